"""The arithmetic of optimizers, on lists with one tensor for each leaf. Each function here is one node of a program.

Kernels get lists in float32 or wider, and return new lists. Formulas are torch's where torch.optim has the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.optim.operations import MAPS, SUMS, define, define_stage

Number = float | Tensor
"""A number, or behind `inject_hyperparams` a 0-d tensor. Of one operation all are numbers, or all are tensors."""
List = Any
"""A list of tensors, one for each leaf. `Any`, because torch types the results of its list operations as tuples."""


def _scale_by_adam(
    grads: List, mu: List, nu: List, count: Tensor, b1: Number, b2: Number, eps: Number
) -> tuple[List, ...]:
    means, squares = _average(mu, grads, b1), _average_squares(nu, grads, b2)
    scaled = torch._foreach_div(means, bias_correction(b1, count, [x.dtype for x in means]))
    torch._foreach_div_(scaled, _corrected_roots(squares, b2, count, eps))
    return scaled, means, squares


scale_by_adam = define_stage(
    "scale_by_adam(Tensor[] updates, Tensor[] mu, Tensor[] nu, Tensor count, float b1, float b2, float eps)"
    " -> (Tensor[], Tensor[], Tensor[])",
    _scale_by_adam,
)
"""`scale_by_adam(updates, mu, nu, count, b1, b2, eps) -> (updates, mu, nu)`; `count` is 1 at the first step."""


def _scale_by_amsgrad(
    grads: List, mu: List, nu: List, nu_max: List, count: Tensor, b1: Number, b2: Number, eps: Number
) -> tuple[List, ...]:
    means, squares = _average(mu, grads, b1), _average_squares(nu, grads, b2)
    largest = torch._foreach_maximum(nu_max, squares)
    scaled = torch._foreach_div(means, bias_correction(b1, count, [x.dtype for x in means]))
    torch._foreach_div_(scaled, _corrected_roots(largest, b2, count, eps))
    return scaled, means, squares, largest


scale_by_amsgrad = define_stage(
    "scale_by_amsgrad(Tensor[] updates, Tensor[] mu, Tensor[] nu, Tensor[] nu_max, Tensor count, float b1, float b2,"
    " float eps) -> (Tensor[], Tensor[], Tensor[], Tensor[])",
    _scale_by_amsgrad,
)
"""As `scale_by_adam`, with `nu_max`, the largest `nu` so far, in the place of `nu` in the denominator."""


def _scale_by_nadam(
    grads: List,
    mu: List,
    nu: List,
    count: Tensor,
    of_grad: Tensor,
    of_mean: Tensor,
    b1: Number,
    b2: Number,
    eps: Number,
) -> tuple[List, ...]:
    means, squares = _average(mu, grads, b1), _average_squares(nu, grads, b2)
    scaled = torch._foreach_mul(grads, of_grad)
    torch._foreach_add_(scaled, torch._foreach_mul(means, of_mean))
    torch._foreach_div_(scaled, _corrected_roots(squares, b2, count, eps))
    return scaled, means, squares


scale_by_nadam = define_stage(
    "scale_by_nadam(Tensor[] updates, Tensor[] mu, Tensor[] nu, Tensor count, Tensor of_grad, Tensor of_mean,"
    " float b1, float b2, float eps) -> (Tensor[], Tensor[], Tensor[])",
    _scale_by_nadam,
)
"""As `scale_by_adam`, with `of_grad * g + of_mean * m` in the place of the corrected mean."""


def _scale_by_lion(grads: List, mu: List, b1: Number, b2: Number) -> tuple[List, ...]:
    signs = _average(mu, grads, b1)
    torch._foreach_sign_(signs)
    return signs, _average(mu, grads, b2)


scale_by_lion = define_stage(
    "scale_by_lion(Tensor[] updates, Tensor[] mu, float b1, float b2) -> (Tensor[], Tensor[])", _scale_by_lion
)
"""`scale_by_lion(updates, mu, b1, b2) -> (updates, mu)`."""


def _scale_by_rss(grads: List, sums: List, eps: Number) -> tuple[List, ...]:
    sums = torch._foreach_addcmul(sums, grads, grads)
    return torch._foreach_div(grads, _roots(sums, eps)), sums


scale_by_rss = define_stage(
    "scale_by_rss(Tensor[] updates, Tensor[] sum_of_squares, float eps) -> (Tensor[], Tensor[])", _scale_by_rss
)
"""`scale_by_rss(updates, sum_of_squares, eps) -> (updates, sum_of_squares)`."""


def _scale_by_rms(grads: List, nu: List, decay: Number, eps: Number) -> tuple[List, ...]:
    squares = _average_squares(nu, grads, decay)
    return torch._foreach_div(grads, _roots(squares, eps)), squares


scale_by_rms = define_stage(
    "scale_by_rms(Tensor[] updates, Tensor[] nu, float decay, float eps) -> (Tensor[], Tensor[])", _scale_by_rms
)
"""`scale_by_rms(updates, nu, decay, eps) -> (updates, nu)`."""


def _scale_by_stddev(grads: List, mu: List, nu: List, decay: Number, eps: Number) -> tuple[List, ...]:
    means, squares = _average(mu, grads, decay), _average_squares(nu, grads, decay)
    variances = torch._foreach_addcmul(squares, means, means, -1)
    return torch._foreach_div(grads, _roots(variances, eps)), means, squares


scale_by_stddev = define_stage(
    "scale_by_stddev(Tensor[] updates, Tensor[] mu, Tensor[] nu, float decay, float eps)"
    " -> (Tensor[], Tensor[], Tensor[])",
    _scale_by_stddev,
)
"""`scale_by_stddev(updates, mu, nu, decay, eps) -> (updates, mu, nu)`."""


def _scale_by_floored_rms(grads: List, nu: List, weight: Tensor, floors: Sequence[float]) -> tuple[List, ...]:
    squares = torch._foreach_mul(nu, 1 - weight)
    torch._foreach_add_(squares, torch._foreach_mul(torch._foreach_mul(grads, grads), weight))
    roots = torch._foreach_sqrt(squares)
    torch._foreach_clamp_min_(roots, floors)
    return torch._foreach_div(grads, roots), squares


scale_by_floored_rms = define_stage(
    "scale_by_floored_rms(Tensor[] updates, Tensor[] nu, Tensor weight, float[] floors) -> (Tensor[], Tensor[])",
    _scale_by_floored_rms,
)
"""Adafactor's step for a leaf without rows: `g / max(sqrt(v), floor)`, with `v = (1 - weight) * v + weight * g**2`."""


def _schedule_free(updates: List, z: List, params: List, weight: Tensor, b1: Number) -> tuple[List, ...]:
    steps = torch._foreach_mul(updates, b1)
    torch._foreach_add_(steps, z)
    torch._foreach_sub_(steps, params)
    torch._foreach_mul_(steps, weight)
    torch._foreach_add_(steps, torch._foreach_mul(updates, 1 - b1))
    return steps, torch._foreach_add(z, updates)


schedule_free = define_stage(
    "schedule_free(Tensor[] updates, Tensor[] z, Tensor[] params, Tensor weight, float b1) -> (Tensor[], Tensor[])",
    _schedule_free,
)
"""`schedule_free(updates, z, params, weight, b1) -> (updates, z)`: see `optim.schedule_free`.

With `x = (y - (1 - b1) z) / b1` for the params y, the step from y to `b1 x' + (1 - b1) z'`, where `z' = z + u` and
`x' = x + weight (z' - x)`, is `(1 - b1) u + weight (z + b1 u - y)`. So nothing is divided by b1.
"""


def _average(means: List, new: List, decay: Number) -> List:
    """`decay * means + (1 - decay) * new`."""
    if isinstance(decay, Tensor):  # which lerp would read on the host
        return torch._foreach_add(torch._foreach_mul(means, decay), torch._foreach_mul(new, 1 - decay))
    return torch._foreach_lerp(means, new, 1 - decay)


def _average_squares(nu: List, grads: List, decay: Number) -> List:
    squares = torch._foreach_mul(nu, decay)
    if isinstance(decay, Tensor):
        torch._foreach_add_(squares, torch._foreach_mul(torch._foreach_mul(grads, grads), 1 - decay))
    else:
        torch._foreach_addcmul_(squares, grads, grads, 1 - decay)
    return squares


def _roots(squares: List, eps: Number) -> List:
    roots = torch._foreach_sqrt(squares)
    torch._foreach_add_(roots, eps)
    return roots


def _corrected_roots(squares: List, decay: Number, count: Tensor, eps: Number) -> List:
    roots = torch._foreach_div(squares, bias_correction(decay, count, [x.dtype for x in squares]))
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, eps)
    return roots


def bias_correction(decay: Number, count: Tensor, dtypes: Sequence[torch.dtype]) -> Tensor:
    """`1 - decay ** count`, 0-d: the factor by which a running mean that starts at 0 is too small."""
    # In float32 the rounding of 0.999, 3e-8, would be 3e-5 of the difference 1e-3.
    widest = torch.float64 if torch.float64 in dtypes else torch.float32
    return (1 - decay ** count.to(torch.float64)).to(widest)


# whole leaves


def _sums_of_squares(leaves: List, divisors: Sequence[int], dtype: torch.dtype) -> List:
    return [leaf.to(dtype).square().sum() / divisor for leaf, divisor in zip(leaves, divisors)]


_sum_rows = define(
    "sums_of_squares(Tensor[] leaves, int[] divisors, ScalarType dtype) -> Tensor[]",
    _sums_of_squares,
    lambda leaves, divisors, dtype: [leaf.new_empty((), dtype=dtype) for leaf in leaves],
    SUMS,
)


def sums_of_squares(leaves: List, divisors: Sequence[int]) -> List:
    """For each leaf the sum of its squared elements, divided by its divisor.

    The sums are 0-d, in float32, or all in float64 where a leaf is float64: one dtype, because one collective adds them
    up over ranks.
    """
    is_wide = any(leaf.dtype == torch.float64 for leaf in leaves)
    sums: List = _sum_rows(leaves, divisors, torch.float64 if is_wide else torch.float32)  # passes cut these lists
    return sums


def _scale_each(leaves: List, factors: Tensor, rows: Sequence[int]) -> List:
    return [(leaf * factors[row]).to(leaf.dtype) for leaf, row in zip(leaves, rows)]


_scale_rows = define(
    "scale_each(Tensor[] leaves, Tensor factors, int[] rows) -> Tensor[]",
    _scale_each,
    lambda leaves, factors, rows: [torch.empty_like(leaf) for leaf in leaves],
    MAPS,
)


def scale_each(leaves: List, factors: Tensor) -> List:
    """Each leaf times its element of `factors`, [leaves], in the leaf's dtype."""
    scaled: List = _scale_rows(leaves, factors, list(range(len(leaves))))  # passes cut this list with the leaves
    return scaled
