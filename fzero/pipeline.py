"""The pipeline: a function and arguments to the program that ranks run, traced, checked and rewritten."""

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
from fzero.tracing.trace import trace
from fzero.values.sharded import Form, Sharded

T = TypeVar("T")
_log = logging.getLogger("fzero")


class Pipeline(Generic[T]):
    """What `finish` makes of the programs of a function on the mesh of `on`, one for each signature of its arguments:
    their structure, shapes, dtypes, devices, layouts and constants."""

    def __init__(self, fn: Callable[..., Any], on: Any, passes: Sequence[Pass], finish: Callable[[Program], T]) -> None:
        self.fn, self.on, self.passes, self.finish = fn, on, passes, finish
        self._made: list[tuple[Any, T]] = []  # with the signature of each
        self._measured: Rates | None = None

    def program(self, args: tuple[Any, ...]) -> Program:
        """The program for these arguments, made anew.

        Raises:
            FzeroError: for state of another mesh, or a constant that does not hash.
        """
        self._check(*tree.flatten(args))
        with _uncollected():
            program = replace(resolve(trace(self.fn, args, self.on.mesh)), measured=self._measured)
            return run_passes(program, self.passes)

    def remake(self, measured: Rates) -> None:
        """Make programs anew when they are next asked for, for a machine with these rates."""
        self._measured = measured
        self._made.clear()

    def made(self, leaves: list[Any], treedef: tree.TreeDef) -> T:
        """What was made for arguments of this signature, or is now. Raises as `program`.

        Signatures are compared, not hashed: the forms of state that `Returned` made are the same objects at each call.
        """
        signature = treedef, [leaf.form if leaf.__class__ is Sharded else _signature(leaf) for leaf in leaves]
        for known, made in self._made:
            if known == signature:
                return made
        self._check(leaves, treedef)
        if self._made:
            _log.warning("%r is traced again: its arguments differ from the %d seen", self.fn, len(self._made))
        made = self.finish(self.program(tree.unflatten(treedef, leaves)))
        self._made.append((signature, made))
        return made

    def _check(self, leaves: list[Any], treedef: tree.TreeDef) -> None:
        """Refuse state of another mesh, and constants that do not hash."""
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Sharded):
                if leaf.on is not self.on:
                    raise _of_another_mesh(leaf, self.on)
            elif not isinstance(leaf, Tensor) and not _hashes(leaf):
                raise FzeroError(
                    f"argument {tree.dotted(tree.keys(treedef)[position])}",
                    f"a {type(leaf).__name__} is no tensor and does not hash",
                    "give a tensor or a number",
                )


class Returned:
    """What a step returns, given the tensors that its program does: its results and, where passes added state, the new
    state beside them."""

    def __init__(self, program: Program, on: Any) -> None:
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


def create_pass_state(program: Program, on: Any) -> dict[str, Sharded]:
    """The state that the passes of a program added, as it begins: path -> value."""
    device = on.device or program.placeholders[-1].meta["val"].device
    created = {}
    for state in program.pass_state:
        layout = program.layouts[state.bucket]
        shape = layout.leaves[0].shape if layout.replicated else (len(layout.part(state.leaf, on.rank)),)
        local = torch.full(shape, state.initial, dtype=state.dtype, device=device)
        created[state.path] = Sharded(local, layout, state.leaf, on)
    return created


def order_pass_state(program: Program, given: Mapping[str, Any] | None, on: Any) -> list[Sharded]:
    """The values of a program's added state, in the order of its arguments.

    Raises:
        FzeroError: for state that is missing, left over, or of another layout or mesh.
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
        if not isinstance(value, Sharded) or value.on is not on or value.layout != program.layouts[state.bucket]:
            problem = "is not the state that this step's passes keep on its mesh"
            raise FzeroError(f"pass_state {state.path!r}", problem, "make it with step.init_pass_state(*args)")
    return [given[path] for path in wanted]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's garbage collector, which would walk through a growing graph again and again: a quarter of the
    time. What it would free in between, a few megabytes a layer, stays until its next turn."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _signature(leaf: Any) -> Any:
    """What of an argument's leaf that is not state decides whether a traced program fits it."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.stride()
    return type(leaf), leaf


def _hashes(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True


def _of_another_mesh(leaf: Sharded, on: Any) -> FzeroError:
    theirs, ours = ([x.mesh, "every rank" if x.rank is None else f"rank {x.rank}"] for x in (leaf.on, on))
    return FzeroError(
        leaf.path,
        "was partitioned on another mesh of the same shape"
        if theirs == ours
        else f"was partitioned on {theirs[0]} as {theirs[1]}, the step runs on {ours[0]} as {ours[1]}",
        "partition the tree on the step's mesh",
    )
