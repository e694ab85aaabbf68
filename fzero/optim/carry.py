"""State carried over to another set of trained leaves: what freezing and unfreezing in the middle of a run needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.optim.base import State


def carry_state(old: State, first: State) -> State:
    """`first`, what `init` returns for the leaves that train from now on, with every value that `old` has too.

        trained, frozen = fzero.tree.split(fzero.tree.merge(trained, frozen), mask)       # another mask than before
        opt_state = optim.carry_state(opt_state, optimizer.init(trained))

    Leaves that go on training keep their state, leaves that stop lose it, and leaves that begin have that of their
    first step. So has a step count whose leaves all begin. Where some leaves of a step count begin and others go on, as
    in Adam's bias correction, both would be wrong: they need a group each, with `multi_transform`.

    Raises:
        FzeroError: for leaves that begin beside others in a stage that counts steps; where shapes or dtypes differ.
            Both name the leaf.
    """
    olds = dict(zip(tree.paths(old), tree.leaves(old)))
    fresh: set[str] = set()
    for numbers, leaves in _list_counts(first, ()):
        begun = [path for path in leaves if path in olds]
        if not begun:
            fresh.update(numbers)
        elif len(begun) < len(leaves):
            path = next(path for path in leaves if path not in olds)
            problem = f"begins to train beside {begun[0]}, whose steps are counted in {numbers[0]}"
            raise FzeroError(path, problem, "give it a label of its own in optim.multi_transform")

    def choose(path: str, leaf: Any) -> Any:
        kept = leaf if path in fresh else olds.get(path, leaf)
        if (kept.shape, kept.dtype) != (leaf.shape, leaf.dtype):
            problem = f"is {kept.dtype} {list(kept.shape)}, and would be {leaf.dtype} {list(leaf.shape)}"
            raise FzeroError(path, problem, "give the state of these parameters, by an optimizer of the same stages")
        return kept

    return tree.map_with_path(choose, first)


def _list_counts(node: Any, key: tuple[Any, ...]) -> Iterator[tuple[list[str], list[str]]]:
    """`(numbers, leaves)` of each stage that has both: the paths of the numbers of its state, such as step counts, and
    of the leaves that they belong to."""
    if not isinstance(node, (tuple, list, dict)):
        return
    is_stage = _is_stage(node)
    parts = node._asdict() if hasattr(node, "_asdict") else node if isinstance(node, dict) else dict(enumerate(node))
    numbers, leaves = list[str](), list[str]()
    for name, part in parts.items():
        paths = [tree.dotted((*key, name, path) if path else (*key, name)) for path in tree.paths(part)]
        if is_stage and paths and not tree.find(part, _is_stage):
            is_number = isinstance(part, Tensor) and not part.ndim
            (numbers if is_number else leaves).extend(paths)
        else:
            yield from _list_counts(part, (*key, name))
    if numbers and leaves:
        yield numbers, leaves


def _is_stage(node: Any) -> bool:
    """Whether a node is the state of a stage: a NamedTuple that is named so."""
    return hasattr(node, "_fields") and type(node).__name__.endswith("State")
