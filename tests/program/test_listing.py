"""Listing: the program as text."""

from __future__ import annotations

import functools

import pytest
from programs import MESH, apply, differentiated, layers, loss, on_rows, trained

from fzero import optim
from fzero.base.mesh import VirtualMesh
from fzero.base.sizes import format_size
from fzero.passes import bucket, defaults, donate, fuse, release
from fzero.program.program import Program


def steps(program: Program) -> list[str]:
    """The listing's lines without the first, each as its verb and, if it has one, its bucket."""
    lines = [line.split() for line in str(program).splitlines()[1:]]
    return [line[0] if line[0] == "compute" else " ".join(line[:2]) for line in lines]


def test_a_forward_and_backward_pass_read_like_zero_3() -> None:
    program = apply(differentiated(loss, layers(3), MESH).trace(), bucket, functools.partial(release, stage=3))
    assert steps(program) == [
        "all_gather layers.0", "compute", "release layers.0",
        "compute",
        "all_gather layers.1", "compute", "release layers.1",
        "compute",
        "all_gather layers.2", "compute",
        "reduce_scatter layers.2", "compute", "release layers.2",
        "compute",
        "reduce_scatter layers.1",
        "all_gather layers.1", "compute", "release layers.1",
        "compute",
        "reduce_scatter layers.0",
        "all_reduce 1",
    ]  # fmt: skip


def test_at_stage_2_a_bucket_is_released_behind_its_last_use() -> None:
    program = apply(differentiated(loss, layers(3), MESH).trace(), bucket, functools.partial(release, stage=2))
    assert [line for line in steps(program) if "layers.1" in line] == [
        "all_gather layers.1", "reduce_scatter layers.1", "release layers.1"
    ]  # fmt: skip


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_of_four_layers_is_well_under_a_hundred_lines(stage: int) -> None:
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1))
    program = apply(trained(optimizer, layers(4), MESH).trace(), *defaults(stage=stage, in_place=True))
    lines = str(program).splitlines()
    assert len(lines) < 50
    verbs = [line.split()[0] for line in lines[1:]]
    last_scatter = len(verbs) - 1 - verbs[::-1].index("reduce_scatter")
    assert verbs.index("all_gather") < verbs.index("reduce_scatter") <= last_scatter < verbs.index("update")


def test_the_first_line_sums_up() -> None:
    program = apply(differentiated(loss, layers(3), MESH).trace(), bucket)
    head = str(program).splitlines()[0]
    nodes, peak = len(program.graph.nodes), format_size(program.memory().peak)
    assert head == (
        f"differentiated on VirtualMesh(fsdp=2): {nodes} nodes, peak {peak}, "
        "moves all_gather 384 B, reduce_scatter 384 B, all_reduce 4 B"
    )


def test_a_collective_has_its_bucket_bytes_and_dtype() -> None:
    program = apply(differentiated(loss, layers(1), MESH).trace(), bucket)
    assert [line.split() for line in str(program).splitlines()[1:2]] == [
        ["all_gather", "layers.0", "128", "B", "float32"]
    ]


def test_an_update_has_its_leaves_and_says_whether_it_is_in_place() -> None:
    program = apply(trained(optim.adamw(0.1), layers(2), MESH).trace(), bucket, fuse)
    assert "update          adamw, 4 leaves" in map(str.strip, str(program).splitlines())
    assert "update          adamw, 4 leaves, in place" in map(str.strip, str(donate(program)).splitlines())


def test_a_program_that_moves_nothing_says_so() -> None:
    case = on_rows(lambda p, x: x * 2, layers(1))
    head, *lines = str(case.trace()).splitlines()
    assert head.endswith("moves nothing") and [line.split() for line in lines] == [["compute", "mul"]]


def test_what_is_computed_is_counted_the_most_frequent_first() -> None:
    case = on_rows(lambda p, x: (x.sin().sin().sin() + 1).t(), layers(1))
    assert str(case.trace()).splitlines()[1].split(maxsplit=1)[1] == "sin x3, add"  # a view is no computation


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 50, "3072.0 TiB"),
    ],
)
def test_sizes_read_well(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_all_collectives_of_a_node_are_listed_with_their_axes() -> None:
    """A mean over a mesh of two axes is a reduce-scatter along one and an all-reduce along the other."""
    mesh = VirtualMesh(replica=2, fsdp=2)
    program = apply(differentiated(loss, layers(1), mesh).trace(), bucket)
    moves = [line.split() for line in str(program).splitlines()[1:] if "layers.0" in line and "release" not in line]
    assert [(line[0], line[-2:]) for line in moves] == [
        ("all_gather", ["over", "fsdp"]),
        ("reduce_scatter", ["over", "fsdp"]),
        ("all_reduce", ["over", "replica"]),
    ]
    listed = [entry.op for entry in program.comm() if entry.bucket]
    assert listed == [line[0] for line in moves]
