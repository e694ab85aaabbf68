"""Transports: on real ranks, every transport performs the same collectives with the same bits."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial, reduce
from typing import Any, NamedTuple

import pytest
import torch
from processes import Outcome, can_read_memory, run, run_cases, values
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fzero import FzeroError, VirtualMesh
from fzero.layout import buffers
from fzero.layout.layout import Layout, Leaf
from fzero.layout.wires import Wire, wire
from fzero.ranks import processes
from fzero.ranks.live import live
from fzero.ranks.transports import Native, PointToPoint, SameHost, Transport, board, process_memory, same_host
from fzero.ranks.transports import point_to_point as messages
from fzero.ranks.transports.reduction import JOINS
from fzero.ranks.transports.worker import Worker

SECOND = timedelta(seconds=1)
LEAVES = Leaf("w", (30, 7)), Leaf("b", (7,)), Leaf("none", (0, 3)), Leaf("u", (50, 11), block=11), Leaf("s", ())


class Sent(NamedTuple):
    """The leaves of a bucket that ranks scatter, in full: random numbers, times `size`."""

    dtype: torch.dtype
    leaves: tuple[int, ...] = (0, 1, 2, 3, 4)
    is_transposed: bool = False
    size: float = 1.0

    def wire(self, world: int) -> Wire:
        return wire(Layout("layer", LEAVES, VirtualMesh(fsdp=world)), self.leaves)

    def fulls(self, rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        shapes = [LEAVES[leaf].shape for leaf in self.leaves]
        if self.is_transposed:
            return [_reversed(torch.randn(shape[::-1], generator=generator).to(self.dtype)) for shape in shapes]
        return [(self.size * torch.rand(shape, generator=generator)).to(self.dtype) for shape in shapes]

    def mean(self, world: int, rank: int) -> Tensor:
        """[S] the block that `rank` should get: the mean in rank order, added up in float32 or wider, rounded once."""
        blocks = [buffers.blocks_of(self.fulls(each), self.wire(world)) for each in range(world)]
        wide = [block.to(torch.promote_types(block.dtype, torch.float32)) for block in blocks]
        return (reduce(torch.add, wide) / world).to(self.dtype).view(world, -1)[rank]


def _reversed(x: Tensor) -> Tensor:
    return x.permute(tuple(reversed(range(x.ndim))))


SENT = {
    "fp32": Sent(torch.float32),
    "bf16": Sent(torch.bfloat16),
    "fp16 whose sum is beyond fp16": Sent(torch.float16, size=65000),
    "fp64": Sent(torch.float64),
    "some leaves": Sent(torch.float32, leaves=(1, 3)),
    "one leaf, which some ranks have nothing of": Sent(torch.float32, leaves=(1,)),
    "no element": Sent(torch.float32, leaves=(2,)),
    "transposed": Sent(torch.float32, is_transposed=True),
    "some transposed": Sent(torch.bfloat16, leaves=(0, 3), is_transposed=True),
}


def point_to_point(mesh: DeviceMesh) -> Transport:
    messages.PIECE = 100  # type: ignore[misc]
    return PointToPoint(mesh.get_group(), live(mesh).members.timeout)


def native(mesh: DeviceMesh) -> Transport:
    return Native(mesh.get_group(), live(mesh).members.new_twin(mesh.get_group()))


def waiting(mesh: DeviceMesh) -> Transport:
    """A transport that reads when its result is waited for."""
    transport = live(mesh).transports["fsdp"]
    assert isinstance(transport, SameHost)
    transport._reader, same_host.PIECE = None, 100
    return transport


def reading(mesh: DeviceMesh) -> Transport:
    """A transport that reads on a thread."""
    transport = waiting(mesh)
    assert isinstance(transport, SameHost)
    transport._reader = Worker("reader")
    return transport


TRANSPORTS: dict[str, Callable[[DeviceMesh], Transport]] = {
    each.__name__: each for each in (point_to_point, native, waiting, reading)
}


def scattered(make: Callable[[DeviceMesh], Transport], mesh: DeviceMesh) -> dict[str, bool]:
    """Start all scatters at once and wait in order. For each: is the result the mean, bit for bit?"""
    transport, members, world = make(mesh), live(mesh).members, mesh.size()
    pending = {
        name: transport.reduce_scatter(sent.fulls(mesh.get_rank()), sent.wire(world), members.begin(name))
        for name, sent in SENT.items()
    }
    found = {name: each.wait() for name, each in pending.items()}
    # gloo adds in an order of its own: another float32 sum, which the one rounding of a narrow dtype may move by a step
    steps = 2 if isinstance(transport, Native) else 0
    return {
        name: torch.allclose(
            found[name],
            sent.mean(world, mesh.get_rank()),
            rtol=steps * torch.finfo(sent.dtype).eps,
            atol=steps * torch.finfo(torch.float32).eps,  # sums of numbers about 1 may cancel
        )
        for name, sent in SENT.items()
    }


def gathered(make: Callable[[DeviceMesh], Transport], mesh: DeviceMesh) -> list[bool]:
    """Gather blocks of several sizes, and overwrite each block as soon as the transport has settled."""
    transport, members, rank = make(mesh), live(mesh).members, mesh.get_rank()
    right = []
    for size in (0, 1, 16, 5000):
        for turn in range(3):
            block = torch.arange(size, dtype=torch.float32) + 1000 * rank + turn
            full = transport.all_gather(block, members.begin("gather")).wait()
            transport.settle()
            block.fill_(-1)
            ranks = [torch.arange(size, dtype=torch.float32) + 1000 * other + turn for other in range(mesh.size())]
            right.append(full.equal(torch.cat(ranks)))
            full.fill_(-1)
            place = full[rank * size :][:size].copy_(ranks[rank])
            again = transport.all_gather(place, members.begin("gather"), full).wait()
            right.append(not getattr(transport, "_open", {}))  # what is in the result does not outlive it
            right.append(again.equal(torch.cat(ranks)) and again.data_ptr() == full.data_ptr())
    return right


def reduced(make: Callable[[DeviceMesh], Transport], mesh: DeviceMesh) -> list[bool]:
    """All reductions, of small tensors and of a large one, with a nan and infinities on one rank. Where fzero adds up
    itself, small ones are in rank order, bit for bit."""
    transport, members, right = make(mesh), live(mesh).members, []
    for shape in ((), (3, 5), (600, 500)):
        ranks = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(mesh.size())]
        ranks[1].view(-1)[0] = math.nan
        ranks[0].view(-1)[-1] = math.inf
        for op, join in JOINS.items():
            mine = ranks[mesh.get_rank()]
            found = transport.all_reduce(mine.mT if shape else mine, op, members.begin(op)).wait()
            expected = reduce(join, ranks) / (mesh.size() if op == "avg" else 1)
            rtol, atol = (1e-5, 1e-6) if isinstance(transport, Native) or mine.nbytes > messages.LARGE else (0.0, 0.0)
            right.append(
                torch.allclose(found, expected.mT if shape else expected, rtol=rtol, atol=atol, equal_nan=True)
            )
        first = transport.all_reduce(ranks[0], "max", members.begin("max"))
        count = transport.all_reduce(torch.tensor(mesh.get_rank() + 1), "sum", members.begin("count")).wait()
        right.append(int(count) == mesh.size() * (mesh.size() + 1) // 2)
        right.append(first.wait().equal(ranks[0]))  # what starts first may be waited for last
    return right


def narrowly_reduced(make: Callable[[DeviceMesh], Transport], mesh: DeviceMesh) -> list[Tensor]:
    """The bits of sums and means of float16 and bfloat16, small and large, each one rounding from the exact value."""
    transport, members, found = make(mesh), live(mesh).members, []
    for dtype, shape, op in itertools.product(
        (torch.float16, torch.bfloat16), ((), (3, 5), (2000, 500)), ("sum", "avg")
    ):
        size = 60000 if op == "avg" else 60000 / mesh.size()  # beyond float16: the sum of a mean, and of no sum
        ranks = [size * torch.rand(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(mesh.size())]
        given = [x.to(dtype) for x in ranks]
        total = transport.all_reduce(given[mesh.get_rank()], op, members.begin(op)).wait()
        exact = torch.stack(given).double().sum(0) / (mesh.size() if op == "avg" else 1)
        assert total.dtype == dtype
        torch.testing.assert_close(total.double(), exact, rtol=torch.finfo(dtype).eps / 2 + 1e-6, atol=0)
        found.append(total.view(torch.int16))
    return found


def reduced_beside_a_gather(mesh: DeviceMesh) -> bool:
    """Rank 0 starts a gather in front of an all-reduce, the others behind it."""
    transport, members, rank = native(mesh), live(mesh).members, mesh.get_rank()

    def gather() -> Any:
        return transport.all_gather(torch.full((3,), float(rank)), members.begin("gather"))

    early = gather() if rank == 0 else None
    total = transport.all_reduce(torch.ones(2), "sum", members.begin("sum")).wait()
    full = (early or gather()).wait()
    return total.tolist() == 2 * [mesh.size()] and full.view(-1, 3)[:, 0].tolist() == list(range(mesh.size()))


def too_many(mesh: DeviceMesh) -> str:
    transport = waiting(mesh)
    same_host.SLOTS = 2
    attempt = live(mesh).members.begin("gather")
    started = [transport.all_gather(torch.ones(3), attempt) for _ in range(2)]
    with pytest.raises(FzeroError) as caught:
        transport.all_gather(torch.ones(3), attempt)
    assert all(pending.wait().equal(torch.ones(3 * mesh.size())) for pending in started)
    transport.settle()
    transport.all_gather(torch.ones(3), attempt).wait()
    same_host.SLOTS = board.SLOTS
    return str(caught.value)


def left(mesh: DeviceMesh) -> None:
    """The process ends right after the last gather, in which others read its memory."""
    transport = waiting(mesh)
    transport.all_gather(torch.ones(100), live(mesh).members.begin("gather")).wait()
    transport.settle()


def first_words(mesh: DeviceMesh) -> list[bool]:
    """Is there a board: between processes of one host, of several hosts, and where one may not read?"""
    group = mesh.get_group()
    found = [board.share_board(group, SECOND, False) is not None]
    place, processes._place = processes._place, lambda: (f"host {mesh.get_rank()}",)
    found.append(board.share_board(group, SECOND, False) is not None)
    processes._place = place
    if mesh.get_rank() == 1:
        board._is_readable = lambda other: False  # type: ignore[assignment]
    return [*found, board.share_board(group, SECOND, False) is not None]


CASES: dict[str, Callable[[DeviceMesh], Any]] = {
    **{f"scattered {name}": partial(scattered, make) for name, make in TRANSPORTS.items()},
    **{f"gathered {name}": partial(gathered, make) for name, make in TRANSPORTS.items()},
    **{f"reduced {name}": partial(reduced, make) for name, make in TRANSPORTS.items()},
    **{f"narrowly reduced {name}": partial(narrowly_reduced, make) for name, make in TRANSPORTS.items()},
    "reduced beside a gather": reduced_beside_a_gather,
    "too many": too_many,
    "first words": first_words,
}


@pytest.fixture(scope="module", params=[2, 3])
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    if not can_read_memory():
        pytest.skip("this kernel keeps processes from reading each other's memory")
    return run_cases(request.param, CASES)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_scatter_is_the_mean_in_rank_order(outcomes: dict[str, list[Outcome]], name: str) -> None:
    for right in values(outcomes[f"scattered {name}"]):
        assert right == dict.fromkeys(SENT, True)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_gather_is_what_blocks_were(outcomes: dict[str, list[Outcome]], name: str) -> None:
    for right in values(outcomes[f"gathered {name}"]):
        assert all(right) and len(right) == 36


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_reduction_is_that_of_all_ranks(outcomes: dict[str, list[Outcome]], name: str) -> None:
    for right in values(outcomes[f"reduced {name}"]):
        assert all(right) and len(right) == 18


def test_an_all_reduce_does_not_wait_for_gathers_on_the_backend(outcomes: dict[str, list[Outcome]]) -> None:
    assert all(values(outcomes["reduced beside a gather"]))


@pytest.mark.parametrize("name", TRANSPORTS)
def test_narrow_dtypes_are_rounded_once_and_alike_on_all_ranks(outcomes: dict[str, list[Outcome]], name: str) -> None:
    first, *others = values(outcomes[f"narrowly reduced {name}"])
    assert len(first) == 12
    for other in others:
        assert all(map(torch.equal, first, other))


def test_more_collectives_at_once_than_there_are_slots(outcomes: dict[str, list[Outcome]]) -> None:
    for message in values(outcomes["too many"]):
        assert message.startswith("gather: 2 collectives were started since gather, which goes on; wait for some")


def test_a_rank_may_end_as_soon_as_all_others_have_read() -> None:
    run(3, left, lost=[0, 1, 2])


def test_memory_is_read_only_where_every_rank_can(outcomes: dict[str, list[Outcome]]) -> None:
    assert values(outcomes["first words"]) == [[True, False, False]] * len(outcomes["first words"])


@pytest.mark.skipif(not can_read_memory(), reason="this kernel keeps processes from reading each other's memory")
def test_what_a_rank_did_before_it_failed_counts() -> None:
    table = board._Table()
    seen = board.Board(table, [board.Owner(processes.this_process(), ctypes.addressof(table), b"", False)], SECOND)
    find = seen._entry

    def end_after_the_first_look(rank: int, index: int) -> int:
        found, seen._entry = find(rank, index), find  # type: ignore[method-assign]
        seen.post_done(1)
        seen.fail()
        return found

    seen._entry = end_after_the_first_look  # type: ignore[method-assign]
    seen.wait_until_done(0, 1)
    with pytest.raises(RuntimeError, match="rank 0 of the group has given up"):
        seen.wait_until_done(0, 2)


@pytest.mark.skipif(not can_read_memory(), reason="this kernel keeps processes from reading each other's memory")
def test_memory_that_is_not_there() -> None:
    found = ctypes.create_string_buffer(5)
    with pytest.raises(RuntimeError, match=rf"5 bytes of process {os.getpid()} cannot be read: Bad address"):
        process_memory.read(os.getpid(), 0, ctypes.addressof(found), 5)
    with pytest.raises(RuntimeError, match="No such process"):
        process_memory.read(2**22 + 1, ctypes.addressof(found), ctypes.addressof(found), 5)


def test_a_worker_performs_in_order_and_hands_on_what_is_raised() -> None:
    worker, done = Worker("test"), list[int]()
    waits = [worker.start(partial(done.append, i)) for i in range(5)]
    failing = worker.start(lambda: [][0])
    last = worker.start(partial(done.append, 5))
    with pytest.raises(IndexError):
        failing()
    last()
    assert all(wait() is None for wait in waits) and done == [0, 1, 2, 3, 4, 5]
