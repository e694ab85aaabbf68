"""Hugging Face: a sharded tree as a folder that `from_pretrained` reads, and such a folder as a sharded tree."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.shapes import global_shape
from fzero.base.sizes import parse_size
from fzero.files import load
from fzero.formats.inner import Inner
from fzero.formats.rearranged import Rearranged, RearrangedSource
from fzero.formats.transformers_models import (
    Model,
    find_class,
    make_model,
    name_leaves,
    plan_files,
    plan_leaves,
    read_config,
    render_configs,
    split_files,
)
from fzero.layout.chunks import chunks
from fzero.layout.strides import Copy, compose, dense, view_to_view, within
from fzero.ranks.ranks import Ranks
from fzero.state.fill import CHUNK_NBYTES, chunk_numel
from fzero.state.partition import partition
from fzero.state.publishing import find_common_ranks
from fzero.state.safetensors import load_sources, open_safetensors
from fzero.state.safetensors.header import Header, plan_header
from fzero.state.safetensors.loading import Rename
from fzero.state.safetensors.saving import (
    check_paths,
    choose_part,
    list_origins,
    list_parts,
    name_value,
)
from fzero.state.safetensors.writing import FilePiece, WritePlan, write
from fzero.state.sources import Source, TensorSource, source_of
from fzero.values.quantized import is_quantized
from fzero.values.sharded import Sharded

INDEX = "model.safetensors.index.json"
METADATA = {"format": "pt"}
Values = dict[str, Sharded | Source | Inner]


@check_arguments
def export_hf(
    path: str | os.PathLike[str],
    params: tree.Tree,
    model_or_config: Any,
    *,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    chunk: int = CHUNK_NBYTES,
) -> None:
    """Write the parameters of a model of transformers as a folder that `from_pretrained` reads: the files that
    `model.save_pretrained(path, max_shard_size=max_shard_size)` writes, byte for byte.

        params, apply = fzero.lower(model)
        ...
        fzero.checkpoint.export_hf("out", params, model, dtype=torch.bfloat16)

    All ranks of the mesh call `export_hf` together, on a filesystem that they share. Each rank writes the parts that it
    holds, and holds a chunk beside them; nothing is gathered. `params` is the tree of `fzero.lower` or `fzero.build`.
    `rename(path)` returns the model's name for a leaf of another tree, or None for a leaf that is no part of the model.
    The model may be on the meta device: only buffers that `params` lacks are taken from it. In place of the model, its
    config will do where `config.architectures` names the class.

    `dtype` casts floating-point leaves while they are written. A file has at most `max_shard_size` bytes of tensors:
    a number, or a text such as "500MB". The folder appears when it is complete; before, it has another name beside
    `path`.

    Raises:
        FzeroError: for a folder that exists; for a tree that is not that of the model, naming the leaf; for a tensor
            larger than `max_shard_size`; for a conversion that computes values; on every rank, naming the rank that
            failed, when a rank cannot write. After an error nothing new is there.
    """
    given = zip([rename(at) if rename else at for at in tree.paths(params)], tree.leaves(params))
    named = [(name, leaf) for name, leaf in given if name is not None]
    on = find_common_ranks((name, _holder(leaf)) for name, leaf in named)

    def make_plan() -> WritePlan:
        check_paths(name for name, _ in named)
        return plan_export(dict(named), model_or_config, dtype, parse_size("max_shard_size", max_shard_size), on)

    write(Path(path), make_plan, on, chunk, "export_hf")


def plan_export(
    leaves: Mapping[str, Any], model_or_config: Any, dtype: torch.dtype | None, limit: int, on: Ranks
) -> WritePlan:
    """What the ranks write to export the leaves of a model, given by name, in files of at most `limit` bytes."""
    model = make_model(model_or_config)
    given = {name: leaf if isinstance(leaf, Inner) else name_value(name, leaf) for name, leaf in leaves.items()}
    values = _complete(given, model)
    dtypes = {name: _cast(value.dtype, dtype) for name, value in values.items()}
    tensors = plan_files(model, dtypes)
    files = split_files(tensors, limit)
    headers = {file: plan_header({key: tensors[key] for key in keys}, METADATA) for file, keys in files.items()}
    texts = render_configs(model, next((x for x in dtypes.values() if x.is_floating_point), torch.float32))
    if len(files) > 1:
        texts[INDEX] = _render_index(model, headers)
    pieces = list(plan_pieces(values, tensors, headers, on))
    return WritePlan(headers, pieces, list_origins(map(_holder, leaves.values())), texts)


@check_arguments
def load_hf(
    path: str | os.PathLike[str],
    like: tree.Tree,
    mesh: Any,
    *,
    model_or_config: Any = None,
    rename: Rename | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    **how: Any,
) -> tree.Tree:
    """A tree of `Sharded` leaves with the shapes of `like` and the values of a folder in Hugging Face's format. Keys of
    older releases are renamed, and tensors split and joined, as `from_pretrained` does it.

        config = AutoConfig.from_pretrained("folder")
        params, apply = fzero.build(lambda: AutoModelForCausalLM.from_config(config), mesh)
        params = fzero.checkpoint.load_hf("folder", params, mesh)

    `like` is a tree of tensors, on the meta device or not, or of `Sharded` leaves; only shapes and dtypes count. Each
    rank reads its own parts of the files, and holds these parts and a chunk. The folder's `config.json` names the class
    of the model; `model_or_config` replaces it, for example by a model with another head. `rename(path)` returns the
    model's name for a leaf of `like`, by default the path. `strict` and `dtype` are those of `fzero.load_safetensors`,
    and `how` are further keywords of `fzero.partition`.

    Raises:
        FzeroError: for a folder without safetensors files or configuration; for keys that the model has no place for,
            with `strict`; for weights that are one leaf of `like` and differ in the files; as `fzero.load_safetensors`
            does.
    """
    wanted = {rename(at) if rename else at for at in tree.paths(like, is_leaf=is_quantized)}
    sources = open_hf(path, wanted, model_or_config, strict)
    return partition(load_sources(sources, like, rename=rename, strict=strict, dtype=dtype), mesh, **how)


def open_hf(
    path: str | os.PathLike[str], wanted: Container[str | None], model_or_config: Any, strict: bool
) -> dict[str, Source]:
    """The leaves of the model in a folder by name: of the names of a tied leaf those that are `wanted`. Reads headers,
    and the values of weights that are tied and are in the files twice.

    Raises:
        FzeroError: as `load_hf`.
    """
    files = open_safetensors(path)
    if model_or_config is None:
        config = read_config(Path(path))
        cls = find_class(config)
    else:
        model = make_model(model_or_config)
        config, cls = model.config, type(model)
    leaves = plan_leaves(cls, config, files, str(path), strict)

    def open_leaf(name: str) -> Source:
        return RearrangedSource(name, leaves.tensors[name], files)

    sources = {name: open_leaf(name) for name in leaves.choose_names(wanted)}
    for first, second in leaves.doubles:
        spare = [name for name in (first, second) if name not in wanted]
        if len(spare) == 1:  # `like` has one leaf for both
            _check_tie(open_leaf(first), open_leaf(second), str(path))
            sources.pop(spare[0], None)
    return sources


def _check_tie(first: Source, second: Source, folder: str) -> None:
    """Raise for two values that differ. A model has both in one leaf."""
    for piece in chunks(first.shape.numel(), chunk_numel(CHUNK_NBYTES, first.dtype, second.dtype)):
        values = [torch.empty(len(piece), dtype=source.dtype, device="cpu") for source in (first, second)]
        for source, out in zip((first, second), values):
            source.read(piece.start, out)
        if not torch.equal(*values):
            problem = f"is tied to {second.path} by the configuration, and has other values than it in {folder}"
            raise FzeroError(first.path, problem, "set tie_word_embeddings=False in the config, and give the model")


def _cast(dtype: torch.dtype, to: torch.dtype | None) -> torch.dtype:
    if to is not None and not to.is_floating_point:
        raise FzeroError("dtype", f"is {to}, not a floating-point dtype", "give torch.bfloat16, for example, or none")
    return to if to is not None and dtype.is_floating_point else dtype


def _complete(values: Values, model: Model) -> Values:
    """`values` and the model's persistent buffers that are not among them.

    Raises:
        FzeroError: for leaves that the model lacks, or has in another shape; for parameters without a leaf.
    """
    buffers = dict(model.named_buffers())
    leaves = {**dict(model.named_parameters()), **buffers}
    expected = {path: leaves[path] for path in dict.fromkeys(name_leaves(model).values())}
    name = type(model).__name__
    surplus = [path for path in values if path not in expected]
    missing = [path for path, x in expected.items() if path not in values and (path not in buffers or x.is_meta)]
    if surplus or missing:
        problems = [f"leaves that {name} lacks ({len(surplus)}): {', '.join(surplus[:8])}"] if surplus else []
        problems += [f"no leaf for ({len(missing)}): {', '.join(missing[:8])}"] if missing else []
        way_out = "give the tree that fzero.lower or fzero.build returned for the model, or `rename` another tree"
        raise FzeroError((surplus + missing)[0], "; ".join(problems), way_out)
    for path, value in values.items():
        shape = global_shape(value)
        if shape != expected[path].shape:
            problem = f"has shape {list(shape)}, {name} has {list(expected[path].shape)}"
            raise FzeroError(path, problem, "give the model that was lowered, with its configuration")
    return {path: values[path] if path in values else source_of(x, path) for path, x in expected.items()}


def _render_index(model: Model, headers: Mapping[str, Header]) -> bytes:
    metadata = {
        "total_parameters": model.num_parameters(),
        "total_size": sum(header.nbytes for header in headers.values()),
    }
    weights = {key: name for name, header in headers.items() for key in header.entries}
    index = {"metadata": metadata, "weight_map": weights}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def plan_pieces(
    values: Values, tensors: Mapping[str, Rearranged], headers: Mapping[str, Header], on: Ranks
) -> Iterator[FilePiece]:
    """The pieces that this process writes of tensors that are made of leaves. All ranks of a mesh together write each
    byte once."""
    for name, header in headers.items():
        for key, entry in header.entries.items():
            for path, copy in tensors[key].pieces(key):
                for held, part, of_part in _list_parts(values[path], path, copy, on):
                    for mine in within(of_part, part):
                        offset = entry.span.start + mine.target * entry.dtype.itemsize
                        yield _plan_piece(held, mine, part.start, entry.dtype, path)._replace(offset=offset, file=name)


def _holder(leaf: Any) -> Any:
    """The leaf that has the elements of a value."""
    return leaf.leaf if isinstance(leaf, Inner) else leaf


def _list_parts(
    value: Sharded | Source | Inner, path: str, copy: Copy, on: Ranks
) -> Iterator[tuple[Tensor, range, Copy]]:
    """The elements of a leaf that this process writes, 1-d, which they are in the leaf, and the copy of these. Of a
    split leaf, those of each part, and the copies of a part's elements."""
    if isinstance(value, Inner):
        for inside in value.copies:
            for each in compose(inside, copy):
                yield from _list_parts(value.leaf, path, each, on)
    elif isinstance(value, Sharded) and value.form.layout.splits > 1:
        for held, part, to_whole in list_parts(value, on):
            yield from ((load(held), part, each) for each in compose(to_whole, copy))
    else:
        yield _flatten(value, path), choose_part(value, on) or range(0), copy


def _flatten(value: Sharded | Source, path: str) -> Tensor:
    """The elements that this process has of a leaf, 1-d."""
    if isinstance(value, Sharded):
        return value.local.detach().view(-1)
    if not isinstance(value, TensorSource):
        raise FzeroError(path, f"is a {type(value).__name__}", "partition the tree first")
    return value.tensor.reshape(-1)


def _plan_piece(flat: Tensor, copy: Copy, start: int, dtype: torch.dtype, path: str) -> FilePiece:
    """The piece of a copy whose source elements are in `flat`, which begins at element `start`: its values come in the
    order of the file."""
    dims = copy.swap().dims
    sizes = [dim.size for dim in dims]
    values = flat.as_strided(sizes, [dim.target for dim in dims], flat.storage_offset() + copy.source - start)
    (places,) = view_to_view(sizes, dense(sizes), [dim.source for dim in dims])
    return FilePiece(0, TensorSource(values, path, dtype), places=places)
