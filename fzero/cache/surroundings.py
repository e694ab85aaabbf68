"""Surroundings: settings of the process that a trace depends on, and what a trace reads of the process."""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero.base.torch_private_functions import list_global_hooks, list_modes
from fzero.cache.files import list_files
from fzero.cache.rules import Undescribed

VERSION = 1
"""Of what is stored. A file of another version is as no file."""
_log = logging.getLogger("fzero")


def list_settings(device: torch.device | None) -> list[str]:
    """A line for each setting of Python, of torch and of the machine.

    Raises:
        Undescribed: inside of a mode or of hooks of torch that see each operation of a step.
    """
    modes = list_modes()
    if modes:
        raise Undescribed("the step", f"is called inside of {modes[0]}, which sees its operations")
    backends: Any = torch.backends
    determinism: Any = torch.utils.deterministic
    found = {
        "version": VERSION, "python": sys.version, "torch": torch.__version__, "git": torch.version.git_version,
        "machine": platform.machine(), "cpu": backends.cpu.get_cpu_capability(), "path": sys.path,
        "optimize": sys.flags.optimize, "threads": torch.get_num_threads(), "anomaly": torch.is_anomaly_enabled(),
        "mkldnn": (backends.mkldnn.is_available(), backends.mkldnn.enabled),
        "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic,
                  backends.cudnn.allow_tf32),
        "matmul": (backends.cuda.matmul.allow_tf32, backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
                   backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        "fastpath": backends.mha.get_fastpath_enabled(),
        "einsum": (backends.opt_einsum.is_available(), backends.opt_einsum.enabled, backends.opt_einsum.strategy),
        "fill": determinism.fill_uninitialized_memory,
    }  # fmt: skip
    if device is not None and device.type == "cuda":
        found["cuda"] = torch.version.cuda, torch.cuda.get_device_properties(device), torch.backends.cudnn.version()
    return [f"{name}: {value!r}" for name, value in found.items()]


def list_hooks() -> list[tuple[str, dict[int, Any]]]:
    """`(name, hooks)` of all modules of torch at once."""
    return list_global_hooks()


@dataclass
class Reads:
    """What a trace read of its process: variables of the environment with their values, and the modules that it
    imported. `why` says what it read that nothing can be compared with."""

    variables: dict[str, str | None] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    why: str = ""
    thread: int = field(default_factory=threading.get_ident)
    """The thread of the trace: what others read is no part of it."""


class _Environment(os._Environ):  # type: ignore[type-arg]
    """`os.environ`, while a trace runs."""

    _reads: Reads

    def __getitem__(self, key: str) -> str:
        try:
            value = super().__getitem__(key)
        except KeyError:
            vars(self)["_reads"].variables[key] = None
            raise
        vars(self)["_reads"].variables[key] = value
        return value

    def __iter__(self) -> Iterator[str]:
        vars(self)["_reads"].why = "reads all variables of the environment"
        return super().__iter__()


class _Warnings(logging.Handler):
    def __init__(self, reads: Reads) -> None:
        super().__init__(logging.WARNING)
        self._reads = reads

    def emit(self, record: logging.LogRecord) -> None:
        self._reads.warnings.append(record.getMessage())


_opened: list[Reads] = []  # of the traces that run
_imported: set[str] = set()
"""The modules that traces imported, which a process that takes programs from files may never import."""
_is_watching = False


def _watch_files(event: str, args: tuple[Any, ...]) -> None:
    is_of_trace = bool(_opened) and event == "open" and _opened[-1].thread == threading.get_ident()
    if is_of_trace and isinstance(args[0], (str, bytes)):
        path, mode, flags = os.fsdecode(args[0]), args[1], args[2] or 0
        is_written = "r" not in (mode or "r") or flags & (os.O_WRONLY | os.O_RDWR)
        if (
            not is_written
            and not path.endswith((".py", ".pyc", ".so", ".pth"))
            and not path.startswith(("/dev/", "/proc/", "/sys/"))
        ):
            _opened[-1].why = _opened[-1].why or f"reads the file {path}"


@contextmanager
def record_reads() -> Iterator[Reads]:
    """Record what is read of the process in a block: `Reads` is complete behind it. Replaces the class of `os.environ`
    in the block, and adds a hook of `sys.addaudithook` for good."""
    global _is_watching
    if not _is_watching:
        sys.addaudithook(_watch_files)
        _is_watching = True
    reads, before = Reads(), list_files()
    environment: Any = os.environ
    was, handler = environment.__class__, _Warnings(reads)
    vars(environment)["_reads"] = reads
    environment.__class__ = _Environment
    _log.addHandler(handler)
    _opened.append(reads)
    try:
        yield reads
    finally:
        _opened.remove(reads)
        _log.removeHandler(handler)
        environment.__class__ = was
        vars(environment).pop("_reads", None)
        now = list_files()
        _imported.update(now.keys() - before.keys())
        reads.modules |= {name: now[name] for name in _imported & now.keys()}


def list_own_files() -> dict[str, str]:
    """`list_files` of the modules that no trace imported."""
    return {name: file for name, file in list_files().items() if name not in _imported}
