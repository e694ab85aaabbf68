"""Whether fzero trains right on one device: tiny models, one rank, each kind of step beside that step on CPU tensors.

`gpu.py` starts it as `gpu_checks.py DEVICE OUT NAMES`. Behind each check OUT is written anew: name -> status, seconds
and what the check found. Where a check ends the process, OUT has the checks before it.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import flags
import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from measure import growth
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention

import fzero
import fzero.checkpoint
from fzero import optim, tree

CONFIG = GPTConfig(vocab=128, seq=16, dim=64, layers=2, heads=2)
STEPS = 5
FP32, BF16 = 1e-4, 3e-2
"""Greatest relative difference of two losses, which steps of AdamW let grow."""

Found = dict[str, Any]


class LeftOutError(Exception):
    """A check that this device cannot make."""


class Training(NamedTuple):
    """A kind of step. Called with trees of CPU tensors it is the step that the sharded one must equal."""

    dtype: torch.dtype = torch.float32
    drop: float = 0.0
    saved: Literal["kept", "computed again", "on the host"] = "kept"
    is_clipped: bool = False
    optimizer: optim.GradientTransformation | None = None  # AdamW where there is none
    params_to: Any = None  # placements
    state_to: Any = None

    def begin(self) -> tuple[Any, Any, Callable[..., Any]]:
        """(params, optimizer, train_step), the same at each call."""
        torch.manual_seed(0)
        params, apply = fzero.lower(GPT(CONFIG))
        optimizer = self.optimizer or optim.adamw(1e-3)
        if self.is_clipped:
            rate = optim.warmup_cosine_decay_schedule(0.0, 1e-3, 2, 10)
            optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(rate))

        def logits_of(params: Any, tokens: Tensor) -> Tensor:
            used = tree.map(lambda leaf: leaf.to(self.dtype), params)
            return dropout(apply(used, tokens), self.drop).float()

        forward = logits_of
        if self.saved != "kept":
            forward = fzero.remat(logits_of, policy="offload" if self.saved == "on the host" else None)

        def loss_fn(params: Any, tokens: Tensor) -> Tensor:
            return cross_entropy(forward(params, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

        def train_step(params: Any, state: Any, tokens: Tensor) -> Any:
            loss, grads = fzero.value_and_grad(loss_fn)(params, tokens)
            updates, state = optimizer.update(grads, state, params)
            return optim.apply_updates(params, updates), state, loss

        return params, optimizer, train_step


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(CONFIG.vocab, (4, CONFIG.seq + 1), generator=generator) for _ in range(STEPS))


def train_plain(how: Training) -> list[float]:
    """Losses on CPU tensors."""
    params, optimizer, train_step = how.begin()
    state, losses = optimizer.init(params), []
    for tokens in batches():
        params, state, loss = train_step(params, state, tokens)
        losses.append(loss.item())
    return losses


def place(mesh: DeviceMesh, how: Training, **options: Any) -> tuple[Any, Any, Any]:
    """(params, optimizer state, step) on the mesh."""
    params, optimizer, train_step = how.begin()
    params = fzero.partition(params, mesh, to=how.params_to)
    return params, optimizer.init(params, to=how.state_to), fzero.shard(train_step, mesh, **options)


def train(mesh: DeviceMesh, how: Training, **options: Any) -> list[float]:
    """Losses on the mesh."""
    params, state, step = place(mesh, how, **options)
    torch.manual_seed(2)
    losses = []
    for tokens in batches():
        params, state, loss = step(params, state, tokens.to(mesh.device_type))
        losses.append(loss)
    return torch.stack(losses).tolist()


def require(got: list[float], expected: list[float], tolerance: float) -> Found:
    """The greatest relative difference of the losses. Raises where it is above the tolerance, or no number."""
    apart = max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))
    if not apart <= tolerance:
        raise AssertionError(f"losses {got} are {apart:.1e} from {expected}, and {tolerance:.0e} is allowed")
    return {"apart": apart, "losses": got}


def equals_cpu(how: Training, tolerance: float, mesh: DeviceMesh, **options: Any) -> Found:
    return require(train(mesh, how, **options), train_plain(how), tolerance)


def optimize(mesh: DeviceMesh) -> Found:
    """Each optimizer, and how far its losses are apart. Muon orthogonalizes in bfloat16."""
    found = dict[str, float]()
    for name in (
        "adam",
        "adamw8bit",
        "adafactor",
        "adagrad",
        "amsgrad",
        "lamb",
        "lion",
        "muon",
        "nadam",
        "rmsprop",
        "sgd",
    ):
        how = Training(optimizer=getattr(optim, name)(1e-3))
        found[name] = equals_cpu(how, BF16 if name == "muon" else FP32, mesh)["apart"]
    return found


def drops(mesh: DeviceMesh) -> Found:
    """The same numbers are drawn from the same seed, and dropout does something."""
    how = Training(drop=0.1)
    losses = train(mesh, how)
    if losses == train(mesh, Training()):
        raise AssertionError("dropout changes nothing")
    return require(train(mesh, how), losses, 0.0)


def repeats(mesh: DeviceMesh) -> Found:
    """What `remat` computes again is what it was, random draws too."""
    return require(train(mesh, Training(drop=0.1, saved="computed again")), train(mesh, Training(drop=0.1)), FP32)


def lies_on_disk(mesh: DeviceMesh) -> Found:
    """A step with all state in files."""
    with TemporaryDirectory() as folder:
        disk = fzero.disk(folder)
        return equals_cpu(Training(is_clipped=True, params_to=disk, state_to=disk), FP32, mesh)


def fits(mesh: DeviceMesh, **options: Any) -> Found:
    """A step with two thirds of the memory of stage 3 has its loss. Beside the budget what the allocator of the device
    handed out: it rounds up."""
    tokens = torch.randint(CONFIG.vocab, (512, CONFIG.seq + 1), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(mesh.device_type)  # so many that activations are most of the memory
    params, state, step = place(mesh, Training(), stage=3, donate=False)
    expected = step(params, state, tokens)[2]
    budget = step.trace(params, state, tokens).memory().peak * 2 // 3
    params, state, step = place(mesh, Training(), memory=budget, donate=False, **options)
    found = require([step(params, state, tokens)[2].item()], [expected.item()], FP32)
    given = sum(x.local.nbytes for x in tree.leaves((params, state))) + tokens.nbytes
    grown = growth(lambda: step(params, state, tokens), tokens.device)
    return found | {"budget": budget, "arguments": given, "grown": grown}


def dequantizes(mesh: DeviceMesh) -> Found:
    """Codes stand for the same numbers on the device, and a step computes with these."""
    torch.manual_seed(0)
    params, apply = fzero.lower(GPT(CONFIG))
    tokens, found = next(batches()), dict[str, Any]()

    def loss(params: Any, tokens: Tensor) -> Tensor:
        return cross_entropy(apply(params, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def read(params: Any) -> list[Tensor]:
        leaves, _ = tree.flatten(params, is_leaf=lambda x: hasattr(x, "full_tensor"))
        return [leaf.full_tensor() for leaf in leaves if hasattr(leaf, "coding")]

    for how in ({"bits": 8}, {"bits": 4, "block": 64}, {"bits": 4, "block": 64, "levels": "nf4"}):
        held = fzero.quantize(params, where=lambda path, leaf: leaf.ndim == 2, **how)
        there = fzero.partition(held, mesh)
        assert all(torch.equal(a, b.cpu()) for a, b in zip(read(held), read(there), strict=True))
        got = fzero.shard(loss, mesh)(there, tokens.to(mesh.device_type))
        found[str(how)] = require([got.item()], [loss(held, tokens).item()], FP32)["apart"]
    return found


def changes_length(mesh: DeviceMesh, **options: Any) -> Found:
    """Steps of batches of other rows and lengths: from the second on a program with open sizes is filled."""
    how, draws = Training(), torch.Generator().manual_seed(1)
    sizes = [(4, 17), (6, 13), (4, 11), (8, 15), (5, 9), (12, 17)]
    given = [torch.randint(CONFIG.vocab, size, generator=draws) for size in sizes]
    params, optimizer, train_step = how.begin()
    state, expected = optimizer.init(params), []
    for tokens in given:
        params, state, loss = train_step(params, state, tokens)
        expected.append(loss.item())
    params, state, step = place(mesh, how, **options)
    losses = []
    for tokens in given:
        params, state, loss = step(params, state, tokens.to(mesh.device_type))
        losses.append(loss.item())
    return require(losses, expected, FP32)


def splits(mesh: DeviceMesh) -> Found:
    """Steps of a perceptron whose leaves are split over a model axis, by collectives of its own."""
    draws = torch.Generator().manual_seed(0)
    whole = {"up": torch.randn(64, 16, generator=draws) / 4, "down": torch.randn(16, 64, generator=draws) / 8}
    x, optimizer = torch.randn(8, 16, generator=draws), optim.adamw(1e-2)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        hidden = fzero.all_gather(x, "tp") @ params["up"].T
        return fzero.psum_scatter(hidden.relu() @ params["down"].T, "tp").square().mean()

    def train_step(params: Any, state: Any, x: Tensor) -> Any:
        part = fzero.all_to_all(x, "tp", 0, 0)
        loss, grads = fzero.value_and_grad(lambda params: fzero.pmean(loss_fn(params, part), "tp"))(params)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    def losses_of(params: Any, step: Callable[..., Any], x: Tensor) -> list[float]:
        state, losses = optimizer.init(params), []
        for _ in range(STEPS):
            params, state, loss = step(params, state, x)
            losses.append(loss.item())
        return losses

    grid = init_device_mesh(mesh.device_type, (1, 1), mesh_dim_names=("fsdp", "tp"))
    held = fzero.partition(whole, grid, split={"up": ("tp", 0), "down": ("tp", 1)})
    got = losses_of(held, fzero.shard(train_step, grid, data=("fsdp",)), x.to(mesh.device_type))
    return require(got, losses_of(whole, train_step, x), FP32)


def restarts(mesh: DeviceMesh) -> Found:
    """Two steps with one folder: the second takes its programs from there, that of all lengths too."""
    with TemporaryDirectory() as folder:
        changes_length(mesh, cache=folder)
        written = {file.name: file.stat().st_mtime_ns for file in Path(folder).iterdir()}
        found = changes_length(mesh, cache=folder)
        if not written or written != {file.name: file.stat().st_mtime_ns for file in Path(folder).iterdir()}:
            raise AssertionError(f"the folder had {len(written)} files, and the second step wrote some")
    return found


def attends(mesh: DeviceMesh) -> Found:
    """FlexAttention with a causal mask: the loss and the norm of its gradient are those of torch's attention."""
    if mesh.device_type == "cpu":
        raise LeftOutError("torch has no gradient of FlexAttention on a CPU")
    size, heads = 256, 4
    x = torch.randn(2, size, 64, generator=torch.Generator().manual_seed(0))
    params = {"w": torch.randn(64, 3 * 64, generator=torch.Generator().manual_seed(1)) / 8}
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, size, size, device=mesh.device_type)

    def differentiate(attend: Callable[..., Tensor], params: Any, x: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            split = (x @ params["w"]).view(2, size, 3, heads, 16).permute(2, 0, 3, 1, 4)
            return attend(*split.unbind(0)).square().mean()

        value, grads = fzero.value_and_grad(loss)(params)
        return value, grads["w"].square().sum().sqrt()

    step = fzero.shard(partial(differentiate, partial(flex_attention, block_mask=causal)), mesh)
    got = step(fzero.partition(params, mesh), x.to(mesh.device_type))
    expected = differentiate(partial(scaled_dot_product_attention, is_causal=True), params, x)
    return require([value.item() for value in got], [value.item() for value in expected], 1e-3)  # TF32 may be on


def trains_as_transformers(mesh: DeviceMesh, *, has_adapters: bool = False, **arguments: Any) -> Found:
    """Trainers of transformers and of fzero log the same losses on the device, and the models say the same tokens."""
    import peft
    import transformers

    import fzero.hf

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    draws = torch.Generator().manual_seed(0)
    rows = [{"input_ids": x, "labels": x} for x in torch.randint(1, 128, (32, 24), generator=draws)]
    prompt = rows[0]["input_ids"][None, :8].to(mesh.device_type)

    def train(cls: Any, folder: str, **named: Any) -> tuple[list[float], list[int]]:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, num_hidden_layers=5, **sizes))
        if has_adapters:
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM"))
        given = {
            "max_steps": STEPS,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "learning_rate": 1e-2,
        }
        is_cpu = mesh.device_type == "cpu"
        given |= {"per_device_train_batch_size": 4, "disable_tqdm": True, "use_cpu": is_cpu, "optim": "adamw_torch"}
        trainer = cls(model, transformers.TrainingArguments(folder, **given, **arguments), train_dataset=rows, **named)
        trainer.train()
        generate = trainer.generate if named else trainer.model.generate
        tokens = generate(input_ids=prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        return [log["loss"] for log in trainer.state.log_history if "loss" in log], tokens.tolist()

    with TemporaryDirectory() as folder:
        theirs, said = train(transformers.Trainer, folder)
        ours, ours_said = train(fzero.hf.Trainer, folder, mesh=mesh)
    if "bf16" not in arguments and ours_said != said:
        raise AssertionError(f"it says {ours_said}, and transformers {said}")
    return require(ours, theirs, BF16 if "bf16" in arguments else FP32)


def calibrates(mesh: DeviceMesh) -> Found:
    params, state, step = place(mesh, Training())
    tokens = next(batches()).to(mesh.device_type)
    rates = step.calibrate(params, state, tokens)
    _, _, loss = step(params, state, tokens)
    return require([loss.item()], train_plain(Training())[:1], FP32) | {"rates": str(rates)}


def saves(mesh: DeviceMesh) -> Found:
    params, _, _ = place(mesh, Training())
    with TemporaryDirectory() as folder:
        path = str(Path(folder) / "params.safetensors")
        fzero.save_safetensors(params, path)
        loaded = fzero.load_safetensors(path, Training().begin()[0], mesh)
    pairs = list(zip(tree.leaves(params), tree.leaves(loaded), strict=True))
    assert all(torch.equal(a.local, b.local) and a.device == b.device for a, b in pairs)
    return {"leaves": len(pairs)}


def saves_meanwhile(mesh: DeviceMesh, **options: Any) -> Found:
    """A checkpoint has the values of the moment of the call, although steps write over them at once."""
    if mesh.device_type == "cpu" and options.get("compile") == "graph":
        raise LeftOutError("CUDA graphs need a GPU")
    params, state, step = place(mesh, Training(), **options)
    tokens = [x.to(mesh.device_type) for x in batches()]
    for x in tokens:
        params, state, _ = step(params, state, x)
    expected = [leaf.local.clone() for leaf in tree.leaves((params, state))]
    with TemporaryDirectory() as folder:
        saving = fzero.checkpoint.save(folder, (params, state), step=1, wait=False)
        for x in tokens:
            params, state, _ = step(params, state, x)
        saving.wait()
        loaded = fzero.checkpoint.load(folder, (params, state))
    pairs = list(zip(expected, tree.leaves(loaded), strict=True))
    assert all(torch.equal(a, b.local) and a.device == b.local.device for a, b in pairs)
    assert not pairs[0][0].equal(tree.leaves(params)[0].local)
    return {"leaves": len(pairs), "seconds": dict(saving.seconds)}


def captures(mesh: DeviceMesh) -> Found:
    if mesh.device_type == "cpu":
        raise LeftOutError("CUDA graphs need a GPU")
    return equals_cpu(Training(), FP32, mesh, compile="graph")


def runs_ahead(mesh: DeviceMesh) -> Found:
    """One step in which the host does not wait for the GPU."""
    if mesh.device_type == "cpu":
        raise LeftOutError("a CPU has nothing to wait for")
    params, state, step = place(mesh, Training(is_clipped=True))
    tokens = next(batches()).to(mesh.device_type)
    for _ in range(2):
        params, state, loss = step(params, state, tokens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        params, state, loss = step(params, state, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"loss": loss.item()}


def fails(mesh: DeviceMesh) -> Found:
    raise AssertionError("this check is broken")


def dies(mesh: DeviceMesh) -> Found:
    os._exit(3)


CHECKS: dict[str, Callable[[DeviceMesh], Found]] = {
    "fp32": partial(equals_cpu, Training(), FP32),
    "bf16": partial(equals_cpu, Training(dtype=torch.bfloat16), BF16),
    "dropout": drops,
    "remat": repeats,
    "clipping and schedule": partial(equals_cpu, Training(is_clipped=True), FP32),
    "optimizers": optimize,
    "optimizer on the host": partial(equals_cpu, Training(is_clipped=True, state_to=fzero.host()), FP32),
    "all on the host": partial(equals_cpu, Training(params_to=fzero.host(), state_to=fzero.host()), FP32),
    "all on a disk": lies_on_disk,
    "saved values on the host": partial(equals_cpu, Training(saved="on the host"), FP32),
    "budget": fits,
    "budget and host": partial(fits, to=fzero.host()),
    "streamed": partial(equals_cpu, Training(), FP32, chunk="64KiB"),
    "quantized": dequantizes,
    "lengths": changes_length,
    "lengths in a budget": partial(changes_length, memory="1GiB"),
    "compiled lengths": partial(changes_length, compile=True),
    "programs in a folder": restarts,
    "a model axis": splits,
    "FlexAttention": attends,
    "Trainer": trains_as_transformers,
    "Trainer in bf16": partial(trains_as_transformers, bf16=True, gradient_checkpointing=True),
    "Trainer of adapters": partial(trains_as_transformers, has_adapters=True),
    "calibrate": calibrates,
    "save and load": saves,
    "checkpoint meanwhile": saves_meanwhile,
    "checkpoint beside a graph": partial(saves_meanwhile, compile="graph"),
    "no synchronization": runs_ahead,
    "compiled": partial(equals_cpu, Training(), FP32, compile=True),
    "graph": captures,
}
BROKEN: dict[str, Callable[[DeviceMesh], Found]] = {"fails": fails, "dies": dies}
"""Checks for dry runs: one raises, one ends the process."""


def perform(check: Callable[[DeviceMesh], Found], mesh: DeviceMesh) -> Found:
    """What became of a check, ready for JSON."""
    begin = time.monotonic()
    try:
        found: Found = {"status": "ok", "result": check(mesh)}
    except LeftOutError as reason:
        found = {"status": "left out", "result": str(reason)}
    except Exception as error:
        found = {"status": f"{type(error).__name__}: {error}", "log": traceback.format_exc()}
    gc.collect()  # the frames of an error hold steps, and NCCL waits for the end of CUDA graphs
    return found | {"seconds": round(time.monotonic() - begin, 1)}


@contextmanager
def alone(device: str) -> Iterator[DeviceMesh]:
    """A mesh of this one process."""
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(device, (1,), mesh_dim_names=("fsdp",))
    dist.destroy_process_group()


def main(device: str, out: Path, names: list[str]) -> None:
    """Make the checks in this order."""
    found: dict[str, Found] = {}
    with alone(device) as mesh:
        for name in names:
            found[name] = perform((CHECKS | BROKEN)[name], mesh)
            flags.write(out, found)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(","))
