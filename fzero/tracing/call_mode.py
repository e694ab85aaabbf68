"""CallMode: a torch function mode that sees each call of a torch function by a step, above autograd, during a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from torch.overrides import TorchFunctionMode

from fzero.base.errors import FzeroError
from fzero.base.torch_private_functions import HigherOrderOperator
from fzero.base.user_line import current_user_line, place_of_caller
from fzero.ranks.performer import MovePerformer
from fzero.tracing import custom_ops, higher_order
from fzero.tracing.calls import Calls
from fzero.tracing.checks import Checks
from fzero.tracing.kinds import Kinds
from fzero.tracing.readings import Readings
from fzero.tracing.rewrites import REWRITES, set_item
from fzero.values.quantized import is_quantized
from fzero.values.sharded import Sharded


class CallMode(TorchFunctionMode):
    """While this mode is active,

    * state that the step captured is refused: a rank's part of it would be a constant of the program;
    * a tensor is not converted to numpy, which would read memory that a traced tensor does not have;
    * a function with `out=` writes into that;
    * a function of `REWRITES` is what stands there;
    * a higher-order operator of torch is what `higher_order` says, or is refused;
    * a custom operation has its derivative under torch.func;
    * `x.tolist()` is what `readings` say, where the batch alone decides it;
    * `checks` knows which function is running, and `calls` note each, where they are given.
    """

    def __init__(
        self, kinds: Kinds, checks: Checks, readings: Readings, on: MovePerformer, calls: Calls | None = None
    ) -> None:
        super().__init__()
        self._kinds, self._checks, self._readings, self._on, self._calls = kinds, checks, readings, on, calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        returned = self._call(func, args, kwargs or {})
        if self._calls is not None:
            self._calls.note(func, (args, kwargs or {}), returned)
        return returned

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        for given in (*args, *kwargs.values()):
            for x in given if isinstance(given, (list, tuple)) else (given,):
                held = x.codes if is_quantized(x) else x
                if isinstance(held, Sharded) and held.on is not self._on:
                    _refuse_capture(held)
        self._checks.note_call(place_of_caller(1) if name == "__bool__" else name)
        if name in ("numpy", "__array__"):
            problem = "numpy reads the elements of a tensor, which a trace does not have"
            raise FzeroError(current_user_line(), problem, "compute with torch, or convert the tensor outside the step")
        if func is Tensor.tolist and (found := self._readings.read_list(args[0])) is not None:
            return found[0]
        if name == "__setitem__":
            return set_item(func, self._readings.is_decided, *args)
        if name in REWRITES and "out" not in kwargs:
            if "input" in kwargs:  # torch's name of the first argument
                kwargs = dict(kwargs)
                args = (kwargs.pop("input"), *args)
            return REWRITES[name](func, *args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            return higher_order.call(self._kinds, func, args, kwargs)
        operation = custom_ops.find_custom_op(func)
        if operation is not None:
            return custom_ops.call(operation, args, kwargs)
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
    if x.on.is_tracing:
        problem = f"the step uses {x.path or 'a value'} of an earlier trace, which left no data behind"
        raise FzeroError(current_user_line(), problem, "return the value from the step, and pass it in again")
    problem = f"{x.path or 'a leaf'} is state that the step captured, and it would be a constant of the program"
    raise FzeroError(current_user_line(), problem, "give it to the step as an argument")
