"""Laws of positions: however often a run stops, on whatever ranks it goes on, it sees every example once, in one
order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from fake_mesh import loaders_of_fake_ranks, ranks
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from fzero.data import Loader, loader, pad
from property_tests.laws import slow

PAD = -1


class Leg(NamedTuple):
    """A run of some batches on one mesh: `replicas * ranks` ranks, each with `rows` rows of a batch."""

    replicas: int
    ranks: int
    rows: int
    batches: int

    @property
    def batch(self) -> int:
        return self.replicas * self.ranks * self.rows


@pytest.fixture(autouse=True, scope="module")
def fake_ranks() -> Iterator[None]:
    with loaders_of_fake_ranks():
        yield


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def loaders(dataset: Any, leg: Leg, **how: Any) -> list[Loader]:
    meshes = ranks(replica=leg.replicas, fsdp=leg.ranks)
    return [loader(dataset, leg.batch, mesh, padding=PAD, **how) for mesh in meshes]


def take(each: Loader, batches: int) -> list[list[int]]:
    """So many batches from a loader's position on, through ends of epochs."""
    taken: list[list[int]] = []
    while len(taken) < batches:
        taken += [batch.tolist() for batch in itertools.islice(each, batches - len(taken))]
    return taken


def travel(dataset: Any, legs: list[Leg], **how: Any) -> tuple[list[int], int]:
    """The examples that the runs of `legs` see, each from where the one before stopped, and the epochs they have
    ended."""
    seen, position = list[int](), None
    for leg in legs:
        each_rank = loaders(dataset, leg, **how)
        for each in each_rank if position is not None else ():
            each.resume(position)
        rows = [take(each, leg.batches) for each in each_rank]
        seen += [x for parts in zip(*rows, strict=True) for part in parts for x in part if x != PAD]
        positions = {each.position.to_numbers() for each in each_rank}
        assert len(positions) == 1
        position = each_rank[0].position
    assert position is not None
    return seen, int(position.epoch)


def legs() -> st.SearchStrategy[list[Leg]]:
    sizes = st.integers(1, 4)
    return st.lists(st.builds(Leg, sizes, sizes, st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4)


@given(st.integers(1, 60), st.integers(0, 2**63 - 1), legs())
def test_every_example_is_seen_once_an_epoch_in_one_order(length: int, seed: int, legs: list[Leg]) -> None:
    seen, epochs = travel(list(range(length)), legs, seed=seed)
    straight, _ = travel(list(range(length)), [Leg(1, 1, length, epochs + 1)], seed=seed)
    assert seen == straight[: len(seen)]
    assert all(sorted(straight[i : i + length]) == list(range(length)) for i in range(0, len(straight), length))


@given(st.integers(1, 60), legs())
def test_a_stream_is_seen_as_a_dataset(length: int, legs: list[Leg]) -> None:
    assert travel(Stream(length), legs) == travel(list(range(length)), legs)


@slow
@given(st.integers(1, 20), st.integers(0, 9), legs(), st.integers(1, 2))
def test_workers_change_nothing(length: int, seed: int, legs: list[Leg], workers: int) -> None:
    few = legs[:1]
    few[0] = few[0]._replace(replicas=1, ranks=1, batches=min(few[0].batches, 3))
    dataset = list(range(length))
    assert travel(dataset, few, seed=seed, num_workers=workers) == travel(dataset, few, seed=seed)


@given(st.integers(1, 60), st.integers(0, 9), legs())
def test_ends_that_are_dropped_are_seen_by_nobody_and_nothing_twice(length: int, seed: int, legs: list[Leg]) -> None:
    for leg in [leg for leg in legs if leg.batch <= length][:1]:
        two_epochs = leg._replace(batches=2 * (length // leg.batch))
        seen, epochs = travel(list(range(length)), [two_epochs], seed=seed, drop_last=True)
        half = len(seen) // 2
        assert epochs == 2 and half == length // leg.batch * leg.batch
        assert len({*seen[:half]}) == len({*seen[half:]}) == half


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 4), st.integers(0, 3), st.integers(-128, 127)
)
def test_padding_keeps_what_is_there(shape: list[int], more: int, fewer: int, number: int) -> None:
    x = torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    count = max(shape[0] - fewer, 0)
    length = shape[1] + more if len(shape) > 1 else None
    got = pad(x, number, count=count, length=length)
    kept = got[:count] if length is None else got[:count, : shape[1]]
    assert torch.equal(kept, x[:count])
    assert got.shape == torch.Size([shape[0], *([length] if length is not None else []), *shape[2:]])
    assert int((got != number).sum()) == int((x[:count] != number).sum())
