"""Hugging Face: an exported folder is that of `save_pretrained`, and a folder is read as `from_pretrained` reads it."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from processes import run
from safetensors.torch import load_file, save_file
from stand_ins import live_stand_ins
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import tree
from fzero.checkpoint import export_hf, load_hf
from fzero.formats.hugging_face import plan_export
from fzero.ranks.virtual import ALONE
from fzero.state.fill import copy_slices
from fzero.state.publishing import TEMPORARY
from fzero.state.safetensors import open_safetensors
from fzero.state.safetensors.writing import write
from fzero.state.sources import SAMPLE
from fzero.values.sharded import Sharded

transformers = pytest.importorskip("transformers")
conversion_mapping = pytest.importorskip("transformers.conversion_mapping")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from families import FAMILIES  # noqa: E402

MESH = fzero.VirtualMesh(fsdp=3)
LIMITS = {"Mixtral": 16384, "Mamba": 4096, "GPT-2": 4096, "ViT": 4096}
"""Bytes of a file, few of the tensors of each family."""


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def meta(params: Any) -> Any:
    return tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), params)


def assert_equal(found: Any, expected: Any) -> None:
    assert tree.paths(found) == tree.paths(expected)
    for path, a, b in zip(tree.paths(found), tree.leaves(found), tree.leaves(expected)):
        assert a.dtype == b.dtype and a.equal(b), path


# out and in, on virtual ranks


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_is_that_of_save_pretrained(name: str, tmp_path: Path) -> None:
    """Byte for byte, with configurations and index; and it loads, on any number of ranks."""
    model = FAMILIES[name].make()
    params, _ = fzero.lower(model)
    for world, limit in ((2, "5GB"), (3, LIMITS.get(name, 3072))):
        theirs, ours = tmp_path / f"theirs-{world}", tmp_path / f"ours-{world}"
        model.save_pretrained(theirs, max_shard_size=limit)
        export_hf(ours, fzero.partition(params, fzero.VirtualMesh(fsdp=world)), model, max_shard_size=limit)
        assert contents(ours) == contents(theirs)
        assert len(list(ours.glob("*.safetensors"))) > 2 or limit == "5GB"
        loaded = load_hf(ours, meta(params), fzero.VirtualMesh(fsdp=5 - world))
        assert_equal(fzero.unpartition(loaded), params)
    found, report = type(model).from_pretrained(ours, output_loading_info=True)
    assert not any(report.values())
    assert_equal(dict(found.named_parameters()), dict(model.named_parameters()))


def leaves_of(params: Any, on: Any) -> dict[str, Sharded]:
    """What one rank of a mesh holds of a tree."""
    whole = dict(zip(tree.paths(params), tree.leaves(params)))
    found = {}
    for leaf in tree.leaves(fzero.partition(params, on.mesh)):
        layout = leaf.form.layout
        local = copy_slices({leaf.index: whole[leaf.path].detach()}, layout, on.rank)[leaf.index]
        found[leaf.path] = Sharded(local, layout, leaf.index, on)
    return found


@pytest.mark.parametrize("axes", [{"fsdp": 1}, {"fsdp": 4}, {"fsdp": 7}, {"replica": 2, "fsdp": 3}], ids=str)
@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_ranks_write_their_own_parts_once(name: str, axes: dict[str, int], tmp_path: Path) -> None:
    model = FAMILIES[name].make()
    params, _ = fzero.lower(model)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=16384)
    plans = [
        plan_export(leaves_of(params, on), model, None, 16384, on) for on in live_stand_ins(fzero.VirtualMesh(**axes))
    ]
    numels = [sum(piece.values.shape.numel() for piece in plan.pieces) for plan in plans]
    assert sum(numels) == model.num_parameters()
    assert max(numels) <= model.num_parameters() / axes["fsdp"] + 16 * len(tree.leaves(params))
    whole = plans[0]._replace(pieces=[piece for plan in plans for piece in plan.pieces])
    write(tmp_path / "ours", lambda: whole, ALONE, 64, "test")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


def test_values_are_cast_while_they_are_written(tmp_path: Path) -> None:
    model = FAMILIES["Mixtral"].make()
    params, _ = fzero.lower(model)
    export_hf(tmp_path / "ours", fzero.partition(params, MESH), model, dtype=torch.bfloat16, chunk=64)
    assert model.config.dtype != "bfloat16"
    model.bfloat16().save_pretrained(tmp_path / "theirs")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load_hf(tmp_path / "ours", meta(params), MESH)  # `like` is float32
    assert_equal(fzero.unpartition(loaded), tree.map(lambda x: x.detach().bfloat16().float(), params))


def test_a_configuration_stands_for_the_model(tmp_path: Path) -> None:
    model = FAMILIES["GPT-NeoX"].make()
    model.save_pretrained(tmp_path / "theirs")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "theirs")
    export_hf(tmp_path / "ours", fzero.partition(fzero.lower(model)[0], MESH), config)
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


def test_buffers_come_from_the_model_or_from_the_tree(tmp_path: Path) -> None:
    model = deepseek()
    for buffer in model.buffers():
        buffer.add_(torch.rand_like(buffer))
    params, buffers, _ = fzero.lower_stateful(model)
    state = {"params": params, "buffers": buffers, "count": torch.tensor(3)}
    heads = {"params": "", "buffers": ""}
    persistent = model.state_dict().keys()

    def rename(path: str) -> str | None:
        head, _, name = path.partition(".")
        return name if head in heads and name in persistent else None

    model.save_pretrained(tmp_path / "theirs")
    export_hf(tmp_path / "ours", fzero.partition(params, MESH), model)
    export_hf(tmp_path / "all", fzero.partition(state, MESH), model.to("meta"), rename=rename)
    assert contents(tmp_path / "ours") == contents(tmp_path / "all") == contents(tmp_path / "theirs")
    loaded = load_hf(tmp_path / "ours", {**meta({"params": params}), "buffers": buffers}, MESH, rename=rename)
    assert_equal(fzero.unpartition(loaded), {"params": params, "buffers": buffers})
    with pytest.raises(fzero.FzeroError, match=r"no leaf for \(1\): model.layers.1.mlp.gate.e_score_correction_bias"):
        export_hf(tmp_path / "none", fzero.partition(params, MESH), model)
    with pytest.raises(fzero.FzeroError, match=r"keys without a leaf \(1\): 'model.layers.1.mlp.gate.e_score_corr"):
        load_hf(tmp_path / "ours", meta(params), MESH)


def deepseek() -> Any:
    """A model with a persistent buffer."""
    config = transformers.DeepseekV3Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, q_lora_rank=4, kv_lora_rank=4, qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=4,
        first_k_dense_replace=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.DeepseekV3ForCausalLM(config)


# folders of others


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the tiny BERT."""
    FAMILIES["BERT"].make().save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def rewrite(folder: Path, change: Any) -> None:
    """Replace the tensors of a folder of one file."""
    file = folder / "model.safetensors"
    save_file({key: x.contiguous() for key, x in change(load_file(file)).items()}, file, {"format": "pt"})


def test_keys_of_old_releases_are_renamed(folder: Path) -> None:
    params, _ = fzero.lower(FAMILIES["BERT"].make())

    def age(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        return {next((key.replace(a, b) for a, b in old.items() if a in key), key): x for key, x in tensors.items()}

    rewrite(folder, age)
    assert any("gamma" in key for key in open_safetensors(folder))
    assert_equal(fzero.unpartition(load_hf(folder, meta(params), MESH)), params)


def test_names_in_memory_are_read_as_well(tmp_path: Path) -> None:
    model = FAMILIES["Mixtral"].make()
    params, _ = fzero.lower(model)
    model.save_pretrained(tmp_path, save_original_format=False, max_shard_size=9000)
    assert_equal(fzero.unpartition(load_hf(tmp_path, meta(params), MESH)), params)


def test_transposed_experts_of_old_releases(tmp_path: Path) -> None:
    conversions = conversion_mapping.get_checkpoint_conversion_mapping("qwen3_vl_moe") or []
    operations = [op for conversion in conversions for op in getattr(conversion, "operations", ())]
    if not any(getattr(op, "check_dims", False) for op in operations):
        pytest.skip("this release of transformers has experts as the old ones")
    text = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
        "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16, "patch_size": 4,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, image_token_id=5, video_token_id=6)
    torch.manual_seed(0)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn_like(param))
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {key: x.mT if ".experts." in key else x for key, x in tensors.items()})
    params, _ = fzero.lower(model)
    for world in (1, 5):
        loaded = load_hf(tmp_path, meta(params), fzero.VirtualMesh(fsdp=world))
        assert_equal(fzero.unpartition(loaded), params)


def test_a_missing_expert_is_told(tmp_path: Path) -> None:
    model = FAMILIES["Mixtral"].make()
    model.save_pretrained(tmp_path)
    rewrite(
        tmp_path, lambda tensors: {key: x for key, x in tensors.items() if "1.block_sparse_moe.experts.3" not in key}
    )
    with pytest.raises(
        fzero.FzeroError, match=r"layers.1.mlp.experts.\w+: has shape \[3, .*\] in .*, \[4, .*\] in the"
    ):
        load_hf(tmp_path, meta(fzero.lower(model)[0]), MESH)


def test_a_tied_weight_may_be_there_twice(tmp_path: Path) -> None:
    model = FAMILIES["Qwen3"].make()
    params, _ = fzero.lower(model)
    model.save_pretrained(tmp_path)
    head = model.lm_head.weight.detach()
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": head.clone()})
    assert_equal(fzero.unpartition(load_hf(tmp_path, meta(params), MESH)), params)
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": head + 1})
    with pytest.raises(fzero.FzeroError, match="is tied to .* by the configuration, and has other values"):
        load_hf(tmp_path, meta(params), MESH)
    rewrite(tmp_path, lambda tensors: {k: x for k, x in tensors.items() if k != "model.embed_tokens.weight"})
    loaded = fzero.unpartition(load_hf(tmp_path, meta(params), MESH))
    assert loaded["model"]["embed_tokens"]["weight"].equal(head + 1)


def test_a_model_takes_the_place_of_the_configuration(folder: Path) -> None:
    body = FAMILIES["BERT"].make(seed=1).bert
    params, _ = fzero.lower(body)
    loaded = fzero.unpartition(load_hf(folder, meta(params), MESH, model_or_config=body, strict=False))
    assert_equal(loaded, fzero.lower(FAMILIES["BERT"].make())[0]["bert"])


# bad input


def test_a_folder_that_cannot_be_read_is_refused(folder: Path) -> None:
    params, _ = fzero.lower(FAMILIES["BERT"].make())

    def refuse(match: str, **how: Any) -> None:
        with pytest.raises(fzero.FzeroError, match=match):
            load_hf(folder, meta(params), MESH, **how)

    rewrite(folder, lambda tensors: tensors | {"bert.what": torch.ones(1)})
    refuse(r"bert: keys that BertForMaskedLM has no place for \(1\): bert.what; with strict=False")
    load_hf(folder, meta(params), MESH, strict=False)
    rewrite(
        folder, lambda tensors: {k: x for k, x in tensors.items() if "bert.embeddings.w" not in k and "what" not in k}
    )
    refuse(r"leaves without values \(1\): bert.embeddings.word_embeddings.weight")
    FAMILIES["BERT"].make(hidden_size=8).save_pretrained(folder)
    refuse(r"bert.embeddings.LayerNorm.bias: has shape \[8\] in .*bert/model.safetensors, \[16\] in the tree")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 16}))
    refuse(r"has shape \[\d.*\] in .*, \[\d.*\] in the model of config.json")
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Bart"]}))
    refuse(r"config: its architectures are \['Bart'\]")
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    refuse(r"config: has a quantization_config: {'quant_method': 'fp8'")
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "what"}))
    refuse(r"config.json: transformers cannot read it")
    (folder / "config.json").unlink()
    refuse(r"bert: has no config.json")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    refuse(r"model.safetensors gives it|its bytes are|bytes of data")
    (folder / "model.safetensors").unlink()
    refuse(r"has 0 files \*.safetensors")


def test_a_tree_of_another_model_is_refused(tmp_path: Path) -> None:
    model = FAMILIES["Llama"].make()
    params, _ = fzero.lower(model)

    def refuse(match: str, params: Any = params, model: Any = model, **how: Any) -> None:
        with pytest.raises(fzero.FzeroError, match=match):
            export_hf(tmp_path / "out", fzero.partition(params, MESH), model, **how)
        assert names(tmp_path) == []

    refuse(r"^what: leaves that LlamaForCausalLM lacks \(1\): what", {**params, "what": torch.ones(1)})
    refuse(r"^lm_head.weight: no leaf for \(1\): lm_head.weight", {"model": params["model"]})
    refuse(r"^lm_head.weight: has shape \[4\], LlamaFo", {**params, "lm_head": {"weight": torch.ones(4)}})
    refuse(r"dtype: is torch.int8, not a floating-point dtype", dtype=torch.int8)
    refuse(r"model.embed_tokens.weight: takes 2048 bytes; max_shard_size is 2047", max_shard_size=2047)
    refuse(r"max_shard_size: is '5 Gigabytes'", max_shard_size="5 Gigabytes")
    refuse(r"max_shard_size: is 0", max_shard_size=0)
    refuse(r"config: its architectures are \[\]", model=model.config)
    refuse(r"model: is a Linear, no model", model=torch.nn.Linear(1, 1))
    model.config.quantization_config = {"quant_method": "fp8"}
    refuse(r"config: has a quantization_config: {'quant_method': 'fp8'}", model=model)


def test_a_folder_that_exists_stays_as_it_is(tmp_path: Path) -> None:
    model = FAMILIES["Llama"].make()
    params = fzero.partition(fzero.lower(model)[0], MESH)
    (tmp_path / "out").mkdir()
    with pytest.raises(fzero.FzeroError, match="out: exists; give the path of a new folder"):
        export_hf(tmp_path / "out", params, model)
    assert names(tmp_path) == ["out"] and not names(tmp_path / "out")


def test_folders_of_killed_exports_are_removed(tmp_path: Path) -> None:
    model = FAMILIES["Llama"].make()
    params = fzero.partition(fzero.lower(model)[0], MESH)
    left, goes_on = (tmp_path / f".out.{number}{TEMPORARY}" for number in (1234, 5678))
    for folder in (left, goes_on):
        folder.mkdir()
        (folder / "model.safetensors").write_text("a part")
    fd = os.open(goes_on, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    export_hf(tmp_path / "out", params, model)
    os.close(fd)
    assert names(tmp_path) == [goes_on.name, "out"]


# two processes


def trained_and_exported(mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    """Trains two families for three steps, exports them, and loads them back. Then the folder of one rank is full."""
    found = {}
    for name in ("Llama", "Mixtral"):
        family = FAMILIES[name]
        params, apply = fzero.build(family.make, mesh)
        optimizer = fzero.optim.adamw(1e-2)

        def train(params: Any, state: Any, batch: Any) -> Any:
            loss, grads = fzero.value_and_grad(lambda p: apply(p, **batch).loss)(params)  # noqa: B023
            updates, state = optimizer.update(grads, state, params)  # noqa: B023
            return fzero.optim.apply_updates(params, updates), state, loss

        step, state = fzero.shard(train, mesh), optimizer.init(params)
        for seed in range(3):
            params, state, _ = step(params, state, family.batch(2, seed=2 * seed + mesh.get_rank()))
        with torch.device("meta"):
            model = family.make()
        export_hf(folder / name, params, model, max_shard_size=16384, chunk=256)
        with mock.patch("os.preadv", side_effect=os.preadv) as reads:
            loaded = load_hf(folder / name, params, mesh)
        held = sum(leaf.local.nbytes + SAMPLE * leaf.itemsize for leaf in tree.leaves(loaded))
        assert sum(len(call.args[1][0]) for call in reads.call_args_list) <= held
        assert all(tree.leaves(tree.map(lambda a, b: a.local.equal(b.local), loaded, params)))
        found[name] = tree.map(lambda x: x.detach(), fzero.unpartition(params))
    pwrite = full_disk if mesh.get_rank() == 1 else os.pwrite
    with mock.patch("os.pwrite", pwrite), pytest.raises(fzero.FzeroError) as caught:
        export_hf(folder / "full", params, model)
    return {**found, "error": str(caught.value)}


def full_disk(fd: int, data: memoryview, offset: int) -> int:
    raise OSError(28, "No space left on device")


def test_two_ranks_train_and_export(tmp_path: Path) -> None:
    first, second = run(2, trained_and_exported, tmp_path)
    for name in ("Llama", "Mixtral"):
        family = FAMILIES[name]
        model = family.make(seed=1).eval()
        values = dict(zip(tree.paths(first[name]), tree.leaves(first[name])))
        missing, surplus = model.load_state_dict(values, strict=False)
        assert not missing and not surplus
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        batch = family.batch(2)
        with torch.no_grad():
            torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, rtol=0, atol=0)
    assert first["error"] == second["error"]
    assert "full: rank 1 could not write it: OSError: [Errno 28] No space" in first["error"]
    assert names(tmp_path) == ["Llama", "Mixtral"]
