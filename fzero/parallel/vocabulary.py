"""A vocabulary that ranks have parts of: the embedding of tokens, and the cross entropy of a head."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import FzeroError
from fzero.base.arguments import check_arguments
from fzero.values.collectives import is_same_along


@check_arguments
def vocab_embedding(
    tokens: Tensor,
    weight: Tensor,
    *,
    axis: str | tuple[str, ...] = "tp",
    sequence: int | None = None,
    is_whole: bool | None = None,
) -> Tensor:
    """The rows `weight[tokens]` of an embedding that is split by vocabulary.

    * `weight` [V, d] is split along dim 0, `split={"embed": (axis, 0)}`, and differs along the axis.
    * `tokens` [...], from 0 to V - 1, are the same along the axis.
    * The result [..., d] is the same along the axis. With `sequence`, a dim, each rank gets some of its rows there, in
      rank order: these differ.

    Each rank looks up its own tokens. An all-reduce of one activation, or with `sequence` a reduce-scatter.

    A weight that `is_whole` is not split, and is the same along the axis, as where the ranks do not divide V. Each rank
    takes V / N rows of it, rounded up. By default a leaf of the step says whether it is split, and any other tensor is
    a part where it differs along the axis, or is not of the step.

    Raises:
        FzeroError: with `is_whole` for a leaf that is split; for a leaf that is split otherwise than by rows.
        IndexError: as torch does, for a token outside of the vocabulary.
    """
    classes = find_classes("vocab_embedding", weight, axis, is_whole)
    (weight,) = (weight,) if classes is None else take_rows((weight,), axis)
    local, is_mine = find_local(tokens, weight, axis, classes)
    rows = torch.where(is_mine.unsqueeze(-1), F.embedding(local, weight), 0)
    return fzero.psum(rows, axis) if sequence is None else fzero.psum_scatter(rows, axis, sequence)


@check_arguments
def vocab_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    axis: str | tuple[str, ...] = "tp",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    chunks: int = 1,
    is_whole: bool | None = None,
) -> Tensor:
    """`torch.nn.functional.cross_entropy(hidden @ head.T + bias, labels)`, where no rank has the logits of all classes.

    * `head` [V, d] and `bias` [V] are split along dim 0, `split={"head": (axis, 0)}`, and differ along the axis.
    * `hidden` [..., d] and `labels` [...] are the same along the axis. Gather rows that differ first.
    * The loss is the same along the axis: 0-d, or [...] without a reduction. Its dtype is float32, float64 for float64.

    A rank has [tokens, V / N] logits. With `chunks` it has those of one part of the tokens at a time, and computes them
    again backward. Three numbers a token are reduced forward, the largest logit, the sum of exponentials and the
    label's logit, and the last two backward. "mean" is over the labels of this rank that are not `ignore_index`. Rows
    that pad a vocabulary count as classes, unless their `bias` is -inf.

    A head that `is_whole`, and its bias, are not split, and are the same along the axis, as where ranks do not divide
    V. Each rank takes V / N rows of it, rounded up, and missing rows are no class. By default as in `vocab_embedding`.

    Raises:
        FzeroError: for a `label_smoothing` outside of 0 to 1; for `chunks` as `fzero.tiled`; with `is_whole` for a leaf
            that is split; for a split otherwise than by rows; for a bias that is not split as its head is.
        RuntimeError: as torch does, for a label outside of the vocabulary.
    """
    if not 0 <= label_smoothing <= 1:
        raise FzeroError("vocab_cross_entropy: label_smoothing", f"is {label_smoothing}", "give 0 to 1")
    classes = find_classes("vocab_cross_entropy", head, axis, is_whole)
    check_bias(bias, head, axis, classes, is_whole)

    def find_losses(params: Any, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(hidden, *params)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        is_class = None if classes is None else list_rows(len(params[0]), axis, labels.device) < classes
        logits = logits if is_class is None else torch.where(is_class, logits, -torch.inf)
        is_kept = labels != ignore_index
        local, is_mine = find_local(torch.where(is_kept, labels, 0), params[0], axis, classes)
        top = fzero.pmax(logits.detach().amax(-1), axis)
        shifted = logits - top.unsqueeze(-1)
        picked = torch.where(is_mine, shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0)
        if label_smoothing:
            count = logits.shape[-1] * fzero.axis_size(axis) if classes is None else classes
            real = shifted if is_class is None else torch.where(is_class, shifted, 0)
            picked = (1 - label_smoothing) * picked + label_smoothing / count * real.sum(-1)
        total, target = fzero.psum(torch.stack([shifted.exp().sum(-1), picked]), axis)
        return torch.where(is_kept, total.log() - target, 0)

    params: tuple[Tensor, ...] = (head,) if bias is None else (head, bias)
    params = params if classes is None else take_rows(params, axis)
    rows = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    losses = find_losses(params, *rows) if chunks == 1 else fzero.tiled(find_losses, chunks)(params, *rows)
    return reduce_losses(losses, labels, ignore_index, reduction)


def reduce_losses(losses: Tensor, labels: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """The losses of all labels, 1-d: as labels lie, their sum, or their mean over the labels that count."""
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() / (labels != ignore_index).sum() if reduction == "mean" else losses.sum()


def find_classes(what: str, weight: Any, axis: str | tuple[str, ...], is_whole: bool | None) -> int | None:
    """The rows of a weight that ranks along an axis have whole; None for one of which they have parts.

    Raises:
        FzeroError: with `is_whole` for a leaf that is split; for a leaf that is split, and not by rows over the axis.
    """
    shape: torch.Size | None = getattr(weight, "global_shape", None)  # of a leaf, a quantized one too
    if shape is None or shape == weight.shape:
        is_known = is_whole is None and fzero.axis_size(axis) > 1
        return len(weight) if is_whole or (is_known and (shape is not None or is_same_along(weight, axis))) else None
    path, part = weight.path, list(weight.shape)
    if is_whole:
        problem = f"{path} is split, and is_whole says that each rank has all of it"
        raise FzeroError(what, problem, "leave the leaf out of split=, or is_whole out of the call")
    is_in_runs = isinstance(weight, fzero.Sharded) and weight.leaf.split is not None and weight.leaf.split.parts > 1
    if is_in_runs or [part[0] * fzero.axis_size(axis), *part[1:]] != list(shape):
        problem = f"{path} is split into parts {part} of {list(shape)}, which are no rows for each rank along {axis!r}"
        raise FzeroError(what, problem, "split the leaf along dim 0 over this axis, or leave it out of split=")
    return None


def check_bias(bias: Any, head: Any, axis: str | tuple[str, ...], classes: int | None, is_whole: bool | None) -> None:
    """Refuse a bias that is not split as its head is, or has other rows."""
    if bias is None:
        return
    found = find_classes("vocab_cross_entropy", bias, axis, is_whole)
    if (found is None) != (classes is None) or len(bias) != len(head):
        said = [f"{name} {list(x.shape)} is {'a part' if rows is None else 'whole'}" for name, x, rows in (
            ("the head", head, classes), ("the bias", bias, found))]  # fmt: skip
        raise FzeroError("vocab_cross_entropy", " and ".join(said), "split both along dim 0, or none")


def list_rows(size: int, axis: str | tuple[str, ...], device: torch.device) -> Tensor:
    """[size] the numbers of this rank's rows, where each rank has so many."""
    return fzero.axis_index(axis, device) * size + torch.arange(size, device=device)


def take_rows(params: tuple[Tensor, ...], axis: str | tuple[str, ...]) -> tuple[Tensor, ...]:
    """This rank's rows of whole tensors. What the last ranks lack are copies of the last row, which nothing reads."""
    classes = len(params[0])
    rows = list_rows(-(-classes // fzero.axis_size(axis)), axis, params[0].device).clamp(max=classes - 1)
    return tuple(x.index_select(0, rows) for x in params)


def find_local(
    tokens: Tensor, weight: Tensor, axis: str | tuple[str, ...], classes: int | None = None
) -> tuple[Tensor, Tensor]:
    """The rows of this rank's part of a weight that are those of tokens, and whether they are. A token of another rank
    has row 0, and one outside of the vocabulary a row that is nowhere, which torch refuses."""
    size = weight.shape[0]
    local = tokens - fzero.axis_index(axis, tokens.device) * size
    is_mine = (local >= 0) & (local < size)
    if classes is not None:  # behind the last class are rows of the last ranks
        is_class = (tokens >= 0) & (tokens < classes)
        return torch.where(is_mine, torch.where(is_class, local, size), torch.where(is_class, 0, size)), is_mine
    is_elsewhere = ~is_mine & (tokens >= 0) & (tokens < size * fzero.axis_size(axis))
    return torch.where(is_elsewhere, 0, local), is_mine
