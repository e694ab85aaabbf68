"""Functions of torch on `Sharded` values. The tables of `rules` say which rule a function follows:

* An elementwise function stays sharded. Its other operands are sharded values of the same layout, scalars, or uniform
  tensors of the same shape.
* A reduction of all elements (`sum`, `mean`, `norm`, `max`, `min`, `all`, `any`) takes one collective and returns a
  plain 0-d tensor.
* A list function (`torch._foreach_*`) is elementwise at each position of its lists. Functions of `optim` that sum over
  each leaf of a list take one all-reduce a leaf, which the `coalesce` pass makes one for all.
* `optim`'s `orthogonalize` moves each matrix to one rank, computes there, and moves slices of the result back.
* A function that writes into a value writes into its slice. Only a step may do that, and not to its arguments.
* Any other function gathers the value and runs on the full tensor.

Under `torch.func.vmap` a plain operand may be a batch, and a batch has no slices: its sharded operands are gathered.

Outside of a step ranks compare the function and the origins of its operands before they communicate (`calls`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from fzero.base import torch_private
from fzero.base.errors import FzeroError
from fzero.optim import operations
from fzero.optim.newton_schulz import Blocks, NewtonSchulz
from fzero.optim.quantized import BLOCK
from fzero.program.ops.owners import orthogonalize_on_owners
from fzero.values import rules
from fzero.values.calls import follow_call, hash_call, perform_call
from fzero.values.moves import BESIDE, Cut, add_parts, copy_alias, move
from fzero.values.origin import Origin, describe_state
from fzero.values.scales import make_scales
from fzero.values.splits import cut_here, find_places, join_here
from fzero.values.views import apply_to_copies

if TYPE_CHECKING:
    from fzero.values.sharded import Sharded


def is_sharded(value: Any) -> TypeGuard[Sharded]:
    """Whether `value` is a `Sharded`."""
    return isinstance(value, Tensor) and hasattr(value, "form")


def apply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)` by its rule in `rules`; without a rule, the function of the gathered values."""
    name = rules.name_of(func)
    if name in rules.METADATA:
        with torch.DisableTorchFunctionSubclass():
            return args[0].numel() if name in rules.COUNTS else func(*args, **kwargs)
    if name in rules.REFUSED:
        raise FzeroError(_find_path((args, kwargs)), f"{name} is no function of a Sharded", rules.REFUSED[name])
    rules.check_bytes(name, args, kwargs)
    if (written := rules.find_target(func, args, kwargs)) is not None:
        return _write(func, name, written, args, kwargs)
    if name in rules.LIST_REDUCTIONS:
        return [rules.LIST_REDUCTIONS[name](x, *args[1:], **kwargs) for x in args[0]]
    if name in rules.NEW_SCALES:
        return make_scales(*args)
    if name in rules.BLOCKWISE_LIST_OPS:
        return _apply_blockwise(func, *args)
    if name in rules.OWNED_LIST_OPS:
        return _apply_on_owners(func, *args, **kwargs)
    if name in rules.LIST_OPS or (name.startswith("_foreach_") and name not in rules.GATHERED_LIST_OPS):
        return _apply_to_lists(func, args, kwargs)
    if name in rules.SLICE_OPS:
        return _apply_to_slices(func, name, *args)
    if name in rules.ELEMENTWISE and kwargs.get("memory_format") in rules.MEMORY_FORMATS:
        anchor = _find_anchor(name, args, kwargs)
        if anchor is not None:
            kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
            return _apply_elementwise(func, anchor, args, kwargs)
    if name in rules.REDUCTIONS and args and is_sharded(args[0]):
        result = _reduce(name, *args, **kwargs)
        if result is not None:
            return result
    return _apply_in_full(func, name, args, kwargs)


def _apply_in_full(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function of the full tensors. One that moves running statistics writes into values: those that the step made
    and that have no gradient. Which of them the statistics are, does not matter."""
    if name not in rules.MOVES_STATISTICS:
        return _gather_and_apply(func, args, kwargs)
    given = torch_private.pytree_leaves((args, kwargs), is_leaf=is_sharded)
    values = [x for x in given if is_sharded(x) and x.on.may_write(x.local) and not x.requires_grad]
    return _write_full(func, name, values, args, kwargs)


def _gather_and_apply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function of the full tensors. Outside of a step a result that is a view of one is a `View`."""
    gathered: list[tuple[Sharded, Tensor]] = []

    def gather(x: Any) -> Any:
        if not is_sharded(x):
            return x
        gathered.append((x, x.gather_for(rules.name_of(func))))
        return gathered[-1][1]

    if is_sharded(operand := args[0] if args else kwargs.get("input")):
        rules.check_parts(rules.name_of(func), operand, args, kwargs)
    args, kwargs = torch_private.map_pytree(gather, (args, kwargs), is_leaf=is_sharded)
    if not any(value.on.is_tracing for value, _ in gathered):
        return apply_to_copies(func, args, kwargs, [(value.path, full) for value, full in gathered])
    result = func(*args, **kwargs)
    for value, full in gathered:
        value.on.note_result(value.local, full, result)
    return result


def _write(func: Callable[..., Any], name: str, written: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that writes into its operand `written`: a value, a list of values, or plain tensors.

    It writes into a slice. Where the function is not elementwise on slices, it writes into a full copy of the value,
    and the slice of that into the slice.

    Raises:
        FzeroError: for a value that is immutable, or that would differ between ranks.
    """
    if not _has_sharded(written):
        return _apply_in_full(func, name, args, kwargs)
    values = [x for x in (written if isinstance(written, (list, tuple)) else [written]) if is_sharded(x)]
    for value in values:
        if rules.is_accessor(func) or not value.on.may_write(value.local) or _is_computed_in_full(value):
            way_out = "arguments of a step, and values that have views, are immutable; write p = p + u"
            raise FzeroError(value.path, f"{name} would change a value in place", way_out)
    if name.startswith("_foreach_"):
        _apply_to_lists(func, args, kwargs, values)
    else:
        value, base = values[0], name.removesuffix("_")
        anchor = _find_anchor(base, args, kwargs) if base in rules.ELEMENTWISE | rules.FILLS else None
        if len(values) == 1 and anchor is not None and anchor.form[:2] == value.form[:2]:
            func(*(_to_slice(x, value) for x in args), **{key: _to_slice(x, value) for key, x in kwargs.items()})
        else:
            _write_full(func, name, values, args, kwargs)
            return written
    for value in values:
        value.on.note_write()
    return written


def _write_full(
    func: Callable[..., Any], name: str, values: list[Sharded], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Write into full copies of `values`, and the slices of the copies into their slices. Returns what `func` does.

    A value that has another shape afterwards, as after `squeeze_`, is replicated.
    """
    copies = {id(value): value.full_tensor().clone() for value in values}
    replace = functools.partial(torch_private.map_pytree, lambda x: copies.get(id(x), x), is_leaf=is_sharded)
    result = _gather_and_apply(func, *replace((args, kwargs)))
    for value in values:
        full = copies[id(value)]
        if value.on.varies(full):
            way_out = "write into a plain tensor: value.full_tensor().clone()"
            raise FzeroError(value.path, f"{name} would write what differs between ranks into a slice", way_out)
        if full.shape == value.shape:
            value.local.copy_(value.slice_of(full).local)
        else:
            value.become_replicated(full)
        value.on.note_write()
    return result


def _find_path(given: Any) -> str:
    """The path of the first `Sharded` in a structure."""
    return next(x.path for x in torch_private.pytree_leaves(given, is_leaf=is_sharded) if is_sharded(x))


def _reduce(name: str, x: Sharded, *args: Any, **kwargs: Any) -> Tensor | None:
    """The result of the rule of a full reduction; None where the value is to be gathered instead."""
    if _is_whole(x):
        if x.form.layout.splits == 1:
            return None
        return rules.REDUCTIONS[name](x.full_tensor(), x.cut_of_part, x.on, *args, **kwargs)
    return rules.REDUCTIONS[name](x.local, x.cut, perform_call(name, x, args, kwargs), *args, **kwargs)


def _gather(x: Any) -> Any:
    return x.full_tensor() if is_sharded(x) else x


def _has_sharded(x: Any) -> bool:
    return is_sharded(x) or (isinstance(x, (list, tuple)) and any(map(is_sharded, x)))


def _find_anchor(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sharded | None:
    """The operand whose layout the result of the elementwise function `name` has. None where all operands are to be
    gathered:

    * the operands broadcast, or are of a kind for which torch has other kernels (`rules.GATHERED_COMPLEX`), or
    * a plain operand differs between ranks, or
    * a plain operand may be a batch of vmap, or
    * a 0-d leaf meets a plain 0-d tensor and one of them is differentiated, as a weight meets this rank's own loss.
    """
    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if name in rules.GATHERED_COMPLEX and any(map(_is_complex, (*args, *operands))):
        return None
    values = [x for x in operands if is_sharded(x)]
    if not values:
        return None
    anchor = max(values, key=lambda x: (x.ndim > 0, not x.is_replicated))
    if not all(x.ndim == 0 or (x.ndim == anchor.ndim and x.shape == anchor.shape) for x in operands):
        rules.check_wholes(values, operands)
        return None
    if anchor.ndim == 0 and name in rules.GATHERED_0D:
        return None
    plain = [x for x in operands if not is_sharded(x)]
    if plain and (torch_private.in_vmap() or (anchor.ndim == 0 and _is_differentiated(operands))):
        return None
    return None if any(map(anchor.on.varies, plain)) else anchor


def _is_complex(x: Any) -> bool:
    return isinstance(x, complex) or (isinstance(x, Tensor) and x.dtype.is_complex)


def _is_differentiated(operands: list[Any]) -> bool:
    return torch_private.in_forward_mode() or any(x.requires_grad for x in operands)


def _is_computed_in_full(anchor: Sharded) -> bool:
    """Whether functions beside `anchor` run on full values, in a trace of forward mode or of second derivatives.

    There torch creates tensors by size. The size of a slice differs between ranks, but one program serves all ranks.
    """
    is_sliced = anchor.on.is_tracing and not anchor.is_replicated
    return is_sliced and (torch_private.in_forward_mode() or torch_private.in_second_order())


def _is_whole(x: Sharded) -> bool:
    """Whether functions of `x` run on all of its elements: every rank has them, or gathers them."""
    return x.is_replicated or _is_computed_in_full(x)


def _apply_elementwise(func: Callable[..., Any], anchor: Sharded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An elementwise function of this rank's slices, its tensors wrapped as values of the anchor's layout."""
    slices, more = [_to_slice(x, anchor) for x in args], {key: _to_slice(x, anchor) for key, x in kwargs.items()}
    result = func(*slices, **more)
    own = functools.partial(copy_alias, on=anchor.on, operands=[*slices, *more.values()])
    origin = follow_call(anchor, [*args, *kwargs.values()], hash_call(func, anchor, args, kwargs))
    return torch_private.map_pytree(lambda x: _wrap(own(x), anchor, origin) if isinstance(x, Tensor) else x, result)


def _wrap(x: Tensor, anchor: Sharded, origin: Origin) -> Sharded:
    """The value of the anchor's layout from a result on slices, or on full values."""
    value = anchor.slice_of(x) if _is_computed_in_full(anchor) else anchor.with_local(x)
    value.origin = origin
    return value


def _to_slice(x: Any, anchor: Sharded) -> Any:
    """The operand `x` as a slice that pairs with the anchor's, or in full where functions run on full values."""
    if is_sharded(x):
        rules.check_splits(x, anchor)
    if _is_computed_in_full(anchor):
        return _gather(x)
    if is_sharded(x):
        if x.form[:2] == anchor.form[:2]:
            return x.local
        x = x.gather_for(f"a function with {anchor.path}")
    if not isinstance(x, Tensor) or anchor.is_replicated:
        return x
    if x.ndim == 0 and anchor.ndim > 0:
        return move(BESIDE, x, anchor.perform_for("a number beside"), anchor.cut)
    return anchor.slice_of(x).local


def _apply_to_lists(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Sharded] = ()
) -> Any:
    """A function of lists of equal length, elementwise at each position. Each position has an anchor of its own.

    Raises:
        FzeroError: where the function writes into the list `written`, and a position has another anchor than that.
    """
    beside = tuple(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    rows = list(zip(*(x for x in args if isinstance(x, (list, tuple)) and any(map(_is_value, x)))))
    anchors = [_find_anchor("", (*row, *beside), {}) for row in rows]
    first = next((anchor for anchor in anchors if anchor is not None), None)
    for value, anchor in zip(written, anchors):
        if anchor is None or anchor.form[:2] != value.form[:2]:
            problem = "a list operation would write what differs between ranks, or broadcasts, into a slice"
            raise FzeroError(value.path, problem, "use the operation without its trailing underscore")

    def to_slices(x: Any) -> Any:
        if isinstance(x, (list, tuple)) and any(map(_is_value, x)):
            return [_gather(item) if anchor is None else _to_slice(item, anchor) for item, anchor in zip(x, anchors)]
        x = _gather(x)
        if first is None or _is_computed_in_full(first) or not isinstance(x, Tensor) or x.ndim:
            return x
        return move(BESIDE, x, first.perform_for("a number beside"), first.cut)

    places = _find_places(anchors) if rules.name_of(func) in operations.PLACED else ()
    given = [*map(to_slices, args[: len(args) - len(places)]), *places]
    if places:
        given[:2] = [list(map(join_here, column, anchors)) for column in given[:2]]
    result = func(*given, **{key: to_slices(x) for key, x in kwargs.items()})
    if result is None or written:
        return None
    if places:
        result = list(map(cut_here, result, anchors))
    # One list, or a tuple of lists: `scale_by_adam` returns three.
    columns = result if isinstance(result, tuple) and result and isinstance(result[0], (list, tuple)) else (result,)
    call, beside = hash_call(func, first, args, kwargs), tuple(x for x in beside if is_sharded(x))
    wrapped = [
        [
            x if anchor is None else _wrap(x, anchor, follow_call(anchor, (*row, *beside), call, number))
            for x, anchor, row in zip(column, anchors, rows)
        ]
        for number, column in enumerate(columns)
    ]
    return tuple(wrapped) if columns is result else wrapped[0]


def _apply_to_slices(func: Callable[..., Any], name: str, leaves: Sequence[Any], *others: Any) -> Any:
    """A function of `rules.SLICE_OPS` on slices: its results are sums over leaves, or one new leaf for each leaf."""
    slices, options = [x if is_sharded(x) and not _is_whole(x) else None for x in leaves], others
    given = [_gather(x) if sliced is None else sliced.local for x, sliced in zip(leaves, slices)]
    if is_placed := name in operations.PLACED:
        places = _find_places(leaves)
        others, given = (*others[: -len(places)], *places), list(map(join_here, given, slices))
    results = func(given, *([_gather(x) for x in arg] if isinstance(arg, (list, tuple)) else arg for arg in others))
    if name in operations.SUMS:
        owners = [leaves[i % len(leaves)] for i in range(len(results))]
        rows = zip(results, owners, map(_find_cut, owners))
        return [x if cut is None else add_parts(x, perform_call(name, own, options, {}), cut) for x, own, cut in rows]
    anchors = [x if is_sharded(x) else None for x in leaves]
    call = hash_call(func, next((x for x in anchors if x is not None), None), options)
    results = list(map(cut_here, results, slices)) if is_placed else results
    return [x if each is None else _wrap(x, each, follow_call(each, [each], call)) for x, each in zip(results, anchors)]


def _find_cut(x: Any) -> Cut | None:
    """The axes over which the sum of what functions run on is no sum of all elements of a leaf. None for no axes."""
    if not is_sharded(x) or x.is_replicated:
        return None
    if not _is_whole(x):
        return x.cut
    return x.cut_of_part if x.form.layout.splits > 1 else None


def _find_places(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The last arguments of an operation of `PLACED`: a leaf is whole where all ranks are here."""
    return find_places([x if is_sharded(x) and x.on.rank is not None else None for x in leaves], _is_whole)


def _apply_blockwise(func: Callable[..., Any], updates: Sequence[Any], *rest: Any) -> tuple[list[Any], ...]:
    """A function of lists of updates, codes, scales, codes and scales, and of others: each position on its slices.

    Raises:
        FzeroError: for scales that do not lie as the blocks of their codes do.
    """
    columns, others = rest[:4], [_gather(x) for x in rest[4:]]
    for codes, scales in (columns[:2], columns[2:]):
        for code, scale in zip(codes, scales):
            if is_sharded(code) and scale.form[:2] != (code.form.layout.coarsen(BLOCK), code.index):
                problem = f"its 8-bit state lies otherwise than blocks of {BLOCK} elements"
                raise FzeroError(code.path, problem, "give the state that init or update returned")
    slices = [_to_slice(x, code) if is_sharded(code) else x for x, code in zip(updates, columns[0])]
    states = [[x.local if is_sharded(x) else x for x in column] for column in columns]
    anchor = next((code for code in columns[0] if is_sharded(code)), None)
    if anchor is not None and not _is_computed_in_full(anchor):
        others[0] = move(BESIDE, others[0], anchor.perform_for("a number beside"), anchor.cut)
    rows, call = list(zip(*columns, updates)), hash_call(func, anchor, rest[4:])

    def wrap(made: Sequence[Tensor], likes: Sequence[Any], number: int) -> list[Any]:
        return [
            _wrap(x, like, follow_call(like, row, call, number)) if is_sharded(like) else x
            for x, like, row in zip(made, likes, rows)
        ]

    return tuple(map(wrap, func(slices, *states, *others), (columns[0], *columns), range(len(columns) + 1)))


def _apply_on_owners(func: Callable[..., Any], given: Sequence[Any], blocks: Blocks, how: NewtonSchulz) -> list[Any]:
    """`orthogonalize` of a list: of values on the owners of their matrices, of plain tensors where they are.

    Raises:
        FzeroError: for a value that is differentiated: what moves to owners has no derivative.
    """
    values = [x for x in given if is_sharded(x)]
    for x in (x for x in values if _is_differentiated([x])):
        raise FzeroError(x.path, "orthogonalize has no derivative", "update outside the differentiated function")
    plain = [(x, row) for x, row in zip(given, blocks) if not is_sharded(x)]
    others = iter(func([x for x, _ in plain], [row for _, row in plain], how))
    places, cuts = [x.form[:2] for x in values], [row for x, row in zip(given, blocks) if is_sharded(x)]
    on = values[0].on.specify("orthogonalize", [describe_state(x.path, x.origin) for x in values])
    slices = iter(orthogonalize_on_owners(on, [x.local for x in values], places, cuts, how))
    call = hash_call(func, values[0], cuts, how)
    return [_wrap(next(slices), x, follow_call(x, [x], call)) if is_sharded(x) else next(others) for x in given]


def _is_value(x: Any) -> bool:
    return isinstance(x, Tensor)
