"""Metrics of a run while it trains, by torchtitan's names, from the program's own flops, to files and services.

In: what a step returns, its program, and times that are taken here. Out: numbers that are the same on all ranks, which
one rank writes; and traces of a profiler, with what was predicted beside what was measured. docs/metrics.md has a row
for each name. Imported by name: `import fzero.metrics`.
"""

from fzero.metrics.meter import Meter
from fzero.metrics.progress import progress
from fzero.metrics.sinks import Sink, Write, console, jsonl, mlflow, tensorboard, wandb
from fzero.metrics.traces import export_trace

__all__ = ["Meter", "Sink", "Write", "console", "export_trace", "jsonl", "mlflow", "progress", "tensorboard", "wandb"]
