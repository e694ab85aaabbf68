"""torch's operator database: its operators by name, and samples of their arguments."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

DEVICE = os.environ.get("CONFORMANCE_DEVICE", "cpu")
"""Where samples lie and steps compute; "cuda" asks for a GPU. Processes that judge take it from their parent."""


@functools.cache
def operators() -> dict[str, Any]:
    """Every operator of the database by its name."""
    # Not at the top: this import takes three seconds, and freezes the flags of torch.backends for the whole process.
    from torch.testing._internal.common_methods_invocations import op_db

    return {name_of(op): op for op in op_db}


def name_of(op: Any) -> str:
    """`linalg.norm.subgradients_at_zero`: the operator's name and its variant's."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def has_derivative(op: Any, dtype: torch.dtype) -> bool:
    return op.supports_autograd and dtype in op.supported_backward_dtypes(DEVICE)


def samples(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    """The samples that `op.sample_inputs` draws, the same at each call.

    `op.sample_inputs` also looks for a unittest on the call stack, and reads the source of every caller for that: under
    pytest this takes longer than most samples.
    """
    from torch.testing._internal.common_utils import SEED

    set_seeds(0)
    drawn = iter(op.sample_inputs_func(op, DEVICE, dtype, has_derivative(op, dtype)))
    while True:
        set_seeds(SEED)
        try:
            yield next(drawn)
        except StopIteration:
            return


def set_seeds(seed: int) -> None:
    """Seed each generator. `torch.manual_seed` also notes the call stack for devices that are not in use yet: with a
    sample of every operator this is a third of all time."""
    torch.default_generator.manual_seed(seed)
    if DEVICE != "cpu":
        torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
