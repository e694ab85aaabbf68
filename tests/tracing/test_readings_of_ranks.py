"""Ranks whose masks and lengths differ, in code that was not written around them: what one schedule serves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_readings import Batch, cut, make_batch, make_params, train, train_plainly
from torch import Tensor
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


def test_an_error_says_why_the_first_rank_has_another_program() -> None:
    def read(p: Any, b: Batch, h: Tensor) -> Tensor:
        return h[b["y"] == 2].squeeze().sum()  # another program of one row

    mesh = fzero.VirtualMesh(fsdp=2)
    step = fzero.simulate(lambda p, b: train(read, p, b), mesh)
    batch = make_batch(6, 2, 0) | {"y": torch.tensor([2, 0, 0, 0, 0, 0, 2, 2, 2, 0, 0, 0])}
    with pytest.raises(FzeroError, match="a size of 1 has a program of its own"):
        step(fzero.partition(make_params(), mesh), batch)
