"""The bucket pass: one all-gather and one reduce-scatter for each bucket."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import torch

from fzero.layout.wires import wire
from fzero.passes.order import (
    count_depths,
    find_changes,
    find_dependences,
    find_mutable,
    is_cast,
    restore_order,
    sink_gathers,
)
from fzero.program import ops
from fzero.program.arguments import LeafMove, operand_of
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import is_call, record, storage


def bucket(program: Program) -> Program:
    """Turn the leaf gathers of a bucket into one all-gather, and the leaf scatters into one reduce-scatter. Leaves are
    views of the buffers.

    * A leaf that is gathered twice from the same slice is gathered once.
    * A state argument that is cast and then gathered is cast into the buffer that is sent, at each gather.
    * Gradients of a bucket that the step casts to one dtype, and uses nowhere else, are cast as the block that they
      arrive in.
    * Each all-gather stands at its first use, each reduce-scatter where the last of its gradients is ready.
    * Two sets of slices in one layout, as parameters and their moving average, keep gathers of their own.

    Same results, bit for bit, with kernels whose results do not depend on the alignment of their operands: a leaf may
    begin anywhere in a buffer. The results of MKL do depend on alignment, unless MKL_CBWR is set.
    """
    program = program.take()
    _merge_repeats(program)
    behind = find_dependences(find_mutable(program.graph))
    for members in _group_moves(program, ops.gather, behind):
        _move_together(program, members, behind)
    held = find_mutable(program.graph)
    restore_order(program.graph, held)  # an all-gather stands behind its last operand, and so maybe behind a leaf's use
    behind = find_dependences(held)
    for members in _group_moves(program, ops.scatter, behind):
        _move_together(program, members, behind)
    _cast_blocks(program)
    sink_gathers(program.graph)
    return program


def _merge_repeats(program: Program) -> None:
    """Let the first gather of a slice replace the later gathers of the same slice."""
    first: dict[tuple[object, ...], Node] = {}
    for node in program.graph.find_nodes(op="call_function", target=ops.gather):
        kept = first.setdefault(node.args, node)
        if kept is not node:
            program.substitute(node, kept)


def _group_moves(program: Program, target: Any, behind: Mapping[Node, list[Node]]) -> list[list[Node]]:
    """The nodes that call `target`, in groups that may become one collective.

    The nodes of a group have one bucket, dtype and tree of state, do not depend on each other, and name each leaf once.
    """
    moves = program.graph.find_nodes(op="call_function", target=target)
    depth = count_depths(program.graph, set(moves), behind)
    path = {node: argument.path for node, argument in zip(program.placeholders, program.arguments)}
    groups: dict[tuple[object, ...], dict[int, Node]] = {}
    for node in moves:
        move, how = LeafMove(*node.args), tuple(node.kwargs.items())
        key = (move.bucket, node.meta["val"].dtype, depth[node], _find_tree(program, node, path), how)
        repeats = (groups.setdefault((*key, repeat), {}) for repeat in count())
        next(members for members in repeats if move.leaf not in members)[move.leaf] = node
    return [[members[leaf] for leaf in sorted(members)] for members in groups.values()]


def _find_tree(program: Program, node: Node, path: dict[Node, str]) -> tuple[str, ...] | None:
    """The tree of state that a gathered slice comes from: ("0",) for the argument "0.blocks.1.w" of leaf "blocks.1.w".

    None for a scatter, and for a slice that comes from no argument.
    """
    if not is_call(node, ops.gather):
        return None
    leaf = program.layout_of(node).leaves[LeafMove(*node.args).leaf].path
    source = node
    while source.all_input_nodes:
        source = source.all_input_nodes[0]
    if source.op != "placeholder":
        return None
    given, own = path[source].split("."), leaf.split(".")
    while given and own and given[-1] == own[-1]:
        given.pop()
        own.pop()
    return tuple(given)


def _move_together(program: Program, members: list[Node], behind: Mapping[Node, list[Node]]) -> None:
    """Replace `members` by one collective, a wait, and for each member a node that takes its leaf, behind the last
    operand. A member that must stay `behind` a write into its operand takes the collective behind the write."""
    start = record(members[0]).together
    moves = [LeafMove(*node.args) for node in members]
    name, values, leaves = moves[0].bucket, [move.value for move in moves], [move.leaf for move in moves]
    sent = wire(program.layouts[name], tuple(leaves))
    written = [write for node in members for write in behind.get(node, ())]
    size, how = sent.stride, members[0].kwargs
    if record(start).starts == "gathered":
        size, (values, how) = sent.numel, _skip_casts(values)
    with program.graph.inserting_before(max([*values, *written]).next):
        pending = program.emit(start, values, name, leaves, size, **how)
        buffer = program.emit(ops.wait, pending)
        taken = [program.emit(record(start).taken, buffer, name, leaves, i, move.size) for i, move in enumerate(moves)]
    program.substitute_all(dict(zip(members, taken)))


def _cast_blocks(program: Program) -> None:
    """Cast each scattered block as one where the step casts every slice of the block to one dtype, has no other use of
    the slices, and writes into none of them."""
    changed = find_changes(program.graph)
    for start in program.graph.find_nodes(op="call_function", target=record(ops.scatter).together):
        (block,) = start.users
        casts = [user for part in block.users for user in part.users]
        if not all(map(is_cast, casts)) or changed & set(map(storage, (block, *casts))):
            continue
        dtypes = {node.meta["val"].dtype for node in casts}
        if len(dtypes) == 1:
            program.substitute_all({cast: operand_of(cast) for cast in casts})
            with program.graph.inserting_before(block):
                program.substitute(block, program.emit(ops.wait, start, dtype=dtypes.pop()))


def _skip_casts(slices: list[Node]) -> tuple[list[Node], dict[str, Any]]:
    """The slices before their casts, and the keyword with which an all-gather casts them instead."""
    given = [operand_of(node) if _is_cast(node) else node for node in slices]
    return given, {} if given == slices else {"dtype": slices[0].meta["val"].dtype}


def _is_cast(node: Node) -> bool:
    """Whether a node casts a state argument to another dtype, and does nothing else."""
    return (
        is_call(node, torch.ops.aten._to_copy.default)
        and node.kwargs.keys() == {"dtype"}
        and operand_of(node).op == "placeholder"
    )
