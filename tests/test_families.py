"""Families of Hugging Face models as they are: a step of each, saved and loaded. `benchmarks/hugging_face.py` trains
them for longer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from passes.test_disk import fill_places
from programs import training
from torch import Tensor

import fzero
from fzero import optim, tree
from fzero.values.quantized import is_quantized

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from families import FAMILIES, Family  # noqa: E402

MESH = fzero.VirtualMesh(fsdp=2)
ROWS = 4
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of gradient_checkpointing_enable's new name


def make(family: Family, seed: int = 0, **settings: Any) -> Any:
    """The model with weights ten times those of its own initial values, whose gradients are of some size."""
    model = family.make(seed, **settings)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.2 * torch.randn_like(param))
    return model


def by_path(params: Any) -> dict[str, Tensor]:
    return dict(zip(tree.paths(params), tree.leaves(params)))


def assert_trains(model: Any, batch: Any, *, stage: int = 3, held: Any = None, **options: Any) -> Any:
    """The loss and its gradients are those of plain torch on the whole batch, with the model's parameters or with
    those `held` in another form. Returns the model's output."""
    params, apply = fzero.lower(model)
    params = params if held is None else held

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            output = apply(params, **batch, **options)
            return output.loss, output

        return fzero.value_and_grad(loss, has_aux=True)(params)

    (loss, output), grads = fzero.simulate(step, MESH, stage=stage)(fzero.partition(params, MESH), batch)
    expected = model(**batch, **options)
    expected.loss.backward()
    torch.testing.assert_close(loss.mean(), expected.loss.detach())
    torch.testing.assert_close(output.logits, expected.logits.detach())
    for path, grad in by_path(fzero.unpartition(grads)).items():
        theirs = model.get_parameter(path).grad
        theirs = torch.zeros_like(grad) if theirs is None else theirs
        torch.testing.assert_close(grad, theirs, rtol=1e-4, atol=1e-6)  # sums of ranks, in another order
    return output


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_plain_torch(name: str, is_checkpointed: bool) -> None:
    """On batches of a tokenizer, padded. The step returns the output, with its cache."""
    family = FAMILIES[name]
    model = make(family)
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    output = assert_trains(model, family.batch(ROWS))
    has_cache = bool(family.prompt(ROWS)) and name != "Mamba" and not is_checkpointed
    assert has_cache == (output.get("past_key_values") is not None) or is_checkpointed


@pytest.mark.parametrize(("name", "bits", "stage"), [("Llama", 4, 3), ("GPT-2", 8, 2)])
def test_a_family_with_quantized_weights_trains_as_plain_torch(name: str, bits: int, stage: int) -> None:
    """With the dequantized weights. All weights of linear layers are frozen and quantized, all others are trained."""
    model = make(FAMILIES[name])
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D":
            module.weight.requires_grad_(False)
    if name == "Llama":
        model.gradient_checkpointing_enable()
    held = fzero.quantize(fzero.lower(model)[0], bits=bits, block=32)
    leaves, treedef = tree.flatten(held, is_leaf=is_quantized)
    chosen = {tree.dotted(key): leaf for key, leaf in zip(tree.keys(treedef), leaves) if is_quantized(leaf)}
    assert len(chosen) >= 8
    with torch.no_grad():
        for path, leaf in chosen.items():
            model.get_parameter(path).copy_(leaf.full_tensor())
    assert_trains(model, FAMILIES[name].batch(ROWS), stage=stage, held=held)


ELSEWHERE: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "GPT-2": ({"n_layer": 1, "vocab_size": 256}, "host device", {"chunk": 4096, "stage": 2}),  # streams its tied leaf
    "Qwen3": ({"num_hidden_layers": 1}, "disk host", {"stage": 1, "donate": False}),
    "ViT": ({"num_hidden_layers": 1}, "device device", {"memory": "30KiB", "to": fzero.host()}),
}
"""Family -> settings, where parameters and state lie, and options of the step."""


@pytest.mark.parametrize("name", ELSEWHERE)
def test_state_elsewhere_trains_as_plain_torch(name: str, tmp_path: Path) -> None:
    """Two steps with clipping and momentum: parameters and state. SGD does not blow up gradients that are rounding."""
    settings, places, how = ELSEWHERE[name]
    model, batch = make(FAMILIES[name], **settings), FAMILIES[name].batch(ROWS)
    whole, apply = fzero.lower(model)
    optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1, momentum=0.9))
    train = training(optimizer, lambda params, batch: apply(params, **batch).loss)
    to = fill_places(places, fzero.disk(tmp_path))
    params = fzero.partition(whole, MESH, layers=lambda path: path if "wte" in path else None, to=to[0])
    state = optimizer.init(params, to=to[1])
    step, theirs = fzero.simulate(train, MESH, **how), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    assert not any("gathered whole" in line for line in step.trace(params, state, batch).remarks)
    for _ in range(2):
        params, state, value = step(params, state, batch)
        theirs.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        theirs.step()
        torch.testing.assert_close(value.mean(), loss.detach())
    for path, leaf in by_path(fzero.unpartition(params)).items():
        torch.testing.assert_close(leaf, model.get_parameter(path).detach(), rtol=1e-4, atol=1e-6)
    momentum = state[1][0].trace
    for path, leaf in by_path(fzero.unpartition(momentum)).items():
        expected = theirs.state[model.get_parameter(path)]["momentum_buffer"]
        torch.testing.assert_close(leaf, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "stage"), [("Llama", 2), ("T5", 1), ("Mixtral", 1)])
def test_other_stages(name: str, stage: int) -> None:
    assert_trains(make(FAMILIES[name]), FAMILIES[name].batch(ROWS), stage=stage)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Llama", {"attn_implementation": "eager"}),
        ("Qwen3", {"tie_word_embeddings": False}),
        ("Mixtral", {"experts_implementation": "batched_mm"}),
        ("Mamba", {"use_mambapy": True}),
    ],
    ids=str,
)
def test_settings(name: str, settings: dict[str, Any]) -> None:
    assert_trains(make(FAMILIES[name], **settings), FAMILIES[name].batch(ROWS))


REFUSED = {
    "Whisper": ({"encoder_layerdrop": 0.1}, r"modeling_whisper.py:\d+ in forward: .*such as layerdrop"),
    "Mixtral": (
        {"experts_implementation": "eager"},
        r"modeling_mixtral.py:\d+ in forward: .*nonzero\(\): Python needs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_values_is_refused_at_its_line(name: str) -> None:
    settings, message = REFUSED[name]
    with pytest.raises(fzero.FzeroError, match=message):
        assert_trains(make(FAMILIES[name], **settings), FAMILIES[name].batch(ROWS))


def test_ranks_with_unequal_numbers_of_labels_count_alike_when_they_share_the_number() -> None:
    family = FAMILIES["Llama"]
    model, batch = make(family), family.batch(ROWS)
    batch["labels"][0, 3:] = -100  # rank 0 has fewer
    params, apply = fzero.lower(model)

    def loss(params: Any, batch: Any) -> Tensor:
        count = fzero.pmean((batch["labels"][:, 1:] != -100).sum().float(), "fsdp")
        return apply(params, **batch, num_items_in_batch=count).loss

    value, grads = fzero.simulate(fzero.value_and_grad(loss), MESH)(fzero.partition(params, MESH), batch)
    expected = model(**batch).loss
    expected.backward()
    torch.testing.assert_close(value.mean(), expected.detach())
    for path, grad in by_path(fzero.unpartition(grads)).items():
        torch.testing.assert_close(grad, model.get_parameter(path).grad, rtol=1e-4, atol=1e-6)


def test_bf16_differs_no_more_than_plain_torch_in_parts() -> None:
    family = FAMILIES["Llama"]
    model, batch = make(family).bfloat16(), family.batch(ROWS)
    params, apply = fzero.lower(model)
    step = fzero.simulate(fzero.value_and_grad(lambda p, batch: apply(p, **batch).loss), MESH)
    grads = by_path(fzero.unpartition(step(fzero.partition(params, MESH), batch)[1]))
    exact = make(family)
    exact.load_state_dict(model.state_dict())
    exact(**batch).loss.backward()
    for part in zip(*(x.chunk(2) for x in batch.values())):
        (model(**dict(zip(batch, part))).loss / 2).backward()

    def error(path: str, grad: Tensor) -> Tensor:
        return (grad - exact.get_parameter(path).grad).norm()

    errors = [(error(path, grad), error(path, model.get_parameter(path).grad)) for path, grad in grads.items()]
    assert all(mine <= 2 * theirs for mine, theirs in errors)


def test_a_llama_on_the_meta_device_moves_what_it_moves_on_the_cpu() -> None:
    """With the cache that it makes by default, whose first tensor is `torch.tensor([])`."""
    moved = list[list[str]]()
    for device in ("cpu", "meta"):
        model = make(FAMILIES["Llama"], num_hidden_layers=1).to(device)
        params, apply = fzero.lower(model)
        step = fzero.simulate(fzero.value_and_grad(lambda p, batch, apply=apply: apply(p, **batch).loss), MESH)
        batch = {name: x.to(device) for name, x in FAMILIES["Llama"].batch(ROWS).items() if name != "attention_mask"}
        moved.append(sorted(map(str, step.trace(fzero.partition(params, MESH), batch).comm())))
    assert moved[0] == moved[1]


@pytest.mark.parametrize("name", ["Llama", "T5", "GPT-2"])
def test_steps_generate_greedily_with_a_cache(name: str) -> None:
    family = FAMILIES[name]
    model, prompt = make(family).eval(), family.prompt(ROWS)
    params, apply = fzero.lower(model)
    params, is_t5 = fzero.partition(params, MESH), model.config.is_encoder_decoder

    def read(params: Any, prompt: Any, tokens: Tensor, cache: Any) -> Any:
        given = {**prompt, "decoder_input_ids": tokens} if is_t5 else {"input_ids": tokens}
        output = apply(params, **given, past_key_values=cache, use_cache=True)
        return output.logits[:, -1:].argmax(-1), output.past_key_values

    step = fzero.simulate(read, MESH)
    tokens, cache = torch.zeros(ROWS, 1, dtype=torch.int64) if is_t5 else prompt["input_ids"], None
    found = [tokens]
    for _ in range(3):
        tokens, cache = step(params, prompt, tokens, cache)
        found.append(tokens)
    config = transformers.GenerationConfig(
        max_new_tokens=3, do_sample=False, pad_token_id=0, bos_token_id=1, decoder_start_token_id=0
    )
    assert torch.equal(torch.cat(found, 1), model.generate(**prompt, generation_config=config))


def test_a_static_cache_has_one_program_for_all_tokens() -> None:
    family = FAMILIES["Llama"]
    model, prompt = make(family).eval(), family.prompt(ROWS)
    params, apply = fzero.lower(model)
    params = fzero.partition(params, MESH)

    def read(params: Any, tokens: Tensor, cache: Any) -> Any:
        cache = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, cache)
        output = apply(params, tokens, past_key_values=cache, use_cache=True)
        return output.logits[:, -1:].argmax(-1), output.past_key_values

    first, step = (fzero.simulate(read, MESH) for _ in range(2))
    cache = transformers.StaticCache(config=model.config, max_cache_len=12)
    cache.early_initialization(ROWS, 1, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(fzero.FzeroError, match=r"cumulative_length: add_ writes into it"):
        fzero.simulate(lambda p, x, cache: apply(p, x, past_key_values=cache), MESH)(params, prompt["input_ids"], cache)
    found = [prompt["input_ids"]]
    for each in (first, step, step):
        tokens, cache = each(params, found[-1], cache)
        found.append(tokens)
        for layer in cache.layers:
            layer.cumulative_length = layer.cumulative_length[0]  # one number a rank
    config = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(torch.cat(found, 1), model.generate(**prompt, generation_config=config))
    assert len(step._pipeline._cache) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    """Trained state goes to `from_pretrained`, its files and those of `save_pretrained` come back: equal logits, and
    tied weights stay tied."""
    family = FAMILIES[name]
    model, batch = make(family).eval(), family.batch(ROWS)
    with torch.no_grad():
        expected = model(**batch).logits
    saved, theirs, renamed = tmp_path / "saved", tmp_path / "theirs", tmp_path / "renamed"
    model.config.save_pretrained(saved)
    params, _ = fzero.lower(model)
    fzero.save_safetensors(fzero.partition(params, MESH), saved / "model.safetensors", metadata={"format": "pt"})
    loaded, report = type(model).from_pretrained(saved, output_loading_info=True)
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, expected, rtol=0, atol=0)
    assert not any(report.values())
    assert [path for path, _ in loaded.named_parameters()] == [path for path, _ in model.named_parameters()]

    model.save_pretrained(theirs)  # in the names of old releases, and experts one by one
    model.save_pretrained(renamed, save_original_format=False)
    others, apply = fzero.build(lambda: make(family, seed=1).eval(), MESH)
    step = fzero.simulate(lambda p, batch: apply(p, **batch).logits, MESH)
    for folder in (saved, renamed):
        torch.testing.assert_close(step(fzero.load_safetensors(folder, others, MESH), batch), expected)
    if name in ("ViT", "Mixtral"):
        for files in (theirs, theirs / "model.safetensors"):
            with pytest.raises(
                fzero.FzeroError, match=r"fzero\.checkpoint\.load_hf\(folder, params, mesh\) renames, split"
            ):
                fzero.load_safetensors(files, others, MESH)
    built, apply = fzero.build(lambda: type(model).from_pretrained(theirs), MESH)
    torch.testing.assert_close(step(built, batch), expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_layers_of_llama_in_a_loop_are_the_model(stage: int) -> None:
    """A layer as transformers wrote it is the body of `fzero.scan`."""
    model = make(FAMILIES["Llama"], num_hidden_layers=3)
    params, apply = fzero.lower(model)
    modules = model.model.embed_tokens, model.model.layers[0], model.model.norm
    embed, block, norm = (fzero.lower(module)[1] for module in modules)
    rotary, tokens = model.model.rotary_emb, torch.randint(model.config.vocab_size, (ROWS, 8))

    def in_a_loop(params: Any, tokens: Tensor) -> Tensor:
        parts = params["model"]
        h = embed(parts["embed_tokens"], tokens)
        rope = rotary(h, torch.arange(tokens.shape[1])[None])
        layer = lambda h, _, q: (block(q, h, position_embeddings=rope, attention_mask=None), None)  # noqa: E731
        h, _ = fzero.scan(layer, h, layers=parts["layers"])
        logits = torch.nn.functional.linear(norm(parts["norm"], h), params["lm_head"]["weight"])
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def whole(params: Any, tokens: Tensor) -> Tensor:
        return apply(params, input_ids=tokens, labels=tokens, use_cache=False).loss

    step = fzero.simulate(fzero.value_and_grad(in_a_loop), MESH, stage=stage)
    given = fzero.partition(params, MESH), tokens
    assert sum(node.target is fzero.ops.loop for node in step.trace(*given).graph.nodes) == 2
    got = fzero.unpartition(step(*given))
    torch.testing.assert_close(got, fzero.value_and_grad(whole)(params, tokens), rtol=1e-4, atol=1e-6)
