"""Models: parameters become slices, whether they are whole or were born sharded in `zero.Init`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import torch
from torch import nn

from fzero import lower, lower_stateful, partition, tree
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.base.placement import Disk, Placement
from fzero.optim.base import GradientTransformation
from fzero.ranks.live import find_ranks
from fzero.state.build.build import cut_into_slices, make_ordinary
from fzero.state.build.deferred import Deferred
from fzero.state.build.store import Store
from fzero.training.synced import sync_norms
from fzero.values.collectives import mean_over_data
from fzero.values.lowering import StatefulApply, find_statistics
from fzero.values.rebinding import copy_and_bind

Call = Callable[..., Any]
"""(params, buffers, *args, **kwargs) -> `(output of a model, or its loss; new buffers)`. `buffers` are the running
statistics that the model changes, None in most models."""
WHOLE = sys.maxsize
"""The `persist` of `fzero.partition` with which every leaf stays whole on each rank."""


class Lowered(NamedTuple):
    """A model as functions, in both of its modes.

    * `buffers` are the running statistics that training changes, None in most models.
    * Without buffers `train(params, *args, **kwargs)` and `evaluate(params, *args, **kwargs)` return the output.
    * With buffers `train(params, buffers, *args, **kwargs)` and `evaluate(params, buffers, *args, **kwargs)` return
      `(output, new buffers)`.
    """

    params: tree.Tree
    buffers: tree.Tree | None
    train: Callable[..., Any]
    evaluate: Callable[..., Any]


def lower_modes(model: nn.Module) -> Lowered:
    """`fzero.lower` of a model in both modes, or `fzero.lower_stateful` for the running statistics that it changes. The
    model keeps its own mode.

    Raises:
        FzeroError: as `fzero.lower`; for a SyncBatchNorm of a process group.
    """
    model, was_training = sync_norms(model), model.training
    try:
        buffers = find_statistics(model.train())
        if buffers is None:
            _, evaluate = lower(model.eval())
            params, train = lower(model.train())
            return Lowered(params, None, train, evaluate)
        params, _, _ = lower_stateful(model)
        train_stateful = StatefulApply(model, params, buffers)
        return Lowered(params, buffers, train_stateful, StatefulApply(model.eval(), params, buffers))
    finally:
        model.train(was_training)


def carry_buffers(apply: Callable[..., Any], buffers: tree.Tree | None) -> Call:
    """A function of `Lowered` as a `Call`: for a model without buffers that change, it takes None and returns None."""
    if buffers is not None:
        return apply
    return lambda params, _, /, *args, **kwargs: (apply(params, *args, **kwargs), None)


class Bound:
    """A `Call` with parameters, as a function with the arguments of the model. `buffers` are those behind its calls."""

    def __init__(self, call: Call, params: tree.Tree, buffers: tree.Tree | None) -> None:
        self._call, self._params, self.buffers = call, params, buffers
        self._is_decorated = False

    def decorate(self, decorator: Callable[[Call], Call]) -> Bound:
        """This function itself, whose `Call` becomes `decorator(call)` the first time."""
        if not self._is_decorated:
            self._call, self._is_decorated = decorator(self._call), True
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output, self.buffers = self._call(self._params, self.buffers, *args, **kwargs)
        return output


def average_buffers(buffers: tree.Tree | None) -> tree.Tree | None:
    """New buffers as state, the same on all ranks: the mean over ranks of numbers, and counts as they are."""
    return tree.map(lambda x: mean_over_data(x) if x.is_floating_point() else x, buffers)


def partition_buffers(model: nn.Module, buffers: tree.Tree | None, mesh: Any) -> tree.Tree | None:
    """The buffers of rank 0, whole on each rank."""
    return None if buffers is None else partition_model(model, buffers, None, mesh, persist=WHOLE)


def partition_model(model: nn.Module, params: tree.Tree, store: Store | None, mesh: Any, **how: Any) -> tree.Tree:
    """The partitioned parameters of a lowered model, with the values of rank 0. `store` is what `find_store` said of
    the model, and `how` are keywords of `fzero.partition`. A model of `zero.Init` is unusable afterwards.

    Raises:
        FzeroError: for a model of `zero.Init` on another mesh.
    """
    on = find_ranks(mesh)
    if store is None:
        first = None if on.members.is_alone else on.ranks[0]
        return partition(params, mesh, source_rank=first, **how)
    if store.on is not on:
        problem = f"is {mesh}, and zero.Init cut the model over {store.on.mesh}"
        raise FzeroError("mesh", problem, "give initialize and zero.Init the same mesh")
    held = cut_into_slices(params, mesh, store, how)
    spent = Store(on)  # the store itself may serve a context that goes on
    for x in model.parameters():
        if isinstance(x, Deferred):
            store.allocations.discard(x.allocation)
            x.allocation.store = spent
            spent.allocations.add(x.allocation)
    spent.close()
    return held


def init_state(optimizer: GradientTransformation, params: tree.Tree, to: Placement | None, ratio: float = 1) -> Any:
    """The first state of an optimizer, at a placement; None for that of the parameters. With a `ratio` below 1 the
    state of the last layers, so many of all elements, lies there. State lies where its parameter does while it is
    made."""
    if to is None or ratio == 1:
        return optimizer.init(params, to=to)
    trained = [leaf for leaf in tree.leaves(params) if not is_frozen(leaf)]
    sizes = Counter[str]()
    for leaf in trained:
        sizes[leaf.form.layout.bucket] += leaf.numel()
    stays, room = set(), (1 - ratio) * sizes.total()
    for bucket, size in sizes.items():
        if size > room:
            break
        stays.add(bucket)
        room -= size

    def make() -> Any:
        return optimizer.init(tree.map(lambda x: x.at(None if x.form.layout.bucket in stays else to), params))

    return trained[0].on.do_together(make, "an optimizer's init on a disk") if isinstance(to, Disk) else make()


def find_store(model: nn.Module) -> Store | None:
    """The memory that a model of `zero.Init` was born in; None for any other model. Buffers become ordinary.

    Raises:
        FzeroError: for parameters of several `zero.Init`.
    """
    stores = {x.allocation.store for x in model.parameters() if isinstance(x, Deferred)}
    if len(stores) > 1:
        raise FzeroError("model", f"has parameters of {len(stores)} zero.Init", "construct it in one")
    if stores:
        make_ordinary(model)
    return next(iter(stores), None)


def copy_without_values(module: nn.Module, buffers: Container[str] = ()) -> nn.Module:
    """The module with parameters, and the buffers of these paths, on the meta device: the values are in a state, and
    old ones would mislead."""
    absent: dict[int, torch.Tensor] = {id(x): forget_values(x) for x in module.parameters()}
    absent |= {
        id(x): torch.empty(x.shape, dtype=x.dtype, device="meta")
        for path, x in module.named_buffers()
        if path in buffers
    }
    return copy_and_bind(module, absent, ())


def forget_values(parameter: torch.Tensor) -> nn.Parameter:
    """A parameter like this one on the meta device."""
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)
