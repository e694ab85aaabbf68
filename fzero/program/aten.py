"""Aten: the record of an operation of torch, from its schema and tags, with tables that correct these.

A table stands here where schema and tags do not say enough; its docstring gives the reason.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fzero.base.torch_private import overload_name, schema_of
from fzero.program.arguments import Item, operand_of
from fzero.program.kinds import RAGGED, UNIFORM, Kind, Slice
from fzero.program.operation import NO_WORK, Node, Operation, Work, nbytes, no_operands, values_of

if TYPE_CHECKING:
    from fzero.program.inference import Walk

_aten = torch.ops.aten
_VIEWS = frozenset(
    """
    alias detach view _unsafe_view t transpose permute unsqueeze squeeze expand slice select as_strided unfold diagonal
    real
    """.split()
)
"""Operations of one tensor whose result is a view of the tensor. `_unsafe_view` is one, though its schema denies it."""
_CHEAP_COPIES = frozenset({"_to_copy", "clone"})
"""Copies that are cheaper to make again than to keep a gathered leaf alive for."""
_QUIET = frozenset(
    """
    view t transpose permute detach alias unsqueeze squeeze expand slice select _unsafe_view as_strided split ones_like
    zeros_like
    """.split()
)
"""Operations that take too little time to be named in a listing."""
_ELEMENTWISE = frozenset(
    """
    alias detach lift_fresh_copy _to_copy copy_ fill fill_ zero_ masked_fill masked_fill_
    floor_divide rsub hardswish log_sigmoid_forward real imag _conj resolve_conj _neg_view resolve_neg
    leaky_relu elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    leaky_relu_backward log_sigmoid_backward mish_backward softplus_backward softshrink_backward threshold_backward
    """.split()
)
"""Elementwise operations without torch's tag `pointwise`, in 2.13 or in 2.11."""
_REDUCING_LISTS = frozenset({"_foreach_norm", "_foreach_max", "_foreach_mm", "_foreach_powsum"})
"""List operations whose result at a position is not elementwise in the operand at the position."""
_SET = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})
_UNSET = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
"""Operations that make a tensor: elements are set by `_SET`, and are whatever was in the memory for `_UNSET`."""
_OVERWRITES = frozenset({"copy_", "fill_", "zero_"})
"""In-place operations that overwrite every element of their first operand without reading it."""
HIDDEN_WRITES: dict[str, tuple[str, ...]] = {
    "native_batch_norm": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
    "mkldnn_rnn_layer_backward": ("workspace",),
    "_cudnn_rnn": ("dropout_state",),
    "miopen_rnn": ("dropout_state",),
    "_cudnn_rnn_backward": ("reserve",),
    "miopen_rnn_backward": ("reserve",),
}
"""Operation -> the operands that its kernel writes into, though its schema does not say so.

`tests/program/test_aten.py` runs torch's operators and modules on CPU tensors, and finds which operands change. The
rows of cuDNN and MIOpen follow torch's source: these kernels move the same statistics, advance the state of dropout,
and use the reserve as scratch, which autograd clones where it needs the reserve again.
"""
_LOCAL_SIZE = frozenset({"mean", "var", "var_mean", "std", "std_mean"})
"""Reductions that divide by the number of elements, which is another number for a slice than for its leaf."""
_OF_SOME = frozenset({"amax", "amin", "aminmax", "argmax", "argmin", "max", "median", "min"})
"""Reductions that fail on a tensor without elements, which the slice of some rank may be."""
_OF_SOME_ROWS = frozenset({"embedding", "index", "index_select", "gather", "slice", "select"})
"""Operations that read only the elements of their first operand that they return."""


def _count_attention(is_causal: bool, query: Any, key: Any, value: Any) -> int:
    flops = sdpa_flop_count(query.shape, *_repeat_heads(query, key, value))
    return _take_causal(flops, query, key) if is_causal else flops


def _count_attention_backward(is_causal: bool, grad: Any, query: Any, key: Any, value: Any) -> int:
    flops = sdpa_backward_flop_count(grad.shape, query.shape, *_repeat_heads(query, key, value))
    return _take_causal(flops, query, key) if is_causal else flops


def _take_causal(flops: int, query: Any, key: Any) -> int:
    """The flops of the pairs that causal attention looks at: query i, counted from 0, with the first i + 1 keys.
    Kernels leave the other blocks of pairs out."""
    queries, keys = query.shape[-2], key.shape[-2]
    corner = min(queries, keys)
    pairs = corner * (corner + 1) // 2 + (queries - corner) * keys
    return int(flops * pairs // max(queries * keys, 1))


def _count_flash(operation: Any) -> Callable[..., int]:
    """What counts the flops of a fused attention of torch, or of its backward pass."""
    names = [argument.name for argument in operation.default._schema.arguments]
    at, is_backward = names.index("is_causal"), names[0].startswith("grad")

    def count(*args: Any, is_causal: bool = False, **_: Any) -> int:
        is_causal = args[at] if len(args) > at else is_causal
        if is_backward:
            return _count_attention_backward(is_causal, *args[:4])
        return _count_attention(is_causal, *args[:3])

    return count


def _repeat_heads(query: Any, *others: Any) -> list[Sequence[int]]:
    """The shapes of keys and values with as many heads as the query. torch counts with fewer since 2.13 only."""
    return [(x.shape[0], query.shape[1], *x.shape[2:]) for x in others]


def _count_product(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Of [..., m, k] and [..., k, n]. Where one of them has a dim of groups and the other has none, each row or column
    of that one is multiplied once, by the part of its group."""
    groups = a.shape[0] if len(a.shape) > len(b.shape) else 1
    return int(2 * a.numel() * b.shape[-1] // max(groups, 1))


def _count_added_product(total: Any, a: Any, b: Any, **_: Any) -> int:
    return _count_product(a, b)


_FLOPS: dict[Any, Callable[..., int]] = {
    **dict.fromkeys((_aten.mm, _aten._int_mm, _aten._grouped_mm, _aten._scaled_grouped_mm), _count_product),
    **dict.fromkeys((_aten.addmm_, _aten.baddbmm_), _count_added_product),
} | {
    operation: _count_flash(operation)
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for operation in (getattr(_aten, f"_scaled_dot_product_{kernel}{backward}") for backward in ("", "_backward"))
}
"""Operation -> a function of its operands that counts its flops: where torch's table lacks it or lacks fewer heads, and
for `mm`, where torch's function takes ten times as long."""


def describe(target: Any) -> Operation:
    """The record of an operation of torch. For any other function a record that assumes nothing."""
    name = getattr(target, "__name__", str(target)).partition(".")[0]
    schema = schema_of(target)
    views = name in ("_unsafe_view", "getitem") or (schema is not None and any(x.alias_info for x in schema.returns))
    writes = schema is not None and (name in HIDDEN_WRITES or any(map(_is_written, schema.arguments)))
    overwritten = _list_overwritten(name, schema)
    random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return Operation(
        name=name,
        target=target,
        fake=target,
        kind=_choose_rule(target, name),
        shares=(lambda node: True) if views else (lambda node: False),
        writes=partial(_find_writes, name) if writes else no_operands,
        overwrites=partial(_find_overwritten, overwritten) if overwritten else no_operands,
        work=(lambda node: NO_WORK)
        if name in _UNSET or (views and not writes)
        else partial(_estimate_work, name, views, writes, _find_flops(target)),
        is_quiet=name in _QUIET or target is operator.getitem,
        is_derived=_is_aten(target) and name in _VIEWS | _CHEAP_COPIES,
        is_pointwise=_is_pointwise(target, name),
        takes_shape=_is_aten(target) and name in _SET | _UNSET,
        is_random=_draws if random else (lambda node: False),
    )


def _is_aten(target: Any) -> bool:
    return getattr(target, "namespace", "") == "aten"


def _is_pointwise(target: Any, name: str) -> bool:
    """Whether an operation is elementwise: by its tag, by the table, or because it is the in-place form of such an
    operation. torch tags `abs` and `gelu`, and neither `abs_` nor `gelu_`."""
    if torch.Tag.pointwise in getattr(target, "tags", ()) or name in _ELEMENTWISE:
        return True
    if not (_is_aten(target) and name.endswith("_")):
        return False
    base = name.removesuffix("_")  # its overloads may have other names: `floor_divide_.Tensor`, `floor_divide.default`
    functional = getattr(getattr(_aten, base, None), overload_name(target), None)
    return base in _ELEMENTWISE or (functional is not None and _is_pointwise(functional, base))


def _find_writes(name: str, node: Node) -> list[Node]:
    """The operands that an operation writes into, by its schema and `HIDDEN_WRITES`; lists item by item.

    Normalization and noise with `training=False` change no operand besides the one that they return.
    """
    schema, operands = schema_of(node.target), _list_operands(node)
    written = [arg.name for arg in schema.arguments if _is_written(arg)]
    if operands.get("training") is False:
        returned = {name for x in schema.returns if x.alias_info for name in x.alias_info.before_set}
        written = [arg.name for arg in schema.arguments if _is_written(arg) and arg.alias_info.before_set & returned]
    else:
        written += HIDDEN_WRITES.get(name, ())
    given = [operands[name] for name in written]
    return [x for arg in given for x in (arg if isinstance(arg, (list, tuple)) else [arg]) if x is not None]


def _list_overwritten(name: str, schema: Any) -> tuple[str, ...]:
    """The arguments whose every element an operation overwrites, and does not read."""
    if schema is None:
        return ()
    first = (schema.arguments[0].name,) if name in _OVERWRITES else ()
    return first + tuple(x.name for x in schema.arguments if _is_written(x) and (x.kwarg_only or x.name == "noise"))


def _find_overwritten(names: Sequence[str], node: Node) -> list[Node]:
    operands = _list_operands(node)
    return [operands[name] for name in names if isinstance(operands[name], fx.Node)]


def _list_operands(node: Node) -> dict[str, Any]:
    """The values that a node passes for the arguments of its operation's schema, by name."""
    return {arg.name: find_operand(node, i, arg) for i, arg in enumerate(schema_of(node.target).arguments)}


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def find_operand(node: Node, position: int, argument: Any) -> Any:
    """The value that a node passes for an argument of its operation's schema: the default where it passes none."""
    default = node.args[position] if position < len(node.args) else argument.default_value
    return node.kwargs.get(argument.name, default)


def _draws(node: Node) -> bool:
    """Whether a node of a random aten operation draws: dropout of nothing, and noise without training, do not."""
    operands = _list_operands(node)
    is_off = any(operands.get(name) is False for name in ("training", "train"))
    return not (is_off or any(operands.get(name) == 0 for name in ("dropout_p", "dropout")))


def find_functional(target: Any) -> Any:
    """The operation that returns what a random operation writes into operands other than its first; None where torch
    has none."""
    if target in (_aten.rrelu_with_noise.default, _aten.rrelu_with_noise_.default):
        return _aten.rrelu_with_noise_functional.default  # the result, and the noise
    packet, overload = target.overloadpacket, overload_name(target)
    name = overload.removesuffix("out").removesuffix("_") or "default"
    if name == overload or name not in packet.overloads():
        return None
    functional = getattr(packet, name)
    is_pure = not any(map(_is_written, functional._schema.arguments))
    return functional if is_pure and len(functional._schema.returns) == 1 else None


def _estimate_work(name: str, views: bool, writes: bool, count: Callable[..., int] | None, node: Node) -> Work:
    """The flops and bytes of a node whose operation has this name, returns an operand or not, writes into operands or
    not, and whose flops a function of its operands and its result counts, if it has any.

    Flops are those of `torch.utils.flop_counter`: matrix products, convolutions, and attention. Causal attention counts
    the pairs that it looks at, about half; torch counts all. Every operation reads its operands and writes its result
    once. Views do no work.
    """
    written = values_of(_find_writes(name, node)) if writes else []
    made = None if views else node.meta.get("val")
    flops = 0
    if count is not None:
        args, kwargs = values_of((node.args, node.kwargs))
        flops = count(*args, **kwargs, out_val=node.meta["val"])
    return Work(
        flops, _count_bytes_read(node, name) + nbytes(made) + nbytes(written), flops if "attention" in name else 0
    )


def _find_flops(target: Any) -> Callable[..., int] | None:
    """The function that counts the flops of an operation, None where it has none."""
    packet = getattr(target, "overloadpacket", None)
    return _FLOPS.get(packet) or flop_registry.get(packet)


def _count_bytes_read(node: Node, name: str) -> int:
    given = [nbytes(source.meta.get("val")) for source in node.all_input_nodes]
    if name in _OF_SOME_ROWS and given:
        given[0] = min(given[0], nbytes(node.meta["val"]))
    return sum(given)


# the kind of the result


def _choose_rule(target: Any, name: str) -> Callable[[Walk, Node], Kind]:
    """The rule for the kinds of an operation's results."""
    if target is operator.getitem:
        return infer_item
    if "c10d" in getattr(target, "namespace", ""):
        return lambda walk, node: walk.per_rank  # nothing is known of the collectives of torch itself
    if name in _SET or name in _UNSET:
        return _infer_new
    return infer_lists if name.startswith("_foreach_") else infer


def infer(walk: Walk, node: Node) -> Kind:
    """The kind of the result of an aten operation.

    Raises:
        FzeroError: where a slice meets a value that differs between ranks, a slice of another leaf or a full tensor;
            where the operation gives another result for slices than for their leaf, as a mean does.
    """
    operation, given = walk.record(node), node.all_input_nodes
    name = operation.name
    if operation.is_random(node):
        return walk.per_rank
    if given and operation.shares(node) and not operation.writes(node):
        kind = walk.of_memory(given[0])
        if isinstance(kind, frozenset):
            return kind  # what lies in the memory counts where it is read
    if name in _LOCAL_SIZE and any(isinstance(walk.of(x), Slice) for x in given):
        raise walk.refuse(node, f"{name} divides by the size of a slice", "sum, and divide by the leaf's numel")
    if name in _OF_SOME and not operation.is_pointwise and _may_be_empty(walk, operand_of(node)):
        raise walk.refuse(node, f"{name} fails where a slice is empty", "join an element to it first")
    lost = operation.overwrites(node)
    return _infer_write(walk, node, lost) if lost else walk.join(node, given, operation.is_pointwise)


def _infer_write(walk: Walk, node: Node, lost: Sequence[Node]) -> Kind:
    """The kind of a result where the node overwrites the elements of the operands `lost`. These do not count, but what
    else lies in their memory does."""
    within = walk.find_source_within(node)  # of which elements that nothing has set stay so
    given = [x for x in node.all_input_nodes if x is not within and (x not in lost or isinstance(walk.of(x), Slice))]
    beside = [x for x in lost if x not in given and not _fills_its_memory(x)] + ([within] if within is not None else [])
    is_pointwise = walk.record(node).is_pointwise
    kind = walk.join(node, given, is_pointwise)
    if isinstance(kind, Slice):
        return walk.join(node, [*given, *beside], is_pointwise)
    return kind.union(*map(walk.of_memory, beside))


def _infer_new(walk: Walk, node: Node) -> Kind:
    """The kind of a new tensor, which takes only shape and dtype from its operand."""
    name = walk.name_of(node)
    like = walk.of(operand_of(node)) if name.endswith("_like") else UNIFORM
    if isinstance(like, Slice):
        return like
    if RAGGED in like:
        return walk.of_slices | (walk.per_rank if name in _UNSET else UNIFORM)
    if name in _UNSET:
        walk.leave_unset(node)
    return UNIFORM


def _may_be_empty(walk: Walk, node: Node) -> bool:
    """Whether some rank may hold no element of a value: of a slice, and of a value computed from slices alone."""
    kind = walk.of(node)
    of_slices = isinstance(kind, Slice) or RAGGED in kind
    joined = walk.name_of(node) == "cat" and not all(_may_be_empty(walk, part) for part in node.all_input_nodes)
    return of_slices and not joined


def _fills_its_memory(node: Node) -> bool:
    """Whether a value covers its whole storage, so that overwriting the value leaves nothing of the old contents."""
    value = node.meta["val"]
    return value.is_contiguous() and value.untyped_storage().nbytes() == value.numel() * value.element_size()


def infer_lists(walk: Walk, node: Node) -> Kind:
    """The kinds of the results of a list operation, one for each position."""
    args = [*node.args, *node.kwargs.values()]
    columns = [arg for arg in args if isinstance(arg, Sequence) and any(isinstance(x, fx.Node) for x in arg)]
    rows = [[x for x in row if isinstance(x, fx.Node)] for row in zip(*columns)]
    beside = [arg for arg in args if isinstance(arg, fx.Node)]
    pointwise = walk.name_of(node) not in _REDUCING_LISTS
    return [walk.join(node, row, pointwise, beside) for row in rows]


def infer_item(walk: Walk, node: Node) -> Kind:
    """The kind of an item of several results: the kind at its position, where each position has its own. Lists of
    results have one list of kinds for all of them, or one for each."""
    source, index = Item(*node.args)
    kind = walk.of(source)
    if not isinstance(kind, list):
        return kind
    is_each = not isinstance(node.meta["val"], (list, tuple)) or (index < len(kind) and isinstance(kind[index], list))
    return kind[index] if is_each else kind
