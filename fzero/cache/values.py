"""Values as plain data: what stands in programs, without tensors and nodes, as lists, texts and numbers of JSON.

    Writer(...).write(value) -> plain data         Reader(...).read(plain data) -> value

What is neither plain nor a record of fzero's own is refused: `Undescribed`. Reading looks names up among what is
imported and runs no code but the constructors of fzero's records.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import math
import operator
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import optree
import torch

from fzero.base.mesh import VirtualMesh
from fzero.base.torch_private import OpOverload
from fzero.base.tree import TreeDef
from fzero.cache.rules import Undescribed
from fzero.cache.trees import build, list_nodes
from fzero.layout.layout import Layout
from fzero.program.open import Number
from fzero.program.records import find_function

_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES = {"list": list, "tuple": tuple, "size": torch.Size, "frozenset": frozenset}
_BUILTINS = {"_operator": operator, "math": math}


class Unreadable(Exception):
    """Data that is no value here: of another version, or of a class that is not imported."""


class Writer:
    """`device` is this rank's own, which other ranks have by another number. `leaves` are those of the arguments."""

    def __init__(self, device: torch.device | None, leaves: Sequence[Any]) -> None:
        self._device = device
        self._places = {id(x): i for i, x in enumerate(leaves)}
        self.layouts: list[Any] = []
        self._numbers: dict[Layout, int] = {}

    def write(self, x: Any) -> Any:
        """Plain data for a value."""
        cls = type(x)
        if cls in _PLAIN:
            return x
        if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
            return [_name_sequence(x), *map(self.write, x)]
        if cls is frozenset:
            return ["frozenset", *sorted(map(self.write, x), key=repr)]
        if isinstance(x, dict):
            return self._write_dict(x)
        for kind, write in _WRITERS:
            if isinstance(x, kind):
                return write(self, x)
        if cls.__module__.startswith("fzero.") and (dataclasses.is_dataclass(cls) or hasattr(x, "_fields")):
            return ["record", name_class(cls), *(self.write(getattr(x, name)) for name in list_fields(cls))]
        raise Undescribed("the program", f"holds an object of class {cls.__module__}.{cls.__qualname__}")

    def write_constant(self, x: Any) -> Any:
        """Plain data for a value that a step returns: an object that it was called with is known by its position."""
        if type(x) not in _PLAIN and id(x) in self._places:
            return ["argument", self._places[id(x)]]
        return self.write(x)

    def write_initial(self, x: Any) -> Any:
        """Plain data for the first value of a pass's state: a number, or a function by which it is drawn, which is
        known by its module and its qualified name."""
        if not callable(x):
            return self.write(x)
        name = getattr(x, "__module__", None), getattr(x, "__qualname__", "")
        if not isinstance(x, FunctionType) or find_by_name(*name) is not x:
            raise Undescribed("the program", f"has state whose initial is {x}, which no module has under its own name")
        return list(name)

    def _write_dict(self, x: Mapping[Any, Any]) -> Any:
        pairs = [[self.write(key), self.write(value)] for key, value in x.items()]
        if type(x) is defaultdict:
            return ["defaultdict", self.write(x.default_factory), *pairs]
        return ["OrderedDict" if type(x) is OrderedDict else "dict", *pairs]

    def _write_layout(self, x: Layout) -> Any:
        number = self._numbers.get(x)
        if number is None:
            fields = [self.write(getattr(x, name)) for name in list_fields(Layout)]
            number = self._numbers[x] = len(self.layouts)
            self.layouts.append(fields)
        return ["layout", number]

    def _write_device(self, x: torch.device) -> Any:
        return ["device", None if x == self._device else str(x)]

    def _write_tree(self, x: TreeDef) -> Any:
        return ["tree", [[self.write(kind), count, self.write(data), self._write_node(held)]
                         for kind, count, data, held in list_nodes(x)]]  # fmt: skip

    def _write_node(self, x: Any) -> Any:
        if isinstance(x, deque):
            return ["deque", x.maxlen, *x]
        if hasattr(x, "_fields") or (isinstance(x, tuple) and type(x) is not tuple):
            return ["node", name_class(type(x)), *x]
        return self.write(x)


def _name_sequence(x: Any) -> str:
    return "size" if isinstance(x, torch.Size) else "list" if isinstance(x, list) else "tuple"


def _write_target(writer: Writer, x: Any) -> Any:
    module: str = getattr(x, "__module__", None) or ""
    if isinstance(x, OpOverload):
        return ["operator", str(x)]
    name: str = getattr(x, "__name__", "")
    if isinstance(x, BuiltinFunctionType):
        home = _BUILTINS.get(module)
        if getattr(home, name, None) is x:
            return ["builtin", module, name]
    elif find_function(name) is x:
        return ["function", name]
    raise Undescribed("the program", f"calls {x}")


_WRITERS: list[tuple[Any, Callable[[Writer, Any], Any]]] = [
    (Layout, Writer._write_layout),
    (VirtualMesh, lambda writer, x: ["mesh", [[name, size] for name, size in x.sizes.items()], x.state and [*x.state]]),
    (torch.dtype, lambda writer, x: ["torch", str(x).removeprefix("torch.")]),
    ((torch.layout, torch.memory_format), lambda writer, x: ["torch", str(x).removeprefix("torch.")]),
    (torch.device, Writer._write_device),
    (slice, lambda writer, x: ["slice", *map(writer.write, (x.start, x.stop, x.step))]),
    (range, lambda writer, x: ["range", x.start, x.stop, x.step]),
    (bytes, lambda writer, x: ["bytes", base64.b64encode(x).decode()]),
    (complex, lambda writer, x: ["complex", x.real, x.imag]),
    (type(Ellipsis), lambda writer, x: ["ellipsis"]),
    (Number, lambda writer, x: ["number", int(x)]),
    (enum.Enum, lambda writer, x: ["enum", name_class(type(x)), x._name_]),
    (Path, lambda writer, x: ["path", str(x)]),
    (type, lambda writer, x: ["class", name_class(x)]),
    (TreeDef, Writer._write_tree),
    ((OpOverload, BuiltinFunctionType, FunctionType), _write_target),
]


def find_by_name(module: Any, path: str) -> Any:
    """What has this qualified name in a module that is imported; None where there is none."""
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if found is not None and hasattr(found, "__dict__") else None
    return found


def name_class(cls: type) -> str:
    """The name by which a class is found again."""
    return f"{cls.__module__}:{cls.__qualname__}"


def list_fields(cls: Any) -> tuple[str, ...]:
    """The fields of a record."""
    return cls._fields if hasattr(cls, "_fields") else tuple(x.name for x in dataclasses.fields(cls) if x.init)


class Reader:
    """The inverse of `Writer`. `classes` has, by name, those that were reached from the step; `known` are layouts that
    take the place of equal ones."""

    def __init__(
        self,
        device: torch.device | None,
        leaves: Sequence[Any],
        classes: Mapping[str, type],
        known: Mapping[Layout, Layout],
    ) -> None:
        self._device, self._leaves, self._classes, self._known = device, leaves, classes, known
        self._layouts: list[Layout] = []
        self._targets: dict[str, Any] = {}

    def read_layouts(self, data: Any) -> None:
        """Read the table of layouts, to which values refer."""
        for fields in data:
            layout = Layout(*map(self.read, fields))
            self._layouts.append(self._known.get(layout, layout))

    def read(self, data: Any) -> Any:
        """The value of plain data.

        Raises:
            Unreadable: for an unknown kind or name.
        """
        if not isinstance(data, list):
            return data
        kind, *rest = data
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](map(self.read, rest))
        if kind not in _READERS:
            raise Unreadable(f"kind {kind!r}")
        return _READERS[kind](self, rest)

    def read_initial(self, data: Any) -> Any:
        """The first value of a pass's state: a number, or a Python function."""
        if not isinstance(data, list):
            return data
        found = find_by_name(*data)
        if not isinstance(found, FunctionType):
            raise Unreadable(f"function {':'.join(data)}")
        return found

    def _find_class(self, name: str) -> Any:
        if name in self._classes or name == "builtins:NoneType":
            return self._classes.get(name, type(None))
        module, _, path = name.partition(":")
        found = find_by_name(module, path)
        if not isinstance(found, type):
            raise Unreadable(f"class {name}")
        return found

    def _read_record(self, rest: list[Any]) -> Any:
        cls = self._find_class(rest[0])
        if not rest[0].startswith("fzero.") or not (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")):
            raise Unreadable(f"record {rest[0]}")
        return cls(**dict(zip(list_fields(cls), map(self.read, rest[1:]), strict=True)))

    def _read_enum(self, rest: list[Any]) -> Any:
        cls = self._find_class(rest[0])
        if not issubclass(cls, enum.Enum):
            raise Unreadable(f"enum {rest[0]}")
        return cls.__members__[rest[1]]

    def _read_operator(self, rest: list[Any]) -> Any:
        name = rest[0]
        if name not in self._targets:
            space, packet, overload = name.split(".")
            target = getattr(getattr(getattr(torch.ops, space), packet), overload)
            if not isinstance(target, OpOverload):
                raise Unreadable(f"operator {name}")
            self._targets[name] = target
        return self._targets[name]

    def _read_builtin(self, rest: list[Any]) -> Any:
        target = getattr(_BUILTINS[rest[0]], rest[1])
        if not isinstance(target, BuiltinFunctionType):
            raise Unreadable(f"function {rest}")
        return target

    def _read_function(self, rest: list[Any]) -> Any:
        target = find_function(rest[0])
        if target is None:
            raise Unreadable(f"operation {rest[0]}")
        return target

    def _read_tree(self, rest: list[Any]) -> TreeDef:
        return build(
            (self.read(kind), count, self.read(data), self._read_node(held)) for kind, count, data, held in rest[0]
        )

    def _read_node(self, data: Any) -> Any:
        if isinstance(data, list) and data[0] == "deque":
            return deque(data[2:], data[1])
        if isinstance(data, list) and data[0] == "node":
            cls = self._find_class(data[1])
            if optree.is_namedtuple_class(cls):
                return tuple.__new__(cls, data[2:])
            if optree.is_structseq_class(cls):
                return cls(data[2:])
            raise Unreadable(f"node {data[1]}")
        return self.read(data)

    def _read_torch(self, rest: list[Any]) -> Any:
        found = getattr(torch, rest[0])
        if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            raise Unreadable(f"torch.{rest[0]}")
        return found

    def _read_device(self, rest: list[Any]) -> Any:
        return self._device if rest[0] is None else torch.device(rest[0])


_READERS: dict[str, Callable[[Reader, list[Any]], Any]] = {
    "dict": lambda reader, rest: {reader.read(key): reader.read(value) for key, value in rest},
    "OrderedDict": lambda reader, rest: OrderedDict((reader.read(key), reader.read(value)) for key, value in rest),
    "defaultdict": lambda reader, rest: defaultdict(
        reader.read(rest[0]), ((reader.read(key), reader.read(value)) for key, value in rest[1:])
    ),
    "layout": lambda reader, rest: reader._layouts[rest[0]],
    "mesh": lambda reader, rest: VirtualMesh(**dict(rest[0])).lay_state(rest[1]),
    "torch": Reader._read_torch,
    "device": Reader._read_device,
    "slice": lambda reader, rest: slice(*map(reader.read, rest)),
    "range": lambda reader, rest: range(*rest),
    "bytes": lambda reader, rest: base64.b64decode(rest[0]),
    "complex": lambda reader, rest: complex(*rest),
    "number": lambda reader, rest: Number(*rest),
    "ellipsis": lambda reader, rest: ...,
    "enum": Reader._read_enum,
    "path": lambda reader, rest: Path(rest[0]),
    "class": lambda reader, rest: reader._find_class(rest[0]),
    "tree": Reader._read_tree,
    "operator": Reader._read_operator,
    "builtin": Reader._read_builtin,
    "function": Reader._read_function,
    "record": Reader._read_record,
    "argument": lambda reader, rest: reader._leaves[rest[0]],
}
