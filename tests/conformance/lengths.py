"""Each operator of torch's database in a step whose batches change in size, beside plain torch.

    PYTHONPATH=tests python -m conformance.lengths --write     # all, and docs/open_sizes.md
    PYTHONPATH=tests python -m conformance.lengths addcmul     # some

A sample's tensors are the batch. They grow along dim 0, along the last dim, or along both, by each of `FACTORS`: those
whose size there is that of the sample's first tensor, or this one alone, as plain torch takes it. One step is called
with all of them. It is traced at the first size, with open sizes at the second, and not again, where torch can do that.
Results and the gradient of a factor are compared at each size.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from conformance import operators
from conformance.verdict import Verdict, compare_lists, deadline, describe, flatten, silence, weighted_sum
from conformance.workers import judge_all
from torch import Tensor

import fzero

PAGE = Path(__file__).parents[2] / "docs" / "open_sizes.md"
FACTORS = (1, 2, 3, 5)
WAYS = ("rows", "last", "both")
OUTCOMES = ("wrong", "raw", "refused", "each", "open")
"""From worst to best. "each": equal, and traced for each size; "open": equal, and one program serves all sizes."""
MESH = fzero.VirtualMesh(fsdp=1)


class Grown(NamedTuple):
    """The leaves of a sample at each size, and what plain torch makes of them: results, and a gradient or None."""

    leaves: list[list[Any]]
    expected: list[tuple[list[Any], Tensor | None]]


class Case(NamedTuple):
    """An operator with a sample. Each floating tensor of the first argument is multiplied by a leaf."""

    op: Any
    sample: Any

    def call(self, leaves: list[Any], factor: Any) -> tuple[Any, Any]:
        """The results for these leaves of the sample, and a loss, None where nothing is differentiable."""
        treedef = pytree.tree_structure((self.sample.input, self.sample.args, self.sample.kwargs))
        given, args, kwargs = pytree.tree_unflatten(leaves, treedef)
        scaled = pytree.tree_map(lambda x: x * factor if _is_floating(x) else x, given)
        made = self.op(scaled, *args, **kwargs)
        followed = dict(enumerate(flatten(self.sample.output_process_fn_grad(made))))
        weights = {i: _make_weight(x) for i, x in followed.items() if _is_floating(x) and x.requires_grad}
        return made, weighted_sum(list(followed.values()), weights) if weights else None


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _make_weight(y: Tensor) -> Tensor:
    """The weight of each element in the loss. torch asks for the values of sizes in `linspace`, and not in `arange`."""
    return (torch.arange(1, y.numel() + 1, dtype=torch.float64) / y.numel()).reshape(y.shape).to(y.dtype)


def grow(leaves: list[Any], factor: int, way: str, is_alone: bool) -> list[Any]:
    """Leaves that are `factor` times as large."""
    first = next(x for x in leaves if isinstance(x, Tensor) and x.ndim)
    dims = {"rows": (0,), "last": (-1,), "both": (0, -1)}[way] if first.ndim > 1 or way != "both" else (0,)

    def change(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.ndim or (is_alone and x is not first):
            return x
        made = x.detach()
        for dim in dims:
            if x.shape[dim] == first.shape[dim] and (len(dims) == 1 or x.ndim > 1):
                made = torch.cat([made, *(vary(made, i) for i in range(1, factor))], dim)
        return made

    return list(map(change, leaves))


def vary(x: Tensor, seed: int) -> Tensor:
    """A tensor like `x`: equal rows would make a matrix singular."""
    if not x.is_floating_point():
        return x
    return x * (0.5 + torch.rand(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype))


def list_grown(op: Any, sample: Any, way: str) -> Iterator[Grown]:
    """The sample at all sizes, where plain torch takes it so, draws nothing at random and agrees with itself."""
    leaves, case = pytree.tree_leaves((sample.input, sample.args, sample.kwargs)), Case(op, sample)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if any(x.layout is not torch.strided or x.is_nested for x in tensors) or not any(x.ndim for x in tensors):
        return
    for is_alone in (False, True):
        try:
            sizes = [grow(leaves, factor, way, is_alone) for factor in FACTORS]
            if _shapes(sizes[0]) == _shapes(sizes[1]):
                continue
            with operators.Draws() as draws:
                expected, again = ([_run_plain(case, each) for each in sizes] for _ in range(2))
        except Exception:
            continue
        is_steady = not any(compare_lists(a, b) for (a, _), (b, _) in zip(expected, again))
        if is_steady and not draws.any and len({gradient is None for _, gradient in expected}) == 1:
            yield Grown(sizes, expected)


def _shapes(leaves: list[Any]) -> list[Any]:
    return [x.shape for x in leaves if isinstance(x, Tensor)]


def _run_plain(case: Case, leaves: list[Any]) -> tuple[list[Any], Tensor | None]:
    factor = torch.tensor(1.25, dtype=torch.float64, requires_grad=case.op.supports_autograd)
    made, loss = case.call([x.clone() if isinstance(x, Tensor) else x for x in leaves], factor)
    gradient = None if loss is None else torch.autograd.grad(loss, factor)[0]
    return [x.detach() if isinstance(x, Tensor) else x for x in flatten(made)], gradient


def judge_grown(case: Case, grown: Grown) -> Verdict:
    """The outcome of a step that is called with each size."""
    params = fzero.partition({"factor": torch.full((1,), 1.25, dtype=torch.float64)}, MESH)
    fixed, is_followed = grown.leaves[0], grown.expected[0][1] is not None

    def step(params: Any, batch: dict[str, Tensor]) -> Any:
        leaves = [batch.get(str(i), x) for i, x in enumerate(fixed)]

        def loss_of(params: Any) -> Any:
            made, loss = case.call(leaves, params["factor"][0])
            return loss, made

        if not is_followed:
            return case.call(leaves, params["factor"][0])[0], None
        (_, made), gradients = fzero.value_and_grad(loss_of, has_aux=True)(params)
        return made, gradients

    called, log = fzero.simulate(step, MESH), _Log()
    with log:
        for leaves, (results, gradient) in zip(grown.leaves, grown.expected):
            batch = {str(i): x.clone() for i, x in enumerate(leaves) if isinstance(x, Tensor)}
            try:
                made, gradients = called(params, batch)
            except fzero.FzeroError as error:
                return Verdict("refused", describe(error))
            except Exception as error:
                return Verdict("raw", describe(error))
            got = [_as_plain(x, y) for x, y in zip(flatten(made), results, strict=True)]
            found = compare_lists(got, results)
            if gradient is not None and not found:
                found = compare_lists([fzero.unpartition(gradients)["factor"][0]], [gradient], "gradient")
            if found:
                return Verdict("wrong", found)
    return Verdict("open") if log.is_open else Verdict("each", log.why)


def _as_plain(x: Any, like: Any) -> Any:
    """A result of the one rank: a 0-d one is the rank's own, with a dim of ranks."""
    is_own = isinstance(x, Tensor) and isinstance(like, Tensor) and x.ndim == 1 and not like.ndim
    return x[0] if is_own else x


class _Log(logging.Handler):
    """What fzero says of traces in a block."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())

    def __enter__(self) -> _Log:
        self._logger, self._disabled = logging.getLogger("fzero"), logging.root.manager.disable
        self._level = self._logger.level
        logging.disable(logging.NOTSET)
        self._logger.setLevel(logging.DEBUG)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)
        logging.disable(self._disabled)

    @property
    def is_open(self) -> bool:
        return any("with open sizes" in x for x in self._said) and not any("traced again" in x for x in self._said)

    @property
    def why(self) -> str:
        """Why a trace with open sizes did not serve."""
        return next((x.partition("for each shape: ")[2] for x in self._said if "for each shape" in x), "")


def judge(name: str, samples: int = 8) -> dict[str, Verdict]:
    """Way -> the outcome of a sample that plain torch takes at all sizes, among the first in a fixed shuffle."""
    op = operators.operators()[name]
    drawn = list(operators.draw_samples(name, "f64")) if "f64" in _dtypes(name) and "empty" not in name else []
    random.Random(name).shuffle(drawn)
    found = {}
    with silence():
        for way in WAYS:
            grown = ((sample, each) for sample in drawn[:samples] for each in list_grown(op, sample, way))
            for sample, each in itertools.islice(grown, 1):
                found[way] = _judge(Case(op, sample), each)
    return found


def _dtypes(name: str) -> set[str]:
    return {cell.dtype for cell in operators.cells(name)}


def _judge(case: Case, grown: Grown) -> Verdict:
    try:
        with deadline():
            return judge_grown(case, grown)
    except TimeoutError as error:
        return Verdict("raw", f"TimeoutError: {error}")


def find_dead(name: str) -> dict[str, Verdict]:
    """What is said of an operator that ends the process, as plain torch does where it does not check sizes."""
    return dict.fromkeys(WAYS, Verdict("skipped", "the process died"))


def render(table: dict[str, dict[str, Verdict]]) -> str:
    """The page."""
    cells = [verdict for row in table.values() for verdict in row.values() if verdict.outcome in OUTCOMES]
    counts = Counter(verdict.outcome for verdict in cells)
    rows = [
        f"| `{name}` | " + " | ".join(row[way].outcome if way in row else "" for way in WAYS) + " | "
        + next((f"`{verdict.reason[:110]}`" for verdict in row.values() if verdict.reason), "") + " |"
        for name, row in sorted(table.items())
        if any(verdict.outcome != "open" for verdict in row.values())
    ]  # fmt: skip
    version = torch.__version__.partition("+")[0]
    return "\n".join([
        "# Operators in batches that change in size", "",
        f"`PYTHONPATH=tests python -m conformance.lengths --write` makes this page, with torch {version}.", "",
        "Each operator of torch's database that takes a larger batch: along dim 0 (`rows`), along the last dim",
        "(`last`), or along both. One step is called with batches of 1, 2, 3 and 5 times the size of a sample, in",
        "float64, and its results and a gradient are compared with plain torch's at each size. *open*: equal, and one",
        "program serves all sizes from the second on. *each*: equal, and the step is traced for each size, because",
        "torch decides by the size, or because the first size is 0 or 1, which has a program of its own.", "",
        f"{len(table)} operators, {len(cells)} pairs of an operator and a way: "
        + ", ".join(f"{counts[outcome]} {outcome}" for outcome in reversed(OUTCOMES)) + ".", "",
        "The operators that are not open in all ways:", "",
        "| operator | rows | last | both | why |", "|---|---|---|---|---|", *rows, "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="operators; all by default")
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    table = {}
    for name, row in judge_all(given.names or operators.names(), given.workers, judge, find_dead):
        if row:
            table[name] = row
        print(name, *(f"{way}: {x.outcome} {x.reason}" for way, x in row.items()), flush=True)
    if given.write:
        PAGE.write_text(render(table), encoding="utf-8")


if __name__ == "__main__":
    main()
