"""Building: a module's own constructor, run by all ranks together, with parameters that are cut as they are made.

params, apply = fzero.build(lambda: MyLargeModel(config), mesh, seed=0)
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fzero.base import tree
from fzero.ranks.agreement import agree, digest
from fzero.state.build.deferred import Deferred, deferring, read, whole
from fzero.base.errors import FzeroError
from fzero.ranks.live import live
from fzero.values.lowering import Apply, StatefulApply, lower, lower_stateful
from fzero.base.mesh import VirtualMesh
from fzero.state.partition import partition
from fzero.values.sharded import Sharded
from fzero.state.sources import source_of
from fzero.state.build.store import CHUNK, Store
from fzero.state.fill import elements
from fzero.base.tree import Tree
from fzero.ranks.virtual import virtual

Constructor = Callable[[], nn.Module]


def build(constructor: Constructor, mesh: Any, *, seed: int = 0, **how: Any) -> tuple[Tree, Apply]:
    """`(params, apply)` of the module that `constructor` returns, partitioned: bit for bit those of

        torch.manual_seed(seed)
        params, apply = fzero.lower(constructor())
        params = fzero.partition(params, mesh, **how)

    All ranks call it together with one constructor, which runs once on each, on the CPU or where it says. Of the
    tensors of more than 1,024 elements that are made in it, a rank holds its pieces and, whole, the one that is worked
    on: its shards and the largest parameter at most, or its shard of the largest bucket where that is more. A
    constructor that computes with several large tensors at once has these whole at once, and buffers are whole at the
    end, as those of `fzero.lower` are. What needs a large tensor's old values after another was worked on gathers them;
    what overwrites them all, such as `normal_`, does not.

    The random state is afterwards what it was before. `how` are further keywords of `fzero.partition`. Nothing in torch
    is replaced: two modes are active while the constructor runs, as in torchdistX's `deferred_init`, and what it
    leaves behind elsewhere is unusable afterwards, the module itself too.

    Raises:
        FzeroError: for a constructor that asks for the memory of a large tensor (`data_ptr`, `numpy`), where ranks
            built different modules, and as `fzero.lower` does.
    """
    _check(mesh, how)
    with _built(constructor, mesh, seed) as (module, store):
        params, apply = lower(module)
        return _partitioned(params, mesh, store, how), apply


def build_stateful(
    constructor: Constructor, mesh: Any, *, seed: int = 0, **how: Any
) -> tuple[Tree, Tree, StatefulApply]:
    """`(params, buffers, apply)`, as `build`, of a module that changes its buffers: for `fzero.lower_stateful`. Buffers
    are whole on every rank."""
    _check(mesh, how)
    with _built(constructor, mesh, seed) as (module, store):
        params, buffers, apply = lower_stateful(module)
        return _partitioned(params, mesh, store, how), buffers, apply


def _check(mesh: Any, how: dict[str, Any]) -> None:
    if how.get("source_rank") is not None:
        raise FzeroError("source_rank", "one rank alone would build the module", "let all ranks run the constructor")
    partition({}, mesh, **how)  # knows its keywords
    elements(how.get("chunk", CHUNK), torch.uint8)


@contextmanager
def _built(constructor: Constructor, mesh: Any, seed: int) -> Iterator[tuple[nn.Module, Store]]:
    """The module, with deferred parameters and ordinary buffers. Afterwards its parameters are gone."""
    on = virtual(mesh) if isinstance(mesh, VirtualMesh) else live(mesh)
    store = Store(on)
    try:
        with torch.random.fork_rng(_cuda_devices()):
            torch.manual_seed(seed)
            with deferring(store):
                module = constructor()
            drawn = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        if isinstance(module, nn.Module):
            if on.rank is not None:
                _agree(on, module, drawn)
            _make_ordinary(module)
        yield module, store
    finally:
        store.close()


def _cuda_devices() -> list[int]:
    """The devices whose random state there is to keep."""
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def _agree(on: Any, module: nn.Module, drawn: str) -> None:
    """Make sure that all ranks built the same, and drew the same random numbers for it."""
    named = (*module.named_parameters(), *module.named_buffers())
    lines = [f"{path}: {list(tensor.shape)} {tensor.dtype}" for path, tensor in named]
    lines.append(f"fzero.build: random state {drawn[:8]} after the constructor")
    agree(on.members, digest(lines), lines)


def _make_ordinary(module: nn.Module) -> None:
    """Make every tensor that the module has and that is no parameter a whole, ordinary one: they are constants."""
    params = {id(param) for param in module.parameters()}
    done: dict[int, Tensor] = {}

    def ordinary(value: Deferred) -> Tensor:
        if id(value) in params:
            return value
        if id(value) not in done:
            done[id(value)] = whole(value).requires_grad_(value.requires_grad)
        return done[id(value)]

    for child in module.modules():
        for names in (child._buffers, vars(child)):
            for name, value in list(names.items()):
                if name not in _OWN and any(isinstance(leaf, Deferred) for leaf in tree_leaves(value)):
                    names[name] = tree_map_only(Deferred, ordinary, value)


_OWN = ("_parameters", "_buffers", "_modules")


def _partitioned(params: Tree, mesh: Any, store: Store, how: dict[str, Any]) -> Tree:
    """`partition(params, mesh, **how)`, leaf by leaf in an order that all ranks share. Entries are given up as soon as
    they were placed."""
    store.bring([])
    planned, treedef = tree.flatten(_planned(params, mesh, how))
    leaves: list[Tensor] = tree.leaves(params)
    uses = Counter(leaf.entry for leaf in leaves if isinstance(leaf, Deferred))
    values: dict[int, Sharded] = {}
    for positions in _blocks(planned):
        device = how.get("device") or store.on.device or leaves[positions[0]].device
        room = _room([planned[position] for position in positions], device, how.get("pin", False))
        for position, value in zip(positions, room):
            values[position], leaf = value, leaves[position]
            _fill(value, leaf, how.get("chunk", CHUNK))
            if isinstance(leaf, Deferred):
                uses[leaf.entry] -= 1
                if not uses[leaf.entry]:
                    store.release(leaf.entry)
    return tree.unflatten(treedef, [values[position] for position in range(len(leaves))])


def _planned(params: Tree, mesh: Any, how: dict[str, Any]) -> Tree:
    """What `partition` gives, on the meta device."""
    absent = tree.map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), params)
    return partition(absent, mesh, **{**how, "device": "meta", "pin": False})


def _blocks(planned: Sequence[Sharded]) -> list[list[int]]:
    """Positions of the values that lie in one memory together."""
    blocks: dict[int, list[int]] = {}
    for position, value in enumerate(planned):
        blocks.setdefault(value.local.untyped_storage()._cdata, []).append(position)
    return list(blocks.values())


def _room(planned: Sequence[Sharded], device: Any, pin: bool) -> list[Sharded]:
    """These values, which lie in one memory on the meta device, as zeros on another."""
    first = planned[0].local
    numel = first.untyped_storage().nbytes() // first.dtype.itemsize
    block = torch.zeros(numel, dtype=first.dtype, device=device, pin_memory=pin)
    slices = [value.local for value in planned]
    views = [block.as_strided(x.shape, x.stride(), x.storage_offset()) for x in slices]
    return [value.with_local(view) for value, view in zip(planned, views)]


def _fill(value: Sharded, leaf: Tensor, chunk: int) -> None:
    """Write this rank's part of a leaf. Collective where the leaf is deferred."""
    if isinstance(leaf, Deferred):
        read(leaf, value.part, value.local.view(-1), chunk)
    else:
        source_of(leaf, value.path).read(value.part.start, value.local.view(-1))
