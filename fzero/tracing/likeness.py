"""Likeness of layers: whether two modules are equal but for their tensors, and whether code has changed what it reads.

A layer's index differs from that of the next one, and most layers never read it. So attributes that differ are watched
while the first layer runs.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fzero.base.executed_code import record_code
from fzero.base.hugging_face import is_cache_module
from fzero.base.installed import find_package, is_installed
from fzero.base.reachable import is_of_library
from fzero.base.torch_private import unwrap
from fzero.tracing.contents import HeldContents
from fzero.tracing.watched_reads import LayerIndex, watch_reads
from fzero.values.layers import is_handed_over

Attribute = tuple[str, str]
"""The path of a module in a layer, and the name of an attribute."""

_ATOMS: frozenset[Any] = frozenset(
    (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size, range)
)
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
_BY_NAME = frozenset({"globals", "vars", "eval", "exec", "__dict__", "locals", "import_module", "__import__"})
"""Names in code that may read what no name in it says."""
_GENERATED = frozenset({"_tuple_new", "hash", "NotImplemented"})
"""Globals of the methods that Python generates for a named tuple and for a dataclass: builtins, and one of its own."""
_LATER = frozenset(
    {"Function.apply", "Tensor.register_hook", "Tensor.register_post_accumulate_grad_hook", "register_multi_grad_hook"}
)
"""Functions of torch that let code of a user run in the backward pass, where nothing sees what it reads."""


def find_differences(a: nn.Module, b: nn.Module) -> set[Attribute] | None:
    """The attributes in which two layers differ. None where they differ in more than values of attributes: in the
    classes or the names of what they are made of."""
    found: set[Attribute] = set()
    parts, others = dict(a.named_modules()), dict(b.named_modules())
    if parts.keys() != others.keys() or _find_sharing(a) != _find_sharing(b):
        return None
    pairs = {id(part): others[path] for path, part in parts.items()}
    for path, part in parts.items():
        other = others[path]
        if type(part) is not type(other) or _describe_buffers(part) != _describe_buffers(other):
            return None
        mine, its = vars(part), vars(other)
        if mine.keys() != its.keys() or _list_parameters(part) != _list_parameters(other):
            return None
        for name, x in mine.items():
            y = its[name]
            if name in _TABLES or x is y or (name == "forward" and is_handed_over(x) and is_handed_over(y)):
                continue
            if not _is_equal(x, y, pairs):
                found.add((path, name))
    return found


def find_differing(layers: nn.Module, at: int) -> dict[int, set[Attribute]]:
    """LayerIndex -> the attributes in which a layer of a list differs from the one at a position, for those that differ
    in nothing else."""
    children = list(layers.children())
    found = {i: find_differences(children[at], child) for i, child in enumerate(children) if i != at}
    return {i: each for i, each in found.items() if each is not None}


def _list_parameters(module: nn.Module) -> list[tuple[str, bool | None]]:
    """The parameters of a module, and whether autograd follows them."""
    return [(name, None if x is None else x.requires_grad) for name, x in module._parameters.items()]


def list_buffers(module: nn.Module) -> list[Tensor]:
    """The buffers of a module and of its parts, one that lies in two places twice."""
    return [x for _, x in module.named_buffers(remove_duplicate=False)]


def _find_sharing(module: nn.Module) -> list[int]:
    """For each buffer the position of the first one that is the same tensor."""
    ids = list(map(id, list_buffers(module)))
    return list(map(ids.index, ids))


def _describe_buffers(module: nn.Module) -> list[Any]:
    """The buffers of a module, and their forms. A traced one is like no other, and so is one of a single element: torch
    knows its value in a trace, where Python may decide by it."""
    return [(name, x if x is None else _describe_buffer(x)) for name, x in module._buffers.items()]


def _describe_buffer(x: Tensor) -> Any:
    if type(x) is not Tensor or unwrap(x) is not x or x.layout is not torch.strided or x.numel() < 2:
        return id(x)
    return x.dtype, x.device, x.shape, x.stride(), x.storage_offset(), x.requires_grad, x.is_conj(), x.is_neg()


def _is_equal(x: Any, y: Any, pairs: dict[int, Any]) -> bool:
    """Whether two values are equal and stay so. `pairs` has the module of the other layer for each of the one's."""
    if x is y:
        return not isinstance(x, Tensor)
    cls = type(x)
    if cls is not type(y):
        return False
    if cls in _ATOMS:
        return bool(x == y) and (cls is not float or repr(x) == repr(y))  # 0.0 is no -0.0
    if cls in (list, tuple):
        return len(x) == len(y) and all(_is_equal(*each, pairs) for each in zip(x, y))
    if cls in (dict, OrderedDict):
        return list(x) == list(y) and all(_is_equal(x[key], y[key], pairs) for key in x)
    if cls is set:
        return all(type(each) in _ATOMS for each in x) and x == y
    if cls is MethodType:
        return x.__func__ is y.__func__ and pairs.get(id(x.__self__)) is y.__self__
    if cls is functools.partial:
        return _is_equal((x.func, x.args, x.keywords), (y.func, y.args, y.keywords), pairs)
    return isinstance(x, nn.Module) and pairs.get(id(x)) is y


class ReadAttributes:
    """What code has read of the attributes in which a layer differs from others. With its position `at` in a cache, its
    index may go there: the cache finds the slot of the layer by it."""

    def __init__(self, layer: nn.Module, attributes: set[Attribute], at: int | None) -> None:
        self._parts, self._attributes, self._at = dict(layer.named_modules()), attributes, at
        self._is_watched: Callable[[Any], bool] = lambda part: False
        self._seen: set[Attribute] = set()
        self.indices: set[Attribute] = set()
        """Attributes that are the index, and that code may have handed to a cache."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """The context in which the layer runs."""
        paths = {path for path, _ in self._attributes}
        parts = [(self._parts[path], functools.partial(self._note, path)) for path in paths]
        with watch_reads(parts) as self._is_watched:
            yield

    def _note(self, path: str, name: str, x: Any) -> Any:
        if name == "__dict__" and not _is_read_by_torch():
            self._seen |= {each for each in self._attributes if each[0] == path}
        if (path, name) not in self._attributes:
            return x
        if type(x) is int and x == self._at:
            self.indices.add((path, name))
            return LayerIndex(x, lambda module: None if is_cache_module(module) else self._seen.add((path, name)))
        self._seen.add((path, name))
        return x

    def list_read(self) -> set[Attribute]:
        """The attributes that were read, but for an index that only caches looked at."""
        return {each for each in self._attributes if each in self._seen or not self._is_watched(self._parts[each[0]])}


def has_index(layer: nn.Module, indices: set[Attribute], at: int) -> bool:
    """Whether attributes of a layer that are indices are its position."""
    found = (vars(layer.get_submodule(path)).get(name) for path, name in indices)
    return all(type(x) is int and x == at for x in found)


def _is_read_by_torch() -> bool:
    """Whether `nn.Module` looks for a tensor or a module, by its name, in the attributes of an object."""
    return sys._getframe(3).f_globals.get("__name__") == nn.Module.__module__


class ReadGlobals:
    """What the code that a layer ran has read by the names of globals, as it was then."""

    def __init__(self) -> None:
        self._named: list[tuple[dict[str, Any], str, Any]] = []
        self._contents = HeldContents()
        self._is_recorded = False

    @property
    def is_known(self) -> bool:
        """Whether that is all that the code may have read."""
        return self._is_recorded and self._contents.is_known

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the code that runs in this context. Nothing is known where another profiler runs."""
        with record_code() as codes:
            yield
        if codes is not None:
            modules = _list_modules()
            self._is_recorded = all(self._take(code, modules) for code in codes)

    def _take(self, code: CodeType, modules: dict[str, list[ModuleType]]) -> bool:
        """Note the globals that a code names. Returns whether these are all that it may read."""
        homes = modules.get(code.co_filename, [])
        packages = [find_package(code.co_filename), *(home.__name__ for home in homes)]
        if any(map(is_of_library, packages)) or code.co_filename.startswith("<frozen "):
            return not (packages[0] == "torch" and code.co_qualname in _LATER)
        if code.co_filename == "<string>":  # of a named tuple or a dataclass; of a user, where it reads globals
            return all(x.argval in _GENERATED for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL")
        names = set(code.co_names)
        has_variables = set(code.co_freevars) - {"__class__"} and not is_installed(code.co_filename)
        if not homes or names & _BY_NAME or has_variables:  # a variable of a decorator stays what it is
            return False
        for home in homes:
            self._note_names(home, names, set())
        return True

    def _note_names(self, module: ModuleType, names: set[str], seen: set[int]) -> None:
        """Note what code reads of a module, and of users' modules in it."""
        seen.add(id(module))
        for name in names & vars(module).keys():
            x = vars(module)[name]
            self._named.append((vars(module), name, x))
            self._contents.add(x)
            if isinstance(x, ModuleType) and not is_of_library(x.__name__) and id(x) not in seen:
                self._note_names(x, names, seen)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of these tensors is among what was read."""
        return any(x is each for _, _, x in self._named for each in tensors) or self._contents.holds(tensors)

    def is_same(self) -> bool:
        """Whether all that was read is what it was."""
        return all(held.get(name, self) is x for held, name, x in self._named) and self._contents.is_same()


def _list_modules() -> dict[str, list[ModuleType]]:
    """The modules of each file."""
    found: dict[str, list[ModuleType]] = {}
    for module in list(sys.modules.values()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str):  # looked up in the table: a lazy module would import what it lacks
            found.setdefault(file, []).append(module)
    return found
