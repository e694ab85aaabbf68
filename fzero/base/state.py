"""State: all that a run needs to go on, as one value that a step takes and returns."""

from __future__ import annotations

from typing import Any, NamedTuple

from fzero.base import tree


class State(NamedTuple):
    """All that a run needs to go on: what a step returns, and what a checkpoint saves. Fields without a use are None.

    A step takes and returns any tree; `State` is a tree with these names. Two things look at the names:

    * `fzero.partition(state, mesh)` partitions `params`, and then the other fields `like` them. Leaves that are
      partitioned already stay.
    * Where `seed` is given, the random draws of a step follow from `seed` and `step`, both 0-d integer tensors, and
      torch's generator stays as it is. So a run that goes on from a saved state draws the same numbers. The step
      returns `step + 1`; the seed stays. Without `seed` draws follow from torch's generator.

    Each rank draws its own numbers, so with dropout another number of ranks gives the same in distribution only.
    """

    params: Any = None
    opt_state: Any = None
    scale: Any = None  # of the loss, as `fzero.optim.loss_scale` keeps
    step: Any = None  # steps so far
    seed: Any = None
    ema: Any = None  # averages of the parameters, a tree like them
    data: Any = None  # the position of a `fzero.data` loader
    buffers: Any = None  # of a module that changes them, as `fzero.lower_stateful` gives


def find_seeds(treedef: tree.TreeDef) -> dict[int, str]:
    """Position of a leaf -> "seed" or "step", for the leaves of each `State` with a seed, in order."""
    found, pending = dict[int, str](), [(treedef, 0)]
    for node, start in pending:  # breadth first: the list grows while it is read
        is_state = isinstance(node.type, type) and issubclass(node.type, State)
        children = [] if node.is_leaf() else node.children()
        has_seed = is_state and children[State._fields.index("seed")].num_leaves > 0
        for number, child in enumerate(children):
            name = State._fields[number] if has_seed else ""
            if name in ("seed", "step"):
                found.update((start + i, name) for i in range(child.num_leaves))
            pending.append((child, start))
            start += child.num_leaves
    return dict(sorted(found.items()))
