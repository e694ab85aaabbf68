"""What prints of a step of many layers: tables of at most 40 lines, and all of it on demand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs import layers, training

import fzero
from fzero import Program, VirtualMesh, optim, tree
from fzero.program.peak import Memory
from fzero.program.tables import LINES

COUNT = 80
MESH = VirtualMesh(replica=2, fsdp=2)


@pytest.fixture(scope="module")
def program() -> Program:
    """A step of 80 equal layers on two axes, traced from shapes."""
    whole = tree.map(lambda leaf: leaf.to("meta"), layers(COUNT))
    params = fzero.partition(whole, MESH)
    step = fzero.simulate(training(optim.sgd(0.1)), MESH)
    return step.trace(params, optim.sgd(0.1).init(params), torch.empty(8, 5, device="meta"))


def test_tables_have_at_most_forty_lines_and_full_has_all(program: Program) -> None:
    comm, timeline, memory = program.comm(), program.timeline(), program.memory()
    for table, rows in ((comm, len(comm)), (timeline, len(timeline.transfers)), (memory, None)):
        assert len(str(table).splitlines()) <= LINES
        wanted = len(program.graph.nodes) - len(program.arguments) + 1 if rows is None else rows
        assert len(table.table(full=True).splitlines()) == 2 + wanted > LINES


def read(table: Any, name: str) -> list[list[str]]:
    return [line.split() for line in str(table).splitlines() if name in line]


def test_equal_layers_are_one_row_with_its_axis_and_bytes(program: Program) -> None:
    rows = read(program.comm(), "layers.*")
    gathers, scatters, means = sorted(rows, key=lambda row: (row[0] != "all_gather", row[0] != "reduce_scatter"))
    every = [x for x in program.comm() if x.op == "all_gather"]
    assert gathers[:3] == ["all_gather", "fsdp", "layers.*"] and str(len(every)) in gathers
    assert scatters[1] == "fsdp" and means[1] == "replica" and str(COUNT) in scatters
    (row,) = read(program.timeline(), "reduce_scatter layers.*")
    assert row[2] == str(COUNT)


def test_a_listing_folds_layers_and_has_the_axis_of_each_collective(program: Program) -> None:
    lines = str(program).splitlines()
    assert len(lines) <= 60 and any("times, each one layer back:" in line for line in lines)
    moved = [line for line in lines[1:] if line.split()[0] in ("all_gather", "reduce_scatter", "all_reduce")]
    assert all(" B float32 over " in line for line in moved)


def test_a_short_list_stays_whole() -> None:
    params = fzero.partition(layers(2), MESH)
    small = fzero.simulate(training(optim.sgd(0.1)), MESH).trace(params, optim.sgd(0.1).init(params), torch.ones(8, 5))
    lines = str(small.comm()).splitlines()
    assert len(lines) == 2 + len(small.comm()) and "times" not in lines[1] and "layers.0" in lines[2]
    assert str(small.comm()) == small.comm().table(full=True)
    first, *_ = str(small.memory()).splitlines()
    assert first == f"peak {small.memory().summary}, at {small.memory().at}"


def test_a_program_without_collectives_says_so() -> None:
    alone = fzero.simulate(lambda x: x * 2, VirtualMesh(fsdp=2)).trace(torch.ones(2))
    assert str(alone.comm()) == "0 collectives move nothing"


def test_memory_without_names_is_a_table() -> None:
    assert str(Memory(10, "x", [1, 2], [1, 10])).splitlines()[-1].split() == ["1", "10", "B", "#" * 32]
