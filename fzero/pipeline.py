"""The pipeline: a function and arguments to the program that ranks run, traced, checked and rewritten."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from fzero import tree
from fzero.errors import FzeroError
from fzero.passes.resolve import resolve
from fzero.program import Program
from fzero.sharded import Sharded
from fzero.tracing import trace

Pass = Callable[[Program], Program]
T = TypeVar("T")
_log = logging.getLogger("fzero")


class Pipeline(Generic[T]):
    """What `finish` makes of the programs of a function on the mesh of `on`, one for each signature of its arguments:
    their structure, shapes, dtypes, devices, layouts and constants."""

    def __init__(self, fn: Callable[..., Any], on: Any, passes: Sequence[Pass], finish: Callable[[Program], T]) -> None:
        self.fn, self.on, self.passes, self.finish = fn, on, passes, finish
        self._made: dict[Any, T] = {}

    def program(self, args: tuple[Any, ...]) -> Program:
        """The program for these arguments, made anew.

        Raises:
            FzeroError: for state of another mesh, or a constant that does not hash.
        """
        self._signature(*tree.flatten(args))
        program = resolve(trace(self.fn, args, self.on.mesh))
        for rewrite in self.passes:
            program = rewrite(program)
        return program

    def made(self, leaves: list[Any], treedef: tree.TreeDef) -> T:
        """What was made for arguments of this signature, or is now. Raises as `program`."""
        signature = self._signature(leaves, treedef)
        if signature not in self._made:
            if self._made:
                _log.warning("%r is traced again: its arguments differ from the %d seen", self.fn, len(self._made))
            self._made[signature] = self.finish(self.program(tree.unflatten(treedef, leaves)))
        return self._made[signature]

    def _signature(self, leaves: list[Any], treedef: tree.TreeDef) -> Any:
        return treedef, tuple([_signature(i, leaf, treedef, self.on) for i, leaf in enumerate(leaves)])


def returned(program: Program, outputs: Sequence[Tensor], on: Any) -> Any:
    """What the step returns, given the tensors that its program does."""
    tensors = iter(outputs)
    return tree.unflatten(
        program.out_tree,
        [
            result.constant
            if result.is_constant
            else next(tensors)
            if result.bucket is None
            else Sharded(next(tensors), program.layouts[result.bucket], result.leaf, on)
            for result in program.results
        ],
    )


def _signature(position: int, leaf: Any, treedef: tree.TreeDef, on: Any) -> Any:
    """What of an argument's leaf decides whether a traced program fits it."""
    if isinstance(leaf, Sharded):
        if leaf.on is not on:
            raise _of_another_mesh(leaf, on)
        return leaf.layout, leaf.index, leaf.local.dtype
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.stride()
    try:
        hash(leaf)
    except TypeError:
        where = tree.dotted(tree.keys(treedef)[position])
        raise FzeroError(
            f"argument {where}", f"a {type(leaf).__name__} is no tensor and does not hash", "give a tensor or a number"
        ) from None
    return type(leaf), leaf


def _of_another_mesh(leaf: Sharded, on: Any) -> FzeroError:
    theirs, ours = ([x.mesh, "every rank" if x.rank is None else f"rank {x.rank}"] for x in (leaf.on, on))
    return FzeroError(
        leaf.path,
        "was partitioned on another mesh of the same shape"
        if theirs == ours
        else f"was partitioned on {theirs[0]} as {theirs[1]}, the step runs on {ours[0]} as {ours[1]}",
        "partition the tree on the step's mesh",
    )
