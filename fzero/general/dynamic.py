"""The dimensions of batches that a user says change from call to call: `shard(dynamic={"batch": {1: (1, 8192)}})`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.formulas import LEAST
from fzero.general.sizes import Place, find_size, is_constant, list_own_strides
from fzero.tracing.signatures import Signature, is_batch

Range = tuple[int, int] | None
"""The least and the greatest size of a dimension; None for any."""
Ranges = Mapping[str, Mapping[int, Range]]


class Dynamic:
    """The dimensions of the arguments of `fn` that change.

    Args:
        ranges: a parameter of `fn`, or a path to a part of it ("batch.input_ids"), "*" in it for any -> dimension,
            from the end where it is negative -> its least and greatest size. All tensors at the path that have the
            dimension are meant.

    Raises:
        FzeroError: for a name that `fn` does not have, for what is no dimension and no range.
    """

    def __init__(self, ranges: Ranges, fn: Callable[..., Any]) -> None:
        try:
            given = list(inspect.signature(fn).parameters.values())
        except ValueError:
            way_out = "wrap it in a function that names its arguments"
            raise FzeroError("dynamic", f"names arguments, and {fn!r} does not say which it has", way_out) from None
        self._names = [x.name for x in given if x.kind not in (x.KEYWORD_ONLY, x.VAR_KEYWORD)]
        self._has_more = any(x.kind is x.VAR_POSITIONAL for x in given)
        self._rules: list[tuple[str, int, Range]] = []
        for path, dims in ranges.items():
            name = path.partition(".")[0] if isinstance(path, str) else ""
            if not any(fnmatchcase(x, name) for x in self._names):
                near = get_close_matches(name, self._names)
                way_out = f"write {near[0]!r}" if near else f"name one of {self._names}"
                raise FzeroError(f"dynamic[{path!r}]", "is no argument of the step", way_out)
            if not isinstance(dims, Mapping) or not dims:
                raise _refuse(path, dims)
            for dim, size in dims.items():
                if not _is_int(dim) or not _is_range(size):
                    raise _refuse(path, {dim: size})
                self._rules.append((path, dim, size))

    def _name(self, key: tuple[Any, ...]) -> str:
        """The path of a leaf with the name of its parameter: "batch.labels"."""
        at, *rest = key
        last = len(self._names) - 1
        if self._has_more and at >= last:
            return tree.dotted([self._names[last], at - last, *rest])
        return tree.dotted([self._names[at] if at <= last else at, *rest])

    def find_places(self, signature: Signature) -> tuple[tuple[Place, ...], ...]:
        """The dimensions of a call that change, and the strides of longer rows in which batches lie; without those that
        are less than an open size can be.

        Raises:
            FzeroError: for a rule that names no batch of the call, for a size outside of its range.
        """
        named = [self._name(key) for key in tree.keys(signature[1])]
        found = list[Place]()
        for path, dim, given in self._rules:
            for place in _match(signature, named, path, dim):
                size = find_size(signature, place)
                if given is not None and not given[0] <= size <= given[1]:
                    problem = f"dim {place[1]} is {size}, and dynamic says {given[0]} to {given[1]} for {path!r}"
                    raise FzeroError(f"argument {named[place[0]]}", problem, "give other batches, or a wider range")
                found.append(place)
        for i in dict.fromkeys(i for i, _ in found):
            count = len(signature[2][i][0])
            found += [(i, count + dim) for dim in list_own_strides(signature[2][i])]
        return tuple((place,) for place in dict.fromkeys(found) if find_size(signature, place) >= LEAST)


def _match(signature: Signature, named: Sequence[str], path: str, dim: int) -> list[Place]:
    """The places of a rule. None where its argument has no tensor at all in this call, as one that is None."""
    argument = path.partition(".")[0]
    found, has_tensors = list[Place](), False
    for i, (described, leaf) in enumerate(zip(signature[2], named)):
        has_tensors |= fnmatchcase(leaf.partition(".")[0], argument) and not is_constant(described)
        if is_batch(described) and any(fnmatchcase(leaf, x) for x in (path, f"{path}.*")):
            rank = len(described[0])
            found += [(i, dim % rank)] if -rank <= dim < rank else []
    if has_tensors and not found:
        raise FzeroError(f"dynamic[{path!r}]", f"no batch of this call has a dimension {dim} there", "leave it out")
    return found


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_range(given: Any) -> bool:
    if given is None:
        return True
    return (
        isinstance(given, (tuple, list)) and len(given) == 2 and all(map(_is_int, given)) and 0 <= given[0] < given[1]
    )


def _refuse(path: str, given: Any) -> FzeroError:
    return FzeroError(
        f"dynamic[{path!r}]", f"is {given!r}", "write {dim: (least, greatest)}, or {dim: None} for any size"
    )
