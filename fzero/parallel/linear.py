"""Linear layers whose weights are split: a column, whose outputs differ along the axis, and a row, which sums them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero.base.arguments import check_arguments


@check_arguments
def column(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    axis: str | tuple[str, ...] = "tp",
    sequence: int | None = None,
) -> Tensor:
    """`x @ weight.T + bias` of this rank's outputs.

    * `weight` [out, in] and `bias` [out] are split along dim 0, `split={"up": (axis, 0)}`. They differ along the axis.
    * `x` [..., in] is the same along the axis. With `sequence`, a dim of `x`, each rank has some of its rows there, in
      rank order: these differ, and are gathered.
    * The result [..., out / N] differs along the axis.

    The columns of Megatron (Shoeybi et al., 2019); with `sequence` of its sequence parallelism (Korthikanti et al.,
    2022). Forward the gather moves one activation, else nothing moves.
    """
    if sequence is not None:
        x = fzero.all_gather(x, axis, sequence)
    return F.linear(x, weight, bias)


@check_arguments
def row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    axis: str | tuple[str, ...] = "tp",
    sequence: int | None = None,
) -> Tensor:
    """`x @ weight.T + bias` of inputs that ranks have parts of, such as the outputs of `column`.

    * `weight` [out, in] is split along dim 1, `split={"down": (axis, 1)}`. `x` [..., in / N] and the weight differ
      along the axis.
    * `bias` [out] is not split, and is added once, behind the sum.
    * The result [..., out] is the same along the axis. With `sequence`, a dim, each rank gets some of its rows there,
      in rank order: these differ.

    An all-reduce of one activation, or with `sequence` a reduce-scatter. The transpose moves as much backward.

    Raises:
        FzeroError: with `sequence` for rows that do not divide by the ranks.
    """
    y = F.linear(x, weight)
    y = fzero.psum(y, axis) if sequence is None else fzero.psum_scatter(y, axis, sequence)
    return y if bias is None else y + bias
