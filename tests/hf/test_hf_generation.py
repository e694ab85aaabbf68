"""`generate` from slices: equal to transformers' own, token for token, on one rank, on virtual ranks and on two."""

from __future__ import annotations

import functools
import re
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
from fzero.hf.caches import find_caches, round_up
from fzero.values.layers import FEWEST

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


def assert_equal(
    model: Any, generator: Any, params: Any, tolerance: dict[str, float] | None = None, **named: Any
) -> tuple[Any, Any]:
    """Equal tokens for the same seed, from equal logits. Returns both outputs."""
    results = []
    for generate in (functools.partial(generator, params), model.generate):
        torch.manual_seed(0)
        results.append(generate(**{**PLAIN, "return_dict_in_generate": True, "output_logits": True, **named}))
    got, expected = results
    assert torch.equal(got["sequences"], expected["sequences"])
    torch.testing.assert_close(got.get("logits"), expected.get("logits"), **(tolerance or {}))
    assert len(expected["sequences"].unique()) > 1
    return got, expected


ONE_LAYER = {"GPT-2": ["n_layer"], "T5": ["num_layers"], "Whisper": ["encoder_layers", "decoder_layers"]}
DECODERS = ("Llama", "Qwen3", "Gemma", "GPT-2", "GPT-NeoX", "OLMo-2", "Mixtral", "Mamba")


@pytest.mark.parametrize("name", [*DECODERS, "T5", "Whisper"])
def test_a_family_generates_as_plain_transformers(name: str) -> None:
    """Greedily and by sampling, from padded prompts. More tokens need no further program. Equal layers, of which a
    trace may copy, write into one cache."""
    family = FAMILIES[name]
    layers = FEWEST if name == "Llama" else 1
    model = perturb(family.make(**dict.fromkeys(ONE_LAYER.get(name, ["num_hidden_layers"]), layers)))
    prompt = make_prompt() if name in DECODERS else family.prompt(ROWS)
    named = {**prompt, **({} if name in DECODERS else {"decoder_start_token_id": 1})}
    generator, params = partition(model)
    assert_equal(model, generator, params, **named, do_sample=False)
    programs = count_programs(generator)
    assert_equal(model, generator, params, **named, do_sample=True, top_k=8, max_new_tokens=9)
    print(name, programs)  # of prompts, of tokens and of encoders
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


class Listener(transformers.generation.BaseStreamer):
    """Notes what a streamer is told."""

    def __init__(self, found: list[Any]) -> None:
        self.found = found

    def put(self, value: Tensor) -> None:
        self.found.append(value.tolist())

    def end(self) -> None:
        self.found.append("end")


def test_one_program_serves_all_prompts_of_a_bucket_and_one_all_tokens_of_a_cache() -> None:
    model = perturb(FAMILIES["Llama"].make(num_hidden_layers=1))
    generator, params = partition(model)
    for length in (3, 10, 16, 17, 19):
        named = {**make_prompt(2, length), "max_new_tokens": 13, "eos_token_id": [4, 9, 14, 21]}
        assert_equal(model, generator, params, **named)
    tokens: list[list[Any]] = [[], []]
    for found, generate in zip(tokens, (functools.partial(generator, params), model.generate)):
        generate(**make_prompt(2), **PLAIN, streamer=Listener(found))
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 8  # the prompt, six tokens, and the end
    assert count_programs(generator) == {"prompt": 2, "token": 2, "encoder": 0}  # of 16 and of 32
    assert [round_up(n) for n in (1, 16, 17, 32, 33, 1000)] == [16, 16, 32, 32, 64, 1024]


def test_no_rank_holds_whole_parameters() -> None:
    mesh = VirtualMesh(fsdp=8)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 5, "num_attention_heads": 2}
    model = FAMILIES["Llama"].make(**sizes).eval()
    generator, params = partition(model, mesh)
    generator(params, **make_prompt(8), **{**PLAIN, "max_new_tokens": 2})
    whole = sum(x.nbytes for x in model.parameters())
    for name in ("prompt", "token"):
        (known,) = generator.programs[name]._pipeline._cache
        assert known.finished.memory().peak < 0.8 * whole  # an eighth, and three layers of five


CASES: dict[str, dict[str, Any]] = {
    "hidden states": {"output_hidden_states": True},
    "attention": {"output_attentions": True},
    "a chunked prompt": {"prefill_chunk_size": 2},
    "processors": {"output_scores": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
    "a static cache": {"cache_implementation": "static"},
    "without a cache": {"use_cache": False},
    "tokens looked up in the prompt": {"prompt_lookup_num_tokens": 2, "output_logits": False},
}


@pytest.mark.parametrize("case", CASES)
def test_arguments_of_generate_mean_the_same(case: str) -> None:
    settings = {"attn_implementation": "eager"} if case == "attention" else {}
    model = perturb(FAMILIES["Llama"].make(num_hidden_layers=1, **settings))
    generator, params = partition(model, VirtualMesh(fsdp=1))
    prompt = {"input_ids": torch.tensor([[5, 6, 7, 5, 6]])} if "looked" in case else make_prompt(2)
    got, expected = assert_equal(model, generator, params, **prompt, **{"max_new_tokens": 3, **CASES[case]})
    for name in ("hidden_states", "attentions", "scores"):
        torch.testing.assert_close(got.get(name), expected.get(name))


@pytest.mark.parametrize("kind", ["Mistral", "Bloom"])
def test_windows_and_masks_of_other_kinds(kind: str) -> None:
    """A window is hidden by the mask. Bloom counts positions in a mask of the cache's length."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    mine = {"sliding_window": 4, "num_key_value_heads": 1, "intermediate_size": 32} if kind == "Mistral" else {}
    config = getattr(transformers, f"{kind}Config")(**sizes, **mine)
    model = perturb(getattr(transformers, f"{kind}ForCausalLM")(config))
    generator, params = partition(model)
    got, expected = assert_equal(model, generator, params, **make_prompt(2), max_new_tokens=7)
    assert_equal_caches(got.past_key_values, expected.past_key_values)
    assert sum(count_programs(generator).values()) == 2


@pytest.mark.parametrize("kind", ["", "StaticCache"])
def test_a_cache_goes_on_in_the_next_call(kind: str) -> None:
    """A chat: the second call takes what the first one returned, with its own layers, keys and values."""
    model = perturb(FAMILIES["Llama"].make(num_hidden_layers=1))
    generator, params = partition(model, VirtualMesh(fsdp=1))
    named, outputs = {**PLAIN, "return_dict_in_generate": True}, []
    for generate in (functools.partial(generator, params), model.generate):
        given = {"past_key_values": transformers.StaticCache(model.config, max_cache_len=20)} if kind else {}
        first = generate(torch.tensor([[5, 6, 7]]), **given, **named)
        tokens = torch.cat([first.sequences, torch.tensor([[8, 9]])], 1)
        outputs.append(generate(tokens, past_key_values=first.past_key_values, **named))
        assert not kind or first.past_key_values is given["past_key_values"]
    got, expected = outputs
    assert torch.equal(got.sequences, expected.sequences)
    assert_equal_caches(got.past_key_values, expected.past_key_values)


def test_a_cache_is_found_by_its_class_under_any_name() -> None:
    """Releases name it otherwise. One that is not found is not filled, and tokens are of the last token alone."""
    decoder = transformers.DynamicCache()
    both = transformers.EncoderDecoderCache(decoder, transformers.DynamicCache())
    named = {"input_ids": torch.ones(1, 2), "use_cache": True, "mems": None}
    for cache in (decoder, both, transformers.StaticCache(FAMILIES["Llama"].make().config, max_cache_len=4)):
        for name in ("cache", "past_key_values", "cache_params", "a name of tomorrow"):
            assert find_caches({**named, name: cache}) == {name: cache}


def assert_equal_caches(got: Any, expected: Any) -> None:
    for ours, theirs in zip(got.layers, expected.layers, strict=True):
        assert type(ours) is type(theirs)
        for name in ("keys", "values"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))


def test_what_cannot_generate_is_refused_by_name() -> None:
    llama, bert = (FAMILIES[name].make(num_hidden_layers=1) for name in ("Llama", "BERT"))
    generator, params = partition(llama)
    with pytest.raises(FzeroError, match="cache_implementation: is 'quantized'"):
        generator(params, **make_prompt(2), cache_implementation="quantized")
    with pytest.raises(FzeroError, match=r"3 rows do not divide by 2 ranks"):
        generator(params, **make_prompt(3))
    generator, params = partition(bert)
    with pytest.raises(FzeroError, match="generate: BertForMaskedLM has no generate"):
        generator(params, torch.tensor([[5, 6]]))
    keeper = transformers.OpenAIGPTLMHeadModel(
        transformers.OpenAIGPTConfig(vocab_size=32, n_embd=16, n_layer=1, n_head=2)
    )
    reader = transformers.BertLMHeadModel(bert.config)
    for model in (keeper, reader):  # one takes no cache, the other sees both sides
        generator, params = partition(model)
        with pytest.raises(FzeroError, match=rf"{type(model).__name__} fills no cache; set is_decoder=True"):
            generator(params, **make_prompt(2), **PLAIN)
    assert_equal(reader.eval(), generator, params, **make_prompt(2), use_cache=False)


def generate_on_two(mesh: DeviceMesh) -> list[Any]:
    """What a rank has for its own prompts, where ranks differ in rows, lengths and steps, and where one fails."""
    rank = mesh.get_local_rank()
    model = perturb(FAMILIES["Llama"].make(num_hidden_layers=1))
    generator, params = partition(model, mesh)
    found: list[Any] = []
    for rows, length, steps in (((2, 2), (5, 7), (6, 3)), ((1, 2), (20, 5), (2, 6))):
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
    changed = {"max_steps": 1, "gradient_accumulation_steps": 1, "learning_rate": 0.1, "warmup_steps": 0}
    theirs, ours = (
        cls(make_model("llama"), make_arguments(tmp_path, **changed), train_dataset=make_dataset())
        for cls in (transformers.Trainer, fzero.hf.Trainer)
    )
    for trainer in (theirs, ours):
        trainer.train()
        trainer.model.eval()
    assert_equal(theirs.model, lambda _, **named: ours.generate(**named), None, input_ids=torch.tensor([[5, 9, 2, 7]]))


def test_a_trainer_in_bfloat16_generates_in_autocast(tmp_path: Path) -> None:
    trainer = fzero.hf.Trainer(make_model("llama"), make_arguments(tmp_path, bf16=True), mesh=VirtualMesh(fsdp=1))

    def generate(_: Any, **named: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return trainer.generate(**named)

    rounding = {"rtol": 2**-7, "atol": 2**-7}
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(make_model("llama").eval(), generate, None, rounding, input_ids=torch.tensor([[5, 9, 2, 7]]))


def test_a_model_of_files_generates_as_the_page_says(tmp_path: Path) -> None:
    model = perturb(make_model("llama"))
    model.save_pretrained(tmp_path)
    page = (Path(__file__).resolve().parents[2] / "docs" / "huggingface.md").read_text()
    (example,) = [x for x in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if ".generate(" in x]
    pretrained = fzero.hf.from_pretrained(tmp_path, MESH)
    names: dict[str, Any] = {"texts": ["a", "b"], "tokenizer": lambda texts, **_: make_prompt(len(texts))}
    exec(compile(example, "docs/huggingface.md", "exec"), names | {"pretrained": pretrained}, names)
    expected = model.generate(**make_prompt(2), max_new_tokens=20, num_beams=2)
    assert torch.equal(names["tokens"], expected)
