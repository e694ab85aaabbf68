"""Holders: ways in which one Python object holds a value, and what code writes to get it."""

from __future__ import annotations

import functools
from collections import UserDict, defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import nn


class Holder(NamedTuple):
    """`make(value)` holds a value, `spelled` is code that gets it from an object, in the place of `{}`, and
    `put(object, value)` sets another one."""

    make: Callable[[Any], Any]
    spelled: str
    put: Callable[[Any, Any], None]


class Plain:
    def __init__(self, value: Any) -> None:
        self.inner = value


class Slot:
    __slots__ = ("inner",)

    def __init__(self, value: Any) -> None:
        self.inner = value


class Hidden:
    """Holds a value in an attribute that only its own methods name."""

    def __init__(self, value: Any) -> None:
        self._kept = value

    @property
    def shown(self) -> Any:
        return self._kept

    def give(self) -> Any:
        return self._kept

    def __call__(self) -> Any:
        return self._kept

    def __getitem__(self, key: Any) -> Any:
        return self._kept

    def __iter__(self) -> Any:
        return iter([self._kept])

    def give_by_helper(self) -> Any:
        return get_kept(self)


def get_kept(holder: Any) -> Any:
    return holder._kept


class Table:
    """Finds attributes in a dict."""

    def __init__(self, value: Any) -> None:
        self.table = {"inner": value}

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            return self.table[name]
        raise AttributeError(name)


@dataclass
class Data:
    inner: Any


@dataclass(slots=True)
class SlottedData:
    inner: Any


class Base:
    def read(self) -> Any:
        return self.inner  # type: ignore[attr-defined]


class Derived(Base):
    def __init__(self, value: Any) -> None:
        self.inner = value

    def read(self) -> Any:
        return super().read()

    def read_by_generator(self) -> Any:
        yield self.inner

    def read_by_operator(self) -> Any:
        return attrgetter("inner")(self)

    @staticmethod
    def read_of(holder: Any) -> Any:
        return holder.inner

    def read_by_static(self) -> Any:
        return self.read_of(self)


class Filled(UserDict[str, Any]):
    def __init__(self, value: Any) -> None:
        super().__init__(inner=value)


class Missing(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        return self["inner"]


class Layer(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.inner = value

    def forward(self) -> Any:
        return self.inner


def make_class(value: Any) -> type:
    return type("OfClass", (), {"inner": value})


def make_module(value: Any) -> ModuleType:
    module = ModuleType("held")
    module.inner = value  # type: ignore[attr-defined]
    return module


def make_variable(value: Any) -> ContextVar[Any]:
    variable = ContextVar[Any]("held")
    variable.set(value)
    return variable


def make_closure(value: Any) -> Any:
    def get() -> Any:
        return value

    def put(other: Any) -> None:
        nonlocal value
        value = other

    get.put = put  # type: ignore[attr-defined]
    return get


def _put_inner(holder: Any, value: Any) -> None:
    holder.inner = value


def _put_kept(holder: Any, value: Any) -> None:
    holder._kept = value


def _put_first(holder: Any, value: Any) -> None:
    holder[0] = value


def _put_entry(holder: Any, value: Any) -> None:
    holder["inner"] = value


HOLDERS: dict[str, Holder] = {
    "an attribute": Holder(Plain, "{}.inner", _put_inner),
    "getattr": Holder(Plain, 'getattr({}, "inner")', _put_inner),
    "vars": Holder(Plain, 'vars({})["inner"]', _put_inner),
    "a slot": Holder(Slot, "{}.inner", _put_inner),
    "a namespace": Holder(lambda value: SimpleNamespace(inner=value), "{}.inner", _put_inner),
    "an entry": Holder(lambda value: {"inner": value}, '{}["inner"]', _put_entry),
    "get": Holder(lambda value: {"inner": value}, '{}.get("inner")', _put_entry),
    "values": Holder(lambda value: {"inner": value}, "[*{}.values()][0]", _put_entry),
    "an item": Holder(lambda value: [value], "{}[0]", _put_first),
    "a loop": Holder(lambda value: [value], "[x for x in {}][0]", _put_first),
    "a deque": Holder(lambda value: deque([value]), "{}[0]", _put_first),
    "a property": Holder(Hidden, "{}.shown", _put_kept),
    "a method": Holder(Hidden, "{}.give()", _put_kept),
    "a method with a helper": Holder(Hidden, "{}.give_by_helper()", _put_kept),
    "a call": Holder(Hidden, "{}()", _put_kept),
    "a subscript": Holder(Hidden, "{}[0]", _put_kept),
    "an iterator": Holder(Hidden, "next(iter({}))", _put_kept),
    "__getattr__": Holder(Table, "{}.inner", lambda holder, value: _put_entry(holder.table, value)),
    "a class": Holder(make_class, "{}.inner", _put_inner),
    "an attribute of a class": Holder(
        lambda value: make_class(value)(), "{}.inner", lambda holder, value: _put_inner(type(holder), value)
    ),
    "a module": Holder(make_module, "{}.inner", _put_inner),
    "a module of layers": Holder(Layer, "{}.inner", _put_inner),
    "a forward": Holder(Layer, "{}()", _put_inner),
    "a context variable": Holder(make_variable, "{}.get()", lambda holder, value: holder.set(value)),
    "a closure": Holder(make_closure, "{}()", lambda holder, value: holder.put(value)),
    "a dataclass": Holder(Data, "{}.inner", _put_inner),
    "a dataclass with slots": Holder(SlottedData, "{}.inner", _put_inner),
    "super": Holder(Derived, "{}.read()", _put_inner),
    "a generator": Holder(Derived, "[*{}.read_by_generator()][0]", _put_inner),
    "attrgetter": Holder(Derived, "{}.read_by_operator()", _put_inner),
    "a static method": Holder(Derived, "{}.read_by_static()", _put_inner),
    "a user's dict": Holder(Filled, '{}["inner"]', _put_entry),
    "a missing entry": Holder(lambda value: Missing(inner=value), '{}["other"]', _put_entry),
    "a tuple of objects": Holder(lambda value: (Data(value),), "{}[0].inner", lambda held, x: _put_inner(held[0], x)),
    "a set of objects": Holder(
        lambda value: {Plain(value)}, "[*{}][0].inner", lambda held, x: _put_inner(next(iter(held)), x)
    ),
    "a dict of objects": Holder(
        lambda value: {1: Plain(value)}, "[x.inner for x in {}.values()][0]",
        lambda held, x: _put_inner(held[1], x),
    ),
    "a default dict": Holder(lambda value: defaultdict(int, inner=value), '{}["inner"]', _put_entry),
    "a long list": Holder(lambda value: [*range(30), Plain(value)], "{}[-1].inner", lambda h, x: _put_inner(h[-1], x)),
    "a partial": Holder(
        lambda value: functools.partial(dict.get, {"inner": value}, "inner"), "{}()",
        lambda holder, value: _put_entry(holder.args[0], value),
    ),
}  # fmt: skip

READERS: dict[str, str] = {
    "spelled out": "def step(x):\n    return x * {read_root}\n",
    "a helper": "def helper(held):\n    return {read_held}\n\ndef step(x):\n    return x * helper({root})\n",
    "two helpers": "def second(held):\n    return {read_held}\n\ndef first(held):\n    return second(held)\n\n"
    "def step(x):\n    return x * first({root})\n",
    "beside a written entry": "def helper(held):\n    return {read_held}\n\ndef step(x):\n    y = x.clone()\n"
    "    y[:, 0] = 0.5\n    return y * helper({root})\n",
    "a keyword": "def helper(x, *, held):\n    return x * {read_held}\n\ndef step(x):\n"
    "    return helper(x, held={root})\n",
    "a variable": "def step(x):\n    held = {root}\n    return x * {read_held}\n",
    "an assignment inside": "def step(x):\n    return x * (held := {root}) if False else x * (lambda held: "
    "{read_held})({root})\n",
    "a map": "def step(x):\n    return x * [*map(lambda held: {read_held}, [{root}])][0]\n",
    "a list": "def step(x):\n    return x * [{read_held} for held in [{root}]][0]\n",
    "a helper in a table": "TABLE = {{'helper': lambda held: {read_held}}}\n\ndef step(x):\n"
    "    return x * TABLE['helper']({root})\n",
    "a function that returns it": "def get(held):\n    return held\n\ndef step(x):\n    held = get({root})\n"
    "    return x * {read_held}\n",
    "a condition": "def step(x):\n    held = {root} if x.ndim else None\n    return x * (0 if held is None else "
    "{read_held})\n",
    "an exception": "def step(x):\n    held = {root}\n    try:\n        return x * {read_held}\n"
    "    except KeyError:\n        return x\n",
    "a tuple": "def step(x):\n    held, _ = {root}, 1\n    return x * {read_held}\n",
    "stars": "def helper(x, *args, **named):\n    held, = args\n    return x * {read_held}\n\ndef step(x):\n"
    "    return helper(*(x, {root}))\n",
    "a generator": "def each(held):\n    yield {read_held}\n\ndef step(x):\n    return x * [*each({root})][0]\n",
    "a gradient": "import fzero\n\ndef loss(x, held):\n    return (x * {read_held}).sum()\n\ndef step(x):\n"
    "    return x + fzero.grad(lambda y: loss(y, {root}))(x)\n",
    "a decorator": "import functools\n\ndef decorate(fn):\n    @functools.wraps(fn)\n    def inner(*args):\n"
    "        return fn(*args)\n    return inner\n\n@decorate\ndef helper(x, held):\n    return x * {read_held}\n\n"
    "def step(x):\n    return helper(x, {root})\n",
    "an object that is made": "class Made:\n    def __init__(self, held):\n        self.held = held\n\n"
    "    def read(self):\n        held = self.held\n        return {read_held}\n\ndef step(x):\n"
    "    return x * Made({root}).read()\n",
}
"""Ways to read what is held, in code with the `root`, `read_root`, which is what is read of it, and `read_held`."""

ROOTS: dict[str, str] = {
    "a global": "{source}",
    "a closure": "def outer(root):\n{indented}\n    return step\n\nstep = outer(root)\n",
    "a default": "{with_default}",
    "self": "class Owner:\n    def __init__(self, root):\n        self.root = root\n\n{method}\n"
    "step = Owner(root).step\n",
    "an argument": "{with_argument}",
}
"""Where a step has its root from."""
