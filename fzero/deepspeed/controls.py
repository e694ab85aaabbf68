"""Controls: what DeepSpeed's engine lets a loop change, and the attributes of its module."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.deepspeed.absent import refuse_method
from fzero.deepspeed.settings import Settings
from fzero.deepspeed.status import Status

_log = logging.getLogger("fzero")
_STRUCTURE = ("parameters", "named_parameters", "modules", "named_modules", "children", "named_children", "config")
"""Attributes of a module that need no values."""


class Controls(Status):
    """The part of an engine that changes how it goes on."""

    module: nn.Module
    _sums: Any
    _open: Any
    _is_held = False  # within no_sync
    _has_noted_rows = False

    def _prepare(self, settings: Settings) -> None:
        raise NotImplementedError

    @property
    def gradients(self) -> Any:
        """The sums of gradients since the last update, times the loss scale: a tree like `params`, or None."""
        return self._sums

    @gradients.setter
    def gradients(self, sums: Any) -> None:
        self._sums = sums

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context of several batches without `step`, which it refuses. Gradients are the same as outside: a program
        adds slices, so that each batch sends its gradients."""
        if self._is_held:
            raise FzeroError("engine.no_sync", "is entered twice", "leave the first one before")
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    coalesce_grad_reduction = no_sync

    @check_arguments
    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Let inductor compile the programs from now on: `fzero.shard(compile=True)`.

        Raises:
            FzeroError: for another backend, and for options.
        """
        if backend != "inductor" or compile_kwargs or schedule is not None:
            problem = f"got backend {backend!r}, compile_kwargs {compile_kwargs!r}, schedule {schedule!r}"
            raise FzeroError("engine.compile", problem, "call engine.compile() without arguments")
        self._prepare(self.settings._replace(compile=True))

    @property
    def is_compiled(self) -> bool:
        return self.settings.compile

    @check_arguments
    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Take more or fewer batches for an update, of the size that they have.

        Raises:
            FzeroError: for a size that batches of all ranks do not divide; between `backward` and an update.
        """
        rows = self.settings.micro_batch_size * self.world_size
        if train_batch_size < 1 or train_batch_size % rows:
            problem = f"is {train_batch_size}, and a batch of all ranks has {rows} examples"
            raise FzeroError("set_train_batch_size", problem, f"give a multiple of {rows}")
        self._resize("set_train_batch_size", self.settings.micro_batch_size, train_batch_size // rows)

    @check_arguments
    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Take batches of another size, as many for an update as before. Raises as `set_train_batch_size`."""
        if micro_batch_size < 1:
            raise FzeroError("set_train_micro_batch_size", f"is {micro_batch_size}", "give at least 1")
        self._resize("set_train_micro_batch_size", micro_batch_size, self.settings.accumulation_steps)

    def _resize(self, where: str, micro: int, steps: int) -> None:
        if self._sums is not None or self._open is not None:
            raise FzeroError(where, "is called between engine(...) and an update", "call it behind the step")
        has_new_programs, total = steps != self.settings.accumulation_steps, micro * steps * self.world_size
        self.settings = self.settings._replace(train_batch_size=total, micro_batch_size=micro, accumulation_steps=steps)
        if has_new_programs:
            self._prepare(self.settings)

    def _note_rows(self, rows: int | None) -> None:
        """Log the first batch that has another number of rows than the configuration says. It counts as one batch."""
        wanted = self.settings.micro_batch_size * len(self._on.numbers)
        if rows in (None, wanted) or self._has_noted_rows or self.global_rank:
            return
        self._has_noted_rows = True
        text = "fzero.deepspeed: a batch has %d rows, and the configuration says %d: its mean loss counts as one batch"
        _log.info(text, rows, wanted)

    def empty_partition_cache(self) -> None:
        """Nothing: no parameter stays whole between two calls."""

    def destroy(self) -> None:
        """Drop gradients and compiled programs. State stays, and the process group."""
        self._sums = self._open = None
        self._prepare(self.settings)

    def __getattr__(self, name: str) -> Any:
        if name in _STRUCTURE and "module" in self.__dict__ and hasattr(self.module, name):
            return getattr(self.module, name)
        raise refuse_method("engine", name, dir(type(self)))
