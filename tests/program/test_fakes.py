"""Fakes: values of known form are those that torch would return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fzero
from fzero import tree
from fzero.base.torch_private import FakeTensorMode, storage_key
from fzero.program.fakes import copy_form, repeat_value, view_first
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.tracing.trace import trace

SHAPES = [[], [5], [2, 3, 4], [3, 0, 2], [0], [7, 1, 3]]


def attend(p: tree.Tree, x: Tensor) -> Tensor:
    """Views, lists of views, several results, broadcasts, casts, a draw, a write, and a result that is an operand."""
    q, k, v = (x @ p["qkv"]).chunk(3, -1)
    heads = [y.unflatten(-1, (2, -1)).transpose(1, 2) for y in (q, k, v)]
    y = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
    y = functional.dropout(functional.layer_norm(y, y.shape[-1:]), 0.1) + x.mean(0).expand(x.shape)
    y = y.contiguous().clone().add_(1.0)[:, ::2]
    return torch.var_mean(y.double().half().float(), -1)[0].max(-1).values.sum()


def train(p: tree.Tree, x: Tensor) -> tuple[tree.Tree, Tensor]:
    value, grads = fzero.value_and_grad(attend)(p, x)
    return tree.map(lambda x, grad: x - 0.1 * grad, p, grads), value


def trace_step() -> Program:
    mesh = fzero.VirtualMesh(fsdp=2)
    params = fzero.partition({"qkv": torch.ones(8, 24)}, mesh)
    return trace(train, (params, torch.ones(4, 6, 8)), mesh)


def describe(value: Any, operands: list[Tensor]) -> Any:
    """The form of a value, and which operand's memory it lies in."""
    if isinstance(value, (list, tuple)):
        return [describe(x, operands) for x in value]
    if not isinstance(value, Tensor):
        return value
    within = [i for i, x in enumerate(operands) if storage_key(x) == storage_key(value)]
    size = None if within else value.untyped_storage().nbytes()
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, within, size


def values_of(nodes: list[Node]) -> list[Tensor]:
    return [x.meta["val"] for x in nodes if isinstance(x.meta["val"], Tensor)]


def test_a_repeated_node_has_the_value_of_its_operation() -> None:
    """All of a step, once more in other memory."""
    program, known = trace_step(), 0
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    with program.graph.inserting_before(program.output):
        news = {node: program.emit(torch.ops.aten.clone.default, node) for node in program.placeholders}
        for node in nodes:
            news[node] = program.repeat(node, lambda x: news[x])
            operands = values_of(news[node].all_input_nodes)
            expected = program._fake(news[node].target, news[node].args, news[node].kwargs)
            assert describe(news[node].meta["val"], operands) == describe(expected, operands), node.format_node()
            known += repeat_value(node, news[node]) is not None
    assert known > len(nodes) / 2


def test_operands_of_another_form_are_left_to_the_operation() -> None:
    program = trace_step()
    product = next(node for node in program.graph.nodes if node.target is torch.ops.aten.mm.default)
    with program.graph.inserting_before(product):
        (left, right) = product.args
        turned = program.emit(torch.ops.aten.t.default, right)
        moved = program.emit(torch.ops.aten.clone.default, turned, memory_format=torch.contiguous_format)
        other = program.emit(torch.ops.aten.t.default, moved)
        repeated = program.repeat(product, {left: left, right: other}.__getitem__)
    assert other.meta["val"].stride() != right.meta["val"].stride()
    assert repeat_value(product, repeated) is None and repeated.meta["val"].shape == product.meta["val"].shape


@pytest.mark.parametrize("shape", SHAPES)
def test_a_view_of_the_first_elements(shape: list[int]) -> None:
    with FakeTensorMode():
        flat = torch.empty(100)[3:]
        expected = flat.narrow(0, 0, torch.Size(shape).numel()).view(shape)
        assert describe(view_first(flat, shape), [flat]) == describe(expected, [flat])
    real = torch.arange(100.0)
    assert torch.equal(view_first(real, shape), real[: torch.Size(shape).numel()].view(shape))


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_form_of_a_copy(shape: list[int], is_inference: bool) -> None:
    with torch.inference_mode(is_inference), FakeTensorMode():
        plain = torch.empty(shape, dtype=torch.bfloat16)
        for value in (plain, plain.mT if plain.ndim > 1 else plain[..., None], plain.expand(2, *shape), plain.conj()):
            made, expected = copy_form(value), torch.empty_like(value, memory_format=torch.preserve_format)
            assert describe(made, [value]) == describe(expected, [value])
            assert made.is_inference() == expected.is_inference() == is_inference
