"""Each operator of torch's operator database, in a step on three virtual ranks, compared with plain torch.

The first tensor of a sample is partitioned. The step closes over all other arguments, so that every rank sees the same
values. The outcome of a sample is one of

    equal    the results, and the gradient of the first tensor, are plain torch's
    refused  fzero raises an FzeroError
    raw      something else is raised
    wrong    a result or the gradient differs
    skipped  there is nothing to compare; the reason says why

The outcome of an operator is the worst of its samples', skipped ones left out.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fzero

MESH = fzero.VirtualMesh(fsdp=3)
DTYPE = torch.float64
TOLERANCE = 1e-12
"""The largest difference allowed, in units of the largest element expected.

A gathered tensor goes through torch's own kernel, with the bits that plain torch has. Two things round differently: a
sum that is taken slice by slice, and a vectorized kernel, whose blocks begin elsewhere in a slice. With one sample of
each operator the differences were below 1e-15, and 1.6e-15 in a solve, which magnifies them.
"""

MAX_NUMEL = 1 << 16
"""Samples with a larger tensor are left out: one of grid_sampler_3d has five million elements."""

OUTCOMES = ("wrong", "raw", "refused", "equal")
"""From worst to best."""


class Verdict(NamedTuple):
    """The outcome of a sample, or of an operator: then `sample` is the first sample that has this outcome."""

    outcome: str
    reason: str = ""
    sample: int = 0


class Case(NamedTuple):
    """An operator with the arguments of one sample, as the leaves of a pytree."""

    op: Any
    sample: Any
    leaves: list[Any]
    treedef: pytree.TreeSpec
    first: int  # position of the leaf that is partitioned

    def call(self, x: Any, others: list[Any]) -> Any:
        """The operator's result, with `x` as the first tensor."""
        leaves = [*others[: self.first], x, *others[self.first + 1 :]]
        given, args, kwargs = pytree.tree_unflatten(leaves, self.treedef)
        return self.op(given, *args, **kwargs)

    def differentiable(self, results: Any) -> list[Any]:
        """What goes into the loss. The database makes it of the results, so that its derivative is well defined."""
        return flatten(self.sample.output_process_fn_grad(results))


class Expected(NamedTuple):
    """What plain torch returns."""

    results: list[Any]
    weights: dict[int, Tensor]  # position of a differentiable result -> its weight in the loss
    gradient: Tensor | None  # None where torch has none


def name_of(op: Any) -> str:
    """`linalg.norm.subgradients_at_zero`: the operator's name and its variant's."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


@functools.cache
def operators() -> dict[str, Any]:
    """Every operator of the database by its name."""
    # Not at the top: this import takes three seconds, and freezes the flags of torch.backends for the whole process.
    from torch.testing._internal.common_methods_invocations import op_db

    return {name_of(op): op for op in op_db}


def judge(name: str, limit: int | None = None, also: int = 0) -> Verdict:
    """The outcome of an operator.

    With `limit`, only so many samples are tested, skipped ones not counted: sample `also`, then others in the order of
    a fixed shuffle, because the first samples of many operators are 0-d.
    """
    found: list[Verdict] = []
    with silence():
        for verdict in judge_samples(operators()[name], also if limit else None):
            found.append(verdict)
            if limit and sum(verdict.outcome in OUTCOMES for verdict in found) == limit:
                break
    found.sort(key=lambda verdict: verdict.sample)
    tested = [verdict for verdict in found if verdict.outcome in OUTCOMES]
    if not tested:
        return found[0] if found else Verdict("skipped", "no samples")
    return min(tested, key=lambda verdict: OUTCOMES.index(verdict.outcome))


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """No warnings, and no log: torch logs the stack trace of each error in a fake tensor."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def judge_samples(op: Any, first: int | None = None) -> Iterator[Verdict]:
    """The outcome of each sample, in order; with `first`, of that sample and then of the others, shuffled."""
    if "empty" in op.name:
        yield Verdict("skipped", "its values are what memory held")
        return
    if DTYPE not in op.supported_dtypes("cpu"):
        yield Verdict("skipped", "no float64 on CPU")
        return
    every = draw_samples(op)
    order = list(range(len(every)))
    if first is not None:
        random.Random(0).shuffle(order)
        order.sort(key=lambda index: index != first)
    for index in order:
        yield judge_sample(op, every[index])._replace(sample=index)


def draw_samples(op: Any) -> list[Any]:
    """The samples of an operator. The same at each call."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    return list(op.sample_inputs("cpu", DTYPE, requires_grad=has_derivative(op)))


def has_derivative(op: Any) -> bool:
    return op.supports_autograd and DTYPE in op.supported_backward_dtypes("cpu")


class Draws(TorchDispatchMode):
    """Sets `any` when an operation draws random numbers.

    The generator's state before and after an operator does not tell: the database's operators restore it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        self.any = self.any or not torch.equal(torch.get_rng_state(), before)
        return result


def judge_sample(op: Any, sample: Any) -> Verdict:
    """The outcome of one sample."""
    leaves, treedef = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not tensors:
        return Verdict("skipped", "no tensor")
    if any(leaves[i].numel() > MAX_NUMEL for i in tensors):
        return Verdict("skipped", "too large")
    case = Case(op, sample, leaves, treedef, tensors[0])
    try:
        with Draws() as draws:
            expected = run_plain(case)
    except Exception as error:
        return Verdict("skipped", f"plain torch raises {describe(error)}")
    if draws.any:
        return Verdict("skipped", "random")
    found = judge_case(case, expected)
    if found.outcome in ("refused", "raw") and expected.gradient is not None:
        # A wrong result, of another shape say, may be what makes the loss raise.
        results_alone = judge_case(case, expected._replace(gradient=None))
        return results_alone if results_alone.outcome == "wrong" else found
    return found


def judge_case(case: Case, expected: Expected) -> Verdict:
    """The outcome of a case."""
    try:
        results, gradient = run_simulated(case, expected)
    except fzero.FzeroError as error:
        return Verdict("refused", describe(error))
    except Exception as error:
        return Verdict("raw", describe(error))
    return compare(results, gradient, expected)


def run_plain(case: Case) -> Expected:
    """Results and gradient without fzero."""
    results = flatten(case.call(case.leaves[case.first].clone(), copy_leaves(case.leaves)))
    x = case.leaves[case.first].clone()
    if not has_derivative(case.op) or not (x.is_floating_point() or x.is_complex()):
        return Expected(results, {}, None)
    try:
        outputs = case.differentiable(case.call(x.requires_grad_(), copy_leaves(case.leaves)))
        weights = {i: make_weight(y) for i, y in enumerate(outputs) if isinstance(y, Tensor) and y.requires_grad}
        gradient = torch.autograd.grad(weighted_sum(outputs, weights), x)[0] if weights else None
    except Exception:  # a derivative that torch lacks: the results are compared all the same
        return Expected(results, {}, None)
    return Expected(results, weights, gradient)


def run_simulated(case: Case, expected: Expected) -> tuple[list[Any], Tensor | None]:
    """Results and gradient of a step on virtual ranks, whole."""
    others = copy_leaves(case.leaves)

    def loss_of(params: dict[str, Any]) -> Any:
        return weighted_sum(case.differentiable(case.call(params["x"], others)), expected.weights)

    def step(params: dict[str, Any]) -> Any:
        results = case.call(params["x"], others)
        gradient = fzero.value_and_grad(loss_of)(params)[1]["x"] if expected.gradient is not None else None
        return results, gradient

    params = fzero.partition({"x": case.leaves[case.first]}, MESH)
    results, gradient = fzero.unpartition(fzero.simulate(step, MESH)(params))
    return flatten(results), gradient


def flatten(results: Any) -> list[Any]:
    return pytree.tree_leaves(results, is_leaf=lambda value: isinstance(value, fzero.Sharded))


def copy_leaves(leaves: list[Any]) -> list[Any]:
    """Copies, because an operator may write to its arguments: batch norm writes to its running mean."""
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def make_weight(y: Tensor) -> Tensor:
    """The weight of each element of `y` in the loss. They differ, so that a gradient in the wrong place shows."""
    real = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).reshape(y.shape)
    return torch.complex(real, 2.5 - real).to(y.dtype) if y.is_complex() else real.to(y.dtype)


def weighted_sum(results: list[Any], weights: dict[int, Tensor]) -> Any:
    return sum((results[i] * w).sum().real for i, w in weights.items())


def compare(results: list[Any], gradient: Tensor | None, expected: Expected) -> Verdict:
    """The outcome of a case that has run."""
    if len(results) != len(expected.results):
        return Verdict("wrong", f"{len(results)} results, expected {len(expected.results)}")
    for i, (got, want) in enumerate(zip(results, expected.results)):
        found = compare_values(got, want)
        if found:
            return Verdict("wrong", f"result {i} {found}")
    found = compare_values(gradient, expected.gradient)
    if found:
        return Verdict("wrong", f"gradient {found}")
    is_empty = all(isinstance(want, Tensor) and not want.numel() for want in expected.results)
    return Verdict("skipped", "no elements") if is_empty else Verdict("equal")


def compare_values(got: Any, want: Any) -> str:
    """How two results differ; "" where they are equal. NaN equals NaN."""
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        same = type(got) is type(want) and got == want
        return "" if same else f"is {got!r}, expected {want!r}"
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"is {got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}"
    got, want = got.detach().to_dense(), want.detach().to_dense()
    if want.dtype.is_floating_point or want.dtype.is_complex:
        finite = want[want.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        close = torch.isclose(got, want, rtol=0.0, atol=TOLERANCE * largest, equal_nan=True)
    else:
        close = got == want
    return "" if close.all() else f"differs in {int((~close).sum())} of {want.numel()} elements"


def describe(error: Exception) -> str:
    """The error's type and the start of its message, without paths, lines and addresses."""
    message = error.problem if isinstance(error, fzero.FzeroError) else str(error)
    message = re.sub(r"\S*[/\\]\S*|0x[0-9a-f]+", "...", " ".join(message.split(" (/")[0].split()))
    return f"{type(error).__name__}: {message}"[:100].rstrip()
