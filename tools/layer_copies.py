"""Models of transformers, tiny, of six layers: the trace that copies equal layers beside the one that runs them all.

    python tools/layer_copies.py llama mixtral     # some folders
    python tools/layer_copies.py --write           # all that have a plan, and docs/layer_copies.md

A model has a configuration with the sizes of `tiny_models.py`. Its loss and gradients are traced for two ranks in both
ways, and the programs are compared: each node with its operands, the form of its value, which values share memory, the
user's line and the regions. A model that has a cache, which it makes by default, is traced with it and without.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import parallel_models
import tiny_models
import torch
import transformers

import fzero
from fzero.tracing.layers import Layers
from fzero.tracing.trace import trace

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from traces import describe_trace  # noqa: E402

PAGE, LAYERS = ROOT / "docs" / "layer_copies.md", 6


class Found(NamedTuple):
    """What came of a model: "equal", "unequal", "refused", "raw" or "untried"; how many of its layers were copied, with
    its cache and without, and how many nodes its program has."""

    outcome: str
    why: str = ""
    copies: int = 0
    with_cache: int = 0
    nodes: int = 0


def make(folder: str) -> tuple[Any, dict[str, Any]]:
    """A model of a folder with six layers, of each kind that it names in turn, and a batch."""
    made = tiny_models.make(folder, "tp_plan") or tiny_models.make(folder, "ep_plan")
    if made is None:
        raise tiny_models.UntriedError("no model with a plan")
    return made


def choose_layers(name: str, layers: int, values: dict[str, Any]) -> dict[str, Any]:
    """Six layers, with the kinds that a configuration lists for each of its `layers`, in turn."""
    lists = {key: list(x) for key, x in values.items() if isinstance(x, list | tuple) and len(x) == layers}
    return {name: LAYERS} | {key: (x * LAYERS)[:LAYERS] for key, x in lists.items()} if lists else {}


def compare(folder: str) -> Found:
    """What came of a folder's model, with its cache and without."""
    found = [compare_one(folder, options) for options in ({"use_cache": False}, {})]
    differs = next((each for each in found if each.outcome != "equal"), found[0])
    return differs._replace(copies=found[0].copies, with_cache=found[1].copies)


def compare_one(folder: str, options: dict[str, Any]) -> Found:
    """What came of a folder's model that is called with some `options`."""
    model, batch = make(folder)
    options = {name: x for name, x in options.items() if name in inspect.signature(model.forward).parameters}
    try:
        model(**batch, **options)
    except Exception as error:
        raise tiny_models.UntriedError(f"plain torch: {type(error).__name__} {error}") from error
    params, apply = fzero.lower(model)
    given, copied = (fzero.partition(params, fzero.VirtualMesh(fsdp=2)), batch), list[int]()

    def step(params: Any, batch: Any) -> Any:
        return fzero.value_and_grad(lambda params: parallel_models.loss_of(apply(params, **batch, **options)))(params)

    copy = Layers._copy
    Layers._copy = lambda self, *how: (copied.append(1), copy(self, *how))[1]  # type: ignore[method-assign]
    try:
        with_copies = trace(step, given, fzero.VirtualMesh(fsdp=2))
    finally:
        Layers._copy = copy  # type: ignore[method-assign]
    without = trace(step, given, fzero.VirtualMesh(fsdp=2), copies=False)
    is_equal = describe_trace(with_copies) == describe_trace(without)
    return Found("equal" if is_equal else "unequal", "", len(copied), nodes=len(without.graph.nodes))


def judge(folder: str) -> Found:
    """`compare`, with what it raised."""
    try:
        return compare(folder)
    except fzero.FzeroError as error:
        return Found("refused", " ".join(str(error).split())[:160])
    except tiny_models.UntriedError as error:
        return Found("untried", str(error)[:160])
    except Exception as error:
        return Found("raw", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")


def write(found: dict[str, Found]) -> str:
    """The page of what came of all models."""
    counts = Counter(each.outcome for each in found.values())
    copying = sum(each.outcome == "equal" and each.copies > 0 for each in found.values())
    caching = sum(each.outcome == "equal" and each.with_cache > 0 for each in found.values())
    lines = [
        "# Equal layers of transformers' models",
        "",
        f"`python tools/layer_copies.py --write`, transformers {transformers.__version__}, torch {torch.__version__}:",
        f"{counts['equal']} programs with copies of layers equal the ones without, {counts['unequal']} do not;",
        f"in {copying} of them layers were copied without a cache, in {caching} with the one that a model makes by",
        f"default. {counts['refused']} models are refused by name, {counts['raw']} fail with a raw error,",
        f"{counts['untried']} could not be made, or fail in plain torch.",
        "",
        "| folder | outcome | layers copied, of 6 | with a cache | nodes | why |",
        "|---|---|---|---|---|---|",
    ]
    rows = (
        f"| {name} | {x.outcome} | {x.copies} | {x.with_cache} | {x.nodes} | {x.why.replace('|', '/')} |"
        for name, x in found.items()
    )
    return "\n".join([*lines, *rows]) + "\n"


def _start() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    sizes = ((rule, LAYERS if "num_hidden_layers|num_layers" in rule else size) for rule, size in tiny_models.SIZES)
    tiny_models.SIZES = tuple(sizes)
    tiny_models._choose_layers = choose_layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--write", action="store_true", help="write docs/layer_copies.md")
    given = parser.parse_args()
    folders, found = given.folders or tiny_models.list_folders(), dict[str, Found]()
    with multiprocessing.get_context("spawn").Pool(1, _start, maxtasksperchild=20) as pool:
        for folder, each in zip(folders, pool.imap(judge, folders)):
            found[folder] = each
            print(folder, *each, flush=True)
    if given.write:
        PAGE.write_text(write(found), encoding="utf-8")


if __name__ == "__main__":
    main()
