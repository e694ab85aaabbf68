"""State results: plain tensors that a step returns in the place of state become slices of that state.

A step may compute a new leaf by any function, and that function may return a plain tensor: a cumulative sum gathers its
operand. Where the step returns the tensor in a tree like one of its arguments, the tensor is the new value of the leaf
at that place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.program.operation import Node
from fzero.program.refusals import refuse_state
from fzero.tracing.kinds import Kinds
from fzero.values.sharded import Sharded

Place = tuple[tree.TreeDef, int]
"""A subtree: its structure, and the position of its first leaf among all leaves."""


def take_state(given: tree.Tree, returned: tree.Tree, kinds: Kinds) -> tree.Tree:
    """`returned` with each plain tensor in the place of a `Sharded` leaf of an argument as a `Sharded` of its layout.

    `given` is the tuple of a step's arguments and `returned` its result. A subtree of the result is in the place of an
    argument, or of a part of one, that has the same structure and the same shapes. A tensor alone is in the place of an
    argument alone that has its shape and is not 0-d.

    Raises:
        FzeroError: with leaf and line, for such a tensor that may differ between ranks: the ranks would drift apart.
    """
    leaves, treedef = tree.flatten(given)
    if not any(isinstance(leaf, Sharded) for leaf in leaves):
        return returned
    results, result_def = tree.flatten(returned)
    paths = tree.paths(returned)
    taken: set[int] = set()  # state leaves that have a result already: another tree of numbers may be metrics
    for at, like in _find_pairs(_list_places(treedef, leaves), leaves, result_def, results):
        result = results[at]
        if isinstance(result, Tensor) and not isinstance(result, Sharded):
            if not kinds.varies(result):
                results[at] = like.slice_of(result)
            elif id(like) not in taken:
                raise _refuse(kinds, like, paths[at], result)
        taken.add(id(like))
    return tree.unflatten(result_def, results)


def pair_results(given: tree.Tree, returned: tree.Tree) -> dict[int, int]:
    """Position of a leaf of `returned` -> position of the leaf of `given` in whose place it stands.

    A subtree of the result is in the place of a subtree of the arguments that has the same structure and the same
    shapes. The largest pair up first, and those of equal size in order, so that a tree of gradients takes the place of
    no state that has a new value. Each leaf is in one pair at most.
    """
    (leaves, treedef), (results, result_def) = tree.flatten(given), tree.flatten(returned)
    tops, alike = {*_children((result_def, 0))}, dict[tree.TreeDef, list[Place]]()
    for place in _list_places(treedef, leaves):
        alike.setdefault(place[0], []).append(place)
    claimed, replaced = set[int](), dict[int, int]()
    for place in sorted(_list_subtrees(result_def), key=lambda place: -place[0].num_leaves):
        count, start = place[0].num_leaves, place[1]
        if replaced.keys().isdisjoint(range(start, start + count)):
            free = (each for each in alike.get(place[0], ()) if claimed.isdisjoint(range(each[1], each[1] + count)))
            found = next((each for each in free if _fits(place, each, results, leaves, place in tops)), None)
            if found is not None:
                claimed.update(range(found[1], found[1] + count))
                replaced |= zip(range(start, start + count), range(found[1], found[1] + count))
    return replaced


def _list_places(treedef: tree.TreeDef, leaves: list[Any]) -> list[Place]:
    """The arguments and their subtrees, the larger ones first. Of single tensors only arguments that are state."""
    tops = set(_children((treedef, 0)))
    _, *places = _list_subtrees(treedef)
    return [
        place for place in places if not place[0].is_leaf() or (place in tops and isinstance(leaves[place[1]], Sharded))
    ]


def _list_subtrees(treedef: tree.TreeDef) -> Iterator[Place]:
    pending = [(treedef, 0)]
    for place in pending:  # breadth first: the list grows while it is read
        yield place
        pending += _children(place)


def _children(place: Place) -> Iterator[Place]:
    treedef, start = place
    for child in treedef.children() if not treedef.is_leaf() else ():
        yield child, start
        start += child.num_leaves


def _find_pairs(
    places: list[Place], leaves: list[Any], result_def: tree.TreeDef, results: list[Any]
) -> Iterator[tuple[int, Sharded]]:
    """`(position of a result, the state leaf in whose place it stands)`.

    Numbers in the place of state that has new values already are taken for metrics.
    """
    pending, tops = [(result_def, 0)], {(result_def, 0), *_children((result_def, 0))}
    claimed: set[int] = set()  # leaves of the arguments
    for place in pending:
        fitting = (other for other in places if _fits(place, other, results, leaves, place in tops))
        found = next((other for other in fitting if not (other[1] in claimed and _has_numbers(other, leaves))), None)
        if found is None:
            pending += _children(place)
            continue
        places = [*(other for other in places if other != found), found]  # trees of one structure pair up in order
        claimed.update(range(found[1], found[1] + found[0].num_leaves))
        for i in range(place[0].num_leaves):
            if isinstance(leaves[found[1] + i], Sharded):
                yield place[1] + i, leaves[found[1] + i]


def _has_numbers(place: Place, leaves: list[Any]) -> bool:
    """Whether all leaves of a subtree are numbers or 0-d tensors."""
    return not any(getattr(leaf, "ndim", 0) for leaf in leaves[place[1] :][: place[0].num_leaves])


def _fits(place: Place, other: Place, results: list[Any], leaves: list[Any], is_top: bool) -> bool:
    """Whether a subtree of the result has the structure and shapes of a subtree of the arguments."""
    treedef = place[0]
    if treedef != other[0]:
        return False
    ours, theirs = results[place[1] :][: treedef.num_leaves], leaves[other[1] :][: treedef.num_leaves]
    if treedef.is_leaf() and not (is_top and getattr(theirs[0], "ndim", None)):
        return False
    return all(getattr(a, "shape", None) == getattr(b, "shape", None) for a, b in zip(ours, theirs))


def _refuse(kinds: Kinds, like: Sharded, path: str, result: Tensor) -> FzeroError:
    """The error of a result that varies, at the last node where a value that varies met one that does not."""
    last: Node = kinds.node_of(result)
    pending = [last]
    for node in pending:  # breadth first: the list grows while it is read
        varying = [source for source in node.all_input_nodes if kinds.node_varies(source)]
        if len(varying) < len(node.all_input_nodes):
            return refuse_state(kinds.program, like.path or path, path, kinds.of(last), node)
        pending += [source for source in varying if source not in pending]
    return refuse_state(kinds.program, like.path or path, path, kinds.of(last), last)
