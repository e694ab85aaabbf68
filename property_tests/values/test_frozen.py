"""The law of frozen parameters: whichever of a module's parameters are frozen, training equals plain torch's."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fzero
from fzero import optim, tree
from property_tests.laws import slow

PARAMETERS = 6


def make(frozen: frozenset[int]) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))
    for number, param in enumerate(module.parameters()):
        param.requires_grad_(number not in frozen)
    return module


@given(
    st.frozensets(st.integers(0, PARAMETERS - 1), max_size=PARAMETERS - 1),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0, 20]),
)
@slow
def test_training_equals_plain_torch(frozen: frozenset[int], ranks: int, stage: int, persist: int) -> None:
    module, mesh = make(frozen), fzero.VirtualMesh(fsdp=ranks)
    params, apply = fzero.lower(make(frozen))
    optimizer = optim.adamw(0.05, b2=0.95, weight_decay=0.1)

    def step(params: tree.Tree, state: tree.Tree, x: Tensor) -> tuple[tree.Tree, tree.Tree, Tensor]:
        loss, grads = fzero.value_and_grad(lambda p: apply(p, x).square().mean())(params)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    held = fzero.partition(params, mesh, persist=persist)
    state, simulated = optimizer.init(held), fzero.simulate(step, mesh, stage=stage)
    trained = [param for param in module.parameters() if param.requires_grad]
    plain = torch.optim.AdamW(trained, 0.05, (0.9, 0.95), weight_decay=0.1)
    x = torch.randn(12, 3)
    for _ in range(2):
        held, state, _ = simulated(held, state, x)
        plain.zero_grad()
        module(x).square().mean().backward()
        plain.step()
    names = [name for name, param in module.named_parameters() if param.requires_grad]
    assert sorted(tree.paths(state[0].mu)) == sorted(names)
    for path, leaf in zip(tree.paths(held), tree.leaves(fzero.unpartition(held))):
        # Adam's first steps are near the sign of a gradient, whose sum over ranks is taken in another order
        torch.testing.assert_close(leaf, module.get_parameter(path).detach(), rtol=1e-3, atol=1e-4, msg=path)
