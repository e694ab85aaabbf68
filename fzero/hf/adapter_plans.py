"""Adapter plans: what a rule of a tensor plan means where LoRA of peft is put around the layer that the rule names.

peft puts a layer into a module of its own, `q_proj.base_layer`, beside two linear layers `q_proj.lora_A.NAME` and
`q_proj.lora_B.NAME`. A plan names `q_proj`. The rule becomes one of the inner layer, and of those of the two whose
outputs, or inputs, are the layer's:

    outputs in parts      lora_B has the same parts of its outputs; lora_A is whole
    inputs in parts       lora_A has the same parts of its inputs, and is summed; lora_B is whole
    input and output whole, and others without parts      both are whole
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from fzero.base.errors import FzeroError
from fzero.hf.adapters import has_adapters


class LayerPlace(NamedTuple):
    """Where a module or parameter is in a model before adapters were put in. `role` is "" for what was there before,
    "lora_A", "lora_B", or "added" for what else peft adds."""

    name: str
    role: str = ""


_OUTPUTS = ("colwise", "packed_colwise")
_INPUTS = ("rowwise", "rowwise_split_input", "rowwise_rep")
_WHOLE = (
    *("colwise_gather_output", "colwise_rep", "embedding_rowwise", "embedding_colwise"),
    *("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"),
)


def find_model(model: Any) -> Any:
    """The model of transformers in a model of peft; the model itself where it is none of peft."""
    return model.get_base_model() if has_adapters(model) else model


def check_adapters(model: Any) -> None:
    """Refuse adapters other than LoRA of linear layers and embeddings: no rule says what ranks have of these.

    Raises:
        FzeroError: naming the module, or the configuration.
    """
    way_out = "leave tp, ep and sp out, or use LoraConfig with target_modules"
    for name, config in model.peft_config.items() if has_adapters(model) else ():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            problem = f"adapter {name!r} is {kind}, and ranks can share LoRA alone"
            raise FzeroError("model", problem, way_out)
    for path, unit in _find_units(model).items():
        wrong = _find_wrong(unit)
        if wrong is not None:
            raise FzeroError(path, f"{wrong}, which ranks cannot share", way_out)


def _find_units(model: nn.Module) -> dict[str, Any]:
    """The modules of peft in the places of others, by their paths."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = BaseTunerLayer, AuxiliaryTrainingWrapper
    return {path: module for path, module in model.named_modules() if isinstance(module, kinds)}


def _find_wrong(unit: Any) -> str | None:
    """What a module of peft is, or has, that no rule is for; None for LoRA, and for a module that is trained whole."""
    from peft.tuners import lora
    from peft.utils.other import ModulesToSaveWrapper

    if type(unit) not in (lora.Linear, lora.Embedding, ModulesToSaveWrapper):
        return f"is a {type(unit).__module__}.{type(unit).__name__} of peft"
    variants = getattr(unit, "lora_variant", {})
    return f"has {type(next(iter(variants.values()))).__name__}" if variants else None


def list_places(model: nn.Module, names: Iterable[str]) -> dict[str, LayerPlace]:
    """Each of the names of modules and parameters of a model -> its place before adapters were put in."""
    base, units = find_model(model), _find_units(model)
    start = "" if base is model else next(path for path, module in model.named_modules() if module is base)
    places: dict[str, LayerPlace] = {}
    for name in names:
        if not start:
            places[name] = _find_place(name, "", units) if units else LayerPlace(name)
        elif name == start or name.startswith(f"{start}."):
            places[name] = _find_place(name[len(start) + 1 :], start, units)
    return places


def _find_place(name: str, start: str, units: Mapping[str, Any]) -> LayerPlace:
    words, path, found = iter(name.split(".") if name else ()), start, list[str]()
    for word in words:
        if path in units:
            if word == "modules_to_save":
                path = f"{path}.{word}.{next(words, '')}"
            elif word in ("base_layer", "original_module"):
                path = f"{path}.{word}"
            else:
                role = word if word in ("lora_A", "lora_B") and next(words, None) is not None else "added"
                return LayerPlace(".".join(found), role)
            continue
        found.append(word)
        path = f"{path}.{word}".lstrip(".")
    return LayerPlace(".".join(found), "added" if path in units else "")


def fit_style(place: LayerPlace, style: str) -> str | None:
    """The style of what stands in a place, for the style of the layer there; None for none.

    Raises:
        FzeroError: for a style whose parts are none of a linear layer.
    """
    if place.role in ("", "added"):
        return None if place.role else style
    word, is_first = style.split()[0], place.role == "lora_A"
    if word in _OUTPUTS:
        return None if is_first else style
    if word in _INPUTS:
        return "rowwise" if is_first else None
    if word == "rowwise_own_block":
        return "rowwise" if is_first else "colwise"
    if word in _WHOLE:
        return None
    problem = f"has adapters, and the style {style!r}, by which ranks cannot share them"
    raise FzeroError(place.name, problem, "leave it out of target_modules, or give plan= another style for it")


def find_owner(modules: Mapping[str, Any], name: str) -> Any:
    """The module that a layer belongs to, past what peft put around the layer."""
    for path in _list_parents(name):
        owner = modules[path]
        if not isinstance(owner, nn.ModuleDict) and not hasattr(owner, "base_layer") and not _is_wrapper(owner):
            return owner
    return modules[""]


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__module__.startswith("peft.")


def _list_parents(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name
