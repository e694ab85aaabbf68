"""Status: what DeepSpeed's engine says about itself, from the state and the settings."""

from __future__ import annotations

from typing import Any

import torch

from fzero.base.state import State
from fzero.deepspeed.functions import count_skips
from fzero.deepspeed.schedulers import Scheduled, rate_at, values_at
from fzero.deepspeed.settings import Settings
from fzero.optim.kinds import Group
from fzero.ranks.live import find_ranks
from fzero.ranks.ranks import Ranks


class Status:
    """The part of an engine that answers questions."""

    state: State
    settings: Settings
    mesh: Any
    groups: list[Group]
    _scheduled: Scheduled
    _norm: Any

    @property
    def global_steps(self) -> int:
        """Updates so far, those that were skipped among them."""
        return int(self.state.step)

    @property
    def global_samples(self) -> int:
        return self.global_steps * self.settings.train_batch_size

    @property
    def skipped_steps(self) -> int:
        """Updates that were skipped because gradients were not finite. Waits for the device."""
        return count_skips(self.state.opt_state)

    def get_lr(self) -> list[float]:
        """The rate of the next update, one for each group of parameters."""
        count = self.global_steps - self.skipped_steps
        return [rate_at(each, count) for each in self._scheduled]

    def list_hyperparameters(self) -> list[dict[str, Any]]:
        """Those of the next update by torch's names, one dict for each group of parameters."""
        count, found = self.global_steps - self.skipped_steps, []
        for group, scheduled in zip(self.groups, self._scheduled):
            now: dict[str, Any] = {**group.options, **values_at(scheduled, count)}
            kept: dict[str, Any] = {name: now[name] for name in ("eps", "weight_decay", "momentum") if name in now}
            kept |= {"betas": (now["b1"], now["b2"])} if "b1" in now else {}
            found.append({"lr": now["learning_rate"], **kept})
        return found

    def get_global_grad_norm(self) -> float | None:
        """The norm of the mean gradient of the last update, before it was clipped. None before the first update."""
        return None if self._norm is None else float(self._norm)

    @property
    def loss_scale(self) -> float:
        """The factor of the loss of the next batch, 1 without fp16."""
        return 1.0 if self.state.scale is None else float(self.state.scale.scale.full_tensor())

    cur_scale = loss_scale

    def train_batch_size(self) -> int:
        return self.settings.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.settings.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self.settings.accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """`(train batch, micro batch of a rank, accumulation steps)`."""
        return self.settings[:3]

    def gradient_clipping(self) -> float:
        return self.settings.clipping

    def zero_optimization_stage(self) -> int:
        return self.settings.stage

    def zero_optimization(self) -> bool:
        return self.settings.stage > 0

    def fp16_enabled(self) -> bool:
        return self.settings.compute is torch.float16

    def bfloat16_enabled(self) -> bool:
        return self.settings.compute is torch.bfloat16

    @property
    def device(self) -> torch.device:
        """Where batches belong."""
        return self._on.choose_device()

    @property
    def global_rank(self) -> int:
        return self._on.number

    @property
    def world_size(self) -> int:
        return self._on.mesh.size()

    @property
    def dp_world_size(self) -> int:
        return self.world_size

    @property
    def _on(self) -> Ranks:
        return find_ranks(self.mesh)
