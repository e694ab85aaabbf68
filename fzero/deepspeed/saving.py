"""Saving: the checkpoints of an engine, by DeepSpeed's names of folders and tags."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fzero import checkpoint, partition, tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.frozen import freeze
from fzero.base.state import State
from fzero.deepspeed.absent import refuse_arguments
from fzero.deepspeed.quantized import iter_values
from fzero.deepspeed.settings import Settings
from fzero.formats.deepspeed import read_tag
from fzero.ranks.ranks import Ranks
from fzero.ranks.together import do_together, gather_words
from fzero.state.safetensors.loading import load_sources

LATEST = "latest"
"""The file that has the tag of the last checkpoint in a folder, as DeepSpeed writes it."""
SCRIPT = "zero_to_fp32.py"
"""The script beside checkpoints that reads their weights without fzero, by DeepSpeed's name."""
_STAND_ALONE = Path(__file__).parent / "utils" / "stand_alone.py"
_log = logging.getLogger("fzero")


def find_folder(load_dir: str | os.PathLike[str], tag: Any = None) -> Path | None:
    """The folder of the checkpoint `tag`, by default the last one; None where nothing tells which one that is."""
    if tag is None:
        tag = read_tag(Path(load_dir) / LATEST)
        if tag is None:
            return None
    return Path(load_dir) / str(tag)


class EngineFiles:
    """The part of an engine that writes and reads files."""

    state: State
    micro_steps: int
    settings: Settings
    mesh: Any
    lr_scheduler: Any
    _on: Ranks

    @check_arguments
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the state to `save_dir/tag`, by default `global_step` and the count of updates. All ranks call it
        together. `client_state`, values of JSON, is what `load_checkpoint` gives back. The files are those of
        `fzero.checkpoint.save`, which any number of ranks load. Beside them stands zero_to_fp32.py, which reads the
        weights with torch alone.

        Raises:
            FzeroError: between `backward` and an update, whose gradients no file would have; as
                `fzero.checkpoint.save`; on all ranks, where the first one cannot write the tag.
        """
        self._check_between_updates("engine.save_checkpoint")
        refuse_arguments("save_checkpoint", {"exclude_frozen_parameters": (exclude_frozen_parameters, "leave it out")})
        step = int(self.state.step)
        tag = f"global_step{step}" if tag is None else str(tag)
        scheduler = self.lr_scheduler.state_dict()
        metadata = {
            "client_state": dict(client_state or {}),
            "micro_steps": self.micro_steps,
            "lr_scheduler": scheduler,
        }
        checkpoint.save(Path(save_dir) / tag, self.state, step=step, overwrite=True, keep=1, metadata=metadata)

        def write() -> None:
            shutil.copyfile(_STAND_ALONE, Path(save_dir) / SCRIPT)
            if save_latest:
                (Path(save_dir) / LATEST).write_text(tag)

        self._write("save_checkpoint", Path(save_dir) / (LATEST if save_latest else SCRIPT), write)
        return True

    @check_arguments
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """`(folder, client state)` of the checkpoint `tag`, by default the last one, after the state was read from it.
        All ranks call it together. A folder without a checkpoint gives `(None, None)`, as in DeepSpeed. Of a checkpoint
        that DeepSpeed's ZeRO wrote, `load_module_only` reads the weights.

        Raises:
            FzeroError: for optimizer state that DeepSpeed wrote; as `fzero.checkpoint.load`.
        """
        way_out = "fzero.checkpoint.open_checkpoint gives the tensors"
        refuse_arguments("load_checkpoint", {"custom_load_fn": (custom_load_fn, way_out)})
        self._check_between_updates("engine.load_checkpoint")
        folder, is_whole = find_folder(load_dir, tag), load_optimizer_states and not load_module_only
        if folder is None:
            _log.warning("fzero.deepspeed: %s has no file %r: nothing is loaded", load_dir, LATEST)
            return None, None
        wanted = self.state if is_whole else State(params=self.state.params, buffers=self.state.buffers)
        if any(folder.glob("*_optim_states.pt")):
            return str(folder), self._load_weights(folder, is_whole)
        if not os.path.exists(folder):
            tags = sorted(each.name for each in Path(load_dir).glob("*/"))
            problem = f"does not exist; {load_dir} has {', '.join(tags[:8]) or 'no tag'}"
            raise FzeroError(f"load_checkpoint: {folder}", problem, "give a tag that engine.save_checkpoint wrote")
        strict = load_module_strict if is_whole else False
        loaded = checkpoint.load(folder, wanted, strict=strict)
        self.state = loaded if is_whole else self.state._replace(params=loaded.params, buffers=loaded.buffers)
        metadata = checkpoint.open_checkpoint(folder).metadata
        if is_whole:
            self.micro_steps = metadata["micro_steps"]
            if load_lr_scheduler_states:
                self.lr_scheduler.load_state_dict(metadata.get("lr_scheduler", {}))
        return str(folder), metadata["client_state"]

    def _load_weights(self, folder: Path, is_whole: bool) -> dict[str, Any]:
        """Take the weights of a checkpoint that DeepSpeed's ZeRO wrote. It has no client state that is read."""
        if is_whole:
            problem = "is DeepSpeed's own, of which an engine reads weights alone"
            way_out = (
                "give load_module_only=True; fzero.checkpoint.load_adam(open_deepspeed(path), like, mesh) reads Adam's "
                "state"
            )
            raise FzeroError(str(folder), problem, way_out)
        found = checkpoint.open_deepspeed(folder)
        weights = {key.removeprefix("model."): x for key, x in found.items() if key.startswith("model.")}

        def read(like: Any, **how: Any) -> Any:
            absent = tree.map(lambda x: freeze(torch.empty(x.shape, dtype=x.dtype, device="meta"), x), like)
            return partition(load_sources(weights, absent, strict=False), self.mesh, like=like, **how)

        params = read(self.state.params, to=self.settings.params_at)
        buffers = None if self.state.buffers is None else read(self.state.buffers)
        self.state = self.state._replace(params=params, buffers=buffers)
        return {}

    @check_arguments
    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the parameters and running statistics as a state dict of torch, in the dtype of compute, to one file.
        All ranks call it together; the first rank holds all of them meanwhile, and writes.

        Raises:
            FzeroError: on all ranks, where the first one cannot write.
        """
        refuse_arguments("save_16bit_model", {"exclude_frozen_parameters": (exclude_frozen_parameters, "leave it out")})
        values, target = {}, Path(save_dir) / save_filename
        for path, leaf in self._iter_values():
            if self._is_first:
                is_cast = self.settings.compute is not None and leaf.is_floating_point()
                values[path] = leaf.detach().to("cpu", self.settings.compute if is_cast else leaf.dtype)

        def write() -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            torch.save(values, target)

        self._write("save_16bit_model", target, write)
        return True

    save_fp16_model = save_16bit_model

    @check_arguments
    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """All parameters and running statistics, whole on every rank, by their names in the module. All ranks call it
        together."""
        given = {"exclude_frozen_parameters": (exclude_frozen_parameters, "leave it out")}
        refuse_arguments("module_state_dict", given)
        return {path: leaf.detach().clone() for path, leaf in self._iter_values()}

    def _iter_values(self) -> Iterator[tuple[str, Any]]:
        """`(name in the module, whole tensor)` of parameters, then of buffers that change."""
        yield from iter_values(self.state.params)
        yield from iter_values(self.state.buffers)

    def _check_between_updates(self, where: str) -> None:
        if getattr(self, "_sums", None) is not None or getattr(self, "_open", None) is not None:
            way_out = "call it behind the step that updates, or drop the gradients with engine.zero_grad()"
            raise FzeroError(where, "gradients are waiting for an update", way_out)

    @property
    def _is_first(self) -> bool:
        """Whether this process has the first rank."""
        return self._on.number == 0

    def _write(self, call: str, path: Path, write: Callable[[], Any]) -> None:
        """Call `write` on the first rank. All ranks return together, or raise."""
        gather, way_out = gather_words(self._on.members, call, f"to {path}"), "mend that, and save again"
        do_together(gather, lambda: write() if self._is_first else None, str(path), "write it", way_out)
