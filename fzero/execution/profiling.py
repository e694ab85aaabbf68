"""Profiling: what a program's communication is called in a profile of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function


class _Named(NamedTuple):
    pending: Any
    name: str


class Profiled:
    """A runtime whose communication has names: `"all_gather layers.0"` while one is started, `"wait all_gather
    layers.0"` while it is waited for, `"all_reduce fsdp"`, and `"adamw 12 leaves"` for updates.

    Everything else is the other runtime's.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def all_gather(self, slices: Any, bucket: str, *rest: Any, **how: Any) -> _Named:
        return self._started("all_gather", slices, bucket, *rest, **how)

    def reduce_scatter(self, fulls: Any, bucket: str, *rest: Any) -> _Named:
        return self._started("reduce_scatter", fulls, bucket, *rest)

    def _started(self, op: str, values: Any, bucket: str, *rest: Any, **how: Any) -> _Named:
        name = f"{op} {bucket}"
        with record_function(name):
            return _Named(getattr(self._runtime, op)(values, bucket, *rest, **how), name)

    def wait(self, started: _Named) -> Tensor:
        with record_function(f"wait {started.name}"):
            return self._runtime.wait(started.pending)

    def gather(self, x: Tensor, bucket: str, *rest: Any) -> Tensor:
        with record_function(f"gather {bucket}"):
            return self._runtime.gather(x, bucket, *rest)

    def scatter(self, x: Tensor, bucket: str, *rest: Any) -> Tensor:
        with record_function(f"scatter {bucket}"):
            return self._runtime.scatter(x, bucket, *rest)

    def all_reduce(self, x: Tensor, op: str, axis: str) -> Tensor:
        with record_function(f"all_reduce {axis}"):
            return self._runtime.all_reduce(x, op, axis)

    def all_reduce_list(self, values: Sequence[Tensor], op: str, axis: str) -> list[Tensor]:
        with record_function(f"all_reduce {axis}"):
            return self._runtime.all_reduce_list(values, op, axis)

    def adamw(self, params: Any, *rest: Any) -> Any:
        with record_function(f"adamw {len(params)} leaves"):
            return self._runtime.adamw(params, *rest)

    def adamw_(self, params: Any, *rest: Any) -> None:
        with record_function(f"adamw {len(params)} leaves"):
            self._runtime.adamw_(params, *rest)


def named(runtime: Any) -> Any:
    """The runtime, `Profiled` while a profile of torch is taken: names cost 20 microseconds each."""
    return Profiled(runtime) if torch.autograd.profiler._is_profiler_enabled else runtime
