"""Models of transformers: which tensors their files have, and which elements of a leaf are which of a file's tensor.

Both directions run transformers' own functions on `Rearranged` tensors, so that its tables say what is renamed, split,
joined, tied and left out. transformers is an optional dependency, and is imported when a function here is called.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Container, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero.base import torch_private
from fzero.base.dtypes import name_dtype
from fzero.base.errors import FzeroError
from fzero.formats.rearranged import Rearranged, name_tensor
from fzero.state.sources import Source

Model = Any
"""A `transformers.PreTrainedModel`."""


def make_model(model_or_config: Any) -> Model:
    """The model itself, or a model of a configuration on the meta device.

    Raises:
        FzeroError: for anything else; for a model that transformers does not save as it is: quantized, with adapters,
            or of a class from outside of transformers.
    """
    from transformers import PreTrainedConfig, PreTrainedModel

    model = model_or_config
    if isinstance(model, PreTrainedConfig):
        model = _make_on_meta(find_class(model), model)
    if not isinstance(model, PreTrainedModel):
        problem = f"is a {type(model).__name__}, no model and no configuration of transformers"
        raise FzeroError("model", problem, "give the model that was lowered, or its config")
    name = type(model).__name__
    _refuse_codes(model.config)
    if getattr(model, "_hf_peft_config_loaded", False):
        raise FzeroError("model", f"{name} has adapters, which files hold apart", "merge them into the model first")
    if type(model).__module__.startswith("transformers_modules."):
        raise FzeroError("model", f"{name} comes from a file of its folder, not from transformers")
    return model


def _make_on_meta(cls: type, config: Any) -> Model:
    """A model of a class and a configuration, without values."""
    with torch.device("meta"):
        model: Model = cls(copy.deepcopy(config))
    model.tie_weights()  # transformers 5.0 ties no weights on the meta device
    return model


def find_class(config: Any) -> type:
    """The class of transformers that a configuration names.

    Raises:
        FzeroError: where it names none.
    """
    import transformers

    names = getattr(config, "architectures", None) or []
    found = getattr(transformers, names[0], None) if len(names) == 1 else None
    if found is None:
        problem = f"its architectures are {names}, not the name of one class of transformers"
        raise FzeroError("config", problem, "give the model instead, which may be on the meta device")
    return found


def _refuse_codes(config: Any) -> None:
    """Raise for the configuration of a quantized model: its files hold codes and scales."""
    found = getattr(config, "quantization_config", None)
    if found is not None:
        raise FzeroError("config", f"has a quantization_config: {found!r:.80}", "fzero moves values, not their codes")


def read_config(folder: Path) -> Any:
    """The configuration in a folder.

    Raises:
        FzeroError: for a folder without a configuration that transformers reads, and for a quantized model.
    """
    from transformers import AutoConfig

    if not os.path.isfile(folder / "config.json"):
        problem = "has no config.json, which says what model its files are of"
        raise FzeroError(str(folder), problem, "give the folder of save_pretrained or export_hf, or give the model")
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise FzeroError(str(folder / "config.json"), f"transformers cannot read it: {error}") from error
    _refuse_codes(config)
    return config


def render_configs(model: Model, dtype: torch.dtype) -> dict[str, bytes]:
    """The configurations that transformers writes beside a model of this dtype, by file name."""
    config = copy.deepcopy(model.config)
    config.dtype = name_dtype(dtype)
    config.architectures = [type(model).__name__]
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def name_leaves(model: Model) -> dict[str, str]:
    """The path of the leaf behind each key of a model's state: of a tied tensor, its first name."""
    first: dict[int, str] = {}
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        first.setdefault(id(tensor), path)
    return {key: first[id(tensor)] for key, tensor in _state(model).items()}


def _state(model: Model) -> dict[str, Tensor]:
    """Parameters and persistent buffers by all of their names."""
    return model.state_dict(keep_vars=True)


def plan_files(model: Model, dtypes: Mapping[str, torch.dtype]) -> dict[str, Rearranged]:
    """The tensors that the files of a model have, by key, in the order in which transformers writes them, of leaves
    that have these dtypes by path.

    Raises:
        FzeroError: where transformers cannot convert the model's leaves.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    leaves, state = name_leaves(model), _state(model)
    for key in model._keys_to_ignore_on_save or ():
        state.pop(key, None)
    params = {
        key: torch.empty(x.shape, dtype=x.dtype, device="meta")
        for key, x in state.items()
        if isinstance(x, nn.Parameter)
    }
    try:
        kept = remove_tied_weights_from_state_dict(dict(params), model)
        named = {
            key: name_tensor(leaves[key], x.shape, dtypes[leaves[key]])
            for key, x in state.items()
            if key in kept or key not in params
        }
        tensors = revert_weight_conversion(model, named)
    except FzeroError:
        raise
    except (RuntimeError, ValueError) as error:
        raise FzeroError(type(model).__name__, f"transformers cannot convert its weights: {error}") from error
    for key, tensor in tensors.items():
        if not isinstance(tensor, Rearranged):
            raise FzeroError(key, "transformers makes it in a way that fzero cannot follow", "use save_pretrained")
    return dict(tensors)


def split_files(tensors: Mapping[str, Rearranged], limit: int) -> dict[str, list[str]]:
    """The keys of each file, by file name, with files of at most `limit` bytes of data, as transformers would split
    them. Tensors that are parts of one tensor in memory, such as experts, stay in one file.

    Raises:
        FzeroError: for a tensor of more bytes.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    for key, tensor in tensors.items():
        if _memory_nbytes(tensor) > limit:
            together = sum(_memory_key(tensor) == _memory_key(other) for other in tensors.values())
            kept = f", with {together - 1} others that stay in one file with it" if together > 1 else ""
            problem = f"takes {_memory_nbytes(tensor)} bytes{kept}; max_shard_size is {limit}"
            raise FzeroError(key, problem, f'give max_shard_size={_memory_nbytes(tensor)} or more, such as "50GB"')
    found = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=_memory_nbytes,
        get_storage_id=_memory_key,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    return found.filename_to_tensors


def _memory_nbytes(tensor: Rearranged) -> int:
    return tensor.plain.untyped_storage().nbytes()


def _memory_key(tensor: Rearranged) -> int:
    return torch_private.storage_key(tensor.plain)


class Leaves(NamedTuple):
    """The leaves of a model, made of the tensors of its files. A tied leaf has several names.

    `doubles` are pairs of names that the configuration ties, and that the files have apart.
    """

    tensors: dict[str, Rearranged]
    names: list[list[str]]
    doubles: list[tuple[str, str]]

    def choose_names(self, wanted: Container[str | None]) -> list[str]:
        """Of the names of each leaf those that are wanted, or else the first."""
        return [name for group in self.names for name in ([name for name in group if name in wanted] or group[:1])]


def plan_leaves(cls: type, config: Any, files: Mapping[str, Source], folder: str, strict: bool) -> Leaves:
    """The leaves that `from_pretrained` of a class of transformers makes of files.

    Raises:
        FzeroError: for a tensor of the files that the model has no place for, with `strict`; for one of another shape.
    """
    state = {key: name_tensor(key, source.shape, source.dtype) for key, source in files.items()}
    try:
        model, info = cls.from_pretrained(  # type: ignore[attr-defined]
            None, config=config, state_dict=state, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except FzeroError as error:
        way_out = f"load it with fzero.build(lambda: {cls.__name__}.from_pretrained(folder), mesh)"
        raise FzeroError(error.where, f"{error.problem}, in {folder}", way_out) from error
    except (RuntimeError, ValueError) as error:
        raise FzeroError(folder, f"transformers cannot make a {cls.__name__} of it: {error}") from error
    for key, found, expected in info["mismatched_keys"]:
        problem = f"has shape {list(found)} in {folder}, {list(expected)} in the model of config.json"
        raise FzeroError(key, problem, "mend the configuration, or give the model")
    if info["unexpected_keys"] and strict:
        keys = sorted(info["unexpected_keys"])
        problem = f"keys that {cls.__name__} has no place for ({len(keys)}): {', '.join(keys)}"
        raise FzeroError(folder, problem, "with strict=False they are skipped")
    made = {name: tensor for name, tensor in _state(model).items() if isinstance(tensor, Rearranged)}
    groups: dict[int, list[str]] = {}
    for name, tensor in made.items():
        groups.setdefault(id(tensor), []).append(name)
    tied = name_leaves(_make_on_meta(cls, config))  # whatever the files hold
    pairs = [pair for pair in tied.items() if made.keys() >= set(pair)]
    return Leaves(made, list(groups.values()), [pair for pair in pairs if made[pair[0]] is not made[pair[1]]])
