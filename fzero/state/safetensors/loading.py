"""Loading: the leaves of a tree from safetensors files; each rank reads its own parts."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.arguments import check_arguments
from fzero.base.embeddings import is_embedding, mark_embedding
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.base.shapes import global_shape
from fzero.program.blockwise import Coding
from fzero.state.partition import partition
from fzero.state.publishing import remove_leftovers
from fzero.state.quantize import quantize_leaf
from fzero.state.safetensors.reading import open_safetensors
from fzero.state.sources import Source, TensorSource
from fzero.values.quantized import is_quantized, map_quantized_leaves
from fzero.values.sharded import Sharded

Files = str | os.PathLike[str] | Mapping[str, Source]
"""A path for `open_safetensors`, or the dict of sources that a function such as `open_safetensors` returned."""
Rename = Callable[[str], str | None]


@check_arguments
def load_safetensors(
    files: Files,
    like: tree.Tree,
    mesh: Any,
    *,
    rename: Rename | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    **how: Any,
) -> tree.Tree:
    """A tree of `Sharded` leaves with the shapes of `like` and the values of a safetensors file, index or directory.

    Each rank reads its own parts of the files, and holds these parts and a chunk. `files`, `like`, `rename`, `strict`
    and `dtype` are the arguments of `load_sources`; `how` are further keywords of `fzero.partition`.

        params, apply = fzero.lower(Model(device="meta"))
        params = fzero.load_safetensors("checkpoint/", params, mesh)

    What a save that was killed on this host left beside the files is removed.

    Raises:
        FzeroError: as `open_safetensors`, `load_sources` and `fzero.partition` do.
    """
    loaded = partition(load_sources(files, like, rename=rename, strict=strict, dtype=dtype), mesh, **how)
    if not isinstance(files, Mapping):
        remove_leftovers(Path(files) if os.path.isdir(files) else Path(files).parent, is_reader=True)
    return loaded


def load_sources(
    files: Files,
    like: tree.Tree,
    *,
    rename: Rename | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
) -> tree.Tree:
    """`like` with each leaf replaced by a source of the leaf's values in `files`. Reads no values.

    `files` is a path, as `open_safetensors` takes, or a dict of sources by key, of any file format. `like` is a tree of
    tensors with the expected shapes and dtypes, for example on the meta device. `rename(path)` returns the key of the
    leaf at a dotted path, by default the path itself. Several leaves may have one key. For None the files have no such
    leaf: then the leaf of `like` must have values, and stays.

    A source has the dtype of its leaf in `like`. `dtype` replaces the dtype of all floating-point leaves. With
    `strict=False`, keys without a leaf are skipped, and leaves without a key stay if they have values.

    A quantized leaf of `like` is in the files as codes and scales, or in full precision at its own path: then it is
    quantized while it is read.

    Raises:
        FzeroError: with every missing and every left-over key; for a leaf of another shape; for a leaf whose stored
            values would change their kind when cast, such as floating-point values to integers.
    """
    if dtype is not None:
        like = map_quantized_leaves(lambda leaf: leaf.read_as(dtype), like)
    where = "" if isinstance(files, Mapping) else str(files)
    sources: Mapping[str, Source] = files if isinstance(files, Mapping) else open_safetensors(files)
    leaves, treedef = tree.flatten(like, is_leaf=is_quantized)
    paths = tree.paths(like, is_leaf=is_quantized)
    exact = [is_quantized(x) and (rename(path) if rename else path) in sources for path, x in zip(paths, leaves)]
    whole = [_make_meta(x.coding) if is_exact else x for x, is_exact in zip(leaves, exact)]
    found = _find_sources(where, sources, tree.unflatten(treedef, whole), rename, strict, dtype)
    opened = tree.flatten(found, is_leaf=is_quantized)[0]
    rows = zip(paths, opened, leaves, exact)
    return tree.unflatten(
        treedef, [quantize_leaf(at, x, leaf.coding) if is_exact else x for at, x, leaf, is_exact in rows]
    )


def _make_meta(coding: Coding) -> Tensor:
    """A frozen tensor without values, of the shape and dtype of a quantized leaf."""
    empty = torch.empty(coding.shape, dtype=coding.dtype, device="meta")
    return torch.nn.Parameter(empty, requires_grad=False)


def _find_sources(
    where: str,
    sources: Mapping[str, Source],
    like: tree.Tree,
    rename: Rename | None,
    strict: bool,
    dtype: torch.dtype | None,
) -> tree.Tree:
    """`like` with each leaf replaced by a source among `sources`, which are in the files at `where`."""
    leaves, treedef = tree.flatten(like)
    paths = tree.paths(like)
    for path, leaf in zip(paths, leaves):
        if not isinstance(getattr(leaf, "dtype", None), torch.dtype):
            raise FzeroError(path, f"is a {type(leaf).__name__}, not a tensor", "keep only tensors in the tree")
    keys = [rename(path) if rename else path for path in paths]
    kept = [_keeps_values(key, leaf, sources, strict) for key, leaf in zip(keys, leaves)]
    missing = {path: key for path, key, stays in zip(paths, keys, kept) if key not in sources and not stays}
    surplus = [key for key in sources.keys() - set(keys) if strict]
    if missing or surplus:
        raise _mismatch_error(where, missing, sorted(surplus))
    chosen = [None if key is None else sources.get(key) for key in keys]
    rows = zip(leaves, paths, chosen)
    return tree.unflatten(treedef, [mark_embedding(_leaf(*row, dtype), is_embedding(row[0])) for row in rows])


def _keeps_values(key: str | None, leaf: Any, sources: Mapping[str, Source], strict: bool) -> bool:
    """Whether a leaf stays with the values that it has in `like`."""
    if key in sources or (strict and key is not None):
        return False
    return isinstance(leaf, Tensor) and not isinstance(leaf, Sharded) and not leaf.is_meta


def _leaf(leaf: Tensor, path: str, source: Source | None, dtype: torch.dtype | None) -> Source:
    """The source of one leaf: the file's tensor, or the leaf's own values where the files have none."""
    target = dtype if dtype is not None and leaf.dtype.is_floating_point else leaf.dtype
    if source is None:
        return TensorSource(leaf, path, target, is_frozen(leaf))
    home, stored = getattr(source, "where", source), getattr(source, "stored", source.dtype)
    if tuple(source.shape) != global_shape(leaf):
        problem = f"has shape {list(source.shape)} in {home}, {list(global_shape(leaf))} in the tree"
        raise FzeroError(path, problem, "give the tree of the model that was saved, or rename the leaf to another key")
    if not torch.can_cast(stored, target):
        raise FzeroError(path, f"is {stored} in {home}, {target} in the tree", "cast the file or `like`")
    named: Any = copy.copy(source)  # reads the same values; errors name the leaf
    named.path, named.dtype, named.is_frozen = path, target, is_frozen(leaf)
    return named


def _mismatch_error(where: str, missing: Mapping[str, str | None], surplus: list[str]) -> FzeroError:
    problems = []
    if missing:
        names = (path if key in (path, None) else f"{path} (as {key!r})" for path, key in missing.items())
        problems.append(f"leaves without values ({len(missing)}): {', '.join(names)}")
    if surplus:
        problems.append(f"keys without a leaf ({len(surplus)}): {', '.join(map(repr, surplus))}")
    way_out = (
        "rename(path) gives the key of a leaf; with strict=False left-over keys are skipped, and missing leaves stay "
        "as they are in the tree where they have values"
    )
    has_config = (Path(where) / "config.json").is_file() or (Path(where).parent / "config.json").is_file()
    if where and missing and (surplus or has_config):
        call = f"fzero.checkpoint.load_hf(folder, params, mesh{'' if has_config else ', model_or_config=model'})"
        way_out += f"; {call} renames, splits and joins what transformers saved, and knows the keys of older releases"
        way_out += "; fzero.hf.from_pretrained(folder, mesh) makes the model as well" * has_config
    return FzeroError(where, "; ".join(problems), way_out)
