"""Updates: the step of an optimizer for many leaves in one call.

    scale_by_adam    Adam's running means and scaled gradients; `fzero.optim` calls it
    adamw, adamw_    an AdamW step; the `fuse` pass emits `adamw`, the `donate` pass `adamw_`, which works in place

aten's own `_fused_adamw` does not serve as `adamw`: it also returns copies of the gradients, and needs a step count for
each leaf. The schema of `_fused_adamw_` says that the kernel writes into the gradients as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fzero.optim.kernels import fused_adamw_, scale_by_adam
from fzero.program.aten import infer_lists
from fzero.program.operation import Node, Operation, Work, nbytes, read_and_write, values_of
from fzero.program.records import register

if TYPE_CHECKING:
    from fzero.program.program import Program
    from fzero.ranks.exchanges import Rank

Lists = Sequence[Tensor]


def adamw(
    params: Lists,
    grads: Lists,
    mu: Lists,
    nu: Lists,
    count: Tensor,
    rate: Any,
    *hyperparameters: float,
    where: Tensor | None = None,
) -> tuple[list[Tensor], ...]:
    """The new parameters, first moments and second moments. `hyperparameters` are b1, b2, eps and the weight decay.

    With `where`, a 0-d bool, the results are the operands unless it is true.
    """
    return tuple([torch.empty_like(x) for x in column] for column in (params, mu, nu))


def adamw_(
    params: Lists,
    grads: Lists,
    mu: Lists,
    nu: Lists,
    count: Tensor,
    rate: Any,
    *hyperparameters: float,
    where: Tensor | None = None,
) -> None:
    """`adamw` in place: writes the results over `params`, `mu` and `nu`."""


def _adamw(program: Program, node: Node, rank: Rank) -> Callable[..., Any]:
    def run(params: Lists, grads: Lists, mu: Lists, nu: Lists, *rest: Any, **how: Any) -> tuple[list[Tensor], ...]:
        new = [[x.clone() for x in column] for column in (params, mu, nu)]
        fused_adamw_(new[0], grads, new[1], new[2], *rest, **how)
        return tuple(new)

    return run


def _adamw_writes(node: Node) -> list[Node]:
    return [x for position in (0, 2, 3) for x in node.args[position]]


def _adamw_in_place_work(node: Node) -> Work:
    return Work(0, nbytes(values_of(node.all_input_nodes)) + nbytes(values_of(_adamw_writes(node))))


def _label(program: Program, node: Node) -> str:
    return f"adamw {len(node.args[0])} leaves"


register(
    Operation(
        name="adamw",
        target=adamw,
        fake=adamw,
        kind=infer_lists,
        perform=_adamw,
        line=lambda program, node: f"update          adamw, {len(node.args[0])} leaves",
        label=_label,
        in_place=adamw_,
        replaces=(0, 2, 3),
        gradients=1,
        takes_where=True,
    )
)
register(
    Operation(
        name="adamw_",
        target=adamw_,
        fake=adamw_,
        kind=infer_lists,
        writes=_adamw_writes,
        work=_adamw_in_place_work,
        perform=lambda program, node, rank: fused_adamw_,
        line=lambda program, node: f"update          adamw, {len(node.args[0])} leaves, in place",
        label=_label,
    )
)
for _overload in (scale_by_adam.default, scale_by_adam.tensors):
    register(Operation(name="scale_by_adam", target=_overload, fake=_overload, kind=infer_lists, work=read_and_write))
