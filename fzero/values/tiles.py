"""Tiles: functions of many rows, computed from a few rows at a time, so that what lies between their arguments and
their results is never whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.values.functions import is_sharded
from fzero.values.loops import take_turns
from fzero.values.quantized import read_quantized_leaves
from fzero.values.regions import remat

TILES = "tiles"
"""The `sync` of the loop over parts: leaves are gathered in front of it, and gradients scattered behind it."""
NOTHING: list[Any] = []
"""The policy of `remat` for a part: no operation of torch is kept. Collectives do not repeat: what a part sends for the
logits of a vocabulary are some numbers of a token."""


@check_arguments
def tiled(fn: Callable[..., tree.Tree], chunks: int, dim: int = 0) -> Callable[..., tree.Tree]:
    """`g(params, *args)` calls `fn(params, *parts)` for each of `chunks` parts of `args` along `dim`, one after the
    other, and joins the results along `dim`.

        h = h + fzero.tiled(mlp, chunks=8, dim=1)(params["mlp"], h)

    `fn` computes each row of its results from `params` and from the same row of its other arguments. These are trees of
    tensors of one size along `dim`. A part has `ceil(size / chunks)` rows, the last one fewer where the size does not
    divide. What all parts need whole, as weights are, stands in the tree `params`.

    In a sharded step the parts are the turns of one loop. The leaves of `params` are gathered once in front of it. The
    backward pass computes each part again, adds up the gradients of `params`, in their dtypes, and scatters the sums
    once. So one part's values inside of `fn` are alive at a time. A leaf that `shard(..., chunk=)` streams is gathered
    and scattered chunk by chunk in each part. Outside of a step the backward pass keeps all.

    The idea is that of tiled MLPs in ALST (Bekman et al., Arctic Long Sequence Training, 2025).

    Raises:
        FzeroError: for `chunks` below 1 or above the size along `dim`; for leaves of `args` that are no tensors, lack
            `dim` or have unequal sizes there; for a result that lacks `dim` or has another size there than its part.
    """

    def joined(params: tree.Tree, *args: tree.Tree) -> tree.Tree:
        args = read_quantized_leaves(args)
        leaves, treedef = tree.flatten(args)
        for path, x in zip(tree.paths(args), leaves):
            _check_dim(f"argument {path}", x, dim)
        if not leaves:
            raise FzeroError("tiled", "has no argument behind params to cut", "call the function itself")
        rows = [gather(x).movedim(dim, 0) for x in leaves]
        for path, x in zip(tree.paths(args), rows):
            if len(x) != len(rows[0]):
                problem = f"has size {len(x)} along dim {dim}, argument {tree.paths(args)[0]} has {len(rows[0])}"
                raise FzeroError(f"tiled: argument {path}", problem, "give what all parts need whole in params")

        def turn(whole: tree.Tree, parts: Sequence[Tensor]) -> tuple[tree.Tree, tree.Tree]:
            given = tree.unflatten(treedef, [x.movedim(0, dim) for x in parts])
            results = tree.map(gather, read_quantized_leaves(remat(fn, NOTHING)(whole, *given)))
            for path, y in zip(tree.paths(results), tree.leaves(results)):
                _check_dim(f"result {path}", y, dim)
                if y.shape[dim] != len(parts[0]):
                    problem = f"has size {y.shape[dim]} along dim {dim}, of a part of {len(parts[0])}"
                    raise FzeroError(f"tiled: result {path}".rstrip(), problem, "return a row for each row")
            return whole, tree.map(lambda y: y.movedim(dim, 0), results)

        _, results = scan_parts("tiled", turn, tree.map(gather, params), rows, chunks, TILES)
        return tree.map(lambda y: y.movedim(0, dim), results)

    return joined


def _check_dim(what: str, x: Any, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise FzeroError(f"tiled: {what}".rstrip(), f"is a {type(x).__name__}", "give tensors, others in params")
    if not -x.ndim <= dim < x.ndim:
        raise FzeroError(f"tiled: {what}".rstrip(), f"has {x.ndim} dimensions, and no dim {dim}", "give another dim")


def gather(x: Any) -> Any:
    """The full tensor of a leaf; anything else as given."""
    return x.full_tensor() if is_sharded(x) else x


def scan_parts(
    where: str,
    body: Callable[..., Any],
    carry: tree.Tree,
    xs: Sequence[Tensor],
    chunks: int,
    sync: str | None = None,
) -> tuple[tree.Tree, tree.Tree]:
    """The carry behind the last part, and y with a row for each row: `scan` over parts of ceil(rows / chunks) rows, and
    a last part of the rows that are left. `sync` is that of the loop."""
    rows = len(xs[0])
    if not isinstance(chunks, int) or isinstance(chunks, bool) or not 1 <= chunks <= rows:
        way_out = "give a whole number from 1 to the number of rows"
        raise FzeroError(f"{where}: chunks", f"is {chunks!r}, for {rows} rows", way_out)
    size = -(-rows // chunks)
    end = rows // size * size
    carry, ys = take_turns(body, carry, [x[:end].unflatten(0, (-1, size)) for x in xs], None, sync)
    ys = tree.map(lambda y: y.flatten(0, 1), ys)
    if end < rows:
        carry, last = body(carry, [x[end:] for x in xs])
        ys = tree.map(lambda y, more: torch.cat([y, more]), ys, last)
    return carry, ys
