"""Sliced: a model whose values are in slices, which is called as a whole one. A call computes the output by a program.

Outputs of a call outside of `torch.no_grad` have a gradient. So a loss is ordinary code around the call: it may look at
values, call the model several times, and exchange values with other ranks. Its backward pass runs a second program, in
which the forward pass is computed again (`fzero.training.outputs`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero import grad, tree
from fzero.base.errors import FzeroError
from fzero.base.torch_private import version_of
from fzero.deepspeed.functions import find_loss
from fzero.hf.adapters import list_active
from fzero.training.live import ModuleState
from fzero.training.models import Bound, average_buffers, carry_buffers, copy_without_values, lower_modes
from fzero.training.outputs import Cotangents, Surroundings, attach, join_numbers, weigh
from fzero.training.programs import add_sums
from fzero.values.functions import is_sharded

STATES = 16
Compile = Callable[..., Any]
"""(name, function, keywords of `fzero.shard`) -> its program."""


class Programs(NamedTuple):
    """What a structure computes as it is now.

    * `forward(params, buffers, args, kwargs)` returns `(output, buffers)`.
    * `pull(params, buffers, args, kwargs, cotangents)` returns the gradients of parameters.
    * `pull_more(sums, params, ...)` returns new sums of gradients.
    * `differentiate(params, buffers, args, kwargs, share)` returns `(output, buffers, gradients)` of the share of the
      loss in the output.
    """

    forward: Callable[..., Any]
    pull: Callable[..., Any]
    pull_more: Callable[..., Any]
    differentiate: Callable[..., Any]


class Held(NamedTuple):
    """The values of a model: parameters, and running statistics that training changes, None in most models."""

    params: tree.Tree
    buffers: tree.Tree | None


class Sliced:
    """The calls of a model.

    * `structure` has the modules, without values. Its mode, its adapters and whether it computes activations again may
      change: each state has programs of its own, which are made in the first call.
    * `call(function, *args, **kwargs)` computes an output, in the dtype of compute.
    * `virtual_ranks` is how many ranks run in this process.
    """

    def __init__(self, structure: nn.Module, compile: Compile, call: Callable[..., Any], virtual_ranks: int) -> None:
        self.structure, self._compile, self._call = structure, compile, call
        self._virtual_ranks = virtual_ranks
        self._programs: dict[tuple[Any, ...], Programs] = {}
        self._state, self._changes = ModuleState(structure), 0

    def forward(self, held: Held, args: Any, kwargs: Any) -> tuple[Any, Held]:
        """`(output, values with new buffers)`."""
        output, buffers = self._find().forward(held.params, held.buffers, args, kwargs)
        return output, held._replace(buffers=buffers)

    def follow(self, held: Held, args: Any, kwargs: Any, add: Callable[[Call, Any], None]) -> tuple[Any, Held]:
        """As `forward`, with an output that has a gradient. A backward pass calls `add(call, find_sums)`, where
        `find_sums(sums)` returns the sums of gradients with those of this call."""
        call = Call(self._find(), held, args, kwargs, add)
        output, after = self.forward(held, args, kwargs)
        return attach(call, output), after

    def differentiate(
        self, held: Held, args: Any, kwargs: Any, add: Callable[[Call, Any], None], share: float
    ) -> tuple[Any, Held, Any]:
        """As `follow`, and the gradients of `share` times the loss in the output, of the same forward pass.

        Raises:
            NoLoss: for an output without a loss.
        """
        call = Call(self._find(), held, args, kwargs, add)
        output, buffers, grads = self._find().differentiate(held.params, held.buffers, args, kwargs, share)
        return attach(call, output), held._replace(buffers=buffers), grads

    def _find(self) -> Programs:
        """The programs of the structure as it is now. Those of the `STATES` states that were used last are kept."""
        if self._state.list_changes_inside():
            self._state, self._changes = ModuleState(self.structure), self._changes + 1
        state = self._changes, *_describe(self.structure)
        found = self._programs.pop(state, None) or self._make()
        self._programs[state] = found
        if len(self._programs) > STATES:
            del self._programs[next(iter(self._programs))]
        return found

    def _make(self) -> Programs:
        structure = copy_without_values(self.structure)
        lowered = lower_modes(structure)
        apply = carry_buffers(lowered.train if structure.training else lowered.evaluate, lowered.buffers)
        virtual_ranks = self._virtual_ranks

        def forward(params: Any, buffers: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
            bound = Bound(apply, params, buffers)
            output = self._call(bound, *args, **kwargs)
            whole = tree.map(lambda x: x.full_tensor() if is_sharded(x) else x, output)
            return whole, average_buffers(bound.buffers)

        def pull(params: Any, buffers: Any, args: Any, kwargs: Any, cotangents: Cotangents) -> Any:
            def compute(params: Any) -> Tensor:
                return weigh(forward(params, buffers, args, kwargs)[0], cotangents, virtual_ranks)

            return grad(compute)(params)

        def pull_more(sums: Any, *given: Any) -> Any:
            return add_sums(sums, pull(*given))

        def differentiate(params: Any, buffers: Any, args: Any, kwargs: Any, share: float) -> tuple[Any, Any, Any]:
            def compute(params: Any) -> tuple[Tensor, Any]:
                output, after = forward(params, buffers, args, kwargs)
                return find_loss(join_numbers(output)) * share, (output, after)

            grads, (output, after) = grad(compute, has_aux=True)(params)
            return output, after, grads

        return Programs(
            self._compile("forward pass", forward, donate=False),  # `pull` needs the buffers that it was given
            self._compile("gradients", pull),
            self._compile("gradients of a further call", pull_more),
            self._compile("forward pass and gradients", differentiate, donate=False),  # as of the forward pass
        )


class Call:
    """A call whose output has a gradient. `pull` adds the gradients of parameters."""

    def __init__(
        self, programs: Programs, held: Held, args: Any, kwargs: Any, add: Callable[[Call, Any], None]
    ) -> None:
        self._programs, self._args, self._kwargs, self._add = programs, args, kwargs, add
        self.held = held
        self._surroundings = Surroundings.take()

    def pull(self, cotangents: Cotangents) -> tuple[()]:
        given = [x if x is None else x.contiguous() for x in cotangents]  # a program belongs to strides

        def find_sums(sums: Any) -> Any:
            named = (self.held.params, self.held.buffers, self._args, self._kwargs, tuple(given))
            with self._surroundings.restore():
                if sums is None:
                    return self._programs.pull(*named)
                return self._programs.pull_more(sums, *named)

        self._add(self, find_sums)
        return ()


def call_narrow(function: Callable[..., Any], device: str, dtype: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
    """The output of a function under torch's autocast, in float32 as accelerate returns it. Without a `dtype` it is
    that of the function."""
    if dtype is None:
        return function(*args, **kwargs)
    with torch.autocast(device, dtype):
        output = function(*args, **kwargs)
    narrow = (torch.bfloat16, torch.float16)
    return tree.map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype in narrow else x, output)


def _describe(structure: nn.Module) -> tuple[Any, ...]:
    """What of a structure may change between calls, and changes what they compute: plain attributes of modules, such as
    their mode, and buffers. `disable_adapter` of peft replaces the forward of a model with virtual tokens, and tells
    the layers of others."""
    is_checkpointing = getattr(structure, "is_activation_checkpointing", False)
    plain = tuple(
        (name, type(x), x) for module in structure.modules() for name, x in vars(module).items() if type(x) in _PLAIN
    )
    buffers = tuple((id(x), version_of(x)) for x in structure.buffers())
    return is_checkpointing, "forward" in vars(structure), list_active(structure), plain, buffers


_PLAIN = frozenset({bool, int, float, str, type(None)})


def stand_for(structure: nn.Module, call: Callable[..., Any], **methods: Callable[..., Any]) -> Any:
    """An object that is `structure`, in its class and its attributes, which it shares. A call of it is
    `call(*args, **kwargs)`, and methods are the given ones."""
    cls: Any = type(structure)
    replaced: dict[str, Any] = {"__module__": cls.__module__}
    for name, method in {"__call__": call, **methods}.items():
        replaced[name] = functools.partialmethod(_call_method, method)
    made: Any = type(cls.__name__, (cls,), replaced)
    stand_in = made.__new__(made)
    object.__setattr__(stand_in, "__dict__", vars(structure))
    return stand_in


def _call_method(_: Any, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return method(*args, **named)


def refuse_stale(call: Call) -> FzeroError:
    """The error for gradients of a call whose parameters have changed since."""
    problem = "the parameters have changed since the call of the model whose output the loss depends on"
    return FzeroError("compute_loss", problem, "call the model in the compute_loss that uses its output")
