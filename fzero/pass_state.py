"""State that passes keep: its first values, and its order among the arguments of a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.randomness import fold
from fzero.program.program import Program
from fzero.program.state_layouts import PassState
from fzero.ranks.ranks import Ranks
from fzero.values.sharded import Sharded


def create_pass_state(program: Program, on: Ranks) -> dict[str, Sharded]:
    """Path -> first value, for the state that the passes of a program added."""
    device = on.choose_device(program.placeholders[-1].meta["val"].device)
    created = {}
    for state in program.pass_state:
        layout = program.layouts[state.bucket]
        part = (
            range(layout.leaves[state.leaf].numel) if layout.replicated else layout.part(state.leaf, layout.rank_of(on))
        )
        repeats = layout.splits if on.rank is None else 1  # one process has the values of all ranks
        if callable(state.initial):
            values = _draw(state)
            whole = values.repeat(layout.leaves[state.leaf].numel // max(1, values.numel()))
            local = whole[part.start : part.stop].repeat(repeats).to(device)
        else:
            local = torch.full((repeats * len(part),), state.initial, dtype=state.dtype, device=device)
        shape = layout.leaves[state.leaf].shape if layout.replicated else local.shape
        created[state.path] = Sharded(local.view(shape), layout, state.leaf, on)
    return created


def _draw(state: PassState) -> Tensor:
    """The first value of a state, flat, on the host: the same on every rank."""
    assert callable(state.initial)
    value = state.initial(state.shape, torch.Generator().manual_seed(fold(0, state.path)))
    if not isinstance(value, Tensor) or tuple(value.shape) != state.shape:
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        problem = f"its initial gives {found} for the shape {list(state.shape)}"
        raise FzeroError(f"pass_state {state.path!r}", problem, "return a tensor of the shape that initial is given")
    return value.detach().reshape(-1).to("cpu", state.dtype)


def order_pass_state(program: Program, given: Mapping[str, Any] | None, on: Ranks) -> list[Sharded]:
    """The values of the state that passes added, in the order of the program's arguments.

    Raises:
        FzeroError: for state that is missing, that no pass keeps, or that has another layout, dtype or mesh.
    """
    wanted, given = [state.path for state in program.pass_state], given or {}
    missing, surplus = [x for x in wanted if x not in given], [x for x in given if x not in wanted]
    if missing or surplus:
        path = (missing or surplus)[0]
        problem = "a pass of this step keeps this state, and it is not given" if missing else "no pass keeps this state"
        way_out = "give pass_state=step.init_pass_state(*args) first, then what the step returned"
        raise FzeroError(f"pass_state {path!r}", problem, way_out)
    for state in program.pass_state:
        value = given[state.path]
        wanted_form = program.layouts[state.bucket], state.leaf, on, state.dtype
        if not isinstance(value, Sharded) or value.form[:4] != wanted_form:
            problem = "is not the state that this step's passes keep on its mesh, in layout and dtype"
            raise FzeroError(f"pass_state {state.path!r}", problem, "make it with step.init_pass_state(*args)")
    return [given[path] for path in wanted]
