"""Operations from outside are held to their records: in a simulation, and at the first call of a program on a mesh."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mutants import give, good, list_mutants, seed
from processes import Outcome, run_cases, values
from programs import assert_same, layers, training
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import FzeroError, Program, ops, optim, passes, tree
from fzero.execution import claims, lockstep, outline
from fzero.execution.codegen import link
from fzero.program.inference import infer
from fzero.ranks.live import live

MESH = fzero.VirtualMesh(fsdp=2)
SGD = optim.sgd(0.1)


def attempt(act: Callable[[], Any]) -> str:
    try:
        act()
    except FzeroError as error:
        return str(error)
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"
    return "silent"


# mutants of fzero's own variants


def list_unnamed(words: dict[str, str]) -> list[str]:
    """The mutants whose error is not the one that the table wants."""
    wanted = {mutant.name: mutant.says for mutant in list_mutants()}
    return [f"{name}: {said}" for name, said in words.items() if not re.search(wanted[name], said)]


def run_all(mesh: DeviceMesh) -> dict[str, str]:
    on, words = live(mesh), {}
    for mutant in list_mutants():
        program, given = seed(mutant), give(mutant.variant)[on.rank]
        runner = functools.partial(link, program, on, is_held=True)
        words[mutant.name] = attempt(lambda runner=runner, given=given: runner()(given))
    return words


def test_each_mutant_is_named_in_a_simulation() -> None:
    words = {x.name: attempt(functools.partial(lockstep.run, seed(x), give(x.variant))) for x in list_mutants()}
    assert len(words) > 60 and list_unnamed(words) == []


def test_operations_that_do_what_they_say_are_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in ("int8_gather", "int8_mean", "int8_scatter"):
        held = lockstep.run(good(variant)[1], give(variant))
        with monkeypatch.context() as patch:
            patch.setattr(claims, "hold", lambda program, node, rank, run, kind: run)
            assert_same(held, lockstep.run(good(variant)[1], give(variant)))


def test_kinds_are_known_in_compiled_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outline, "LEAST", 1)
    for variant in ("int8_gather", "int8_mean", "int8_scatter"):
        plain = good(variant)[1]
        outlined = outline.outline(plain)
        assert any(isinstance(node.target, outline.Fragment) for node in outlined.graph.nodes)
        ours, theirs = infer(outlined), infer(plain)
        expected = {node.name: kind for node, kind in theirs.items() if claims.is_foreign(node)}
        assert expected == {node.name: kind for node, kind in ours.items() if claims.is_foreign(node)} != {}


# operations that are wrong by themselves


def slice_kind(walk: Any, node: Any) -> Any:
    return walk.of(node.args[0])


def sized_by_rank_0(program: Program, node: Any, rank: Any) -> Any:
    return lambda x: x.new_ones(node.meta["val"].numel())


def uneven(program: Program, node: Any, rank: Any) -> Any:
    def run(x: Tensor) -> Any:
        received = yield ops.AllToAll("an exchange", "fsdp", x.new_ones(3), ([1, 2], [1, 2]))
        return received.sum()

    return run


def fits(program: Program, node: Any, rank: Any) -> Any:
    def run(x: Tensor) -> Any:
        given = [1, 2] if rank.rank == 0 else [3, 4]
        taken = [1, 3] if rank.rank == 0 else [2, 4]
        received = yield ops.AllToAll("an exchange", "fsdp", x.new_ones(sum(given)), (given, taken))
        return received.sum()

    return run


def to_all(nbytes: int) -> Any:
    return lambda program, node: [ops.Comm("all_to_all", "fsdp", None, torch.float32, nbytes)]


def a_number(x: Tensor) -> Tensor:
    return x.new_empty(())


def differs(walk: Any, node: Any) -> Any:
    return walk.per_rank


MADE: dict[str, tuple[dict[str, Any], str]] = {
    "sized by rank 0": (
        {"fake": torch.empty_like, "kind": slice_kind, "perform": sized_by_rank_0},
        r"kind says a slice of \S+, here the shape \[\d+\], and perform gives \[\d+\], in .* on rank 1",
    ),
    "its fake is a view": (
        {"fake": lambda x: x, "kind": slice_kind},
        "shares says that the result has memory of its own, and fake gives a view of",
    ),
    "a copy for a view": (
        {"fake": lambda x: x.view(-1), "kind": slice_kind, "shares": lambda node: True,
         "perform": lambda program, node, rank: lambda x: x.clone()},
        "fake gives memory of .*, and perform gives other memory",
    ),
    "another span": (
        {"fake": lambda x: x.view(-1), "kind": slice_kind, "shares": lambda node: True,
         "span": lambda program, node, rank: range(0, 1), "perform": lambda program, node, rank: lambda x: x.view(-1)},
        r"span gives elements 0 to 1, and perform gives elements 0 to \d+",
    ),
    "splits that do not fit": (
        {"fake": a_number, "kind": differs, "perform": uneven, "moves": to_all(16)},
        "yields splits that do not fit: along 'fsdp' rank 0 gives 2 elements to rank 1, which takes 1",
    ),
    "splits of other bytes": (
        {"fake": a_number, "kind": differs, "perform": fits, "moves": to_all(16)},
        "moves lists all_to_all over 'fsdp' of float32, 16 B as exchange 1, and perform moves 24 B",
    ),
    "splits that fit": ({"fake": a_number, "kind": differs, "perform": fits, "moves": to_all(24)}, "^silent"),
}  # fmt: skip


@functools.cache
def define(name: str) -> Any:
    return ops.define(f"claims_{re.sub(r'[^a-z0-9]', '_', name)}", **MADE[name][0])


def use(program: Program, name: str) -> Program:
    """Call the operation of `MADE` on the weight's slice, which differs in size between ranks."""
    program, target = program.copy(), define(name)
    (weight,) = (x for x, given in zip(program.placeholders, program.arguments) if given.path == "0.layers.0.w")
    with program.graph.inserting_before(program.output):
        program.emit(target, weight)
    return program


def choose(name: str) -> Any:
    rewrite = functools.partial(use, name=name)
    return passes.insert(passes.defaults(stage=3), rewrite, before="prefetch")


def call(step: Any, mesh: Any, times: int = 1) -> Any:
    params = fzero.partition(layers(1), mesh)
    state, x = SGD.init(params), torch.ones(2 * (1 if isinstance(mesh, DeviceMesh) else 2), 5)
    for _ in range(times):
        params, state, value = step(params, state, x)
    return params, value


def test_each_wrong_operation_is_named_in_a_simulation() -> None:
    words = {name: attempt(lambda name=name: call(fzero.simulate(training(SGD), MESH, passes=choose(name)), MESH))
             for name in MADE}  # fmt: skip
    assert {name: said for name, said in words.items() if not re.search(MADE[name][1], said)} == {}


def run_made(mesh: DeviceMesh) -> dict[str, str]:
    """The words of each wrong operation at the first call of a program on this rank. Those that raise on one rank alone
    run without a `Step`, which would end the mesh."""
    words = {}
    for name in MADE:
        step = fzero.shard(training(SGD), mesh, passes=choose(name))
        params = fzero.partition(layers(1), mesh)
        program = step.trace(params, SGD.init(params), torch.ones(2, 5))
        given = [*(x.local for x in tree.leaves((params, SGD.init(params)))), torch.ones(2, 5)]
        words[name] = attempt(functools.partial(link(program, live(mesh), is_held=True), given))
    return words


class Counted:
    """A right operation that counts how often it is looked at."""

    held = 0


def hold_and_count(*args: Any) -> Any:
    Counted.held += 1
    return claims.hold(*args)


def call_twice(mesh: DeviceMesh) -> tuple[int, int, Any, Any]:
    """How often operations are held in a first call and in two later ones; the results, with a variant and held."""
    from fzero.execution import bind
    from fzero.variants.int8_gather import int8_gather

    own = passes.defaults(stage=3)
    step = fzero.shard(training(SGD), mesh, passes=passes.insert(own, int8_gather, before="prefetch"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bind, "hold", hold_and_count)
        params = fzero.partition(layers(1), mesh)
        state, x, counts = SGD.init(params), torch.ones(2, 5), []
        for _ in range(3):
            params, state, _ = step(params, state, x)
            counts.append(Counted.held)
    plain = fzero.simulate(training(SGD), MESH, passes=passes.insert(own, int8_gather, before="prefetch"))
    expected, _ = call(plain, MESH, times=3)
    return counts[0], counts[2], fzero.unpartition(params), fzero.unpartition(expected)


def fail_on_rank_1(mesh: DeviceMesh) -> str:
    """The operation stands behind all exchanges, so rank 0 hears of it in its second call."""
    return attempt(lambda: call(fzero.shard(training(SGD), mesh, passes=choose("sized by rank 0")), mesh, times=2))


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Outcome]]:
    cases = {"mutants": run_all, "twice": call_twice, "made": run_made, "fails": fail_on_rank_1}
    return run_cases(2, cases)


def test_each_mutant_is_named_at_the_first_call_on_two_ranks(ranks: dict[str, list[Outcome]]) -> None:
    for words in values(ranks["mutants"]):
        assert list_unnamed(words) == []


def test_each_wrong_operation_is_named_at_the_first_call_on_two_ranks(ranks: dict[str, list[Outcome]]) -> None:
    said = values(ranks["made"])
    for name, (_, wanted) in MADE.items():
        words = [each[name] for each in said]
        at_one = name == "sized by rank 0"
        assert re.search(wanted, words[1]), (name, words)
        assert re.search("^silent" if at_one else wanted, words[0]), (name, words)


def test_later_calls_are_not_held(ranks: dict[str, list[Outcome]]) -> None:
    for first, third, got, expected in values(ranks["twice"]):
        assert first == third > 0
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(got), tree.leaves(expected)))


def test_a_rank_that_finds_a_wrong_operation_tells_the_others(ranks: dict[str, list[Outcome]]) -> None:
    first, second = values(ranks["fails"])
    assert re.search(MADE["sized by rank 0"][1], second)
    assert "rank 1" in first and "operation 'claims_sized_by_rank_0'" in first, first
