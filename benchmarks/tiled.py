"""`fzero.tiled_cross_entropy` beside the cross entropy of all logits: the peak of a planned step, and at a small size
the peak and the seconds of a step that runs.

    python benchmarks/tiled.py                 # prints both tables
    python benchmarks/tiled.py --plan          # the first one alone: nothing is timed

A step takes the loss and the gradients of a head, and of a matrix in front of it. Contenders:

    plain           torch's cross entropy of all logits
    tiled-k         fzero.tiled_cross_entropy with k chunks: the gradient is computed in the forward pass
    recomputed-k    fzero.scan over k chunks under fzero.remat: the backward pass computes the logits again

The plan is that of one of 8 ranks at stage 3, on tensors without data. The steps that run have one rank and one thread.
They take turns. Their peak is the growth of the bytes in use of the allocator (`examples/measure.py`), beside what
`program.memory()` predicts without the arguments.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rounds
import torch
from torch import Tensor
from torch.nn import functional

import fzero

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from measure import growth

MIB, GIB = 1 << 20, 1 << 30
RESULTS = Path(__file__).parent / "results" / "tiled.json"
PLANNED = {"tokens": 32768, "vocabulary": 131072, "width": 4096, "ranks": 8}
MEASURED = {"tokens": 1024, "vocabulary": 16384, "width": 256}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of all logits."""
    return functional.cross_entropy((hidden @ head.T).float(), labels)


def tiled(chunks: int) -> Loss:
    """The gradient of a chunk is computed with its loss."""
    return lambda hidden, head, labels: fzero.tiled_cross_entropy(hidden, head, labels, chunks)


def recomputed(chunks: int) -> Loss:
    """The backward pass computes the logits of a chunk again."""

    @fzero.remat
    def sum_of(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy((hidden @ head.T).float(), labels, reduction="sum")

    def loss(hidden: Tensor, head: Any, labels: Tensor) -> Tensor:
        def turn(carry: Any, part: Any) -> Any:
            total, head = carry
            return (total + sum_of(part[0], head, part[1]), head), None

        whole = head.full_tensor() if isinstance(head, fzero.Sharded) else head
        start = torch.zeros((), device=hidden.device), whole
        (total, _), _ = fzero.scan(turn, start, (hidden.unflatten(0, (chunks, -1)), labels.unflatten(0, (chunks, -1))))
        return total / labels.numel()

    return loss


def contenders(*chunks: int) -> dict[str, Loss]:
    """Name -> loss."""
    some = {f"{fn.__name__}-{k}": fn(k) for fn in (tiled, recomputed) for k in chunks}
    return {"plain": plain, **some}


def step_of(loss: Loss) -> Callable[..., Any]:
    """The loss and its gradients."""
    return lambda p, x, labels: fzero.value_and_grad(lambda p: loss(x @ p["w"], p["head"], labels))(p)


def arguments(tokens: int, vocabulary: int, width: int, **options: Any) -> tuple[Any, Tensor, Tensor]:
    """Parameters, inputs and labels."""
    p = {"w": torch.randn(width, width, **options) / width, "head": torch.randn(vocabulary, width, **options)}
    labels = torch.randint(vocabulary, (tokens,), device=options.get("device", "cpu"))
    return p, torch.randn(tokens, width, **options), labels


def plan() -> dict[str, Any]:
    """Name -> the predicted peak of a step in bf16, its scratch beside arguments, and the bytes that a rank moves."""
    mesh, found = fzero.VirtualMesh(fsdp=PLANNED["ranks"]), dict[str, Any]()
    for name, loss in contenders(8, 32).items():
        sizes = {"tokens": PLANNED["ranks"] * PLANNED["tokens"], **{k: PLANNED[k] for k in ("vocabulary", "width")}}
        p, x, labels = arguments(**sizes, dtype=torch.bfloat16, device="meta")
        program = fzero.simulate(step_of(loss), mesh).trace(fzero.partition(p, mesh), x, labels)
        comm = program.comm()
        found[name] = {
            "peak": program.memory().peak,
            "gathers": sum(each.op == "all_gather" and each.bucket == "head" for each in comm),
            "scatters": sum(each.op == "reduce_scatter" and each.bucket == "head" for each in comm),
            "moved": sum(each.nbytes for each in comm),
        }
    return found


def measure(count: int) -> dict[str, Any]:
    """Name -> the predicted and the measured peak beside the arguments, and the seconds of each step."""
    torch.manual_seed(0)
    device, found, steps = torch.device("cpu"), dict[str, Any](), dict[str, Callable[[], Any]]()
    with rounds.one_rank() as mesh:
        p, x, labels = arguments(**MEASURED)
        p = fzero.partition(p, mesh)
        given = sum(leaf.local.nbytes for leaf in p.values()) + x.nbytes + labels.nbytes
        losses = []
        for name, loss in contenders(4, 16).items():
            step = fzero.shard(step_of(loss), mesh)
            predicted = step.trace(p, x, labels).memory().peak - given
            steps[name] = lambda step=step: step(p, x, labels)
            losses.append(steps[name]()[0].item())
            found[name] = {"predicted": predicted, "measured": growth(steps[name], device)}
        for name, seconds in rounds.time_rounds(steps, count).items():
            found[name]["seconds"] = seconds
    assert max(losses) - min(losses) < 1e-5 * losses[0], losses
    return found


def main() -> None:
    """Prints the tables, and writes the record."""
    flags = rounds.parse(__doc__, RESULTS)
    planned = plan()
    print(f"planned, {PLANNED}, bf16")
    print(f"{'':<16}{'peak GiB':>10}{'gathers':>9}{'scatters':>10}{'moved GiB':>11}")
    for name, row in planned.items():
        sizes = f"{row['peak'] / GIB:>10.2f}{row['gathers']:>9}{row['scatters']:>10}{row['moved'] / GIB:>11.2f}"
        print(f"{name:<16}{sizes}")
    if flags.plan:
        return
    measured = measure(flags.rounds)
    print(f"measured, {MEASURED}, float32, one rank")
    print(f"{'':<16}{'predicted MiB':>14}{'peak MiB':>10}{'ms':>8}{'ratio':>7}")
    first = statistics.median(measured["plain"]["seconds"])
    for name, row in measured.items():
        seconds = statistics.median(row["seconds"])
        peaks = f"{row['predicted'] / MIB:>14.1f}{(row['measured'] or 0) / MIB:>10.1f}"
        print(f"{name:<16}{peaks}{1000 * seconds:>8.1f}{seconds / first:>7.2f}")
    record = {"planned": {**PLANNED, "steps": planned}, "measured": {**MEASURED, "steps": measured}}
    rounds.write(flags.json, record)


if __name__ == "__main__":
    main()
