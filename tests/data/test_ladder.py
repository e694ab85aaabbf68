"""Padding: sequences of few lengths, agreed on by all ranks, so that a step has few programs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_collate

import fzero
from fzero import FzeroError, State, VirtualMesh, optim, tree
from fzero.data import loader, pad, round_up

PADDING = {"inputs": 0, "labels": -100}
LADDER = (4, 8, 16)


def texts(lengths: list[int]) -> list[dict[str, Tensor]]:
    """Examples of these lengths, of 11 tokens."""
    rows = [torch.randint(1, 11, (length + 1,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    return [{"inputs": row[:-1], "labels": row[1:]} for row in rows]


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(11, 6, generator=generator) for name in ("embedding", "head")}


def sums(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
    logits = F.embedding(batch["inputs"], params["embedding"]) @ params["head"].T
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return losses, (batch["labels"] != -100).sum()


def train_step(state: State, batch: Any) -> tuple[State, Tensor]:
    loss, grads = fzero.accumulate(sums, microbatches=1)(state.params, batch)
    updates, opt_state = optim.sgd(0.1).update(grads, state.opt_state, state.params)
    params = optim.apply_updates(state.params, updates)
    return state._replace(params=params, opt_state=opt_state, step=state.step + 1), loss


def start(mesh: Any) -> State:
    params = fzero.partition(weights(), mesh)
    return fzero.partition(State(params, optim.sgd(0.1).init(params), step=torch.tensor(0)), mesh)


def plain(example: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x[None] for name, x in example.items()}


# one batch


def test_rows_and_sequences_are_padded() -> None:
    batch = {"inputs": torch.ones(3, 2, 5), "labels": torch.ones(3, 2, dtype=torch.int64), "n": torch.ones(3)}
    got = pad(batch, {"inputs": 0, "labels": -100, "n": 7}, count=2, length=3)
    assert got["inputs"].shape == (3, 3, 5) and got["labels"].shape == (3, 3)
    assert got["inputs"][:2, :2].eq(1).all() and not got["inputs"][2].any() and not got["inputs"][:, 2].any()
    assert got["labels"].tolist() == [[1, 1, -100], [1, 1, -100], [-100] * 3] and got["n"].tolist() == [1, 1, 7]
    assert batch["labels"].eq(1).all()


def test_what_is_full_stays() -> None:
    batch = (torch.ones(2, 4), torch.ones(2))
    assert all(a is b for a, b in zip(pad(batch, (0, 0), count=2, length=4), batch))


def test_one_number_is_for_all_leaves() -> None:
    x, y = pad((torch.ones(1, 1), torch.ones(1, 2)), 5, length=3)
    assert x.tolist() == [[1, 5, 5]] and y.tolist() == [[1, 1, 5]]


def test_only_named_leaves_have_lengths() -> None:
    batch = {"tokens": torch.ones(2, 3), "features": torch.ones(2, 3)}
    got = pad(batch, 0, length=4, sequences=["tokens"])
    assert got["tokens"].shape == (2, 4) and got["features"] is batch["features"]


def test_padding_keeps_dtypes() -> None:
    for dtype, number in ((torch.uint8, 255), (torch.bool, True), (torch.bfloat16, float("nan")), (torch.int64, -100)):
        (got,) = pad((torch.zeros(1, 1, dtype=dtype),), number, length=2)
        assert (got.dtype == dtype and got[0, 1].item() == number) or number != number


MISTAKES: dict[str, tuple[Any, str]] = {
    "a sequence that is longer": (
        lambda: pad({"x": torch.ones(1, 5)}, 0, length=4), "batch x: has sequences of 5, longer than 4",
    ),
    "a number that does not fit": (
        lambda: pad({"x": torch.ones(1, 1, dtype=torch.uint8)}, -100, length=2), "batch x: is torch.uint8, which",
    ),
    "no rows": (lambda: pad({"x": torch.ones(())}, 0), "batch x: is a number, and only tensors of rows"),
    "a leaf that is no sequence": (
        lambda: pad({"x": torch.ones(2)}, 0, length=2, sequences=["x"]), r"batch x: is in sequences, and is no leaf of",
    ),
    "a ladder that descends": (lambda: round_up(3, (8, 4), VirtualMesh(fsdp=2)), r"ladder: is \(8, 4\)"),
    "an empty ladder": (lambda: round_up(3, (), VirtualMesh(fsdp=2)), r"ladder: is \(\)"),
    "a ladder that ends too early": (
        lambda: list(loader(texts([3, 17]), 2, VirtualMesh(fsdp=2), padding=PADDING, ladder=LADDER)),
        "ladder: ends at 16, and the longest sequence of all ranks has 17; cut sequences",
    ),
    "a ladder without padding": (
        lambda: loader(texts([3]), 1, VirtualMesh(fsdp=1), ladder=LADDER), "padding: is None, and a ladder",
    ),
    "lists in the place of tensors, in a worker": (
        lambda: list(
            loader([{"inputs": [1, 2]}], 1, VirtualMesh(fsdp=1), padding=PADDING, ladder=LADDER, num_workers=1)
        ),
        r"batch inputs\.0: ",
    ),
    "lists in the place of tensors": (
        lambda: list(loader([{"inputs": [1, 2]}], 1, VirtualMesh(fsdp=1), padding=PADDING, ladder=LADDER)),
        r"batch inputs\.0: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    make, said = MISTAKES[name]
    with pytest.raises(FzeroError, match=f"^{said}"):
        make()


# ladders


def test_lengths_are_rounded_up_the_ladder() -> None:
    mesh = VirtualMesh(fsdp=2)
    assert [round_up(length, LADDER, mesh) for length in (0, 1, 4, 5, 16)] == [4, 4, 4, 8, 16]
    each = loader(texts([1, 3, 2, 5, 9, 16]), 2, mesh, padding=PADDING, ladder=LADDER)
    assert [batch["inputs"].shape[1] for batch in each] == [4, 8, 16]


def join(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A collate function of the user's, which pads to 5."""
    return {name: torch.cat([pad(plain(row), PADDING, length=5)[name] for row in examples]) for name in PADDING}


def test_a_collate_function_of_ones_own_may_pad_as_well() -> None:
    each = loader(texts([1, 3]), 2, VirtualMesh(fsdp=2), padding=PADDING, ladder=LADDER, collate_fn=join)
    (batch,) = each
    assert batch["inputs"].shape == (2, 8) and batch["labels"][0, 1:].eq(-100).all()


def test_numbers_have_the_dtypes_of_torch() -> None:
    examples = [{"x": torch.ones(length), "n": length, "share": 0.5} for length in (1, 2)]
    (got,) = loader(examples, 2, VirtualMesh(fsdp=2), padding=0, ladder=(4,))
    expected = default_collate([{"n": 1, "share": 0.5}, {"n": 2, "share": 0.5}])
    assert got["n"].dtype == expected["n"].dtype and got["share"].dtype == expected["share"].dtype
    assert got["n"].tolist() == [1, 2] and got["x"].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]


def test_padded_rows_and_places_count_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Three ranks with nothing but padding in the last batch. At most one program a rung. The losses are those of the
    texts alone, on one device."""
    lengths, mesh = [2, 9, 3, 16, 7], VirtualMesh(fsdp=4)
    each = loader(texts(lengths), 4, mesh, padding=PADDING, ladder=LADDER)
    step, state, losses = fzero.simulate(train_step, mesh), start(mesh), []
    with caplog.at_level(logging.INFO, "fzero"):
        for batch in [*each, *each]:
            state, loss = step(state, batch)
            losses.append(loss.item())
    assert len(step._pipeline._cache) == 2  # of lengths 16 and 8
    said = [text for text in caplog.messages if "is traced" in text]  # and how far a slow trace has come
    assert len(said) == 1 and "is traced with open sizes" in said[0]

    expected = State(weights(), optim.sgd(0.1).init(weights()), step=torch.tensor(0))
    for rows, loss in zip([texts(lengths[:4]), texts(lengths[4:])] * 2, losses, strict=True):
        joined = {name: torch.cat([row[name] for row in rows])[None] for name in PADDING}
        expected, alone = train_step(expected, joined)
        assert loss == pytest.approx(alone.item(), rel=1e-5)
    for a, b in zip(tree.leaves(fzero.unpartition(state.params)), tree.leaves(expected.params)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# real ranks


def on_real_ranks(mesh: DeviceMesh) -> tuple[list[float], list[int], list[Any]]:
    """Losses, lengths of batches and draws on this mesh and on virtual ranks."""
    virtual = VirtualMesh(fsdp=mesh.size())
    dataset = texts([12, 9, 13, 15, 11, 16, 9, 14, 13])  # one program
    outcomes = []
    for where, step in ((mesh, fzero.shard(train_step, mesh)), (virtual, fzero.simulate(train_step, virtual))):
        each = loader(dataset, 4, where, seed=1, padding=PADDING, ladder=LADDER)
        state, losses, shapes = start(where), [], []
        for batch in each:
            state, loss = step(state, batch)
            losses.append(loss.item())
            shapes.append(batch["inputs"].shape[1])
        outcomes.append((losses, shapes))
    assert outcomes[0] == outcomes[1]

    def drawn(state: State, x: Tensor) -> tuple[State, Tensor]:
        return state._replace(step=state.step + 1), F.dropout(x)

    torch.manual_seed(mesh.get_rank())
    rows = torch.ones(2 * mesh.size(), 50)
    draws = []
    for where, step in ((mesh, fzero.shard(drawn, mesh)), (virtual, fzero.simulate(drawn, virtual))):
        state = fzero.partition(State(step=torch.tensor(0), seed=torch.tensor(4)), where)
        mine = rows.chunk(mesh.size())[mesh.get_rank()] if where is mesh else rows
        state, _ = step(state, mine)
        state, x = step(state, mine)
        draws.append((x if where is mesh else x.chunk(mesh.size())[mesh.get_rank()]).tolist())
    return *outcomes[0], draws


def count_bytes(mesh: DeviceMesh) -> tuple[int, list[int]]:
    """The number of batches, and the bytes of each all-reduce meanwhile."""
    each = loader(texts([2, 9, 3, 5, 1, 16]), 2, mesh, padding=PADDING, ladder=LADDER)
    all_reduce, nbytes = dist.all_reduce, []

    def counting(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        nbytes.append(x.nbytes)
        return all_reduce(x, *args, **kwargs)

    dist.all_reduce = counting  # of this process, which ends behind the test
    return len(list(each)), nbytes


def too_long(mesh: DeviceMesh) -> str:
    """Only the second rank has a text that is too long."""
    with pytest.raises(FzeroError) as caught:
        list(loader(texts([3, 17]), 2, mesh, padding=PADDING, ladder=LADDER))
    return str(caught.value)


def test_real_ranks_take_the_batches_of_virtual_ones() -> None:
    (losses, lengths, first), (others, other_lengths, second) = run(2, on_real_ranks)
    assert losses == others and lengths == other_lengths == [16, 16, 16]
    assert first[0] == first[1] and second[0] == second[1] and first != second  # ranks draw their own numbers


def test_a_length_costs_one_all_reduce_of_24_bytes() -> None:
    assert run(2, count_bytes) == [(3, [24] * 4)] * 2  # the first is the agreement of the loop


def other_data(mesh: DeviceMesh) -> list[str]:
    """What ranks hear whose data differ in one point."""
    rank, errors = mesh.get_rank(), []
    mine = [
        loader(texts([3] * (4 + 2 * rank)), 2, mesh),
        loader(texts([3] * 4), 2, mesh, seed=rank),
        loader(texts([3] * 4), 2, mesh, fingerprint="ab"[rank]),
        loader(texts([3] * 4), 2 + 2 * rank, mesh),
        loader(texts([3] * 4), 2, mesh, padding=PADDING, ladder=LADDER[rank:]),
    ]
    late = loader(texts([3] * 4), 2, mesh)
    late.resume(late.position._replace(index=2 * rank))
    for each in (*mine, late):
        with pytest.raises(FzeroError) as caught:
            next(iter(each))
        errors.append(str(caught.value))
    next(iter(loader(texts([3] * 4), 2, mesh)))  # ranks can go on
    return errors


def test_ranks_with_other_data_are_named() -> None:
    first, second = run(2, other_data)
    assert first == second
    assert [each.partition(":")[0] for each in first] == [
        "data length", "data seed", "data fingerprint", "data batch", "data ladder", "data index",
    ]  # fmt: skip
    assert first[0] == (
        "data length: ranks take different data: rank 0 has 'data length: 4', rank 1 has 'data length: 6'; make the "
        "loader alike on every rank, and resume it at one position"
    )


def test_all_ranks_hear_of_a_text_that_is_too_long() -> None:
    first, second = run(2, too_long)
    assert first == second and "the longest sequence of all ranks has 17" in first
