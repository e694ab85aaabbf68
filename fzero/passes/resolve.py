"""The resolve pass, the first of all: check the kinds of a traced program, and average its per-rank results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fzero.base.errors import FzeroError
from fzero.base.torch_private import schema_of
from fzero.passes.order import erase_dead, find_changes
from fzero.passes.verify import check_results, check_writes
from fzero.program import ops
from fzero.program.arguments import operand_of
from fzero.program.inference import infer
from fzero.program.kinds import RAGGED, UNIFORM, Kind, axes_of
from fzero.program.operation import Node
from fzero.program.ops.reductions import mean_over
from fzero.program.program import Program
from fzero.program.records import (
    averages_alone,
    find_bodies,
    find_calls,
    find_writes,
    is_call,
    name_of,
    record,
    storage,
)
from fzero.program.refusals import line_of, refuse_objective

_STRIDED = frozenset({"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"})
"""Operations that count elements from the start of their operand's memory."""


def resolve(program: Program) -> Program:
    """Give a traced program the meaning of a sharded step.

    * A floating 0-d result that is computed from per-rank data becomes its mean over the mesh.
    * The mean of a value that is the same on all ranks is that value: the all-reduce goes.
    * The `beside` marks go: only inference reads them.
    * A value that is gathered or scattered, and overwritten later, is copied first. So later passes may move its
      collective, whose result is the value's memory on a mesh of one rank. There a value whose slice is overwritten is
      copied as well.
    * A leaf or a reduced value that `as_strided` looks into is copied: it becomes a view of a buffer, and `as_strided`
      counts elements from the start of the memory.
    * Each result that is neither state nor of a given kind notes the axes along which it varies (`Result.varies`).
    * On a mesh with model axes a random draw notes the axes along which it differs.

    Raises:
        FzeroError: where a per-rank value meets a slice or is returned as state, where the step writes into its
            arguments, or looks at a fixed place of a batch's memory, with the leaf and the user's line; for a floating
            0-d result that differs along a model axis; for a model axis along which nothing differs.
    """
    given, program = program, ops.map_bodies(program, resolve)
    program = program.take() if program is given else program
    check_writes(program)
    kinds = infer(program)
    check_results(program, kinds)
    if program.model_axes:
        _note_draws(program, kinds)
        _check_model_axes(program, kinds)
    _average_results(program, kinds)
    program = _note_axes(program, kinds)
    changed = find_changes(program.graph)
    if changed:
        _copy_overwritten(program)
    _copy_for_strides(program)
    for node in find_calls(program.graph, lambda known: known.is_identity is not None):
        operand, is_identity = operand_of(node), record(node).is_identity
        assert is_identity is not None
        if is_identity(program, node, kinds[operand]) and storage(operand) not in changed:
            program.substitute(node, operand)  # else the node is a copy of what lies there by then
    erase_dead(program.graph)
    return program


def _note_draws(program: Program, kinds: dict[Node, Kind]) -> None:
    for node in program.graph.find_nodes(op="call_function", target=ops.draw):
        node.kwargs = {**node.kwargs, "along": program.mesh.join(kinds[node] - {RAGGED})}


def _check_model_axes(program: Program, kinds: dict[Node, Kind]) -> None:
    for result, node in zip(program.tensor_results, program.returned):
        value, along = node.meta["val"], axes_of(program, kinds[node]).intersection(program.model_axes)
        if result.bucket is None and result.kind is None and not value.ndim and value.is_floating_point() and along:
            raise refuse_objective(f"result {result.path!r}", along, line_of(node))
    used = _find_axes(program, kinds)
    for axis in () if program.is_body else program.model_axes:
        if program.mesh.size(axis) > 1 and axis not in used:
            data = tuple(name for name in program.mesh.names if name not in program.model_axes)
            problem = f"is a model axis of {program.mesh}, and nothing that {program.name} computes differs along it"
            way_out = f"give data={(*data, axis)} if ranks along it take different examples, else use a mesh without it"
            raise FzeroError(f"mesh axis {axis!r}", problem, way_out)


def _find_axes(program: Program, kinds: dict[Node, Kind]) -> frozenset[str]:
    """The axes along which values differ, in the bodies of loops too."""
    found, kinds_of = UNIFORM, list[Kind](kinds.values())
    for kind in kinds_of:
        if isinstance(kind, list):
            kinds_of += kind  # of a list of results, or of lists
        else:
            found |= axes_of(program, kind)
    return found.union(*(_find_axes(body, infer(body)) for body in find_bodies(program.graph)))


def _copy_overwritten(program: Program) -> None:
    """Let each gather and scatter whose operand a later node writes into read a copy of the operand. On a mesh of one
    rank along the axes of the collective a slice is its operand's memory, and counts as the operand."""
    written_later: set[object] = set()
    for node in reversed(list(program.graph.nodes)):
        if is_call(node, ops.gather, ops.scatter) and written_later.intersection(
            map(storage, (operand_of(node), node) if _is_alone(program, node) else (operand_of(node),))
        ):
            with program.graph.inserting_before(node):
                node.replace_input_with(operand_of(node), program.emit(torch.ops.aten.clone.default, operand_of(node)))
        written_later.update(storage(written) for written in find_writes(node))


def _is_alone(program: Program, node: Node) -> bool:
    """Whether a rank gathers, or scatters, with no other rank."""
    return averages_alone(program, node) if is_call(node, ops.scatter) else program.layout_of(node).world == 1


def _copy_for_strides(program: Program) -> None:
    """Let each `as_strided` of state, or of a collective's result, read a copy, which begins memory of its own.

    Raises:
        FzeroError: for a storage offset into the memory of a batch: only the caller knows where a batch lies.
    """
    strided = find_calls(program.graph, lambda known: known.name in _STRIDED)
    if not strided:
        return
    roots: dict[object, Node] = {}
    for node in program.graph.nodes:
        roots.setdefault(storage(node), node)
    given = dict(zip(program.placeholders, program.arguments))
    for node in strided:
        owner = given.get(roots[storage(operand_of(node))])
        if owner is not None and owner.bucket is None and _find_storage_offset(node) is not None:
            raise FzeroError(
                node.stack_trace or f"argument {owner.path}",
                f"{name_of(node)} with storage_offset {_find_storage_offset(node)} reads a fixed place of the memory "
                f"of argument {owner.path}, which lies elsewhere on other ranks and in other calls",
                "leave storage_offset out, or clone the batch first",
            )
    state = {node for node, argument in given.items() if argument.bucket is not None}
    for root in {roots[storage(operand_of(node))]: None for node in strided}:
        if root in state or (root.op == "call_function" and record(root).perform is not None):
            users = [user for user in root.users if user.op != "output"]
            with program.graph.inserting_after(root):
                copy = program.emit(torch.ops.aten.clone.default, root)
            for user in users:
                user.replace_input_with(root, copy)
            program.refresh([copy])


def _find_storage_offset(node: Node) -> Any:
    """The argument `storage_offset` of a node of `_STRIDED`, None where there is none."""
    names = [argument.name for argument in schema_of(node.target).arguments]
    return node.kwargs.get("storage_offset", dict(zip(names, node.args)).get("storage_offset"))


def _average_results(program: Program, kinds: dict[Node, Kind]) -> None:
    """Replace each floating 0-d result that differs between ranks by its mean over the axes along which it differs."""
    returned = list(program.returned)
    for position, result in enumerate(program.tensor_results):
        value = returned[position].meta["val"]
        if result.bucket is None and result.kind is None and value.ndim == 0 and value.is_floating_point():
            value_of, differs = returned[position], kinds[returned[position]]
            if differs:
                with program.graph.inserting_before(program.output):
                    mean = mean_over(program, value_of, differs)
                mean.stack_trace, kinds[mean], returned[position] = value_of.stack_trace, UNIFORM, mean
    program.output.args = (returned,)


def _note_axes(program: Program, kinds: dict[Node, Kind]) -> Program:
    """The program with the axes along which each result varies that has no kind of its own."""
    nodes = iter(program.returned)

    def note(result: Any) -> Any:
        if result.is_constant:
            return result
        kind = kinds[next(nodes)]
        is_known = result.bucket is not None or result.kind is not None  # its kind has the axes
        return result if is_known else replace(result, varies=axes_of(program, kind))

    return replace(program, results=tuple(map(note, program.results)))
