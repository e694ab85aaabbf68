"""Marks on the nodes of a trace: regions, whose values the backward pass computes again instead of keeping them, and
turns of loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from torch.utils.checkpoint import CheckpointPolicy

from fzero.base import torch_private
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.torch_private_functions import HigherOrderOperator, make_policy_context
from fzero.program.ops.loops import TiledLoss

Policy = Callable[..., CheckpointPolicy | bool]
"""`policy(context, operation, *args, **kwargs)`, a policy of torch's `create_selective_checkpoint_contexts`. Tensors
have no data."""

DOTS = frozenset(
    """
    mm bmm addmm addbmm baddbmm mv addmv dot vdot convolution _scaled_mm _grouped_mm _scaled_grouped_mm
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_cudnn_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_fused_attention_overrideable
    _flash_attention_forward _efficient_attention_forward flex_attention
    """.split()
)
"""Names of matrix products and of attention in one operation: the results that take longest to compute again."""

_POLICIES: dict[str | None, Policy] = {
    None: lambda context, operation, *args, **kwargs: False,
    "dots": lambda context, operation, *args, **kwargs: operation.__name__.partition(".")[0] in DOTS,
    "budget": lambda context, operation, *args, **kwargs: True,
    "offload": lambda context, operation, *args, **kwargs: CheckpointPolicy.MUST_CPU_OFFLOAD,
    "local": lambda context, operation, *args, **kwargs: True,
}
Fate = Literal["keep", "again", "host"]
"""What becomes of a value until the backward pass uses it: a region keeps it, computes it again, or moves it to the
host and back."""
_FATES: dict[Any, Fate] = {
    True: "keep",
    False: "again",
    CheckpointPolicy.MUST_SAVE: "keep",
    CheckpointPolicy.PREFER_SAVE: "keep",
    CheckpointPolicy.MUST_RECOMPUTE: "again",
    CheckpointPolicy.PREFER_RECOMPUTE: "again",
    CheckpointPolicy.MUST_CPU_OFFLOAD: "host",
    CheckpointPolicy.PREFER_CPU_OFFLOAD: "host",
}
"""What a policy returns -> the fate of the operation's result."""


@check_arguments
def remat(fn: Callable[..., Any], policy: str | list[Any] | Policy | None = None) -> Callable[..., Any]:
    """`fn`, with intermediate values that a sharded step does not keep for its backward pass: it computes them again
    there, or moves them to the host and back.

    The step keeps the arguments of `fn`, the values that the forward pass uses outside `fn` (its results), and what
    `policy` chooses:

    * None: nothing else.
    * "dots": the results of matrix products and attention.
    * "budget": what the budget of `shard(..., memory=)` leaves room for; without a budget everything.
    * "offload": everything, in the memory of the host. Each value that the backward pass uses is copied there and back,
      beside compute. Values of less than 4 KiB stay, and so do values that the backward pass uses before they could
      have gone and come back.
    * "local": what a rank computes by itself. What comes along model axes comes again: a rank that gathers a sequence
      for a layer keeps its own part alone.
    * a list of operations, such as `[torch.ops.aten.mm.default]`: their results.
    * a function `policy(context, operation, *args, **kwargs)`: the results for which it returns True or a
      `CheckpointPolicy` to save; those to offload go to the host; MUST and PREFER are alike. The list and the function
      are what `torch.utils.checkpoint.create_selective_checkpoint_contexts` takes. `fzero` calls the function once for
      each operation of torch in `fn`, in order, with tensors without data; `context.op_output` is the result.

    Results are the same bit for bit: random draws repeat. Collectives along model axes repeat with the policies None,
    as under `torch.utils.checkpoint`, and "local". Others do not repeat, except that parameters are gathered again
    where the step's stage says so.

    While `fn` is traced, `remat` marks its nodes and changes nothing else. So `fn` may contain, or stand in, any
    torch.func transform, and regions nest. Outside a sharded step the result does what `fn` does.

    The name is JAX's. The idea is Chen et al., Training Deep Nets with Sublinear Memory Cost (2016).

    Raises:
        FzeroError: for any other policy; when the step is traced, for what a function returns otherwise.
    """
    chosen = _find_policy(policy)

    @functools.wraps(fn, updated=())
    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        region = Region(chosen, torch_private.in_backward(), by_budget=policy == "budget")
        token = _open_regions.set((*_open_regions.get(), region))
        try:
            return fn(*args, **kwargs)
        finally:
            _open_regions.reset(token)

    return rematerialized


def _find_policy(policy: Any) -> Policy:
    """The function that a policy stands for.

    Raises:
        FzeroError: for anything else than `remat` takes.
    """
    if callable(policy):
        return policy
    if isinstance(policy, list):
        for operation in policy:
            if not isinstance(operation, (torch_private.OpOverload, HigherOrderOperator)):
                way_out = "name one overload, such as torch.ops.aten.mm.default"
                raise FzeroError("policy", f"has {operation!r}, which is no operation of torch", way_out)
        operations = tuple(policy)
        return lambda context, operation, *args, **kwargs: operation in operations
    if policy is None or (isinstance(policy, str) and policy in _POLICIES):
        return _POLICIES[policy]
    words = ", ".join(f'"{name}"' for name in _POLICIES if name)
    way_out = f"give None, {words}, a list of operations or a function"
    raise FzeroError("policy", f"is {policy!r}", way_out)


class Region:
    """One call of a function made by `remat`. `in_backward` says whether a backward pass made the call.

    The region also keeps the values of the nodes with the numbers `kept`, and moves those with the numbers `moved` to
    the host. With `by_budget` a memory budget may make another region of its nodes.
    """

    def __init__(
        self,
        policy: Policy,
        in_backward: bool,
        kept: frozenset[int] = frozenset(),
        moved: frozenset[int] = frozenset(),
        by_budget: bool = False,
    ) -> None:
        self._policy, self.in_backward, self.by_budget = policy, in_backward, by_budget
        self.kept, self.moved = kept, moved
        self._answers: dict[str, Fate] = {}

    @property
    def is_local(self) -> bool:
        """Whether it keeps what a rank computes by itself, and nothing else."""
        return self._policy is _POLICIES["local"]

    @property
    def repeats_collectives(self) -> bool:
        """Whether collectives along model axes repeat."""
        return self.is_local or self._policy is _POLICIES[None]

    def copy(self) -> Region:
        """A region of the same policy, for another call."""
        return Region(self._policy, self.in_backward, self.kept, self.moved, self.by_budget)

    def decide(self, name: str, where: str, operation: Any, args: Any, kwargs: Any, result: Any) -> Fate:
        """The fate of the result of an operation, which the user called at `where`, by the region's policy.

        A policy may count, and a program may be built several times: so the policy is asked once about the node of a
        `name`.

        Raises:
            FzeroError: where the policy returns another thing than to keep, to compute again or to move to the host.
        """
        if name in self._answers:
            return self._answers[name]
        context = make_policy_context(result)
        said = self._policy(context, operation, *args, **kwargs)
        if not isinstance(said, (bool, CheckpointPolicy)) or said not in _FATES:
            problem = f"the policy of a checkpoint returns {said!r} for {operation}"
            raise FzeroError(where, problem, "return CheckpointPolicy.MUST_SAVE, MUST_RECOMPUTE or MUST_CPU_OFFLOAD")
        self._answers[name] = _FATES[said]
        return _FATES[said]


_open_regions: ContextVar[tuple[Region, ...]] = ContextVar("fzero_regions", default=())


@contextmanager
def leave_regions(*, only_local: bool = False) -> Iterator[None]:
    """Nodes that are traced in this context belong to no region that is open around it, so their values are kept; with
    `only_local` to none with the policy "local"."""
    token = _open_regions.set(tuple(each for each in _open_regions.get() if only_local and not each.is_local))
    try:
        yield
    finally:
        _open_regions.reset(token)


class Turn:
    """The turn of a loop that a trace records for all of them. The loop takes `length` turns, and has a `number`.

    * `sync` is as in `fzero.accumulate`.
    * `forward` is the turn that this one is the backward pass of; None for any other turn.
    * `is_followed`: autograd follows the turn.
    * `layers`: a bucket of the first layer -> the bucket of each row.
    * `loss` says which part of a cross entropy the turn computes; None for any other turn.
    """

    def __init__(
        self, length: int, number: int, sync: str | None, forward: Turn | None = None, is_followed: bool = False
    ) -> None:
        self.length, self.number, self.sync, self.forward = length, number, sync, forward
        self.is_followed = is_followed
        self.layers: dict[str, tuple[str, ...]] = {} if forward is None else forward.layers
        self.loss: TiledLoss | None = None


_open_turns: ContextVar[tuple[Turn, ...]] = ContextVar("fzero_turns", default=())


@contextmanager
def open_turn(turn: Turn) -> Iterator[None]:
    """Nodes that are traced in this context belong to a turn."""
    with keep_turns():
        begin_turn(turn)
        yield


@contextmanager
def keep_turns() -> Iterator[None]:
    """Behind this context the same turns are open as in front of it."""
    token = _open_turns.set(_open_turns.get())
    try:
        yield
    finally:
        _open_turns.reset(token)


def begin_turn(turn: Turn) -> None:
    """Nodes that are traced from here on belong to a turn."""
    _open_turns.set((*_open_turns.get(), turn))


def end_turn() -> None:
    """Close the turn that was opened last."""
    _open_turns.set(_open_turns.get()[:-1])


class Mark(NamedTuple):
    """Where a node was traced: in which regions and in which turns, the outermost first, and whether in a backward
    pass. A node that stands for the border of a turn has the turn as its `port`. A memory budget gives the nodes of a
    trace a `number`, which their copies in programs have too."""

    regions: tuple[Region, ...] = ()
    in_backward: bool = False
    turns: tuple[Turn, ...] = ()
    port: Turn | None = None
    number: int | None = None


def current_mark() -> Mark:
    """The mark for a node that is traced now."""
    return Mark(_open_regions.get(), torch_private.in_backward(), _open_turns.get())


def set_mark(meta: dict[str, Any], mark: Mark) -> None:
    """Write a mark into the meta of a node.

    While tracing, `meta` may be that of torch's `get_current_meta`: torch copies its "custom" entry into new nodes.
    """
    meta["custom"] = {**meta.get("custom", {}), "fzero": mark}


def get_mark(node: Any) -> Mark:
    """The mark of a node; an empty mark where the node has none."""
    return node.meta.get("custom", {}).get("fzero", Mark())
