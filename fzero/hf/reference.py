"""Reference: a further model of a Trainer in slices, which is not trained: that of DPO, or of a KL term."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from fzero import tree
from fzero.base.errors import FzeroError
from fzero.hf.checks import check_model, check_values, refuse_use
from fzero.hf.outside import Outside
from fzero.hf.sliced import Held, stand_for
from fzero.training.models import find_store, lower_modes, partition_model
from fzero.training.programs import compile_function
from fzero.training.spent import spend_model

WITHOUT_AUTOCAST = "_original_forward"
"""The attribute where accelerate's `prepare_model` keeps the forward that it put autocast around. Programs have their
own autocast."""


class Reference:
    """A model whose values move into slices. `stand_in` is called as the whole model, by all ranks together.

    Raises:
        FzeroError: for a model that cannot be cut, and for one with running statistics.
    """

    def __init__(self, trainer: Outside, model: nn.Module) -> None:
        check_model(model)
        check_values(model)
        if WITHOUT_AUTOCAST in vars(model):
            model.forward = vars(model).pop(WITHOUT_AUTOCAST)
        lowered = lower_modes(model)
        if lowered.buffers is not None:
            problem = f"{type(model).__name__} has running statistics, which a reference does not keep"
            raise FzeroError("ref_model", problem, "give a model without them")
        self._trainer = trainer
        self.params = partition_model(model, lowered.params, find_store(model), trainer.mesh)
        spend_model(model, trainer.args.device, refuse_use)
        self._sliced = trainer.make_sliced(model, "ref_model")
        self.stand_in = stand_for(model, self._call)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self._trainer.compute(self._sliced.forward, Held(self.params, None), args, kwargs)[0]

    def move(self, params: tree.Tree, share: float) -> None:
        """Move the parameters towards `params`: `(1 - share) * own + share * params`."""

        def mix(own: Any, others: Any) -> Any:
            return tree.map(lambda x, y: x * (1 - share) + share * y, own, others)

        self.params = compile_function(mix, self._trainer.mesh, title="Trainer: ref_model")(self.params, params)


class MoveReference(TrainerCallback):
    """TRL's SyncRefModelCallback for a reference in slices."""

    def __init__(self, trainer: Any, reference: Reference) -> None:
        self._trainer, self._reference = trainer, reference

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % args.ref_model_sync_steps == 0:
            self._reference.move(self._trainer.sharded.params, args.ref_model_mixup_alpha)
