"""Weights of a checkpoint, whole and in float32, in this process alone: DeepSpeed's script of that name.

A checkpoint is one that `engine.save_checkpoint` wrote, or one of DeepSpeed's ZeRO.

python -m fzero.deepspeed.utils.zero_to_fp32 CHECKPOINT OUT [--tag TAG]     writes OUT/pytorch_model.bin
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fzero import checkpoint
from fzero.base.arguments import check_arguments
from fzero.base.dtypes import describe_form
from fzero.base.errors import FzeroError
from fzero.deepspeed.absent import make_getattr, refuse_arguments
from fzero.deepspeed.saving import find_folder

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

__getattr__ = make_getattr(__name__, __all__)
WEIGHTS = "pytorch_model.bin"


@check_arguments
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | os.PathLike[str] | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """The weights and running statistics of a checkpoint by their names in the module, on the CPU.

    Raises:
        FzeroError: for a folder without a checkpoint; for `exclude_frozen_parameters` and `lazy_mode`.
    """
    given = {"exclude_frozen_parameters": exclude_frozen_parameters, "lazy_mode": lazy_mode}
    refuse_arguments("zero_to_fp32", {name: (value, "leave it out") for name, value in given.items()})
    folder = find_folder(checkpoint_dir, tag)
    if folder is None and not os.path.isdir(checkpoint_dir):
        raise FzeroError(str(checkpoint_dir), "is no folder", "give the folder of save_checkpoint")
    if folder is None:
        raise FzeroError(str(checkpoint_dir), "has no file 'latest'", "give tag=, or a folder of save_checkpoint")
    if any(folder.glob("*_optim_states.pt")):
        sources, prefixes = dict(checkpoint.open_deepspeed(folder)), ["model"]
    else:
        sources, prefixes = dict(checkpoint.open_checkpoint(folder)), ["params", "buffers"]
    parts = [(*key.partition("."), source) for key, source in sources.items()]
    return {name: _read(source) for prefix, _, name, source in parts if prefix in prefixes}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | os.PathLike[str] | None = None
) -> nn.Module:
    """The model, on the CPU, with the weights of a checkpoint. Buffers that the checkpoint does not have stay.

    Raises:
        FzeroError: for a parameter that the checkpoint does not have, and the other way round.
    """
    values, model = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), model.cpu()
    missing = sorted({name for name, _ in model.named_parameters()} - values.keys())  # names one of those that are tied
    unknown = sorted(values.keys() - model.state_dict().keys())
    if missing or unknown:
        problem = f"lacks {missing[:4]}, and has {unknown[:4]} beside"
        raise FzeroError(str(checkpoint_dir), problem, "give the model that was trained")
    model.load_state_dict(values, strict=False)
    return model


@check_arguments
def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: Any = None,
    safe_serialization: bool = False,
    tag: str | os.PathLike[str] | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of a checkpoint as one state dict of torch to `output_dir/pytorch_model.bin`.

    Raises:
        FzeroError: for `max_shard_size` and `safe_serialization`; where the file cannot be written.
    """
    way_out = "leave it out: fzero.save_safetensors writes safetensors, on all ranks at once"
    given = {"max_shard_size": (max_shard_size, way_out), "safe_serialization": (safe_serialization, way_out)}
    refuse_arguments("zero_to_fp32", given)
    values = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    file = Path(output_dir) / WEIGHTS
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(values, file)
    except (OSError, RuntimeError) as error:
        raise FzeroError(str(file), f"cannot be written: {error}", "give a folder with room") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """DeepSpeed's command. Returns the exit status: 1 after an `FzeroError`, whose message goes to stderr."""
    about = "Write the weights of a checkpoint as one state dict of torch."
    parser = argparse.ArgumentParser("python -m fzero.deepspeed.utils.zero_to_fp32", description=about)
    parser.add_argument("checkpoint_dir", help="the folder that was given to save_checkpoint")
    parser.add_argument("output_dir", help=f"the folder to write {WEIGHTS} to")
    parser.add_argument("-t", "--tag", help="by default the one in the file 'latest'")
    parser.add_argument("-d", "--debug", action="store_true", help="list the weights")
    for name in "--exclude_frozen_parameters", "--safe_serialization":
        parser.add_argument(name, action="store_true", help="is refused")
    parser.add_argument("--max_shard_size", help="is refused: all weights are in one file")
    given = parser.parse_args(arguments)
    options = {name: value for name, value in vars(given).items() if name != "debug"}
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**options)
    except FzeroError as error:
        print(error, file=sys.stderr)
        return 1
    values = torch.load(Path(given.output_dir) / WEIGHTS, mmap=True)
    for name, value in values.items() if given.debug else ():
        print(f"{name}  {describe_form(value)}")
    print(f"{len(values)} tensors of {given.checkpoint_dir} in {Path(given.output_dir) / WEIGHTS}")
    return 0


def _read(source: Any) -> Tensor:
    values = torch.empty(source.shape.numel(), dtype=torch.float32 if source.dtype.is_floating_point else source.dtype)
    source.read(0, values)
    return values.reshape(source.shape)


if __name__ == "__main__":
    sys.exit(main())
