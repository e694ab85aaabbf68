"""Custom operations of `torch.library` with a backward of their own, for torch.func: torch makes an autograd Function
of them that torch.func does not take."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd import Function

from fzero.base.torch_private import OpOverload, gradient_of, schema_of


def find_custom_op(func: Any) -> Any:
    """The operation that a call of `func` runs, where that is a custom operation with a backward; None elsewhere.

    torch takes only operations of one overload here.
    """
    func = getattr(func, "default", func)
    return func if isinstance(func, OpOverload) and gradient_of(func) is not None else None


def call(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`operation(*args, **kwargs)`, differentiable under torch.func."""
    taken = schema_of(operation).arguments
    if any(argument.kwarg_only for argument in taken) or any(isinstance(x, (list, tuple)) for x in args):
        return operation(*args, **kwargs)  # which torch.func refuses to differentiate
    rest = [kwargs.get(x.name, x.default_value) for x in taken[len(args) :]]
    setup, backward = gradient_of(operation) or (None, None)
    return _make_function(operation, setup, backward).apply(*args, *rest)


@cache
def _make_function(operation: Any, setup: Callable[..., None] | None, backward_fn: Any) -> type[Function]:
    """The autograd Function of an operation, in the form that torch.func takes."""

    class CustomOp(Function):
        generate_vmap_rule = True  # by the vmap of the operation

        @staticmethod
        def forward(*args: Any) -> Any:
            return operation(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if setup is not None:
                setup(ctx=ctx, inputs=inputs, output=output)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return backward_fn(ctx, *grads)

    return CustomOp
