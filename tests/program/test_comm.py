"""Communication: bytes that a step moves, against numbers worked out by hand."""

from __future__ import annotations

import torch
from programs import MESH, Case, apply, layers, loss, on_rows

import fzero
from fzero import optim
from fzero.base.mesh import VirtualMesh
from fzero.passes import bucket, coalesce
from fzero.program.comm import Comm

F32 = torch.float32


def test_comm_of_a_step_on_two_axes() -> None:
    case = on_rows(fzero.value_and_grad(loss), layers(1), mesh=VirtualMesh(replica=2, fsdp=3))
    assert apply(case.trace(), bucket).comm() == [
        Comm("all_gather", "fsdp", "layers.0", F32, 48 * 4),  # 25 + 5 elements, padded to 3 * 16
        Comm("reduce_scatter", "fsdp", "layers.0", F32, 48 * 4),
        Comm("all_reduce", "replica", "layers.0", F32, 16 * 4),  # this rank's slice of it
        Comm("all_reduce", "replica+fsdp", None, F32, 4),  # the loss
    ]


def test_comm_of_leaves_alone_is_padded_leaf_by_leaf() -> None:
    case = on_rows(lambda p, x: loss(p, x), layers(1), mesh=VirtualMesh(fsdp=3))
    # of b, 5 elements, rank 0 has all; of w, 25, ranks have 11, 14 and 0: blocks of 16
    assert sorted(entry.nbytes for entry in case.trace().comm()) == [4, 48 * 4, 48 * 4]


def test_comm_of_reductions_is_what_they_reduce() -> None:
    case = Case(optim.global_norm, MESH, (fzero.partition(layers(2), MESH),))
    assert apply(case.trace(), coalesce).comm() == [Comm("all_reduce", "fsdp", None, F32, 4 * 4)]


def to_meta(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


def test_backends_that_add_up_on_the_way_are_sent_float32() -> None:
    """NCCL would round a sum of bfloat16 at each rank. On CPU ranks add up what arrives, in float32 too."""
    case = on_rows(fzero.value_and_grad(loss), layers(1), mesh=VirtualMesh(fsdp=3))
    narrow = fzero.tree.map(lambda x: x.to(torch.bfloat16), fzero.unpartition(case.args))
    for args, sent in ((narrow, torch.bfloat16), (fzero.tree.map(to_meta, narrow), F32)):
        program = fzero.simulate(case.step, case.mesh).trace(fzero.partition(args[0], case.mesh), args[1])
        assert program.comm() == [
            Comm("all_gather", "fsdp", "layers.0", torch.bfloat16, 48 * 2),
            Comm("reduce_scatter", "fsdp", "layers.0", sent, 48 * sent.itemsize),
            Comm("all_reduce", "fsdp", None, sent, sent.itemsize),
        ]
