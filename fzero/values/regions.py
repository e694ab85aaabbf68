"""Regions: marks on the nodes of a program that say what is to be computed again in the backward pass, not kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base.errors import FzeroError

Keeps = Callable[[str, Tensor], bool]
"""Of an operation's name ("mm") and its result, a tensor without data: whether the result is kept."""

DOTS = frozenset(
    """
    mm bmm addmm addbmm baddbmm mv addmv dot vdot convolution _scaled_mm _grouped_mm _scaled_grouped_mm
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_cudnn_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_fused_attention_overrideable
    _flash_attention_forward _efficient_attention_forward
    """.split()
)
"""Matrix products, and attention in one operation: what takes longest to compute again."""

_POLICIES: dict[Any, Keeps] = {None: lambda name, value: False, "dots": lambda name, value: name in DOTS}


def remat(fn: Callable[..., Any], policy: str | Keeps | None = None) -> Callable[..., Any]:
    """`fn`, whose intermediate values a sharded step does not keep for its backward pass but computes again there.

    Kept are what `fn` is given and what is used of it in the forward pass, its results. `policy` says what else: None
    nothing, "dots" matrix products and attention, a callable `policy(name, value) -> bool` the results for which it is
    true, of the aten operation's name and a tensor without data. Results are the same bit for bit: random draws repeat,
    and collectives are not repeated but for gathers of parameters, which follow the step's stage.

    Marks nodes while `fn` is traced, so every torch.func transform passes through it, and regions nest. Outside a
    sharded step it is `fn` itself. The name is JAX's; the idea is Chen et al., Training Deep Nets with Sublinear Memory
    Cost (2016).

    Raises:
        FzeroError: for another policy.
    """
    if not callable(policy) and policy not in _POLICIES:
        raise FzeroError("policy", f"is {policy!r}", 'give None, "dots" or a function of a name and a value')
    keeps = policy if callable(policy) else _POLICIES[policy]

    @functools.wraps(fn, updated=())
    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        token = _entered.set((*_entered.get(), Region(keeps, in_backward())))
        try:
            return fn(*args, **kwargs)
        finally:
            _entered.reset(token)

    return rematerialized


class Region:
    """One call of a function made by `remat`, and whether that came from a backward pass."""

    def __init__(self, keeps: Keeps, in_backward: bool) -> None:
        self.keeps, self.in_backward = keeps, in_backward


_entered: ContextVar[tuple[Region, ...]] = ContextVar("fzero_regions", default=())


class Mark(NamedTuple):
    """Where a node was traced: in which regions, the outermost first, and whether in a backward pass."""

    regions: tuple[Region, ...] = ()
    in_backward: bool = False


def here() -> Mark:
    """The mark of what is traced now."""
    return Mark(_entered.get(), in_backward())


def in_backward() -> bool:
    """Whether autograd is running a backward pass."""
    return torch._C._current_autograd_node() is not None


def annotate(meta: dict[str, Any], mark: Mark) -> None:
    """Put a mark into the meta of a node, or of what is traced now: into the entry that torch copies into new nodes."""
    meta["custom"] = {**meta.get("custom", {}), "fzero": mark}


def mark_of(node: Any) -> Mark:
    """The mark of a node; an empty one where it was not traced."""
    return node.meta.get("custom", {}).get("fzero", Mark())
