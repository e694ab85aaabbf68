"""The runs of `published.py`: who published what, and how the run is written for the planner.

Sources, read on 2026-11-26:

* torchtitan: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, at the commit 9dec370 that it names. Its
  memory is what the allocator has reserved (train.py). With stages it keeps gathered weights between forward and
  backward pass (torchtitan/parallelisms/parallelize_llama.py). Microbatches are not published: as many as ranks along
  the pipeline are assumed, which is that commit's default (pipelining_utils.py).
* llama-3: 405B in bfloat16, arXiv 2407.21783, table 4: TFLOPS of a GPU. Tokens a second are those of
  6 N + 6 x layers x width x length flops a token. Section 3.3.2: gathered weights are kept, and no value is computed
  again at 8,192 tokens. Microbatches are not published: one row each is assumed, which is as many as there can be.
* Stages of the 405B: 126 layers, the embedding and the head are 16 on each of 8 ranks, or 8 on each of 16 (section
  3.3.2; pipelining_utils.py gives the first and the last rank a layer less). fzero cuts the embedding and the head over
  all stages, and its stages have equal numbers of layers: the plan has 128.
* torchtitan on H200: the same repository, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md.
* nanotron: huggingface.co/nanotron/old_bench, log_metrics.csv of each run, with the model and options of
  huggingface/bench_cluster at 95c1ce1. Its memory is what tensors take (max_memory_allocated).
* flash_2: arXiv 2407.08608, abstract, has the part of the flops of an H100 that FlashAttention-2 attains. nanotron
  calls it, and so did torch on an H100 in 2024. torchtitan has had cuDNN's attention since 2025-03
  (pytorch/torchtitan/pull/1000). Which attention Meta had is not known.
* ZeRO: arXiv 1910.02054, figure 1: bytes of model states by a formula, for 7.5 billion parameters on 64 ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Run(NamedTuple):
    """A published run. `memory` in GiB and `rate` in tokens a second, of one rank. The rest is how it is planned, and
    `reasons` has the letters of what the prediction lacks. With `flash_2` its attention was FlashAttention-2."""

    name: str
    what: str
    model: str
    mesh: str
    batch: int
    length: int
    memory: float | None = None
    rate: float | None = None
    hardware: str = "h100-hbm2e"
    microbatches: int = 1
    stage: int | None = None
    remat: str | None = None
    flash_2: bool = False
    reasons: tuple[str, ...] = ()

    @property
    def sequence_parallel(self) -> bool:
        """Whether ranks along "tp" have parts of rows between layers, as in all of these runs; beside stages a plan has
        none."""
        return "tp=" in self.mesh and "pp=" not in self.mesh

    @property
    def layers(self) -> int | None:
        """The layers of the plan, where the run had others."""
        return MODELS[self.model]["num_hidden_layers"] if self.model == "405b-stages" else None


def _llama(width: int, inner: int, layers: int, heads: int, keys: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return {"model_type": "llama", **sizes, "num_attention_heads": heads, "num_key_value_heads": keys, **more}


MODELS: dict[str, dict[str, Any]] = {
    "8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "405b": _llama(16384, 53248, 126, 128, 8, 128256),
    "405b-stages": _llama(16384, 53248, 128, 128, 8, 128256),
    "1b": _llama(2048, 4096, 24, 32, 32, 50272, tie_word_embeddings=True),  # 50,257 words, padded for sixteen ranks
    "7.5b": {"model_type": "gpt2", "n_embd": 4096, "n_layer": 36, "n_head": 32, "vocab_size": 50257},
}

FLASH_2 = 0.35
"""The part of the dense flops of an H100 that FlashAttention-2 attains."""

_ZERO = 2**30 / 1e9  # the figure has GB


def _torchtitan(name: str, what: str, mesh: str, memory: float, rate: float, *reasons: str) -> Run:
    run = Run(f"torchtitan-8b-{name}", f"torchtitan 8B, {what}", "8b", mesh, 2, 8192, memory, rate)
    return run._replace(remat="selective", flash_2=True, reasons=reasons)


def _large(
    name: str, what: str, model: str, mesh: str, batch: int, length: int, memory: float, rate: float, *reasons: str
) -> Run:
    run = Run(f"torchtitan-{name}", f"torchtitan {what}", model, mesh, batch, length, memory, rate)
    return run._replace(remat="layers", flash_2=True, reasons=reasons)


def _staged(name: str, what: str, batch: int, length: int, memory: float, rate: float) -> Run:
    """A run with 8 stages and 8 ranks that share layers, on 512 ranks."""
    reasons = ("a", "b", "c", "f")
    run = _large(name, what, "405b-stages", "fsdp=8,pp=8,tp=8", batch, length, memory, rate, *reasons)
    return run._replace(microbatches=8, stage=2)


def _llama_3(name: str, what: str, mesh: str, batch: int, flops: float, length: int = 8192) -> Run:
    run = Run(f"llama-3-{name}", f"Llama-3 405B, {what}", "405b", mesh, batch, length)
    rate = flops / (6 * 405.9e9 + 6 * 126 * 16384 * length)
    run = run._replace(rate=rate, hardware="h100-sxm")
    if "pp=" not in mesh:
        return run._replace(remat="layers", reasons=("i",))
    return run._replace(model="405b-stages", microbatches=batch, stage=2, reasons=("f",))


def _long(model: str, mesh: str, data: int, parts: int, length: int, memory: float, rate: float, *reasons: str) -> Run:
    what = f"{model.upper()}, {length:,} tokens in {parts}, compiled, float8"
    return _large(f"{model}-cp{parts}", what, model, mesh.format(data, parts), 1, length, memory, rate, *reasons)


def _h200(ranks: int, memory: float, rate: float) -> Run:
    run = _torchtitan(f"h200-{ranks}", f"H200, {ranks} ranks, compiled, float8", f"fsdp={ranks}", memory, rate)
    return run._replace(hardware="h200", flash_2=False, reasons=("a", "b", "c"))


def _nanotron(ranks: str, mesh: str, batch: int, parts: int, mebibytes: float, rate: float) -> Run:
    run = Run(f"nanotron-{ranks}", f"nanotron 1B, {ranks}", "1b", mesh, batch * parts, 4096, mebibytes / 1024, rate)
    return run._replace(hardware="h100-sxm", microbatches=parts, stage=1, flash_2=True, reasons=("e",))


def _zero(stage: int, mesh: str, gigabytes: float, *reasons: str) -> Run:
    run = Run(f"zero-{stage}", f"ZeRO's figure 1, stage {stage}", "7.5b", mesh, 1, 64, gigabytes / _ZERO)
    return run._replace(hardware="h100-sxm", stage=stage or None, reasons=reasons)


# groups of ranks, ranks that share a row, its tokens, GiB, tokens a second
_LENGTHS_8B = [(4, 2, 65536, 84.2, 2540), (2, 4, 131072, 84.0, 1071), (1, 8, 262144, 84.5, 548)]
_LENGTHS_405B = [
    (32, 2, 65536, 75.9, 47),
    (16, 4, 131072, 77.1, 31),
    (8, 8, 262144, 84.9, 16),
]

RUNS = [
    _torchtitan("8", "8 ranks", "fsdp=8", 82.4, 5762, "a"),
    _torchtitan("8-compile", "8 ranks, compiled", "fsdp=8", 77.0, 6667, "a", "b"),
    _torchtitan("8-float8", "8 ranks, compiled, float8", "fsdp=8", 76.8, 8532, "a", "b", "c"),
    _torchtitan("128", "128 ranks", "fsdp=128", 67.0, 5605, "a"),
    _torchtitan("128-compile", "128 ranks, compiled", "fsdp=128", 62.0, 6514, "a", "b"),
    _torchtitan("128-float8", "128 ranks, compiled, float8", "fsdp=128", 61.8, 8380, "a", "b", "c"),
    _large("32k", "8B, 8 ranks, compiled, float8", "8b", "fsdp=8", 1, 32768, 83.9, 3890, "a", "b", "c"),
    _large("70b", "70B, 256 ranks, compiled, float8", "70b", "fsdp=32,tp=8", 16, 8192, 71.9, 829, "a", "b", "c", "d"),
    _large("70b-async", "70B, the same with AsyncTP", "70b", "fsdp=32,tp=8", 16, 8192, 67.6, 876, "a", "b", "c", "d"),
    *(_long("8b", "fsdp={},sp={}", *each, "a", "b", "c", "h") for each in _LENGTHS_8B),
    _h200(32, 47.96, 10938),
    _h200(64, 46.97, 10753),
    _staged("405b", "405B, 512 ranks, PP 8, 1F1B", 32, 8192, 82.5, 100),
    _staged("405b-turns", "405B, the same interleaved", 32, 8192, 72.7, 128),
    _staged("405b-cp1", "405B, 32,768 tokens in 1, compiled, float8", 8, 32768, 75.3, 76),
    *(_long("405b", "fsdp={},sp={},tp=8", *each, "a", "b", "c", "i") for each in _LENGTHS_405B),
    _llama_3("8192", "8,192 ranks, TP 8 PP 16", "fsdp=64,pp=16,tp=8", 32, 430e12),
    _llama_3("16384", "16,384 ranks, TP 8 PP 16", "fsdp=128,pp=16,tp=8", 16, 400e12),
    _llama_3("cp16", "16,384 ranks, CP 16 TP 8 PP 16", "fsdp=128,sp=16,tp=8", 1, 380e12, 131072),
    _nanotron("dp4 tp2, 8 rows", "fsdp=4,tp=2", 8, 32, 43650.72, 33200),
    _nanotron("dp2 tp4, 8 rows", "fsdp=2,tp=4", 8, 64, 25808.34, 27700),
    _nanotron("dp1 tp8, 8 rows", "fsdp=1,tp=8", 8, 128, 16891.31, 20100),
    _nanotron("dp4 tp4, 16 rows", "fsdp=4,tp=4", 16, 16, 47549, 25400),
    _nanotron("tp4 pp4, 4 rows", "fsdp=1,pp=4,tp=4", 4, 256, 13109, 14700)._replace(reasons=("e", "f")),
    _zero(0, "replica=64,fsdp=1", 120.0),
    _zero(1, "fsdp=64", 31.4),
    _zero(2, "fsdp=64", 16.6, "g"),
    _zero(3, "fsdp=64", 1.9, "g"),
]

REASONS: dict[str, str] = {
    "a": "torchtitan publishes what the allocator has reserved, and a plan counts live tensors. By its code, "
    "torchtitan's loss also holds three float32 tensors of the size of the logits, and fzero's one and "
    "one in bfloat16: 11.7 GiB more at 2 x 8192 tokens, 23.5 at 32768. It keeps the last product of each "
    "layer, which no backward pass reads (4.0 GiB, not when compiled), and the gathered embedding (1.0). "
    "With these the live tensors are 68 of 82.4 GiB on 8 ranks, and 58 of 67.0 on 128. The rest may "
    "be memory that is reserved and not live; this is not measured. Plans take the flops of the data sheet "
    "of SXM. torchtitan's GPUs had a limit of 500 W, and its page says that their peak lies between SXM and "
    "NVL and is not known.",
    "b": "compiled layers, whose elementwise operations are fused. A plan reckons each operation by itself.",
    "c": "matrix products in float8. A plan multiplies in bfloat16.",
    "d": "At 70B a plan has 20.0 GiB of inputs of layers, 11.7 of logits of a rank's places, in float32 and once in "
    "bfloat16, and 3.1 of state, of 36.1 GiB. What else the allocator of the run had reserved is not known.",
    "e": "nanotron publishes a peak, and does not say of what. Its attention and norms are fused. The plans are 2.6 to "
    "8.9 GiB below it where no stages are, which was not looked into.",
    "f": "a pipeline. The plan has the mesh, the rows and the kept weights of the run, and microbatches that are "
    "assumed: 8 (torchtitan), one row each (Meta); those of nanotron are published. fzero's stages differ "
    "from the run's. Each is computed again, and with remat layers each layer once more; Meta computed "
    "nothing again. There are no interleaved rounds in fzero.hf.parallel: with 8 microbatches 7 of 15 ticks "
    "are a bubble, with 32 on 16 ranks 15 of 47. Ranks that share layers have whole rows between them, "
    "because stages have no sequence-parallel: of 38.3 s of Meta's run on 8,192 ranks 15.4 are matrix "
    "products, 11.3 other operations, eager, and 11.6 waiting, for sums that travel in float32. Rows of all "
    "microbatches stand on each rank before and behind the layers, several times in float32: with nanotron's "
    "1,024 rows these and the logits are 171.0 GiB.",
    "i": "a pipeline beside parts of a sequence, which fzero.hf.parallel refuses. The run had 8 stages "
    "(torchtitan) or 16 (Meta), and the plan cuts weights over all ranks in their place, each of which is "
    "gathered where it is used. A stage holds its weights and gradients whole, and inputs of several "
    "microbatches.",
    "h": "parts of a sequence. The run rotates keys and values from rank to rank, and a plan exchanges heads. A plan "
    "counts the pairs below the diagonal, of all ranks alike, and at 131,072 and 262,144 tokens it is 1.6 and 1.75 "
    "times as fast as the run: the figures are not reconciled. Its state is cut over the groups alone: "
    "45 GiB at 2 groups, and 90 at one.",
    "g": "the figure has model states alone. The peak of a plan has the float32 gradients of two layers on "
    "their way (1.6 GB), the gathered weights, and the gradient of the embedding besides. State and its "
    "slices of gradients alone are 1.87 GB at stage 3.",
}

LACKS = [
    "Interleaved stages: torchtitan's are planned as its 1F1B. Stages beside parts of a sequence: planned without (i).",
    "ALST: its longest lengths have no bytes or seconds, the optimizer is on the host, and ranks share rows.",
    "torchtitan's asynchronous TP of 2025-06: the figures are a picture.",
]
