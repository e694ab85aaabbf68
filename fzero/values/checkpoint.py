"""`torch.utils.checkpoint.checkpoint` in a step, and in a gradient outside of one: `fzero.remat`. torch's own saves
tensors by hooks, which torch.func does not have. Models that let their layers be checkpointed call `requires_grad_`,
too, so that what goes into the first of them has a gradient; torch.func refuses that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import noop_context_fn

from fzero.base.errors import FzeroError
from fzero.base.torch_private import depth
from fzero.base.torch_private_functions import begins_gradient, policy_of, replace_checkpoint
from fzero.base.user_line import current_user_line
from fzero.ranks.performer import current_performer
from fzero.values.regions import Policy, remat
from fzero.values.sharded import Sharded


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


def keep_requires_grad(func: Callable[..., Any], x: Tensor, requires_grad: bool = True) -> Tensor:
    """`requires_grad_`, called by a function mode. Within a gradient of torch.func, which knows what it differentiates,
    this changes nothing, and `requires_grad_(False)` of a value that has a gradient is an error. torch.func itself
    calls it to begin a gradient."""
    is_end = x.requires_grad and not requires_grad
    if begins_gradient() or is_end or isinstance(x, Sharded) or depth() == 0:
        return func(x, requires_grad)
    return x


@contextmanager
def take_checkpoints() -> Iterator[None]:
    """A context in which torch.func differentiates models whose layers are checkpointed. A trace does so by itself."""
    if current_performer() is not None:
        yield
        return
    with replace_checkpoint(checkpoint), _KeepRequiresGrad():
        yield


class _KeepRequiresGrad(TorchFunctionMode):
    """While this mode is active, `requires_grad_` is `keep_requires_grad`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.requires_grad_:
            return keep_requires_grad(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
