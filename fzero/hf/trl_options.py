"""Options of TRL: which releases of TRL work, and which arguments of its trainers are refused by name."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import transformers

from fzero.base.errors import FzeroError
from fzero.hf.alike import describe

LEAST, BEFORE = (1, 16), (1, 17)
"""The releases that work: from the first to before the second. Between releases TRL changes what its trainers do behind
the constructor of transformers, so a new one is tried before it is taken."""
WAY_OUT = "pip install 'trl>=1.16,<1.17'"
NAMES = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer")
"""The trainers of TRL that are here, by TRL's names."""

REFUSED = {
    "fp16": "give bf16=True: the loss scale of fp16 is not tried with a loss outside of programs",
    "deepspeed": "leave it out, and give stage= and mesh=",
    "neftune_noise_alpha": "leave it out: the noise is not tried with TRL's trainers",
    "use_vllm": "leave it out: completions come from slices, by fzero.hf.Generator",
    "use_transformers_continuous_batching": "leave it out: completions come from slices, by fzero.hf.Generator",
    "activation_offloading": "leave it out: gradient_checkpointing=True computes activations again",
}
"""The fields of TRL's configurations that are refused, with what to do instead."""
STATEFUL = frozenset({"linear_attention", "conv"})
"""The types of layers of transformers' configurations that see earlier tokens in another way than by attention."""


def check_release() -> None:
    """Refuse a release of TRL other than those that work.

    Raises:
        FzeroError: with the release, and those that work; where TRL is not installed.
    """
    if importlib.util.find_spec("trl") is None:
        raise FzeroError("trl", f"is not installed, and fzero.hf.{NAMES[0]} is a subclass of TRL's", WAY_OUT)
    check_version(metadata.version("trl"))


def check_version(version: str) -> None:
    """Refuse a version that is not between `LEAST` and `BEFORE`."""
    found = tuple(int(part) for part in version.split(".")[:2])
    if not LEAST <= found < BEFORE:
        least, before = (".".join(map(str, each)) for each in (LEAST, BEFORE))
        raise FzeroError("trl", f"is {version}, and fzero.hf works with {least} to before {before}", WAY_OUT)


def check_options(args: Any, model: Any, virtual_ranks: int) -> None:
    """Refuse what a configuration of TRL asks for, and is not here. `virtual_ranks` is how many ranks run in this
    process.

    Raises:
        FzeroError: naming the field, its value and the way out.
    """
    name = type(args).__name__
    for field, way_out in REFUSED.items():
        if getattr(args, field, None):
            raise FzeroError(f"{name}: {field}", f"is {getattr(args, field)!r}, which is not supported", way_out)
    _check_joined_rows(args, model, virtual_ranks)


def _check_joined_rows(args: Any, model: Any, virtual_ranks: int) -> None:
    """Refuse to join the rows of a batch into one, where something would go from row to row, or padding would count."""
    name, config = type(args).__name__, model.config
    is_packed = getattr(args, "packing", False) and args.packing_strategy != "wrapped"
    joins = "packing" if is_packed else "padding_free" if getattr(args, "padding_free", False) else None
    if joins is None or name == "DPOConfig":  # which TRL 1.16 pads all the same
        return
    where, wrapped = f"{name}: {joins}", 'packing_strategy="wrapped"'
    attention = str(getattr(config, "_attn_implementation", None))
    if "flash" in attention:
        problem = f"joins rows for kernels of {attention!r}, which take lengths that change from batch to batch"
        raise FzeroError(where, problem, 'give a model with attn_implementation="sdpa"')
    if getattr(model, "_is_stateful", False) or STATEFUL & set(getattr(config, "layer_types", None) or ()):
        problem = f"joins rows, and {type(model).__name__} has layers with a state, which would go from row to row"
        raise FzeroError(where, problem, f"leave it out, or give {wrapped}")
    weight = getattr(args, "router_aux_loss_coef", None)
    weight = getattr(config, "router_aux_loss_coef", 0.0) if weight is None else weight
    if weight and hasattr(config, "output_router_logits"):
        problem = f"joins rows without a mask, and the load of experts, which weighs {weight}, would count padding"
        raise FzeroError(where, problem, f"give router_aux_loss_coef=0.0, or {wrapped}")
    if virtual_ranks > 1:
        problem = f"joins the rows of a batch into one, which {virtual_ranks} virtual ranks cannot share"
        raise FzeroError(where, problem, f"give {wrapped}, VirtualMesh(fsdp=1), or ranks of torchrun")


def list_fields(args: Any) -> Iterator[str]:
    """A line for each field of a configuration that transformers does not know: ranks must have them alike."""
    known = {field.name for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)}
    for field in dataclasses.fields(args):
        if field.name not in known:
            yield f"configuration {type(args).__name__}.{field.name}: {describe(getattr(args, field.name))}"
