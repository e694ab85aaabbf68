"""Equivalence: compare a sharded step with the unsharded step, on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.arguments import check_arguments
from fzero.base.dtypes import describe_form
from fzero.base.errors import FzeroError
from fzero.base.frozen import freeze
from fzero.base.mesh import VirtualMesh, virtual_mesh
from fzero.layout.splits import runs_in_parts
from fzero.passes.run import Pass
from fzero.program.plan import Plan
from fzero.simulation import simulate
from fzero.state.partition import partition
from fzero.state.splits import Rules
from fzero.state.unpartition import unpartition
from fzero.values.sharded import Sharded


class Difference(NamedTuple):
    """How far apart two values are: the largest absolute difference, and the largest difference relative to the
    unsharded value."""

    absolute: float
    relative: float


@check_arguments
def check_equivalence(
    train_step: Callable[..., Any],
    state: tuple[tree.Tree, ...],
    batch: tuple[tree.Tree, ...],
    *,
    ranks: int | VirtualMesh = 8,
    stage: int | None = None,
    memory: int | str | None = None,
    steps: int = 1,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    reduce_dtype: torch.dtype | None = None,
    passes: Sequence[Pass] | None = None,
    plan: Plan | None = None,
    data: Sequence[str] | None = None,
    split: Rules | None = None,
    pass_state: Mapping[str, Any] | None = None,
) -> dict[str, Difference]:
    """Run `steps` steps sharded on virtual ranks and unsharded, and compare the results after each step.

    `state` and `batch` are tuples of trees of full tensors, which stay as they are. `train_step(*state, *batch)`
    returns the new state, tree by tree, and then its other results. Every step gets the same batch. The trees of
    `state` are partitioned by `fzero.partition`, each `like` the trees before it, and the first of them with `split`,
    whose axes `data` leaves out. Every tensor of `batch` is cut along dim 0, one part for each rank. `stage`, `memory`,
    `reduce_dtype`, `passes`, `plan` and `data` are as in `fzero.simulate`. State that passes keep begins as
    `pass_state`, by default as `init_pass_state` gives it, and goes from step to step; it is not compared.

    Returns:
        Path of each result -> its largest difference over all steps.

    Raises:
        FzeroError: with the first leaf, step, rank and element that differ by more than `atol + rtol * |unsharded|`;
            where shapes or dtypes differ; as `fzero.simulate` does.
    """
    if steps < 1:
        raise FzeroError("steps", f"is {steps}", "compare at least 1 step")
    mesh = virtual_mesh(ranks)
    how: dict[str, Any] = {"stage": stage, "memory": memory, "reduce_dtype": reduce_dtype, "passes": passes}
    step = simulate(train_step, mesh, plan=plan, data=data, **how)
    sharded: tuple[tree.Tree, ...] = ()
    for part in state:
        sharded = (*sharded, partition(part, mesh, like=sharded, split=None if sharded else split))
    plain = tree.map(lambda leaf: freeze(leaf.detach().clone(), leaf), state)
    kept = step.init_pass_state(*sharded, *batch) if pass_state is None and passes is not None else pass_state
    largest: dict[str, Difference] = {}
    for number in range(1, steps + 1):
        result = step(*sharded, *batch, pass_state=kept)
        result, kept = result if kept else (result, kept)
        got, expected = (_as_tuple(each, state) for each in (result, train_step(*plain, *batch)))
        for path, found in _compare_results(got, expected, number, (rtol, atol)).items():
            largest[path] = Difference(*map(max, zip(found, largest.get(path, found))))
        sharded, plain = got[: len(state)], expected[: len(state)]
    return largest


def _as_tuple(result: Any, state: tuple[tree.Tree, ...]) -> tuple[Any, ...]:
    """The results of one step, as a tuple that begins with the new state."""
    result = result if isinstance(result, tuple) else (result,)
    if len(result) < len(state):
        raise FzeroError(
            "train_step",
            f"returned {len(result)} values for {len(state)} trees of state",
            "return the new state, tree by tree, and then other results",
        )
    return result


def _compare_results(
    got: tree.Tree, expected: tree.Tree, step: int, tolerances: tuple[float, float]
) -> dict[str, Difference]:
    """Path -> difference, for each tensor of the results."""
    ours, treedef = tree.flatten(got)
    theirs, expected_def = tree.flatten(expected)
    if treedef != expected_def:
        raise tree.mismatch(expected_def, treedef)
    paths = map(tree.dotted, tree.keys(treedef))
    return {
        path: _compare(f"{path}, step {step}", a, b, tolerances)
        for path, a, b in zip(paths, ours, theirs)
        if isinstance(b, Tensor)
    }


def _compare(where: str, got: Tensor, expected: Tensor, tolerances: tuple[float, float]) -> Difference:
    value = unpartition(got)
    if (value.shape, value.dtype) != (expected.shape, expected.dtype):
        raise FzeroError(
            where,
            f"is {describe_form(value)} sharded and {describe_form(expected)} unsharded",
            "a result that is each rank's own is joined along dim 0; psum, pmean or a floating mean makes one of it",
        )
    exact = value.to(torch.float64 if not value.is_complex() else torch.complex128).reshape(-1)
    wanted = expected.to(exact.dtype).reshape(-1)
    if not exact.numel():
        return Difference(0.0, 0.0)
    inexact = expected.is_floating_point() or expected.is_complex()
    rtol, atol = tolerances if inexact else (0.0, 0.0)
    # Integers are compared as they are: float64 has not all of them. Infinities and NaNs are near to themselves only.
    same = (exact == wanted) | (exact.isnan() & wanted.isnan()) if inexact else (value == expected).reshape(-1)
    distance = torch.where(same, 0.0, (exact - wanted).abs())
    far = ~same & ~((distance <= atol + rtol * wanted.abs()) & wanted.isfinite() if inexact else same)
    if far.any():
        raise _refuse_difference(where, got, int(far.nonzero()[0]), exact, wanted, (rtol, atol))
    relative = torch.where(distance == 0, 0.0, distance / wanted.abs())
    return Difference(float(distance.max()), float(relative.max()))


def _refuse_difference(
    where: str, got: Tensor, element: int, ours: Tensor, theirs: Tensor, tolerances: tuple[float, float]
) -> FzeroError:
    return FzeroError(
        f"{where}, {_find_holder(got, element)}",
        f"element {element} is {ours[element].item():.9g} sharded and {theirs[element].item():.9g} unsharded, further "
        f"apart than rtol {tolerances[0]:g} and atol {tolerances[1]:g}",
        "is the loss a mean over the batch, and nothing else computed from one rank's part?",
    )


def _find_holder(value: Tensor, element: int) -> str:
    """The rank that holds an element of a flattened value, in words."""
    if not isinstance(value, Sharded) or value.form.layout.replicated:
        return "every rank"
    layout, where = value.form.layout, ""
    if layout.splits > 1:
        runs = runs_in_parts(layout.run_of(value.index), layout.splits, range(element, element + 1))
        position, element, _ = next(runs)
        where = f" of part {position} along {layout.split_axis!r}"
    return f"rank {next(rank for rank in range(layout.world) if element in layout.part(value.index, rank))}{where}"
