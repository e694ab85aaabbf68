"""Large leaves that are streamed, beside leaves that are gathered whole: the peak, the comm and the time of a planned
step, and at a small size the peak and the seconds of steps that run.

    python benchmarks/streamed.py              # prints both tables
    python benchmarks/streamed.py --plan       # the first one alone: nothing runs

A step takes a loss and the gradients of all parameters. Models:

    head    a matrix, a head of 256k classes, and their cross entropy
    tiled   planned: the same with fzero.tiled_cross_entropy in 8 parts, of tokens or of a streamed head
    mlp     x + down(gelu(up(x))), whose matrices are as large as the head

The plan is that of one of 8 ranks at stage 3, in bfloat16, on tensors without data; its time is that of the program's
timeline with the guessed rates of a GPU. The steps that run are those of two gloo ranks with one thread each. Whole and
streamed steps take turns. Their peak is the growth of the bytes in use of the allocator (`examples/measure.py`), on the
rank with more, beside what `program.memory()` predicts without the arguments.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rounds
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import fzero
from fzero.program.rates import guess_rates

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from measure import growth

MIB, GIB = 1 << 20, 1 << 30
RESULTS = Path(__file__).parent / "results" / "streamed.json"
CHUNKS = {"planned": (None, "512MiB", "128MiB"), "measured": (None, "8MiB", "2MiB")}
PLANNED = {"tokens": 2048, "width": 8192, "large": 262144, "ranks": 8}
MEASURED = {"tokens": 128, "width": 256, "large": 32768, "ranks": 2}
Loss = Callable[[Any, Tensor, Tensor], Tensor]


def head(p: Any, x: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of all logits of a head."""
    return functional.cross_entropy((x @ p["w"] @ p["head"].T).float(), labels)


def tiled(p: Any, x: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of a head, some tokens at a time."""
    return fzero.tiled_cross_entropy(x @ p["w"], p["head"], labels, chunks=8)


def mlp(p: Any, x: Tensor, labels: Tensor) -> Tensor:
    """A loss of an MLP with a residual connection."""
    return (x + functional.gelu(x @ p["up"].T) @ p["down"].T).float().square().mean()


MODELS: dict[str, Loss] = {"head": head, "mlp": mlp}


def arguments(name: str, sizes: dict[str, int], tokens: int, **options: Any) -> tuple[Any, Tensor, Tensor]:
    """Parameters, inputs and labels of a model. The matrices of the MLP have half as many rows as the head."""
    width, large = sizes["width"], sizes["large"]
    shapes = {"w": (width, width), "head": (large, width)}
    if name == "mlp":
        shapes = {"up": (large // 2, width), "down": (width, large // 2)}
    params = {key: torch.randn(shape, **options) / width**0.5 for key, shape in shapes.items()}
    labels = torch.randint(large, (tokens,), device=options.get("device", "cpu"))
    return params, torch.randn(tokens, width, **options), labels


def step_of(loss: Loss) -> Callable[..., Any]:
    """The loss and its gradients."""
    return lambda p, x, labels: fzero.value_and_grad(loss)(p, x, labels)


def plan() -> dict[str, Any]:
    """Model -> chunk -> the predicted peak, the bytes that a rank moves by collective, and the predicted seconds."""
    mesh, found = fzero.VirtualMesh(fsdp=PLANNED["ranks"]), dict[str, Any]()
    for name, loss in {**MODELS, "tiled": tiled}.items():
        tokens = PLANNED["ranks"] * PLANNED["tokens"]
        params, x, labels = arguments(name, PLANNED, tokens, dtype=torch.bfloat16, device="meta")
        params = fzero.partition(params, mesh)
        for chunk in CHUNKS["planned"]:
            program = fzero.simulate(step_of(loss), mesh, chunk=chunk).trace(params, x, labels)
            moved = Counter[str]()
            for each in program.comm():
                moved[each.op] += each.nbytes
            seconds = program.timeline(guess_rates("cuda")).seconds
            found.setdefault(name, {})[chunk or "whole"] = {
                "peak": program.memory().peak, "moved": dict(moved), "seconds": seconds, "remarks": program.remarks,
            }  # fmt: skip
    return found


def run_rank(rank: int, store: str, count: int, results: Any) -> None:
    """Run all steps on one rank, and put what was found into the queue `results`."""
    torch.set_num_threads(1)
    world = MEASURED["ranks"]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = torch.distributed.init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    device, found = torch.device("cpu"), dict[str, Any]()
    for name, loss in MODELS.items():
        torch.manual_seed(0)
        params, x, labels = arguments(name, MEASURED, world * MEASURED["tokens"])
        mine = slice(rank * MEASURED["tokens"], (rank + 1) * MEASURED["tokens"])
        x, labels, p = x[mine].clone(), labels[mine].clone(), fzero.partition(params, mesh)
        given = sum(leaf.local.nbytes for leaf in p.values()) + x.nbytes + labels.nbytes
        steps, first = dict[str, Callable[[], Any]](), None
        for chunk in CHUNKS["measured"]:
            step, key = fzero.shard(step_of(loss), mesh, chunk=chunk), chunk or "whole"
            steps[key] = lambda step=step, p=p, x=x, labels=labels: step(p, x, labels)
            value, gradients = steps[key]()
            first = first or (value, gradients)
            torch.testing.assert_close(value, first[0])
            for path, gradient in gradients.items():
                torch.testing.assert_close(gradient.local, first[1][path].local, rtol=1e-5, atol=1e-6)
            found.setdefault(name, {})[key] = {
                "predicted": step.trace(p, x, labels).memory().peak - given,
                "measured": growth(steps[key], device),
            }
        for key, seconds in rounds.time_rounds(steps, count, align=dist.barrier).items():
            found[name][key]["seconds"] = seconds
    results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def measure(count: int) -> dict[str, Any]:
    """Model -> chunk -> the predicted and the measured peak beside the arguments, and the seconds of each step."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run_rank, args=(rank, f"{folder}/store", count, results), daemon=True)
            for rank in range(MEASURED["ranks"])
        ]
        for each in ranks:
            each.start()
        found = [results.get(timeout=600) for _ in ranks]
        for each in ranks:
            each.join(timeout=60)
    for name, rows in found[0].items():
        for key, row in rows.items():
            row["measured"] = max(each[name][key]["measured"] or 0 for each in found)
    return found[0]


def main() -> None:
    """Prints the tables, and writes the record."""
    flags = rounds.parse(__doc__, RESULTS)
    planned = plan()
    print(f"planned, {PLANNED}, bf16")
    print(f"{'':<8}{'chunk':<10}{'peak GiB':>10}{'gathered GiB':>14}{'scattered GiB':>15}{'ms':>8}")
    for name, rows in planned.items():
        for key, row in rows.items():
            moved = "".join(
                f"{row['moved'][op] / GIB:>{n}.2f}" for op, n in (("all_gather", 14), ("reduce_scatter", 15))
            )
            print(f"{name:<8}{key:<10}{row['peak'] / GIB:>10.2f}{moved}{1000 * row['seconds']:>8.0f}")
    if flags.plan:
        return
    measured = measure(flags.rounds)
    print(f"measured, {MEASURED}, float32")
    print(f"{'':<8}{'chunk':<10}{'predicted MiB':>14}{'peak MiB':>10}{'ms':>8}{'ratio':>7}")
    for name, rows in measured.items():
        first = statistics.median(rows["whole"]["seconds"])
        for key, row in rows.items():
            seconds = statistics.median(row["seconds"])
            peaks = f"{row['predicted'] / MIB:>14.1f}{row['measured'] / MIB:>10.1f}"
            print(f"{name:<8}{key:<10}{peaks}{1000 * seconds:>8.1f}{seconds / first:>7.2f}")
    record = {"planned": {**PLANNED, "steps": planned}, "measured": {**MEASURED, "steps": measured}}
    rounds.write(flags.json, record)


if __name__ == "__main__":
    main()
