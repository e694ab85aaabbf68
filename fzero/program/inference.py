"""Inference: the kind of every value of a program, found by walking its graph once.

`RULES` says what each operation of `ops` takes and gives; aten operations join what they are given. What would let
ranks drift apart, mix slices of different leaves, or let padding into a value, is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fzero.optim.kernels import scale_by_adam
from fzero.program import ops
from fzero.program.kinds import (
    RAGGED,
    UNIFORM,
    Buffer,
    Kind,
    Slice,
    axes_of,
    broken,
    drifts,
    kind_of_state,
    path_of,
    words,
)
from fzero.program.ops import Node, is_random, name_of, overwritten, storage
from fzero.program.program import Program

_ELEMENTWISE = frozenset(
    """
    alias detach lift_fresh_copy _to_copy copy_ fill fill_ zero_ masked_fill masked_fill_
    floor_divide rsub hardswish log_sigmoid_forward real imag _conj resolve_conj _neg_view resolve_neg
    leaky_relu elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    leaky_relu_backward log_sigmoid_backward mish_backward softplus_backward softshrink_backward threshold_backward
    """.split()
)
"""Elementwise operations that torch does not tag as pointwise, or did not in 2.11."""
_REDUCING_LISTS = frozenset({"_foreach_norm", "_foreach_max", "_foreach_mm", "_foreach_powsum"})
"""Operations on lists that are not elementwise at each position."""
_SET = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})
_UNSET = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
"""Operations that make a tensor, whose elements are set or are what was in that memory."""
_OVERWRITES = frozenset({"copy_", "fill_", "zero_"})
"""Operations in place of whose result nothing is left of what was there."""
_LOCAL_SIZE = frozenset({"mean", "var", "var_mean", "std", "std_mean"})
"""Reductions that divide by the number of elements, which for a slice is not the leaf's."""
_OF_SOME = frozenset({"amax", "amin", "aminmax", "argmax", "argmin", "max", "median", "min"})
"""Reductions that fail where there is no element, as in some rank's slice."""
_TAKES_BUFFERS = frozenset({ops.wait, ops.whole, ops.part})


class Walk:
    """One walk over a program: the kinds found so far."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.per_rank = frozenset(program.mesh.names)
        """The kind of what differs between all ranks."""
        self.of_slices = frozenset({program.mesh.shard_axis, RAGGED})
        """The kind of what is computed from slices and is none."""
        self._kinds: dict[Node, Kind] = {}
        self._written: dict[Any, frozenset[str]] = {}
        """Memory -> the axes along which what was written into it differs."""
        self._slices: dict[Any, Slice] = {}
        """Memory -> a slice that is in it."""

    def run(self) -> dict[Node, Kind]:
        """The kind of each node."""
        for argument, node in zip(self.program.arguments, self.program.placeholders):
            self._note(node, self.per_rank if argument.bucket is None else kind_of_state(self.program, argument))
        for node in self.program.graph.nodes:
            if node.op == "get_attr":
                self._note(node, UNIFORM)
            elif node.op == "call_function":
                if node.target not in _TAKES_BUFFERS:
                    self._refuse_buffers(node)
                self._note(node, RULES.get(node.target, _aten)(self, node))
                self._write(node)
        return {node: self.of(node) for node in self._kinds}

    def of(self, given: Any) -> Kind:
        """The kind of an argument, with what has been written into its memory by now."""
        if not isinstance(given, fx.Node):
            return UNIFORM
        kind = self._kinds[given]
        return kind | self._written.get(storage(given), UNIFORM) if isinstance(kind, frozenset) else kind

    def _refuse_buffers(self, node: Node) -> None:
        for kind in map(self.of, node.all_input_nodes):
            if isinstance(kind, Buffer):
                problem = f"reads the padding of {words(self.program, kind)}"
                raise broken(self.program, node, problem, "take leaves of it")

    def _note(self, node: Node, kind: Kind) -> None:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not value.ndim and isinstance(kind, frozenset):
            kind -= {RAGGED}
        if isinstance(kind, Slice):
            self._slices[storage(node)] = kind
        self._kinds[node] = kind

    def _write(self, node: Node) -> None:
        """What shares memory with what a node overwrites now differs along the axes along which that does."""
        kind = self._kinds[node]
        for position, written in enumerate(overwritten(node)):
            new, memory = kind[position % len(kind)] if isinstance(kind, list) else kind, storage(written)
            if isinstance(new, frozenset) and new and memory in self._slices:
                raise drifts(self.program, node, new, self._slices[memory])
            self._written[memory] = self._written.get(memory, UNIFORM) | axes_of(self.program, new)


def infer(program: Program) -> dict[Node, Kind]:
    """The kind of each node.

    Raises:
        FzeroError: where a value that differs between ranks, or the slice of another leaf, meets a slice; where a
            buffer's padding would be read; where a collective is given another leaf than it names, or values of
            different sizes. With the leaf, the operation and the user's line.
    """
    return Walk(program).run()


# what aten operations give


def _aten(walk: Walk, node: Node) -> Kind:
    name, given = name_of(node), node.all_input_nodes
    if is_random(node) or _is_foreign(node):
        return walk.per_rank
    if name in _SET or name in _UNSET:
        return _made(walk, node)
    if name.startswith("_foreach_"):
        return _listwise(walk, node)
    if name in _LOCAL_SIZE and any(isinstance(walk.of(x), Slice) for x in given):
        way_out = "sum, and divide by the leaf's numel"
        raise broken(walk.program, node, f"{name} divides by the size of a slice", way_out)
    if name in _OF_SOME and not _is_pointwise(node) and _may_be_empty(walk, node.args[0]):
        raise broken(walk.program, node, f"{name} fails where a slice is empty", "join an element to it first")
    if name in _OVERWRITES and _fills_its_memory(node.args[0]):
        given = [x for x in given if x is not node.args[0] or isinstance(walk.of(x), Slice)]
    return _join(walk, node, given, _is_pointwise(node))


def _made(walk: Walk, node: Node) -> Kind:
    """The kind of a new tensor, which has nothing but shape and dtype from what is given."""
    kind = walk.per_rank if name_of(node) in _UNSET else UNIFORM
    like = walk.of(node.args[0]) if name_of(node).endswith("_like") else UNIFORM
    if isinstance(like, Slice):
        return like
    return kind | walk.of_slices if RAGGED in like else kind


def _may_be_empty(walk: Walk, node: Node) -> bool:
    """Whether some rank may hold no element of a value: of slices, and of what is made of them alone."""
    kind = walk.of(node)
    of_slices = isinstance(kind, Slice) or RAGGED in kind
    joined = name_of(node) == "cat" and not all(_may_be_empty(walk, part) for part in node.all_input_nodes)
    return of_slices and not joined


def _is_foreign(node: Node) -> bool:
    """Whether a node calls a collective of torch itself, of which nothing is known here."""
    return "c10d" in getattr(node.target, "namespace", "")


def _fills_its_memory(node: Node) -> bool:
    value = node.meta["val"]
    return value.is_contiguous() and value.untyped_storage().nbytes() == value.numel() * value.element_size()


def _is_pointwise(node: Node) -> bool:
    """Whether each element of the result depends on the elements at its position: nothing else is applied to slices by
    the rules of `Sharded` and their derivatives, but sums and extremes."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or name_of(node) in _ELEMENTWISE


def _join(walk: Walk, node: Node, given: Sequence[Node], pointwise: bool, beside: Sequence[Node] = ()) -> Kind:
    """The kind of a result that depends on these values, and on numbers `beside` them. What is computed from slices and
    is none differs between the ranks that hold different ones."""
    kinds = [kind for x in (*given, *beside) for kind in _flat(walk.of(x))]
    slices = {kind for kind in kinds if isinstance(kind, Slice)}
    varies = UNIFORM.union(*(kind for kind in kinds if isinstance(kind, frozenset)))
    if not (slices and pointwise):
        return varies | walk.of_slices if slices else varies
    if varies:
        raise drifts(walk.program, node, varies, next(kind for kind in kinds if isinstance(kind, Slice)))
    if len(slices) > 1:
        paths = " and ".join(sorted(path_of(walk.program, kind) for kind in slices))
        raise broken(walk.program, node, f"mixes slices of {paths}", "gather one of them")
    for shape in (list(x.meta["val"].shape) for x in given if walk.of(x) == UNIFORM):
        if shape:
            way_out = "take this rank's slice of it"
            raise broken(walk.program, node, f"has a whole {shape} meet a slice", way_out)
    (found,) = slices
    return found


def _listwise(walk: Walk, node: Node) -> Kind:
    """One kind a position of the lists that the operation takes."""
    args = [*node.args, *node.kwargs.values()]
    columns = [arg for arg in args if isinstance(arg, Sequence) and any(isinstance(x, fx.Node) for x in arg)]
    rows = [[x for x in row if isinstance(x, fx.Node)] for row in zip(*columns)]
    beside = [arg for arg in args if isinstance(arg, fx.Node)]
    pointwise = name_of(node) not in _REDUCING_LISTS
    return [_join(walk, node, row, pointwise, beside) for row in rows]


# what operations of `ops` take and give


def _gather(walk: Walk, node: Node) -> Kind:
    source, bucket, leaf, shape = node.args
    _expect(walk, node, source, Slice(bucket, leaf))
    _expect_shape(walk, node, shape, bucket, leaf)
    return UNIFORM


def _scatter(walk: Walk, node: Node) -> Kind:
    _expect_leaf(walk, node, *node.args[:3])
    return Slice(*node.args[1:3])


def _take(walk: Walk, node: Node) -> Kind:
    _expect_uniform(walk, node)
    _expect_leaf(walk, node, *node.args[:3])
    return Slice(*node.args[1:3])


def _beside(walk: Walk, node: Node) -> Kind:
    _expect_uniform(walk, node)
    return UNIFORM


def _spread(walk: Walk, node: Node) -> Kind:
    _expect_uniform(walk, node)
    return _join(walk, node, node.all_input_nodes, pointwise=True)


def _all_reduce(walk: Walk, node: Node) -> Kind:
    _expect_whole(walk, node, node.args[0])
    return walk.of(node.args[0]) - {node.args[2]}


def _all_reduce_list(walk: Walk, node: Node) -> Kind:
    for value in node.args[0]:
        _expect_whole(walk, node, value)
    return [walk.of(value) - {node.args[2]} for value in node.args[0]]


def _axis_index(walk: Walk, node: Node) -> Kind:
    return frozenset({node.args[0]})


def _draw(walk: Walk, node: Node) -> Kind:
    return walk.per_rank | _join(walk, node, node.all_input_nodes, pointwise=False)


def _all_gather(walk: Walk, node: Node) -> Kind:
    slices, bucket, leaves, _ = node.args
    for given, leaf in zip(slices, leaves, strict=True):
        _expect(walk, node, given, Slice(bucket, leaf))
    return Buffer(True, bucket, tuple(leaves))


def _reduce_scatter(walk: Walk, node: Node) -> Kind:
    fulls, bucket, leaves, _ = node.args
    for full, leaf in zip(fulls, leaves, strict=True):
        _expect_leaf(walk, node, full, bucket, leaf)
    return Buffer(False, bucket, tuple(leaves))


def _wait(walk: Walk, node: Node) -> Kind:
    kind = walk.of(node.args[0])
    if not isinstance(kind, Buffer) or kind.done:
        raise broken(walk.program, node, "waits for something that was not started", "wait once, for a collective")
    return replace(kind, done=True)


def _whole(walk: Walk, node: Node) -> Kind:
    _expect_shape(walk, node, node.args[4], node.args[1], _leaf_in(walk, node, gathered=True))
    return UNIFORM


def _part(walk: Walk, node: Node) -> Kind:
    return Slice(node.args[1], _leaf_in(walk, node, gathered=False))


def _leaf_in(walk: Walk, node: Node, *, gathered: bool) -> int:
    """The leaf that `whole` or `part` takes out of a buffer."""
    buffer, bucket, leaves, position, _ = node.args
    _expect(walk, node, buffer, Buffer(gathered, bucket, tuple(leaves), done=True))
    if not 0 <= position < len(leaves):
        raise broken(walk.program, node, f"takes leaf {position} of {len(leaves)} in a buffer", _MEND)
    return leaves[position]


def _item(walk: Walk, node: Node) -> Kind:
    """The kind of one result of several: its position's where the operation returned a list of leaves."""
    source, index = node.args
    kind = walk.of(source)
    return kind[index] if isinstance(kind, list) and not isinstance(node.meta["val"], (list, tuple)) else kind


RULES: dict[Any, Callable[[Walk, Node], Kind]] = {
    ops.gather: _gather,
    ops.scatter: _scatter,
    ops.take: _take,
    ops.beside: _beside,
    ops.spread: _spread,
    ops.all_reduce: _all_reduce,
    ops.axis_index: _axis_index,
    ops.draw: _draw,
    ops.all_gather: _all_gather,
    ops.reduce_scatter: _reduce_scatter,
    ops.wait: _wait,
    ops.whole: _whole,
    ops.part: _part,
    ops.all_reduce_list: _all_reduce_list,
    ops.adamw: _listwise,
    ops.adamw_: _listwise,
    scale_by_adam.default: _listwise,
    operator.getitem: _item,
}
"""Operation -> its kind, given the walk and the node. A pass that brings operations of its own adds them here."""


# refusals

_MEND = "mend the last pass"


def _expect(walk: Walk, node: Node, given: Node, expected: Kind) -> None:
    kind = walk.of(given)
    if kind != expected:
        raise broken(
            walk.program, node, f"takes {words(walk.program, kind)} for {words(walk.program, expected)}", _MEND
        )


def _expect_whole(walk: Walk, node: Node, given: Node) -> None:
    """A value of which each rank has as many elements."""
    kind = walk.of(given)
    if not isinstance(kind, frozenset) or RAGGED in kind:
        raise broken(walk.program, node, f"takes {words(walk.program, kind)} for a whole value", "gather it first")


def _expect_leaf(walk: Walk, node: Node, given: Node, bucket: str, leaf: int) -> None:
    _expect_whole(walk, node, given)
    _expect_shape(walk, node, given.meta["val"].shape, bucket, leaf)


def _expect_shape(walk: Walk, node: Node, got: Sequence[int], bucket: str, leaf: int) -> None:
    expected = walk.program.layouts[bucket].leaves[leaf]
    if tuple(got) != expected.shape:
        problem = f"has shape {list(got)} where {expected.path} has {list(expected.shape)}"
        raise broken(walk.program, node, problem, _MEND)


def _expect_uniform(walk: Walk, node: Node) -> None:
    kind = walk.of(node.args[0])
    if not isinstance(kind, frozenset):
        raise broken(walk.program, node, f"takes {words(walk.program, kind)} for a uniform value", "gather it first")
    if kind:
        raise drifts(walk.program, node, kind)


def _flat(kind: Kind) -> list[Kind]:
    return kind if isinstance(kind, list) else [kind]
