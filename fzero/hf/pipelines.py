"""Pipelines: a model of transformers whose layers are stages on ranks, as parameters in slices and its function."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from fzero import checkpoint, lower, partition, tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh, mesh_shape
from fzero.hf.equal_layers import EqualLayers, find_layers
from fzero.hf.sharing import find_cuts, find_sharing, share_forwards
from fzero.hf.stacks import Stack, open_stack, unstack
from fzero.hf.stages import Depth, StagedLayers, replace_layers
from fzero.hf.styles import Axis
from fzero.hf.wishes import Wish
from fzero.values.lowering import Apply


def make_stages(
    model: nn.Module, mesh: Any, wish: Wish, pp: Axis, num_microbatches: int | None, how: dict[str, Any]
) -> tuple[tree.Tree, Apply]:
    """`(params, apply)` of a model whose layers are stages along `pp`. `how` are keywords of `fzero.partition`.

    Raises:
        FzeroError: as `fzero.hf.parallel`.
    """
    sizes = mesh_shape(mesh)
    names = _check_axis(sizes, wish, pp)
    ranks = sizes.size(sizes.join(names))
    count = ranks if num_microbatches is None else num_microbatches
    if count < 1:
        raise FzeroError("num_microbatches", f"is {count}", "give 1 or more, such as the ranks along pp")
    layers = find_layers(model, ranks, pp)
    sharing = find_sharing(model, wish, mesh, pp)
    stacks, axes = _stack_leaves(layers, find_cuts(model, sharing.rules), names, ranks, sizes)
    with share_forwards(model, sharing), replace_layers(model, layers, StagedLayers(layers, stacks, Depth(pp, count))):
        params, apply = lower(model)
    held = {f"{layers.name}.{path}": path for path in stacks}
    given = [dict(layer.named_parameters()) for layer in layers.modules]

    def fill(path: str, leaf: Any) -> Any:
        if path not in held:
            return leaf
        return open_stack(stacks[held[path]], [each[held[path]] for each in given], path)

    split = {path: (axes[inner], 0) for path, inner in held.items()}
    split |= {rule: cut for rule, cut in sharing.split.items() if not rule.startswith(f"{layers.name}.")}
    return partition(tree.map_with_path(fill, params), mesh, split=split, **how), apply


def _check_axis(mesh: VirtualMesh, wish: Wish, pp: Axis) -> tuple[str, ...]:
    """The names of the axis along which ranks have stages, in the order of the mesh.

    Raises:
        FzeroError: for an axis that the mesh lacks, over which all state is cut, or whose ranks share layers; for one
            behind these in the mesh; beside parts of a sequence and tokens that go to experts.
    """
    joined = mesh.join((pp,) if isinstance(pp, str) else pp)
    names = mesh.split(joined)
    others = {axis: mesh.split(name) for axis, name in wish.find_axes(mesh).items()}
    for word, is_given in (("sp", wish.sp is not None), ("capacity", wish.sends)):
        if is_given:
            raise FzeroError(f"pp={pp!r}", f"is given beside {word}, and stages do not have it", f"leave {word} out")
    if set(mesh.shard_axes).intersection(names):
        way_out = 'give the mesh an axis "fsdp" besides, of one rank if need be'
        raise FzeroError(f"pp={pp!r}", f"is an axis over which {mesh} cuts all state", way_out)
    for axis, taken in others.items():
        if set(names).intersection(taken):
            raise FzeroError(f"pp={pp!r}", f"is {axis!r} too", "give the mesh an axis besides for stages")
        if mesh.names.index(names[-1]) > mesh.names.index(taken[0]):
            raise FzeroError(f"pp={pp!r}", f"is behind {axis!r} in {mesh}", f"give the mesh {pp!r} before {axis!r}")
    return names


def _stack_leaves(
    layers: EqualLayers, cuts: dict[str, Any], names: tuple[str, ...], ranks: int, mesh: VirtualMesh
) -> tuple[dict[str, Stack], dict[str, tuple[str, ...]]]:
    """For each leaf of a layer its stack, and the axes over which that is split.

    Raises:
        FzeroError: for a leaf that is tied to one outside of its layer, and for one of which ranks have other parts in
            another layer; for a dim that the ranks do not divide.
    """
    stacks: dict[str, Stack] = {}
    axes: dict[str, tuple[str, ...]] = {}
    for path, leaf in layers.modules[0].named_parameters():
        full = [f"{layers.name}.{number}.{path}" for number in range(len(layers.modules))]
        tied = next((name for name in full if name not in cuts), None)
        if tied is not None:
            raise FzeroError(tied, "is one leaf with another of the model", "leave pp out: a stage has its own leaves")
        (cut,) = {cuts[full[0]]}
        odd = next((name for name in full if cuts[name] != cut), None)
        if odd is not None:
            raise FzeroError(
                odd, f"is split as {cuts[odd]}, and in layer 0 as {cut}", "give all layers one rule of plan="
            )
        stack, axes[path] = Stack(tuple(leaf.shape), len(full), ranks), names
        if cut is not None:
            along = mesh.split(mesh.join((cut[0],) if isinstance(cut[0], str) else cut[0]))
            each, dim = mesh.size(mesh.join(along)), cut[1] % leaf.ndim
            if leaf.shape[dim] % (each * cut[2]):
                problem = f"has {leaf.shape[dim]} elements along dim {dim}, for {cut[2]} parts on {each} ranks"
                raise FzeroError(full[0], problem, "take a number of ranks that divides, or plan= other rules")
            stack, axes[path] = stack._replace(ranks=each, dim=dim, parts=cut[2]), (*names, *along)
        stacks[path] = stack
    return stacks, axes


@check_arguments
def save_pretrained(folder: str | os.PathLike[str], params: tree.Tree, model: nn.Module, **how: Any) -> None:
    """Write parameters of `fzero.hf.parallel` as a folder that `from_pretrained` reads: with whole tensors, and the
    names of the plain model, as `model.save_pretrained(folder)` does.

    All ranks of the mesh call together. Each writes its own parts; nothing is gathered. Of stacks along `pp` each layer
    is written by its name. `model` may be on the meta device. `how` are keywords of `fzero.checkpoint.export_hf`.

    Raises:
        FzeroError: for a folder that exists; for a leaf that the model does not have; as `export_hf`.
    """
    checkpoint.export_hf(folder, unstack(params, model), model, **how)
