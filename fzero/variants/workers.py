"""Each position along an axis as a worker that trains weights and optimizer state of its own, with ZeRO inside."""

from __future__ import annotations

from typing import Any

import torch

from fzero import FzeroError, Program, ops

aten = torch.ops.aten


def train_apart(program: Program, name: str, axis: str) -> tuple[Program, list[tuple[str, int, Any, Any]]]:
    """Leave an axis out of the mean of gradients, and let all that a step trains be state of the pass, of which each
    position along the axis has its own. It begins as what the first step is given; the step returns what it is given.
    Returns also each weight's path, place among the results, node of the old value, and node of a worker's new one."""
    if program.is_body:
        return program, []  # the step with its loop is refused
    (scatters, loops, sums), mesh = map(program.find, (ops.scatter, ops.loop, ops.all_reduce)), program.mesh
    whole = [x for x in sums if x.kwargs.get("leaf")]
    if loops or whole or not scatters or program.model_axes or mesh.replica_axes != (axis,):
        problem = f"finds {len(scatters)} scatters, {len(loops)} loops and {len(whole)} whole leaves on {mesh}"
        raise FzeroError(f"pass {name!r}", problem, f"put it before='bucket', without loops, on a mesh with {axis!r}")
    program, count = program.copy().step_count()
    trained, news, weights = set[Any](), dict[int, Any](), []
    for node in program.graph.find_nodes(op="call_function", target=ops.scatter):
        node.kwargs = {**node.kwargs, "replicas": False}
        trained.add(node.args[1:3])
    with program.graph.inserting_after(program.placeholders[-1]):
        first = program.emit(aten.eq.Scalar, count, 0)
    given: Any = {x.path: (x, node) for x, node in zip(program.arguments, program.placeholders)}
    for at, (result, new) in enumerate(zip(program.tensor_results, program.output.args[0])):
        argument, old = given.get(result.replaces, (None, new))
        is_state = argument is not None and argument.bucket is not None and old is not new
        if is_state and argument.flag:  # such as a gradient that is not finite: all workers hear of it
            with program.graph.inserting_before(program.output):
                news[at] = program.emit(ops.all_reduce, new, "sum", axis)
        elif is_state and not program.layouts[argument.bucket].replicated:
            users, path, leaf = list(old.users), f"{name}.{argument.path}", (argument.bucket, argument.leaf)
            casts = [x for x in old.users if ops.is_call(x, aten._to_copy.default)]
            if leaf in trained and any(ops.is_call(user, ops.gather) for x in (old, *casts) for user in x.users):
                trained.remove(leaf)
                weights.append((path, at, old, new))
            program, own = program.add_state(path, like=old, differs=(axis,))
            with program.graph.inserting_after(first):
                mine = program.emit(aten.where.self, first, old, own)
            for user in users:
                user.replace_input_with(old, mine)
            program.return_state(path, new)
            news[at] = old
    if lost := sorted(program.layouts[bucket].leaves[leaf].path for bucket, leaf in trained):
        raise FzeroError(f"pass {name!r}", f"finds no new value of {lost}", "return all that the step trains")
    return return_instead(program, news), weights


def return_instead(program: Program, news: dict[int, Any]) -> Program:
    """Let the step return other nodes, by their place among the results."""
    program.output.args = ([news.get(i, x) for i, x in enumerate(program.output.args[0])],)
    return program
