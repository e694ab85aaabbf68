"""Steps as one CUDA graph: what is copied and what stays in place, with a recorder that needs no GPU, and on one."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from processes import run
from programs import differentiated, layers, loss, on_rows, training
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero import FzeroError, optim, tree
from fzero.base.mesh import VirtualMesh
from fzero.execution.codegen import link
from fzero.execution.cuda_graph import Captured, check_program
from fzero.execution.outline import outline
from fzero.ranks.live import live

ADAMW = optim.adamw(0.02)


class Emulated:
    """A `Recorder` that runs its work once for results, and restores the state afterwards."""

    def __init__(self, state: Sequence[Tensor]) -> None:
        self.state, self.recorded = state, 0

    def __call__(self, work: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        self.recorded += 1
        before = [x.clone() for x in self.state]
        results = work()
        for x, old in zip(self.state, before):
            x.copy_(old)

        def replay() -> None:
            for mine, new in zip(results, work()):
                mine.copy_(new)

        return replay, results


class Ran(NamedTuple):
    """A run on one rank: losses and parameters of its steps, and the number of recordings."""

    losses: list[float]
    params: list[list[float]]
    recorded: int
    warnings: list[str]


def begun(mesh: DeviceMesh) -> tuple[Any, Any]:
    params = fzero.partition(layers(3), mesh)
    return params, ADAMW.init(params)


def batches(mesh: DeviceMesh, count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(mesh.get_rank())
    return (torch.randn(2, 5, generator=generator) for _ in range(count))


def trained(mesh: DeviceMesh, is_captured: bool, runs: int) -> Ran:
    """Runs of five steps each, each from the same state; losses are looked at when all steps are done."""
    step = fzero.shard(training(ADAMW, loss), mesh)
    program = step.trace(*begun(mesh), next(batches(mesh, 1)))
    runner: Any = link(outline(program), live(mesh))
    recorder, losses, warnings = Emulated([]), list[Tensor](), list[str]()
    if is_captured:
        runner = Captured(program, runner, recorder)
    logger, handler = logging.getLogger("fzero"), logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    finals = []
    for _ in range(runs):
        state = [x.local for x in tree.leaves(begun(mesh))]
        recorder.state = state
        for x in batches(mesh, 5):
            if is_captured:
                runner.prepare([*state, x], runner.is_elsewhere([*state, x]))
            *state, value = runner([*state, x])
            losses.append(value)
        finals.append([x.clone() for x in state])
    logger.removeHandler(handler)
    return Ran([x.item() for x in losses], [x.tolist() for final in finals for x in final], recorder.recorded, warnings)


def both(mesh: DeviceMesh, runs: int) -> tuple[Ran, Ran]:
    return trained(mesh, False, runs), trained(mesh, True, runs)


@pytest.mark.parametrize("world", [1, 2])
def test_a_graph_trains_as_the_program_does(world: int) -> None:
    for expected, captured in run(world, both, 2):
        assert captured.losses == expected.losses and len(set(expected.losses)) == 5
        assert captured.params == expected.params
        assert captured.recorded == 2
        assert captured.warnings == ["step: state lies elsewhere than at the last call: this one is no CUDA graph"]


def kept(mesh: DeviceMesh) -> bool:
    """Whether a result that is an argument is the given tensor itself, for the batch too."""
    params = fzero.partition(layers(1), mesh)
    step = fzero.shard(lambda params, x: (params, x, x + 1), mesh)
    x = torch.ones(2, 5)
    program = step.trace(params, x)
    state = [leaf.local for leaf in tree.leaves(params)]
    captured = Captured(program, link(program, live(mesh)), Emulated(state))
    for turn in range(3):
        x = torch.full((2, 5), float(turn), requires_grad=True)
        captured.prepare([*state, x], as_it_is=turn == 0)
        *same, given, more = captured([*state, x])
        assert not more.requires_grad
        assert given is x and more.equal(x + 1)
    return all(mine is theirs for mine, theirs in zip(same, state))


def test_arguments_that_are_returned_are_those_that_were_given() -> None:
    assert run(1, kept) == [True]


def failing(mesh: DeviceMesh) -> str:
    step = fzero.shard(lambda x: x + 1, mesh)
    program = step.trace(torch.ones(2))

    def record(work: Any) -> Any:
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        finally:
            raise RuntimeError("capture has failed before")

    captured = Captured(program, link(program, live(mesh)), record)
    with pytest.raises(FzeroError) as caught:
        captured.prepare([torch.ones(2)], as_it_is=False)
    return str(caught.value)


def test_what_cuda_says_when_it_cannot_capture_is_told() -> None:
    (message,) = run(1, failing)
    assert message == (
        "compile: CUDA cannot capture this step: operation not permitted when stream is capturing; give compile=True"
    )


class Recorded(Captured):
    """A `Captured` that says what it is told."""

    told: ClassVar[list[bool]] = []

    def __init__(self, program: Any, run: Any, **how: Any) -> None:
        super().__init__(program, run, Emulated([]), **how)

    def prepare(self, tensors: Any, as_it_is: bool) -> None:
        self.told.append(as_it_is)
        super().prepare(tensors, as_it_is)


def moved_on_one(mesh: DeviceMesh) -> tuple[list[bool], bool]:
    """A step by which state is not changed, called four times; on rank 0 state is elsewhere at the third. Whether the
    step, and its graph with it, ends with its last reference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fzero.transform.check_mesh", lambda on: None)
        patch.setattr("fzero.transform.Captured", Recorded)
        patch.setattr("fzero.linked.Captured", Recorded)
        step = fzero.shard(lambda params, x: loss(params, x), mesh, compile="graph")
        params, x = fzero.partition(layers(1), mesh), torch.ones(2, 5)
        losses = [step(params, x), step(params, x)]
        if mesh.get_rank() == 0:
            for leaf in tree.leaves(params):
                leaf._local = leaf.local.clone()
        losses += [step(params, x), step(params, x)]
        assert len({value.item() for value in losses}) == 1
    gc.disable()
    ended = weakref.ref(step._pipeline)
    del step
    return Recorded.told, ended() is None


def test_all_ranks_run_a_step_as_it_is_where_state_of_one_is_elsewhere() -> None:
    assert run(2, moved_on_one) == [([True, False, True, False], True)] * 2


def refused(mesh: DeviceMesh, donate: bool) -> str:
    with pytest.raises(FzeroError) as caught:
        fzero.shard(training(ADAMW, loss), mesh, compile="graph", donate=donate)
    return str(caught.value)


def test_a_mesh_without_cuda_and_state_that_moves_are_refused() -> None:
    assert run(1, refused, True) == [
        "compile: is 'graph', and the mesh is on cpu: graphs are CUDA's; give compile=True"
    ]
    assert run(1, refused, False) == ["compile: is 'graph', and donate is False: state would move; give donate=True"]


def test_a_step_that_can_be_a_graph() -> None:
    check_program(differentiated(loss, layers(1), VirtualMesh(fsdp=2)).trace(), "cpu")


@pytest.mark.parametrize(
    ("step", "device", "message"),
    [
        (lambda params, x: torch.nn.functional.dropout(x), "cpu", r"\w+ draws random numbers.*test_cuda_graph.py:\d+"),
        (lambda params, x: x + 1, "cuda", r"0.layers.0.b is on cpu, not on cuda"),
    ],
    ids=["draws", "elsewhere"],
)
def test_steps_that_a_graph_would_not_repeat_are_refused(step: Any, device: str, message: str) -> None:
    case = on_rows(step, layers(1), mesh=VirtualMesh(fsdp=2))
    with pytest.raises(FzeroError, match=f"(?m)^compile: is 'graph', and {message}.*; give compile=True$"):
        check_program(case.trace(), device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
def test_a_cuda_graph_trains_as_the_compiled_step_does(caplog: pytest.LogCaptureFixture) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("fsdp",))
        losses = []
        for compile in (True, "graph"):
            params = fzero.partition(tree.map(Tensor.cuda, layers(3)), mesh)
            state, step = ADAMW.init(params), fzero.shard(training(ADAMW, loss), mesh, compile=compile)
            values = []
            for x in batches(mesh, 5):
                params, state, value = step(params, state, x.cuda())
                values.append(value)
            losses.append(torch.stack(values))
        assert losses[0].equal(losses[1]) and "no CUDA graph" not in caplog.text
    finally:
        dist.destroy_process_group()
