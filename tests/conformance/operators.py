"""Each operator of torch's operator database, in a step on three virtual ranks, compared with plain torch.

Some tensors of a sample are partitioned, as the form of the trial says. The step closes over all other arguments, so
that every rank sees the same values; in the form `batch` they are arguments of the step, the same for each rank. What
an operator writes to, as batch norm its running mean, is a clone that the step makes and returns.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from conformance.database import DEVICE, has_derivative, operators, samples
from conformance.forms import FORMS, Form, is_sharded
from conformance.verdict import (
    DOUBLE,
    DTYPES,
    MESH,
    Cell,
    Trial,
    Verdict,
    choose_stages,
    compare_lists,
    compare_runs,
    compare_values,
    describe,
    flatten,
    make_weight,
    to_double,
    weighted_sum,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fzero

SLOW = 5.0
"""Seconds of a second step in plain torch from which on it is not compared."""

MAX_NUMEL = 1 << 16
"""Samples with a larger tensor are left out: one of grid_sampler_3d has five million elements."""


class Case(NamedTuple):
    """An operator with the arguments of one sample, as the leaves of a pytree; which are partitioned, and how used."""

    op: Any
    sample: Any
    leaves: list[Any]
    treedef: pytree.TreeSpec
    partitioned: tuple[int, ...]  # positions in `leaves`
    form: Form
    dtype: torch.dtype
    stage: int
    written: tuple[int, ...] = ()  # positions of what the operator writes to

    def call(self, leaves: list[Any]) -> tuple[Any, list[Any]]:
        """What the form makes of the operator, and what the operator wrote to."""
        leaves = [leaf.clone() if i in self.written else leaf for i, leaf in enumerate(leaves)]
        given, args, kwargs = pytree.tree_unflatten(leaves, self.treedef)
        return self.form.call(self.op, given, args, kwargs), [leaves[i] for i in self.written]

    def differentiable(self, called: tuple[Any, list[Any]]) -> list[Any]:
        """What goes into the loss. The database makes it of the results, so that its derivative is well defined."""
        return flatten(self.sample.output_process_fn_grad(called[0]))

    def place(self, values: dict[int, Any]) -> list[Any]:
        """The leaves with other values at some positions."""
        return [values.get(i, leaf) for i, leaf in enumerate(copy_leaves(self.leaves))]

    @property
    def floating(self) -> list[int]:
        """The positions whose gradients are compared."""
        is_differentiated = self.form.differentiates and has_derivative(self.op, self.dtype)
        return [i for i in self.partitioned if is_differentiated and is_floating(self.leaves[i])]


class Expected(NamedTuple):
    """What plain torch returns."""

    results: list[Any]
    weights: dict[int, Tensor]  # position of a differentiable result -> its weight in the loss
    gradients: list[Tensor]  # none where torch has none
    precise: Expected | None = None  # the same in double precision, of a case in single precision


def names() -> list[str]:
    return sorted(operators())


def cells(name: str) -> list[Cell]:
    """The dtypes and forms that torch has of an operator."""
    op = operators()[name]
    return [
        Cell(form, dtype)
        for dtype in DTYPES
        if DTYPES[dtype] in op.supported_dtypes(DEVICE)
        for form in FORMS
        if FORMS[form].exists(op)
    ]


def trials(name: str, cell: Cell) -> Iterator[Trial]:
    """Every sample, at one stage each; the one in the middle at all, because the first are 0-d."""
    op, form = operators()[name], FORMS[cell.form]
    if "empty" in op.name:
        yield Trial(0, lambda: Verdict("skipped", "its values are what memory held"))
        return
    drawn, writes = draw_samples(name, cell.dtype), writes_operands(name, cell.dtype)
    judge = functools.partial(judge_sample, op, form=form, dtype=DTYPES[cell.dtype], writes=writes)
    for index, sample in enumerate(drawn):
        for stage in choose_stages(index, len(drawn)):
            yield Trial(index, functools.partial(judge, sample, stage=stage, turn=index))


@functools.lru_cache(2)
def draw_samples(name: str, dtype: str) -> list[Any]:
    """The samples of an operator. The same at each call."""
    return list(samples(operators()[name], DTYPES[dtype]))


def is_floating(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def random_states() -> list[Tensor]:
    """The state of each generator that an operator may draw from."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if DEVICE != "cpu" else ())]


class Draws(TorchDispatchMode):
    """Sets `any` when an operation draws random numbers, be it none because its result is empty.

    The generator's state before and after an operator does not tell: the database's operators restore it. Results
    inside are not used: `linalg.pinv` of complex numbers returns other ones under a dispatch mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = random_states()
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in flatten(result) if isinstance(x, Tensor)]
        draws_none = torch.Tag.nondeterministic_seeded in func.tags and not any(x.numel() for x in tensors)
        self.any = self.any or draws_none or not all(map(torch.equal, random_states(), before))
        return result


def judge_sample(
    op: Any, sample: Any, form: Form, dtype: torch.dtype, stage: int = 3, turn: int = 0, writes: bool = False
) -> Verdict:
    """The outcome of one sample of an operator, which `writes` to its operands or not: the worst of several leaves'."""
    leaves, treedef = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not tensors:
        return Verdict("skipped", "no tensor")
    if any(leaves[i].numel() > MAX_NUMEL for i in tensors):
        return Verdict("skipped", "too large")
    verdicts = []
    written = tuple(tensors) if writes and not form.writes_leaf else ()
    for partitioned in choose_leaves(form, tensors, turn):
        case = Case(op, sample, leaves, treedef, partitioned, form, dtype, stage, written)
        try:
            case = prepare_out(case) if form in (FORMS["out"], FORMS["out_leaf"]) else case
            with Draws() as draws:
                call_plain(case)
            expected = run_plain(case)._replace(precise=run_precise(case))
        except Exception as error:
            return Verdict("skipped", f"plain torch raises {describe(error)}")
        if draws.any:
            return Verdict("skipped", "random")
        verdicts.append(judge_case(case, expected))
        if verdicts[-1].outcome in ("wrong", "raw"):
            break
    order = ("wrong", "raw", "refused", "equal", "skipped")
    return min(verdicts, key=lambda verdict: order.index(verdict.outcome), default=Verdict("skipped", "one tensor"))


def choose_leaves(form: Form, tensors: list[int], turn: int) -> list[tuple[int, ...]]:
    """The positions of the tensors to be partitioned, for each case of a sample."""
    first, *others = tensors
    match form.leaves:
        case "first":
            return [(first,)] if others or not form.batches else []
        case "others":
            return [(i,) for i in others]
        case "all":
            return [tuple(tensors)] if others else []
        case _:
            return [tuple(tensors) if turn % 2 else (first,)]


def prepare_out(case: Case) -> Case:
    """The case with the shapes and dtypes of its results as `out`; or with a leaf that takes the result."""
    given, args, kwargs = pytree.tree_unflatten(copy_leaves(case.leaves), case.treedef)
    results = case.op(given, *args, **kwargs)
    if not all(isinstance(y, Tensor) for y in flatten(results)):
        raise TypeError("a result is no tensor")
    if not case.form.writes_leaf:
        shapes = tuple((y.shape, y.dtype) for y in flatten(results))
        leaves, treedef = pytree.tree_flatten((given, args, {**kwargs, "out": Shapes(shapes)}))
        return case._replace(leaves=leaves, treedef=treedef)
    if not isinstance(results, Tensor):
        raise TypeError("several results")
    leaves, treedef = pytree.tree_flatten((torch.zeros_like(results), (), {"of": (given, args, kwargs)}))
    return case._replace(leaves=leaves, treedef=treedef, partitioned=(0,))


class Shapes(list[Any]):
    """Shapes and dtypes: a class of its own, so that pytree takes it for a leaf."""


def run_plain(case: Case) -> Expected:
    """Results and gradients without fzero."""
    results = flatten(call_plain(case))
    if not case.floating:
        return Expected(results, {}, [])
    xs = {i: case.leaves[i].clone().requires_grad_() for i in case.floating}
    try:
        outputs = case.differentiable(case.call(case.place(xs)))
        weights = {i: make_weight(y) for i, y in enumerate(outputs) if isinstance(y, Tensor) and y.requires_grad}
        if not weights:
            return Expected(results, {}, [])
        gradients = torch.autograd.grad(weighted_sum(outputs, weights), list(xs.values()), allow_unused=True)
    except Exception:  # a derivative that torch lacks: the results are compared all the same
        return Expected(results, {}, [])
    return Expected(results, weights, [torch.zeros_like(x) if g is None else g for x, g in zip(xs.values(), gradients)])


def run_precise(case: Case) -> Expected | None:
    """Results and gradients in double precision; None where torch has none."""
    if case.dtype not in DOUBLE:
        return None
    try:
        return run_plain(case._replace(leaves=[to_double(x) for x in case.leaves], dtype=DOUBLE[case.dtype]))
    except Exception:  # an argument such as `dtype` that does not fit
        return None


def call_plain(case: Case) -> Any:
    return case.call(copy_leaves(case.leaves))


@functools.lru_cache(2)
def writes_operands(name: str, dtype: str) -> bool:
    """Whether some sample shows that the operator writes to its operands. With a momentum of 0 it does not show."""
    return any(changes_operand(operators()[name], sample) for sample in draw_samples(name, dtype))


def changes_operand(op: Any, sample: Any) -> bool:
    """Whether an operator changes a tensor of the sample."""
    leaves, treedef = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    before = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    after = copy_leaves(before)
    given, args, kwargs = pytree.tree_unflatten(after, treedef)
    with contextlib.suppress(Exception):  # what raises an error is skipped
        op(given, *args, **kwargs)
    return any(isinstance(x, Tensor) and compare_values(x, y) != "" for x, y in zip(after, before))


def judge_case(case: Case, expected: Expected) -> Verdict:
    """The outcome of a case."""
    if case.form is FORMS["state"]:
        return judge_state(case, expected)
    found = compare_runs(lambda: run_sharded(case, expected), expected, compare)
    if found.outcome in ("refused", "raw") and expected.gradients:
        # A wrong result, of another shape say, may be what makes the loss raise.
        alone = expected._replace(gradients=[])
        results_alone = compare_runs(lambda: run_sharded(case, alone), alone, compare)
        return results_alone if results_alone.outcome == "wrong" else found
    if case.form.writes_leaf and found.outcome == "equal":
        return Verdict("wrong", "is not refused, but writes to a leaf")
    is_empty = all(isinstance(want, Tensor) and not want.numel() for want in expected.results)
    return Verdict("skipped", "no elements") if is_empty and found.outcome == "equal" else found


def run_sharded(case: Case, expected: Expected) -> Expected:
    """Results and gradients of a step on virtual ranks, whole."""
    captured = case.leaves if case.form.batches else copy_leaves(case.leaves)
    batch = {i: repeat(x) for i, x in enumerate(captured) if case.form.batches and is_strided(x)}

    def call(params: dict[str, Any], batch: dict[int, Any]) -> Any:
        values = {int(key): value for key, value in params.items()}
        return case.call([values.get(i, batch.get(i, leaf)) for i, leaf in enumerate(captured)])

    def loss_of(params: dict[str, Any], others: dict[str, Any], batch: dict[int, Any]) -> Any:
        return weighted_sum(case.differentiable(call({**params, **others}, batch)), expected.weights)

    def step(params: dict[str, Any], batch: dict[int, Any]) -> Any:
        results = call(params, batch)
        if not expected.gradients:
            return results, {}
        floating = {str(i): params[str(i)] for i in case.floating}
        others = {key: value for key, value in params.items() if key not in floating}
        return results, fzero.value_and_grad(loss_of)(floating, others, batch)[1]

    params = fzero.partition({str(i): case.leaves[i] for i in case.partitioned}, MESH)
    batch = {i: x for i, x in batch.items() if i not in case.partitioned}
    returned = fzero.simulate(step, MESH, stage=case.stage, donate=False)(params, batch)
    results, gradients = fzero.unpartition(returned)
    results = flatten(results)
    if case.form.batches:
        results = [undo_repeat(got, want) for got, want in zip(results, expected.results)]
    return Expected(results, expected.weights, [gradients[str(i)] for i in case.floating] if gradients else [])


def is_strided(x: Any) -> bool:
    """Whether `x` is a tensor that can be a batch: a sparse one cannot be cut."""
    return isinstance(x, Tensor) and x.layout == torch.strided


def repeat(x: Tensor) -> Tensor:
    """A batch in which each rank has `x`: a 0-d tensor goes to every rank."""
    return torch.cat([x] * MESH.size()) if x.ndim else x


def undo_repeat(got: Any, want: Any) -> Any:
    """One rank's value of a result that may be joined from all ranks; `got` where the ranks' values differ by more than
    rounding. A kernel may round differently where the rows of a rank begin at another address."""
    if not isinstance(got, Tensor) or not isinstance(want, Tensor) or got.shape == want.shape:
        return got
    parts = got.chunk(MESH.size()) if want.ndim and got.ndim else got.reshape(-1).unbind()
    same = len(parts) == MESH.size() and not any(compare_values(part, parts[0]) for part in parts)
    return parts[0] if same else got


def compare(got: Expected, expected: Expected) -> str:
    """How the results of a case differ; "" where they are equal."""
    precise = expected.precise or expected
    return compare_lists(got.results, expected.results, "result", precise.results) or compare_lists(
        got.gradients, expected.gradients, "gradient", precise.gradients
    )


def judge_state(case: Case, expected: Expected) -> Verdict:
    """The outcome where the result is the leaf's new state, after each of two steps that donate.

    A result that is a plain tensor in the sharded step is added to the leaf first: what a step returns as state must be
    partitioned. The plain second step begins where the sharded first one ended.
    """
    (position,) = case.partitioned
    x = case.leaves[position]
    fits = [i for i, y in enumerate(expected.results) if isinstance(y, Tensor)]
    fits = [i for i in fits if (expected.results[i].shape, expected.results[i].dtype) == (x.shape, x.dtype)]
    if not fits or not x.numel() or x.dtype == torch.bool:
        return Verdict("skipped", "no result of the leaf's shape and dtype")
    captured, is_added = copy_leaves(case.leaves), False

    def step(params: dict[str, Any]) -> dict[str, Any]:
        nonlocal is_added
        leaf = params["x"]
        y = flatten(case.call([leaf if i == position else other for i, other in enumerate(captured)]))[fits[0]]
        is_added = not is_sharded(y) if is_sharded(leaf) else is_added
        return {"x": leaf + y if is_added else y}

    def run() -> list[Any]:
        simulated = fzero.simulate(step, MESH, stage=case.stage)
        params = simulated(fzero.partition({"x": x}, MESH))
        first = fzero.unpartition(params)["x"].clone()
        pairs = [(first, step({"x": x.clone()})["x"])]
        start = time.monotonic()
        try:
            second = step({"x": first.clone()})["x"]
        except Exception:  # plain torch takes no second step: the first may have given a zero to divide by
            return pairs
        if time.monotonic() - start > SLOW:  # polygamma(4, x) takes a time that grows with -x
            return pairs
        return [*pairs, (fzero.unpartition(simulated(params))["x"], second)]

    return compare_runs(run, None, lambda got, _: compare_lists(*map(list, zip(*got)), "state"))


def copy_leaves(leaves: list[Any]) -> list[Any]:
    """Copies, because an operator may write to its arguments: batch norm writes to its running mean."""
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
