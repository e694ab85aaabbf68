"""What the state of workers is for, found by following data from results back to gradients and arguments."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from fzero import FzeroError, Program, ops
from fzero.variants.origins import StateChange, find_origins, list_changes

aten = torch.ops.aten


def find_roles(program: Program, name: str, means: Collection[Any]) -> list[StateChange]:
    """The state in slices that differs between workers, where `means` are the same for all of them, each with a role:

    * "weight": a loss gathers it, and it gets its new value from its gradient, and from no other tree of its structure;
    * "optimizer": new weights are computed from it, and gradients are not;
    * "beside": all other state, such as averages of weights, or a teacher.

    Raises:
        FzeroError: where a gradient is scattered, and no state is its weight.
    """
    scatters = set(program.graph.find_nodes(op="call_function", target=ops.scatter))
    slices = [x for x in list_changes(program) if not program.layouts[x.argument.bucket].replicated]
    differ = set(scatters)
    while more := [x.old for x in slices if x.old not in differ and find_origins([x.new], differ, {*means, *differ})]:
        differ.update(more)
    states, trained = [x for x in slices if x.old in differ], {ops.LeafMove(*x.args).key for x in scatters}
    candidates = [x for x in states if _leaf(x) in trained and _is_gathered(x.old)]
    weights = [x for x in candidates if _is_trained(x, scatters, [y.old for y in candidates if _leaf(x) == _leaf(y)])]
    if lost := sorted(program.layouts[x].leaves[y].path for x, y in trained - set(map(_leaf, weights))):
        problem = f"finds no new value of {lost} from its gradient and its old value"
        raise FzeroError(
            f"pass {name!r}", problem, "return all that the step trains, each in the place of its old value"
        )
    olds = {x.old for x in states}
    used = find_origins([x.new for x in weights], olds, scatters)
    used -= find_origins([ops.LeafMove(*x.args).value for x in scatters], olds, ())
    roles = ["weight" if x in weights else "optimizer" if x.old in used else "beside" for x in states]
    return [x._replace(role=role) for x, role in zip(states, roles)]


def _leaf(state: StateChange) -> tuple[str, int]:
    return state.argument.bucket, state.argument.leaf


def _is_gathered(old: Any) -> bool:
    casts = [x for x in old.users if ops.is_call(x, aten._to_copy.default)]
    return any(ops.is_call(user, ops.gather) for x in (old, *casts) for user in x.users)


def _is_trained(state: StateChange, scatters: set[Any], olds: list[Any]) -> bool:
    """Whether a new value comes from a gradient of its leaf, and from its old value alone among those of its leaf."""
    found = find_origins([state.new], {*scatters, *olds}, scatters)
    return found - scatters == {state.old} and any(ops.LeafMove(*x.args).key == _leaf(state) for x in found & scatters)
