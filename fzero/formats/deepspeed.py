"""DeepSpeed: checkpoints of its ZeRO stages 1, 2 and 3, as sources.

    stages 1, 2   |-- a --|---- b ----|- c -|00|     a group of parameters, flattened, padded
                  |---- rank 0 ----|---- rank 1 ----|
    stage 3       |- a -|-- b --|c|  |- a -|-- b --|c|     each parameter is cut by itself, into equal parts
                  |--- rank 0 ---|   |--- rank 1 ---|

The file of a rank has a flat tensor of float32 weights for each group, and one for each moment of the optimizer. The
file of the model has the names and shapes of parameters in order. Files are mapped into memory: to read some elements
touches the pages that have them.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.formats.torch_files import load_torch_file
from fzero.layout.ranges import intersect, pad, tile
from fzero.layout.strides import Copy, view_to_view
from fzero.state.pieces import PiecedSource
from fzero.state.sources import Source, TensorSource

OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
ALIGN = 2
"""A group of stages 1 and 2 is padded to a multiple of so many elements a rank."""
INCOMPLETE = "copy the folder of the checkpoint again, with the files of all ranks"


class _Unused:
    """Stands for an object of DeepSpeed that nothing here needs."""

    def __setstate__(self, state: Any) -> None:
        pass


STAND_INS = (
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Unused, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Unused, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Unused, "deepspeed.utils.tensor_fragment.fragment_address"),
)
"""What stands in the place of DeepSpeed's classes, so that none of its code runs and it need not be installed."""


@check_arguments
def open_deepspeed(path: str | os.PathLike[str]) -> dict[str, Source]:
    """The tensors of a checkpoint that DeepSpeed's ZeRO saved, as sources by key. Reads no values.

    * "model.NAME" are the float32 weights, buffers and frozen parameters in the dtypes that they were saved with, and
      shared parameters under each of their names.
    * "optim.state.NAME.exp_avg", "optim.state.NAME.exp_avg_sq" and "optim.state.NAME.step" are Adam's; other optimizers
      have keys of their own.

    `path` is a folder that `save_checkpoint` wrote to, of which `latest` names the checkpoint, or one checkpoint in it.

    Raises:
        FzeroError: for a checkpoint of stage 0, of model or expert parallelism; for a file that is missing or damaged,
            or that names a class which is not known to be harmless; for flat tensors that do not have the parameters.
    """
    folder = _find_checkpoint(Path(path))
    try:
        found = _open(folder)
    except FzeroError:
        raise
    except Exception as error:  # files of another program fail in as many ways as there are programs
        problem = f"is not laid out as DeepSpeed's ZeRO does: {type(error).__name__}: {error}"
        raise FzeroError(str(folder), problem, INCOMPLETE) from error
    for key, source in found.items():
        source.path = key
    return found


def _open(folder: Path) -> dict[str, Source]:
    files = _list_optimizer_files(folder)
    parts = [_load_part(file, len(files)) for file in files]
    stage, paddings = parts[0].stage, parts[0].paddings
    models = [_load(folder / name) for name in _list_model_files(stage, len(parts))]
    shapes = _get(models[0], "param_shapes", folder)
    join = _join_each if stage == 3 else _join_groups
    found = dict(_iter_beside(models, shapes, stage, folder))
    for name, source in join(shapes, paddings, [part.weights for part in parts], folder, "weights"):
        found[f"model.{name}"] = source
    for moment in parts[0].moments:
        flats = [_get(part.moments, moment, file) for part, file in zip(parts, files)]
        for name, source in join(shapes, paddings, flats, folder, moment):
            found[f"optim.state.{name}.{moment}"] = source
    found |= _find_steps(parts, shapes, folder)
    for alias, name in models[0].get("shared_params", {}).items():
        if f"model.{name}" in found:
            found[f"model.{alias}"] = copy.copy(found[f"model.{name}"])
    return found


class _Part(NamedTuple):
    """What one rank has: a list of flat tensors for the weights, and one for each moment; the steps of each group."""

    stage: int
    weights: list[Tensor]
    moments: dict[str, list[Tensor]]
    steps: list[Any]
    paddings: Any  # behind each parameter of each group, None where there are none


def _find_checkpoint(path: Path) -> Path:
    """The folder of one checkpoint: `path`, or the one in it that `latest` names."""
    tag = read_tag(path / "latest")
    if tag is None:
        return path
    if Path(tag).name != tag or not os.path.isdir(path / tag):
        problem = f"names {tag!r:.80}, which is no folder beside it"
        raise FzeroError(str(path / "latest"), problem, "give the folder of a checkpoint")
    return path / tag


def read_tag(latest: Path) -> str | None:
    """The tag in a file `latest`; None where there is no such file.

    Raises:
        FzeroError: for a file that is no text.
    """
    if not os.path.isfile(latest):
        return None
    try:
        return latest.read_bytes().decode().strip()
    except (OSError, ValueError) as error:
        raise FzeroError(str(latest), f"cannot be read: {error}", "write the tag of a checkpoint to it") from error


def _list_optimizer_files(folder: Path) -> list[Path]:
    """The files of the optimizer in the order of ranks."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    found = {match.groups(): folder / match[0] for match in map(OPTIMIZER_FILE.fullmatch, names) if match}
    if not found:
        problem = f"has no file *zero_pp_rank_0_mp_rank_00_optim_states.pt among its {len(names)} files"
        raise FzeroError(str(folder), problem, "give a checkpoint of ZeRO; stage 0 has plain files of torch.save")
    if others := sorted({model for _, model in found} - {"00"}):
        problem = f"has files of model-parallel ranks {', '.join(others)}, each with a part of every parameter"
        raise FzeroError(str(folder), problem, "make it a universal or a full checkpoint with DeepSpeed's tools")
    by_rank = {int(rank): file for (rank, _), file in found.items()}
    for rank in range(max(by_rank) + 1):
        if rank not in by_rank:
            raise FzeroError(str(folder), f"has no file of rank {rank} of {max(by_rank) + 1}", INCOMPLETE)
    return [by_rank[rank] for rank in sorted(by_rank)]


def _list_model_files(stage: int, world: int) -> list[str]:
    """The files of the model: of stages 1 and 2 one, of stage 3 one a rank, with the rank's part of frozen leaves."""
    if stage == 3:
        return [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(world)]
    return ["mp_rank_00_model_states.pt"]


def _load(file: Path) -> Any:
    if not os.path.isfile(file):
        raise FzeroError(str(file), "is not there", INCOMPLETE)
    return load_torch_file(file, str(file), mmap=True, stand_ins=STAND_INS)


def _get(table: Any, key: Any, where: Path) -> Any:
    """An entry that a checkpoint of ZeRO has."""
    if not isinstance(table, Mapping) or key not in table:
        raise FzeroError(str(where), f"has no {key!r}", "give a checkpoint that DeepSpeed's ZeRO saved")
    return table[key]


def _load_part(file: Path, world: int) -> _Part:
    """What one of `world` files of the optimizer has."""
    saved = _get(_load(file), "optimizer_state_dict", file)
    stage, counts = _get(saved, "zero_stage", file), _get(saved, "partition_count", file)
    if any(count != world for count in (counts if isinstance(counts, list) else [counts])):
        problem = f"is of a group of {counts} ranks, {world} files are there"
        raise FzeroError(
            str(file), problem, f"{INCOMPLETE}; experts of MoE layers, in groups of their own, are refused"
        )
    inner = _get(saved, "optimizer_state_dict" if stage == 3 else "base_optimizer_state", file)
    weights = list(_get(saved, "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups", file))
    rows = [_get(inner, "state", file).get(group, {}) for group in range(len(weights))]
    names = [key for key, value in rows[0].items() if isinstance(value, Tensor) and value.ndim == 1]
    moments = {name: [_get(row, name, file) for row in rows] for name in names}
    for tensor in (*weights, *(tensor for each in moments.values() for tensor in each)):
        if not isinstance(tensor, Tensor) or tensor.ndim != 1:
            raise FzeroError(str(file), f"has a {type(tensor).__name__} in place of a flat tensor", INCOMPLETE)
    weights = [tensor.detach() for tensor in weights]  # they require grad
    return _Part(stage, weights, moments, [row.get("step") for row in rows], saved.get("param_alignment_paddings"))


Joined = Iterator[tuple[str, Source]]


def _join_groups(
    shapes: Sequence[Mapping[str, Any]], paddings: Any, parts: Sequence[list[Tensor]], folder: Path, what: str
) -> Joined:
    """Each parameter of stages 1 and 2: a range of its group, whose tensors of all ranks follow each other."""
    for number, group in enumerate(shapes):
        flat = [part[number] for part in parts]
        numels = [torch.Size(shape).numel() for shape in group.values()]
        behind = [0] * len(numels) if paddings is None else paddings[number]
        places = tile(numel + gap for numel, gap in zip(numels, behind, strict=True))
        had, needed = sum(tensor.numel() for tensor in flat), places[-1].stop if places else 0
        if had < needed or pad(had, ALIGN * len(parts)) != pad(needed, ALIGN * len(parts)):
            problem = f"group {number} has {had} elements of {what}, its parameters need {needed}"
            raise FzeroError(str(folder), problem, INCOMPLETE)
        for (name, shape), place in zip(group.items(), places):
            yield name, _join(shape, flat, folder, place.start)


def _join_each(
    shapes: Sequence[Mapping[str, Any]], paddings: Any, parts: Sequence[list[Tensor]], folder: Path, what: str
) -> Joined:
    """Each parameter of stage 3: equal ranges of the tensors of each rank, which follow each other."""
    table = {name: shape for group in shapes for name, shape in group.items()}
    places = tile(-(-torch.Size(shape).numel() // len(parts)) for shape in table.values())
    needed = places[-1].stop if places else 0
    for rank, part in enumerate(parts):
        if (had := sum(tensor.numel() for tensor in part)) != needed:
            problem = f"rank {rank} has {had} elements of {what}, its parts of the parameters need {needed}"
            raise FzeroError(str(folder), problem, INCOMPLETE)
    for (name, shape), place in zip(table.items(), places):
        pieces = [piece for part in parts for piece in _cut(part, place)]
        yield name, _join(shape, pieces or parts[0], folder)


def _join(shape: Any, tensors: Sequence[Tensor], folder: Path, start: int = 0) -> PiecedSource:
    """The elements from `start` on of consecutive 1-d tensors, as a value of a shape."""
    numel, done, parts = torch.Size(shape).numel(), 0, list[tuple[Copy, Source]]()
    for piece in _cut(tensors, range(start, start + numel)):
        parts += [(copy, TensorSource(piece)) for copy in view_to_view(piece.shape, [1], [1], to=done)]
        done += piece.numel()
    return PiecedSource("", torch.Size(shape), tensors[0].dtype, parts, str(folder), INCOMPLETE)


def _cut(tensors: Sequence[Tensor], span: range) -> Iterator[Tensor]:
    """The elements of a range of consecutive 1-d tensors, tensor by tensor."""
    for tensor, place in zip(tensors, tile(tensor.numel() for tensor in tensors)):
        if common := intersect(span, place):
            yield tensor[common.start - place.start : common.stop - place.start]


def _iter_beside(
    models: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Any]], stage: int, folder: Path
) -> Iterator[tuple[str, Source]]:
    """What the files of the model have that no optimizer updates: buffers, and frozen parameters."""
    module, buffers = _get(models[0], "module", folder), set(_get(models[0], "buffer_names", folder))
    if stage == 1 and not models[0].get("frozen_param_shapes"):  # which DeepSpeed lists from stage 2 on
        updated = {*models[0].get("shared_params", {}), *(name for group in shapes for name in group)}
        buffers |= {name for name, value in module.items() if isinstance(value, Tensor) and name not in updated}
    for name in sorted(buffers):
        if name in module:
            yield f"model.{name}", TensorSource(module[name])
    # stages 1 and 2 have one file of the model, with whole fragments
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        fragments = [_get(_get(model, "frozen_param_fragments", folder), name, folder) for model in models]
        whole = [fragment.detach().view(-1) for fragment in fragments]
        if sum(piece.numel() for piece in whole) < torch.Size(shape).numel():
            problem = f"has {[piece.numel() for piece in whole]} elements of {name}, of shape {list(shape)}"
            raise FzeroError(str(folder), problem, INCOMPLETE)
        yield f"model.{name}", _join(shape, whole, folder)


def _find_steps(parts: Sequence[_Part], shapes: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Source]:
    """The steps that the optimizer has made, for each parameter: all groups of all ranks make them together."""
    steps = {float(step) for part in parts for step in part.steps if step is not None}
    if len(steps) > 1:
        problem = f"has groups that made {', '.join(f'{step:g}' for step in sorted(steps))} steps"
        raise FzeroError(str(folder), problem, INCOMPLETE)
    names = [name for group in shapes for name in group]
    return {f"optim.state.{name}.step": TensorSource(torch.tensor(step)) for step in steps for name in names}
