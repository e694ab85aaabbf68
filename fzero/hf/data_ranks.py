"""Data ranks: accelerate's view of a mesh on which some ranks take the same batches, because they share layers."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.mesh import mesh_shape
from fzero.hf.sharing import ALONE, Sharing
from fzero.hf.together import Together
from fzero.hf.wishes import Wish
from fzero.ranks.live import find_ranks
from fzero.ranks.ranks import Ranks


class DataRanks(accelerate.Accelerator):
    """accelerate's Accelerator, which counts ranks along data axes alone: those along model axes take the same batches.

    `num_processes` and `process_index` say which rows a loader draws. `gather` returns the values of one rank of those
    with the same batches. Without `share` all ranks count.
    """

    _chosen: tuple[int, ...] | None = None  # for each batch the first process that takes it
    _position = 0

    @classmethod
    def share(cls, accelerator: Any, on: Ranks, data: tuple[str, ...]) -> None:
        """Let an Accelerator count the ranks along `data` alone. It becomes a `DataRanks`."""
        axis, first = on.mesh.join(data), dict[int, int]()
        for number, process in enumerate(on.ranks):
            first.setdefault(on.mesh.position(number, axis), process)
        accelerator.__class__ = cls  # the Trainer of transformers constructs it
        accelerator._chosen = tuple(first[position] for position in sorted(first))
        accelerator._position = on.mesh.position(on.number, axis)

    @property
    def num_processes(self) -> int:
        return super().num_processes if self._chosen is None else len(self._chosen)

    @property
    def process_index(self) -> int:
        return super().process_index if self._chosen is None else self._position

    def prepare_data_loader(self, *args: Any, **named: Any) -> Any:
        loader = super().prepare_data_loader(*args, **named)
        if isinstance(loader, DataLoaderDispatcher):
            problem = "gives each rank other rows of a stream, and ranks along model axes take the same"
            way_out = 'give accelerator_config={"dispatch_batches": False}'
            raise FzeroError("TrainingArguments: dispatch_batches", problem, way_out)
        return loader

    def gather(self, tensor: Any) -> Any:
        return accelerate.utils.recursively_apply(self._choose, super().gather(tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object:
            raise _refuse_objects()
        try:
            accelerate.utils.recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError as error:
            problem = "has values that are no tensors, and objects would be those of all ranks, some with equal rows"
            raise FzeroError("gather_for_metrics: input_data", problem, "give tensors alone") from error
        return super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        def add_up(x: Tensor) -> Tensor:
            return self.gather(x.unsqueeze(0)).sum(0)

        if reduction == "none":
            return tensor
        ranks = self.num_processes if reduction == "mean" else 1
        return accelerate.utils.recursively_apply(lambda x: add_up(x) / ranks * scale, tensor)

    def _choose(self, gathered: Tensor) -> Tensor:
        """The rows of the chosen processes, of those that all processes gave."""
        if self._chosen is None:
            return gathered
        rows = gathered.unflatten(0, (self.state.num_processes, -1))
        return rows[torch.tensor(self._chosen, device=rows.device)].flatten(0, 1)


def _refuse_objects() -> FzeroError:
    problem = "is True, and objects are those of all ranks, of which some have the same rows"
    return FzeroError("TrainingArguments: eval_use_gather_object", problem, "leave it out")


class Sharers(Together):
    """The part of the Trainer where ranks share the layers of a model.

    `_wish` is what the user gave, and `_sharing` what it means for the model.
    """

    accelerator: Any
    _may_share = True
    _wish: Wish = Wish()
    _sharing: Sharing = ALONE

    @property
    def _data(self) -> tuple[str, ...] | None:
        """The axes along which ranks take different batches; None for what the names of axes say."""
        return self._wish.find_data(self.mesh) if self._wish.axes else None

    @property
    def _data_of_state(self) -> tuple[str, ...] | None:
        """The data axes of a program of state alone, in which nothing differs along an axis of parts of a sequence."""
        of_layers = self._wish._replace(sp=None)
        return (of_layers.find_data(self.mesh) or mesh_shape(self.mesh).names) if self._wish.axes else None

    @property
    def _copies(self) -> int:
        """How many processes take the same batch."""
        return self.args.world_size // self.accelerator.num_processes

    def _count_parts(self) -> float:
        """Into how many parts a batch of this process is cut: more than one on a virtual mesh alone."""
        sizes, data = mesh_shape(self.mesh), self._data
        return (sizes.size() if data is None else sizes.size(sizes.join(data))) / self.accelerator.num_processes

    def create_accelerator_and_postprocess(self) -> None:
        """As transformers' `create_accelerator_and_postprocess`."""
        if self._wish.axes and not self._may_share:
            problem = f"are {self._wish[:3]}, and {type(self).__name__} calls the model outside of programs"
            raise FzeroError("tp, ep, sp", problem, "leave them out, or give the data to fzero.hf.Trainer")
        if self._wish.sp is not None and self.args.neftune_noise_alpha:
            problem = f"is {self.args.neftune_noise_alpha}, and its noise would be the same in each part of a sequence"
            raise FzeroError("TrainingArguments: neftune_noise_alpha", problem, "leave it out, or leave sp out")
        super().create_accelerator_and_postprocess()
        if self._data is not None and self.args.world_size > 1:
            if self.args.eval_use_gather_object:
                raise _refuse_objects()
            DataRanks.share(self.accelerator, find_ranks(self.mesh), self._data)

    def get_total_train_batch_size(self, args: Any) -> int:
        """As transformers' `get_total_train_batch_size`: the rows of an update."""
        return super().get_total_train_batch_size(args) // self._copies

    def floating_point_ops(self, inputs: Any) -> int:
        """As transformers' `floating_point_ops`: those of this rank."""
        return super().floating_point_ops(inputs) // self._copies
