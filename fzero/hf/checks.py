"""Checks: the arguments of transformers' Trainer that are refused by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import transformers
from torch import nn

from fzero import tree
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.hf.adapters import find_parameter_adapter, has_adapters
from fzero.hf.arguments import ARGUMENTS
from fzero.hf.codes import suggest
from fzero.hf.optimizers import check_optimizer
from fzero.training.spent import Spent
from fzero.values.quantized import is_quantized

SEAMS = (
    *("_wrap_model", "_move_model_to_device", "_clip_grad_norm", "_get_grad_norm"),
    *("_save_optimizer_and_scheduler", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model"),
    *("_run_epoch", "_maybe_log_save_evaluate"),
)
"""The methods of transformers' Trainer that ours replaces beside public ones."""


def refuse_model(where: str, given: Any) -> FzeroError:
    """The error for what is no model."""
    way_out = "give a model, such as AutoModelForCausalLM.from_pretrained(folder) or fzero.hf.from_pretrained(folder)"
    return FzeroError(where, f"is {given!r:.80}, which is no model", way_out)


def check_type(args: Any) -> None:
    """Refuse what is no TrainingArguments.

    Raises:
        FzeroError: naming the value.
    """
    if not isinstance(args, transformers.TrainingArguments):
        raise FzeroError("args", f"is {args!r:.80}", 'give transformers.TrainingArguments("folder")')


def check_training_arguments(args: Any, allowed: Collection[str] = ()) -> None:
    """Refuse TrainingArguments that ask for what is not here, and a release of transformers with another Trainer. The
    options named in `allowed` pass.

    Raises:
        FzeroError: naming the argument, its value and the way out.
    """
    _check_release()
    _check_options(args, allowed)


def _check_release() -> None:
    missing = [name for name in SEAMS if not hasattr(transformers.Trainer, name)]
    if missing:
        problem = f"is {transformers.__version__}, whose Trainer has no {missing[0]}"
        raise FzeroError("transformers", problem, "install transformers 5.22 or later")


def _check_options(args: Any, allowed: Collection[str]) -> None:
    """Refuse the options of TrainingArguments that ask for what is not here."""
    refused = [(each.name, each.note) for each in ARGUMENTS.values() if each.meaning == "refused"]
    for name, way_out in (*refused, ("predict_with_generate", "give it to fzero.hf.Seq2SeqTrainer")):
        value = getattr(args, name, None)
        if value and name not in allowed:
            raise FzeroError(f"TrainingArguments: {name}", f"is {value!r:.80}, which is not supported", way_out)
    check_optimizer(getattr(args.optim, "value", args.optim))
    precision = getattr(args, "mixed_precision", "no")
    if precision not in ("no", "bf16", "fp16"):
        problem = f"is {precision!r}, which is not supported"
        raise FzeroError("accelerate: mixed_precision", problem, 'give "bf16", "fp16" or "no"')
    if getattr(args, "torch_compile_backend", None) not in (None, "inductor"):
        problem = f"is {args.torch_compile_backend!r}, which is not supported"
        raise FzeroError("TrainingArguments: torch_compile_backend", problem, 'give "inductor"')
    if getattr(args, "torch_compile_mode", None) not in (None, "default"):
        problem = f"is {args.torch_compile_mode!r}, which is not supported"
        way_out = "give torch_compile=True alone: inductor compiles what stands between collectives"
        raise FzeroError("TrainingArguments: torch_compile_mode", problem, way_out)
    if (getattr(args, "activation_checkpointing_kwargs", None) or {}).get("offload"):
        problem = "asks for offload, which is not supported"
        way_out = 'leave it out, or train by fzero.shard with fzero.remat(fn, policy="offload")'
        raise FzeroError("TrainingArguments: activation_checkpointing_kwargs", problem, way_out)
    if getattr(args, "world_size", 1) > 1:
        _check_several_ranks(args)
    if getattr(args, "n_gpu", 0) > 1:
        problem = f"one process sees {args.n_gpu} GPUs"
        raise FzeroError("TrainingArguments: n_gpu", problem, "start one process a GPU: torchrun --nproc-per-node")


def _check_several_ranks(args: Any) -> None:
    """Refuse what gives some ranks fewer rows or batches, or lets one save alone: all ranks take each step together,
    with equal shapes."""
    if args.enable_jit_checkpoint:
        problem = f"is True, and a signal reaches {args.world_size} ranks at different updates"
        way_out = 'give save_strategy="steps"; fzero.checkpoint.run saves on a signal'
        raise FzeroError("TrainingArguments: enable_jit_checkpoint", problem, way_out)
    if not args.accelerator_config.even_batches:
        problem = f"has even_batches=False, and {args.world_size} ranks take each step together"
        raise FzeroError("TrainingArguments: accelerator_config", problem, "give dataloader_drop_last=True instead")
    if args.train_sampling_strategy == "batch_rebalance":
        problem = f"is 'batch_rebalance', which gives {args.world_size} ranks unequal numbers of rows"
        raise FzeroError("TrainingArguments: train_sampling_strategy", problem, 'give "group_by_length"')


def check_plugins(trainer: Any) -> None:
    """Refuse what `accelerate launch` asked for by its environment.

    Raises:
        FzeroError: for FSDP and DeepSpeed.
    """
    for name in ("fsdp", "deepspeed"):
        if getattr(trainer, f"is_{name}_enabled"):
            problem = "is on, and fzero cuts parameters into slices itself"
            raise FzeroError(f"accelerate: {name}", problem, "start the script with torchrun, or accelerate without it")


def check_model(model: Any) -> None:
    """Refuse a model that cannot be cut into slices as it is.

    Raises:
        FzeroError: for adapters that transformers added, or of single parameters, for parameters that DeepSpeed cut,
            and for a quantized model.
    """
    name = type(model).__name__
    if not has_adapters(model) and getattr(model, "_hf_peft_config_loaded", False):
        problem = f"{name} has adapters of add_adapter, which transformers saves in a way of its own"
        raise FzeroError("model", problem, "give peft.get_peft_model(model, config)")
    path = find_parameter_adapter(model)
    if path is not None:
        of = 'target_parameters, which "all-linear" also means for routers and stacked experts'
        problem = f"{path} has adapters by {of}: peft registers these anew in each forward"
        way_out = 'give target_modules that name linear modules, such as ["q_proj", "v_proj"]'
        raise FzeroError("model", problem, way_out)
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    cut = next((path for path, x in named if hasattr(x, "ds_id")), None)
    if cut is not None:
        problem = f"{cut} was cut by deepspeed.zero.Init, which TrainingArguments of transformers turn on"
        raise FzeroError("model", problem, "give fzero.hf.TrainingArguments, or load the model before the arguments")
    if getattr(model, "is_quantized", False):
        held = suggest(getattr(getattr(model, "config", None), "quantization_config", None) or {})
        way_out = f"load it without quantization_config, and give {held} to fzero.hf.Trainer or from_pretrained"
        raise FzeroError("model", f"{name} is quantized, and its weights are codes that ranks cannot cut", way_out)


def refuse_use(path: str, what: str) -> FzeroError:
    """The error for the use `what` of a parameter at `path` of a Trainer's model, or of the model itself."""
    where = f"model: {path}" if path else "model"
    problem = f"{what} needs values, which are in the slices of a Trainer"
    way_out = (
        "trainer.save_model(folder) writes values for from_pretrained; trainer.generate, trainer.evaluate and "
        "trainer.predict use them; change a model before Trainer gets it"
    )
    if what == ".grad":
        way_out = (
            "max_grad_norm clips gradients, and the logs have grad_norm; "
            "a create_optimizer of your own ends with `return super().create_optimizer()`"
        )
    return FzeroError(where, problem, way_out)


def check_values(model: nn.Module) -> None:
    """Refuse a model whose values are in slices elsewhere.

    Raises:
        FzeroError: naming the first parameter.
    """
    path = next((path for path, x in model.named_parameters() if isinstance(x, Spent)), None)
    if path is not None:
        problem = "has no values: the model was given to a Trainer or to initialize before"
        raise FzeroError(f"model: {path}", problem, "construct the model again, or give a copy.deepcopy the first time")


def check_same(model: Any, of_slices: Any) -> None:
    """Refuse a model that was put in the place of the one whose values are in slices.

    Raises:
        FzeroError: where there are slices, and they are of another model.
    """
    if of_slices is not None and model is not of_slices:
        problem = f"was replaced by another {type(model).__name__}, and the slices are of the first model"
        raise FzeroError("trainer.model", problem, "give the model to a new Trainer, or give model_init")


def refuse_gradients() -> FzeroError:
    """The error for a call of the model that asks for gradients outside of the programs of training."""
    problem = "is called for gradients outside of compute_loss"
    way_out = (
        "a training_step of your own returns what `super().training_step(model, inputs, num_items_in_batch)` returns; "
        "a loss of your own is compute_loss; accelerator.backward has no gradients to compute"
    )
    return FzeroError("training_step: the model", problem, way_out)


def check_frozen(model: nn.Module, params: tree.Tree) -> None:
    """Refuse a structure whose `requires_grad` is not that of its slices: gradients follow the slices.

    Raises:
        FzeroError: naming the parameter.
    """
    leaves, _ = tree.flatten(params, is_leaf=is_quantized)
    for path, leaf in zip(tree.paths(params, is_leaf=is_quantized), leaves):
        requires_grad = model.get_parameter(path).requires_grad
        if requires_grad == is_frozen(leaf):
            problem = f"requires_grad became {requires_grad} after the parameter was cut into slices"
            raise FzeroError(path, problem, "set requires_grad on a whole model, and give that to fzero.hf")
