"""CallMode: a torch function mode that sees each call of a torch function by a step, above autograd, during a trace."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from torch.overrides import TorchFunctionMode

from fzero.base.errors import FzeroError
from fzero.base.torch_private import DataDependentOutputException, assert_later
from fzero.tracing.kinds import Kinds
from fzero.tracing.substitutes import SUBSTITUTES
from fzero.tracing.user_line import current_user_line
from fzero.values.sharded import Sharded

_CHECKS = {
    ("torch.distributions.distribution", "__init__"),
    ("torch.distributions.distribution", "_validate_sample"),
    ("torch.distributions.constraints", "check"),
}
"""(module, function) of torch that asks for the truth of a tensor only to raise an error where it is false."""

_HINTS = {("torch.nn.modules.transformer", "_detect_is_causal_mask")}
"""(module, function) of torch that asks for the truth of a tensor only to choose a faster way where it is true."""


class CallMode(TorchFunctionMode):
    """While this mode is active,

    * state that the step captured is refused: a rank's part of it would be a constant of the program;
    * a tensor is not converted to numpy, which would read memory that a traced tensor does not have;
    * a check of input by torch is a node of the program, which raises when the step runs: a trace has no values;
    * a function with `out=` writes into that;
    * a branch of torch that only saves time is not taken where it depends on values;
    * `one_hot` with a number of classes needs no values, and neither do the functions of `substitutes`.
    """

    def __init__(self, kinds: Kinds) -> None:
        super().__init__()
        self._kinds = kinds

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        for given in args:
            for x in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(x, Sharded) and not x.on.is_tracing:
                    _refuse_capture(x)
        if name == "__bool__":
            return _check_later(func, args[0])
        if name in ("numpy", "__array__"):
            problem = "numpy reads the elements of a tensor, which a trace does not have"
            raise FzeroError(current_user_line(), problem, "compute with torch, or convert the tensor outside the step")
        if name == "one_hot":
            return _one_hot(func, *args, **kwargs)
        if name in SUBSTITUTES:
            return SUBSTITUTES[name](func, *args, **kwargs)
        if isinstance(kwargs.get("out"), Tensor):
            return _write_out(self._kinds, func, args, kwargs)
        return func(*args, **kwargs)


def _write_out(kinds: Kinds, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function with `out=`. torch traces some, such as `linalg.matrix_rank`, without a write: it is made here."""
    out, last = kwargs["out"], kinds.find_last()
    result = func(*args, **kwargs)
    if isinstance(out, Sharded) or kinds.has_write(last):
        return result
    return out.copy_(func(*args, **{**kwargs, "out": None}))


def _refuse_capture(x: Sharded) -> NoReturn:
    problem = f"{x.path or 'a leaf'} is state that the step captured, and it would be a constant of the program"
    raise FzeroError(current_user_line(), problem, "give it to the step as an argument")


def _check_later(func: Callable[..., Any], x: Tensor) -> bool:
    """The truth of `x`. Where the trace does not know the truth: True for a check of input, False for a hint."""
    try:
        return func(x)
    except DataDependentOutputException:
        frame = sys._getframe(2)
        where = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if where in _HINTS:
            return False
        if where not in _CHECKS:
            raise
        assert_later(_gather(x).detach(), f"{where[1]} of {where[0]} found invalid values")
        return True


def _gather(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, Sharded) else x


def _one_hot(func: Callable[..., Any], x: Tensor, num_classes: int = -1) -> Tensor:
    """`torch.nn.functional.one_hot`. Refuses a class out of range when the step runs."""
    if num_classes < 0:
        return func(x, num_classes)
    x = _gather(x)
    return x.new_zeros((*x.shape, num_classes)).scatter(-1, x.unsqueeze(-1), 1)
