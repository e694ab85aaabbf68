"""`fzero.quantize`: which leaves, from tensors, sources and files, on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peaks import Peaks
from torch import Tensor, nn

import fzero
import fzero.checkpoint
from fzero import tree
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.program import blockwise
from fzero.program.memory import measure_memory
from fzero.state import quantize as rounding
from fzero.state.sources import TensorSource
from fzero.values.quantized import Quantized


class Model(nn.Module):
    """A frozen embedding and two frozen layers beside a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 20)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(2))
        self.requires_grad_(False)
        self.head = nn.Linear(20, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers[1](torch.tanh(self.layers[0](self.embed(tokens)))))


def frozen() -> Any:
    torch.manual_seed(0)
    return fzero.lower(Model())[0]


def stored(params: Any) -> list[tuple[str, Tensor]]:
    """The whole codes and scales of a tree."""
    whole = fzero.unpartition(params)
    return [(path, x) for path, x in zip(tree.paths(whole), tree.leaves(whole)) if x.dtype == torch.uint8]


def assert_same(got: Any, expected: Any) -> None:
    for (path, a), (other, b) in zip(stored(got), stored(expected), strict=True):
        assert path == other and torch.equal(a, b), path


def test_frozen_matrices_are_quantized_and_no_embeddings() -> None:
    held = fzero.quantize(frozen())
    assert [path for path, _ in stored(held)] == [
        f"layers.{i}.weight.{name}" for i in range(2) for name in ("codes-int8-256-of-20x20", "scales")
    ]
    assert all(is_frozen(x) for x in tree.leaves(held["layers"]))


DOUBLE: dict[str, Any] = {"bits": 4, "block": 2, "levels": "nf4", "double_quant": True}
"""So small blocks that a leaf of 627 elements has two groups of scales."""


def test_where_chooses() -> None:
    params = frozen()
    by_pattern = fzero.quantize(params, where=r"^(embed|head\.w)")
    by_function = fzero.quantize(params, where=lambda path, leaf: leaf.ndim == 2 and leaf.shape[0] == 30)
    assert_same(by_pattern, by_function)
    assert [path.split(".codes-")[0] for path, _ in stored(by_pattern)][::2] == ["embed.weight", "head.weight"]
    both = fzero.quantize(by_pattern, bits=4, block=16)  # what is left
    assert both["embed"]["weight"].coding.bits == 8 and both["layers"][1]["weight"].coding.bits == 4


@pytest.mark.parametrize("how", [{"bits": 8, "block": 16}, {"bits": 4, "block": 16}, DOUBLE])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_codes_do_not_depend_on_ranks_chunks_and_sources(
    how: dict[str, Any], world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, mesh = {"a": {"w": torch.randn(57, 11)}, "b": [torch.randn(130)]}, fzero.VirtualMesh(fsdp=world)
    expected = fzero.quantize(params, where="", **how)
    monkeypatch.setattr(blockwise, "CHUNK", 48)
    monkeypatch.setattr(rounding, "CHUNK_NBYTES", 300)
    assert_same(fzero.quantize(params, where="", **how), expected)
    held = fzero.partition(expected, mesh)
    assert_same(held, expected)
    sources = tree.map(TensorSource, params)
    assert_same(fzero.partition(fzero.quantize(sources, where="", **how), mesh, chunk=40), expected)
    exact = fzero.partition(params, mesh)
    assert_same(fzero.quantize(exact, where="", **how), expected)
    file = str(tmp_path / "exact.safetensors")
    fzero.save_safetensors(params, file)
    opened = fzero.quantize(fzero.open_safetensors(file), where="", **how)
    assert torch.equal(fzero.unpartition(fzero.partition(opened, mesh))["a.w"].codes, expected["a"]["w"].codes)


@pytest.mark.parametrize("double_quant", [False, True])
def test_codes_and_scales_are_saved_and_loaded(double_quant: bool, tmp_path: Path) -> None:
    how: dict[str, Any] = {"bits": 4, "block": 64, "double_quant": double_quant}
    file, folder = str(tmp_path / "model.safetensors"), str(tmp_path / "checkpoint")
    held = fzero.partition(fzero.quantize(frozen(), **how), fzero.VirtualMesh(fsdp=2))
    fzero.save_safetensors(held, file)
    scales = "scales-dynamic8-256" if double_quant else "scales"
    names = {"layers.0.weight.codes-int4-64-of-20x20", f"layers.0.weight.{scales}", "head.weight"}
    assert names <= fzero.open_safetensors(file).keys()
    fzero.checkpoint.save(folder, held, step=0)
    with torch.device("meta"):
        like = fzero.quantize(fzero.lower(Model())[0], **how)
    other = fzero.VirtualMesh(fsdp=3)
    for loaded in (
        fzero.load_safetensors(file, like, other),
        fzero.checkpoint.load(folder, like, other),
    ):
        assert_same(loaded, held)
        weight = loaded["layers"][1]["weight"]
        assert isinstance(weight, Quantized) and is_frozen(weight.codes) and weight.path == "layers.1.weight"
        assert torch.equal(weight.full_tensor(), held["layers"][1]["weight"].full_tensor())


SAVED: dict[str, Any] = {"bits": 4, "block": 64}


@pytest.mark.parametrize(
    ("shape", "how"),
    [((20, 26), SAVED | {"levels": "nf4"}), ((20, 26), SAVED | {"block": 62}), ((26, 20), SAVED)],
)
def test_codes_are_read_by_no_other_coding_of_as_many_bytes(
    shape: tuple[int, int], how: dict[str, Any], tmp_path: Path
) -> None:
    mesh, file, folder = fzero.VirtualMesh(fsdp=2), str(tmp_path / "a.safetensors"), str(tmp_path / "checkpoint")
    held = fzero.partition(fzero.quantize({"w": torch.randn(20, 26)}, where="w", **SAVED), mesh)
    fzero.save_safetensors(held, file)
    fzero.checkpoint.save(folder, held, step=0)
    like = fzero.quantize({"w": torch.empty(shape, device="meta")}, where="w", **how)
    assert [x.shape for x in tree.leaves(like)] == [x.shape for x in tree.leaves(held)]
    with pytest.raises(
        FzeroError, match=r"leaves without values \(1\): w\.codes-.*; keys .* 'w\.codes-int4-64-of-20x26'"
    ):
        fzero.load_safetensors(file, like, mesh)
    with pytest.raises(FzeroError, match=r"lacks 1 leaves of `like`: w\.codes-.* lacks: w\.codes-int4-64-of-20x26"):
        fzero.checkpoint.load(folder, like, mesh)


def test_files_in_full_precision_are_quantized_while_they_are_read(tmp_path: Path) -> None:
    file, mesh, exact = str(tmp_path / "exact.safetensors"), fzero.VirtualMesh(fsdp=3), frozen()
    fzero.save_safetensors({"model": exact}, file)
    with torch.device("meta"):
        like = fzero.quantize(fzero.lower(Model())[0], bits=4, block=64)
    held = fzero.load_safetensors(file, like, mesh, rename=lambda path: f"model.{path}")
    assert_same(held, fzero.quantize(exact, bits=4, block=64))
    assert torch.equal(fzero.unpartition(held)["head"]["bias"], exact["head"]["bias"])
    narrow = fzero.load_safetensors(file, like, mesh, rename=lambda path: f"model.{path}", dtype=torch.bfloat16)
    assert narrow["layers"][0]["weight"].full_tensor().dtype == torch.bfloat16 == narrow["head"]["weight"].dtype
    assert_same(narrow, held)
    with pytest.raises(FzeroError, match=r"layers\.0\.weight: has shape \[20, 20\] in .*, \[20, 10\] in the tree"):
        like["layers"][0]["weight"] = fzero.quantize({"w": torch.ones(20, 10)}, block=64, where="w")["w"]
        fzero.load_safetensors(file, like, mesh, rename=lambda path: f"model.{path}")
    with pytest.raises(FzeroError, match=r"leaves without values \(9\): .*layers\.0\.weight\.codes"):
        fzero.load_safetensors(file, like, mesh)


def test_what_is_built_is_quantized_where_it_lies() -> None:
    mesh = fzero.VirtualMesh(fsdp=3)
    built, apply = fzero.build(Model, mesh, seed=0)
    held = fzero.quantize(built, bits=4, block=64)
    torch.manual_seed(0)
    assert_same(held, fzero.quantize(fzero.lower(Model())[0], bits=4, block=64))
    weight = held["layers"][1]["weight"]
    assert weight.codes.form.layout.bucket == "layers.1:uint8" and is_frozen(weight.scales)
    whole = fzero.partition(fzero.quantize(fzero.lower(Model())[0], bits=4, block=64), mesh)
    for leaf, expected in zip(tree.leaves(held), tree.leaves(whole)):  # nothing keeps memory of the whole layer
        assert leaf.form == expected.form
        assert leaf.local.untyped_storage().nbytes() == expected.local.untyped_storage().nbytes()
    assert held["head"]["weight"] is built["head"]["weight"]
    with torch.device("meta"):
        absent = fzero.quantize(fzero.partition(fzero.lower(Model())[0], mesh), bits=4, block=64)
    assert [leaf.form.layout for leaf in tree.leaves(absent)] == [leaf.form.layout for leaf in tree.leaves(whole)]
    step = fzero.simulate(fzero.value_and_grad(lambda p, x: apply(p, x).square().mean()), mesh)
    value, _ = step(held, torch.arange(6))
    expected = fzero.simulate(apply, mesh)(fzero.partition(fzero.unpartition(held), mesh), torch.arange(6))
    torch.testing.assert_close(value.mean(), expected.square().mean())


@pytest.mark.parametrize("name", ["host", "disk"])
def test_codes_lie_where_the_leaf_lay(name: str, tmp_path: Path) -> None:
    """And a step takes them from there, with the same results and the bytes that are planned."""
    place = fzero.host() if name == "host" else fzero.disk(tmp_path)
    mesh, (params, apply) = fzero.VirtualMesh(fsdp=2), fzero.lower(Model())
    held, resident = (fzero.quantize(fzero.partition(params, mesh, to=to)) for to in (place, None))
    weight = held["layers"][0]["weight"]
    assert {x.place for x in (weight.codes, weight.scales)} == {place}
    step, tokens = fzero.simulate(fzero.value_and_grad(lambda p, x: apply(p, x).square().mean()), mesh), torch.arange(6)
    program = step.trace(held, tokens)
    peaks, planned = Peaks(program), [measure_memory(program, [rank]) for rank in (0, 1)]
    got, expected = step(held, tokens, watch=peaks.watch), step(resident, tokens)
    assert all(map(torch.equal, *(tree.leaves(fzero.unpartition(each)) for each in (got, expected))))
    assert program.comm() == step.trace(resident, tokens).comm()
    most = {"device": [x.peak for x in planned], "host": [x.host for x in planned], "disk": [x.disk for x in planned]}
    assert peaks.most == {name: max(each) for name, each in most.items()}


def test_an_array_is_quantized() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.linspace(-1, 1, 300, dtype=numpy.float32)
    mesh = fzero.VirtualMesh(fsdp=2)
    held = fzero.partition(fzero.quantize({"w": array}, block=16, where="w"), mesh)
    assert_same(held, fzero.quantize({"w": torch.from_numpy(array)}, block=16, where="w"))


def test_a_rank_holds_its_part_of_the_codes() -> None:
    params = {"w": torch.randn(64, 64)}
    held = fzero.partition(fzero.quantize(params, bits=4, block=64, where="w"), fzero.VirtualMesh(fsdp=4))
    layout = held["w"].codes.form.layout
    assert layout == held["w"].scales.form.layout, "codes and scales share a bucket"
    assert layout.numel == 64 * 64 // 2 + 64 * 4 and layout.shard == layout.numel // 4


def test_the_page_runs_and_says_what_is(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "quantized.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    with torch.random.fork_rng():
        names: dict[str, Any] = {}
        exec(compile(code, "docs/quantized.md", "exec"), names)
    (printed,) = re.findall(r"print\(.*# (.*)", code)
    assert capsys.readouterr().out.strip() == printed
    sizes = re.findall(r"bits=(\d), block=(\d+)` \| ([\d.]+)", page)
    assert len(sizes) == 2
    for bits, block, size in sizes:
        assert float(size) == pytest.approx(int(bits) / 8 + 4 / int(block), abs=5e-4)
    (size,) = re.findall(r"the same, and `double_quant=True` \| ([\d.]+)", page)
    assert float(size) == pytest.approx(4 / 8 + 1 / 64 + 4 / 64 / 256, abs=5e-5)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda p: fzero.quantize(p, bits=3), "bits is 3; give 8 or 4"),
        (lambda p: fzero.quantize(p, levels="nf4"), "levels is 'nf4' with 8 bits; give 'even', or 'nf4' with bits=4"),
        (lambda p: fzero.quantize(p, where="*.w"), r"where: '\*\.w' is no regular expression: nothing to repeat"),
        (lambda p: fzero.quantize(p | {"n": 3}, where="n"), "n: is a int, not a tensor"),
        (lambda p: fzero.quantize(p, block=63), "block is 63; give an even number"),
        (lambda p: fzero.quantize(p, dtype=torch.int8), "dtype is torch.int8; give a floating dtype"),
        (lambda p: fzero.quantize(p), r"chooses none of 3 leaves \(such as b, i, w\); call requires_grad_\(False\)"),
        (lambda p: fzero.quantize(p, where="i"), "i: is torch.int64, and codes stand for floating numbers"),
        (lambda p: fzero.quantize(p, where="b"), "b: has 7 elements, a block 256; leave it out"),
        (lambda p: fzero.quantize(fzero.quantize(p, where="w"), where="w"), "w: is quantized already, with 8 bits"),
        (lambda p: fzero.quantize({"w": p["w"].log()}, where="w"), "w: element 0 is nan, and a block"),
    ],
)  # fmt: skip
def test_bad_input_is_named(make: Any, error: str) -> None:
    params = {"w": -torch.ones(32, 32), "b": torch.ones(7), "i": torch.ones(300, dtype=torch.int64)}
    with pytest.raises(FzeroError, match=error):
        make(params)
