"""The transform: `shard(fn, mesh)`, a pure single-device step that runs on every rank of a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fzero import tree
from fzero.agreement import agree, digest
from fzero.linking import Runner, link
from fzero.live import Live, live
from fzero.passes import defaults, verify
from fzero.pipeline import Pass, Pipeline, returned
from fzero.program import Program
from fzero.runtime import Runtime
from fzero.sharded import Sharded


def shard(
    fn: Callable[..., Any],
    mesh: Any,
    *,
    stage: int = 3,
    donate: bool = True,
    passes: Sequence[Pass] | None = None,
) -> Step:
    """`fn` as a step that every rank of `mesh` runs, on `Sharded` state and on its part of the batch.

    `fn` is pure. `Sharded` leaves of its arguments are state; every other tensor is this rank's part of the batch; any
    other leaf is a constant. On equal parts of a batch the step equals `fn` on the whole batch whenever the loss is a
    mean over examples: gradients of state are means over ranks, and so is a floating 0-d result computed from the
    batch. Other results computed from the batch stay this rank's own.

    `stage` 3 gathers each layer's parameters for each use, 2 keeps them from first to last use, 1 keeps whole gradients
    too. With `donate` a step that updates state (`p + u`) does it in place, and the `Sharded` values that it was given
    become unusable. `passes` replaces the default ones, each a function of a `Program` to a `Program`.

    The step is traced at its first call and again when shapes, dtypes, structure or constants change, which the logger
    "fzero" reports.
    """
    return Step(fn, live(mesh), defaults(stage=stage, in_place=donate) if passes is None else (*passes, verify))


class _Compiled(NamedTuple):
    program: Program
    run: Runner
    donated: tuple[int, ...]  # positions among the tensor arguments
    number: int
    lines: list[str]


class Step:
    """A sharded step. Call it as the function it was made of; `trace` gives its `Program` without running it."""

    def __init__(self, fn: Callable[..., Any], on: Live, passes: Sequence[Pass]) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._on = on
        self._pipeline = Pipeline(fn, on, passes, self._link)

    def __repr__(self) -> str:
        return f"fzero.shard({getattr(self, '__name__', self._pipeline.fn)}, {self._on.mesh})"

    def trace(self, *args: Any) -> Program:
        """The program that a call with these arguments runs. No collective."""
        return self._pipeline.program(args)

    def __call__(self, *args: Any) -> Any:
        leaves, treedef = tree.flatten(args)
        compiled = self._compiled(leaves, treedef)
        agree(self._on.control, compiled.number, compiled.lines)
        tensors = _unaliased([x for x in leaves if isinstance(x, (Sharded, Tensor))], compiled.donated)
        return returned(compiled.program, compiled.run(tensors), self._on)

    def _compiled(self, leaves: list[Any], treedef: tree.TreeDef) -> _Compiled:
        try:
            return self._pipeline.made(leaves, treedef)
        except Exception as error:
            agree(self._on.control, 0, [], error)
            raise

    def _link(self, program: Program) -> _Compiled:
        runner = link(program, Runtime(self._on, program.layouts))
        lines = program.lines()
        donated = tuple(i for i, argument in enumerate(program.arguments) if argument.donated)
        return _Compiled(program, runner, donated, digest(lines), lines)


def _unaliased(values: list[Sharded | Tensor], donated: Sequence[int]) -> list[Tensor]:
    """The tensors of the arguments. What is donated is taken from its `Sharded`, and copied where another shares it."""
    tensors = [value.local if isinstance(value, Sharded) else value for value in values]
    if not donated:
        return tensors
    taken = set(donated)
    seen = {tensor.data_ptr() for i, tensor in enumerate(tensors) if i not in taken and tensor.numel()}
    for i in donated:
        pointer = tensors[i].data_ptr()
        if tensors[i].numel() and pointer in seen:
            tensors[i] = tensors[i].clone()
        seen.add(pointer)
    for i in donated:
        values[i]._local = None  # type: ignore[union-attr]
    return tensors
