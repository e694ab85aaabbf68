"""Ways: changes of a step that does not fit, each planned, the cheapest of those that fit first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.base.progress import Progress
from fzero.planner.forecast import Recipe, trace_step
from fzero.planner.summary import Forecast, summarize
from fzero.program.rates import Rates


class Way(NamedTuple):
    """Changed options of the command, and the mesh and the recipe that they lead to."""

    options: dict[str, str]
    mesh: VirtualMesh
    recipe: Recipe

    def __str__(self) -> str:
        return " ".join(f"{option} {value}".strip() for option, value in self.options.items())

    def change(self, **fields: Any) -> Way:
        """The way with other fields of its recipe, each of which is an option of the command."""
        said = {f"--{field.replace('_', '-')}": "" if value is True else str(value) for field, value in fields.items()}
        return self._replace(options=self.options | said, recipe=self.recipe._replace(**fields))

    def resize(self, **sizes: int) -> Way:
        """The way with axes of other sizes. A new axis is the last one, whose ranks are neighbours; of stages, which
        send least, the first one."""
        axes = {axis: self.mesh.size(axis) for axis in self.mesh.names} | sizes
        axes = {axis: axes[axis] for axis in sorted(axes, key=lambda axis: axis != "pp")} if "pp" in sizes else axes
        text = ",".join(f"{axis}={size}" for axis, size in axes.items())
        return self._replace(options={"--mesh": text} | self.options, mesh=VirtualMesh(**axes))


class Tried(NamedTuple):
    """A way, and what its step takes."""

    way: Way
    found: Forecast


Change = Callable[[Way], Way | None]
"""A way with one change more; None where it has that change already, or cannot have it."""


def _cut_state(way: Way) -> Way | None:
    return None if way.recipe.stage in (None, 3) else way.change(stage=3)


def _compute_half_again(way: Way) -> Way | None:
    return None if way.recipe.remat is not None else way.change(remat="selective")


def _compute_layers_again(way: Way) -> Way | None:
    return None if way.recipe.remat == "layers" else way.change(remat="layers")


def _cut_batch(way: Way) -> Way | None:
    rows = way.recipe.batch
    return way.change(microbatches=rows) if rows > way.recipe.microbatches else None


def _cut_rows(way: Way) -> Way | None:
    is_cut = way.recipe.sequence_parallel or way.mesh.has("pp")
    return way.change(sequence_parallel=True) if way.mesh.has("tp") and not is_cut else None


def _offload(way: Way) -> Way | None:
    return None if way.recipe.offload else way.change(offload=True)


def _add_ranks(way: Way) -> Way | None:
    return way.resize(fsdp=2 * way.mesh.size("fsdp")) if way.mesh.has("fsdp") else None


def _share(axis: str) -> Change:
    """Half of the groups, each of twice the ranks and rows: as many rows in a step, on as many ranks. A pipeline takes
    them one by one."""

    def change(way: Way) -> Way | None:
        groups = way.mesh.size("fsdp") if way.mesh.has("fsdp") else 1
        if groups % 2:
            return None
        parts = {"microbatches": 2 * way.recipe.batch} if axis == "pp" else {}
        ranks = way.mesh.size(axis) if way.mesh.has(axis) else 1
        return way.resize(fsdp=groups // 2, **{axis: 2 * ranks}).change(batch=2 * way.recipe.batch, **parts)

    return change


SINGLE: tuple[Change, ...] = (
    _cut_state, _cut_rows, _compute_half_again, _cut_batch, _compute_layers_again, _offload, _share("tp"), _share("sp"),
    _share("pp"), _add_ranks,
)  # fmt: skip
TOGETHER: tuple[Change, ...] = (_cut_state, _cut_rows, _cut_batch, _compute_layers_again, _offload, _add_ranks)
"""What is tried by two and more, where single changes do not do."""


def list_ways(mesh: VirtualMesh, recipe: Recipe, limit: int) -> Iterator[tuple[int, Way]]:
    """The number of changes, and the way that they lead to: a budget of 95 % of `limit`, single changes, then two and
    more of `TOGETHER`."""
    start, told = Way({}, mesh, recipe._replace(memory=None)), set[str]()
    if recipe.memory is None and recipe.stage is None:
        yield 1, start.change(memory=f"{int(limit * 0.95) >> 20}MiB")
    for size in range(1, len(TOGETHER) + 1):
        for changes in itertools.combinations(SINGLE if size == 1 else TOGETHER, size):
            way: Way | None = start
            for change in changes:
                way = None if way is None else change(way)
            if way is not None and str(way) not in told:
                told.add(str(way))
                yield size, way


def find_ways(
    config: Path,
    mesh: VirtualMesh,
    recipe: Recipe,
    rates_of: Callable[[VirtualMesh], Rates],
    limit: int,
    wanted: int = 3,
) -> list[Tried]:
    """The `wanted` cheapest ways whose peak is at most `limit`, by tokens a second and rank: of all single changes,
    and, where fewer fit, of the first that do with two changes and more. A way that is refused is left out."""
    fits, progress = list[Tried](), Progress("planning", str(config), "ways")
    for changes, way in list_ways(mesh, recipe, limit):
        if changes > 1 and len(fits) >= wanted:
            break
        progress.count(str(way))
        try:
            found = summarize(trace_step(config, way.mesh, way.recipe, rates_of(way.mesh)))
        except FzeroError:
            continue
        if found.peak <= limit:
            fits.append(Tried(way, found))
    return sorted(fits, key=lambda tried: -tried.found.tokens_a_second)[:wanted]
