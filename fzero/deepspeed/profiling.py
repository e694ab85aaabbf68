"""Profiling: the seconds of the parts of an update, and what its programs compute in them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fzero.base.text_files import write_text

_log = logging.getLogger("fzero")
GRADIENTS, UPDATE = "forward and backward", "update"
"""The two parts of an update. A program computes forward and backward pass together."""


class Profiler:
    """The clock of an engine. `options` is the block `flops_profiler` of a configuration, or None.

    With `always` it measures each update. Else it measures the update behind `profile_step` updates. To measure it
    waits for the device.
    """

    def __init__(self, options: Mapping[str, Any] | None, always: bool, device: torch.device) -> None:
        self._options, self._always, self._device = options, always, device
        self._seconds: dict[str, float] = {}
        self._batch: tuple[Any, Any] | None = None  # of the update that is profiled

    @contextmanager
    def measure(self, part: str, step: int, *batch: Any) -> Iterator[None]:
        """Add the seconds inside of the context to a part of the update behind `step` updates."""
        is_profiled = self._options is not None and step == self._options["profile_step"]
        if not (self._always or is_profiled):
            yield
            return
        if is_profiled and batch:
            self._batch = batch[0], batch[1]
        began = self._read_clock()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + self._read_clock() - began

    def write(self, engine: Any) -> None:
        """Say at rank 0 what was measured since the last update, and begin anew."""
        seconds, batch = self._seconds, self._batch
        self._seconds, self._batch = {}, None
        if engine.global_rank or not seconds:
            return
        if self._always:
            parts = ", ".join(f"{part} {1000 * value:.2f} ms" for part, value in seconds.items())
            _log.info("step %d: %s", engine.global_steps, parts)
        if batch is not None and self._options is not None:
            text = render_profile(engine, engine.report(*batch[0], **batch[1]).flops, seconds, self._options)
            _put(text, self._options["output_file"])

    def _read_clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def render_profile(
    engine: Any, flops: Mapping[str, int], seconds: Mapping[str, float], options: Mapping[str, Any]
) -> str:
    """The profile of an update: `flops` of one rank in a batch by layer, and the seconds of the update's parts. Layers
    have the most flops first: all of them with `detailed`, else `top_modules`."""
    batches, total = engine.gradient_accumulation_steps(), sum(flops.values())
    layers = sorted(flops.items(), key=lambda item: -item[1])
    layers = layers if options["detailed"] else layers[: options["top_modules"]]
    spent = seconds.get(GRADIENTS, 0.0)
    rows = [
        ("ranks", f"{engine.world_size}"),
        ("examples of a rank in a batch", f"{engine.train_micro_batch_size_per_gpu()}"),
        ("batches in an update", f"{batches}"),
        ("parameters of the model", f"{sum(x.numel() for x in engine.module.parameters()):,}"),
        ("flops of a rank in a batch, forward and backward", f"{total:,}"),
        ("seconds of forward and backward, all batches", f"{spent:.6f}"),
        ("flops a second of a rank, forward and backward", f"{total * batches / spent:.3e}" if spent else "unknown"),
        ("seconds of the update", f"{seconds.get(UPDATE, 0.0):.6f}"),
        *((f"  {name}", f"{count:,} flops, {100 * count / total:.1f} %") for name, count in layers),
    ]
    width = max(len(name) for name, _ in rows)
    head = f"profile of update {options['profile_step'] + 1}: what is computed twice counts twice"
    return "\n".join([head, *(f"{name:<{width}}  {value}" for name, value in rows)]) + "\n"


def _put(text: str, path: str | None) -> None:
    """Print a text, or write it to a file, as DeepSpeed does."""
    if path:
        write_text("flops_profiler.output_file", path, text, parents=True)
    else:
        sys.stdout.write(text)
