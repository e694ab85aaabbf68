"""Each module of torch's module database, lowered, in a step on three virtual ranks, compared with the plain module.

The leaves are the module's parameters; of a module without parameters, its floating inputs. Outputs, gradients of the
leaves, and buffers after the forward are compared. The step closes over the inputs, so that every rank sees the same
values; in the forms that end with `batch` they are arguments of the step, the same for each rank.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from conformance.database import DEVICE
from conformance.operators import Draws, is_floating, repeat, undo_repeat
from conformance.verdict import (
    DOUBLE,
    DTYPES,
    MESH,
    Cell,
    Trial,
    Verdict,
    choose_place,
    choose_stages,
    compare_lists,
    compare_runs,
    describe,
    flatten,
    make_weight,
    to_double,
    weighted_sum,
)
from torch import Tensor, nn

import fzero

FORMS = ("train", "eval", "train_batch", "eval_batch")


class Outcome(NamedTuple):
    """What a forward and a backward pass of a module give."""

    results: list[Any]
    weights: dict[int, Tensor]
    gradients: list[Tensor]
    buffers: list[Tensor]
    precise: Outcome | None = None  # the same in double precision, of a module in single precision


@functools.cache
def modules() -> dict[str, Any]:
    """Every entry of the database by its name: `nn.Linear`."""
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db}


def names() -> list[str]:
    return sorted(modules())


def cells(name: str) -> list[Cell]:
    """Every form in the dtypes that the database has."""
    return [Cell(form, d) for d in DTYPES if DTYPES[d] in modules()[name].dtypes for form in FORMS]


def trials(name: str, cell: Cell) -> Iterator[Trial]:
    """Every sample, at one stage each; the one in the middle at all."""
    samples = list(draw_samples(name, cell))
    for index, sample in enumerate(samples):
        for stage in choose_stages(index, len(samples)):
            place = choose_place(index, stage)
            yield Trial(index, functools.partial(judge_sample, modules()[name], sample, cell, stage, place))


def draw_samples(name: str, cell: Cell) -> list[Any]:
    """The samples of a module that have inputs. The same at each call."""
    torch.manual_seed(0)
    random.seed(0)
    info, training = modules()[name], cell.form.startswith("train")
    given = {"device": DEVICE, "dtype": DTYPES[cell.dtype], "requires_grad": False, "training": training}
    return [x for x in info.module_inputs_func(info, **given) if x.forward_input is not None]


def judge_sample(info: Any, sample: Any, cell: Cell, stage: int, place: Any) -> Verdict:
    """The outcome of one sample."""
    torch.manual_seed(0)
    inputs, treedef = pytree.tree_flatten((sample.forward_input.args, sample.forward_input.kwargs))
    inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
    try:
        given = sample.constructor_input
        module = info.module_cls(*given.args, **given.kwargs).to(DEVICE, DTYPES[cell.dtype])
        module.train(cell.form.startswith("train"))
        if info.is_lazy:
            args, kwargs = pytree.tree_unflatten(inputs, treedef)
            module(*args, **kwargs)
        with Draws() as draws:
            run_plain(copy.deepcopy(module), inputs, treedef)
        expected = run_plain(copy.deepcopy(module), inputs, treedef)
        if DTYPES[cell.dtype] in DOUBLE:
            double = copy.deepcopy(module).to(DOUBLE[DTYPES[cell.dtype]])
            expected = expected._replace(precise=run_plain(double, list(map(to_double, inputs)), treedef))
    except Exception as error:
        return Verdict("skipped", f"plain torch raises {describe(error)}")
    if draws.any:
        return Verdict("skipped", "random")
    if not any(True for _ in module.parameters()) and not any(isinstance(x, Tensor) and is_floating(x) for x in inputs):
        return Verdict("skipped", "no floating tensor")
    batches = cell.form.endswith("batch")
    return compare_runs(
        lambda: run_sharded(module, inputs, treedef, expected, batches, stage, place), expected, compare
    )


def run_plain(module: nn.Module, inputs: list[Any], treedef: pytree.TreeSpec) -> Outcome:
    """The forward and backward pass without fzero."""
    leaves: list[Any] = list(module.parameters())
    inputs = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
    if not leaves:
        leaves = [x.requires_grad_() for x in inputs if isinstance(x, Tensor) and is_floating(x)]
    args, kwargs = pytree.tree_unflatten(inputs, treedef)
    outputs = flatten(module(*args, **kwargs))
    weights = {i: make_weight(y) for i, y in enumerate(outputs) if isinstance(y, Tensor) and y.requires_grad}
    gradients = torch.autograd.grad(weighted_sum(outputs, weights), leaves, allow_unused=True) if weights else ()
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients)]
    return Outcome(outputs, weights, zeros, [x.detach() for x in module.buffers()])


def run_sharded(
    module: nn.Module,
    inputs: list[Any],
    treedef: pytree.TreeSpec,
    expected: Outcome,
    batches: bool,
    stage: int,
    place: Any,
) -> Outcome:
    """The forward and backward pass of the lowered module in a step."""
    has_params = any(True for _ in module.parameters())
    whole: Any
    if any(True for _ in module.buffers()):
        whole, whole_buffers, apply = fzero.lower_stateful(module)
    else:
        whole, apply_alone = fzero.lower(module)
        whole_buffers, apply = {}, lambda params, buffers, *args, **kwargs: (apply_alone(params, *args, **kwargs), {})
    floating = {str(i): x for i, x in enumerate(inputs) if isinstance(x, Tensor) and is_floating(x)}
    params = fzero.partition(whole if has_params else floating, MESH, to=place)
    buffers = fzero.partition(whole_buffers, MESH)

    def forward(params: Any, buffers: Any, batch: dict[str, Any]) -> Any:
        placed = batch if has_params else {**batch, **params}
        args, kwargs = pytree.tree_unflatten([placed.get(str(i), x) for i, x in enumerate(inputs)], treedef)
        output, buffers = apply(params if has_params else {}, buffers, *args, **kwargs)
        outputs = flatten(output)
        return weighted_sum(outputs, expected.weights), (outputs, buffers)

    def step(params: Any, buffers: Any, batch: dict[str, Any]) -> Any:
        if not expected.weights:
            return forward(params, buffers, batch)[1], {}
        (_, results), gradients = fzero.value_and_grad(forward, has_aux=True)(params, buffers, batch)
        return results, gradients

    batch = {str(i): repeat(x) for i, x in enumerate(inputs) if isinstance(x, Tensor)} if batches else {}
    returned = fzero.simulate(step, MESH, stage=stage, donate=False)(params, buffers, batch)
    (results, after), gradients = fzero.unpartition(returned)
    results, after = flatten(results), by_path(after, [path for path, _ in module.named_buffers()])
    if batches:
        results = [undo_repeat(got, want) for got, want in zip(results, expected.results)]
        after = [undo_repeat(got, want) for got, want in zip(after, expected.buffers)]
    paths = [path for path, _ in module.named_parameters()] if has_params else list(floating)
    return Outcome(results, expected.weights, by_path(gradients, paths), after)


def by_path(values: Any, paths: list[str]) -> list[Tensor]:
    """The leaves of a tree in the order of `paths`; none of an empty tree."""
    found = dict(zip(fzero.tree.paths(values), fzero.tree.leaves(values)))
    return [found[path] for path in paths] if found else []


def compare(got: Outcome, expected: Outcome) -> str:
    """How two outcomes differ; "" where they are equal."""
    for word, field in (("result", "results"), ("gradient", "gradients"), ("buffer", "buffers")):
        lists = (getattr(x, field) for x in (got, expected, expected.precise or expected))
        found = compare_lists(next(lists), next(lists), word, next(lists))
        if found:
            return found
    return ""
