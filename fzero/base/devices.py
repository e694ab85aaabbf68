"""Devices, as users name them."""

from __future__ import annotations

import torch

from fzero.base.errors import FzeroError


def parse_device(given: torch.device | str) -> torch.device:
    """The device of a name, such as "cpu" or "cuda:1".

    Raises:
        FzeroError: for a name that is no device.
    """
    try:
        return torch.device(given)
    except RuntimeError as error:
        raise _refuse(given, error) from error


def check_device(device: torch.device) -> None:
    """Refuse a device that this process does not have."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        raise _refuse(device, error) from error


def _refuse(given: torch.device | str, error: Exception) -> FzeroError:
    problem = f"is {str(given)!r}: {str(error).splitlines()[0]}"
    return FzeroError("device", problem, "name a device of this process, such as 'cpu'")
