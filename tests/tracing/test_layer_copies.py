"""Equal layers are traced once: the program is the one of a trace that runs each layer. The law over drawn models is
`property_tests/tracing/test_layer_copies.py`; `tools/layer_copies.py` tries the models of transformers."""

from __future__ import annotations

import contextvars
from abc import ABC
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from traces import describe_trace

import fzero
from fzero.base.executed_code import record_code
from fzero.tracing import layers
from fzero.tracing.trace import _Trace, trace

MESH, WIDTH, LAYERS = fzero.VirtualMesh(fsdp=2), 4, 6
SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
STATE = SimpleNamespace(scale=1.0, seen=[], last=None)


class Block(nn.Module):
    """A layer with an index that nothing reads, and what a case does with its input."""

    scale = 1.0

    def __init__(self, index: int, do: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.index, self.do = index, do
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0, notes: Any = None) -> Tensor:
        x = x + self.linear(self.do(self, self.norm(x))) * scale
        if notes is not None:
            notes.append(x.mean())
        return x


class Model(nn.Module):
    """Layers, and how they are called: `run(model, layers, x)`."""

    def __init__(self, do: Any, run: Any, change: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(i, do) for i in range(LAYERS))
        self.run, self.embed = run, nn.Linear(WIDTH, WIDTH)
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.embed(x))


def in_order(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def count(program_of: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int]:
    """A program, and how many layers of it are copies: none, where the step was traced again without."""
    made: list[Any] = []
    with monkeypatch.context() as patch:
        copy, init = layers.Layers._copy, _Trace.__init__
        patch.setattr(layers.Layers, "_copy", lambda self, *given: (made.append(1), copy(self, *given))[1])
        patch.setattr(_Trace, "__init__", lambda self, *given, **how: (made.clear(), init(self, *given, **how))[1])
        return program_of(), len(made)


def both(
    monkeypatch: pytest.MonkeyPatch, do: Any = lambda self, x: F.gelu(x), run: Any = in_order,
    change: Any = lambda model: None, take: Any = fzero.value_and_grad, loss: Any = lambda x: x.square().mean(),
    device: str = "cpu",
) -> int:  # fmt: skip
    """The program of a step with copies is that of a step without. Returns how many layers were copied."""
    torch.manual_seed(0)
    params, apply = fzero.lower(Model(do, run, change).to(device))
    given = fzero.partition(params, MESH), torch.zeros(3, WIDTH, device=device)

    def step(params: Any, x: Tensor) -> Any:
        return take(lambda params: loss(apply(params, x)))(params)

    with_copies, copied = count(lambda: trace(step, given, MESH), monkeypatch)
    without = trace(step, given, MESH, copies=False)
    assert describe_trace(with_copies) == describe_trace(without)
    assert str(with_copies) == str(without)
    return copied


def test_layers_are_copied_while_a_folder_of_programs_records_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with record_code() as codes:
        assert both(monkeypatch) == LAYERS - 2
    assert codes is not None and Block.forward.__code__ in codes


def test_a_kernel_that_returns_numbers_beside_tensors_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device attention is that of a GPU, which returns the lengths too, and None for what it leaves out."""

    def attend(self: Any, x: Tensor) -> Tensor:
        x = x[None, None]
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)[0, 0]

    assert both(monkeypatch, attend, device="meta") == LAYERS - 2


class AbstractBlock(Block, ABC):
    """A class as peft's layers are, which have a metaclass of Python."""


def become_abstract(model: Any) -> None:
    for layer in model.layers:
        layer.__class__ = AbstractBlock


def test_layers_of_an_abstract_class_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert both(monkeypatch, change=become_abstract) == LAYERS - 2
    assert both(monkeypatch, by_index, change=become_abstract) == 0


def test_layers_behind_a_first_one_whose_input_has_no_gradient_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    assert both(monkeypatch, change=lambda model: model.embed.requires_grad_(False)) == LAYERS - 3


def test_layers_that_share_a_value_are_not_tried_and_others_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a decoder are all given what the encoder returned: autograd adds up what each of them gives for it."""

    def encode_and_decode(model: Any, x: Tensor) -> Tensor:
        seen, x = in_order(model, model.embed(x)), model.embed(x.sin())
        for layer in model.decoder:
            x = layer(x, scale=seen)
        return x

    def add_decoder(model: Any) -> None:
        model.decoder = nn.ModuleList(Block(i, model.layers[0].do) for i in range(LAYERS))

    made, init = list[bool](), _Trace.__init__
    with monkeypatch.context() as patch:
        patch.setattr(_Trace, "__init__", lambda self, *given, **how: (made.append(True), init(self, *given, **how))[1])
        assert both(monkeypatch, run=encode_and_decode, change=add_decoder) == LAYERS - 2
    assert len(made) == 2  # one trace with copies, and one without


def by_index(self: Any, x: Tensor) -> Tensor:
    return x * self.index


def by_dict(self: Any, x: Tensor) -> Tensor:
    return x * vars(self)["index"]


def by_context(self: Any, x: Tensor) -> Tensor:
    return x * SCALE.get()


def by_global(self: Any, x: Tensor) -> Tensor:
    return x * STATE.scale


def set_around(model: Any, x: Tensor) -> Tensor:
    """What a layer reads is set in front of it, and reset behind."""
    for i, layer in enumerate(model.layers):
        token, STATE.scale = SCALE.set(float(i)), float(i)
        x = layer(x)
        SCALE.reset(token)
        STATE.scale = 1.0
    return x


def append(self: Any, x: Tensor) -> Tensor:
    STATE.seen.append(x.square().mean())
    return x


def add_seen(model: Any, x: Tensor) -> Tensor:
    """Each layer leaves a value, as a router does for its loss."""
    STATE.seen.clear()
    x = in_order(model, x)
    seen = torch.stack(STATE.seen).sum()
    STATE.seen.clear()
    return x + seen


def read_last(self: Any, x: Tensor) -> Tensor:
    before, STATE.last = STATE.last, x
    return x if before is None else x + before


def forget_last(model: Any, x: Tensor) -> Tensor:
    STATE.last = None
    x = in_order(model, x)
    STATE.last = None
    return x


def write_output(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x).add_(1.0)
    return x


class Notes:
    """A tree that does not show what it notes, as a layer of a cache does not show what it writes later."""

    def __init__(self, shown: Tensor) -> None:
        self.shown, self.noted = shown, list[Tensor]()

    def append(self, x: Tensor) -> None:
        self.noted.append(x)


torch.utils._pytree.register_pytree_node(Notes, lambda x: ([x.shown], None), lambda shown, _: Notes(*shown))


def note_in(make: Callable[[Tensor], Any], read: Callable[[Any], list[Tensor]]) -> Callable[[Any, Tensor], Tensor]:
    """Each layer notes its mean in an object that it is given."""

    def run(model: Any, x: Tensor) -> Tensor:
        notes = make(x)
        for layer in model.layers:
            x = layer(x, notes=notes)
        assert len(read(notes)) == LAYERS
        return x * torch.stack(read(notes)).sum()

    return run


def skip(model: Any, x: Tensor) -> Tensor:
    """What goes into a layer is used beside it, too."""
    for layer in model.layers:
        x = x + layer(x)
    return x


def share(model: Any, x: Tensor) -> Tensor:
    """All layers compute with one value, as those of a decoder do with the encoder's."""
    shared = x * 2.0
    for layer in model.layers:
        x = layer(x, scale=shared)
    return x


def in_place(self: Any, x: Tensor) -> Tensor:
    return x.mul_(2.0)


def own_in_place(self: Any, x: Tensor) -> Tensor:
    return (x * 2.0).add_(1.0)


class Scaled(torch.autograd.Function):
    """A function whose derivative says what its forward does not."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return cotangent * ctx.factor, None


def tie(model: Any) -> None:
    for layer in model.layers[1:]:
        layer.linear.weight = model.layers[0].linear.weight


def freeze_half(model: Any) -> None:
    for layer in model.layers[: LAYERS // 2]:
        layer.requires_grad_(False)


def by_hand(model: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x, scale=float(i))
    return x


def twice(model: Any, x: Tensor) -> Tensor:
    return in_order(model, in_order(model, x))


def reverse(model: Any, x: Tensor) -> Tensor:
    for layer in reversed(model.layers):
        x = layer(x)
    return x


def without_last(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers[:-1]:
        x = layer(x)
    return x


def under_no_grad(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = in_order(model, x)
    return model.layers[0](x)


def under_remat(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = fzero.remat(layer, "dots")(x)
    return x


def under_autocast(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return in_order(model, x).float()


def inner_remat(self: Any, x: Tensor) -> Tensor:
    return fzero.remat(lambda x: F.gelu(x) * 2.0)(x)


def add_hook(self: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    x.register_hook(lambda gradient: gradient * 2.0)
    return x


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "equal": (LAYERS - 2, {}),
    "dropout": (LAYERS - 2, {"do": lambda self, x: F.dropout(x, 0.5)}),
    "attention": (
        LAYERS - 2,
        {"do": lambda self, x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)[0]},
    ),
    "writes to its own memory": (LAYERS - 2, {"do": own_in_place}),
    "a custom function, whose derivative may read anything": (0, {"do": lambda self, x: Scaled.apply(x, 2.0)}),
    "a hook of a gradient, which may read anything": (0, {"do": add_hook}),
    "regions around layers": (LAYERS - 2, {"run": under_remat}),
    "regions in layers": (LAYERS - 2, {"do": inner_remat}),
    "autocast": (LAYERS - 2, {"run": under_autocast}),
    "the loss of a mean": (LAYERS - 2, {"loss": lambda x: x.mean()}),
    "no gradient": (0, {"run": under_no_grad}),
    "an evaluation": (LAYERS - 2, {"take": lambda loss_of: loss_of}),
    "an index that is read": (0, {"do": by_index}),
    "an index that is read from a table": (0, {"do": by_dict}),
    "a factor of the derivative": (0, {"do": lambda self, x: Scaled.apply(x, float(self.index))}),
    "arguments that differ": (0, {"run": by_hand}),
    "half of the layers frozen": (0, {"change": freeze_half}),
    "a context variable": (0, {"do": by_context, "run": set_around}),
    "a global": (0, {"do": by_global, "run": set_around}),
    "values that leave": (0, {"do": append, "run": add_seen}),
    "the value of the layer before": (0, {"do": read_last, "run": forget_last}),
    "a write to what comes out": (0, {"run": write_output}),
    "a list that layers write into": (0, {"run": note_in(lambda x: [], lambda notes: notes)}),
    "a list with a value that has a gradient": (0, {"run": note_in(lambda x: [x], lambda notes: notes[1:])}),
    "an object that layers write into": (0, {"run": note_in(Notes, lambda notes: notes.noted)}),
    "a skip around each layer": (0, {"run": skip}),
    "a value that all layers share": (0, {"run": share}),
    "a tied leaf": (0, {"change": tie}),
    "called twice": (0, {"run": twice}),
    "in the memory of another value": (LAYERS - 2, {"do": in_place}),
    "from the last": (0, {"run": reverse}),
    "without the last": (0, {"run": without_last}),
    "a jvp": (0, {"take": lambda loss_of: lambda params: torch.func.jvp(loss_of, (params,), (params,))}),
    "a second derivative": (0, {"take": lambda loss_of: fzero.grad(lambda p: sum_of(fzero.grad(loss_of)(p)))}),
}


def sum_of(gradient: Any) -> Any:
    return sum(x.full_tensor().sum() for x in fzero.tree.leaves(gradient))


@pytest.mark.parametrize("case", CASES)
def test_the_program_is_that_of_layers_that_run(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, given = CASES[case]
    assert both(monkeypatch, **given) == expected
