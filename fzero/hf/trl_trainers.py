"""TRL: its trainers over programs of slices. Each is TRL's class with our Trainer in the place of transformers'."""

from __future__ import annotations

from typing import Any

import trl
from torch import Tensor, nn

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.hf.outside import Outside
from fzero.hf.pretrained import Pretrained
from fzero.hf.reference import MoveReference, Reference
from fzero.hf.trl_options import check_options, list_fields
from fzero.hf.wishes import Wish


class _Base(Outside):
    """`Outside` as TRL's classes construct it: without the arguments of our own."""

    _own: dict[str, Any]
    _pretrained: Pretrained | None

    def __init__(self, model: Any = None, args: Any = None, *more: Any, **named: Any) -> None:
        given = model if self._pretrained is None else self._pretrained
        super().__init__(given, args, *more, **self._own, **named)

    def _construct(self, pretrained: Pretrained | None, model: Any, args: Any, *more: Any, **named: Any) -> None:
        virtual_ranks = 1 if self.mesh is None else self.virtual_ranks
        check_options(args, model if pretrained is None else pretrained.model, virtual_ranks)
        super()._construct(pretrained, model, args, *more, **named)

    def _list_alike(self, name: str, dataset: Any) -> list[str]:
        return [*super()._list_alike(name, dataset), *list_fields(self.args)]


class _Front(Outside):
    """What comes before TRL's methods: a model in slices stands where they use a whole one."""

    ref_model: Any  # None in trainers without a reference
    _own: dict[str, Any]  # the arguments that TRL does not know
    _pretrained: Pretrained | None
    _is_constructed = False

    @check_arguments
    def __init__(
        self, model: Any, *more: Any, mesh: Any = None, stage: int | None = None, quantize: Any = None, **named: Any
    ) -> None:
        axis = next((name for name in Wish._fields if name in named), None)
        if axis is not None:
            problem = f"is given, and {type(self).__name__} calls the model outside of programs"
            raise FzeroError(axis, problem, "leave it out, or give the data to fzero.hf.Trainer")
        self._own = {"mesh": mesh, "stage": stage, "quantize": quantize}
        self._pretrained = model if isinstance(model, Pretrained) else None
        if self._pretrained is not None:
            model = self._pretrained.model
            if named.get("peft_config") is not None:
                problem = "needs a whole model to put adapters into, and from_pretrained made slices"
                raise FzeroError("peft_config", problem, "give peft_config to fzero.hf.from_pretrained")
        super().__init__(model, *more, **named)
        if not self._is_constructed:
            self._finish()

    def _adopt(self) -> None:
        """As in `Trainer`. TRL changes the model behind the constructor of transformers, so adoption waits for that."""
        if self._is_constructed:
            super()._adopt()

    def _finish(self) -> None:
        """Cut all values into slices: TRL's constructor needs them no more."""
        self._is_constructed = True
        self._adopt()

    def training_step(self, model: nn.Module, *more: Any, **named: Any) -> Tensor:
        """As TRL's `training_step`."""
        with self._bind() as bound:
            return super().training_step(bound, *more, **named)

    def prediction_step(self, model: nn.Module, *more: Any, **named: Any) -> Any:
        """As TRL's `prediction_step`."""
        with self._bind() as bound:
            return super().prediction_step(bound, *more, **named)


class _WithReference(_Front):
    """`_Front` of a trainer with a reference model, which is in slices, too."""

    def _finish(self) -> None:
        super()._finish()
        if isinstance(self.ref_model, nn.Module):
            reference = Reference(self, self.ref_model)
            self.ref_model = reference.stand_in
            if self.pop_callback(trl.SyncRefModelCallback) is not None:
                self.add_callback(MoveReference(self, reference))


class SFTTrainer(_Front, trl.SFTTrainer, _Base):
    """TRL's SFTTrainer, with its arguments and those of `fzero.hf.Trainer`.

    trainer = fzero.hf.SFTTrainer("folder", args=SFTConfig("out"), train_dataset=dataset)
    trainer.train()
    """


class RewardTrainer(_Front, trl.RewardTrainer, _Base):
    """TRL's RewardTrainer, with its arguments and those of `fzero.hf.Trainer`."""


class _WithComputedReference(_WithReference):
    """`_WithReference` of a trainer that may compute all results of the reference before it trains."""

    def _precompute_ref_logps(self, *args: Any, **named: Any) -> Any:
        if not self._is_constructed:
            self._finish()  # TRL's constructor ends with this call
        with self._bind():
            return super()._precompute_ref_logps(*args, **named)


class DPOTrainer(_WithComputedReference, trl.DPOTrainer, _Base):
    """TRL's DPOTrainer, with its arguments and those of `fzero.hf.Trainer`. The reference model is in slices, too."""


class KTOTrainer(_WithComputedReference, trl.KTOTrainer, _Base):
    """TRL's KTOTrainer, with its arguments and those of `fzero.hf.Trainer`. The reference model is in slices, too."""


class GRPOTrainer(_WithReference, trl.GRPOTrainer, _Base):
    """TRL's GRPOTrainer, with its arguments and those of `fzero.hf.Trainer`. Completions come from slices
    (`fzero.hf.Generator`)."""


class RLOOTrainer(_WithReference, trl.RLOOTrainer, _Base):
    """TRL's RLOOTrainer, with its arguments and those of `fzero.hf.Trainer`. Completions come from slices
    (`fzero.hf.Generator`)."""
