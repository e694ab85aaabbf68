"""Options: what those of `shard` and `simulate` add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fzero.base.errors import FzeroError
from fzero.base.sizes import parse_size
from fzero.budget.fit import Budget, Rewrite
from fzero.passes import verify
from fzero.passes.run import Pass
from fzero.program.plan import Plan
from fzero.program.program import Program


def choose_rewrite(
    passes: Sequence[Pass] | None,
    plan: Plan | None,
    memory: int | str | None,
    *,
    donate: bool = True,
    **fields: Any,
) -> Rewrite:
    """How `shard` and `simulate` rewrite a trace, by their options: with the passes or by the plan that are given, else
    by the plan of `donate` and of `fields`, which are those of `Plan` or None. A budget completes it.

    Raises:
        FzeroError: for options that exclude each other; for a `plan` that is none; for a `to` without a budget; as
            `Plan` and `parse_size`.
    """
    own = {name: x for name, x in fields.items() if x is not None} | ({} if donate else {"in_place": False})
    made, options = Plan(**own), {"donate" if name == "in_place" else name: x for name, x in own.items()}
    if plan is not None:
        if not isinstance(plan, Plan):
            raise FzeroError("plan", f"is {plan!r:.80}", "give a fzero.passes.Plan, such as Plan.load(path)")
        for name, x in (*options.items(), ("memory", memory), ("passes", passes)):
            if x is not None:
                says = f"plan=dataclasses.replace(plan, {_format(own)})" if name in options else f"{name} or plan"
                raise FzeroError(name, f"is {x!r:.80}, and a plan is given, which decides that", f"give {says}")
        return plan
    if memory is not None:
        other = "stage" if "stage" in own else "passes" if passes is not None else None
        if other is not None:
            problem = f"is {memory!r}, and {other} is given too: both say which buckets stay gathered"
            raise FzeroError("memory", problem, f"give memory or {other}")
        return Budget(parse_size("memory", memory), made)
    if made.to is not None:
        way_out = "give memory too, or place state by partition(..., to=) and optimizer.init(..., to=)"
        raise FzeroError("to", f"is {made.to}, where a memory budget may put state, and there is none", way_out)
    if passes is None:
        return made
    for name, x in options.items():
        way_out = f"give it to the passes: passes=fzero.passes.defaults({_format({'stage': 3, **own})})"
        raise FzeroError(name, f"is {x!r}, and passes are given", way_out)
    return (*passes, verify)


def _format(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={x!r}" for name, x in fields.items())


def find_plan_of(program: Program) -> Plan:
    """The plan of a program. Refuses one that passes of a user made."""
    if program.plan is None:
        problem = f"passes were given to {program.name}, and nothing is known of them"
        raise FzeroError("plan", problem, "give options, or a plan, in their place")
    return program.plan
