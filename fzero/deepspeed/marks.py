"""Marks: which parameter is which leaf of which engine. Modules with marks have a structure and no values."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from fzero.base.errors import FzeroError

_MARK = "fzero_mark"
"""The attribute of a parameter that has its mark."""


class _Mark:
    """The engine and the path of a leaf."""

    def __init__(self, engine: Any = None, path: str = "") -> None:
        self.engine = None if engine is None else weakref.ref(engine)
        self.path = path


def mark_parameters(module: nn.Module, engine: Any) -> None:
    """Note on each parameter which leaf of an engine it is. The last engine of a model counts."""
    for path, parameter in module.named_parameters():
        setattr(parameter, _MARK, _Mark(engine, path))


def find_owner(parameter: Any) -> tuple[Any, str]:
    """`(engine, path)` of a parameter of `engine.module`, or of the model that `initialize` was given.

    Raises:
        FzeroError: for any other tensor, and where the engine is gone.
    """
    mark = getattr(parameter, _MARK, _Mark())
    engine = None if mark.engine is None else mark.engine()
    if engine is None:
        problem = f"a {type(parameter).__name__} of shape {tuple(getattr(parameter, 'shape', ()))} is no engine's"
        raise FzeroError("parameter", problem, "give one of engine.module.named_parameters()")
    return engine, mark.path
