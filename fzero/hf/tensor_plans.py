"""Tensor plans: what a model's own plan, and a plan of the user's, say of each module and parameter.

A plan is a dict from names, in which "*" stands for a number, to styles (`fzero.hf.styles`). It names modules or
parameters; a rule of a module is one of its parameters too, unless they have their own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from fzero.base.errors import FzeroError
from fzero.hf.adapter_plans import find_model, fit_style, list_places
from fzero.hf.styles import STYLES, Axis, Style, find_style

TensorPlan = Mapping[str, str]


class Rule(NamedTuple):
    """What a plan says of a module or a parameter, with the axis of the ranks that share it."""

    name: str
    style: Style
    axis: Axis


_WHISPER = {
    f"{side}.layers.*.{layer}.{name}": style
    for side, layers in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "encoder_attn")))
    for layer in layers
    for name, style in (("q_proj", "colwise"), ("k_proj", "colwise"), ("v_proj", "colwise"), ("out_proj", "rowwise"))
} | {
    f"{side}.layers.*.{name}": style
    for side in ("encoder", "decoder")
    for name, style in (
        ("self_attn", "divide num_heads"), ("encoder_attn", "divide num_heads"), ("fc1", "colwise"), ("fc2", "rowwise"),
    )
}  # fmt: skip
_T5 = {
    f"{side}.block.*.layer.*.{attention}.{name}": style
    for side, attentions in (("encoder", ("SelfAttention",)), ("decoder", ("SelfAttention", "EncDecAttention")))
    for attention in attentions
    for name, style in (("q", "colwise"), ("k", "colwise"), ("v", "colwise"), ("o", "rowwise"))
} | {
    f"{side}.block.*.layer.*.{name}": style
    for side in ("encoder", "decoder")
    for name, style in (
        ("SelfAttention.relative_attention_bias", "colwise"), ("SelfAttention", "divide n_heads"),
        ("EncDecAttention", "divide n_heads"), ("DenseReluDense.wi", "colwise"), ("DenseReluDense.wi_0", "colwise"),
        ("DenseReluDense.wi_1", "colwise"), ("DenseReluDense.wo", "rowwise"),
    )
}  # fmt: skip
OURS: dict[str, TensorPlan] = {
    "gpt2": {
        "wte": "embedding_rowwise", "h.*.attn": "divide split_size", "h.*.attn.c_attn": "packed_colwise 3",
        "h.*.attn.c_proj": "rowwise", "h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise",
    },
    "bert": {
        "embeddings.word_embeddings": "embedding_rowwise", "encoder.layer.*.attention.self.query": "colwise",
        "encoder.layer.*.attention.self.key": "colwise", "encoder.layer.*.attention.self.value": "colwise",
        "encoder.layer.*.attention.output.dense": "rowwise", "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    },
    "t5": {"shared": "embedding_rowwise", **_T5},
    "whisper": {"decoder.embed_tokens": "embedding_rowwise", **_WHISPER},
    # that of transformers has the embedding alone; columns of gate and up alternate
    "gpt_oss": {
        "layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise", "layers.*.self_attn.sinks": "colwise",
        "layers.*.self_attn.o_proj": "rowwise", "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "rowwise", "layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "layers.*.mlp.experts.down_proj": "colwise",
    },
    # norms of queries and keys are over all heads
    "esmc": {
        "layers.*.self_attn.q_proj": "colwise_gather_output", "layers.*.self_attn.k_proj": "colwise_gather_output",
        "layers.*.self_attn.q_norm": "own_block", "layers.*.self_attn.k_norm": "own_block",
    },
    # a mask for each head is computed from the values of all
    "doge": {"layers.*.self_attn.dt_proj": "rowwise_own_block", "layers.*.self_attn.A": "colwise"},
    # the mean and deviation of the gate are taken over all of it, and the plan of transformers splits it
    "gemma3n_text": {
        "layers.*.mlp.gate_proj": "colwise_gather_output", "layers.*.mlp.up_proj": "colwise_gather_output",
        "layers.*.mlp.down_proj": "rowwise_split_input",
    },
}  # fmt: skip
"""Rules by the type of a model: plans of models that have none, and what takes the place of wrong rules of
transformers. Names are those of the base model."""


def list_rules(model: nn.Module, plan: TensorPlan | None, tp: Axis | None, ep: Axis | None) -> dict[str, Rule]:
    """Name of a module or parameter -> its rule: `plan` first, then the model's own plans, then ours.

    A module with a rule of the expert plan loses its rules of the tensor plan, and so do its parts, as in transformers.
    Rules name what was there before adapters of peft: of LoRA each module has the rule that fits.

    Raises:
        FzeroError: for a model without a plan; for a rule of `plan` that names nothing, or an unknown style.
    """
    names = [*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False))]
    places, base = list_places(model, names), find_model(model)
    expert_plan = _read_plan(base, "ep_plan") if ep is not None else {}
    tensor_plan = _read_plan(base, "tp_plan") | _find_ours(base) if tp is not None else {}
    if plan is not None:
        _check_names(plan, [place.name for place in places.values()])
        own = {name: style for name, style in plan.items() if ep is not None and style in EXPERT_STYLES}
        expert_plan = expert_plan | own
        tensor_plan = tensor_plan | {name: style for name, style in plan.items() if name not in own}
    for axis, kind, found in ((tp, "tensor", tensor_plan), (ep, "expert", expert_plan)):
        if axis is not None and not found:
            way_out = f"give plan={{name: style}}, with styles such as {', '.join(list(STYLES)[:4])}"
            raise FzeroError(type(base).__name__, f"has no {kind} plan for the axis {axis!r}", way_out)
    experts = [re.compile(_to_expression(name) + r"(\..*)?") for name in expert_plan]
    rules: dict[str, Rule] = {}
    for name, place in places.items():
        style, axis = _find(place.name, expert_plan), ep
        if style is None and tp is not None and not any(each.fullmatch(place.name) for each in experts):
            style, axis = _find(place.name, tensor_plan), tp
        style = None if style is None else fit_style(place, style)
        if style is not None and axis is not None:
            rules[name] = Rule(style, _read_style(name, style), axis)
    return rules


EXPERT_STYLES = ("grouped_gemm", "ep_dispatch_experts")


def _read_plan(model: Any, name: str) -> dict[str, str]:
    return dict(getattr(model, name, None) or {})


def _find_ours(model: nn.Module) -> dict[str, str]:
    """The rules of `OURS` for a model and the models inside of it, with names as in the model."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        if model_type in OURS and getattr(module, "base_model", None) is module:
            found |= {f"{path}.{name}".lstrip("."): style for name, style in OURS[model_type].items()}
    return found


def _find(name: str, plan: TensorPlan) -> str | None:
    return plan.get(name, plan.get(generalize(name)))


def generalize(name: str) -> str:
    """`layers.3.mlp` -> `layers.*.mlp`"""
    return re.sub(r"(?<![^.])\d+(?=\.|$)", "*", name)


def _to_expression(name: str) -> str:
    return re.escape(name).replace(r"\*", r"\d+")


def _check_names(plan: TensorPlan, names: Iterable[str]) -> None:
    """Refuse a rule of a user's plan that names nothing."""
    known = {*names, *map(generalize, names)}
    for name in plan:
        if name not in known:
            near = ", ".join(difflib.get_close_matches(name, known, 3, 0.0))
            raise FzeroError(f"plan {name!r}", "names no module and no parameter", f"near to it are {near}")


def _read_style(name: str, style: str) -> Style:
    found = find_style(style)
    if found is None:
        raise FzeroError(name, f"has the style {style!r} in its plan, which fzero does not know", _KNOWN)
    return found


_KNOWN = f"give plan={{name: style}} with one of {', '.join(STYLES)}"
