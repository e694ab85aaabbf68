"""Layers of a lowered module: who records them during a trace, and which they are."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, NamedTuple, Protocol

from torch import nn

FEWEST = 4
"""Layers of one class that a list must have: the first and the last one are always traced."""


class LayerCall(NamedTuple):
    """A call of the layer at a position of a list of modules: `forward(*args, **kwargs)`."""

    layers: nn.Module
    at: int
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def list_layers(self) -> list[nn.Module]:
        """The modules of the list."""
        return list(self.layers.children())


class LayerRecorder(Protocol):
    """Who may answer a call of a layer in another way than by running its code."""

    def call_layer(self, call: LayerCall) -> Any:
        """What the call returns."""


_recorder: ContextVar[LayerRecorder | None] = ContextVar("fzero_layer_recorder", default=None)


@contextmanager
def record_layers(recorder: LayerRecorder | None) -> Iterator[None]:
    """Inside this context `recorder` answers the calls of layers. None lets them run."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def hand_over_layers(modules: Mapping[str, nn.Module]) -> None:
    """Let the present recorder answer the calls of the layers among `modules`, until their attributes are reset."""
    recorder = _recorder.get()
    if recorder is None:
        return
    for layers in modules.values():
        if isinstance(layers, (nn.ModuleList, nn.Sequential)):
            children = list(layers.children())
            often = {cls for cls, count in Counter(map(type, children)).items() if count >= FEWEST}
            for i, child in enumerate(children):
                if type(child) in often and "forward" not in vars(child) and isinstance(child.forward, MethodType):
                    vars(child)["forward"] = _hand_over(recorder, layers, i, child.forward)


def is_handed_over(function: Any) -> bool:
    """Whether an attribute `forward` is what `hand_over_layers` puts there."""
    return hasattr(function, "_of_layer")


def _hand_over(recorder: LayerRecorder, layers: nn.Module, at: int, forward: MethodType) -> MethodType:
    """A method, as `forward` is: code may look at its signature, or at the function and the module of it."""

    @functools.wraps(forward)
    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_layer(LayerCall(layers, at, forward, args, kwargs))

    call._of_layer = at  # type: ignore[attr-defined]
    call.__signature__ = inspect.signature(forward.__func__)  # type: ignore[attr-defined]
    return MethodType(call, forward.__self__)
