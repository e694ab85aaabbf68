"""Lists of layers that are equal but for what their code does beside computing: its habits, and those of its model."""

from __future__ import annotations

import contextvars
import functools
import types
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

WIDTH = 6
FACTOR = contextvars.ContextVar("FACTOR", default=1.0)
CALLS, SETTINGS = [0], {"now": 0, "scale": 1.0}


class _Skip(Exception):
    """What a layer raises instead of returning."""


class _Halve(torch.autograd.Function):
    """The identity, whose derivative is a half."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


def _count(self: Layer, h: Tensor, given: Any) -> Tensor:
    CALLS[0] += 1
    return h * (1 + 0.01 * (CALLS[0] % 7))


def _set_factor(self: Layer, h: Tensor, given: Any) -> Tensor:
    FACTOR.set(FACTOR.get() * 1.01)
    return h * FACTOR.get()


def _append(self: Layer, h: Tensor, given: Any) -> Tensor:
    given["sums"].append(h.mean())
    return h


def _remember_by_index(self: Layer, h: Tensor, given: Any) -> Tensor:
    h = h + given["notes"].get(self.index - 1, 0.0)
    given["notes"][self.index] = h.mean()
    return h


def _remember(self: Layer, h: Tensor, given: Any) -> Tensor:
    given["notes"]["sum"] = given["notes"].get("sum", 0.0) + h.mean()
    return h


def _keep(self: Layer, h: Tensor, given: Any) -> Tensor:
    self.last = h.mean()
    return h


def _raise(self: Layer, h: Tensor, given: Any) -> Tensor:
    if self.index == 3:
        raise _Skip
    return h


def _cache(self: Layer, h: Tensor, given: Any) -> Tensor:
    keys, values = given["cache"].update(h[:, None], h[:, None] * 2, self.index)
    return h + nn.functional.scaled_dot_product_attention(h[:, None], keys, values)[:, 0]


def _look_into_cache(self: Layer, h: Tensor, given: Any) -> Tensor:
    return _cache(self, h * (1 + 0.1 * given["cache"].get_seq_length(max(self.index - 1, 0))), given)


def _hook(self: Layer, h: Tensor, given: Any) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 0.5)
    return h


HABITS: dict[str, Callable[[Any, Tensor, Any], Tensor]] = {
    "index": lambda self, h, given: h * (1 + 0.1 * self.index),
    "even": lambda self, h, given: h * 1.2 if self.index % 2 == 0 else h,
    "buffer": lambda self, h, given: h * self.own,
    "tensor": lambda self, h, given: h * self.unregistered,
    "closure": lambda self, h, given: self.closure(h),
    "equal closure": lambda self, h, given: self.equal_closure(h),
    "partial": lambda self, h, given: self.partial(h),
    "list": lambda self, h, given: h * self.numbers[1],
    "eps": lambda self, h, given: h + self.norm.eps,
    "counts calls": _count,
    "sets a variable": _set_factor,
    "reads a variable": lambda self, h, given: h * FACTOR.get(),
    "reads settings": lambda self, h, given: h * (1 + 0.1 * SETTINGS["now"]) * SETTINGS["scale"],
    "appends": _append,
    "remembers by index": _remember_by_index,
    "remembers": _remember,
    "keeps": _keep,
    "raises": _raise,
    "cache": _cache,
    "looks into a cache": _look_into_cache,
    "hook": _hook,
    "own derivative": lambda self, h, given: _Halve.apply(h),
    "length": lambda self, h, given: h * 1.5 if h.shape[1] > 4 else h,
    "first weight": lambda self, h, given: h + h @ self.first[0].linear.weight,
    "half detached": lambda self, h, given: h.detach() * 0.5 + h * 0.5,
    "earlier": lambda self, h, given: h + sum(x.mean() for x in given["earlier"]),
    "mask": lambda self, h, given: h + given["mask"][..., :1] * 0.1,
    "gradient mode": lambda self, h, given: h * (1.0 if torch.is_grad_enabled() else 2.0),
    "training": lambda self, h, given: h * 1.1 if self.training else h,
    "trained": lambda self, h, given: h * 1.2 if self.linear.bias.requires_grad else h,
    "inner layers": lambda self, h, given: h + sum(torch.sin(inner(h)) for inner in self.inner),
    "in place": lambda self, h, given: h.clone().mul_(1.1),
    "name": lambda self, h, given: h * (1 + 0.01 * len(type(self).__name__)),
    "transposed norm": lambda self, h, given: nn.functional.layer_norm(h.mT, h.shape[1:2]).mT,
}


class Layer(nn.Module):
    """`x + tanh(linear(norm(x)))`, changed by habits. `returns` a tensor, a pair, or a pair on every second layer."""

    last: Tensor
    first: list[Layer]

    def __init__(self, index: int, habits: Collection[str], returns: str) -> None:
        super().__init__()
        self.index, self.habits, self.returns = index, tuple(habits), returns
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.numbers, factor = [1.0, 1 + 0.1 * index], 1 + 0.1 * index
        self.unregistered = torch.full((WIDTH,), factor) if "tensor" in habits else None
        self.closure = (lambda x: x * factor) if "closure" in habits else None
        self.equal_closure = (lambda x: x * 1.3) if "equal closure" in habits else None
        self.partial = functools.partial(torch.mul, other=1 + 0.1 * (index % 2)) if "partial" in habits else None
        if "eps" in habits:
            self.norm.eps = 10.0 ** -(2 + index % 3)
        if "buffer" in habits:
            self.register_buffer("own", torch.full((WIDTH,), factor))
        if "inner layers" in habits:
            self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, **given: Any) -> Any:
        h = torch.tanh(self.linear(self.norm(x)))
        for habit in self.habits:
            h = HABITS[habit](self, h, given)
        if self.returns == "tensor":
            return x + h
        return x + h, (h.mean() if self.returns == "pair" or self.index % 2 else None)


class Other(Layer):
    """Another class."""

    def forward(self, x: Tensor, **given: Any) -> Any:
        made = super().forward(x * 1.1, **given)
        return made


ORDERS: dict[str, Callable[[list[Layer]], list[Layer]]] = {
    "twice": lambda layers: [layer for layer in layers for _ in range(2)],
    "again": lambda layers: layers + layers,
    "reversed": lambda layers: layers[::-1],
    "without the first": lambda layers: layers[1:],
    "the last first": lambda layers: layers[-1:] + layers[:-1],
    "odd behind even": lambda layers: layers[::2] + layers[1::2],
}
MODEL_HABITS = (
    *ORDERS, "shared", "another class", "frozen", "no gradient", "detach", "hook of a module", "hooks in front", "U",
    "own forward", "checkpoint", "late use", "left out", "eval", "between", "stack", "norms", "reads a cache",
)  # fmt: skip


class Model(nn.Module):
    """Layers in a list, called one after the other. Returns a loss."""

    def __init__(self, count: int, habits: Collection[str], of_model: Collection[str], returns: str) -> None:
        super().__init__()
        kinds = [Other if "another class" in of_model and i % 3 == 2 else Layer for i in range(count)]
        self.layers = nn.ModuleList(kind(i, habits, returns) for i, kind in enumerate(kinds))
        self.habits, self.of_layers = frozenset(of_model), frozenset(habits)
        layers: list[Any] = list(self.layers)
        for layer in layers:
            layer.first = [layers[0]]
        if "shared" in of_model:
            layers[-2].linear = layers[0].linear
        if "frozen" in of_model:
            layers[1].requires_grad_(False)
        if "hook of a module" in of_model:
            layers[2].norm.register_forward_hook(lambda module, given, made: made * 1.1)
        if "hooks in front" in of_model:
            for layer in layers:
                layer.register_forward_pre_hook(lambda module, given: (given[0] * (1 + 0.01 * module.index),))
        if "own forward" in of_model:
            layers[2].forward = types.MethodType(
                lambda self, x, **given: Layer.forward(self, x * 1.2, **given), layers[2]
            )
        if "eval" in of_model:
            layers[1].eval()

    def forward(self, x: Tensor) -> Tensor:
        FACTOR.set(1.0)
        CALLS[0], sums, notes, made, loss = 0, [], {}, [], x.new_zeros(())
        layers: list[Any] = list(self.layers)
        for name in ORDERS.keys() & self.habits:
            layers = ORDERS[name](layers)
        h, cache = x, DynamicCache()
        for i, layer in enumerate(layers):
            SETTINGS["now"], SETTINGS["scale"] = i % 3, 1 + 0.1 * (i % 2)
            if "left out" in self.habits and h.shape[1] > 4 and i == 3:
                continue
            given = {"sums": sums, "notes": notes, "earlier": list(made), "mask": x if i % 2 else x * 2, "cache": cache}
            asked = {"appends": "sums", "remembers": "notes", "remembers by index": "notes"}
            asked |= {"earlier": "earlier", "mask": "mask", "cache": "cache", "looks into a cache": "cache"}
            given = {key: given[key] for habit, key in asked.items() if habit in self.of_layers}
            try:
                h, beside = self._call(layer, i, h, given)
            except _Skip:
                continue
            loss = loss if beside is None else loss + 0.01 * beside
            h = h.detach() if "detach" in self.habits and i == 2 else h
            h = torch.relu(h) + 0.1 * h if "between" in self.habits else h
            if "U" in self.habits and len(layers) // 2 <= i and len(layers) - 1 - i < len(made):
                h = h + made[len(layers) - 1 - i]
            loss = loss + 0.01 * h.square().mean() if "norms" in self.habits else loss
            made.append(h)
        h = h + made[1] if "late use" in self.habits else h
        h = torch.stack(made).mean(0) if "stack" in self.habits else h
        loss = loss + sum(layer.last for layer in layers) if "keeps" in self.of_layers else loss
        if "reads a cache" in self.habits:
            slots = [each for each in cache.layers if each.is_initialized]
            loss = loss + sum((i + 1) * each.values.mean() for i, each in enumerate(slots))
        return torch.tanh(h).square().mean() + torch.tanh(loss + sum(sums) + sum(notes.values()))

    def _call(self, layer: Any, at: int, h: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad() if "no gradient" in self.habits and at < 2 else nullcontext():
            if "checkpoint" in self.habits and at % 2:
                made = torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=False, **given)
            else:
                made = layer(h, **given)
        return made if isinstance(made, tuple) else (made, None)
