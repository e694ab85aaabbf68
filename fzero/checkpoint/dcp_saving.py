"""Writing folders of `torch.distributed.checkpoint`: torch plans and writes, each rank gives its own slices.

torch takes any tensor that says of itself which rectangles of a whole it has. A slice is a range of a flattened leaf,
and a range is at most `2 * ndim - 1` rectangles (see `fzero.layout.boxes`). Nothing is gathered.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.base import torch_private, tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.checkpoint.pieces import CheckpointPlan, plan
from fzero.files import load
from fzero.layout.boxes import Box, boxes
from fzero.layout.ranges import tile
from fzero.ranks.ranks import Ranks
from fzero.ranks.together import gather_words
from fzero.state.publishing import Publication, find_common_ranks, give_name, open_temporary
from fzero.state.sources import Source, TensorSource
from fzero.state.splits import list_positions
from fzero.values.sharded import Sharded


@check_arguments
def save_dcp(path: str | os.PathLike[str], values: tree.Tree) -> None:
    """Write a tree as a folder that `torch.distributed.checkpoint.load` and `dcp_to_torch_save` read. A leaf's key is
    its dotted path. Leaves are those of `fzero.checkpoint.save`; numbers and strings are stored as they are.

    All ranks of the mesh call `save_dcp` together, and see one filesystem. The folder appears when it is complete;
    before, it has another name in the same directory. Such a folder of a process that was killed is removed by the next
    save into the directory. torch plans on the first rank of the mesh: for many ranks and leaves,
    `fzero.checkpoint.save` is faster.

    Raises:
        FzeroError: for a leaf that a checkpoint cannot hold; where `path` is there already; on all ranks, where a rank
            cannot write, or where ranks save different trees.
    """
    on = find_common_ranks(zip(tree.paths(values), tree.leaves(values)))
    target, plans = Path(path), list[CheckpointPlan]()

    def make_plan() -> list[str]:
        plans.append(plan(values, on))
        if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
            raise FzeroError(str(target), "is there already", "give a new folder, or remove this one first")
        return plans[0].list_lines()

    def take() -> AbstractContextManager[str]:
        target.parent.mkdir(parents=True, exist_ok=True)
        return open_temporary(target, is_folder=True)

    def write(name: str) -> Path:
        _write(target.parent / name, plans[0], on, f"save_dcp to {path}")
        return target.parent / name

    gather = gather_words(on.members, "save_dcp", f"to {path}")
    publication = Publication(target, "save_dcp", gather, on.number == 0)
    publication.run(make_plan, take, write, lambda written: give_name(written[0], target))


def _write(folder: Path, of: CheckpointPlan, on: Ranks, what: str) -> None:
    """Let torch write the files of all ranks, and its metadata. Raises the error of this rank."""
    # here, as below: these imports take most of a second
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {key: _view(leaf) for key, leaf in of.leaves.items()} | of.values
    group = on.members.group
    failed: Mapping[int, Any] = {}
    with on.members.begin(what), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:
            save(state, storage_writer=FileSystemWriter(folder), process_group=group, no_dist=group is None)
        except CheckpointException as error:  # no subclass of Exception; torch raises it on all ranks
            failed = error.failures
    mine = 0 if group is None else dist.get_rank(group)
    if mine in failed:
        raise failed[mine][0]


def _view(leaf: Sharded | Source) -> Tensor:
    """A leaf as torch takes it."""
    if isinstance(leaf, Sharded):
        if not leaf.numel():  # it has no rectangles, and torch would forget it
            return torch.empty(leaf.global_shape, dtype=leaf.dtype)
        return leaf.local.detach().view(leaf.shape) if leaf.is_replicated else Slices(leaf)
    if isinstance(leaf, TensorSource) and leaf.dtype == leaf.tensor.dtype:
        return leaf.tensor
    whole = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
    leaf.read(0, whole.view(-1))
    return whole


def _list_boxes(leaf: Sharded) -> Iterator[tuple[Box, Tensor]]:
    """The rectangles of a whole leaf that this process has, and their values."""
    layout, local = leaf.form.layout, load(leaf.local.detach()).view(-1)
    for held, place in list_positions(local, layout, leaf.ranks):
        shape, dim = list(leaf.shape), 0
        if (split := leaf.leaf.split) is not None:  # each of the parts that a dim is split into has a dim of its own
            dim, size = split.dim, leaf.shape[split.dim] // split.parts
            shape[dim : dim + 1] = split.parts, size
        found = boxes(tuple(shape), leaf.part)
        for box, at in zip(found, tile(torch.Size(box.size).numel() for box in found)):
            values = held[at.start : at.stop].view(box.size)
            if split is None:
                yield box, values
                continue
            for number, each in enumerate(values.unbind(dim), box.start[dim]):
                first = (number * layout.splits + place) * size + box.start[dim + 1]
                start = (*box.start[:dim], first, *box.start[dim + 2 :])
                yield Box(start, tuple(each.shape)), each


class Slices(Tensor):
    """A leaf of which this rank holds a slice, for `torch.distributed.checkpoint` to write. Of torch's protocol
    `_Checkpointable`; a tensor of the leaf's global shape, without memory of its own."""

    boxes: dict[tuple[int, ...], tuple[Box, Tensor]]

    def __new__(cls, leaf: Sharded) -> Slices:
        view: Slices = torch_private.make_wrapper_subclass(cls, leaf.global_shape, dtype=leaf.dtype, device=leaf.device)
        view.boxes = {box.start: (box, values) for box, values in _list_boxes(leaf)}
        return view

    def __init__(self, leaf: Sharded) -> None:
        pass  # `__new__` did it

    def __create_write_items__(self, key: str, value: Any) -> list[Any]:
        """What of the tensor this rank writes."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        items = []
        for box, _ in self.boxes.values():
            chunk = ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size))
            data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size())
            items.append(WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The values of one rectangle."""
        return self.boxes[tuple(index.offset)][1]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse a kernel of torch: an asynchronous save would copy memory that is not there."""
        raise FzeroError(str(func), "got a leaf for torch.distributed.checkpoint.save", "save it with nothing else")
