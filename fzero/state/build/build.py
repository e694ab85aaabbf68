"""Build: all ranks run a module's own constructor together, and parameters are cut over the ranks as they are made.

params, apply = fzero.build(lambda: MyLargeModel(config), mesh, seed=0)
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fzero.base import torch_private, tree
from fzero.base.arguments import check_arguments
from fzero.base.embeddings import is_embedding, mark_embedding
from fzero.base.errors import FzeroError
from fzero.base.frozen import freeze
from fzero.base.placement import Disk, Placement
from fzero.base.progress import Progress
from fzero.base.tree import Tree
from fzero.files import allocate as allocate_on_disk
from fzero.files.memory import memory_of
from fzero.layout.parts import cut_out
from fzero.layout.ranges import intersect
from fzero.ranks.agreement import agree, digest
from fzero.ranks.live import find_ranks
from fzero.ranks.ranks import Ranks
from fzero.ranks.together import tell_others
from fzero.state.build.deferred import Deferred, copy_whole, defer_tensors, iter_values, read
from fzero.state.build.store import Store
from fzero.state.fill import BUILD_CHUNK_NBYTES, allocate, chunk_numel, fill, find_memory
from fzero.state.partition import partition
from fzero.state.sources import source_of
from fzero.state.splits import list_parts, list_positions
from fzero.values.lowering import Apply, StatefulApply, lower, lower_stateful
from fzero.values.origin import make_origin
from fzero.values.sharded import Sharded

Constructor = Callable[[], nn.Module]
WHAT = "agreement of fzero.build"


@check_arguments
def build(constructor: Constructor, mesh: Any, *, seed: int = 0, **how: Any) -> tuple[Tree, Apply]:
    """`(params, apply)` of the module that `constructor` returns, partitioned: bit for bit the result of

        torch.manual_seed(seed)
        params, apply = fzero.lower(constructor())
        params = fzero.partition(params, mesh, **how)

    All ranks call `build` together with the same constructor, which runs once on each rank, on the CPU unless it names
    another device. `how` are further keywords of `fzero.partition`.

    Memory: of the constructor's large tensors, those of more than 1,024 elements, a rank holds its pieces and one whole
    tensor, the one that is worked on. So the peak is its shards and the largest parameter; or, where it is more, its
    shards and its shard of the largest bucket. Large tensors that one operation uses together are whole together.
    Buffers are whole at the end, as in `fzero.lower`.

    Communication: an operation that reads a large tensor gathers it, if another large tensor was worked on since. An
    operation that overwrites a whole tensor, such as `normal_`, does not gather.

    The random state is restored at the end. Nothing in torch is replaced: two modes are active while the constructor
    runs, as in torchdistX's `deferred_init`. The module, and any other tensor that the constructor keeps, is unusable
    afterwards.

    Raises:
        FzeroError: for a constructor that asks for the memory of a large tensor (`data_ptr`, `numpy`); when ranks built
            different modules; as `fzero.lower` does.
    """
    _check(mesh, seed, how)
    with _construct(constructor, mesh, seed, how.get("to")) as (module, store):
        params, apply = lower(module)
        return cut_into_slices(params, mesh, store, how), apply


@check_arguments
def build_stateful(
    constructor: Constructor, mesh: Any, *, seed: int = 0, **how: Any
) -> tuple[Tree, Tree, StatefulApply]:
    """`(params, buffers, apply)` of a module that changes its buffers: `build` for `fzero.lower_stateful`. Buffers are
    whole on every rank."""
    _check(mesh, seed, how)
    with _construct(constructor, mesh, seed, how.get("to")) as (module, store):
        params, buffers, apply = lower_stateful(module)
        return cut_into_slices(params, mesh, store, how), buffers, apply


def _check(mesh: Any, seed: int, how: dict[str, Any]) -> None:
    if not -(2**63) <= seed < 2**64:
        raise FzeroError("seed", f"is {seed}, which torch.manual_seed does not take", "give a number of 64 bits")
    if how.get("source_rank") is not None:
        raise FzeroError("source_rank", "one rank alone would build the module", "let all ranks run the constructor")
    partition({}, mesh, **{**how, "split": None})  # raises for a keyword that it does not have
    chunk_numel(how.get("chunk", BUILD_CHUNK_NBYTES), torch.uint8)


@contextmanager
def _construct(
    constructor: Constructor, mesh: Any, seed: int, to: Placement | None
) -> Iterator[tuple[nn.Module, Store]]:
    """The module, with deferred parameters and ordinary buffers. The parameters are freed at the end of the block."""
    on = find_ranks(mesh)
    store = Store(on, to if isinstance(to, Disk) else None)
    try:
        with tell_others(on.members, WHAT), torch.random.fork_rng(_cuda_devices()):
            torch.manual_seed(seed)
            with defer_tensors(store):
                module = constructor()
            random_state = torch.get_rng_state()
            drawn = hashlib.sha256(memory_of(random_state)).hexdigest()
        if isinstance(module, nn.Module):
            _agree(on, module, drawn)
        with tell_others(on.members, WHAT) if store.place else nullcontext():
            if isinstance(module, nn.Module):
                make_ordinary(module)
            yield module, store
        if store.place:
            on.agree("the end of fzero.build")
    finally:
        store.close()


def _cuda_devices() -> list[int]:
    """The CUDA devices whose random state is restored."""
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def _agree(on: Ranks, module: nn.Module, drawn: str) -> None:
    """Raise unless all ranks built the same shapes and dtypes, and drew the same random numbers. `drawn` is a digest of
    the random state."""
    named = (*module.named_parameters(), *module.named_buffers())
    lines = [f"{path}: {list(tensor.shape)} {tensor.dtype}" for path, tensor in named]
    lines.append(f"fzero.build: random state {drawn[:8]} after the constructor")
    agree(on.members, digest(lines), lambda: lines, what=WHAT)


def make_ordinary(module: nn.Module) -> None:
    """Replace each deferred tensor of the module that is no parameter by a whole, ordinary tensor."""
    params = {id(param) for param in module.parameters()}
    done: dict[int, Tensor] = {}

    def make_ordinary(value: Deferred) -> Tensor:
        if id(value) in params:
            return value
        if id(value) not in done:
            done[id(value)] = copy_whole(value).requires_grad_(value.requires_grad)
        return done[id(value)]

    for child in module.modules():
        for names in (torch_private.own_buffers(child), vars(child)):
            for name, value in list(names.items()):
                if name not in _OWN and any(isinstance(leaf, Deferred) for leaf in torch_private.pytree_leaves(value)):
                    names[name] = torch_private.map_pytree_only(Deferred, make_ordinary, value)


_OWN = ("_parameters", "_buffers", "_modules")


def cut_into_slices(params: Tree, mesh: Any, store: Store, how: dict[str, Any]) -> Tree:
    """`partition(params, mesh, **how)`, leaf by leaf in an order that all ranks share. An allocation is freed after the
    last leaf that uses it."""
    store.bring([])
    made = store.on.count_agreements()
    planned, treedef = tree.flatten(_plan(params, mesh, how))
    leaves: list[Tensor] = tree.leaves(params)
    uses = Counter(leaf.allocation for leaf in leaves if isinstance(leaf, Deferred))
    values: dict[int, Sharded] = {}
    progress = Progress("building", "leaves", "leaves", len(planned))
    for positions in _group_by_storage(planned):
        device = how.get("device") or store.on.choose_device(leaves[positions[0]].device)
        zeros = _allocate([planned[position] for position in positions], device, how.get("pin", False))
        for position, value in zip(positions, zeros):
            values[position], leaf = value, leaves[position]
            value.origin = make_origin(hash((made, position)))  # ranks agreed on the constructor and on its draws
            _fill(value, leaf, how.get("chunk", BUILD_CHUNK_NBYTES))
            if isinstance(leaf, Deferred):
                uses[leaf.allocation] -= 1
                if not uses[leaf.allocation]:
                    store.release(leaf.allocation)
            progress.count(value.path)
    return tree.unflatten(treedef, [values[position] for position in range(len(leaves))])


def _plan(params: Tree, mesh: Any, how: dict[str, Any]) -> Tree:
    """The result of `partition` on the meta device."""

    def make_absent(leaf: Tensor) -> Tensor:
        absent = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        return mark_embedding(freeze(absent, leaf), is_embedding(leaf))

    return partition(tree.map(make_absent, params), mesh, **{**how, "device": "meta", "pin": False})


def _group_by_storage(planned: Sequence[Sharded]) -> list[list[int]]:
    """Positions of the values that share one storage."""
    blocks: dict[int, list[int]] = {}
    for position, value in enumerate(planned):
        blocks.setdefault(torch_private.storage_key(value.local), []).append(position)
    return list(blocks.values())


def _allocate(planned: Sequence[Sharded], device: Any, pin: bool) -> list[Sharded]:
    """Zeros in place of values that share one storage on the meta device. They share one storage on `device`."""
    first = planned[0].local
    place, device = planned[0].place, torch.device(device)
    if isinstance(place, Disk):
        return [_allocate_on_disk(value, place, device) for value in planned]
    numel = first.untyped_storage().nbytes() // first.dtype.itemsize
    block = allocate(numel, first.dtype, *find_memory(place, device, pin)).zero_()
    slices = [value.local for value in planned]
    views = [block.as_strided(x.shape, x.stride(), x.storage_offset()) for x in slices]
    forms = [value.form._replace(device=block.device if place is None else device) for value in planned]
    return [Sharded.of_form(view, form) for form, view in zip(forms, views)]


def _allocate_on_disk(planned: Sharded, place: Disk, device: torch.device) -> Sharded:
    layout, rank = planned.form.layout, planned.form.layout.rank_of(planned.on)
    local = allocate_on_disk(place, planned.dtype, planned.local.numel(), rank, layout.bucket, planned.path)
    return Sharded.of_form(local, planned.form._replace(device=device))


def _fill(value: Sharded, leaf: Tensor, chunk: int) -> None:
    """Write this rank's part of a leaf. Collective for a deferred leaf."""
    layout, index, flat = value.form.layout, value.index, value.local.view(-1)
    if not isinstance(leaf, Deferred):
        for out, part in list_parts(flat, source_of(leaf, value.path), layout, index, value.ranks):
            fill(out, part, layout, index, layout.rank_of(value.on), chunk)
    elif layout.splits == 1:
        read(leaf, value.part, flat, chunk)
    else:
        for span, values in iter_values(leaf, range(leaf.numel()), chunk):
            for out, position in list_positions(flat, layout, value.ranks):
                held, found = cut_out(values, span, layout, index, position)
                here = intersect(held, value.part)
                into = out[here.start - value.part.start : here.stop - value.part.start]
                into.copy_(found[here.start - held.start : here.stop - held.start])
            del values  # as in `read`
