"""Loading: the batches of `training_data`, in the order of DeepSpeed's loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from fzero.base.errors import FzeroError
from fzero.base.mesh import mesh_shape
from fzero.data import loader
from fzero.data.parts import find_part
from fzero.deepspeed.settings import Settings
from fzero.ranks.live import find_ranks


def load(data: Any, collate_fn: Callable[..., Any] | None, settings: Settings, mesh: Any) -> Any:
    """The loader of `training_data`: each rank's part of batches. All ranks call `load` together.

    Raises:
        FzeroError: for data without a batch; where ranks have other numbers of examples; as `fzero.data.loader`, for
            an iterable dataset.
    """
    world = mesh_shape(mesh).size()
    options: dict[str, Any] = {} if collate_fn is None else {"collate_fn": collate_fn}
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):  # DeepSpeed takes none
        return loader(data, settings.micro_batch_size * world, mesh, drop_last=settings.drop_last, **options)
    if not hasattr(data, "__len__"):
        raise FzeroError("training_data", f"is a {type(data).__name__} without a length", "give it __len__")
    find_ranks(mesh).agree("training_data", [f"data training_data: {len(data)} examples"])
    if not len(data) or (settings.drop_last and len(data) // world < settings.micro_batch_size):
        problem = f"has {len(data)} examples, and a batch of {world} ranks {settings.micro_batch_size * world}"
        raise FzeroError("training_data", problem, "give more, or dataloader_drop_last false")
    samplers = [DistributedSampler[Any](data, world, rank) for rank in find_part(world, mesh, None)]
    return TrainingLoader(data, Order(samplers, settings.micro_batch_size, settings.drop_last), options)


class Order(Sampler[list[int]]):
    """The examples of each batch: those that torch's DistributedSampler, with seed 0, gives the ranks of this process.
    Examples are repeated until all ranks have as many. So the last batch may be smaller, and is so on all ranks.

    As in DeepSpeed each epoch has one order, unless `set_epoch` is called.
    """

    def __init__(self, samplers: list[DistributedSampler[Any]], rows: int, drop_last: bool) -> None:
        self._samplers = samplers
        self._batches = [BatchSampler(each, rows, drop_last) for each in samplers]

    def set_epoch(self, epoch: int) -> None:
        """Take the order of another epoch, from the next iteration on."""
        for each in self._samplers:
            each.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        for parts in zip(*self._batches):
            yield [index for part in parts for index in part]

    def __len__(self) -> int:
        return len(self._batches[0])


class TrainingLoader:
    """The loader that `initialize` returns: `data_sampler` has the order, `dataset` the examples."""

    def __init__(self, dataset: Any, order: Order, options: dict[str, Any]) -> None:
        self.dataset, self.data_sampler = dataset, order
        seeds = torch.Generator()  # of workers: torch's own stays as it is
        pins = torch.cuda.is_available()
        self._loads: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=order, generator=seeds, pin_memory=pins, **options
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loads)

    def __len__(self) -> int:
        return len(self.data_sampler)
