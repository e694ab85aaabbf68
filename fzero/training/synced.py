"""Synced: SyncBatchNorm in a step. Its statistics are those of the batches of all ranks."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fzero.base.errors import FzeroError
from fzero.values.collectives import count_ranks, mean_over_data


def sync_norms(model: nn.Module) -> nn.Module:
    """The model, or a copy of it with its own parameters and buffers, whose SyncBatchNorm are `SyncedNorm`.

    Raises:
        FzeroError: for a SyncBatchNorm of a process group.
    """
    found = {path: child for path, child in model.named_modules() if isinstance(child, nn.SyncBatchNorm)}
    for path, child in found.items():
        if child.process_group is not None:
            problem = "is a SyncBatchNorm of a process group, and a step takes the statistics of all ranks"
            raise FzeroError(path or "model", problem, "leave process_group out")
    if not found:
        return model
    memo: dict[int, object] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, memo)
    for path in found:
        copied.get_submodule(path).__class__ = SyncedNorm
    return copied


class SyncedNorm(nn.SyncBatchNorm):
    """SyncBatchNorm by collectives that a program has: the mean of means, then the mean of squared distances to it.
    Each rank has as many examples."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        dims, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean = mean_over_data(wide.mean(dims))
        apart = wide - mean.view(shape)
        var = mean_over_data(apart.square().mean(dims))
        if self.track_running_stats:
            self._note(mean.detach(), var.detach(), x.numel() // x.shape[1] * count_ranks())
        normal = apart * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(x.dtype)

    def _note(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Move the running statistics towards those of a batch of `count` numbers a channel."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked.to(mean.dtype) if self.momentum is None else self.momentum
        unbiased = var * (count / max(count - 1, 1))
        for running, now in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running * (1 - share) + now.to(running.dtype) * share)
