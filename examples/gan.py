"""A GAN: two models and two optimizers in one step. A generator learns to draw points on a ring.

    torchrun --standalone --nproc-per-node 2 examples/gan.py

In each step the discriminator moves first, and the generator plays against the new one. Goodfellow et al.,
https://arxiv.org/abs/1406.2661, with the generator's non-saturating loss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ranks
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import softplus

import fzero
from fzero import optim

RADIUS, NOISE, WIDTH, POINTS = 2.0, 4, 64, 128


class Player(NamedTuple):
    """A model and the state of its optimizer."""

    params: Any
    opt_state: Any


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, outputs),
    )  # fmt: skip


def ring(generator: torch.Generator, count: int) -> Tensor:
    """[count, 2] points on the ring, off by a tenth or so."""
    points = torch.randn(count, 2, generator=generator)
    return points / points.norm(dim=1, keepdim=True) * (RADIUS + 0.1 * torch.randn(count, 1, generator=generator))


def main(mesh: DeviceMesh, steps: int) -> None:
    """Trains both models, prints how far drawn points are from the ring, and checks that they come nearer."""
    torch.manual_seed(0)
    (drawn, draw), (judged, judge) = (fzero.lower(mlp(*sizes).to(mesh.device_type)) for sizes in ((NOISE, 2), (2, 1)))
    optimizers = optim.adam(2e-3, b1=0.5), optim.adam(2e-3, b1=0.5)
    params = fzero.partition(drawn, mesh), fzero.partition(judged, mesh)
    players = [Player(held, optimizer.init(held)) for held, optimizer in zip(params, optimizers)]

    def move(optimizer: optim.GradientTransformation, player: Player, grads: Any) -> Player:
        updates, opt_state = optimizer.update(grads, player.opt_state, player.params)
        return Player(optim.apply_updates(player.params, updates), opt_state)

    def train_step(generator: Player, discriminator: Player, real: Tensor) -> tuple[Player, Player, Tensor]:
        noise = torch.randn(len(real), NOISE, device=real.device)  # each rank's own

        def discriminate(params: Any) -> Tensor:
            with torch.no_grad():
                fake = draw(generator.params, noise)
            return softplus(-judge(params, real)).mean() + softplus(judge(params, fake)).mean()

        discriminator = move(optimizers[1], discriminator, fzero.grad(discriminate)(discriminator.params))

        def deceive(params: Any) -> tuple[Tensor, Tensor]:
            fake = draw(params, noise)
            return softplus(-judge(discriminator.params, fake)).mean(), (fake.norm(dim=1) - RADIUS).abs().mean()

        grads, distance = fzero.grad(deceive, has_aux=True)(generator.params)
        return move(optimizers[0], generator, grads), discriminator, fzero.pmean(distance, "fsdp")

    step = fzero.shard(train_step, mesh)
    source = torch.Generator().manual_seed(mesh.get_rank())
    distances = []
    for index in range(steps):
        *players, distance = step(*players, ring(source, POINTS // mesh.size()).to(mesh.device_type))
        distances.append(distance.item())
        if index % 50 == 0:
            ranks.say(mesh, f"step {index}: points are {distances[-1]:.3f} from the ring")

    last = sum(distances[-20:]) / 20
    ranks.say(mesh, f"at the end: {last:.3f} (the ring's own points: about 0.08)")
    assert last < 0.5 * distances[0], distances


if __name__ == "__main__":
    ranks.run(main, steps=600)
