"""Random draws: a random aten operation draws by the step's seed, the rank's number and the operation's own number.

On a mesh with model axes the rank's number is that along the axes along which the draw differs: the data axes, and
those along which an operand differs. So ranks with the same values drop the same of them.
"""

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


def draw(number: int, target: Callable[..., Any], *args: Any, along: str = "", **kwargs: Any) -> Any:
    """`target(*args, **kwargs)` for a random aten operation.

    Calls with the same `number` draw the same, in one step on ranks of one position `along` axes of the mesh, by
    default all: `rematerialize` relies on that. Nothing else uses an operand that the call writes into.
    """
    return target(*args, **kwargs)


def _draw_kind(walk: Walk, node: Node) -> Kind:
    operands = list(node.all_input_nodes)
    for each in operands:  # dropout draws into a new tensor that is like its operand
        if each.op == "call_function" and walk.record(each).takes_shape:
            operands += each.all_input_nodes
    return walk.per_rank | walk.join(node, operands, pointwise=False)


def _draw(program: Program, node: Node, rank: Rank) -> Callable[..., Any]:
    along = node.kwargs.get("along")
    position = rank.along(along) if along else rank.number

    def run(number: int, target: Callable[..., Any], *args: Any, seed: int, along: str = "", **kwargs: Any) -> Any:
        return draw_from(fold(seed, position, number), target, *args, **kwargs)

    return run


register(Operation(name="draw", target=draw, fake=draw, kind=_draw_kind, perform=_draw, draws=True))
