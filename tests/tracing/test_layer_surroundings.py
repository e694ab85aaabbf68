"""Equal layers of a trace: what only layers in the middle of a list meet, and what code sees of a layer."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_layer_copies import LAYERS, MESH, WIDTH, Block, Model, both, count, in_order
from torch import Tensor, nn
from traces import describe_trace

import fzero
from fzero.tracing.trace import trace

STATE = SimpleNamespace(seen=[], inner=SimpleNamespace(scale=1.0))


class Slots:
    """An object without a table of attributes."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


SLOTS = Slots()


@dataclass(frozen=True)
class Key:
    """What Python generates a hash for."""

    size: int = 3


TABLE = {Key(): 2.0}


def in_the_middle(change: Any) -> Any:
    """Layers in order. What they read is other than before while the ones in the middle run: `change(model, layer,
    value)`."""

    def run(model: Any, x: Tensor) -> Tensor:
        for i, layer in enumerate(model.layers):
            change(model, layer, 1.0 if i in (0, LAYERS - 1) else 2.0)
            x = layer(x)
            change(model, layer, 1.0)
        return x

    return run


def share_context(model: Any) -> None:
    model.context = SimpleNamespace(scale=1.0, seen=[])
    for layer in model.layers:
        layer.context, layer.scale, layer.info = model.context, 1.0, {}


def set_of_layer(model: Any, layer: Any, value: float) -> None:
    layer.scale = value


def set_context(model: Any, layer: Any, value: float) -> None:
    model.context.scale = value


def set_nested(model: Any, layer: Any, value: float) -> None:
    STATE.inner.scale = value


def set_slot(model: Any, layer: Any, value: float) -> None:
    SLOTS.scale = value


def set_class(model: Any, layer: Any, value: float) -> None:
    Block.scale = value


def note_size(self: Any, x: Tensor) -> Tensor:
    self.info["size"] = x.shape[0]
    return x


def use_sizes(model: Any, x: Tensor) -> Tensor:
    x = in_order(model, x)
    return x * sum(layer.info.get("size", 0) for layer in model.layers)


def append_gradient(self: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    x.register_hook(lambda gradient: STATE.seen.append(gradient.square().sum()))
    return x


def with_seen(take: Any) -> Any:
    """The values that hooks have left, too."""

    def call(params: Any) -> Any:
        STATE.seen.clear()
        made = take(params), sum(STATE.seen)
        STATE.seen.clear()
        return made

    return call


def hook_by_attribute(self: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    x.register_hook(lambda gradient: gradient * self.scale)
    return x


def hook_weight(self: Any, x: Tensor) -> Tensor:
    self.linear.weight.register_hook(lambda gradient: gradient * 3.0)
    return x


def one_other(model: Any) -> None:
    share_context(model)
    model.layers[2].scale = 2.0


class Table(dict[str, float]):
    """A dict that has attributes."""


def give_tables(model: Any) -> None:
    for i, layer in enumerate(model.layers):
        layer.table = Table()
        layer.table.scale = 2.0 if i == 2 else 1.0


def by_signature(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        factor = 2.0 if "scale" in inspect.getfullargspec(layer.forward).args else 3.0
        x = layer.forward.__func__(layer, x, factor)
    return x


def signed_zero(model: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x, 0.0 if i in (0, LAYERS - 1) else -0.0)
    return x


def of_torch(model: Any) -> None:
    model.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))


def give_ones(model: Any) -> None:
    for layer in model.layers:
        layer.register_buffer("one", torch.randn(1))


def give_shifts(model: Any) -> None:
    for layer in model.layers:
        layer.register_buffer("shift", torch.randn(WIDTH))


def shift_in_rows(model: Any) -> None:
    give_shifts(model)
    model.layers[2].shift = torch.randn(1, WIDTH)


def shift_twice(model: Any) -> None:
    give_shifts(model)
    for layer in model.layers:
        layer.linear.register_buffer("again", layer.shift)


def shift_twice_but_one(model: Any) -> None:
    shift_twice(model)
    model.layers[2].linear.again = torch.randn(WIDTH)


def share_first(model: Any) -> None:
    give_shifts(model)
    STATE.inner.shift = model.layers[0].shift


class Told(Block):
    """A layer whose class is told of each class that is made of it, as those of transformers are."""

    def __init_subclass__(cls) -> None:
        raise AssertionError(f"{cls} is no class of the user")


def of_told(model: Any) -> None:
    for layer in model.layers:
        layer.__class__ = Told


def line_by_line(model: Any, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    x = model.layers[1](x)
    x = model.layers[2](x)
    x = model.layers[3](x)
    x = model.layers[4](x)
    return model.layers[5](x)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "an attribute set around the layer": (
        0, {"do": lambda self, x: x * self.scale, "run": in_the_middle(set_of_layer), "change": share_context}),
    "an object that layers share": (
        0, {"do": lambda self, x: x * self.context.scale, "run": in_the_middle(set_context), "change": share_context}),
    "an object in a global": (0, {"do": lambda self, x: x * STATE.inner.scale, "run": in_the_middle(set_nested)}),
    "a slot": (0, {"do": lambda self, x: x * SLOTS.scale, "run": in_the_middle(set_slot)}),
    "an attribute of the class": (0, {"do": lambda self, x: x * self.scale, "run": in_the_middle(set_class)}),
    "what a layer notes in a dict": (0, {"do": note_size, "run": use_sizes, "change": share_context}),
    "gradients that leave": (
        0, {"do": append_gradient, "take": lambda loss_of: with_seen(fzero.value_and_grad(loss_of))}),
    "an attribute that a hook reads": (0, {"do": hook_by_attribute, "change": one_other}),
    "a hook of a weight": (0, {"do": hook_weight}),
    "a dict with attributes": (0, {"do": lambda self, x: x * self.table.scale, "change": give_tables}),
    "the signature of a layer": (LAYERS - 2, {"run": by_signature}),
    "a buffer of each layer": (
        LAYERS - 2, {"do": lambda self, x: x * self.shift + self.shift.tanh(), "change": give_shifts}),
    "a buffer in two places": (
        LAYERS - 2, {"do": lambda self, x: x * self.shift + self.linear.again, "change": shift_twice}),
    "a buffer in two places, but of one layer": (
        LAYERS - 3, {"do": lambda self, x: x * self.shift + self.linear.again, "change": shift_twice_but_one}),
    "the buffer of the first one for all": (
        0, {"do": lambda self, x: x * STATE.inner.shift + self.shift, "change": share_first}),
    "a buffer of another form": (LAYERS - 3, {"do": lambda self, x: x * self.shift, "change": shift_in_rows}),
    "a buffer of one element, whose value a trace knows": (
        0, {"do": lambda self, x: x * self.one, "change": give_ones}),
    "a class that is told of its subclasses": (LAYERS - 2, {"change": of_told}),
    "an index that a class of that kind reads": (0, {"do": lambda self, x: x * self.index, "change": of_told}),
    "a hash that Python generates": (LAYERS - 2, {"do": lambda self, x: x * TABLE[Key()]}),
    "a signed zero": (0, {"run": signed_zero}),
    "layers of torch, line by line": (LAYERS - 2, {"change": of_torch, "run": line_by_line}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_program_is_that_of_layers_that_run(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, given = CASES[case]
    assert both(monkeypatch, **given) == expected


def test_buffers_that_a_step_is_given_are_those_of_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last layer have one buffer, those between them others."""
    model = Model(lambda self, x: x * self.shift, in_order, give_shifts)
    model.layers[-1].shift = model.layers[0].shift
    params, buffers, apply = fzero.lower_stateful(model)
    given = fzero.partition(params, MESH), buffers, torch.zeros(3, WIDTH)

    def step(params: Any, buffers: Any, x: Tensor) -> Any:
        return fzero.value_and_grad(lambda params: apply(params, buffers, x)[0].square().mean())(params)

    with_copies, copied = count(lambda: trace(step, given, MESH), monkeypatch)
    assert describe_trace(with_copies) == describe_trace(trace(step, given, MESH, copies=False)) and not copied
