"""`copy_graph` beside torch's own copy."""

from __future__ import annotations

import torch
from torch import fx

from fzero.base.torch_private_functions import copy_graph

_mul = torch.ops.aten.mul.Tensor


def build() -> fx.Graph:
    """x -> [x * 2, relu(x=x * 2)], with a node that was erased."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(_mul, (x, 2))
    graph.erase_node(graph.call_function(_mul, (x, 3)))
    graph.output([product, graph.call_function(torch.relu, kwargs={"input": product})])
    for number, node in enumerate(graph.nodes):
        node.meta["number"] = number
    return graph


def test_a_copy_is_the_graph_and_stands_alone() -> None:
    graph = build()
    copy, expected = copy_graph(graph), fx.Graph()
    expected.output(expected.graph_copy(graph, {}))
    copy.lint()
    assert [node.format_node() for node in copy.nodes] == [node.format_node() for node in expected.nodes]
    assert [node.meta for node in copy.nodes] == [node.meta for node in graph.nodes]
    assert len(copy.nodes) == 4 and len(copy.find_nodes(op="call_function", target=_mul)) == 1
    (product,) = copy.find_nodes(op="call_function", target=_mul)
    product.meta["number"] = None
    with copy.inserting_after(product):
        new = copy.call_function(_mul, (product, 4))
    product.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    assert new.name not in [node.name for node in graph.nodes]
    assert len(graph.nodes) == 4 and graph.find_nodes(op="call_function", target=_mul)[0].meta == {"number": 1}
    assert torch.equal(fx.GraphModule({}, copy)(torch.ones(2))[0], torch.full((2,), 8.0))
