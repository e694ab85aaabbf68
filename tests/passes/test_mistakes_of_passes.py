"""Mistakes of a user's pass that torch or Python would name in words of their own: each is an error that names the pass
or the operation, and the way out."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import run
from programs import dense, layers, training
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import FzeroError, Program, ops, optim, passes

aten = torch.ops.aten
MESH, HYBRID = fzero.VirtualMesh(fsdp=2), fzero.VirtualMesh(replica=2, fsdp=2)
SGD = optim.sgd(0.1)

longer_scatter = ops.define(
    "mistakes_longer_scatter", like=ops.reduce_scatter, fake=lambda fulls, bucket, leaves, numel, more: fulls[0][:numel]
)
bad_kind = ops.define(
    "mistakes_bad_kind", fake=lambda x: x.new_empty(()), kind=lambda walk, node: walk.of(node.args[5])
)
doubled_leaf = ops.define(  # with an argument behind those that `names` says
    "mistakes_doubled_leaf", names="position", takes_buffers=True, kind=lambda walk, node: frozenset(),
    fake=lambda buffer, bucket, leaves, position, shape, by: buffer.new_empty(shape),
    perform=lambda program, node, rank: lambda buffer, bucket, leaves, position, shape, by: torch.full(shape, by),
)  # fmt: skip


def parts(program: Program) -> list[Any]:
    return program.graph.find_nodes(op="call_function", target=ops.part)


def gives_an_argument_by_position(program: Program) -> Program:
    program = program.copy()
    for node in program.graph.find_nodes(op="call_function", target=ops.reduce_scatter):
        node.target, node.args = longer_scatter, (*node.args, 7)
    return program


def has_a_kind_that_raises(program: Program) -> Program:
    program = program.copy()
    with program.graph.inserting_before(program.output):
        program.emit(bad_kind, program.placeholders[0])
    return program


def adds_state_of_another_size(program: Program) -> Program:
    program, state = program.copy().add_state("mine.state", (7,), torch.float32)
    with program.graph.inserting_after(parts(program)[0]):
        program.emit(aten.add.Tensor, parts(program)[0], state)
    return program


def sizes_by_rank_0(program: Program) -> Program:
    program = program.copy()
    part, numel = parts(program)[0], parts(program)[0].meta["val"].numel()
    with program.graph.inserting_before(program.output):
        flipped = program.emit(aten.flip.default, part, [0])
        program.emit(aten.add.Tensor, flipped, program.emit(aten.ones.default, [numel]))
    return program


def keeps_nodes_from_before_the_copy(program: Program) -> Program:
    before = parts(program)[0]
    program = program.copy()
    with program.graph.inserting_before(before):
        program.emit(aten.neg.default, before)
    return program


def takes_operands_from_before_the_copy(program: Program) -> Program:
    before = parts(program)[0]
    program = program.copy()
    with program.graph.inserting_before(program.output):
        program.emit(aten.neg.default, before)
    return program


def adds_float8(program: Program) -> Program:
    program = program.copy()
    with program.graph.inserting_before(program.output):
        narrow = program.emit(aten._to_copy.default, parts(program)[0], dtype=torch.float8_e4m3fn)
        program.emit(aten.add.Tensor, narrow, narrow)
    return program


def looks_up_what_is_not_there(program: Program) -> Program:
    return program.layouts["nobody"]  # type: ignore[return-value]


def updates_by_one_replica(program: Program) -> Program:
    """A gradient that is averaged along one axis of two meets the parameter."""
    program = program.copy()
    for node in program.graph.find_nodes(op="call_function", target=ops.reduce_scatter):
        node.kwargs = {"replicas": False}
    return program


TABLE: dict[Callable[[Program], Program], str] = {
    gives_an_argument_by_position: r"operation 'mistakes_longer_scatter': its check, which like=reduce_scatter gives, "
    r"raises ValueError: too many values to unpack \(expected 4\) of reduce_scatter; give check= for arguments that",
    has_a_kind_that_raises: r"operation 'mistakes_bad_kind': its kind raises IndexError: .* of mistakes_bad_kind; let",
    adds_state_of_another_size: r"add\.Tensor: cannot be emitted: RuntimeError: .*, of float32\[5\], float32\[7\]; gi",
    sizes_by_rank_0: r"add_tensor of pass 'sizes_by_rank_0': raises RuntimeError: The size of tensor a .*, of "
    r"float32\[0\], float32\[5\] on rank 1, where rank 0 has float32\[5\], float32\[5\]; size nothing by node.meta",
    keeps_nodes_from_before_the_copy: r"raises AssertionError: Node to insert before is not in graph\. \(.*test_mis"
    r"takes_of_passes\.py:\d+ in keeps_.*\); find nodes in what program\.copy\(\) returns",
    takes_operands_from_before_the_copy: r"neg_default takes part of another graph; find nodes in what program\.copy\(",
    adds_float8: r"add_tensor of pass 'adds_float8': raises NotImplementedError: \"add_stub\" not implemented for 'Flo"
    r"at8_e4m3fn', of float8_e4m3fn\[\d\] on rank 0; emit an operation that torch has",
    looks_up_what_is_not_there: r"raises KeyError: 'nobody' \(.*test_mistakes_of_passes\.py:\d+ in looks_up_",
}


def use(rewrite: Any, mesh: Any = MESH, step: Any = None, give: Any = fzero.simulate) -> str:
    """What a step says with a pass, of which the error has to name the pass."""
    step = give(step or training(SGD), mesh, passes=passes.insert(passes.defaults(stage=3), rewrite, before="prefetch"))
    params, rows = fzero.partition(layers(1), mesh), 2 if give is fzero.shard else 2 * mesh.size()
    args = params, SGD.init(params), torch.ones(rows, 5)
    try:
        step(*args, pass_state=step.init_pass_state(*args))
    except FzeroError as error:
        return str(error)
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"
    return "silent"


def test_each_mistake_is_named_with_the_pass(capfd: pytest.CaptureFixture[str]) -> None:
    words = {rewrite: use(rewrite) for rewrite in TABLE}
    wrong = {x.__name__: said for x, said in words.items() if not re.search(TABLE[x], said) or x.__name__ not in said}
    assert wrong == {}
    assert "failed while attempting" not in capfd.readouterr().err  # torch's own log of thirty lines


def on_ranks(mesh: DeviceMesh) -> str:
    return use(adds_float8, mesh, give=fzero.shard)


def test_what_raises_on_a_rank_is_named_there() -> None:
    for rank, said in enumerate(run(2, on_ranks, lost=())):
        assert re.search(TABLE[adds_float8].replace("rank 0", f"rank {rank}"), said), said


def test_slices_that_differ_along_an_axis_are_told_apart() -> None:
    assert re.search(
        r"mixes a slice of (\S+) and a slice of \1 that differs along \['replica'\]; average over \['replica'\] first",
        use(updates_by_one_replica, HYBRID),
    )


# loops


def in_a_loop(params: Any, state: Any, x: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        x, _ = fzero.scan(lambda h, _, layer: (dense(layer, h), None), x, layers=params["layers"])
        return x.square().mean()

    value, grads = fzero.value_and_grad(loss)(params, x)
    updates, state = SGD.update(grads, state, params)
    return optim.apply_updates(params, updates), state, value


def skips_loops(program: Program) -> Program:
    if program.is_body:
        return program
    program = program.copy()
    for node in program.graph.find_nodes(op="call_function", target=ops.reduce_scatter):
        node.kwargs = {}
    return program


def looks_on(program: Program) -> Program:
    return program


def copies(program: Program) -> Program:
    return program.copy()


def counts_turns(program: Program) -> Program:
    program, count = program.copy().add_state("mine.count", (), torch.float32, replicated=True)
    program.return_state("mine.count", count)
    return program


def trace_loop(rewrite: Any) -> Program:
    step = fzero.simulate(in_a_loop, MESH, passes=passes.insert(passes.defaults(stage=3), rewrite, before="prefetch"))
    params = fzero.partition(layers(3), MESH)
    return step.trace(params, SGD.init(params), torch.ones(4, 5))


def test_a_pass_that_leaves_out_loops_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fzero"):
        trace_loop(looks_on)
        trace_loop(copies)
        assert not caplog.records
        trace_loop(skips_loops)
    (record,) = caplog.records
    wanted = (
        r"pass 'skips_loops' changes nothing, and leaves the bodies of loops as they are, which have .*1 reduce_scatter"
    )
    assert re.search(wanted, record.getMessage()), record.getMessage()


def test_state_that_a_scan_does_not_change_is_kept_by_turn() -> None:
    paths = [state.path for state in trace_loop(counts_turns).pass_state]
    assert paths[:3] == ["mine.count.0", "mine.count.1", "mine.count.2"] and paths[-1] == "mine.count"
    assert len(paths) == len(set(paths)) == 3 + 3 + 1  # of the loop of each pass, and of the step


def test_accumulate_of_a_gradient_is_named() -> None:
    def loss(params: Any, x: Any) -> Any:
        return dense(params["layers"][0], x).square().mean()

    with pytest.raises(FzeroError, match=r"^accumulate: the function returned a dict .*value_and_grad does .*\(sum"):
        fzero.accumulate(fzero.value_and_grad(loss), 2)(layers(1), torch.ones(4, 5))


def test_an_operation_on_a_leaf_may_have_further_arguments() -> None:
    def doubles(program: Program) -> Program:
        program = program.copy()
        for node in program.graph.find_nodes(op="call_function", target=ops.whole):
            with program.graph.inserting_before(node):
                program.substitute(node, program.emit(doubled_leaf, *node.args, 2.0))
        return program

    chosen = passes.insert(passes.defaults(stage=3), doubles, before="prefetch")
    step = fzero.simulate(lambda p, x: (p, p["w"][0], (x @ p["w"]).sum()), MESH, passes=chosen)
    _, row, total = step(fzero.partition({"w": torch.ones(4, 4)}, MESH), torch.ones(2, 4))
    assert row.tolist() == [2.0] * 4 and total == 32  # the mean over ranks of one row each
