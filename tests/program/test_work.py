"""Work: flops and bytes of operations, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import MESH, Case, apply, calls, on_ones, trained
from torch import Tensor, fx
from torch.nn import functional

import fzero
from fzero import optim
from fzero.passes import bucket, fuse
from fzero.program import ops
from fzero.program.program import Program
from fzero.program.records import name_of
from fzero.program.work import Work, find_device_type, work


def traced(step: Callable[..., Any], *shapes: tuple[int, ...]) -> Program:
    """`step` of float32 batches of these shapes."""
    return Case(step, MESH, tuple(torch.ones(2 * rows, *shape) for rows, *shape in shapes)).trace()


def node_named(program: Program, name: str) -> fx.Node:
    (node,) = [node for node in program.graph.nodes if node.op == "call_function" and name_of(node) == name]
    return node


PRODUCTS = {
    "mm": (torch.mm, [(2, 3), (3, 5)], 2 * 2 * 3 * 5, 6 + 15 + 10),
    "addmm": (torch.addmm, [(5,), (2, 3), (3, 5)], 2 * 2 * 3 * 5, 5 + 6 + 15 + 10),
    "bmm": (torch.bmm, [(4, 2, 3), (4, 3, 5)], 4 * 2 * 2 * 3 * 5, 4 * (6 + 15 + 10)),
    "baddbmm": (torch.baddbmm, [(4, 2, 5), (4, 2, 3), (4, 3, 5)], 4 * 2 * 2 * 3 * 5, 4 * (10 + 6 + 15 + 10)),
    "convolution": (functional.conv1d, [(1, 2, 6), (3, 2, 3)], 2 * 4 * 3 * 2 * 3, 12 + 18 + 12),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    step, shapes, flops, elements = PRODUCTS[name]
    assert work(node_named(traced(step, *shapes), name)) == Work(flops, 4 * elements)


@pytest.mark.parametrize(
    ("heads", "is_causal", "keys", "pairs"), [(1, False, 8, 64), (2, True, 8, 36), (2, True, 4, 26), (2, True, 16, 36)]
)
def test_attention_is_two_products_and_five_backward(heads: int, is_causal: bool, keys: int, pairs: int) -> None:
    """Also with fewer heads of keys and values, which torch's formula takes since 2.13. Causal attention counts the
    pairs of a query with keys up to its own place."""

    def step(q: Tensor, k: Tensor, v: Tensor) -> Any:
        attend = functional.scaled_dot_product_attention
        return torch.func.grad(lambda q: attend(q, k, v, is_causal=is_causal, enable_gqa=True).sum())(q)

    program = traced(step, (1, 2, 8, 4), *[(1, heads, keys, 4)] * 2)
    product = 2 * 2 * pairs * 4  # of 2 heads
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert work(node_named(program, name)).flops == 2 * product
    assert work(node_named(program, f"{name}_backward")).flops == 5 * product
    fused = [work(node) for node in program.graph.nodes if "attention" in node.name]
    assert sum(done.attention for done in fused) == 7 * product == sum(done.flops for done in fused)


def test_what_is_no_product_moves_bytes() -> None:
    assert work(node_named(traced(torch.add, (2, 3), (3,)), "add")) == Work(0, 4 * (6 + 3 + 6))


def test_views_are_no_work() -> None:
    program = traced(lambda x: x.t().view(3, 2)[0], (2, 3))
    assert {work(node) for node in program.graph.nodes} == {Work(0, 0)}


def test_what_is_written_in_place_is_read_and_written() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        return (x * 2).add_(y)

    assert work(node_named(traced(step, (2, 3), (3,)), "add_")) == Work(0, 4 * (6 + 3 + 6))


def test_an_embedding_reads_only_the_rows_that_it_takes() -> None:
    def step(table: Tensor, x: Tensor) -> Tensor:
        return functional.embedding(x.to(torch.int64), table)

    assert work(node_named(traced(step, (100, 3), (5,)), "embedding")) == Work(0, 4 * 15 + 8 * 5 + 4 * 15)


def gradient(device: str = "cpu", **shapes: tuple[int, ...]) -> Program:
    """The gradients of the leaves of one bucket."""
    params = {"layer": {name: torch.ones(shape, device=device) for name, shape in shapes.items()}}

    def step(params: Any, x: Tensor) -> Any:
        return fzero.grad(lambda params: sum((x @ leaf).sum() for leaf in params["layer"].values()))(params)

    held = fzero.partition(params, MESH)
    return fzero.simulate(step, MESH, passes=(bucket,)).trace(held, torch.ones(4, 4, device=device))


def test_leaves_are_packed_to_be_scattered_but_on_cpu() -> None:
    for device, packed in (("meta", 2 * 4 * (16 + 32)), ("cpu", 0)):
        (scatter,) = calls(gradient(device, v=(4, 4), w=(4, 8)), ops.reduce_scatter)
        assert work(scatter) == Work(0, packed)


def test_slices_are_read_and_cast_to_be_gathered() -> None:
    def step(params: Any, x: Tensor) -> Tensor:
        return x @ params["w"].to(torch.bfloat16)

    program = apply(on_ones(lambda params, x: step(params, x.bfloat16()), {"w": torch.ones(4, 8)}).trace(), bucket)
    assert work(node_named(program, "all_gather")) == Work(0, 16 * 4 + 16 * 2)


def test_a_leaf_alone_is_scattered_as_it_is() -> None:
    for node in calls(gradient("meta", w=(4, 8)), ops.reduce_scatter, ops.all_gather, ops.wait, ops.whole, ops.part):
        assert work(node) == Work(0, 0)


def test_a_fused_update_reads_four_lists_and_writes_three() -> None:
    optimizer = optim.adamw(0.1)

    case = trained(optimizer, {"w": torch.ones(4, 8)}, MESH, lambda p, x: (x @ p["w"]).sum(), width=4)
    (call,) = calls(apply(case.trace(), fuse), ops.adamw)
    count = 4
    assert work(call) == Work(0, (4 + 3) * 4 * 16 + count)


def test_device_type() -> None:
    assert find_device_type(traced(torch.add, (2, 3), (3,)).graph) == "cpu"
    assert find_device_type(fx.Graph()) == "cpu"
