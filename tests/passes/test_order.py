"""The default passes and their order, and the order of a graph's nodes after a pass."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from programs import MESH, calls, differentiated, layers, loss, names, on_rows
from torch import Tensor, fx

import fzero
from fzero import FzeroError, tree
from fzero.passes import bucket, defaults
from fzero.passes.order import (
    count_depths,
    find_dependences,
    find_mutable,
    find_origins,
    list_uses,
    reorder,
    restore_order,
    sink_gathers,
)
from fzero.program import ops
from fzero.program.program import Program
from fzero.program.records import name_of

FIRST = "accumulate cast_gradients bucket coalesce release defer fuse skip relieve split offload prefetch reuse"
LAST = "donate verify"


@pytest.mark.parametrize(
    ("stage", "in_place", "expected"),
    [
        (1, True, f"rematerialize hoist {FIRST} {LAST}"),
        (2, True, f"rematerialize hoist {FIRST} {LAST}"),
        (3, False, f"rematerialize {FIRST} verify"),
    ],
)
def test_passes_of_shard(stage: int, in_place: bool, expected: str) -> None:
    passes = defaults(stage=stage, in_place=in_place)
    assert [getattr(each, "func", each).__name__ for each in passes] == expected.split()
    staged = {each.func.__name__: each.keywords for each in passes if isinstance(each, functools.partial)}
    kept = {"stage": stage, "keep": frozenset()}
    named = {"accumulate": {"stage": stage}, "release": kept, "verify": kept}
    assert staged == named | {"cast_gradients": {"dtype": None}}


def test_a_node_uses_gathered_leaves_in_the_order_of_its_operands() -> None:
    """Else copies of all-gathers have other names in each process, and ranks take that for other programs."""
    params = {"layers": {str(i): {"w": torch.ones(4)} for i in range(7)}}

    def step(params: Any, x: Tensor) -> Tensor:
        return (torch.cat([params["layers"][str(i)]["w"] for i in (3, 0, 5, 1, 6, 2, 4)]) * x.sum()).sum()

    program = fzero.simulate(step, MESH).trace(fzero.partition(params, MESH), torch.ones(2))
    origin = find_origins(program.graph, "gathered")
    ((node, runs),) = list_uses(program, origin)
    assert list(runs) == [origin[x] for x in node.all_input_nodes] and len(runs) == 7


def graph_of(**inputs: str) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """A graph of nodes by name, each with the names of its inputs: `x=""` is a placeholder, the last is the output."""
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for name, given in inputs.items():
        args = tuple(nodes[source] for source in given.split())
        if not args:
            nodes[name] = graph.placeholder(name)
        elif name == "out":
            nodes[name] = graph.output(args)
        else:
            nodes[name] = graph.create_node("call_function", max, args, name=name)
    return graph, nodes


def order(graph: fx.Graph) -> str:
    return " ".join(node.name for node in graph.nodes).removesuffix(" output")


def test_hops_count_along_the_longest_path() -> None:
    graph, nodes = graph_of(x="", a="x", b="a", far="b", near="x", out="near far a")
    counted = {"a", "far", "near"}
    depth = count_depths(graph, {nodes[name] for name in counted}, {})
    assert {name: depth[node] for name, node in nodes.items()} == {
        "x": 0, "a": 1, "b": 1, "far": 2, "near": 1, "out": 2
    }  # fmt: skip


def test_settling_moves_what_stands_before_an_input_right_behind_the_last_of_them() -> None:
    graph, nodes = graph_of(x="", a="x", d="a", b="x", c="a b", e="c d", out="e")
    nodes["a"].append(nodes["c"])
    assert order(graph) == "x a c d b e"
    restore_order(graph)
    assert order(graph) == "x a d b c e"
    graph.lint()


def test_settling_moves_a_chain_in_its_order() -> None:
    graph, nodes = graph_of(x="", late="x", a="late", b="a x", other="x", out="b other")
    nodes["b"].append(nodes["late"])
    assert order(graph) == "x a b late other"
    restore_order(graph)
    assert order(graph) == "x late a b other"


def test_settling_leaves_the_rest_as_it_was_and_drops_what_has_no_use() -> None:
    graph, _ = graph_of(x="", y="", b="x", unused="x", a="y", also="unused", c="a b", out="c")
    restore_order(graph)
    assert order(graph) == "x y b a c"


def test_rearranging_puts_the_output_last() -> None:
    graph, nodes = graph_of(x="", a="x", b="x", out="a b")
    reorder(graph, [nodes[name] for name in ("x", "b", "a", "out")])
    assert order(graph) == "x b a" and next(iter(reversed(graph.nodes))).op == "output"


def traced(step: Any) -> Program:
    """The program of `step(params, x)` with params of two layers, a bucket at a time."""
    return bucket(on_rows(step, layers(2)).trace())


def test_what_is_derived_from_one_gather_is_known_by_it() -> None:
    def step(params: tree.Tree, x: Tensor) -> tuple[Tensor, ...]:
        first, second = (layer["w"].full_tensor() for layer in params["layers"])
        return first.t().to(torch.float64) @ second.double(), second.sin(), torch.cat([first, second])

    program = traced(step)
    origin = find_origins(program.graph, "gathered")
    first, second = calls(program, ops.all_gather)
    assert [sorted(node.name for node, start in origin.items() if start is each) for each in (first, second)] == [
        ["_to_copy", "all_gather", "t", "wait", "whole"],
        ["_to_copy_1", "all_gather_1", "wait_1", "whole_1"],
    ]


def test_what_is_derived_from_one_scatter_is_known_by_it() -> None:
    program = bucket(differentiated(loss, layers(2), MESH).trace())
    origin = find_origins(program.graph, "scattered")
    for start in calls(program, ops.reduce_scatter):
        derived = [name_of(node) for node, each in origin.items() if each is start]
        assert derived == ["reduce_scatter", "wait", "part", "part"]
    assert len(set(origin.values())) == 2


def test_what_is_overwritten_is_no_copy_of_a_gathered_leaf() -> None:
    def step(params: tree.Tree, x: Tensor) -> Tensor:
        copy = params["layers"][0]["w"].full_tensor().clone()
        return copy.mul_(2) @ x.T

    program = traced(step)
    assert {name_of(node) for node in find_origins(program.graph, "gathered")} == {"all_gather", "wait", "whole"}


def test_gathers_sink_to_their_first_use_with_what_is_derived_from_them() -> None:
    def step(params: tree.Tree, x: Tensor) -> Tensor:
        first, second = (layer["w"].full_tensor().t() for layer in params["layers"])
        y = x.sin() @ first
        return (y.cos() @ second) @ first

    program = traced(step)
    starts = calls(program, ops.all_gather)
    starts[0].append(starts[1])
    restore_order(program.graph)
    sink_gathers(program.graph)
    chain = ["all_gather", "wait", "whole", "t"]
    assert names(program) == ["sin", *chain, "mm", "cos", *chain, "mm", "mm"]


def test_a_gather_that_nothing_uses_is_dropped() -> None:
    program = traced(lambda params, x: (x @ params["layers"][0]["w"], params["layers"][1]["w"].full_tensor() * 2))
    program.output.args = (program.output.args[0][:1],)
    sink_gathers(program.graph)
    assert names(program) == ["all_gather", "wait", "whole", "mm"]


def test_what_reads_memory_keeps_its_place_among_what_writes_to_it() -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        y, late = x * 2, x.sin()
        before = y + late
        view = y.t()
        y.add_(1.0)
        return before, view, y.cos(), x.exp(), x.neg()

    program = on_rows(step).trace()
    (late,) = calls(program, torch.ops.aten.sin.default)
    calls(program, torch.ops.aten.exp.default)[0].append(late)
    restore_order(program.graph)
    assert names(program) == ["mul", "t", "exp", "sin", "add", "add_", "cos", "neg"]


def test_what_nobody_reads_is_not_written() -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        read, unread = torch.zeros(5), torch.zeros(5)
        view = read[1:]
        unread.add_(x[0])
        view.add_(x[0, 1:])
        unread[:2].mul_(2.0)
        result = read * 2
        view.zero_()  # behind the last read
        return (result,)

    assert names(on_rows(step).trace()) == ["zeros", "slice", "select", "slice", "add_", "mul"]


def test_a_write_into_what_is_returned_is_kept() -> None:
    def step(x: Tensor) -> Tensor:
        result = x * 2
        result.t()[0].zero_()
        return result

    assert names(on_rows(step).trace())[-1] == "zero_"


def test_a_cycle_is_an_error() -> None:
    graph, nodes = graph_of(x="", a="x", b="a", out="b")
    nodes["a"].args = (nodes["b"],)
    with pytest.raises(FzeroError, match="depends on itself, through a value or through memory"):
        restore_order(graph)


def test_depths_count_along_memory() -> None:
    def step(x: Tensor) -> Tensor:
        buffer = torch.zeros(5)
        buffer.copy_(x.sin()[0])
        first = buffer.cos()
        buffer.copy_(x.exp()[0])
        return first + buffer.cos()

    program = on_rows(step).trace()
    copies = {node for node in program.graph.nodes if name_of(node) == "copy_"}
    depth = count_depths(program.graph, copies, find_dependences(find_mutable(program.graph)))
    assert [depth[node] for node in calls(program, torch.ops.aten.cos.default)] == [1, 2]
    assert [depth[node] for node in calls(program, torch.ops.aten.exp.default)] == [0]
