"""Mistakes without a word: each an error or a warning that names leaf and line. What is meant passes in silence."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from mistakes import DOUBTFUL, MEANT, PLAIN, ROWS, UNMEANT, Unmeant, descend
from programs import MESH

import fzero
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.pipeline import Pipeline
from fzero.program.program import Program
from fzero.ranks.virtual import virtual


def prepare(case: Unmeant, mesh: VirtualMesh = MESH) -> Program:
    """The program that a rank of `shard` traces: plain arguments are not cut, as they are in a simulation."""
    return Pipeline(case.step, virtual(mesh), (), lambda on, program: program).program(case.args)


@pytest.mark.parametrize("name", UNMEANT)
def test_what_trains_apart_or_not_at_all_is_refused(name: str) -> None:
    with pytest.raises(FzeroError, match=UNMEANT[name].message):
        prepare(UNMEANT[name])


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_may_be_meant_is_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    prepare(DOUBTFUL[name])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.name == "fzero"
    assert re.search(DOUBTFUL[name].message, record.getMessage()), record.getMessage()


@pytest.mark.parametrize("name", MEANT)
def test_what_resembles_a_mistake_passes_in_silence(name: str, caplog: pytest.LogCaptureFixture) -> None:
    prepare(MEANT[name])
    assert not caplog.records


def test_one_rank_may_train_plain_tensors() -> None:
    assert prepare(Unmeant(descend, (PLAIN, ROWS)), VirtualMesh(fsdp=1)).tensor_results


def test_a_warning_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    case = DOUBTFUL["a module is captured"]
    step = fzero.simulate(case.step, MESH)
    for rows in (2, 2, 4):
        step(case.args[0], torch.ones(rows, 5))
    assert sum("requires grad" in record.getMessage() for record in caplog.records) == 1


def test_a_loss_that_calls_the_module_is_refused_on_one_device_too() -> None:
    case = UNMEANT["the loss calls the module"]
    with pytest.raises(FzeroError, match=case.message):
        case.step(PLAIN, ROWS)


def test_a_function_of_its_own_arguments_may_use_captured_parameters_besides() -> None:
    captured = torch.nn.Parameter(torch.ones(2))
    gradient = fzero.grad(lambda w: (w * captured).sum())(torch.zeros(2))
    assert gradient.tolist() == [1.0, 1.0]
