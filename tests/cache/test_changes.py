"""What a program depends on: a change of it, and the program in the folder is not used."""

from __future__ import annotations

import argparse
import enum
import functools
import importlib.util
import operator
import os
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from programs import Case
from test_cache_programs import Process
from torch import Tensor, nn
from torch.nn import functional

import fzero
from fzero.base.mesh import VirtualMesh
from fzero.cache import executed, files
from fzero.cache.code import find_owner
from fzero.passes import defaults

MESH = VirtualMesh(fsdp=2)
Step = Callable[..., Any]
RATE = 0.5
HELD = {"rate": 0.5, "list": [1, 2]}
VARIABLE: ContextVar[float] = ContextVar("rate", default=0.5)
SETTING = types.SimpleNamespace(rate=0.5)


class Kind(enum.Enum):
    HALF = 0.5
    WHOLE = 1.0


@dataclass
class Config:
    rate: float
    inner: Any = None


class Pair(NamedTuple):
    rate: float
    other: int


class Slots:
    __slots__ = ("rate",)

    def __init__(self, rate: float) -> None:
        self.rate = rate


class Scaled:
    rate = 0.5

    def scale(self, x: Tensor) -> Tensor:
        return x * self.rate


class Child(Scaled):
    pass


def scaled(x: Tensor, rate: Any = 0.5) -> Tensor:
    return x * rate


def by(scale: Callable[[Tensor], Tensor]) -> Step:
    """A step whose loss is scaled."""

    def step(params: Any, x: Tensor) -> Any:
        value, grads = fzero.value_and_grad(lambda p: scale((x @ p["w"]).mean()))(params)
        return fzero.tree.map(lambda p, g: p - g, params, grads), value

    return step


def case(step: Step, *more: Any, width: int = 4, mesh: VirtualMesh = MESH, dtype: Any = torch.float32) -> Case:
    params = fzero.partition({"w": torch.ones(width, 4, dtype=dtype)}, mesh)
    return Case(step, mesh, (params, torch.ones(2 * mesh.size(), width, dtype=dtype), *more))


def compute(text: str, value: Any) -> Callable[[Tensor], Tensor]:
    """A function of code that no file has."""
    held: dict[str, Any] = {"value": value}
    exec(f"def scale(x):\n    return {text}\n", held)
    return held["scale"]  # type: ignore[no-any-return]


def hold(value: Any, read: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: x * read(value)


def make_local(rate: float) -> Any:
    class Local(Scaled):
        def scale(self, x: Tensor) -> Tensor:
            return x * rate

    return Local()


def lower(change: Callable[[nn.Module], Any]) -> Callable[[Tensor], Tensor]:
    """A module without parameters, changed. Hooks have the numbers that they have in a new process."""
    torch.utils.hooks.RemovableHandle.next_id = 0
    module = nn.Sequential(nn.Hardtanh(-1.0, 1.0), nn.Dropout(0.0))
    change(module)
    params, apply = fzero.lower(module)
    return lambda x: apply(params, x)


HOLDERS: dict[str, Callable[[float], Callable[[Tensor], Tensor]]] = {
    "closure": lambda rate: lambda x: x * rate,
    "default": lambda rate: lambda x, rate=rate: x * rate,
    "keyword of a partial": lambda rate: functools.partial(scaled, rate=rate),
    "partial inside a partial": lambda rate: functools.partial(functools.partial(scaled, rate=rate)),
    "attribute": lambda rate: hold(Config(rate), lambda held: held.rate),
    "attribute of an attribute": lambda rate: hold(Config(1.0, Config(rate)), lambda held: held.inner.rate),
    "slot": lambda rate: hold(Slots(rate), lambda held: held.rate),
    "field": lambda rate: hold(Pair(rate, 1), lambda held: held.rate),
    "arguments of a program": lambda rate: hold(argparse.Namespace(rate=rate), lambda held: held.rate),
    "namespace": lambda rate: hold(types.SimpleNamespace(rate=rate), lambda held: held.rate),
    "item of a dict": lambda rate: hold({"rate": rate}, lambda held: held["rate"]),
    "item of an ordered dict": lambda rate: hold(OrderedDict(rate=rate), lambda held: held["rate"]),
    "item of a deque": lambda rate: hold(deque([1, rate]), lambda held: held[1]),
    "length of a deque": lambda rate: hold(deque([1], maxlen=int(10 * rate)), lambda held: held.maxlen),
    "item of a set": lambda rate: hold({rate}, min),
    "order of a dict": lambda rate: hold({1.0: 0, 2.0: 0} if rate > 0.6 else {2.0: 0, 1.0: 0}, lambda x: next(iter(x))),
    "item by a variable": lambda rate: hold([rate, 2.0], lambda held: held[len(held) - 2]),
    "by getattr": lambda rate: hold(Config(rate), lambda held: getattr(held, "ra" + "te")),
    "default of a dict": lambda rate: hold(defaultdict(functools.partial(float, rate)), lambda held: held["a"]),
    "member": lambda rate: hold(Kind.WHOLE if rate > 0.6 else Kind.HALF, lambda held: held.value),
    "method of an object": lambda rate: make_local(rate).scale,
    "text": lambda rate: hold(str(rate), float),
    "number of a subclass": lambda rate: hold(type("Number", (float,), {})(rate), float),
    "code without a file": lambda rate: compute(f"x * {rate}", 1.0),
    "global of code without a file": lambda rate: compute("x * value", rate),
    "constant of code": lambda rate: (lambda x: x * 2.0) if rate > 0.6 else (lambda x: x * 3.0),
    "type of a number": lambda rate: hold(1 if rate > 0.6 else 1.0, lambda held: 2.0 if isinstance(held, int) else 3.0),
    "sign of zero": lambda rate: hold(0.0 if rate > 0.6 else -0.0, lambda held: float(str(held) + "1")),
    "elements of a tensor that code reads": lambda rate: hold(torch.tensor(rate), float),
    "elements of an array": lambda rate: hold(torch.tensor([rate]).numpy(), lambda held: float(held[0])),
    "dtype of a captured tensor": lambda rate: hold(
        torch.ones(1, dtype=torch.float64 if rate > 0.6 else torch.float32), lambda held: held.sum().to(torch.float32)
    ),
    "setting of a layer": lambda rate: lower(lambda module: setattr(module[0], "max_val", rate)),
    "mode of a layer": lambda rate: lower(lambda module: module.train(rate > 0.6)),
    "hook of a layer": lambda rate: lower(lambda module: module[0].register_forward_hook(lambda m, i, o: o * rate)),
    "forward of one layer": lambda rate: lower(lambda module: setattr(module[0], "forward", lambda x: x * rate)),
    "property": lambda rate: hold(type("Held", (), {"rate": property(lambda self: rate)})(), lambda held: held.rate),
    "remembered result": lambda rate: hold(functools.lru_cache(lambda: rate), lambda held: held()),
}  # fmt: skip


@pytest.mark.parametrize("where", HOLDERS)
def test_a_value_that_a_step_holds(where: str, tmp_path: Path) -> None:
    make = HOLDERS[where]
    first, again, other = (Process(case(by(make(rate))), tmp_path) for rate in (0.5, 0.5, 0.75))
    assert first.prepare()
    assert len(list(tmp_path.iterdir())) == 1
    assert again.has_file() and not other.has_file()


def by_a_global(x: Tensor) -> Tensor:
    return x * RATE * HELD["rate"] * VARIABLE.get() * SETTING.rate  # type: ignore[operator]


def by_a_method(x: Tensor) -> Tensor:
    return Child().scale(x)


def by_torch(x: Tensor) -> Tensor:
    return nn.GELU()(x) * functional.softplus(x)


def by_a_variable(x: Tensor) -> Tensor:
    return x * float(os.environ.get("FZERO_TEST_RATE", "1.0"))


def by_a_name(x: Tensor) -> Tensor:
    return x * getattr(sys.modules[__name__], "RA" + "TE")


def by_a_hidden_way(x: Tensor) -> Tensor:
    return operator.methodcaller("by_a" + "_global", x)(HERE)  # type: ignore[no-any-return]


def by_another_module(x: Tensor) -> Tensor:
    import tests_helper  # type: ignore[import-not-found]

    return tests_helper.scale(x)


HERE = sys.modules[__name__]


def patch_forward(self: nn.GELU, x: Tensor) -> Tensor:
    return x * 2


def patch_softplus(x: Tensor) -> Tensor:
    return x * 2


def patch_scale(self: Any, x: Tensor) -> Tensor:
    return x * 4


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[pytest.MonkeyPatch], None]]] = {
    "global": (by_a_global, lambda patch: patch.setattr(HERE, "RATE", 0.75)),
    "item of a global": (by_a_global, lambda patch: patch.setitem(HELD, "rate", 0.75)),
    "attribute of a global": (by_a_global, lambda patch: patch.setattr(SETTING, "rate", 0.75)),
    "context variable": (by_a_global, lambda patch: VARIABLE.set(0.75) and None),  # type: ignore[func-returns-value]
    "attribute of a class": (by_a_method, lambda patch: patch.setattr(Scaled, "rate", 0.75)),
    "attribute of a derived class": (by_a_method, lambda patch: patch.setattr(Child, "rate", 0.75, raising=False)),
    "method of a class": (by_a_method, lambda patch: patch.setattr(Scaled, "scale", patch_scale)),
    "method of a class of torch": (by_torch, lambda patch: patch.setattr(nn.GELU, "forward", patch_forward)),
    "function of torch": (by_torch, lambda patch: patch.setattr(functional, "softplus", patch_softplus)),
    "partial for a function of torch": (
        by_torch, lambda patch: patch.setattr(functional, "softplus", functools.partial(patch_softplus))
    ),
    "variable of the environment": (by_a_variable, lambda patch: patch.setenv("FZERO_TEST_RATE", "2.0")),
    "global by a computed name": (by_a_name, lambda patch: patch.setattr(HERE, "RATE", 0.75)),
    "global of a function that is reached by hidden ways": (
        by_a_hidden_way, lambda patch: patch.setattr(HERE, "RATE", 0.75)
    ),
    "setting of torch": (by_torch, lambda patch: torch.use_deterministic_algorithms(True)),
    "precision of torch": (by_torch, lambda patch: torch.set_float32_matmul_precision("medium")),
    "backend of torch": (by_torch, lambda patch: torch.backends.mkldnn.set_flags(False)),
    "threads": (by_torch, lambda patch: torch.set_num_threads(2)),
    "path of modules": (by_torch, lambda patch: patch.syspath_prepend("/nowhere")),
}  # fmt: skip


@pytest.fixture
def restored_settings() -> Iterator[None]:
    rate, threads = VARIABLE.get(), torch.get_num_threads()
    flags = torch.backends.mkldnn.set_flags()  # not by attributes: torch's own tests, once imported, forbid that
    yield
    torch.backends.mkldnn.set_flags(*flags)
    VARIABLE.set(rate)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(threads)


@pytest.fixture
def modules_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the user's modules this one alone: code that reads `sys.modules` may read all of them, and a run of the tests
    has imported hundreds."""
    iter_modules = executed._iter_modules

    def iter_some() -> Iterator[tuple[str, types.ModuleType]]:
        return ((name, x) for name, x in iter_modules() if name == __name__ or find_owner(name) != "user")

    monkeypatch.setattr(executed, "_iter_modules", iter_some)


@pytest.mark.usefixtures("restored_settings", "modules_of_this_test")
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_the_surroundings(what: str, tmp_path: Path) -> None:
    scale, change = CHANGES[what]
    first, again, other = (Process(case(by(scale)), tmp_path) for _ in range(3))
    assert first.prepare() and list(tmp_path.iterdir())
    assert again.has_file()
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        assert not other.has_file()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("variable of the environment", "the variable FZERO_TEST_RATE has changed"),
        ("global of a function that is reached by hidden ways", f"of the module {__name__} has changed"),
    ],
)
def test_the_logger_names_what_a_trace_has_read_and_is_another_now(
    what: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scale, change = CHANGES[what]
    first, other = (Process(case(by(scale)), tmp_path) for _ in range(2))
    first.prepare()
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO", "fzero"):
        change(patch)
        assert not other.has_file()
    assert said in caplog.text


CALLS: dict[str, Callable[[Path], Process]] = {
    "stage": lambda folder: Process(case(by(scaled)), folder, defaults(stage=2)),
    "passes": lambda folder: Process(case(by(scaled)), folder, ()),
    "in place": lambda folder: Process(case(by(scaled)), folder, defaults(stage=3, in_place=False)),
    "dtype of reductions": lambda folder: Process(
        case(by(scaled)), folder, defaults(stage=3, reduce_dtype=torch.bfloat16)
    ),
    "mesh": lambda folder: Process(case(by(scaled), mesh=VirtualMesh(fsdp=3)), folder),
    "shape": lambda folder: Process(case(by(scaled), width=8), folder),
    "dtype": lambda folder: Process(case(by(scaled), dtype=torch.float64), folder),
    "argument": lambda folder: Process(case(lambda p, x, n: by(scaled)(p, x), 1), folder),
}


@pytest.mark.parametrize("what", CALLS)
def test_another_call(what: str, tmp_path: Path) -> None:
    Process(case(by(scaled)), tmp_path).prepare()
    other = CALLS[what](tmp_path)
    other.prepare()
    again = CALLS[what](tmp_path)
    again.prepare()
    assert (other.traces, again.traces) == (1, 0)


def test_a_constant_among_the_arguments(tmp_path: Path) -> None:
    def step(params: Any, x: Tensor, rate: float) -> Any:
        return by(lambda y: y * rate)(params, x)

    made = [Process(case(step, rate), tmp_path) for rate in (0.5, 0.5, 0.75)]
    for each in made:
        each.prepare()
    assert [each.traces for each in made] == [1, 0, 1]


@pytest.mark.parametrize("is_reached", [True, False])
def test_a_file_of_another_module(is_reached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code counts where the step reaches it, and its file where it does not."""
    monkeypatch.setattr(files, "_START", float("inf"))
    file, folder = tmp_path / "tests_helper.py", tmp_path / "folder"
    traces = []
    for rate in (0.5, 0.5, 0.75):
        file.write_text(f"def scale(x):\n    return x * {rate}\n")
        spec = importlib.util.spec_from_file_location("tests_helper", file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "tests_helper", module)
        spec.loader.exec_module(module)
        made = Process(case(by(by_another_module if is_reached else by_torch)), folder)
        made.prepare()
        traces.append(made.traces)
    assert traces == [1, 0, 1]
