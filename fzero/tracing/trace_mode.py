"""The trace mode: sees each operation of a step as it is written down."""

from __future__ import annotations

import keyword
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.traceback import get_current_meta, preserve_node_meta, set_stack_trace
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.base.errors import FzeroError
from fzero.program.records import record
from fzero.tracing.user_line import running_user_line
from fzero.values import regions

_aten = torch.ops.aten


class TraceMode(TorchDispatchMode):
    """Within, while tracing, each node's `stack_trace` becomes the user's line that is running, it is marked with the
    `regions` that have been entered, and what torch would write down wrongly is put right.

    Raises:
        FzeroError: for operations that cannot be in a program.
    """

    def __enter__(self) -> TraceMode:
        self._preserved = preserve_node_meta()
        self._preserved.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._preserved.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line, kwargs = running_user_line(), kwargs or {}
        set_stack_trace([line])
        regions.annotate(get_current_meta(), regions.here())
        _check_call(line, func, kwargs)
        if record(func).perform is not None:
            args = tuple(_unknown(arg) for arg in args)
        if func is _aten._efficientzerotensor.default:  # derivatives of forward mode: zeros that traces lose
            func = _aten.zeros.default
        return func(*args, **kwargs)


def _unknown(arg: Any) -> Any:
    """An argument for one of our operations, which have no kernels: of a value that it knows, like `torch.tensor(2.0)`,
    torch would compute the result while it traces. It knows only values of one element."""
    if not isinstance(arg, FakeTensor) or arg.constant is None:
        return arg
    return arg.expand(2, *arg.shape).select(0, 0)


def _check_call(line: str, func: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a generator, whose draws have an order that a program has not, and what torch cannot write down."""
    if kwargs.get("generator") is not None:
        raise FzeroError(
            line,
            "a generator is given, but what a step draws follows from its seed alone",
            "leave it out; torch.manual_seed and torch.get_rng_state seed and save the steps' draws",
        )
    if keyword.iskeyword(func._overloadname):
        raise FzeroError(line, f"torch cannot trace {func}, whose name is no name in Python", "draw with torch.randint")
