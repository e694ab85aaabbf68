"""The transform: `shard(fn, mesh)` turns a pure single-device step into a step that every rank of a mesh runs."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.ambient import find_ambient
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.flags import FlagReader
from fzero.base.mesh import find_model_axes, mesh_shape
from fzero.base.placement import Disk, Placement
from fzero.base.torch_private import version_of
from fzero.budget.fit import Rewrite
from fzero.execution.calibration import calibrate
from fzero.execution.claims import has_foreign
from fzero.execution.codegen import Compile, Runner, link, link_open
from fzero.execution.cuda_graph import Captured, check_mesh, check_program
from fzero.execution.inductor import compile_fragment, compile_open
from fzero.execution.outline import outline
from fzero.general.dynamic import Ranges
from fzero.options import choose_rewrite, find_plan_of
from fzero.pass_state import create_pass_state, order_pass_state
from fzero.passes.run import Pass
from fzero.pipeline import MAX_PROGRAMS, Pipeline, copy_aliases, list_flags, place_state
from fzero.program.open import Template, make_template
from fzero.program.plan import Plan
from fzero.program.program import Program
from fzero.program.rates import Rates
from fzero.ranks.agreement import agree, digest
from fzero.ranks.likeness import check_alike
from fzero.ranks.live import Live, live
from fzero.ranks.members import Members
from fzero.report import Report, report_step
from fzero.returned import Returned
from fzero.values.origin import MASK, Origin, describe_state, follow
from fzero.values.sharded import Sharded

MAX_FRAGMENTS = 1024
"""How many compiled fragments a step remembers beside those in its programs: programs share equal fragments."""
Mode = bool | Literal["graph"]


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


class _Compiled(NamedTuple):
    """A linked program, and the lines that ranks compare before each call. The sizes of `program` may be others than
    those of `find_program()`."""

    program: Program
    find_program: Callable[[], Program]
    run: Runner
    returned: Returned
    donated: tuple[int, ...]  # positions among the tensor arguments
    lines: _Lines
    trial: _Trial | None


class _Trial:
    """The first call of a program with operations from outside of fzero. `link` returns the runner that holds them to
    their records. It is another runner, so that later calls pay nothing."""

    def __init__(self, link: Callable[[], Runner]) -> None:
        self.link, self.is_due = link, True


class _Lines:
    """The lines that must be the same on all ranks for a program to run, and a hash of them.

    A constant is a tensor of the user, who may write to it between two steps. So its line has its present contents.
    """

    def __init__(self, program: Program, settings: Sequence[str]) -> None:
        self._program, self._settings, self._find_program = program, settings, lambda: program
        self._digest = digest([*settings, *program.lines()])
        self._versions: list[int] | None = None
        self._constant_lines: list[str] = []
        self._state = [(i, given.path) for i, given in enumerate(program.arguments) if given.bucket is not None]

    def at(self, sizes: Sequence[int], find_program: Callable[[], Program]) -> _Lines:
        """The same for a program that differs in sizes only."""
        other = copy.copy(self)
        other._find_program, other._versions = find_program, None
        other._digest = digest([str(self._digest), *map(str, sizes)])
        return other

    def agree(
        self, members: Members, values: Sequence[Any], vote: bool = False, call: Sequence[str] = ()
    ) -> tuple[bool, Origin]:
        """`agree` of `fzero.ranks.agreement` on the present lines and on the origins of the state among `values`. Also
        returns the origin of the state that the program makes of these. `call` is the line of a call that is no
        step."""
        versions = [version_of(x) for x in self._program.constants.values()]
        if versions != self._versions or -1 in versions:  # an inference tensor does not count its changes
            self._versions, self._constant_lines = versions, self._program.constant_lines()
            self._number = digest([str(self._digest), *self._constant_lines])
        origins = [values[i].origin for i, _ in self._state]
        made = follow(origins, members.agreements)  # so that a call's state differs from that of an equal call before
        number = self._number ^ digest(call) if call else self._number

        def lines() -> list[str]:
            program = [*self._settings, *self._find_program().lines()]
            return [*call, *program, *self._constant_lines, *_list_origins(self._state, origins)]

        return bool(agree(members, (number ^ made) & MASK, lines, vote=vote)), made


class Step:
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
        finish = functools.partial(_link, compile, remember(compile_fragment))
        finish_open = functools.partial(_link_open, compile, remember(compile_open))
        self._pipeline = Pipeline(
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
        compiled, values, tensors = self._prepare(args, pass_state)
        graph = compiled.run if isinstance(compiled.run, Captured) else None
        moved, trial, run = graph is not None and graph.is_elsewhere(tensors), compiled.trial, compiled.run
        is_first = trial is not None and trial.is_due
        has_begun = False
        try:
            moved, origin = compiled.lines.agree(self._on.members, values, vote=moved or is_first)
            if self._model_axes:
                check_alike(self._on, self._model_axes, _list_batch(compiled.program, values))
            has_begun = True
            if trial is not None and moved:  # of some rank it is the first call, and all take part in a trial
                run, trial.is_due = trial.link(), False
            if graph is not None:
                graph.prepare(tensors, as_it_is=moved)
            for i in compiled.donated:
                values[i].give_up()
            outputs = run(tensors)
            self._flags.hold(compiled.returned.list_noted(outputs))
            return compiled.returned(outputs, values, origin)
        except BaseException as error:
            if has_begun or not isinstance(error, FzeroError):  # ranks that disagree raise alike
                self._on.members.leave("a step", error)
            raise

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
        compiled, values, tensors = self._prepare(args, pass_state)
        compiled.lines.agree(self._on.members, values, call=["call of step.calibrate"])
        rates = calibrate(self._on, compiled.find_program(), tensors, disk)
        self._pipeline.reschedule(rates)
        return rates

    def _prepare(
        self, args: tuple[Any, ...], pass_state: Mapping[str, Any] | None
    ) -> tuple[_Compiled, list[Any], list[Tensor]]:
        """The compiled program for these arguments, its arguments, which are tensors or `Sharded`, and their memory.

        All ranks learn of an error here, so that none waits for this one.
        """
        leaves, treedef = tree.flatten(args)
        try:
            compiled, read = self._pipeline.find(leaves, treedef)
            values = [*(x for x in leaves if isinstance(x, Tensor)), *read]
            if pass_state is not None or compiled.program.pass_state:
                values += order_pass_state(compiled.program, pass_state, self._on)
            self._flags.read(list_flags(compiled.program, values))
            values = place_state(compiled.program, values, self._on.settle)
            return compiled, values, copy_aliases(values, compiled.donated)
        except Exception as error:
            agree(self._on.members, 0, list, error)
            raise


def _list_origins(state: Sequence[tuple[int, str]], origins: Sequence[Origin]) -> list[str]:
    """The origin of each argument that is state, one line each."""
    return [describe_state(path, origin) for (_, path), origin in zip(state, origins)]


def _link(mode: Mode, compile: Compile, on: Live, program: Program) -> _Compiled:
    """Link a program, compiled by `mode`.

    A function and no method of `Step`: a cycle of references would keep a step and its CUDA graphs alive after
    `del step`.
    """
    if mode == "graph":
        check_program(program, on.device.type)
    lines = _Lines(program, _list_settings(mode, program))
    outlined = outline(program) if mode else program
    run = link(outlined, on, compile)
    trial = _Trial(functools.partial(link, outlined, on, compile, is_held=True)) if has_foreign(program) else None
    runner = Captured(program, run, settle=on.settle) if mode == "graph" else run
    return _Compiled(program, lambda: program, runner, Returned(program, on), _find_updates(program), lines, trial)


def _link_open(
    mode: Mode, compile: Callable[..., Any], on: Live, template: Template
) -> Callable[[Sequence[int]], _Compiled] | None:
    """A function of sizes that returns the linked program of these. None where each has to be linked by itself."""
    opened, like = template.opened, template.program
    if mode == "graph" or has_foreign(like):
        return None
    if mode:
        assert opened is not None and opened.open is not None
        symbols = opened.open.symbols
        run_at = link_open(make_template(outline(opened)), on, lambda fragment: compile(fragment, symbols))
    else:
        run_at = link_open(template, on, lambda fragment: lambda sizes: fragment)
    returned, donated = Returned(like, on), _find_updates(like)
    lines = _Lines(like, _list_settings(mode, like))

    def link_at(sizes: Sequence[int]) -> _Compiled:
        find = functools.cache(lambda: template.fill(sizes))
        results = returned.with_results(template.fill_results(sizes))
        return _Compiled(like, find, run_at(sizes), results, donated, lines.at(sizes, find), None)

    return link_at


def _list_settings(mode: Mode, program: Program) -> list[str]:
    plan = program.plan.lines() if program.plan else []
    return [f"compile: {mode}", *plan, *find_ambient().lines()]


def _find_updates(program: Program) -> tuple[int, ...]:
    """The positions of donated arguments, which a program writes over."""
    return tuple(i for i, argument in enumerate(program.arguments) if argument.donated)


def _list_batch(program: Program, values: Sequence[Any]) -> list[tuple[str, Any]]:
    """The batch among the arguments `values` of a program's step: path and tensor."""
    return [(given.path, x) for given, x in zip(program.arguments, values) if given.bucket is None]
