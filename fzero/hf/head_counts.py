"""Head counts: whether ranks divide the heads, experts and other numbers of modules that a plan splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fzero.base.errors import FzeroError
from fzero.hf.adapter_plans import find_owner, list_places
from fzero.hf.styles import Axis
from fzero.hf.tensor_plans import Rule

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "qk_head_dim")


def check_counts(model: nn.Module, rules: Mapping[str, Rule], ranks: Mapping[Axis, int]) -> None:
    """Refuse counts that the ranks along their axis do not divide.

    Raises:
        FzeroError: naming the module, the number, the ranks, and the numbers of ranks that divide.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    for path, place in list_places(model, rules).items():
        if path not in modules or place.role:
            continue
        module, rule, name = modules[path], rules[path], place.name
        world = ranks[rule.axis]
        word, *words = rule.name.split()
        if word == "ep_dispatch_experts":
            _check(name, "experts", _read(name, module, "num_experts"), world, rule.axis)
        elif word == "divide":
            for attribute in words:
                _check(name, attribute, _read(name, module, attribute), world, rule.axis)
        elif word in ("colwise", "packed_colwise") and hasattr(module, "weight"):
            cut = rule.style.cut(module, "weight", module.weight)
            outputs = 0 if cut is None else module.weight.shape[cut[0]] // cut[1]
            parent = find_owner(modules, path)
            # an embedding has a number for each head, such as a bias of positions
            counts = [outputs] if isinstance(module, nn.Embedding) and cut is not None else _list_heads(parent, outputs)
            for count in counts:
                _check(name, "heads", count, world, rule.axis)


def _read(name: str, module: Any, attribute: str) -> int:
    """The number that a style expects in an attribute of a module."""
    value = getattr(module, attribute, None)
    if not isinstance(value, int):
        problem = f"is a {type(module).__name__}, which has no number {attribute!r}"
        raise FzeroError(name, problem, "give it another style, as plan=")
    return value


def _list_heads(parent: Any, outputs: int) -> Iterator[int]:
    """The heads that so many outputs of a layer hold, as its parent counts them."""
    size = next((x for x in map(vars(parent).get, _HEAD_SIZES) if isinstance(x, int) and x > 0), None)
    if size is not None and outputs % size == 0:
        yield outputs // size
        return
    heads = next((x for x in map(vars(parent).get, _HEADS) if isinstance(x, int) and x > 0), None)
    if heads is not None and outputs % heads == 0:
        yield heads


def _check(name: str, what: str, count: int, ranks: int, axis: Axis) -> None:
    if count % ranks:
        divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        problem = f"has {count} {what}, to be split over {ranks} ranks along {axis!r}"
        way_out = f"take a mesh with {divisors} ranks along it, or plan= other rules for this module"
        raise FzeroError(name, problem, way_out)
