"""Variants on a mesh with a model axis, beside leaves that are split over it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from axes import ADAMW, EXAMPLES, SPLIT, WEIGHTS, WIDTH, loss_of, split_mlp, train
from torch import Tensor

import fzero
from fzero import VirtualMesh, passes, tree
from fzero.passes.run import Pass
from fzero.program.memory import Allocator
from fzero.program.records import find_bodies
from fzero.variants.fp8_gather import compress, decompress, fp8_gather
from fzero.variants.hops import gather_in_two_hops
from fzero.variants.hpz import hpz
from fzero.variants.int8_gather import int8_gather
from fzero.variants.int8_mean import int8_mean
from fzero.variants.int8_scatter import INT8, int8_scatter
from fzero.variants.mics import mics
from fzero.variants.parts import gather_parts
from fzero.variants.qgz import qgz
from fzero.variants.topk_scatter import topk_scatter
from fzero.variants.two_hop_scatter import two_hop_scatter
from fzero.variants.zeropp import zeropp

NODES, GRID = VirtualMesh(node=2, local=2, tp=2), VirtualMesh(replica=2, fsdp=2, tp=2)
LAID = VirtualMesh(replica=2, fsdp=2, tp=2).lay_state(("fsdp", "tp"))
"""Leaves that are split over "tp" lie along "fsdp", and the others along both."""


def with_pass(rewrite: Pass | None, before: str = "offload", **options: Any) -> Any:
    chosen = passes.defaults(stage=3, **options)
    return passes.insert(chosen, rewrite, before=before) if rewrite else chosen


def step_on(fn: Any, mesh: VirtualMesh, chosen: Any) -> Any:
    return fzero.simulate(fn, mesh, data=tuple(axis for axis in mesh.names if axis != "tp"), passes=chosen)


def test_gathers_inside_of_nodes_and_in_hops_are_the_same_bit_for_bit() -> None:
    tries: list[tuple[Pass | None, Any]] = [(None, {}), (hpz, {}), (mics, {}), (hpz, {"keep": frozenset({"down:tp"})})]
    for mesh, place in ((NODES, None), (NODES, fzero.host()), (LAID, None)):
        found = []
        for rewrite, options in tries:
            held = fzero.partition(WEIGHTS, mesh, split=SPLIT, to=place)
            rewrite = partial(hpz, axis="tp") if rewrite is hpz and mesh is LAID else rewrite
            run = step_on(train(split_mlp), mesh, with_pass(rewrite, **options))
            args, emitted = (held, ADAMW.init(held), EXAMPLES), {hpz: gather_parts, mics: gather_in_two_hops}
            changed = emitted.get(getattr(rewrite, "func", rewrite))
            assert changed is None or run.trace(*args).find(changed)
            found.append(tree.leaves(fzero.unpartition(run(*args))))
        assert all(all(map(torch.equal, got, found[0])) for got in found[1:])


def gradients(mesh: VirtualMesh, rewrite: Pass | None, before: str = "prefetch") -> Any:
    held = fzero.partition({name: w.float() for name, w in WEIGHTS.items()}, mesh, split=SPLIT)
    step = step_on(fzero.grad(loss_of(split_mlp)), mesh, with_pass(rewrite, before))
    kept = step.init_pass_state(held, EXAMPLES.float())
    found = step(held, EXAMPLES.float(), **({"pass_state": kept} if kept else {}))
    return fzero.unpartition(found[0] if kept else found)


def test_a_scatter_that_loses_nothing_has_the_gradients_of_one_device() -> None:
    right = fzero.grad(loss_of(split_mlp))({name: w.float() for name, w in WEIGHTS.items()}, EXAMPLES.float())
    for mesh in (NODES, GRID, VirtualMesh(fsdp=1, tp=4), LAID):
        torch.testing.assert_close(gradients(mesh, partial(topk_scatter, density=1.0)), right)
    for mesh in (NODES, LAID):
        torch.testing.assert_close(gradients(mesh, two_hop_scatter), right)


def test_rounding_is_within_its_bounds() -> None:
    """A split leaf's gradient, on a rank, is what this rank's rows alone make of it on one device: codes of these are
    scattered. Blocks are 256 elements, and parts are smaller."""
    params = {name: w.float() for name, w in WEIGHTS.items()}
    rows = [fzero.grad(loss_of(split_mlp))(params, x.float()) for x in EXAMPLES.chunk(4)]
    bounds: list[tuple[Pass, VirtualMesh, float]] = [
        (qgz, NODES, (1 + 15 / 14) / 14),
        (int8_mean, GRID, 1 / 254),
        (int8_scatter, NODES, 1 / 254),
    ]
    for rewrite, mesh, bound in bounds:
        found = gradients(mesh, rewrite)
        for name in SPLIT:
            each = torch.stack([row[name] for row in rows])
            assert 0 < (found[name] - each.mean(0)).abs().max() <= 1.001 * bound * each.abs().max(), (rewrite, name)


def test_weights_that_travel_as_codes_are_those_of_the_parts() -> None:
    """One rank has all of a part here: so the step is that of one device on parts that are rounded one by one."""
    mesh = VirtualMesh(fsdp=1, tp=2)

    def round_parts(name: str, w: Tensor) -> Tensor:
        parts = w.float().chunk(2, SPLIT[name][1]) if name in SPLIT else [w.float()]
        rounded = [decompress(compress(part.reshape(1, -1)), part.numel()).view(part.shape) for part in parts]
        return torch.cat(rounded, SPLIT[name][1] if name in SPLIT else 0)

    rounded = {name: round_parts(name, w) for name, w in WEIGHTS.items()}
    right = fzero.grad(loss_of(split_mlp))(rounded, EXAMPLES.float())
    torch.testing.assert_close(gradients(mesh, fp8_gather), right)
    found = gradients(NODES, zeropp, before="offload"), gradients(NODES, lambda program: qgz(int8_gather(program)))
    assert all(map(torch.equal, *map(tree.leaves, found)))


def test_codes_and_what_is_kept_have_their_own_sizes_where_a_rank_has_all_of_a_leaf() -> None:
    """A square weight is gathered as it lies there, and products of its shape have its elements. The pass makes two
    values of the one leaf of a bucket."""
    mesh, weight = VirtualMesh(fsdp=1, tp=2), {"w": torch.ones(WIDTH, WIDTH)}

    def sums(params: Any, x: Tensor) -> Any:
        made = fzero.psum(fzero.axis_index("tp") * (x @ torch.tanh(params["w"])), "tp")
        return made.square().sum(), torch.tensor(len(x))

    step = step_on(fzero.accumulate(sums, 2), mesh, with_pass(int8_scatter, "release"))
    program = step.trace(fzero.partition(weight, mesh), EXAMPLES[: 2 * WIDTH].float())
    (body,) = find_bodies(program.graph)
    (node,), allocator = body.find(INT8.pack), Allocator(body, [0])
    sizes = [int(allocator.nbytes[at.key]) for at in allocator.at(node)]
    assert sizes == [x.nbytes for x in node.meta["val"]] == [4 * 4 + 4, 4 * 4 * 4] and program.memory().peak > 0
