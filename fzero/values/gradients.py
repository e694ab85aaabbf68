"""Gradients: `torch.func.grad` and `grad_and_value`, except that the backward pass frees its graph as it runs.

torch.func keeps the graph for a second derivative, which a training step rarely takes. Nested gradients still work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fzero.base import tree
from fzero.base.ambient import leave_inference_mode
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.base.reachable import find_tensor, walk
from fzero.base.torch_private import unwrap
from fzero.program.refusals import refuse_objective
from fzero.ranks.performer import current_performer
from fzero.values.checkpoint import take_checkpoints
from fzero.values.custom_functions import take_custom_functions
from fzero.values.sharded import Sharded


@check_arguments
def value_and_grad(fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., tuple[Any, Any]]:
    """`g(params, *args) -> (fn(params, *args), gradient)`, the gradient a tree as `params` (JAX's `value_and_grad`).

    `fn` returns a floating 0-d tensor. With `has_aux`, `fn` returns a pair `(value, aux)` with any tree `aux`, and `g`
    returns `((value, aux), gradient)`. A None subtree of `params` (see `fzero.tree.split`) has a None gradient, and so
    has a frozen leaf, a parameter that `requires_grad_(False)` was called for. Composes with torch.func.

    Raises:
        FzeroError: for a leaf of `params` that is not floating; for a value that is not one number; for a value that is
            computed from captured tensors which require grad, and from no leaf of `params`.
    """

    def differentiated(params: tree.Tree, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves, treedef = tree.flatten(params)
        trained = [i for i, leaf in enumerate(leaves) if not is_frozen(leaf)]
        _check_leaves(treedef, leaves, trained)

        rebuild: Callable[[list[Any]], Any]

        def fn_of_leaves(*given: Any) -> Any:
            nonlocal rebuild
            with take_checkpoints():
                result = fn(tree.unflatten(treedef, _replace(leaves, trained, given)), *args, **kwargs)
            value, aux = take_pair("value_and_grad", result, "(value, aux)") if has_aux else (result, None)
            value = value.full_tensor() if isinstance(value, Sharded) else value
            _check_value(value)
            _check_use(fn, value)
            _check_objective(value)
            tensors, rebuild = _take_tensors(aux)
            return value, tensors

        primals = [leaves[i] for i in trained]
        with leave_inference_mode(), take_custom_functions():  # in that mode torch 2.11 takes gradients for zeros
            value, pull_back, tensors = torch.func.vjp(fn_of_leaves, *primals, has_aux=True)  # type: ignore[misc]
            cotangents = pull_back(torch.ones_like(value), retain_graph=False)
        gradient = tree.unflatten(treedef, _replace([None] * len(leaves), trained, cotangents))
        return ((value, rebuild(tensors)) if has_aux else value), gradient

    return differentiated


@check_arguments
def grad(fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """`g(params, *args) -> gradient`; with `has_aux`, `g(params, *args) -> (gradient, aux)`. See `value_and_grad`."""

    def differentiated(params: tree.Tree, *args: Any, **kwargs: Any) -> Any:
        value, gradient = value_and_grad(fn, has_aux)(params, *args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return differentiated


def take_pair(where: str, result: Any, expected: str) -> tuple[Any, Any]:
    """The two values that a user's function returns. `expected` names them.

    Raises:
        FzeroError: for any other result.
    """
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        got = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a {type(result).__name__}"
        raise FzeroError(where, f"the function returned {got}, not two", f"return a pair: {expected}")
    first, second = result
    return first, second


def _take_tensors(aux: tree.Tree) -> tuple[list[Any], Callable[[list[Any]], tree.Tree]]:
    """The tensors of a tree, and `rebuild(tensors)`, the tree with other tensors in their places.

    torch.func takes tensors only as auxiliary output; `aux` may have other leaves.

    Raises:
        FzeroError: for a leaf that holds a tensor where no tree is: torch.func would leave a dead tensor in it.
    """
    leaves, treedef = tree.flatten(aux)
    for i, leaf in enumerate(leaves):
        place = None if isinstance(leaf, Tensor) else find_tensor(leaf)
        if place is not None:
            problem = f"is an object of class {type(leaf).__name__}, which is no tree, and holds a tensor at {place}"
            raise FzeroError(f"aux {tree.dotted(tree.keys(treedef)[i])}", problem, "return its tensors in a dict")
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def rebuild(tensors: list[Any]) -> tree.Tree:
        return tree.unflatten(treedef, _replace(leaves, at, tensors))

    return [leaves[i] for i in at], rebuild


def _replace(values: Sequence[Any], positions: Sequence[int], new: Iterable[Any]) -> list[Any]:
    """`values` with the values at some positions replaced by `new`, in order."""
    replaced = dict(zip(positions, new))
    return [replaced.get(i, value) for i, value in enumerate(values)]


def _check_leaves(treedef: tree.TreeDef, leaves: list[Any], trained: list[int]) -> None:
    if leaves and not trained:
        raise FzeroError(
            "value_and_grad",
            f"each of the {len(leaves)} leaves of its first argument is frozen: its parameter does not require grad",
            "call requires_grad_(True) on what is to be trained, before fzero.lower",
        )
    keys = tree.keys(treedef)
    for i in trained:
        key, leaf = keys[i], leaves[i]
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not (dtype.is_floating_point or dtype.is_complex):
            raise FzeroError(
                tree.dotted(key),
                f"a leaf of {dtype or type(leaf).__name__} has no gradient",
                "keep it out of the first argument, with fzero.tree.split",
            )


def _check_value(value: Any) -> None:
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise FzeroError(
            "value_and_grad", f"the function returned {got}, not one floating number", "return a mean or sum"
        )


def _check_objective(value: Tensor) -> None:
    """Refuse a value that is the part of one rank along a model axis."""
    on = current_performer()
    axes = on.find_differing(value) if on is not None else None
    if axes:
        raise refuse_objective("value_and_grad: the value", axes, "")


def _check_use(fn: Callable[..., Any], value: Tensor) -> None:
    """Refuse a value without a derivative in the function's own argument that has one in captured parameters: the
    function calls a module with the module's own parameters, which no step would train."""
    captured = unwrap(value)
    if value.requires_grad or not captured.requires_grad:
        return
    name = getattr(fn, "__name__", "the function")
    names = (place for place, x in walk(name, fn) if isinstance(x, nn.Parameter) and x.requires_grad)
    code = getattr(fn, "__code__", None)
    line = f" ({code.co_filename}:{code.co_firstlineno} in {name})" if code is not None else ""
    raise FzeroError(
        next(names, name),
        f"{name} uses this parameter, and no leaf of its first argument{line}: its gradient is zero everywhere",
        "call apply(params, ...) of fzero.lower(module) in the place of the module",
    )
