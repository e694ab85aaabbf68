"""Sweep: a step planned on the meshes that so many ranks can form, the fastest that fits first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.base.progress import Progress
from fzero.planner.forecast import Recipe, has_experts, trace_step
from fzero.planner.summary import Forecast, count_sharing, summarize
from fzero.program.rates import Rates

AXES = ("pp", "replica", "fsdp", "tp", "ep", "sp")
"""The axes that the meshes of a sweep may have, the slowest wires first."""
USUAL = ("tp", "ep")
"""The axes along which ranks share examples that a sweep tries when it is told no others."""


class Candidate(NamedTuple):
    """A mesh, and the parts that a batch is taken in. `found` is None where the step is refused, with the error as its
    `problem`."""

    mesh: VirtualMesh
    microbatches: int
    found: Forecast | None = None
    problem: str = ""

    def __str__(self) -> str:
        return ",".join(f"{axis}={self.mesh.size(axis)}" for axis in self.mesh.names)

    @property
    def remark(self) -> str:
        """The problem on one line of a table, without the way out."""
        return self.problem.partition("; ")[0]


def list_meshes(ranks: int, host: int, axes: Collection[str] = ("tp",)) -> Iterator[VirtualMesh]:
    """The meshes of `ranks` with these `axes` along which ranks share examples. Those that move activations of every
    layer ("tp", "ep", "sp") stay inside of a host. Stages ("pp") may be as many as a host has ranks, on any hosts, and
    are not beside "sp", which they do not go with.

    State is cut over all other ranks, or over those of a host, with replicas beside: over "fsdp", and "replica".
    """
    inside = [size for size in range(1, host + 1) if host % size == 0]
    near_axes = [axis for axis in AXES[3:] if axis in axes]
    for stages, *sizes in itertools.product(inside if "pp" in axes else [1], *(inside for _ in near_axes)):
        sharing = math.prod(sizes)
        shared = {axis: size for axis, size in zip(near_axes, sizes) if size > 1}
        if host % sharing or ranks % (stages * sharing) or (stages > 1 and "sp" in shared):
            continue
        first = {"pp": stages} if stages > 1 else {}
        rest, near = ranks // (stages * sharing), host // sharing
        yield VirtualMesh(**first, fsdp=rest, **shared)
        if 1 < near < rest and rest % near == 0:
            yield VirtualMesh(**first, replica=rest // near, fsdp=near, **shared)


def list_candidates(ranks: int, host: int, axes: Collection[str], microbatches: int) -> Iterator[Candidate]:
    """The meshes, each with the batch whole, and in as many more parts as ranks share it."""
    for mesh in list_meshes(ranks, host, axes):
        for parts in dict.fromkeys((1, count_sharing(mesh))):
            yield Candidate(mesh, microbatches * parts)


def sweep_meshes(
    config: Path,
    ranks: int,
    host: int,
    recipe: Recipe,
    rates_of: Callable[[VirtualMesh], Rates],
    limit: int,
    axes: Collection[str] = USUAL,
) -> Iterator[Candidate]:
    """Plan a step on each mesh with these `axes`; "ep" is for models with experts. The rows of a step are the same on
    all of them: `recipe.batch` for each rank.

    A candidate whose peak is over `limit`, or whose sizes do not fit the mesh, has a problem. The same problem of the
    same mesh is told once, whatever the parts of the batch.
    """
    told = set[tuple[VirtualMesh, str]]()
    tried = [axis for axis in axes if axis != "ep" or has_experts(config)]
    candidates = list(list_candidates(ranks, host, tried, recipe.microbatches))
    progress = Progress("planning", str(config), "meshes", len(candidates))
    for candidate in candidates:
        mesh, parts = candidate.mesh, candidate.microbatches
        chosen = recipe._replace(batch=recipe.batch * count_sharing(mesh), microbatches=parts)
        progress.count(str(candidate))
        try:
            found = summarize(trace_step(config, mesh, chosen, rates_of(mesh)))
        except FzeroError as error:
            refused = candidate._replace(problem=str(error))
            if (mesh, refused.remark) not in told:
                yield refused
            told.add((mesh, refused.remark))
            continue
        yield candidate._replace(found=found, problem="" if found.peak <= limit else "needs more memory")


def rank_candidates(candidates: list[Candidate]) -> list[Candidate]:
    """Those that fit, by tokens a second; then those that need more memory, by their peak; then the refused ones."""

    def key(candidate: Candidate) -> tuple[int, float]:
        if candidate.found is None:
            return 2, 0.0
        return (1, candidate.found.peak) if candidate.problem else (0, -candidate.found.tokens_a_second)

    return sorted(candidates, key=key)
