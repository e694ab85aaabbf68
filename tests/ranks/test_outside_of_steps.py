"""Ranks that do different things outside of steps: on every transport, every rank raises at once, and all go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from processes import Outcome, Refusal, can_read_memory, refusal, run, run_cases, values
from test_origins import TRANSPORTS, X, descend, full
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero.ranks import transports
from fzero.ranks.live import live
from fzero.ranks.members import Members
from fzero.ranks.transports import PointToPoint, SameHost, Transport

SOON = 20.0
"""Seconds, of which a busy machine may need some."""


class Told(NamedTuple):
    """The error of what ranks do differently, and what all ranks do alike afterwards."""

    refusal: Refusal
    whole: Any


def is_odd() -> bool:
    return dist.get_rank() == 1


def params(mesh: DeviceMesh) -> Any:
    return fzero.partition(full(), mesh)


def told(transport: Callable[[DeviceMesh], Transport], use: Callable[[Any, DeviceMesh], Any], mesh: DeviceMesh) -> Told:
    live(mesh).transports["fsdp"] = transport(mesh)
    given = params(mesh)
    found = refusal(lambda: use(given, mesh))
    return Told(found, fzero.unpartition(given))


def another_leaf(given: Any, mesh: DeviceMesh) -> Any:
    (layer,) = given["layers"]
    return fzero.unpartition(layer["b" if is_odd() else "w"])


def a_tree_and_a_leaf(given: Any, mesh: DeviceMesh) -> Any:
    return fzero.unpartition(given["layers"][0]["w"] if is_odd() else given)


def another_receiver(given: Any, mesh: DeviceMesh) -> Any:
    return fzero.unpartition(given, rank=dist.get_rank())


def another_leaf_to_update(given: Any, mesh: DeviceMesh) -> Any:
    return fzero.update_leaf(given, f"layers.0.{'b' if is_odd() else 'w'}", lambda x: x + 1)


def another_shape_to_update_to(given: Any, mesh: DeviceMesh) -> Any:
    new = fzero.update_leaf(given, "layers.0.w", lambda x: x[: 3 if is_odd() else 2])
    return fzero.unpartition(new)


def another_chunk(given: Any, mesh: DeviceMesh) -> Any:
    return list(fzero.iter_full(given, chunk=32 if is_odd() else 16))


def chunks_and_leaves(given: Any, mesh: DeviceMesh) -> Any:
    return list(fzero.iter_full(given, chunk=16 if is_odd() else None))


def the_end_of_an_iteration(given: Any, mesh: DeviceMesh) -> Any:
    """Rank 1 iterates no further, and takes a step."""
    leaves: Iterator[Any] = fzero.iter_full(given)
    next(leaves)
    return fzero.shard(descend, mesh, donate=False)(given, X) if is_odd() else next(leaves)


def another_full_tensor(given: Any, mesh: DeviceMesh) -> Any:
    (layer,) = given["layers"]
    return layer["b" if is_odd() else "w"].full_tensor()


def another_sum(given: Any, mesh: DeviceMesh) -> Any:
    w = given["layers"][0]["w"]
    return w.amax() if is_odd() else w.sum()


def another_source(given: Any, mesh: DeviceMesh) -> Any:
    return fzero.partition(full(), mesh, source_rank=dist.get_rank())


def another_chunk_of_one_source(given: Any, mesh: DeviceMesh) -> Any:
    return fzero.partition(full(), mesh, source_rank=0, chunk=32 if is_odd() else 16)


def another_layout_of_one_source(given: Any, mesh: DeviceMesh) -> Any:
    return fzero.partition(full(), mesh, source_rank=0, persist=5 if is_odd() else 0)


def a_step_and_a_gather(given: Any, mesh: DeviceMesh) -> Any:
    return fzero.shard(descend, mesh, donate=False)(given, X) if is_odd() else fzero.unpartition(given)


FAULTS = {
    another_leaf: "leaf layers.0.w: ranks give different leaves",
    a_tree_and_a_leaf: "leaf layers.0.b: ranks give different leaves",
    another_receiver: "'collective unpartition on rank 0'",
    another_leaf_to_update: "'collective update_leaf of layers.0.w'",
    another_shape_to_update_to: "leaf layers.0.b: ranks give different leaves",
    another_chunk: "'collective iter_full of layers.0.b: elements 0 to 4'",
    chunks_and_leaves: "iter_full of layers.0.b",
    the_end_of_an_iteration: "'collective iter_full of layers.0.w'",
    another_full_tensor: "collective full_tensor of layers.0.w: ",
    another_sum: "collective sum of layers.0.w: ",
    another_source: "'collective partition from rank 0, ",
    another_chunk_of_one_source: "'collective partition from rank 0, 16 bytes at a time'",
    another_layout_of_one_source: "leaf layers.0.b: ranks give different leaves",
    a_step_and_a_gather: "'collective unpartition'",
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    return run_cases(
        2,
        {
            f"{use.__name__} {transport.__name__}": partial(told, transport, use)
            for transport in TRANSPORTS
            for use in FAULTS
        },
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("use", FAULTS)
def test_both_ranks_are_told(outcomes: dict[str, list[Outcome]], use: Any, transport: Any) -> None:
    for found, whole in values(outcomes[f"{use.__name__} {transport.__name__}"]):
        assert found.kind == "FzeroError" and found.seconds < SOON, found
        assert FAULTS[use] in found.message, found.message
        assert "rank 0 has " in found.message and "rank 1 has " in found.message
        assert fzero.tree.leaves(fzero.tree.map(torch.equal, whole, full())) == [True, True]


# what no agreement comes before


def other_sizes(mesh: DeviceMesh) -> Refusal:
    """Ranks start an exchange of other sizes, as no step and no function of fzero does."""
    on = live(mesh)
    sent = torch.ones(3 if is_odd() else 5)
    return refusal(lambda: on.transports["fsdp"].all_gather(sent, on.members.begin("all_gather of w")).wait())


def test_a_rank_reads_no_memory_of_another_size() -> None:
    if not can_read_memory():
        pytest.skip("this kernel keeps processes from reading each other's memory")
    for found in run(2, other_sizes):
        assert found.kind == "FzeroError" and found.cause == "RuntimeError", found
        assert found.message.startswith("all_gather of w: failed, though every rank answers")


# what ranks decide together


def reading_on_one_rank(mesh: DeviceMesh) -> Any:
    """Rank 1 alone sees cores to spare."""
    transports.are_cores_spare = lambda world: is_odd()  # type: ignore[attr-defined]
    given = params(mesh)
    transport = live(mesh).transports["fsdp"]
    assert isinstance(transport, SameHost) and transport._reader is None
    step = fzero.shard(descend, mesh)
    losses = []
    for _ in range(3):
        given, loss = step(given, X)
        losses.append(float(loss))
    return losses


def test_all_ranks_read_on_a_thread_or_none() -> None:
    if not can_read_memory():
        pytest.skip("this kernel keeps processes from reading each other's memory")
    first, second = run(2, reading_on_one_rank)
    assert first == second and len(set(first)) == 3


# messages of the user


def a_message_of_the_user(mesh: DeviceMesh) -> Tensor:
    """The user waits for a message, without a tag, in the process group of the mesh, while fzero sends some."""
    group, members = mesh.get_group(), live(mesh).members
    assert isinstance(members, Members)
    live(mesh).transports["fsdp"] = PointToPoint(group, members.timeout)
    given, peer, received = params(mesh), 1 - dist.get_rank(), torch.zeros(4)
    waiting: Any = dist.irecv(received, group=group, group_src=peer)
    fzero.unpartition(fzero.shard(descend, mesh)(given, X)[0])
    fzero.unpartition(fzero.partition(full(), mesh, source_rank=1), rank=0)
    sending: Any = dist.isend(torch.full((4,), 7.0 + peer), group=group, group_dst=peer)
    sending.wait()
    waiting.wait()
    return received


def test_messages_of_the_user_are_not_those_of_fzero() -> None:
    assert [x.tolist() for x in run(2, a_message_of_the_user)] == [[7.0] * 4, [8.0] * 4]
