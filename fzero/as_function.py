"""AsFunction: how steps are copied and pickled."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from fzero.base.errors import FzeroError


class AsFunction:
    """A step is copied as a function is: the copy is the step itself. No file keeps its programs and connections."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        problem = "is pickled, and no file keeps the programs and the connections of a step"
        raise FzeroError(repr(self), problem, "pickle the function, and make the step where it runs")
