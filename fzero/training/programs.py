"""Programs: functions that add the gradients of batches, and the programs of functions on a mesh."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from fzero import grad, tree
from fzero.base.arguments import check_arguments
from fzero.base.mesh import VirtualMesh
from fzero.simulation import simulate
from fzero.transform import shard


def make_sums(train: Callable[..., tuple[Tensor, Any]]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`(begin, add)` for `train(params, *args, **kwargs)`, which returns `(share of the loss, output)` of a batch.

    * `begin(params, scale, args, kwargs)` returns `(output, gradients)` of the first batch of an update. `scale` is
      the state of a loss scale, or None.
    * `add(params, sums, scale, args, kwargs)` returns `(output, new sums)`: the sums of gradients with those of a
      further batch.
    """

    def begin(params: Any, scale: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def scaled(params: Any) -> tuple[Tensor, Any]:
            loss, output = train(params, *args, **kwargs)
            return (loss if scale is None else loss.to(torch.float32) * scale.scale), output

        grads, output = grad(scaled, has_aux=True)(params)
        return output, grads

    def add(params: Any, sums: Any, scale: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        output, grads = begin(params, scale, args, kwargs)
        return output, add_sums(sums, grads)

    return begin, add


def add_sums(sums: Any, grads: Any) -> Any:
    """Two trees of gradients, added leaf by leaf."""
    leaves, treedef = tree.flatten(sums)
    return tree.unflatten(treedef, torch._foreach_add(leaves, tree.leaves(grads)))


@check_arguments
def compile_function(
    function: Callable[..., Any], mesh: Any, *, title: str, compile: bool | Literal["graph"] = False, **how: Any
) -> Any:
    """A program for a mesh: on a virtual mesh all ranks run in this process. `how` are keywords of `fzero.shard`.

    Logs call the program `title`, with the names of the function's arguments: a log calls part of an argument
    "argument 3.input_ids".
    """
    named: Any = functools.update_wrapper(functools.partial(function), function)  # the function keeps its own name
    named.__qualname__ = f"{title}({', '.join(inspect.signature(function).parameters)})"
    if isinstance(mesh, VirtualMesh):
        return simulate(named, mesh, **how)
    return shard(named, mesh, compile=compile, **how)
