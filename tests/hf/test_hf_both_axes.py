"""Parts of a sequence along an axis of attention and, between layers, along that of the layers: `sp=("sp", "tp")`."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from parallel_layers import list_bytes
from processes import run
from test_hf_sequence import PACKED, PADDED, SIZES, assert_alike, make, make_batch, make_step
from test_hf_stages import replace_norms
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
import fzero.hf
from fzero import FzeroError, VirtualMesh, tree
from fzero.optim import adamw, apply_updates, chain, clip_by_global_norm

BOTH = ("sp", "tp")
RATE, NORM = 1e-2, 0.5
AT = "model.layers.*.self_attn"
ONE_HEAD = {f"{AT}.k_proj": "replicate", f"{AT}.v_proj": "replicate", AT: "divide num_key_value_groups"}


def make_exact(kind: str, **settings: Any) -> Any:
    """A model in float64, norms included, with weights for which attention is not uniform."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
    model = replace_norms(getattr(transformers, f"{kind}ForCausalLM")(config).double().train())
    with torch.no_grad():
        for leaf in model.parameters():
            leaf.add_(0.1 * torch.randn_like(leaf))
    return model


def make_rows(length: int, rows: int) -> dict[str, Tensor]:
    """Two documents in each row, the second of which begins inside of a rank's places."""
    first = length // 2 - 1
    places = torch.cat([torch.arange(first), torch.arange(length - first)]).expand(rows, -1)
    tokens = torch.randint(32, (rows, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": tokens, "position_ids": places.contiguous()}


def find_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss of next tokens in float64: transformers' own is in float32."""
    return torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def train_plainly(model: Any, batches: list[dict[str, Tensor]]) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01), []
    for batch in batches:
        loss = find_loss(model(**batch, use_cache=False), batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([leaf.grad.norm() for leaf in model.parameters()]).norm()
        for leaf in model.parameters():  # clip_grad_norm_ adds 1e-6 to the norm
            leaf.grad.mul_((NORM / norm).clamp(max=1))
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_train_step(apply: Any) -> tuple[Any, Any]:
    optimizer = chain(clip_by_global_norm(NORM), adamw(RATE, b1=0.9, b2=0.999, weight_decay=0.01))

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(lambda p: find_loss(apply(p, **batch, use_cache=False), batch))(params)
        updates, state = optimizer.update(grads, state, params)
        return apply_updates(params, updates), state, loss

    return optimizer, step


TRAINED: dict[str, tuple[str, dict[str, Any], dict[str, int], tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "by heads, which ranks of keys repeat": (
        "Llama", {}, {"fsdp": 1, "sp": 2, "tp": 2}, (8, 8, 8), {}, {},
    ),
    "layers again, stage 3, data ranks": (
        "Qwen3", {}, {"fsdp": 2, "sp": 2, "tp": 2}, (8, 8, 8), {}, {"stage": 3},
    ),
    "by keys": ("Qwen3", {}, {"fsdp": 1, "sp": 4, "tp": 2}, (8, 8), {}, {"stage": 2}),
    "rotated keys of one head, which is whole": (
        "Llama", {"num_key_value_heads": 1}, {"fsdp": 1, "sp": 2, "tp": 2}, (8, 8, 8),
        {"rotate": True, "plan": ONE_HEAD}, {},
    ),
    "open lengths, and a window": (
        "Mistral", {"sliding_window": 3}, {"fsdp": 1, "tp": 2, "sp": 2}, (8, 16, 12), {},
        {"dynamic": {"batch.*": {1: None}}},
    ),
    "leaves in chunks": (
        "Llama", {}, {"fsdp": 1, "sp": 2, "tp": 2}, (8, 8), {}, {"chunk": 256},
    ),
    "state on the host by a budget": (
        "Llama", {}, {"fsdp": 1, "sp": 2, "tp": 2}, (8, 8), {},
        {"memory": "110KiB", "to": fzero.host(pin=False)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TRAINED)
def test_training_is_that_of_one_device(case: str) -> None:
    kind, settings, axes, lengths, how, options = TRAINED[case]
    model, mesh = make_exact(kind, **settings), VirtualMesh(**axes)
    batches = [make_rows(length, 2 * axes["fsdp"]) for length in lengths]
    if "again" in case:
        model.gradient_checkpointing_enable()
    params, apply = fzero.hf.parallel(model, mesh, sp=BOTH, **how)
    optimizer, step = make_train_step(apply)
    state, simulated, losses = optimizer.init(params), fzero.simulate(step, mesh, data=("fsdp",), **options), []
    for batch in batches:
        params, state, loss = simulated(params, state, batch)
        losses.append(loss.mean().item())
    assert losses == pytest.approx(train_plainly(model, batches), rel=1e-13)
    whole = fzero.unpartition(params)
    for path, leaf in zip(tree.paths(whole), tree.leaves(whole)):
        torch.testing.assert_close(leaf, model.get_parameter(path).detach(), rtol=0, atol=1e-12, msg=path)


def train_on_ranks(mesh: DeviceMesh) -> list[float]:
    """Losses of a rank of (fsdp 1, sp 2, tp 2)."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("fsdp", "sp", "tp"))
    params, apply = fzero.hf.parallel(make_exact("Llama"), mesh, sp=BOTH)
    optimizer, step = make_train_step(apply)
    state, sharded, losses = optimizer.init(params), fzero.shard(step, mesh, data=("fsdp",)), []
    for batch in [make_rows(8, 2)] * 3:
        params, state, loss = sharded(params, state, batch)
        losses.append(loss.item())
    return losses


def test_ranks_train_as_one_device() -> None:
    expected = train_plainly(make_exact("Llama"), [make_rows(8, 2)] * 3)
    assert all(losses == pytest.approx(expected, rel=1e-13) for losses in run(4, train_on_ranks))


LABELLED: dict[str, tuple[str, dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "windows, sinks and experts": ("gpt-oss", {"sp": 2, "tp": 2}, {}, {}),
    "padding": ("llama", {"sp": 2, "tp": 2}, {"attention_mask": PADDED}, {}),
    "layers in front of attention": ("llama", {"tp": 2, "sp": 2}, {"position_ids": PACKED}, {"rotate": True}),
    "labels of other batches": ("llama", {"sp": 2, "tp": 2}, {"num_items_in_batch": torch.tensor(21)}, {}),
    "one rank of attention": ("llama", {"sp": 1, "tp": 2}, {"position_ids": PACKED}, {"rotate": True}),
    "one rank of layers": ("llama", {"sp": 2, "tp": 1}, {"position_ids": PACKED}, {}),
}


@pytest.mark.parametrize("case", LABELLED)
def test_the_loss_of_labels_is_that_of_one_device(case: str) -> None:
    name, axes, more, how = LABELLED[case]
    model, batch, mesh = make(name), {**make_batch(), **more}, VirtualMesh(fsdp=1, **axes)
    params, apply = fzero.hf.parallel(model, mesh, sp=BOTH, **how)
    (loss, logits), grads = fzero.simulate(make_step(apply, use_cache=False), mesh, data=("fsdp",))(params, batch)
    assert_alike(model, {**batch, "use_cache": False}, loss, logits, grads)


def test_several_axes_of_each_kind() -> None:
    """Names joined by "+" are those of a tuple."""
    model, batch, mesh = make("llama"), make_batch(), VirtualMesh(fsdp=1, a=2, b=1, c=2, d=1)
    for sp in (("a", "b", "c", "d"), "a+b+c+d"):
        params, apply = fzero.hf.parallel(model, mesh, tp=("c", "d"), sp=sp)
        (loss, logits), grads = fzero.simulate(make_step(apply, use_cache=False), mesh, data=("fsdp",))(params, batch)
        model.zero_grad()
        assert_alike(model, {**batch, "use_cache": False}, loss, logits, grads)


def trace(sp: Any, rotate: bool) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).double()
    mesh, batch = VirtualMesh(fsdp=1, sp=2, tp=2), make_batch(length=256)
    params, apply = fzero.hf.parallel(model, mesh, sp=sp, rotate=rotate)
    step = fzero.grad(lambda params, batch: apply(params, **batch, use_cache=False).loss)
    return fzero.simulate(step, mesh, data=("fsdp",)).trace(params, batch)


@pytest.mark.parametrize("rotate", [False, True])
def test_a_rank_keeps_its_own_places_between_layers(rotate: bool) -> None:
    """Along tp each layer gathers and scatters as with `sp="tp"`, for the places of a rank along sp. Along sp attention
    sends what it sends without parts between layers. Rotated scores are computed again as without these."""
    alone, both = (trace(sp, rotate) for sp in ("sp", BOTH))
    assert both.memory().peak < (1 if rotate else 0.85) * alone.memory().peak
    assert list_bytes(both, "sp") == list_bytes(alone, "sp")
    hidden, logits = 2 * 128 * 16 * 8, 2 * 128 * 32 * 8
    assert list_bytes(both, "tp") == {
        "all_gather": (6 * 2 + 3) * hidden, "psum_scatter": (4 * 2 + 2) * hidden, "all_to_all": logits,
    }  # fmt: skip


def test_ranks_that_have_parts_of_rows_take_the_same() -> None:
    mesh, batch = VirtualMesh(fsdp=1, sp=2, tp=2), make_batch()
    for tp, sp in ((None, "sp"), ("tp", BOTH)):
        params, apply = fzero.hf.parallel(make("llama"), mesh, tp=tp, sp=sp)
        with pytest.raises(
            FzeroError, match="other examples on each rank along 'sp', whose ranks share layers or rows"
        ):
            fzero.simulate(lambda p, b, run=apply: run(p, **b).loss, mesh, data=("fsdp", "sp"))(params, batch)


REFUSED: dict[str, tuple[dict[str, Any], int]] = {
    "has 6 places, for 2 ranks along 'sp' and 2 ranks along 'tp'; pad to a multiple of 4": ({"sp": BOTH}, 6),
    "for 2 chunks on each of 2 ranks along 'sp' and 2 ranks along 'tp'; pad to a multiple of 4": (
        {"sp": BOTH, "rotate": True}, 10,
    ),
    "some of its ranks share layers too: tp=('sp', 'tp')": ({"sp": "sp", "tp": ("sp", "tp")}, 8),
    "some of its ranks share layers too: tp='tp', ep='sp'": ({"sp": BOTH, "ep": "sp"}, 8),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(words: str) -> None:
    how, length = REFUSED[words]
    mesh, batch = VirtualMesh(fsdp=1, sp=2, tp=2), make_batch(length)
    with pytest.raises(FzeroError) as caught:
        params, apply = fzero.hf.parallel(make("llama"), mesh, **how)
        fzero.simulate(lambda params: apply(params, **batch).loss, mesh, data=("fsdp",))(params)
    assert words in str(caught.value)
