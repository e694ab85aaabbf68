"""Report: which stages of an optimizer keep state for which leaf, read off the optimizer's state."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.tree import Tree
from fzero.optim.base import State


def report(params: Tree, state: State) -> dict[str, tuple[str, ...]]:
    """Path of each leaf -> the stages of an optimizer that keep state for the leaf, in order.

        optim.report(params, opt_state)  # {"blocks.0.up": ("scale_by_muon",), "wte": ("scale_by_adam",), ...}

    A stage has the name of its state's class, in small letters. A leaf without a stage is frozen, or its optimizer
    keeps no state, as plain gradient descent. `step.report(*args)` says the same of a step of `shard` or `simulate`.
    """
    stages: dict[str, dict[str, None]] = {path: {} for path in tree.paths(params)}
    for stage, path in _list_stages(params, state, ""):
        stages[path][stage] = None
    return {path: tuple(names) for path, names in stages.items()}


def _list_stages(params: Tree, state: Any, stage: str) -> Iterator[tuple[str, str]]:
    """`(stage, path)` of each leaf of the trees in a state that are as `params`."""
    if stage and _is_as(params, state):
        yield from ((stage, path) for path in tree.paths(state))
    elif isinstance(state, tuple) and hasattr(state, "_fields"):
        for part in state:
            yield from _list_stages(params, part, name_stage(type(state)))
    elif isinstance(state, (tuple, list, dict)):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _list_stages(params, part, stage)


def _is_as(params: Tree, state: Any) -> bool:
    """Whether a tree has the structure of `params`, with None in some places."""
    try:
        tree.split_as(params, state)
    except FzeroError:
        return False
    return True


def name_stage(cls: type) -> str:
    """The stage whose state has this class: "scale_by_muon" for `ScaleByMuonState`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__.removesuffix("State")).lower()
