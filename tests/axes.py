"""Collectives over named axes, and a model whose parts ranks compute, for tests on virtual and on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import VirtualMesh, optim, tree

F64 = torch.float64
WIDTH, HIDDEN = 4, 12

Collective = Callable[[Tensor, Any], Tensor]
COLLECTIVES: dict[str, Collective] = {
    "psum": fzero.psum,
    "pmean": fzero.pmean,
    "all_gather": fzero.all_gather,
    "all_gather of dim 1": lambda x, axis: fzero.all_gather(x, axis, -1),
    "psum_scatter": fzero.psum_scatter,
    "psum_scatter of dim 1": lambda x, axis: fzero.psum_scatter(x, axis, 1),
    "all_to_all": lambda x, axis: fzero.all_to_all(x, axis, 1, 0),
    "all_to_all of one dim": lambda x, axis: fzero.all_to_all(x, axis, 0, 0),
    "ppermute": lambda x, axis: fzero.ppermute(x, axis, [(i, i + 1) for i in range(fzero.axis_size(axis) - 1)]),
    "ppermute around": lambda x, axis: fzero.ppermute(
        x, axis, [(i, (i - 1) % fzero.axis_size(axis)) for i in range(fzero.axis_size(axis))]
    ),
}


def on_ranks(fn: Callable[..., Any], mesh: VirtualMesh, *batch: Tensor) -> Any:
    """`fn` on all ranks of a mesh, each of which has its own rows."""
    return fzero.simulate(fn, mesh, data=mesh.names)(*batch)


def rows_of(mesh: VirtualMesh, rows: int = 24, seed: int = 0) -> Tensor:
    """[ranks * rows, 24]: different rows on each rank."""
    return torch.randn(mesh.size() * rows, 24, dtype=F64, generator=torch.Generator().manual_seed(seed))


def ragged_rows(mesh: VirtualMesh, axes: Any, rows: int = 7) -> tuple[Tensor, Tensor]:
    """[ranks, rows, 3]: rows of each rank, and [ranks, N]: how many go to each rank along the axes, or none."""
    generator, names = torch.Generator().manual_seed(3), (axes,) if isinstance(axes, str) else axes
    world = mesh.size(mesh.join(names))
    x = torch.randn(mesh.size(), rows, 3, dtype=F64, generator=generator)
    ends = torch.randint(rows + 1, (mesh.size(), world), generator=generator).sort().values
    sizes = ends.diff(prepend=torch.zeros(mesh.size(), 1, dtype=torch.int64))
    sizes[0], sizes[-1, 1:] = 0, 0
    return x, sizes


WEIGHTS = {
    "norm": torch.ones(WIDTH, dtype=F64),
    "up": torch.randn(HIDDEN, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(0)) / 2,
    "down": torch.randn(WIDTH, HIDDEN, dtype=F64, generator=torch.Generator().manual_seed(1)) / 2,
}
EXAMPLES = torch.randn(16, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(2))
ADAMW = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.01))


def block(w: Any, dim: int, axis: Any = "tp") -> Tensor:
    """This rank's block of a whole leaf."""
    size = w.shape[dim] // fzero.axis_size(axis)
    return w.index_select(dim, fzero.axis_index(axis) * size + torch.arange(size))


def mlp(params: Any, x: Tensor) -> Tensor:
    """A column, then a row of Megatron's: each rank has some of the hidden units."""
    hidden = F.layer_norm(x, (WIDTH,), params["norm"]) @ block(params["up"], 0).T
    return x + fzero.psum(hidden.relu() @ block(params["down"], 1).T, "tp")


def on_a_sequence(params: Any, x: Tensor) -> Tensor:
    """The same, where each rank normalizes some of the rows."""
    mine = F.layer_norm(block(x, 0), (WIDTH,), params["norm"])
    hidden = fzero.all_gather(mine, "tp") @ block(params["up"], 0).T
    added = fzero.psum_scatter(hidden.relu() @ block(params["down"], 1).T, "tp")
    return fzero.all_gather(block(x, 0) + added, "tp")


SPLIT = {"up": ("tp", 0), "down": ("tp", -1)}


def split_mlp(params: Any, x: Tensor) -> Tensor:
    """`mlp` of split leaves: a step has this rank's part of them."""
    hidden = F.layer_norm(x, (WIDTH,), params["norm"]) @ params["up"].T
    return x + fzero.psum(hidden.relu() @ params["down"].T, "tp")


def split_sequence(params: Any, x: Tensor) -> Tensor:
    """`on_a_sequence` of split leaves."""
    mine = F.layer_norm(block(x, 0), (WIDTH,), params["norm"])
    hidden = fzero.all_gather(mine, "tp") @ params["up"].T
    return fzero.all_gather(block(x, 0) + fzero.psum_scatter(hidden.relu() @ params["down"].T, "tp"), "tp")


def loss_of(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda params, x: forward(params, x).square().mean()


def train(forward: Callable[[Any, Tensor], Tensor]) -> Callable[..., Any]:
    def step(params: Any, state: Any, x: Tensor) -> Any:
        loss, grads = fzero.value_and_grad(loss_of(forward))(params, x)
        updates, state = ADAMW.update(grads, state, params)
        return tree.map(torch.add, params, updates), state, loss

    return step
