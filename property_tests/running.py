"""Programs of random steps, run for all ranks in lockstep between one pass and the next."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor

import fzero
from fzero import tree
from fzero.execution import lockstep
from fzero.passes import defaults
from fzero.program.program import Program
from fzero.state.fill import copy_slices
from fzero.state.grouping import group_by_layout
from fzero.values.sharded import Sharded
from property_tests.steps import Step

Outputs = list[list[Tensor]]
"""The tensors that a program returns, rank by rank."""


class Running(NamedTuple):
    """A step's program and what each rank calls it with."""

    program: Program
    arguments: Outputs

    def outputs(self, program: Program | None = None, watch: lockstep.Watch | None = None) -> Outputs:
        """What each rank's `program` returns, by default its own. The arguments stay as they are."""
        given = [copy.deepcopy(tensors) for tensors in self.arguments]  # what shares memory keeps sharing it
        return lockstep.run(program or self.program, given, watch)


def as_written(step: Step) -> Running:
    """The step before any pass, its kinds resolved."""
    given = (*step.sharded(), *step.batch())
    program = fzero.simulate(step, step.mesh, passes=()).trace(*given)
    leaves = tree.leaves(given)
    return Running(program, [_arguments(leaves, seat) for seat in lockstep.seats(step.mesh)])


def finished(step: Step) -> Running:
    """The step after its default passes."""
    running = as_written(step)
    program = running.program
    for rewrite in defaults(stage=step.stage, in_place=step.donate):
        program = rewrite(program)
    return running._replace(program=program)


def _arguments(leaves: list[Sharded | Tensor], seat: lockstep.Seat) -> list[Tensor]:
    """A rank's rows of each batch, and its slices of each bucket of state, next to each other."""
    size = seat.mesh.size()
    values = {i: leaf.chunk(size)[seat.number].clone() for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    places = {i: (leaf.layout, leaf.index) for i, leaf in enumerate(leaves) if isinstance(leaf, Sharded)}
    for layout, members in group_by_layout(places, {i: leaves[i].dtype for i in places}):
        placed = copy_slices({index: leaves[i].local for i, index in members.items()}, layout, seat.rank)
        values.update((i, placed[index]) for i, index in members.items())
    return [values[i] for i in range(len(leaves))]


def assert_equal(got: Outputs, expected: Outputs, tolerance: float | None = None) -> None:
    """Every rank's results are equal: bit for bit, or by the tolerance that is given."""
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
