"""A small MLP with AdamW, trained with a variant on virtual ranks and on real ones. A helper of the tests beside it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

import fzero
from fzero import passes, tree
from fzero.passes.run import Pass
from fzero.variants.int8_gather import int8_gather
from fzero.variants.int8_mean import int8_mean
from fzero.variants.int8_scatter import int8_scatter

VARIANTS: dict[str, Pass] = {"int8_gather": int8_gather, "int8_mean": int8_mean, "int8_scatter": int8_scatter}
STEPS = 5
ROWS = 16
WIDTHS = (24, 70, 70, 5)  # slices are no multiple of 256: each has a block that is shorter

optimizer = fzero.optim.adamw(1e-2, weight_decay=0.1)


@lru_cache
def lower() -> tuple[tree.Tree, Any]:
    """Parameters and the pure function of the MLP, the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, second = (nn.Sequential(nn.Linear(*WIDTHS[i : i + 2]), nn.GELU()) for i in range(2))
        return fzero.lower(nn.Sequential(first, second, nn.Linear(*WIDTHS[2:])))


def draw_batch(index: int) -> tuple[Tensor, Tensor]:
    """[ROWS, 24] inputs and the class of each: the largest of its first five numbers."""
    x = torch.randn(ROWS, WIDTHS[0], generator=torch.Generator().manual_seed(index))
    return x, x[:, : WIDTHS[-1]].argmax(1)


def loss_fn(params: tree.Tree, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(lower()[1](params, x), y)


def train_step(params: tree.Tree, opt_state: Any, x: Tensor, y: Tensor) -> Any:
    loss, grads = fzero.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return fzero.optim.apply_updates(params, updates), opt_state, loss


def rewrites(variant: str | None, stage: int) -> tuple[Pass, ...]:
    """The default passes of a stage, with a variant among them."""
    defaults = passes.defaults(stage=stage)
    return defaults if variant is None else passes.insert(defaults, VARIANTS[variant], before="prefetch")


class Held(NamedTuple):
    """What the user of a step holds between two calls."""

    params: tree.Tree
    opt_state: Any
    pass_state: dict[str, fzero.Sharded]


class Run(NamedTuple):
    """A step on a mesh, and the rows of a batch that this process gives it."""

    step: Any
    mesh: Any
    rows: slice = slice(None)

    def begin(self) -> Held:
        params = fzero.partition(lower()[0], self.mesh)
        opt_state = optimizer.init(params)
        return Held(params, opt_state, self.step.init_pass_state(params, opt_state, *self.batch(0)))

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = draw_batch(index)
        return x[self.rows], y[self.rows]

    def trace(self) -> fzero.Program:
        held = self.begin()
        return self.step.trace(held.params, held.opt_state, *self.batch(0))

    def train(self, held: Held, indices: range = range(STEPS), **how: Any) -> tuple[Held, Tensor]:
        """What is held after these steps, and their losses."""
        losses = []
        for index in indices:
            given = (held.params, held.opt_state, *self.batch(index))
            if held.pass_state:
                (params, opt_state, loss), state = self.step(*given, pass_state=held.pass_state, **how)
            else:
                (params, opt_state, loss), state = self.step(*given, **how), {}
            held = Held(params, opt_state, state)
            losses.append(loss)
        return held, torch.stack(losses)


def on_virtual(variant: str | None, stage: int, world: int) -> Run:
    mesh = fzero.VirtualMesh(fsdp=world)
    return Run(fzero.simulate(train_step, mesh, passes=rewrites(variant, stage)), mesh)


def on_real(variant: str | None, stage: int, mesh: DeviceMesh) -> Run:
    rows = ROWS // mesh.size()
    mine = slice(mesh.get_rank() * rows, (mesh.get_rank() + 1) * rows)
    return Run(fzero.shard(train_step, mesh, passes=rewrites(variant, stage)), mesh, mine)
