"""Kinds: which values of a program are sharded, uniform or per-rank, found by walking its graph once.

    sharded    one global value of which this rank holds a slice: "sharded"
    otherwise  the mesh axes along which the value differs between ranks, a frozenset
               uniform, the same everywhere: none of them
               per-rank, the batch and random draws and what is computed from them: all of them

After the varying and invariant values of JAX's shard_map. A value that differs between ranks and meets a slice, or is
returned as state, would let ranks drift apart and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fzero import ops
from fzero.errors import FzeroError
from fzero.ops import Node, is_call, name_of, overwritten, storage
from fzero.program import Program

SHARDED = "sharded"
UNIFORM: frozenset[str] = frozenset()
Kind = Any  # one of these, or for a list of leaves a tuple of them

_KEEPS_SLICE = {
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.full_like.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.lift_fresh_copy.default,
}
_UNTAGGED = frozenset(
    """
    fill fill_ masked_fill masked_fill_ hardswish rsub floor_divide log_sigmoid_forward real imag _conj resolve_conj
    _neg_view resolve_neg
    """.split()
)
"""Elementwise operations that torch does not tag as pointwise, besides derivatives."""
_SHAPE_ONLY = {
    "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like",
}  # fmt: skip


def resolve(program: Program) -> Program:
    """`program` with its kinds checked and used: floating 0-d results of per-rank data become means over the mesh, the
    mean of a value that is uniform is dropped, and so are the `beside` marks.

    Raises:
        FzeroError: where a per-rank value meets a slice or is returned as state, with the leaf and the user's line.
    """
    program = program.copy("kinds")
    kinds = infer(program)
    _check_results(program, kinds)
    _average_results(program, kinds)
    for node in list(program.graph.nodes):
        if is_call(node, ops.beside) or _is_needless_mean(node, kinds):
            program.substitute(node, node.args[0])
    program.graph.eliminate_dead_code()
    return program


def infer(program: Program) -> dict[Node, Kind]:
    """The kind of each node.

    Raises:
        FzeroError: where a per-rank value meets a slice, with the leaf and the user's line.
    """
    kinds: dict[Node, Kind] = {}
    for argument, node in zip(program.arguments, program.placeholders):
        kinds[node] = _kind_of_argument(program, argument.bucket)
    _check_pure(program)
    for node in program.graph.nodes:
        if node.op == "get_attr":
            kinds[node] = UNIFORM
        elif node.op == "call_function":
            kinds[node] = _kind(program, node, kinds)
            if overwritten(node):
                _spread_to_views(node, kinds)
    return kinds


def _spread_to_views(node: Node, kinds: dict[Node, Kind]) -> None:
    """What shares the memory that a node has overwritten now differs along the axes along which its result does."""
    changed = {storage(written) for written in overwritten(node)}
    for other, kind in kinds.items():
        if storage(other) in changed and SHARDED not in (kind, kinds[node]) and not isinstance(kinds[node], tuple):
            kinds[other] = kind | kinds[node]


def _check_pure(program: Program) -> None:
    """Refuse operations that write into an argument, a gathered leaf or a captured constant."""
    given = {storage(node): program.path_of(arg) for arg, node in zip(program.arguments, program.placeholders)}
    for node in program.graph.nodes:
        if is_call(node, ops.gather):
            given[storage(node)] = program.layout_of(node).leaves[node.args[2]].path
        elif node.op == "get_attr":
            given[storage(node)] = "a tensor that the step captured"
        for memory in map(storage, overwritten(node)):
            if memory in given:
                raise FzeroError(
                    given[memory],
                    f"{name_of(node)} writes into it, but a step is a pure function ({node.stack_trace})",
                    "write the operation without its trailing underscore, or clone first",
                )


def _per_rank(program: Program) -> Kind:
    return frozenset(program.mesh.names)


def _kind_of_argument(program: Program, bucket: str | None) -> Kind:
    if bucket is None:
        return _per_rank(program)
    return UNIFORM if program.layouts[bucket].replicated else SHARDED


def _kind(program: Program, node: Node, kinds: dict[Node, Kind]) -> Kind:
    name = name_of(node)
    if is_call(node, ops.gather):
        return UNIFORM
    if is_call(node, ops.scatter):
        return SHARDED
    if is_call(node, ops.all_reduce):
        return kinds[node.args[0]] - {node.args[2]}
    if is_call(node, ops.axis_index):
        return frozenset({node.args[0]})
    if is_call(node, ops.take, ops.beside, ops.spread):
        if kinds[node.args[0]] != UNIFORM:
            raise _meets_a_slice(program, node, kinds[node.args[0]])
        return UNIFORM if is_call(node, ops.beside) else SHARDED
    if name == "getitem":
        return _item(node, kinds)
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return _per_rank(program)
    if name.startswith("_foreach_") or name in _LISTWISE:
        return _listwise(program, node, kinds)
    given = [kinds[n] for n in node.all_input_nodes]
    flat = {kind for item in given for kind in (item if isinstance(item, tuple) else (item,))}
    if name in _SHAPE_ONLY and (SHARDED not in flat or node.target not in _KEEPS_SLICE):
        return UNIFORM
    return _join(program, node, flat, _is_pointwise(node))


def _is_pointwise(node: Node) -> bool:
    """Whether each element of the result depends on the elements at its position: nothing else is applied to slices by
    the rules of `Sharded` and their derivatives, but sums and extremes."""
    name = name_of(node)
    tagged = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _KEEPS_SLICE
    return tagged or name in _UNTAGGED or name.endswith("_backward")


def _join(program: Program, node: Node, flat: set[Kind], pointwise: bool) -> Kind:
    """The kind of a result that depends on values of these kinds. What is computed from a slice but is no slice differs
    between the ranks that hold different slices."""
    if SHARDED in flat and pointwise:
        if flat - {SHARDED, UNIFORM}:
            raise _meets_a_slice(program, node, UNIFORM.union(*(flat - {SHARDED})))
        return SHARDED
    partial = {frozenset({program.mesh.shard_axis})} if SHARDED in flat else set()
    return UNIFORM.union(*(flat - {SHARDED}), *partial)


def _listwise(program: Program, node: Node, kinds: dict[Node, Kind]) -> Kind:
    """One kind a position of the lists that the operation takes."""
    columns = [arg for arg in node.args if isinstance(arg, Sequence) and any(isinstance(x, fx.Node) for x in arg)]
    beside = {kinds[arg] for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, fx.Node)}
    return tuple(
        _join(program, node, beside | {kinds[x] for x in row if isinstance(x, fx.Node)}, True) for row in zip(*columns)
    )


def _item(node: Node, kinds: dict[Node, Kind]) -> Kind:
    """The kind of one result of several: its position's where the operation returned a list of leaves."""
    source, index = node.args
    kind = kinds[source]
    if not isinstance(kind, tuple) or isinstance(node.meta["val"], (list, tuple)):
        return kind
    return kind[index]


_LISTWISE = {"scale_by_adam"}


def _is_needless_mean(node: Node, kinds: dict[Node, Kind]) -> bool:
    """Whether a node averages (or takes the extreme of) a value along an axis on which it does not differ."""
    return is_call(node, ops.all_reduce) and node.args[1] != "sum" and node.args[2] not in kinds[node.args[0]]


def _average_results(program: Program, kinds: dict[Node, Kind]) -> None:
    """Floating 0-d results that differ between ranks become their mean over the axes along which they do."""
    returned = list(program.output.args[0])
    tensors = [result for result in program.results if not result.is_constant]
    for position, (result, node) in enumerate(zip(tensors, returned)):
        value = node.meta["val"]
        if result.bucket is None and value.ndim == 0 and value.is_floating_point():
            for axis in sorted(kinds[node], key=program.mesh.names.index):
                with program.graph.inserting_before(program.output):
                    returned[position] = program.emit(ops.all_reduce, returned[position], "avg", axis)
                kinds[returned[position]] = kinds[returned[position].args[0]] - {axis}
    program.output.args = (returned,)


def _check_results(program: Program, kinds: dict[Node, Kind]) -> None:
    tensors = [result for result in program.results if not result.is_constant]
    for result, node in zip(tensors, program.output.args[0]):
        if result.bucket is not None and kinds[node] not in (SHARDED, UNIFORM):
            raise FzeroError(
                program.path_of(result),
                f"result {result.path!r} is state but depends on this rank's batch: ranks would drift apart "
                f"({node.stack_trace})",
                _average_first(kinds[node]),
            )


def _average_first(axes: Kind) -> str:
    return f"make it the same on every rank first, with {' and '.join(f'fzero.pmean(x, {a!r})' for a in sorted(axes))}"


def _meets_a_slice(program: Program, node: Node, axes: Kind) -> FzeroError:
    return FzeroError(
        _leaf_near(program, node),
        f"a per-rank value meets a slice of this leaf in {name_of(node)}: ranks would drift apart ({node.stack_trace})",
        _average_first(axes),
    )


def _leaf_near(program: Program, node: Node) -> str:
    """The path of the leaf that a node works on: its own, or that of the nearest state argument behind it."""
    if is_call(node, ops.take):
        return program.layout_of(node).leaves[node.args[2]].path
    given = zip(program.placeholders, program.arguments)
    state = {node: program.path_of(argument) for node, argument in given if argument.bucket is not None}
    frontier = [node, *node.users]
    for _ in range(len(program.graph.nodes)):
        for near in frontier:
            if near in state:
                return state[near]
        frontier = [source for near in frontier for source in near.all_input_nodes]
        if not frontier:
            break
    return node.name
