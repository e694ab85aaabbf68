"""Simulation: run a sharded step without a cluster, for every rank of a virtual mesh in one process."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fzero.as_function import AsFunction
from fzero.base import tree
from fzero.base.ambient import disable_autocast, leave_inference_mode
from fzero.base.arguments import check_arguments
from fzero.base.bits import format_values, has_equal_bits
from fzero.base.dense import check_dense, is_dense
from fzero.base.errors import FzeroError
from fzero.base.flags import FlagReader
from fzero.base.frozen import freeze
from fzero.base.mesh import VirtualMesh, find_model_axes, virtual_mesh
from fzero.base.placement import Placement
from fzero.budget.fit import Rewrite
from fzero.execution.lockstep import Seat, Watch, run, seats
from fzero.files import OnDisk, address_of, allocate, duplicate
from fzero.general.dynamic import Ranges
from fzero.given import list_flags, place_state
from fzero.layout.layout import Layout
from fzero.layout.parts import take_part
from fzero.options import choose_rewrite, find_plan_of
from fzero.pass_state import create_pass_state, order_pass_state
from fzero.passes.run import Pass
from fzero.pipeline import MAX_PROGRAMS
from fzero.program.open import find_difference
from fzero.program.plan import Plan
from fzero.program.program import Program
from fzero.program.rates import Rates
from fzero.program.signature import Result
from fzero.rank_pipeline import RankPipeline
from fzero.ranks.virtual import virtual
from fzero.report import Report, report_step
from fzero.returned import Returned
from fzero.state.fill import copy_slices
from fzero.state.grouping import group_by_layout
from fzero.values.sharded import Sharded

DECIDE_ALIKE = (
    "compute with tensors, or with numbers of x.item() and x.tolist(), which may differ; where Python goes another "
    "way, as by if, int(x), len(x) and range(n), let the batches of all ranks decide alike"
)
"""The way out where batches of ranks ask for several programs."""


@check_arguments
def simulate(
    fn: Callable[..., Any],
    ranks: int | VirtualMesh,
    *,
    stage: int | None = None,
    memory: int | str | None = None,
    to: Placement | None = None,
    donate: bool = True,
    reduce_dtype: torch.dtype | None = None,
    chunk: int | str | None = None,
    passes: Sequence[Pass] | None = None,
    plan: Plan | None = None,
    data: Sequence[str] | None = None,
    dynamic: Ranges | None = None,
    max_programs: int = MAX_PROGRAMS,
) -> Simulation:
    """`fn` as a step that runs for every rank of a virtual mesh in this process.

    Runs the same program as `shard`, node by node in lockstep, and computes collectives across the ranks in rank order.

        mesh = fzero.VirtualMesh(fsdp=8)
        params = fzero.partition(params, mesh)
        step = fzero.simulate(train_step, mesh)
        params, opt_state, loss = step(params, optimizer.init(params), batch)

    `ranks` is a mesh, or the size of a mesh with the one axis "fsdp". State is partitioned on that mesh and holds
    the slices of all ranks. Every other tensor is a batch of all ranks: it is cut along dim 0 into equal parts, one
    for each rank in the order of rank numbers, and ranks along axes that are no `data` axes get the same part;
    every rank gets a 0-d tensor as it is. Results that differ between ranks are joined along dim 0, and 0-d results
    to [ranks]. `stage`, `memory`, `to`, `donate`, `reduce_dtype`, `chunk`, `passes`, `plan`, `data`, `dynamic` and
    `max_programs` are as in `shard`.

    Raises:
        FzeroError: for a mesh axis that is not a data axis, for an unknown value of an option.
    """
    mesh = virtual_mesh(ranks)
    model_axes = find_model_axes(mesh, data)
    rewrites = choose_rewrite(
        passes, plan, memory, donate=donate, stage=stage, to=to, reduce_dtype=reduce_dtype, chunk=chunk
    )
    return Simulation(fn, mesh, rewrites, max_programs, model_axes, dynamic)


class Simulation(AsFunction):
    """A step on every rank of a virtual mesh. Call it like the function it comes from; `trace` returns its
    `Program`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: VirtualMesh,
        passes: Rewrite,
        max_programs: int = MAX_PROGRAMS,
        model_axes: tuple[str, ...] = (),
        dynamic: Ranges | None = None,
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.mesh, self._flags = mesh, FlagReader()
        self._data = mesh.join(axis for axis in mesh.names if axis not in model_axes)
        self._pipeline = RankPipeline(
            fn,
            virtual(mesh),
            passes,
            lambda on, program: program,
            max_programs,
            lambda on, template: template.fill,
            model_axes=model_axes,
            dynamic=dynamic,
        )

    @property
    def _seats(self) -> tuple[Seat, ...]:
        """The ranks, with state where it lies."""
        return seats(self._pipeline.on.mesh)

    def __repr__(self) -> str:
        return f"fzero.simulate({getattr(self, '__name__', self._pipeline.fn)}, {self.mesh})"

    def trace(self, *args: Any) -> Program:
        """The program that a call with these arguments runs on each rank. Leaves may be on the meta device: only shapes
        matter."""
        leaves, treedef = tree.flatten(args)
        with self._name_cuts(treedef, leaves):
            return self._pipeline.program(tree.unflatten(treedef, self._select_rank(0, treedef, leaves)))

    def schedule_for(self, rates: Rates) -> None:
        """Schedule programs for ranks of these rates, as `Step.calibrate` of `fzero.shard` does for those that it
        measured."""
        self._pipeline.reschedule(rates)

    def program(self, *args: Any) -> Program:
        """The program that a call with these arguments runs, as `Step.program` of `fzero.shard`."""
        leaves, treedef = tree.flatten(args)
        return self._prepare(treedef, leaves)

    def report(self, *args: Any) -> Report:
        """What a call with these arguments does, as `Step.report` of `fzero.shard`."""
        return report_step(self.program(*args), args)

    def plan(self, *args: Any) -> Plan:
        """The plan of a call with these arguments, as `Step.plan` of `fzero.shard`."""
        leaves, treedef = tree.flatten(args)
        return find_plan_of(self._prepare(treedef, leaves))

    def check_flags(self) -> None:
        """Raise for what the calls so far have noted, such as more rows than a bound, as the next call would. Call it
        behind the last step of a run. Waits for the device. No collective: all ranks have the same flags.

        Raises:
            FzeroError: of the first flag that is set.
        """
        self._flags.read_all()

    def init_pass_state(self, *args: Any) -> dict[str, Sharded]:
        """The first value of the state that the step's passes keep, as `Step.init_pass_state` of `fzero.shard`."""
        leaves, treedef = tree.flatten(args)
        program = self._prepare(treedef, leaves)
        return create_pass_state(program, self._pipeline.on)

    def __call__(self, *args: Any, watch: Watch | None = None, pass_state: Mapping[str, Any] | None = None) -> Any:
        """Run the step. `watch(node, values)` is called with the values of each rank after each node of the program.
        `pass_state` is the state that the step's passes keep.

        Raises:
            FzeroError: for a batch that does not divide by the ranks; where ranks disagree about a value that must be
                the same on all of them; where a call before noted a problem in the state (`fzero.base.flags`).
        """
        leaves, treedef = tree.flatten(args)
        programs, read = self._find(treedef, leaves)
        program = programs[0]
        state = order_pass_state(program, pass_state, self._pipeline.on)
        given = [x for x in leaves if isinstance(x, Tensor)]
        behind = len(given)  # where what readings found stands
        given = place_state(program, [*given, *read[0], *state])
        self._flags.read(list_flags(program, given))
        placed = _separate(program, given)
        del placed[behind : behind + len(read[0])]
        tensors = iter(placed)
        leaves = [next(tensors) if isinstance(x, Tensor) else x for x in (*leaves, *state)]
        arguments = self._place_arguments(treedef, leaves)
        for row, values in zip(arguments, read):
            row[behind:behind] = values
        for argument, value in zip(program.arguments, given):
            if argument.donated and isinstance(value, Sharded):
                value.give_up()
        outputs = run(program, arguments, watch, programs if len(programs) > 1 else ())
        with disable_autocast():  # as in the program, whose casts are nodes
            rows = zip(program.tensor_results, zip(*outputs))
            joined = [self._join(program, result, list(row)) for result, row in rows]
            returned = Returned(program, self._pipeline.on)
            self._flags.hold(returned.list_noted(joined))
            return returned(joined, given)

    def _prepare(self, treedef: tree.TreeDef, leaves: list[Any]) -> Program:
        """The program of a call with these arguments, from the cache where they are of known shapes."""
        with self._name_cuts(treedef, leaves):
            return self._pipeline.prepare(self._select_rank(0, treedef, leaves), treedef)

    def _find(self, treedef: tree.TreeDef, leaves: list[Any]) -> tuple[list[Program], list[list[Tensor]]]:
        """The program of a call, or that of each rank where their sizes differ, and what readings find in the batch of
        each rank."""
        pipeline = self._pipeline
        with self._name_cuts(treedef, leaves):
            if not pipeline.is_common:
                program = pipeline.find(self._select_rank(0, treedef, leaves), treedef).finished
                if not program.readings:
                    return [program], [[]] * len(self._seats)
            rows = [self._select_rank(seat.number, treedef, leaves) for seat in self._seats]
            found = pipeline.find_together(rows, treedef)
            if not found[0].is_together and not _are_equal([x.finished for x in found]):
                why = pipeline.open_together(rows, treedef)
                if why is not None:
                    problem = f"batches of ranks ask for other programs: {why}"
                    raise FzeroError(found[0].finished.name, problem, DECIDE_ALIKE)
                found = pipeline.find_together(rows, treedef)
            if not found[0].is_together and not _are_equal([x.finished for x in found]):
                raise FzeroError(found[0].finished.name, "batches of ranks ask for other programs", DECIDE_ALIKE)
        programs = [x.finished for x in found]
        _check_constants(programs)
        return programs if found[0].is_together else programs[:1], [x.read for x in found]

    @contextmanager
    def _name_cuts(self, treedef: tree.TreeDef, leaves: list[Any]) -> Iterator[None]:
        """Note at an error that a tensor was cut as a batch, where the tensor may be state that is not partitioned."""
        try:
            yield
        except Exception as error:
            path = _find_plain_state(treedef, leaves) if len(self._seats) > 1 else None
            if path is not None:
                error.add_note(
                    f"argument {path} is not partitioned, so simulate cut it along dim 0, a part for each of "
                    f"{len(self._seats)} ranks. Where it is a parameter, or state of an optimizer, partition first: "
                    "params = fzero.partition(params, mesh), then opt_state = optimizer.init(params)"
                )
            raise

    def _select_rank(self, number: int, treedef: tree.TreeDef, leaves: list[Any]) -> list[Any]:
        """The arguments with one rank's part of each batch."""
        at = functools.partial(self._cut_batch, treedef=treedef, number=number)
        return [at(i, leaf) if _is_batch(leaf) else leaf for i, leaf in enumerate(leaves)]

    def _cut_batch(self, position: int, leaf: Tensor, treedef: tree.TreeDef, number: int) -> Tensor:
        if not is_dense(leaf):
            check_dense(f"argument {tree.dotted(tree.keys(treedef)[position])}", leaf)
        if not leaf.ndim:
            return leaf
        ranks = self.mesh.size(self._data)
        if leaf.shape[0] % ranks:
            raise FzeroError(
                f"argument {tree.dotted(tree.keys(treedef)[position])}",
                f"{leaf.shape[0]} rows do not divide by {ranks} ranks",
                f"give a multiple of {ranks}; tensors that are not partitioned are batches, cut along dim 0",
            )
        rows, number = leaf.shape[0] // ranks, self.mesh.position(number, self._data)
        return freeze(leaf[number * rows : (number + 1) * rows], leaf)

    def _place_arguments(self, treedef: tree.TreeDef, leaves: list[Any]) -> list[list[Tensor]]:
        """The tensor arguments of each rank: copies of its slices, those of a bucket in one block, and its rows of each
        batch. Rows are views and no copies: a copy would have other strides, and no memory around a cropped batch. Nor
        are slices on a disk: a step overwrites those of donated values alone."""
        state = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Sharded)]
        places = {i: (leaf.form.layout, leaf.index) for i, leaf in state if not isinstance(leaf.local, OnDisk)}
        groups = group_by_layout(places, {i: leaves[i].dtype for i in places})
        with leave_inference_mode():  # in which torch makes no slice of a tensor on disk
            return [self._place_arguments_of(seat, groups, treedef, leaves) for seat in self._seats]

    def _place_arguments_of(self, seat: Seat, groups: Any, treedef: tree.TreeDef, leaves: list[Any]) -> list[Tensor]:
        parts = enumerate(self._select_rank(seat.number, treedef, leaves))
        values = {i: part if part.ndim else part.clone() for i, part in parts if _is_batch(part)}
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Sharded) and isinstance(leaf.local, OnDisk):
                part = leaf.form.layout.part(leaf.index, leaf.form.layout.rank_of(seat))
                values[i] = _find_part(leaf, seat)[part.start : part.stop]
        for layout, members in groups:
            full = {index: _find_part(leaves[i], seat) for i, index in members.items()}
            placed = copy_slices(full, layout, layout.rank_of(seat))
            values.update((i, placed[index]) for i, index in members.items())
        return [values[i] for i in sorted(values)]

    def _join(self, program: Program, result: Result, values: list[Tensor]) -> Tensor:
        """One result, from the values of all ranks."""
        layout = program.layouts[result.bucket] if result.bucket is not None else None
        if layout is not None and not layout.replicated:
            alike = defaultdict[tuple[int, int], list[Tensor]](list)
            for value, seat in zip(values, self._seats):
                alike[_find_position(layout, seat), layout.rank_of(seat)].append(value)
            slices = [self._require_equal(program, result, alike[place]) for place in sorted(alike)]
            on_disk = [x for x in slices if isinstance(x, OnDisk)]
            return _join_files(on_disk, layout.bucket) if on_disk else torch.cat(slices)
        if not result.varies:
            return self._require_equal(program, result, values)
        differing = self.mesh.join({*self.mesh.split(self._data), *result.varies})
        rows = defaultdict[int, list[Tensor]](list)
        for value, seat in zip(values, self._seats):
            rows[seat.along(differing)].append(value)
        different = [self._require_equal(program, result, rows[position]) for position in sorted(rows)]
        return torch.cat(different) if values[0].ndim else torch.stack(different)

    def _require_equal(self, program: Program, result: Result, values: list[Tensor]) -> Tensor:
        """The value of all these ranks. Refuses values that differ in a bit."""
        for value in values[1:]:
            if not has_equal_bits(value, values[0]):
                raise FzeroError(
                    program.path_of(result),
                    f"ranks that must hold the same value of result {result.path!r} hold {format_values(values[0])} "
                    f"and {format_values(value)}",
                    "take a pass out of shard(..., passes=...) to find which one breaks it",
                )
        return values[0]


def _check_constants(programs: Sequence[Program]) -> None:
    """Refuse a number that a step returns, and that ranks compute from other sizes: one value stands for all ranks."""
    for results in zip(*(program.results for program in programs)):
        values = list(dict.fromkeys(repr(x.constant) for x in results if x.is_constant))
        if len(values) > 1:
            problem = f"is {values[0]} on one rank and {values[1]} on another, and a number has one value"
            raise FzeroError(f"result {results[0].path!r}", problem, "return a tensor, as torch.full((), n)")


def _are_equal(programs: Sequence[Program]) -> bool:
    return all(x is programs[0] or find_difference(programs[0], x) is None for x in programs)


def _find_position(layout: Layout, seat: Seat) -> int:
    """The position of a rank among those that have parts of the leaves of a layout."""
    return seat.along(layout.split_axis) if layout.split_axis else 0


def _find_part(leaf: Sharded, seat: Seat) -> Tensor:
    """The part of a leaf that a rank has a slice of."""
    return take_part(leaf.local, leaf.form.layout, _find_position(leaf.form.layout, seat))


def _separate(program: Program, given: Sequence[Tensor]) -> list[Tensor]:
    """The arguments, with copies of slices on a disk that the step overwrites and that stand in another argument too.
    Arguments in memory are copied in any case."""
    files = {i: x for i, x in enumerate(given) if isinstance(x, Sharded) and isinstance(x.local, OnDisk)}
    shared = Counter(address_of(x.local) for x in files.values())
    separate = list(given)
    for i, x in files.items():
        if program.arguments[i].donated and shared[address_of(x.local)] > 1:
            shared[address_of(x.local)] -= 1
            separate[i] = x.of_form(duplicate(x.local), x.form, x.origin)
    return separate


def _find_plain_state(treedef: tree.TreeDef, leaves: list[Any]) -> str | None:
    """The path of the first tensor that may be state and is not partitioned: any batch where no argument is state,
    else a batch whose path ends as that of state does."""
    held = {leaf.path for leaf in leaves if isinstance(leaf, Sharded)}
    for key, leaf in zip(tree.keys(treedef), leaves):
        if (
            _is_batch(leaf)
            and leaf.ndim
            and (not held or any(tree.dotted(key[i:]) in held for i in range(1, len(key))))
        ):
            return tree.dotted(key)
    return None


def _is_batch(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, Sharded)


def _join_files(slices: Sequence[OnDisk], bucket: str) -> Tensor:
    """The tensor on disk of which these are the slices, in order: where they lie side by side the very one."""
    first, numel = slices[0], sum(x.numel() for x in slices)
    starts = accumulate((x.nbytes for x in slices), initial=first.start)
    if all(x.extent is first.extent and x.start == start for x, start in zip(slices, starts) if x.numel()):
        return OnDisk(first.extent, first.start, numel, first.dtype)
    whole = allocate(first.place, first.dtype, numel, None, bucket, first.extent.leaf)
    for x, end in zip(slices, accumulate(x.numel() for x in slices)):
        whole[end - x.numel() : end].copy_(x)
    return whole
