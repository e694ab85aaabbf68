"""The exchange of rows whose numbers are known only when a step runs."""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.base import torch_private, tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.flags import FlagForm
from fzero.program import ops
from fzero.program.linear import apply
from fzero.program.ops.blocks import resize
from fzero.program.records import record
from fzero.ranks.performer import current_performer
from fzero.values.collectives import Axis, all_to_all, axis_size
from fzero.values.flags import note_local
from fzero.values.functions import is_sharded
from fzero.values.quantized import read_quantized_leaves

_WHERE = "ragged_all_to_all"


@check_arguments
def ragged_all_to_all(
    x: tree.Tree, sizes: Tensor, axis: Axis, bound: int, *, cut: bool = False
) -> tuple[tree.Tree, Tensor]:
    """Send `sizes[r]` rows of each leaf to rank r along a mesh axis. Rows stand in order of the ranks that they go to.

    Two ranks hold rows [1, 2, 3] with sizes [1, 2] and rows [4, 5, 6] with sizes [3, 0]. With a bound of 5 they get
    [1, 4, 5, 6, 0] and [2, 3, 0, 0, 0], and the sizes [1, 3] and [2, 0].

    Returns `(rows, taken)`: a leaf has `bound` rows, first those that came, in order of the ranks that they came from,
    then zeros. `taken`, as `sizes`, has how many came from each rank. Both results differ along the axis. The way back
    is `ragged_all_to_all(rows, taken, axis, len(x))`, which is also the transpose.

    Exactly the rows that sizes name travel. `comm()` counts min(rows, bound) of them on each rank, because no number is
    known before the step runs: the mean over ranks is never more. Sizes are read on the host, so a GPU waits for them.

    Where more than `bound` rows come to a rank, the further ones are dropped, and the next call of the step raises on
    all ranks; likewise where sizes name rows that `x` lacks. With `cut` neither is an error: the caller counts what
    `taken` has above `bound`, and rows that `x` lacks are zeros. Outside of `shard` there is one rank, and the call
    itself raises.

    The derivative is by `x`. `torch.func.vmap` maps `x`, not `sizes`.

    Raises:
        FzeroError: for sizes that are not one integer for each rank along the axis; for a leaf without rows, or leaves
            of unequal numbers of rows; for a negative bound; for an axis that the mesh does not have; for sizes that
            are a batch of vmap; in the next call, for sizes below 0 or of more rows than `x` has, and for more rows
            than `bound`.
    """
    x = read_quantized_leaves(x)
    rows, world = _count_rows(x), axis_size(axis)
    _check(sizes, world, axis, bound)
    given = sizes.to(torch.int64).clamp(min=0)
    taken = all_to_all(given, axis, 0, 0)
    over = f"{_WHERE} over {'+'.join((axis,) if isinstance(axis, str) else axis)!r}"
    problem = "has a number below 0, or more rows together than the {limit:.0f} of x"
    words = FlagForm(f"{over}: sizes", problem, "give how many rows of x, in order, go to each rank")
    is_lacking = (sizes < 0).any() if cut else (given.sum() > rows) | (sizes < 0).any()
    note_local(words, is_lacking, rows)
    if not cut:
        problem, total = "{value:.0f} rows come to a rank, and its bound is {limit:.0f}", taken.sum()
        way_out = "give a larger bound (of experts, a larger capacity=), or let fewer rows go to one rank"
        words = FlagForm(over, problem, way_out)
        note_local(words, total * (total > bound), bound)
    on = current_performer()

    def exchange(leaf: Tensor) -> Tensor:
        if is_sharded(leaf):
            leaf = leaf.full_tensor()
        if on is None:
            return _keep(leaf, taken, bound)
        sent, got = map(torch_private.unwrap, (given, taken))
        return apply(record(ops.ragged_rows), leaf, on.mesh.join(_names(axis)), world, sent, got, bound, rows, on=on)

    return tree.map(exchange, x), taken.to(sizes.dtype)


def _names(axis: Axis) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else axis


def _keep(x: Tensor, taken: Tensor, bound: int) -> Tensor:
    """What a rank that is alone gets."""
    kept = torch.arange(bound, device=x.device) < taken.to(x.device)
    return resize(x, bound).masked_fill(~kept.view(-1, *[1] * (x.ndim - 1)), 0)


def _count_rows(x: tree.Tree) -> int:
    leaves = tree.leaves(x)
    for path, leaf in zip(tree.paths(x), leaves):
        if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape[0] != leaves[0].shape[0]:
            given = list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise FzeroError(f"{_WHERE}: x {path}".rstrip(), f"is {given}", "give tensors of equal numbers of rows")
    if not leaves:
        raise FzeroError(f"{_WHERE}: x", "has no tensor", "give at least one")
    return leaves[0].shape[0]


def _check(sizes: Tensor, world: int, axis: Axis, bound: int) -> None:
    if torch_private.is_batch(sizes):
        raise FzeroError(f"{_WHERE}: sizes", "is a batch of vmap", "map x alone, or call it for each example")
    is_whole = not (sizes.is_floating_point() or sizes.is_complex() or sizes.dtype == torch.bool)
    if tuple(sizes.shape) != (world,) or not is_whole:
        problem = f"is {sizes.dtype} {list(sizes.shape)}"
        raise FzeroError(f"{_WHERE}: sizes", problem, f"give an integer for each of the {world} ranks along {axis!r}")
    if bound < 0:
        raise FzeroError(f"{_WHERE}: bound", f"is {bound}", "give a number of rows, 0 or more")
