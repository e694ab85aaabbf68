"""What all contenders have in common: what one is, the loss, and AdamW's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

Batch = dict[str, Tensor]

RATE, B1, B2, EPS, DECAY = 3e-4, 0.9, 0.95, 1e-8, 0.1


class Contender(NamedTuple):
    """Ready to train: a step on this rank's batch, which returns its loss.

    `program` is fzero's, of the step that it would take next; others have none.
    """

    step: Callable[[Batch], Tensor]
    program: Callable[[Batch], Any] | None = None


Setup = Callable[[Callable[[], nn.Module], DeviceMesh, bool], Contender]
"""`(build, mesh, bf16) -> Contender`: `build()` is the module to train. With `bf16` it computes and gathers in that,
over weights, moments and updates in fp32."""


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """torch's, fused, over the parameters that a module has now."""
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=(B1, B2), eps=EPS, weight_decay=DECAY, fused=True)


def loss_of(logits: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy in fp32."""
    return cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten())
