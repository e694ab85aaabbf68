"""Outputs of programs with a gradient; parameters that are spent, and may be frozen for a while."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fzero import FzeroError
from fzero.training.outputs import Cotangents, Surroundings, attach
from fzero.training.spent import let_freeze, spend_model


class Recorder:
    """A call of which the gradients of the outputs are kept."""

    def __init__(self) -> None:
        self.got: list[Cotangents] = []

    def pull(self, cotangents: Cotangents) -> Sequence[Tensor]:
        self.got.append(cotangents)
        return [torch.full((2,), 3.0)]


def test_a_backward_pass_tells_which_outputs_the_loss_depends_on() -> None:
    call, given = Recorder(), torch.ones(2, requires_grad=True)
    output = attach(call, {"used": torch.ones(3), "other": torch.ones(2), "count": torch.tensor(4)}, [given])
    assert output["count"].requires_grad is False
    (output["used"] * 2).sum().backward()
    used, other = sorted(call.got[0], key=lambda x: x is None)
    assert used is not None and torch.equal(used, torch.full((3,), 2.0)) and other is None
    assert torch.equal(given.grad, torch.full((2,), 3.0))


def test_surroundings_bring_back_the_random_numbers_and_the_autocast_of_a_call() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        surroundings = Surroundings.take()
        first = torch.rand(3)
    state = torch.get_rng_state()
    with surroundings.restore():
        assert torch.is_autocast_enabled("cpu") and torch.equal(torch.rand(3), first)
    assert not torch.is_autocast_enabled("cpu") and torch.equal(torch.get_rng_state(), state)


def refuse(path: str, what: str) -> FzeroError:
    return FzeroError(path, f"{what} needs values", "leave it")


def test_spent_parameters_may_be_frozen_in_a_context_alone() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    spend_model(module, torch.device("cpu"), refuse)
    with let_freeze(module):
        module.requires_grad_(False)
        module.bias.requires_grad_(True)
        assert [x.requires_grad for x in module.parameters()] == [False, True]
    assert [x.requires_grad for x in module.parameters()] == [True, False]
    with pytest.raises(FzeroError, match="requires_grad_ needs values"):
        module.requires_grad_(False)
