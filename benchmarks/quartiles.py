"""The spread of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Quartiles(NamedTuple):
    """A quarter of all values lies below `low`, half below `median`, and a quarter above `high`."""

    low: float
    median: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Of one value or more, between two values where they fall there."""
    at = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    return Quartiles(*torch.tensor(values, dtype=torch.float64).quantile(at).tolist())
