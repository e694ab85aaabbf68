"""Parts of gathered buffers that the loop of a forward pass keeps, turn by turn, for the loop of its backward pass."""

from __future__ import annotations

from typing import Any

from fzero import Program, ops
from fzero.variants.parts import gather_parts, keep_part, list_gathers


def keep_for_later_loops(program: Program, axis: str) -> None:
    """Let a turn that gathers leaves of its layer keep a part of the buffer, where a turn of a later loop gathers these
    leaves, or some of them: that one gathers the parts, along `axis`. Changes the graphs of the program and of its
    loops' bodies."""
    known, lists = list[tuple[Any, Any, set[Any]]](), dict[Any, Any]()
    for loop in program.graph.find_nodes(op="call_function", target=ops.loop):
        body = ops.copy_body(loop)
        for node in list_gathers(body):
            leaves = _find_leaves(loop, node)
            found = [(earlier, first) for earlier, first, has in known if earlier is not loop and leaves <= has]
            if not leaves or not found:
                known.append((loop, node, leaves))
                continue
            ((earlier, first), *_), (_, bucket, _, _) = found, node.args
            path, kind = f"hpz.{bucket}", frozenset({axis, *program.layouts[bucket].split_axes})
            if first not in lists:
                part = _keep_part(ops.Loop(*earlier.args).body, first, axis)
                lists[first] = ops.return_rows(program, earlier, path, part, kind)
            _gather_parts(body, node, first, ops.take_rows(loop, path, lists[first], kind), axis)


def _keep_part(body: Program, node: Any, axis: str) -> Any:
    (buffer,), (_, bucket, leaves, numel) = node.users, node.args
    with body.graph.inserting_after(buffer):
        return body.emit(keep_part, buffer, bucket, leaves, numel // body.mesh.size(axis), axis)


def _gather_parts(body: Program, node: Any, first: Any, part: Any, axis: str) -> None:
    """Gather parts of what the earlier turn's node `first` gathered, in the place of a node."""
    (buffer,), (_, bucket, leaves, numel) = node.users, first.args
    for user in list(buffer.users):
        if ops.is_call(user, ops.whole):
            view = ops.BufferView(*user.args)
            position = list(leaves).index(view.leaves[view.position])
            user.args = tuple(view._replace(leaves=leaves, position=position))
        elif ops.is_call(user, keep_part):  # for a later gather of this turn
            user.args = (buffer, bucket, leaves, numel // body.mesh.size(axis), axis)
    with body.graph.inserting_before(node):
        body.substitute(node, body.emit(gather_parts, part, bucket, leaves, numel, axis))
    body.refresh_with([buffer])


def _find_leaves(loop: Any, node: Any) -> set[Any]:
    """The leaves that a gather of a loop's body gathers, each with its slices of all turns; none without such lists."""
    given, (slices, _, leaves, _) = ops.Loop(*loop.args), node.args
    items = dict(zip(given.body.placeholders[len(given.carry) + len(given.xs) :], given.lists))
    rows: list[Any] = [items.get(x) for x in slices]
    is_known = all(isinstance(x, list) for x in rows)
    return {(leaf, *node.kwargs.items(), *each) for leaf, each in zip(leaves, rows)} if is_known else set()
