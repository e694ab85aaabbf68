"""Parallel: layers whose parts ranks compute along a mesh axis. Each is a function of public names of fzero.

In: tensors and split leaves of a step, as this rank has them. Out: tensors, with the axis along which they differ in
the docstring. Outside of `shard` an axis has one rank, so each function is the layer of one device.

The files: `linear` (column, row), `vocabulary` (embedding, cross entropy), `routing` (experts), `sequences` (ulysses,
ring_attention), `stages` (pipeline). `ragged_all_to_all` is the collective under `experts`.
"""

from fzero.parallel.linear import column, row
from fzero.parallel.routing import experts
from fzero.parallel.sequences import order_rows, ring_attention, ulysses
from fzero.parallel.stages import pipeline
from fzero.parallel.vocabulary import vocab_cross_entropy, vocab_embedding
from fzero.values.ragged import ragged_all_to_all

__all__ = [
    "column",
    "experts",
    "order_rows",
    "pipeline",
    "ragged_all_to_all",
    "ring_attention",
    "row",
    "ulysses",
    "vocab_cross_entropy",
    "vocab_embedding",
]
