"""Absent: names of DeepSpeed that have no place here, and what to do instead of each."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fzero.base.errors import FzeroError


class AbsentAttribute(FzeroError, AttributeError):
    """A name that an object does not have: `hasattr` is false."""


_PIPELINE = "initialize takes a plain module; fzero.parallel.pipeline cuts layers into stages (docs/parallel.md)"
_INFERENCE = "there is no engine for inference: engine.eval(), or fzero.hf.from_pretrained and its generate"
_TENSORS = "fzero.hf.parallel(model, mesh, tp=...) splits layers (docs/hf_parallel.md)"
_EXPERTS = "fzero.hf.parallel(model, mesh, ep=...) gives ranks experts (docs/hf_parallel.md)"
_MODULES: dict[str, str] = {
    "PipelineModule": _PIPELINE,
    "pipe": _PIPELINE,
    "init_inference": _INFERENCE,
    "InferenceEngine": _INFERENCE,
    "DeepSpeedInferenceConfig": _INFERENCE,
    "module_inject": _INFERENCE,
    "replace_transformer_layer": _INFERENCE,
    "tp_model_init": _TENSORS,
    "moe": _EXPERTS,
    "sequence": "fzero.hf.parallel(model, mesh, sp=...) cuts sequences (docs/hf_parallel.md)",
    "DeepSpeedTransformerLayer": "torch.nn.functional.scaled_dot_product_attention has fused kernels",
    "DeepSpeedTransformerConfig": "torch.nn.functional.scaled_dot_product_attention has fused kernels",
    "OnDevice": 'give "meta" to torch.device as a context, or construct the model in zero.Init()',
    "compression": "DeepSpeed 0.19 removed it too",
    "autotuning": 'fzero.shard(memory="40GiB") chooses what an autotuner tries',
    "elasticity": "every checkpoint loads on any number of ranks (docs/elastic.md)",
    "TiledLinear": "give nn.Linear, and stage3_partition_stream_chunk_size: a large weight is used in chunks",
    "TiledLinearReturnBias": "give nn.Linear, and stage3_partition_stream_chunk_size: a large weight is used in chunks",
    "model_parallel_cuda_manual_seed": "torch.manual_seed seeds all ranks, and each rank draws numbers of its own",
    "get_cuda_rng_tracker": "torch.manual_seed seeds all ranks, and what is computed again draws the same",
    "log_summary": "print(engine.report(batch)) lists the bytes of each collective",
    "FusedLamb": "give an optimizer of fzero.optim",
    "groups": "fzero.deepspeed.comm has the ranks of torch.distributed",
}
_LOCAL = "slices are cut otherwise here: use the function with full in the place of local"
_UTILS = {f"safe_{verb}_local_{what}": _LOCAL for verb in ("get", "set") for what in ("grad", "fp32_param")}
_UTILS |= {f"safe_{verb}_local_optimizer_state": _LOCAL for verb in ("get", "set")}
_UTILS["safe_update_full_grad_vectorized"] = "call safe_set_full_grad for each parameter"
_METHODS: dict[str, str] = {
    "offload_states": "offload_optimizer and offload_param of the configuration say where state lies",
    "reload_states": "offload_optimizer and offload_param of the configuration say where state lies",
    "set_lr": "give initialize a scheduler: its rates are part of the update",
    "get_mom": "the betas are those of the configuration, or of the optimizer that initialize was given",
    "dynamic_loss_scale": "fp16.loss_scale of the configuration says it: 0 is dynamic",
    "allreduce_gradients": "gradients are means over ranks already",
    "deepspeed_io": "fzero.data.loader makes the batches of each rank",
    "generate": _INFERENCE,
    "load_state_dict": "engine.load_checkpoint, or load the model before initialize",
    "state_dict": "engine.module_state_dict(), which all ranks call together",
    "to": "give initialize a model: its parameters lie where the mesh says",
    "cuda": "give initialize a model: its parameters lie where the mesh says",
    "half": "fp16 of the configuration says that compute is float16",
    "bfloat16": "bf16 of the configuration says that compute is bfloat16",
    "register_forward_hook": "register hooks on the model before initialize",
}


def refuse_arguments(where: str, given: Mapping[str, tuple[Any, str]]) -> None:
    """Refuse arguments that ask for something that is not here: name -> `(value, way out)`.

    Raises:
        FzeroError: for the first value that is not None, False or empty.
    """
    for name, (value, way_out) in given.items():
        if value is not None and value is not False and value != ():
            raise FzeroError(f"{where}: {name}", f"is {value!r:.80}, which is not supported", way_out)


def make_getattr(module: str, known: Iterable[str]) -> Callable[[str], Any]:
    """The function `__getattr__` of a module, for the names that it does not have.

    It raises an `FzeroError` for a name of DeepSpeed, also where the name is imported, and an `AttributeError` with the
    nearest of the `known` names for any other.
    """
    known = list(known)

    def refuse(name: str) -> Any:
        way_out = {**_MODULES, **_UTILS}.get(name)
        if way_out is not None:
            raise FzeroError(f"{module}.{name}", "is not here", way_out)
        raise AttributeError(f"module {module!r} has no attribute {name!r}{_suggest(name, known)}")

    return refuse


def refuse_method(owner: str, name: str, known: Iterable[str]) -> AbsentAttribute:
    """The error of an attribute that an object of DeepSpeed has, or that is unknown."""
    way_out = _METHODS.get(name, "docs/deepspeed.md lists what is here")
    return AbsentAttribute(f"{owner}.{name}", f"is not here{_suggest(name, known)}", way_out)


def _suggest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, [each for each in known if not each.startswith("_")], 1)
    return f" (the nearest is {near[0]})" if near else ""


def render_absent() -> Mapping[str, str]:
    """Each absent name, and what to do instead."""
    return {**_MODULES, **_UTILS, **{f"engine.{name}": way_out for name, way_out in _METHODS.items()}}
