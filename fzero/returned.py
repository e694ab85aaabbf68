"""What a step returns: a tree of values, from the tensors that its program returns."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fzero.base import tree
from fzero.base.flags import Flag
from fzero.files import duplicate
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import follow_memory
from fzero.program.signature import Result
from fzero.ranks.ranks import Ranks
from fzero.values.origin import UNKNOWN, Origin, number_values, tell_apart
from fzero.values.sharded import Form, Sharded


class Returned:
    """The value that a step returns, from the tensors that its program returns: the tree of results. Where passes added
    state, a pair of these and the new state by path.

    The next step may write over state. So every result that is state has memory of its own: a result that is an
    argument is the very `Sharded` that was given, equal results are one `Sharded`, and any other result in memory of
    state, of a batch or of a constant is a copy. Other results share memory with batches and constants as they do in
    plain torch.
    """

    def __init__(self, program: Program, on: Ranks) -> None:
        self._out_tree, self._constants = program.out_tree, list[tuple[int, Any]]()
        self._set_constants(program.results)
        values = [node.meta["val"] for node in program.returned]
        self._state = [
            (i, Form(program.layouts[result.bucket], result.leaf, on, value.dtype, value.device, result.place))
            for i, (result, value) in enumerate(zip(program.tensor_results, values))
            if result.bucket is not None
        ]
        self._numbers = number_values(len(self._state))
        self._added = [state.path for state in program.pass_state]
        self._noted, self._last = program.noted, len(values) - len(program.pass_state)
        self._given, self._equal, self._copied = _find_aliases(program)

    def _set_constants(self, results: Sequence[Result]) -> None:
        self._constants = [(i, result.constant) for i, result in enumerate(results) if result.is_constant]

    def with_results(self, results: Sequence[Result]) -> Returned:
        """The same for a program whose results have other constants, and no other difference."""
        other = copy.copy(self)
        other._set_constants(results)
        return other

    def list_noted(self, outputs: Sequence[Tensor]) -> list[Flag]:
        """The flags that the step returns beside its results."""
        first = self._last - len(self._noted)
        return [flag(value) for flag, value in zip(self._noted, outputs[first : self._last])]

    def __call__(self, outputs: Sequence[Tensor], given: Sequence[Any] = (), origin: Origin = UNKNOWN) -> Any:
        """The value of a step that was called with the tensors and the state `given`. Each new value has an origin
        of its own, made of the `origin` of the call."""
        leaves: list[Any] = list(outputs)
        for i in self._copied:
            leaves[i] = duplicate(leaves[i])
        for (i, form), own in zip(self._state, tell_apart(origin, self._numbers)):
            leaves[i] = Sharded.of_form(leaves[i], form, own)
        for i, argument in self._given.items() if given else ():
            leaves[i] = given[argument]
        for i, first in self._equal.items():
            leaves[i] = leaves[first]
        added, leaves = leaves[self._last :], leaves[: self._last - len(self._noted)]
        for i, constant in self._constants:
            leaves.insert(i, constant)
        result = tree.unflatten(self._out_tree, leaves)
        return (result, dict(zip(self._added, added))) if self._added else result


def _find_aliases(program: Program) -> tuple[dict[int, int], dict[int, int], list[int]]:
    """The results that share memory: result -> the argument that it is, result -> the earlier result that it is, and
    the results to copy. Results and arguments by position among the tensors."""
    given: dict[int, int] = {}
    equal: dict[int, int] = {}
    copied: list[int] = []
    arguments = {node: (i, argument) for i, (node, argument) in enumerate(zip(program.placeholders, program.arguments))}
    state = {node for node, (_, argument) in arguments.items() if argument.bucket is not None}  # nodes of its memory
    kept = {node for node, (_, argument) in arguments.items() if not argument.donated}
    first: dict[Any, int] = {}
    returned = list(enumerate(zip(program.tensor_results, program.returned)))
    for i, (result, node) in returned:
        if result.bucket is None:
            continue
        *views, owner = follow_memory(node)
        position, argument = arguments.get(owner, (0, result))
        is_owners = (
            owner in state and owner in kept and (argument.bucket, argument.leaf) == (result.bucket, result.leaf)
        )
        key = node, result.bucket, result.leaf
        if key in first:
            equal[i] = first[key]
        elif is_owners and all(_is_same_tensor(view, owner) for view in views):
            given[i] = position
        elif owner in kept or owner in first or owner.op == "get_attr" or not all(map(_has_distinct_elements, views)):
            copied.append(i)
        first.setdefault(key, i)
        first.setdefault(owner, i)
    for i, (result, node) in returned:
        if result.bucket is None and any(x in state or x in first for x in follow_memory(node)):
            copied.append(i)
    return given, equal, copied


def _is_same_tensor(node: Node, owner: Node) -> bool:
    """Whether a node's value, in memory of `owner`, has the owner's elements in the same places."""
    a, b = ([x.dtype, x.shape, x.stride(), x.storage_offset(), x.is_conj(), x.is_neg()] for x in _values(node, owner))
    return a == b


def _has_distinct_elements(node: Node) -> bool:
    """Whether no two elements of a node's value share memory, as those of an expanded tensor do."""
    value = node.meta["val"]
    return 0 not in [stride for size, stride in zip(value.shape, value.stride()) if size > 1]


def _values(*nodes: Node) -> list[Any]:
    return [node.meta["val"] for node in nodes]
