"""The directions that power iteration looks in: columns of length 1, of which none becomes zeros."""

from __future__ import annotations

from typing import Any

import torch

from fzero import Program

aten = torch.ops.aten


def draw(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """The first directions."""
    return torch.randn(shape, generator=generator)


def normalize_columns(program: Program, new: Any, old: Any) -> Any:
    """The columns of `new` [m, r] with length 1. A column of zeros, or with a number that is not finite, would stay
    so for ever: in its place stands that of `old`, shifted by one row, for the same column may meet zeros again."""
    length = program.emit(aten.linalg_vector_norm.default, new, 2, [0], True)  # [1, r]
    is_column = program.emit(aten.eq.Tensor, *[program.emit(aten.div.Tensor, length, length)] * 2)  # nan of 0, inf, nan
    unit = program.emit(aten.div.Tensor, new, length)
    return program.emit(aten.where.self, is_column, unit, program.emit(aten.roll.default, old, [1], [0]))
