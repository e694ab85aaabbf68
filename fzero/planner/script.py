"""Script: the step of a user's file, traced on a virtual mesh."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.planner.summary import Traced
from fzero.program.rates import Rates
from fzero.simulation import simulate
from fzero.values.sharded import Sharded

WAY_OUT = "give a function of a mesh that returns (train_step, its arguments, the tokens of a step): docs/plan.md"


def trace_script(
    script: str, mesh: VirtualMesh, stage: int | None, memory: str | None, data: tuple[str, ...], rates: Rates
) -> Traced:
    """The program of the step that `FILE:FUNCTION` makes: `FUNCTION(mesh)` returns a step, a tuple of its arguments and
    the tokens of all ranks in a step. Parameters are the first argument. Along the axes `data` ranks take different
    examples.

    Raises:
        FzeroError: for what is no such function; as `fzero.simulate`.
    """
    with import_from(Path(script.rpartition(":")[0]).parent):
        made = find_function(script)(mesh)
    if not (isinstance(made, tuple) and len(made) == 3 and callable(made[0]) and isinstance(made[1], tuple)):
        raise FzeroError(f"--script {script}", f"returns {made!r:.80}", WAY_OUT)
    train_step, arguments, tokens = made
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise FzeroError(f"--script {script}", f"returns {tokens!r:.80} as the tokens of a step", WAY_OUT)
    held = [leaf for leaf in tree.leaves(arguments) if isinstance(leaf, Sharded)]
    if not held:
        raise FzeroError(
            f"--script {script}", "has no argument in slices", "partition parameters on the mesh it is given"
        )
    step = simulate(train_step, mesh, stage=stage, memory=memory, data=data)
    step.schedule_for(rates)
    program = step.trace(*arguments)
    parameters = sum(leaf.numel() for leaf in tree.leaves(arguments[:1]) if isinstance(leaf, Tensor))
    return Traced(program, parameters, tokens)


def find_function(script: str) -> Callable[[VirtualMesh], Any]:
    """The function that `FILE:FUNCTION` names. The file runs as a module of its own name."""
    file, _, name = script.rpartition(":")
    path = Path(file)
    if not path.is_file() or path.suffix != ".py":
        problem = f"has no file {file!r}" if not path.is_file() else f"has {file!r}, which is no file of Python"
        raise FzeroError(f"--script {script}", problem, "give FILE:FUNCTION, as in train.py:plan")
    spec = importlib.util.spec_from_file_location(f"script {path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    found: Any = getattr(module, name, None)
    if not callable(found):
        raise FzeroError(f"--script {script}", f"has no function {name!r}", WAY_OUT)
    return found


@contextmanager
def import_from(folder: Path) -> Iterator[None]:
    """Let imports find the modules of a folder first, in a block."""
    here = str(folder.resolve())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
