"""Escapes: nothing without data leaves a trace, and what a trace cannot see into is refused."""

from __future__ import annotations

import collections
import enum
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import MESH, layers, mlp, rows
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fzero
from fzero import tree
from fzero.base.errors import FzeroError
from fzero.base.reachable import walk
from fzero.base.torch_private import FakeTensor, unwrap


def run(step: Callable[..., Any], *args: Any) -> Any:
    return fzero.simulate(step, MESH)(*args)


def state() -> Any:
    return fzero.partition(layers(1), MESH)


# stored values: each place, in each way of computing


class Model(nn.Module):
    """Stores what it computes in `kept`, and its attribute `last`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.kept: dict[str, Any] = {}
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.kept["y"] = self.linear(x)  # kept here
        return self.last


class Trainer:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def step(self, p: Any, x: Tensor) -> Tensor:
        self.seen.append(x * 2)  # kept here
        return x.sum()


SEEN: dict[str, Any] = {}


def keep_globally(p: Any, x: Tensor) -> Tensor:
    SEEN["x"] = x * 2  # kept here
    return x.sum()


def call_keep(p: Any, x: Tensor) -> Tensor:
    return keep_globally(p, x)


def keep_in_default(p: Any, x: Tensor, memory: list[Any] = []) -> Tensor:  # noqa: B006
    memory.append(x * 2)  # kept here
    return x.sum()


@functools.lru_cache
def positions(count: int) -> Tensor:
    return torch.arange(count).float()


def keep_in_closure() -> Any:
    kept = []

    def step(p: Any, x: Tensor) -> Tensor:
        kept.append(x * 2)  # kept here
        return x.sum()

    return step


def keep_inside_of_a_gradient() -> Any:
    kept = []

    def loss(p: Any, x: Tensor) -> Tensor:
        kept.append(mlp(p, x))
        return kept[-1].sum()

    return lambda p, x: fzero.grad(loss)(p, x)


def keep_a_leaf() -> Any:
    kept = {}

    def step(p: Any, x: Tensor) -> Tensor:
        kept["w"] = tree.map(lambda leaf: leaf * 2, p)
        return x.sum()

    return step


def keep_in_module() -> Any:
    model = Model()
    return lambda p, x: model(x)


def keep_in_gradients() -> Any:
    model = nn.Linear(5, 5)

    def step(p: Any, x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    return step


STORED: dict[str, tuple[Callable[..., Any], str]] = {
    "a closure": (keep_in_closure(), "kept[0]"),
    "a gradient's function": (keep_inside_of_a_gradient(), "kept[0]"),
    "a sharded value": (keep_a_leaf(), "kept['w']['layers'][0]['w']"),
    "a module": (keep_in_module(), "model.last"),
    "the gradients of a module": (keep_in_gradients(), "model.weight.grad"),
    "an object": (Trainer().step, "self.seen[0]"),
    "a global": (keep_globally, "SEEN['x']"),
    "a global of a called function": (call_keep, "SEEN['x']"),
    "a default": (keep_in_default, "memory[0]"),
    "a partial": (functools.partial(lambda kept, p, x: kept.append(x * 2) or x.sum(), []), "step.args[0][0]"),
}


@pytest.mark.parametrize("name", STORED)
def test_a_value_that_outlives_the_trace_is_refused_with_its_place(name: str) -> None:
    step, place = STORED[name]
    try:
        with pytest.raises(FzeroError) as error:
            run(step, state(), rows(MESH))
        assert error.value.where == place
        assert re.search(r"holds float32\[.*\] of the step after its trace", error.value.problem)
    finally:
        SEEN.clear()


@pytest.mark.parametrize("step", [keep_globally, Trainer().step, keep_in_closure()])
def test_the_line_that_computed_it_is_named(step: Callable[..., Any]) -> None:
    with pytest.raises(FzeroError, match=r"test_escapes\.py:\d+ in \w+: .*# kept here\)"):
        run(step, state(), rows(MESH))
    SEEN.clear()


def test_backward_is_told_from_other_stores() -> None:
    with pytest.raises(FzeroError, match=r"take gradients with fzero\.value_and_grad"):
        run(keep_in_gradients(), state(), rows(MESH))


def test_a_cache_of_functools_forgets_what_was_traced() -> None:
    step = fzero.simulate(lambda p, x: x * positions(5), MESH)
    for batch in (rows(MESH), rows(MESH).double()):  # traced twice
        torch.testing.assert_close(step(state(), batch), batch * torch.arange(5).float())
    assert positions(5).tolist() == [0, 1, 2, 3, 4]


def test_attributes_that_a_lowered_forward_sets_are_reset_and_no_mistake() -> None:
    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.table = x.new_ones(5)
            return super().forward(x) * self.table

    params, apply = fzero.lower(Counting(5, 5))
    placed = fzero.partition(params, MESH)
    x = rows(MESH)
    torch.testing.assert_close(run(lambda p, x: apply(p, x), placed, x), apply(params, x))


# results


class Opaque:
    def __init__(self, value: Any) -> None:
        self.value = value


class Level(enum.Enum):
    LOW = 1


CONSTANTS = [1, 2.5, True, "text", b"bytes", 1j, torch.float32, torch.device("cpu"), torch.strided, torch.Size([2]),
             slice(1, 2), Level.LOW, int, Path("x"), frozenset({1})]  # fmt: skip


@pytest.mark.parametrize("value", CONSTANTS, ids=repr)
def test_values_that_never_change_are_results(value: Any) -> None:
    assert run(lambda x: {"value": value}, rows(MESH)) == {"value": value}


def test_an_object_that_the_step_was_given_is_a_result() -> None:
    given = Opaque("text")
    assert run(lambda given, x: (given, x.sum()), given, rows(MESH))[0] is given


OPAQUE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a tensor in an object": (lambda x: {"out": Opaque([x])}, "result 'out': .*class Opaque.*holds a tensor at .value"),
    "an object made in the trace": (lambda x: [Opaque(3)], "result '0': .*class Opaque that the step made"),
    "a generator": (lambda x: (x for _ in range(3)), "the result: .*class generator that the step made"),
    "a function": (lambda x: lambda: x, "the result: .*class function, .*holds a tensor at x"),
    "a subclass of dict": (lambda x: collections.Counter(a=x), r"the result: .*class Counter.*; return dict\(...\)"),
    "a mapping": (
        lambda x: collections.ChainMap({"a": x}),
        r"class ChainMap.* at \.maps\[0\]\['a'\]; return dict\(...\)",
    ),
    "a sparse tensor": (lambda x: x.to_sparse(), r"the result: is a torch.sparse_coo tensor, .*; give tensor.to_dense"),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_an_opaque_result_is_refused_with_its_class_and_path(name: str) -> None:
    step, message = OPAQUE[name]
    with pytest.raises(FzeroError, match=message):
        run(step, rows(MESH))


@pytest.mark.parametrize("inside", [False, True], ids=["one device", "sharded"])
def test_auxiliary_values_are_seen_into(inside: bool) -> None:
    def step(x: Tensor) -> Any:
        return fzero.value_and_grad(lambda y: (y.sum(), {"aux": Opaque(y)}), has_aux=True)(x)

    with pytest.raises(FzeroError, match=r"aux aux: .*class Opaque, .* holds a tensor at \.value"):
        run(step, rows(MESH)) if inside else step(rows(MESH))


# arguments

UNSEEN: dict[str, tuple[Any, str]] = {
    "an object with a tensor": (Opaque({"k": torch.ones(2)}), r"argument 0: .*class Opaque.*tensor at \.value\['k'\]"),
    "a mapping": (
        collections.ChainMap({"x": torch.ones(2)}),
        r"argument 0: a ChainMap .*not hash; give dict\(...\)",
    ),
    "a sparse tensor": (torch.eye(2).to_sparse(), "argument 0: is a torch.sparse_coo tensor.*to_dense"),
    "a nested tensor": (torch.nested.nested_tensor([torch.ones(2)]), "argument 0: is a nested tensor.*padded_tensor"),
    "a tensor of tensors": (TwoTensor(torch.ones(2), torch.ones(2)), "argument 0: is a TwoTensor, which is made of"),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_an_argument_that_a_trace_cannot_see_into_is_refused(name: str) -> None:
    value, message = UNSEEN[name]
    with pytest.raises(FzeroError, match=message):
        run(lambda given, x: x.sum(), value, rows(MESH))


def test_an_argument_that_the_step_stores_into_is_named() -> None:
    def step(memory: Opaque, x: Tensor) -> Tensor:
        memory.value = [x * 2]
        return x.sum()

    with pytest.raises(FzeroError, match=r"^argument 0\.value\[0\]: holds float32"):
        run(step, Opaque(None), rows(MESH))


def test_functions_and_modules_may_be_arguments() -> None:
    model = nn.Linear(5, 5).requires_grad_(False)
    x = rows(MESH)
    torch.testing.assert_close(run(lambda model, x: model(x), model, x), model(x))


@pytest.mark.parametrize("leaf", [torch.eye(4).to_sparse(), TwoTensor(torch.ones(4), torch.ones(4))])
def test_partition_refuses_what_is_not_dense(leaf: Tensor) -> None:
    with pytest.raises(FzeroError, match="^w: is a "):
        fzero.partition({"w": leaf}, MESH)


# the law: whatever a step returns or keeps has data


def has_fake(value: Any) -> bool:
    return any(isinstance(x, Tensor) and isinstance(unwrap(x), FakeTensor) for _, x in walk("", value))


RETURNS: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": lambda x: x * 2,
    "a dict": lambda x: {"a": [x, (x, None)]},
    "an ordered dict": lambda x: collections.OrderedDict(b=x, a=x),
    "a default dict": lambda x: collections.defaultdict(list, a=[x]),
    "a deque": lambda x: collections.deque([x]),
    "a named tuple of torch": lambda x: x.max(0),
    "a registered class": lambda x: Registered(x),
    **{name: step for name, (step, _) in OPAQUE.items()},
}


class Registered:
    """A class that torch's pytree takes apart."""

    def __init__(self, value: Any) -> None:
        self.value = value


torch.utils._pytree.register_pytree_node(Registered, lambda x: ([x.value], None), lambda xs, _: Registered(*xs))


@pytest.mark.parametrize("name", RETURNS)
def test_no_result_is_without_data(name: str) -> None:
    try:
        result = run(RETURNS[name], rows(MESH))
    except FzeroError:
        return
    expected = RETURNS[name](rows(MESH))
    assert type(result) is type(expected) and not has_fake(result)
    if not isinstance(result, Mapping | tuple):
        assert tree.paths(result) == tree.paths(expected)


# values that leave a transform


def keep_from_a_loss(p: Any, x: Tensor) -> Any:
    kept = []

    def loss(p: Any) -> Tensor:
        kept.append(mlp(p, x))
        return kept[0].square().mean()

    return fzero.grad(loss)(p), kept[0]


def keep_a_leaf_from_a_loss(p: Any, x: Tensor) -> Any:
    kept = []

    def loss(p: Any) -> Tensor:
        kept.append(p["layers"][0]["w"] * 2)
        return (kept[0].square().sum() + mlp(p, x)).mean()

    return torch.func.grad(loss)(p), kept[0]


@pytest.mark.parametrize("step", [keep_from_a_loss, keep_a_leaf_from_a_loss])
def test_what_a_loss_appends_to_a_list_may_be_returned(step: Callable[..., Any]) -> None:
    got = fzero.unpartition(fzero.simulate(step, MESH, donate=False)(state(), rows(MESH)))
    expected = step(layers(1), rows(MESH))
    for mine, theirs in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        # sums over 2 rows a rank in place of 4
        torch.testing.assert_close(mine, unwrap(theirs), rtol=1e-5, atol=1e-6)


def test_what_a_mapped_function_appends_to_a_list_is_refused() -> None:
    def step(x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        torch.func.vmap(lambda row: kept.append(row * 2) or row.sum())(x)  # type: ignore[func-returns-value]
        return kept[0]

    with pytest.raises(FzeroError, match="the result: is one example of a batch, kept from a function under vmap"):
        run(step, rows(MESH))


def test_a_tensor_that_an_earlier_trace_left_behind_is_refused() -> None:
    kept: list[Tensor] = []
    with pytest.raises(FzeroError, match="holds float32"):
        run(lambda x: kept.append(x * 2) or x.sum(), rows(MESH))  # type: ignore[func-returns-value]
    with pytest.raises(FzeroError, match=r"a tensor without data, .*\(.*test_escapes\.py:\d+ in <lambda>: "):
        run(lambda x: x + kept[0], rows(MESH))


def test_a_step_returns_the_output_of_a_transformers_model() -> None:
    """What everyone writes first: loss and output from the model, and the output among the results."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    params, apply = fzero.lower(transformers.BertForSequenceClassification(config).eval())
    batch = {"input_ids": torch.arange(12).view(4, 3), "labels": torch.tensor([0, 1, 1, 0])}

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> tuple[Tensor, Any]:
            output = apply(params, **batch)
            return output.loss, output

        return fzero.value_and_grad(loss, has_aux=True)(params)

    (loss, output), _ = run(step, fzero.partition(params, MESH), batch)
    (expected_loss, expected), _ = step(params, batch)
    assert type(output) is type(expected) and not has_fake(output)
    # a mean over 2 rows a rank, and over ranks
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def decoder() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_a_cache_of_transformers_passes_from_step_to_step(decoder: Any) -> None:
    params, apply = fzero.lower(decoder)
    placed, ids = fzero.partition(params, MESH), torch.arange(12).view(4, 3)

    def read(params: Any, ids: Tensor, cache: Any) -> Any:
        output = apply(params, ids, past_key_values=cache, use_cache=True)
        return output.logits, output.past_key_values

    step = fzero.simulate(read, MESH)
    _, cache = step(placed, ids[:, :2], None)
    logits, longer = step(placed, ids[:, 2:], cache)
    assert cache.get_seq_length() == 2 and longer.get_seq_length() == 3 and not has_fake(longer)
    torch.testing.assert_close(logits[:, 0], decoder(ids).logits[:, 2])


def test_an_empty_cache_that_a_step_fills_and_returns_stands_for_no_argument(decoder: Any) -> None:
    """The step sees an argument with more leaves than it was given."""
    params, apply = fzero.lower(decoder)
    placed, ids = fzero.partition(params, MESH), torch.arange(12).view(4, 3)
    cls = type(decoder(ids).past_key_values)

    def read(params: Any, ids: Tensor, cache: Any) -> Any:
        return apply(params, ids, past_key_values=cache, use_cache=True).past_key_values

    given, filled = cls(), cls()
    decoder(ids, past_key_values=filled)
    cache = fzero.simulate(read, MESH)(placed, ids, given)
    assert not given.layers and cache.get_seq_length() == 3
    torch.testing.assert_close(cache.layers[0].keys, filled.layers[0].keys)
    torch.testing.assert_close(cache.layers[0].values, filled.layers[0].values)


@pytest.mark.parametrize("is_filled", [True, False])
def test_a_cache_that_a_step_fills_and_does_not_return_is_refused(decoder: Any, is_filled: bool) -> None:
    params, apply = fzero.lower(decoder)
    placed, ids = fzero.partition(params, MESH), torch.arange(12).view(4, 3)
    cache = decoder(ids).past_key_values if is_filled else type(decoder(ids).past_key_values)()

    def read(params: Any, ids: Tensor, cache: Any) -> Tensor:
        return apply(params, ids, past_key_values=cache).logits

    with pytest.raises(FzeroError, match="read: fills a DynamicCache that it was given, and does not return it"):
        run(read, placed, ids, cache)
    logits = run(lambda p, ids, cache: read(p, ids, tree.map(lambda x: x, cache)), placed, ids, cache)
    torch.testing.assert_close(logits, decoder(ids, past_key_values=cache).logits)


def test_a_batch_of_a_tokenizer_is_an_argument() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"a": rows(MESH), "b": rows(MESH) + 1})
    got = run(lambda batch: (batch, (lambda a, b: a * b)(**batch)), batch)
    assert type(got[0]) is type(batch)
    torch.testing.assert_close(got[1], batch["a"] * batch["b"])


def test_a_user_dict_is_a_tree() -> None:
    batch = collections.UserDict(b=rows(MESH), a=[rows(MESH) + 1])
    got = run(lambda batch: (batch, batch["a"][0] * batch["b"]), batch)
    assert type(got[0]) is collections.UserDict and tree.paths(got[0]) == ["b", "a.0"]
    torch.testing.assert_close(got[1], batch["a"][0] * batch["b"])


# what is traced again


def test_an_argument_that_has_the_step_traced_again_is_named(caplog: pytest.LogCaptureFixture) -> None:
    step = fzero.simulate(lambda batch: batch["x"] * len(batch["name"]), MESH)
    for name in ("first", "second"):
        step({"name": name, "x": rows(MESH)})
    assert "argument 0.name: was 'first', is 'second'" in caplog.text


def test_a_batch_of_another_shape_is_named(caplog: pytest.LogCaptureFixture) -> None:
    step = fzero.simulate(lambda batch: batch["x"] * 2, MESH)
    step({"x": torch.ones(4, 5)})
    step({"x": torch.ones(2, 5)})
    assert "argument 0.x: was torch.float32 [2, 5]" in caplog.text and "is torch.float32 [1, 5]" in caplog.text
    step({"x": torch.ones(2, 5), "y": 1})
    assert "argument 0.y: this leaf was not expected" in caplog.text


# what an earlier trace left behind


LEFT: list[Any] = []


def leave(p: Any) -> Tensor:
    LEFT.append(p["w"] * 2)
    return p["w"].sum()


@pytest.fixture
def left() -> Any:
    """State, and in `LEFT` a value of the trace of a step that was refused."""
    given = fzero.partition({"w": torch.ones(4)}, MESH)
    with pytest.raises(FzeroError, match=r"LEFT\[0\]: holds float32\[4\] of the step after its trace"):
        fzero.simulate(leave, MESH)(given)
    yield given
    LEFT.clear()


def test_another_step_may_reach_what_an_earlier_trace_left_behind(left: Any) -> None:
    step = fzero.simulate(lambda p: p["w"].sum() * len(LEFT), MESH)
    assert step(left) == 4


def test_another_step_may_not_use_what_an_earlier_trace_left_behind(left: Any) -> None:
    step = fzero.simulate(lambda p: (LEFT[0] * p["w"]).sum(), MESH)
    with pytest.raises(FzeroError, match="test_escapes.*the step uses w of an earlier trace"):
        step(left)
