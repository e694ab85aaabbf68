"""The law of custom autograd Functions with a combined forward: derivatives of first and second order are torch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

import fzero
from fzero.base.errors import FzeroError
from property_tests.laws import slow

MESH = fzero.VirtualMesh(fsdp=3)
OPERATIONS = [
    lambda a, b: a * b,
    lambda a, b: a.sin() + b,
    lambda a, b: a * 0.5,
    lambda a, b: a.view(-1).view(a.shape),
    lambda a, b: (a - b).tanh(),
    lambda a, b: Inner.apply(a),
]
FACTORS = [lambda s: s, lambda s: s.cos(), lambda s: s * s * 0.3, lambda s: Inner.apply(s)]


class Inner(Function):
    """A combined forward that saves its output. Its derivative is not the true one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * cotangent


@dataclass(frozen=True)
class Recipe:
    """A Function of two tensors and a number. Values are the two, and what `operations` compute from earlier values."""

    operations: tuple[tuple[int, int, int], ...]  # operation, its operands
    outputs: tuple[int, ...]
    saved: tuple[tuple[int, str], ...]  # value, how ctx keeps it
    terms: tuple[tuple[int, int, int, int], ...]  # input, output, factor, saved: a product in the input's gradient
    constant: bool  # an output in the middle that is no tensor
    marks: bool  # the last output as without derivative
    materializes: bool
    once: bool
    is_needed: bool  # whether backward asks needs_input_grad

    def function(self) -> type[Function]:
        """The Function, of which the plain step and the sharded one take one each."""
        recipe = self

        class Made(Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, factor: float, y: Tensor) -> Any:
                values = [x, y]
                for operation, a, b in recipe.operations:
                    values.append(OPERATIONS[operation](values[a], values[b]))
                values[2] = values[2] * factor
                ctx.kept, ctx.needed = {"list": []}, ctx.needs_input_grad
                ctx.save_for_backward(None, *(values[i] for i, how in recipe.saved if how == "saved"))
                for k, (i, how) in enumerate(recipe.saved):
                    if how == "attribute":
                        setattr(ctx, f"kept_{k}", values[i])
                    elif how == "container":
                        ctx.kept["list"].append((k, values[i]))
                outputs = [values[i] for i in recipe.outputs]
                if recipe.marks:
                    ctx.mark_non_differentiable(outputs[-1])
                ctx.set_materialize_grads(recipe.materializes)
                return (outputs[0], factor, *outputs[1:]) if recipe.constant else tuple(outputs)

            @staticmethod
            def backward(ctx: Any, *cotangents: Any) -> Any:
                of_outputs = list(cotangents)
                if recipe.constant:
                    assert of_outputs.pop(1) is None
                of_saved, inside = iter(ctx.saved_tensors[1:]), dict(ctx.kept["list"])
                saved = [
                    next(of_saved) if how == "saved" else getattr(ctx, f"kept_{k}") if how == "attribute" else inside[k]
                    for k, (_, how) in enumerate(recipe.saved)
                ]
                gradients: list[Any] = [None, None, None]
                for at, output, factor, k in recipe.terms:
                    cotangent = of_outputs[output]
                    if cotangent is not None and (ctx.needed[2 * at] or not recipe.is_needed):
                        term = cotangent * FACTORS[factor](saved[k])
                        gradients[2 * at] = term if gradients[2 * at] is None else gradients[2 * at] + term
                return tuple(gradients)

        if recipe.once:
            Made.backward = staticmethod(once_differentiable(Made.backward))
        return Made


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    n = draw(st.integers(1, 4))
    operations = [
        (draw(st.integers(0, len(OPERATIONS) - 1)), draw(st.integers(0, i + 1)), draw(st.integers(0, i + 1)))
        for i in range(n)
    ]
    values = st.integers(0, n + 1)
    outputs = draw(st.lists(values, min_size=1, max_size=3, unique=True))
    kinds = st.sampled_from(["saved", "attribute", "container"])
    saved = draw(st.lists(st.tuples(values, kinds), min_size=1, max_size=4))
    terms = st.tuples(
        st.integers(0, 1),
        st.integers(0, len(outputs) - 1),
        st.integers(0, len(FACTORS) - 1),
        st.integers(0, len(saved) - 1),
    )
    return Recipe(
        tuple(operations),
        tuple(outputs),
        tuple(saved),
        tuple(draw(st.lists(terms, min_size=1, max_size=4))),
        constant=draw(st.booleans()),
        marks=len(outputs) > 1 and draw(st.booleans()),
        materializes=draw(st.booleans()),
        once=draw(st.integers(0, 4)) == 0,
        is_needed=draw(st.booleans()),
    )


def make_loss(recipe: Recipe, where: str, used: int) -> Any:
    """A loss that applies the Function to leaves, to values of the batch, or to one of each."""
    apply = recipe.function().apply

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        h = x @ p["w"]
        given = {"leaves": (p["a"], p["b"]), "batch": (h, h.sin()), "both": (h, x @ p["a"])}[where]
        outputs = [y for y in apply(given[0], 0.9, given[1]) if isinstance(y, Tensor)]
        mixed = sum((i + 1) * y for i, y in enumerate(outputs[: used + 1]))
        return ((mixed if where != "leaves" else x @ mixed) * h).square().mean()

    return loss


def params() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(4, 4, generator=draw, dtype=torch.float64) * 0.5 for name in "wab"}


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@given(recipes(), st.sampled_from(["leaves", "batch", "both"]), st.integers(0, 2), st.integers(1, 3), st.booleans())
@slow
def test_derivatives_are_those_of_plain_torch(recipe: Recipe, where: str, used: int, stage: int, twice: bool) -> None:
    loss = make_loss(recipe, where, used)
    plain = {name: x.requires_grad_() for name, x in params().items()}
    value = torch.stack([loss(plain, x) for x in X.chunk(3)]).mean()
    expected = torch.autograd.grad(value, list(plain.values()), create_graph=twice, materialize_grads=True)

    def step(p: dict[str, Tensor], x: Tensor) -> Any:
        if not twice:
            return fzero.grad(loss)(p, x)
        return fzero.grad(lambda p: torch.stack([g.square().sum() for g in fzero.grad(loss)(p, x).values()]).sum())(p)

    if twice:
        norm = torch.stack([g.square().sum() for g in expected]).sum()
        expected = torch.autograd.grad(norm, list(plain.values()), materialize_grads=True)
    try:
        got = fzero.unpartition(fzero.simulate(step, MESH, stage=stage)(fzero.partition(params(), MESH), X))
    except FzeroError as error:
        assert twice and recipe.once and "once_differentiable" in str(error)
        return
    torch.testing.assert_close(got, dict(zip(plain, expected)), rtol=1e-9, atol=1e-11)
