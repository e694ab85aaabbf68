"""Adam with moments of 8 bits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.shapes import global_shape
from fzero.base.tree import Tree
from fzero.optim import kernels
from fzero.optim.base import (
    GradientTransformation,
    Mask,
    Schedule,
    chain,
    check_decay,
    check_not_negative,
    check_number,
    flatten_alike,
    init_count,
    init_zeros,
    stage,
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

    Blocks are counted from the start of each whole leaf, so codes are the same on any number of ranks. Therefore no
    rank may cut a block: partition with `fzero.partition(..., unit=256)`. A leaf that is split over model axes has the
    blocks of one device too: elements that adjoin in the whole and in a part, such as a row's, must be whole blocks.
    Leaves of fewer than 4,096 elements have means of the parameter's dtype. A step computes in float32. State is made
    outside of a step.

    Dettmers et al., 8-bit Optimizers via Block-wise Quantization, https://arxiv.org/abs/2110.02861, with blocks of 256.

    Raises:
        FzeroError: as `scale_by_adam`, and for a rate that is a tensor; in `init`, naming the leaf, where ranks, or
            the parts of a split leaf, cut blocks; in `update`, naming the leaf, for state of blocks of another size.
    """
    check_number("scale_by_adam8bit", b1=b1, b2=b2, eps=eps)
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
        treedef, (mu, nu, grads) = flatten_alike(state.mu, state.nu, updates)
        count, scales = state.count + 1, [tree.leaves(state.mu_scales), tree.leaves(state.nu_scales)]
        large = [i for i, mean in enumerate(mu) if mean.dtype == torch.uint8]
        small = [i for i, mean in enumerate(mu) if mean.dtype != torch.uint8]
        _check_scales([tree.paths(state.mu)[i] for i in large], [mu[i] for i in large], state)
        made: dict[int, tuple[Any, ...]] = {}  # position -> update, mu, nu
        if large:
            g, m, v = ([column[i] for i in large] for column in (grads, mu, nu))
            g, m, scales[0], v, scales[1] = step_in_8_bits(g, m, scales[0], v, scales[1], count, b1, b2, eps)
            made.update(zip(large, zip(g, m, v)))
        if small:
            lists = ([column[i] for i in small] for column in (grads, mu, nu))
            made.update(zip(small, zip(*kernels.scale_by_adam(*lists, count, b1, b2, eps))))
        trees = [tree.unflatten(treedef, [made[i][column] for i in range(len(mu))]) for column in range(3)]
        new = (tree.unflatten(tree.flatten(state.mu_scales)[1], column) for column in scales)
        return trees[0], ScaleByAdam8bitState(count, trees[1], trees[2], *new)

    return stage(ScaleByAdam8bitState, init, update)


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
    return math.prod(global_shape(leaf)) >= LEAST


def _check_scales(paths: list[str], codes: list[Any], state: ScaleByAdam8bitState) -> None:
    """Refuse state without a scale for each block of these codes: of blocks of another size, or of other leaves."""
    way_out = "give state of this optimizer, with blocks of this size"
    for scales in (state.mu_scales, state.nu_scales):
        given = dict(zip(tree.paths(scales), tree.leaves(scales)))
        for path, code in zip(paths, codes):
            found, expected = (
                tuple(given[path].shape) if path in given else None,
                (count_blocks(math.prod(code.shape)),),
            )
            if found != expected:
                problem = f"8-bit state has scales of shape {found}, blocks of {BLOCK} elements have {expected}"
                raise FzeroError(path, problem, way_out)
        for path in given.keys() - set(paths):
            raise FzeroError(path, "has scales and no 8-bit codes", way_out)
