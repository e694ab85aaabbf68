"""Checks in torch's own code that ask for the truth of a tensor. A trace has no truths: it goes on as torch does where
the check passes, and the check becomes a node of the program, which raises an error when the step runs."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from fzero.base.torch_private import assert_later, in_second_order, name_of_backward
from fzero.program.records import name_of
from fzero.tracing.kinds import Kinds

_DISTRIBUTIONS = "torch.distributions.distribution"

_PASSES: dict[tuple[str, str], bool] = {
    (f"{_DISTRIBUTIONS}.__init__", "all"): True,
    (f"{_DISTRIBUTIONS}._validate_sample", "all"): True,
    ("torch.distributions.constraints.check", "all"): True,
    ("gaussian_nll_loss", "any"): False,
    ("istft", "all"): True,
    ("LinalgSvdBackward", "all"): True,
}
"""(who asks, the operation that made the tensor) -> the truth with which the check passes. Who asks is a function of
torch, a backward node of autograd, or the place of a `bool(x)` in torch's Python code."""

_FIRST_ORDER: dict[tuple[str, str], bool] = {
    ("ScatterReduceBackward", "any"): False,
    ("IndexReduceBackward", "any"): False,
}
"""As `_PASSES`, where the first derivative is the same for both truths, and only the second has a check."""


class Checks:
    """What a trace answers to the checks of torch. `running` is the function of torch that the step is calling."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self.running = ""

    def answer(self, x: Tensor) -> bool | None:
        """The truth with which a check of `x` passes, which is now a node of the program; None where no check of the
        tables asks for it."""
        node = self._kinds.node_of(x)
        asks = name_of_backward().rstrip("0123456789") or self.running
        key = asks, "" if node is None else name_of(node).partition(".")[0]
        if not in_second_order() and key in _FIRST_ORDER:
            return _FIRST_ORDER[key]
        if key not in _PASSES:
            return None
        assert_later(x if _PASSES[key] else ~x, f"{asks} found invalid values")
        return _PASSES[key]


def place_of_caller(depth: int) -> str:
    """The module and function of a frame: `torch.distributions.constraints.check`."""
    frame: Any = sys._getframe(depth + 1)
    return f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}"
