"""Rules: how objects of known classes are described, and which objects hide what they hold."""

from __future__ import annotations

import collections
import contextvars
import datetime
import decimal
import enum
import functools
import hashlib
import inspect
import logging
import os
import re
import threading
import types
import typing
import weakref
from collections import deque
from collections.abc import Callable
from types import CodeType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fzero.base.mesh import mesh_shape
from fzero.base.reachable import is_step
from fzero.base.torch_private import OpOverload, is_wrapper
from fzero.base.torch_private_functions import HigherOrderOperator
from fzero.base.tree import TreeDef
from fzero.cache.code import find_owner, hash_code
from fzero.cache.trees import list_nodes
from fzero.ranks.ranks import Ranks
from fzero.values.sharded import Sharded

Part = tuple[str, Any, bool]
"""What an object holds: a name, the object, and whether it is the user's where the holder is."""
Known = tuple[str, list[Part]]

ATOMS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis), type(NotImplemented), torch.dtype,
     torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo)
)  # fmt: skip
"""Classes of objects that their texts describe: none of a subclass."""

_GENERIC: Any = type(typing.Callable[[int], str])
_BY_TEXT = (
    datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, types.GenericAlias,
    types.UnionType, typing.TypeVar, typing.ParamSpec, _GENERIC.__base__, _GENERIC, type(typing.Any),
    inspect.Signature, inspect.Parameter,
)  # fmt: skip
_EMPTY = (type(threading.Lock()), type(threading.RLock()), logging.Logger, logging.Handler, object)
"""Classes of objects that no step computes with."""
_CALLABLES = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, MemberDescriptorType,
)  # fmt: skip
_FieldGetter: Any = type(vars(collections.namedtuple("_FieldGetter", "field"))["field"])
_BASES = (dict, list, tuple, deque, int, float, complex, str, bytes)
"""Classes of C whose content is known."""
_MANAGED_DICT = 1 << 4  # Py_TPFLAGS_MANAGED_DICT


class Undescribed(Exception):
    """An object that a hash cannot stand for. `place` is the user's name for it."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(f"{place} {why}")
        self.place, self.why = place, why


def describe_by_class(value: Any) -> Known | None:
    """What an object of a known class is called, and what it holds; None for any other class."""
    for cls, describe in _KNOWN:
        if isinstance(value, cls):
            return describe(value)
    if type(value) in _EMPTY or isinstance(value, (logging.Logger, logging.Handler)):
        return f"a {type(value).__qualname__}", []
    if isinstance(value, _BY_TEXT):
        return f"{type(value).__name__} {value!r}", []
    if is_step(value):
        return "step", [("", value.__wrapped__, True), ("passes", value._pipeline.passes, True)]
    if type(value).__qualname__ == "DeviceMesh":  # an optional part of torch
        return f"ranks of {mesh_shape(value)!r}", []
    return _describe_array(value) if type(value).__module__ == "numpy" else None


def name_item(x: Any) -> str:
    """A text by which the items of a set are brought into an order that does not depend on the process.

    Raises:
        Undescribed: for an object without a name.
    """
    if type(x) in ATOMS:
        return f"{type(x).__name__} {x!r}"
    if isinstance(x, (tuple, frozenset)):
        names = list(map(name_item, x))
        return f"{type(x).__name__} {names if isinstance(x, tuple) else sorted(names)}"
    if isinstance(x, enum.Enum):
        return f"enum {type(x).__qualname__} {x._name_}"
    name = getattr(x, "__qualname__", None) if not isinstance(x, Tensor) else None
    if isinstance(name, str):
        return f"{type(x).__name__} {getattr(x, '__module__', '')}.{name}"
    if isinstance(x, OpOverload):
        return f"operator {x}"
    raise Undescribed("", f"is a set of objects of class {type(x).__qualname__}, which have no order")


def _describe_tensor(x: Tensor) -> Known:
    if isinstance(x, Sharded):
        form = x.form
        return f"Sharded {form.leaf} {form.dtype} {form.device}", [
            ("layout", form.layout, True), ("on", form.on, True), ("place", form.place, True)
        ]  # fmt: skip
    with torch.DisableTorchFunctionSubclass():
        head = f"tensor {tuple(x.shape)} {x.dtype} {x.device} {x.layout} {x.requires_grad} {x.is_leaf}"
        plain = x.layout is torch.strided and not is_wrapper(x)
        where = f" {x.stride()} {x.storage_offset()} {x.is_conj()} {x.is_neg()} {x.is_inference()}" if plain else ""
        grad = x.grad if x.is_leaf else None
    parts: list[Part] = [("class", type(x), True), ("grad", grad, True)]
    return head + where, parts + [(key, held, True) for key, held in vars(x).items()]


def _describe_tree(treedef: TreeDef) -> Known:
    parts: list[Part] = []
    for i, (kind, count, data, container) in enumerate(list_nodes(treedef)):
        parts += [(f"{i} of {count}", kind, True), ("data", data, True), ("container", container, True)]
    return "tree", parts


def _describe_array(x: Any) -> Known:
    kind = type(x).__qualname__
    if kind == "ufunc" or kind.startswith("dtype") or kind == "_ArrayFunctionDispatcher":
        return f"numpy {kind} {getattr(x, '__name__', x)!r}", []
    if kind == "ndarray" and x.dtype.hasobject:
        raise Undescribed("", "is an array of objects")
    if kind == "ndarray":
        return f"array {x.shape} {x.dtype.str} {hashlib.sha256(x.tobytes()).hexdigest()} {x.flags.writeable}", []
    if hasattr(x, "dtype") and not getattr(x, "shape", ()):
        return f"number {x.dtype.str} {x.tobytes().hex()}", []
    raise Undescribed("", f"is an object of class numpy.{kind}")


def _describe_callable(x: Any) -> Known:
    owner = getattr(x, "__self__", None)
    if isinstance(owner, ModuleType) or type(owner).__module__ == "pybind11_builtins":  # of a function of C++
        owner = None
    where = getattr(x, "__module__", None) or getattr(getattr(x, "__objclass__", None), "__qualname__", "")
    return f"{type(x).__name__} {where}.{getattr(x, '__qualname__', x.__name__)}", [("self", owner, True)]


def _describe_module(x: ModuleType) -> Known:
    """A module that an object holds: which of its names code uses is not known."""
    if find_owner(x.__name__) != "user":
        return f"module {x.__name__}", []
    return f"module {x.__name__}", [(key, held, False) for key, held in vars(x).items() if not key.startswith("__")]


def _describe_context_variable(x: Any) -> Known:
    try:
        return f"context variable {x.name}", [("value", x.get(), True)]
    except LookupError:
        return f"context variable {x.name}", []


def _describe_partial(x: Any) -> Known:
    return "partial", [
        ("func", x.func, True), ("args", x.args, True), ("keywords", x.keywords, True), ("attributes", vars(x), True)
    ]  # fmt: skip


def _describe_cache(x: Any) -> Known:
    """A function with a cache: what the cache holds follows from the function."""
    return "cache", [(key, held, True) for key, held in vars(x).items()]


def _describe_enum(x: enum.Enum) -> Known:
    return f"enum {x._name_}", [("class", type(x), True), ("value", x._value_, True)]


def _describe_path(x: Any) -> Known:
    return f"path {type(x).__qualname__} {os.fspath(x)!r}", []


def _describe_operator(x: Any) -> Known:
    return f"operator {x}", []


def _refuse(x: Any) -> Known:
    raise Undescribed("", f"is an object of class {type(x).__module__}.{type(x).__qualname__}, which may change")


_KNOWN: list[tuple[Any, Callable[[Any], Known]]] = [
    (Tensor, _describe_tensor),
    (MethodType, lambda x: ("method", [("self", x.__self__, True), ("func", x.__func__, True)])),
    (functools.partial, _describe_partial),
    ((staticmethod, classmethod), lambda x: (type(x).__name__, [("func", x.__func__, True)])),
    (functools._lru_cache_wrapper, _describe_cache),
    (property, lambda x: ("property", [("get", x.fget, True), ("set", x.fset, True), ("del", x.fdel, True)])),
    (functools.cached_property, lambda x: (f"property {x.attrname}", [("func", x.func, True)])),
    (weakref.ref, lambda x: ("reference", [("", x(), True)])),
    (weakref.ProxyTypes, _refuse),
    (enum.Enum, _describe_enum),
    (ModuleType, _describe_module),
    (types.CellType, lambda x: ("cell", [("", x.cell_contents, True)])),
    (torch.library.Library, lambda x: (f"library {x.ns} {x.kind}", [])),
    (CodeType, lambda x: (f"code {hash_code(x)}", [])),
    (_CALLABLES, _describe_callable),
    (_FieldGetter, lambda x: (f"field {x.__reduce__()[1][0]}", [])),
    (TreeDef, _describe_tree),
    (Ranks, lambda x: (f"ranks of {x.mesh!r}", [])),
    (slice, lambda x: ("slice", [("", (x.start, x.stop, x.step), True)])),
    (MappingProxyType, lambda x: ("mapping", [("", dict(x), True)])),
    (types.SimpleNamespace, lambda x: ("namespace", [("class", type(x), True), ("", vars(x), True)])),
    (threading.local, lambda x: ("thread", [("class", type(x), True), ("", vars(x), True)])),
    (contextvars.ContextVar, _describe_context_variable),
    (re.Pattern, lambda x: (f"pattern {x.pattern!r} {x.flags}", [])),
    (os.PathLike, _describe_path),
    ((OpOverload, type(torch.ops.aten.mm), type(torch.ops.aten), HigherOrderOperator), _describe_operator),
    ((types.GeneratorType, types.CoroutineType, types.FrameType), _refuse),
]  # fmt: skip
"""Rules by class; the first that fits counts."""


@functools.lru_cache(1 << 14)
def list_slots(cls: type) -> list[tuple[str, MemberDescriptorType]]:
    """The slots of a class that Python made."""
    held = ((key, slot) for each in cls.__mro__ for key, slot in vars(each).items() if _is_made_by_python(each))
    return [(key, slot) for key, slot in held if isinstance(slot, MemberDescriptorType)]


@functools.lru_cache(1 << 14)
def find_hidden(cls: type) -> Any:
    """The class of C whose content an object of a class has besides its attributes: `object` for none.

    Raises:
        Undescribed: where the object has memory that Python does not show.
    """
    base = next((each for each in cls.__mro__ if each in _BASES), object)
    size = base.__basicsize__
    if cls.__dictoffset__ and not cls.__flags__ & _MANAGED_DICT:
        size += object.__basicsize__ // 2
    if cls.__weakrefoffset__ > 0:
        size += object.__basicsize__ // 2
    size += len(list_slots(cls)) * (object.__basicsize__ // 2)
    known = {collections.OrderedDict: dict, collections.defaultdict: dict}
    for each in cls.__mro__:
        if each in known:
            return known[each]
    if cls.__basicsize__ > size:
        raise Undescribed("", f"is an object of class {cls.__module__}.{cls.__qualname__}, whose content is hidden")
    return base


def _is_made_by_python(cls: type) -> bool:
    return bool(cls.__flags__ & (1 << 9)) and "__module__" in vars(cls)  # Py_TPFLAGS_HEAPTYPE
