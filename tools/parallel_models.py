"""Each model folder of transformers with a tensor or an expert plan, tiny, by `fzero.hf.parallel` beside plain torch.

    python tools/parallel_models.py --write            # all, and docs/parallel_models.md
    python tools/parallel_models.py llama mixtral      # some; outcomes of the others are those in build/

A model has a configuration with the sizes of `tiny_models.py`, weights of some size, and double precision. On virtual
ranks (fsdp 2, tp 2), or (fsdp 2, ep 2), the loss and the gradient of each parameter are compared with the means of
plain torch over the two halves of the batch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import signal
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import tiny_models
import torch
import transformers

import fzero
import fzero.hf
from fzero import tree

ROOT = Path(__file__).parents[1]
PAGE, JOURNAL = ROOT / "docs" / "parallel_models.md", ROOT / "build" / "parallel_models.json"
SECONDS = 180
ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Of the largest gradient: transformers computes losses and norms in float32 in any case."""


class Found(NamedTuple):
    """What came of a model: "equal", "refused", "raw", "wrong", "untried" or "absent" (no such plan), and why."""

    outcome: str
    why: str = ""
    split: int = 0


def loss_of(output: Any) -> Any:
    """The loss of a model with a head, else the mean square of its output."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    first = output[0] if not isinstance(output, torch.Tensor) else output
    return first.square().mean()


def plain(model: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Loss and gradients of plain torch: means over the halves of the batch."""
    losses = []
    for half in range(2):
        rows = {key: x.chunk(2)[half] for key, x in batch.items()}
        loss = loss_of(model(**rows))
        (loss / 2).backward()
        losses.append(loss.detach())
    return sum(losses) / 2, {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def try_axis(model: Any, batch: dict[str, Any], axis: str) -> Found:
    """`fzero.hf.parallel` along an axis, "tp" or "ep"."""
    try:
        expected, theirs = plain(model, batch)
    except Exception as error:
        raise tiny_models.UntriedError(f"plain torch: {type(error).__name__} {error}") from error
    mesh = fzero.VirtualMesh(**{"fsdp": 2, axis: 2})
    params, apply = fzero.hf.parallel(model, mesh, tp="tp" if axis == "tp" else None, ep="ep" if axis == "ep" else None)
    split = sum(bool(leaf.form.layout.split_axes) for leaf in tree.leaves(params))

    def step(params: Any, batch: Any) -> Any:
        return fzero.value_and_grad(lambda params: loss_of(apply(params, **batch)))(params)

    value, grads = fzero.simulate(step, mesh, data=("fsdp",))(params, batch)
    largest = max(x.abs().max().item() for x in theirs.values())
    whole = fzero.unpartition(grads)
    off = {
        path: (grad - theirs.get(path, torch.zeros(()))).abs().max().item() / largest
        for path, grad in zip(tree.paths(whole), tree.leaves(whole))
    }
    apart = abs(value.mean() - expected).item() / abs(expected).item()
    worst = max(off, key=lambda path: off[path])
    allowed = ALLOWED[next(model.parameters()).dtype]
    if not apart <= allowed or not off[worst] <= allowed:
        return Found("wrong", f"the loss is {apart:.1e} off, the gradient of {worst} {off[worst]:.1e}", split)
    return Found("equal", split=split)


def judge(folder: str) -> dict[str, Found]:
    """Axis -> what came of it."""
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError(f"no end in {SECONDS} s")))
    found = {}
    for axis in ("tp", "ep"):
        signal.alarm(SECONDS)
        try:
            made = tiny_models.make(folder, f"{axis}_plan")
            found[axis] = Found("absent") if made is None else try_axis(*made, axis)
        except fzero.FzeroError as error:
            found[axis] = Found("refused", " ".join(str(error).split()))
        except tiny_models.UntriedError as error:
            found[axis] = Found("untried", str(error))
        except TimeoutError as error:
            found[axis] = Found("untried", str(error))
        except Exception as error:
            found[axis] = Found("raw", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        finally:
            signal.alarm(0)
    return found


def _start() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()


Table = dict[str, dict[str, Found]]
HEAD = """# Models with tensor and expert plans

Each model folder of transformers {version} with a tensor plan (`tp`) or an expert plan (`ep`), by `fzero.hf.parallel`
([hf_parallel](hf_parallel.md)). `python tools/parallel_models.py --write` makes this page.

A model has a tiny configuration, weights of some size, and double precision where its own code allows it. It reads
tokens; where images or sound belong to it, these are left out. On virtual ranks (fsdp 2, tp 2), or (fsdp 2, ep 2), its
loss, and the gradient of each parameter, are *equal* if they differ from the means of plain torch over both halves of
the batch by at most {allowed} of the largest gradient, or 1e-4 in single precision. *untried* are models that plain
torch did not run with the tiny configuration, that need packages which are not installed, or that take too long.

{counts}

| folder | tp | leaves split | ep | leaves split |
|---|---|---|---|---|
{rows}

## Why

{reasons}
"""


def render(table: Table) -> str:
    """The page of a table."""
    counts = "; ".join(f"`{axis}`: {count(table, axis)}" for axis in ("tp", "ep"))
    rows = [
        f"| {folder} | " + " | ".join(f"{_word(x)} | {x.split or ''}" for x in found.values()) + " |"
        for folder, found in sorted(table.items())
        if any(x.outcome != "absent" for x in found.values())
    ]
    reasons = [
        f"* {folder}, `{axis}`: {x.outcome}. {_quote(x.why)}"
        for folder, found in sorted(table.items())
        for axis, x in found.items()
        if x.why and x.outcome != "absent"
    ]
    version, allowed = transformers.__version__, f"{ALLOWED[torch.float64]:.0e}"
    page = HEAD.format(
        version=version, allowed=allowed, counts=counts, rows="\n".join(rows), reasons="\n".join(reasons)
    )
    return page


def count(table: Table, axis: str) -> str:
    """`120 equal, 2 refused, ...`"""
    found = Counter(row[axis].outcome for row in table.values())
    return ", ".join(f"{found[outcome]} {outcome}" for outcome in ("equal", "refused", "raw", "wrong", "untried"))


def _word(found: Found) -> str:
    return "" if found.outcome == "absent" else found.outcome


def _quote(why: str) -> str:
    text = re.sub(r"\S*/(?=transformers/|tools/)", "", why)
    return "`" + text.replace("`", "'")[:300] + "`"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", help="model folders of transformers; all with a plan by default")
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    known = json.loads(JOURNAL.read_text()) if JOURNAL.exists() and given.folders else {}
    table: Table = {folder: {axis: Found(*x) for axis, x in row.items()} for folder, row in known.items()}
    JOURNAL.parent.mkdir(exist_ok=True)
    chosen = given.folders or tiny_models.list_folders()
    with multiprocessing.get_context("fork").Pool(given.workers, _start, maxtasksperchild=8) as pool:
        for folder, found in zip(chosen, pool.imap(judge, chosen)):
            table[folder] = found
            JOURNAL.write_text(json.dumps(table))
            print(folder, *(f"{axis}: {x.outcome} {x.split or ''} {x.why}" for axis, x in found.items()), flush=True)
    for axis in ("tp", "ep"):
        print(f"{axis}: {count(table, axis)}")
    if given.write:
        PAGE.write_text(render(table))


if __name__ == "__main__":
    main()
