"""State dicts: those of a model or of an optimizer as sources, whole tensors and DTensors of FSDP2 alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.state.rows import RowSource
from fzero.state.sources import Source, TensorSource


@check_arguments
def open_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Source]:
    """The tensors of a state dict as sources by key, nested keys joined by dots. Copies nothing.

    `state_dict` is what `model.state_dict()`, `optimizer.state_dict()` or a function of
    `torch.distributed.checkpoint.state_dict` returned, or a dict of several of these. Values that are no tensors are
    left out. DTensors stay where they are until `load_params` or `load_adam` moves their rows, from rank to rank.

    Raises:
        FzeroError: for a tensor that is neither dense nor a DTensor, and for a DTensor of partial sums.
    """
    return {key: _open(key, value) for key, value in _flatten(state_dict, "")}


def _flatten(value: Any, key: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield key, value
    children = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        yield from _flatten(child, f"{key}.{name}" if key else str(name))


def _open(key: str, value: Any) -> Source:
    if hasattr(value, "local_shards"):
        way_out = "save it with torch.distributed.checkpoint, and open the files with open_dcp"
        raise FzeroError(key, f"is a {type(value).__name__}, as FSDP1 makes them", way_out)
    if not hasattr(value, "placements"):
        return TensorSource(value, key)
    if all(placement.is_replicate() for placement in value.placements):
        return TensorSource(value.to_local(), key)
    return RowSource(value, key)
