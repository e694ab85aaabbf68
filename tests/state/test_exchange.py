"""The exchange planner, and what ranks do with a plan when one of them fails or dies."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
from processes import run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout, Leaf
from fzero.layout.splits import Split
from fzero.ranks.live import live
from fzero.state.exchange import Message, Part, Stretch, find_owners, perform, plan, ranks_by_position

LAYOUT = Layout("b", (Leaf("v", (3,)), Leaf("w", (2, 5))), VirtualMesh(fsdp=2), align=1)
"""13 elements, padded to 14: rank 0 keeps [0, 4) of w, rank 1 the rest."""


def test_ranks_by_position_lists_the_copies_of_the_state() -> None:
    def list_copies(ranks: list[int], *at: int, split: Split | None = None, **sizes: int) -> list[list[int]]:
        return ranks_by_position(Layout("b", (Leaf("w", (5,), split=split),), VirtualMesh(**sizes)), ranks, *at)

    assert list_copies([4, 5, 6, 7, 8, 9], replica=2, fsdp=3) == [[4, 7], [5, 8], [6, 9]]
    assert list_copies([0, 1, 2, 3], fsdp=2, replica=2) == [[0, 1], [2, 3]]
    assert list_copies([0, 1, 2, 3], 1, split=Split("tp", 0, 1), fsdp=2, tp=2) == [[1], [3]]


def test_one_rank_has_a_piece_and_each_copy_gets_its_part() -> None:
    keepers = find_owners(LAYOUT, 1, range(2, 8), [[0, 2], [1, 3]])
    assert keepers == [Part(0, range(2, 4)), Part(2, range(2, 4)), Part(1, range(4, 8)), Part(3, range(4, 8))]
    assert plan([Part(2, range(2, 8))], keepers) == [
        Message(2, 0, range(2, 4)), Message(2, 2, range(2, 4)), Message(2, 1, range(4, 8)), Message(2, 3, range(4, 8))
    ]  # fmt: skip


def test_one_rank_collects_a_leaf() -> None:
    messages = plan(find_owners(LAYOUT, 1, range(10), [[7], [9]]), [Part(9, range(10))])
    assert messages == [Message(7, 9, range(4)), Message(9, 9, range(4, 10))]


def test_a_piece_without_elements_is_nobody_s() -> None:
    assert find_owners(LAYOUT, 1, range(4, 4), [[0], [1]]) == [] == plan([], [Part(0, range(3))])


# two messages of one sender, and messages in both directions


def both_ways(mesh: DeviceMesh) -> list[float]:
    on, me = live(mesh), mesh.get_rank()
    room = torch.full((10,), -1.0)
    messages = [
        Message(0, 1, range(2)), Message(1, 0, range(5, 9)), Message(0, 1, range(7, 10)), Message(0, 0, range(1))
    ]  # fmt: skip
    perform(on, "a test", messages, Stretch(0, torch.arange(10.0) + 100 * me), Stretch(0, room))
    return room.tolist()


def test_messages_of_one_pair_keep_their_order() -> None:
    assert run(2, both_ways) == [
        [0, -1, -1, -1, -1, 105, 106, 107, 108, -1],
        [0, 1, -1, -1, -1, -1, -1, 7, 8, 9],
    ]


# replicas


def to_and_from_replicas(mesh: DeviceMesh) -> list[Tensor]:
    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "fsdp"))
    values = torch.arange(33.0)
    given = {"w": values if mesh.get_rank() == 3 else values.to("meta")}
    params = fzero.partition(given, rows, source_rank=3, chunk=40)
    pieces = [values for _, (_, values) in fzero.iter_full(params, chunk=40)]
    return [params["w"].full_tensor(), torch.cat(pieces)]


def test_every_copy_of_the_state_gets_its_parts() -> None:
    for values in run(4, to_and_from_replicas):
        assert all(value.equal(torch.arange(33.0)) for value in values)


# failures


class Breaking:
    """A source that fails after 40 elements with a RuntimeError, the type by which gloo also reports a lost rank."""

    shape, dtype, path = torch.Size((100,)), torch.float32, "w"

    def read(self, start: int, out: Tensor) -> None:
        if start >= 40:
            raise RuntimeError("no such page")
        out.fill_(1)


def failing_then_whole(mesh: DeviceMesh) -> tuple[str, Tensor]:
    """A read that fails, then a read that succeeds, on the same ranks."""
    here = mesh.get_rank() == 0
    with pytest.raises((FzeroError, RuntimeError)) as error:
        fzero.partition({"w": Breaking() if here else torch.empty(100, device="meta")}, mesh, source_rank=0, chunk=80)
    whole = {"w": torch.arange(9.0) if here else torch.empty(9, device="meta")}
    return str(error.value), fzero.partition(whole, mesh, source_rank=0)["w"].full_tensor()


def test_ranks_go_on_after_a_source_failed_with_torch_s_own_error() -> None:
    outcomes = run(3, failing_then_whole)
    said = "rank 0: could not read its values: RuntimeError: no such page"
    assert [message for message, _ in outcomes] == ["no such page", said, said]
    assert all(values.equal(torch.arange(9.0)) for _, values in outcomes)


def without_the_source(mesh: DeviceMesh) -> str:
    class Dying(Breaking):
        def read(self, start: int, out: Tensor) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(FzeroError) as error:
        values = Dying() if mesh.get_rank() == 2 else torch.empty(100, device="meta")
        fzero.partition({"w": values}, mesh, source_rank=2)
    return str(error.value)


def test_a_source_that_dies_is_named() -> None:
    first, second, _ = run(3, without_the_source, stall=timedelta(seconds=15), lost=[2])
    for message in (first, second):
        assert message.startswith("partition of w from rank 2: rank 2 died or left")


def collecting(mesh: DeviceMesh) -> str:
    """Rank 1 dies once ranks have agreed to collect the leaf."""
    params, members = fzero.partition({"w": torch.arange(100.0)}, mesh), live(mesh).members
    begin = members.begin

    def strike(what: str) -> Any:
        if mesh.get_rank() == 1 and what.startswith("collecting"):
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(what)

    members.begin = strike  # type: ignore[method-assign]
    with pytest.raises(FzeroError) as error:
        fzero.unpartition(params, rank=0)
    return str(error.value)


def test_an_owner_that_dies_is_named_where_its_part_is_awaited() -> None:
    message = run(2, collecting, stall=timedelta(seconds=15), lost=[1])[0]
    assert message.startswith("collecting w on rank 0: rank 1 died or left")
