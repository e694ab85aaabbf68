"""The user's line: which line of user code a traced node, or an exception, comes from."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from functools import cache, lru_cache
from types import FrameType, TracebackType
from typing import Any

import optree
import torch
from torch.fx.traceback import preserve_node_meta, set_stack_trace
from torch.utils._python_dispatch import TorchDispatchMode

_LIBRARIES = tuple(os.path.dirname(os.path.abspath(f)) + os.sep for f in (torch.__file__, optree.__file__, __file__))


class UserLines(TorchDispatchMode):
    """Within, while tracing, each node's `stack_trace` becomes the user's line that is running."""

    def __enter__(self) -> UserLines:
        self._preserved = preserve_node_meta()
        self._preserved.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._preserved.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        set_stack_trace([_running_user_line()])
        return func(*args, **(kwargs or {}))


def user_line_of_error(tb: TracebackType | None) -> str:
    """`file:line in function: code` of the innermost frame outside the libraries; "" where there is none."""
    for frame in reversed(traceback.extract_tb(tb)):
        if _is_user(frame.filename):
            return _line(frame.filename, frame.lineno or 0, frame.name)
    return ""


def _running_user_line() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if _is_user(frame.f_code.co_filename):
            return _line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return ""


@cache
def _is_user(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, sys.base_prefix + os.sep + "lib" + os.sep, "<"))


@lru_cache(maxsize=4096)
def _line(file: str, line: int, function: str) -> str:
    return f"{file}:{line} in {function}: {linecache.getline(file, line).strip()}"
