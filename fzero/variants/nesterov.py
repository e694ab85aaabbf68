"""Nesterov's step of weights that workers share."""

from __future__ import annotations

from typing import Any

import torch

from fzero import Program

aten = torch.ops.aten


def step_towards(program: Program, old: Any, mean: Any, before: Any, rate: float, momentum: float) -> tuple[Any, Any]:
    """The next momentum, and what workers share, moved by its distance from their mean."""
    distance = program.emit(aten.sub.Tensor, old, mean)
    after = program.emit(aten.add.Tensor, distance, before, alpha=momentum)
    step = program.emit(aten.add.Tensor, distance, after, alpha=momentum)
    return after, program.emit(aten.sub.Tensor, old, step, alpha=rate)
