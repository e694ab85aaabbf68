"""Reachable objects: what a function, or an object, holds on to, each with the name that a user would write for it.

    walk("step", step) -> ("model", <module>), ("model.cache", {...}), ("model.cache['k']", <tensor>), ...

A function holds its closure, the globals that its code names, its defaults and, as a method, its object. An object
holds its attributes and items. Code of libraries is not looked into.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import islice
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, fx, nn

from fzero.base.changes import list_defaults
from fzero.base.symbols import Symbol, Symbols
from fzero.base.torch_private_symbols import make_environment

LIMIT = 50_000
"""The most objects that one walk visits, the nearest ones first. A walk of so many takes about 0.1 seconds."""

_CONTAINERS = frozenset({dict, list, tuple, set, frozenset, deque, OrderedDict, defaultdict})
_PLAIN = frozenset({dict, list, tuple, set, frozenset, deque, defaultdict})
"""Containers without attributes."""
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "fzero", "optree", "numpy", "einops"})
_LIBRARIES |= {"_pytest", "sympy", "mpmath"}  # what functions of tests with an `assert` name, and those of open sizes
_LIBRARIES |= frozenset(
    """
    accelerate filelock httpx httpx2 huggingface_hub idna jinja2 packaging peft psutil regex requests safetensors
    tokenizers tqdm yaml
    """.split()
)  # which transformers stands on, or which stand on it: half of what its Trainer reaches
"""Packages whose functions and classes hold nothing of the user's."""
_PARTS = tuple(
    f"transformers.{name}" for name in ("utils.", "tokenization_", "convert_slow_tokenizer", "generation.continuous_")
)
"""Beginnings of names of such modules, in a package of which others, those of models, may hold tensors: a walk leaves
them out. What a layer reads of them is watched all the same."""

_OF_NO_ONE = frozenset(sys.stdlib_module_names - {"builtins", "collections", "functools", "queue", "types"}) | {"sympy"}
"""Modules of Python whose objects (loggers, locks, signatures, dataclass fields) hold nothing of the user's, and the
library with which torch computes open sizes: it loads its modules while a step is traced."""

_OF_OPEN_SIZES = frozenset({Symbols.__module__, make_environment.__module__})
"""Modules of fzero whose objects compute open sizes."""

_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, fx.Graph, *Symbol,
               ModuleType, CodeType, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType,
               GetSetDescriptorType, MemberDescriptorType)  # fmt: skip
"""Classes of objects that hold nothing of the user's."""

_SIMPLE = frozenset({str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device})
"""Classes of most of what objects hold, whose objects hold nothing."""

_Named = tuple[str, Any]
Walked = list[tuple[str, Any, list[_Named]]]
"""Objects that a walk visited, each with its name and what `list_children` found in it."""


def walk(name: str, root: Any, limit: int = LIMIT) -> Iterator[_Named]:
    """`(name, object)` of `root` and of all that can be reached from it, each object once, breadth first."""
    for place, value, _ in walk_with_contents(name, root, limit):
        yield place, value


def walk_with_contents(name: str, root: Any, limit: int = LIMIT) -> Iterator[tuple[str, Any, list[_Named]]]:
    """As `walk`, each object with what `list_children` finds in it, or past the limit with an empty list."""
    yield from _walk(name, root, list_children, limit, _is_empty)


def walk_inside(name: str, root: Any, limit: int = LIMIT, without: Container[int] = ()) -> Iterator[_Named]:
    """`walk` through what objects hold themselves: without globals that functions name, and without classes. Empty
    containers, which may be filled later, are visited; objects with these ids are not."""

    def is_skipped(value: Any) -> bool:
        return id(value) in without or is_of_no_one(value)

    for place, value, _ in _walk(name, root, list_contents, limit, is_skipped):
        yield place, value


def _walk(
    name: str,
    root: Any,
    children: Callable[[str, Any], Iterable[_Named]],
    limit: int,
    is_skipped: Callable[[Any], bool],
) -> Iterator[tuple[str, Any, list[_Named]]]:
    waiting, seen = deque([(name, root)]), {id(root): root}  # values keep objects alive, so that each id is of one
    while waiting:
        name, value = waiting.popleft()
        held = list(children(name, value)) if len(seen) < limit else []
        yield name, value, held
        for child_name, child in held:
            if type(child) not in _SIMPLE and id(child) not in seen and not is_skipped(child):
                seen[id(child)] = child
                waiting.append((child_name, child))


def find_tensor(held: Any) -> str | None:
    """The place of the first tensor that an object holds, such as ".layers[0].keys"; None where it holds none."""
    return next((name for name, value in walk("", held) if isinstance(value, Tensor)), None)


def _is_empty(value: Any) -> bool:
    """Whether an object is known to hold nothing of the user's."""
    return (type(value) in _CONTAINERS and not value) or is_of_no_one(value)


def is_of_no_one(value: Any) -> bool:
    """Whether an object is of a class whose objects hold nothing of the user's."""
    if isinstance(value, type):
        return _is_left_out(value.__module__)
    return _is_class_of_no_one(type(value))  # type: ignore[arg-type]  # a class is taken for unhashable


@functools.lru_cache(1 << 12)
def _is_class_of_no_one(cls: type) -> bool:
    if issubclass(cls, weakref.ref):
        return False
    is_symbolic = cls.__module__ in _OF_OPEN_SIZES
    return is_symbolic or issubclass(cls, _ATOMS) or cls.__module__.partition(".")[0] in _OF_NO_ONE


def list_children(name: str, value: Any) -> Iterable[_Named]:
    """`(name, object)` of what an object keeps alive, with its class, and the globals that a function names."""
    return _find_child_lister(type(value))(name, value)  # type: ignore[arg-type]  # a class is taken for unhashable


@functools.lru_cache(1 << 12)
def _find_child_lister(cls: type) -> Callable[[str, Any], Iterable[_Named]]:
    """The function that lists what objects of a class keep alive. A walk asks for every object that it visits."""
    if cls in _PLAIN:
        return _items
    if issubclass(cls, weakref.ref):
        return _list_nothing
    list_held = _find_lister(cls)  # type: ignore[arg-type]  # as above
    if cls is FunctionType:
        return lambda name, value: (*list_held(name, value), *list_globals(value))
    if issubclass(cls, type):
        return lambda name, value: [(f"{value.__name__}.{key}", item) for key, item in vars(value).items()]
    if issubclass(cls, (Tensor, *_FUNCTIONS)):
        return list_held
    return lambda name, value: (*list_held(name, value), (cls.__name__, cls))


_FUNCTIONS = (MethodType, functools.partial, staticmethod, classmethod, functools._lru_cache_wrapper)


def list_contents(name: str, value: Any) -> Iterable[_Named]:
    """`(name, object)` of what an object holds itself."""
    return _find_lister(type(value))(name, value)  # type: ignore[arg-type]  # a class is taken for unhashable


@functools.lru_cache(1 << 12)
def _find_lister(cls: type) -> Callable[[str, Any], Iterable[_Named]]:
    """The function that lists what objects of a class hold."""
    if cls in _SIMPLE:
        return _list_nothing
    return next(lister for classes, lister in _LISTERS if issubclass(cls, classes))


def _list_nothing(name: str, value: Any) -> Iterable[_Named]:
    return ()


def _list_method(name: str, value: Any) -> Iterable[_Named]:
    return (("self", value.__self__), (name, value.__func__))


def _list_partial(name: str, value: Any) -> Iterator[_Named]:
    yield name, value.func
    yield from ((f"{name}.args[{i}]", item) for i, item in enumerate(value.args))
    yield from ((f"{name}.keywords[{key!r}]", item) for key, item in value.keywords.items())
    yield from _attributes(name, value)


def _list_function_of(name: str, value: Any) -> Iterable[_Named]:
    return ((name, value.__func__),)


def _list_referent(name: str, value: Any) -> Iterable[_Named]:
    return ((name, value()),)


def _list_cache(name: str, value: Any) -> Iterator[_Named]:
    """The cache has no attribute. The collector knows it: a dict of results, or of the links that hold them."""
    return ((name, item) for item in gc.get_referents(value))


def _list_tensor(name: str, value: Any) -> Iterator[_Named]:
    with torch.DisableTorchFunctionSubclass():  # a subclass may refuse the question
        grad = value.grad if value.is_leaf else None
    yield f"{name}.grad", grad
    yield from _attributes(name, value)


def _list_container(name: str, value: Any) -> Iterable[_Named]:
    return (*_items(name, value), *_attributes(name, value))


def _list_closure(name: str, function: FunctionType) -> list[_Named]:
    code = function.__code__
    held = list[_Named]()
    for variable, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            held.append((variable, cell.cell_contents))
        except ValueError:  # a variable that is not assigned yet
            continue
    held += list_defaults(function).items()
    return held + _attributes(name, function) if vars(function) else held


_LISTERS: tuple[tuple[Any, Callable[[str, Any], Iterable[_Named]]], ...] = (
    (FunctionType, _list_closure),
    (MethodType, _list_method),
    (functools.partial, _list_partial),
    ((staticmethod, classmethod), _list_function_of),
    (weakref.ref, _list_referent),
    (functools._lru_cache_wrapper, _list_cache),
    (Tensor, _list_tensor),
    (type, _list_nothing),
    ((dict, list, tuple, set, frozenset, deque), _list_container),
    (object, lambda name, value: _attributes(name, value)),
)


def list_globals(function: FunctionType) -> Iterator[_Named]:
    """`(name, object)` of the globals that the code of a function names. None for a function of a library."""
    if _is_left_out(function.__module__):
        return
    used, known = list_names(function.__code__), function.__globals__
    for variable in used:
        if variable not in known:
            continue
        value = known[variable]
        yield variable, value
        if isinstance(value, ModuleType) and not is_of_library(value.__name__):
            yield from ((f"{variable}.{key}", vars(value)[key]) for key in used if key in vars(value))


@functools.lru_cache(1 << 14)
def list_names(code: CodeType) -> list[str]:
    """The globals and attributes that a code and the functions inside it name, sorted."""
    inner = (list_names(x) for x in code.co_consts if isinstance(x, CodeType))
    return sorted({*code.co_names, *itertools.chain.from_iterable(inner)})


def _items(name: str, value: Any) -> list[_Named]:
    """The items of a container of Python, or of a class derived from one."""
    if isinstance(value, dict):
        return [(f"{name}[{key!r}]", item) for key, item in islice(list(dict.items(value)), LIMIT)]
    return [(f"{name}[{i}]", item) for i, item in enumerate(islice(value, LIMIT))]


def _attributes(name: str, value: Any) -> list[_Named]:
    """The attributes that an instance holds. Attributes of fzero's own objects add nothing to a name: the module in
    what `fzero.lower` returned goes by the name of `apply`. A step holds the function that it wraps, and what a user
    gave it as an attribute: its programs hold nothing of the user's."""
    held = _list_dict(value)
    if is_step(value):
        given = [(f"{name}.{key}", item) for key, item in held if not key.startswith("_")]
        return [(name, value.__wrapped__), *given]
    held += _list_slots(value)
    if is_of_fzero(type(value)):
        return [(name, item) for _, item in held]
    return [(f"{name}.{key}", item) for key, item in held]


def _list_dict(value: Any) -> list[_Named]:
    attributes = getattr(value, "__dict__", None)
    held = list(attributes.items()) if isinstance(attributes, dict) else []
    if not isinstance(value, nn.Module):
        return held
    of_modules = ("_parameters", "_buffers", "_modules")
    return [x for key, item in held for x in (item.items() if key in of_modules else ((key, item),))]


def _list_slots(value: Any) -> Iterator[_Named]:
    for cls, key, slot in _find_slots(type(value)):  # type: ignore[arg-type]  # as above
        try:
            yield key, slot.__get__(value, cls)
        except AttributeError:  # a slot without a value
            continue


@functools.lru_cache(1 << 12)
def _find_slots(cls: type) -> list[tuple[type, str, MemberDescriptorType]]:
    """The slots of a class that are no library's."""
    classes = [x for x in cls.__mro__ if is_of_fzero(x) or not is_of_library(x.__module__)]
    return [(x, key, slot) for x in classes for key, slot in vars(x).items() if isinstance(slot, MemberDescriptorType)]


@functools.lru_cache(1 << 12)
def _is_left_out(module: str | None) -> bool:
    """Whether a walk does not look into functions and classes of a module."""
    return is_of_library(module) or (module or "").startswith(_PARTS)


@functools.lru_cache(1 << 12)
def is_of_library(module: str | None) -> bool:
    """Whether a module is of a package whose functions and classes hold nothing of the user's."""
    return (module or "").partition(".")[0] in _LIBRARIES


def is_step(value: Any) -> bool:
    """Whether an object is a function's step, as `fzero.shard` and `fzero.simulate` return it."""
    return is_of_fzero(type(value)) and "__wrapped__" in getattr(value, "__dict__", ())


def is_of_fzero(cls: type) -> bool:
    """Whether a class is one of fzero's. The module of Cython's class of classes is no string."""
    return str(cls.__module__).startswith("fzero.")
