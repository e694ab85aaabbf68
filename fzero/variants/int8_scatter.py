"""Gradients as block-wise int8 with error feedback: ZeRO++ (arXiv:2306.10209) and 1-bit Adam (arXiv:2102.02888)."""

from functools import partial
from operator import getitem
from typing import Any

import torch

from fzero import FzeroError, Program, ops
from fzero.variants.quantization import count_bytes, dequantize, quantize


def int8_scatter(program: Program) -> Program:
    """Scatter every gradient as int8, by an all-to-all, and take the mean in float32 on each rank.

    Each rank keeps its rounding error as state of the step, 0 for what is not finite, for its next gradient.

    Raises:
        FzeroError: on a mesh of several axes, where nothing is scattered, and where a loop scatters.
    """
    program, world = program.copy(), program.mesh.size()
    scatters = program.graph.find_nodes(op="call_function", target=ops.reduce_scatter)
    if len(program.mesh.names) > 1 or not (scatters or program.is_body):
        problem = f"finds {len(scatters)} reduce-scatters on {program.mesh}"
        raise FzeroError("pass 'int8_scatter'", problem, "put it behind the pass bucket, on a mesh of one axis")
    for number, node in enumerate(scatters):
        fulls, bucket, leaves, numel = node.args
        path = f"int8_error.{number}.{bucket}"
        program, error = program.add_state(path, (world, world * numel), torch.float32)
        with program.graph.inserting_before(node):
            both = program.emit(add_error, fulls, bucket, leaves, error, numel)
            packed, left = program.emit(getitem, both, 0), program.emit(getitem, both, 1)
            program.substitute(node, program.emit(exchange, packed, bucket, leaves, numel, node.meta["val"].dtype))
        program.return_state(path, left)
    return program


def _add_error(program: Program, node: Any, fulls: Any, bucket: str, leaves: Any, error: Any, numel: int) -> list[Any]:
    rows = (ops.pack_leaves(fulls, program.wire_of(node)) + error).view(-1, numel)  # [N, S]
    packed = quantize(rows)
    return [packed.view(-1), (rows - dequantize(packed, numel)).nan_to_num(0, 0, 0).view(-1)]


def _exchange(program: Program, packed: Any, bucket: str, leaves: Any, numel: int, dtype: torch.dtype) -> Any:
    received = yield ops.AllToAll(f"int8 reduce_scatter of {bucket}", program.mesh.shard_axis, packed)
    return dequantize(received.view(-1, count_bytes(numel)), numel).mean(0).to(dtype)


add_error = ops.define(
    "int8_add_error", names="leaves", perform=lambda program, node, rank: partial(_add_error, program, node),
    fake=lambda fulls, bucket, leaves, error, numel: [quantize(error.view(-1, numel)).view(-1), error.clone()],
    kind=lambda walk, node: [walk.per_rank, walk.of(node.args[3])],
)  # fmt: skip
exchange = ops.define(
    "int8_reduce_scatter", like=ops.reduce_scatter, perform=lambda program, node, rank: partial(_exchange, program),
    fake=lambda packed, bucket, leaves, numel, dtype: packed.new_empty(numel, dtype=dtype),
    kind=lambda walk, node: ops.Buffer(False, node.args[1], tuple(node.args[2])), check=lambda program, node: None,
    moves=lambda program, node: [ops.Comm("all_to_all", program.mesh.shard_axis, node.args[1], torch.uint8,
                                          program.mesh.size() * count_bytes(node.args[3]))],
)  # fmt: skip
