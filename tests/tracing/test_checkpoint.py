"""`torch.utils.checkpoint` in a step is `fzero.remat`."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from programs import Case, dense, layers, names, rows, training
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import fzero
from fzero.base.errors import FzeroError

MESH = fzero.VirtualMesh(fsdp=2)
Wrap = Callable[..., Any]


def case(wrap: Wrap) -> Case:
    """Two layers and dropout, each layer through `wrap(fn, *args)`."""

    def layer(layer: Any, x: Tensor) -> Tensor:
        return nn.functional.dropout(dense(layer, x), 0.5)

    def loss(params: Any, x: Tensor) -> Tensor:
        for each in params["layers"]:
            x = wrap(layer, each, x)
        return x.square().mean()

    params, optimizer = fzero.partition(layers(), MESH), fzero.optim.sgd(0.1)
    return Case(training(optimizer, loss), MESH, (params, optimizer.init(params), rows(MESH)))


WRAPS: dict[str, Wrap] = {
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": lambda fn, layer, x: checkpoint(
        lambda w, b, x: fn({"w": w, "b": b}, x), layer["w"], layer["b"], x, use_reentrant=True
    ),
    "its options": partial(checkpoint, use_reentrant=False, preserve_rng_state=False, determinism_check="none"),
    "with a policy": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, [])
    ),
    "by keyword": lambda fn, layer, x: checkpoint(fn, layer, x=x, use_reentrant=False),
}


def reaching_end(wrap: Wrap) -> tuple[list[str], Any]:
    """The names of the nodes of a step's program after all passes, and its peak of memory."""
    given = case(wrap)
    program = fzero.simulate(given.step, MESH).trace(*given.args)
    return names(program), program.memory().peak


@pytest.mark.parametrize("name", WRAPS)
def test_a_checkpoint_is_remat_node_for_node(name: str) -> None:
    expected = reaching_end(lambda fn, *args: fzero.remat(fn)(*args))
    assert reaching_end(WRAPS[name]) == expected != reaching_end(lambda fn, *args: fn(*args))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_sequence_of_checkpoints_trains_as_plain_torch(stage: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)))
    params, apply = fzero.lower(Checkpointed(module))
    x = rows(MESH)
    step = fzero.simulate(fzero.value_and_grad(lambda p, x: apply(p, x).square().mean()), MESH, stage=stage)
    value, grads = step(fzero.partition(params, MESH), x)
    expected = module(x).square().mean()
    expected.backward()
    torch.testing.assert_close(value.mean(), expected.detach())
    for path, grad in zip(fzero.tree.paths(grads), fzero.tree.leaves(fzero.unpartition(grads))):
        torch.testing.assert_close(grad, module.get_parameter(path.removeprefix("sequence.")).grad)


class Checkpointed(nn.Module):
    """A sequence in two segments."""

    def __init__(self, sequence: nn.Sequential) -> None:
        super().__init__()
        self.sequence = sequence

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.sequence, 2, x, use_reentrant=False)


def differentiate(loss: Callable[..., Tensor]) -> None:
    fzero.simulate(fzero.grad(loss), MESH)(fzero.partition({"w": torch.ones(5)}, MESH), rows(MESH))


# selective checkpoints: the same values are kept and computed again as in plain torch

aten = torch.ops.aten
COMPUTED = ("mm", "silu", "sin", "exp", "var_mean")
"""Operations that are compared. The derivatives of others are made of other operations under torch.func."""


def every_second_product() -> Any:
    """A policy with a state, which keeps every second matrix product."""
    seen = Counter[Any]()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen[operation] += not context.is_recompute
        keep = operation is aten.mm.default and seen[operation] % 2 == 0
        return CheckpointPolicy.PREFER_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def wide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps results of at least 64 elements."""
    made = context.op_output
    is_large = isinstance(made, Tensor) and made.numel() >= 64
    return CheckpointPolicy.MUST_SAVE if is_large else CheckpointPolicy.MUST_RECOMPUTE


CONTEXTS: dict[str, Callable[..., Any]] = {
    "nothing": partial(create_selective_checkpoint_contexts, []),
    "a list": partial(create_selective_checkpoint_contexts, [aten.mm.default, aten.sin.default]),
    "a bool": partial(
        create_selective_checkpoint_contexts, lambda context, op, *args, **kwargs: op is aten.silu.default
    ),
    "by result": partial(create_selective_checkpoint_contexts, wide),
    "several results": partial(create_selective_checkpoint_contexts, [aten.var_mean.correction]),
    "with a state": every_second_product,
    "views": partial(create_selective_checkpoint_contexts, [aten.t.default, aten.silu.default]),
}


REFUSED_BEFORE = {
    "by result": "shows no results to a policy",
    "with a state": "asks a policy again while it computes again, and wants the same answers",
}
"""Names of `CONTEXTS` -> why plain torch has no such policies before 2.13."""


def block(w: Tensor, x: Tensor) -> Tensor:
    """Four products and functions of [8, 8] matrices, views, and an operation with two results.

    The backward pass uses the operands of each operation. Otherwise torch computes again what it never uses: in front
    of a kept `tanh`, say, whose derivative needs only the result. A program does not.
    """
    x = nn.functional.silu(x @ w) @ w
    variance, mean = torch.var_mean(x.view(-1, 4).sin(), 1, keepdim=True)
    return nn.functional.silu((x.view(-1, 4) * (variance.exp() * mean)).view(8, 8) @ w) @ w


def sum_of_squares(context_fn: Callable[..., Any], w: Tensor, x: Tensor) -> Tensor:
    """Of the result of two checkpoints."""
    x = x + w
    for _ in range(2):
        x = checkpoint(block, w, x, use_reentrant=False, context_fn=context_fn)
    return x.square().sum()


def run_in_torch(context_fn: Callable[..., Any], w: Tensor, x: Tensor) -> tuple[Counter[str], Tensor]:
    """How often plain torch runs each operation for a gradient, and the gradient by `w`."""
    counted = Counter[str]()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted[func.__name__.partition(".")[0]] += 1
            return func(*args, **(kwargs or {}))

    w = w.clone().requires_grad_()
    with Count():
        (gradient,) = torch.autograd.grad(sum_of_squares(context_fn, w, x), w)
    return counted, gradient


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_selective_checkpoint_keeps_what_torch_keeps(name: str) -> None:
    if name in REFUSED_BEFORE and torch.__version__ < "2.13":
        pytest.skip(f"torch 2.11 {REFUSED_BEFORE[name]}")
    w, x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0)) / 4
    expected, gradient = run_in_torch(CONTEXTS[name], w, x)
    params, rows = fzero.partition({"w": w}, MESH), torch.cat([x, x])  # the same on both ranks
    chosen = CONTEXTS[name]
    step = fzero.simulate(fzero.grad(lambda p, x: sum_of_squares(chosen, p["w"].full_tensor(), x)), MESH)
    counted = Counter(names(step.trace(params, rows)))
    assert {key: counted[key] for key in COMPUTED} == {key: expected[key] for key in COMPUTED}
    torch.testing.assert_close(fzero.unpartition(step(params, rows))["w"], gradient)


def test_a_policy_that_says_something_else_is_refused_by_name() -> None:
    def maybe(*_: Any, **__: Any) -> str:
        return "maybe"

    chosen = partial(create_selective_checkpoint_contexts, maybe)
    with pytest.raises(FzeroError, match=r"test_checkpoint\.py:\d+ .*'maybe' for aten\.mul.*MUST_SAVE"):
        differentiate(lambda p, x: checkpoint(lambda x: x * p["w"], x, use_reentrant=False, context_fn=chosen).sum())


def test_another_context_is_refused() -> None:
    def contexts() -> Any:
        return contextlib.nullcontext(), contextlib.nullcontext()

    with pytest.raises(FzeroError, match=r"test_checkpoint\.py:\d+ .*given a context_fn.*create_selective"):
        differentiate(lambda p, x: checkpoint(lambda x: x * p["w"], x, use_reentrant=False, context_fn=contexts).sum())
    with pytest.raises(ValueError, match="only supported when use_reentrant=False"):
        differentiate(lambda p, x: checkpoint(lambda x: x * p["w"], x, context_fn=CONTEXTS["a list"]).sum())


def test_a_reentrant_checkpoint_that_trains_nothing_in_plain_torch_is_refused() -> None:
    with pytest.raises(FzeroError, match=r"trains nothing inside.*give use_reentrant=False"):
        differentiate(lambda p, x: checkpoint(lambda x: x * p["w"], x, use_reentrant=True).sum())
    with pytest.raises(ValueError, match="Unexpected keyword arguments: x"):
        differentiate(lambda p, x: checkpoint(lambda x: x * p["w"], x=x, use_reentrant=True).sum())


def test_outside_of_a_trace_a_checkpoint_is_that_of_torch() -> None:
    """Before, behind, and in another thread while a trace goes on."""
    calls: list[int] = []

    def square(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin().square()

    def run() -> None:
        x = torch.ones(2, requires_grad=True)
        checkpoint(square, x, use_reentrant=False).sum().backward()

    def step(x: Tensor) -> Tensor:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return x + 1

    run()
    fzero.simulate(step, MESH)(torch.ones(2))
    with pytest.raises(KeyError):
        fzero.simulate(lambda x: {}["missing"], MESH)(torch.ones(2))
    run()
    assert len(calls) == 6  # each function twice: the backward pass computed it again


def test_to_require_grad_within_a_gradient_changes_nothing() -> None:
    """As hooks of transformers do with the output of an embedding, whose weight may be frozen."""
    params = fzero.partition({"w": torch.ones(5)}, MESH)

    def loss(p: Any, x: Tensor) -> Tensor:
        return (x.requires_grad_() * p["w"]).requires_grad_(True).sum()

    x = rows(MESH)
    grads = fzero.simulate(fzero.grad(loss), MESH)(params, x)
    torch.testing.assert_close(fzero.unpartition(grads)["w"], x.sum(0) / 2)  # a mean over ranks


def test_to_require_no_grad_within_a_gradient_changes_nothing_where_there_is_none() -> None:
    """As positions of the Annotated Transformer, which are a part of a buffer."""
    positions, given = torch.arange(10.0).view(2, 5), fzero.partition({"w": torch.ones(5)}, MESH)

    def loss(p: Any, x: Tensor) -> Tensor:
        return ((x + positions[:1].requires_grad_(False)).requires_grad_(False) * p["w"]).sum()

    def stop(p: Any, x: Tensor) -> Tensor:
        return (x * p["w"]).requires_grad_(False).sum()

    x = rows(MESH)
    grads = fzero.simulate(fzero.grad(loss), MESH)(given, x)
    expected = (x + positions[:1]).sum(0)
    torch.testing.assert_close(fzero.unpartition(grads)["w"], expected / 2)  # a mean over ranks
    torch.testing.assert_close(fzero.grad(loss)({"w": torch.ones(5)}, x)["w"], expected)
    with pytest.raises(FzeroError, match="requires_grad_"):
        fzero.simulate(fzero.grad(stop), MESH)(given, x)


class Embedded(nn.Module):
    """Layers as models of transformers let them be checkpointed: what goes into the first one gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x.requires_grad_(True)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


def test_a_step_of_checkpointed_layers_runs_on_one_device_as_it_is() -> None:
    model, tokens = Embedded(), torch.randint(5, (4, 3))
    params, apply = fzero.lower(model)
    model(tokens).backward()
    loss, grads = fzero.value_and_grad(apply)(params, tokens)
    assert torch.equal(loss, model(tokens))
    for path, grad in zip(fzero.tree.paths(grads), fzero.tree.leaves(grads)):
        assert torch.equal(grad, model.get_parameter(path).grad)
    optimizer = fzero.optim.sgd(0.1)
    step = training(optimizer, apply)
    assert fzero.check_equivalence(step, (params, optimizer.init(params)), (tokens,), ranks=2)


def test_a_backward_pass_behind_apply_of_checkpointed_layers_is_refused() -> None:
    params, apply = fzero.lower(Embedded())
    given = fzero.tree.map(lambda x: x.clone().requires_grad_(), params)
    with pytest.raises(FzeroError, match=r"^layers\.1\.0\.\w+: is used in a backward pass behind apply"):
        apply(given, torch.randint(5, (4, 3))).backward()


def test_a_checkpoint_beside_a_gradient_of_another_thread_is_of_torch() -> None:
    """The replacement is for the thread that differentiates, and ends with the last of them."""
    x, done = torch.ones(2, requires_grad=True), threading.Barrier(2, timeout=30)
    usual = vars(checkpoint.__wrapped__).get("__dynamo_disable")  # type: ignore[attr-defined]

    def differentiated(w: Tensor) -> Tensor:
        done.wait()  # while the other thread is within its gradient, too
        return checkpoint(torch.square, w, use_reentrant=False).sum()

    threads = [threading.Thread(target=fzero.grad(differentiated), args=(torch.ones(2),)) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert vars(checkpoint.__wrapped__).get("__dynamo_disable") is usual  # type: ignore[attr-defined]
    checkpoint(torch.square, x, use_reentrant=False).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]
