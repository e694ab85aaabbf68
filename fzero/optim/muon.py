"""Muon: momentum whose matrices are orthogonalized, for the matrices of hidden layers; AdamW for all other leaves.

Sharded, each matrix is orthogonalized once, on one rank: docs/muon.md says what moves.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.embeddings import is_embedding
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.base.shapes import global_shape, of_whole
from fzero.base.tree import Tree
from fzero.optim.base import (
    EmptyState,
    GradientTransformation,
    Mask,
    Schedule,
    State,
    cast,
    chain,
    check_choice,
    check_decay,
    check_finite,
    check_not_negative,
    check_number,
    flatten_alike,
    init_zeros,
    stage,
)
from fzero.optim.newton_schulz import Block, NewtonSchulz, orthogonalize
from fzero.optim.operations import cast_each
from fzero.optim.presets import adamw
from fzero.optim.transforms import add_decayed_weights, scale_by_learning_rate

Adjust = Literal["original", "match_rms_adamw"]
Split = Callable[[str, Any], Sequence[int] | None]
"""(dotted path, leaf) -> the rows of each matrix that the leaf's rows are cut into; None for one matrix. Of a leaf that
is split over model axes, the rows of the whole leaf."""

SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""How the update of a matrix is scaled: as Jordan does, or to the root mean square of AdamW's updates (Moonlight)."""

_log = logging.getLogger("fzero")
_DEFAULT = NewtonSchulz()


class ScaleByMuonState(NamedTuple):
    """Muon's running mean of past gradients."""

    mu: Tree  # as params


def scale_by_muon(
    momentum: float | Tensor = 0.95,
    nesterov: bool = True,
    *,
    ns_steps: int = _DEFAULT.steps,
    ns_coeffs: tuple[float, float, float] = _DEFAULT.coefficients,
    eps: float = _DEFAULT.eps,
    adjust: Adjust = "original",
    split: Split | None = None,
) -> GradientTransformation:
    """Orthogonalized momentum, with the formulas and defaults of `torch.optim.Muon`; every leaf is a matrix or a stack.

    `mu` is the running mean of gradients `g`: `mu + (1 - momentum) (g - mu)`. The update is `mu`, or with `nesterov`
    `g + momentum (mu - g)`, orthogonalized by `ns_steps` Newton-Schulz steps in bfloat16 and scaled by `adjust`:
    "original", sqrt(max(1, rows / columns)), or "match_rms_adamw", 0.2 sqrt(max(rows, columns)).

    A leaf of 3 dimensions is a stack of matrices, such as experts, along dim 0. `split(path, leaf)` lists the rows of
    each matrix where several lie in one leaf, such as queries, keys and values; in a stack, those of each matrix of it.
    `momentum` may be a 0-d tensor, such as the value of a schedule.

    Sources: Jordan et al., https://kellerjordan.github.io/posts/muon/; Liu et al., Muon is Scalable for LLM Training,
    https://arxiv.org/abs/2502.16982.

    Raises:
        FzeroError: for a momentum outside [0, 1), a negative `eps`, fewer than 0 or more than 99 steps, another number
            of coefficients than 3, an unknown `adjust`; in `init`, naming the leaf, for a leaf of other than 2 or 3
            dimensions, and where `split` does not add up to the leaf's rows; else as `trace`.
    """
    check_decay("scale_by_muon", "momentum", momentum)
    check_not_negative("scale_by_muon", "eps", eps)
    if not (isinstance(ns_steps, int) and 0 <= ns_steps < 100):
        raise FzeroError("scale_by_muon", f"ns_steps is {ns_steps!r}", "give 0 to 99 steps")
    if not (isinstance(ns_coeffs, (tuple, list)) and len(ns_coeffs) == 3):
        raise FzeroError("scale_by_muon", f"ns_coeffs is {ns_coeffs!r}", "give three numbers: a, b and c")
    for i, coefficient in enumerate(ns_coeffs):
        check_number("scale_by_muon", **{f"ns_coeffs[{i}]": coefficient})
        check_finite("scale_by_muon", f"ns_coeffs[{i}]", coefficient)
    check_choice("scale_by_muon", "adjust", adjust, SCALES)
    how = NewtonSchulz(ns_steps, (ns_coeffs[0], ns_coeffs[1], ns_coeffs[2]), eps)

    def cut(path: str, leaf: Any) -> list[Block]:
        columns = global_shape(leaf)[-1]
        return [Block(rows, SCALES[adjust](rows, columns)) for rows in _cut_rows(path, leaf, split)]

    def init(params: Tree) -> ScaleByMuonState:
        mu = init_zeros(params)
        tree.map_with_path(cut, tree.split_as(params, mu)[0])
        return ScaleByMuonState(mu)

    def update(updates: Tree, state: ScaleByMuonState, params: Tree | None = None) -> tuple[Tree, ScaleByMuonState]:
        treedef, (mu, grads) = flatten_alike(state.mu, updates)
        if not grads:
            return updates, state
        blocks = [cut(path, leaf) for path, leaf in zip(tree.paths(state.mu), mu)]
        wide = [torch.promote_types(grad.dtype, mean.dtype) for grad, mean in zip(grads, mu)]
        grads, means = cast_each(grads, wide), cast_each(mu, wide)
        means = _lerp(means, grads, 1 - momentum)
        steps = orthogonalize(_lerp(grads, means, momentum) if nesterov else means, blocks, how)
        return tree.unflatten(treedef, steps), ScaleByMuonState(tree.unflatten(treedef, cast(means, mu)))

    return stage(ScaleByMuonState, init, update)


def _lerp(start: list[Any], end: list[Any], weight: float | Tensor) -> list[Any]:
    """`start + weight * (end - start)`, for a number by torch's lerp, as `torch.optim.Muon`."""
    if not isinstance(weight, Tensor):
        return list(torch._foreach_lerp(start, end, weight))
    return list(torch._foreach_add(start, torch._foreach_mul(torch._foreach_sub(end, start), weight)))


def _cut_rows(path: str, leaf: Any, split: Split | None) -> list[int]:
    """The rows of each matrix of a leaf, in order."""
    shape = global_shape(leaf)
    if len(shape) not in (2, 3):
        way_out = "let where=... choose leaves of 2 dimensions, or of 3, which are stacks of matrices"
        raise FzeroError(path, f"has shape {list(shape)}, which is no matrix", way_out)
    if not math.prod(shape):
        return []
    total = shape[-2]
    given = of_whole(split)(path, leaf) if split is not None else None
    rows = [total] if given is None else list(given)
    if sum(rows) != total or min(rows) < 1:
        problem = f"split gives matrices of {rows} rows, and the leaf has {total}"
        raise FzeroError(path, problem, "give rows above 0 that add up to those of the leaf, or None")
    return rows * math.prod(shape[:-2])


class MuonState(NamedTuple):
    """The states of both optimizers. Each has None in the places of the other's leaves."""

    matrices: State  # of Muon
    rest: State  # of the other optimizer; empty where Muon has all leaves


def muon(
    learning_rate: float | Schedule = 1e-3,
    weight_decay: float = 0.1,
    momentum: float | Tensor = 0.95,
    nesterov: bool = True,
    *,
    ns_steps: int = _DEFAULT.steps,
    ns_coeffs: tuple[float, float, float] = _DEFAULT.coefficients,
    eps: float = _DEFAULT.eps,
    adjust: Adjust = "original",
    where: Mask | None = None,
    split: Split | None = None,
    rest: GradientTransformation | None = None,
) -> GradientTransformation:
    """Muon for the leaves that `where` chooses, and `rest` for all others: by default AdamW with torch's defaults, a
    rate of 1e-3 and a decay of 0.01.

        optim.muon(0.02, rest=optim.adamw(3e-4, weight_decay=0.01))

    Equal to `torch.optim.Muon`: the step of a matrix is minus the rate times (its orthogonalized momentum, scaled by
    `adjust`, + `weight_decay` * the matrix). The other arguments are those of `scale_by_muon`.

    `where(path, leaf)` is by default true for leaves of 2 dimensions but weights of an `nn.Embedding`, alone or tied.
    `fzero.lower` marks these. `init` refuses a matrix of a tree of other origin, because nothing says what it is.
    `optim.report(params, state)` lists the optimizer of each leaf. `update` needs the parameters.

    Raises:
        FzeroError: as `scale_by_muon` and `add_decayed_weights`; in `init`, where `where` chooses no leaf, and, naming
            the leaf, where nothing says whether a matrix is an embedding.
    """
    matrices = chain(
        scale_by_muon(momentum, nesterov, ns_steps=ns_steps, ns_coeffs=ns_coeffs, eps=eps, adjust=adjust, split=split),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )
    others = adamw(1e-3, weight_decay=0.01) if rest is None else rest

    def init(params: Tree) -> MuonState:
        trained, _ = tree.split(params, lambda path, leaf: not is_frozen(leaf))
        chosen, left = tree.split(trained, of_whole(where or _is_hidden_matrix))
        count, total = len(tree.leaves(chosen)), len(tree.leaves(trained))
        if not count:
            way_out = "give where=lambda path, leaf: ..., which is true for the matrices of hidden layers"
            raise FzeroError("muon", f"where chooses none of {total} leaves", way_out)
        _log.info("muon: orthogonalizes %d of %d leaves", count, total)
        return MuonState(matrices.init(chosen), others.init(left) if count < total else EmptyState())

    def update(updates: Tree, state: MuonState, params: Tree | None = None) -> tuple[Tree, MuonState]:
        if params is None:
            raise FzeroError("muon", "has no parameters", "pass them: update(updates, state, params)")
        mu = state.matrices[0].mu
        (chosen, left), (weights, other_weights) = tree.split_as(updates, mu), tree.split_as(params, mu)
        chosen, first = matrices.update(chosen, state.matrices, weights)
        second = state.rest
        if tree.leaves(left):
            left, second = others.update(left, second, other_weights)
        return tree.merge(chosen, left), MuonState(first, second)

    return stage(MuonState, init, update, takes_integers=True)


def _is_hidden_matrix(path: str, leaf: Any) -> bool:
    """Whether a leaf is a matrix and no embedding."""
    if leaf.ndim != 2:
        return False
    known = is_embedding(leaf)
    if known is None:
        problem = f"nothing says whether this {list(leaf.shape)} leaf is an embedding, which Muon leaves to AdamW"
        way_out = "give optim.muon(where=lambda path, leaf: ...), or init with a tree of fzero.lower or its partition"
        raise FzeroError(path, problem, way_out)
    return not known
