"""Head counts: whether ranks divide the heads, experts and other numbers of modules that a plan splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fzero.base.errors import FzeroError
from fzero.hf.styles import Axis
from fzero.hf.tensor_plans import Rule

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "qk_head_dim")


def check_counts(model: nn.Module, rules: Mapping[str, Rule], ranks: Mapping[Axis, int]) -> None:
    """Refuse counts that the ranks along their axis do not divide.

    Raises:
        FzeroError: naming the module, the number, the ranks, and the numbers of ranks that divide.
    """
    modules = dict(model.named_modules())
    for name, rule in rules.items():
        if name not in modules:
            continue
        module, world = modules[name], ranks[rule.axis]
        if rule.name == "ep_dispatch_experts":
            _check(name, "experts", module.num_experts, world, rule.axis)
        elif rule.name.startswith("divide "):
            for attribute in rule.name.split()[1:]:
                _check(name, attribute, getattr(module, attribute), world, rule.axis)
        elif rule.name == "colwise":
            for what, count in _list_heads(modules[name.rpartition(".")[0]], module):
                _check(name, what, count, world, rule.axis)


def _list_heads(parent: Any, module: Any) -> Iterator[tuple[str, int]]:
    """The heads that the outputs of a layer hold, as its parent counts them."""
    outputs = getattr(module, "out_features", None)
    if not isinstance(outputs, int):
        return
    size = next((x for x in map(vars(parent).get, _HEAD_SIZES) if isinstance(x, int) and x > 0), None)
    if size is not None and outputs % size == 0:
        yield "heads", outputs // size
        return
    heads = next((x for x in map(vars(parent).get, _HEADS) if isinstance(x, int) and x > 0), None)
    if heads is not None and outputs % heads == 0:
        yield "heads", heads


def _check(name: str, what: str, count: int, ranks: int, axis: Axis) -> None:
    if count % ranks:
        divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        problem = f"has {count} {what}, to be split over {ranks} ranks along {axis!r}"
        raise FzeroError(name, problem, f"take a mesh with {divisors} ranks along it, or give plan= without this rule")
