"""Families of Hugging Face models trained by fzero and by plain torch, and the differences between their losses.

    python benchmarks/hugging_face.py                        # two virtual ranks, in one process
    python -m torch.distributed.run --nproc-per-node 2 benchmarks/hugging_face.py --gloo

Each family trains as it is: padded batches of a tokenizer, `output.loss`, gradient checkpointing off and on. Every few
steps the model is evaluated and generates greedily. Plain torch trains on the whole batch. In fp32 losses may differ by
1e-5. In bf16 they may differ by twice what plain torch's own losses do where the batch is split into 1, 2 and 4 parts.
At the end the model is saved, and loaded by `from_pretrained` and by fzero: logits must be equal.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from families import FAMILIES, Family
from machine import machine

import fzero

RANKS, ROWS, EVERY, NEW_TOKENS, RATE = 2, 8, 5, 4, 1e-3
ALLOWED = 1e-5
SPLITS = (1, 2, 4)
Trained = dict[str, list[Any]]
"""The losses of all steps; and of every fifth the loss of an evaluation and the tokens that are generated."""


class Ranks(NamedTuple):
    """Virtual ranks, or the ranks that torchrun started."""

    mesh: Any
    shard: Callable[..., Any]
    rank: int | None  # None: all of them

    def own(self, batch: Any) -> Any:
        """The rows of this rank."""
        return batch if self.rank is None else fzero.tree.map(lambda x: x.chunk(RANKS)[self.rank or 0], batch)

    @classmethod
    def make(cls, is_gloo: bool) -> Ranks:
        if not is_gloo:
            return cls(fzero.VirtualMesh(fsdp=RANKS), fzero.simulate, None)
        mesh = torch.distributed.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
        return cls(mesh, fzero.shard, dist.get_rank())


def generate(family: Family, model: Any) -> Any:
    """The tokens that a model in evaluation mode generates greedily."""
    prompt = cast(family.prompt(ROWS), model.dtype)
    if not prompt:
        return []
    config = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=2,
        bos_token_id=1, decoder_start_token_id=model.config.to_dict().get("decoder_start_token_id"),
    )  # fmt: skip
    return model.generate(**prompt, generation_config=config).tolist()


def train_plain(family: Family, steps: int, dtype: torch.dtype, parts: int = 1) -> Trained:
    """Training by plain torch, each batch in so many parts."""
    model = family.make().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=1e-4)
    found: Trained = {"losses": [], "evaluated": [], "generated": []}
    for index in range(steps):
        losses = []
        for part in zip(*(x.chunk(parts) for x in cast(family.batch(ROWS, index), dtype).values())):
            loss = model(**dict(zip(family.batch(ROWS), part))).loss
            (loss / parts).backward()
            losses.append(loss.detach().float())
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(torch.stack(losses).mean().item())
        if index % EVERY == EVERY - 1:
            with torch.no_grad():
                found["evaluated"].append(model.eval()(**cast(family.batch(ROWS, steps), dtype)).loss.item())
            found["generated"].append(generate(family, model))
            model.train()
    return found


def train_sharded(family: Family, steps: int, dtype: torch.dtype, stage: int, is_checkpointed: bool, on: Ranks) -> Any:
    """Training by fzero, and the parameters behind it."""
    model = family.make().to(dtype)
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    params, apply = fzero.lower(model)
    evaluate = fzero.lower(model.eval())[1]
    optimizer = fzero.optim.adamw(RATE, weight_decay=1e-4)

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            output = apply(params, **batch)
            return output.loss, output

        (loss, output), grads = fzero.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return fzero.optim.apply_updates(params, updates), state, fzero.pmean(loss, "fsdp"), output

    def eval_step(params: Any, batch: Any) -> Any:
        return fzero.pmean(evaluate(params, **batch).loss, "fsdp")

    train, test = on.shard(train_step, on.mesh, stage=stage), on.shard(eval_step, on.mesh, stage=stage)
    params = fzero.partition(params, on.mesh)
    state = optimizer.init(params)
    found: Trained = {"losses": [], "evaluated": [], "generated": []}
    for index in range(steps):
        batch = cast(family.batch(ROWS, index), dtype)
        params, state, loss, output = train(params, state, on.own(batch))
        assert "loss" in output
        found["losses"].append(loss.float().mean().item())
        if index % EVERY == EVERY - 1:
            found["evaluated"].append(test(params, on.own(cast(family.batch(ROWS, steps), dtype))).mean().item())
            plain = family.make().to(dtype).eval()
            plain.load_state_dict(by_path(fzero.unpartition(params)), strict=False)  # tied weights have one name
            found["generated"].append(generate(family, plain))
    return found, params


def check_files(family: Family, params: Any, on: Ranks) -> float:
    """The largest difference of logits between the parameters, and what `from_pretrained` and fzero load of them."""
    plain, batch = family.make().eval(), family.batch(ROWS)
    plain.load_state_dict(by_path(fzero.unpartition(params)), strict=False)
    with torch.no_grad():
        expected = plain(**batch).logits
    folder = [tempfile.mkdtemp() if not on.rank else ""]
    if on.rank is not None:
        dist.broadcast_object_list(folder)
    saved, own = Path(folder[0]), Path(folder[0]) / "own"
    if not on.rank:
        plain.config.save_pretrained(saved)
        plain.save_pretrained(own)
    fzero.save_safetensors(params, saved / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        logits = [type(plain).from_pretrained(saved)(**batch).logits]
    for constructor, file in ((lambda: type(plain).from_pretrained(own), None), (lambda: family.make(1).eval(), saved)):
        built, apply = fzero.build(constructor, on.mesh)
        built = built if file is None else fzero.load_safetensors(file, built, on.mesh)
        step = on.shard(lambda p, batch: apply(p, **batch).logits, on.mesh)  # noqa: B023
        logits.append(step(built, on.own(batch)))
    expected = [expected, on.own(expected), on.own(expected)]
    return max((mine - other).abs().max().item() for mine, other in zip(logits, expected))


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """A batch with its floating-point tensors in a dtype."""
    return fzero.tree.map(lambda x: x.to(dtype) if x.is_floating_point() else x, batch)


def by_path(params: Any) -> dict[str, Any]:
    """`{dotted path: tensor}` of a tree."""
    return dict(zip(fzero.tree.paths(params), fzero.tree.leaves(params)))


def difference(a: Trained, b: Trained) -> float:
    """The largest difference of losses, in training and evaluation."""
    pairs = [*zip(a["losses"], b["losses"]), *zip(a["evaluated"], b["evaluated"])]
    return max(abs(x - y) for x, y in pairs)


def compare(family: Family, steps: int, stages: list[int], on: Ranks) -> dict[str, Any]:
    """The differences of a family's runs, and whether they are allowed."""
    plain = train_plain(family, steps, torch.float32)
    halves = [train_plain(family, steps, torch.bfloat16, parts) for parts in SPLITS]
    varies = max(difference(a, b) for a in halves for b in halves)
    found: dict[str, Any] = {"varies": varies, "fp32": 0.0, "bf16": 0.0, "generated": True}
    for stage in stages:
        for is_checkpointed in (False, True):
            mine, params = train_sharded(family, steps, torch.float32, stage, is_checkpointed, on)
            found["fp32"] = max(found["fp32"], difference(mine, plain))
            found["generated"] &= mine["generated"] == plain["generated"]
            half = train_sharded(family, steps, torch.bfloat16, stage, is_checkpointed, on)[0]
            found["bf16"] = max(found["bf16"], difference(half, halves[0]))
    found["files"] = check_files(family, params, on)
    is_equal = found["fp32"] <= ALLOWED and found["bf16"] <= 2 * varies
    return found | {"is_equal": is_equal and found["generated"] and found["files"] == 0}


def main() -> None:
    """Prints a line for each family. Exits with 1 where one is not equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("families", nargs="*", help=f"some of {', '.join(FAMILIES)}; all of them by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--gloo", action="store_true", help="the two ranks that torchrun started")
    parser.add_argument("--json", type=Path, help="a file for every figure, the versions and the machine")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("fzero").setLevel(logging.ERROR)
    on, runs = Ranks.make(flags.gloo), dict[str, Any]()
    write = print if not on.rank else (lambda *_, **__: None)
    write(f"{'':<10}{'fp32':>10}{'bf16':>10}{'twice':>10}{'generated':>11}{'files':>9}")
    for name in flags.families or FAMILIES:
        try:
            runs[name] = found = compare(FAMILIES[name], flags.steps, flags.stages, on)
        except fzero.FzeroError as error:
            runs[name] = {"is_equal": False, "refused": str(error)}
            write(f"{name:<10} refused: {error}", flush=True)
            continue
        figures = f"{found['fp32']:>10.1e}{found['bf16']:>10.1e}{2 * found['varies']:>10.1e}"
        generated, files = "equal" if found["generated"] else "differs", f"{found['files']:.0e}"
        write(f"{name:<10}{figures}{generated:>11}{files:>9}{'' if found['is_equal'] else '   NOT EQUAL'}", flush=True)
    if flags.json and not on.rank:
        flags.json.write_text(json.dumps(machine() | {"transformers": transformers.__version__, "runs": runs}) + "\n")
    if flags.gloo:
        dist.barrier()
        dist.destroy_process_group()
    raise SystemExit(0 if all(found["is_equal"] for found in runs.values()) else 1)


if __name__ == "__main__":
    main()
