"""Rearranged tensors: their parts are read and written as torch arranges the values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stand_ins import live_stand_ins
from torch import Tensor

import fzero
from fzero.base.errors import FzeroError
from fzero.formats.hugging_face import plan_pieces
from fzero.formats.rearranged import Rearranged, RearrangedSource, name_tensor
from fzero.layout.strides import Copy, Dim
from fzero.ranks.virtual import ALONE
from fzero.state.fill import copy_slices
from fzero.state.safetensors.header import plan_header
from fzero.state.safetensors.writing import ITSELF, WritePlan, write
from fzero.state.sources import Source, TensorSource
from fzero.values.sharded import Sharded

Program = Callable[[Tensor, Tensor], Tensor]
PROGRAMS: dict[str, Program] = {
    "joined": lambda a, b: torch.cat([a, b], dim=1),
    "stacked": lambda a, b: torch.stack([a, b]).transpose(1, 2).contiguous(),
    "fused": lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1),
    "split": lambda a, b: torch.cat([a, b], dim=1).chunk(3, dim=0)[1].contiguous(),
    "interleaved": lambda a, b: torch.cat([a, b]).view(6, 2, 4).transpose(0, 1).reshape(12, 4),
    "padded by nothing": lambda a, b: torch.nn.functional.pad(a, (0, 0)).t().clone(),
    "cast": lambda a, b: b.to(torch.bfloat16).t(),
    "a number": lambda a, b: a[2, 1],
}


def values() -> dict[str, Tensor]:
    return {"a": torch.arange(24.0).view(6, 4), "b": torch.arange(24.0, 48.0).view(6, 4)}


def names() -> list[Rearranged]:
    return [name_tensor(name, x.shape, x.dtype) for name, x in values().items()]


@pytest.mark.parametrize("name", PROGRAMS)
def test_ranges_are_read_as_torch_arranges_them(name: str) -> None:
    expected, found = PROGRAMS[name](*values().values()), PROGRAMS[name](*names())
    assert isinstance(found, Rearranged) and found.shape == expected.shape and found.stride() == expected.stride()
    source = RearrangedSource(name, found, {key: TensorSource(x) for key, x in values().items()})
    for start in range(0, expected.numel(), 5):
        out = torch.empty(min(7, expected.numel() - start), dtype=expected.dtype)
        source.read(start, out)
        assert out.equal(expected.reshape(-1)[start : start + 7])


@pytest.mark.parametrize("world", [1, 3, 5])
def test_ranks_write_their_elements_where_they_belong(world: int, tmp_path: Path) -> None:
    """Elements that lie apart in the file, and chunks smaller than a row."""
    whole = values()
    tensors = {name: program(*names()) for name, program in PROGRAMS.items() if name != "cast"}
    header = plan_header(tensors, {})
    pieces = []
    for on in live_stand_ins(fzero.VirtualMesh(fsdp=world)):
        held: dict[str, Sharded | Source] = {}
        for leaf in fzero.partition(whole, on.mesh).values():
            local = copy_slices({leaf.index: whole[leaf.path]}, leaf.form.layout, on.rank)[leaf.index]
            held[leaf.path] = Sharded(local, leaf.form.layout, leaf.index, on)
        pieces += list(plan_pieces(held, tensors, {ITSELF: header}, on))
    write(tmp_path / "x.safetensors", lambda: WritePlan({ITSELF: header}, pieces), ALONE, 12, "test")
    found = load_file(tmp_path / "x.safetensors")
    assert sum(piece.values.shape.numel() for piece in pieces) == sum(x.numel() for x in found.values())
    for name in tensors:
        assert found[name].equal(PROGRAMS[name](*whole.values()))


class Counter(TensorSource):
    """A source that counts what is read."""

    numel = calls = 0

    def read(self, start: int, out: Tensor) -> None:
        self.numel += out.numel()
        self.calls += 1
        super().read(start, out)


def test_a_part_of_a_transpose_reads_rows_and_little_more() -> None:
    """Rows of the transpose are columns of the source, of which one read takes a stretch."""
    matrix = torch.arange(2.0**20).view(1024, 1024)
    found = name_tensor("w", matrix.shape, matrix.dtype).t().contiguous()
    for rows, calls in ((512, 4), (4, 1024)):
        source, out = Counter(matrix), torch.empty(rows * 1024)
        RearrangedSource("w", found, {"w": source}).read(100 * 1024, out)
        assert out.view(rows, 1024).equal(matrix.t()[100 : 100 + rows])
        assert source.numel <= 4 * out.numel() and source.calls == calls


def test_parts_that_lie_side_by_side_are_read_at_once() -> None:
    experts = [name_tensor(f"{i}", (8, 16), torch.float32) for i in range(3)]
    fused = torch.cat([torch.stack(experts), torch.stack(experts)], dim=1)
    assert fused[1, 8:].pieces("x") == [("1", Copy(0, 0, (Dim(128, 1, 1),)))]


def test_what_is_computed_is_refused_by_name() -> None:
    a, b = names()
    with pytest.raises(FzeroError, match=r"^w: is computed by aten.add.Tensor from a, and fzero only moves elements"):
        (a + 1).t().clone().pieces("w")
    with pytest.raises(FzeroError, match=r"^w: is computed by aten.clone.default \(elements overlap"):
        a[0].expand(3, 4).clone().pieces("w")
    with pytest.raises(FzeroError, match=r"^w: is made of a and other values"):
        torch.cat([a, torch.empty(1, 4, device="meta")]).pieces("w")
    with pytest.raises(FzeroError, match=r"^b: aten.mul_.Tensor writes into it"):
        b.mul_(2)
    torch.empty_like(b).fill_(1)  # is nobody's
