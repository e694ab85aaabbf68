"""Modules that hold themselves: replaced forwards, hooks, weights in lists: trained as by torch, or refused by name."""

from __future__ import annotations

import functools
import itertools
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fzero
from fzero import tree
from fzero.base.errors import FzeroError
from fzero.training.models import copy_without_values

MESH = fzero.VirtualMesh(fsdp=2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Twice:
    """A wrapper that is no module, as adapters are."""

    def __init__(self, module: nn.Module) -> None:
        self.forward_of_module, self.scale = module.forward, 2

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_of_module(x) * self.scale


class WithTensorOf(nn.Module):
    """A parametrization that uses a parameter of another module, which it holds in a list."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, w: Tensor) -> Tensor:
        return w + self.others[0].weight  # type: ignore[operator]


def by_closure(m: Net) -> None:
    forward = m.b.forward
    m.b.forward = lambda x: forward(x) * 2  # type: ignore[method-assign]


def on_the_whole_model(m: Net) -> None:
    forward = m.forward
    m.forward = lambda x: forward(x) * 2  # type: ignore[method-assign]


def by_wraps(m: Net) -> None:
    forward = m.b.forward

    @functools.wraps(forward)
    def twice(*args: Any, **kwargs: Any) -> Tensor:
        return forward(*args, **kwargs) * 2

    m.b.forward = twice  # type: ignore[method-assign]


def by_defaults(m: Net) -> None:
    def forward(x: Tensor, first: Any = m.b.forward, *, second: Any = m.a.forward) -> Tensor:
        return first(x) + second(x)

    m.b.forward = forward  # type: ignore[method-assign]


def by_a_method_of_a_closure(m: Net) -> None:
    forward = m.b.forward
    m.b.forward = types.MethodType(lambda self, x: forward(x) * 2 + self.bias, m.b)  # type: ignore[method-assign]


def by_two_functions_with_one_variable(m: Net) -> None:
    forward = m.b.forward

    def inner(x: Tensor) -> Tensor:
        return forward(x) + m.a(x)

    m.b.forward = lambda x: inner(x) + forward(x)  # type: ignore[method-assign]


def by_accelerate(m: Net) -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Double(hooks.ModelHook):  # type: ignore[misc]
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return output * 2

    for module in (m.b, m):
        hooks.add_hook_to_module(module, Double(), append=True)
    hooks.add_hook_to_module(m.b, Double(), append=True)


def by_weights_in_a_list(m: Net) -> None:
    m.weights = [m.b.weight, {"of a": m.a.weight}]  # type: ignore[assignment]
    m.b.forward = lambda x: x @ m.weights[0].T + x @ m.weights[1]["of a"]  # type: ignore


def by_a_weight_in_a_closure(m: Net) -> None:
    weight = m.b.weight
    m.b.forward = lambda x: nn.functional.linear(x, weight, m.b.bias)  # type: ignore[method-assign]


def used_twice(m: Net) -> None:
    m.c, m.d = m.b, nn.ModuleList([m.a, nn.Sequential(m.b, m.b)])
    m.forward = lambda x: m.d[1](m.c(m.a(x)))  # type: ignore


REBOUND: dict[str, Callable[[Net], Any]] = {
    "a closure": by_closure,
    "a closure on the whole model": on_the_whole_model,
    "functools.wraps": by_wraps,
    "defaults": by_defaults,
    "a partial": lambda m: setattr(
        m.b, "forward", functools.partial(lambda s, f, x: f(x) * 2 + s.bias, m.b, m.b.forward)
    ),
    "a method of a closure": by_a_method_of_a_closure,
    "two functions with one variable": by_two_functions_with_one_variable,
    "a method of another module": lambda m: setattr(m.b, "forward", m.a.forward),
    "a method of an object": lambda m: setattr(m.b, "forward", Twice(m.b).forward),
    "accelerate": by_accelerate,
    "a hook": lambda m: m.b.register_forward_hook(lambda module, args, output: output + m.a(args[0])),
    "a pre-hook": lambda m: m.b.register_forward_pre_hook(lambda module, args: (m.a(args[0]),)),
    "a weak reference": lambda m: setattr(m.b, "forward", functools.partial(lambda ref, x: ref()(x), weakref.ref(m.a))),
    "a parametrization": lambda m: parametrize.register_parametrization(m.b, "weight", WithTensorOf(m.a)),
    "weights in a list": by_weights_in_a_list,
    "a weight in a closure": by_a_weight_in_a_closure,
    "modules used twice": used_twice,
    "a module of Python": lambda m: (
        setattr(m, "functions", nn.functional),
        setattr(m.b, "forward", lambda x: m.functions.linear(x, m.b.weight)),
    ),
    "one block twice": lambda m: setattr(m, "b", nn.Sequential(*[nn.Sequential(m.b, nn.Tanh())] * 2)),
}


def make(change: Callable[[Net], Any]) -> Net:
    torch.manual_seed(0)
    module = Net()
    change(module)
    return module


def losses_of_fzero(module: nn.Module, x: Tensor) -> list[float]:
    params, apply = fzero.lower(module)

    def train(params: Any, x: Tensor) -> Any:
        loss, grads = fzero.value_and_grad(lambda p: apply(p, x).square().mean())(params)
        return tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    step, found = fzero.simulate(train, MESH), []
    params = fzero.partition(params, MESH)
    for _ in range(3):
        params, loss = step(params, x)
        found.append(loss.mean().item())
    return found


def losses_of_torch(module: nn.Module, x: Tensor) -> list[float]:
    optimizer, found = torch.optim.SGD(module.parameters(), 0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", REBOUND)
def test_a_module_that_holds_itself_trains_as_the_module(name: str) -> None:
    """And a function of its parameters holds none of them: with zeros there is another output."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    module = make(REBOUND[name])
    params, apply = fzero.lower(module)
    torch.testing.assert_close(apply(params, x), module(x).detach(), rtol=0, atol=0)
    zeros = tree.map(torch.zeros_like, params)
    with torch.no_grad():
        expected = make(REBOUND[name])
        for param in expected.parameters():
            param.zero_()
    torch.testing.assert_close(apply(zeros, x), expected(x).detach(), rtol=0, atol=0)
    torch.testing.assert_close(losses_of_fzero(module, x), losses_of_torch(module, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REBOUND)
def test_a_copy_of_a_copy_without_values_computes_as_the_module(name: str) -> None:
    """The copies hold nothing of the module."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    module = make(REBOUND[name])
    params, apply = fzero.lower(module)
    copied = copy_without_values(copy_without_values(module))
    assert all(param.is_meta for param in copied.parameters())
    assert torch.equal(fzero.lower(copied)[1](params, x), apply(params, x))


def test_a_layer_that_a_package_of_the_user_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own, layers = types.ModuleType("own"), types.ModuleType("own.layers")
    for each in (own, layers):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    module = Net()
    module.package, own.layers, layers.first = own, layers, module.a  # type: ignore
    module.b.forward = lambda x: own.layers.first(x)  # type: ignore[method-assign]
    with pytest.raises(FzeroError, match=r"^package: holds the original Linear in a module"):
        fzero.lower(module)


def test_a_module_of_a_library_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches all modules, and so this one, through `sys.modules`."""
    module = Net()
    module.functions = nn.functional
    monkeypatch.setattr(sys.modules[__name__], "found", module, raising=False)
    params, apply = fzero.lower(module)
    x = torch.randn(3, 4)
    assert torch.equal(apply(params, x), module(x))


GLOBAL: list[Any] = []


def by_a_global(m: Net) -> None:
    GLOBAL[:] = [m]
    m.b.forward = lambda x: GLOBAL[0].a(x)  # type: ignore[method-assign]


def by_a_class(m: Net) -> None:
    forward = m.b.forward
    m.b.__class__ = type("Patched", (nn.Linear,), {"forward": lambda self, x: forward(x)})


def by_a_cache(m: Net) -> None:
    part = functools.lru_cache(lambda: m.a)
    part()
    m.b.forward = lambda x: part()(x)  # type: ignore[method-assign]


def by_a_kept_table(m: Net) -> None:
    m.kept = {"cpu": [m.a.weight * 2]}  # type: ignore[assignment]
    m.b.forward = lambda x: x @ m.kept["cpu"][0]  # type: ignore


REFUSED: dict[str, tuple[Callable[[Net], Any], str]] = {
    "a global": (by_a_global, r"^b\.forward: is a function that uses the original by the global 'GLOBAL'"),
    "a class": (by_a_class, r"^b\.forward: is a function of the class Patched that holds the original"),
    "a cache": (by_a_cache, r"^b\.forward: holds the original Net in a function"),
    "a lock": (lambda m: setattr(m.b, "lock", threading.Lock()), r"^b\.lock: holds a lock, which cannot be copied"),
    "a table that was computed": (by_a_kept_table, r"^kept\['cpu'\]\[0\]: .*an earlier forward computed from param"),
    "a weight in a tuple": (
        lambda m: setattr(m.b, "forward", functools.partial(nn.functional.linear, weight=m.b.weight)),
        r"^b\.weight: is held in a place that cannot be filled",
    ),
    "data of a weight": (
        lambda m: setattr(m.b, "forward", functools.partial(torch.mul, m.b.weight.data)),
        r"other\.args\[0\]|args\[0\]: holds a tensor in the memory of b\.weight",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rebound_is_refused_by_its_name(name: str) -> None:
    change, message = REFUSED[name]
    with pytest.raises(FzeroError, match=message):
        fzero.lower(make(change))[1](fzero.lower(make(change))[0], torch.ones(4, 4))
    GLOBAL.clear()


class Activated(nn.Module):
    """Parts without tensors are made once, with the functions of the class."""

    def __init__(self, first: nn.Module = nn.Tanh(), *, last: nn.Module = nn.Sequential(nn.ReLU())):  # noqa: B008
        super().__init__()
        self.a, self.first, self.last = nn.Linear(4, 4), first, last
        self.add_middle()

    def add_middle(self, middle: nn.Module = nn.GELU()) -> None:  # noqa: B008
        self.middle, self.name_of_super = middle, super().__repr__

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.a(self.first(x))))


class Shared(nn.Module):
    """All objects of the class have one layer."""

    def __init__(self, layer: nn.Module = nn.Linear(4, 4)) -> None:  # noqa: B008
        super().__init__()
        self.layer = layer


def test_a_default_of_a_function_of_the_class_may_be_a_part_without_tensors() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    twice = nn.Sequential(Activated(), Activated())
    assert twice[0].first is twice[1].first
    torch.testing.assert_close(losses_of_fzero(twice, x), losses_of_torch(twice, x), rtol=1e-5, atol=1e-6)
    with pytest.raises(FzeroError, match=r"^__init__: is a function of the class Shared that holds the original"):
        fzero.lower(Shared())


def test_a_parameter_that_gives_its_dtype_alone_is_not_captured() -> None:
    """As the first hidden state of a recurrent model, which a loop makes of `next(model.parameters())`."""
    module, x = Net(), torch.randn(4, 4)
    params, apply = fzero.lower(module)

    def loss(params: Any, x: Tensor) -> Tensor:
        start = module.a.weight.new_zeros(len(x), 4) + torch.full_like(module.b.bias, 0.5)
        return (apply(params, x + start)).square().mean()

    step = fzero.simulate(lambda p, x: fzero.value_and_grad(lambda p: loss(p, x))(p), MESH)
    value, grads = step(fzero.partition(params, MESH), x)
    expected, plain = fzero.value_and_grad(loss)(params, x)
    torch.testing.assert_close(value.mean(), expected)
    torch.testing.assert_close(tree.leaves(fzero.unpartition(grads)), tree.leaves(plain))
    turns = fzero.simulate(lambda p, x: fzero.accumulate(lambda p, x: (loss(p, x), 1.0), 2)(p, x), MESH)
    turns(fzero.partition(params, MESH), x)
    uses = fzero.simulate(lambda p, x: fzero.accumulate(lambda p, x: (apply(p, module.a(x)).sum(), 1.0), 2)(p, x), MESH)
    with pytest.raises(FzeroError, match=r"^a\.weight: the step uses this parameter of a module that was lowered"):
        uses(fzero.partition(params, MESH), x)


def test_a_captured_parameter_of_a_lowered_module_is_an_error() -> None:
    module, x = Net(), torch.ones(4, 4)
    params, apply = fzero.lower(module)

    def loss(params: Any, x: Tensor) -> Tensor:
        return (apply(params, x) - module.a(x)).square().mean()

    step = fzero.simulate(lambda p, x: fzero.value_and_grad(lambda p: loss(p, x))(p), MESH)
    with pytest.raises(
        FzeroError, match=r"^a\.weight: the step uses this parameter of a module that was lowered \(.*in"
    ):
        step(fzero.partition(params, MESH), x)
    module.requires_grad_(False)
    step(fzero.partition(params, MESH), x)


class Biased(nn.Module):
    """Keeps what it computed from a parameter in evaluation mode, as LeViT of timm does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.kept = nn.Parameter(torch.randn(4)), dict[str, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if "cpu" not in self.kept:
            self.kept["cpu"] = self.bias * 2
        return x + self.kept["cpu"]


def test_what_a_forward_keeps_is_forgotten() -> None:
    module, x = Biased().eval(), torch.ones(2, 4)
    params, apply = fzero.lower(module)
    for factor in (1, 3):
        given = tree.map(lambda p, factor=factor: p * factor, params)
        assert torch.equal(apply(given, x), x + 2 * factor * module.bias.detach())
    assert losses_of_fzero(module, x)[0] == pytest.approx(module(x).square().mean().item())
    with pytest.raises(
        FzeroError, match=r"^kept\['cpu'\]: holds a tensor that an earlier forward computed.*; empty it"
    ):
        fzero.lower(module)[1](params, x)
    module.kept.clear()
    assert torch.equal(fzero.lower(module)[1](params, x), module(x).detach())


class Converted(Net):
    """Converts its parts in its forward, as the router of Switch Transformers does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.rnn, self.norm = dtype, nn.GRU(4, 4), nn.BatchNorm1d(4).eval()

    def forward(self, x: Tensor) -> Tensor:
        self.a = self.a.to(self.dtype)
        self.to(self.dtype)
        return self.norm(self.rnn(super().forward(x).unsqueeze(0))[0][0])


def test_a_part_that_the_forward_converts_to_its_own_dtype_stays_as_it_is() -> None:
    module, x = Converted(torch.float64).double(), torch.randn(6, 4, dtype=torch.float64)
    params, apply = fzero.lower(module)
    output = fzero.simulate(lambda p, x: apply(p, x), MESH)(fzero.partition(params, MESH), x)
    torch.testing.assert_close(output.view_as(x), module(x).detach(), rtol=1e-12, atol=1e-12)
    assert losses_of_fzero(module, x) == pytest.approx(losses_of_torch(module, x), rel=1e-12)


@pytest.mark.parametrize("differentiate", [False, True])
def test_a_part_that_the_forward_converts_to_another_dtype_is_refused(differentiate: bool) -> None:
    params, apply = fzero.lower(Converted(torch.float64))
    step = (lambda p, x: fzero.grad(lambda p: apply(p, x).mean())(p)) if differentiate else (lambda p, x: apply(p, x))
    with pytest.raises(
        FzeroError, match=r"^\S+: the forward of Converted changes this .*; .*convert the module before"
    ):
        fzero.simulate(step, MESH)(fzero.partition(params, MESH), torch.randn(2, 4))


# calls that are counted


class Counting(Net):
    count, choices, flag = 0, 2, True

    def __init__(self, how: Callable[[Counting], float]) -> None:
        super().__init__()
        self.how, self.list, self.tables = how, [1.0, 2.0], {"n": 0}
        self.numbers = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.how(self)


def count_and_choose(m: Counting) -> float:
    m.count += 1
    return 2.0 if m.count % m.choices else 1.0


def take_the_last(m: Counting) -> float:
    return m.list.pop()


def count_in_a_dict(m: Counting) -> float:
    m.tables["n"] += 1
    return m.tables["n"] / 2


def turn_off(m: Counting) -> float:
    m.flag = not m.flag
    return 1.0 if m.flag else 2.0


def count_on_the_class(m: Counting) -> float:
    Counting.choices += 1
    return float(Counting.choices)


NUMBER = 0


def count_globally(m: Counting) -> float:
    global NUMBER
    NUMBER += 1
    return float(NUMBER)


def only_count(m: Counting) -> float:
    m.seen += 1
    return 1.0


CHANGES: dict[str, tuple[Callable[[Counting], float], str]] = {
    "an attribute": (count_and_choose, r"^count: the forward changes it from 0 to 1, and reads it"),
    "a list": (take_the_last, r"^list: the forward changes it from 2 to 1 entries"),
    "a dict": (count_in_a_dict, r"^tables\['n'\]: the forward changes it from 0 to 1"),
    "a flag": (turn_off, r"^flag: the forward changes it from True to False"),
    "an iterator": (lambda m: float(next(m.numbers)), r"numbers: the \w+ changes it from count\(1\) to count\(2\)"),
    "a class": (count_on_the_class, r"choices: the step changes it from \d+ to \d+ while it is traced, and reads it"),
    "a global": (count_globally, r"^NUMBER: the step changes it from 0 to 1 while it is traced"),
    "random numbers": (lambda m: random.random(), r"draws from the generator of random: each call would use the num"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_forward_that_depends_on_earlier_calls_is_refused(name: str) -> None:
    how, message = CHANGES[name]
    module = Counting(how)
    vars(module).update(count=0, flag=True, seen=0)
    with pytest.raises(FzeroError, match=message):
        losses_of_fzero(module, torch.ones(4, 4))


def test_what_is_only_counted_or_kept_once_is_harmless() -> None:
    module = Counting(only_count)
    module.seen = 0  # type: ignore[assignment]
    x, shapes = torch.ones(4, 4), list[Any]()
    module.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    assert losses_of_fzero(module, x)[0] == pytest.approx(module(x).square().mean().item())
    assert len(shapes) == 2


def test_a_step_that_depends_on_earlier_calls_is_refused() -> None:
    class Trainer:
        steps = 0

        def train_step(self, x: Tensor) -> Tensor:
            self.steps += 1
            return x * self.steps

    with pytest.raises(
        FzeroError, match=r"^self\.steps: the step changes it from 0 to 1 .*; give what changes as an arg"
    ):
        fzero.simulate(Trainer().train_step, MESH)(torch.ones(2))


def test_a_number_that_the_step_keeps_in_itself_is_refused() -> None:
    """Its name is that of the sharded step, once that took the place of the function."""

    def step(x: Tensor) -> Tensor:
        step.count += 1  # type: ignore[attr-defined]
        return x * step.count  # type: ignore[attr-defined]

    step = fzero.simulate(step, MESH)  # type: ignore[assignment]
    step.count = 0  # type: ignore[attr-defined]
    with pytest.raises(FzeroError, match=r"^step\.count: the step changes it from 0 to 1 "):
        step(torch.ones(2))


FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "scripted": torch.jit.script,
    "of torch.fx": torch.fx.symbolic_trace,
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "DataParallel": nn.DataParallel,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", FORMS)
def test_a_module_in_another_form_trains_as_the_module_or_is_refused_by_name(name: str) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    expected = losses_of_torch(make(lambda m: None), x)
    inside = losses_of_fzero(make(lambda m: setattr(m, "b", FORMS[name](m.b))), x)
    torch.testing.assert_close(inside, expected, rtol=1e-5, atol=1e-6)
    whole = FORMS[name](make(lambda m: None))
    if name in ("scripted", "DataParallel"):
        with pytest.raises(FzeroError, match=r"^(RecursiveScriptModule|DataParallel): .*; give "):
            fzero.lower(whole)
    else:
        torch.testing.assert_close(losses_of_fzero(whole, x), expected, rtol=1e-5, atol=1e-6)
