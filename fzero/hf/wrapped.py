"""Wrapped: what transformers' loop takes for the model. A call computes the output from slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Wrapped(nn.Module):
    """A model with its structure and attributes, without values. `call(*args, **kwargs)` computes its output."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._call = module, call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients are no attributes of parameters."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def _get_name(self) -> str:
        return self.module._get_name()  # transformers looks at the class's name to choose a loss
