"""Loops as they run: the turns of a loop, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from fzero.base.randomness import fold
from fzero.program.arguments import position_of
from fzero.program.operation import Node
from fzero.program.ops.loops import Loop
from fzero.program.ops.transfers import copy_of

Rows = list[list[Tensor]]  # one list of tensors a rank


class Early:
    """A node of a loop's body that starts so many turns `ahead`: an all-gather, or a copy that another such node reads.
    It takes the place of the function `run` that the body calls.

    `arrive` waits for a copy. A node finds the copies that it reads `among` those before it.
    """

    def __init__(
        self,
        node: Node,
        ahead: int,
        run: Callable[..., Any],
        among: Sequence[Early],
        arrive: Callable[[Any], Sequence[Tensor]] | None,
    ) -> None:
        self.ahead = ahead
        self._node, self._run, self._arrive = node, run, arrive
        copied = {copy_of(x) for x in node.all_input_nodes}
        self._copies = [each for each in among if each._node in copied]
        self.started = list[Any]()
        """What was started and not taken yet, in order."""

    def begin(self, values: Mapping[Node, Tensor]) -> None:
        """Start it with these items of lists, behind the copies that were started last."""
        given = dict(values)
        for copy in self._copies:
            assert copy._arrive is not None
            arrived = copy._arrive(copy.started[-1])
            given |= {x: arrived[position_of(x)] for x in self._node.all_input_nodes if copy_of(x) is copy._node}
        args, kwargs = fx.map_arg((self._node.args, self._node.kwargs), given.__getitem__)
        self.started.append(self._run(*args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What was started for this turn."""
        return self.started.pop(0)


def run_turns(
    node: Node,
    run: Callable[[int | None, Rows], Rows],
    seed: int | None,
    given: Sequence[Sequence[Any]],
    early: Sequence[Early] = (),
    made: Sequence[list[Any]] | None = None,
) -> Sequence[list[Any]]:
    """The results of a loop on some ranks. `run(seed, arguments of each rank)` runs its body once on all of them.
    `early` are the nodes that start in front of their turns; without them all start in their turns.
    `made` has for each rank a list, to which the results are added as soon as there is memory for them.

    `given` has for each rank the lists of operands: carry, xs, lists, constants. Each row has a seed of its own, which
    a loop in the backward pass draws from again.
    """
    loop = Loop(*node.args)
    frees = [loop.frees(rows) for rows in loop.lists]
    carries = [list(carry) for carry, *_ in given]
    count, single = len(carries[0]), len(loop.body.results) - loop.kept
    made = [[] for _ in given] if made is None else made
    placeholders = loop.body.placeholders[count + len(loop.xs) :]

    rows = loop.rows()

    def begin(turn: int) -> None:
        """Start what starts early in front of a turn, which may be one before the first."""
        for each in sorted(early, key=lambda each: each.ahead):
            if 0 <= turn + each.ahead < loop.length:
                row = rows[turn + each.ahead]
                each.begin(dict(zip(placeholders, (items[row] for items in given[0][2]))))

    for each in early:
        each.started.clear()  # of a step that failed
    for turn in range(-max([0, *(each.ahead for each in early)]), 0):
        begin(turn)
    for turn, row in enumerate(rows):
        begin(turn)
        arguments = [
            [*carry, *(x[row] for x in xs), *map(_take, lists_given, frees, [row] * len(frees)), *constants]
            for carry, (_, xs, lists_given, constants) in zip(carries, given)
        ]
        results = run(None if seed is None else fold(seed, row), arguments)
        del arguments
        carries = [row_of_rank[:count] for row_of_rank in results]
        for places, values in zip(made, results):
            if turn == 0:
                places += [y.new_empty((loop.length, *y.shape)) for y in values[count:single]]
                places += [[None] * loop.length for _ in values[single:]]
            for place, value in zip(places, values[count:]):
                place[row] = value
        del results
    for places, carry in zip(made, carries):
        places[:0] = carry
    return made


def _take(items: Any, frees: bool, row: int) -> Tensor:
    """The item of a list for this turn. With `frees` it leaves the list."""
    item: Tensor = items[row]
    if frees:
        items[row] = None
    return item


def operands(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The lists of operands among the arguments of a loop: carry, xs, lists, constants."""
    given = Loop(*args)
    return given.carry, given.xs, given.lists, given.constants
