"""All-to-all: each rank gives each rank one block, on every transport and across virtual ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from processes import Outcome, can_read_memory, run_cases, values
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fzero.base.errors import FzeroError
from fzero.ranks.exchanges import AllGather, AllReduce, AllToAll, begin
from fzero.ranks.live import live
from fzero.ranks.transports import Alone, Native, Pending, PointToPoint, SameHost, Splits, Transport

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.bool]
SIZES = [0, 1, 3, 1000, 300_000]  # elements of a block: none, few, and more than one message


def blocks_of(rank: int, world: int, size: int, dtype: torch.dtype) -> Tensor:
    """[N * S] what a rank gives, other numbers on each rank: nan and infinity among those of a floating dtype."""
    generator = torch.Generator().manual_seed(1000 * rank + size)
    given = (100 * torch.randn(world * size, generator=generator)).to(dtype)
    if dtype.is_floating_point and size:
        given[0], given[-1] = math.nan, math.inf
    return given


def expect(rank: int, world: int, size: int, dtype: torch.dtype) -> Tensor:
    """[N * S] what a rank gets: of each rank, in their order, the block at its own place."""
    given = [blocks_of(other, world, size, dtype) for other in range(world)]
    return torch.cat([each[rank * size : (rank + 1) * size] for each in given])


def are_same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def point_to_point(mesh: DeviceMesh) -> Transport:
    return PointToPoint(mesh.get_group(), timedelta(seconds=20))


def native(mesh: DeviceMesh) -> Transport:
    return Native(mesh.get_group(), live(mesh).members.new_twin(mesh.get_group()))


def same_host(mesh: DeviceMesh) -> Transport:
    """The transport that CPU ranks have: messages, where the kernel keeps them from reading each other's memory."""
    transport = live(mesh).transports["fsdp"]
    assert isinstance(transport, SameHost if can_read_memory() else PointToPoint)
    return transport


TRANSPORTS: dict[str, Callable[[DeviceMesh], Transport]] = {
    each.__name__: each for each in (point_to_point, native, same_host)
}


def exchanged(make: Callable[[DeviceMesh], Transport], mesh: DeviceMesh) -> dict[str, bool]:
    """Of each size and dtype: is what arrives right, and what was given unchanged and not aliased?"""
    transport, members, rank, world, right = make(mesh), live(mesh).members, mesh.get_rank(), mesh.size(), {}
    for dtype in DTYPES:
        for size in SIZES:
            given = blocks_of(rank, world, size, dtype)
            before = given.clone()
            equal = Splits.equal(len(given), world)
            found = transport.all_to_all(given, members.begin("all_to_all"), equal).wait()
            right[f"{dtype} {size}"] = (
                are_same_bits(found, expect(rank, world, size, dtype))
                and are_same_bits(given, before)
                and (not size or found.data_ptr() != given.data_ptr())
            )
    return right


def started_together(make: Callable[[DeviceMesh], Transport], mesh: DeviceMesh) -> list[bool]:
    """Several are started at once, with an all-gather among them, and waited for in order."""
    transport, members, rank, world = make(mesh), live(mesh).members, mesh.get_rank(), mesh.size()

    def start(size: int) -> Pending:
        blocks, equal = blocks_of(rank, world, size, torch.float32), Splits.equal(world * size, world)
        return transport.all_to_all(blocks, members.begin("all_to_all"), equal)

    pending = [start(size) for size in (5, 7000)]
    gather = transport.all_gather(torch.full((3,), float(rank)), members.begin("all_gather"))
    pending.append(start(9))
    right = [
        are_same_bits(each.wait(), expect(rank, world, size, torch.float32))
        for each, size in zip(pending[:2], (5, 7000))
    ]
    right.append(gather.wait().tolist() == [float(other) for other in range(world) for _ in range(3)])
    right.append(are_same_bits(pending[2].wait(), expect(rank, world, 9, torch.float32)))
    transport.settle()
    return right


def not_contiguous(make: Callable[[DeviceMesh], Transport], mesh: DeviceMesh) -> bool:
    """A view with gaps is sent as its elements lie in order."""
    transport, members, rank, world = make(mesh), live(mesh).members, mesh.get_rank(), mesh.size()
    given = torch.stack([blocks_of(rank, world, 4, torch.float32), torch.zeros(4 * world)], 1)[:, 0]
    found = transport.all_to_all(given, members.begin("all_to_all"), Splits.equal(len(given), world)).wait()
    return are_same_bits(found, expect(rank, world, 4, torch.float32))


def size_from(rank: int, to: int, scale: int) -> int:
    """The elements that a rank gives to another, where blocks differ: none from some."""
    return scale * ((3 * rank + 2 * to) % 4)


def given_raggedly(rank: int, world: int, scale: int) -> AllToAll:
    """What a rank gives: blocks of several sizes, whose elements say who gives them to whom."""
    given = [size_from(rank, to, scale) for to in range(world)]
    taken = [size_from(other, rank, scale) for other in range(world)]
    blocks = [torch.arange(size) + 1000.0 * (10 * rank + to) for to, size in enumerate(given)]
    return AllToAll("all_to_all", "fsdp", torch.cat(blocks), (given, taken))


def expect_raggedly(rank: int, world: int, scale: int) -> Tensor:
    sizes = [size_from(other, rank, scale) for other in range(world)]
    return torch.cat([torch.arange(size) + 1000.0 * (10 * other + rank) for other, size in enumerate(sizes)])


def exchanged_raggedly(make: Callable[[DeviceMesh], Transport], mesh: DeviceMesh) -> list[bool]:
    transport, members, rank, world = make(mesh), live(mesh).members, mesh.get_rank(), mesh.size()
    found = [
        given_raggedly(rank, world, scale).start(transport, members.begin("all_to_all")).wait() for scale in (0, 1, 500)
    ]
    return [are_same_bits(each, expect_raggedly(rank, world, scale)) for each, scale in zip(found, (0, 1, 500))]


def asked_of_a_live_rank(mesh: DeviceMesh) -> bool:
    """The exchange that operations yield goes to the transport of its axis."""
    on, rank, world = live(mesh), mesh.get_rank(), mesh.size()
    exchange = AllToAll("all_to_all of w", "fsdp", blocks_of(rank, world, 6, torch.float32))
    return are_same_bits(on.begin(exchange).wait(), expect(rank, world, 6, torch.float32))


CASES: dict[str, Callable[[DeviceMesh], Any]] = {
    **{f"exchanged {name}": partial(exchanged, make) for name, make in TRANSPORTS.items()},
    **{f"together {name}": partial(started_together, make) for name, make in TRANSPORTS.items()},
    **{f"strided {name}": partial(not_contiguous, make) for name, make in TRANSPORTS.items()},
    **{f"ragged {name}": partial(exchanged_raggedly, make) for name, make in TRANSPORTS.items()},
    "asked": asked_of_a_live_rank,
}


@pytest.fixture(scope="module", params=[2, 3])
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    return run_cases(request.param, CASES)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_each_rank_gets_the_block_that_each_rank_gives_it(outcomes: dict[str, list[Outcome]], name: str) -> None:
    for right in values(outcomes[f"exchanged {name}"]):
        assert right == dict.fromkeys(right, True) and len(right) == len(DTYPES) * len(SIZES)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_blocks_may_differ_in_size(outcomes: dict[str, list[Outcome]], name: str) -> None:
    assert values(outcomes[f"ragged {name}"]) == [[True] * 3] * len(outcomes[f"ragged {name}"])


@pytest.mark.parametrize("name", TRANSPORTS)
def test_several_may_be_under_way(outcomes: dict[str, list[Outcome]], name: str) -> None:
    assert all(all(right) and len(right) == 4 for right in values(outcomes[f"together {name}"]))


@pytest.mark.parametrize("name", TRANSPORTS)
def test_blocks_need_not_be_contiguous(outcomes: dict[str, list[Outcome]], name: str) -> None:
    assert all(values(outcomes[f"strided {name}"]))


def test_an_exchange_goes_to_the_transport_of_its_axis(outcomes: dict[str, list[Outcome]]) -> None:
    assert all(values(outcomes["asked"]))


# one rank, and virtual ones


class Nobody:
    """An attempt of a rank that is alone: nothing can fail."""

    what = "all_to_all"

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_one_rank_alone_gets_what_it_gives() -> None:
    """In new memory, but of an all-gather, whose block nothing overwrites."""
    given = blocks_of(0, 1, 7, torch.float32)
    asked = [AllToAll("x", "fsdp", given), AllReduce("x", "fsdp", given, "avg"), AllGather("x", "fsdp", given)]
    found = [begin(exchange, Alone(), Nobody()).wait() for exchange in asked]  # type: ignore[arg-type]
    assert all(are_same_bits(x, given) for x in found)
    assert [x.data_ptr() == given.data_ptr() for x in found] == [False, False, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_virtual_ranks_get_the_same_blocks(world: int, dtype: torch.dtype) -> None:
    for size in (0, 1, 3, 1000):
        row = [AllToAll("all_to_all", "fsdp", blocks_of(rank, world, size, dtype)) for rank in range(world)]
        found = row[0].join(row)
        assert all(are_same_bits(found[rank], expect(rank, world, size, dtype)) for rank in range(world))
        assert [list(each.sent) for each in row] == [[each.blocks] for each in row]


def test_twice_is_the_identity() -> None:
    given = [blocks_of(rank, 4, 5, torch.float32) for rank in range(4)]
    row = [AllToAll("all_to_all", "fsdp", blocks) for blocks in given]
    back = [AllToAll("all_to_all", "fsdp", blocks) for blocks in row[0].join(row)]
    assert all(are_same_bits(a, b) for a, b in zip(back[0].join(back), given))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_virtual_ranks_get_blocks_of_several_sizes(world: int) -> None:
    for scale in (0, 1, 100):
        row = [given_raggedly(rank, world, scale) for rank in range(world)]
        found = row[0].join(row)
        assert all(are_same_bits(found[rank], expect_raggedly(rank, world, scale)) for rank in range(world))


@pytest.mark.parametrize("splits", [([1, 2], [1, 1]), ([1, 1, 1], [1, 1]), ([2, 2], [1, 1, 1])])
def test_sizes_that_do_not_fit_are_refused(splits: tuple[list[int], list[int]]) -> None:
    row = [AllToAll("all_to_all of w", "fsdp", torch.zeros(4), splits)] * 2
    with pytest.raises(FzeroError, match=r"all_to_all of w: exchanges 4 elements over 2 ranks: gives \["):
        row[0].join(row)
