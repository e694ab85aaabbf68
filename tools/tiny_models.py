"""Tiny models: the models of transformers that have a tensor or an expert plan, each with a small configuration."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROWS, LENGTH, VOCABULARY = 4, 8, 64
SIZES: tuple[tuple[str, int | None], ...] = (
    ("(.*_)?(vocab_size|codebook_size)(_per_layer_input)?|num_embeddings|unpadded_vocab_size", VOCABULARY),
    ("num_kv_shared_layers|num_nextn_predict_layers|num_timestamp_prediction_layers", 0),
    ("first_k_dense_replace|num_dense_layers", 1),
    ("(.*_)?(num_hidden_layers|num_layers|n_layers?|depth|encoder_layers|decoder_layers|resampler_depth)", 2),
    ("n_(input|recurrent|output)_layers|num_layers_per_stack", 1),
    ("linear_num_key_heads", 2),
    ("(.*_)?(num_key_value_heads|num_kv_heads|kv_n_heads)", 2),
    ("index_n_heads", 2),
    ("mamba_n_heads|mamba_num_heads", 8),
    ("(.*_)?(num_attention_heads|num_heads|n_heads?|attention_heads|linear_num_value_heads)", 4),
    ("index_head_dim", 16),
    ("qk_head_dim", None),
    ("(.*_)?(head_dim|dim_head|mamba_d_head|rotary_dim|d_rel)", 8),
    ("(.*_)?lora_rank|(.*_)?rank", 16),
    ("(.*_)?(n_routed_experts|num_experts|num_local_experts|zero_expert_num)", 4),
    ("num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts", 2),
    ("n_group|num_expert_group", 2),
    ("topk_group", 1),
    ("mamba_d_state|ssm_state_size|mamba_d_conv", 4),
    ("mamba_chunk_size|chunk_size|sliding_window(_size)?|attention_chunk_size", 4),
    ("hidden_size_per_layer_input|moe_(shared_expert_)?intermediate_size|expert_ffn_hidden_size", 16),
    ("mamba_d_ssm", 64),
    ("(.*_)?(intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size|mlp_dim)", 64),
    ("(.*_)?(hidden_size|d_model|n_embd|embed_dim|embedding_dim|hidden_dim|output_dim|projection_dim)", 32),
    ("text_hidden_size|position_embedding_size", 32),
    ("max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|block_size|max_source_positions", 64),
)
"""Attributes of a configuration by expression, and their sizes; None for those that follow from others."""
SPECIAL = 50
"""Tokens from here on are special ones, such as of images."""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "BambaConfig": {"attn_layer_indices": [1]},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "DeepseekOcr2TextConfig": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "DoryConfig": {
        "num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Ernie4_5_VLMoeTextConfig": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}},
    "HunYuanMoEV1Config": {"num_experts": 4, "moe_topk": 2},
    "Dots1Config": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "Gemma4TextConfig": {"num_global_key_value_heads": 2},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    # sdpa is causal there for a mask of ones, which transformers leaves out, and is not in torch.compile, nor in a step
    "Phi4MultimodalVisionConfig": {"attn_implementation": "eager"},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "Step3p7TextConfig": {"sliding_window": 4},
}  # fmt: skip
"""Config class -> what the rules above do not find."""


class UntriedError(Exception):
    """The model was not made here: no configuration of small sizes was found."""


_PLAN = re.compile(r"^\s+(base_model_tp_plan|base_model_ep_plan|_tp_plan|_ep_plan)\b[^=\n]*=\s*\{", re.MULTILINE)


def list_folders() -> list[str]:
    """The model folders of transformers in which a configuration or a model has a plan."""
    root = Path(transformers.__file__).parent / "models"
    return sorted({file.parent.name for file in root.glob("*/*.py") if _PLAN.search(file.read_text())})


def make(folder: str, plan: str) -> tuple[nn.Module, dict[str, Any]] | None:
    """A model of a folder with a plan, "tp_plan" or "ep_plan", and a batch. None for a model with the other plan alone.

    Raises:
        UntriedError: where no model of the folder could be made.
    """
    errors, has_other = [], False
    for config_class, model_class in _list_classes(folder):
        try:
            config = shrink(config_class)
            with torch.device("meta"):
                empty = model_class(config)
            found = getattr(empty, plan)
        except Exception as error:
            errors.append(f"{model_class.__name__}: {type(error).__name__} {' '.join(str(error).split())[:200]}")
            continue
        has_other = has_other or bool(empty.tp_plan or empty.ep_plan)
        if found:
            batch = draw_batch(model_class)
            try:
                return _fill(model_class, config, batch), batch
            except Exception as error:
                raise UntriedError(f"plain torch: {type(error).__name__} {error}") from error
    if not has_other:
        raise UntriedError("; ".join(errors[:2]) or "the folder has no model that reads tokens")
    return None


def batch_experts(model: nn.Module) -> None:
    """Let experts compute all products at once: shapes of eager ones depend on values, grouped ones know no float64."""
    for child in model.modules():
        if hasattr(getattr(child, "config", None), "_experts_implementation"):
            child.config._experts_implementation = "batched_mm"


def _fill(model_class: Any, config: Any, batch: dict[str, Any]) -> nn.Module:
    """The model with weights of some size, in double precision if its code works in it."""
    torch.manual_seed(0)
    model = model_class(config).double().eval()
    batch_experts(model)
    with torch.no_grad():
        for leaf in model.parameters():
            leaf.copy_(torch.nan_to_num(leaf) + 0.2 * torch.randn_like(leaf))
        try:
            model(**batch)
        except RuntimeError as error:
            return model.float() if "dtype" in str(error) else model
    return model


def draw_batch(model_class: Any) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(3, SPECIAL, (ROWS, LENGTH), generator=draws)
    given = inspect.signature(model_class.forward).parameters
    batch = {"input_ids": ids}
    if model_class.__name__.startswith("PaliGemma"):  # which is causal only where it is told
        batch["token_type_ids"] = torch.ones_like(ids)
    if "labels" in given:
        batch["labels"] = ids
    elif "decoder_input_ids" in given:
        batch["decoder_input_ids"] = ids
    return {key: x for key, x in batch.items() if key in given}


HEADS = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "ForTokenClassification", "TextModel", "Model")


def list_models(folder: str) -> dict[str, Any]:
    """The classes of models that a folder defines, by their names."""
    models: dict[str, Any] = {}
    for path in sorted((Path(transformers.__file__).parent / "models" / folder).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{folder}.{path.stem}")
        own = {name: x for name, x in vars(module).items() if inspect.isclass(x) and x.__module__ == module.__name__}
        models |= {name: x for name, x in own.items() if issubclass(x, transformers.PreTrainedModel)}
    return models


def _list_classes(folder: str) -> Iterator[tuple[Any, Any]]:
    """Configurations and models of a folder: first those whose configuration has a plan, with a head first."""
    file = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    models = list_models(folder)
    configs = [x for x in vars(file).values() if inspect.isclass(x) and issubclass(x, transformers.PreTrainedConfig)]
    configs = [x for x in configs if x.__module__ == file.__name__]
    configs.sort(key=lambda x: not (x.base_model_tp_plan or getattr(x, "base_model_ep_plan", None)))
    for config in configs:
        borrowed = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        if not models and borrowed is not None:  # of another folder
            yield config, getattr(transformers, borrowed)
        for head in HEADS:
            for name, model in models.items():
                if name.endswith(head) and config_of(model) is config and _reads_tokens(model):
                    yield config, model


def _reads_tokens(model: Any) -> bool:
    return "input_ids" in inspect.signature(model.forward).parameters


def config_of(model: Any) -> Any:
    """The configuration that a model is made of."""
    hint = model.__init__.__annotations__.get("config")
    if isinstance(hint, str):
        hint = vars(importlib.import_module(model.__module__)).get(hint)
    return hint or model.config_class


def shrink(config_class: Any) -> Any:
    """A small configuration of a class."""
    return config_class(**_settings(config_class(), SETTINGS.get(config_class.__name__, {})))


def _settings(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    values = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    special = SPECIAL
    for name in {**values, **config.attribute_map}:
        value = values.get(name, values.get(config.attribute_map.get(name, "")))
        if isinstance(value, transformers.PreTrainedConfig):
            made[name] = shrink(type(value))
        elif isinstance(value, bool) or not isinstance(value, int | float):
            continue
        elif re.search("dropout|drop_rate|drop_path|layerdrop|_pdrop$|mask_(time|feature)_prob", name):
            made[name] = type(value)(0)
        elif re.fullmatch(r".*(token_(id|index)|_id|start_id|end_id|offset)", name) and value >= SPECIAL:
            made[name] = special
            special += 1
        elif isinstance(value, int) and name in values:
            size = next((size for rule, size in SIZES if re.fullmatch(rule, name)), value)
            is_few = value == 1 and name.endswith("num_key_value_heads")
            if size is not None and size != value and value > 0:
                made[name] = size if is_few else min(size, value)
    for name, size in (("head_dim", 8), ("num_key_value_heads", 2)):
        if name in values and values[name] is None:
            made[name] = size
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and ("mrope_section" in rope or _names_sections(type(config))):
        half = int(made.get("qk_rope_head_dim", made.get("head_dim", 8)) * rope.get("partial_rotary_factor", 1)) // 2
        made["rope_parameters"] = rope | {"mrope_section": [half - 2 * (half // 4), half // 4, half // 4]}
    heads = [key for key in made if re.fullmatch(r"(.*_)?(num_attention_heads|num_key_value_heads)", key)]
    for name in heads:
        if name.endswith("num_key_value_heads"):
            partner = name.replace("num_key_value_heads", "num_attention_heads")
            if values.get(name) == values.get(partner):
                made[name] = made.get(partner, made[name])
    layers = next((key for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if key in made), None)
    if layers is not None:
        made |= _choose_layers(layers, getattr(config, layers), values)
    return made | given


def _names_sections(config_class: Any) -> bool:
    """Whether a model divides the dims of its rotation among axes of an image."""
    folder = Path(inspect.getfile(config_class)).parent
    return any("mrope_section" in file.read_text() for file in folder.glob("modeling_*.py"))


def _choose_layers(name: str, layers: int, values: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind, at least 2."""
    lists = {key: x for key, x in values.items() if isinstance(x, list | tuple) and len(x) == layers}
    if not lists or layers < 2:
        return {}
    kinds: dict[Any, int] = {}
    for i, kind in enumerate(zip(*lists.values())):
        kinds.setdefault(str(kind), i)
    chosen = sorted({*kinds.values(), 0, 1})[:6]
    return {name: len(chosen)} | {key: [x[i] for i in chosen] for key, x in lists.items()}
