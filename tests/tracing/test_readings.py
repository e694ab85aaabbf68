"""Values and shapes that the batch alone decides: steps that read their batch are steps of plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_general import Traced
from torch import Tensor

import fzero
from fzero import FzeroError

Batch = dict[str, Tensor]
SHAPES = {"up": (8, 5), "down": (3, 8)}
KEEP = torch.tensor([True, False, True, True, False, True, True])


def chosen_rows(p: Any, b: Batch, h: Tensor) -> Tensor:
    known = b["y"] != -100
    return torch.nn.functional.cross_entropy(h[known], b["y"][known])


def rows_by_number(p: Any, b: Batch, h: Tensor) -> Tensor:
    (rows,) = torch.where(b["y"] > 2)
    return (h[rows] ** 2).sum() + h[torch.nonzero(b["y"] == 1).squeeze(1)].sum()


def selected(p: Any, b: Batch, h: Tensor) -> Tensor:
    return torch.masked_select(h, b["y"][:, None] > 1).square().mean() + h[:, KEEP].mean()


def written_rows(p: Any, b: Batch, h: Tensor) -> Tensor:
    h = h.clone()
    h[b["y"] == 2] = h[b["y"] == 3].sum(0)
    return (h * torch.arange(7.0)).sum()


def unique_labels(p: Any, b: Batch, h: Tensor) -> Tensor:
    labels, position, counts = b["y"].unique(return_inverse=True, return_counts=True)
    means = h.new_zeros(len(labels), 7).index_add(0, position, h) / counts[:, None]
    return means.std(0).sum()


def repeated_rows(p: Any, b: Batch, h: Tensor) -> Tensor:
    return (h.repeat_interleave(b["k"], dim=0) ** 3).sum()


def divided(p: Any, b: Batch, h: Tensor) -> Tensor:
    return h.sum() / (b["y"] != -100).sum().item()


def scaled_by_a_count(p: Any, b: Batch, h: Tensor) -> Tensor:
    """What no batch is part of, but for a number: it differs between ranks all the same."""
    return (p["w"] ** 2).sum() * (b["y"] != -100).sum().item() + h.mean()


def counted_up(p: Any, b: Batch, h: Tensor) -> Tensor:
    rows = h[b["y"] != -100]
    steps = torch.arange(rows.shape[0], dtype=h.dtype)
    return (p["w"].mean() * steps).sum() + (p["w"].reshape(-1)[: rows.shape[0]] ** 2).sum()


def in_parts(p: Any, b: Batch, h: Tensor) -> Tensor:
    first, second = b["k"][:2].tolist()
    return sum((part**2).mean() for part in torch.split(h, [first, second, h.shape[0] - first - second]))


def longest(p: Any, b: Batch, h: Tensor) -> Tensor:
    return (h[: b["k"].max().item()] ** 2).sum()


def changed_mask(p: Any, b: Batch, h: Tensor) -> Tensor:
    known = b["y"] != -100
    known[0] = True
    known[1:3] &= b["y"][1:3] > 1
    return h[known].square().sum()


def read_twice(p: Any, b: Batch, h: Tensor) -> Tensor:
    kept = b["y"][b["y"] != -100]
    count = (kept > 2).sum().item()
    return h[b["y"] != -100][kept > 2].sum() / (count + 1)


def masks_like_values(p: Any, b: Batch, h: Tensor) -> Tensor:
    """Masks of the shape of values, written by labels: of values the shape decides alone."""
    mask, other = torch.zeros_like(h), h.new_full(h.shape, 2)
    where = torch.arange(len(h)), b["y"].clamp(min=0)
    mask[where], other[where] = 1, 0
    assert not torch.any((mask != 0) & (other != 0))
    turned = torch.full_like(h.t(), True, dtype=torch.bool)
    turned[:, b["y"] == 2] = False
    return h[mask.bool()].square().mean() + h.view(-1)[turned.t().view(-1)].sum()


STEPS = [
    chosen_rows, rows_by_number, selected, written_rows, unique_labels, repeated_rows, divided, scaled_by_a_count,
    counted_up, in_parts, longest, changed_mask, read_twice, masks_like_values,
]  # fmt: skip
BY_VALUE: list[Callable[..., Tensor]] = [unique_labels]
"""Steps whose Python takes a value as it is: another one is another program, and ranks have the same."""


def make_batch(rows: int, ranks: int, seed: int) -> Batch:
    """Labels of 7 classes, of which about half are -100, and two or more of each rank's are not."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(1, 7, (ranks, rows), generator=generator)
    y[torch.rand(ranks, rows, generator=generator) < 0.5] = -100
    y[:, :6] = torch.arange(1, 7)
    k = torch.randint(2, 5, (ranks, rows), generator=generator)
    x = torch.randn(ranks * rows, 5, generator=generator, dtype=torch.float64)
    return {"x": x, "y": y.flatten(), "k": k.flatten()}


def make_params() -> Any:
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.randn(5, 7, generator=generator, dtype=torch.float64) / 3}


def train(read: Callable[..., Tensor], p: Any, b: Batch) -> Any:
    def loss(p: Any) -> Tensor:
        return read(p, b, torch.tanh(b["x"] @ p["w"]))

    value, grads = fzero.value_and_grad(loss)(p)
    return fzero.tree.map(lambda x, g: x - 0.01 * g, p, grads), value


def train_plainly(read: Callable[..., Tensor], p: Any, parts: Sequence[Batch]) -> Any:
    """One update by the mean of the losses of parts, and that mean."""
    w = p["w"].detach().requires_grad_()
    value = sum(read({"w": w}, b, torch.tanh(b["x"] @ w)) for b in parts) / len(parts)
    (grad,) = torch.autograd.grad(value, w)
    return {"w": w.detach() - 0.01 * grad}, value.detach()


def cut(b: Batch, ranks: int) -> list[Batch]:
    return [dict(zip(b, parts)) for parts in zip(*(x.chunk(ranks) for x in b.values()))]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("read", STEPS, ids=lambda read: read.__name__)
def test_a_step_that_reads_its_batch_is_that_of_plain_torch(read: Callable[..., Tensor], ranks: int) -> None:
    """Values, counts and lengths change at each call, and counts differ between ranks."""
    if ranks > 1 and read in BY_VALUE:
        pytest.skip("Python takes values as they are, which differ between ranks")
    mesh = fzero.VirtualMesh(fsdp=ranks)
    expected, params = make_params(), fzero.partition(make_params(), mesh)
    step = fzero.simulate(lambda p, b: train(read, p, b), mesh)
    for i, rows in enumerate([12, 12, 12, 17, 14, 12]):
        batch = make_batch(rows, ranks, i)
        expected, value = train_plainly(read, expected, cut(batch, ranks))
        params, loss = step(params, batch)
        torch.testing.assert_close(loss.mean(), value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(fzero.unpartition(params)["w"], expected["w"], rtol=1e-12, atol=1e-12)


def test_ranks_along_model_axes_take_the_same_rows() -> None:
    """Rows differ in number along the data axis, and ranks along the other axis exchange them."""
    mesh = fzero.VirtualMesh(fsdp=2, tp=2)

    def make() -> Any:
        generator = torch.Generator().manual_seed(0)
        return {name: torch.randn(*s, generator=generator, dtype=torch.float64) for name, s in SHAPES.items()}

    def loss(p: Any, b: Batch, column: Callable[..., Tensor], row: Callable[..., Tensor]) -> Tensor:
        rows = torch.tanh(b["x"])[b["y"] != -100]
        return row(torch.tanh(column(rows, p["up"])), p["down"]).square().mean()

    def step(p: Any, b: Batch) -> Any:
        value, grads = fzero.value_and_grad(lambda p: loss(p, b, fzero.parallel.column, fzero.parallel.row))(p)
        return fzero.tree.map(lambda x, g: x - 0.1 * g, p, grads), value

    simulated = fzero.simulate(step, mesh, data=("fsdp",))
    params = fzero.partition(make(), mesh, split={"up": ("tp", 0), "down": ("tp", 1)})
    expected = make()
    linear = torch.nn.functional.linear
    for seed in range(4):
        batch = make_batch(10, 2, seed)
        leaves = {name: x.requires_grad_() for name, x in expected.items()}
        value = sum(loss(leaves, part, linear, linear) for part in cut(batch, 2)) / 2
        grads = torch.autograd.grad(value, list(leaves.values()))
        expected = {name: (x - 0.1 * g).detach() for (name, x), g in zip(leaves.items(), grads)}
        params, got = simulated(params, batch)
        torch.testing.assert_close(got, value.detach())
        torch.testing.assert_close(fzero.unpartition(params), expected)


def test_a_way_that_a_batch_decides_has_a_program_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    def read(p: Any, b: Batch, h: Tensor) -> Tensor:
        if (b["k"] > 3).any():
            h = h * 2
        for _ in range(int(b["k"].max())):
            h = torch.sin(h)
        assert not b["x"].isnan().any()
        return h.sum()

    mesh, traced = fzero.VirtualMesh(fsdp=2), Traced(lambda p, b: train(read, p, b))
    simulated = fzero.simulate(traced, mesh, donate=False)
    for longest in (2, 4, 3, 4, 3, 2):
        batch = make_batch(6, 2, longest) | {"k": torch.full((12,), longest)}
        expected, value = train_plainly(read, make_params(), cut(batch, 2))
        params, loss = simulated(fzero.partition(make_params(), mesh), batch)
        torch.testing.assert_close(loss, value)
        torch.testing.assert_close(fzero.unpartition(params)["w"], expected["w"])
    count = traced.count
    simulated(fzero.partition(make_params(), mesh), batch)
    assert traced.count == count  # each of the three ways is known
    assert "what is read at" in caplog.text and "any():: was False, is True" in caplog.text


def test_a_size_that_python_reads_as_text_is_no_size_of_all_calls() -> None:
    """torch does not say that the text of an open size was read. It stands in what is read alone."""

    def read(p: Any, b: Batch, h: Tensor) -> Tensor:
        return h[b["y"] > len(str(h.shape[0]))].sum()

    mesh, expected = fzero.VirtualMesh(fsdp=1), make_params()
    step, params = fzero.simulate(lambda p, b: train(read, p, b), mesh), fzero.partition(make_params(), mesh)
    for i, rows in enumerate([8, 9, 12, 40, 9, 120]):
        batch = make_batch(rows, 1, i)
        expected, value = train_plainly(read, expected, [batch])
        params, loss = step(params, batch)
        torch.testing.assert_close(loss, value)
        torch.testing.assert_close(fzero.unpartition(params)["w"], expected["w"])


def test_rows_of_a_batch_are_read_for_few_traces() -> None:
    mesh, traced = fzero.VirtualMesh(fsdp=1), Traced(lambda p, b: train(chosen_rows, p, b))
    simulated, params = fzero.simulate(traced, mesh), fzero.partition(make_params(), mesh)
    for i in range(12):
        params, _ = simulated(params, make_batch(20 + 3 * (i // 4), 1, i))
    assert traced.count == 3  # at the first sizes, with open counts, with open rows


def by_state(p: Any, b: Batch, h: Tensor) -> Tensor:
    return h[h.sum(1) > 0].sum()  # here


def by_a_draw(p: Any, b: Batch, h: Tensor) -> Tensor:
    return h[torch.rand(h.shape[0]) > 0.5].sum()  # here


def by_what_state_was_written_into(p: Any, b: Batch, h: Tensor) -> Tensor:
    mask = b["y"] > 2
    mask[0] = h[0, 0] > 0
    return h[mask].sum()  # here


def by_zeros_that_state_was_written_into(p: Any, b: Batch, h: Tensor) -> Tensor:
    mask = torch.zeros_like(h)
    mask += h > 0
    return h[mask.bool()].sum()  # here


def by_a_view_of_what_state_was_written_into(p: Any, b: Batch, h: Tensor) -> Tensor:
    kept = b["x"].clone()
    view = kept[1:]
    kept.copy_(h[:, :5])
    return h[1:][view[:, 0] > 0].sum()  # here


def in_a_loop(p: Any, b: Batch, h: Tensor) -> Tensor:
    def turn(carry: Tensor, x: Any) -> Any:
        rows, y = x
        return carry + rows[y > 2].sum(), None  # here

    total, _ = fzero.scan(turn, h.sum() * 0, (h.view(3, -1, 7), b["y"].view(3, -1)))
    return total


@pytest.mark.parametrize(
    "read",
    [
        by_state,
        by_a_draw,
        by_what_state_was_written_into,
        by_zeros_that_state_was_written_into,
        by_a_view_of_what_state_was_written_into,
        in_a_loop,
    ],
    ids=lambda read: read.__name__,
)
def test_what_more_than_the_batch_decides_is_refused_at_its_line(read: Callable[..., Tensor]) -> None:
    mesh = fzero.VirtualMesh(fsdp=1)
    step = fzero.simulate(lambda p, b: train(read, p, b), mesh)
    why = "one program for all of its turns" if read is in_a_loop else "only known when the step runs"
    with pytest.raises(FzeroError, match=f"# here: .*{why}.*weigh them"):
        step(fzero.partition(make_params(), mesh), make_batch(9, 1, 0))


def test_a_batch_without_elements_is_not_read() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    step = fzero.simulate(lambda p, b: train(chosen_rows, p, b), mesh)
    batch = {name: x.to("meta") for name, x in make_batch(9, 2, 0).items()}
    params = fzero.partition({"w": make_params()["w"].to("meta")}, mesh)
    with pytest.raises(FzeroError, match="only known when the step runs"):
        step.trace(params, batch)


def test_the_batch_stays_as_it_is() -> None:
    mesh, batch = fzero.VirtualMesh(fsdp=2), make_batch(9, 2, 0)
    before = {name: x.clone() for name, x in batch.items()}
    fzero.simulate(lambda p, b: train(changed_mask, p, b), mesh)(fzero.partition(make_params(), mesh), batch)
    assert all(torch.equal(before[name], x) for name, x in batch.items())


def test_a_captured_mask_that_changes_is_read_again() -> None:
    mesh, mask = fzero.VirtualMesh(fsdp=1), torch.tensor([True, False, True, True, False, False, True])

    def read(p: Any, b: Batch, h: Tensor) -> Tensor:
        return h[(b["y"] > 2) & mask[:1]].sum() + h[:, mask].square().sum()

    step = fzero.simulate(lambda p, b: train(read, p, b), mesh, donate=False)
    for _ in range(3):
        batch = make_batch(9, 1, 1)
        _, value = train_plainly(read, make_params(), [batch])
        torch.testing.assert_close(step(fzero.partition(make_params(), mesh), batch)[1], value)
        mask.logical_not_()


def test_ranks_whose_batches_lead_python_elsewhere_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    mesh = fzero.VirtualMesh(fsdp=2)

    def read(p: Any, b: Batch, h: Tensor) -> Tensor:
        return h.sum() * (2 if (b["k"] > 3).any() else 1)

    step = fzero.simulate(lambda p, b: train(read, p, b), mesh, donate=False)
    params, batch = fzero.partition(make_params(), mesh), make_batch(6, 2, 0)
    with pytest.raises(FzeroError, match=r"Python reads (True|False) on one rank and (True|False) on another"):
        step(params, batch | {"k": torch.tensor([1] * 6 + [5] * 6)})
    for k in (1, 5):
        _, value = train_plainly(read, make_params(), cut(batch | {"k": torch.full((12,), k)}, 2))
        torch.testing.assert_close(step(params, batch | {"k": torch.full((12,), k)})[1], value)


def test_a_number_that_differs_between_ranks_is_no_result() -> None:
    def step(w: Any, x: Tensor) -> Any:
        rows = x[x > 0]
        return w, (rows * w.full_tensor().sum()).sum(), rows.shape[0]

    w = fzero.partition({"w": torch.ones(3)}, fzero.VirtualMesh(fsdp=2))["w"]
    simulated = fzero.simulate(step, w.on.mesh, donate=False)
    assert simulated(w, torch.ones(8))[2] == 4
    with pytest.raises(FzeroError, match="result '2': is 4 on one rank and 3 on another.*return a tensor"):
        simulated(w, torch.tensor([1.0, 1, 1, 1, -1, 1, 1, 1]))


def test_a_read_that_leads_to_one_program_may_differ(caplog: pytest.LogCaptureFixture) -> None:
    mesh = fzero.VirtualMesh(fsdp=2)

    def read(p: Any, b: Batch, h: Tensor) -> Tensor:
        logging.getLogger("user").info("%s", (b["k"] > 3).any().item())
        return h.sum()

    batch = make_batch(6, 2, 0) | {"k": torch.tensor([1] * 6 + [5] * 6)}
    step = fzero.simulate(lambda p, b: train(read, p, b), mesh)
    _, value = train_plainly(read, make_params(), cut(batch, 2))
    torch.testing.assert_close(step(fzero.partition(make_params(), mesh), batch)[1], value)
