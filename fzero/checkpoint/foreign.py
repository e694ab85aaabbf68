"""Foreign: sources from files or state dicts of others, as parameters and as the state of Adam."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fzero.base import tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.state.partition import partition
from fzero.state.safetensors.loading import Rename, load_sources
from fzero.state.sources import Source, TensorSource

MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
"""Adam's running means by their names in fzero's state, and by torch's."""
OF_ADAM = (*MOMENTS.values(), "max_exp_avg_sq")


@check_arguments
def load_params(
    sources: Mapping[str, Source],
    like: tree.Tree,
    mesh: Any,
    *,
    prefix: str = "",
    rename: Rename | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    **how: Any,
) -> tree.Tree:
    """A tree of `Sharded` leaves with the shapes of `like` and the values of `sources`. Each rank reads its own parts.

    `sources` are what `open_dcp`, `open_deepspeed` or `open_state_dict` returned. Of these, only keys that start with
    `prefix` count, without the prefix. `rename(path)` returns the key of the leaf at a dotted path, by default the path
    itself. `like`, `strict` and `dtype` are as in `fzero.load_safetensors`; `how` are keywords of `fzero.partition`.

        params, apply = fzero.lower(Model(device="meta"))
        params = load_params(open_dcp("run/step-1000"), params, mesh, prefix="model.")

    All ranks of the mesh call `load_params` together.

    Raises:
        FzeroError: with every missing and every left-over key; for a leaf of another shape or of another kind of dtype;
            where a file is missing or damaged, with leaf and file.
    """
    return partition(
        load_sources(_select(sources, prefix), like, rename=rename, strict=strict, dtype=dtype), mesh, **how
    )


@check_arguments
def load_adam(
    sources: Mapping[str, Source],
    like: tree.Tree,
    mesh: Any,
    *,
    prefix: str = "",
    rename: Rename | None = None,
    **how: Any,
) -> tree.Tree:
    """The state of `fzero.optim.adamw`, or of another optimizer around `scale_by_adam`, from that of torch's Adam.

    `like` is `optimizer.init(params)` of partitioned parameters. Running means come from "NAME.exp_avg" and
    "NAME.exp_avg_sq", and step counts from "NAME.step", each behind `prefix`. NAME is the dotted path of the parameter,
    or `rename(path)`. Hyperparameters are not state: give them to the optimizer.

        optimizer = fzero.optim.adamw(3e-4)
        opt_state = load_adam(sources, optimizer.init(params), mesh, prefix="optim.state.")

    `how` are keywords of `fzero.partition`. All ranks of the mesh call `load_adam` together.

    Raises:
        FzeroError: as `load_params`; for state that Adam does not have, such as the largest mean of AMSGrad; where
            parameters have made different numbers of steps.
    """
    keys, counts, names = dict[str, str](), dict[str, torch.dtype](), list[str]()
    for key, leaf in zip(tree.keys(tree.flatten(like)[1]), tree.leaves(like)):
        path, at = tree.dotted(key), next((i for i, part in enumerate(key) if part in MOMENTS), None)
        if at is not None:
            name = tree.dotted(key[at + 1 :])
            name = name if rename is None else rename(name) or ""
            keys[path] = f"{name}.{MOMENTS[str(key[at])]}"
            names.append(name)
        elif key[-1:] == ("count",) and not leaf.shape:
            keys[path], counts[path] = f"count of {path}", leaf.dtype
        else:
            problem = "is no part of Adam's state: a running mean or a count of steps"
            raise FzeroError(path, problem, "give the state of an optimizer around scale_by_adam")
    here = _select(sources, prefix)
    found = {key: source for key, source in here.items() if key.rpartition(".")[2] in OF_ADAM}
    if counts:
        step = _read_step(here, dict.fromkeys(names))
        found |= {keys[path]: TensorSource(torch.tensor(step, dtype=dtype)) for path, dtype in counts.items()}
    return partition(load_sources(found, like, rename=keys.__getitem__), mesh, **{"like": like} | how)


def _select(sources: Mapping[str, Source], prefix: str) -> dict[str, Source]:
    """The sources whose keys start with a prefix, by key without it."""
    return {key.removeprefix(prefix): source for key, source in sources.items() if key.startswith(prefix)}


def _read_step(sources: Mapping[str, Source], names: Iterable[str]) -> int:
    """The steps that all of these parameters have made."""
    found = dict[float, str]()
    for name in names:
        if (source := sources.get(f"{name}.step")) is None:
            raise FzeroError(name, f"has no key '{name}.step' among {len(sources)}", "give prefix and rename")
        out = torch.empty(1, dtype=torch.float64)
        source.read(0, out)
        found.setdefault(out.item(), name)
    if len(found) != 1 or not next(iter(found)).is_integer():
        problem = "made " + ", ".join(f"{step:g} steps ({name})" for step, name in found.items())
        raise FzeroError("count", problem, "Adam's state has one count: partition such parameters apart")
    return int(next(iter(found)))
