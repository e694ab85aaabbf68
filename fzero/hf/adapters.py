"""Adapters: models of peft. Their files hold what was added to a base model, and no base model."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fzero import tree, unpartition
from fzero.base.errors import FzeroError
from fzero.training.models import copy_without_values

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
"""The files of an adapter, by peft's names. Those of an adapter that is not named "default" lie in a folder of its
name."""


CHANGING = ("pissa", "corda", "loftq", "lora_ga")
"""The `init_lora_weights` that put other values into the weights of a base model, by what the names begin with."""


def has_adapters(model: Any) -> bool:
    """Whether this is a model of peft."""
    return "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)


def find_parameter_adapter(model: Any) -> str | None:
    """The path of the first parameter that has adapters of its own, by `target_parameters` of a LoraConfig."""
    if not has_adapters(model):
        return None
    from peft.tuners.lora.layer import ParamWrapper

    for path, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            return f"{path}.{module.parameter_name}"
    return None


def add_adapters(model: Any, config: Any) -> Any:
    """The model of peft that `peft.get_peft_model(model, config)` returns.

    Raises:
        FzeroError: for what is no configuration of peft, and for adapters whose first values are taken out of base
            weights: these come from files, in slices.
    """
    import peft

    if not isinstance(config, peft.PeftConfig):
        raise FzeroError("peft_config", f"is {config!r:.80}", "give a configuration of peft, such as LoraConfig(r=8)")
    start = getattr(config, "init_lora_weights", None)
    if isinstance(start, str) and start.startswith(CHANGING):
        problem = f"is {start!r}, which changes weights of the base model, and their files are read into slices"
        way_out = "give fzero.hf.Trainer(peft.get_peft_model(model, config)), or another init_lora_weights"
        raise FzeroError("peft_config: init_lora_weights", problem, way_out)
    return peft.get_peft_model(model, config)


def find_base(model: Any) -> Any:
    """The model that adapters were put into; the model itself where it has none.

    Raises:
        FzeroError: for virtual tokens, which peft puts in front of a prompt by itself.
    """
    if not has_adapters(model):
        return model
    refuse_virtual_tokens(model, "generate", "save_model(folder), and generate with peft's from_pretrained")
    return model.get_base_model()


def refuse_virtual_tokens(model: Any, call: str, way_out: str) -> None:
    """Raise for a model of peft whose adapter is no part of its modules."""
    if model.active_peft_config.is_prompt_learning:
        problem = f"{type(model).__name__} has virtual tokens of {model.active_peft_config.peft_type}"
        raise FzeroError(call, problem, way_out)


def take_base(model: Any, params: tree.Tree) -> tree.Tree:
    """The part of a model's parameters that are those of `find_base(model)`."""
    base = find_base(model)
    if base is not model:
        path = next(path for path, module in model.named_modules() if module is base)
        for name in path.split("."):
            params = params[name]
    return params


def list_active(model: nn.Module) -> frozenset[tuple[bool, tuple[str, ...]]]:
    """Which adapters of a model are active: for each kind of layer, whether all are disabled, and the active ones."""
    if not has_adapters(model):
        return frozenset()
    layers: list[Any] = [each for each in model.modules() if isinstance(getattr(each, "disable_adapters", None), bool)]
    return frozenset((each.disable_adapters, tuple(each.active_adapters)) for each in layers)


def list_files(model: Any) -> list[str]:
    """The files of a model's adapters, by their paths in the folder of the model."""
    return [str(_find_folder(Path(), name) / file) for name in model.peft_config for file in (CONFIG, WEIGHTS)]


def gather_adapters(model: nn.Module, values: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
    """Path -> whole tensor on the CPU of what peft saves of a model, on one rank, and an empty dict on the others. All
    ranks call it together. `values` has the leaves of the model by their paths."""
    paths = find_adapter_paths(copy_without_values(model))
    whole = unpartition({path: values[path] for path in paths if path in values}, rank=rank)
    return {path: x.cpu() for path, x in whole.items() if x is not None}


def save_adapters(folder: Path, model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Write what `save_pretrained` of a model of peft writes, with the tensors `whole` for its values."""
    fill_model(model, whole).save_pretrained(str(folder))


def load_adapters(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """Path -> tensor of what the files of a model's adapters hold. Each rank reads these files as a whole.

    Raises:
        FzeroError: for a file that lacks a tensor of its adapter, or has others.
    """
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    empty = copy_without_values(model)
    paths = find_adapter_paths(empty)
    unknown = {path: _make_unknown(x) for path, x in _list_tensors(empty, paths).items()}
    target = fill_model(model, unknown)
    for name, config in target.peft_config.items():
        file = _find_folder(folder, name) / WEIGHTS
        found: Any = set_peft_model_state_dict(target, load_file(file), adapter_name=name)
        if found.unexpected_keys and not config.is_prompt_learning:  # of which peft loads the prompt by itself
            problem = f"has {found.unexpected_keys[:3]}, which are of no adapter {name!r} of the model"
            raise FzeroError(str(file), problem, _WAY_OUT)
    loaded = {path: x.detach() for path, x in _list_tensors(target, paths).items()}
    missing = [path for path, x in loaded.items() if x.is_floating_point() and x.numel() and x.isnan().all()]
    if missing:
        raise FzeroError(str(folder), f"{WEIGHTS} lacks {missing[:3]}", _WAY_OUT)
    return loaded


_WAY_OUT = "resume with the configuration of peft that was trained"


def _make_unknown(like: Tensor) -> Tensor:
    """A tensor on the CPU that tells whether a file had its values."""
    return torch.full_like(like, math.nan if like.is_floating_point() else 0, device="cpu")


def _find_folder(folder: Path, name: str) -> Path:
    return folder if name == "default" else folder / name


def find_adapter_paths(empty: Any) -> dict[str, None]:
    """The paths of the parameters and buffers of which peft saves values: those that train, and what peft takes of a
    state dict for its adapters."""
    from peft import get_peft_model_state_dict

    held = empty.state_dict(keep_vars=True)  # in which a tied parameter is one object
    paths = {id(x): path for path, x in reversed(held.items())}  # the first name, which is that of the slices
    taken = dict.fromkeys(path for path, x in empty.named_parameters() if x.requires_grad)
    for name, config in empty.peft_config.items():
        if config.is_prompt_learning:  # which peft computes from the parameters of its encoder
            taken |= dict.fromkeys(path for path in held if "prompt_encoder." in path)
            continue
        made = get_peft_model_state_dict(empty, state_dict=held, adapter_name=name)
        taken |= dict.fromkeys(paths[id(x)] for x in made.values() if id(x) in paths)
    return taken


def _list_tensors(module: nn.Module, paths: Mapping[str, None]) -> dict[str, Tensor]:
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {path: held[path] for path in paths if path in held}


def fill_model(model: nn.Module, whole: Mapping[str, Tensor]) -> Any:
    """A copy of a model with these values, and without all others. A tied parameter takes its value by each name."""
    filled = copy_without_values(model)
    held = filled.state_dict(keep_vars=True)
    values = {id(held[path]): x for path, x in whole.items() if path in held}
    named = {path: values[id(x)] for path, x in held.items() if id(x) in values}
    filled.load_state_dict(named, strict=False, assign=True)
    return filled
