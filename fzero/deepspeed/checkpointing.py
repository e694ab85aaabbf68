"""Checkpointing: DeepSpeed's activation checkpointing. What is computed again is torch's `checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from fzero.base.errors import FzeroError
from fzero.deepspeed.absent import make_getattr
from fzero.deepspeed.reading import read_config

__all__ = ["checkpoint", "configure", "is_configured", "reset"]

__getattr__ = make_getattr(__name__, __all__)

_ON_HOST = "activation_checkpointing.cpu_checkpointing"


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Check the arguments. `checkpoint` needs none: what is kept is one layer's input, on its rank.

    Raises:
        FzeroError: for a mesh of model parallelism; for activations that are to lie on the host; as `initialize`, for
            the configuration.
    """
    if mpu_ is not None:
        raise FzeroError("checkpointing.configure: mpu_", "is given, and there is no model parallelism", "give None")
    given = {} if deepspeed_config is None else read_config(deepspeed_config)
    named = {"checkpoint_in_cpu": checkpoint_in_cpu, "cpu_checkpointing": given.get(_ON_HOST)}
    for name, value in named.items():
        if value:
            way_out = 'give fzero.remat(fn, policy="offload"), which moves saved values to the host'
            raise FzeroError(f"checkpointing.configure: {name}", "is True", way_out)


def is_configured() -> bool:
    """True: nothing has to be configured."""
    return True


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, computed again in the backward pass: `torch.utils.checkpoint.checkpoint`."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def reset() -> None:
    """Nothing: no buffers are kept between steps."""
