"""Readings: what a program takes from the elements of a batch in front of each step.

The batch alone may decide how many rows a step computes with, as in `loss[labels != -100]`, or which way Python goes,
as in `lengths.max().item()`. A trace computes both from the batch of its call. The program has the numbers of the rows
as further arguments, and the numbers that Python took as constants, as if the user had computed both in front of the
step and had given them. A `Reading` computes them for each further call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from fzero.base.ambient import disable_autocast
from fzero.program.open import Template, make_template

if TYPE_CHECKING:
    from fzero.program.program import Program


Found = list[list[Any]]
"""The values of each reading of a program."""


@dataclass(frozen=True, eq=False)
class Reading:
    """What the user's line `where` takes from the batch: the one result of `program`, converted.

    `sources` are the positions of the program's arguments: among the leaves of a call's arguments, and behind these
    among the values that readings before this one found. It finds `count` values.
    """

    where: str
    program: Program
    sources: tuple[int, ...]
    count: int = 1
    convert: Callable[[Any], Any] | None = None

    @cached_property
    def _template(self) -> Template:
        return make_template(self.program)

    def fill(self, sizes: Sequence[int]) -> Reading:
        """The reading of these sizes, where some are open."""
        return self if self.program.open is None else replace(self, program=self._template.fill(sizes))

    def read(self, leaves: Sequence[Any], sizes: Sequence[int] = ()) -> list[Any]:
        """The tensors, or the one value of Python, that these leaves have, where the open sizes are `sizes`."""
        program = self.fill(sizes).program
        given = (leaves[i].detach() for i in self.sources)
        values = dict[fx.Node, Any](zip(program.placeholders, given, strict=True))
        with torch.no_grad(), disable_autocast():  # casts are nodes
            for node in program.graph.nodes:
                if node.op == "get_attr":
                    values[node] = program.constants[node.target]
                elif node.op == "call_function":
                    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                    values[node] = node.target(*args, **kwargs)
        (found,) = fx.map_arg(program.returned, values.__getitem__)
        if self.convert is not None:
            found = self.convert(found)
        return [_lay_out(x) if isinstance(x, Tensor) else x for x in (found if isinstance(found, tuple) else [found])]


def _lay_out(x: Tensor) -> Tensor:
    """A tensor with the strides that its shape alone says: `nonzero` puts its columns one behind the other."""
    return x.reshape(-1).view(x.shape)


def read_all(readings: Iterable[Reading], leaves: Sequence[Any]) -> Found:
    """The values of each reading of a program of given sizes."""
    found = Found()
    for reading in readings:
        found.append(reading.read([*leaves, *flatten(found)]))
    return found


def flatten(found: Iterable[Sequence[Any]]) -> list[Any]:
    """The values of all readings, in order."""
    return [value for values in found for value in values]


def list_tensors(found: Iterable[Sequence[Any]]) -> list[Tensor]:
    """The values of all readings that are arguments of the program."""
    return [x for x in flatten(found) if isinstance(x, Tensor)]
