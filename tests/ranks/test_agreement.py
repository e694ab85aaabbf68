"""Ranks that are about to run different steps: each rank raises at once, with the first difference and its ranks.

All ranks can go on afterwards.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from processes import Outcome, Refusal, refusal, run_cases, values
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import tree
from fzero.ranks.agreement import LONGEST, SHOWN, Disagreement, Text, Word, compare, digest

Compared = Generator[Any, Any, bool | Disagreement]

WORLD, ODD = 4, "ranks 1, 3"
SOON = 20.0
"""Seconds, of which a busy machine may need some. A collective that a rank does not join waits three times as long."""


class Differing(NamedTuple):
    """The error of a step, and the loss of a later step that all ranks take alike."""

    refusal: Refusal
    loss_after: float


def full_params(width: int = 6) -> dict[str, Any]:
    return {"layers": [{"w": torch.full((5, width), 0.1), "b": torch.ones(width)}]}


def loss_of(params: dict[str, Any], x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = x.to(layer["w"].dtype) @ layer["w"] + layer["b"]
    return x.square().mean()


def descend(params: Any, x: Tensor) -> Any:
    loss, grads = fzero.value_and_grad(loss_of)(params, x)
    return tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def steps_on(
    mesh: DeviceMesh, params: Any, x: Tensor, step: Callable[..., Any] = descend, known: bool = False
) -> Differing:
    """Run a step on this rank's arguments, then a step on arguments that are equal on all ranks. Where `known`, the
    first step has run before, on [2, 5] on all ranks."""
    sharded, differing = fzero.partition(params, mesh), fzero.shard(step, mesh)
    if known:
        differing(fzero.partition(params, mesh), torch.ones(2, 5))
    found = refusal(lambda: differing(sharded, x))
    _, loss = going_on(mesh)(fzero.partition(full_params(), mesh), torch.ones(2, 5))
    return Differing(found, float(loss))


@functools.cache
def going_on(mesh: DeviceMesh) -> Callable[..., Any]:
    """The step at the end of each case, traced once for all cases."""
    return fzero.shard(descend, mesh)


def is_odd(mesh: DeviceMesh) -> bool:
    return mesh.get_rank() % 2 == 1


def another_batch(mesh: DeviceMesh) -> Differing:
    return steps_on(mesh, full_params(), torch.ones(*[2, 3] if is_odd(mesh) else [2], 5))


def another_batch_where_others_know_theirs(mesh: DeviceMesh) -> Differing:
    return steps_on(mesh, full_params(), torch.ones(*[2, 3] if is_odd(mesh) else [2], 5), known=True)


def another_dtype_of_the_batch(mesh: DeviceMesh) -> Differing:
    return steps_on(mesh, full_params(), torch.ones(2, 5, dtype=torch.bfloat16 if is_odd(mesh) else torch.float32))


def another_dtype_of_the_model(mesh: DeviceMesh) -> Differing:
    dtype = torch.float64 if is_odd(mesh) else torch.float32
    return steps_on(mesh, tree.map(lambda leaf: leaf.to(dtype), full_params()), torch.ones(2, 5))


def another_width(mesh: DeviceMesh) -> Differing:
    return steps_on(mesh, full_params(8 if is_odd(mesh) else 6), torch.ones(2, 5))


def another_depth(mesh: DeviceMesh) -> Differing:
    params = full_params(5)
    return steps_on(mesh, {"layers": params["layers"] * (2 if is_odd(mesh) else 1)}, torch.ones(2, 5))


def another_shape_among_many(mesh: DeviceMesh) -> Differing:
    """The last leaf of many in a bucket."""
    leaves = [torch.ones(2 + is_odd(mesh) if i == 60 else 2) for i in range(61)]

    def step(params: Any, x: Tensor) -> Any:
        return x.sum()

    return steps_on(mesh, {"layers": [leaves]}, torch.ones(2, 5), step)


def another_key(mesh: DeviceMesh) -> Differing:
    """The same shapes in the same order, under other names."""
    layer = full_params()["layers"][0]

    def step(params: Any, x: Tensor) -> Any:
        return descend({"layers": [dict(zip("bw", params.values()))]}, x)

    return steps_on(mesh, {"b": layer["b"], "weight" if is_odd(mesh) else "w": layer["w"]}, torch.ones(2, 5), step)


def another_order_of_keys(mesh: DeviceMesh) -> Differing:
    (layer,) = full_params()["layers"]
    names = sorted(layer, reverse=is_odd(mesh))
    return steps_on(mesh, {"layers": [{name: layer[name] for name in names}]}, torch.ones(2, 5))


def another_constant(mesh: DeviceMesh) -> Differing:
    """A number that the step was written with."""

    def step(params: Any, x: Tensor) -> Any:
        return descend(params, x * (0.3 if is_odd(mesh) else 0.2))

    return steps_on(mesh, full_params(), torch.ones(2, 5), step)


def another_order_in_the_step(mesh: DeviceMesh) -> Differing:
    """The end of a long line."""
    columns = [0, 1, 2, 4, 3] if is_odd(mesh) else [0, 1, 2, 3, 4]

    def step(params: Any, x: Tensor) -> Any:
        parts = x.split(1, 1)
        return descend(params, torch.cat([parts[i] for i in columns], 1))

    return steps_on(mesh, full_params(), torch.ones(2, 5), step)


def another_tensor_in_the_step(mesh: DeviceMesh) -> Differing:
    def step(params: Any, x: Tensor) -> Any:
        return descend(params, x * torch.tensor([1.0, 2, 3, 4, 6 if is_odd(mesh) else 5]))

    return steps_on(mesh, full_params(), torch.ones(2, 5), step)


def writing_to(mesh: DeviceMesh, new: Callable[[int], float]) -> Differing:
    """A tensor that the step captures is written to after the trace. Where the step runs, its loss follows."""
    scale = torch.ones(())
    step = fzero.shard(lambda params, x: descend(params, x * scale), mesh)
    step(fzero.partition(full_params(), mesh), torch.ones(2, 5))
    scale.fill_(new(mesh.get_rank()))

    def run() -> None:
        _, loss = step(fzero.partition(full_params(), mesh), torch.ones(2, 5))
        torch.testing.assert_close(loss, loss_of(full_params(), torch.ones(2, 5) * scale))

    found = refusal(run)
    _, loss = going_on(mesh)(fzero.partition(full_params(), mesh), torch.ones(2, 5))
    return Differing(found, float(loss))


def another_tensor_since(mesh: DeviceMesh) -> Differing:
    return writing_to(mesh, lambda rank: 3.0 if rank % 2 else 2.0)


def a_write_on_some_ranks(mesh: DeviceMesh) -> Differing:
    return writing_to(mesh, lambda rank: 3.0 if rank % 2 else 1.0)


def a_write_on_all_ranks(mesh: DeviceMesh) -> Differing:
    return writing_to(mesh, lambda rank: 3.0)


def another_setting(mesh: DeviceMesh) -> Differing:
    step, params = fzero.shard(lambda params, x: loss_of(params, x), mesh), fzero.partition(full_params(), mesh)
    torch.use_deterministic_algorithms(is_odd(mesh))
    found = refusal(lambda: step(params, torch.ones(2, 5)))
    torch.use_deterministic_algorithms(False)
    _, loss = going_on(mesh)(fzero.partition(full_params(), mesh), torch.ones(2, 5))
    return Differing(found, float(loss))


def another_plan(mesh: DeviceMesh) -> Differing:
    """Of one layer: the program is the same at both stages."""
    plan = fzero.passes.Plan(stage=2 if is_odd(mesh) else 3)
    step, params = fzero.shard(loss_of, mesh, plan=plan), fzero.partition(full_params(), mesh)
    found = refusal(lambda: step(params, torch.ones(2, 5)))
    _, loss = going_on(mesh)(fzero.partition(full_params(), mesh), torch.ones(2, 5))
    return Differing(found, float(loss))


def errors_of_three_ranks(mesh: DeviceMesh) -> Differing:
    def step(params: Any, x: Tensor) -> Any:
        if is_odd(mesh):
            raise KeyError("no such tokenizer")
        if mesh.get_rank() == 2:
            raise OSError("disk full")
        return descend(params, x)

    return steps_on(mesh, full_params(), torch.ones(2, 5), step)


def an_error_where_others_know(mesh: DeviceMesh) -> Differing:
    """While odd ranks trace for another batch, even ranks are about to run what they have traced before."""

    def step(params: Any, x: Tensor) -> Any:
        if len(x) == 3:
            raise KeyError("no such tokenizer")
        return descend(params, x)

    return steps_on(mesh, full_params(), torch.ones(3 if is_odd(mesh) else 2, 5), step, known=True)


BATCHES = ("argument 1: ", "'argument 1: float32[2, 5]'", "'argument 1: float32[2, 3, 5]'", "differ in sizes alone")
PARTS = {
    another_batch: BATCHES,
    another_batch_where_others_know_theirs: BATCHES,
    another_dtype_of_the_batch: ("argument 1: ", "float32[2, 5]", "bfloat16[2, 5]"),
    another_dtype_of_the_model: ("argument 0.layers.0.b: ", "float32[6] of layers.0", "float64[6] of layers.0"),
    another_width: ("argument 0.layers.0.b: ", "float32[6] of layers.0", "float32[8] of layers.0"),
    another_depth: ("argument 1: ", "'argument 0.layers.1.b: "),
    another_shape_among_many: ("argument 0.layers.0.60: ", "float32[2] of layers.0", "float32[3] of layers.0"),
    another_key: ("argument 0.w: ", "'argument 0.weight: "),
    another_constant: ("node mul", "0.2", "0.3"),
    another_order_in_the_step: ("node cat: ", "'...", "%getitem_2, %getitem_3,", "%getitem_2, %getitem_4,"),
    another_tensor_in_the_step: ("constant ", "5.0", "6.0"),
    another_tensor_since: ("constant ", "float32[] [2.0]", "float32[] [3.0]"),
    a_write_on_some_ranks: ("constant ", "float32[] [1.0]", "float32[] [3.0]"),
    another_plan: ("plan stage: ", "'plan stage: 3'", "'plan stage: 2'"),
    another_setting: ("setting deterministic: ", "False", "True"),
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Outcome]]:
    cases = [*PARTS, another_order_of_keys, a_write_on_all_ranks, errors_of_three_ranks, an_error_where_others_know]
    return run_cases(WORLD, {case.__name__: case for case in cases})


def refusals(outcomes: list[Outcome]) -> list[Refusal]:
    """The error of each rank. Each came soon, and all ranks went on."""
    differing, expected = values(outcomes), loss_of(full_params(), torch.ones(2, 5))
    for found, loss_after in differing:
        assert loss_after == pytest.approx(float(expected)) and found.seconds < SOON
    return [found for found, _ in differing]


@pytest.mark.parametrize("case", PARTS, ids=lambda case: case.__name__)
def test_every_rank_is_told_the_first_difference_and_its_ranks(case: Any, found: dict[str, list[Outcome]]) -> None:
    for told in refusals(found[case.__name__]):
        assert told.kind == "FzeroError", told
        missing = [p for p in (*PARTS[case], "ranks 0, 2 have '", f"{ODD} have '") if p not in told.message]
        assert not missing, f"{missing} not in: {told.message}"
        assert len(told.message) < 1000


def test_the_order_of_keys_makes_no_difference(found: dict[str, list[Outcome]]) -> None:
    assert {each.kind for each in refusals(found["another_order_of_keys"])} == {"nothing"}


def test_a_tensor_that_all_ranks_write_to_has_its_new_value(found: dict[str, list[Outcome]]) -> None:
    assert {each.kind for each in refusals(found["a_write_on_all_ranks"])} == {"nothing"}


def test_errors_of_several_ranks_reach_all(found: dict[str, list[Outcome]]) -> None:
    told, *others = refusals(found["errors_of_three_ranks"])
    assert [told.kind, *(other.kind for other in others)] == ["FzeroError", "KeyError", "OSError", "KeyError"]
    assert told.message.startswith("ranks 1, 2, 3: could not make the step: "), told
    assert f"{ODD} have \"KeyError: 'no such tokenizer'\", rank 2 has 'OSError: disk full'" in told.message


def test_an_error_reaches_ranks_that_have_their_program(found: dict[str, list[Outcome]]) -> None:
    told = refusals(found["an_error_where_others_know"])
    assert [each.kind for each in told] == ["FzeroError", "KeyError"] * 2
    for each in told[::2]:
        assert each.message.startswith(f"{ODD}: could not make the step: KeyError: 'no such tokenizer'; "), each


# without processes: members whose questions are answered in one process


class Cost(NamedTuple):
    """What an agreement found, and what it cost a member: bytes that it heard, and questions."""

    found: bool | Disagreement
    nbytes: int
    questions: int


def answers(members: Sequence[Compared]) -> Cost:
    """The end of an agreement that all members come to, the same for each of them."""
    nbytes, count, row = 0, 0, [next(member) for member in members]
    while True:
        answer, count = type(row[0]).join(row), count + 1  # type: ignore[arg-type]
        nbytes += len(answer) if isinstance(row[0], Text) else 8 * len(torch.tensor(answer).flatten())
        ends, row = list[Any](), list[Any]()
        for member in members:
            try:
                row.append(member.send(answer))
            except StopIteration as end:
                ends.append(end.value)
        if ends:
            assert not row and all(end == ends[0] for end in ends)
            return Cost(ends[0], nbytes, count)


def member(lines: Sequence[str], error: Exception | None = None, vote: int = 0) -> Compared:
    return compare(digest(lines), lambda: lines, error, vote)


PROGRAM = [f"node {i}: float32[512, 512] = mul(%node_{i - 1}, 0.5)" for i in range(1000)]
MANY = 1024


@pytest.mark.parametrize("at", [0, 1, 499, 999])
def test_a_disagreement_of_a_thousand_members_costs_kilobytes(at: int) -> None:
    odd = [*PROGRAM[:at], "node odd", *PROGRAM[at + 1 :]]
    start = time.monotonic()
    found, nbytes, questions = answers([member(odd if i == 700 else PROGRAM) for i in range(MANY)])
    seconds = (time.monotonic() - start) / MANY  # of one member, whose hashes take nearly all of it
    assert found == Disagreement(
        [Word([i for i in range(MANY) if i != 700], PROGRAM[at]), Word([700], "node odd")], is_error=False, more=0
    )
    assert nbytes < 20_000 and questions <= 1 + 1 + 10 + 1 + 2 + 1
    assert seconds < 0.1


def test_an_agreement_of_a_thousand_members_costs_24_bytes() -> None:
    assert answers([member(PROGRAM[:10], vote=-i) for i in range(5, MANY)]) == Cost(-5, 24, 1)  # the largest vote


def test_a_thousand_errors_cost_kilobytes() -> None:
    errors: list[Exception | None] = [OSError(f"no file {i}" * 10_000) if i % 2 else None for i in range(MANY)]
    found, nbytes, _ = answers([member([], error) for error in errors])
    assert isinstance(found, Disagreement) and found.is_error and found.more == MANY // 2 - SHOWN
    assert [word.members for word in found.words] == [[1], [3], [5], [7]]
    assert nbytes <= SHOWN * LONGEST + 16 * MANY + 24


@pytest.mark.parametrize("lengths", [*itertools.product(range(4), repeat=2)])
def test_the_first_difference_is_found(lengths: tuple[int, int]) -> None:
    """All pairs of lists of up to three lines of two letters."""
    for rows in itertools.product(*(itertools.product("ab", repeat=length) for length in lengths)):
        found = answers([member(row) for row in rows]).found
        if rows[0] == rows[1]:
            assert found == 0
        else:
            at = next(i for i in range(4) if rows[0][i : i + 1] != rows[1][i : i + 1])
            said = [row[at] if at < len(row) else "nothing more" for row in rows]
            assert isinstance(found, Disagreement) and [word.text for word in found.words] == said
