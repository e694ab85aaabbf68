"""Programs in a folder: `Programs.find` returns the one that a trace would give, `keep` writes one that a trace gave.

A key is the hash of what a trace can see: the function and all that it reaches, the signature of its arguments, passes,
mesh, settings, the files of all imported modules, and what was put in the place of torch's functions. A file also names
what a trace read as it ran, which is compared before the program is used: variables of the environment, modules that
it imported, and the elements of captured tensors.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fzero.base.frozen import is_frozen
from fzero.base.torch_private import OpOverload, is_wrapper
from fzero.cache.describe import Description
from fzero.cache.encode import ProgramReader, ProgramWriter, read_bytes
from fzero.cache.executed import Executed, hash_globals, record_calls
from fzero.cache.files import stamp, stamp_files
from fzero.cache.patches import list_patches
from fzero.cache.rules import Undescribed
from fzero.cache.store import ProgramStore
from fzero.cache.surroundings import Reads, list_hooks, list_own_files, list_settings, record_reads
from fzero.cache.templates import read_sizes, read_template, write_general
from fzero.cache.values import Reader
from fzero.general.programs import Finish, General, find_limit
from fzero.program.arguments import call_of
from fzero.program.open import Template, find_difference
from fzero.program.program import Program
from fzero.program.records import find_bodies, find_foreign, record
from fzero.ranks.ranks import Ranks
from fzero.tracing.signatures import Signature
from fzero.values.sharded import Form, Sharded

T = TypeVar("T")
MOST_GENERALS = 8
"""The general programs of one step that a folder holds at most: each serves many sizes."""
MOST_BYTES = 64 * 2**20
"""The bytes of captured tensors that are compared at most."""
_log = logging.getLogger("fzero")


class Call(NamedTuple):
    """A call that no program is known for: what a key describes. `settings` are those of `find_ambient`."""

    fn: Callable[..., Any]
    settings: Any
    treedef: Any
    leaves: Sequence[Any]
    passes: Any
    on: Ranks
    measured: Any
    model_axes: tuple[str, ...] = ()


class StoredPrograms:
    """The programs of a step in a folder."""

    def __init__(self, folder: Any, name: str) -> None:
        self._store, self._name = ProgramStore(folder), name

    def find(self, call: Call) -> CallFiles | None:
        """The entry of a call, with its program where there is one. None, which the logger says at level info, where a
        key cannot stand for the call."""
        try:
            return CallFiles(self._store, self._name, call)
        except Undescribed as error:
            _log.info("cache: %s is traced at each start: %s", self._name, error)
        except Exception as error:  # a mistake here must not stop a step
            _log.warning("cache: %s is traced at each start: %s: %s", self._name, type(error).__name__, error)
        return None


class CallFiles:
    """The files of a call: that of its own program, by the shapes of its batches, and those of general programs.
    `program` is None where a trace has to make it."""

    def __init__(self, store: ProgramStore, name: str, call: Call) -> None:
        self._store, self._name, self._call = store, name, call
        self._description = Description(_list_roots(call))
        lines = [*list_settings(call.on.device), *stamp_files(list_own_files()), self._description.digest]
        self._key = _hash(lines)
        self.key = _hash([self._key, *(str(_shape(leaf)) for leaf in call.leaves)])
        self._tensors = _list_tensors(self._description)
        self.program: Program | None = self._read(self.key, lambda data: self._make_reader().read(data["program"]))

    def _read(self, key: str, decode: Callable[[Any], T | None]) -> T | None:
        """What `decode` makes of the data of a file, which nothing contradicts that its trace read. None where there is
        none."""
        data = self._store.read(key)
        if data is None:
            return None
        try:
            change = "its key" if data["key"] != key else self._find_change(data)
            if change is not None:
                _log.info("cache: %s is traced: %s has changed since its file was written", self._name, change)
                return None
            found = decode(data)
        except Exception as error:  # an unknown operation or class: of another version, or not imported
            _log.warning("cache: %s is traced: %s: %s", self._name, type(error).__name__, error)
            return None
        if found is None:
            return None
        for message in data["warnings"]:
            _log.warning("%s", message)
        _log.info("cache: %s has its program from %s", self._name, self._store.path(key))
        return found

    def read_general(self, signature: Signature, finish: Finish) -> General | None:
        """A general program that fits a signature, from a file. None where there is none."""
        limit = find_limit(self._call.passes)

        def decode(data: Any) -> General | None:
            sizes, conditions = read_sizes(data["general"], signature)
            found = sizes.find(signature)
            if isinstance(found, str) or conditions.find_broken(found) is not None:
                return None
            template = read_template(data["general"], self._make_reader(), conditions.names)
            general = General(sizes, lambda: conditions, finish, limit, templates=[template])
            return None if isinstance(general.find_sizes(signature), str) else general

        found = (self._read(key, decode) for key in self._list_keys())
        return next((general for general in found if general is not None), None)

    def _list_keys(self) -> list[str]:
        """The keys of general programs."""
        return [_hash([self._key, "general", str(i)]) for i in range(MOST_GENERALS)]

    def _make_reader(self) -> ProgramReader:
        call = self._call
        known = {leaf.form.layout: leaf.form.layout for leaf in call.leaves if isinstance(leaf, Sharded)}
        return ProgramReader(Reader(call.on.device, call.leaves, self._description.classes, known), self._tensors)

    def _make_writer(self) -> ProgramWriter:
        numbers = {id(x): i for i, x in enumerate(self._tensors)}
        return ProgramWriter(self._call.on.device, self._call.leaves, numbers)

    def _find_change(self, data: Any) -> str | None:
        """What the trace read as it ran and is another now: the first of such."""
        now = hash_globals(data["globals"])
        shapes = [list(x.shape) for x in self._tensors]
        changed = chain(
            (f"the variable {name}" for name, was in data["variables"].items() if os.environ.get(name) != was),
            (f"the module {name}" for name, (file, was) in data["modules"].items() if stamp(file) != was),
            (f"one of {of}" for of, was in data["values"].items() if now.get(of) != was),
            (f"a captured tensor {shapes[i]}" for i, was in data["elements"] if hash_elements(self._tensors[i]) != was),
            (f"the operation {name}" for name, was in data["foreign"].items() if _hash_operation(name) != was),
        )
        return next(changed, None)

    def trace(self, make: Callable[[], Program]) -> Program:
        """The program that `make` traces. It is written to the file, where that can be."""
        with record_reads() as reads, record_calls() as executed:
            program = make()
        self._write(self.key, program, partial(self._describe, program, reads, executed), self._encode)
        return program

    def trace_general(self, make: Callable[[], General | None]) -> General | None:
        """The general program that `make` traces. Its templates are written to files, where that can be."""
        with record_reads() as reads, record_calls() as executed:
            general = make()
        if general is not None:
            describe = cache(partial(self._describe, general.program, reads, executed))
            general.keep(lambda template: self._write_template(general, template, describe))
        return general

    def _write_template(self, general: General, template: Template, describe: Callable[[], dict[str, Any]]) -> None:
        key = next((key for key in self._list_keys() if not self._store.path(key).exists()), None)
        if key is None:
            _log.info("cache: %s has %d general programs in the folder, and keeps no more", self._name, MOST_GENERALS)
            return
        self._write(key, template.program, describe, lambda _: {"general": self._encode_template(general, template)})

    def _write(
        self,
        key: str,
        program: Program,
        describe: Callable[[], dict[str, Any]],
        encode: Callable[[Program], dict[str, Any]],
    ) -> None:
        try:
            self._store.write(key, {"key": key, **describe(), **encode(program)})
        except Undescribed as error:
            _log.info("cache: %s is traced at each start: %s", self._name, error)
        except Exception as error:
            _log.warning("cache: %s is not written: %s: %s", self._name, type(error).__name__, error)

    def _describe(self, program: Program, reads: Reads, executed: Executed) -> dict[str, Any]:
        """What a trace read as it ran, and the messages of the logger."""
        if reads.why:
            raise Undescribed("the step", reads.why)
        return {
            "variables": reads.variables,
            "modules": {name: [file, stamp(file)] for name, file in reads.modules.items()},
            "elements": [[number, hash_elements(self._tensors[number])] for number in self._list_read(program)],
            "foreign": {name: _hash_operation(name) for name in _list_foreign(program)},
            "warnings": reads.warnings,
            "globals": (names := executed.list_names(reads.modules.keys())),
            "values": executed.hash(names),
        }

    def _encode(self, program: Program) -> dict[str, Any]:
        written = self._make_writer().write(program)
        _check_same(find_difference(program, self._make_reader().read(written)))
        return {"program": written}

    def _encode_template(self, general: General, template: Template) -> dict[str, Any]:
        written = write_general(general, template, self._make_writer())
        again = read_template(written, self._make_reader(), template.names)
        _check_same(find_difference(template.program, again.program))
        same = write_general(general, again, self._make_writer())
        _check_same(None if same == written else "numbers that follow from sizes")
        return written

    def _list_read(self, program: Program) -> list[int]:
        """The tensors whose elements the program may depend on: all that it reaches and does not take as they are at
        each step."""
        taken = {id(x) for x in program.constants.values()} - {id(x) for x in program.read}
        found = [i for i, x in enumerate(self._tensors) if id(x) not in taken and not isinstance(x, Sharded)]
        nbytes = sum(self._tensors[i].nbytes for i in found)
        if nbytes > MOST_BYTES:
            raise Undescribed("the step", f"reaches {nbytes} bytes of tensors that are no arguments")
        return found


def _hash(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def _check_same(difference: str | None) -> None:
    if difference is not None:
        raise Undescribed("the program", f"does not read as it was written: {difference}")


def _list_roots(call: Call) -> list[tuple[str, Any]]:
    """What a key describes."""
    name = getattr(call.fn, "__name__", "step")
    leaves = [(f"argument {i}", _sign(leaf, call.on)) for i, leaf in enumerate(call.leaves)]
    own = [
        ("settings", tuple(call.settings)),
        ("arguments", call.treedef),
        ("passes", call.passes),
        ("mesh", call.on.mesh),
        ("model axes", call.model_axes),
    ]
    return [(name, call.fn), *leaves, *own, ("rates", call.measured), *list_hooks(), *list_patches()]


def _sign(leaf: Any, on: Ranks) -> Any:
    """What a program depends on of an argument. This rank's own device has no number."""
    if not isinstance(leaf, Tensor):
        return leaf
    device = "own" if leaf.device == on.device else str(leaf.device)
    if isinstance(leaf, Sharded):
        form: Form = leaf.form
        return "state", form.layout, form.leaf, form.dtype, device, form.place
    return "batch", leaf.ndim, leaf.dtype, device, is_frozen(leaf)


def _shape(leaf: Any) -> Any:
    """The sizes and strides of a batch: what `_sign` leaves out."""
    is_batch = isinstance(leaf, Tensor) and not isinstance(leaf, Sharded)
    return (tuple(leaf.shape), leaf.stride()) if is_batch else None


def _list_tensors(description: Description) -> list[Tensor]:
    return [x for _, x in description.tensors]


def hash_elements(x: Tensor) -> str:
    """A hash of the elements of a tensor; "" where it has none."""
    if x.is_meta:
        return ""
    if x.layout is not torch.strided or is_wrapper(x):
        raise Undescribed("the step", f"reaches a tensor of class {type(x).__name__}, whose elements are not compared")
    return hashlib.sha256(read_bytes(x)).hexdigest()


# operations from outside of fzero


def _list_foreign(program: Program) -> set[str]:
    """The names of the operations from outside of fzero that a program calls: those of `fzero.ops.define`, and
    operators of torch that others registered."""
    found = set[str]()
    for node in program.graph.nodes:
        if node.op == "call_function":
            target, _ = call_of(node) if record(node).draws else (node.target, node.args)
            if isinstance(target, OpOverload):
                found |= {target.namespace} - _OWN
            if record(node).is_foreign:
                found.add(record(node).name)
    return found.union(*map(_list_foreign, find_bodies(program.graph)))


_OWN = frozenset({"aten", "prims", "prim", "fzero"})


def _hash_operation(name: str) -> str:
    """A hash of the record of an operation that `fzero.ops.define` made. An operator that another library registered
    with torch, by its namespace, is code of a file of this process.

    Raises:
        Undescribed: for an operator where the main module has no file.
    """
    known = find_foreign(name)
    if known is not None:
        return Description([(name, known)]).digest
    if not hasattr(sys.modules["__main__"], "__file__"):
        raise Undescribed(f"torch.ops.{name}", "may be defined in a session without a file")
    return ""
