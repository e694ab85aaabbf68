"""Memory: bytes that are alive behind each node, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import apply, on_ones, on_rows
from torch import Tensor

import fzero
from fzero.base.mesh import VirtualMesh
from fzero.passes import bucket
from fzero.program.memory import measure_memory, representative_ranks
from fzero.program.operation import nbytes
from fzero.program.program import Program

F32 = torch.float32


@pytest.mark.parametrize(
    ("value", "size"),
    [(torch.ones(3), 12), ([torch.ones(3), (torch.ones(2, dtype=torch.int8),)], 14), (None, 0), (7, 0)],
)
def test_nbytes(value: Any, size: int) -> None:
    assert nbytes(value) == size


def bucketed(step: Callable[..., Any], mesh: VirtualMesh, *shape: int) -> Program:
    """`step(params, x)` of one leaf `w`, 4 x 4 unless a shape is given, and x [2, 4]."""
    params = {"w": torch.ones(shape or (4, 4))}
    return apply(on_ones(step, params, mesh).trace(), bucket)


def product(params: Any, x: Tensor) -> Tensor:
    return x @ params["w"]


def gradient(params: Any, x: Tensor) -> Any:
    return fzero.grad(lambda p: product(p, x).sum())(params)


def node_by_node(program: Program) -> list[tuple[str, int]]:
    """`(name of the node, bytes alive behind it)`, from the first operation on."""
    nodes = zip(program.graph.nodes, program.memory().timeline, strict=True)
    return [(node.name, alive) for node, alive in nodes if node.op == "call_function"]


def test_memory_of_a_product_on_two_ranks() -> None:
    program = bucketed(product, VirtualMesh(fsdp=2))
    # w: 16 floats, all of them rank 0's, as 16 is the least slice; x: 8 floats; gathered: 2 * 16; product: 8
    assert program.memory().timeline[:2] == [64, 64 + 32]
    assert node_by_node(program) == [
        ("all_gather", 96 + 128),
        ("wait", 96 + 128),
        ("whole", 96 + 128),
        ("mm", 96 + 32),  # the buffer dies here
    ]
    assert program.memory().peak == 96 + 128 + 32 and program.memory().at == "mm"


def test_results_do_not_die() -> None:
    program = bucketed(product, VirtualMesh(fsdp=2))
    assert program.memory().timeline[-1] == 64 + 32 + 32  # w, x, and the product


def test_alone_what_is_gathered_is_the_argument() -> None:
    program = bucketed(product, VirtualMesh(fsdp=1))
    assert node_by_node(program) == [("all_gather", 96), ("wait", 96), ("whole", 96), ("mm", 96 + 32)]
    assert program.memory().peak == 128


@pytest.mark.parametrize("world", [2, 3])
def test_memory_of_a_gradient(world: int) -> None:
    program = bucketed(gradient, VirtualMesh(fsdp=world))
    buffer = world * 64
    assert node_by_node(program) == [
        ("all_gather", 96 + buffer),
        ("wait", 96 + buffer),
        ("whole", 96 + buffer),
        ("mm", 96 + 32),
        ("sum_1", 96 + 4),
        ("ones_like", 96 + 4),
        ("expand", 96 + 4),  # a view
        ("t", 96 + 4),  # a view
        ("mm_1", 96 + 64),
        ("reduce_scatter", 96 + 64 + (world - 1) * 64),  # sent where it lies; a block from each other rank
        ("wait_1", 96 + 64),
        ("part", 96 + 64),
    ]
    assert program.memory().peak == 96 + buffer + 32  # at mm


def test_a_gradient_that_is_a_whole_bucket_is_sent_from_where_it_lies() -> None:
    program = bucketed(gradient, VirtualMesh(fsdp=2), 4, 8)  # 32 elements: no padding
    alive = dict(node_by_node(program))
    assert alive["mm_1"] == 64 + 32 + 128
    assert alive["reduce_scatter"] == 64 + 32 + 128 + 64
    assert program.memory().peak == 64 + 32 + 128 + 64


def test_a_rank_alone_keeps_its_gradients_where_they_lie() -> None:
    alive = dict(node_by_node(bucketed(gradient, VirtualMesh(fsdp=1))))
    assert alive["mm_1"] == alive["reduce_scatter"] == alive["wait_1"] == alive["part"] == 64 + 32 + 64


@pytest.mark.parametrize("world", [1, 2])
def test_a_block_is_cast_into_new_memory(world: int) -> None:
    def narrow(params: Any, x: Tensor) -> Any:
        return fzero.grad(lambda p: product({"w": p["w"].to(torch.bfloat16)}, x.to(torch.bfloat16)).sum())(params)

    *_, (_, sent), (_, waited), (_, taken) = node_by_node(bucketed(narrow, VirtualMesh(fsdp=world)))
    assert sent == 96 + 32 + (world - 1) * 32  # the gradient, and a block from each other rank
    assert waited == taken == 96 + 64


def test_in_place_operations_need_nothing() -> None:
    def step(params: Any, x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1.0)
        return y

    program = bucketed(step, VirtualMesh(fsdp=2))
    assert node_by_node(program) == [("mul", 96 + 32), ("add_", 96 + 32)]


def test_a_view_keeps_what_it_views_alive() -> None:
    def step(params: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        corner = (x * 2)[:1, :1]
        return x + 1, corner

    program = bucketed(step, VirtualMesh(fsdp=2))
    assert max(program.memory().timeline) == 64 + 32 + 32 + 32


def on_two_ranks(step: Callable[..., Any], params: Any) -> Program:
    """`step(params, x)`, x [2, 4]."""
    given = on_rows(step, params, width=4)
    return apply(given.trace(), bucket)


def squares(params: Any, x: Tensor) -> Tensor:
    u, w = (p * p for p in params["layer"].values())
    return x @ u @ w


def test_slices_that_do_not_adjoin_are_packed_into_the_result() -> None:
    program = on_two_ranks(squares, {"layer": {"u": torch.ones(4, 2), "w": torch.ones(2, 4)}})
    alive = dict(node_by_node(program))  # rank 0 has both: 64 arguments, 32 batch, 64 squares, 128 the buffer
    assert alive["mul_1"] == 64 + 32 + 64 and program.memory().peak == 64 + 32 + 64 + 128
    assert alive["all_gather"] == alive["wait"] == 64 + 32 + 128  # the squares have been copied


def test_a_slice_that_is_all_of_a_block_is_sent_from_where_it_lies() -> None:
    program = on_two_ranks(squares, {"layer": {"u": torch.ones(4, 4), "w": torch.ones(4, 4)}})  # u is rank 0's
    alive = dict(node_by_node(program))
    assert alive["all_gather"] == 64 + 32 + 64 + 128 and alive["wait"] == 64 + 32 + 128


def test_slices_are_cast_into_the_result() -> None:
    def step(params: Any, x: Tensor) -> Tensor:
        u, w = (p.to(torch.bfloat16) for p in params["layer"].values())
        return x.to(torch.bfloat16) @ u @ w

    program = on_two_ranks(step, {"layer": {"u": torch.ones(4, 2), "w": torch.ones(2, 4)}})
    # 64 arguments, 32 batch and 16 its cast, and 64 the buffer
    assert dict(node_by_node(program))["all_gather"] == 64 + 32 + 16 + 64


def test_a_leaf_in_two_pieces_of_a_buffer_is_copied() -> None:
    params = {"layer": {"a": torch.ones(12), "w": torch.ones(3, 4)}}  # of w rank 0 has 4, rank 1 the rest
    program = on_two_ranks(lambda params, x: x @ params["layer"]["w"].T, params)
    # 64 arguments, 32 batch, 2 * 64 the buffer of blocks of 16, which dies at `whole`
    nodes, timeline = list(program.graph.nodes), program.memory().timeline
    whole = next(i for i, node in enumerate(nodes) if node.name == "whole")
    assert timeline[whole - 1] == 64 + 32 + 128 and timeline[whole] == 64 + 32 + 48


def test_padding_of_the_block_that_arguments_lie_in_is_counted() -> None:
    program = on_two_ranks(lambda params, x: params["w"] * 1, {"w": torch.ones(3)})
    assert program.memory().timeline[0] == 16 * 4


def test_a_slice_of_a_whole_keeps_that_alive() -> None:
    program = on_two_ranks(lambda params, x: params["w"] * torch.ones(4, 8).cumsum(0), {"w": torch.ones(4, 8)})
    alive = dict(node_by_node(program))
    assert alive["take"] == alive["cumsum"] == alive["mul"] + 128 - 64


def test_memory_is_that_of_the_rank_that_has_most() -> None:
    params = {"layer": {"a": torch.ones(16), "b": torch.ones(12)}}  # a is rank 0's, b rank 1's
    program = on_two_ranks(lambda params, x: [torch.exp(params["layer"]["b"]) for _ in range(3)], params)
    assert program.memory().peak == 64 + 32 + 3 * 12 * 4


def test_of_thousands_of_ranks_those_are_looked_at_whose_slices_differ() -> None:
    program = bucketed(gradient, VirtualMesh(fsdp=4096), 4, 32768)  # of w each rank has 32 elements
    assert representative_ranks(program.layouts.values()) == [0, 1, 4095]
    alive = dict(node_by_node(program))
    assert alive["all_gather"] == 32 * 4 + 32 + 4 * 32768 * 4
    assert alive["part"] == 32 * 4 + 32 + 32 * 4


def test_memory_of_some_ranks() -> None:
    program = on_two_ranks(lambda params, x: [torch.exp(params["w"]) for _ in range(3)], {"w": torch.ones(20)})
    of = [measure_memory(program, [rank]).timeline[-1] for rank in range(2)]
    assert of == [64 + 32 + 3 * 64, 64 + 32 + 3 * 16]  # of 20 elements rank 0 has 16
    assert program.memory().timeline[-1] == of[0]
