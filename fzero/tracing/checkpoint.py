"""`torch.utils.checkpoint.checkpoint` in a step: `fzero.remat`. torch's own saves tensors by hooks, which torch.func
does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import noop_context_fn

from fzero.base.errors import FzeroError
from fzero.base.torch_private import depth
from fzero.tracing.user_line import current_user_line
from fzero.values.regions import remat


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[..., Any] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """`remat(function)(*args, **kwargs)`. The other arguments are those of torch, and say how, not what.

    Raises:
        FzeroError: for a `context_fn`; for reentrant autograd where torch would train nothing.
    """
    if context_fn is not noop_context_fn:
        problem = "torch.utils.checkpoint is given a context_fn, which a trace cannot run again in the backward pass"
        raise FzeroError(current_user_line(), problem, 'choose what is kept: fzero.remat(function, policy="dots")')
    is_reentrant = use_reentrant is None or use_reentrant
    if is_reentrant and kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))  # as torch does
    inputs = [x for x in args if isinstance(x, Tensor)]
    if is_reentrant and depth() > 0 and torch.is_grad_enabled() and not any(x.requires_grad for x in inputs):
        problem = "torch.utils.checkpoint with use_reentrant=True trains nothing inside, as no input has a gradient"
        raise FzeroError(current_user_line(), problem, "give use_reentrant=False")
    return remat(function)(*args, **kwargs)
