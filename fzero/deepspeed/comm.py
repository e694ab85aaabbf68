"""Comm: DeepSpeed's `deepspeed.comm`, whose names are those of `torch.distributed`."""

from __future__ import annotations

from typing import Any

import torch.distributed

from fzero.deepspeed.absent import make_getattr
from fzero.training.meshes import find_local_rank, init_distributed

__all__ = ["get_local_rank", "init_distributed"]

_refuse = make_getattr(__name__, [*__all__, *dir(torch.distributed)])


def get_local_rank() -> int:
    """The number of this process on its host."""
    return find_local_rank(None)


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and hasattr(torch.distributed, name):
        return getattr(torch.distributed, name)
    return _refuse(name)
