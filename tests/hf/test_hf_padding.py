"""Padding: what a model returns for padded inputs is cut to the length of a rank's own. `test_hf_ranks.py` pads."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from fzero import FzeroError
from fzero.hf import padding
from fzero.hf.padding import cut_to_own, pad_to_longest, pad_to_rung
from fzero.ranks.virtual import ALONE

INPUTS = {"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 4), "count": torch.tensor(7)}


def test_a_process_that_is_alone_pads_nothing() -> None:
    padded = pad_to_longest(INPUTS, ALONE.members, ["labels"], 0)
    assert all(padded[name] is x for name, x in INPUTS.items())
    output = {"logits": torch.ones(2, 3, 3)}
    assert cut_to_own(output, INPUTS, padded, ["labels"], [])["logits"].shape == (2, 3, 3)


def test_packed_rows_get_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask a model would not separate the documents of a row."""
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model, tokens = LlamaForCausalLM(config), torch.tensor([[3, 4, 5, 6, 7, 8]])
    packed = {"input_ids": tokens, "labels": tokens, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    shapes = {name: tuple(x.shape) for name, x in packed.items()}
    longer = dict.fromkeys(packed, (1, 8))
    monkeypatch.setattr(padding, "_gather_shapes", lambda members, own: [shapes, longer])
    padded = pad_to_longest(packed, ALONE.members, ["labels"], 0, model)
    assert padded["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]] and "attention_mask" not in padded
    expected, found = (model(**inputs, use_cache=False) for inputs in (packed, padded))
    torch.testing.assert_close(found.logits[:, :6], expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)
    masked = pad_to_longest({"input_ids": tokens, "labels": tokens}, ALONE.members, ["labels"], 0)
    assert masked["attention_mask"].tolist() == [[1] * 6 + [0] * 2]


def test_a_model_that_looks_ahead_gets_a_mask_beside_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    config = BertConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model, inputs = BertModel(config).eval(), {"input_ids": torch.ones(1, 3, dtype=torch.int64)}
    inputs["position_ids"] = torch.arange(3).unsqueeze(0)
    monkeypatch.setattr(padding, "_gather_shapes", lambda _, own: [own, dict.fromkeys(own, (1, 5))])
    padded = pad_to_longest(inputs, ALONE.members, [], 0, model)
    assert padded["attention_mask"].tolist() == [[1, 1, 1, 0, 0]]


def test_results_lie_along_the_labels_and_those_of_an_encoder_along_its_input() -> None:
    padded = {**INPUTS, "input_ids": torch.ones(2, 5), "labels": torch.ones(2, 5), "attention_mask": torch.ones(2, 5)}
    output = {
        "loss": torch.ones(1), "logits": torch.ones(2, 5, 9), "hidden": (torch.ones(2, 5, 6), torch.ones(2, 1, 6)),
        "encoder_last_hidden_state": torch.ones(2, 5, 6), "attentions": torch.ones(2, 5, 5, 5),
    }  # fmt: skip
    cut = cut_to_own(output, INPUTS, padded, ["labels"], [5])
    assert cut["loss"].shape == (1,) and cut["logits"].shape == (2, 4, 9)
    assert [x.shape[1] for x in cut["hidden"]] == [4, 1]
    assert cut["encoder_last_hidden_state"].shape == (2, 3, 6) and cut["attentions"].shape == (2, 5, 5, 5)


def test_labels_that_were_not_padded_keep_results_that_are_as_long_as_padded_inputs() -> None:
    padded = {**INPUTS, "input_ids": torch.ones(2, 4)}
    output = {"logits": torch.ones(2, 4, 9), "encoder_last_hidden_state": torch.ones(2, 4, 6)}
    cut = cut_to_own(output, INPUTS, padded, ["labels"], [])
    assert cut["logits"].shape == (2, 4, 9) and cut["encoder_last_hidden_state"].shape == (2, 3, 6)


def test_a_result_of_two_dims_that_may_be_a_sequence_or_not_is_refused_by_name() -> None:
    inputs = {"input_ids": torch.ones(2, 3), "labels": torch.ones(2)}
    padded = {**inputs, "input_ids": torch.ones(2, 4)}
    output = {"start_logits": torch.ones(2, 4), "logits": torch.ones(2, 6)}
    cut = cut_to_own(dict(output), inputs, padded, ["labels"], [6])
    assert cut["start_logits"].shape == (2, 3) and cut["logits"].shape == (2, 6)
    with pytest.raises(FzeroError, match=r"output start_logits: has shape \[2, 4\], and 4 is a number.*max_length"):
        cut_to_own(dict(output), inputs, padded, ["labels"], [4])


def test_lengths_are_padded_to_a_rung_of_few() -> None:
    inputs = {"input_ids": torch.ones(1, 70), "labels": torch.ones(1, 70), "position_ids": torch.ones(1, 3), "n": 7}
    padded = pad_to_rung(inputs, ["labels"], 5, None)
    assert padded["input_ids"][0, 69:].tolist() == [1.0] + [5.0] * 10 and padded["n"] == 7
    assert padded["labels"][0, 69:].tolist() == [1.0] + [-100.0] * 10
    assert padded["position_ids"].tolist() == [[1.0] * 3 + [0.0] * 5]
    rungs = {pad_to_rung({"labels": torch.ones(1, n)}, ["labels"], 0, None)["labels"].shape[1] for n in range(1, 1025)}
    assert len(rungs) == 24 and max(rungs) == 1024


def test_no_length_is_padded_past_the_greatest_of_a_model_or_beside_unknown_inputs() -> None:
    inputs = {"input_ids": torch.ones(1, 70)}
    assert pad_to_rung(inputs, [], 5, 80)["input_ids"].shape[1] == 80
    assert pad_to_rung(inputs, [], 5, 79)["input_ids"] is inputs["input_ids"]
    unknown = {**inputs, "sound": torch.ones(1, 70)}
    assert pad_to_rung(unknown, [], 5, None)["input_ids"] is inputs["input_ids"]
