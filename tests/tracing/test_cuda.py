"""Tracing on CUDA: whole training steps of a GPT on fake tensors, whose programs are those of the same steps on CPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fake_cuda
import pytest
import torch
from programs import apply, moved
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, dropout

import fzero
from fzero import optim, tree
from fzero.base.torch_private import FakeTensorMode
from fzero.passes import defaults, split
from fzero.program.program import Program
from fzero.program.records import is_call, name_of
from fzero.values.regions import get_mark

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab=64, seq=16, dim=32, layers=2, heads=2)
MESH = fzero.VirtualMesh(fsdp=2)
DEVICES = ("cpu", "cuda:0")


class Averaged(torch.autograd.Function):
    """The identity; its gradient is averaged over ranks by user code."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return fzero.pmean(gradients[0], "fsdp")


class Around(nn.Module):
    """A module with a function around its forward."""

    def __init__(self, around: Callable[..., Any], module: nn.Module) -> None:
        super().__init__()
        self.around, self.module = around, module

    def forward(self, *args: Tensor) -> Any:
        return self.around(self.module)(*args)


def noisy(module: nn.Module) -> Callable[..., Tensor]:
    """Dropout of one kernel that all devices have."""
    return lambda x: (y := module(x)) * (torch.rand_like(y) < 0.9)


def averaged(module: nn.Module) -> Callable[..., Tensor]:
    return lambda x: Averaged.apply(module(x))


def dropped(module: nn.Module) -> Callable[..., Tensor]:
    return lambda x: dropout(module(x), 0.1)


def wrap(*arounds: Callable[..., Any]) -> GPT:
    """A GPT without values, with these functions around each block, the first inside."""
    with torch.device("meta"):
        model = GPT(CONFIG)
    for i, block in enumerate(model.blocks):
        for around in arounds:
            block = Around(around, block)
        model.blocks[i] = block
    return model


def training(model: nn.Module, dtype: torch.dtype = torch.float32, clip: float | None = None) -> Any:
    """(params without values, optimizer, train_step)."""
    params, forward = fzero.lower(model)
    schedule = optim.warmup_cosine_decay_schedule(0.0, 1e-3, 5, 100)
    optimizer = optim.adamw(1e-3)
    if clip is not None:
        optimizer = optim.chain(optim.clip_by_global_norm(clip), optim.adamw(schedule))

    def loss_fn(params: Any, tokens: Tensor) -> Tensor:
        used = tree.map(lambda leaf: leaf.to(dtype), params)
        return cross_entropy(forward(used, tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    def train_step(params: Any, state: Any, tokens: Tensor) -> Any:
        loss, grads = fzero.value_and_grad(loss_fn)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    return params, optimizer, train_step


def penalized(model: nn.Module) -> Any:
    """A step that differentiates a gradient inside of a `remat` region again."""
    params, forward = fzero.lower(model)

    def penalty(params: Any, tokens: Tensor) -> Tensor:
        grads = fzero.grad(lambda params: forward(params, tokens[:, :-1]).logsumexp(-1).mean())(params)
        return sum(leaf.square().sum() for leaf in tree.leaves(grads))

    def train_step(params: Any, state: Any, tokens: Tensor) -> Any:
        loss, grads = fzero.value_and_grad(fzero.remat(penalty))(params, tokens)
        return tree.map(lambda p, g: p - 0.1 * g, params, grads), state, loss

    return params, optim.sgd(0.1), train_step


STEPS: dict[str, Callable[[], Any]] = {
    "plain": lambda: training(wrap()),
    "remat of dots": lambda: training(wrap(partial(fzero.remat, policy="dots"))),
    "a custom function": lambda: training(wrap(averaged)),
    "a gradient inside remat": lambda: penalized(wrap()),
    "everything": lambda: training(wrap(noisy, averaged, fzero.remat), torch.bfloat16, clip=1.0),
}
OTHER_KERNELS = {"dropout": lambda: training(wrap(dropped, averaged, fzero.remat), torch.bfloat16, clip=1.0)}


class Traced(NamedTuple):
    """The programs of a step on one device, as text. `split` is left out, and `scheduled` is sorted: gradients arrive
    at other times on another device."""

    raw: list[str]  # before any pass
    passed: list[str]  # behind the passes in front of split
    scheduled: list[str]  # behind all passes
    moved: list[str]  # the collectives, behind all passes
    averages: int  # all-reduces before any pass
    lineless: list[str]  # the nodes of them without a user line


def describe(program: Program) -> list[str]:
    """Each node in order: its operation, operands, value, user line and mark; the device left out."""
    lines = []
    for node in program.graph.nodes:
        mark, value = get_mark(node), node.meta.get("val")
        values = [x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, Tensor)]
        if name_of(node) == "native_layer_norm":
            values = values[:1]
        elif name_of(node) == "getitem" and name_of(node.args[0]) == "native_layer_norm" and node.args[1]:
            values = []  # mean and deviation, which are float32 on CUDA, and as the operand on CPU
        shapes = [(x.dtype, tuple(x.shape), x.stride()) for x in values]
        assert len({x.device for x in values}) <= 1
        words = (node.format_node(), shapes, node.stack_trace, len(mark.regions), mark.in_backward)
        lines.append(re.sub(r"(cuda:0|cpu)\b", "DEVICE", str(words)))
    return lines


def trace_on(device: str, step: Callable[[], Any], stage: int) -> Traced:
    params, optimizer, train_step = step()
    mode = FakeTensorMode()
    with mode, torch.device(device):
        tokens = torch.zeros(4, CONFIG.seq + 1, dtype=torch.int64)

    def put(leaf: Any) -> Any:
        with mode:
            return type(leaf)(torch.empty(leaf.local.shape, dtype=leaf.dtype, device=device), *leaf.form[:3])

    params = tree.map(put, fzero.partition(params, MESH, device="meta"))
    with mode:
        state = optimizer.init(params)
    raw = fzero.simulate(train_step, MESH, passes=()).trace(params, state, tokens)
    passes = defaults(stage=stage, reduce_dtype=torch.float32)
    first = passes.index(split)
    passed = apply(raw, *passes[:first])
    scheduled = apply(passed, *passes[first + 1 :])
    made = [node for node in raw.graph.nodes if node.op == "call_function"]
    return Traced(
        describe(raw),
        describe(passed),
        sorted(re.sub(r"_\d+\b", "", line) for line in describe(scheduled)),
        moved(scheduled),
        sum(is_call(node, fzero.ops.all_reduce) for node in made),
        [node.format_node() for node in made if not node.stack_trace],
    )


def trace_all() -> dict[tuple[str, str], Traced]:
    """(step, device) -> what is traced there. Attention is of a kernel that both devices have."""
    with sdpa_kernel(SDPBackend.MATH):
        return {
            (name, device): trace_on(device, step, stage=1 + number % 3)
            for device in DEVICES
            for number, (name, step) in enumerate({**STEPS, **OTHER_KERNELS}.items())
        }


@pytest.fixture(scope="module")
def traced() -> Mapping[tuple[str, str], Traced]:
    return fake_cuda.run(trace_all)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_on_cuda_is_the_program_of_the_step_on_cpu(traced: Mapping[tuple[str, str], Traced], name: str) -> None:
    cpu, cuda = (traced[name, device] for device in DEVICES)
    assert cuda.raw == cpu.raw
    assert cuda.passed == cpu.passed
    assert cuda.scheduled == cpu.scheduled


@pytest.mark.parametrize("name", OTHER_KERNELS)
def test_where_kernels_differ_the_collectives_are_equal(traced: Mapping[tuple[str, str], Traced], name: str) -> None:
    cpu, cuda = (traced[name, device] for device in DEVICES)
    assert any("native_dropout" in line for line in cuda.raw) and cpu.raw != cuda.raw
    assert sorted(cuda.moved) == sorted(cpu.moved)


@pytest.mark.parametrize("name", [*STEPS, *OTHER_KERNELS])
def test_each_node_has_a_user_line(traced: Mapping[tuple[str, str], Traced], name: str) -> None:
    assert [traced[name, device].lineless for device in DEVICES] == [[], []]


def test_a_mean_in_the_backward_pass_of_a_custom_function_is_traced(
    traced: Mapping[tuple[str, str], Traced],
) -> None:
    plain, custom = (traced[name, "cuda:0"].averages for name in ("plain", "a custom function"))
    assert custom == plain + CONFIG.layers
