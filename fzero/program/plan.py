"""Plan: all that is decided about the program of a step, as a value that is printed, saved, compared and used again."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from fzero.base.arguments import check_arguments, is_whole
from fzero.base.dtypes import name_dtype
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.base.placement import Placement, check_placement
from fzero.base.placement import disk as make_disk
from fzero.base.placement import host as make_host
from fzero.base.sizes import parse_size
from fzero.base.text_files import write_text
from fzero.program.rates import Rates, check_rates, read_rates

REDUCE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
VERSION = 1
"""Of the files that `Plan.save` writes."""
_VERSION_KEY = "fzero plan"
_LISTED, _NEAREST = 6, 3
"""How many names a line of `str(plan)` has, and how many an error."""


@dataclass(frozen=True)
class Plan:
    """All that is decided about the program of a step. The defaults are those of `fzero.shard`.

    * `stage`: 0 to 3, as in `fzero.shard`.
    * `keep`: the buckets that stay gathered from their first to their last use, at stage 3.
    * `again`: the values of the forward pass that the backward pass computes again, by the names of their nodes in the
      trace.
    * `on_host`: the values that go to the host behind the forward pass, and come back.
    * `to`: a placement. State that is given there, or on the device, lies there where `away` names it, and else on the
      device. None: all state stays where it was given.
    * `away`: the arguments of the step whose state lies in `to`, by their paths.
    * `ahead`: the bytes that collectives have to start ahead of their use. None: as many as `fzero.passes.prefetch`
      gives them.
    * `chunk`, `reduce_dtype`: as in `fzero.shard`.
    * `in_place`: whether new state is written over the old: `donate` of `fzero.shard`.
    * `mesh`: the mesh that the plan was made for, None for any. Another one is refused.
    * `rates`: the rates that schedule the program until `step.calibrate` measures others. None: guesses.

    Raises:
        FzeroError: for a value that a field does not take, and for fields that exclude each other.
    """

    stage: int = 3
    keep: frozenset[str] = frozenset()
    again: frozenset[str] = frozenset()
    on_host: frozenset[str] = frozenset()
    to: Placement | None = None
    away: frozenset[str] = frozenset()
    ahead: int | None = None
    chunk: int | None = None
    reduce_dtype: torch.dtype | None = None
    in_place: bool = True
    mesh: VirtualMesh | None = None
    rates: Rates | None = None

    def __post_init__(self) -> None:
        check_stage(self.stage)
        for name in _SETS:
            object.__setattr__(self, name, _freeze(name, getattr(self, name)))
        check_placement(self.to)
        for name, kind in (("in_place", bool), ("mesh", VirtualMesh | None), ("rates", Rates | None)):
            if not isinstance(getattr(self, name), kind):
                raise FzeroError(name, f"is {getattr(self, name)!r:.80}", f"give a value of {kind}")
        if self.rates is not None:
            check_rates("rates", self.rates)
        if both := self.again & self.on_host:
            problem = f"are both computed again and moved to the host: {', '.join(sorted(both)[:_NEAREST])}"
            raise FzeroError("again and on_host", problem, "name each value in one of them")
        if self.ahead is not None and (not is_whole(self.ahead) or self.ahead < 0):
            raise FzeroError("ahead", f"is {self.ahead!r}", "give a number of bytes from 0 on, or None")
        if self.chunk is not None:
            object.__setattr__(self, "chunk", parse_size("chunk", self.chunk))
        if self.reduce_dtype not in (None, *REDUCE_DTYPES):
            way_out = f"give {' or '.join(map(str, REDUCE_DTYPES))}, or None to keep each gradient's dtype"
            raise FzeroError("reduce_dtype", f"is {self.reduce_dtype!r}", way_out)
        if self.keep and self.stage != 3:
            problem = f"names buckets, and the stage is {self.stage}, which gathers no bucket twice"
            raise FzeroError("keep", problem, "give stage=3, or no buckets")
        if self.away and self.to is None:
            raise FzeroError("away", "names state, and `to` is None", "say where it lies: to=fzero.host()")

    def __str__(self) -> str:
        """The stage, and a line for each other field that is not as usual."""
        usual, shown = Plan(), {field.name: getattr(self, field.name) for field in fields(self)}
        own = ((name, x) for name, x in shown.items() if name == "stage" or x != getattr(usual, name))
        return "\n".join(f"{name}: {_fold(x) if name in _SETS else x}" for name, x in own)

    def lines(self) -> list[str]:
        """What ranks compare, one line each: all but the mesh and the rates that the plan was made for."""
        return [f"plan {name}: {value}" for name, value in _write(self).items() if name not in ("mesh", "rates")]

    def check_mesh(self, mesh: VirtualMesh) -> None:
        """Refuse a step on another mesh than the plan was made for."""
        if self.mesh is not None and self.mesh.sizes != mesh.sizes:
            way_out = "search again with memory=, or take it as it is: dataclasses.replace(plan, mesh=None)"
            raise FzeroError("plan", f"was made for {self.mesh}, and the step runs on {mesh}", way_out)

    @check_arguments
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file of JSON. Ranks have equal plans, so that one of them saves."""
        usual, rows = _write(Plan()), {_VERSION_KEY: VERSION, "stage": self.stage}
        rows |= {name: x for name, x in _write(self).items() if x != usual[name]}
        lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in rows.items())
        write_text("plan", path, "{\n" + ",\n".join(lines) + "\n}\n")

    @staticmethod
    @check_arguments
    def load(path: str | os.PathLike[str]) -> Plan:
        """The plan of a file that `save` wrote. `load` of a saved plan equals it.

        Raises:
            FzeroError: for a file that is no plan, and for a key or a value that no plan has.
        """
        where = f"plan {os.fspath(path)!r}"
        try:
            rows = json.loads(Path(path).read_text())
            if rows.pop(_VERSION_KEY) is not VERSION:
                raise TypeError(f"of another version than {VERSION}")
            check_names("keys", rows, (field.name for field in fields(Plan)), "a plan")
            return Plan(**{name: _FORMS[name][1](x) if name in _FORMS else x for name, x in rows.items()})
        except FzeroError as error:
            raise FzeroError(f"{where}: {error.where}", error.problem, error.way_out) from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise FzeroError(where, f"is no plan: {error!r}", "give a file that Plan.save wrote") from error


_SETS = ("keep", "again", "on_host", "away")


def check_stage(stage: int) -> None:
    """Refuse a number that is no stage: another one than 0, 1, 2 or 3."""
    if not is_whole(stage) or stage not in (0, 1, 2, 3):
        raise FzeroError("stage", f"is {stage!r}", "stages are 0, 1, 2 and 3")


def check_names(where: str, names: Iterable[str], known: Iterable[str], of: str) -> None:
    """Refuse the first of these names that is not among the `known` ones `of` a step, with the nearest of them."""
    known = list(known)
    for name in sorted(set(names) - set(known)):
        near = ", ".join(difflib.get_close_matches(name, known, _NEAREST, 0.0))
        raise FzeroError(where, f"{name!r} is not of {of}", f"the nearest are {near}" if near else "there are none")


def _freeze(name: str, given: Any) -> frozenset[str]:
    is_set = isinstance(given, Collection) and not isinstance(given, (str, Mapping))
    if not is_set or not all(isinstance(x, str) for x in given):
        raise FzeroError(name, f"is {given!r:.80}", "give names, as in ['blocks.0', 'blocks.1']")
    return frozenset(given)


def _fold(names: Collection[str]) -> str:
    """A few of these names, and their number. Those that differ in numbers have one place: "blocks.* x4, head (5)"."""
    alike: dict[str, list[str]] = {}
    for name in sorted(names):
        alike.setdefault(_NUMBER.sub(lambda found: "" if found[1] else "*", name), []).append(name)
    listed = [own[0] if len(own) == 1 else f"{each} x{len(own)}" for each, own in alike.items()]
    return f"{', '.join([*listed[:_LISTED], *['...'] * (len(listed) > _LISTED)])} ({len(names)})"


_NUMBER = re.compile(r"(_)\d+$|(?<![^.])\d+(?![^.])")
"""The number at the end of a node's name, and the number of a layer in a path."""


def _write(plan: Plan) -> dict[str, Any]:
    """Name -> plain data, of all fields."""
    given = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return {name: x if x is None or name not in _FORMS else _FORMS[name][0](x) for name, x in given.items()}


def _read_place(host: dict[str, Any] | None = None, disk: str | None = None) -> Placement:
    if (host is None) == (disk is None):
        raise TypeError("`to` is of the host or of a disk")
    if host is None:
        return make_disk(str(disk))
    return make_host(**host)


_FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    **dict.fromkeys(_SETS, (sorted, lambda names: names)),
    "to": (
        lambda place: {"host": {"pin": place.pin}} if place.where == "host" else {"disk": str(place.path)},
        lambda data: _read_place(**data),
    ),
    "reduce_dtype": (name_dtype, lambda name: getattr(torch, name)),
    "mesh": (lambda mesh: mesh.sizes, lambda sizes: VirtualMesh(**sizes)),
    "rates": (Rates._asdict, lambda data: read_rates("rates", data)),
}
"""Field -> the functions to plain data of JSON, and back."""
