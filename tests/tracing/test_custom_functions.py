"""A step that applies custom autograd Functions with a combined forward: as plain autograd, or refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import fzero
from fzero.base.errors import FzeroError

MESH = fzero.VirtualMesh(fsdp=3)
Params = dict[str, Tensor]
Loss = Callable[[Params, Tensor], Tensor]


class Function(torch.autograd.Function):
    """With the gradient of the identity, for each tensor argument."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return cotangents


class Straight(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()


class Offsets(torch.autograd.Function):
    """Asks for values in its backward pass, as grouped experts of some releases of transformers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.offsets = x.argmax(0)
        return x * 2

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent * len(ctx.offsets.tolist())


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return cotangent * ctx.factor, None


straight = Straight.apply  # an alias made before the step, as torch's docs show


class FakeQuantize(Function):
    """Saves a mask that the forward computed, and its range as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.range = {"scale": (high - low) / 15}
        ctx.save_for_backward((x >= low) & (x <= high))
        return ((x.clamp(low, high) - low) / ctx.range["scale"]).round() * ctx.range["scale"] + low

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        (inside,) = ctx.saved_tensors
        return cotangent * inside * (1 + ctx.range["scale"]), None, None


class LinearLoss(Function):
    """A fused product and loss, of which the forward computes the gradients already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = x @ weight
        loss = F.cross_entropy(logits, labels)
        of_logits = (logits.softmax(-1) - F.one_hot(labels, weight.shape[1])) / len(x)
        ctx.of_x = of_logits @ weight.T if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(x.T @ of_logits if ctx.needs_input_grad[1] else None)
        return loss

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        (of_weight,) = ctx.saved_tensors
        return None if ctx.of_x is None else ctx.of_x * cotangent, of_weight * cotangent, None


class SavedOutput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * cotangent


class SavedInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * cotangent


class Attributes(Function):
    """Keeps an input, an output and an intermediate value as attributes, in containers too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        s = x.sin()
        out = s * y
        ctx.x, ctx.kept = x, {"all": [y, s, out], "name": "kept"}
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        y, s, out = ctx.kept["all"]
        return ctx.x.cos() * y * cotangent, (s + 0.1 * out) * cotangent


class Several(Function):
    """Several outputs: an input, a number, one without derivative, indices, None and a list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: tuple[float, float], extra: None) -> Any:
        assert extra is None
        ctx.factors = factors
        most, where = x.max(-1)
        mask = x > 0
        half = x / 2
        ctx.mark_non_differentiable(half)
        return x * factors[0], x, 3, half, where, None, [mask, most], most

    @staticmethod
    def backward(ctx: Any, *of: Any) -> Any:
        assert len(of) == 8 and of[2] is None and of[5] is None and of[6] is None
        assert of[3] is not None
        return of[0] * ctx.factors[0] + 2 * of[1] + of[7][..., None], None, None


class Lazy(Function):
    """Leaves cotangents None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> Tensor | None:
        assert b is None
        return None if a is None else a * 2


class Rows(Function):
    """Takes integers, and has no gradient for the second tensor."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = table.shape
        return table[ids]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        return cotangent.new_zeros(ctx.shape).index_add(0, ids, cotangent), None


class Outer(Function):
    """Applies a Function in its forward, and another in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        ctx.save_for_backward(x)
        return SavedInput.apply(x) + Straight.apply(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return SavedOutput.apply(ctx.saved_tensors[0]) * cotangent


class Once(SavedInput):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * cotangent


class OnceSeparate(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * cotangent


class Recomputes(SavedInput):
    """Differentiates in its backward by autograd."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(x**3, x, cotangent)[0]


class Box:
    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors


class Opaque(SavedInput):
    """Keeps its tensors in an object that is no tree."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.box = Box(x, x.sin())
        return x**3

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        x, s = ctx.box.tensors
        return cotangent * (x**2 + s)


def captured(w: Tensor, x: Tensor) -> Tensor:
    doubled = w * 2

    class Captured(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(doubled, x)
            return x @ doubled

        @staticmethod
        def backward(ctx: Any, cotangent: Tensor) -> Tensor:
            return cotangent @ ctx.saved_tensors[0].T * ctx.saved_tensors[1]

    return Captured.apply((x @ w) @ w.T)


class Mixed(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return cotangent @ w.T, x.T @ cotangent


class Writes(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mul_(2) * 1


class Returned(Function):
    """Returns and saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * cotangent


class Pairs(Function):
    """Takes a list, whose tensors have no gradient."""

    @staticmethod
    def forward(ctx: Any, pair: list[Tensor], y: Tensor) -> Tensor:
        ctx.pair = pair
        return pair[0] * y + pair[1]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return None, cotangent * ctx.pair[0]


class Views(Function):
    """Saves views of its input: they are constants of the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.view(-1), x[:1])
        return -x

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        flat, first = ctx.saved_tensors
        return cotangent * flat.view(-1, 4) + first * cotangent


class Twins(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        y = x * 2
        return y, y


class Branch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Tangents(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_forward(x)
        ctx.cube = x**3
        return ctx.cube, x * 2

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        return 7 * ctx.saved_tensors[0] ** 2 * tangent + ctx.cube, 2 * tangent


class Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return 5 * cotangent


class ByName(Function):
    @staticmethod
    def vjp(ctx: Any, cotangent: Tensor, nothing: None) -> Any:
        return cotangent * ctx.factor, None

    backward = torch.autograd.Function.backward  # torch calls it vjp or backward

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Any:
        ctx.factor = factor
        return x * factor, factor


@torch.library.custom_op("fzero_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


cube.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, cotangent: 3 * ctx.saved_tensors[0] ** 2 * cotangent,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def several(x: Tensor) -> Tensor:
    a, b, number, half, where, nothing, (mask, most), last = Several.apply(x, (0.5, 2.0), None)
    assert (number, nothing) == (3, None) and where.dtype == torch.int64
    return a * b + half.sin() + mask + (most * last * where)[..., None] * number


def labels(x: Tensor) -> Tensor:
    return x.argmax(-1) % 4


LOSSES: dict[str, Loss] = {
    "straight through": lambda p, x: x @ Straight.apply(p["w"]),
    "an alias of apply": lambda p, x: straight(x @ straight(p["w"])),
    "fake quantization": lambda p, x: FakeQuantize.apply(x @ FakeQuantize.apply(p["w"], -1.0, 1.5), -2.0, 2.0),
    "a fused linear and loss": lambda p, x: LinearLoss.apply(x, p["w"], labels(x)),
    "and of an activation": lambda p, x: LinearLoss.apply((x * p["b5"]).tanh(), p["w"], labels(x)),
    "saved output": lambda p, x: SavedOutput.apply(x @ p["w"]) * SavedOutput.apply(p["b"]),
    "saved input": lambda p, x: SavedInput.apply(x @ SavedInput.apply(p["w"])),
    "attributes": lambda p, x: Attributes.apply(x @ p["w"], p["b"].expand(len(x), 4)) * p["s"],
    "attributes that are leaves": lambda p, x: x @ p["w"] + Attributes.apply(p["b"], p["b"]),
    "captured values": lambda p, x: captured(p["w"], x),
    "an opaque attribute": lambda p, x: Opaque.apply(x @ p["w"]),
    "differentiates in backward": lambda p, x: Recomputes.apply(x @ Recomputes.apply(p["w"])),
    "autocast": lambda p, x: Mixed.apply(x, p["w"]),
    "writes into its argument": lambda p, x: (lambda h: Writes.apply(h) + h)(x @ p["w"]),
    "saved views": lambda p, x: Views.apply(x @ p["w"]),
    "tensors in a list": lambda p, x: Pairs.apply([x @ p["w"], p["b"]], x @ p["w"]),
    "a returned input": lambda p, x: x @ Returned.apply(p["w"]) + Returned.apply(x @ p["w"]),
    "several outputs": lambda p, x: several(x @ p["w"]) + several(p["w"]).mean(),
    "no cotangent": lambda p, x: Lazy.apply(x @ p["w"])[0] + Lazy.apply(p["b"])[0],
    "an output without use": lambda p, x: Lazy.apply(x @ p["w"])[0],
    "integers": lambda p, x: Rows.apply(p["w"], labels(x)),
    "Functions in a Function": lambda p, x: Outer.apply(x @ p["w"]),
    "once differentiable": lambda p, x: Once.apply(x @ Once.apply(p["w"])) + OnceSeparate.apply(p["b"]),
    "kept in place": lambda p, x: Dirty.apply((x @ p["w"]).sin()).square(),
    "vjp": lambda p, x: ByName.apply(x @ p["w"], 3.0)[0],
    "by name": lambda p, x: ByName.apply(x @ p["w"], factor=3.0)[0],
    "under no_grad": lambda p, x: torch.no_grad()(Straight.apply)(p["w"]).sum() + x @ p["w"],
    "remat": lambda p, x: fzero.remat(lambda h: SavedOutput.apply(SavedInput.apply(h)).sin())(x @ p["w"]),
    "a 0-d leaf": lambda p, x: SavedInput.apply(p["s"]) * (x @ p["w"]),
    "an operation with register_autograd": lambda p, x: cube(x @ cube(p["w"])),
    "a leaf in a closure": lambda p, x: closed(p["w"], x),
}  # fmt: skip


@pytest.fixture(autouse=True)
def skip_names(request: pytest.FixtureRequest) -> None:
    if "by name" in request.node.name and torch.__version__ < "2.13":
        pytest.skip("apply of torch 2.11 takes no arguments by name")


REFUSED_TWICE = {"once differentiable", "captured values", "an opaque attribute", "differentiates in backward"}
"""These have no second derivative."""


def closed(w: Tensor, x: Tensor) -> Tensor:
    class Closed(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(w * 2)
            return x @ w

        @staticmethod
        def backward(ctx: Any, cotangent: Tensor) -> Tensor:
            return cotangent @ ctx.saved_tensors[0].T

    return Closed.apply((x @ w) @ w.T)


def params() -> Params:
    draw = torch.Generator().manual_seed(0)
    shapes = {"w": (5, 4), "b": (4,), "b5": (5,), "s": ()}
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def batch() -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def plain(loss: Loss) -> tuple[Tensor, Params]:
    """Loss and gradients by torch's autograd: the mean over the ranks' rows."""
    leaves = {name: x.requires_grad_() for name, x in params().items()}
    value = torch.stack([loss(leaves, x).square().mean() for x in batch().chunk(3)]).mean()
    gradients = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return value.detach(), dict(zip(leaves, gradients))


def step(loss: Loss) -> Callable[[Params, Tensor], tuple[Tensor, Params]]:
    def run(p: Params, x: Tensor) -> tuple[Tensor, Params]:
        value, gradients = fzero.value_and_grad(lambda p: loss(p, x).square().mean())(p)
        return fzero.pmean(value, "fsdp"), gradients

    return run


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_plain_torch(name: str, stage: int) -> None:
    run = fzero.simulate(step(LOSSES[name]), MESH, stage=stage)
    value, gradients = run(fzero.partition(params(), MESH), batch())
    torch.testing.assert_close((value, fzero.unpartition(gradients)), plain(LOSSES[name]))


def plain_twice(loss: Loss) -> Params:
    """The gradients of the squared norm of the gradients."""
    leaves = {name: x.requires_grad_() for name, x in params().items()}
    value = torch.stack([loss(leaves, x).square().mean() for x in batch().chunk(3)]).mean()
    first = torch.autograd.grad(value, list(leaves.values()), create_graph=True, materialize_grads=True)
    norm = torch.stack([g.square().sum() for g in first]).sum()
    gradients = torch.autograd.grad(norm, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, gradients))


def twice(loss: Loss) -> Callable[[Params, Tensor], Params]:
    def penalty(p: Params, x: Tensor) -> Tensor:
        first = fzero.grad(lambda p: loss(p, x).square().mean())(p)
        return torch.stack([g.square().sum() for g in first.values()]).sum()

    return fzero.grad(penalty)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in REFUSED_TWICE])
def test_second_derivatives_are_those_of_plain_torch(name: str) -> None:
    run = fzero.simulate(twice(LOSSES[name]), MESH)
    got = fzero.unpartition(run(fzero.partition(params(), MESH), batch()))
    torch.testing.assert_close(got, plain_twice(LOSSES[name]))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (LOSSES["once differentiable"], r"Once \(.*test_custom_functions.py:.*once_differentiable"),
        (lambda p, x: x @ OnceSeparate.apply(p["w"]), "OnceSeparate .*once_differentiable"),
        (LOSSES["captured values"], "Captured .*no argument of apply; give it to apply"),
        (LOSSES["an opaque attribute"], "Opaque .*no argument of apply; give it to apply"),
        (LOSSES["differentiates in backward"], "in backward: .*torch.func does not support this"),
    ],
)
def test_a_second_derivative_that_would_be_wrong_is_refused(loss: Loss, message: str) -> None:
    with pytest.raises(FzeroError, match=message):
        fzero.simulate(twice(loss), MESH)(fzero.partition(params(), MESH), batch())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, x: x @ Writes.apply(p["w"]), r"^Writes \(.* writes into a leaf.*leaf.clone\(\)"),
        (lambda p, x: x @ Dirty.apply(p["w"]), "^Dirty .* writes into a leaf"),
        (lambda p, x: sum(Twins.apply(x @ p["w"])), "^Twins .* one tensor twice"),
        (lambda p, x: Branch.apply(x @ p["w"]), "in forward: .*Python needs a value"),
        (
            lambda p, x: Offsets.apply(x @ p["w"]),
            r"in backward: .*tolist\(\).*needs the values of a tensor.*batched_mm",
        ),
        (lambda p, x: torch.func.vmap(Straight.apply)(x @ p["w"]), "^Straight .*generate_vmap_rule"),
    ],
)
def test_what_cannot_be_is_refused_by_name(loss: Loss, message: str) -> None:
    with pytest.raises(FzeroError, match=message):
        fzero.simulate(step(loss), MESH)(fzero.partition(params(), MESH), batch())


def test_transforms_of_torch_func_in_a_step() -> None:
    def run(p: Params) -> Any:
        w = p["w"].full_tensor()
        tangents = torch.func.jvp(Tangents.apply, (w,), (torch.ones_like(w),))[1]
        return torch.func.grad(lambda w: SavedInput.apply(w).sum())(w), *tangents, straight(w), straight(p["w"])

    w = params()["w"]
    expected = 3 * w**2, 7 * w**2 + w**3, torch.full_like(w, 2), w.round(), w.round()
    torch.testing.assert_close(fzero.simulate(run, MESH)(fzero.partition(params(), MESH)), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_outside_of_a_step(name: str) -> None:
    of_ranks = [
        fzero.value_and_grad(lambda p, x: LOSSES[name](p, x).square().mean())(params(), x) for x in batch().chunk(3)
    ]
    mean = fzero.tree.map(lambda *xs: torch.stack(xs).mean(0), *of_ranks)
    torch.testing.assert_close(mean, plain(LOSSES[name]))


def test_autograd_outside_of_the_gradient_sees_the_second_derivative() -> None:
    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    first = fzero.grad(lambda x: SavedInput.apply(x).sum())(x)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], 6 * x.detach())


def test_torch_is_as_before_after_the_last_of_two_threads() -> None:
    module: Any = torch.autograd.function

    def find_names() -> list[Any]:
        names = "custom_function_call", "_is_setup_context_defined", "_bind_default_args"  # the last of torch 2.15
        return [*(getattr(module, name, None) for name in names), vars(module._SingleLevelFunction)["setup_context"]]

    before = find_names()
    inside, done = threading.Barrier(2), threading.Event()

    def differentiate() -> None:
        def loss(x: Tensor) -> Tensor:
            inside.wait()  # both threads are in their gradients
            inside.wait()
            return straight(x).sum()

        fzero.grad(loss)(torch.ones(()))
        done.set()

    other = threading.Thread(target=differentiate)
    with pytest.raises(ZeroDivisionError):
        fzero.grad(lambda x: (other.start(), inside.wait(), straight(x) / 0, 1 // 0))(torch.ones(()))
    inside.wait()
    other.join()
    assert done.is_set() and before == find_names()
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(straight)(torch.ones(()))


def test_defaults_of_a_separate_function_beside_a_combined_one() -> None:
    """torch adds default values by the signature of a forward without ctx."""

    def loss(x: Tensor) -> Tensor:
        return (straight(x) * Doubles.apply(straight(x))).sum()

    x = torch.linspace(-2, 2, 6)
    torch.testing.assert_close(fzero.grad(loss)(x), 2 * x.round() * 2)


def test_other_threads_apply_as_ever_while_a_gradient_is_taken() -> None:
    """Outside of torch.func, a combined forward gets its ctx."""
    x, found = torch.linspace(-2, 2, 6), list[Tensor]()

    def differentiate() -> None:
        leaf = x.clone().requires_grad_()
        straight(leaf).square().sum().backward()
        found.append(leaf.grad)  # type: ignore[arg-type]

    def loss(y: Tensor) -> Tensor:
        other = threading.Thread(target=differentiate)
        other.start()
        other.join()
        return straight(y).square().sum()

    expected = 2 * x.round()
    torch.testing.assert_close(fzero.grad(loss)(x), expected)
    torch.testing.assert_close(found, [expected])
