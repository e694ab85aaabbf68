"""Dense tensors: the ones with one memory and strides, which fzero cuts, sends and traces."""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.torch_private import FakeTensor, is_wrapper, unwrap


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is neither sparse nor nested nor made of other tensors, as a DTensor is."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and (not is_wrapper(tensor) or isinstance(unwrap(tensor), FakeTensor))


def check_dense(where: str, tensor: Tensor) -> None:
    """Refuse a tensor that is made of other tensors or of indices: a DTensor, a sparse or a nested tensor.

    Raises:
        FzeroError: with the tensor's class or layout, and how to get its elements.
    """
    if is_dense(tensor):
        return
    if tensor.is_nested:
        way_out = "give tensor.to_padded_tensor(0.0), with the lengths or a mask beside it"
        raise FzeroError(where, "is a nested tensor, whose rows have lengths of their own", way_out)
    if tensor.layout is not torch.strided:
        raise FzeroError(where, f"is a {tensor.layout} tensor, which has no strides", "give tensor.to_dense()")
    way_out = "give tensor.full_tensor()" if hasattr(tensor, "full_tensor") else "give a plain torch.Tensor"
    raise FzeroError(where, f"is a {type(tensor).__name__}, which is made of other tensors", way_out)
