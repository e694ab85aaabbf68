"""The borders of a layer in a graph of derivatives: where autograd enters the layer, and where it leaves it.

A `run` is a call of a layer, and its `layers` are told of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.base.torch_private import FakeTensor


class EnterLayer(torch.autograd.Function):
    """`(run, *tensors)`, from the operands of a layer that runs to other tensors for the same values. The transpose
    ends the backward pass of the layer: autograd runs it behind all others of the layer, because it was made first."""

    @staticmethod
    def forward(run: Any, *tensors: FakeTensor) -> tuple[Tensor, ...]:
        return tuple(run.layers.repeats.make_again(x) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.run = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.run.layers.end_backward(ctx.run, gradients)
        return None, *gradients


class LeaveLayer(torch.autograd.Function):
    """`(run, *tensors)`, from the results of a layer that runs to other tensors for the same values. The transpose
    begins the backward pass of the layer."""

    forward = staticmethod(EnterLayer.forward)
    setup_context = staticmethod(EnterLayer.setup_context)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        ctx.run.layers.start_backward(ctx.run, cotangents)
        return None, *cotangents


class CopyLayer(torch.autograd.Function):
    """`(run, copy, *tensors)`, from the operands that autograd follows to what `copy()` returns. The transpose is a
    copy, too."""

    @staticmethod
    def forward(run: Any, copy: Callable[[], tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        return copy()

    setup_context = staticmethod(EnterLayer.setup_context)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        return None, None, *ctx.run.layers.copy_backward(ctx.run, cotangents)
