"""Stages that scale each element by running statistics of its own gradients. Names are optax's, formulas torch's where
torch.optim has the optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.tree import Tree
from fzero.optim import kernels
from fzero.optim.base import (
    GradientTransformation,
    check_decay,
    check_not_negative,
    flatten_alike,
    init_count,
    init_number,
    init_zeros,
    same_kind,
    stage,
)


class ScaleByLionState(NamedTuple):
    """Lion's running mean of past gradients."""

    mu: Tree  # as params


def scale_by_lion(b1: float = 0.9, b2: float = 0.99) -> GradientTransformation:
    """The sign of `b1 * m + (1 - b1) * g`, where m is the running mean of gradients with decay rate `b2`.

    Chen et al., Symbolic Discovery of Optimization Algorithms, https://arxiv.org/abs/2302.06675, and its defaults.

    Raises:
        FzeroError: for a decay rate outside [0, 1); in `init` and `update`, as `scale_by_adam`.
    """
    check_decay("scale_by_lion", "b1", b1)
    check_decay("scale_by_lion", "b2", b2)

    def update(updates: Tree, state: ScaleByLionState, params: Tree | None = None) -> tuple[Tree, ScaleByLionState]:
        treedef, (mu, grads) = flatten_alike(state.mu, updates)
        lists = kernels.scale_by_lion(grads, mu, *same_kind(None, b1, b2))
        updates, mu = (tree.unflatten(treedef, leaves) for leaves in lists)
        return updates, ScaleByLionState(mu)

    return stage(ScaleByLionState, lambda params: ScaleByLionState(init_zeros(params)), update)


class ScaleByRssState(NamedTuple):
    """Adagrad's sums of past squared gradients."""

    sum_of_squares: Tree  # as params


def scale_by_rss(initial_accumulator_value: float = 0.0, eps: float = 1e-10) -> GradientTransformation:
    """`g / (sqrt(s) + eps)`, where s is the sum of all squared gradients and `initial_accumulator_value`.

    Duchi et al., Adaptive Subgradient Methods, https://jmlr.org/papers/v12/duchi11a.html. Formula and defaults are
    those of torch.optim.Adagrad; optax adds `eps` inside of the root.

    Raises:
        FzeroError: for a negative number; in `init` and `update`, as `scale_by_adam`.
    """
    check_not_negative("scale_by_rss", "initial_accumulator_value", initial_accumulator_value)
    check_not_negative("scale_by_rss", "eps", eps)

    def init(params: Tree) -> ScaleByRssState:
        return ScaleByRssState(tree.map(lambda leaf: leaf + initial_accumulator_value, init_zeros(params)))

    def update(updates: Tree, state: ScaleByRssState, params: Tree | None = None) -> tuple[Tree, ScaleByRssState]:
        treedef, (sums, grads) = flatten_alike(state.sum_of_squares, updates)
        updates, sums = (tree.unflatten(treedef, leaves) for leaves in kernels.scale_by_rss(grads, sums, eps))
        return updates, ScaleByRssState(sums)

    return stage(ScaleByRssState, init, update)


class ScaleByRmsState(NamedTuple):
    """RMSprop's running mean of past squared gradients."""

    nu: Tree  # as params


def scale_by_rms(decay: float = 0.99, eps: float = 1e-8) -> GradientTransformation:
    """`g / (sqrt(v) + eps)`, where v is the running mean of squared gradients.

    Hinton, https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf. Formula and defaults are those of
    torch.optim.RMSprop; optax adds `eps` inside of the root, and its `decay` is 0.9.

    Raises:
        FzeroError: as `scale_by_adam`.
    """
    check_decay("scale_by_rms", "decay", decay)
    check_not_negative("scale_by_rms", "eps", eps)

    def update(updates: Tree, state: ScaleByRmsState, params: Tree | None = None) -> tuple[Tree, ScaleByRmsState]:
        treedef, (nu, grads) = flatten_alike(state.nu, updates)
        updates, nu = (
            tree.unflatten(treedef, leaves) for leaves in kernels.scale_by_rms(grads, nu, *same_kind(None, decay, eps))
        )
        return updates, ScaleByRmsState(nu)

    return stage(ScaleByRmsState, lambda params: ScaleByRmsState(init_zeros(params)), update)


class ScaleByStddevState(NamedTuple):
    """Running means of past gradients and of their squares."""

    mu: Tree  # as params: running mean of gradients
    nu: Tree  # as params: running mean of squared gradients


def scale_by_stddev(decay: float = 0.99, eps: float = 1e-8) -> GradientTransformation:
    """`g / (sqrt(v - m**2) + eps)`, where m and v are the running means of gradients and of squared gradients.

    RMSprop with `centered=True`: Graves, https://arxiv.org/abs/1308.0850. Formula and defaults are those of
    torch.optim.RMSprop.

    Raises:
        FzeroError: as `scale_by_adam`.
    """
    check_decay("scale_by_stddev", "decay", decay)
    check_not_negative("scale_by_stddev", "eps", eps)

    def init(params: Tree) -> ScaleByStddevState:
        return ScaleByStddevState(init_zeros(params), init_zeros(params))

    def update(updates: Tree, state: ScaleByStddevState, params: Tree | None = None) -> tuple[Tree, ScaleByStddevState]:
        treedef, (mu, nu, grads) = flatten_alike(state.mu, state.nu, updates)
        lists = kernels.scale_by_stddev(grads, mu, nu, *same_kind(None, decay, eps))
        updates, mu, nu = (tree.unflatten(treedef, leaves) for leaves in lists)
        return updates, ScaleByStddevState(mu, nu)

    return stage(ScaleByStddevState, init, update)


class ScaleByAmsgradState(NamedTuple):
    """AMSGrad's running means of past gradients, and the largest mean of squares."""

    count: Tensor  # type: ignore[assignment]  # 0-d int32, steps so far (hides tuple.count, as in optax)
    mu: Tree  # as params: running mean of gradients
    nu: Tree  # as params: running mean of squared gradients
    nu_max: Tree  # as params: the largest nu so far, element by element


def scale_by_amsgrad(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> GradientTransformation:
    """`m / (sqrt(v) + eps)` as of `scale_by_adam`, where v is the largest running mean of squares so far.

    Reddi et al., On the Convergence of Adam and Beyond, https://arxiv.org/abs/1904.09237. Formula and defaults are
    those of torch.optim.Adam with `amsgrad=True`: the bias is corrected behind the maximum. optax corrects the bias in
    front of the maximum.

    Raises:
        FzeroError: as `scale_by_adam`.
    """
    check_decay("scale_by_amsgrad", "b1", b1)
    check_decay("scale_by_amsgrad", "b2", b2)
    check_not_negative("scale_by_amsgrad", "eps", eps)

    def init(params: Tree) -> ScaleByAmsgradState:
        return ScaleByAmsgradState(init_count(params), *(init_zeros(params) for _ in range(3)))

    def update(
        updates: Tree, state: ScaleByAmsgradState, params: Tree | None = None
    ) -> tuple[Tree, ScaleByAmsgradState]:
        treedef, (mu, nu, nu_max, grads) = flatten_alike(state.mu, state.nu, state.nu_max, updates)
        count = state.count + 1
        lists = kernels.scale_by_amsgrad(grads, mu, nu, nu_max, count, *same_kind(count, b1, b2, eps))
        updates, mu, nu, nu_max = (tree.unflatten(treedef, leaves) for leaves in lists)
        return updates, ScaleByAmsgradState(count, mu, nu, nu_max)

    return stage(ScaleByAmsgradState, init, update)


class ScaleByNadamState(NamedTuple):
    """NAdam's running means of past gradients, and the product of its momenta."""

    count: Tensor  # type: ignore[assignment]  # 0-d int32, steps so far (hides tuple.count, as in optax)
    product: Tensor  # 0-d float64, of the momenta so far
    mu: Tree  # as params: running mean of gradients
    nu: Tree  # as params: running mean of squared gradients


def scale_by_nadam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, momentum_decay: float = 4e-3
) -> GradientTransformation:
    """Adam with Nesterov's momentum: `((1 - u) / (1 - U) * g + u' / (1 - U * u') * m) / (sqrt(v) + eps)`.

    m and v are running means of gradients and of their squares, v corrected as in Adam. The momentum of step t is
    `u = b1 * (1 - 0.96 ** (t * momentum_decay) / 2)`, that of step t + 1 is u', and U is the product of all up to u.

    Dozat, Incorporating Nesterov Momentum into Adam, ICLR 2016 workshop. Formula and defaults are those of
    torch.optim.NAdam; optax's nadam has a constant momentum.

    Raises:
        FzeroError: as `scale_by_adam`.
    """
    check_decay("scale_by_nadam", "b1", b1)
    check_decay("scale_by_nadam", "b2", b2)
    check_not_negative("scale_by_nadam", "eps", eps)
    check_not_negative("scale_by_nadam", "momentum_decay", momentum_decay)

    def momentum(step: Any) -> Any:
        return b1 * (1 - 0.5 * 0.96 ** (momentum_decay * step.to(torch.float64)))

    def init(params: Tree) -> ScaleByNadamState:
        return ScaleByNadamState(
            init_count(params), init_number(params, 1.0, torch.float64), init_zeros(params), init_zeros(params)
        )

    def update(updates: Tree, state: ScaleByNadamState, params: Tree | None = None) -> tuple[Tree, ScaleByNadamState]:
        treedef, (mu, nu, grads) = flatten_alike(state.mu, state.nu, updates)
        count = state.count + 1
        now, later = momentum(count), momentum(count + 1)
        product = state.product * now
        of_grad, of_mean = (1 - now) / (1 - product), later / (1 - product * later)
        lists = kernels.scale_by_nadam(grads, mu, nu, count, of_grad, of_mean, *same_kind(count, b1, b2, eps))
        updates, mu, nu = (tree.unflatten(treedef, leaves) for leaves in lists)
        return updates, ScaleByNadamState(count, product, mu, nu)

    return stage(ScaleByNadamState, init, update)
