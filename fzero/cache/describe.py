"""Descriptions: a hash of Python objects, of all that can be reached from them, and of how they hold each other.

Equal hashes mean that a trace sees equal values. A function is its code, its closure, its defaults and the globals that
its code names; an object is its class and its attributes; a class is its methods and its bases. A tensor is its form:
its elements are compared apart (`Description.tensors`).

Whose an object is decides how exactly it is described:

    user        all of it. What cannot be described raises `Undescribed`.
    installed   functions and classes of installed packages are in files, whose stamps are part of a key: their code,
                and what they hold as far as that goes. Globals that a trace reads are compared by `executed`.
    closed      packages of `fzero.cache.code.CLOSED`: a name, and a function's closure.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from fzero.base.hugging_face import OWN_HASHES
from fzero.base.reachable import list_names
from fzero.cache.code import find_owner, hash_code
from fzero.cache.rules import ATOMS, Part, Undescribed, describe_by_class, find_hidden, list_slots, name_item

MOST = 200_000
"""How many objects of the user a description has at most."""
MOST_INSTALLED = 20_000
"""How many objects of installed packages it looks into."""


class Description:
    """The hash of `roots`, pairs of a name and an object. `tensors` and `classes` are what was reached.

    With `is_exact` false, an object that cannot be described counts by its class alone.

    Raises:
        Undescribed: for an object of the user that may hold what cannot be seen.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], is_exact: bool = True) -> None:
        self.tensors: list[tuple[str, Tensor]] = []
        self.classes: dict[str, type] = {}
        self._hash = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []  # so that an id stays that of one object
        self._exact = _Queue()
        self._rough = _Queue()
        for name, value in roots:
            self._write(f"{name}: {self._refer(name, value, is_exact)}")
        while self._exact.waiting:
            self._describe(*self._exact.take(), True)
            if len(self._exact.seen) > MOST:
                raise Undescribed("the step", f"reaches more than {MOST} objects")
        while self._rough.waiting and len(self._rough.seen) < MOST_INSTALLED:
            name, value = self._rough.take()
            if id(value) not in self._exact.seen:
                self._describe(name, value, False)

    @property
    def digest(self) -> str:
        """The hash, in hexadecimal digits."""
        return self._hash.hexdigest()

    def _write(self, text: str) -> None:
        self._hash.update(f"{len(text)}:{text}\n".encode("utf-8", "surrogatepass"))

    def _refer(self, name: str, value: Any, is_exact: bool) -> str:
        """A text that stands for an object: an atom itself, and the number of any other, which is described later."""
        cls = type(value)
        if cls in ATOMS:
            return f"{cls.__name__} {value!r}"
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._numbers)
            self._held.append(value)
        (self._exact if is_exact else self._rough).add(name, value)
        return f"#{number}"

    def _describe(self, name: str, value: Any, is_exact: bool) -> None:
        try:
            head, parts = self._list_parts(value)
        except Undescribed as error:
            if is_exact:
                raise Undescribed(name, error.why) from None
            head, parts = f"some {type(value).__module__}.{type(value).__qualname__}", []
        except Exception as error:  # a class of the user that raises where it is asked for its attributes
            if is_exact:
                raise Undescribed(name, f"raises {type(error).__name__} where it is looked at") from error
            head, parts = f"some {type(value).__module__}.{type(value).__qualname__}", []
        texts = [f"{key!r}={self._refer(_join(name, key), x, is_exact and exact)}" for key, x, exact in parts]
        self._write(f"#{self._numbers[id(value)]} {head}: {' '.join(texts)}")

    def _list_parts(self, value: Any) -> tuple[str, list[Part]]:
        """What an object is called, and `(key, object, whether it is the user's)` of what it holds."""
        if isinstance(value, FunctionType):
            return self._list_function(value)
        if isinstance(value, type):
            return self._list_class(value)
        if isinstance(value, Tensor):
            self.tensors.append(("", value))
        if isinstance(value, (set, frozenset)):
            held = [(name_item(x), x, True) for x in value]
            held.sort(key=lambda part: part[0])
            return "set", [("class", type(value), True), *held, *_list_attributes(value, type(value))]
        known = describe_by_class(value)
        if known is not None:
            return known
        cls = type(value)
        base = find_hidden(cls)  # type: ignore[arg-type]  # classes are hashable
        inside: Iterator[Part] = iter(())
        if base is dict:
            inside = (
                pair
                for i, (k, x) in enumerate(dict.items(value))
                for pair in ((f"key {i}", k, True), (f"{i}", x, True))
            )
        elif base in (list, tuple, deque):
            inside = ((str(i), x, True) for i, x in enumerate(base.__iter__(value)))
        elif base is not object:
            inside = iter([("", base.__repr__(value), True)])
        for key in ("maxlen", "default_factory"):  # of a deque, and of a defaultdict
            if cls in (deque, defaultdict) and hasattr(value, key):
                inside = itertools.chain(inside, [(key, getattr(value, key), True)])
        return "object", [("class", cls, True), *inside, *_list_attributes(value, cls)]

    def _list_function(self, fn: FunctionType) -> tuple[str, list[Part]]:
        code, module = fn.__code__, fn.__globals__.get("__name__")
        cells = zip(code.co_freevars, fn.__closure__ or ())
        parts: list[Part] = [(name, _read_cell(cell), True) for name, cell in cells]
        parts += [("defaults", fn.__defaults__, True), ("kwdefaults", fn.__kwdefaults__, True)]
        if find_owner(module) == "user":
            parts += [(key, x, True) for key, x in vars(fn).items()]
            parts += [(key, x, True) for key, x in list_globals(code, fn.__globals__)]
        return f"function {module}.{fn.__qualname__} {hash_code(code)}", parts

    def _list_class(self, cls: type) -> tuple[str, list[Part]]:
        self.classes[f"{cls.__module__}:{cls.__qualname__}"] = cls
        owner = find_owner(str(cls.__module__))
        parts: list[Part] = [("type", type(cls), True)] if type(cls) is not type else []
        if owner != "closed":
            parts += [("base", base, True) for base in cls.__bases__]
            parts += [(key, x, owner == "user") for key, x in vars(cls).items() if key not in _OF_CLASSES]
        return f"class {cls.__module__}.{cls.__qualname__}", parts


_OF_CLASSES = frozenset(
    """
    __dict__ __weakref__ __doc__ __module__ __qualname__ __annotations__ __abstractmethods__ _abc_impl __parameters__
    __orig_bases__ __subclasshook__ __static_attributes__ __firstlineno__ __annotate__ __annotate_func__
    __annotations_cache__ _abc_registry _abc_cache
    """.split()
)
"""What each class has, and what no code computes with."""


class _Queue:
    """Objects that wait to be described, each once."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[str, Any]] = deque()
        self.seen: set[int] = set()

    def add(self, name: str, value: Any) -> None:
        if id(value) not in self.seen:
            self.seen.add(id(value))
            self.waiting.append((name, value))

    def take(self) -> tuple[str, Any]:
        return self.waiting.popleft()


def _join(name: str, key: str) -> str:
    return f"{name}[{key}]" if key.isdigit() else key if not name else f"{name}.{key}"


def _read_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is assigned yet
        return "no value"


def _list_attributes(value: Any, cls: type) -> Iterator[Part]:
    held, skipped = getattr(value, "__dict__", None), (*getattr(cls, "not_described", ()), *OWN_HASHES)
    if str(cls.__module__).startswith("fzero.") and is_dataclass(cls):
        held = {x.name: getattr(value, x.name) for x in fields(cls)}  # not what is remembered beside them
    if isinstance(held, dict):
        yield from ((str(key), x, True) for key, x in held.items() if key not in skipped)
    for key, slot in list_slots(cls):
        try:
            yield key, slot.__get__(value, cls), True
        except AttributeError:  # a slot without a value
            continue


def list_globals(code: CodeType, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The globals `known` that a code names, and of modules that it names or imports what it names of these."""
    names = list_names(code)
    package = str(known.get("__package__") or "")
    waiting = deque[tuple[str, ModuleType]]()
    for name in names:
        value = known.get(name)
        if isinstance(value, ModuleType):
            waiting.append((name, value))
        elif name in known:
            yield name, value
        for imported in (name, f"{package}.{name}") if name not in known else ():
            if isinstance(module := sys.modules.get(imported), ModuleType):
                waiting.append((imported, module))
    seen = set[int]()
    while waiting:
        place, module = waiting.popleft()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield f"{place} is", module.__name__
        if find_owner(module.__name__) == "closed":
            continue
        for key in names:
            if key in vars(module):
                value = vars(module)[key]
                if isinstance(value, ModuleType):
                    waiting.append((f"{place}.{key}", value))
                else:
                    yield f"{place}.{key}", value
