"""Layers: what may follow in a chain, by what of a value a rank has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

import fzero

WIDTH = 24
"""The columns of every value: divides by the ranks along all axes."""
WHOLE = None
"""What of a value a rank has: all of it, or its part along dim 0 or 1."""
Apply = Callable[[Any, Tensor], Tensor]


MIXES: dict[str, Any] = {
    "": None,
    "sum": torch.add,
    "product": torch.mul,
    "larger": lambda a, b: torch.where(a > b, a, b),
    "lists": lambda a, b: torch._foreach_add([a], [b])[0],
    "number": None,
    "column": None,
}
"""What a weight may be computed from: itself, another leaf of its shape, a 0-d leaf, or one of one element."""


@dataclass(frozen=True)
class Layer:
    """A function of parameters and a value, the parameters that it needs, and their splits."""

    name: str
    apply: Apply
    shapes: Mapping[str, tuple[int, ...]]
    splits: Mapping[str, tuple[Any, ...]]
    after: int | None


def block(x: Tensor, dim: int, axes: Any) -> Tensor:
    """This rank's part of a whole value."""
    size = x.shape[dim] // fzero.axis_size(axes)
    return x.index_select(dim, fzero.axis_index(axes) * size + torch.arange(size))


def draw_layer(draw: Random, more: Random, number: int, before: int | None, axes: Any) -> Layer:
    """A layer that takes what a rank has `before`. `axes` are those of parts. `more` draws what weights are made of."""
    key = f"w{number}"
    is_split = {key: draw.random() < 0.7, f"{key} too": more.random() < 0.7}
    mix = more.choice(["", *MIXES])

    def own(params: Any, name: str, dim: int) -> Tensor:
        """This rank's part of a leaf, which is split or whole."""
        weight = params[name]
        return (
            weight if is_split[name] else block(weight.full_tensor() if hasattr(weight, "form") else weight, dim, axes)
        )

    def part(params: Any, dim: int) -> Tensor:
        """This rank's part of a weight, which is a leaf, or is computed from it and from what `MIXES` names."""
        weight = own(params, key, dim)
        if mix == "number":
            return weight * params[f"{key} one"]
        if mix == "column":
            return weight * params[f"{key} few"].expand(weight.shape)
        return MIXES[mix](weight, own(params, f"{key} too", dim)) if mix else weight

    def make(name: str, apply: Apply, after: int | None, dim: int | None = None, shape: tuple[int, ...] = ()) -> Layer:
        shapes, is_part = {key: shape} if shape else {}, dim is not None and name != "penalty"
        if mix and is_part:
            name, more = f"{name}, {mix}", {"number": ("one", ()), "column": ("few", (1,))}
            word, of_other = more.get(mix, ("too", shape))
            shapes[f"{key} {word}"] = of_other
        splits = {each: (axes, dim) for each in shapes if dim is not None and is_split.get(each)}
        return Layer(f"{name}{' of a split leaf' if splits else ''}", apply, shapes, splits, after)

    square = (WIDTH, WIDTH)
    whole = [
        make("linear", lambda p, x: x @ p[key].T, WHOLE, shape=square),
        make("scale", lambda p, x: x * p[key], WHOLE, shape=(WIDTH,)),
        make("normalize", lambda p, x: torch.nn.functional.layer_norm(x, (WIDTH,), p[key]), WHOLE, shape=(WIDTH,)),
        make("take rows", lambda p, x: block(x, 0, axes), 0),
        make("take columns", lambda p, x: block(x, 1, axes), 1),
        make("column", lambda p, x: x @ part(p, 0).T, 1, 0, square),
        make("bias of columns", lambda p, x: block(x, 1, axes) + part(p, 0), 1, 0, (WIDTH,)),
        make("penalty", lambda p, x: x + p[key].square().mean(), WHOLE, 0, square),
    ]
    of_rows = [
        make("linear", lambda p, x: x @ p[key].T, 0, shape=square),
        make("gather rows", lambda p, x: fzero.all_gather(x, axes, 0), WHOLE),
        make("rows to columns", lambda p, x: fzero.all_to_all(x, axes, 1, 0), 1),
        make("round", lambda p, x: turn(turn(x, axes, 1).tanh(), axes, -1), 0),
        make("column of gathered rows", lambda p, x: fzero.all_gather(x, axes, 0) @ part(p, 0).T, 1, 0, square),
        make("less the mean", lambda p, x: x - fzero.pmean(x.mean(0), axes), 0),
        make("less the maximum", lambda p, x: x - fzero.pmax(x.amax(0), axes), 0),
    ]
    of_columns = [
        make("gather columns", lambda p, x: fzero.all_gather(x, axes, -1), WHOLE),
        make("columns to rows", lambda p, x: fzero.all_to_all(x, axes, 0, 1), 0),
        make("row", lambda p, x: fzero.psum(x @ part(p, 1).T, axes), WHOLE, 1, square),
        make("row, scattered", lambda p, x: fzero.psum_scatter(x @ part(p, 1).T, axes, 0), 0, 1, square),
        make("row, scattered over columns", lambda p, x: fzero.psum_scatter(x @ part(p, 1).T, axes, 1), 1, 1, square),
        make("norm of rows", lambda p, x: x / (1 + fzero.psum(x.square().sum(1, True), axes)).sqrt(), 1),
        make("softmax of rows", lambda p, x: softmax(x, axes), 1),
    ]
    found = draw.choice(whole if before is WHOLE else of_rows if before == 0 else of_columns)
    if draw.random() < 0.3:
        inner = found.apply
        return replace(found, name=f"tanh of {found.name}", apply=lambda p, x: inner(p, x).tanh())
    return found


def turn(x: Tensor, axes: Any, by: int) -> Tensor:
    """Each rank's part on the rank that is so many positions on."""
    ranks = fzero.axis_size(axes)
    return fzero.ppermute(x, axes, [(i, (i + by) % ranks) for i in range(ranks)])


def softmax(x: Tensor, axes: Any) -> Tensor:
    """The softmax of rows of which a rank has some columns."""
    largest = fzero.pmax(x.amax(1, keepdim=True), axes)
    shifted = (x - largest).exp()
    return shifted / fzero.psum(shifted.sum(1, keepdim=True), axes)


def finish(x: Tensor, has: int | None, axes: Any, is_summed: bool) -> Tensor:
    """The mean of squares of a value, from what ranks have of it."""
    if has is WHOLE:
        return x.square().mean()
    if is_summed:
        return fzero.pmean(x.square().mean(), axes)
    return fzero.all_gather(x, axes, has).square().mean()


def wrap(draw: Random, apply: Apply, is_whole: bool) -> tuple[str, Apply]:
    """A chain as it is, computed again in the backward pass, or as the body of a loop that gives what it takes."""
    kind = draw.choice(["", "", "remat", "loop" if is_whole else ""])
    if kind == "remat":
        return kind, fzero.remat(apply)
    if kind == "loop":
        return kind, functools.partial(_loop, apply)
    return kind, apply


def _loop(apply: Apply, params: Any, x: Tensor) -> Tensor:
    return fzero.scan(lambda x, _: (apply(params, x), None), x, None, length=2)[0]
