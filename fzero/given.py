"""What a step is given: the arguments of a call as its program takes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.flags import Flag
from fzero.base.sizes import format_size
from fzero.files import address_of, duplicate
from fzero.program.program import Program
from fzero.ranks.ranks import Ranks
from fzero.state.move import move
from fzero.values.sharded import Sharded

_log = logging.getLogger("fzero")


def place_state(program: Program, values: Sequence[Any], settle: Callable[[], None] = lambda: None) -> list[Any]:
    """The arguments `values` of a program's step, with state where the program has it. State that lies elsewhere is
    moved, after `settle`. The objects stay the same; one that stands for several arguments is moved for each."""
    places = {i: x.place for i, x in enumerate(program.arguments) if x.bucket is not None}
    away = [i for i, place in places.items() if values[i].place != place]
    if not away:
        return list(values)
    moved, seen = list(values), {id(x) for i, x in enumerate(values) if i not in away}
    for i in away:
        if id(moved[i]) in seen:
            moved[i] = Sharded.of_form(moved[i].local, moved[i].form, moved[i].origin)
        seen.add(id(moved[i]))
    settle()
    nbytes = sum(moved[i].local.nbytes for i in away)
    _log.info("%s moves %s of state to where its memory budget has it", program.name, format_size(nbytes))
    move({i: moved[i] for i in away}, places)
    return moved


def copy_aliases(values: Sequence[Tensor], donated: Sequence[int]) -> list[Tensor]:
    """The tensors of arguments, with a copy of each donated tensor that the step must not write to: one that lies in
    memory of another argument, or an inference tensor outside of inference mode."""
    tensors = [value.local if isinstance(value, Sharded) else value for value in values]
    if not donated:
        return tensors
    pointers = [address_of(tensor) if tensor.numel() else None for tensor in tensors]
    written = [pointers[i] for i in donated]
    # a batch may be a view of state
    storages = [x.untyped_storage() for x, value in zip(tensors, values) if x is value]
    batches = [range(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages]
    is_shared = len({*pointers} - {None}) < len(pointers) - pointers.count(None)
    is_batch = any(pointer is not None and _is_within(pointer, batches) for pointer in written)
    is_frozen = not torch.is_inference_mode_enabled() and any(tensors[i].is_inference() for i in donated)
    if is_shared or is_batch or is_frozen:
        taken = set(donated)
        kept = {pointer for i, pointer in enumerate(pointers) if i not in taken}
        for i, pointer in zip(donated, written):
            if (pointer is not None and (pointer in kept or _is_within(pointer, batches))) or is_frozen:
                tensors[i] = duplicate(tensors[i])
            kept.add(pointer)
    return tensors


def _is_within(address: tuple[str, int], batches: Sequence[range]) -> bool:
    """Whether an address is one of memory that a batch lies in."""
    file, start = address
    return not file and any(start in batch for batch in batches)


def list_flags(program: Program, values: Sequence[Any]) -> list[Flag]:
    """The flags among the arguments `values` of a program's step."""
    given = [(flag, values[i]) for i, flag in program.flags]
    return [flag(value.local if isinstance(value, Sharded) else value) for flag, value in given]


def refuse_mesh(leaf: Sharded, on: Ranks) -> FzeroError:
    """The error for state that does not lie on the ranks of a step."""
    theirs, ours = ([x.mesh, "every rank" if x.rank is None else f"rank {x.rank}"] for x in (leaf.on, on))
    way_out = "partition the tree on the step's mesh"
    if on.follow(leaf.on) is leaf.on:
        way_out = f"give partition state={on.mesh.shard_axes} for it too, or like= the leaves that lie so"
    return FzeroError(
        leaf.path,
        "was partitioned on another mesh of the same shape"
        if theirs == ours
        else f"was partitioned on {theirs[0]} as {theirs[1]}, the step runs on {ours[0]} as {ours[1]}",
        way_out,
    )
