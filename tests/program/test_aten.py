"""What torch's operators write: each runs on real tensors, and a record names every operand that changes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conformance import database
from torch import Tensor, fx
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.program.aten import HIDDEN_WRITES
from fzero.program.records import record

SAMPLES = 1
"""Of each operator and module: writes show in the first."""
LARGEST = 1 << 12
NOT_ON_CPU = {"cudnn_batch_norm", "miopen_batch_norm", "_cudnn_rnn", "miopen_rnn", "_cudnn_rnn_backward"} | {
    "miopen_rnn_backward"
}


class Look(TorchDispatchMode):
    """Notes for each call of an operation which operands' bytes or versions change, and which its record names.

    `hidden`: name -> the arguments that change though the schema does not declare them. `untold`: the same, but for
    arguments that the record does not name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden: dict[str, set[str]] = {}
        self.untold: dict[str, set[str]] = {}
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, kwargs = func._schema, kwargs or {}
        given = dict(zip((arg.name for arg in schema.arguments), args)) | kwargs
        before = [(name, x, bits(x), x._version) for name, value in given.items() for x in plain_tensors(value)]
        result = func(*args, **kwargs)
        declared = [arg.name for arg in schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
        outputs = {x.untyped_storage().data_ptr() for name in declared for x in plain_tensors(given.get(name))}
        changed = [(name, x) for name, x, old, version in before if x._version != version or not same(bits(x), old)]
        name, told = schema.name.removeprefix("aten::"), None
        self.seen.add(name)
        for argument, x in changed:
            told = written_by(func, args, kwargs) if told is None else told
            if argument not in declared and x.untyped_storage().data_ptr() not in outputs:
                self.hidden.setdefault(name, set()).add(argument)
            if x.untyped_storage().data_ptr() not in told:
                self.untold.setdefault(name, set()).add(argument)
        return result


def plain_tensors(value: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(value) if type(x) in (Tensor, torch.nn.Parameter) and x.is_contiguous()]


def bits(x: Tensor) -> Tensor:
    return x.detach().clone().view(-1).view(torch.uint8) if x.layout == torch.strided else torch.empty(0)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b)


def written_by(func: Any, args: Any, kwargs: Any) -> set[int]:
    """The memory of the operands that the record of a call names."""
    graph, values = fx.Graph(), dict[fx.Node, Tensor]()

    def place(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        node = graph.placeholder("x")
        values[node] = x
        return node

    placed_args, placed_kwargs = pytree.tree_map(place, (args, kwargs))
    node = graph.call_function(func, placed_args, placed_kwargs)
    return {values[x].untyped_storage().data_ptr() for x in record(node).writes(node)}


def run(call: Any, leaves: list[Tensor]) -> None:
    """Run a function and the gradient of its results. Its own errors are its own affair."""
    try:
        outs = [out for out in pytree.tree_leaves(call()) if isinstance(out, Tensor) and out.requires_grad]
        if outs:
            total = sum((out.real if out.is_complex() else out).sum() for out in outs)
            torch.autograd.grad(total, [x for x in leaves if x.requires_grad], allow_unused=True)
    except Exception:
        return


def operator_calls() -> Iterator[tuple[Any, list[Tensor]]]:
    for op in database.operators().values():
        dtype = next((d for d in (torch.float64, torch.float32, torch.int64) if d in op.supported_dtypes("cpu")), None)
        if dtype is None:
            continue
        for sample, _ in zip(database.samples(op, dtype), range(SAMPLES)):
            yield functools.partial(op, sample.input, *sample.args, **sample.kwargs), sample


def module_calls() -> Iterator[tuple[Any, Any]]:
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        for training in (True, False):
            try:
                inputs = info.module_inputs_func(
                    info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
                )
            except TypeError:  # a module of losses that takes other arguments
                continue
            for given in inputs[:SAMPLES]:
                module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
                args, kwargs = given.forward_input.args, given.forward_input.kwargs
                yield functools.partial(module.train(training), *args, **kwargs), (args, kwargs, module)


@pytest.fixture(scope="module")
def looked() -> Look:
    look = Look()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for calls in (operator_calls(), module_calls()):
            for call, given in calls:
                values = (given.input, given.args, given.kwargs) if hasattr(given, "input") else given[:2]
                leaves = [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]
                leaves += list(given[2].parameters()) if isinstance(given, tuple) else []
                if not any(map(is_lazy, leaves)) and all(x.numel() <= LARGEST for x in leaves):
                    with look:
                        run(call, leaves)
    return look


def test_a_record_names_every_operand_that_an_operation_writes(looked: Look) -> None:
    assert len(looked.seen) > 500
    assert not looked.untold


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the table is that of torch 2.13")
def test_the_table_of_hidden_writes_is_what_runs_show(looked: Look) -> None:
    known = {name: set(arguments) for name, arguments in HIDDEN_WRITES.items() if name not in NOT_ON_CPU}
    assert looked.hidden == known


@pytest.mark.parametrize("name", sorted(HIDDEN_WRITES))
def test_each_row_names_arguments_that_the_schema_denies(name: str) -> None:
    for overload in getattr(torch.ops.aten, name).overloads():
        arguments = {x.name: x for x in getattr(getattr(torch.ops.aten, name), overload)._schema.arguments}
        assert all(arguments[written].alias_info is None for written in HIDDEN_WRITES[name] if written in arguments)
        assert NOT_ON_CPU or set(HIDDEN_WRITES[name]) <= arguments.keys()


ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "training", "expected"),
    [
        (ATEN.native_batch_norm.default, True, [3, 4]),
        (ATEN.native_batch_norm.default, False, []),
        (ATEN._native_batch_norm_legit.default, True, [3, 4]),
        (ATEN._native_batch_norm_legit.default, False, []),
        (ATEN.rrelu_with_noise.default, True, [1]),
        (ATEN.rrelu_with_noise.default, False, []),
        (ATEN.rrelu_with_noise_.default, True, [0, 1]),
        (ATEN.rrelu_with_noise_.default, False, [0]),
    ],
)
def test_without_training_only_the_returned_operand_is_written(target: Any, training: bool, expected: Any) -> None:
    graph = fx.Graph()
    tensors = [graph.placeholder(f"x{i}") for i in range(5)]
    is_norm = "norm" in str(target)
    args = (*tensors, training, 0.1, 1e-5) if is_norm else (*tensors[:2], 0.1, 0.3, training)
    node = graph.call_function(target, args)
    assert record(node).writes(node) == [tensors[i] for i in expected]
    if not is_norm:
        assert record(node).is_random(node) is training


IN_PLACE = [
    getattr(getattr(ATEN, name), overload)
    for name in dir(ATEN)
    if name.endswith("_") and not name.startswith("_")
    for overload in getattr(ATEN, name).overloads()
]


def test_the_in_place_form_of_a_pointwise_operation_is_pointwise() -> None:
    """torch tags `abs`, `gelu`, `threshold` and 19 others, and not their in-place forms."""
    found = 0
    for target in IN_PLACE:
        functional = getattr(ATEN, target._schema.name.removeprefix("aten::").removesuffix("_"), None)
        overload = getattr(functional, target._overloadname, None)
        if overload is not None and record(overload).is_pointwise:
            found += torch.Tag.pointwise not in target.tags
            assert record(target).is_pointwise, target
    assert found >= 20
