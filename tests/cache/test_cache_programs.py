"""Programs in a folder: what a second process finds is the program that it would trace."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from programs import EVERY_STEP, STEPS, Case, assert_same

from fzero import tree
from fzero.base.mesh import VirtualMesh
from fzero.budget.fit import Budget
from fzero.passes import Plan, defaults, insert
from fzero.pipeline import Pipeline
from fzero.program.open import find_difference
from fzero.program.program import Program
from fzero.ranks.virtual import virtual
from fzero.variants.int8_scatter import int8_scatter
from fzero.variants.power_sgd import power_sgd


class NoFile(Exception):
    """A program is about to be traced, because the folder has none."""


class Counting(Pipeline[Program]):
    """Counts its traces. Nothing is put in the place of fzero's functions, which a key would know."""

    traces = 0
    may_trace = True

    def program(self, args: tuple[Any, ...]) -> Program:
        if not self.may_trace:
            raise NoFile
        self.traces += 1
        return super().program(args)


class Process:
    """The programs of one process with a folder, for the arguments of one rank of virtual ones."""

    def __init__(self, case: Case, folder: Path, passes: Any = None) -> None:
        how = defaults(stage=3) if passes is None else passes
        self.pipeline = Counting(case.step, virtual(case.mesh), how, lambda on, program: program, cache=folder)
        leaves, treedef = tree.flatten(case.args)
        self.given = case.simulation._select_rank(0, treedef, leaves), treedef

    def prepare(self) -> Program:
        return self.pipeline.prepare(*self.given)

    def has_file(self) -> bool:
        """Whether the folder has the program; where it has none, nothing is traced."""
        self.pipeline.may_trace = False
        try:
            self.prepare()
        except NoFile:
            return False
        finally:
            self.pipeline.may_trace = True
        return True

    @property
    def traces(self) -> int:
        return self.pipeline.traces


def assert_equal(restored: Program, traced: Program) -> None:
    """A program from a file is the one that was traced, in all that is known of it."""
    assert restored is not traced
    assert find_difference(restored, traced) is None
    assert restored.lines() == traced.lines()
    assert restored.constant_lines() == traced.constant_lines()
    assert str(restored) == str(traced)
    assert restored.memory() == traced.memory()
    assert restored.timeline() == traced.timeline()
    assert [x.meta.get("stack_trace") for x in restored.graph.nodes] == [
        x.meta.get("stack_trace") for x in traced.graph.nodes
    ]
    restored.graph.lint()


@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
@pytest.mark.parametrize("how", ["defaults", "nothing", "budget"])
def test_a_program_from_a_file_is_the_one_that_was_traced(name: str, world: int, how: str, tmp_path: Path) -> None:
    case = STEPS[name](VirtualMesh(fsdp=world))
    passes = {
        "defaults": Plan(),
        "nothing": (),
        "budget": Budget(1 << 30, Plan()),
    }
    traced = Process(case, tmp_path, passes[how]).prepare()
    process = Process(case, tmp_path, passes[how])
    restored = process.prepare()
    assert process.traces == 0
    assert_equal(restored, traced)
    assert_same(case.run(restored), case.run(traced))


@pytest.mark.parametrize(
    ("rewrite", "before"), [(int8_scatter, "prefetch"), (functools.partial(power_sgd, rank=1), "bucket")]
)
def test_state_of_passes_is_read_as_it_was_written(rewrite: Any, before: str, tmp_path: Path) -> None:
    """State of which each rank has its own, and state that a function draws."""
    case, passes = STEPS["odd"](VirtualMesh(fsdp=2)), insert(defaults(stage=3), rewrite, before=before)
    traced = Process(case, tmp_path, passes).prepare()
    process = Process(case, tmp_path, passes)
    restored = process.prepare()
    assert process.traces == 0
    assert_equal(restored, traced)
    assert restored.pass_state == traced.pass_state and restored.results == traced.results


def test_kernels_that_inductor_makes_while_a_process_runs_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 has these among the modules, by names of its own, and their files are younger than the process."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    for name in ("torch._inductor.runtime.compile_tasks.c4b3", "c5xj.kernel"):
        kernel = ModuleType(name)
        kernel.__file__ = str(folder / f"{name}.py")
        (folder / f"{name}.py").write_text("")
        monkeypatch.setitem(sys.modules, name, kernel)
    Process(STEPS["odd"](VirtualMesh(fsdp=2)), tmp_path / "programs").prepare()
    made = ModuleType("torch._inductor.made")  # with a method that its module compiles, as of torch 2.15
    made.Handler = type("Handler", (), {"__module__": made.__name__})  # type: ignore[attr-defined]
    exec("def add(self, a, b): ...", held := dict[str, Any]())
    made.Handler.add = held["add"]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    process = Process(STEPS["odd"](VirtualMesh(fsdp=2)), tmp_path / "programs")
    process.prepare()
    assert process.traces == 0


def add_drawn(program: Program) -> Program:
    return program.copy().add_state("drawn", (4,), torch.float32, initial=lambda shape, draw: torch.ones(shape))[0]


def test_state_that_a_lambda_draws_has_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fzero")
    Process(STEPS["odd"](VirtualMesh(fsdp=2)), tmp_path, (add_drawn,)).prepare()
    assert "has state whose initial is <function add_drawn.<locals>.<lambda>" in caplog.text
    assert not list(tmp_path.rglob("*.*"))
