"""Keys: what each key of a DeepSpeed configuration means here. This table is the only list of keys.

`docs/deepspeed.md` shows the table. Names, types and defaults are those of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Meaning = Literal["honoured", "mapped", "no meaning", "refused"]


class Key(NamedTuple):
    """One key. A path that ends with `.*` stands for all keys below a block, which are not looked at one by one."""

    path: str
    type: str  # bool, int, float, str, list, dict, or words such as "fp16|bf16"
    default: Any
    meaning: Meaning
    note: str  # what the key does here, why it does nothing, or what to do instead
    alias_of: str = ""  # the path of the key that this one is another name of


def _keys(prefix: str, meaning: Meaning, *rows: tuple[str, str, Any, str]) -> tuple[Key, ...]:
    """Keys below one prefix, of one meaning."""
    return tuple(Key(prefix + name, kind, default, meaning, note) for name, kind, default, note in rows)


_BUCKETS = "a bucket is a layer, and transfers are scheduled by cost (docs/passes.md)"
_COPIES = "the leaves of a bucket lie side by side already"
_REMOVED = "DeepSpeed 0.19 removed it too: take the key out"

BATCH = _keys(
    "",
    "honoured",
    ("train_batch_size", "int", None, "examples of all ranks in one update"),
    ("train_micro_batch_size_per_gpu", "int", None, "examples of one rank in one call of the engine"),
    ("gradient_accumulation_steps", "int", None, "calls of the engine in one update"),
    (
        "managed_gradient_accumulation",
        "bool",
        True,
        "false: each `engine.step()` updates, behind any number of batches",
    ),
    ("gradient_clipping", "float", 1.0, "largest global norm of gradients; 0 is none. `version=` says which default"),
    (
        "steps_per_print",
        "int",
        None,
        'updates between the lines of the logger "fzero": rates, loss scale, skips, seconds',
    ),
    ("wall_clock_breakdown", "bool", False, 'the logger "fzero" says the seconds of each update and of its gradients'),
    ("dataloader_drop_last", "bool", False, "whether the last, smaller batch of `training_data` is left out"),
)

TOP = (
    *BATCH,
    *_keys(
        "",
        "mapped",
        ("communication_data_type", "fp16|bf16|fp32", None, "`reduce_dtype` of `fzero.shard`"),
        ("gradient_allreduce_op", "mean|sum", "mean", "a sum is the mean times the number of ranks"),
    ),
    *_keys(
        "",
        "no meaning",
        ("dump_state", "bool", False, "the table of keys is logged in any case"),
        ("disable_python_gc", "bool", False, "Python's collector is the program's own matter"),
        ("disable_allgather", "bool", False, "the stage says what is gathered"),
        ("seq_parallel_communication_data_type", "fp16|bf16|fp32", "fp32", "it is about sequence axes"),
        ("prescale_gradients", "bool", False, "gradients are means in any case"),
        ("gradient_predivide_factor", "float", 1.0, "gradients are means in any case"),
        ("zero_allow_untested_optimizer", "bool", False, "an optimizer is the same at every stage"),
        ("zero_force_ds_cpu_optimizer", "bool", True, "state on the host is updated on the host by the same formula"),
        ("memory_breakdown", "bool", False, "`print(engine.report(batch))` says the peak and its parts"),
        ("vocabulary_size", "int", None, "DeepSpeed warns of sizes that are no multiple of 8; nothing depends on it"),
        ("log_level", "str", None, 'set the level of the logger "fzero"'),
    ),
    *_keys(
        "",
        "refused",
        ("use_data_before_expert_parallelism", "bool", False, "`fzero.hf.parallel(ep=...)` gives ranks experts"),
        ("sequence_parallel_size", "int", 1, "`fzero.hf.parallel(sp=...)` cuts sequences"),
        ("data_parallel_size", "int", None, "all ranks of the mesh are data parallel: give mesh="),
        ("sparse_gradients", "bool", False, _REMOVED),
        ("graph_harvesting", "bool", False, _REMOVED),
        *(
            (name, "dict", None, _REMOVED)
            for name in (
                "nebula", "compression_training", "amp", "quantize_training", "eigenvalue", "sparse_attention",
                "elasticity", "curriculum_learning", "progressive_layer_drop",
            )
        ),
        ("data_efficiency", "dict", None, "fzero.data makes batches; give them to the engine"),
        ("autotuning", "dict", None, 'fzero.shard(memory="40GiB") chooses instead (docs/budget.md)'),
        ("hybrid_engine", "dict", None, "there is no engine for generation yet"),
        ("expert_parallel", "dict", None, "`fzero.hf.parallel(ep=...)` gives ranks experts"),
        ("weight_quantization", "dict", None, "fzero.quantize holds frozen leaves as codes (docs/quantized.md)"),
        ("datastates_ckpt", "dict", None, "fzero.checkpoint.save(wait=False) writes while training goes on"),
    ),
)  # fmt: skip

PRECISION = (
    *_keys(
        "fp16.",
        "honoured",
        ("enabled", "bool", False, "`fzero.precision(torch.float16)`: weights stay float32, compute is float16"),
        ("loss_scale", "float", 0.0, "0: `optim.loss_scale.dynamic`; any other: that scale throughout"),
        ("initial_scale_power", "int", 16, "the first dynamic scale is 2 to this power"),
        ("loss_scale_window", "int", 1000, "`window` of the dynamic scale"),
        ("hysteresis", "int", 2, "`hysteresis` of the dynamic scale; 1 at stage 0, as in DeepSpeed"),
        ("consecutive_hysteresis", "bool", False, "as in `optim.loss_scale.dynamic`"),
        ("min_loss_scale", "int", 1, "`min_scale` of the dynamic scale"),
    ),
    *_keys("fp16.", "no meaning", ("auto_cast", "bool", False, "floating tensors of a batch are cast in any case")),
    *_keys(
        "fp16.",
        "refused",
        ("fp16_master_weights_and_grads", "bool", False, "weights stay float32"),
    ),
    *_keys(
        "bf16.",
        "honoured",
        ("enabled", "bool", False, "`fzero.precision(torch.bfloat16)`: weights stay float32, compute is bfloat16"),
        ("check_grad_overflow", "bool", True, "an update whose gradients are not finite is skipped"),
    ),
    *_keys("bf16.", "no meaning", ("immediate_grad_update", "bool", False, "a step is one program")),
    *_keys(
        "bf16.",
        "mapped",
        ("bf16_master_weights_and_grads", "bool", False, "parameters and gradients are bfloat16; needs the next key"),
        ("bf16_optimizer_states", "bool", False, "optimizer state is bfloat16; needs the key before"),
    ),
    *_keys(
        "torch_autocast.",
        "mapped",
        ("enabled", "bool", False, "`torch.autocast` around the module"),
        ("dtype", "str", None, '"bfloat16"; for float16 there is the block `fp16`'),
    ),
    Key(
        "torch_autocast.lower_precision_safe_modules",
        "list",
        None,
        "no meaning",
        "leaves move in the dtype of their uses",
    ),
    *(
        Key(f"bfloat16.{name}", "bool", default, "honoured", f"`bf16.{name}`", f"bf16.{name}")
        for name, default in (("enabled", False), ("check_grad_overflow", True))
    ),
    Key(
        "data_types.grad_accum_dtype",
        "fp16|bf16|fp32",
        None,
        "no meaning",
        "gradients add up in float32, the widest; with bf16 masters in bfloat16",
    ),
    *_keys(
        "data_types.",
        "refused",
        ("param_dtype", "fp16|bf16|fp32", None, "cast the model before initialize"),
        ("buffer_dtype", "fp16|bf16|fp32", None, "cast the model's buffers before initialize"),
        ("keep_in_fp32_modules", "str|list", "auto", "cast in the model's forward"),
    ),
)

ALGORITHMS = (
    *_keys(
        "optimizer.",
        "honoured",
        (
            "type",
            "str",
            None,
            "Adam, AdamW, Adagrad, Lamb, Lion, Muon, SGD, RMSprop, NAdam, Adafactor; others are refused by name",
        ),
        ("params.*", "dict", None, "as DeepSpeed's or torch's optimizer of that type takes"),
    ),
    *_keys("optimizer.", "no meaning", ("legacy_fusion", "bool", False, "updates are fused by `fzero.passes.fuse`")),
    *_keys(
        "scheduler.",
        "honoured",
        ("type", "str", None, "WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle"),
        ("params.*", "dict", None, "as DeepSpeed's schedule of that type takes (`fzero.optim.deepspeed`)"),
    ),
)

_ZERO_IGNORED = (
    *((name, "bool", default, _COPIES) for name, default in (
        ("contiguous_gradients", True), ("parameter_alignment", False), ("round_robin_gradients", False),
    )),
    *((name, kind, default, _BUCKETS) for name, kind, default in (
        ("reduce_scatter", "bool", True), ("reduce_bucket_size", "int", 500_000_000),
        ("use_multi_rank_bucket_allreduce", "bool", True), ("allgather_partitions", "bool", True),
        ("allgather_bucket_size", "int", 500_000_000), ("allgather_size", "int", 500_000_000),
        ("overlap_comm", "bool", None),
        ("sub_group_size", "int", 1_000_000_000), ("stage3_prefetch_bucket_size", "int", 50_000_000),
        ("stage3_param_persistence_threshold", "int", 100_000),
        ("stage3_model_persistence_threshold", "int", 2**63 - 1), ("stage3_max_live_parameters", "int", 10**9),
        ("stage3_max_reuse_distance", "int", 10**9), ("stage3_module_granularity_threshold", "int", 0),
        ("stage3_use_all_reduce_for_fetch_params", "bool", False), ("stage3_allgather_sequential", "bool", False),
        ("prefetch_bucket_size", "int", 50_000_000), ("param_persistence_threshold", "int", 100_000),
        ("model_persistence_threshold", "int", 2**63 - 1), ("max_live_parameters", "int", 10**9),
        ("max_reuse_distance", "int", 10**9), ("module_granularity_threshold", "int", 0),
        ("use_all_reduce_for_fetch_params", "bool", False), ("allgather_sequential", "bool", False),
    )),
    *((name, "bool", False, "save_16bit_model gathers in any case") for name in (
        "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
    )),
    ("compute_grad_norm", "bool", True, "the norm is computed in any case"),
    ("load_from_fp32_weights", "bool", True, "checkpoints hold float32 weights"),
    ("elastic_checkpoint", "bool", False, "a checkpoint loads on any number of ranks"),
    ("ignore_unused_parameters", "bool", True, "a parameter without a use has a gradient of zeros"),
    ("legacy_stage1", "bool", False, "there is one stage 1"),
    ("memory_efficient_linear", "bool", True, "the backward pass gathers weights again in any case"),
    ("pipeline_loading_checkpoint", "bool", False, "each rank reads its own ranges in any case"),
    ("override_module_apply", "bool", True, "no method of a module is replaced"),
    ("log_trace_cache_warnings", "bool", False, 'a step that is traced again says why in the logger "fzero"'),
    ("enable_sanity_checks", "bool", False, "programs are verified in any case"),
    ("save_muon_momentum_buffer_in_memory", "bool", False, "the momentum lies where optimizer state lies"),
    ("leaf_module.*", "dict", None, "gathers follow uses, not modules"),
)  # fmt: skip

ZERO = (
    *_keys(
        "zero_optimization.",
        "honoured",
        ("stage", "int", 0, "0: whole state on each rank; 1, 2, 3: the stages of `fzero.shard`"),
    ),
    *_keys(
        "zero_optimization.",
        "mapped",
        ("offload_optimizer.device", "none|cpu|nvme", "none", '"cpu": `fzero.host()`; "nvme": `fzero.disk()`'),
        ("offload_optimizer.pin_memory", "bool", True, "`fzero.host(pin=)`"),
        ("offload_optimizer.ratio", "float", 1.0, "at stage 3, how much of the state: that of the last layers"),
        ("offload_param.device", "none|cpu|nvme", "none", 'at stage 3, "cpu": `fzero.host()`; "nvme": `fzero.disk()`'),
        ("offload_param.pin_memory", "bool", True, "`fzero.host(pin=)`"),
        ("offload_optimizer.nvme_path", "str", None, "the folder of `fzero.disk()`"),
        ("offload_param.nvme_path", "str", None, "the folder of `fzero.disk()`"),
        ("stage3_partition_stream_chunk_size", "int", None, "`chunk` of `fzero.shard`, in bytes"),
        ("mics_shard_size", "int", -1, "at stage 3, the mesh (replica, fsdp) with so many ranks along fsdp"),
        ("mics_hierarchical_params_gather", "bool", False, "groups of several hosts: the pass `fzero.variants.mics`"),
        ("zero_hpz_partition_size", "int", 1, "at stage 3, the mesh (node, local), and the pass `fzero.variants.hpz`"),
        ("zero_quantized_weights", "bool", False, "at stage 3, the pass `fzero.variants.int8_gather`"),
        ("zero_quantized_gradients", "bool", False, "at stage 3, the pass `fzero.variants.int8_mean`"),
        (
            "zero_quantized_nontrainable_weights",
            "bool",
            False,
            "at stage 3, `fzero.quantize` of frozen leaves: 8 bits, blocks of 256 elements",
        ),
        ("cpu_offload", "bool", None, '`offload_optimizer.device` "cpu"'),
        ("cpu_offload_param", "bool", None, '`offload_param.device` "cpu"'),
        ("cpu_offload_use_pin_memory", "bool", None, "`pin_memory` of both"),
    ),
    *_keys(
        "zero_optimization.offload_",
        "no meaning",
        *(
            (f"{what}.{name}", kind, default, "it is about DeepSpeed's own buffers and kernels")
            for what, name, kind, default in (
                ("optimizer", "buffer_count", "int", 4), ("optimizer", "pipeline_read", "bool", False),
                ("optimizer", "pipeline_write", "bool", False), ("optimizer", "fast_init", "bool", False),
                ("optimizer", "cpuadam_cores_perc", "float", 0.8),
                ("param", "buffer_count", "int", 5), ("param", "buffer_size", "int", 100_000_000),
                ("param", "max_in_cpu", "int", 1_000_000_000),
            )
        ),
    ),
    *_keys(
        "zero_optimization.",
        "refused",
        ("offload_optimizer.super_offload", "bool", False, "offload_optimizer.device is what there is"),
        ("zenflow", "dict", None, "offload_optimizer.device is what there is"),
        ("zeropp_loco_param", "dict", None, _REMOVED),
    ),
    *_keys("zero_optimization.", "no meaning", *_ZERO_IGNORED),
)  # fmt: skip

_CHECKPOINTING = "the model decides, with `deepspeed.checkpointing.checkpoint`, torch.utils.checkpoint or fzero.remat"
BLOCKS = (
    *_keys(
        "",
        "no meaning",
        *(
            (f"activation_checkpointing.{name}", kind, default, _CHECKPOINTING)
            for name, kind, default in (
                ("partition_activations", "bool", False), ("number_checkpoints", "int", None),
                ("contiguous_memory_optimization", "bool", False), ("synchronize_checkpoint_boundary", "bool", False),
                ("profile", "bool", False), ("cpu_checkpointing", "bool", False),
            )
        ),
        ("aio.*", "dict", None, "reads and writes go straight to the disk"),
        ("timers.*", "dict", None, "the line of `steps_per_print` has the seconds"),
        ("comms_logger.*", "dict", None, "`print(engine.report(batch))` lists the bytes of each collective"),
        ("pipeline.*", "dict", None, "it is about PipelineModule, which is refused"),
        ("checkpoint.tag_validation", "str", "WARN", "ranks that give different tags raise"),
        ("checkpoint.load_universal", "bool", False, "every checkpoint loads on any number of ranks"),
        ("checkpoint.parallel_write.*", "dict", None, "all ranks write at once"),
        ("checkpoint.serialization.*", "dict", None, "files are safetensors"),
        ("checkpoint.writer.*", "dict", None, "files are safetensors"),
        ("tensor_parallel.*", "dict", None, "it is about tensor parallelism"),
        ("compile.*", "dict", None, "it is about the passes of DeepCompile"),
    ),
    *_keys("", "mapped", ("compile.deepcompile", "bool", False, "`compile=True` of `fzero.shard`")),
    *_keys(
        "",
        "refused",
        ("checkpoint.use_node_local_storage", "bool", False, "all ranks see one filesystem"),
        ("tensor_parallel.autotp_size", "int", 0, "`fzero.hf.parallel(tp=...)` splits layers"),
        ("tensor_parallel.tp_size", "int", 1, "`fzero.hf.parallel(tp=...)` splits layers"),
    ),
)  # fmt: skip

_FOLDER = "the folder of its files is `output_path`/`job_name`"
WATCHERS = (
    *_keys(
        "",
        "honoured",
        *(
            row
            for name in ("tensorboard", "csv_monitor")
            for row in (
                (f"{name}.enabled", "bool", False, "rank 0 writes `Train/Samples/` `train_loss`, `lr`, `loss_scale`"),
                (f"{name}.output_path", "str", "", _FOLDER),
                (f"{name}.job_name", "str", "DeepSpeedJobName", _FOLDER),
            )
        ),
        *(
            row
            for name in ("wandb", "comet")
            for row in (
                (f"{name}.enabled", "bool", False, "rank 0 logs `Train/Samples/` `train_loss`, `lr`, `loss_scale`"),
                (f"{name}.project", "str", "deepspeed" if name == "wandb" else None, "the service's own"),
            )
        ),
        *((f"wandb.{name}", "str", None, "the service's own") for name in ("group", "team")),
        *(
            (f"comet.{name}", "str", None, "the service's own")
            for name in ("workspace", "api_key", "experiment_name", "experiment_key", "mode")
        ),
        ("comet.online", "bool", None, "the service's own"),
        ("comet.samples_log_interval", "int", 100, "examples between two numbers of one name"),
    ),
    *_keys(
        "flops_profiler.",
        "honoured",
        ("enabled", "bool", False, "rank 0 says the flops of each layer, and the seconds of one update"),
        ("profile_step", "int", 1, "updates before the one that is profiled"),
        ("detailed", "bool", True, "whether all layers are listed"),
        ("top_modules", "int", 1, "how many layers are listed without `detailed`, those with the most flops"),
        ("output_file", "str", None, "the file of the profile; without it the profile is printed"),
    ),
    *_keys(
        "flops_profiler.",
        "no meaning",
        ("module_depth", "int", -1, "layers are the buckets of the program"),
        ("recompute_fwd_factor", "float", 0.0, "the program has what is computed twice"),
    ),
)

KEYS: dict[str, Key] = {key.path: key for key in (*TOP, *PRECISION, *ALGORITHMS, *ZERO, *BLOCKS, *WATCHERS)}
"""Path -> key, all of them."""
