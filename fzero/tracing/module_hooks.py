"""Module hooks: what a trace does for modules of torch whose forward asks for the values of tensors."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fzero.base.torch_private import BatchNormBase, assert_later


class ModuleHooks(ExitStack):
    """Within this context

    * a batch norm without momentum computes its cumulative average from the number of batches as a tensor;
    * an `nn.TransformerEncoder` returns what it does with nested tensors, which a trace cannot have.
    """

    def __enter__(self) -> ModuleHooks:
        super().__enter__()
        self._averages: dict[Any, tuple[Tensor, Tensor]] = {}  # of the batch norms whose forward is running
        self._encoders: set[nn.Module] = set()
        self.callback(lambda: [self._restore(module) for module in list(self._averages)])
        self.enter_context(register_module_forward_pre_hook(self._before))
        self.enter_context(register_module_forward_hook(self._after))
        return self

    def _before(self, module: Any, args: Any) -> None:
        if _is_cumulative(module):
            self._averages[module] = mean, var = module.running_mean, module.running_var
            # With a momentum of 1 the forward computes the statistics of the batch. It does so in copies: autograd
            # saves what the forward writes into, and refuses another write.
            module.running_mean, module.running_var, module.momentum = mean.clone(), var.clone(), 1.0
        forward = getattr(type(module), "forward", None)  # scripted modules have none in their class
        if forward is nn.TransformerEncoder.forward and module not in self._encoders:
            # A hook of all modules that takes keyword arguments would leave an entry in a table of torch for ever.
            self._encoders.add(module)
            self.enter_context(module.register_forward_hook(_zero_padding, with_kwargs=True))

    def _after(self, module: Any, args: Any, output: Any) -> None:
        if module in self._averages:
            statistics = module.running_mean, module.running_var
            for average, new in zip(self._restore(module), statistics):
                average.lerp_(new, module.num_batches_tracked.to(new.dtype).reciprocal())

    def _restore(self, module: Any) -> tuple[Tensor, Tensor]:
        module.momentum, (module.running_mean, module.running_var) = None, self._averages.pop(module)
        return module.running_mean, module.running_var


def _is_cumulative(module: Any) -> bool:
    """Whether the forward of a module is about to update a cumulative average."""
    is_training = isinstance(module, BatchNormBase) and module.training
    return is_training and module.momentum is None and module.num_batches_tracked is not None


_WAY_OUT = "give the encoder enable_nested_tensor=False"


def _zero_padding(encoder: nn.TransformerEncoder, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    """The output of an encoder with 0 at padded positions, before the last norm, where plain torch takes nested
    tensors; None elsewhere.

    torch does so where the padding is at the end of each row of the batch, and leaves out elements whose mask is any
    number but 0. The step checks when it runs that there is no other padding, and no number but 0 and -inf.
    """
    given = dict(zip(("src", "mask", "src_key_padding_mask"), args)) | kwargs
    src, mask, padding = given["src"], given.get("mask"), given.get("src_key_padding_mask")
    layer = encoder.layers[0]
    differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in (src, *layer.parameters()))
    is_nested = encoder.use_nested_tensor and torch.backends.mha.get_fastpath_enabled()
    if padding is None or mask is not None or not is_nested or layer.training or differentiates:
        return None
    if src.dim() != 3 or torch.is_autocast_enabled():
        return None
    is_padded = padding != 0
    is_last = is_padded[:, :-1] <= is_padded[:, 1:]
    assert_later(is_last.all(), f"nn.TransformerEncoder: padding stands before other elements of a row; {_WAY_OUT}")
    if padding.dtype != torch.bool:
        is_mask = is_padded.logical_not() | padding.isneginf()
        assert_later(is_mask.all(), f"nn.TransformerEncoder: a padding mask has numbers besides 0 and -inf; {_WAY_OUT}")
    zeros = torch.zeros_like(output)
    return torch.where(is_padded.unsqueeze(-1), zeros if encoder.norm is None else encoder.norm(zeros), output)
