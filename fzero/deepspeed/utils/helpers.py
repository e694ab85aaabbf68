"""Helpers: logs of some ranks, loaders that begin anew, and marks of modules that mean nothing here."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError

logger = logging.getLogger("fzero")


@check_arguments
def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these global ranks, by default, and for -1, on all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if ranks is None or rank in ranks or -1 in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


class RepeatingLoader:
    """An iterator that begins a loader anew at its end.

    Raises:
        FzeroError: for what cannot be iterated; where the loader begins anew and gives no batch.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        if not isinstance(loader, Iterable):
            raise FzeroError("RepeatingLoader", f"loader is {loader!r:.80}", "give a DataLoader, or a list of batches")
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for batch in self._batches:
            return batch
        self._batches = iter(self.loader)
        for batch in self._batches:
            return batch
        way_out = "give one with batches, and none that ends for good, such as a generator"
        raise FzeroError("RepeatingLoader", "the loader gives no batch", way_out)


def set_z3_leaf_modules(model: Any, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True) -> list[Any]:
    """The modules of these classes, or names of classes. The mark does nothing: what is gathered together is a bucket,
    on every rank in one order.

    Raises:
        FzeroError: for a model without such a module, unless `raise_if_not_found` is False.
    """
    found = [x for x in model.modules() if type(x) in leaf_module_classes or type(x).__name__ in leaf_module_classes]
    return _refuse_none(model, leaf_module_classes, found, raise_if_not_found)


def set_z3_leaf_modules_by_name(model: Any, names: Sequence[str], raise_if_not_found: bool = True) -> list[Any]:
    """The modules at these dotted paths. The mark does nothing, as in `set_z3_leaf_modules`, whose errors these are."""
    found = [x for name, x in model.named_modules() if name in names]
    return _refuse_none(model, names, found, raise_if_not_found)


def _refuse_none(model: Any, asked: Sequence[Any], found: list[Any], raises: bool) -> list[Any]:
    if raises and not found:
        names = [each if isinstance(each, str) else each.__name__ for each in asked]
        way_out = "give classes or paths that it has, or raise_if_not_found=False"
        raise FzeroError("leaf modules", f"{type(model).__name__} has none of {names}", way_out)
    return found


unset_z3_leaf_modules = set_z3_leaf_modules
