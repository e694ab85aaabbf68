"""What the results of a step are computed from, and in whose place they stand."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from fzero import FzeroError, Program


class StateChange(NamedTuple):
    """State that a step changes: its argument, its place among the results, the nodes of its old and its new value,
    and its role (`fzero.variants.roles`). Where workers train apart, `own` is what a worker begins with."""

    argument: Any
    at: int
    old: Any
    new: Any
    role: str = ""
    own: Any = None


def list_changes(program: Program) -> list[StateChange]:
    """The state that a step changes, in the order of its results."""
    given = {x.path: (x, node) for x, node in zip(program.arguments, program.placeholders) if x.bucket is not None}
    pairs = enumerate(zip(program.tensor_results, program.returned))
    found = [(at, given[result.replaces], new) for at, (result, new) in pairs if result.replaces in given]
    return [StateChange(argument, at, old, new) for at, (argument, old), new in found if old is not new]


def list_weights(states: list[StateChange]) -> list[StateChange]:
    """The weights among the state that workers change apart (`fzero.variants.workers`).

    Raises:
        FzeroError: where workers change other state than weights and the optimizer's.
    """
    for argument, *_, role, _ in states:
        if role == "beside":
            raise FzeroError(argument.path, "differs between workers, and belongs to no fragment", "use diloco")
    return [x for x in states if x.role == "weight"]


def find_origins(nodes: Collection[Any], among: Collection[Any], stops: Collection[Any]) -> set[Any]:
    """The nodes of `among` that values are computed from. The operands of a node of `stops` are not followed."""
    waiting, seen = list(nodes), set(nodes)
    while waiting:
        node = waiting.pop()
        found = [] if node in stops else [x for x in node.all_input_nodes if x not in seen]
        waiting += found
        seen.update(found)
    return seen.intersection(among)


def return_instead(program: Program, news: dict[int, Any]) -> Program:
    """Let the step return other nodes, by their place among the results."""
    program.output.args = ([news.get(i, x) for i, x in enumerate(program.returned)],)
    return program
