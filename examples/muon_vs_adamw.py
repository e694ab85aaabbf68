"""Muon beside AdamW: the same GPT on the same bytes, once with each, and a plot of both losses.

    pip install "fzero[plot]"                                                        # without it: numbers, no plot
    torchrun --standalone --nproc-per-node 2 examples/muon_vs_adamw.py               # writes muon_vs_adamw.png

Muon takes the matrices of the blocks, and leaves embeddings, the head, norms and biases to AdamW.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ranks
import tiny
from corpus import Batch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import optim

PICTURE = Path("muon_vs_adamw.png")
WINDOW = 10  # steps whose losses are averaged


def main(mesh: DeviceMesh, steps: int, picture: Path = PICTURE) -> None:
    """Trains a GPT with each optimizer, plots and prints the losses, and compares the last ones."""
    adamw = optim.adamw(4e-3, b2=0.95, weight_decay=0.1)
    muon = optim.muon(0.02, where=lambda path, leaf: leaf.ndim == 2 and path.startswith("blocks."), rest=adamw)
    optimizers = {"Muon": muon, "AdamW": adamw}
    losses = {name: train(mesh, steps, optimizer) for name, optimizer in optimizers.items()}
    if mesh.get_rank() == 0:
        print("\n".join(table(losses)))
        print(plot(losses, picture))
    last = {name: sum(values[-WINDOW:]) / WINDOW for name, values in losses.items()}
    assert last["Muon"] < last["AdamW"] < 0.9 * losses["AdamW"][0], last


def train(mesh: DeviceMesh, steps: int, optimizer: optim.GradientTransformation) -> list[float]:
    """The loss of each step."""
    params, apply = fzero.lower(tiny.byte_gpt(mesh))
    params = fzero.partition(params, mesh)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optimizer)
    opt_state = optimizer.init(params)

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        return tiny.next_byte_loss(apply(params, batch["inputs"]), batch)

    def train_step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any, Tensor]:
        loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    step = fzero.shard(train_step, mesh)
    losses = []
    for batch in tiny.batches(mesh, steps):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(loss.item())
    return losses


def table(losses: dict[str, list[float]]) -> list[str]:
    """The mean loss of each run of `WINDOW` steps, a line each."""
    lines = ["steps      " + "".join(f"{name:>10}" for name in losses)]
    for start in range(0, len(losses["Muon"]) - WINDOW + 1, WINDOW):
        means = (sum(values[start : start + WINDOW]) / WINDOW for values in losses.values())
        lines.append(f"{start:>4} - {start + WINDOW - 1:<4}" + "".join(f"{mean:>10.4f}" for mean in means))
    return lines


def plot(losses: dict[str, list[float]], picture: Path) -> str:
    """Writes the plot. What became of it, in words."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f'{picture} is not written: matplotlib is not installed; pip install "fzero[plot]"'
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats a byte")
    for name, values in losses.items():
        axes.plot(values, label=name)
    axes.legend()
    figure.savefig(picture, dpi=120)
    return f"wrote {picture}"


if __name__ == "__main__":
    ranks.run(main, steps=150)
