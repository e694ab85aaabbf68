"""Sweep: a step planned on the meshes that so many ranks can form, the fastest that fits first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.base.progress import Progress
from fzero.planner.forecast import Recipe, has_experts, trace_step
from fzero.planner.summary import SHARED, Forecast, count_sharing, summarize
from fzero.program.rates import Rates

AXES = ("replica", "fsdp", *SHARED)
"""The axes that the meshes of a sweep may have."""


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


def list_meshes(ranks: int, host: int, experts: bool) -> Iterator[VirtualMesh]:
    """The meshes of `ranks` whose axes "tp" and, for a model with `experts`, "ep" stay inside of a host.

    State is cut over all other ranks, or over those of a host, with replicas beside: over "fsdp", and "replica".
    """
    inside = [size for size in range(1, host + 1) if host % size == 0]
    for tp, ep in itertools.product(inside, inside if experts else [1]):
        if host % (tp * ep) or ranks % (tp * ep):
            continue
        shared = {axis: size for axis, size in zip(SHARED, (tp, ep)) if size > 1}
        rest, near = ranks // (tp * ep), host // (tp * ep)
        yield VirtualMesh(fsdp=rest, **shared)
        if 1 < near < rest and rest % near == 0:
            yield VirtualMesh(replica=rest // near, fsdp=near, **shared)


def list_candidates(ranks: int, host: int, experts: bool, microbatches: int) -> Iterator[Candidate]:
    """The meshes, each with the batch whole, and in as many more parts as ranks share it."""
    for mesh in list_meshes(ranks, host, experts):
        for parts in dict.fromkeys((1, count_sharing(mesh))):
            yield Candidate(mesh, microbatches * parts)


def sweep_meshes(
    config: Path, ranks: int, host: int, recipe: Recipe, rates_of: Callable[[VirtualMesh], Rates], limit: int
) -> Iterator[Candidate]:
    """Plan a step on each mesh. The rows of a step are the same on all of them: `recipe.batch` for each rank.

    A candidate whose peak is over `limit`, or whose sizes do not fit the mesh, has a problem. The same problem of the
    same mesh is told once, whatever the parts of the batch.
    """
    told, candidates = (
        set[tuple[VirtualMesh, str]](),
        list(list_candidates(ranks, host, has_experts(config), recipe.microbatches)),
    )
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
