"""Merging: adapters become part of their base model, whose weights stay in slices. One module is whole at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fzero import lower, partition, tree, unpartition
from fzero.base.embeddings import is_embedding
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.base.shapes import global_shape
from fzero.hf.adapters import fill_model, has_adapters, refuse_virtual_tokens
from fzero.layout.layout import Layout
from fzero.ranks.ranks import Ranks
from fzero.state.sources import Source, check_range
from fzero.state.unpartition import SourceOfSharded
from fzero.training.models import copy_without_values
from fzero.values.quantized import is_quantized

Leaves = Mapping[str, Any]
"""Path -> a `Sharded` or `Quantized` leaf of a model."""


def merge_adapters(model: Any, params: tree.Tree, mesh: Any) -> tuple[nn.Module, tree.Tree]:
    """`(base model without values, its parameters in slices)` of a model of peft: what `model.merge_and_unload()` of
    peft returns for these parameters. Codes become numbers. Of a model without adapters, its own parameters.

    All ranks call together. A rank holds its slices, and one module that has adapters, of which peft's own code makes
    the merged weights.

    Raises:
        FzeroError: for virtual tokens, for adapters of two modules that share a weight, and where peft does not merge.
    """
    held = list_leaves(params)
    if not has_adapters(model):
        return copy_without_values(model), dequantize_leaves(params, mesh)
    refuse_virtual_tokens(model, "merge_and_unload", "save_pretrained(folder): no weight of the base model changed")
    if not hasattr(model, "unload"):
        kind = model.active_peft_config.peft_type
        problem = f"{type(model).__name__} has adapters of {kind}, which peft does not merge"
        raise FzeroError("merge_and_unload", problem, "save_pretrained(folder) writes the adapters as they are")
    empty: Any = copy_without_values(model)
    paths = {id(x): path for path, x in empty.named_parameters()}
    units = _list_units(empty.get_base_model())
    made = {name: _collect(name, unit, held, paths) for name, unit in units.items()}
    base = empty.unload()
    merged: dict[int, Callable[[], Tensor]] = {}
    for name, compute in made.items():
        for local, x in base.get_submodule(name).named_parameters():
            if id(x) in merged:
                problem = "has adapters of two modules that share it, and peft adds both to one weight"
                raise FzeroError(f"{name}.{local}", problem, "merge with peft, or adapt one of the two modules")
            merged[id(x)] = functools.partial(_take, compute, local)
    _untie(base)

    def find_source(path: str, like: Any) -> Source:
        key = id(base.get_parameter(path))
        return _Computed(path, like, merged[key]) if key in merged else _open(path, held[paths[key]])

    return base, partition(tree.map_with_path(find_source, lower(base)[0]), mesh)


def dequantize_leaves(params: tree.Tree, mesh: Any) -> tree.Tree:
    """Parameters in slices, with numbers in the place of codes. All ranks call together."""
    leaves, treedef = tree.flatten(params, is_leaf=is_quantized)
    if not any(map(is_quantized, leaves)):
        return params
    sources = [_open(path, leaf) for path, leaf in list_leaves(params).items()]
    return partition(tree.unflatten(treedef, sources), mesh)


def list_leaves(params: tree.Tree) -> dict[str, Any]:
    """Path -> leaf of a tree, in order. A quantized leaf is one."""
    leaves, _ = tree.flatten(params, is_leaf=is_quantized)
    return dict(zip(tree.paths(params, is_leaf=is_quantized), leaves))


def _list_units(base: nn.Module) -> dict[str, Any]:
    """The modules that peft unloads, by their paths: the outermost that adapters are in."""
    units: dict[str, Any] = {}
    for path, module in base.named_modules():
        is_unit = hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer")
        if is_unit and not any(path.startswith(f"{outer}.") for outer in units):
            units[path] = module
    return units


def _collect(name: str, unit: nn.Module, held: Leaves, paths: Mapping[int, str]) -> Callable[[], nn.Module]:
    """A function that all ranks call together, and that returns a unit of `_list_units` as a whole, merged module. It
    raises an `FzeroError` for adapters that peft does not merge."""
    given = {local: held[paths[id(x)]] for local, x in unit.named_parameters()}

    def merge() -> nn.Module:
        whole = {local: x.full_tensor() if is_quantized(x) else x for local, x in unpartition(given).items()}
        filled: Any = fill_model(unit, whole)
        try:
            with torch.no_grad():
                if hasattr(filled, "unload_and_optionally_merge_module"):
                    how: dict[str, Any] = {"merge": True, "safe_merge": False, "adapter_names": None}
                    return filled.unload_and_optionally_merge_module(**how)
                filled.merge()
                return filled.get_base_layer()
        except (RuntimeError, ValueError, NotImplementedError) as error:  # such as lora_bias without a bias below
            way_out = "save_model(folder) writes the adapters as they are, for PeftModel.from_pretrained"
            raise FzeroError(name, f"peft does not merge it: {error}", way_out) from error

    return merge


def _take(compute: Callable[[], nn.Module], name: str) -> Tensor:
    return compute().get_parameter(name)


def _untie(base: Any) -> None:
    """Note in a configuration, as peft does, that the head is no longer the embedding."""
    config: Any = getattr(base, "config", None)
    if getattr(config, "tie_word_embeddings", False):
        head = base.get_output_embeddings()
        config.tie_word_embeddings = head is None or head.weight is base.get_input_embeddings().weight


def _open(path: str, leaf: Any) -> Source:
    """The source of the values of a leaf in slices."""
    if not is_quantized(leaf):
        return SourceOfSharded(leaf)
    return _Computed(path, leaf, lambda: unpartition(leaf).full_tensor())  # whole, where it is split, too


class _Computed:
    """The source of a whole tensor that all ranks compute together, where its slices are filled."""

    def __init__(self, path: str, like: Any, compute: Callable[[], Tensor]) -> None:
        self.path, self.shape, self._compute = path, torch.Size(global_shape(like)), compute
        self.dtype = like.dtype
        self.is_frozen, self.is_embedding = is_frozen(like), is_embedding(like)

    def read(self, start: int, out: Tensor) -> None:
        where = check_range(self, start, out)
        out.copy_(self._compute().detach().reshape(-1)[where.start : where.stop])

    def fingerprint(self) -> bytes:
        """Nothing: one rank alone cannot compute the values."""
        return b""

    def fill(self, on: Ranks, out: Tensor, layout: Layout, leaf: int, chunk: int) -> None:
        """Fill `out`, this rank's part of the leaf in a layout, 1-d. All ranks of the mesh call together."""
        mine = layout.part(leaf, layout.rank_of(on))
        out.copy_(self._compute().detach().reshape(-1)[mine.start : mine.stop])
