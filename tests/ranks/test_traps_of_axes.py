"""The mistakes that code bases with axes of their own have made, each a step: it gives the same on one device, on four
virtual ranks and on four real ones.

Where a real thread tells of a trap, its address stands at the step. Checkpoints on other axes and batches that differ
along a model axis are in `test_axes_of_ranks.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from axes import ADAMW, EXAMPLES, SPLIT, WEIGHTS, WIDTH, block, split_mlp
from processes import Outcome, run_cases, values
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero import VirtualMesh, optim, tree

F64 = torch.float64
DRAWS = torch.Generator().manual_seed(5)
ROUTED = {
    "router": torch.randn(4, WIDTH, dtype=F64, generator=DRAWS),
    "up": torch.randn(4, 6, WIDTH, dtype=F64, generator=DRAWS),
    "down": torch.randn(4, WIDTH, 6, dtype=F64, generator=DRAWS),
}
EXPERTS = dict.fromkeys(("up", "down"), ("tp", 0))


class Trap(NamedTuple):
    """A loss of parameters and rows, and how its leaves and rows lie on the mesh (fsdp 2, tp 2)."""

    loss: Callable[[Any, Tensor], Tensor]
    params: Any = WEIGHTS
    split: Any = None
    data: tuple[str, ...] = ("fsdp",)
    persist: int = 0
    state: tuple[str, ...] | None = None


def square(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda params, x: forward(params, x).square().mean()


def on_all_tokens(params: Any, x: Tensor) -> Tensor:
    """Ranks along tp take the same tokens, and each has some experts."""
    mine = block((x @ params["router"].T).softmax(-1), 1)
    hidden = torch.einsum("nd,ehd->neh", x, params["up"]).relu()
    return x + fzero.psum(torch.einsum("neh,edh,ne->nd", hidden, params["down"], mine), "tp")


def on_own_tokens(params: Any, x: Tensor) -> Tensor:
    """Ranks along tp take tokens of their own, which go to all experts and back."""
    mine = block(fzero.all_gather((x @ params["router"].T).softmax(-1), "tp"), 1)
    hidden = torch.einsum("nd,ehd->neh", fzero.all_gather(x, "tp"), params["up"]).relu()
    return x + fzero.psum_scatter(torch.einsum("neh,edh,ne->nd", hidden, params["down"], mine), "tp")


def gathered(params: Any, x: Tensor) -> Tensor:
    """Each rank uses the whole weight, of which it has a part, on rows of its own."""
    rows = block(x, 0) @ fzero.all_gather(params["up"], "tp").T
    return fzero.all_gather(rows.tanh() @ fzero.all_gather(params["down"], "tp", -1).T, "tp")


def weighed(params: Any, x: Tensor) -> Tensor:
    """The mean over tokens that count, of which ranks along the sequence have different numbers."""
    counts = (x[:, 0] > 0.5).to(F64)
    tokens = (F.layer_norm(x, (WIDTH,), params["norm"]) @ params["up"].T).square().mean(1)
    axes = ("fsdp", "tp")
    return (tokens * counts).sum() * fzero.axis_size(axes) / fzero.psum(counts.sum(), axes)


TRAPS = {
    # a norm counts leaves that are not split once a rank: github.com/NVIDIA-NeMo/RL/issues/3788; clips by it
    "norm": Trap(square(split_mlp), split=SPLIT),
    # gradients of experts are sums where means belong: github.com/NVIDIA/Megatron-LM/issues/5956
    "scale of experts": Trap(square(on_own_tokens), ROUTED, EXPERTS, ("fsdp", "tp")),
    # replicas miss the sum of their gradients and drift: github.com/pytorch/torchtitan/issues/2416
    "drift": Trap(square(split_mlp), split=SPLIT, persist=sys.maxsize),
    # the router's gradient is that of this rank's experts: github.com/huggingface/transformers/issues/48205
    "router": Trap(square(on_all_tokens), ROUTED, EXPERTS),
    # the backward pass of a gathered weight slices where it must scatter: github.com/NVIDIA-NeMo/Automodel/issues/1260
    "gathered weight": Trap(square(gathered), split=SPLIT),
    # a loss that all ranks compute counts once a rank: github.com/mindspore-ai/hyper-parallel/issues/77
    "repeated loss": Trap(lambda params, x: 3 * square(split_mlp)(params, x), split=SPLIT),
    # a mean of ranks' means where tokens count: github.com/ByteDance-Seed/VeOmni/issues/338
    "weights of a sequence": Trap(weighed, data=("fsdp", "tp")),
    # state over all axes: leaves that are split, such as experts, are cut over the rest of them
    "state of experts": Trap(square(on_own_tokens), ROUTED, EXPERTS, ("fsdp", "tp"), state=("fsdp", "tp")),
    "state along a model axis": Trap(square(split_mlp), split=SPLIT, state=("fsdp", "tp")),
    "state of a sequence": Trap(weighed, data=("fsdp", "tp"), state=("fsdp", "tp")),
}
"""With dropout below; the rest of the ten are in `test_axes_of_ranks.py`."""


def train(trap: Trap, shard: Callable[..., Any], params: Any, x: Tensor) -> Any:
    """Three steps: losses, norms of gradients, and the parameters."""
    state, found = ADAMW.init(params), []

    def step(params: Any, state: Any, x: Tensor) -> Any:
        loss, grads = fzero.value_and_grad(trap.loss)(params, x)
        updates, state = ADAMW.update(grads, state, params)
        return tree.map(torch.add, params, updates), state, loss, optim.global_norm(grads)

    step = shard(step)
    for _ in range(3):
        params, state, *seen = step(params, state, x)
        found.append(seen)
    return found, params


def drop(x: Tensor) -> list[Tensor]:
    """What dropout leaves of a value that is the same along tp, and of one that differs: [ranks, 256] each."""
    axes = ("fsdp", "tp")
    stream, heads = F.dropout(x, 0.5), F.dropout(x + fzero.axis_index("tp"), 0.5)
    return [fzero.all_gather((x != 0).view(1, -1) + 0.0 * fzero.axis_index(axes), axes) for x in (stream, heads)]


def on_virtual_ranks(trap: Trap) -> Any:
    mesh = VirtualMesh(fsdp=2, tp=2)
    params = fzero.partition(trap.params, mesh, split=trap.split, persist=trap.persist, state=trap.state)
    found, params = train(trap, lambda step: fzero.simulate(step, mesh, data=trap.data), params, EXAMPLES)
    return found, fzero.unpartition(params)


def on_real_ranks(mesh: DeviceMesh) -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp")), {}
    for name, trap in TRAPS.items():
        params = fzero.partition(trap.params, mesh, split=trap.split, persist=trap.persist, state=trap.state)
        rows = EXAMPLES.chunk(2 ** len(trap.data))[dist.get_rank() // (2 if len(trap.data) == 1 else 1)]
        seen, params = train(trap, lambda step, trap=trap: fzero.shard(step, mesh, data=trap.data), params, rows)
        found[name] = seen, fzero.unpartition(params)
    torch.manual_seed(0)
    found["dropout"] = fzero.shard(drop, mesh, data=("fsdp",))(torch.ones(8, 32))
    return found


@pytest.fixture(scope="module")
def real() -> list[Any]:
    outcomes: dict[str, list[Outcome]] = run_cases(4, {"all": on_real_ranks})
    return values(outcomes["all"])


@pytest.mark.parametrize("name", TRAPS)
def test_virtual_ranks_are_one_device(name: str) -> None:
    expected = train(TRAPS[name], lambda step: step, TRAPS[name].params, EXAMPLES)
    torch.testing.assert_close(on_virtual_ranks(TRAPS[name]), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", TRAPS)
def test_each_real_rank_is_one_device(name: str, real: list[Any]) -> None:
    expected = train(TRAPS[name], lambda step: step, TRAPS[name].params, EXAMPLES)
    for found in real:
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-14)


def test_dropout_is_the_same_where_its_operand_is(real: list[Any]) -> None:
    """A seed for each axis is right for the residual stream, or for heads: github.com/pytorch/pytorch/issues/168058."""
    torch.manual_seed(0)
    stream, heads = fzero.simulate(drop, VirtualMesh(fsdp=2, tp=2), data=("fsdp",))(torch.ones(16, 32))
    assert torch.equal(stream[0], stream[1]) and torch.equal(stream[2], stream[3])
    assert not torch.equal(stream[0], stream[2]) and len({tuple(x.tolist()) for x in heads}) == 4
    assert all(torch.equal(a, b) for found in real for a, b in zip(found["dropout"], (stream, heads)))
