"""Stages that look at the norm of each whole leaf, optax's "block". A step takes one all-reduce for all norms of a
stage."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.tree import Tree, TreeDef
from fzero.optim import kernels
from fzero.optim.base import GradientTransformation, check_not_negative, flatten_alike, stateless


def scale_by_trust_ratio(
    min_norm: float = 0.0,
    trust_coefficient: float = 1.0,
    eps: float = 0.0,
    *,
    bounds: tuple[float, float] = (0.0, math.inf),
) -> GradientTransformation:
    """Each leaf u of the updates, times `trust_coefficient * |p| / (|u| + eps)` with the 2-norms of its parameter and
    of itself. The norms are at least `min_norm`. The factor lies within `bounds`. A leaf stays as it is where a norm is
    0.

    You et al., LARS and LAMB, https://arxiv.org/abs/1904.00962. `update` needs the parameters.

    Raises:
        FzeroError: for a negative number, and bounds that are out of order; in `update`, as `add_decayed_weights`.
    """
    least, most = bounds
    numbers = {"min_norm": min_norm, "trust_coefficient": trust_coefficient, "eps": eps, "bounds": least}
    for name, value in numbers.items():
        check_not_negative("scale_by_trust_ratio", name, value)
    if not least <= most:
        raise FzeroError("scale_by_trust_ratio", f"bounds are {bounds}", "give the smaller one first")

    def update(updates: Tree, params: Tree | None) -> Tree:
        treedef, weights, steps = _flatten_beside("scale_by_trust_ratio", updates, params)
        if not steps:
            return updates
        norms = _roots([*weights, *steps], [1] * 2 * len(steps)).clamp(min=min_norm)
        of_params, of_steps = norms.chunk(2)
        is_zero = (of_params == 0) | (of_steps == 0)
        ratios = (trust_coefficient * of_params / (of_steps + eps)).clamp(least, most)
        factors = torch.where(is_zero, 1.0, ratios)
        return tree.unflatten(treedef, kernels.scale_each(steps, factors))

    return stateless(update)


def scale_by_param_block_rms(min_scale: float = 1e-3) -> GradientTransformation:
    """Each leaf of the updates, times the root mean square of its parameter, at least `min_scale`.

    Shazeer and Stern, Adafactor, https://arxiv.org/abs/1804.04235. `update` needs the parameters.

    Raises:
        FzeroError: for a negative `min_scale`; in `update`, as `add_decayed_weights`.
    """
    check_not_negative("scale_by_param_block_rms", "min_scale", min_scale)

    def update(updates: Tree, params: Tree | None) -> Tree:
        treedef, weights, steps = _flatten_beside("scale_by_param_block_rms", updates, params)
        if not steps:
            return updates
        return tree.unflatten(treedef, kernels.scale_each(steps, _roots(weights, _count(weights)).clamp(min=min_scale)))

    return stateless(update)


def _flatten_beside(where: str, updates: Tree, params: Tree | None) -> tuple[TreeDef, list[Any], list[Any]]:
    """`(treedef, parameters, updates)` as lists, without the parameters that have no update."""
    if params is None:
        raise FzeroError(where, "has no parameters", "pass them: update(updates, state, params)")
    params, _ = tree.split_as(params, updates)
    treedef, (weights, steps) = flatten_alike(params, updates)
    return treedef, weights, steps


def _roots(leaves: list[Any], divisors: list[int]) -> Tensor:
    """[leaves] the root of each leaf's sum of squares, divided by its divisor: the 2-norm for 1."""
    return torch.stack(kernels.sums_of_squares(leaves, divisors)).sqrt()


def _count(leaves: list[Any]) -> list[int]:
    """The elements of each leaf; 1 for a leaf without any, whose mean is then 0."""
    return [max(1, leaf.numel()) for leaf in leaves]
