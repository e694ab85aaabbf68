"""Arguments: what each field of transformers' TrainingArguments means here. This table is the only list of them.

`docs/huggingface.md` shows the table. The fields are those of Seq2SeqTrainingArguments of transformers 5.23.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Meaning = Literal["the same", "mapped", "no meaning", "refused"]


class Field(NamedTuple):
    """One field. `note` is what the field does here, why it does nothing, or what to do instead; "" says no more."""

    name: str
    meaning: Meaning
    note: str = ""


def _same(*names: str, note: str = "") -> tuple[Field, ...]:
    """Fields that mean what they mean in transformers."""
    return tuple(Field(name, "the same", note) for name in names)


_UNTRIED = "code of transformers alone; not tried, because it needs the Hub"

LOOP = (
    *_same("output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "gradient_accumulation_steps"),
    *_same("max_grad_norm", "label_smoothing_factor", "average_tokens_across_devices", "seed", "data_seed"),
    *_same("full_determinism", "use_cache", "disable_tqdm", "use_cpu", "skip_memory_metrics"),
    *_same("do_train", "do_eval", "do_predict", "resume_from_checkpoint", note="for scripts: no Trainer reads it"),
    *_same("local_rank", note="torchrun sets it"),
    *_same("tf32", note="a setting of torch"),
    *_same("bf16", note="torch.autocast"),
    *_same("fp16", note="torch.autocast, and the loss scale of torch.amp.GradScaler; on CPUs too"),
    *_same("neftune_noise_alpha", note="each rank draws its own noise"),
)
OPTIMIZER = (
    *_same("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay"),
    *_same("adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"),
    Field("optim", "mapped", "to fzero.optim: the table of names says which"),
    Field("optim_target_modules", "no meaning", "of GaLore, APOLLO and LOMO, which are refused by name"),
)
DATA = (
    *_same("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *_same("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
    *_same("remove_unused_columns", "label_names", "length_column_name", "ignore_data_skip"),
    *_same("train_sampling_strategy", note='"batch_rebalance" on several ranks is refused'),
    *_same("accelerator_config", note="even_batches=False on several ranks is refused"),
    Field("sortish_sampler", "no meaning", "transformers does not read it"),
)
LOGS = (
    *_same("logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter"),
    *_same("include_num_input_tokens_seen", "log_level", "log_level_replica", "report_to", "run_name", "project"),
    *_same("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", note=_UNTRIED),
)
EVALUATION = (
    *_same("eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size", "prediction_loss_only"),
    *_same("eval_on_start", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
    *_same("include_for_metrics", "batch_eval_metrics"),
    *_same("predict_with_generate", note="of Seq2SeqTrainer; refused by Trainer"),
    *_same("generation_max_length", "generation_num_beams", "generation_config", note="of Seq2SeqTrainer"),
)
FILES = (
    *_same("save_only_model", "save_strategy", "save_steps", "save_total_limit", "load_best_model_at_end"),
    *_same("metric_for_best_model", "greater_is_better", "restore_callback_states_from_checkpoint"),
    *_same("push_to_hub", "hub_model_id", note="tried with a Hub that only notes what it gets"),
    *_same("hub_token", "hub_private_repo", "hub_strategy", "hub_always_push", "hub_revision", note=_UNTRIED),
    *_same("enable_jit_checkpoint", note="on several ranks refused: a signal reaches ranks at different updates"),
)
MEMORY = (
    Field("activation_checkpointing", "mapped", "to fzero.remat of each layer"),
    Field("activation_checkpointing_kwargs", "mapped", "of activation_checkpointing; offload is refused"),
    Field("gradient_checkpointing", "mapped", "the old name of activation_checkpointing"),
    Field("gradient_checkpointing_kwargs", "mapped", "the old name of activation_checkpointing_kwargs"),
    Field("torch_compile", "mapped", "to compile=True of fzero.shard"),
    Field("torch_compile_backend", "mapped", '"inductor"; others are refused'),
    Field("torch_compile_mode", "mapped", '"default"; others are refused'),
    Field("torch_empty_cache_steps", "no meaning", "the caching allocator is left alone"),
)
RANKS = (
    Field("deepspeed", "mapped", "read by fzero.deepspeed; without the package give fzero.hf.TrainingArguments"),
    Field("fsdp", "mapped", "parameters are in slices in any case; fsdp_config counts with it alone"),
    Field("fsdp_config", "mapped", "to stage=, fzero.host() and activation checkpointing: see below"),
    Field("parallelism_config", "mapped", "dp_replicate_size and dp_shard_size to a mesh; other axes are refused"),
    *_same("ddp_backend", "ddp_timeout", note="of the process group"),
    Field("ddp_find_unused_parameters", "no meaning", "there is no DDP"),
    Field("ddp_bucket_cap_mb", "no meaning", "there is no DDP"),
    Field("ddp_broadcast_buffers", "no meaning", "there is no DDP; running statistics are means over ranks"),
    Field("ddp_static_graph", "no meaning", "there is no DDP"),
    Field("liger_kernel_config", "no meaning", "without use_liger_kernel, as in transformers"),
)
REFUSED = (
    Field("auto_find_batch_size", "refused", "give per_device_train_batch_size"),
    Field("fp16_full_eval", "refused", "give bf16=True, which evaluation follows"),
    Field("bf16_full_eval", "refused", "give bf16=True, which evaluation follows"),
    Field("use_liger_kernel", "refused", "fzero.tiled_cross_entropy needs little memory for logits"),
    Field("debug", "refused", "leave it out, and look for overflows with transformers.Trainer"),
    Field("save_on_each_node", "refused", "leave it out: all ranks write parts of one folder, which they share"),
)

ARGUMENTS = {
    each.name: each
    for family in (LOOP, OPTIMIZER, DATA, LOGS, EVALUATION, FILES, MEMORY, RANKS, REFUSED)
    for each in family
}
"""All fields by name."""

OF_A_RANK = frozenset({
    *(name for name, each in ARGUMENTS.items() if each.meaning == "no meaning"),
    *("local_rank", "disable_tqdm", "skip_memory_metrics", "do_train", "do_eval", "do_predict"),
    *("resume_from_checkpoint", "logging_dir", "log_level", "log_level_replica", "log_on_each_node", "report_to"),
    *("run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    *("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
    *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("dataloader_multiprocessing_context", "ddp_backend", "ddp_timeout"),
})  # fmt: skip
"""The fields that each rank may have for itself: what it prints, logs and uploads, and how its data come to it. Ranks
must have all others alike."""
