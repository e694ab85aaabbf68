"""A bug of sharded training, found with no cluster: the mean over tokens that are no padding, taken on each rank alone.

python examples/virtual_ranks.py
"""

import torch
from torch import Tensor

import fzero


def loss_fn(params: dict[str, Tensor], x: Tensor, y: Tensor, mask: Tensor, correct: bool) -> Tensor:
    errors = (torch.tanh(x @ params["w"]) @ params["v"] - y).square().squeeze(-1)
    count = mask.sum()  # wrong: ranks with less padding must count for more
    return (errors * mask).sum() / (fzero.pmean(count, "fsdp") if correct else count)


def train_step(params: dict[str, Tensor], *batch: Tensor, correct: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    loss, grads = fzero.value_and_grad(loss_fn)(params, *batch, correct)
    return fzero.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def main() -> None:
    """Checks the wrong step and the right one on eight ranks, and prints what comes of it."""
    torch.manual_seed(0)
    params = {"w": torch.randn(6, 10), "v": torch.randn(10, 1)}
    batch = torch.randn(64, 6), torch.randn(64, 1), (torch.rand(64) < torch.linspace(0.2, 1, 64)).float()
    try:
        fzero.check_equivalence(train_step, (params,), batch, ranks=8, steps=3)
    except fzero.FzeroError as error:
        print(f"wrong step: {error}")
    largest = fzero.check_equivalence(lambda *args: train_step(*args, correct=True), (params,), batch, ranks=8, steps=3)
    print("right step, largest differences:", {path: f"{found.absolute:.1e}" for path, found in largest.items()})


if __name__ == "__main__":
    main()
