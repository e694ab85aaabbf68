"""`dynamic=`: sizes that are open from the first call on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run
from test_general import MESH, SGD, SHAPES, Traced, full, make, tokens

import fzero
from fzero import FzeroError


@pytest.mark.parametrize("options", [{}, {"memory": "1MiB"}], ids=str)
def test_the_first_call_traces_for_all_sizes(options: Any) -> None:
    params, state, fn = make(window=60)
    step = fzero.simulate(fn, MESH, donate=False, dynamic={"args.2": {0: None, 1: (1, 64)}}, **options)
    for shape in (*SHAPES[:2], (6, 11)):
        expected = fzero.simulate(fn.fn, MESH, donate=False, **options)(params, state, tokens(shape))
        assert all(map(torch.equal, full(step(params, state, tokens(shape))), full(expected))), shape
        assert fn.count == 2, shape  # with open sizes, and at others, to compare
    step(params, state, tokens((4, 62)))  # which the window is shorter than
    assert fn.count > 2


def test_a_trace_that_depends_on_a_size_unseen_is_traced_at_each(caplog: pytest.LogCaptureFixture) -> None:
    """torch does not say that the text of an open size was read."""

    def step(w: Any, x: torch.Tensor) -> Any:
        return w, (x @ w).sum() * len(str(x.shape[0]))

    w = fzero.partition({"w": torch.ones(3, 3)}, MESH)["w"]
    simulated = fzero.simulate(step, MESH, dynamic={"x": {0: None}})
    with caplog.at_level(logging.DEBUG, "fzero"):
        for rows in (24, 6, 40):
            x = torch.ones(rows, 3)
            assert simulated(w, x)[1] == 9 * rows / 2 * len(str(rows // 2))
    assert any("has another program at sizes of [13]" in x.message for x in caplog.records)


def test_what_is_no_dimension_of_a_call_is_refused() -> None:
    def step(w: Any, batch: Any) -> Any:
        return w, (batch["x"] @ w).mean()

    w = fzero.partition({"w": torch.ones(3, 3)}, MESH)["w"]

    def call(dynamic: Any, rows: int = 4) -> Any:
        return fzero.simulate(step, MESH, donate=False, dynamic=dynamic)(w, {"x": torch.ones(2 * rows, 3)})

    for dynamic, problem in (
        ({"bach": {0: None}}, r"dynamic\['bach'\]: is no argument of the step; write 'batch'"),
        ({"batch": {0: (8, 2)}}, r"dynamic\['batch'\]: is {0: \(8, 2\)}; write {dim: \(least, greatest\)}"),
        ({"batch": {}}, r"dynamic\['batch'\]: is {}"),
        ({"batch.y": {0: None}}, r"dynamic\['batch.y'\]: no batch of this call has a dimension 0 there"),
        ({"batch": {2: None}}, r"dynamic\['batch'\]: no batch of this call has a dimension 2 there"),
        ({"w": {0: None}}, r"dynamic\['w'\]: no batch"),
        ({"batch": {0: (1, 3)}}, r"argument batch.x: dim 0 is 4, and dynamic says 1 to 3 for 'batch'"),
    ):
        with pytest.raises(FzeroError, match=f"^{problem}"):
            call(dynamic)
    step_of_many = fzero.simulate(step, MESH, donate=False, dynamic={"batch.*": {-2: (1, 4)}})
    assert [float(step_of_many(w, {"x": torch.ones(2 * rows, 3)})[1]) for rows in (3, 1, 4)] == [3.0] * 3
    with pytest.raises(FzeroError, match="dim 0 is 5, and dynamic says 1 to 4"):
        step_of_many(w, {"x": torch.ones(10, 3)})


def test_another_process_takes_the_program_from_a_folder(tmp_path: Path) -> None:
    for count in (2, 0):
        assert run(1, train_lengths, str(tmp_path)) == [count]


def train_lengths(mesh: Any, folder: str) -> int:
    """How often a step of three lengths is traced."""
    params, _, fn = make()
    params = fzero.partition(fzero.unpartition(params), mesh)
    traced = Traced(fn.fn)
    step = fzero.shard(traced, mesh, donate=False, cache=folder, dynamic={"args.2": {1: None}})
    for length in (7, 12, 9):
        step(params, SGD.init(params), tokens((4, length)))
    return traced.count


def test_sizes_have_conditions_of_their_own_and_small_ones_stay_closed() -> None:
    """Two tensors of one rule, equal at the first call alone; one of a single row; an argument that is not given."""
    w = fzero.partition({"w": torch.ones(3, 3)}, MESH)["w"]

    def step(w: Any, batch: Any, mask: torch.Tensor | None = None) -> Any:
        return w, sum((x @ w).mean() for x in batch.values()) * (1 if mask is None else mask.mean())

    traced = Traced(step)
    pairs = [(4, 4), (5, 6), (7, 9)]
    simulated = fzero.simulate(
        lambda w, batch, mask=None: traced(w, batch, mask),
        MESH,
        donate=False,
        dynamic={"batch": {0: None}, "mask": {0: None}},
    )
    for a, b in pairs:
        simulated(w, {"a": torch.ones(2 * a, 3), "b": torch.ones(2 * b, 3)})
    assert traced.count == 2
    for n in (4, 5, 6):
        simulated(w, {"one": torch.ones(2, 5, 3), "more": torch.ones(2 * n, 3)})
    assert traced.count == 4


def test_calls_that_raise_use_up_no_trace_with_open_sizes() -> None:
    w = fzero.partition({"w": torch.ones(3, 3)}, MESH)["w"]
    traced = Traced(lambda w, x: (w, (x @ w).mean()))
    simulated = fzero.simulate(lambda w, x: traced(w, x), MESH, donate=False, dynamic={"x": {0: None}})
    for _ in range(4):
        with pytest.raises(RuntimeError):
            simulated(w, torch.ones(8, 4))
    before = traced.count
    for rows in (4, 5, 6):
        simulated(w, torch.ones(2 * rows, 3))
    assert traced.count == before + 2
    with pytest.raises(FzeroError, match="does not say which it has"):
        fzero.simulate(torch.sum, MESH, dynamic={"x": {0: None}})
