"""Running passes: those from outside of the package are checked, and may keep state."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from mistakes import WRONG_PASSES, returns_nothing
from programs import dense, layers, loss, training
from torch import Tensor

import fzero
from fzero import FzeroError, Program, ops, optim, passes, tree
from fzero.passes.run import is_foreign, name_of_pass
from fzero.program.records import name_of

MESH = fzero.VirtualMesh(fsdp=2)
SGD = optim.sgd(0.1)
CLIPPED = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1))


@pytest.mark.parametrize(("rewrite", "message"), WRONG_PASSES, ids=lambda each: getattr(each, "__name__", ""))
@pytest.mark.parametrize("before", ["rematerialize", "bucket", "prefetch", "verify"])
def test_a_mistake_in_a_pass_is_named(rewrite: Any, message: str, before: str) -> None:
    step = fzero.simulate(training(SGD), MESH, passes=passes.insert(passes.defaults(stage=3), rewrite, before=before))
    params = fzero.partition(layers(1), MESH)
    with pytest.raises(FzeroError, match=message):
        step(params, SGD.init(params), torch.ones(4, 5))


def test_a_pass_in_a_wrong_place_is_refused() -> None:
    with pytest.raises(
        FzeroError, match="pass 'prefech': is not among the passes; there are rematerialize, accumulate,"
    ):
        passes.insert(passes.defaults(stage=3), returns_nothing, before="prefech")


def test_passes_of_fzero_are_not_foreign() -> None:
    assert not any(map(is_foreign, passes.defaults(stage=1)))
    assert [name_of_pass(each) for each in passes.defaults(stage=3)][-1] == "verify"
    assert is_foreign(returns_nothing) and is_foreign(lambda program: program)


def keeps_copies(program: Program) -> Program:
    """Keeps something as large as each gathered leaf to the end of the step."""
    program, copies = program.copy(), []
    for node in program.graph.find_nodes(op="call_function", target=ops.whole):
        with program.graph.inserting_after(node):
            copies.append(program.emit(torch.ops.aten.neg.default, node))
    with program.graph.inserting_before(program.output):
        program.emit(torch.ops.aten._foreach_norm.Scalar, copies)
    return program


def test_a_pass_that_raises_the_peak_is_told(caplog: pytest.LogCaptureFixture) -> None:
    params = fzero.partition(layers(6), MESH)
    chosen = passes.insert(passes.defaults(stage=3), keeps_copies, before="verify")
    with caplog.at_level(logging.WARNING, "fzero"):
        fzero.simulate(fzero.grad(loss), MESH, passes=passes.defaults(stage=3)).trace(params, torch.ones(4, 5))
        assert not caplog.records
        fzero.simulate(fzero.grad(loss), MESH, passes=chosen).trace(params, torch.ones(4, 5))
    (record,) = caplog.records
    assert "without the passes keeps_copies it is" in record.getMessage()


def reads_too_early(program: Program) -> Program:
    """Moves the sum of a buffer in front of what fills the buffer."""
    program = program.copy()
    nodes = {name_of(node): node for node in program.graph.nodes}
    nodes["zeros"].append(nodes["sum"])
    return program


def test_a_pass_that_moves_a_read_past_a_write_is_named() -> None:
    def step(x: Tensor) -> Tensor:
        buffer = torch.zeros(5)
        buffer[0].copy_(x.sin().mean())
        return buffer.sum()

    chosen = passes.insert(passes.defaults(stage=3), reads_too_early, before="prefetch")
    moved = r"pass 'reads_too_early': moves sum_1 in front of copy_, and one of both writes what the other touches"
    with pytest.raises(FzeroError, match=moved + r" \(.*test_run.py:\d+ in step: return buffer.sum\(\)\)"):
        fzero.simulate(step, MESH, passes=chosen)(torch.ones(4, 5))


# places and loops


def copies(program: Program) -> Program:
    """A pass that changes nothing."""
    return program.copy()


def in_loops(params: Any, state: Any, x: Tensor) -> Any:
    """Microbatches, each of which runs the layers in tiles, in a loop of their own."""

    def sums(params: Any, x: Tensor) -> Any:
        h, _ = fzero.scan(lambda h, _, layer: (dense(layer, h), None), x, layers=params["layers"])
        return fzero.tiled(dense, 2)(params["layers"][0], h).square().sum(), len(x)

    value, grads = fzero.accumulate(sums, 2)(params, x)
    updates, state = CLIPPED.update(grads, state, params)
    return optim.apply_updates(params, updates), state, value


@pytest.mark.parametrize("where", ["device", "host", "disk"])
@pytest.mark.parametrize(("step", "chunk"), [(training(CLIPPED), None), (training(CLIPPED), 128), (in_loops, None)])
def test_a_pass_that_changes_nothing_may_stand_anywhere(
    step: Any, chunk: int | None, where: str, tmp_path: Path
) -> None:
    """In front of each pass, and in loops, wherever state lies."""
    place = {"device": None, "host": fzero.host(), "disk": fzero.disk(tmp_path)}[where]
    params = fzero.partition(layers(), MESH, to=place, granularity=lambda path, shape: shape[-1])
    own = passes.defaults(stage=3, chunk=chunk)
    between = [each for one in own for each in (copies, one)]
    given = params, CLIPPED.init(params), torch.ones(8, 5)
    plain, rewritten = (fzero.simulate(step, MESH, passes=chosen).trace(*given) for chosen in (own, between))
    assert rewritten.lines() == plain.lines()


def test_state_that_a_pass_adds_to_microbatches_is_refused() -> None:
    """In a scan inside of them too: of these turns each would need its own."""
    params = fzero.partition(layers(), MESH)
    chosen = passes.insert(passes.defaults(stage=3), counts_steps, before="bucket")
    with pytest.raises(
        FzeroError, match="pass 'counts_steps': loop .*: is given state by a pass, and its turns keep none"
    ):
        fzero.simulate(in_loops, MESH, passes=chosen).trace(params, CLIPPED.init(params), torch.ones(8, 5))


# state


def counts_steps(program: Program) -> Program:
    """Counts the steps in state of its own."""
    program, count = program.copy().add_state("counts_steps.count", (), torch.float32, initial=5.0, replicated=True)
    with program.graph.inserting_before(program.output):
        new = program.emit(torch.ops.aten.add.Tensor, count, 1)
    program.return_state("counts_steps.count", new)
    return program


def adds_up_gradients(program: Program) -> Program:
    """Keeps the sum of each gradient's slice."""
    program = program.copy()
    parts = program.graph.find_nodes(op="call_function", target=ops.part)
    for part in parts:
        leaf = program.layout_of(part).leaves[part.args[2][part.args[3]]]
        path = f"total.{leaf.path}"
        program, total = program.add_state(path, leaf.shape, part.meta["val"].dtype)
        del total
    return program


def pass_state_of(*rewrites: passes.Pass, donate: bool = True) -> Any:
    chosen = passes.defaults(stage=3, in_place=donate)
    for rewrite in rewrites:
        chosen = passes.insert(chosen, rewrite, before="prefetch")
    return fzero.simulate(training(SGD), MESH, passes=chosen)


@pytest.mark.parametrize("donate", [True, False])
def test_a_pass_keeps_state(donate: bool) -> None:
    plain, step = pass_state_of(donate=donate), pass_state_of(counts_steps, donate=donate)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    ours = theirs = (fzero.partition(layers(1), MESH), SGD.init(fzero.partition(layers(1), MESH)))
    kept = step.init_pass_state(*ours, x)
    assert kept["counts_steps.count"].full_tensor().item() == 5
    for number in range(3):
        if donate:
            theirs = tree.map(lambda leaf: leaf.with_local(leaf.local.clone()), theirs)
        (*ours, value), kept = step(*ours, x, pass_state=kept)
        *theirs, expected = plain(*theirs, x)
        assert kept["counts_steps.count"].full_tensor().item() == 6 + number
        assert torch.equal(value, expected)
    for mine, other in zip(tree.leaves(ours), tree.leaves(theirs)):
        assert torch.equal(mine.full_tensor(), other.full_tensor())


def test_sharded_state_lies_as_slices_and_comes_back_as_it_was() -> None:
    step = pass_state_of(adds_up_gradients)
    params, x = fzero.partition(layers(1), MESH), torch.ones(4, 5)
    kept = step.init_pass_state(params, SGD.init(params), x)
    assert {path: tuple(value.shape) for path, value in kept.items()} == {
        f"total.{leaf.path}": tuple(leaf.shape) for leaf in tree.leaves(params)
    }
    _, after = step(params, SGD.init(params), x, pass_state=kept)
    assert after.keys() == kept.keys() and all(not value.full_tensor().any() for value in after.values())


def test_two_states_of_one_name_are_refused() -> None:
    with pytest.raises(FzeroError, match=r"counts_steps\.count: the step has an argument of this name"):
        params = fzero.partition(layers(1), MESH)
        pass_state_of(counts_steps, counts_steps).trace(params, SGD.init(params), torch.ones(4, 5))


def test_state_of_a_pass_must_be_given() -> None:
    step, params, x = pass_state_of(counts_steps), fzero.partition(layers(1), MESH), torch.ones(4, 5)
    args = params, SGD.init(params), x
    missing = (
        r"pass_state 'counts_steps.count': a pass of this step keeps this state, and it is not given; give pass_st"
    )
    with pytest.raises(FzeroError, match=missing):
        step(*args)
    with pytest.raises(FzeroError, match="pass_state 'other': no pass keeps this state"):
        step(*args, pass_state={**step.init_pass_state(*args), "other": 1})
    with pytest.raises(FzeroError, match="is not the state that this step's passes keep on its mesh"):
        step(*args, pass_state={"counts_steps.count": torch.zeros(())})
    halves = tree.map(lambda value: value.to(torch.float16), step.init_pass_state(*args))
    with pytest.raises(
        FzeroError, match="is not the state that this step's passes keep on its mesh, in layout and dtype"
    ):
        step(*args, pass_state=halves)
    with pytest.raises(FzeroError, match="pass_state 'x': no pass keeps this state"):
        pass_state_of()(*args, pass_state={"x": 1})


def a_tensor(x: Tensor) -> Tensor:
    return x


def test_a_step_without_state_of_passes_has_none() -> None:
    step = fzero.simulate(a_tensor, MESH)
    assert step.init_pass_state(torch.ones(2)) == {}
    assert step(torch.ones(2), pass_state={}).tolist() == [1, 1]


def test_what_a_pass_from_outside_saw_stays_as_it_was() -> None:
    """Passes of fzero change graphs of their own in place, and none that anything else holds."""
    seen: list[tuple[Any, str]] = []

    def look(program: Program) -> Program:
        seen.append((program.graph, str(program.graph)))
        return program

    own = passes.defaults(stage=3)
    given = [each for rewrite in own for each in (look, rewrite)]
    apart = [each for i, rewrite in enumerate(own) for each in ((look,) if i % 3 == 0 else ()) + (rewrite,)]
    params = fzero.partition(layers(3), MESH)
    args = params, CLIPPED.init(params), torch.ones(4, 5)
    for order in (given, apart, (look, *own)):
        fzero.simulate(training(CLIPPED), MESH, passes=order).trace(*args)
    assert len({id(graph) for graph, _ in seen}) > 5
    assert all(str(graph) == text for graph, text in seen)
