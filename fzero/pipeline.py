"""The pipeline: from a function and its arguments to the program that ranks run. Trace, check, rewrite."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.passes import resolve, run_passes
from fzero.passes.run import Pass
from fzero.program.program import Program
from fzero.program.rates import Rates
from fzero.ranks.live import Live
from fzero.ranks.virtual import Virtual
from fzero.tracing.trace import trace
from fzero.values.sharded import Form, Sharded

Performer = Live | Virtual
"""Where a step runs: on this rank of a live mesh, or on all ranks of a virtual mesh."""

T = TypeVar("T")
_log = logging.getLogger("fzero")


class Pipeline(Generic[T]):
    """The programs of a function on the mesh of `on`, one for each signature of its arguments, as `finish` returns
    them.

    A signature is the structure, shapes, dtypes, devices, layouts and constants of the arguments.
    """

    def __init__(
        self, fn: Callable[..., Any], on: Performer, passes: Sequence[Pass], finish: Callable[[Program], T]
    ) -> None:
        self.fn, self.on, self.passes, self.finish = fn, on, passes, finish
        self._cache: list[tuple[Any, T]] = []  # signature, result of `finish`
        self._measured: Rates | None = None

    def program(self, args: tuple[Any, ...]) -> Program:
        """The program for these arguments, traced now.

        Raises:
            FzeroError: for state of another mesh, or a constant that does not hash.
        """
        self._check(*tree.flatten(args))
        with _pause_garbage_collection():
            program = replace(resolve(trace(self.fn, args, self.on.mesh)), measured=self._measured)
            return run_passes(program, self.passes)

    def reschedule(self, measured: Rates) -> None:
        """Drop all programs. The next ones are scheduled for a machine with these rates."""
        self._measured = measured
        self._cache.clear()

    def prepare(self, leaves: list[Any], treedef: tree.TreeDef) -> T:
        """The finished program for these arguments, from the cache where their signature is known. Raises as `program`.

        Signatures are compared, not hashed: the forms of state that `Returned` set are the same objects at each call,
        which Python compares by identity first.
        """
        signature = treedef, [leaf.form if isinstance(leaf, Sharded) else _describe(leaf) for leaf in leaves]
        for known, finished in self._cache:
            if known == signature:
                return finished
        self._check(leaves, treedef)
        if self._cache:
            _log.warning("%r is traced again: its arguments differ from the %d seen", self.fn, len(self._cache))
        finished = self.finish(self.program(tree.unflatten(treedef, leaves)))
        self._cache.append((signature, finished))
        return finished

    def _check(self, leaves: list[Any], treedef: tree.TreeDef) -> None:
        """Refuse state of another mesh, and constants that do not hash."""
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Sharded):
                if leaf.on is not self.on:
                    raise _refuse_mesh(leaf, self.on)
            elif not isinstance(leaf, Tensor) and not _is_hashable(leaf):
                raise FzeroError(
                    f"argument {tree.dotted(tree.keys(treedef)[position])}",
                    f"a {type(leaf).__name__} is no tensor and does not hash",
                    "give a tensor or a number",
                )


class Returned:
    """The value that a step returns, from the tensors that its program returns: the tree of results. Where passes added
    state, a pair of these and the new state by path."""

    def __init__(self, program: Program, on: Performer) -> None:
        self._out_tree = program.out_tree
        self._constants = [(i, result.constant) for i, result in enumerate(program.results) if result.is_constant]
        values = [node.meta["val"] for node in program.output.args[0]]
        self._state = [
            (i, Form(program.layouts[result.bucket], result.leaf, on, value.dtype, value.device))
            for i, (result, value) in enumerate(zip(program.tensor_results, values))
            if result.bucket is not None
        ]
        self._added = [state.path for state in program.pass_state]

    def __call__(self, outputs: Sequence[Tensor]) -> Any:
        leaves: list[Any] = list(outputs)
        for i, form in self._state:
            leaves[i] = Sharded.of_form(leaves[i], form)
        own = len(leaves) - len(self._added)
        added, leaves = leaves[own:], leaves[:own]
        for i, constant in self._constants:
            leaves.insert(i, constant)
        result = tree.unflatten(self._out_tree, leaves)
        return (result, dict(zip(self._added, added))) if self._added else result


def create_pass_state(program: Program, on: Performer) -> dict[str, Sharded]:
    """Path -> first value, for the state that the passes of a program added."""
    device = on.device or program.placeholders[-1].meta["val"].device
    created = {}
    for state in program.pass_state:
        layout = program.layouts[state.bucket]
        shape = layout.leaves[0].shape if layout.replicated else (len(layout.part(state.leaf, on.rank)),)
        local = torch.full(shape, state.initial, dtype=state.dtype, device=device)
        created[state.path] = Sharded(local, layout, state.leaf, on)
    return created


def order_pass_state(program: Program, given: Mapping[str, Any] | None, on: Performer) -> list[Sharded]:
    """The values of the state that passes added, in the order of the program's arguments.

    Raises:
        FzeroError: for state that is missing, that no pass keeps, or that has another layout, dtype or mesh.
    """
    wanted, given = [state.path for state in program.pass_state], given or {}
    missing, surplus = [x for x in wanted if x not in given], [x for x in given if x not in wanted]
    if missing or surplus:
        path = (missing or surplus)[0]
        problem = "a pass of this step keeps this state, and it is not given" if missing else "no pass keeps this state"
        way_out = "give pass_state=step.init_pass_state(*args) first, then what the step returned"
        raise FzeroError(f"pass_state {path!r}", problem, way_out)
    for state in program.pass_state:
        value = given[state.path]
        wanted_form = program.layouts[state.bucket], state.leaf, on, state.dtype
        if not isinstance(value, Sharded) or value.form[:-1] != wanted_form:
            problem = "is not the state that this step's passes keep on its mesh, in layout and dtype"
            raise FzeroError(f"pass_state {state.path!r}", problem, "make it with step.init_pass_state(*args)")
    return [given[path] for path in wanted]


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector in a block, and enable it again behind the block.

    While a program is traced the collector would walk its growing graph again and again, a quarter of the time. The
    cyclic garbage of a trace, a few megabytes a layer, stays until the next collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _describe(leaf: Any) -> Any:
    """The properties of a leaf that is no state on which the program depends."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.stride()
    return type(leaf), leaf


def _is_hashable(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True


def _refuse_mesh(leaf: Sharded, on: Performer) -> FzeroError:
    theirs, ours = ([x.mesh, "every rank" if x.rank is None else f"rank {x.rank}"] for x in (leaf.on, on))
    return FzeroError(
        leaf.path,
        "was partitioned on another mesh of the same shape"
        if theirs == ours
        else f"was partitioned on {theirs[0]} as {theirs[1]}, the step runs on {ours[0]} as {ours[1]}",
        "partition the tree on the step's mesh",
    )
