"""Random draws: a random aten operation draws by the step's seed, the rank's number and the operation's own number."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fzero.base.randomness import draw as draw_from
from fzero.base.randomness import fold
from fzero.program.kinds import Kind
from fzero.program.operation import Node, Operation
from fzero.program.records import register

if TYPE_CHECKING:
    from fzero.program.inference import Walk
    from fzero.program.program import Program
    from fzero.ranks.exchanges import Rank


def draw(number: int, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`target(*args, **kwargs)` for a random aten operation.

    Calls with the same `number` draw the same, in one step on one rank: `rematerialize` relies on that. Nothing else
    uses an operand that the call writes into.
    """
    return target(*args, **kwargs)


def _draw_kind(walk: Walk, node: Node) -> Kind:
    return walk.per_rank | walk.join(node, node.all_input_nodes, pointwise=False)


def _draw(program: Program, node: Node, rank: Rank) -> Callable[..., Any]:
    def run(number: int, target: Callable[..., Any], *args: Any, seed: int, **kwargs: Any) -> Any:
        return draw_from(fold(seed, rank.number, number), target, *args, **kwargs)

    return run


register(Operation(name="draw", target=draw, fake=draw, kind=_draw_kind, perform=_draw, draws=True))
