"""Seq2SeqTrainer: losses, metrics and generated tokens of transformers'. Two processes: test_hf_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers
from hf_models import SEQ2SEQ, assert_equal_seq2seq, make_pairs, train_seq2seq

import fzero.hf
from fzero import VirtualMesh


def test_metrics_are_of_the_tokens_that_transformers_generates(tmp_path: Path) -> None:
    expected = train_seq2seq(transformers.Seq2SeqTrainer, "BART", tmp_path)
    assert_equal_seq2seq(train_seq2seq(fzero.hf.Seq2SeqTrainer, "BART", tmp_path, mesh=VirtualMesh(fsdp=2)), expected)


def test_without_generation_predictions_are_logits(tmp_path: Path) -> None:
    named = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    arguments = transformers.Seq2SeqTrainingArguments(str(tmp_path), **named)
    torch.manual_seed(0)
    model = SEQ2SEQ["T5"]()
    theirs = transformers.Seq2SeqTrainer(model, arguments).predict(make_pairs())
    ours = fzero.hf.Seq2SeqTrainer(model, arguments, mesh=VirtualMesh(fsdp=1)).predict(make_pairs())
    assert ours.predictions[0] == pytest.approx(theirs.predictions[0], abs=1e-5)
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], abs=1e-5)
