"""The law of the project: a sharded step equals its unsharded self, on any mesh, at any stage."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given

import fzero
from fzero.passes import defaults
from fzero.testing.steps import LOOPS, WRONG, TrainStep
from fzero.testing.strategies import train_steps
from property_tests.laws import everything, slow
from property_tests.running import bits


def check(step: TrainStep) -> None:
    fzero.check_equivalence(
        step,
        step.state(),
        step.batch(),
        ranks=step.mesh,
        steps=2,
        rtol=step.tolerance,
        atol=step.tolerance,
        passes=defaults(stage=step.stage, in_place=step.donate),
    )


@given(train_steps(loops=LOOPS))
@everything
@slow
def test_sharded_equals_unsharded(step: TrainStep) -> None:
    check(step)


@given(train_steps(losses=WRONG))
@slow
def test_a_loss_that_is_no_mean_over_examples_is_caught(step: TrainStep) -> None:
    """Such a loss on all examples differs from the mean of the ranks' losses on their own examples."""
    assume(all(op.name != "center" for op in step.ops))  # on one rank's examples alone it takes their mean
    state, batch, size = step.state(), step.batch(), step.mesh.size()
    whole, *parts = (step(*state, *given)[-3] for given in (batch, *zip(*(x.chunk(size) for x in batch))))
    assume(abs(whole - sum(parts) / size) > 2 * step.tolerance * (1 + abs(whole)))
    with pytest.raises(fzero.FzeroError, match="further apart than rtol"):
        check(step)


@given(train_steps())
@slow
def test_a_step_leaves_what_it_is_given_as_it_was(step: TrainStep) -> None:
    """With donate=False. A second call gives the same, bit for bit."""
    simulated = fzero.simulate(step, step.mesh, stage=step.stage, donate=False)
    state, batch = step.partition(), step.batch()
    first = fzero.unpartition(simulated(*state, *batch))
    second = fzero.unpartition(simulated(*state, *batch))
    pairs = zip(*map(fzero.tree.leaves, ((*step.state(), first), (*fzero.unpartition(state), second))))
    assert all(torch.equal(bits(a), bits(b)) for a, b in pairs)
