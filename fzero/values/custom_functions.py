"""Custom `torch.autograd.Function`s under torch.func that torch refuses there, or differentiates wrongly:

* A combined forward, as torch's docs call it: `forward(ctx, ...)` without `setup_context`. torch.func refuses it.
* A backward marked `once_differentiable`. torch.func takes its second derivative for zero; here it is refused.
* `torch.no_grad()` around `apply`, which torch.func honours in the innermost transform only.
* An operation of `torch.library` with `register_autograd`. torch.func refuses it, because torch makes its derivative a
  Function with a combined forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx, once_differentiable

from fzero.base import torch_private, torch_private_functions
from fzero.base.errors import FzeroError
from fzero.base.reachable import walk
from fzero.values.functions import is_sharded

_ONCE = once_differentiable(lambda ctx: None).__code__
"""The code of every backward that torch's `once_differentiable` made."""


def take_custom_functions() -> AbstractContextManager[None]:
    """A context in which `Function.apply` does under torch.func what it does outside of torch.func."""
    return torch_private_functions.replace_custom_call(_call, _differentiate_outside)


def _call(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    """What `function.apply(*args, **kwargs)` returns under torch.func."""
    if function.setup_context != Function.setup_context:
        return _call_separate(_refuse_twice(function), args, kwargs)
    if torch_private.in_vmap():
        problem = "vmap maps over an autograd Function whose forward takes ctx"
        way_out = "write forward without ctx, setup_context(ctx, inputs, output), and generate_vmap_rule = True"
        raise FzeroError(_name(function), problem, way_out)
    given = _bind(function, args, kwargs)
    args = _gather(given)
    leaves = [torch_private.unwrap(x) for leaf, x in zip(_flatten(given), _flatten(args)) if is_sharded(leaf)]
    versions = list(map(torch_private.version_of, leaves))
    call = _Call(function, args)
    if versions != list(map(torch_private.version_of, leaves)):
        problem = "forward of an autograd Function writes into a leaf, and leaves are immutable"
        raise FzeroError(_name(function), problem, "write into leaf.clone()")
    outputs = _call_separate(call.as_function(), args, {}) if call.n_outputs else ()
    return call.fill(call.result, args, outputs)


def _call_separate(function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch.func returns; without derivatives under no_grad, which torch.func ignores in outer transforms."""
    result = torch_private_functions.custom_function_call(function, *args, **kwargs)
    if torch.is_grad_enabled() or not torch_private.in_second_order() or torch_private.in_forward_mode():
        return result
    given = {id(x) for x in _flatten(args)}
    return torch_private.map_pytree(lambda x: x.detach() if isinstance(x, Tensor) and id(x) not in given else x, result)


def _differentiate_outside(function: type[Function]) -> type[Function]:
    """`function` for one transform, in the kernel of an operation: outer transforms differentiate its forward."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(enabled), torch_private_functions.set_forward_mode(True):
            return function.forward(*args, **kwargs)

    enabled = torch.is_grad_enabled()
    return _make_function(function.__name__, function, forward=forward)


def _refuse_twice(function: type[Function]) -> type[Function]:
    """A separate Function whose backward is called by `_differentiate`, where that makes a difference."""
    if not _is_once(function.backward):
        return function

    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        return _differentiate(function, ctx, cotangents)

    return _make_function(function.__name__, function, backward=backward)


def _make_function(name: str, base: type[Function], **methods: Callable[..., Any]) -> type[Function]:
    return type(name, (base,), {key: staticmethod(method) for key, method in methods.items()})


def _bind(function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments by position: torch gives them so to a combined forward."""
    bound = inspect.signature(function.forward).bind(None, *args, **kwargs) if kwargs else None
    if bound is not None and bound.kwargs:
        problem = f"apply of an autograd Function gets {', '.join(bound.kwargs)} by name"
        raise FzeroError(_name(function), problem, "give all arguments of forward by position")
    return args if bound is None else bound.args[1:]


def _flatten(given: Any) -> list[Any]:
    return torch_private.pytree_leaves(given, is_leaf=is_sharded)


def _gather(given: Any) -> Any:
    """A pytree with the full tensors of its leaves."""
    return torch_private.map_pytree(lambda x: x.full_tensor() if is_sharded(x) else x, given, is_leaf=is_sharded)


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor: the position among the inputs of a call, or among its outputs."""

    is_input: bool
    index: int


class _Call:
    """A call of a combined forward, which runs here, once, with a ctx that records.

    `as_function` is the separate form of the Function for this call. Its outputs are what the forward computed: the
    tensors among the results, and behind them the other tensors that ctx holds, which have no derivative. So each
    transform of torch.func wraps them, and gives them to backward in a ctx of its own.

    `result` is the template of what `apply` returns: a `_Place` stands for each tensor, also inside of containers.
    """

    def __init__(self, function: type[Function], args: tuple[Any, ...]) -> None:
        ctx: Any = FunctionCtx()
        ctx.needs_input_grad = tuple(_has_derivative(x) for x in args)
        with torch.no_grad(), torch_private_functions.set_forward_mode(False):
            result, state = _gather((function.forward(ctx, *args), vars(ctx)))
        state.pop("needs_input_grad", None)
        marked, dirty = state.pop("non_differentiable", ()), state.get("dirty_tensors", ())
        results = result if isinstance(result, tuple) else (result,)
        outputs = [x for x in results if isinstance(x, Tensor)]
        inputs = {id(x): _Place(True, i) for i, x in enumerate(_flatten(args)) if isinstance(x, Tensor)}
        places = {id(x): _Place(False, i) for i, x in enumerate(outputs)}
        if len(places) < len(outputs):
            problem = "forward of an autograd Function returns one tensor twice"
            raise FzeroError(_name(function), problem, "return it once, or a clone of it")

        def place(x: Any) -> Any:
            """The place of a tensor, of an input where it is both; what the forward did not make stands for itself."""
            if isinstance(x, Tensor) and id(x) not in inputs and id(x) not in places and not _has_derivative(x):
                places[id(x)] = _Place(False, len(outputs))
                outputs.append(x)
            at = inputs.get(id(x)) or places.get(id(x))
            if at is None and torch_private.in_second_order():
                _refuse_constant(function, x)
            return at or x

        self._function, self.n_outputs = function, len(outputs)
        self._is_output = [isinstance(x, Tensor) for x in results]
        template = tuple(places.get(id(x), x) for x in results)
        template, self._state = torch_private.map_pytree(place, (template, state))
        self.result = template if isinstance(result, tuple) else template[0]
        self._marked = [places[id(x)].index for x in marked if id(x) in places]
        self._marked += range(self.n_outputs, len(outputs))
        self._n_saved = len(outputs) - self.n_outputs
        self._dirty = {inputs[id(x)] for x in dirty if id(x) in inputs}
        self._values = [inputs.get(id(x), torch_private.unwrap(x)) for x in outputs]

    def fill(self, template: Any, inputs: Any, outputs: Sequence[Tensor]) -> Any:
        """A template with tensors in their places."""
        flat = _flatten(inputs)

        def find(x: Any) -> Any:
            return (flat if x.is_input else outputs)[x.index] if isinstance(x, _Place) else x

        return torch_private.map_pytree(find, template)

    def as_function(self) -> type[Function]:
        """The separate form of the Function, for one call."""
        return _make_function(
            self._function.__name__,
            Function,
            forward=self._forward,
            setup_context=self._setup_context,
            backward=self._backward,
            jvp=self._jvp,
        )

    def _forward(self, *args: Any) -> tuple[Tensor, ...]:
        """All outputs, without the wrappers of any transform. An input is returned as a view, as by autograd."""
        given = _flatten(args)

        def take(x: Any) -> Tensor:
            if not isinstance(x, _Place):
                return x
            return given[x.index] if x in self._dirty else given[x.index].view_as(given[x.index])

        values = tuple(map(take, self._values))
        self._values.clear()  # the garbage collector frees classes late
        return values

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        for name, value in self.fill(self._state, inputs, outputs).items():
            setattr(ctx, name, value)
        ctx.mark_non_differentiable(*(outputs[i] for i in self._marked))

    def _backward(self, ctx: Any, *cotangents: Tensor | None) -> Any:
        given = iter(cotangents)
        of_results = [next(given) if is_output else None for is_output in self._is_output]
        return _differentiate(self._function, ctx, of_results)

    def _jvp(self, ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        result = self._function.jvp(ctx, *tangents)
        results = result if isinstance(result, tuple) else (result,)
        of_outputs = [x for x, is_output in zip(results, self._is_output) if is_output]
        return (*of_outputs, *[None] * self._n_saved)


def _refuse_constant(function: type[Function], held: Any) -> None:
    """Refuse what ctx holds where a second derivative would take it for a constant."""
    if any(_has_derivative(x) for _, x in walk("", held)):
        problem = "ctx of an autograd Function holds a tensor with a derivative that is no argument of apply"
        raise FzeroError(_name(function), problem, "give it to apply, and then to ctx.save_for_backward")


def _differentiate(function: type[Function], ctx: Any, cotangents: Sequence[Tensor | None]) -> Any:
    """What the backward of `function` returns. A derivative of that is refused where backward says that it has none."""
    backward = function.backward if function.vjp is Function.vjp else function.vjp
    args = [list(cotangents)] if getattr(function, "boxed_grads_call", False) else cotangents
    if not _is_once(backward):
        return backward(ctx, *args)
    used = [x for x in _flatten((cotangents, ctx.saved_tensors, vars(ctx))) if _has_derivative(x)]
    with torch.no_grad():
        result = backward(ctx, *args)
    if not torch_private.depth() and not any(torch_private.unwrap(x).requires_grad for x in used):
        return result
    gradients = list(result) if isinstance(result, tuple) else [result]
    at = [i for i, x in enumerate(gradients) if isinstance(x, Tensor)]
    if not at:
        return result
    for i, x in zip(at, _Once.apply(_name(function), len(at), *(gradients[i] for i in at), *used)):
        gradients[i] = x
    return tuple(gradients)


class _Once(Function):
    """`apply(where, n, *tensors)` returns the first n tensors. They are computed from the others, and a derivative of
    them is refused."""

    @staticmethod
    def forward(where: str, n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[:n]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.where = inputs[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        problem = "a second derivative of an autograd Function whose backward is marked once_differentiable"
        raise FzeroError(ctx.where, problem, "write a backward of differentiable operations, and take the mark away")

    jvp = backward


def _is_once(backward: Callable[..., Any]) -> bool:
    return getattr(backward, "__code__", None) is _ONCE


def _has_derivative(x: Any) -> bool:
    """Whether a transform, or autograd outside of transforms, differentiates by a tensor."""
    return isinstance(x, Tensor) and torch_private_functions.requires_grad(x.local if is_sharded(x) else x)


def _name(function: type[Function]) -> str:
    """The name of a Function and the place of its forward."""
    code = getattr(inspect.unwrap(function.forward), "__code__", None)
    return function.__qualname__ + (f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else "")
