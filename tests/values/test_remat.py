"""`remat` as a user calls it: in a step of `shard` on two ranks, on modules, and outside a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Outcome, run_cases, values
from programs import training
from torch import Tensor, nn

import fzero
from fzero import optim, tree

WIDTH, HEADS, TOKENS = 16, 2, 8


class Block(nn.Module):
    """A transformer block with dropout: [B, T, D] -> [B, T, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)  # [B, H, T, D / H]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = F.layer_norm(x + F.dropout(self.out(mixed)), (WIDTH,))
        return F.layer_norm(x + F.dropout(self.down(F.gelu(self.up(x)))), (WIDTH,))


class Stack(nn.Module):
    """Three blocks, each under `remat` with `policy`; "keep" is without `remat`."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.policy = policy

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = (layer if self.policy == "keep" else fzero.remat(layer, self.policy))(x)
        return x


def trained(mesh: Any, policy: Any) -> tuple[list[Tensor], int, int]:
    """(losses and slices after two steps on this rank, peak bytes of a step, bytes that a step communicates)."""
    params, apply = fzero.lower(Stack(policy))
    optimizer = optim.adamw(0.01)

    x = torch.randn(4, TOKENS, WIDTH, generator=torch.Generator().manual_seed(mesh.get_rank()))
    params = fzero.partition(params, mesh)
    state = optimizer.init(params)
    step = fzero.shard(training(optimizer, lambda params, x: apply(params, x).cos().mean()), mesh)
    program = step.trace(params, state, x)
    torch.manual_seed(1)
    results = []
    for _ in range(2):
        params, state, value = step(params, state, x)
        results.append(value)
    moved = sum(entry.nbytes for entry in program.comm())
    return [*results, *(leaf.local for leaf in tree.leaves(params))], program.memory().peak, moved


class _With:
    """`trained` with a policy, as a case for `run_cases`."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def __call__(self, mesh: Any) -> Any:
        return trained(mesh, self.policy)


POLICIES = {"keep": "keep", "None": None, "dots": "dots", "offload": "offload"}


@pytest.fixture(scope="module")
def outcomes() -> Mapping[str, list[Outcome]]:
    return run_cases(2, {name: _With(policy) for name, policy in POLICIES.items()})


@pytest.mark.parametrize("policy", ["None", "dots", "offload"])
def test_training_with_dropout_is_the_same_bit_for_bit(outcomes: Mapping[str, list[Outcome]], policy: str) -> None:
    for (got, _, _), (expected, _, _) in zip(values(outcomes[policy]), values(outcomes["keep"])):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_less_is_kept_the_less_memory_it_takes(outcomes: Mapping[str, list[Outcome]]) -> None:
    keep, dots, none, offload = (values(outcomes[name])[0][1] for name in ("keep", "dots", "None", "offload"))
    assert none < dots < keep and offload < keep


def test_no_more_is_moved(outcomes: Mapping[str, list[Outcome]]) -> None:
    assert len({moved for name in POLICIES for _, _, moved in values(outcomes[name])}) == 1


def test_outside_a_step_it_is_the_function() -> None:
    torch.manual_seed(0)
    expected = torch.func.grad(lambda x: F.dropout(x).sin().sum())(torch.ones(20))
    torch.manual_seed(0)
    assert torch.equal(torch.func.grad(lambda x: fzero.remat(F.dropout)(x).sin().sum())(torch.ones(20)), expected)


def test_it_keeps_the_functions_name() -> None:
    def block(x: Tensor) -> Tensor:
        """Of a layer."""
        return x

    assert (fzero.remat(block).__name__, fzero.remat(block).__doc__) == ("block", "Of a layer.")


def test_a_function_that_raises_leaves_no_mark() -> None:
    def failing(x: Tensor) -> Tensor:
        raise KeyError

    def step(x: Tensor) -> Tensor:
        try:
            fzero.remat(failing)(x)
        except KeyError:
            return x.sin()
        return x

    mesh = fzero.VirtualMesh(fsdp=1)
    program = fzero.simulate(step, mesh, passes=()).trace(torch.ones(2))
    assert not any(fzero.values.regions.get_mark(node).regions for node in program.graph.nodes)
