"""The Trainer and `generate` on ranks that share a model, beside transformers; and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers
from accelerate import Accelerator
from hf_models import SEQ2SEQ, make_arguments, make_dataset, make_pairs, read_evaluations, read_logs
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

import fzero
import fzero.hf
from fzero import FzeroError, VirtualMesh, tree
from fzero.hf.data_ranks import DataRanks
from fzero.hf.merging import list_leaves
from fzero.hf.outside import Outside
from fzero.hf.sharing import check_whole
from fzero.hf.wishes import Wish, choose_wish
from fzero.values.quantized import is_quantized

MESH = VirtualMesh(fsdp=2, tp=2)


def make(**settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 62, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **settings}))


def train(cls: Any, folder: Path, model: Any = None, resume: Any = None, **how: Any) -> Any:
    changed = {"max_steps": 3, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 2}
    arguments = make_arguments(folder, **changed, eval_strategy="epoch", num_train_epochs=1)
    rows = make_dataset(12, length=12)
    trainer = cls(make() if model is None else model, arguments, train_dataset=rows, eval_dataset=rows[:8], **how)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_equal(ours: Any, theirs: Any, updates: int = 3) -> None:
    for mine, their in zip(read_logs(ours)[-updates:], read_logs(theirs)[-updates:], strict=True):
        assert mine == pytest.approx(their, rel=1e-5, abs=1e-5)
    assert read_evaluations(ours)[-1] == pytest.approx(read_evaluations(theirs)[-1], abs=1e-5)


def test_a_model_trains_is_saved_and_resumed_as_in_transformers(tmp_path: Path) -> None:
    theirs = train(transformers.Trainer, tmp_path / "theirs")
    mesh = VirtualMesh(fsdp=1, tp=2, sp=2)
    ours = train(fzero.hf.Trainer, tmp_path / "ours", mesh=mesh, tp="tp", sp=("sp", "tp"))
    assert_equal(ours, theirs)
    assert {leaf.form.layout.shard_axis for leaf in tree.leaves(ours.sharded.params)} == {"fsdp+sp"}
    ours.save_model(str(tmp_path / "model"))
    read = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    for (name, x), (_, y) in zip(read.named_parameters(), theirs.model.named_parameters(), strict=True):
        torch.testing.assert_close(x, y, msg=name)
    pretrained = fzero.hf.from_pretrained(tmp_path / "model", MESH, tp="tp")
    assert any(leaf.form.layout.split_axes == ("tp",) for leaf in tree.leaves(pretrained.params))
    checkpoint = str(tmp_path / "ours" / "checkpoint-2")
    resumed = train(fzero.hf.Trainer, tmp_path / "again", pretrained, checkpoint)  # on another mesh, from other weights
    assert_equal(resumed, theirs, updates=1)


def test_an_encoder_decoder_generates() -> None:
    """Keys of the encoder's output are joined once."""
    model = SEQ2SEQ["T5"]().eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.3 * torch.randn_like(param))
    prompt = torch.stack([row["input_ids"] for row in make_pairs()[:2]])
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    params, _ = fzero.hf.parallel(model, MESH)
    got = fzero.hf.Generator(model, MESH, tp="tp")(params, prompt, max_new_tokens=4, do_sample=False)
    assert got.tolist() == expected.tolist() and len({*map(tuple, got.tolist())}) > 1


def test_an_output_of_which_ranks_have_parts_is_refused() -> None:
    model, tokens = make(attn_implementation="eager"), torch.ones(2, 4, dtype=torch.int64)
    params, apply = fzero.hf.parallel(model, MESH)
    step = fzero.simulate(lambda p, x: check_whole(apply(p, x, output_attentions=True)), MESH, data=("fsdp",))
    with pytest.raises(FzeroError, match=r"output attentions\.0: is a part on each rank along 'tp'"):
        step.trace(params, tokens)


def test_gathers_and_rows_are_those_of_ranks_along_data_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks (tp 2, fsdp 2), the second and the fourth have the second half of the rows."""
    accelerator: Any = Accelerator(cpu=True)
    on: Any = SimpleNamespace(mesh=VirtualMesh(tp=2, fsdp=2), ranks=range(4), number=3)
    DataRanks.share(accelerator, on, ("fsdp",))
    assert (accelerator.num_processes, accelerator.process_index) == (2, 1)
    monkeypatch.setattr(Accelerator, "gather", lambda self, x: torch.cat([x, x + 1, x, x + 1]))  # of all ranks
    accelerator.state = SimpleNamespace(num_processes=4)
    assert accelerator.gather(torch.tensor([0, 10])).tolist() == [0, 10, 1, 11]
    assert accelerator.reduce(torch.tensor([2.0])).tolist() == [5.0]
    with pytest.raises(FzeroError, match="eval_use_gather_object: is True"):
        accelerator.gather_for_metrics(["text"], use_gather_object=True)
    with pytest.raises(FzeroError, match="gather_for_metrics: input_data: has values that are no tensors"):
        accelerator.gather_for_metrics({"loss": torch.ones(1), "names": ["text"]})


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(make_dataset(4))


def test_a_stream_that_rank_0_deals_out_is_refused() -> None:
    accelerator: Any = Accelerator(cpu=True)
    DataRanks.share(accelerator, SimpleNamespace(mesh=MESH, ranks=range(4), number=0), ("fsdp",))  # type: ignore[arg-type]
    with pytest.raises(FzeroError, match="dispatch_batches: gives each rank other rows of a stream"):
        accelerator.prepare(torch.utils.data.DataLoader(Stream()))


def make_adapted() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(make(), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


def test_adapters_above_codes_of_parts_train_as_on_one_rank(tmp_path: Path) -> None:
    """QLoRA. The codes of ranks are those of one rank, and a checkpoint goes on at another mesh."""
    coding = {"bits": 4, "block": 8, "levels": "nf4", "double_quant": True}
    checkpoint = str(tmp_path / "ours" / "checkpoint-2")
    tries: list[tuple[str, VirtualMesh, dict[str, Any]]] = [
        ("alone", VirtualMesh(fsdp=1), {}),
        ("ours", MESH, {"tp": "tp"}),
        ("again", VirtualMesh(fsdp=1, tp=2), {"tp": "tp", "resume": checkpoint}),
    ]
    alone, ours, resumed = (
        train(fzero.hf.Trainer, tmp_path / name, make_adapted(), quantize=coding, mesh=mesh, **how)
        for name, mesh, how in tries
    )
    assert_equal(ours, alone)
    assert_equal(resumed, alone, updates=1)
    held = list_leaves(alone.sharded.params)
    codes = {path: leaf for path, leaf in list_leaves(ours.sharded.params).items() if is_quantized(leaf)}
    assert len(codes) == 7 and all(leaf.codes.form.layout.split_axes == ("tp",) for leaf in codes.values())
    for path, leaf in codes.items():
        assert torch.equal(*(fzero.unpartition(each).full_tensor() for each in (leaf, held[path]))), path


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "'tp': is no axis of a mesh: none is given": (make, {"mesh": None}),
    "plan: is given, and neither tp nor ep": (make, {"tp": None, "plan": {"lm_head": "replicate"}}),
    "has 1 heads, to be split over 2 ranks": (lambda: make(num_key_value_heads=1), {}),
    "mesh axis 'ep'": (make, {"ep": "ep"}),
    "is an axis over which": (make, {"tp": "fsdp"}),
    "LlamaForCausalLM: has no expert plan": (make, {"tp": None, "ep": "tp"}),
    "fzero.quantize: chooses none of 12 leaves": (make, {"quantize": "int8"}),
    "in blocks of 64, which a split over 'tp' into runs of 16 would cut": (make_adapted, {"quantize": "nf4"}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_trainer_refuses(words: str, tmp_path: Path) -> None:
    construct, how = REFUSED[words]
    with pytest.raises(FzeroError) as caught:
        fzero.hf.Trainer(construct(), make_arguments(tmp_path), **{"mesh": MESH, "tp": "tp", **how})
    assert words in str(caught.value)


def test_noise_on_embeddings_is_refused_with_parts_of_a_sequence(tmp_path: Path) -> None:
    arguments, mesh = make_arguments(tmp_path, neftune_noise_alpha=5.0), VirtualMesh(fsdp=1, sp=2)
    with pytest.raises(FzeroError, match="neftune_noise_alpha: is 5.0, and its noise would be the same in each part"):
        fzero.hf.Trainer(make(), arguments, mesh=mesh, sp="sp")


def test_other_axes_than_those_of_from_pretrained_are_refused(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    pretrained = fzero.hf.from_pretrained(tmp_path, VirtualMesh(fsdp=2))
    with pytest.raises(FzeroError, match=r"from_pretrained had \(None, None, None\)"):
        fzero.hf.Trainer(pretrained, make_arguments(tmp_path), tp="tp")


def test_a_wish_beside_a_model_in_slices_is_compared_by_names() -> None:
    had = Wish(tp="tp", plan={"lm_head": "replicate"})
    assert choose_wish(Wish(tp=("tp",)), had) is had and choose_wish(had, had) is had
    with pytest.raises(FzeroError, match="plan: is given, and the slices are those of plan=.*lm_head"):
        choose_wish(Wish(tp="tp", plan={}), had)
    with pytest.raises(FzeroError, match="capacity: is 2.0, and from_pretrained had 'same'"):
        choose_wish(Wish(capacity=2.0), had)


def test_a_resumed_model_keeps_the_forms_of_from_pretrained(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    (tmp_path / "trainer_state.json").write_text("{}")
    how = {"unit": 256, "to": fzero.host(pin=False)}
    pretrained = fzero.hf.from_pretrained(tmp_path, MESH, tp="tp", partition=how)
    trainer = fzero.hf.Trainer(pretrained, make_arguments(tmp_path / "out"))
    before = [leaf.form for leaf in tree.leaves(trainer.sharded.params)]
    trainer._load_from_checkpoint(str(tmp_path))
    assert [leaf.form for leaf in tree.leaves(trainer.sharded.params)] == before
    assert before[0].layout.unit == 256 and before[0].place == how["to"]


def test_merging_and_a_split_of_the_user_are_refused_with_axes(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    with pytest.raises(FzeroError, match="partition: split: is given, and tp, ep or sp say how to split"):
        fzero.hf.from_pretrained(tmp_path, MESH, tp="tp", partition={"split": {"*": ("tp", 0)}})
    pretrained = fzero.hf.from_pretrained(tmp_path, MESH, tp="tp")
    words = r"merge_and_unload: the model is shared along \('tp',\), and has no adapters"
    with pytest.raises(FzeroError, match=words):
        pretrained.merge_and_unload()
    with pytest.raises(FzeroError, match=words):
        fzero.hf.Trainer(pretrained, make_arguments(tmp_path / "out")).merge_and_unload()


def test_adapters_train_load_and_merge_as_in_transformers(tmp_path: Path) -> None:
    """LoRA of all layers, beside a head that is trained whole. A checkpoint is read into parts."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM")

    def adapt() -> Any:
        return peft.get_peft_model(make(), config)

    theirs = train(transformers.Trainer, tmp_path / "theirs", adapt())
    ours = train(fzero.hf.Trainer, tmp_path / "ours", adapt(), mesh=VirtualMesh(fsdp=1, tp=2), tp="tp")
    assert_equal(ours, theirs)
    ours._load_from_checkpoint(str(tmp_path / "ours" / "checkpoint-2"))
    read = peft.PeftModel.from_pretrained(make(), tmp_path / "ours" / "checkpoint-2")
    loaded = fzero.unpartition(ours.sharded.params)
    for name, x in zip(tree.paths(loaded), tree.leaves(loaded)):
        torch.testing.assert_close(x, read.get_parameter(name), msg=name)
    prompt = torch.tensor([[5, 6, 7]] * 2)
    expected = read.generate(input_ids=prompt, max_new_tokens=3, do_sample=False)
    assert torch.equal(ours.generate(input_ids=prompt, max_new_tokens=3, do_sample=False), expected)
    ours.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    for name, x in read.merge_and_unload().named_parameters():
        torch.testing.assert_close(merged.get_parameter(name), x, rtol=1e-5, atol=1e-5, msg=name)


def test_a_trainer_whose_loss_is_no_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FzeroError, match="Outside calls the model outside of programs"):
        Outside(make(), make_arguments(tmp_path), mesh=MESH, tp="tp")


def test_a_checkpoint_has_buffers_that_training_leaves_alone(tmp_path: Path) -> None:
    """The biases of DeepSeek-V3's routers are in the files of a model, and no parameters."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8, "q_lora_rank": 4}
    sizes |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    sizes |= {
        "num_attention_heads": 2,
        "kv_lora_rank": 4,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    }
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, num_experts_per_tok=2))
    biases = model.model.layers[0].mlp.gate.e_score_correction_bias
    biases.copy_(torch.arange(4.0))
    trainer = fzero.hf.Trainer(model, make_arguments(tmp_path), mesh=VirtualMesh(fsdp=1))
    trainer.save_model(str(tmp_path))
    (tmp_path / "trainer_state.json").write_text("{}")
    biases.zero_()
    before = fzero.unpartition(trainer.sharded.params)
    trainer._load_from_checkpoint(str(tmp_path))
    torch.testing.assert_close(fzero.unpartition(trainer.sharded.params), before, rtol=0, atol=0)
    assert biases.tolist() == [0, 1, 2, 3]
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "model.layers.1.input_layernorm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    with pytest.raises(FzeroError, match=r"has no place for \(1\): model\.layers\.1\.input_layernorm"):
        trainer._load_from_checkpoint(str(tmp_path))
