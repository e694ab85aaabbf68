"""8-bit numbers: blocks of elements that share a scale, and codes of 8 bits whose values lie densely near zero.

Dettmers et al., 8-bit Optimizers via Block-wise Quantization, https://arxiv.org/abs/2110.02861.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fzero.optim import operations

BLOCK = 256
"""Elements that share a scale, their largest absolute value. Counted from the start of the leaf, not of a slice."""

LEAST = 4096
"""Elements from which on a leaf has state of 8 bits."""

DECADES = 7
"""The powers of ten below 1 that values spread over."""

Lists = tuple[list[Tensor], ...]


@lru_cache
def list_values(is_signed: bool) -> tuple[float, ...]:
    """The 256 values of the codes, in order: the paper's dynamic tree quantization.

    For each k below `DECADES`, the interval [0.1, 1] is cut into 2 ** k equal parts, or into twice as many without a
    sign. The middles of the parts, times 10 ** (k - 6), are values, with a sign both ways. So are 0 and 1.
    """
    values = [0.0, 1.0]
    for k in range(DECADES):
        count = 2**k if is_signed else 2 ** (k + 1)
        middles = [(0.1 + 0.9 * (i + 0.5) / count) * 10.0 ** (k - DECADES + 1) for i in range(count)]
        values += [*middles, *(-x for x in middles)] if is_signed else middles
    return tuple(sorted(values))


@lru_cache
def _values_on(device: torch.device, is_signed: bool) -> Tensor:
    """[256] float32 on a device. Made once, because a CUDA graph does not capture a copy from the host."""
    return torch.tensor(list_values(is_signed), dtype=torch.float32, device=device)


def code_of_zero(is_signed: bool) -> int:
    """The code whose value is 0."""
    return list_values(is_signed).index(0.0)


def count_blocks(numel: int) -> int:
    """The blocks of so many elements. The last one may be shorter."""
    return -(-numel // BLOCK)


def quantize(values: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    """`(codes, scales)` of values [S], which begin at the start of a block: [S] uint8, and [B] float32.

    A code's value, times its block's scale, is the nearest to the value. Zeros stay zeros.
    """
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    table = _values_on(values.device, is_signed)
    borders = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / torch.where(scales == 0, 1.0, scales)[:, None], borders, out_int32=True)
    return codes.to(torch.uint8).view(-1)[: values.numel()], scales


def dequantize(codes: Tensor, scales: Tensor, is_signed: bool) -> Tensor:
    """[S] float32, the values of codes [S] of blocks with scales [B]: the inverse of `quantize`, up to rounding."""
    values = _values_on(codes.device, is_signed)[codes.int()]
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK) * scales[:, None]
    return padded.view(-1)[: values.numel()]


# the operation of `scale_by_adam8bit`


def _scale_by_adam8bit(
    updates: Sequence[Tensor],
    mu: Sequence[Tensor],
    mu_scales: Sequence[Tensor],
    nu: Sequence[Tensor],
    nu_scales: Sequence[Tensor],
    count: Tensor,
    b1: float,
    b2: float,
    eps: float,
) -> Lists:
    """The kernel, leaf by leaf: float32 moments exist for one leaf at a time. Writes into no argument."""
    lists: Lists = ([], [], [], [], [])
    step = count.to(torch.float64)
    corrections = [(1 - b**step).to(torch.float32) for b in (b1, b2)]  # 1 - 0.999 in float32 would be off by 3e-5
    for row in zip(updates, mu, mu_scales, nu, nu_scales):
        for column, result in zip(lists, _step(*row, corrections, b1, b2, eps)):
            column.append(result)
    return lists


def _step(
    grad: Tensor,
    mu: Tensor,
    mu_scales: Tensor,
    nu: Tensor,
    nu_scales: Tensor,
    corrections: Sequence[Tensor],
    b1: float,
    b2: float,
    eps: float,
) -> tuple[Tensor, ...]:
    g = grad.reshape(-1).to(torch.float32)
    m = torch.lerp(dequantize(mu.reshape(-1), mu_scales, is_signed=True), g, 1 - b1)
    v = dequantize(nu.reshape(-1), nu_scales, is_signed=False).mul_(b2).addcmul_(g, g, value=1 - b2)
    scaled = (m / corrections[0]).div_((v / corrections[1]).sqrt_().add_(eps))
    new_mu, new_mu_scales = quantize(m, is_signed=True)
    new_nu, new_nu_scales = quantize(v, is_signed=False)
    return (
        scaled.to(grad.dtype).view(grad.shape),
        new_mu.view(mu.shape),
        new_mu_scales,
        new_nu.view(nu.shape),
        new_nu_scales,
    )


def _scale_by_adam8bit_fake(updates: Sequence[Tensor], *rest: Any) -> Lists:
    return tuple([torch.empty_like(x) for x in column] for column in (updates, *rest[:4]))


scale_by_adam8bit = operations.define(
    "scale_by_adam8bit(Tensor[] updates, Tensor[] mu, Tensor[] mu_scales, Tensor[] nu, Tensor[] nu_scales,"
    " Tensor count, float b1, float b2, float eps) -> (Tensor[], Tensor[], Tensor[], Tensor[], Tensor[])",
    _scale_by_adam8bit,
    _scale_by_adam8bit_fake,
)
"""`scale_by_adam8bit(updates, mu, mu_scales, nu, nu_scales, count, b1, b2, eps)` -> the first five lists, new; `count`
is 1 at the first step. The overload packet, as `kernels.scale_by_adam`."""


def zero_scales(leaf: Any) -> Tensor:
    """[B] float32 zeros, the scales of a leaf's blocks. Of a `Sharded` leaf, each on the rank that holds its block."""
    if torch.overrides.has_torch_function_unary(leaf):
        return torch.overrides.handle_torch_function(zero_scales, (leaf,), leaf)
    return leaf.new_zeros(count_blocks(leaf.numel()), dtype=torch.float32)
