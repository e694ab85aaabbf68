"""One rank's place in a mesh without processes, for loaders: as much of a `DeviceMesh` as they ask, and an agreement
with nobody. A helper of the tests."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import fzero.data  # noqa: F401  whose module is replaced in part
from fzero.ranks.live import find_ranks


class FakeMesh:
    """The place `rank` in a mesh of these sizes."""

    def __init__(self, rank: Sequence[int], **sizes: int) -> None:
        self.mesh_dim_names, self.shape, self._rank = tuple(sizes), tuple(sizes.values()), list(rank)

    def get_coordinate(self) -> list[int]:
        return self._rank

    def agree(self, what: str, details: Sequence[str] = ()) -> None:
        """The ranks of one process take turns: none waits for another."""


def ranks(**sizes: int) -> list[FakeMesh]:
    """All ranks of a mesh, row by row."""
    return [FakeMesh(place, **sizes) for place in itertools.product(*map(range, sizes.values()))]


@contextmanager
def loaders_of_fake_ranks() -> Iterator[None]:
    """Within a block loaders take a `FakeMesh` as well."""

    def find(mesh: Any) -> Any:
        return mesh if isinstance(mesh, FakeMesh) else find_ranks(mesh)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["fzero.data.loader"], "find_ranks", find)
        yield
