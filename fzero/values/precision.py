"""Precision: the dtypes in which a loss is computed, its gradients are averaged, and its results are returned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.values.functions import is_sharded
from fzero.values.quantized import map_quantized_leaves

_NARROW = (torch.float16, torch.bfloat16)
_DTYPES = (*_NARROW, torch.float32, torch.float64)


@check_arguments
def precision(
    compute: torch.dtype, *, reduce: torch.dtype | None = None, output: torch.dtype | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: `fn(params, *args)` computed in the dtype `compute` (FSDP2's `MixedPrecisionPolicy`).

        loss = fzero.precision(torch.bfloat16, reduce=torch.float32, output=torch.float32)(loss_fn)
        value, grads = fzero.value_and_grad(loss)(params, batch)

    * `compute`: the floating tensors of all arguments are cast to it. A sharded leaf is cast before it is gathered, so
      gathers move `compute`. Gradients have the dtype of their leaves.
    * `reduce`: in a sharded step gradients of the leaves are averaged over ranks in it. None: in `compute`.
    * `output`: floating tensors of the result are cast to it. None: as they are.

    Raises:
        FzeroError: for a dtype that is not float16, bfloat16, float32 or float64; where float16 and bfloat16 meet,
            naming the leaf.
    """
    for name, dtype in (("compute", compute), ("reduce", reduce), ("output", output)):
        if dtype not in _DTYPES and (dtype is not None or name == "compute"):
            known = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
            raise FzeroError(f"precision: {name}", f"is {dtype!r}", f"give one of torch's {known}")
        if dtype is not None:
            _check_narrow(f"precision: {name}", dtype, compute)

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn, updated=())
        def computed(*args: Any, **kwargs: Any) -> Any:
            args = _cast(args, compute, check=True, reduce=reduce)
            result = fn(*args, **_cast(kwargs, compute, check=True))
            return result if output is None else _cast(result, output)

        return computed

    return decorate


def _cast(
    values: tree.Tree, dtype: torch.dtype, *, check: bool = False, reduce: torch.dtype | None = None
) -> tree.Tree:
    """The values with their floating tensors in a dtype. The gradients of sharded leaves are averaged in `reduce`."""

    def cast(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        if check:
            _check_narrow(path, leaf.dtype, dtype)
        if is_sharded(leaf) and reduce is not None:
            leaf.on.note_reduce_dtype(leaf.path, reduce)
        return leaf.to(dtype)

    return tree.map_with_path(cast, map_quantized_leaves(lambda leaf: cast(leaf.path, leaf), values))


def _check_narrow(where: str, given: torch.dtype, compute: torch.dtype) -> None:
    if given in _NARROW and compute in _NARROW and given != compute:
        problem = f"is {given} beside a compute dtype of {compute}: each loses what the other keeps"
        raise FzeroError(where, problem, "use one of both, or float32 between them")
