"""TrainingArguments: transformers' own, which take `deepspeed` without the package deepspeed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers


class _WithoutDeepSpeed:
    """The part that keeps `deepspeed` from transformers, which would ask for the package. It annotates no field:
    HfArgumentParser reads the types of transformers."""

    def __post_init__(self) -> None:
        fields: dict[str, Any] = vars(self)
        given, fields["deepspeed"] = fields["deepspeed"], None
        super().__post_init__()  # type: ignore[misc]
        fields["deepspeed"] = given


@dataclass
class TrainingArguments(_WithoutDeepSpeed, transformers.TrainingArguments):
    """transformers' TrainingArguments. `deepspeed`, a ds_config.json or a dict, needs no deepspeed."""


@dataclass
class Seq2SeqTrainingArguments(_WithoutDeepSpeed, transformers.Seq2SeqTrainingArguments):
    """transformers' Seq2SeqTrainingArguments. `deepspeed`, a ds_config.json or a dict, needs no deepspeed."""
