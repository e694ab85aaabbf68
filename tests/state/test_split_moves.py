"""Leaves that are split over a model axis, as whole leaves on their way in and out: initial values, modules under
construction, files and folders of other libraries, edits, and other places than the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from axes import ADAMW, EXAMPLES, F64, SPLIT, WEIGHTS, loss_of, split_mlp, train
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fzero
from fzero import FzeroError, VirtualMesh, checkpoint, initializers, optim, tree
from fzero.layout.parts import cut_into_parts, cut_out, join_parts

DRAW = torch.Generator().manual_seed(4)
WHOLE: dict[str, Tensor] = {
    **WEIGHTS,
    "gate_up": torch.randn(16, 3, dtype=F64, generator=DRAW),
    "rows": torch.randn(3, 8, 5, generator=DRAW),
    "columns": torch.randn(3, 2, 12, generator=DRAW).bfloat16(),
}
RULES: dict[str, Any] = {**SPLIT, "gate_up": ("tp", 0, 2), "rows": ("tp", 1, 2), "columns": ("tp", 2, 3)}
GRID = VirtualMesh(fsdp=2, tp=2)
MESHES = [GRID, VirtualMesh(tp=2, replica=2, fsdp=3), GRID.lay_state(("fsdp", "tp"))]


def hold(mesh: VirtualMesh = GRID, **how: Any) -> dict[str, Any]:
    return fzero.partition(WHOLE, mesh, split=RULES, **how)


def check_same(got: Any, right: Any) -> None:
    torch.testing.assert_close(got, right, rtol=0, atol=0)


def test_some_elements_of_a_whole_leaf_are_those_of_its_parts() -> None:
    for leaf in hold().values():
        if (layout := leaf.form.layout).splits == 1:
            continue
        whole = WHOLE[leaf.path].reshape(-1)
        for start in range(0, whole.numel(), 7):
            for stop in range(start, whole.numel() + 1, 5):
                some = range(start, stop)
                parts = cut_into_parts(whole[start:stop], torch.empty_like(whole[start:stop]), layout, leaf.index, some)
                check_same(join_parts(parts, layout, leaf.index, some), whole[start:stop])
                found = [cut_out(whole[start:stop], some, layout, leaf.index, position) for position in range(2)]
                check_same(torch.cat([values for _, values in found]), parts)
                for row, (held, values) in zip(leaf.local.view(2, -1), found):
                    check_same(row[held.start : held.stop], values)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("on_disk", [False, True])
def test_files_of_split_leaves_have_whole_tensors(mesh: VirtualMesh, on_disk: bool, tmp_path: Path) -> None:
    held = hold(mesh, to=fzero.disk(tmp_path) if on_disk else fzero.host())
    fzero.save_safetensors(held, tmp_path / "split")
    fzero.save_safetensors(WHOLE, tmp_path / "whole")
    assert (tmp_path / "split").read_bytes() == (tmp_path / "whole").read_bytes()
    checkpoint.save_dcp(tmp_path / "dcp", held)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "dcp.pt")
    check_same(torch.load(tmp_path / "dcp.pt"), WHOLE)
    for chunk in (24, 40):
        out = tree.map(lambda x: torch.zeros_like(x).view(-1), WHOLE)
        for path, (piece, values) in fzero.iter_full(held, chunk=chunk):
            out[path][piece.start : piece.stop] = values
        check_same(tree.map(lambda x, like: x.view(like.shape), out, WHOLE), WHOLE)


def test_split_leaves_without_elements(tmp_path: Path) -> None:
    whole = {"rows": torch.zeros(0, 4), "columns": torch.zeros(4, 0), "some": torch.ones(4, 4)}
    held = fzero.partition(whole, GRID, split={"*": ("tp", 0)})
    checkpoint.save(tmp_path, held, step=1)
    check_same(fzero.unpartition(checkpoint.load(tmp_path, held)), whole)
    held = fzero.partition(whole, GRID, split={"*": ("tp", 0)})
    for each in (optim.adafactor(0.1), optim.muon(0.1, where=lambda path, leaf: True), optim.adamw8bit(0.1)):
        got, right = (each.update(x, each.init(x), x)[0] for x in (held, whole))
        torch.testing.assert_close(fzero.unpartition(got), right)
    checkpoint.save_dcp(tmp_path / "dcp", held)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "dcp.pt")
    check_same(torch.load(tmp_path / "dcp.pt"), whole)
    fzero.save_safetensors(held, tmp_path / "split")
    assert {path: x.shape for path, x in fzero.open_safetensors(tmp_path / "split").items()} == {
        path: x.shape for path, x in whole.items()
    }
    assert [path for path, _ in fzero.iter_full(held, chunk=64)] == ["some"]


def test_a_folder_of_transformers_has_whole_tensors(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
    params, _ = fzero.lower(model)
    rules: dict[str, Any] = {"*.q_proj.weight": ("tp", 0), "*.o_proj.weight": ("tp", 1), "*.gate_up_proj": ("tp", 1, 2)}
    rules |= {"*.experts.down_proj": ("tp", -1), "lm_head.weight": ("tp", 0)}
    checkpoint.export_hf(tmp_path / "split", fzero.partition(params, GRID, split=rules), model)
    model.save_pretrained(tmp_path / "whole")
    files = ["model.safetensors", "config.json"]
    assert all((tmp_path / "split" / f).read_bytes() == (tmp_path / "whole" / f).read_bytes() for f in files)
    zeros = tree.map(torch.zeros_like, params)
    loaded = checkpoint.load_hf(tmp_path / "split", zeros, GRID, split=rules)
    check_same(tree.map(torch.Tensor.detach, fzero.unpartition(loaded)), tree.map(torch.Tensor.detach, params))


def test_initial_values_are_those_of_one_device() -> None:
    shapes = {"rows": torch.empty(64, 512, device="meta"), "columns": torch.empty(3000, 512, device="meta")}
    rules: dict[str, Any] = {"rows": ("tp", 0), "columns": ("tp", 1, 2)}
    # the columns of a rank are drawn through those of others, and lie in two of the chunks that are drawn
    found = [
        fzero.unpartition(fzero.init(shapes, mesh, lambda path, leaf: initializers.normal(0.02), split=split))
        for mesh, split in ((GRID, rules), (VirtualMesh(fsdp=1), None))
    ]
    check_same(*found)


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 128), nn.Linear(128, 16)
        self.turned = nn.Parameter(torch.randn(64, 32).T)


def test_a_module_is_built_in_parts() -> None:
    rules: dict[str, Any] = {"up.*": ("tp", 0), "down.weight": ("tp", 1), "turned": ("tp", 0)}
    params, _ = fzero.build(Feedforward, GRID, seed=1, split=rules, chunk=1000)
    torch.manual_seed(1)
    check_same(fzero.unpartition(params), fzero.lower(Feedforward())[0])
    assert params["down"]["weight"].shape == (16, 64) and params["up"]["bias"].shape == (64,)


def test_an_edit_gets_and_returns_a_whole_leaf(tmp_path: Path) -> None:
    for place in (None, fzero.disk(tmp_path)):
        held = fzero.update_leaf(hold(to=place), "up", lambda w: torch.cat([w, w[:4]]))
        assert held["up"].shape == (8, 4) and held["up"].place == place
        check_same(fzero.unpartition(held), {**WHOLE, "up": torch.cat([WHOLE["up"], WHOLE["up"][:4]])})
        words = "up: has 19 elements along dim 0, to be split into 2 ranks along 'tp'"
        with pytest.raises(FzeroError, match=words):
            fzero.update_leaf(held, "up", lambda w: torch.cat([w, w[:3]]))


def test_a_step_with_state_elsewhere_is_that_of_one_device(tmp_path: Path) -> None:
    for place in (fzero.host(), fzero.disk(tmp_path)):
        held = fzero.partition(WEIGHTS, GRID, split=SPLIT, to=place)
        got: Any = held, ADAMW.init(held, to=place)
        got = fzero.simulate(train(split_mlp), GRID, data=("fsdp",))(*got, EXAMPLES)
        right = train(split_mlp)(WEIGHTS, ADAMW.init(WEIGHTS), EXAMPLES)
        torch.testing.assert_close(fzero.unpartition(got), right, rtol=1e-12, atol=1e-14)
        assert got[0]["up"].place == place


def decode(params: Any, tokens: Tensor) -> Tensor:
    """Each weight is split; columns of an embedding, then a column and a row of Megatron's, then rows of a head."""
    hidden = fzero.all_gather(F.embedding(tokens, params["embed"]), "tp", -1)
    hidden = hidden + fzero.psum((hidden @ params["up"].T).relu() @ params["down"].T, "tp")
    return fzero.all_gather(hidden @ params["head"].T, "tp", -1)


def test_a_split_leaf_is_streamed_in_chunks() -> None:
    shapes = {"embed": (40, 16), "up": (64, 16), "down": (16, 64), "head": (48, 16)}
    whole = {name: torch.randn(shape, dtype=F64, generator=DRAW) / 4 for name, shape in shapes.items()}
    rules = {name: ("tp", int(name in ("embed", "down"))) for name in shapes}
    tokens = torch.randint(40, (12, 6), generator=DRAW)

    def step(params: Any, state: Any, tokens: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            return F.cross_entropy(decode(params, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

        value, grads = fzero.value_and_grad(loss)(params)
        updates, state = ADAMW.update(grads, state, params)
        return tree.map(torch.add, params, updates), state, value

    held = fzero.partition(whole, GRID, split=rules, granularity=lambda path, shape: shape[-1])
    run = fzero.simulate(step, GRID, data=("fsdp",), chunk=1024)
    moved = {entry.bucket for entry in run.trace(held, ADAMW.init(held), tokens).comm() if entry.bucket}
    assert moved == {"embed:tp in 4", "up:tp in 4", "down:tp in 4", "head:tp in 3"}
    got, right = run(held, ADAMW.init(held), tokens), step(whole, ADAMW.init(whole), tokens)
    torch.testing.assert_close(fzero.unpartition(got), right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
def test_narrow_and_frozen_leaves(reduce_dtype: torch.dtype | None) -> None:
    whole: dict[str, Any] = {**WEIGHTS, "up": nn.Parameter(WEIGHTS["up"], requires_grad=False)}

    def step(params: Any, x: Tensor) -> Any:
        compute = fzero.precision(torch.bfloat16, output=F64)(split_mlp)
        return fzero.value_and_grad(lambda params: compute(params, x).square().mean())(params)

    held = fzero.partition(whole, GRID, split=SPLIT)
    loss, grads = fzero.simulate(step, GRID, data=("fsdp",), reduce_dtype=reduce_dtype)(held, EXAMPLES)
    assert grads["up"] is None
    # bfloat16 rounds a sum of two parts three times, by up to 2**-8 each, and gradients are of order 1
    torch.testing.assert_close((loss, fzero.unpartition(grads)), step(whole, EXAMPLES), rtol=3 * 2**-8, atol=3 * 2**-8)


def test_quantized_leaves_stand_beside_split_ones() -> None:
    whole = fzero.quantize({**WEIGHTS, "codes": torch.randn(4, 64, dtype=F64, generator=DRAW)}, where="codes", block=32)

    def step(params: Any, x: Tensor) -> Any:
        loss, grads = fzero.value_and_grad(lambda p: (split_mlp(p, x) @ p["codes"]).square().mean())(params)
        return loss, {name: grads[name] for name in WEIGHTS}

    got = fzero.simulate(step, GRID, data=("fsdp",))(fzero.partition(whole, GRID, split=SPLIT), EXAMPLES)
    torch.testing.assert_close(fzero.unpartition(got), step(whole, EXAMPLES), rtol=1e-12, atol=1e-14)
    held = fzero.partition({**WEIGHTS, "codes": torch.ones(4, 64)}, GRID, split=SPLIT)
    made = fzero.quantize(held, where="codes")
    check_same(fzero.unpartition({name: made[name] for name in WEIGHTS}), WEIGHTS)


class OnRanks:
    """A source whose values lie on several ranks."""

    path, shape, dtype = "up", torch.Size((12, 4)), F64

    def read(self, start: int, out: Tensor) -> None:
        raise NotImplementedError

    fill = read


def test_values_on_ranks_are_refused_for_a_split_leaf() -> None:
    with pytest.raises(FzeroError, match="up: is split, and its values lie on ranks; give it whole on each rank"):
        fzero.partition({"up": OnRanks()}, GRID, split={"up": ("tp", 0)})


def test_equivalence_is_checked_with_a_split() -> None:
    state = WEIGHTS, ADAMW.init(WEIGHTS)
    found = fzero.check_equivalence(train(split_mlp), state, (EXAMPLES,), ranks=GRID, data=("fsdp",), split=SPLIT)
    assert max(each.absolute for each in found.values()) < 1e-12

    def wrong(params: Any, x: Tensor) -> Any:
        grads = fzero.grad(loss_of(split_mlp))(params, x)
        return tree.map(lambda p, g: p - p.shape[0] * g, params, grads)

    with pytest.raises(FzeroError, match="0.up, step 1, rank 0 of part 0 along 'tp': element 0 is"):
        fzero.check_equivalence(wrong, (WEIGHTS,), (EXAMPLES,), ranks=GRID, data=("fsdp",), split=SPLIT)
