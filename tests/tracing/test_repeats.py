"""Repeats: what a trace has seen once is recorded at once. The law is `property_tests/repeats.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fzero
from fzero.base.torch_private import storage_key
from fzero.program.open import find_difference
from fzero.program.program import Program
from fzero.tracing import repeats
from fzero.tracing.repeats import Repeats
from fzero.tracing.trace import trace

MESH, WIDTH = fzero.VirtualMesh(fsdp=2), 8


def program_of(loss_of: Any, *params: Tensor) -> Program:
    def step(params: Any, x: Tensor) -> Any:
        return fzero.value_and_grad(loss_of)(params, x)

    given = fzero.partition(dict(zip("uvw", params)), MESH)
    return trace(step, (given, torch.zeros(2, 3, WIDTH)), MESH)


def list_dispatches(layers: int, monkeypatch: pytest.MonkeyPatch, forms: dict[Any, Any]) -> list[Any]:
    """The calls of a trace that torch dispatches, where traces of the process have found these `forms`."""
    seen: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(repeats, "_FORMS", forms)
        learn = Repeats.learn
        patch.setattr(Repeats, "learn", lambda self, call, *found: (seen.append(call), learn(self, call, *found)))
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(layers))
        params, apply = fzero.lower(nn.Sequential(*blocks))
        params = fzero.partition(params, MESH)

        def step(params: Any, x: Tensor) -> Any:
            return fzero.grad(lambda params: apply(params, x).square().mean())(params)

        trace(step, (params, torch.zeros(2, 3, WIDTH)), MESH)
    return seen


def test_torch_dispatches_no_operation_of_a_second_equal_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (list_dispatches(layers, monkeypatch, {}) for layers in (3, 9))
    assert 0 < len(many) <= len(few)


def test_torch_dispatches_no_operation_that_another_trace_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forms: dict[Any, Any] = {}
    first, second = (list_dispatches(3, monkeypatch, forms) for _ in range(2))
    assert {call.operation.namespace for call in first} == {"aten", "fzero"}
    assert {call.operation.namespace for call in second} == {"fzero"}  # which may depend on the mesh of a trace


def test_few_forms_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    forms: dict[Any, Any] = {}
    monkeypatch.setattr(repeats, "_MOST_FORMS", 5)
    list_dispatches(3, monkeypatch, forms)
    assert 0 < len(forms) <= 5


def test_data_of_a_tensor_that_is_detached_elsewhere() -> None:
    """`x.data` dispatches `detach` too."""

    def loss_of(params: Any, x: Tensor) -> Tensor:
        return (x.detach() * params["u"]).sum() + (x.data * params["u"]).sum()

    program = program_of(loss_of, torch.zeros(2, 3, WIDTH))
    assert {node.meta["val"].device.type for node in program.placeholders} == {"cpu"}


def test_a_dispatched_call_leaves_no_node_but_its_own() -> None:
    """The forms of results are found without nodes that take names."""

    def step(x: Tensor) -> Any:
        return torch.empty(3).fill_(1.0) + torch.empty(3).fill_(1.0) + x

    names = [node.name for node in trace(step, (torch.zeros(3),), MESH).graph.nodes if "empty" in node.name]
    assert names == ["empty", "empty_1"]


def test_default_values_are_left_out_as_torch_leaves_them_out() -> None:
    def loss_of(p: Any, x: Tensor) -> Tensor:
        for w in (p["u"], p["v"], p["w"]):
            y = (x @ w).view(2, 1, 3, WIDTH)
            x = F.scaled_dot_product_attention(y, y, y, attn_mask=None).view(2, 3, WIDTH)
        return x.sum()

    weights = [torch.zeros(WIDTH, WIDTH) for _ in "uvw"]
    program = program_of(loss_of, *weights)
    kwargs = [set(node.kwargs) for node in program.graph.nodes if "attention" in node.name and "backward" in node.name]
    assert len(kwargs) == 3 and kwargs[0] == kwargs[1] == kwargs[2]


def test_numbers_of_two_kinds_are_two_calls() -> None:
    """1 and True and 1.0 are equal, and an operation's result has another dtype for each."""

    def step(x: Tensor) -> Any:
        return [torch.add(x, value) for value in (1, True, 1.0)] * 2

    x = torch.zeros(3, dtype=torch.int64)
    values = [node.meta["val"].dtype for node in trace(step, (x,), MESH).output.args[0]]
    assert values == [torch.int64, torch.int64, torch.float32] * 2


def test_operands_in_one_memory_are_told_apart() -> None:
    """A result lies in memory of the operand that it is a view of, also where the first call had one memory for two."""

    def step(x: Tensor) -> Any:
        a, b = x.clone(), x.clone()
        torch._foreach_add_([a, a], 1.0)
        torch._foreach_add_([a, b], 1.0)
        return a.expand_as(a), a.expand_as(b), b.expand_as(a)

    program = trace(step, (torch.zeros(3),), MESH)
    first, second, third = (storage_key(x.meta["val"]) for x in program.output.args[0])
    assert first == second != third


def test_results_of_an_operation_from_elsewhere_are_asked_for_each_time() -> None:
    """Its fake is Python code of others, which may say other sizes at each call."""
    sizes = iter((2, 3, 4))
    library = torch.library.Library("repeats_of_tests", "DEF")
    library.define("grow(Tensor x) -> Tensor")
    torch.library.register_fake("repeats_of_tests::grow", lambda x: x.new_empty(next(sizes)), lib=library)

    def step(x: Tensor) -> Any:
        return [torch.ops.repeats_of_tests.grow(x) for _ in range(3)]

    values = [len(node.meta["val"]) for node in trace(step, (torch.zeros(1),), MESH).output.args[0]]
    assert values == [2, 3, 4]


def test_a_tensor_made_of_nothing_lies_on_the_default_device() -> None:
    def step(x: Tensor) -> Any:
        made = [torch.ops.aten.zeros.default([2])]
        with torch.device("meta"):
            made.append(torch.zeros(2))
        return [*made, torch.ops.aten.zeros.default([2])]

    devices = [node.meta["val"].device.type for node in trace(step, (torch.zeros(1),), MESH).output.args[0]]
    assert devices == ["cpu", "meta", "cpu"]


def test_nothing_is_known_in_inference_mode() -> None:
    def step(x: Tensor) -> Any:
        with torch.inference_mode():
            return [(x + 1) * 2 for _ in range(3)]

    assert len(trace(step, (torch.zeros(1),), MESH).output.args[0]) == 3


LISTS = {
    "tensors": lambda xs: torch._foreach_add(xs, [x.double() for x in xs]),
    "numbers": lambda xs: torch._foreach_mul(xs, [2, 2.0, 2, True, 2.0, 2]),
    "transposed": lambda xs: torch._foreach_neg([x.T for x in xs]),
    "norms": lambda xs: torch._foreach_norm([x.float() for x in xs]),
    "one number": lambda xs: torch._foreach_lerp([x.float() for x in xs], [x.float() for x in xs], 0.5),
    "Adam": lambda xs: [
        y
        for column in fzero.optim.operations.STAGES["scale_by_adam"](
            *([x.float() for x in xs] for _ in range(3)), torch.ones(()), 0.9, 0.99, 1e-8
        )
        for y in column
    ],
}


@pytest.mark.parametrize("name", LISTS)
def test_a_function_of_lists_is_traced_as_torch_traces_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called on one position of each form: here the positions have four."""
    forms = [(2, 3), (3, 2), (2, 3), (2, 2), (3, 2), (2, 3)]
    given = [torch.ones(shape, dtype=torch.int64 if i == 2 else torch.float32) for i, shape in enumerate(forms)]

    def step(xs: Any) -> Any:
        return LISTS[name](xs)

    ours = trace(step, (given,), MESH)
    with monkeypatch.context() as patch:
        patch.setattr(Repeats, "learn_lists", lambda self, call: False)
        theirs = trace(step, (given,), MESH)
    assert find_difference(ours, theirs) is None


def test_a_function_of_lists_is_called_on_one_position_of_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    find = Repeats._find_new
    monkeypatch.setattr(Repeats, "_find_new", lambda self, x, memory: (counts.append(x), find(self, x, memory))[1])
    trace(lambda xs: torch._foreach_neg(xs), ([torch.zeros(2 + i % 2) for i in range(50)],), MESH)
    assert len(counts) == 2
