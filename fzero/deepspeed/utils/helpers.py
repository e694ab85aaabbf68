"""Helpers: logs of some ranks, loaders that begin anew, and marks of modules that mean nothing here."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from fzero.base.arguments import check_arguments

logger = logging.getLogger("fzero")


@check_arguments
def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these global ranks, by default, and for -1, on all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if ranks is None or rank in ranks or -1 in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


class RepeatingLoader:
    """An iterator that begins a loader anew at its end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def set_z3_leaf_modules(model: Any, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True) -> list[Any]:
    """The modules of these classes, or names of classes. The mark does nothing: what is gathered together is a bucket,
    on every rank in one order."""
    return [x for x in model.modules() if type(x) in leaf_module_classes or type(x).__name__ in leaf_module_classes]


def set_z3_leaf_modules_by_name(model: Any, names: Sequence[str], raise_if_not_found: bool = True) -> list[Any]:
    """The modules at these dotted paths. The mark does nothing, as in `set_z3_leaf_modules`."""
    return [x for name, x in model.named_modules() if name in names]


unset_z3_leaf_modules = set_z3_leaf_modules
