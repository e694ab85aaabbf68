"""Optimizers: what `optim` of TrainingArguments names, as an optimizer that `fzero.optim.groups` converts.

The names of bitsandbytes need no bitsandbytes: the optimizer has groups and rates alone. Names of others are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fzero.base.errors import FzeroError
from fzero.optim.groups import GroupHolder

BLOCK = 256
"""The elements that share a scale in 8-bit state: no rank may cut such a block."""
_ADAM = ("adamw", ("betas", "eps"))
_EIGHT = ("adamw8bit", ("betas", "eps"))
_LION = ("lion", ("betas",))
_RMSPROP = ("rmsprop", ())
HELD: dict[str, tuple[str, tuple[str, ...]]] = {
    "paged_adamw_32bit": _ADAM,
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), _EIGHT),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), _LION),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_32bit"), _RMSPROP),
}
"""Names of bitsandbytes -> the kind of `fzero.optim.kinds`, and which of betas and eps the arguments give it."""
_OWN = "give optimizers=(an optimizer of torch.optim, its schedule)"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), 'give "lion_32bit"'),
    "rmsprop_bnb_8bit": 'give "rmsprop_bnb_32bit"',
    **dict.fromkeys(("adamw_torch_8bit", "adamw_torch_4bit"), 'give "adamw_8bit"'),
    **dict.fromkeys(("adamw_torch_xla", "adamw_torch_npu_fused", "stable_adamw", "grokadamw"), 'give "adamw_torch"'),
    "adamw_anyprecision": 'give "adamw_torch", whose state is float32',
    **dict.fromkeys(("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"), 'give "adamw_8bit"'),
    **dict.fromkeys(("lomo", "adalomo"), 'give "adafactor": state and gradients are in slices anyway'),
    **dict.fromkeys(
        ("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw"),
        'give "adamw_8bit" or "adafactor": state is in slices anyway',
    ),
    **dict.fromkeys(
        (
            "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise",
            "apollo_adamw_layerwise",
        ),
        'give "adamw_8bit" or "adafactor": state and gradients are in slices anyway',
    ),
    **dict.fromkeys(
        ("schedule_free_adamw", "schedule_free_sgd", "schedule_free_radam"),
        "fzero.optim.schedule_free is for a step of your own; here give a lr_scheduler_type",
    ),
}  # fmt: skip
"""Names that are refused -> the way out."""


def check_optimizer(name: str) -> None:
    """Refuse the name of an optimizer that there is not.

    Raises:
        FzeroError: naming the way out.
    """
    if name in REFUSED:
        raise FzeroError("TrainingArguments: optim", f"is {name!r}, which is not supported", REFUSED[name])


def choose_optimizer(args: Any) -> tuple[type[GroupHolder], dict[str, Any]] | None:
    """`(class, keywords)` of an optimizer of bitsandbytes, as `get_optimizer_cls_and_kwargs` returns them; None for the
    name of another."""
    name = getattr(args.optim, "value", args.optim)
    check_optimizer(name)
    if name not in HELD:
        return None
    kind, given = HELD[name]
    named = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    options: dict[str, Any] = {each: named[each] for each in given}
    if kind == "rmsprop":
        options |= _read_numbers(args.optim_args)
    return GroupHolder, {"kind": kind, "lr": args.learning_rate, **options}


def _read_numbers(text: str | None) -> dict[str, float]:
    """The numbers in `optim_args`, such as "alpha=0.9,eps=1e-6"."""
    pairs = [part.partition("=")[::2] for part in (text or "").replace(" ", "").split(",") if part]
    try:
        return {name: float(number) for name, number in pairs}
    except ValueError:
        raise FzeroError("TrainingArguments: optim_args", f"is {text!r:.80}", 'give numbers: "alpha=0.9"') from None


def has_codes(args: Any) -> bool:
    """Whether the state of the optimizer has codes of 8 bits."""
    return HELD.get(getattr(args.optim, "value", args.optim)) is _EIGHT


def separate_embeddings(optimizer: Any, model: nn.Module) -> None:
    """Give embeddings moments of 32 bits, in groups of their own, as transformers does for bitsandbytes."""
    if not isinstance(optimizer, GroupHolder) or optimizer.kind != "adamw8bit":
        return
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    wide: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        held: list[torch.Tensor] = [x for x in group["params"] if id(x) in embeddings]
        group["params"] = [x for x in group["params"] if id(x) not in embeddings]
        if held:
            wide.append({**group, "params": held, "optim_bits": 32})
    for group in wide:
        optimizer.add_param_group(group)
