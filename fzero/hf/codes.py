"""Codes: the frozen weights of a Trainer's model in 8 or 4 bits, as QLoRA holds them below adapters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fzero import quantize, tree
from fzero.base.embeddings import is_embedding
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.hf.adapters import find_adapter_paths, has_adapters
from fzero.values.quantized import is_quantized

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"bits": 4, "block": 64, "levels": "nf4"},
    "nf4-dq": {"bits": 4, "block": 64, "levels": "nf4", "double_quant": True},
    "int8": {"bits": 8, "block": 256},
}
"""The names that `quantize=` of a Trainer takes, and the keywords of `fzero.quantize` that they stand for."""


def read_quantize(given: Any) -> dict[str, Any] | None:
    """The keywords of `fzero.quantize` that `quantize=` of a Trainer asks for. None without it.

    Raises:
        FzeroError: for what is neither a name of `KINDS` nor such keywords; for a configuration of bitsandbytes.
    """
    if given is None:
        return None
    if isinstance(given, str) and given in KINDS:
        return KINDS[given]
    if isinstance(given, Mapping):
        names = [
            each.name for each in inspect.signature(quantize).parameters.values() if each.kind is each.KEYWORD_ONLY
        ]
        unknown = [name for name in given if name not in names]
        if not unknown:
            return dict(given)
        problem = f"has {unknown[0]!r}, which fzero.quantize does not take"
        raise FzeroError("quantize", problem, f"give a dict of {', '.join(names)}, or {_NAMES}")
    if _is_of_bitsandbytes(given):
        raise FzeroError("quantize", f"is a {type(given).__name__}", f"give {suggest(given)}")
    raise FzeroError("quantize", f"is {given!r:.80}", f"give {_NAMES}, or a dict of keywords of fzero.quantize")


_NAMES = " or ".join(", ".join(f'"{name}"' for name in KINDS).rsplit(", ", 1))


def suggest(config: Any) -> str:
    """What to give as `quantize=` in the place of a configuration of bitsandbytes."""
    held = config if isinstance(config, Mapping) else vars(config)
    is_of_8_bits = any(held.get(name) for name in ("load_in_8bit", "_load_in_8bit"))
    of_4_bits = "nf4-dq" if held.get("bnb_4bit_use_double_quant") else "nf4"
    return f'quantize="{"int8" if is_of_8_bits else of_4_bits}"'


def _is_of_bitsandbytes(given: Any) -> bool:
    method = getattr(given, "quant_method", None)
    return getattr(method, "value", method) == "bitsandbytes"


def quantize_base(params: tree.Tree, model: nn.Module, how: Mapping[str, Any]) -> tree.Tree:
    """Parameters in slices, with those of the base model as codes. `how` are keywords of `fzero.quantize`.

    By default these are the frozen floating leaves of two or more dimensions and at least one block, but no adapters,
    no embeddings, and not the head that returns logits, which bitsandbytes leaves alone, too. Leaves that are quantized
    already stay.

    Raises:
        FzeroError: as `fzero.quantize`.
    """
    if how.get("where") is None:
        how = {**how, "where": _make_choice(model, how.get("block", KINDS["int8"]["block"]))}
    return quantize(params, **how)


def _make_choice(model: Any, block: int) -> Callable[[str, Any], bool]:
    adapters = find_adapter_paths(model) if has_adapters(model) else {}
    head = find_head(model)
    of_head = {id(x) for x in head.parameters()} if head is not None else set[int]()
    kept = {*adapters, *(path for path, x in model.named_parameters() if id(x) in of_head)}
    return lambda path, leaf: (
        path not in kept
        and not is_quantized(leaf)
        and is_frozen(leaf)
        and not is_embedding(leaf)
        and leaf.ndim >= 2
        and leaf.is_floating_point()
        and leaf.numel() >= block
    )


def find_head(model: Any) -> nn.Module | None:
    """The module that makes logits of a model of transformers; None where it has none."""
    find = getattr(model, "get_output_embeddings", None)
    return None if find is None else find()
