"""Random steps equal plain torch or are refused, and have the traces that torch records; and what finds, prints and
shrinks them works."""

from __future__ import annotations

import functools
import multiprocessing
import random
from dataclasses import replace

import pytest

from property_tests.random_steps import losses, updates, values
from property_tests.random_steps.draw import draw, draw_setting
from property_tests.random_steps.grammar import Rule
from property_tests.random_steps.judge import Verdict, judge
from property_tests.random_steps.program import Program
from property_tests.random_steps.run import Outcome, run
from property_tests.random_steps.scope import Scope
from property_tests.random_steps.shrink import shrink
from property_tests.repeats import trace_both

SEEDS = range(5)
"""`make steps`, which CI runs too, begins with these and goes on with hundreds."""
TABLES = (
    *(values.UNIFORM, values.ROWS, losses.LOCAL, losses.OWN),
    *(losses.TERMS, losses.LOCAL_TERMS, losses.PENALTIES, losses.NUMBERS),
    *(updates.OPTIMIZERS, updates.STATE, updates.METRICS),
)


DIFFERENCES: dict[int, list[str]] = {}
"""What repeats change in the traces of a seed."""


@functools.cache
def ran(seed: int) -> Outcome:
    with trace_both() as DIFFERENCES[seed]:
        return run(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_step_is_plain_torchs_or_refused(seed: int) -> None:
    """And a trace that records operations of known forms at once is the trace that torch records."""
    assert ran(seed).verdict.outcome in ("equal", "refused"), ran(seed).verdict
    assert not DIFFERENCES[seed]


def test_most_random_steps_are_not_refused() -> None:
    """Else the grammar would be about errors."""
    assert sum(ran(seed).verdict.outcome == "equal" for seed in SEEDS) > 3


@pytest.mark.parametrize("seed", [1202851, 1203071, 1206026])
def test_a_wait_for_a_copy_to_the_host_is_no_use_of_a_layer(seed: int) -> None:
    """State on the host: prefetch puts such waits between the uses of other layers, and verify refused that."""
    assert ran(seed).verdict.outcome == "equal", ran(seed).verdict


def test_a_seed_has_one_source() -> None:
    assert draw(7).source() == draw(7).source() != draw(8).source()


def made(**fields: object) -> Program:
    """A step of one statement, on two ranks."""
    program = replace(draw(0), is_local=False, mesh=(("fsdp", 2),), rows=(2,), contexts=("",), between="", held="")
    shapes = {"b": ((program.width,), "float64", 0.5)}
    bare = replace(program, shapes=shapes, layers=0, loss=(), rowwise={}, own={}, metrics=(), dtype="float64")
    sgd = "new = fzero.tree.map(lambda a, b: a - 0.1 * b, p, g)"
    return replace(bare, **{"terms": ('(x * p["b"]).mean()',), "update": (sgd,), **fields})  # type: ignore[arg-type]


def test_a_mean_over_examples_is_equal() -> None:
    assert judge(made()) == Verdict("equal")


@pytest.mark.parametrize(
    "fields",
    [
        {"terms": ('(x * p["b"]).sum()',)},  # no mean over examples
        {"terms": ('(x * p["b"]).mean().square()',)},
        {"own": {"own": "fzero.pmean(x.mean(0), 'fsdp')"}},  # not this rank's own
    ],
)
def test_another_number_than_plain_torchs_is_wrong(fields: dict[str, object]) -> None:
    assert judge(made(**fields)).outcome == "wrong"


def test_an_error_of_fzero_is_a_refusal_and_any_other_is_raw() -> None:
    refused = made(update=("new = dict(p, b=p['b'] + x[0])",), is_local=True)
    assert judge(refused).outcome == "refused"
    assert judge(made(loss=("if isinstance(p['b'], fzero.Sharded): raise KeyError",))).outcome == "raw"


def test_a_step_that_plain_torch_refuses_is_invalid() -> None:
    assert judge(made(loss=("x @ torch.ones(7, 7)",))).outcome == "invalid"


def test_shrinking_keeps_what_the_failure_needs() -> None:
    """Here: the verdict is `wrong` as long as the source has an `embedding`."""
    large = next(step for step in map(draw, range(100)) if "embedding" in step.text and len(step.loss) > 3)

    def has_embedding(program: Program) -> Verdict:
        return Verdict("wrong" if "embedding" in program.text else "equal")

    small, verdict = shrink(large, Verdict("wrong"), has_embedding)
    assert verdict.outcome == "wrong" and len(small.loss) + len(small.terms) <= 3
    assert len(small.rows) == 1 and small.mesh == (("fsdp", 2),) and not small.metrics


def test_each_rule_runs_in_plain_torch() -> None:
    """Else a rule with a slip would never be drawn. In a process of its own, as `make steps` runs them: `torch.cond`
    compiles, which failed in processes where other tests had run."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(find_failing).get(timeout=200) == []


def find_failing() -> list[str]:
    """The texts of the rules that do not run."""
    scopes = [Scope(draw_setting(seed, draws := random.Random(seed)), draws, frozenset()) for seed in range(20)]
    for scope in scopes:
        scope.run(BEFORE)
    rules = (rule for table in TABLES for rule in table)
    return [rule.text for rule in rules if not any(_runs(scope, rule) for scope in scopes)]


BEFORE = """
mean, var, buffers = s["mean"] * 1, s["var"] * 1, s["norm"]
loss, g, results, out, new = x.mean(), fzero.tree.map(torch.ones_like, p), {}, {}, dict(p)
"""


def _runs(scope: Scope, rule: Rule) -> bool:
    """Whether the text of a rule runs beside the variables of a step."""
    try:
        scope.run(scope.fill(rule.text, "made"))
    except Exception:
        return False
    return True
