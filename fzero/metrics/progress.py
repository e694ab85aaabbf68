"""Progress of what takes long before and between steps, for a callback."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.progress import WorkProgress, watch


@check_arguments
def progress(callback: Callable[[WorkProgress], object], *, every: float = 0.5) -> AbstractContextManager[None]:
    """A block in which `callback` hears how far long work is: tracing, passes, compiling, searching, planning,
    building, reading and writing.

        with fzero.metrics.progress(print):
            params = fzero.load_safetensors("model", mesh=mesh, like=like)

    It takes one argument, whose fields are `work`, `name`, `done`, `total` (None where it is not known), `units`,
    `seconds` and `at`, and whose text is a line. Each work calls it `every` seconds behind its last call, however long
    that took, and at the work's last unit, on this rank and in the thread of the work: of a save with `wait=False` in
    the thread that writes. An exception of the callback ends the work as an error of this rank. Blocks may stand in
    each other: each callback hears of the work. Work that a callback does itself is not told.

    Raises:
        FzeroError: for seconds that are negative, or no number.
    """
    if not every >= 0:
        raise FzeroError("every", f"is {every}", "give seconds, 0 or more")
    return watch(callback, every)
