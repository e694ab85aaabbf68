"""The variants, on four virtual ranks and on two real ones: bits, bytes, memory, schedule and losses."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from mlp import STEPS, VARIANTS, Run, on_real, on_virtual, rewrites, train_step
from processes import Outcome, run_cases, values
from programs import Storages, tensors
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero import FzeroError, Program, ops, passes, tree
from fzero.passes.run import Pass
from fzero.program.operation import Node
from fzero.variants.ademamix import ademamix
from fzero.variants.bf16_scatter import bf16_scatter
from fzero.variants.diloco import diloco
from fzero.variants.fp8_gather import fp8_gather
from fzero.variants.int8_gather import int8_all_gather, int8_gather
from fzero.variants.int8_scatter import int8_scatter
from fzero.variants.loco_scatter import loco_scatter
from fzero.variants.power_sgd import power_sgd
from fzero.variants.qgz import qgz
from fzero.variants.sign_scatter import sign_scatter
from fzero.variants.streaming_diloco import streaming_diloco
from fzero.variants.topk_scatter import topk_scatter
from fzero.variants.zeropp import zeropp

pytestmark = pytest.mark.usefixtures("shared_traces")

WORLD = 4
STAGES = (1, 2, 3)
BUCKETS = {"0": 24 * 70 + 70, "1": 70 * 70 + 70, "2": 70 * 5 + 5}
EACH = pytest.mark.parametrize(("variant", "stage"), [(variant, stage) for variant in VARIANTS for stage in STAGES])


@functools.lru_cache
def program_of(variant: str | None, stage: int, world: int = WORLD) -> Program:
    return on_virtual(variant, stage, world).trace()


@functools.lru_cache
def trained(variant: str | None, stage: int) -> tuple[list[Tensor], Tensor]:
    """Whole parameters after training on virtual ranks, and the losses."""
    run = on_virtual(variant, stage, WORLD)
    held, losses = run.train(run.begin())
    return tree.leaves(fzero.unpartition(held.params)), losses


def shard_of(bucket: str, world: int = WORLD) -> int:
    """Elements of a rank's slice of a bucket: an equal part, rounded up to 16."""
    return -(-BUCKETS[bucket] // world // 16) * 16


# bits


def outcome(run: Run) -> Any:
    """What is held after training, whole, and the losses."""
    held, losses = run.train(run.begin())
    return [fzero.unpartition(part) for part in held], losses


def real_and_virtual(mesh: DeviceMesh, variant: str, stage: int) -> tuple[Any, Any]:
    """What a rank holds after training, and on rank 0 what virtual ranks hold."""

    real = outcome(on_real(variant, stage, mesh))
    return real, outcome(on_virtual(variant, stage, mesh.size())) if mesh.get_rank() == 0 else None


class Shown(NamedTuple):
    """A variant of the gallery, the pass that it stands in front of, and the mesh of two ranks that it needs."""

    rewrite: Pass
    before: str = "prefetch"
    shape: Mapping[str, int] = MappingProxyType({"fsdp": 2})


WORKERS, NODES = {"replica": 2, "fsdp": 1}, {"node": 2, "local": 1}
GALLERY = {
    "ademamix": Shown(ademamix, "bucket"),
    "bf16_scatter": Shown(bf16_scatter),
    "diloco": Shown(functools.partial(diloco, syncs=True), "bucket", WORKERS),
    "fp8_gather": Shown(fp8_gather),
    "loco_scatter": Shown(loco_scatter),
    "power_sgd": Shown(functools.partial(power_sgd, rank=2), "bucket", WORKERS),
    "qgz": Shown(qgz, shape=NODES),
    "sign_scatter": Shown(sign_scatter),
    "streaming_diloco": Shown(
        functools.partial(streaming_diloco, sends=[0], takes=[0], fragments=1), "bucket", WORKERS
    ),
    "topk_scatter": Shown(topk_scatter),
    "zeropp": Shown(zeropp, "offload", NODES),
}  # the rest: VARIANTS, and test_nodes.py


def of_gallery(mesh: DeviceMesh, variant: str) -> tuple[Any, Any]:
    """What real ranks hold after training with a variant of the gallery, and on rank 0 what virtual ones hold."""
    rewrite, before, shape = GALLERY[variant]
    chosen = passes.insert(passes.defaults(stage=3), rewrite, before=before)

    real = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    rows = on_real(None, 3, mesh).rows
    found = outcome(Run(fzero.shard(train_step, real, passes=chosen), real, rows))
    virtual = fzero.VirtualMesh(**shape)
    return found, outcome(Run(fzero.simulate(train_step, virtual, passes=chosen), virtual)) if rows.start == 0 else None


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Outcome]]:
    cases = {f"{v} {s}": functools.partial(real_and_virtual, variant=v, stage=s) for v in VARIANTS for s in STAGES}
    return run_cases(2, cases | {v: functools.partial(of_gallery, variant=v) for v in GALLERY})


@pytest.mark.parametrize("variant", GALLERY)
def test_on_two_real_ranks_a_variant_is_as_on_virtual_ones(ranks: dict[str, list[Outcome]], variant: str) -> None:
    """Bit for bit, also what ranks have of their own: a worker's weights and optimizer state, what a scatter left."""
    (_, virtual), *_ = of_ranks = values(ranks[variant])
    for real, _ in of_ranks:
        for got, expected in zip(tree.leaves(real), tree.leaves(virtual), strict=True):
            assert torch.equal(got, expected)


@EACH
def test_two_real_ranks_and_two_virtual_ones_hold_the_same_bits(
    ranks: dict[str, list[Outcome]], variant: str, stage: int
) -> None:
    """Parameters, optimizer state, what rounding left, and losses: sums of two are the same in either order."""
    (_, (expected, expected_losses)), *_ = of_ranks = values(ranks[f"{variant} {stage}"])
    for (held, losses), _ in of_ranks:
        assert torch.equal(losses, expected_losses)
        assert tree.paths(held) == tree.paths(expected)
        for path, a, b in zip(tree.paths(held), tree.leaves(held), tree.leaves(expected)):
            assert torch.equal(a, b), path
        assert len(held[2]) == (len(BUCKETS) if variant == "int8_scatter" else 0)


# bytes


def moved(program: Program, op: str) -> list[tuple[str | None, torch.dtype, int]]:
    return sorted((entry.bucket, entry.dtype, entry.nbytes) for entry in program.comm() if entry.op == op)


def scaled(world: int) -> dict[str, int]:
    """Bucket -> bytes of its int8 buffer: of each rank a byte an element and 4 for each 256, padding included."""
    shards = {bucket: shard_of(bucket, world) for bucket in BUCKETS}
    return {bucket: world * (shard + 4 * -(-shard // 256)) for bucket, shard in shards.items()}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gather_moves_a_byte_an_element_and_a_scale_a_block(stage: int, world: int) -> None:
    program, exact = program_of("int8_gather", stage, world), program_of(None, stage, world)
    gathered = [bucket for bucket, _, _ in moved(exact, "all_gather")]
    assert gathered == (["0", "1", "1", "2"] if stage == 3 else ["0", "1", "2"])
    assert moved(program, "all_gather") == [(bucket, torch.uint8, scaled(world)[bucket]) for bucket in gathered]
    for op in ("reduce_scatter", "all_reduce"):
        assert moved(program, op) == moved(exact, op)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("variant", ["int8_mean", "int8_scatter"])
def test_a_scatter_moves_a_byte_an_element_and_a_scale_a_block(variant: str, stage: int, world: int) -> None:
    program, exact = program_of(variant, stage, world), program_of(None, stage, world)
    assert moved(program, "all_to_all") == [(bucket, torch.uint8, scaled(world)[bucket]) for bucket in BUCKETS]
    assert moved(program, "reduce_scatter") == []
    for op in ("all_gather", "all_reduce"):
        assert moved(program, op) == moved(exact, op)


@pytest.mark.parametrize("variant", VARIANTS)
def test_virtual_ranks_exchange_what_comm_says(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, sent = ops.AllGather if variant == "int8_gather" else ops.AllToAll, list[tuple[torch.dtype, int]]()
    join = exchange.join

    def count(self: Any, row: Any) -> Any:
        given = [each.block if variant == "int8_gather" else each.blocks for each in row]
        nbytes = [x.nbytes for x in given]
        sent.append((given[0].dtype, sum(nbytes) if variant == "int8_gather" else nbytes[0]))
        return join(self, row)

    monkeypatch.setattr(exchange, "join", count)
    run = on_virtual(variant, 3, WORLD)
    run.train(run.begin(), range(1))
    op = "all_gather" if variant == "int8_gather" else "all_to_all"
    assert sent == [(entry.dtype, entry.nbytes) for entry in program_of(variant, 3).comm() if entry.op == op]


# memory


def in_flight(program: Program, node: Node, value: Any) -> int:
    """Bytes on their way that a real rank holds and a virtual one has no need of: what arrives as int8, and what a
    reduce-scatter receives from other ranks than one."""
    (entry,) = ops.record(node).moves(program, node)
    if entry.dtype == torch.uint8:
        return entry.nbytes
    received = max(WORLD - 2, 0) * value.result.nbytes
    return received if entry.op == "reduce_scatter" else 0


@EACH
def test_the_predicted_peak_covers_virtual_ranks_and_is_near_what_real_ones_hold(
    variant: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two nodes. What one needs while it runs has a test of its own."""
    monkeypatch.setattr(ops, "measure_scratch", lambda *args: 0)
    run, virtual, real = on_virtual(variant, stage, WORLD), [0] * WORLD, [0] * WORLD
    program = run.trace()
    storages = Storages(program)

    def watch(node: Node, ranks: list[dict[Node, Any]]) -> None:
        for rank, held in enumerate(ranks):
            alive = storages.count(held, tensors(held.values()))
            flying = [(node, value) for node, value in held.items() if node.op != "placeholder"]
            flying = [(node, value) for node, value in flying if ops.record(node).starts]
            virtual[rank] = max(virtual[rank], alive)
            real[rank] = max(real[rank], alive + sum(in_flight(program, *each) for each in flying))

    run.train(run.begin(), range(1), watch=watch)
    peak = program.memory().peak
    assert max(virtual) <= peak
    assert peak == pytest.approx(max(real), rel=0.05)


# the schedule, the stages, the checks


@EACH
def test_the_timeline_has_each_collective(variant: str, stage: int) -> None:
    program = program_of(variant, stage)
    timeline = program.timeline()
    assert [transfer.comm for transfer in timeline.transfers] == program.comm()
    assert all(transfer.is_ahead for transfer in timeline.transfers if transfer.comm.dtype == torch.uint8)
    assert f"{'all_gather' if variant == 'int8_gather' else 'all_to_all'} 1 " in str(timeline)


@EACH
def test_the_program_is_verified_at_its_stage(variant: str, stage: int) -> None:
    program = program_of(variant, stage)
    assert passes.verify(program, stage=stage) is program


def test_stage_3_gathers_again_as_int8() -> None:
    program = program_of("int8_gather", 3)
    targets = [node.target for node in program.graph.nodes if ops.is_call(node, ops.all_gather, int8_all_gather)]
    assert targets == [int8_all_gather] * 4
    assert str(program).count("uint8") == 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_stages_give_the_same_bits(variant: str) -> None:
    """The order of collectives differs between stages, not what they move."""
    (params, losses), *others = (trained(variant, stage) for stage in STAGES)
    for other, other_losses in others:
        assert torch.equal(other_losses, losses) and all(map(torch.equal, other, params))


# losses


@EACH
def test_losses_are_near_those_of_the_exact_step(variant: str, stage: int) -> None:
    """Of 5 steps with a rate of 1e-2, which move each of the first weights by half of its size."""
    (_, losses), (_, exact) = trained(variant, stage), trained(None, stage)
    assert len(losses) == STEPS and losses.isfinite().all()
    torch.testing.assert_close(losses, exact, rtol=2e-3, atol=0)
    assert not torch.equal(losses, exact)  # it is a variant


def test_slices_stay_in_full_precision() -> None:
    """Weights are rounded on their way, not where they are kept: a rate of zero leaves them as they were."""
    still = fzero.optim.sgd(0.0)

    def step(params: tree.Tree, x: Tensor) -> Any:
        grads = fzero.grad(lambda params: (x @ params["w"]).sin().sum())(params)
        return fzero.optim.apply_updates(params, still.update(grads, still.init(params), params)[0])

    params, mesh = {"w": torch.randn(300, 3, generator=torch.Generator().manual_seed(0))}, fzero.VirtualMesh(fsdp=2)
    run = fzero.simulate(step, mesh, passes=rewrites("int8_gather", 3))
    after = run(fzero.partition(params, mesh), torch.ones(4, 300))
    assert torch.equal(fzero.unpartition(after)["w"], params["w"])


# refusals


def test_a_gather_wants_something_floating_that_is_gathered() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    step = fzero.simulate(lambda params: tree.map(lambda x: x * 2, params), mesh, passes=[int8_gather])
    with pytest.raises(FzeroError, match=r"pass 'int8_gather': finds no floating leaf that is gathered; put it behind"):
        step.trace(fzero.partition({"w": torch.ones(8)}, mesh))


def test_a_scatter_wants_gradients() -> None:
    mesh, before = fzero.VirtualMesh(fsdp=2), passes.insert(passes.defaults(stage=3), int8_scatter, before="bucket")
    step, held = fzero.simulate(train_step, mesh, passes=before), Run(fzero.simulate(train_step, mesh), mesh).begin()
    with pytest.raises(FzeroError, match="pass 'int8_scatter': finds 0 reduce-scatters on VirtualMesh"):
        step.trace(held.params, held.opt_state, *Run(step, mesh).batch(0))


def test_variants_use_public_names_only() -> None:
    for path in Path(fzero.__file__).parent.joinpath("variants").glob("*.py"):
        for origin, names in re.findall(r"^from (fzero[\w.]*) import (.*)$", path.read_text(), re.MULTILINE):
            assert origin.startswith("fzero.variants.") or set(names.split(", ")) <= set(fzero.__all__), path.name
        used = set(re.findall(r"(?<!torch\.)\bops\.(\w+)", path.read_text()))
        assert used <= set(ops.__all__) and "import fzero" not in path.read_text(), path.name
