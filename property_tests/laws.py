"""How laws of steps are run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import example, settings

from property_tests.steps import EVERYTHING

slow = settings(max_examples=max(1, settings.default.max_examples // 5))
"""For laws that trace and run a step, at up to a second a case: a fifth of the profile's cases."""


def everything(law: Callable[..., Any]) -> Callable[..., Any]:
    """Try the steps of `EVERYTHING` first."""
    for step in EVERYTHING:
        law = example(step)(law)
    return law
