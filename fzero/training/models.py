"""Models: parameters become slices, whether they are whole or were born sharded in `zero.Init`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from fzero import partition, tree
from fzero.base.errors import FzeroError
from fzero.ranks.homes import find_home
from fzero.ranks.live import Live
from fzero.state.build.build import cut_into_slices, make_ordinary
from fzero.state.build.deferred import Deferred
from fzero.state.build.store import Store


def partition_model(model: nn.Module, params: tree.Tree, store: Store | None, mesh: Any, **how: Any) -> tree.Tree:
    """The partitioned parameters of a lowered model, with the values of rank 0. `store` is what `find_store` said of
    the model, and `how` are keywords of `fzero.partition`. A model of `zero.Init` is unusable afterwards.

    Raises:
        FzeroError: for a model of `zero.Init` on another mesh.
    """
    home = find_home(mesh)
    if store is None:
        first = home.ranks[0] if isinstance(home, Live) and len(home.ranks) > 1 else None
        return partition(params, mesh, source_rank=first, **how)
    if store.on is not home:
        problem = f"is {mesh}, and zero.Init cut the model over {store.on.mesh}"
        raise FzeroError("mesh", problem, "give initialize and zero.Init the same mesh")
    held = cut_into_slices(params, mesh, store, how)
    spent = Store(home)  # the store itself may serve a context that goes on
    for x in model.parameters():
        if isinstance(x, Deferred):
            store.allocations.discard(x.allocation)
            x.allocation.store = spent
            spent.allocations.add(x.allocation)
    spent.close()
    return held


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


def copy_without_values(module: nn.Module) -> nn.Module:
    """The module with parameters on the meta device: the values are in slices, and old ones would mislead."""
    absent = {
        id(x): nn.Parameter(torch.empty(x.shape, dtype=x.dtype, device="meta"), x.requires_grad)
        for x in module.parameters()
    }
    return copy.deepcopy(module, absent)
