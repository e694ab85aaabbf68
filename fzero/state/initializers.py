"""Initializers: functions that fill a leaf with initial values, a chunk at a time, for `fzero.init`.

An initializer takes `(out, shape, generator)`: `out`, 1-d, is the part of the flattened leaf to fill, `shape` is the
whole leaf's shape. Names and meanings are those of `torch.nn.init`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fzero.base.errors import FzeroError

Initializer = Callable[[Tensor, torch.Size, torch.Generator], object]


def constant(value: float) -> Initializer:
    """Every element is `value`."""
    return lambda out, shape, generator: out.fill_(value)


def zeros() -> Initializer:
    """Every element is 0."""
    return constant(0.0)


def ones() -> Initializer:
    """Every element is 1."""
    return constant(1.0)


def uniform(low: float = 0.0, high: float = 1.0) -> Initializer:
    """Uniform in [low, high)."""
    return lambda out, shape, generator: out.uniform_(low, high, generator=generator)


def normal(std: float = 1.0, mean: float = 0.0) -> Initializer:
    """Normal with mean `mean` and standard deviation `std`."""
    return lambda out, shape, generator: out.normal_(mean, std, generator=generator)


def trunc_normal(std: float = 1.0, mean: float = 0.0, low: float = -2.0, high: float = 2.0) -> Initializer:
    """Normal, truncated to values in [low, high]. The bounds are values, not multiples of `std`."""
    return lambda out, shape, generator: torch.nn.init.trunc_normal_(out, mean, std, low, high, generator)


def xavier_uniform(gain: float = 1.0) -> Initializer:
    """Uniform of variance gain² · 2 / (fan_in + fan_out). Glorot & Bengio (2010)."""
    return _scale_by_fans(_uniform_of_std, lambda fan_in, fan_out: gain * math.sqrt(2 / (fan_in + fan_out)))


def xavier_normal(gain: float = 1.0) -> Initializer:
    """Normal of variance gain² · 2 / (fan_in + fan_out). Glorot & Bengio (2010)."""
    return _scale_by_fans(normal, lambda fan_in, fan_out: gain * math.sqrt(2 / (fan_in + fan_out)))


def kaiming_uniform(a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Initializer:
    """Uniform of variance gain² / fan, with the gain of `nonlinearity` of slope `a`. He et al. (2015)."""
    return _scale_by_fans(_uniform_of_std, _kaiming(a, mode, nonlinearity))


def kaiming_normal(a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Initializer:
    """Normal of variance gain² / fan, with the gain of `nonlinearity` of slope `a`. He et al. (2015)."""
    return _scale_by_fans(normal, _kaiming(a, mode, nonlinearity))


def fans(shape: torch.Size) -> tuple[int, int]:
    """`(fan_in, fan_out)` of a weight: the sizes of dimension 1 and of dimension 0, each times the sizes of all
    dimensions from 2 on.

    Raises:
        FzeroError: for fewer than two dimensions.
    """
    if len(shape) < 2:
        raise FzeroError("", f"shape {list(shape)} has no fan_in and fan_out", "give leaves of one dimension zeros()")
    field = math.prod(shape[2:])
    return shape[1] * field, shape[0] * field


def _scale_by_fans(distribution: Callable[[float], Initializer], std: Callable[[int, int], float]) -> Initializer:
    """An initializer of `distribution(std(fan_in, fan_out))`, with the fans of the leaf."""
    return lambda out, shape, generator: distribution(std(*fans(shape)))(out, shape, generator)


def _uniform_of_std(std: float) -> Initializer:
    return uniform(-math.sqrt(3) * std, math.sqrt(3) * std)


def _kaiming(a: float, mode: str, nonlinearity: str) -> Callable[[int, int], float]:
    if mode not in ("fan_in", "fan_out"):
        raise FzeroError("mode", f"is {mode!r}", 'give "fan_in" or "fan_out"')
    gain = torch.nn.init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type]  # calculate_gain checks the name itself
    return lambda fan_in, fan_out: gain / math.sqrt(fan_in if mode == "fan_in" else fan_out)
