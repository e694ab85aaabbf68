"""Report: what a step does to each parameter, and what its program costs, before anything runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

from torch import Tensor

from fzero.base import tree
from fzero.base.dtypes import name_dtype
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.base.sizes import format_size
from fzero.base.text_files import write_text
from fzero.optim.report import name_stage
from fzero.pages.comparison import draw_comparison
from fzero.pages.page import draw_page
from fzero.program.flops import count_flops
from fzero.program.largest import Alive
from fzero.program.listing import summarize_program
from fzero.program.operation import nbytes
from fzero.program.program import Program
from fzero.values.sharded import Sharded

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""The number of a layer in a path."""


class LeafReport(NamedTuple):
    """A parameter: its global `shape` and dtype, and the `stages` of an optimizer that keep state for it, in order.

    A parameter without a stage is frozen, or its optimizer keeps no state, as plain gradient descent.
    """

    shape: tuple[int, ...]
    dtype: str
    stages: tuple[str, ...]
    is_frozen: bool

    @property
    def optimizer(self) -> str:
        """The stages in one word: `"scale_by_adam"`, `"frozen"`, or `"no state"`."""
        return ", ".join(self.stages) or ("frozen" if self.is_frozen else "no state")


class Report(NamedTuple):
    """What a step does. `str(report)` is a text of it, and `export_html` writes a page with pictures.

    * `leaves`: path of each parameter -> its `LeafReport`.
    * `peak`: bytes of live tensors at most, on the rank with most.
    * `comm`: (collective, mesh axis) -> bytes a step; `program.comm()` lists them one by one.
    * `copies`: "read", "write", "to_host", "to_device" -> bytes a step of this rank, of virtual ranks the first.
    * `nodes`: of the program.
    * `remarks`: lines about the program: what a memory budget chose, what state a call moves first, which leaves are
      gathered whole though they are larger than `chunk`.
    * `flops`: bucket, or operation without a leaf -> flops a step on one rank.
    * `largest`: the largest values that are alive at the peak; `program.largest(count)` has more of them.
    * `program`: what the step runs.
    """

    summary: str
    leaves: dict[str, LeafReport]
    peak: int
    comm: dict[tuple[str, str], int]
    nodes: int
    copies: dict[str, int]
    remarks: tuple[str, ...]
    flops: Mapping[str, int]
    largest: tuple[Alive, ...]
    program: Program

    def export_html(self, path: str | PathLike[str], *, beside: Report | None = None) -> None:
        """Write a page about the program: memory over the step, lanes of time, slices, the listing, and what each line
        of your code takes. One file without a script, which needs no network. With `beside` the page has the program of
        another report next to this one, on equal scales, and the lines in which they differ.

        Raises:
            FzeroError: where the file cannot be written, and where `beside` is no report.
        """
        if beside is not None and not isinstance(beside, Report):
            raise FzeroError("beside", f"is {beside!r:.80}", "give what step.report(*args) of another step returns")
        page = draw_page(self.program) if beside is None else draw_comparison(self.program, beside.program)
        write_text("page", path, page)

    def __str__(self) -> str:
        lines = [self.summary, *(f"  {remark}" for remark in self.remarks)]
        lines += ["  alive at the peak:"] * bool(self.largest)
        lines += [f"    {format_size(value.nbytes):>9} of {value.what}" for value in self.largest]
        groups: dict[str, dict[str, LeafReport]] = {}
        for path, leaf in self.leaves.items():
            groups.setdefault(leaf.optimizer, {})[path] = leaf
        for optimizer, members in groups.items():
            lines.append(f"  {optimizer}: {len(members)} {'leaf' if len(members) == 1 else 'leaves'}")
            lines += [f"    {line}" for line in _fold_layers(members)]
        return "\n".join(lines)


def _fold_layers(leaves: Mapping[str, LeafReport]) -> list[str]:
    """A line for each leaf. Leaves of equal layers, whose paths differ in numbers alone, have one line together."""
    alike: dict[tuple[str, str], list[str]] = {}
    for path, leaf in leaves.items():
        alike.setdefault((_NUMBER.sub("*", path), f"{leaf.dtype} {list(leaf.shape)}"), []).append(path)
    lines = [(paths[0] if len(paths) == 1 else path, kind, paths) for (path, kind), paths in alike.items()]
    width = max((len(path) for path, _, _ in lines), default=0)
    return [f"{path:<{width}}  {kind}" + f", {len(paths)} times" * (len(paths) > 1) for path, kind, paths in lines]


def report_step(program: Program, args: Sequence[Any], rank: int = 0) -> Report:
    """The report of a step with these arguments on a rank along the shard axis.

    The first value of a path, in the order of the arguments, is the parameter. Later values of the path are its state,
    of the stage whose NamedTuple they stand in.
    """
    comm = Counter[tuple[str, str]]()
    for entry in program.comm():
        comm[entry.op, entry.axis] += entry.nbytes
    peak, nodes = program.memory().peak, len(program.graph.nodes)
    leaves, copies = _list_leaves(args), program.copies(rank)
    remarks = (*program.remarks, *_list_moves(program, args))
    summary, flops, largest = summarize_program(program), count_flops(program), tuple(program.largest())
    return Report(summary, leaves, peak, dict(comm), nodes, copies, remarks, flops, largest, program)


def _list_moves(program: Program, args: Sequence[Any]) -> Iterator[str]:
    """A line for each place to which the first call moves state that was given elsewhere."""
    moved: dict[str, tuple[int, float]] = {}
    given = (leaf for leaf in tree.leaves(args) if isinstance(leaf, Tensor))
    for leaf, argument, node in zip(given, program.arguments, program.placeholders):
        if isinstance(leaf, Sharded) and leaf.place != argument.place:
            size, rates = nbytes(node.meta["val"]), program.rates
            has_disk = any(place and place.where == "disk" for place in (leaf.place, argument.place))
            where = str(argument.place or "the device")
            total, seconds = moved.get(where, (0, 0.0))
            moved[where] = total + size, seconds + (rates.copy_to_disk(size) if has_disk else rates.copy(size))
    for where, (total, seconds) in moved.items():
        yield f"  a call with this state first moves {format_size(total)} to {where}, once, in {1000 * seconds:.2f} ms"


class _Value(NamedTuple):
    path: str  # among the arguments
    classes: tuple[type, ...]  # the NamedTuples around the value, the outermost first
    value: Sharded


def _list_leaves(args: Sequence[Any]) -> dict[str, LeafReport]:
    values = list(_walk(args, (), ()))
    params: dict[str, _Value] = {}
    for each in values:
        if each.value.path and not any(cls.__module__.startswith("fzero.optim.") for cls in each.classes):
            params.setdefault(each.value.path, each)
    stages: dict[str, dict[str, None]] = {path: {} for path in params}
    for each in values:
        path = each.value.path or _find_owner(each.path, params)
        own = [cls for cls in each.classes if path in params and cls not in params[path].classes]
        if own and name_stage(own[-1]):
            stages[path][name_stage(own[-1])] = None
    return {path: _describe(each.value, tuple(stages[path])) for path, each in params.items()}


def _walk(node: Any, key: tuple[Any, ...], classes: tuple[type, ...]) -> Iterator[_Value]:
    """The `Sharded` values in a tree of arguments."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        for name, part in zip(node._fields, node):
            yield from _walk(part, (*key, name), (*classes, type(node)))
    elif isinstance(node, (tuple, list, dict)):
        named = sorted(node.items(), key=lambda item: str(item[0])) if isinstance(node, dict) else enumerate(node)
        for name, part in named:
            yield from _walk(part, (*key, name), classes)
    else:
        for path, leaf in zip(tree.paths(node), tree.leaves(node)):
            if isinstance(leaf, Sharded):
                yield _Value(tree.dotted((*key, path) if path else key), classes, leaf)


def _find_owner(path: str, params: Mapping[str, _Value]) -> str:
    """The parameter whose path is the longest end of a path; empty where there is none. State that every rank holds
    whole, such as means of rows, has no path of its own."""
    parts = path.split(".")
    ends = (".".join(parts[i:]) for i in range(len(parts)))
    return next((end for end in ends if end in params), "")


def _describe(value: Sharded, stages: tuple[str, ...]) -> LeafReport:
    return LeafReport(tuple(value.shape), name_dtype(value.dtype), stages, is_frozen(value))
