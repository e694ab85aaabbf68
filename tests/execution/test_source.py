"""Source: the function of a linked program."""

from __future__ import annotations

import gc
import linecache
import math
import operator

import pytest
import torch
from torch import fx

from fzero.execution.source import Expression, FunctionSource


def test_values_may_have_the_names_of_parameters() -> None:
    """A pass may name its state "seed"."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("calls", "seed", "numbers", "add_0")]
    total = graph.call_function(torch.add, (nodes[0], nodes[1]), name="total")
    graph.output([total, *nodes[1:]])
    source = FunctionSource("step", graph)
    for node in nodes:
        source.take(node)
    source.set(total, source.call_target(total.target, total.args, total.kwargs))
    source.give_back([Expression(source.seed), *graph.find_nodes(op="output")[0].args[0]])
    assert source.make()(None, 7, (), 1, 2, 3, 4) == [7, 3, 2, 3, 4]


ARGUMENTS = {
    "numbers": (1, -2.5, True, None, "text", 1 + 2j),
    "no finite numbers": (math.inf, -math.inf),
    "objects": (torch.float32, torch.device("cpu"), torch.strided, torch.contiguous_format),
    "structures": ([1, (2,), {"k": [3]}], (), slice(1, None, 2), torch.Size([2, 3])),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_written_as_they_are(name: str) -> None:
    graph = fx.Graph()
    graph.output(None)
    source = FunctionSource("step", graph)
    source.give_back(list(ARGUMENTS[name]))
    made = source.make()(None, None, ())
    assert made == list(ARGUMENTS[name]) and list(map(type, made)) == list(map(type, ARGUMENTS[name]))


def test_a_value_is_dropped_at_its_last_use() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    pair = graph.call_function(divmod, (x, 2), name="pair")
    first = graph.call_function(operator.getitem, (pair, 0), name="first")
    unused = graph.call_function(operator.getitem, (pair, 1), name="unused")
    graph.output([first])
    source = FunctionSource("step", graph)
    source.take(x)
    for node in (pair, first, unused):
        source.set(node, source.call_target(node.target, node.args, node.kwargs))
    source.give_back([first])
    function = source.make()
    lines = linecache.getlines(function.__code__.co_filename)
    assert [line.partition(";  ")[2].strip() for line in lines[1:4]] == ["x = None", "", "pair = unused = None"]
    assert function(None, None, (), 7) == [3]


def test_the_lines_of_a_function_go_with_it() -> None:
    graph = fx.Graph()
    graph.output(None)
    source = FunctionSource("step", graph)
    source.give_back(None)
    function = source.make()
    file = function.__code__.co_filename
    assert file in linecache.cache
    del function
    gc.collect()
    assert file not in linecache.cache
