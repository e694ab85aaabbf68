"""What operations need while they run: measured without data, and counted in a program's memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fzero
from fzero import ops, passes
from fzero.variants.int8_mean import int8_mean


def test_temporaries_are_counted_beside_operands_and_results() -> None:
    def scale(x: Tensor, y: Tensor) -> Tensor:
        wide = x.double()  # 800 B
        return (wide * 2 + y).float()  # 800 B, 800 B while the product is alive, and then the result, 400 B

    assert ops.measure_scratch(scale, torch.ones(100), torch.ones(100)) == 3 * 800 - 400
    assert ops.measure_scratch(lambda pair: pair[0].view(-1), [torch.ones(4), torch.ones(4)]) == 0
    assert ops.measure_scratch(lambda x: x + 1, torch.ones(4)) == 0


def test_a_program_counts_them_where_an_operation_runs_and_where_it_is_waited_for() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    params, x = fzero.partition({"w": torch.ones(64, 64)}, mesh), torch.ones(2, 64)

    chosen = passes.insert(passes.defaults(stage=3), int8_mean, before="prefetch")
    step = fzero.simulate(fzero.grad(lambda p, x: (x @ p["w"]).square().mean()), mesh, passes=chosen)
    program = step.trace(params, x)
    (pack,) = (node for node in program.graph.nodes if getattr(node.target, "__name__", "") == "int8_pack")
    needs = ops.record(pack).scratch(program, pack)  # type: ignore[misc]
    assert needs == 11 * 64 * 64  # padded, divided and rounded float32 numbers, of which the codes are the result
    gradient, slices, batch, codes = 4 * 64 * 64, 2 * 64 * 64, 4 * 64, 2 * (2048 + 4 * 8)
    memory = program.memory()
    assert (memory.peak, memory.at) == (needs + gradient + slices + batch + codes, "int8_pack")
    (exchange,) = pack.users
    ((waits, needs),) = ((x, ops.record(exchange).scratch(program, exchange)) for x in exchange.users)  # type: ignore
    assert memory.timeline[list(program.graph.nodes).index(waits)] >= needs >= 4 * 64 * 64


def test_a_rule_that_gives_no_bytes_is_named() -> None:
    needy = ops.define("needy", like=ops.wait, scratch=lambda program, node: "much")
    with pytest.raises(fzero.FzeroError, match="operation 'needy': its scratch gives 'much'; let it give a number"):
        ops.record(needy).scratch(None, None)  # type: ignore
