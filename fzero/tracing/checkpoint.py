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
from fzero.base.torch_private_functions import policy_of
from fzero.tracing.user_line import current_user_line
from fzero.values.regions import Policy, remat


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
    """`remat(function, policy)(*args, **kwargs)`, with the policy of a `context_fn` that calls torch's
    `create_selective_checkpoint_contexts`. The other arguments are those of torch, and say how, not what.

    Raises:
        FzeroError: for any other `context_fn`; for reentrant autograd where torch would train nothing.
    """
    is_reentrant = use_reentrant is None or use_reentrant
    if is_reentrant and kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))  # as torch does
    policy = _find_policy(context_fn, is_reentrant)
    inputs = [x for x in args if isinstance(x, Tensor)]
    if is_reentrant and depth() > 0 and torch.is_grad_enabled() and not any(x.requires_grad for x in inputs):
        problem = "torch.utils.checkpoint with use_reentrant=True trains nothing inside, as no input has a gradient"
        raise FzeroError(current_user_line(), problem, "give use_reentrant=False")
    return remat(function, policy)(*args, **kwargs)


def _find_policy(context_fn: Callable[..., Any], is_reentrant: bool) -> Policy | None:
    """The policy of a `context_fn`, None for torch's default."""
    if context_fn is noop_context_fn:
        return None
    if is_reentrant:  # as torch does
        raise ValueError("Passing `context_fn` or `debug` is only supported when use_reentrant=False.")
    policy = policy_of(context_fn()[0])
    if policy is None:
        problem = "torch.utils.checkpoint is given a context_fn, which a trace cannot run again in the backward pass"
        way_out = "give partial(create_selective_checkpoint_contexts, policy), or call fzero.remat(function, policy)"
        raise FzeroError(current_user_line(), problem, way_out)
    return policy
