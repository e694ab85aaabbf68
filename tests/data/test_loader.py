"""The loader: every example once, in an order that depends on seed and epoch alone, from a position for any ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_mesh import FakeMesh, loaders_of_fake_ranks, ranks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import fzero
from fzero import FzeroError, State, VirtualMesh, tree
from fzero.data import Loader, Position, loader
from fzero.data.parts import order

PAD = -1


@pytest.fixture(autouse=True, scope="module")
def fake_ranks() -> Iterator[None]:
    with loaders_of_fake_ranks():
        yield


class Squares(Dataset[dict[str, Any]]):
    """Examples `{"x": i, "y": [i * i]}`."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": i, "y": torch.tensor([i * i])}


class Stream(IterableDataset[dict[str, Any]]):
    """The same, one after the other; `set_epoch` turns them around by the epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        assert info is None or info.num_workers == 1
        return ({"x": (i + self.epoch) % self.length, "y": torch.tensor([i])} for i in range(self.length))


def numbers(batches: Iterable[Any]) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches]


def data(values: Iterable[Iterable[int]]) -> list[int]:
    return [x for row in values for x in row if x != PAD]


def together(loaders: Sequence[Loader], count: int | None = None) -> list[list[int]]:
    """The rows of all ranks for each batch, of at most `count` batches."""
    rows = [numbers(itertools.islice(iter(each), count)) for each in loaders]
    return [[x for part in parts for x in part] for parts in zip(*rows, strict=True)]


# parts, order


def test_ranks_take_the_parts_of_a_batch_in_order() -> None:
    (whole,) = [numbers(loader(Squares(24), 8, VirtualMesh(fsdp=4), seed=3))]
    assert together([loader(Squares(24), 8, mesh, seed=3) for mesh in ranks(fsdp=4)]) == whole
    assert sorted(data(whole)) == list(range(24)) != data(whole)


def test_ranks_along_model_axes_take_the_same_part() -> None:
    loaders = [loader(Squares(8), 4, mesh, data=("fsdp",)) for mesh in ranks(fsdp=2, tp=2)]
    assert [numbers(each) for each in loaders] == [[[0, 1], [4, 5]]] * 2 + [[[2, 3], [6, 7]]] * 2


def test_replicas_take_different_parts() -> None:
    loaders = [loader(Squares(4), 4, mesh) for mesh in ranks(replica=2, fsdp=2)]
    assert [numbers(each) for each in loaders] == [[[0]], [[1]], [[2]], [[3]]]


def test_the_order_follows_from_seed_and_epoch() -> None:
    def epochs(seed: int, **how: Any) -> list[list[int]]:
        each = loader(Squares(12), 4, VirtualMesh(fsdp=2), seed=seed, **how)
        return [data(numbers(each)) for _ in range(3)]

    first = epochs(0)
    assert len({tuple(order) for order in (*first, *epochs(1))}) == 6
    assert first == epochs(0) == epochs(0, num_workers=2) and [sorted(order) for order in first] == [[*range(12)]] * 3


def test_the_order_is_the_one_of_saved_positions() -> None:
    """A release of torch that changes `randperm` changes what saved positions mean."""
    assert order(0, 1, 8).tolist() == [7, 2, 4, 3, 1, 0, 6, 5]


def test_without_a_seed_the_dataset_has_its_own_order() -> None:
    assert numbers(loader(Squares(6), 3, VirtualMesh(fsdp=3))) == numbers(DataLoader(Squares(6), 3))


def test_the_generator_of_torch_stays() -> None:
    before = torch.get_rng_state()
    numbers(loader(Squares(8), 4, VirtualMesh(fsdp=2), seed=1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_torch(workers: int) -> None:
    ours = loader(Squares(8), 4, VirtualMesh(fsdp=2), num_workers=workers)
    for a, b in zip(ours, DataLoader(Squares(8), 4), strict=True):
        assert tree.paths(a) == tree.paths(b) and all(map(torch.equal, tree.leaves(a), tree.leaves(b)))
    assert len(ours) == 2


def test_workers_that_live_on_hear_of_the_next_epoch() -> None:
    each = loader(Squares(8), 4, VirtualMesh(fsdp=2), seed=0, num_workers=1, persistent_workers=True)
    alone = loader(Squares(8), 4, VirtualMesh(fsdp=2), seed=0)
    for _ in range(2):
        assert numbers(each) == numbers(alone)
    next(iter(each))
    each.resume(Position.of(0, 4, 8, 0, 0))
    alone.resume(Position.of(0, 4, 8, 0, 0))
    assert numbers(each) == numbers(alone)


# the end of an epoch


def test_the_last_batch_is_filled_with_padding() -> None:
    padding = {"x": PAD, "y": 0}
    (*_, last) = loader(Squares(9), 8, VirtualMesh(fsdp=4), padding=padding)
    assert last["x"].tolist() == [8] + [PAD] * 7 and last["y"].tolist() == [[64]] + [[0]] * 7
    parts = [[batch["x"].tolist() for batch in loader(Squares(9), 8, mesh, padding=padding)] for mesh in ranks(fsdp=4)]
    assert parts == [[[0, 1], [8, PAD]], [[2, 3], [PAD] * 2], [[4, 5], [PAD] * 2], [[6, 7], [PAD] * 2]]


def test_the_last_examples_are_dropped() -> None:
    each = loader(Squares(11), 4, VirtualMesh(fsdp=2), drop_last=True)
    assert numbers(each) == [[0, 1, 2, 3], [4, 5, 6, 7]] and len(each) == 2
    assert each.position[:2] == (1, 0)
    assert numbers(each) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_each_loop_is_the_rest_of_an_epoch() -> None:
    each = loader(Squares(12), 4, VirtualMesh(fsdp=2))
    seen = [batch["x"].tolist() for _, batch in zip(range(2), each)]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]] and each.position[:2] == (0, 8)
    assert numbers(each) == [[8, 9, 10, 11]] and each.position[:2] == (1, 0)
    assert len(numbers(each)) == 3


def test_two_loops_at_once_are_refused() -> None:
    each = loader(Squares(12), 4, VirtualMesh(fsdp=2))
    first, second = iter(each), iter(each)
    next(first)
    next(second)
    with pytest.raises(FzeroError, match="^loader: another iteration has begun"):
        next(first)


# positions


@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_a_run_goes_on_at_another_world_size(stop: int) -> None:
    before = [loader(Squares(22), 6, mesh, seed=5, padding={"x": PAD, "y": 0}) for mesh in ranks(fsdp=2)]
    seen = together(before, stop)
    after = [loader(Squares(22), 8, mesh, seed=5, padding=PAD) for mesh in ranks(replica=2, fsdp=2)]
    for each in after:
        each.resume(before[0].position)
    straight = data(numbers(loader(Squares(22), 22, VirtualMesh(fsdp=1), seed=5)))
    assert data(seen) + data(together(after)) == straight


def test_a_position_behind_an_epoch_is_the_next_one() -> None:
    each = loader(Squares(8), 4, VirtualMesh(fsdp=2), seed=0)
    numbers(each)
    other = loader(Squares(8), 4, VirtualMesh(fsdp=2), seed=0)
    other.resume(Position.of(0, 8, 8, 0, 0))
    assert other.position == each.position and numbers(other) == numbers(each)


def test_a_position_with_too_few_examples_to_go_is_the_next_epoch() -> None:
    each = loader(Squares(10), 4, VirtualMesh(fsdp=2), drop_last=True)
    each.resume(Position.of(0, 7, 10, -1, 0))
    assert numbers(each) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_position_is_saved_with_the_state(tmp_path: Path) -> None:
    mesh = VirtualMesh(fsdp=2)
    state = fzero.partition(State({"w": torch.ones(4)}, step=torch.tensor(0)), mesh)
    step = fzero.simulate(lambda state, x: state._replace(step=state.step + 1), mesh)
    each = loader(Squares(12), 4, mesh, seed=2, fingerprint="squares")
    rest = [batch["x"].tolist() for batch in each][2:]
    each.resume(each.position._replace(epoch=0, index=0))
    for _, batch in zip(range(2), each):
        state = step(state, batch["x"])
    fzero.save_safetensors(state._replace(data=each.position), tmp_path / "state.safetensors")

    like = State({"w": torch.empty(4)}, step=torch.tensor(0), data=each.position)
    loaded = fzero.load_safetensors(tmp_path / "state.safetensors", like, VirtualMesh(fsdp=4))
    other = loader(Squares(12), 4, VirtualMesh(fsdp=4), seed=2, fingerprint="squares")
    other.resume(loaded.data)
    assert numbers(other) == rest and int(loaded.step.full_tensor()) == 2


def test_a_position_travels_through_a_step() -> None:
    mesh = VirtualMesh(fsdp=2)
    each = loader(Squares(8), 4, mesh)
    next(iter(each))
    state = fzero.partition(State({"w": torch.ones(4)}, step=torch.tensor(0), data=each.position), mesh)
    state = fzero.simulate(lambda state: state._replace(step=state.step + 1), mesh)(state)
    other = loader(Squares(8), 4, mesh)
    other.resume(state.data)
    assert other.position == each.position


# streams


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_cut_as_a_dataset_is(workers: int) -> None:
    how: dict[str, Any] = {"padding": {"x": PAD, "y": 0}, "num_workers": workers}
    loaders = [loader(Stream(11), 4, mesh, **how) for mesh in ranks(fsdp=2)]
    assert together(loaders) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, PAD]]
    assert loaders[0].position == (1, 0, -1, -1, 0)
    assert together(loaders, 2) == [[1, 2, 3, 4], [5, 6, 7, 8]]  # of the next epoch
    assert loaders[0].position[:2] == (1, 8)
    other = loader(Stream(11), 2, VirtualMesh(fsdp=1), **how)
    other.resume(loaders[0].position)
    assert numbers(other) == [[9, 10], [0, PAD]]


def test_the_last_examples_of_a_stream_are_dropped() -> None:
    each = loader(Stream(11), 4, VirtualMesh(fsdp=2), drop_last=True)
    assert numbers(each) == [[0, 1, 2, 3], [4, 5, 6, 7]] and each.position[:2] == (1, 0)
    each.resume(Position.of(0, 9, -1, -1, 0))
    assert numbers(each) == [] and each.position[:2] == (1, 0)
    with pytest.raises(TypeError, match="how many batches"):
        len(each)


# what is refused

MESH = VirtualMesh(fsdp=2)


def at(each: Loader, position: Any) -> Loader:
    each.resume(position)
    return each


def resumed(position: Any, **how: Any) -> None:
    at(loader(Squares(8), 4, MESH, **how), position)


MISTAKES: dict[str, tuple[Any, str]] = {
    "a batch that does not divide": (lambda: loader(Squares(8), 3, MESH), "batch: is 3, which does not divide by 2"),
    "no batch": (lambda: loader(Squares(8), 0, MESH), "batch: is 0"),
    "a negative seed": (lambda: loader(Squares(8), 4, MESH, seed=-1), "seed: is -1; give a whole number"),
    "half a seed": (lambda: loader(Squares(8), 4, MESH, seed=0.5), "seed: is 0.5"),  # type: ignore[arg-type]
    "an axis without a name": (lambda: loader(Squares(8), 4, object()), "mesh: object has no named axes"),
    "an axis that is not there": (lambda: loader(Squares(8), 4, MESH, data=("dp",)), "mesh axis 'dp': is in data"),
    "an uneven end": (lambda: loader(Squares(9), 4, MESH), "dataset: has 9 examples from 0 on: the last"),
    "no example": (lambda: loader(Squares(0), 4, MESH), "dataset: has 0 examples"),
    "too few examples": (lambda: loader(Squares(3), 4, MESH, drop_last=True), "dataset: has 3 examples, and a batch 4"),
    "torch's option": (lambda: loader(Squares(8), 4, MESH, shuffle=True), "shuffle: is an option that the loader sets"),
    "no length": (lambda: loader(type("Odd", (), {"__getitem__": 1})(), 4, MESH), "dataset: is a Odd without a length"),
    "no dataset": (lambda: loader(3, 4, MESH), "dataset: is a int"),
    "an iterator": (lambda: loader(iter(range(8)), 4, MESH), "dataset: is an iterator, which is read once"),
    "a stream with a seed": (lambda: loader(Stream(8), 4, MESH, seed=0), "seed: is 0, and an iterable dataset has"),
    "a stream with workers": (
        lambda: loader(Stream(8), 4, MESH, drop_last=True, num_workers=2),
        "num_workers: is 2, and several workers would read",
    ),
    "a stream with workers that live on": (
        lambda: loader(Stream(8), 4, MESH, drop_last=True, num_workers=1, persistent_workers=True),
        "persistent_workers: is True",
    ),
    "a stream without an end": (lambda: loader(Stream(8), 4, MESH), "dataset: is iterable, and its last batch may be"),
    "a stream that is shorter": (
        lambda: numbers(at(loader(Stream(8), 4, MESH, drop_last=True), Position.of(0, 9, -1, -1, 0))),
        "position.index: is 9, and the dataset ends after 8 examples",
    ),
    "a stream that is shorter, in a worker": (
        lambda: numbers(
            at(loader(Stream(8), 4, MESH, drop_last=True, num_workers=1), Position.of(0, 9, -1, -1, 0))
        ),
        "position.index: is 9, and the dataset ends after 8 examples",
    ),
    "no padding for a leaf": (
        lambda: list(loader(Squares(9), 4, MESH, padding={"x": 0})),
        r"batch y: has no padding among \['x'\]; give a number for it, as in padding=\{'y': 0\}",
    ),
    "padding that is no number": (lambda: loader(Squares(9), 4, MESH, padding={"x": "0"}), "padding x: is a str"),
    "padding that does not fit": (
        lambda: list(loader(Squares(9), 4, MESH, padding={"x": 0.5, "y": 0})),
        "batch x: is torch.int64, which cannot hold its padding 0.5",
    ),
    "text": (lambda: list(loader(["a", "b", "c"], 2, MESH, padding=0)), "batch 0: is a str, and only tensors"),
    "another dataset": (
        lambda: resumed(loader(Squares(12), 4, MESH).position),
        "position.length: is 12, this loader's is 8; make the loader with the dataset",
    ),
    "another seed": (lambda: resumed(Position.of(0, 0, 8, 1, 0), seed=2), "position.seed: is 1, this loader's is 2"),
    "other data": (
        lambda: resumed(loader(Squares(8), 4, MESH, fingerprint="a").position, fingerprint="b"),
        r"position.fingerprint: is \d+, this loader's is \d+",
    ),
    "an example that is not there": (lambda: resumed(Position.of(0, 9, 8, -1, 0)), "position.index: is 9, and an"),
    "an epoch that is not there": (lambda: resumed(Position.of(-1, 0, 8, -1, 0)), "position.epoch: is -1"),
    "too few numbers": (lambda: Position.of(0, 9), "Position.of: has 2 numbers; give epoch, index, length, seed"),
    "no position": (lambda: resumed(None), "position: is a NoneType; give loader.position"),
    "half an example": (lambda: resumed((0, 0.5, 8, -1, 0)), "position.index: is 0.5, not a whole number"),
    "an uneven rest": (lambda: resumed(Position.of(0, 2, 8, -1, 0)), "dataset: has 6 examples from 2 on"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    make, said = MISTAKES[name]
    with pytest.raises(FzeroError, match=f"^{said}"):
        make()


def test_a_rank_outside_of_the_mesh_is_refused() -> None:
    class Outside(FakeMesh):
        def get_coordinate(self) -> Any:
            return None

    with pytest.raises(FzeroError, match="^mesh: does not have this rank"):
        loader(Squares(8), 4, Outside([0], fsdp=2))


def test_examples_may_be_tensors_alone() -> None:
    rows: list[Tensor] = [torch.full((2,), float(i)) for i in range(3)]
    (*_, last) = loader(rows, 2, VirtualMesh(fsdp=2), padding=-1)
    assert last.tolist() == [[2.0, 2.0], [-1.0, -1.0]]
