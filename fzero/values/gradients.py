"""Gradients: `torch.func.grad` and `grad_and_value`, except that the backward pass frees its graph as it runs.

torch.func keeps the graph for a second derivative, which a training step rarely takes. Nested gradients still work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.values.sharded import Sharded


def value_and_grad(fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., tuple[Any, Any]]:
    """`g(params, *args) -> (fn(params, *args), gradient)`, the gradient a tree as `params` (JAX's `value_and_grad`).

    `fn` returns a floating 0-d tensor. With `has_aux`, `fn` returns a pair `(value, aux)` with any tree `aux`, and `g`
    returns `((value, aux), gradient)`. A None subtree of `params` (see `fzero.tree.split`) has a None gradient.
    Composes with torch.func.

    Raises:
        FzeroError: for a leaf of `params` that is not floating, or a value that is not one number.
    """

    def differentiated(params: tree.Tree, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves, treedef = tree.flatten(params)
        _check_leaves(treedef, leaves)

        rebuild: Callable[[list[Any]], Any]

        def fn_of_leaves(*given: Any) -> Any:
            nonlocal rebuild
            result = fn(tree.unflatten(treedef, given), *args, **kwargs)
            value, aux = result if has_aux else (result, None)
            value = value.full_tensor() if isinstance(value, Sharded) else value
            _check_value(value)
            tensors, rebuild = _take_tensors(aux)
            return value, tensors

        value, pull_back, tensors = torch.func.vjp(fn_of_leaves, *leaves, has_aux=True)  # type: ignore[misc]
        gradient = tree.unflatten(treedef, pull_back(torch.ones_like(value), retain_graph=False))
        return ((value, rebuild(tensors)) if has_aux else value), gradient

    return differentiated


def grad(fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """`g(params, *args) -> gradient`; with `has_aux`, `g(params, *args) -> (gradient, aux)`. See `value_and_grad`."""

    def differentiated(params: tree.Tree, *args: Any, **kwargs: Any) -> Any:
        value, gradient = value_and_grad(fn, has_aux)(params, *args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return differentiated


def _take_tensors(aux: tree.Tree) -> tuple[list[Any], Callable[[list[Any]], tree.Tree]]:
    """The tensors of a tree, and `rebuild(tensors)`, the tree with other tensors in their places.

    torch.func takes tensors only as auxiliary output; `aux` may have other leaves.
    """
    leaves, treedef = tree.flatten(aux)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def rebuild(tensors: list[Any]) -> tree.Tree:
        replaced = dict(zip(at, tensors))
        return tree.unflatten(treedef, [replaced.get(i, leaf) for i, leaf in enumerate(leaves)])

    return [leaves[i] for i in at], rebuild


def _check_leaves(treedef: tree.TreeDef, leaves: list[Any]) -> None:
    for key, leaf in zip(tree.keys(treedef), leaves):
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
