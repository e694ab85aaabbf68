"""The transform: `shard(fn, mesh)` turns a pure single-device step into a step that every rank of a mesh runs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fzero.as_function import AsFunction
from fzero.base import tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.flags import FlagReader
from fzero.base.mesh import find_model_axes, mesh_shape
from fzero.base.placement import Disk, Placement
from fzero.budget.fit import Rewrite
from fzero.execution.calibration import calibrate
from fzero.execution.cuda_graph import Captured, check_mesh
from fzero.execution.inductor import compile_fragment, compile_open
from fzero.general.dynamic import Ranges
from fzero.general.together import ALIKE
from fzero.given import copy_aliases, list_flags, place_state
from fzero.linked import Linked, Mode, link_program, link_template
from fzero.options import choose_rewrite, find_plan_of
from fzero.pass_state import create_pass_state, order_pass_state
from fzero.passes.run import Pass
from fzero.pipeline import MAX_PROGRAMS
from fzero.program.plan import Plan
from fzero.program.program import Program
from fzero.program.rates import Rates
from fzero.rank_pipeline import RankPipeline
from fzero.ranks.agreement import agree
from fzero.ranks.likeness import check_alike
from fzero.ranks.live import Live, live
from fzero.report import Report, report_step
from fzero.values.origin import Origin
from fzero.values.sharded import Sharded

MAX_FRAGMENTS = 1024
"""How many compiled fragments a step remembers beside those in its programs: programs share equal fragments."""


@check_arguments
def shard(
    fn: Callable[..., Any],
    mesh: Any,
    *,
    stage: int | None = None,
    memory: int | str | None = None,
    to: Placement | None = None,
    donate: bool = True,
    compile: Mode = False,
    reduce_dtype: torch.dtype | None = None,
    chunk: int | str | None = None,
    passes: Sequence[Pass] | None = None,
    plan: Plan | None = None,
    data: Sequence[str] | None = None,
    dynamic: Ranges | None = None,
    max_programs: int = MAX_PROGRAMS,
    cache: str | os.PathLike[str] | None = None,
) -> Step:
    """`fn` as a step that every rank of `mesh` runs, on `Sharded` state and on its part of the batch.

    `fn` is pure. `Sharded` leaves of its arguments are state; every other tensor is this rank's part of the batch; any
    other leaf is a constant. Gradients of state are means over ranks, and so is a floating 0-d result that is computed
    from the batch; other results that are computed from the batch stay this rank's own. So the step on equal parts of a
    batch equals `fn` on the whole batch whenever the loss is a mean over examples.

    * `stage`: 3 (the default) gathers each layer's parameters for each use; 2 keeps them from the first to the last
      use; 1 keeps full gradients too; 0 is plain data parallel, for leaves that `partition(..., persist=sys.maxsize)`
      keeps whole on each rank: gradients are averaged, and nothing is gathered.
    * `memory`, in the place of `stage`: a number of bytes, or a text such as "40GiB". On each rank the peak of live
      tensors, arguments included, stays under it, and the step is the fastest that a search finds: it chooses which
      parameters stay gathered, and which values the backward pass computes again (docs/budget.md). `report` says what
      was chosen.
    * `to`, beside `memory`: a placement, such as `fzero.host()`, where the search may put optimizer state and
      parameters, layer by layer, and on the host saved values. A step moves state that was given elsewhere to where the
      search wants it.
    * `donate`: a step that updates state (`p + u`) writes the new state over the old. The `Sharded` values that the
      step was called with become unusable. Tensors and values that were computed from them do not change.
    * `compile`: inductor compiles the computations between collectives, once for equal layers. The step is the same up
      to rounding, and its first call takes longer. With "graph" CUDA also launches the whole step, collectives
      included, as one graph (docs/compile.md).
    * `reduce_dtype`: gradients are cast to it, averaged over ranks in it, and cast back. None averages each gradient
      in its own dtype. Gathers stay in the dtype in which leaves are used: bfloat16 compute with
      `reduce_dtype=torch.float32` keeps float32 gradients of float32 leaves.
    * `chunk`: bytes, or a text such as "64MiB". A leaf of more gathered bytes is streamed: each use gathers the leaf in
      chunks of at most so many bytes, one after the other, also at stages 1 and 2 (docs/streamed.md). None gathers all
      leaves whole.
    * `passes`: functions of a `Program` to a `Program`, in the place of the default passes. The passes decide what
      `stage`, `memory`, `donate`, `reduce_dtype` and `chunk` decide without them: give these to
      `fzero.passes.defaults`. A pass may keep state: the step then takes it as `pass_state` and returns
      `(results, new pass_state)`.
    * `plan`: an `fzero.passes.Plan`, in the place of all these options: what `step.plan(*args)` of another step
      returns, or `Plan.load(path)`. So a budget's search is not repeated (docs/budget.md).
    * `data`: the axes of `mesh` along which ranks take different examples, as in `data=("dp", "fsdp")`. The axes
      "replica" and "fsdp", "node" and "local" side by side, and the only axis of a mesh, need no `data`. Along other
      axes ranks take the same examples, and compute parts of the model, with collectives such as `fzero.psum`
      (docs/axes.md).
    * `dynamic`: the dimensions of batches that change from call to call, as in `dynamic={"batch": {1: (1, 8192)}}`: a
      parameter of `fn`, or a path to a part of it ("batch.labels"), then a dimension of all tensors there, then its
      least and greatest size, None for any. The first trace then serves all sizes. Without it the step is traced at
      its first size, and for all sizes at the second. The result is the same.

    * `max_programs`: the step keeps so many programs. A further one takes the place of the one used longest ago, and
      the logger "fzero" says once which argument keeps changing.
    * `cache`: a folder of programs. A step whose program is there is not traced: a restarted run begins at once
      (docs/cache.md). What a program depends on is compared; what cannot be compared is traced. None: no folder.

    Values and shapes that the batch alone decides, such as `h[labels != -100]`, are computed in front of the program.
    Ranks may take batches of other sizes (docs/functional.md).

    The step is traced at its first call. It is traced again, which the logger "fzero" reports, when these change:
    shapes, strides, dtypes, structure or constants of the arguments; settings such as autocast; values that the step
    reads from its surroundings. From the second shape of a batch on one trace serves all sizes that it can
    (docs/functional.md).

    Raises:
        FzeroError: for a mesh without devices, for an unknown value of an option, for options that exclude each other,
            for "graph" where no graph is possible, for a mesh axis that is not a data axis. At the first call: for a
            `memory` below the least peak, for an operation from outside that does not do what its record says. At any
            call: for a size outside of its range in `dynamic`.
    """
    if compile == "graph" and not donate:
        raise FzeroError("compile", "is 'graph', and donate is False: state would move", "give donate=True")
    model_axes = find_model_axes(mesh_shape(mesh), data)
    rewrites = choose_rewrite(
        passes, plan, memory, donate=donate, stage=stage, to=to, reduce_dtype=reduce_dtype, chunk=chunk
    )
    if compile == "graph" and plan is not None and not plan.in_place:
        raise FzeroError("compile", "is 'graph', and the plan has in_place=False: state would move", "give another")
    return Step(fn, live(mesh), rewrites, compile, max_programs, cache, model_axes, dynamic)


class Step(AsFunction):
    """A sharded step. Call it like the function it comes from; `trace` returns its `Program` without running it."""

    def __init__(
        self,
        fn: Callable[..., Any],
        on: Live,
        passes: Rewrite,
        compile: Mode,
        max_programs: int = MAX_PROGRAMS,
        cache: str | os.PathLike[str] | None = None,
        model_axes: tuple[str, ...] = (),
        dynamic: Ranges | None = None,
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        if compile == "graph":
            check_mesh(on)
        self._flags, self._model_axes, remember = FlagReader(), model_axes, functools.lru_cache(MAX_FRAGMENTS)
        finish = functools.partial(link_program, compile, remember(compile_fragment))
        finish_open = functools.partial(link_template, compile, remember(compile_open))
        self._pipeline = RankPipeline(
            fn, on, passes, finish, max_programs, finish_open, cache, not compile, model_axes, dynamic
        )

    @property
    def _on(self) -> Live:
        """The rank of this process, with state where it lies."""
        return cast(Live, self._pipeline.on)

    def __repr__(self) -> str:
        return f"fzero.shard({getattr(self, '__name__', self._pipeline.fn)}, {self._on.mesh})"

    def trace(self, *args: Any) -> Program:
        """The program that a call with these arguments runs. No collective."""
        return self._pipeline.program(args)

    def plan(self, *args: Any) -> Plan:
        """The plan of a call with these arguments: all that options, or a budget's search, decided about its program.
        Print it, save it, or give it to another step: `fzero.shard(fn, mesh, plan=plan)`. No collective but with
        `cache`: ranks then agree on whether a file has the program."""
        return find_plan_of(self._pipeline.prepare(*tree.flatten(args)).program)

    def program(self, *args: Any) -> Program:
        """The program that a call with these arguments runs: the same object for each such call. `trace` makes another
        one."""
        return self._pipeline.prepare(*tree.flatten(args)).find_program()

    def report(self, *args: Any) -> Report:
        """What a call with these arguments does: the optimizer of each parameter, the peak, and the bytes that move, as
        data and as text (`print(step.report(params, opt_state, batch))`). No collective but with `cache`."""
        return report_step(self.program(*args), args, self._on.rank)

    def check_flags(self) -> None:
        """Raise for what the calls so far have noted, such as more rows than a bound, as the next call would. Call it
        behind the last step of a run. Waits for the device. No collective: all ranks have the same flags.

        Raises:
            FzeroError: of the first flag that is set.
        """
        self._flags.read_all()

    def init_pass_state(self, *args: Any) -> dict[str, Sharded]:
        """The first value of the state that the step's passes keep, for a step with these arguments: path -> value,
        empty where the passes keep none. Give it to the first call as `pass_state`. No collective but with
        `cache`."""
        return create_pass_state(self._pipeline.prepare(*tree.flatten(args)).program, self._on)

    def __call__(self, *args: Any, pass_state: Mapping[str, Any] | None = None) -> Any:
        call = self._prepare(args, pass_state)
        try:
            agreed = self._agree(call)
        except FzeroError as error:
            members = self._on.members
            if error is not members.told or not members.is_between_steps:
                raise
            self._open_together(args, error)  # on all ranks
            call = self._prepare(args, pass_state)
            agreed = self._agree(call)
        return self._run(call, *agreed)

    def _agree(self, call: _Call) -> tuple[bool, Origin]:
        """Return once all ranks are about to run the same step: whether graphs, or trials, of some rank are due, and
        the origin of the state that the step makes."""
        linked, values, tensors = call
        graph = linked.run if isinstance(linked.run, Captured) else None
        is_moved = graph is not None and graph.is_elsewhere(tensors)
        is_due = is_moved or (linked.trial is not None and linked.trial.is_due)
        try:
            agreed = linked.lines.agree(self._on.members, values, vote=is_due)
            if self._model_axes:
                check_alike(self._on, self._model_axes, _list_batch(linked.program, values))
            return agreed
        except BaseException as error:
            if not isinstance(error, FzeroError):  # ranks that disagree raise alike
                self._on.members.leave("a step", error)
            raise

    def _run(self, call: _Call, is_due: bool, origin: Origin) -> Any:
        """The results of the step, on which ranks have agreed."""
        linked, values, tensors = call
        run, trial = linked.run, linked.trial
        try:
            if trial is not None and is_due:  # of some rank it is the first call, and all take part in a trial
                run, trial.is_due = trial.link(), False
            if isinstance(linked.run, Captured):
                linked.run.prepare(tensors, as_it_is=is_due)
            for i in linked.donated:
                values[i].give_up()
            outputs = run(tensors)
            self._flags.hold(linked.returned.list_noted(outputs))
            return linked.returned(outputs, values, origin)
        except BaseException as error:
            self._on.members.leave("a step", error)
            raise

    def _open_together(self, args: tuple[Any, ...], error: FzeroError) -> None:
        """Let ranks whose batches have other sizes run one schedule; or raise the error that they have come to."""
        leaves, treedef = tree.flatten(args)
        try:
            why = self._pipeline.open_together([leaves], treedef)
        except Exception as failure:
            self._tell(failure)
            raise
        if why is not None:
            if why == ALIKE:
                raise error
            problem = f"{error.problem}. Batches may have other sizes, but not here: {why}"
            raise FzeroError(error.where, problem, error.way_out) from None

    def calibrate(
        self, *args: Any, pass_state: Mapping[str, Any] | None = None, disk: Placement | None = None
    ) -> Rates:
        """Measure how fast the ranks compute and communicate, and schedule the step by that from its next call on.

        All ranks call it together, with the arguments of a step, which stay as they are. Runs the program twice, one
        operation after the other, on copies of the arguments that it overwrites, and times each operation of the second
        run. Returns the mean over ranks, the same on all of them. `step.trace(*args).timeline()` shows the new
        schedule. The results of the step do not change.

        Writes and reads a file on each disk that the arguments lie on, and on `disk`, an `fzero.disk(path)`. Without
        any the rate of a disk stays a guess.

        Raises:
            FzeroError: as the step does; for a `disk` that is no disk; on all ranks, where a disk of one fails.
        """
        if disk is not None and not isinstance(disk, Disk):
            raise FzeroError("disk", f"is {disk!r}", "give fzero.disk(path)")
        linked, values, tensors = self._prepare(args, pass_state)
        linked.lines.agree(self._on.members, values, call=["call of step.calibrate"])
        rates = calibrate(self._on, linked.find_program(), tensors, disk)
        self._pipeline.reschedule(rates)
        return rates

    def _prepare(self, args: tuple[Any, ...], pass_state: Mapping[str, Any] | None) -> _Call:
        """What a call with these arguments runs. All ranks learn of an error here, so that none waits for this one."""
        leaves, treedef = tree.flatten(args)
        try:
            ((linked, read, is_together),) = self._pipeline.find_together([leaves], treedef)
            if is_together:
                linked = linked._replace(lines=linked.lines.without_sizes())
            elif self._pipeline.has_differed:
                linked = linked._replace(lines=linked.lines.of_sizes())
            values = [*(x for x in leaves if isinstance(x, Tensor)), *read]
            if pass_state is not None or linked.program.pass_state:
                values += order_pass_state(linked.program, pass_state, self._on)
            self._flags.read(list_flags(linked.program, values))
            values = place_state(linked.program, values, self._on.settle)
            return _Call(linked, values, copy_aliases(values, linked.donated))
        except Exception as error:
            self._tell(error)
            raise

    def _tell(self, error: Exception) -> None:
        """Let the other ranks know of an error, where they do not yet."""
        if error is not self._on.members.told:
            agree(self._on.members, 0, list, error)


class _Call(NamedTuple):
    """A call of a step: what runs, the arguments of its program, which are tensors or `Sharded`, and their memory."""

    linked: Linked
    values: list[Any]
    tensors: list[Tensor]


def _list_batch(program: Program, values: Sequence[Any]) -> list[tuple[str, Any]]:
    """The batch among the arguments `values` of a program's step: path and tensor."""
    return [(given.path, x) for given, x in zip(program.arguments, values) if given.bucket is None]
