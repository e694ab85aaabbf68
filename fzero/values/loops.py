"""Loops: `scan` calls a function k times. A sharded step traces the function once, and its program has one loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from fzero.base import torch_private, tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.values.flags import TurnFlags
from fzero.values.functions import is_sharded
from fzero.values.quantized import read_quantized_leaves
from fzero.values.regions import keep_turns

Leaves = list[Any]
TurnOf = Callable[[Leaves, Leaves, Leaves], tuple[Leaves, Leaves]]
"""(leaves of the carry, slices of xs, leaves of the layer) -> (leaves of the new carry, leaves of y)"""


class LoopRecorder(Protocol):
    """Writes a loop into the graph of a trace."""

    def record(
        self, turn: TurnOf, carry: Leaves, xs: Leaves, layers: list[Leaves], length: int, sync: str | None
    ) -> tuple[Leaves, Leaves] | None:
        """The carry behind the last turn, and the stacked y of all turns. None where the turns are no loop, and have
        to be traced one by one.

        `layers` has a list for each leaf, with an item for each turn. `sync` is as in `fzero.accumulate`.
        """


_recorder: ContextVar[LoopRecorder | None] = ContextVar("fzero_loop_recorder", default=None)


@contextmanager
def record_loops(recorder: LoopRecorder) -> Iterator[None]:
    """Inside this context `recorder` records the loops of `scan`."""
    token = _recorder.set(recorder)
    try:
        with keep_turns():  # also where an error ends a backward pass in the middle of a turn
            yield
    finally:
        _recorder.reset(token)


@check_arguments
def scan(
    body: Callable[..., tuple[Any, Any]],
    carry: tree.Tree,
    xs: tree.Tree = None,
    length: int | None = None,
    *,
    layers: Sequence[tree.Tree] | None = None,
) -> tuple[tree.Tree, tree.Tree]:
    """Call `carry, y = body(carry, x)` for each slice `x` of `xs` along dim 0, in order. Returns the last carry and the
    stacked `y` (JAX's `lax.scan`).

        def step(total, x):
            return total + x, total
        fzero.scan(step, torch.tensor(0), torch.tensor([1, 2, 3]))  # (6, [0, 1, 3])

    All leaves of `xs` have one size along dim 0, the number of turns; without `xs` that is `length`. With 0 turns the
    result is the carry as given, and every `y` has 0 rows. Each leaf of the carry is a tensor, and keeps its shape,
    dtype and, where it is state, its layout. Random draws differ from turn to turn.

    `layers` is a list of equal trees, such as the parameters of equal layers, one for each turn. Turn i then calls
    `body(carry, x, layers[i])`:

        def block(h, _, p):
            return apply_block(p, h), None
        h, _ = fzero.scan(block, h, layers=[params["blocks"][i] for i in range(96)])

    In a sharded step the program has one loop, and `body` is traced once: again where a carry that all ranks share at
    first differs between ranks later. Each turn gathers its own layer. In a function that is differentiated the
    backward pass is a loop too, from the last turn to the first, and the forward loop keeps what it needs. Turns are
    traced one by one where `body` captures values that are differentiated too, where the carry of a function that is
    differentiated has state, and under vmap, forward mode, nested derivatives and `remat`.

    Raises:
        FzeroError: for a carry that changes in structure, shape, dtype, device or layout; for leaves that are no
            tensors; for `Sharded` leaves of `xs` and `y`; where leaves of `xs` have unequal numbers of rows, or another
            number than `length` or `layers`; for layers of unequal structure, shapes or dtypes; for a `length` that is
            no whole number; in a sharded step, where a value that the body computes is used outside of it, and where
            the derivative of a loop is mapped, as `torch.func.jacrev` does.
    """
    return take_turns(body, carry, xs, length, None, layers)


def take_turns(
    body: Callable[..., tuple[Any, Any]],
    carry: tree.Tree,
    xs: tree.Tree,
    length: int | None,
    sync: str | None,
    layers: Sequence[tree.Tree] | None = None,
) -> tuple[tree.Tree, tree.Tree]:
    """`scan`, with the `sync` of `fzero.accumulate`."""
    start, carry_def = tree.flatten(carry)
    rows, xs_def = tree.flatten(xs := read_quantized_leaves(xs))
    carry_paths, paths = tree.paths(carry), tree.paths(xs)
    _check_tensors("carry", carry_paths, start)
    _check_tensors("xs", paths, rows)
    lists, layer_def = _list_layers(layers)
    turns = _count_turns(paths, rows, length, layers)
    y_def: list[tree.TreeDef] = []
    flags = TurnFlags()

    def turn(leaves: Leaves, slices: Leaves, layer: Leaves) -> tuple[Leaves, Leaves]:
        beside = () if layers is None else (tree.unflatten(layer_def, layer),)
        with flags.collect():
            result = body(tree.unflatten(carry_def, leaves), tree.unflatten(xs_def, slices), *beside)
        if not isinstance(result, tuple) or len(result) != 2:
            raise FzeroError("scan", f"the body returns a {type(result).__name__}", "return a pair: (carry, y)")
        news, new_def = tree.flatten(result[0])
        if new_def != carry_def:
            error = tree.mismatch(carry_def, new_def)
            raise FzeroError(f"scan: carry {error.where}".rstrip(), error.problem, "return a carry like the one given")
        made = read_quantized_leaves(result[1])
        ys, defs = tree.flatten(made)
        _check_tensors("y", tree.paths(made), ys)
        y_def[:] = [defs]
        return [_check_carry(*row) for row in zip(carry_paths, leaves, news)], [*ys, *flags.values()]

    recorder = _recorder.get()
    if turns == 0:
        carries, stacked = start, _find_empty(turn, start, rows, is_tracing=recorder is not None)
    else:
        done = None if recorder is None else recorder.record(turn, start, rows, lists, turns, sync)
        carries, stacked = _run_turns(turn, start, rows, lists, turns) if done is None else done
    count = y_def[0].num_leaves
    flags.note(stacked[count:])
    return tree.unflatten(carry_def, carries), tree.unflatten(y_def[0], stacked[:count])


def _list_layers(layers: Sequence[tree.Tree] | None) -> tuple[list[Leaves], Any]:
    """A list for each leaf of equal trees, with an item for each tree; and the structure of a tree.

    Raises:
        FzeroError: for no tree, and for trees of unequal structure, shapes or dtypes.
    """
    if layers is None:
        return [], None
    if not layers:
        raise FzeroError("scan: layers", "is empty", "give at least one layer, or leave it out")
    columns, first_def = list[Leaves](), tree.flatten(layers[0])[1]
    for i, layer in enumerate(layers):
        leaves, treedef = tree.flatten(layer)
        if treedef != first_def:
            error = tree.mismatch(first_def, treedef)
            where = f"scan: layers {i} {error.where}".rstrip()
            raise FzeroError(where, error.problem, "give layers of one structure, like layer 0")
        _check_tensors(f"layers {i}", tree.paths(layer), leaves)
        columns.append(leaves)
    lists = [list(column) for column in zip(*columns)]
    for path, items in zip(tree.paths(layers[0]), lists):
        for i, item in enumerate(items):
            for name, was, is_now in _compare(items[0], item):
                problem = f"has {name} {is_now}, and {was} in layer 0"
                raise FzeroError(f"scan: layers {i} {path}".rstrip(), problem, "give equal layers")
    return lists, first_def


def _compare(given: Tensor, new: Tensor) -> list[tuple[str, Any, Any]]:
    """What differs between two leaves: its name, and both values."""
    shapes = tuple(given.shape), tuple(new.shape)
    pairs = [("shape", *shapes), ("dtype", given.dtype, new.dtype), ("device", given.device, new.device)]
    return [row for row in pairs if row[1] != row[2]]


def _run_turns(turn: TurnOf, carry: Leaves, xs: Leaves, layers: list[Leaves], length: int) -> tuple[Leaves, Leaves]:
    """The turns one by one."""
    found = []
    for i in range(length):
        carry, ys = turn(carry, [x[i] for x in xs], [items[i] for items in layers])
        found.append(ys)
    return carry, [torch.stack(column) for column in zip(*found)]


def _find_empty(turn: TurnOf, carry: Leaves, xs: Leaves, is_tracing: bool) -> Leaves:
    """Each `y` of a loop without turns, with 0 rows. Nothing is computed: shapes come from tensors without data."""
    if is_tracing:
        _, ys = turn(carry, [x.new_zeros(x.shape[1:]) for x in xs], [])
        return [y.new_zeros((0, *y.shape)) for y in ys]
    with torch_private.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [x if is_sharded(x) else mode.from_tensor(x, static_shapes=True) for x in carry]
        _, ys = turn(fakes, [x.new_empty(x.shape[1:]) for x in xs], [])
        shapes = [(y.shape, y.dtype, y.device) for y in ys]
    return [torch.zeros((0, *shape), dtype=dtype, device=device) for shape, dtype, device in shapes]


def _count_turns(paths: Sequence[str], xs: Leaves, length: int | None, layers: Sequence[Any] | None) -> int:
    """The number of turns: the rows of each leaf of xs, and `length` and the number of layers where they are given."""
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 0):
        raise FzeroError("scan: length", f"is {length!r}", "give a whole number of turns, 0 or more")
    counts = [] if length is None else [("length", length)]
    if layers is not None:
        counts.append(("layers", len(layers)))
    for path, x in zip(paths, xs):
        if x.ndim == 0:
            raise FzeroError(f"scan: xs {path}".rstrip(), "is 0-d and has no rows", "capture it in the body")
        counts.append((f"xs {path}".rstrip(), x.shape[0]))
    if not counts:
        raise FzeroError("scan", "has no xs, no length and no layers", "give one of them")
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
        if is_sharded(leaf) and name in ("xs", "y"):
            way_out = "take leaf.full_tensor(), or carry it" if name == "xs" else "add it up in the carry"
            raise FzeroError(f"scan: {name} {path}".rstrip(), f"is state ({leaf.path or 'a leaf'})", way_out)


def _check_carry(path: str, given: Any, new: Any) -> Any:
    """The new leaf of a carry. A plain tensor in the place of state becomes that state's slice, where it may."""
    where = f"scan: carry {path}".rstrip()
    if not isinstance(new, Tensor):
        raise FzeroError(where, f"becomes {new!r}, which is no tensor", "return a tensor")
    for name, was, is_now in _compare(given, new):
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
