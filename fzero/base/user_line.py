"""The user's line: the line of user code that is running, or that an exception comes from; and who calls a function.

User code is every file outside of fzero, torch, optree, typing_extensions (whose `deprecated` wraps functions of torch)
and the lib folder of the Python installation.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from functools import cache, lru_cache
from types import FrameType, TracebackType

import optree
import torch

_HELPERS = {"_all_true_or_runtime_assert", "__torch_function__"}
"""Functions that ask for others: one of torch, since 2.15, and what a function mode, such as `torch.device`, runs."""
_WRAPPER = os.sep + "typing_extensions.py"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(
    folder + os.sep
    for folder in (*(os.path.dirname(os.path.abspath(f)) for f in (torch.__file__, optree.__file__)), _PACKAGE)
)


def user_line_of_error(tb: TracebackType | None) -> str:
    """`file:line in function: code` of a traceback's innermost frame of user code; "" where there is none."""
    for frame in reversed(traceback.extract_tb(tb)):
        if _is_user(frame.filename):
            return _format_line(frame.filename, frame.lineno or 0, frame.name)
    return ""


def current_user_line() -> str:
    """`file:line in function: code` of the innermost running frame of user code; "" where there is none."""
    frame: FrameType | None = sys._getframe(2)  # not this function, nor the trace mode that calls it
    while frame is not None:
        if _is_user(frame.f_code.co_filename):
            return _format_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return ""


def place_of_caller(above: int) -> str:
    """The module and function of a frame so many above the caller's, or of the one for which it asks:
    `torch.distributions.constraints.check`."""
    frame = sys._getframe(above + 1)
    while frame.f_code.co_name in _HELPERS and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}"


@cache
def _is_user(file: str) -> bool:
    is_library = file.startswith((*_LIBRARIES, sys.base_prefix + os.sep + "lib" + os.sep, "<"))
    return not is_library and not file.endswith(_WRAPPER)


@lru_cache(maxsize=4096)
def _format_line(file: str, line: int, function: str) -> str:
    return f"{file}:{line} in {function}: {linecache.getline(file, line).strip()}"
