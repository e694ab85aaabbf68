"""Files: how the Trainer saves, and how it goes on from what it saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from fzero import checkpoint, load_safetensors, save_safetensors
from fzero.base.errors import FzeroError
from fzero.base.state import State
from fzero.ranks.homes import find_home
from fzero.ranks.live import Live
from fzero.ranks.together import gather_words

STATE = "fzero"
"""The folder of optimizer state in a checkpoint of the Trainer."""
OPTIMIZER = "optimizer.pt"  # of torch's optimizer, which has groups and rates alone
SCHEDULER = "scheduler.pt"
ARGUMENTS = "training_args.bin"
WEIGHTS = "model.safetensors"
"""The files that transformers' Trainer writes, by its names."""


class Files(transformers.Trainer):
    """The part of the Trainer that writes and reads files. All ranks call each method together."""

    mesh: Any
    model: Any
    sharded: State

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the parameters as `from_pretrained` reads them, and what transformers writes beside them. Each rank
        writes its own slices; nothing is gathered."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        beside = folder.with_name(f"{folder.name}.weights")
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
        self._meet(f"save_model {folder}")
        if isinstance(self.model, transformers.PreTrainedModel):
            checkpoint.export_hf(beside, self.sharded.params, self.model)
            if self.args.should_save:
                _move_files(beside, folder)
        else:
            save_safetensors(self.sharded.params, folder / WEIGHTS)
        if self.args.should_save:
            of_collator = getattr(self.data_collator, "tokenizer", None)
            processing = of_collator if self.processing_class is None else self.processing_class
            if processing is not None:
                processing.save_pretrained(str(folder))
            torch.save(self.args, folder / ARGUMENTS)
        self._meet(f"save_model {folder}: end")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        held = State(opt_state=self.sharded.opt_state)
        checkpoint.save(Path(output_dir) / STATE, held, step=self.state.global_step, keep=1, overwrite=True)
        if self.args.should_save:
            torch.save(self.optimizer.state_dict(), Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)
        self._meet(f"save {output_dir}")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        if not folder.is_dir():
            raise FzeroError("resume_from_checkpoint", f"{folder} is no folder", "give a folder checkpoint-STEP")
        like = self.sharded.params
        if isinstance(self.model, transformers.PreTrainedModel):
            read = checkpoint.load_hf(folder, like, self.mesh, model_or_config=self.model)
        else:
            read = load_safetensors(folder / WEIGHTS, like, self.mesh)
        self.sharded = self.sharded._replace(params=read)

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
        loaded = checkpoint.load(folder / STATE, State(opt_state=self.sharded.opt_state))
        self.sharded = self.sharded._replace(opt_state=loaded.opt_state)
        self.optimizer.load_state_dict(torch.load(folder / OPTIMIZER, weights_only=True))
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))

    def _meet(self, what: str) -> None:
        """Wait until all ranks are here."""
        home = find_home(self.mesh)
        if isinstance(home, Live):
            gather_words(home.members, what)(None)


def _move_files(source: Path, target: Path) -> None:
    """Move the files of a folder into another one, and remove the first. Weights of an earlier save go."""
    for old in [*target.glob("model*.safetensors"), *target.glob("model*.safetensors.index.json")]:
        old.unlink()
    for file in source.iterdir():
        file.replace(target / file.name)
    shutil.rmtree(source)
