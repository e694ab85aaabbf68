"""Programs as plain data: `write_program`, and back: `read_program`.

Nodes are rows, fake values are forms in a table of memories, constants are the tensors that the step reaches, by their
number in `fzero.cache.describe`, or the elements of a small tensor that the step itself makes.
"""

from __future__ import annotations

import base64
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, fx

from fzero.base.torch_private import FakeTensorMode, no_dispatch, storage_key
from fzero.base.torch_private_functions import GraphMaker
from fzero.base.torch_private_traces import is_plain, make_as, make_empty
from fzero.cache.rules import Undescribed
from fzero.cache.values import Reader, Writer
from fzero.program.operation import AGAIN, EMITTED_BY
from fzero.program.ops.loops import Loop
from fzero.program.program import Program
from fzero.program.records import body_of, is_call
from fzero.program.signature import Result

LARGEST = 4096
"""The most elements of a tensor that a file holds."""
_TABLES = ("arguments", "results", "out_tree", "layouts", "mesh", "measured", "noted", "pass_state", "reduce_dtypes",
           "remarks", "plan", "is_body", "model_axes")  # fmt: skip
_APART = {"name", "graph", "constants", "fake_mode", "read", "open", "readings", "is_spare"}
assert {x.name for x in fields(Program)} == {*_TABLES, *_APART}


class ProgramWriter:
    """Writes a program. `numbers` has, by its `id`, the number of each tensor that the step reaches."""

    def __init__(self, device: torch.device | None, leaves: Sequence[Any], numbers: Mapping[int, int]) -> None:
        self.values, self._numbers = Writer(device, leaves), numbers
        self._memory: dict[int, int] = {}
        self._nbytes: list[int] = []
        self._lines: dict[str, int] = {}

    def write(self, program: Program) -> dict[str, Any]:
        """Plain data for a program.

        Raises:
            Undescribed: for a program that holds what is no plain data.
        """
        top = self._write(program)
        return {"top": top, "layouts": self.values.layouts, "memory": self._nbytes, "lines": list(self._lines)}

    def _write(self, program: Program) -> Any:
        if program.open is not None:
            raise Undescribed("the program", "has open sizes")
        if program.readings:
            raise Undescribed(program.readings[0].where, "reads elements of the batch")
        rows, numbers = [], dict[Any, int]()
        for node in program.graph.nodes:
            rows.append(self._write_node(node, numbers))
            numbers[node] = len(numbers)
        tables = {name: self._write_table(name, getattr(program, name)) for name in _TABLES}
        constants = {name: self._write_constant(name, x, program) for name, x in program.constants.items()}
        return {
            "name": program.name,
            "nodes": rows,
            "constants": constants,
            "read": self._number_read(program),
        } | tables

    def _write_table(self, name: str, table: Any) -> Any:
        write = self.values.write
        if name == "results":
            return [
                [*(write(getattr(x, field)) for field in _RESULT), self.values.write_constant(x.constant)]
                for x in table
            ]
        if name == "pass_state":
            return [[write(replace(x, initial=0.0)), self.values.write_initial(x.initial)] for x in table]
        return write(dict(table)) if name == "reduce_dtypes" else write(table)

    def _number_read(self, program: Program) -> list[int]:
        if any(id(x) not in self._numbers for x in program.read):
            raise Undescribed("the step", "reads elements of a tensor that it reaches by hidden ways")
        return [self._numbers[id(x)] for x in program.read]

    def _write_node(self, node: Any, numbers: Mapping[Any, int]) -> Any:
        meta = {key: node.meta[key] for key in (EMITTED_BY, AGAIN) if key in node.meta}
        line = node.meta.get("stack_trace")
        place = None if line is None else self._lines.setdefault(line, len(self._lines))
        given = self.write_arguments(tuple(node.args), numbers), self.write_arguments(dict(node.kwargs), numbers)
        target = node.target if isinstance(node.target, str) else self.values.write(node.target)
        return [
            node.name,
            node.op,
            target,
            *given,
            place,
            meta,
            "val" in node.meta,
            self._write_value(node.meta.get("val")),
        ]

    def write_arguments(self, x: Any, numbers: Mapping[Any, int]) -> Any:
        """Plain data for arguments of a node. `numbers` are the positions of the nodes among them."""
        if isinstance(x, fx.Node):
            return ["node", numbers[x]]
        if isinstance(x, Program):
            return ["program", self._write(x)]
        if type(x) is tuple or isinstance(x, list):
            return ["tuple" if type(x) is tuple else "list", *(self.write_arguments(each, numbers) for each in x)]
        if isinstance(x, dict):
            return ["dict", *([key, self.write_arguments(value, numbers)] for key, value in x.items())]
        if isinstance(x, slice):
            return ["slice", *(self.write_arguments(each, numbers) for each in (x.start, x.stop, x.step))]
        return self.values.write(x)

    def _write_value(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return ["tuple" if isinstance(x, tuple) else "list", *map(self._write_value, x)]
        if not isinstance(x, Tensor):
            return self.values.write(x)
        if not is_plain(x):
            raise Undescribed("the program", f"has a value of class {type(x).__name__} that is more than its form")
        key = storage_key(x)
        if key not in self._memory:
            self._memory[key] = len(self._nbytes)
            self._nbytes.append(x.untyped_storage().nbytes())
        form = list(x.shape), list(x.stride()), x.storage_offset(), self._memory[key]
        return ["fake", self.values.write(x.dtype), self.values.write(x.device), *form]

    def _write_constant(self, name: str, x: Tensor, program: Program) -> Any:
        if id(x) in self._numbers:
            return self._numbers[id(x)]
        made = [node for node in program.graph.find_nodes(op="get_attr") if node.target == name]
        is_made = (
            all(is_call(user, *_LIFTS) for node in made for user in _iter_users(node))
            and x.untyped_storage().resizable()
        )
        is_small = type(x) is Tensor and x.numel() <= LARGEST and x.is_contiguous() and x.device.type == "cpu"
        if not (is_made and is_small) or x.requires_grad:
            raise Undescribed("the step", f"captures a tensor {list(x.shape)} that it reaches by hidden ways")
        return [self.values.write(x.dtype), list(x.shape), base64.b64encode(read_bytes(x)).decode()]


def _iter_users(node: fx.Node) -> Iterator[fx.Node]:
    """What takes the value of a node, also in turns of loops that are given it."""
    for user in node.users:
        held = [] if body_of(user) is None else zip(Loop(*user.args).operands, Loop(*user.args).body.placeholders)
        inside = [placeholder for operand, placeholder in held if operand is node]
        yield from [each for placeholder in inside for each in _iter_users(placeholder)] or [user]


_LIFTS = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)
"""What calls `torch.tensor(...)` inside of a step, with a tensor of memory that torch itself allocated."""
_RESULT = ("path", "bucket", "leaf", "is_constant", "varies", "kind", "place", "replaces", "own")
assert {x.name for x in fields(Result)} == {*_RESULT, "constant"}


def read_bytes(x: Tensor) -> bytes:
    """The elements of a tensor."""
    flat = x.detach().cpu().reshape(-1).contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b""


class ProgramReader:
    """Reads a program. `tensors` are those that the step reaches."""

    def __init__(self, values: Reader, tensors: Sequence[Tensor]) -> None:
        self.values, self._tensors = values, tensors
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._likes: dict[Any, Any] = {}
        self._memory: list[torch.UntypedStorage] = []
        self._lines: list[str] = []

    def read(self, data: Mapping[str, Any]) -> Program:
        """The program of plain data.

        Raises:
            Unreadable: where names are unknown.
        """
        self.values.read_layouts(data["layouts"])
        self._memory = [torch.UntypedStorage(nbytes, device="meta") for nbytes in data["memory"]]
        self._lines = data["lines"]
        with no_dispatch():
            return self._read(data["top"])

    def _read(self, data: Mapping[str, Any]) -> Program:
        maker, nodes = GraphMaker(), list[Any]()
        for name, op, target, args, kwargs, line, meta, has_value, value in data["nodes"]:
            called = target if isinstance(target, str) else self.values.read(target)
            found = dict(meta)
            if has_value:
                found["val"] = self._read_value(value)
            if line is not None:
                found["stack_trace"] = self._lines[line]
            given = self.read_arguments(args, nodes), self.read_arguments(kwargs, nodes)
            nodes.append(maker.add(name, op, called, *given, found))
        tables = {name: self._read_table(name, data[name]) for name in _TABLES}
        constants = {name: self._read_constant(x) for name, x in data["constants"].items()}
        read = tuple(self._tensors[number] for number in data["read"])
        return Program(data["name"], maker.graph, constants=constants, fake_mode=self._mode, read=read, **tables)

    def _read_table(self, name: str, data: Any) -> Any:
        if name == "results":
            rows = [list(map(self.values.read, row)) for row in data]
            return tuple(Result(**dict(zip(_RESULT, row)), constant=row[-1]) for row in rows)
        if name == "pass_state":
            return tuple(replace(self.values.read(x), initial=self.values.read_initial(first)) for x, first in data)
        return self.values.read(data)

    def read_arguments(self, data: Any, nodes: Sequence[Any]) -> Any:
        """Arguments of a node, of a program with these `nodes`."""
        if not isinstance(data, list):
            return data
        kind, *rest = data
        if kind == "node":
            return nodes[rest[0]]
        if kind == "list":
            return [self.read_arguments(x, nodes) for x in rest]
        if kind == "tuple":
            return tuple(self.read_arguments(x, nodes) for x in rest)
        if kind == "dict":
            return {key: self.read_arguments(x, nodes) for key, x in rest}
        if kind == "slice":
            return slice(*(self.read_arguments(x, nodes) for x in rest))
        return self._read(rest[0]) if kind == "program" else self.values.read(data)

    def _read_value(self, data: Any) -> Any:
        if not isinstance(data, list):
            return data
        kind, *rest = data
        if kind != "fake":
            items = [self._read_value(x) for x in rest] if kind in ("list", "tuple") else []
            return items if kind == "list" else tuple(items) if kind == "tuple" else self.values.read(data)
        dtype, device, shape, stride, start, memory = rest
        found = self.values.read(device)
        if found not in self._likes:
            self._likes[found] = make_empty(self._mode, found)
        return make_as(self._likes[found], self.values.read(dtype), shape, stride, start, self._memory[memory])

    def _read_constant(self, data: Any) -> Tensor:
        if isinstance(data, int):
            return self._tensors[data]
        dtype, shape, text = data
        elements = bytearray(base64.b64decode(text))
        kind = self.values.read(dtype)
        made = torch.frombuffer(elements, dtype=kind) if elements else torch.empty(0, dtype=kind)
        return made.reshape(shape).clone()
