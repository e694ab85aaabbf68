"""What a trial shows, and how results are compared. A trial runs one thing in plain torch and in a sharded step.

equal    the results, and the gradients where there are some, are plain torch's
refused  fzero raises an FzeroError
raw      something else is raised
wrong    a result or a gradient differs
skipped  there is nothing to compare; the reason says why
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

import fzero

MESH = fzero.VirtualMesh(fsdp=3)
STAGES = (1, 2, 3)
PLACES = (None, fzero.host())
"""Where the leaves of modules and the state of optimizers lie."""

DTYPES = {"f64": torch.float64, "f32": torch.float32, "c64": torch.complex64, "i64": torch.int64}
OUTCOMES = ("wrong", "raw", "refused", "equal")
"""From worst to best; `skipped` stands apart."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The largest difference allowed, in units of the largest element expected.

A gathered tensor goes through torch's own kernel, with the bits that plain torch has. Two things round differently: a
sum that is taken slice by slice, and a vectorized kernel, whose blocks begin elsewhere in a slice. Both are a few units
in the last place of the largest element: 1e-5 is 84 units of float32. In float64 the differences were below 1e-15, and
1.6e-15 in a solve. Half precision appears in results only, where a function casts.
"""

ROUNDING = 4
"""In single precision a difference may also be so many times plain torch's own error, which is measured against double
precision: where terms cancel, or in a solve, rounding is large beside the result."""

DOUBLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}

SECONDS = 60
"""A trial that takes longer is raw."""


class Verdict(NamedTuple):
    """The outcome of a trial; or of several, with the number of the first sample that has it."""

    outcome: str
    reason: str = ""
    sample: int = 0


class Cell(NamedTuple):
    """A column of the table: what is done with a leaf, and the dtype."""

    form: str
    dtype: str


class Trial(NamedTuple):
    """A sample, and the function that tries it."""

    sample: int
    run: Callable[[], Verdict]


def choose_stages(index: int, count: int) -> tuple[int, ...]:
    """The stages at which a sample is tried: one, in turn; for the sample in the middle all, as the first are 0-d."""
    return STAGES if index == count // 2 else STAGES[index % 3 :][:1]


def choose_place(index: int, stage: int) -> Any:
    """The place of a sample at a stage: each in turn."""
    return PLACES[(index + stage) % len(PLACES)]


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst verdict, of the first sample that has it. Skipped ones count where there are no others."""
    ordered = sorted(verdicts, key=lambda verdict: verdict.sample)
    tested = [verdict for verdict in ordered if verdict.outcome in OUTCOMES]
    if not tested:
        return ordered[0] if ordered else Verdict("skipped", "no samples")
    return min(tested, key=lambda verdict: OUTCOMES.index(verdict.outcome))


def compare_runs(sharded: Callable[[], Any], expected: Any, compare: Callable[[Any, Any], str]) -> Verdict:
    """The outcome of a sharded run. `compare(got, expected)` says how they differ, "" where they are equal."""
    try:
        got = sharded()
    except fzero.FzeroError as error:
        return Verdict("refused", describe(error))
    except Exception as error:
        return Verdict("raw", describe(error))
    found = compare(got, expected)
    return Verdict("wrong", found) if found else Verdict("equal")


def compare_lists(got: list[Any], want: list[Any], what: str = "result", precise: list[Any] | None = None) -> str:
    """How two lists of results differ; "" where they are equal. `precise` is `want` in double precision."""
    if len(got) != len(want):
        return f"{len(got)} {what}s, expected {len(want)}"
    errors = [measure_error(a, b) for a, b in zip(want, precise)] if precise and len(precise) == len(want) else []
    for i, (a, b, error) in enumerate(zip(got, want, errors or [0.0] * len(want))):
        found = compare_values(a, b, ROUNDING * error)
        if found:
            return f"{what} {i} {found}"
    return ""


def measure_error(want: Any, precise: Any) -> float:
    """The largest error of a result in single precision, where there is the same in double precision."""
    if not isinstance(want, Tensor) or not isinstance(precise, Tensor) or want.shape != precise.shape:
        return 0.0
    if DOUBLE.get(want.dtype) != precise.dtype or not want.numel():
        return 0.0
    return float((want.detach().to_dense() - precise.detach().to_dense()).abs().nan_to_num(0.0, 0.0, 0.0).max())


def to_double(leaf: Any) -> Any:
    """A tensor in double precision; anything else as it is."""
    return leaf.to(DOUBLE.get(leaf.dtype, leaf.dtype)) if isinstance(leaf, Tensor) else leaf


def compare_values(got: Any, want: Any, error: float = 0.0) -> str:
    """How two results differ by more than `error` and rounding; "" where they are equal. NaN equals NaN."""
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        same = type(got) is type(want) and got == want
        return "" if same else f"is {got!r}, expected {want!r}"
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"is {got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}"
    got, want = (x.detach().to_dense().resolve_conj().resolve_neg() for x in (got, want))
    if want.dtype.is_complex:
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    if torch.equal(got, want):  # as most are, and known in a tenth of the time
        return ""
    if want.dtype.is_floating_point:
        finite = want[want.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        bound = max(TOLERANCE.get(want.dtype, TOLERANCE[torch.bfloat16]) * largest, error)
        close = torch.isclose(got, want, rtol=0.0, atol=bound, equal_nan=True)
    else:
        close = got == want
    return "" if close.all() else f"differs in {int((~close).sum())} of {want.numel()} elements"


def flatten(results: Any) -> list[Any]:
    """The leaves of what an operator or a module returned."""
    return pytree.tree_leaves(results, is_leaf=lambda value: isinstance(value, fzero.Sharded))


def make_weight(y: Tensor) -> Tensor:
    """The weight of each element of `y` in the loss. They differ, so that a gradient in the wrong place shows."""
    real = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64, device=y.device).reshape(y.shape)
    return torch.complex(real, 2.5 - real).to(y.dtype) if y.is_complex() else real.to(y.dtype)


def weighted_sum(results: list[Any], weights: dict[int, Tensor]) -> Any:
    """The loss: the results at the positions of `weights`, times their weights."""
    return sum((results[i] * w).sum().real for i, w in weights.items())


def describe(error: Exception) -> str:
    """The error's type and the first words of its message, without paths, lines and addresses."""
    message = error.problem if isinstance(error, fzero.FzeroError) else str(error)
    message = re.sub(r"\S*[/\\]\S*|0x[0-9a-f]+", "...", " ".join(message.split(" (/")[0].split()))
    return textwrap.shorten(f"{type(error).__name__}: {message}", 160, placeholder=" ...")


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


@contextlib.contextmanager
def deadline(seconds: int = SECONDS) -> Iterator[None]:
    """Raises TimeoutError in a block that takes longer. In the main thread only."""

    def stop(signum: int, frame: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
