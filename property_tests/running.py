"""Programs of random steps, run for all ranks between one pass and the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from programs import Case, Outputs, apply
from torch import Tensor

from fzero.execution import lockstep
from fzero.passes import defaults
from fzero.program.program import Program
from fzero.testing.steps import TrainStep


class Running(NamedTuple):
    """A step with its arguments, and a program of it."""

    case: Case
    program: Program

    def outputs(self, program: Program | None = None, watch: lockstep.Watch | None = None) -> Outputs:
        """What each rank's `program` returns, by default its own."""
        return self.case.run(program or self.program, watch)


def as_written(step: TrainStep) -> Running:
    """The step before any pass, its kinds resolved."""
    case = Case(step, step.mesh, (*step.partition(), *step.batch()))
    return Running(case, case.trace())


def finished(step: TrainStep) -> Running:
    """The step after its default passes."""
    return finish(as_written(step), step)


def finish(written: Running, step: TrainStep) -> Running:
    """A step behind its default passes, from the step before them."""
    return written._replace(program=apply(written.program, *defaults(stage=step.stage, in_place=step.donate)))


def assert_equal(got: Outputs, expected: Outputs, tolerance: float | None = None) -> None:
    """Assert that every rank's results are equal, bit for bit or within `tolerance`."""
    for mine, theirs in zip(got, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            if tolerance is None or not a.is_floating_point():
                assert torch.equal(bits(a), bits(b)), f"{a} is not {b}"
            else:
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
