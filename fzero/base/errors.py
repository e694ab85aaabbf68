"""The one exception of fzero.

Every refusal is an `FzeroError`. The message reads

    <leaf path or key>: <what is wrong, with both numbers>; <the way out>

A traceback shows the error's code below the message: docs/errors.md lists the errors of each code.
"""

from __future__ import annotations

import sys
from typing import Any

_PACKAGE = __name__.partition(".")[0] + "."


class FzeroError(ValueError):
    """Bad input. The message names the leaf (`where`), then the `problem` with its numbers, then the `way_out`.

    `code` is the module of fzero that raised it, such as "values.loops"; empty for an error that other code made.
    """

    def __init__(self, where: str, problem: str, way_out: str = "") -> None:
        message = f"{where}: {problem}" if where else problem
        super().__init__(f"{message}; {way_out}" if way_out else message)
        self.where, self.problem, self.way_out = where, problem, way_out
        spec = sys._getframe(1).f_globals.get("__spec__")
        maker = spec.name if spec is not None else ""  # fzero.__main__ under `python -m fzero`
        self.code = maker.removeprefix(_PACKAGE) if maker.startswith(_PACKAGE) else ""
        if self.code:
            self.add_note(f"[{self.code}] docs/errors.md says what leads to errors of this code, and the ways out")

    def __reduce__(self) -> tuple[type, tuple[str, str, str], dict[str, Any]]:
        # pickle calls an exception's class with `args`, which is the joined message: give the three parts instead
        return type(self), (self.where, self.problem, self.way_out), self.__dict__
