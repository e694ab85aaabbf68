"""Parts of gathered buffers that the loop of a forward pass keeps, turn by turn, for the loop of its backward pass."""

from __future__ import annotations

from typing import Any

from fzero import Program, ops
from fzero.variants.parts import gather_parts, keep_part, list_gathers


def keep_for_later_loops(program: Program, axis: str) -> None:
    """Let a turn that gathers a bucket of its layer keep a part of it, where a turn of a later loop gathers the bucket
    again: that one gathers these parts, along `axis`. Changes the graphs of the program and of its loops' bodies."""
    first = dict[Any, tuple[Any, Any]]()
    lists = dict[Any, Any]()
    for loop in program.graph.find_nodes(op="call_function", target=ops.loop):
        body = ops.copy_body(loop)
        for node in list_gathers(body):
            _, bucket, leaves, numel = node.args
            key = _find_key(loop, node)
            earlier, gathered = first.setdefault(key, (loop, node)) if key else (loop, node)
            if earlier is loop:
                continue
            path, kind = f"hpz.{bucket}", frozenset({axis, *program.layouts[bucket].split_axes})
            if key not in lists:
                part = _keep_part(ops.Loop(*earlier.args).body, gathered, axis)
                lists[key] = ops.return_rows(program, earlier, path, part, kind)
            item = ops.take_rows(loop, path, lists[key], kind)
            for again in [x for (buffer,) in [node.users] for x in buffer.users if ops.is_call(x, keep_part)]:
                body.substitute(again, item)
            with body.graph.inserting_before(node):
                body.substitute(node, body.emit(gather_parts, item, bucket, leaves, numel, axis))


def _keep_part(body: Program, node: Any, axis: str) -> Any:
    """The part that a turn keeps of what it gathers."""
    (buffer,), (_, bucket, leaves, numel) = node.users, node.args
    for known in (x for x in buffer.users if ops.is_call(x, keep_part)):
        return known
    with body.graph.inserting_after(buffer):
        return body.emit(keep_part, buffer, bucket, leaves, numel // body.mesh.size(axis), axis)


def _find_key(loop: Any, node: Any) -> Any:
    """What a gather of a loop's body gathers in all turns: slices and leaves. None where no list has the slices."""
    given, (slices, bucket, leaves, _) = ops.Loop(*loop.args), node.args
    first = len(given.carry) + len(given.xs)
    items = dict(zip(given.body.placeholders[first:], given.lists))
    rows = [items.get(x) for x in slices]
    if not all(isinstance(x, list) for x in rows):
        return None
    return (*map(tuple, rows), tuple(given.layers.get(bucket, (bucket,))), *leaves, *node.kwargs.items())
