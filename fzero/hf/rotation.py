"""Rotation: attention of a decoder of transformers whose keys and values go around the ranks of a sequence.

`fzero.parallel.ring_attention` makes masks of its own: of places, a window and documents. What a model asks a mask for
is read from the functions of `masking_utils` that it composes, and anything else is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import masking_utils

from fzero import parallel
from fzero.base.errors import FzeroError
from fzero.hf.styles import Axis, take_block

WAY_OUT = "leave rotate out"
IGNORED = ("position_ids", "use_cache", "is_causal", "output_attentions")
"""Arguments of attentions that say nothing about numbers here: places are those of the sequence."""


class Sight(NamedTuple):
    """What a model's mask lets queries see, beside earlier places: the last `window` ones, and their own document."""

    window: int | None
    documents: Tensor | None  # [rows, places of this rank]


def check_rotation(model: Any) -> None:
    """Refuse a model whose attention does more than a softmax of scores by places.

    Raises:
        FzeroError: naming the module, or the configuration.
    """
    for path, module in model.named_modules():
        if isinstance(getattr(module, "sinks", None), Tensor):
            raise FzeroError(f"{path}.sinks", "are part of its softmax, and rotated keys have none", WAY_OUT)
        rate = getattr(module, "attention_dropout", 0.0)
        if module.training and isinstance(rate, (int, float)) and rate > 0:
            problem = f"is {rate}, and attention to rotated keys drops nothing"
            raise FzeroError(f"{path}.attention_dropout", problem, f"set it to 0, or {WAY_OUT}")


def read_sight(function: Any, order: Tensor, axis: Axis, positions: Tensor | None, padding: Tensor | None) -> Sight:
    """What a mask that a model composed lets queries see. `positions` are those of packed documents in the sequence.

    Raises:
        FzeroError: for a mask of padding, and any other than causal ones with windows and documents.
    """
    if padding is not None:
        problem = "is given, and attention to rotated keys hides no padding"
        raise FzeroError(
            "attention_mask", problem, f"leave it out, with padding behind and -100 in labels, or {WAY_OUT}"
        )
    windows: list[int] = []
    kinds = set(_list_kinds(function, windows))
    if "causal" not in kinds:
        raise FzeroError("attention_mask: that of the model", "is not causal", WAY_OUT)
    documents = None
    if "documents" in kinds:
        assert positions is not None
        numbers = masking_utils.find_packed_sequence_indices(positions)
        documents = None if numbers is None else take_block(numbers.index_select(1, order), axis, 1)
    return Sight(min(windows, default=None), documents)


def _list_kinds(function: Any, windows: list[int]) -> list[str]:
    if function is masking_utils.causal_mask_function:
        return ["causal"]
    maker = function.__qualname__.partition(".")[0]
    cells = zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()))
    held = dict(cells)
    if maker == "and_masks":
        return [kind for each in held["mask_functions"] for kind in _list_kinds(each, windows)]
    if maker == "remap_positions_for_packed_sequence":  # places of a document, by which chunks are counted
        return _list_kinds(held["mask_function"], windows)
    if maker == "packed_sequence_mask_function":
        return ["documents"]
    if maker == "sliding_window_overlay":
        windows.append(held["sliding_window"])
        return ["window"]
    problem = f"is made by {function.__qualname__}, which attention to rotated keys does not know"
    raise FzeroError("attention_mask: that of the model", problem, WAY_OUT)


def rotate(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, sight: Any, axis: Axis, how: dict[str, Any]
) -> Tensor:
    """The attention of a module, [rows, places of this rank, heads, size].

    Raises:
        FzeroError: for a mask that is not of `read_sight`, and an argument of the attention that is not known.
    """
    where = type(module).__name__
    scale = how.get("scaling")
    window = how.get("sliding_window")
    if not isinstance(sight, Sight):
        raise FzeroError(f"{where}: attention_mask", "is none that its model asked masking_utils for", WAY_OUT)
    if window is not None and window != sight.window:
        problem = f"is {window}, and the mask of its model has {sight.window or 'none'}"
        raise FzeroError(f"{where}: sliding_window", problem, WAY_OUT)
    for name, x in how.items():
        is_said = x is not None and (isinstance(x, Tensor) or (x is not False and x != 0.0))
        if is_said and name not in (*IGNORED, "scaling", "sliding_window"):
            raise FzeroError(f"{where}: {name}", "is given, and attention to rotated keys does not have it", WAY_OUT)
    return parallel.ring_attention(
        query, key, value, axis=axis, window=sight.window, documents=sight.documents, scale=scale, rotate=True,
        balanced=True,
    ).transpose(1, 2)  # fmt: skip
