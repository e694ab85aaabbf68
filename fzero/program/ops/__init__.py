"""The operations of a program that are not aten's, each with its record. One file for each family.

Nodes call the targets `ops.gather`, `ops.wait` and so on. `ops.record(node)` is the record of the operation that a node
calls. `ops.define(...)` adds an operation from outside of the package (docs/passes.md).
"""

from fzero.layout.buffers import block_of as pack_slices
from fzero.layout.buffers import blocks_of as pack_leaves
from fzero.layout.buffers import leaves_of as unpack_leaves
from fzero.layout.buffers import padding_of as padding_mask
from fzero.program.arguments import BucketMove, BufferView, Item, LeafMove, Reduction
from fzero.program.comm import Comm
from fzero.program.kinds import RAGGED, UNIFORM, Buffer, Slice
from fzero.program.operation import NO_WORK, Operation, Work
from fzero.program.ops.attention import flex_attention, flex_attention_backward
from fzero.program.ops.blocks import all_to_all_rows, gather_rows, ppermute_rows, psum_scatter_rows, ragged_rows
from fzero.program.ops.buckets import all_gather, part, reduce_scatter, wait, whole
from fzero.program.ops.draws import draw
from fzero.program.ops.leaves import beside, gather, scatter, spread, take
from fzero.program.ops.loops import Loop, loop
from fzero.program.ops.losses import ctc_loss, ctc_loss_backward, log_softmax_, nll_gradient_
from fzero.program.ops.owners import from_owners, orthogonalize, to_owners
from fzero.program.ops.quantized import dequantize, scale_by_adam8bit
from fzero.program.ops.reductions import all_reduce, all_reduce_list, axis_index
from fzero.program.ops.streams import cut, join
from fzero.program.ops.transfers import arrive, read, to_device, to_device_, to_host, write, write_
from fzero.program.ops.turns import copy_body, map_bodies, return_rows, take_rows
from fzero.program.ops.updates import UPDATES
from fzero.program.records import define, is_call, record
from fzero.program.scratch import measure_scratch
from fzero.ranks.exchanges import AllGather, AllReduce, AllToAll, ReduceScatter

adamw, adamw_ = UPDATES["adamw"]
"""`adamw(params, grads, mu, nu, count, rate, b1, b2, eps, weight_decay) -> (params, mu, nu)`."""
adagrad, adagrad_ = UPDATES["adagrad"]
"""`adagrad(params, grads, sums, rate, eps, weight_decay) -> (params, sums)`."""
momentum, momentum_ = UPDATES["momentum"]
"""`momentum(params, grads, traces, rate, momentum, nesterov, weight_decay) -> (params, traces)`."""
sgd, sgd_ = UPDATES["sgd"]
"""`sgd(params, grads, rate, weight_decay) -> (params,)`."""

__all__ = [
    "NO_WORK",
    "RAGGED",
    "UNIFORM",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "BucketMove",
    "Buffer",
    "BufferView",
    "Comm",
    "Item",
    "LeafMove",
    "Loop",
    "Operation",
    "ReduceScatter",
    "Reduction",
    "Slice",
    "Work",
    "adagrad",
    "adagrad_",
    "adamw",
    "adamw_",
    "all_gather",
    "all_reduce",
    "all_reduce_list",
    "all_to_all_rows",
    "arrive",
    "axis_index",
    "beside",
    "copy_body",
    "ctc_loss",
    "ctc_loss_backward",
    "cut",
    "define",
    "dequantize",
    "draw",
    "flex_attention",
    "flex_attention_backward",
    "from_owners",
    "gather",
    "gather_rows",
    "is_call",
    "join",
    "log_softmax_",
    "loop",
    "map_bodies",
    "measure_scratch",
    "momentum",
    "momentum_",
    "nll_gradient_",
    "orthogonalize",
    "pack_leaves",
    "pack_slices",
    "padding_mask",
    "part",
    "ppermute_rows",
    "psum_scatter_rows",
    "ragged_rows",
    "read",
    "record",
    "reduce_scatter",
    "return_rows",
    "scale_by_adam8bit",
    "scatter",
    "sgd",
    "sgd_",
    "spread",
    "take",
    "take_rows",
    "to_device",
    "to_device_",
    "to_host",
    "to_owners",
    "unpack_leaves",
    "wait",
    "whole",
    "write",
    "write_",
]
