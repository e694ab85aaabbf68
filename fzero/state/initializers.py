"""Initializers: rules that fill a leaf with values, a chunk at a time, for `fzero.init`.

An initializer takes what is to be filled, part of a flattened leaf, with the leaf's shape and a generator. Names and
meanings are those of `torch.nn.init`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fzero.base.errors import FzeroError

Initializer = Callable[[Tensor, torch.Size, torch.Generator], object]


def constant(value: float) -> Initializer:
    """`value` everywhere."""
    return lambda out, shape, generator: out.fill_(value)


def zeros() -> Initializer:
    """0 everywhere."""
    return constant(0.0)


def ones() -> Initializer:
    """1 everywhere."""
    return constant(1.0)


def uniform(low: float = 0.0, high: float = 1.0) -> Initializer:
    """Uniform in [low, high)."""
    return lambda out, shape, generator: out.uniform_(low, high, generator=generator)


def normal(std: float = 1.0, mean: float = 0.0) -> Initializer:
    """Normal."""
    return lambda out, shape, generator: out.normal_(mean, std, generator=generator)


def trunc_normal(std: float = 1.0, mean: float = 0.0, low: float = -2.0, high: float = 2.0) -> Initializer:
    """Normal, of values in [low, high] alone; these bounds are values, not multiples of `std`."""
    return lambda out, shape, generator: torch.nn.init.trunc_normal_(out, mean, std, low, high, generator)


def xavier_uniform(gain: float = 1.0) -> Initializer:
    """Uniform of variance gain² · 2 / (fan_in + fan_out). Glorot & Bengio (2010)."""
    return _scaled(_uniform_of_std, lambda fan_in, fan_out: gain * math.sqrt(2 / (fan_in + fan_out)))


def xavier_normal(gain: float = 1.0) -> Initializer:
    """Normal of variance gain² · 2 / (fan_in + fan_out). Glorot & Bengio (2010)."""
    return _scaled(normal, lambda fan_in, fan_out: gain * math.sqrt(2 / (fan_in + fan_out)))


def kaiming_uniform(a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Initializer:
    """Uniform of variance gain² / fan, the gain that of `nonlinearity` with slope `a`. He et al. (2015)."""
    return _scaled(_uniform_of_std, _kaiming(a, mode, nonlinearity))


def kaiming_normal(a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Initializer:
    """Normal of variance gain² / fan, the gain that of `nonlinearity` with slope `a`. He et al. (2015)."""
    return _scaled(normal, _kaiming(a, mode, nonlinearity))


def fans(shape: torch.Size) -> tuple[int, int]:
    """`(fan_in, fan_out)` of a weight: its second and its first dimension, each times the sizes of all further ones.

    Raises:
        FzeroError: for fewer than two dimensions.
    """
    if len(shape) < 2:
        raise FzeroError("", f"shape {list(shape)} has no fan_in and fan_out", "give leaves of one dimension zeros()")
    field = math.prod(shape[2:])
    return shape[1] * field, shape[0] * field


def _scaled(distribution: Callable[[float], Initializer], std: Callable[[int, int], float]) -> Initializer:
    """A distribution whose deviation follows from a leaf's fans."""
    return lambda out, shape, generator: distribution(std(*fans(shape)))(out, shape, generator)


def _uniform_of_std(std: float) -> Initializer:
    return uniform(-math.sqrt(3) * std, math.sqrt(3) * std)


def _kaiming(a: float, mode: str, nonlinearity: str) -> Callable[[int, int], float]:
    if mode not in ("fan_in", "fan_out"):
        raise FzeroError("mode", f"is {mode!r}", 'give "fan_in" or "fan_out"')
    gain = torch.nn.init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type]  # of which it checks itself
    return lambda fan_in, fan_out: gain / math.sqrt(fan_in if mode == "fan_in" else fan_out)
