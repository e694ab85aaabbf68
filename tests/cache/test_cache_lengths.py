"""Programs with open sizes in a folder: a second process has all lengths of the first, and traces none."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_general_loops
import torch
from processes import run
from test_cache_ranks import Said
from test_general import MESH, SGD, Model, lm_step, tokens
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import tree
from fzero.budget.fit import Budget
from fzero.cache.store import ProgramStore
from fzero.passes import Plan, defaults
from fzero.pipeline import Pipeline
from fzero.program.open import find_difference
from fzero.program.program import Program
from fzero.ranks.virtual import virtual


class Counting(Pipeline[Program]):
    """Counts its traces, those with open sizes too."""

    traces = 0

    def _trace(self, *given: Any) -> tuple[Program, Program]:
        self.traces += 1
        return super()._trace(*given)


class Process:
    """The programs of a step in one process with a folder, as one of two virtual ranks has them."""

    def __init__(self, make: Callable[[], tuple[Any, Any]], folder: Path | None, passes: Any = None) -> None:
        torch.manual_seed(0)
        params, step = make()
        self.params = fzero.partition(params, MESH)
        self.state, self.step = SGD.init(self.params), fzero.simulate(step, MESH, donate=False)
        how = defaults(stage=3) if passes is None else passes
        self.pipeline = Counting(step, virtual(MESH), how, lambda on, program: program, cache=folder)

    def prepare(self, *shape: int) -> Program:
        leaves, treedef = tree.flatten((self.params, self.state, tokens(shape)))
        return self.pipeline.prepare(self.step._select_rank(0, treedef, leaves), treedef)

    @property
    def traces(self) -> int:
        return self.pipeline.traces


def make() -> tuple[Any, Any]:
    return lm_step(Model())


def make_windowed() -> tuple[Any, Any]:
    return lm_step(Model(window=20))


def make_loop(name: str) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        params, gradient = test_general_loops.MAKERS[name]()

        def step(params: Any, state: Any, ids: torch.Tensor) -> Any:
            loss, grads = gradient(params, ids)
            updates, state = SGD.update(grads, state, params)
            return fzero.optim.apply_updates(params, updates), state, loss

        return params, step

    return make


BUDGET = Budget(1 << 30, Plan())
STEPS: dict[str, tuple[Callable[[], tuple[Any, Any]], Any]] = {
    "plain": (make, None),
    "budget": (make, BUDGET),
    **{name: (make_loop(name), None) for name in test_general_loops.MAKERS},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_second_process_traces_no_length(name: str, tmp_path: Path) -> None:
    make, passes = STEPS[name]
    cold, shapes = Process(make, tmp_path, passes), [(8, 9), (8, 14), (8, 11), (8, 25)]
    expected = {shape: cold.prepare(*shape) for shape in shapes}
    assert cold.traces == 2
    warm = Process(make, tmp_path, passes)
    for shape in reversed(shapes):
        found = warm.prepare(*shape)
        assert found is not expected[shape] and find_difference(found, expected[shape]) is None, shape
        assert found.memory() == expected[shape].memory() and str(found) == str(expected[shape]), shape
    assert warm.traces == 0


def test_sizes_that_no_schedule_of_the_folder_serves_are_traced_and_kept(tmp_path: Path) -> None:
    def count_traces(*lengths: int) -> list[int]:
        process, counts = Process(make, tmp_path), list[int]()
        for length in lengths:
            process.prepare(8, length)
            counts.append(process.traces)
        return counts

    assert count_traces(9, 14) == [1, 2]
    assert count_traces(14, 1200, 1300) == [0, 1, 2]  # by itself; with open sizes, which has a schedule for it
    assert count_traces(1250, 11) == [0, 0]


def test_a_broken_condition_is_a_trace(tmp_path: Path) -> None:
    cold = Process(make_windowed, tmp_path)
    expected = [cold.prepare(8, length) for length in (9, 14, 31)]
    assert cold.traces == 3
    warm = Process(make_windowed, tmp_path)
    found = [warm.prepare(8, length) for length in (14, 31, 9)]
    assert warm.traces == 0
    for a, b in zip(found, (expected[1], expected[2], expected[0])):
        assert find_difference(a, b) is None
    warm.prepare(8, 40)  # behind the window, where one length was traced
    assert warm.traces == 1


def rewrite(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the data of each file of lengths, with its hash."""
    store = ProgramStore(folder)
    for file in folder.iterdir():
        data = store.read(file.stem)
        if "general" in data:
            change(data["general"])
            store.write(file.stem, data)


SPOILED: dict[str, Callable[[Any], None]] = {
    "a formula that calls": lambda data: data["formulas"].append("__import__('os').getpid()"),
    "a formula of other names": lambda data: data["formulas"].append("math"),
    "a condition that calls": lambda data: data["conditions"].append(["().__class__", ""]),
    "a name that is none": lambda data: data["names"].append("x=print(1)"),
    "another node": lambda data: data["marks"]["values"][0].__setitem__(0, 10**6),
    "no marks": lambda data: data.pop("marks"),
    "another dimension": lambda data: data["places"][0][0].__setitem__(1, 17),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Program]]:
    """A folder, and the programs of three lengths that are in it."""
    folder = tmp_path_factory.mktemp("written")
    cold = Process(make, folder)
    return folder, [cold.prepare(8, length) for length in (9, 14, 11)]


@pytest.mark.parametrize("what", SPOILED)
def test_a_file_of_lengths_that_is_none_is_as_no_file(
    what: str, written: tuple[Path, list[Program]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, expected = written
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, SPOILED[what])
    warm = Process(make, tmp_path)
    for length, program in zip((9, 14, 11), expected):
        assert find_difference(warm.prepare(8, length), program) is None
    assert warm.traces == 1 and "is traced: " in caplog.text


def train(
    mesh: DeviceMesh, folder: Path | None, lengths: tuple[int, ...], compile: bool = False
) -> tuple[list[torch.Tensor], int]:
    """What a step a length gives on this rank, and how many programs came from its own folder."""
    said, log = Said(), logging.getLogger("fzero")
    log.addHandler(said)
    log.setLevel(logging.INFO)
    torch.manual_seed(0)
    params, step = make()
    params = fzero.partition(params, mesh)
    state = SGD.init(params)
    sharded = fzero.shard(step, mesh, compile=compile, cache=folder and folder / str(mesh.get_rank()))
    losses = []
    for length in lengths:
        params, state, loss = sharded(params, state, tokens((8, length)).chunk(mesh.size())[mesh.get_rank()])
        losses.append(loss)
    made = [leaf.local.clone() for leaf in tree.leaves(params)] + losses
    return made, sum("has its program from" in text for text in said.texts)


def test_ranks_use_a_file_of_lengths_that_all_of_them_have(tmp_path: Path) -> None:
    lengths = (11, 9, 14, 25)
    plain = run(2, train, None, lengths)
    run(2, train, tmp_path, (9, 14))
    warm = run(2, train, tmp_path, lengths)
    assert [count for _, count in warm] == [1, 1]  # that of all lengths
    for file in (tmp_path / "1").iterdir():
        file.unlink()
    mixed = run(2, train, tmp_path, lengths)
    for runs in zip(plain, warm, mixed):
        for others in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0][0], others[0], strict=True))


def test_a_compiled_step_traces_its_lengths(tmp_path: Path) -> None:
    """Inductor compiles open sizes, of which a file of lengths has the formulas alone."""
    run(1, train, tmp_path, (9, 14))
    ((plain, _),) = run(1, train, None, (9, 14, 11))
    ((compiled, count),) = run(1, train, tmp_path, (9, 14, 11), True)
    assert count == 1  # length 9, which has a file of its own
    for a, b in zip(plain, compiled):
        torch.testing.assert_close(a, b)
