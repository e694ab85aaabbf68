"""Each position along an axis as a worker that trains weights and optimizer state of its own, with ZeRO inside."""

from __future__ import annotations

import torch

from fzero import FzeroError, Program, ops
from fzero.variants.origins import StateChange, find_origins, list_changes, return_instead
from fzero.variants.roles import find_roles

aten = torch.ops.aten


def train_apart(program: Program, name: str, axis: str) -> tuple[Program, list[StateChange]]:
    """Leave an axis out of the mean of gradients, and let slices that differ between workers then be state of the pass,
    of which each position along the axis has its own. It begins as what the first step with the pass is given. The step
    returns what it is given. A floating 0-d result that differs between workers becomes their mean. Returns also that
    state, with the step's old value and a worker's new one."""
    if program.is_body:
        return program, []  # the step with its loop is refused
    (scatters, loops, sums), mesh = map(program.find, (ops.scatter, ops.loop, ops.all_reduce)), program.mesh
    whole = [x for x in sums if x.kwargs.get("leaf")]
    if loops or whole or not scatters or program.model_axes or mesh.replica_axes != (axis,):
        problem = f"finds {len(scatters)} scatters, {len(loops)} loops and {len(whole)} whole leaves on {mesh}"
        raise FzeroError(f"pass {name!r}", problem, f"put it before='bucket', without loops, on a mesh with {axis!r}")
    program, count = program.copy().add_state(f"{name}.count", (), torch.int64, replicated=True)
    apart, sums = (program.graph.find_nodes(op="call_function", target=x) for x in (ops.scatter, ops.all_reduce))
    means = {x for x in sums if axis in mesh.split(ops.Reduction(*x.args).axis)}
    states, flags = find_roles(program, name, means), {x.at for x in list_changes(program) if x.argument.flag}
    for node in apart:
        node.kwargs = {**node.kwargs, "replicas": False}
    with program.graph.inserting_after(program.placeholders[-1]):
        first = program.emit(aten.eq.Scalar, count, 0)
    for number, (argument, _, old, *_) in enumerate(states):
        users = list(old.users)
        program, own = program.add_state(f"{name}.{argument.path}", like=old, differs=(axis,))
        with program.graph.inserting_after(first):
            mine = program.emit(aten.where.self, first, old, own)
        for user in users:
            user.replace_input_with(old, mine)
        states[number] = states[number]._replace(own=mine)
        apart.append(own)
    returned, news = program.returned, {x.at: x.old for x in states}
    states = [x._replace(new=returned[x.at]) for x in states]  # what was another's old value is a worker's now
    with program.graph.inserting_before(program.output):
        program.return_state(f"{name}.count", program.emit(aten.add.Scalar, count, 1))
        for state in states:
            program.return_state(f"{name}.{state.argument.path}", state.new)
        for at, (result, new) in enumerate(zip(program.tensor_results, returned)):
            value = new.meta["val"]
            is_number = result.bucket is None and value.is_floating_point() and not value.ndim
            if at in flags:  # such as a gradient that is not finite: all workers hear of it
                news[at] = program.emit(ops.all_reduce, new, "sum", axis)
            elif is_number and find_origins([new], apart, {*means, *apart}):
                news[at] = program.emit(ops.all_reduce, new, "avg", axis)
    return return_instead(program, news), states
