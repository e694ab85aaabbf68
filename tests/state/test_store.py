"""The store on a virtual mesh: bytes survive cuts, joins and copies, and only wanted allocations are whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fzero.base.mesh import VirtualMesh
from fzero.ranks.virtual import virtual
from fzero.state.build.store import Allocation, Store

SIZES = [(world, nbytes) for world in (1, 2, 3, 7) for nbytes in (1, 15, 16, 17, 100, 1000, 1024)]


def made(world: int, nbytes: int) -> tuple[Store, Allocation, Tensor]:
    """A store with one allocation, and its bytes."""
    store = Store(virtual(VirtualMesh(fsdp=world)))
    values = torch.randint(256, (nbytes,), dtype=torch.uint8)
    return store, store.adopt(values.clone()), values


def value(store: Store, allocation: Allocation) -> Tensor:
    store.bring([allocation])
    assert allocation.flat is not None and allocation.pieces is None
    return allocation.flat


@pytest.mark.parametrize(("world", "nbytes"), SIZES)
def test_a_join_undoes_a_cut(world: int, nbytes: int) -> None:
    store, allocation, values = made(world, nbytes)
    store.cut(allocation)
    assert allocation.flat is None and allocation.pieces is not None
    assert [piece.numel() for piece in allocation.pieces] == [allocation.stride] * world
    assert torch.equal(value(store, allocation), values)


@pytest.mark.parametrize(("world", "nbytes"), SIZES)
def test_spans_tile_what_is_wanted(world: int, nbytes: int) -> None:
    store, allocation, values = made(world, nbytes)
    for wanted in (range(nbytes), range(nbytes // 3, nbytes // 2), range(0)):
        found = torch.full((nbytes,), 7, dtype=torch.uint8)
        covered: list[int] = []
        for span, column in store.spans(allocation, wanted, chunk=40):
            found[span.start : span.stop] = column
            covered += span
        assert sorted(covered) == list(wanted)
        assert torch.equal(found[wanted.start : wanted.stop], values[wanted.start : wanted.stop])


@pytest.mark.parametrize("world", [1, 3])
def test_a_duplicate_is_made_of_pieces(world: int) -> None:
    store, allocation, values = made(world, 100)
    other = store.duplicate(allocation)
    assert allocation.flat is None and other.flat is None
    value(store, allocation).zero_()
    assert torch.equal(value(store, other), values)
    assert torch.equal(value(store, store.duplicate(allocation, onto=other)), torch.zeros_like(values))


def test_one_entry_is_whole_at_a_time() -> None:
    store, first, values = made(3, 100)
    second = store.blank(64, torch.device("cpu"))
    store.bring([second])
    assert first.flat is None and second.flat is not None
    assert torch.equal(value(store, first), values)
    assert second.flat is None


def test_what_is_overwritten_is_not_gathered() -> None:
    store, allocation, _ = made(3, 100)
    store.cut(allocation)
    store._gather = None  # type: ignore[assignment, method-assign]
    store.bring([allocation], overwritten=allocation)
    assert allocation.flat is not None and allocation.flat.numel() == 100


def test_a_blank_entry_takes_no_memory_and_reads_as_zeros() -> None:
    store = Store(virtual(VirtualMesh(fsdp=3)))
    allocation = store.blank(1 << 50, torch.device("cpu"))
    assert list(store.spans(allocation, range(10), chunk=40)) == []
    assert store.duplicate(allocation).pieces is None
    assert not value(store, store.blank(10, torch.device("cpu"))).any()


def test_a_closed_store_has_nothing() -> None:
    store, allocation, _ = made(2, 100)
    store.close()
    assert store.is_closed and allocation.flat is None and allocation.pieces is None
