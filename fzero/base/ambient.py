"""Ambient: the settings around a call, such as autocast, by which torch computes besides arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from fzero.base.torch_private_functions import list_global_hooks, list_modes

_AUTOCAST_TYPES = ("cpu", "cuda", "xpu")


class Ambient(NamedTuple):
    """The settings that the trace of a step depends on. A program fits calls with equal settings."""

    autocast: tuple[str, ...]  # "cpu: torch.bfloat16", for each device type with autocast
    default_dtype: torch.dtype
    default_device: torch.device
    grad: bool
    inference: bool
    deterministic: tuple[bool, bool]
    matmul_precision: str
    attention: tuple[bool, ...]  # which kernels of scaled_dot_product_attention torch may choose
    anomalies: bool  # whether torch looks for NaN in each gradient
    modes: tuple[str, ...]  # the classes of modes that see each operation
    hooks: tuple[Any, ...]  # functions that all modules call

    def lines(self) -> list[str]:
        """A line for each setting that nodes of a program do not show, and that must be the same on all ranks."""
        shown = ("default_dtype", "inference", "deterministic", "matmul_precision")
        return [f"setting {name}: {getattr(self, name)}" for name in shown]


def find_ambient() -> Ambient:
    """The present settings. Takes some microseconds."""
    cuda = torch.backends.cuda
    return Ambient(
        tuple(f"{x}: {torch.get_autocast_dtype(x)}" for x in _AUTOCAST_TYPES if torch.is_autocast_enabled(x)),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        torch.get_float32_matmul_precision(),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled(),
        tuple(list_modes()),
        tuple(hook for _, hooks in list_global_hooks() for hook in hooks.values()),
    )


def disable_autocast() -> AbstractContextManager[Any]:
    """A context without autocast. A program has its casts as nodes, and autocast would cast a second time."""
    stack = ExitStack()
    for device_type in _AUTOCAST_TYPES:
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


def leave_inference_mode() -> AbstractContextManager[Any]:
    """A context without inference mode, in which gradients are enabled or not as before.

    While `torch.compiler.is_compiling()` is true, `torch.func.vjp` does not leave inference mode for a backward pass.
    """
    stack = ExitStack()
    if torch.is_inference_mode_enabled():
        is_enabled = torch.is_grad_enabled()
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(is_enabled))
    return stack


@contextmanager
def forget_casts() -> Iterator[None]:
    """Begin and end a block with an empty cache of autocast.

    Autocast remembers the cast of a weight. A weight that the user's code captures would keep the traced cast behind
    the trace, or give the trace the cast of an old value.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
