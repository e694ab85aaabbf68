"""Each position along an axis as a worker that trains weights and optimizer state of its own, with ZeRO inside."""

from __future__ import annotations

from typing import Any

import torch

from fzero import FzeroError, Program, ops

aten = torch.ops.aten


def train_apart(program: Program, name: str, axis: str) -> tuple[Program, list[tuple[str, int, Any, Any]]]:
    """Let the mean of gradients leave out an axis, and all that a step trains be state of the pass, of which ranks
    along the axis have their own. It begins as what the first step is given. The step returns its state as it was.
    Returns also, of each weight, the path of its state, its place among the results, its old node and a worker's new
    one."""
    scatters, loops = program.find(ops.scatter), program.find(ops.loop)
    whole, mesh = [x for x in program.find(ops.all_reduce) if x.kwargs.get("leaf")], program.mesh
    if program.is_body or loops or whole or not scatters or program.model_axes or axis not in mesh.replica_axes:
        problem = f"finds {len(scatters)} scatters, {len(loops)} loops and {len(whole)} whole leaves on {mesh}"
        raise FzeroError(f"pass {name!r}", problem, f"put it before='bucket', without loops, on a mesh with {axis!r}")
    program, count = program.copy().step_count()
    trained, news, weights = set[Any](), dict[int, Any](), []
    for node in program.graph.find_nodes(op="call_function", target=ops.scatter):
        node.kwargs = {**node.kwargs, "replicas": False}
        trained.add(node.args[1:3])
    with program.graph.inserting_after(program.placeholders[-1]):
        first = program.emit(aten.eq.Scalar, count, 0)
    given = {x.path: (x, node) for x, node in zip(program.arguments, program.placeholders)}
    for at, (result, new) in enumerate(zip(program.tensor_results, program.output.args[0])):
        argument, old = given.get(result.replaces, (None, new))
        if argument and argument.flag:  # such as a gradient that is not finite: known to all workers
            with program.graph.inserting_before(program.output):
                news[at] = program.emit(ops.all_reduce, new, "sum", axis)
        elif argument and argument.bucket and old is not new and not program.layouts[argument.bucket].replicated:
            users, path = list(old.users), f"{name}.{argument.path}"
            casts = [x for x in old.users if ops.is_call(x, aten._to_copy.default)]
            is_gathered = any(ops.is_call(user, ops.gather) for x in (old, *casts) for user in x.users)
            if is_gathered and (argument.bucket, argument.leaf) in trained:
                trained.remove((argument.bucket, argument.leaf))
                weights.append((path, at, old, new))
            program, own = program.add_state(path, like=old, differs=(axis,))
            with program.graph.inserting_after(first):
                mine = program.emit(aten.where.self, first, old, own)
            for user in users:
                user.replace_input_with(old, mine)
            program.return_state(path, new)
            news[at] = old
    if trained:
        raise FzeroError(f"pass {name!r}", f"finds no new value of {sorted(trained)}", "return all that is trained")
    return_instead(program, news)
    return program, weights


def return_instead(program: Program, news: dict[int, Any]) -> None:
    """Let the step return other nodes, by their place among the results."""
    program.output.args = ([news.get(i, x) for i, x in enumerate(program.output.args[0])],)
