"""Ranks whose masks and lengths differ, in code that was not written around them: what one schedule serves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_readings import Batch, cut, make_batch, make_params, train, train_plainly
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

import fzero
from fzero import FzeroError

ROWS = [24, 24, 31, 24]
"""Of a rank, in each call."""


def documents(p: Any, b: Batch, h: Tensor) -> Tensor:
    """Rows of documents, one document after the other: each begins where the one before ends, the first at 0."""
    out, ends = torch.empty_like(h), b["ends"].tolist()
    for start, end in itertools.pairwise(ends):
        out[start:end] = h[start:end].cumsum(0)
    return out.square().mean()


def groups(p: Any, b: Batch, h: Tensor) -> Tensor:
    """Rows by groups, whose numbers of rows add up to that of the batch."""
    counts = torch.bincount(b["group"], minlength=3).tolist()
    parts = torch.split(h[b["group"].argsort(stable=True)], counts)
    return sum((part - part.mean(0)).square().sum() * (i + 1) for i, part in enumerate(parts)) / 10


def means_of_labels(p: Any, b: Batch, h: Tensor) -> Tensor:
    """What `unique` finds belongs to each row, so that one of its sizes is that of the batch."""
    labels, position = b["y"].unique(return_inverse=True)
    means = h.new_zeros(labels.shape[0], 7).index_add(0, position, h)
    return (means[position] * h).mean()


def chosen_rows_beside_those_of_all_ranks(p: Any, b: Batch, h: Tensor) -> Tensor:
    others = b["all"] if "all" in b else fzero.all_gather(b["x"], "fsdp", 0)
    return torch.logsumexp(h[b["y"] > 2] @ (others @ p["w"]).detach().T, 1).mean()


def chosen_rows_beside_a_length(p: Any, b: Batch, h: Tensor) -> Tensor:
    return h[b["y"] > 2].sum() / len(h)


def padded_documents(p: Any, b: Batch, h: Tensor) -> Tensor:
    """Documents one beside the other, whichever is the longest."""
    parts, n = torch.split(h, b["ends"].diff().tolist()), torch.arange(1.0, 8.0, dtype=h.dtype)
    left = pad_sequence(parts, batch_first=True, padding_value=0.5, padding_side="left")
    return (pad_sequence(parts).cumsum(0) * n).mean() + left.cumsum(1).square().mean()


STEPS = [
    documents,
    padded_documents,
    groups,
    means_of_labels,
    chosen_rows_beside_those_of_all_ranks,
    chosen_rows_beside_a_length,
]


def make_parts(rows: int, seed: int) -> list[Batch]:
    """The batches of two ranks, the second of which has one row of a group."""
    draws, parts = torch.Generator().manual_seed(seed), cut(make_batch(rows, 2, seed), 2)
    for b, last in zip(parts, (3, 2)):
        first, second = torch.randint(3, rows // 2 - 3, (2,), generator=draws).tolist()
        b["ends"] = torch.tensor([0, first, first + second, rows])
        b["group"] = torch.randint(last, (rows,), generator=draws)
        b["group"][:9] = torch.arange(9) % last
        b["group"][9] = 2
    return parts


@pytest.mark.parametrize("read", STEPS, ids=lambda read: read.__name__)
def test_ranks_of_other_sizes_train_as_plain_torch(read: Callable[..., Tensor]) -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    expected, params = make_params(), fzero.partition(make_params(), mesh)
    step = fzero.simulate(lambda p, b: train(read, p, b), mesh)
    for i, rows in enumerate(ROWS):
        parts = make_parts(rows, i)
        whole = {name: torch.cat([b[name] for b in parts]) for name in parts[0]}
        expected, value = train_plainly(read, expected, [{**b, "all": whole["x"]} for b in parts])
        params, loss = step(params, whole)
        torch.testing.assert_close(loss.mean(), value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(fzero.unpartition(params)["w"], expected["w"], rtol=1e-12, atol=1e-12)


def scaled(p: Any, b: Batch, h: Tensor) -> Tensor:
    h = h.clone()
    h[b["c"]] *= p["w"][0]
    return h.square().sum()


def written_by_number(p: Any, b: Batch, h: Tensor) -> Tensor:
    h, i = h.clone(), b["c"].nonzero().squeeze(1)
    h[i] = h[i].tanh()
    h[i, 0] = h[i, 1] * 2
    return h.sum()


def multiplied(p: Any, b: Batch, h: Tensor) -> Tensor:
    rows = h[b["c"]]
    return (rows[None] @ p["w"].T).square().sum() + torch.einsum("nd,ed->ne", rows, p["w"]).cos().sum()


def layers_of_rows(p: Any, b: Batch, h: Tensor) -> Tensor:
    rows = functional.linear(h[b["c"]].unsqueeze(1), p["w"])
    return functional.layer_norm(rows, (5,)).square().sum() + rows.reshape(-1, 5).amax(1).sum()


def heads_of_rows(p: Any, b: Batch, h: Tensor) -> Tensor:
    rows = h[b["c"]].repeat(1, 2).view(1, -1, 2, 7).transpose(1, 2)
    return rows.softmax(-1).transpose(1, 2).reshape(1, -1, 14).square().sum()


def experts(p: Any, b: Batch, h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for chosen in (b["c"], ~b["c"]):
        (i,) = torch.where(chosen)
        out = out.index_add(0, i, functional.gelu(h[i] @ p["w"].T) @ p["w"])
    return out.square().mean()


def summed_up(p: Any, b: Batch, h: Tensor) -> Tensor:
    return h[b["c"]].cumsum(0).square().sum()


def attention(p: Any, b: Batch, h: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(h[b["c"]][None, None], h[None, None], h[None, None]).sum()


FEW = ((3, 4), (1, 2), (2, 1), (0, 3), (1, 0), (1, 1), (0, 0), (5, 2))
"""How many rows each of two ranks chooses."""
SOME = ((2, 1), (1, 3), (4, 2), (1, 1))
FEW_STEPS = [
    *((read, FEW) for read in (scaled, written_by_number, multiplied, layers_of_rows, heads_of_rows, experts)),
    *((read, SOME) for read in (summed_up, attention)),
]


def choose(counts: tuple[int, int], seed: int) -> Batch:
    """A batch of which each rank chooses so many rows."""
    batch, draws = make_batch(9, 2, seed), torch.Generator().manual_seed(seed)
    chosen = [torch.arange(9) < count for count in counts]
    return {"x": batch["x"], "c": torch.cat([c[torch.randperm(9, generator=draws)] for c in chosen])}


@pytest.mark.parametrize(("read", "counts"), FEW_STEPS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_rank_with_one_chosen_row_or_none_trains_as_plain_torch(
    read: Callable[..., Tensor], counts: Sequence[tuple[int, int]]
) -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    expected, params = make_params(), fzero.partition(make_params(), mesh)
    step = fzero.simulate(lambda p, b: train(read, p, b), mesh)
    for i, each in enumerate(counts):
        batch = choose(each, i)
        expected, value = train_plainly(read, expected, cut(batch, 2))
        params, loss = step(params, batch)
        torch.testing.assert_close(loss.mean(), value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(fzero.unpartition(params)["w"], expected["w"], rtol=1e-12, atol=1e-12)


def another_leaf(p: Any, b: Batch, h: Tensor) -> Tensor:
    rows = h[b["c"]]
    other = p["w"] if rows.shape[0] > 1 else p["v"]
    return (rows @ other.T).square().sum()


def another_value(p: Any, b: Batch, h: Tensor) -> Tensor:
    left, right = h.sin(), h.cos()
    return (left if b["c"].sum().item() > 1 else right).mean()


def a_view_of_one_row(p: Any, b: Batch, h: Tensor) -> Tensor:
    rows = h[b["c"]]
    rows.t().reshape(-1).mul_(2.0)  # a copy of two rows, and of one row the row itself
    return rows.square().sum()


def another_gradient(p: Any, b: Batch, h: Tensor) -> Tensor:
    rows = h[b["c"]]
    grads = torch.func.grad(lambda p: (rows @ p["w"].T).sin().sum() + p["v"].cos().sum())(p)
    return h.mean() * (grads["w"] if rows.shape[0] > 1 else grads["v"]).detach().sum()


def squeezed(p: Any, b: Batch, h: Tensor) -> Tensor:
    return h[b["c"]].squeeze().sum()


OTHERS = (another_leaf, another_value, another_gradient, a_view_of_one_row, squeezed)


@pytest.mark.parametrize("read", OTHERS, ids=lambda read: read.__name__)
def test_a_rank_with_one_row_that_computes_something_else_is_an_error(read: Callable[..., Tensor]) -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    step = fzero.simulate(lambda p, b: train(read, p, b), mesh)
    params = fzero.partition(make_params() | {"v": make_params()["w"].flip(0)}, mesh)
    params, _ = step(params, choose((3, 4), 0))
    with pytest.raises(FzeroError, match=rf"a size of 1 has a program of its own.* in {read.__name__}: "):
        step(params, choose((1, 4), 1))
    with pytest.raises(FzeroError, match=rf"a size of 1 has a program of its own.* in {read.__name__}: "):
        step(params, choose((2, 1), 2))


def test_a_kernel_of_torch_that_cannot_compute_nothing_is_not_run() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    step = fzero.simulate(lambda p, b: train(attention, p, b), mesh)
    params, _ = step(fzero.partition(make_params(), mesh), choose((3, 4), 0))
    with pytest.raises(FzeroError, match="a size of 0 has a program of its own"):
        step(params, choose((0, 4), 1))
