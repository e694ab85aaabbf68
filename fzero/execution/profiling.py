"""Profiling: what a program's operations are called in a profile of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from fzero.execution.bind import Call


class _Named(NamedTuple):
    pending: Any
    name: str


def is_profiling() -> bool:
    """Whether a profile of torch is being taken. Names cost 20 microseconds each, so that only then calls have them."""
    return torch.autograd.profiler._is_profiler_enabled


def name_calls(calls: Mapping[str, Call]) -> dict[str, Callable[..., Any]]:
    """The calls, each under its label: `"all_gather layers.0"` while one is started, `"wait all_gather layers.0"` while
    it is waited for, `"all_reduce fsdp"`, and `"adamw 12 leaves"` for updates."""
    return {key: _name(call) for key, call in calls.items()}


def _name(call: Call) -> Callable[..., Any]:
    if call.waits:
        return _wait
    if not call.label:
        return call.run

    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(call.label):
            result = call.run(*args, **kwargs)
        return _Named(result, call.label) if call.starts else result

    return run


def _wait(started: _Named) -> Tensor:
    with record_function(f"wait {started.name}"):
        return started.pending.wait()
