"""Vocabulary: rules by which ranks that have stages of a model share its embedding and its head, by words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from fzero.base.mesh import VirtualMesh
from fzero.hf.styles import Axis, find_style, list_names
from fzero.hf.tensor_plans import Rule

EMBEDDING, HEAD = "embedding_rowwise", "colwise_gather_output"


def spread_vocabulary(model: Any, rules: Mapping[str, Rule], stages: Axis, mesh: VirtualMesh) -> dict[str, Rule]:
    """Rules, and those of the embedding and the head along the axis of stages: each rank has some of the words, and the
    sum, or the gather, of all is the same on all ranks. Ranks that share these layers already have parts of the parts.

    Modules with another style, and a vocabulary that the ranks do not divide, stay as they are.
    """
    made, names = dict(rules), {id(module): name for name, module in model.named_modules()}
    ends = [(_find(model, "get_input_embeddings"), nn.Embedding, EMBEDDING),
            (_find(model, "get_output_embeddings"), nn.Linear, HEAD)]  # fmt: skip
    found: list[tuple[str, Any, str]] = [
        (names[id(x)], x, style) for x, kind, style in ends if isinstance(x, kind) and id(x) in names
    ]
    if any(name in rules and rules[name].name != style for name, _, style in found):
        return made
    axes = (stages, *(rules[name].axis for name, *_ in found if name in rules))
    along = {name for axis in axes for name in list_names(axis)}
    axis = tuple(name for name in mesh.names if name in along)
    ranks = math.prod(map(mesh.size, axis))
    for name, module, style in found:
        if module.weight.shape[0] % ranks == 0 and (how := find_style(style)) is not None:
            made[name] = Rule(style, how, axis[0] if len(axis) == 1 else axis)
    return made


def find_axis_of_logits(model: Any, rules: Mapping[str, Rule], stages: Axis) -> Axis:
    """The axis whose ranks have parts of the head; that of stages, where each rank has all of it."""
    head = _find(model, "get_output_embeddings")
    name = next((name for name, module in model.named_modules() if module is head), "")
    return rules[name].axis if name in rules and rules[name].name == HEAD else stages


def _find(model: Any, method: str) -> Any:
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
