"""`generate` from slices: equal to transformers' own, token for token, on one rank, on virtual ranks and on two."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers
from hf_models import make_arguments, make_dataset, make_model
from processes import run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero.hf
from fzero import FzeroError, VirtualMesh
from fzero.hf.caches import round_up

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from families import FAMILIES

MESH = VirtualMesh(fsdp=2)
ROWS = 4
PLAIN = {"pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 6}


def perturb(model: Any) -> Any:
    """Weights so large that tokens follow from what was read."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.2 * torch.randn_like(param))
    return model.eval()


def make_prompt(rows: int = ROWS, length: int = 5) -> dict[str, Tensor]:
    """Rows of tokens; every second is shorter, with padding on the left."""
    draw = torch.Generator().manual_seed(length)
    tokens = torch.randint(3, 32, (rows, length), generator=draw)
    mask = (torch.arange(length) >= torch.tensor([0, 3]).repeat(rows)[:rows, None]).long()
    return {"input_ids": tokens * mask, "attention_mask": mask}


def partition(model: Any, mesh: Any = MESH, **how: Any) -> tuple[Any, Any]:
    """A generator, and the parameters of a model in slices."""
    return fzero.hf.Generator(model, mesh, **how), fzero.partition(fzero.lower(model)[0], mesh)


def count_programs(generator: Any) -> dict[str, int]:
    return {name: len(step._pipeline._cache) for name, step in generator.programs.items()}


def assert_equal(model: Any, generator: Any, params: Any, **named: Any) -> tuple[Any, Any]:
    """Equal tokens for the same seed, from equal logits. Returns both outputs."""
    results = []
    for generate in (functools.partial(generator, params), model.generate):
        torch.manual_seed(0)
        results.append(generate(**{**PLAIN, "return_dict_in_generate": True, "output_logits": True, **named}))
    got, expected = results
    assert torch.equal(got["sequences"], expected["sequences"])
    torch.testing.assert_close(got["logits"], expected["logits"])
    assert len(expected["sequences"].unique()) > 1
    return got, expected


DECODERS = ("Llama", "Qwen3", "Gemma", "GPT-2", "GPT-NeoX", "OLMo-2", "Mixtral", "Mamba")


@pytest.mark.parametrize("name", [*DECODERS, "T5", "Whisper"])
def test_a_family_generates_as_plain_transformers(name: str) -> None:
    """Greedily and by sampling, from padded prompts. More tokens need no further program."""
    family = FAMILIES[name]
    model = perturb(family.make())
    prompt = make_prompt() if name in DECODERS else family.prompt(ROWS)
    named = {**prompt, **({} if name in DECODERS else {"decoder_start_token_id": 1})}
    generator, params = partition(model)
    assert_equal(model, generator, params, **named, do_sample=False)
    programs = count_programs(generator)
    assert_equal(model, generator, params, **named, do_sample=True, top_k=8, max_new_tokens=9)
    print(name, programs)
    assert count_programs(generator) == programs
    assert sum(programs.values()) <= (2 if name in DECODERS else 3)


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_beams(name: str) -> None:
    model = perturb(FAMILIES[name].make())
    generator, params = partition(model)
    prompt = {**FAMILIES[name].prompt(2), "decoder_start_token_id": 1} if name == "T5" else make_prompt(2)
    named = {"do_sample": False, "num_beams": 3, "num_return_sequences": 2}
    got, expected = assert_equal(model, generator, params, **prompt, **named, output_scores=True)
    torch.testing.assert_close(got.sequences_scores, expected.sequences_scores)


def test_one_program_serves_all_prompts_of_a_bucket_and_one_all_tokens_of_a_cache() -> None:
    model = perturb(FAMILIES["Llama"].make())
    generator, params = partition(model)
    for length in range(3, 20):
        assert_equal(model, generator, params, **make_prompt(2, length), do_sample=False, max_new_tokens=13)
    assert count_programs(generator) == {"prompt": 2, "token": 2, "encoder": 0}  # of 16 and of 32
    assert [round_up(n) for n in (1, 16, 17, 32, 33, 1000)] == [16, 16, 32, 32, 64, 1024]


def test_no_rank_holds_whole_parameters() -> None:
    mesh = VirtualMesh(fsdp=4)
    model = FAMILIES["Llama"].make(hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4)
    generator, params = partition(model.eval(), mesh)
    generator(params, **make_prompt(4), **{**PLAIN, "max_new_tokens": 2})
    whole = sum(x.nbytes for x in model.parameters())
    for name in ("prompt", "token"):
        (known,) = generator.programs[name]._pipeline._cache
        peak = known.finished.memory().peak
        print(name, peak, whole)
        assert peak < whole / 2


def generate_on_two(mesh: DeviceMesh) -> list[Any]:
    """What a rank has for its own prompts, where ranks differ in rows, lengths and steps, and where one fails."""
    rank = mesh.get_local_rank()
    model = perturb(FAMILIES["Llama"].make())
    generator, params = partition(model, mesh)
    found: list[Any] = []
    for rows, length, steps in (((2, 2), (5, 7), (6, 3)), ((1, 3), (20, 5), (2, 6))):
        named = {**make_prompt(rows[rank], length[rank]), "max_new_tokens": steps[rank], "do_sample": rank == 1}
        assert_equal(model, generator, params, **named)
    for named in ({"typo": rank}, {"stopping_criteria": [stop_by_error]}) if rank else ({}, {}):
        try:
            generator(params, **PLAIN, **make_prompt(2, 5), **named)
        except (FzeroError, ValueError) as error:
            found.append(str(error))
    assert_equal(model, generator, params, **make_prompt(2, 5), do_sample=False)
    return found


def stop_by_error(tokens: Tensor, scores: Any) -> Any:
    raise ValueError(f"no more than {tokens.shape[1]} tokens")


def test_two_ranks_generate_what_each_asks_for() -> None:
    theirs, own = run(2, generate_on_two)
    for message, cause in zip(theirs, ("typo", "no more than 6 tokens")):
        assert "generate, rank 1: could not go on: ValueError" in message
        assert cause in message
    assert "typo" in own[0]
    assert own[1] == "no more than 6 tokens"


def test_a_trainer_generates_from_what_it_trained(tmp_path: Path) -> None:
    changed = {"max_steps": 2, "gradient_accumulation_steps": 1, "learning_rate": 0.1}
    theirs, ours = (
        cls(make_model("llama"), make_arguments(tmp_path, **changed), train_dataset=make_dataset())
        for cls in (transformers.Trainer, fzero.hf.Trainer)
    )
    tokens = torch.tensor([[5, 9, 2, 7]])
    for trainer in (theirs, ours):
        trainer.train()
    assert torch.equal(ours.generate(tokens, **PLAIN), theirs.model.eval().generate(tokens, **PLAIN))
    ours.train()
    assert ours.generate(tokens, **PLAIN).shape == (1, 10)


def test_a_model_of_files_generates(tmp_path: Path) -> None:
    model = perturb(make_model("llama"))
    model.save_pretrained(tmp_path)
    pretrained = fzero.hf.from_pretrained(tmp_path, MESH)
    prompt = make_prompt(2)
    assert torch.equal(pretrained.generate(**prompt, **PLAIN), model.generate(**prompt, **PLAIN))
