"""Files: how the Trainer saves, and how it goes on from what it saved."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from fzero import checkpoint, load_safetensors, save_safetensors, tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.state import State
from fzero.formats.hugging_face import open_hf
from fzero.hf.adapters import gather_adapters, has_adapters, list_files, load_adapters, save_adapters
from fzero.hf.data_ranks import Sharers
from fzero.hf.merging import dequantize_leaves, list_leaves
from fzero.hf.plan import TrainerPlan, place
from fzero.hf.together import Plain
from fzero.ranks.together import do_together, gather_words
from fzero.state.safetensors import load_sources, open_safetensors
from fzero.state.unpartition import replace_values
from fzero.training.models import WHOLE
from fzero.values.sharded import Sharded

STATE = "fzero"
"""The folder of optimizer state in a checkpoint of the Trainer."""
OPTIMIZER = "optimizer.pt"  # of torch's optimizer, which has groups and rates alone
SCHEDULER = "scheduler.pt"
ARGUMENTS = "training_args.bin"
CONFIG = "config.json"
PROGRESS = "trainer_state.json"
WEIGHTS = "model.safetensors"
"""The files that transformers' Trainer writes, by its names."""
_log = logging.getLogger("fzero")


class Files(Sharers):
    """The part of the Trainer that writes and reads files. All ranks call each method together."""

    model: Any
    state: Any
    sharded: State
    _plan: TrainerPlan
    _held: Mapping[str, Any]  # the keywords of `fzero.partition` that made the slices
    _adopt: Callable[[], None]
    _wrapped: Any
    _generator: Any
    _sliced: Any

    @check_arguments
    def train(
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, *args: Any, **named: Any
    ) -> Any:
        """As transformers' `train`. `resume_from_checkpoint=True` means the newest complete checkpoint. All ranks call
        it together."""
        is_own = type(self).get_train_dataloader is not Plain.get_train_dataloader

        def list_lines() -> list[str]:
            how = resume_from_checkpoint if isinstance(resume_from_checkpoint, bool | None) else "a folder"
            lines = self._list_alike("train_dataset", None if is_own else self.train_dataset)
            return [f"configuration resume_from_checkpoint: {how or None}", *lines]

        with self._act("trainer.train", list_lines):
            if resume_from_checkpoint is True:
                resume_from_checkpoint = self._find_newest() or True
            done = super().train(resume_from_checkpoint, *args, **named)
            self._check_flags()
            return done

    def _find_newest(self) -> str | None:
        """The newest checkpoint that is complete; where none is, the newest; None without checkpoints."""
        found = [path for path in Path(self.args.output_dir).glob("checkpoint-*") if path.name[11:].isdecimal()]
        found = sorted(filter(Path.is_dir, found), key=lambda path: int(path.name[11:]), reverse=True)
        missing = [self._find_missing(path) for path in found]
        whole = next((i for i, name in enumerate(missing) if name is None), 0)
        for path, name in zip(found[:whole], missing):
            _log.warning("%s is skipped: it has no %s, so its save did not end", path, name)
        told = gather_words(self._members, "choose a checkpoint")(str(found[whole]) if found else None)
        return next(iter(told.values()))  # of the first rank: a folder may have changed since

    def _find_missing(self, folder: Path) -> str | None:
        """The first file that a complete checkpoint has, and this one lacks."""
        of_model = [CONFIG] if isinstance(self.model, transformers.PreTrainedModel) else []
        names = [*(list_files(self.model) if has_adapters(self.model) else of_model), PROGRESS]
        return next((name for name in names if not (folder / name).exists()), None)

    @check_arguments
    def save_model(self, output_dir: str | os.PathLike[str] | None = None, _internal_call: bool = False) -> None:
        """Write parameters and running statistics as `from_pretrained` reads them, and what transformers writes beside
        them. All ranks call it together. Each rank writes its own slices; nothing is gathered. Of a model of peft rank
        0 gathers and writes the adapters, as peft does."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        beside = folder.with_name(f"{folder.name}.weights")

        def prepare() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(beside, ignore_errors=True)  # of a save that was killed
            if _internal_call:  # the last file of a checkpoint: without it nobody resumes from files of two saves
                (folder / PROGRESS).unlink(missing_ok=True)

        def finish() -> None:
            if has_adapters(self.model):
                save_adapters(folder, self.model, whole)
            if beside.is_dir():
                move_model(beside, folder)
            of_collator = getattr(self.data_collator, "tokenizer", None)
            processing = of_collator if self.processing_class is None else self.processing_class
            if processing is not None:
                processing.save_pretrained(str(folder))
            torch.save(self.args, folder / ARGUMENTS)

        self._check_flags()
        self._meet("trainer.save_model")
        self._write(folder, prepare)
        whole: dict[str, torch.Tensor] = {}
        if has_adapters(self.model):
            whole = gather_adapters(self.model, self._list_values(), rank=0)
        elif isinstance(self.model, transformers.PreTrainedModel):
            limit = inspect.signature(self.model.save_pretrained).parameters["max_shard_size"].default
            checkpoint.export_hf(beside, self._list_values(), self.model, max_shard_size=limit)
        else:
            save_safetensors(self._list_values(), folder / WEIGHTS)
        self._write(folder, finish)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _list_values(self) -> dict[str, Any]:
        """Parameters, and running statistics that training changes, by their names in the model. Codes become numbers,
        but of a base model, which peft does not save."""
        held = self.sharded
        params = held.params if has_adapters(self.model) else dequantize_leaves(held.params, self.mesh)
        return {**list_leaves(params), **list_leaves(held.buffers)}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        held = State(opt_state=self.sharded.opt_state, scale=self.sharded.scale)
        save = functools.partial(
            checkpoint.save, Path(output_dir) / STATE, held, step=self.state.global_step, keep=1, overwrite=True
        )
        is_of_slices = any(isinstance(leaf, Sharded) for leaf in tree.leaves(held))
        if is_of_slices:
            save()

        def write() -> None:
            if not is_of_slices:  # of SGD without momentum: each rank would write all of it
                save()
            torch.save(self.optimizer.state_dict(), Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

        self._write(Path(output_dir), write)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        self._adopt()  # a model of model_init is a new one
        if not folder.is_dir():
            raise FzeroError("resume_from_checkpoint", f"{folder} is no folder", "give a folder checkpoint-STEP")
        held, is_of_transformers = self.sharded, isinstance(self.model, transformers.PreTrainedModel)
        missing = self._find_missing(folder)
        if missing is not None:
            problem = f"has no {missing}: it is no checkpoint, or its save did not end"
            raise FzeroError(str(folder), problem, "resume from another checkpoint, or remove this one")
        if has_adapters(self.model):
            self.sharded = held._replace(params=self._fill(held.params, load_adapters(folder, self.model)))
            return
        leaves = {**list_leaves(held.params), **list_leaves(held.buffers)}
        constants = {name: x for name, x in _list_constants(self.model).items() if name not in leaves}
        wanted = leaves.keys() | constants.keys()
        files = open_hf(folder, wanted, self.model, True) if is_of_transformers else open_safetensors(folder / WEIGHTS)
        constants = {name: x for name, x in constants.items() if name in files}
        load_sources(files, {**leaves, **constants})  # each of the trees is a part of the files, and together all of it
        params = load_safetensors(files, held.params, self.mesh, strict=False, **self._held)
        if held.buffers is not None:
            buffers = load_safetensors(files, held.buffers, self.mesh, strict=False, persist=WHOLE)
            held = held._replace(buffers=buffers)
        if constants:
            _read_into(constants, files)
            self._wrapped = self._sliced = self._generator = None  # programs have the numbers of before
        self.sharded = held._replace(params=place(params, self._plan))

    def _fill(self, params: tree.Tree, whole: dict[str, torch.Tensor]) -> tree.Tree:
        """`params` with the values `whole` of some leaves, by their paths."""

        def fill(path: str, leaf: Any) -> Any:
            if path not in whole:
                return leaf
            x = whole[path].to(leaf.device, leaf.dtype)
            return replace_values(leaf, x) if leaf.form.layout.splits > 1 else leaf.slice_of(x)

        return tree.map_with_path(fill, params)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is None:
            return
        folder = Path(checkpoint_folder)
        if not (folder / STATE).is_dir():
            problem = f"has no folder {STATE!r} with optimizer state"
            way_out = "resume from a checkpoint that fzero.hf.Trainer saved without save_only_model"
            raise FzeroError(str(folder), problem, way_out)
        loaded = checkpoint.load(folder / STATE, State(opt_state=self.sharded.opt_state, scale=self.sharded.scale))
        self.sharded = self.sharded._replace(opt_state=loaded.opt_state, scale=loaded.scale)
        self.optimizer.load_state_dict(torch.load(folder / OPTIMIZER, weights_only=True))
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))

    def _write(self, folder: Path, write: Callable[[], None]) -> None:
        """Call `write` on the rank that saves. All ranks return together, or raise."""
        gather = gather_words(self._members, "a write of the Trainer", f"to {folder}")
        way_out = "mend that, and save again"
        do_together(gather, lambda: write() if self.args.should_save else None, str(folder), "write files", way_out)


def _list_constants(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a model that are in its files, by name: running statistics, and such as biases of routers."""
    return {
        f"{path}.{name}" if path else name: x
        for path, module in model.named_modules()
        for name, x in module._buffers.items()
        if x is not None and name not in module._non_persistent_buffers_set
    }


def _read_into(tensors: dict[str, torch.Tensor], files: Any) -> None:
    """Give tensors their values in files."""
    for name, source in load_sources(files, tensors, strict=False).items():
        whole = torch.empty(source.shape.numel(), dtype=source.dtype)
        source.read(0, whole)
        tensors[name].copy_(whole.view(source.shape))


def move_model(source: Path, target: Path) -> None:
    """Move the files of a model into a folder, and remove `source`. Weights of an earlier save go.

    The configuration goes first and comes last. So a reader refuses what a process that is killed in between leaves,
    and takes no files of two saves for one model.
    """
    (target / CONFIG).unlink(missing_ok=True)
    names = {file.name for file in source.iterdir()}
    for name in names - {CONFIG}:
        (source / name).replace(target / name)
    for old in [*target.glob("model*.safetensors"), *target.glob("model*.safetensors.index.json")]:
        if old.name not in names:
            old.unlink()
    (source / CONFIG).replace(target / CONFIG)
    source.rmdir()
