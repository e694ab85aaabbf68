"""Foreign: sources from files or state dicts of others, as parameters and as the state of Adam."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fzero import optim
from fzero.base import tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.state.partition import partition
from fzero.state.safetensors.loading import Rename, load_sources
from fzero.state.sources import Source, TensorSource
from fzero.values.sharded import Sharded

MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
"""Adam's running means by their names in fzero's state, and by torch's."""
OF_ADAM = (*MOMENTS.values(), "max_exp_avg_sq")
COUNT, KEPT = "count", "kept"
ROLES: dict[type, dict[str, str]] = {
    optim.ScaleByAdamState: MOMENTS | {"count": COUNT},
    optim.ScaleByScheduleState: {"count": COUNT},
    optim.InjectHyperparamsState: {"count": COUNT, "hyperparams": KEPT},
    optim.ClipState: {"failed": KEPT},
    optim.ApplyIfFiniteState: dict.fromkeys(("notfinite_count", "last_finite", "total_notfinite"), KEPT),
}
"""What the parts of an optimizer's state are. Numbers that are kept say what became of earlier steps, or are set by
hand: torch's optimizers have none of them."""
WRAPPERS = (optim.MaskedState, optim.MultiTransformState, optim.EmptyState)


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
    or `rename(path)`. Hyperparameters are not state: give them to the optimizer. The optimizer may be a chain, with
    clipping and schedules, or stand in `masked`, `multi_transform`, `apply_if_finite` or `inject_hyperparams`. Numbers
    that only these have stay as they are in `like`.

        optimizer = fzero.optim.adamw(3e-4)
        opt_state = load_adam(sources, optimizer.init(params), mesh, prefix="optim.state.")

    `how` are keywords of `fzero.partition`. All ranks of the mesh call `load_adam` together.

    Raises:
        FzeroError: as `load_params`; for state that Adam does not have, such as the largest mean of AMSGrad; where
            parameters have made different numbers of steps.
    """
    keys, counts, names = dict[str, str](), dict[str, torch.dtype](), list[str]()
    found = dict[str, Source]()
    roles = dict(_list_roles(like, ()))
    for key, leaf in zip(tree.keys(tree.flatten(like)[1]), tree.leaves(like)):
        path, at = tree.dotted(key), next(at for at in range(len(key) + 1) if key[:at] in roles)
        role = roles[key[:at]]
        if role in MOMENTS.values():
            name = tree.dotted(key[at:])
            name = name if rename is None else rename(name) or ""
            keys[path] = f"{name}.{role}"
            names.append(name)
        elif role == COUNT:
            keys[path], counts[path] = f"count of {path}", leaf.dtype
        elif role == KEPT:
            keys[path] = f"{path} of a new state"
            found[keys[path]] = _open_number(path, leaf)
        else:
            problem = f"is no part of Adam's state, but of {role}"
            raise FzeroError(path, problem, "give the state of an optimizer around scale_by_adam")
    here = _select(sources, prefix)
    found |= {key: source for key, source in here.items() if key.rpartition(".")[2] in OF_ADAM}
    if counts:
        step = _read_step(here, dict.fromkeys(names))
        found |= {keys[path]: TensorSource(torch.tensor(step, dtype=dtype)) for path, dtype in counts.items()}
    return partition(load_sources(found, like, rename=keys.__getitem__), mesh, **{"like": like} | how)


def _list_roles(node: Any, key: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """What the parts of a state are, by the keys that lead to them: a running mean of Adam's, a count of steps, numbers
    that stay as they are in a new state, or the name of a class that is not Adam's."""
    kind = type(node)
    if hasattr(node, "_fields"):
        for name, part in zip(node._fields, node):
            if role := ROLES.get(kind, {}).get(name):
                yield (*key, name), role
            elif isinstance(part, Tensor) or (kind not in ROLES and kind not in WRAPPERS):
                yield (*key, name), kind.__name__
            else:
                yield from _list_roles(part, (*key, name))
    elif isinstance(node, (tuple, list, Mapping)):
        for name, part in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _list_roles(part, (*key, name))
    else:
        yield key, f"a {kind.__name__}"


def _open_number(path: str, leaf: Any) -> Source:
    """A number that a new state has."""
    values = leaf.local if isinstance(leaf, Sharded) else leaf
    if values.is_meta:
        problem = "is on the meta device, and Adam's state of others does not have it"
        raise FzeroError(path, problem, "give optimizer.init(params) of parameters with values")
    return TensorSource(values, path)


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
