"""The transform: `shard(fn, mesh)`, a pure single-device step that runs on every rank of a mesh."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fzero import kinds, tree
from fzero.agreement import agree, digest
from fzero.errors import FzeroError
from fzero.linking import Runner, link
from fzero.live import Live, live
from fzero.passes import defaults
from fzero.program import Program
from fzero.runtime import Runtime
from fzero.sharded import Sharded
from fzero.tracing import trace

Pass = Callable[[Program], Program]
_log = logging.getLogger("fzero")


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
    return Step(fn, live(mesh), defaults(stage=stage, in_place=donate) if passes is None else tuple(passes))


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
        self._fn, self._on, self._passes = fn, on, passes
        self._compiled: dict[Any, _Compiled] = {}

    def __repr__(self) -> str:
        return f"fzero.shard({getattr(self, '__name__', self._fn)}, {self._on.mesh})"

    def trace(self, *args: Any) -> Program:
        """The program that a call with these arguments runs. No collective."""
        leaves, treedef = tree.flatten(args)
        _signature(leaves, treedef, self._on)
        return self._program(args)

    def __call__(self, *args: Any) -> Any:
        leaves, treedef = tree.flatten(args)
        compiled = self._compile(args, leaves, treedef)
        agree(self._on.control, compiled.number, compiled.lines)
        tensors = _unaliased([x for x in leaves if isinstance(x, (Sharded, Tensor))], compiled.donated)
        outputs = iter(compiled.run(tensors))
        return tree.unflatten(compiled.program.out_tree, self._results(compiled.program, outputs))

    def _compile(self, args: tuple[Any, ...], leaves: list[Any], treedef: Any) -> _Compiled:
        try:
            signature = _signature(leaves, treedef, self._on)
            if signature not in self._compiled:
                self._report()
                self._compiled[signature] = self._make(args)
            return self._compiled[signature]
        except Exception as error:
            agree(self._on.control, 0, [], error)
            raise

    def _make(self, args: tuple[Any, ...]) -> _Compiled:
        program = self._program(args)
        runner = link(program, Runtime(self._on, program.layouts))
        lines = program.lines()
        donated = tuple(i for i, argument in enumerate(program.arguments) if argument.donated)
        return _Compiled(program, runner, donated, digest(lines), lines)

    def _program(self, args: tuple[Any, ...]) -> Program:
        program = kinds.resolve(trace(self._fn, args, self._on.mesh))
        for rewrite in self._passes:
            program = rewrite(program)
        return program

    def _report(self) -> None:
        if self._compiled:
            _log.warning("%r is traced again: its arguments differ from the %d seen", self, len(self._compiled))

    def _results(self, program: Program, outputs: Any) -> list[Any]:
        return [
            result.constant
            if result.is_constant
            else next(outputs)
            if result.bucket is None
            else Sharded(next(outputs), program.layouts[result.bucket], result.leaf, self._on)
            for result in program.results
        ]


def _signature(leaves: list[Any], treedef: Any, on: Live) -> Any:
    """What decides whether a traced program fits these arguments.

    Raises:
        FzeroError: for state of another mesh, or a constant that does not hash.
    """
    return treedef, tuple([_leaf_signature(i, leaf, treedef, on) for i, leaf in enumerate(leaves)])


def _leaf_signature(position: int, leaf: Any, treedef: Any, on: Live) -> Any:
    if isinstance(leaf, Sharded):
        if leaf.on is not on:
            raise _of_another_mesh(leaf, on)
        return leaf.layout, leaf.index, leaf.local.dtype
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.stride()
    try:
        hash(leaf)
    except TypeError:
        where = tree.dotted(tree.keys(treedef)[position])
        raise FzeroError(
            f"argument {where}", f"a {type(leaf).__name__} is no tensor and does not hash", "give a tensor or a number"
        ) from None
    return type(leaf), leaf


def _of_another_mesh(leaf: Sharded, on: Live) -> FzeroError:
    return FzeroError(
        leaf.path,
        f"was partitioned on {leaf.on.mesh} as rank {leaf.on.rank}, the step runs on {on.mesh} as rank {on.rank}"
        if leaf.on.mesh != on.mesh
        else "was partitioned on another mesh of the same shape",
        "partition the tree on the step's mesh",
    )


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
