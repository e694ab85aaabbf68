"""Seq2Seq: transformers' Seq2SeqTrainer, whose metrics are of generated tokens, over our Trainer."""

from __future__ import annotations

from typing import Any

import transformers

from fzero.hf.trainer import Trainer


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """transformers' Seq2SeqTrainer, with its arguments and those of `fzero.hf.Trainer`.

        args = Seq2SeqTrainingArguments("out", predict_with_generate=True, generation_num_beams=4)
        trainer = fzero.hf.Seq2SeqTrainer(model=model, args=args, eval_dataset=dataset, compute_metrics=measure)
        trainer.evaluate(max_length=64)

    With `predict_with_generate` the predictions of `evaluate` and `predict` are the tokens that `trainer.generate`
    returns. Each rank generates for its own rows.
    """

    _allowed = frozenset({"predict_with_generate"})

    def prediction_step(self, *args: Any, **named: Any) -> Any:
        """As transformers' `prediction_step`, which calls `self.model.generate`."""
        structure: Any = self.model
        self.model = _Generating(self, structure)
        try:
            return super().prediction_step(*args, **named)
        finally:
            self.model = structure


class _Generating:
    """A model without values, as `prediction_step` uses it: its `generate` is that of its Trainer."""

    def __init__(self, trainer: Trainer, model: Any) -> None:
        self._trainer, self._model = trainer, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, *args: Any, **named: Any) -> Any:
        self._trainer.model = self._model
        try:
            return self._trainer.generate(*args, **named)
        finally:
            self._trainer.model = self
