"""Loops as they run: the turns of a loop, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fzero.base.randomness import fold
from fzero.program.operation import Node
from fzero.program.records import turns_of

Rows = list[list[Tensor]]  # one list of tensors a rank


def run_turns(
    loop: Node, run: Callable[[int | None, Rows], Rows], seed: int | None, given: Sequence[Sequence[Sequence[Tensor]]]
) -> Rows:
    """The results of a loop on some ranks. `run(seed, arguments of each rank)` runs its body once on all of them.

    `given` has for each rank the lists of operands: carry, xs, constants. Each turn has a seed of its own.
    """
    carries = [list(carry) for carry, _, _ in given]
    count, stacks = len(carries[0]), list[list[Tensor]]()
    for turn in range(turns_of(loop)):
        arguments = [[*carry, *(x[turn] for x in xs), *constants] for carry, (_, xs, constants) in zip(carries, given)]
        results = run(None if seed is None else fold(seed, turn), arguments)
        carries, ys = [row[:count] for row in results], [row[count:] for row in results]
        if not stacks:
            stacks = [[y.new_empty((turns_of(loop), *y.shape)) for y in row] for row in ys]
        for rows, values in zip(stacks, ys):
            for stacked, y in zip(rows, values):
                stacked[turn] = y
    return [carry + stacked for carry, stacked in zip(carries, stacks)]


def operands(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The lists of operands among the arguments of a loop: carry, xs, constants."""
    return args[2:5]
