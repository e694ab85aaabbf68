"""Steps that no key can stand for: they have no file, and the logger names what it is."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Case
from test_cache_programs import Process
from test_changes import MESH, by, case, hold, scaled
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fzero
from fzero.cache.surroundings import record_reads

NUMBERS = Path(__file__).with_name("numbers.txt")


def read_file(x: Tensor) -> Tensor:
    return x * len(NUMBERS.read_text())


HELD: dict[str, tuple[Any, str]] = {
    "file": (lambda: io.StringIO("2.0"), "_io.StringIO"),
    "iterator": (lambda: iter([1.0]), "list_iterator"),
    "counter": (lambda: itertools.count(), "itertools.count"),
    "generator": (lambda: (x for x in [1.0]), "generator"),
    "random numbers": (lambda: random.Random(0), "random.Random"),
    "random numbers of torch": (lambda: torch.Generator(), "torch._C.Generator"),
    "set without order": (lambda: {threading.Thread(), threading.Thread()}, "which have no order"),
}


@pytest.mark.parametrize("what", HELD)
def test_an_object_that_hides_what_it_holds(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, word = HELD[what]
    step = by(hold(make(), lambda held: 2.0))
    with caplog.at_level(logging.INFO, "fzero"):
        processes = [Process(case(step), tmp_path) for _ in range(2)]
        for each in processes:
            each.prepare()
    assert [each.traces for each in processes] == [1, 1]
    assert word in caplog.text and "step.scale.value" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_step_that_reads_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    NUMBERS.write_text("12")
    try:
        with caplog.at_level(logging.INFO, "fzero"):
            Process(case(by(read_file)), tmp_path).prepare()
    finally:
        NUMBERS.unlink()
    assert f"reads the file {NUMBERS}" in caplog.text
    assert not list(tmp_path.iterdir())


def test_what_another_thread_reads_is_no_part_of_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_text("12")
    with record_reads() as reads:
        thread = threading.Thread(target=file.read_text)
        thread.start()
        thread.join()
    assert not reads.why
    with record_reads() as reads:
        file.read_text()
    assert reads.why == f"reads the file {file}"


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Mode, lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)])
def test_a_step_inside_of_a_mode(mode: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = Process(case(by(scaled)), tmp_path)
    with caplog.at_level(logging.INFO, "fzero"), contextlib.suppress(Exception), mode():  # which fzero may refuse
        process.prepare()
    assert "is called inside of" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_tensor_without_a_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hidden = {id(x): x for x in [torch.full((3,), 2.0)]}
    find = hidden.__getitem__

    def step(params: Any, x: Tensor) -> Any:
        import gc

        held = next(each for each in gc.get_objects() if isinstance(each, _Holder))
        return by(lambda y: y * held.value.sum())(params, x)

    keep = _Holder(find(next(iter(hidden))))
    with caplog.at_level(logging.INFO, "fzero"):
        Process(case(step), tmp_path).prepare()
    assert keep is not None and "by hidden ways" in caplog.text
    assert not list(tmp_path.iterdir())


class _Holder:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_a_warning_of_a_trace_comes_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def step(params: Any, momentum: Any, x: Tensor) -> Any:
        grads = fzero.grad(lambda p: (x @ p["w"]).mean())(params)
        return fzero.tree.map(lambda p, m, g: p - (0.9 * m + g), params, momentum, grads)

    params = fzero.partition({"w": torch.ones(4, 4)}, MESH)
    given = Case(step, MESH, (params, fzero.tree.map(torch.zeros_like, params), torch.ones(4, 4)))
    texts = []
    for _ in range(2):
        caplog.clear()
        process = Process(given, tmp_path)
        process.prepare()
        texts.append([x.getMessage() for x in caplog.records if x.levelno == logging.WARNING])
    assert process.traces == 0 and "argument 1 meets gradients" in texts[0][0]
    assert texts[0] == texts[1]


def test_a_constant_is_the_tensor_of_the_step(tmp_path: Path) -> None:
    """A program from a file reads what the user writes into a captured tensor."""
    table = torch.ones(4)
    given = case(by(lambda x: x * table.sum()))
    Process(given, tmp_path).prepare()
    restored = Process(given, tmp_path).prepare()
    assert any(x is table or x.data_ptr() == table.data_ptr() for x in restored.constants.values())
