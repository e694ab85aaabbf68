"""The one exception of fzero.

Every refusal is an `FzeroError`. The message reads

    <leaf path or key>: <what is wrong, with both numbers>; <the way out>
"""

from __future__ import annotations


class FzeroError(ValueError):
    """Bad input. The message names the leaf (`where`), then the `problem` with its numbers, then the `way_out`."""

    def __init__(self, where: str, problem: str, way_out: str = "") -> None:
        message = f"{where}: {problem}" if where else problem
        super().__init__(f"{message}; {way_out}" if way_out else message)
        self.where, self.problem, self.way_out = where, problem, way_out

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        # pickle calls an exception's class with `args`, which is the joined message: give the three parts instead
        return type(self), (self.where, self.problem, self.way_out)
