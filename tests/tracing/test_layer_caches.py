"""Layers that write into a cache of transformers are copied as others are, and no layer that does more with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_layer_copies import LAYERS, MESH, WIDTH, count
from torch import Tensor, nn
from torch.nn import functional as F
from traces import describe_trace
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, LlamaForCausalLM, MistralConfig
from transformers.cache_utils import DynamicLayer

import fzero
from fzero.tracing.trace import trace


class Block(nn.Module):
    """A layer with an index, and what a case does with its keys, its values and a cache."""

    def __init__(self, index: int, do: Callable[..., Tensor], factors: list[float]) -> None:
        super().__init__()
        self.index, self.do, self.factors = index, do, factors
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        keys = self.linear(self.norm(x))[None, None]
        return x + self.do(self, keys, keys * 2.0, cache)[0, 0]


class Model(nn.Module):
    """Layers that are given one cache, and what the loss takes of it."""

    def __init__(self, do: Callable[..., Tensor], make: Callable[[], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        factors = [1.0 + i for i in range(LAYERS)]
        self.layers = nn.ModuleList(Block(i, do, factors) for i in range(LAYERS))
        self.make, self.read, self.embed = make, read, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        cache, x = self.make(), self.embed(x)
        for layer in self.layers:
            x = layer(x, cache=cache)
        return x.square().mean() + self.read(cache)


def attend(self: Any, keys: Tensor, values: Tensor, cache: Any) -> Tensor:
    return F.scaled_dot_product_attention(keys, *cache.update(keys, values, self.index))


def by_length(self: Any, keys: Tensor, values: Tensor, cache: Any) -> Tensor:
    return attend(self, keys * (1.0 + cache.get_seq_length(self.index)), values, cache)


def by_first_length(self: Any, keys: Tensor, values: Tensor, cache: Any) -> Tensor:
    return attend(self, keys * (1.0 + cache.get_seq_length()), values, cache)


def look_into_cache(self: Any, keys: Tensor, values: Tensor, cache: Any) -> Tensor:
    return attend(self, keys * (2.0 if len(cache.layers) == 3 else 1.0), values, cache)


def read_slot_before(self: Any, keys: Tensor, values: Tensor, cache: Any) -> Tensor:
    before = [each.keys for each in cache.layers if each.is_initialized]
    return attend(self, keys, values, cache) + sum(before)


def by_table(self: Any, keys: Tensor, values: Tensor, cache: Any) -> Tensor:
    return attend(self, keys * self.factors[self.index], values, cache)


def by_parity(self: Any, keys: Tensor, values: Tensor, cache: Any) -> Tensor:
    return attend(self, keys if self.index % 2 else keys * 2.0, values, cache)


def by_product(self: Any, keys: Tensor, values: Tensor, cache: Any) -> Tensor:
    return attend(self, torch.mul(keys, self.index), values, cache)


def by_text(self: Any, keys: Tensor, values: Tensor, cache: Any) -> Tensor:
    return attend(self, keys * {"2": 2.0}.get(f"{self.index}", 1.0), values, cache)


def by_what_fails(self: Any, keys: Tensor, values: Tensor, cache: Any) -> Tensor:
    try:
        keys = torch.mul(keys, self.index)
    except TypeError:
        keys = keys * 3.0
    return attend(self, keys, values, cache)


def by_class(self: Any, keys: Tensor, values: Tensor, cache: Any) -> Tensor:
    return attend(self, keys * (self.index if type(self.index) is int else 7.0), values, cache)


def from_behind(self: Any, keys: Tensor, values: Tensor, cache: Any) -> Tensor:
    return F.scaled_dot_product_attention(keys, *cache.update(keys, values, LAYERS - 1 - self.index))


def into_the_first(self: Any, keys: Tensor, values: Tensor, cache: Any) -> Tensor:
    return F.scaled_dot_product_attention(keys, *cache.update(keys, values, 0))


def note_in_cache(self: Any, keys: Tensor, values: Tensor, cache: Any) -> Tensor:
    cache.noted = [*getattr(cache, "noted", ()), keys.mean()]
    return attend(self, keys, values, cache)


def sum_of_slots(cache: Any) -> Tensor:
    return sum((i + 1) * each.keys.sum() + each.values.square().sum() for i, each in enumerate(cache.layers))


def nothing(cache: Any) -> float:
    return 0.0


def make_windows() -> DynamicCache:
    return DynamicCache(config=MistralConfig(num_hidden_layers=LAYERS, sliding_window=2))


def make_slots() -> DynamicCache:
    return DynamicCache(config=LlamaConfig(num_hidden_layers=LAYERS))


def make_filled() -> DynamicCache:
    cache = DynamicCache()
    for i in range(LAYERS):
        cache.update(torch.ones(1, 1, 2, WIDTH), torch.ones(1, 1, 2, WIDTH), i)
    return cache


class OddCache(DynamicCache):
    """A cache of a user, which does as it likes."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *more: Any) -> Any:
        return super().update(keys * (2.0 if layer_idx == 2 else 1.0), values, layer_idx)


class OddSlot(DynamicLayer):
    """A slot of a user."""

    def update(self, keys: Tensor, values: Tensor, *more: Any) -> Any:
        return super().update(keys * 2.0, values)


def make_odd_slots() -> DynamicCache:
    cache = DynamicCache()
    cache.layer_class_to_replicate = OddSlot
    return cache


def make_two() -> EncoderDecoderCache:
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def attend_of_two(self: Any, keys: Tensor, values: Tensor, cache: Any) -> Tensor:
    return attend(self, keys, values, cache.self_attention_cache)


ALL = LAYERS - 2
CASES: dict[str, tuple[int, Any, Any, Any]] = {
    "slots that are made when they are written to": (ALL, attend, DynamicCache, nothing),
    "slots that are there": (ALL, attend, make_slots, nothing),
    "slots with a window": (ALL, attend, make_windows, nothing),
    "keys that the loss reads": (ALL, attend, DynamicCache, sum_of_slots),
    "keys of windows that the loss reads": (ALL, attend, make_windows, sum_of_slots),
    "the length of an own slot": (ALL, by_length, DynamicCache, sum_of_slots),
    "the length of the first slot": (0, by_first_length, DynamicCache, nothing),
    "code that looks into the cache": (0, look_into_cache, DynamicCache, nothing),
    "the keys of layers before": (0, read_slot_before, DynamicCache, nothing),
    "an index of a table": (0, by_table, DynamicCache, nothing),
    "a remainder of the index": (0, by_parity, DynamicCache, nothing),
    "a factor": (0, by_product, DynamicCache, nothing),
    "a text": (0, by_text, DynamicCache, nothing),
    "an error that an int does not raise": (0, by_what_fails, DynamicCache, nothing),
    "a class": (0, by_class, DynamicCache, nothing),
    "slots from behind": (0, from_behind, make_slots, nothing),
    "one slot of all layers": (0, into_the_first, DynamicCache, nothing),
    "an attribute of the cache": (0, note_in_cache, DynamicCache, lambda cache: sum(cache.noted)),
    "slots with keys": (0, attend, make_filled, sum_of_slots),
    "a cache of a user": (0, attend, OddCache, nothing),
    "a cache of an encoder and a decoder": (0, attend_of_two, make_two, nothing),
    "slots of a user": (0, attend, make_odd_slots, nothing),
    "no cache": (ALL, lambda self, keys, values, cache: keys, lambda: None, nothing),
    "a cache that nobody writes to": (0, lambda self, keys, values, cache: keys, DynamicCache, nothing),
    "slots that nobody writes to": (ALL, lambda self, keys, values, cache: keys, make_slots, nothing),
}


def count_copies(model: Model, monkeypatch: pytest.MonkeyPatch, catch: Any = ()) -> int:
    """How many layers of a model are copied. The program is that of a trace without copies. A step that catches an
    error goes on without the model."""
    torch.manual_seed(0)
    params, apply = fzero.lower(model)
    given = fzero.partition(params, MESH), torch.zeros(3, WIDTH)

    def loss_of(params: Any, x: Tensor) -> Tensor:
        try:
            return apply(params, x)
        except catch:
            return x.sum() * 0.0

    def step(params: Any, x: Tensor) -> Any:
        return fzero.value_and_grad(lambda params: loss_of(params, x))(params)

    with_copies, copied = count(lambda: trace(step, given, MESH), monkeypatch)
    assert describe_trace(with_copies) == describe_trace(trace(step, given, MESH, copies=False))
    return copied


@pytest.mark.parametrize("case", CASES)
def test_the_program_is_that_of_layers_that_run(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, *how = CASES[case]
    assert count_copies(Model(*how), monkeypatch) == copies


def test_a_step_that_catches_what_an_index_raises_is_traced_with_ints(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_copies(Model(by_product, DynamicCache, nothing), monkeypatch, TypeError) == 0


def test_layers_whose_index_is_not_their_position_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Model(attend, make_slots, sum_of_slots)
    model.layers[1].index, model.layers[2].index = 2, 1
    assert count_copies(model, monkeypatch) == LAYERS - 4


def test_a_llama_with_its_cache_trains_at_each_length_as_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of transformers: a model that trains makes a cache. The loss reads what is in it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=13, num_hidden_layers=5, **sizes)).double()
    params, apply = fzero.lower(model)

    def compute_loss(model: Any, ids: Tensor) -> Tensor:
        made = model(input_ids=ids, labels=ids)
        return made.loss + 0.1 * sum_of_slots(made.past_key_values)

    def train_step(params: Any, ids: Tensor) -> Any:
        return fzero.value_and_grad(lambda p: compute_loss(lambda **given: apply(p, **given), ids))(params)

    mesh = fzero.VirtualMesh(fsdp=1)
    step, given = fzero.simulate(train_step, mesh), fzero.partition(params, mesh)
    ids = [torch.randint(13, (4, length)) for length in (5, 9, 7, 3)]
    _, copied = count(lambda: step(given, ids[0]), monkeypatch)
    assert copied == 3
    for each in ids:
        loss, grads = step(given, each)
        model.zero_grad()
        expected = compute_loss(model, each)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-11, atol=1e-11)
        found, treedef = fzero.tree.flatten(fzero.unpartition(grads))
        named = dict(zip(map(fzero.tree.dotted, fzero.tree.keys(treedef)), found))
        wanted = {name: x.grad for name, x in model.named_parameters()}
        torch.testing.assert_close(named, wanted, rtol=1e-10, atol=1e-10)
