"""Loops: `scan` calls a function k times. A sharded step traces the function once, and its program has one loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from fzero.base import torch_private, tree
from fzero.base.errors import FzeroError
from fzero.values.functions import is_sharded

Leaves = list[Any]
TurnOf = Callable[[Leaves, Leaves], tuple[Leaves, Leaves]]
"""(leaves of the carry, slices of xs) -> (leaves of the new carry, leaves of y)"""


class LoopRecorder(Protocol):
    """Writes a loop into the graph of a trace."""

    def record(self, turn: TurnOf, carry: Leaves, xs: Leaves, length: int, sync: str | None) -> tuple[Leaves, Leaves]:
        """The carry behind the last turn, and the stacked y of all turns. `sync` is as in `fzero.accumulate`."""


_recorder: ContextVar[LoopRecorder | None] = ContextVar("fzero_loop_recorder", default=None)


@contextmanager
def record_loops(recorder: LoopRecorder) -> Iterator[None]:
    """Inside this context `recorder` records the loops of `scan`."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: tree.Tree, xs: tree.Tree = None, length: int | None = None
) -> tuple[tree.Tree, tree.Tree]:
    """Call `carry, y = body(carry, x)` for each slice `x` of `xs` along dim 0, in order. Returns the last carry and the
    stacked `y` (JAX's `lax.scan`).

        def step(total, x):
            return total + x, total
        fzero.scan(step, torch.tensor(0), torch.tensor([1, 2, 3]))  # (6, [0, 1, 3])

    All leaves of `xs` have one size along dim 0, the number of turns; without `xs` that is `length`. With 0 turns the
    result is the carry as given, and every `y` has 0 rows. Each leaf of the carry is a tensor, and keeps its shape,
    dtype and, where it is state, its layout. Random draws differ from turn to turn.

    In a sharded step, outside of a function that is differentiated or mapped, the program has one loop. `body` is
    traced once, and again where a carry that all ranks share at first differs between ranks later. Inside such a
    function, and where tensors of the loop require grad, the turns are traced one by one, and derivatives go through
    them as in plain torch.

    Raises:
        FzeroError: for a carry that changes in structure, shape, dtype or layout; for leaves that are no tensors; for
            `Sharded` leaves of `xs` and `y`; where leaves of `xs` have unequal numbers of rows, or another number than
            `length`; for a `length` that is no whole number; in a sharded step, where a value that the body computes is
            used outside of it.
    """
    return take_turns(body, carry, xs, length, None)


def take_turns(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: tree.Tree, xs: tree.Tree, length: int | None, sync: str | None
) -> tuple[tree.Tree, tree.Tree]:
    """`scan`, with the `sync` of `fzero.accumulate`."""
    start, carry_def = tree.flatten(carry)
    rows, xs_def = tree.flatten(xs)
    carry_paths, paths = tree.paths(carry), tree.paths(xs)
    _check_tensors("carry", carry_paths, start)
    _check_tensors("xs", paths, rows)
    turns = _count_turns(paths, rows, length)
    y_def: list[tree.TreeDef] = []

    def turn(leaves: Leaves, slices: Leaves) -> tuple[Leaves, Leaves]:
        result = body(tree.unflatten(carry_def, leaves), tree.unflatten(xs_def, slices))
        if not isinstance(result, tuple) or len(result) != 2:
            raise FzeroError("scan", f"the body returns a {type(result).__name__}", "return a pair: (carry, y)")
        news, new_def = tree.flatten(result[0])
        if new_def != carry_def:
            error = tree.mismatch(carry_def, new_def)
            raise FzeroError(f"scan: carry {error.where}".rstrip(), error.problem, "return a carry like the one given")
        ys, defs = tree.flatten(result[1])
        _check_tensors("y", tree.paths(result[1]), ys)
        y_def[:] = [defs]
        return [_check_carry(*row) for row in zip(carry_paths, leaves, news)], ys

    recorder = None if is_transformed() else _recorder.get()
    if turns == 0:
        carries, stacked = start, _find_empty(turn, start, rows, is_tracing=_recorder.get() is not None)
    else:
        run = run_turns if recorder is None else recorder.record
        carries, stacked = run(turn, start, rows, turns, sync)
    return tree.unflatten(carry_def, carries), tree.unflatten(y_def[0], stacked)


def is_transformed() -> bool:
    """Whether a function is being differentiated or mapped."""
    return torch_private.depth() > 0 or torch_private.in_vmap() or torch_private.in_forward_mode()


def run_turns(turn: TurnOf, carry: Leaves, xs: Leaves, length: int, sync: str | None) -> tuple[Leaves, Leaves]:
    """The turns of a loop one by one, as a `LoopRecorder` without a graph."""
    found = []
    for i in range(length):
        carry, ys = turn(carry, [x[i] for x in xs])
        found.append(ys)
    return carry, [torch.stack(column) for column in zip(*found)]


def _find_empty(turn: TurnOf, carry: Leaves, xs: Leaves, is_tracing: bool) -> Leaves:
    """Each `y` of a loop without turns, with 0 rows. Nothing is computed: shapes come from tensors without data."""
    if is_tracing:
        _, ys = turn(carry, [x.new_zeros(x.shape[1:]) for x in xs])
        return [y.new_zeros((0, *y.shape)) for y in ys]
    with torch_private.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [x if is_sharded(x) else mode.from_tensor(x, static_shapes=True) for x in carry]
        _, ys = turn(fakes, [x.new_empty(x.shape[1:]) for x in xs])
        shapes = [(y.shape, y.dtype, y.device) for y in ys]
    return [torch.zeros((0, *shape), dtype=dtype, device=device) for shape, dtype, device in shapes]


def _count_turns(paths: Sequence[str], xs: Leaves, length: int | None) -> int:
    """The number of turns: the rows of each leaf of xs, and `length` where it is given."""
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 0):
        raise FzeroError("scan: length", f"is {length!r}", "give a whole number of turns, 0 or more")
    counts = [] if length is None else [("length", length)]
    for path, x in zip(paths, xs):
        if x.ndim == 0:
            raise FzeroError(f"scan: xs {path}".rstrip(), "is 0-d and has no rows", "capture it in the body")
        counts.append((f"xs {path}".rstrip(), x.shape[0]))
    if not counts:
        raise FzeroError("scan", "has no xs and no length", "give one of them")
    (first, count), *rest = counts
    for name, other in rest:
        if other != count:
            raise FzeroError(f"scan: {name}", f"has {other} rows, {first} has {count}", "give equal numbers of rows")
    return count


def _check_tensors(name: str, paths: Sequence[str], leaves: Leaves) -> None:
    for path, leaf in zip(paths, leaves):
        if not isinstance(leaf, Tensor):
            problem = f"is {leaf!r}, which is no tensor"
            way_out = "give torch.tensor(...)" if name == "carry" else "give tensors, and capture the rest in the body"
            raise FzeroError(f"scan: {name} {path}".rstrip(), problem, way_out)
        if is_sharded(leaf) and name != "carry":
            way_out = "take leaf.full_tensor(), or carry it" if name == "xs" else "add it up in the carry"
            raise FzeroError(f"scan: {name} {path}".rstrip(), f"is state ({leaf.path or 'a leaf'})", way_out)


def _check_carry(path: str, given: Any, new: Any) -> Any:
    """The new leaf of a carry. A plain tensor in the place of state becomes that state's slice, where it may."""
    where = f"scan: carry {path}".rstrip()
    if not isinstance(new, Tensor):
        raise FzeroError(where, f"becomes {new!r}, which is no tensor", "return a tensor")
    shapes = tuple(given.shape), tuple(new.shape)
    pairs = ("shape", *shapes), ("dtype", given.dtype, new.dtype), ("device", given.device, new.device)
    for name, was, is_now in pairs:
        if was != is_now:
            raise FzeroError(where, f"has {name} {was}, and {is_now} behind a turn", f"keep its {name}")
    if is_sharded(given) and not is_sharded(new):
        if given.on.varies(new):
            problem = f"is state ({given.path or 'a leaf'}), and differs between ranks behind a turn"
            raise FzeroError(where, problem, "average what you add to it with fzero.pmean")
        return given.slice_of(new)
    if is_sharded(new) and not is_sharded(given):
        problem = f"is a plain tensor, and state ({new.path or 'a leaf'}) behind a turn"
        raise FzeroError(where, problem, "begin with state, such as torch.zeros_like(leaf), or take new.full_tensor()")
    if is_sharded(given) and is_sharded(new) and given.form[:2] != new.form[:2]:
        problem = f"is state of {given.path or 'one leaf'}, and of {new.path or 'another'} behind a turn"
        raise FzeroError(where, problem, "keep the leaf")
    return new
