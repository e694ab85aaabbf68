"""Train steps as values, which strategies draw and failing checks print.

A step trains `layers` square layers, each a dict of `w` [width, width], `b` and `g` [width] and `s` [], and a tree of
other leaves. Its forward pass is a list of operations on activations [rows, width], each of earlier ones; the batch is
the first. Every operation treats each example alone, or takes its means over all ranks, so that the loss is a mean over
examples; and keeps values of order 1, so that rounding stays near that of the dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import fzero
from fzero import optim, tree
from fzero.base.mesh import VirtualMesh

WIDE = torch.float64
NAMES = ("w", "b", "g", "s")
"""The leaves of a layer."""


@dataclass(frozen=True)
class Of:
    """A leaf that is yet to be filled: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: str = "float64"


def fill(of: tree.Tree, seed: int = 0) -> tree.Tree:
    """Tensors for the leaves of a tree of `Of`: normal numbers of deviation 1/2, or integers."""
    draw = torch.Generator().manual_seed(seed)

    def leaf(of: Of) -> Tensor:
        values = torch.randn(of.shape, generator=draw, dtype=WIDE) / 2
        return (values if getattr(torch, of.dtype).is_floating_point else values * 100).to(getattr(torch, of.dtype))

    return tree.map(leaf, of)


class Op(NamedTuple):
    """An operation on activations: its name, the earlier values that it takes, a layer, what that layer's matrix goes
    `through` first, and whether it is done again in the backward pass."""

    name: str
    x: int = 0
    y: int = 0
    layer: int = 0
    through: tuple[str, ...] = ()
    remat: bool = False


class Penalty(NamedTuple):
    """A term of the loss that depends on one leaf alone: its number, modulo the number of leaves."""

    name: str
    leaf: int = 0


class Optimizer(NamedTuple):
    """An optimizer by name, the norm that gradients are clipped to, and whether the rate follows a schedule."""

    name: str = "sgd"
    clip: float | None = None
    schedule: bool = False

    def make(self) -> optim.GradientTransformation:
        """The pair of functions."""
        rate = optim.warmup_cosine_decay_schedule(0.02, 0.1, 1, 4) if self.schedule else 0.1
        clip = optim.identity() if self.clip is None else optim.clip_by_global_norm(self.clip)
        return optim.chain(clip, OPTIMIZERS[self.name](rate))


SGD = Optimizer()
EPS = 1e-3
"""Of Adam. A change of a gradient changes Adam's step by at most 1 / EPS of that."""


def _squash(updates: tree.Tree, params: tree.Tree | None) -> tree.Tree:
    return tree.map(torch.tanh, updates)


OPTIMIZERS: dict[str, Callable[[Any], optim.GradientTransformation]] = {
    "sgd": optim.sgd,
    "momentum": lambda rate: optim.sgd(rate, momentum=0.9),
    "nesterov": lambda rate: optim.sgd(rate, momentum=0.9, nesterov=True),
    "squashed": lambda rate: optim.chain(optim.stateless(_squash), optim.sgd(rate)),
    "adam": lambda rate: optim.adam(rate, eps=EPS),
    "adamw": lambda rate: optim.adamw(rate, eps=EPS, weight_decay=0.1),
    "masked": lambda rate: optim.adamw(rate, eps=EPS, weight_decay=0.1, mask=lambda path, leaf: leaf.ndim > 1),
}
STEADY = ("sgd", "momentum", "nesterov", "squashed")
"""Those whose steps change by no more than the gradients do, which bfloat16 gives to three digits only."""


@dataclass(frozen=True)
class TrainStep:
    """A train step on a mesh: `step(*step.state(), *step.batch())`.

    Returns the new state, tree by tree, and then the loss, the activations [rows, width] and the parameters' norm. In a
    scan every turn does all operations, with the leaves of its layer. With `fzero.accumulate`, which returns no
    activations, the numbers of the batch stand for these.
    """

    mesh: VirtualMesh
    ops: tuple[Op, ...] = ()
    penalties: tuple[Penalty, ...] = ()
    optimizer: Optimizer = SGD
    others: Any = ()  # tree of `Of`, beside the layers
    layers: int = 1
    width: int = 2
    rows: int = 1  # of one microbatch on one rank
    microbatches: int = 1
    dtypes: tuple[str, str, str, str] = ("float64",) * 4  # of a layer's leaves
    loss: str = "mean"
    compute: str = "float64"  # the dtype of activations, to which leaves are cast where they are used
    averaged: bool = False  # whether it keeps a moving average of the parameters, which teaches them
    functorch: bool = False  # whether torch.func differentiates, not fzero
    loop: str = ""  # "scan" over the layers, or fzero.accumulate that averages in "each" turn or "once"
    stage: int = 3
    donate: bool = True

    def state(self) -> tuple[tree.Tree, ...]:
        """Parameters, the optimizer's state, and the average where there is one."""
        shapes = ((self.width, self.width), (self.width,), (self.width,), ())
        layer = {name: Of(shape, dtype) for name, shape, dtype in zip(NAMES, shapes, self.dtypes)}
        shape = {"layers": [layer] * self.layers, "others": self.others}
        params = fill(shape)
        averages = (fill(shape, seed=1),) if self.averaged else ()
        return (params, self.optimizer.make().init(params), *averages)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Numbers [N, width] and tokens [N], N rows of all microbatches of all ranks."""
        draw = torch.Generator().manual_seed(2)
        size = self.rows * self.microbatches * self.mesh.size()
        x = torch.randn(size, self.width, generator=draw, dtype=WIDE) / 2
        return x.to(self.wide), torch.randint(self.width, (size,), generator=draw)

    def partition(self) -> tuple[tree.Tree, ...]:
        """`state` on all ranks of the mesh."""
        placed: tuple[tree.Tree, ...] = ()
        for part in self.state():
            placed = (*placed, fzero.partition(part, self.mesh, like=placed))
        return placed

    def __call__(self, params: tree.Tree, memory: Any, *rest: Any) -> tuple[Any, ...]:
        average, (x, tokens) = rest[0] if self.averaged else None, rest[-2:]
        value, out, grads = self._average(params, average, x, tokens)
        updates, memory = self.optimizer.make().update(grads, memory, params)
        new = optim.apply_updates(params, updates)
        averages = [tree.map(lambda a, p: torch.lerp(a, p, 0.25), average, new)] if self.averaged else []
        return (new, memory, *averages, value, out, optim.global_norm(new))

    def _average(
        self, params: tree.Tree, average: tree.Tree | None, x: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor, tree.Tree]:
        """The loss, the activations and the gradient, of all microbatches."""
        if self.loop in ("each", "once"):

            def sums(params: tree.Tree, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
                value, _ = self._loss(params, average, *batch)
                return value * len(batch[0]), torch.full((), len(batch[0]), dtype=WIDE)

            value, grads = fzero.accumulate(sums, self.microbatches, sync=self.loop)(params, (x, tokens))
            return value, x, grads
        pieces = zip(x.chunk(self.microbatches), tokens.chunk(self.microbatches))
        found = [self._differentiate(params, average, *piece) for piece in pieces]
        grads = tree.map(lambda *parts: sum(parts[1:], parts[0]) / self.microbatches, *(grads for _, _, grads in found))
        value = torch.stack([value for value, _, _ in found]).mean()
        return value, torch.cat([out for _, out, _ in found]), grads

    def _differentiate(self, params: tree.Tree, *given: Any) -> tuple[Tensor, Tensor, tree.Tree]:
        if self.functorch:
            grads, (value, out) = torch.func.grad_and_value(self._loss, has_aux=True)(params, *given)
        else:
            (value, out), grads = fzero.value_and_grad(self._loss, has_aux=True)(params, *given)
        return value, out, grads

    def _loss(self, params: tree.Tree, average: tree.Tree | None, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        out = self._forward(params, x, tokens)
        target = out if average is None else out - self._forward(average, x, tokens)
        value = LOSSES[self.loss](target, tokens)
        leaves = tree.leaves(params)
        for penalty in self.penalties:
            leaf = leaves[penalty.leaf % len(leaves)]
            if leaf.numel():
                value = value + 0.1 * PENALTIES[penalty.name](leaf.to(self.wide))
        return value, out

    def _forward(self, params: tree.Tree, x: Tensor, tokens: Tensor) -> Tensor:
        if self.loop == "scan":

            def turn(h: Tensor, _: None, layer: dict[str, Any]) -> tuple[Tensor, None]:
                return self._apply([layer], h, tokens), None

            return fzero.scan(turn, x, layers=params["layers"])[0]
        return self._apply(params["layers"], x, tokens)

    def _apply(self, layers: list[dict[str, Any]], x: Tensor, tokens: Tensor) -> Tensor:
        values = [x]
        for op in self.ops:
            here = Here(self, layers, op, tokens)
            call = fzero.remat(OPERATIONS[op.name]) if op.remat else OPERATIONS[op.name]
            values.append(call(here, values[op.x % len(values)], values[op.y % len(values)]))
        return values[-1]

    @property
    def wide(self) -> torch.dtype:
        """The dtype of activations."""
        return getattr(torch, self.compute)

    @property
    def tolerance(self) -> float:
        """The largest difference to the unsharded step, absolute and relative.

        Sums in another order move float64 by 1e-16 of values of order 1, Adam a thousand times that; state in float32
        is rounded to 6e-8, and activations in float32 are, many times. bfloat16 rounds to 2 ** -9: gradients in it are
        summed in it over ranks, and those of microbatches, which hold other examples on ranks than alone, are rounded
        to it one by one.
        """
        rounded = any("rounded" in op.through for op in self.ops) and self.microbatches > 1
        if rounded or "bfloat16" in self.dtypes or any(op.name == "low" for op in self.ops):
            return 5e-2
        if self.compute == "float32":
            return 1e-3 if self.optimizer.name.startswith("adam") else 1e-4
        return 1e-5 if "float32" in self.dtypes else 1e-9


class Here(NamedTuple):
    """Where an operation stands."""

    step: TrainStep
    layers: list[dict[str, Any]]
    op: Op
    tokens: Tensor

    def leaf(self, name: str, *, further: int = 0) -> Any:
        """A leaf of the operation's layer, or of one `further` on."""
        return self.layers[(self.op.layer + further) % len(self.layers)][name].to(self.step.wide)

    @property
    def w(self) -> Any:
        """The layer's matrix after the functions of `op.through`."""
        w = self.leaf("w")
        for name in self.op.through:
            w = THROUGH[name](self, w)
        return w


def _round(w: Any) -> Any:
    return w.to(torch.bfloat16).to(w.dtype)


THROUGH: dict[str, Callable[[Here, Any], Any]] = {
    "tanh": lambda here, w: torch.tanh(w),
    "cos": lambda here, w: torch.cos(w),
    "double": lambda here, w: w + w,
    "rounded": lambda here, w: _round(w),
    "detached": lambda here, w: (w + w.detach()) / 2,
    "centered": lambda here, w: w - w.mean(),
    "unit": lambda here, w: w / (1 + w.norm()),
    "peak": lambda here, w: w / (1 + w.abs().max()),
    "scaled": lambda here, w: w * here.leaf("s"),
    "gated": lambda here, w: w * torch.sigmoid(here.leaf("w", further=1)),
    "rows": lambda here, w: w * here.leaf("g"),
    "transposed": lambda here, w: w.T,
    "clamped": lambda here, w: w.clamp(-0.4, 0.4),
    "chosen": lambda here, w: torch.where(w > 0, w, 0.1 * w),
    "mixed": lambda here, w: torch.lerp(w, here.leaf("w", further=1), 0.3),
    "product": lambda here, w: w @ here.leaf("w", further=1),
    "joined": lambda here, w: torch.cat([w[1:], here.leaf("w", further=1)[:1]]),
}
"""What a matrix may go through on its way: elementwise, by numbers of its own or other leaves, and whole."""


def _everywhere(here: Here, x: Tensor) -> Tensor:
    for axis in here.step.mesh.names:
        x = fzero.pmean(x, axis)
    return x


def _low(here: Here, x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x.to(torch.bfloat16) @ here.w.to(torch.bfloat16)).to(x.dtype)


OPERATIONS: dict[str, Callable[[Here, Tensor, Tensor], Tensor]] = {
    "dense": lambda here, x, y: torch.tanh(x @ here.w + here.leaf("b")),
    "linear": lambda here, x, y: torch.tanh(F.linear(x, here.w, here.leaf("b"))),
    "tied": lambda here, x, y: torch.tanh(x @ here.w.T),
    "low": _low,
    "embed": lambda here, x, y: (x + torch.tanh(here.w)[here.tokens]) / 2,
    "attend": lambda here, x, y: torch.softmax(x @ here.w, -1) * y,
    "norm": lambda here, x, y: F.layer_norm(x, x.shape[1:], here.leaf("g"), here.leaf("b"), 0.1),
    "outer": lambda here, x, y: torch.tanh((x.unsqueeze(2) @ y.unsqueeze(1)).sum(1)),
    "gate": lambda here, x, y: x * torch.sigmoid(y),
    "add": lambda here, x, y: (x + y) / 2,
    "scale": lambda here, x, y: torch.tanh(x * here.leaf("g")),
    "times": lambda here, x, y: torch.tanh(x * here.leaf("s")),
    "center": lambda here, x, y: x - _everywhere(here, x.mean(0)),
    "reshape": lambda here, x, y: x.reshape(len(x), 1, -1).transpose(1, 2).flip(1).reshape(len(x), -1),
    "roll": lambda here, x, y: torch.roll(x, 1, 1),
    "sums": lambda here, x, y: x.cumsum(1) / x.shape[1],
    "mean": lambda here, x, y: y + x.mean(1, keepdim=True),
    "gelu": lambda here, x, y: F.gelu(x),
    "relu": lambda here, x, y: torch.relu(x),
    "sin": lambda here, x, y: torch.sin(3 * x),
}
"""Operations of activations x and y [rows, width] to others."""

PENALTIES: dict[str, Callable[[Any], Any]] = {
    "square": lambda p: p.square().sum(),
    "sum": lambda p: torch.tanh(p).sum(),
    "mean": lambda p: p.cos().mean(),
    "norm": lambda p: p.norm(),
    "max": lambda p: p.max(),
    "whole": lambda p: torch.logsumexp(p.reshape(-1), 0),
}
"""Numbers of one leaf."""

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda out, tokens: out.square().mean(),
    "entropy": lambda out, tokens: F.cross_entropy(out, tokens),
    "sum": lambda out, tokens: out.square().sum(),
    "first": lambda out, tokens: out[0].square().mean(),
    "max": lambda out, tokens: out.square().max(),
}
"""Of activations and tokens; the first two are means over examples."""
LOOPS = ("", "scan", "each", "once")
"""What a step loops by: Python, `fzero.scan` over its layers, `fzero.accumulate` that averages in each turn or once."""
RIGHT, WRONG = ("mean", "entropy"), ("sum", "first", "max")
