"""Adam with moments of 8 bits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.tree import Tree
from fzero.optim import kernels
from fzero.optim.base import (
    GradientTransformation,
    Mask,
    Schedule,
    chain,
    check_decay,
    check_not_negative,
    flatten_alike,
    init_count,
    init_zeros,
)
from fzero.optim.quantized import BLOCK, LEAST, code_of_zero, count_blocks, zero_scales
from fzero.optim.quantized import scale_by_adam8bit as step_in_8_bits
from fzero.optim.transforms import add_decayed_weights, scale_by_learning_rate


class ScaleByAdam8bitState(NamedTuple):
    """Adam's running means of past gradients, in 8 bits for leaves of at least 4,096 elements."""

    count: Tensor  # type: ignore[assignment]  # 0-d int32, steps so far (hides tuple.count, as in optax)
    mu: Tree  # as params: codes of the running mean of gradients, or the mean of a small leaf
    nu: Tree  # as params: the same of squared gradients
    mu_scales: Tree  # as params, [blocks] of each large leaf; None for a small leaf
    nu_scales: Tree


def scale_by_adam8bit(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> GradientTransformation:
    """`scale_by_adam` whose running means take 8 bits an element, and 4 bytes for each block of 256.

    Blocks are counted from the start of each leaf, so codes are the same on any number of ranks. Therefore no rank may
    cut a block: partition with `fzero.partition(..., unit=256)`. Leaves of fewer than 4,096 elements have means of the
    parameter's dtype. A step computes in float32. State is made outside of a step.

    Dettmers et al., 8-bit Optimizers via Block-wise Quantization, https://arxiv.org/abs/2110.02861, with blocks of 256.

    Raises:
        FzeroError: as `scale_by_adam`, and for a rate that is a tensor; in `init`, naming the leaf, where ranks cut
            blocks; in `update`, naming the leaf, for state of blocks of another size.
    """
    rates: dict[str, Any] = {"b1": b1, "b2": b2, "eps": eps}
    for name, value in rates.items():
        if isinstance(value, Tensor):
            raise FzeroError("scale_by_adam8bit", f"{name} is a tensor", "give a number, which stays the same")
    check_decay("scale_by_adam8bit", "b1", b1)
    check_decay("scale_by_adam8bit", "b2", b2)
    check_not_negative("scale_by_adam8bit", "eps", eps)

    def init(params: Tree) -> ScaleByAdam8bitState:
        zeros = init_zeros(params)
        large, small = tree.split(zeros, _is_large)
        mu, nu = (
            tree.merge(tree.map(lambda x, code=code: torch.full_like(x, code, dtype=torch.uint8), large), small)
            for code in map(code_of_zero, (True, False))
        )
        scales = tree.map(zero_scales, large), tree.map(zero_scales, large)
        return ScaleByAdam8bitState(init_count(params), mu, nu, *scales)

    def update(
        updates: Tree, state: ScaleByAdam8bitState, params: Tree | None = None
    ) -> tuple[Tree, ScaleByAdam8bitState]:
        flatten_alike(state.mu, state.nu, updates)
        count = state.count + 1
        trees = [tree.split_as(each, state.mu_scales) for each in (updates, state.mu, state.nu)]
        large, small = zip(*trees)
        treedef, (mu_scales, nu_scales) = tree.flatten(state.mu_scales)[1], map(tree.leaves, state[3:])
        grads, mu, nu = map(tree.leaves, large)
        _check_scales(tree.paths(large[0]), mu, mu_scales, nu_scales)
        if grads:
            steps = step_in_8_bits(grads, mu, mu_scales, nu, nu_scales, count, b1, b2, eps)
            grads, mu, mu_scales, nu, nu_scales = map(list, steps)
        lists, small_def = [tree.leaves(each) for each in small], tree.flatten(small[0])[1]
        others = [lists[0], lists[1], lists[2]]
        if lists[0]:
            others = list(kernels.scale_by_adam(lists[0], lists[1], lists[2], count, b1, b2, eps))
        made = [
            tree.merge(tree.unflatten(treedef, ours), tree.unflatten(small_def, theirs))
            for ours, theirs in zip((grads, mu, nu), others)
        ]
        scales = tree.unflatten(treedef, mu_scales), tree.unflatten(treedef, nu_scales)
        return made[0], ScaleByAdam8bitState(count, made[1], made[2], *scales)

    return GradientTransformation(init, update)


def adamw8bit(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    mask: Mask | None = None,
) -> GradientTransformation:
    """AdamW with moments of 8 bits: as `adamw`, with `scale_by_adam8bit` in the place of `scale_by_adam`.

    Raises:
        FzeroError: as `scale_by_adam8bit` and `add_decayed_weights`.
    """
    return chain(
        scale_by_adam8bit(b1, b2, eps),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def _is_large(path: str, leaf: Any) -> bool:
    return math.prod(leaf.shape) >= LEAST


def _check_scales(paths: list[str], codes: list[Any], *scales: list[Any]) -> None:
    """Refuse scales of blocks of another size."""
    for column in scales:
        for path, code, scale in zip(paths, codes, column, strict=True):
            expected, given = count_blocks(math.prod(code.shape)), tuple(scale.shape)
            if given != (expected,):
                problem = f"8-bit state has scales of shape {given}, blocks of {BLOCK} elements have ({expected},)"
                raise FzeroError(path, problem, "give state of this optimizer, with blocks of this size")
