"""Signatures: a constructor that passes arguments on shows those of transformers, to `help` and to editors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def join_signatures(theirs: Callable[..., Any], ours: Callable[..., Any]) -> inspect.Signature:
    """The arguments of `theirs`, and behind them those of `ours` that are given by name alone."""
    own = inspect.signature(ours)
    added = [each for each in own.parameters.values() if each.kind is each.KEYWORD_ONLY]
    given = list(inspect.signature(theirs).parameters.values())
    rest = [each for each in given if each.kind is each.VAR_KEYWORD]
    return own.replace(parameters=[each for each in given if each not in rest] + added + rest)
