"""Pytrees: optree with fixed options, leaves named by their paths, split and merge by predicate.

A tree is any nesting of dicts, lists, tuples, NamedTuples and registered classes; `None` is an empty node. Dict entries
are visited in sorted order of their keys, those of a `UserDict` in the order of insertion. A class is registered with
torch's pytree, as the outputs of transformers' models are, or with optree under the namespace "fzero". Caches and
batches of transformers are trees too.
"""

from __future__ import annotations

import functools
import threading
from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
from torch import Size, Tensor

from fzero.base import hugging_face, torch_private
from fzero.base.errors import FzeroError

Tree = Any
TreeDef = optree.PyTreeSpec
NAMESPACE = "fzero"
_adopting = threading.Lock()


def flatten(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeDef]:
    """`(leaves, treedef)` with `unflatten(treedef, leaves) == tree`. Where `is_leaf(subtree)` the subtree is a leaf."""
    _adopt_nodes(len(torch_private.pytree_nodes), hugging_face.count_modules())
    return optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Tree:
    """Build a tree of the structure `treedef` from leaves in order: the inverse of `flatten`."""
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: Tree) -> list[Any]:
    """The leaves of a tree, in order."""
    _adopt_nodes(len(torch_private.pytree_nodes), hugging_face.count_modules())
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def find(tree: Tree, predicate: Callable[[Any], bool]) -> list[Any]:
    """The outermost subtrees for which a predicate is true, in order."""
    _adopt_nodes(len(torch_private.pytree_nodes), hugging_face.count_modules())
    found = optree.tree_leaves(tree, is_leaf=predicate, namespace=NAMESPACE)
    return [x for x in found if predicate(x)]


@functools.lru_cache(maxsize=1)
def _adopt_nodes(count: int, modules: int) -> None:
    """Register with optree the classes that torch's pytree knows, and those of `hugging_face`. `count` is how many
    classes torch knows, `modules` how many modules of transformers are imported: the cache makes the call free until
    one of these changes.

    Tensors and shapes stay leaves. So does `Sharded`: fzero's own classes are registered with optree where they are to
    be trees.
    """
    with _adopting:
        register: Any = optree.register_pytree_node  # whose types want a Collection, and a ModelOutput is none
        for cls, node in list(torch_private.pytree_nodes.items()):
            if not isinstance(cls, type) or issubclass(cls, (Tensor, Size)) or cls.__module__.startswith("fzero."):
                continue
            is_known = register.get(cls, namespace=NAMESPACE) is not None
            if not (is_known or optree.is_namedtuple_class(cls) or optree.is_structseq_class(cls)):
                register(cls, _flatten_by(node), _unflatten_by(node), namespace=NAMESPACE)
        of_python = hugging_face.make_node_of_items(UserDict)
        for cls, flatten_node, unflatten_node in (of_python, *hugging_face.iter_nodes()):
            if register.get(cls, namespace=NAMESPACE) is None:
                register(cls, flatten_node, unflatten_node, namespace=NAMESPACE)


def _flatten_by(node: Any) -> Callable[[Any], tuple[list[Any], Any, tuple[Any, ...]]]:
    def flatten(tree: Any) -> tuple[list[Any], Any, tuple[Any, ...]]:
        children, context = node.flatten_fn(tree)
        if node.flatten_with_keys_fn is None:
            return children, context, tuple(range(len(children)))
        entries, _ = node.flatten_with_keys_fn(tree)  # whose context is another for dataclasses, in torch 2.13
        return children, context, tuple(torch_private.key_of_entry(entry) for entry, _ in entries)

    return flatten


def _unflatten_by(node: Any) -> Callable[[Any, Iterable[Any]], Any]:
    return lambda context, children: node.unflatten_fn(list(children), context)


def keys(treedef: TreeDef) -> list[tuple[str | int, ...]]:
    """For each leaf, the tuple of dict keys, list positions and field names that leads to the leaf."""
    if treedef.is_leaf():
        return [()]
    return [(name, *key) for name, child in zip(_names(treedef), treedef.children()) for key in keys(child)]


def _names(treedef: TreeDef) -> Sequence[str | int]:
    """The dict keys, list positions or field names of a node's children."""
    kind: Any = treedef.type
    if optree.is_namedtuple_class(kind):
        return optree.namedtuple_fields(kind)
    if kind in (dict, list, tuple):
        return treedef.entries()
    # a class registered elsewhere: only its accessors know the field names, and accessors are slow to make
    heads = [accessor[0] for accessor in treedef.accessors()]
    fields = {head.entry: head.field for head in heads if hasattr(head, "field")}
    return [fields.get(entry, entry) for entry in treedef.entries()]


def paths(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Dotted leaf paths in order: `["blocks.0.mlp.up", ...]`. The path of a tree that is one leaf is "". Where
    `is_leaf(subtree)` the subtree is a leaf."""
    return [dotted(key) for key in keys(flatten(tree, is_leaf)[1])]


def dotted(key: Iterable[str | int]) -> str:
    """`("blocks", 0, "up") -> "blocks.0.up"`."""
    return ".".join(str(part) for part in key)


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply `fn(leaf, *leaves of rest)` to each leaf of `tree`. Trees in `rest` must have the structure of `tree`.

    Raises:
        FzeroError: with the first path at which a structure differs.
    """
    first, treedef = flatten(tree)
    return unflatten(treedef, [fn(*row) for row in zip(first, *(_leaves_as(treedef, other) for other in rest))])


def map_with_path(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """As `map`, but `fn` takes the leaf's dotted path as its first argument."""
    return map(fn, unflatten(flatten(tree)[1], paths(tree)), tree, *rest)


def split(tree: Tree, predicate: Callable[[str, Any], bool]) -> tuple[Tree, Tree]:
    """Split a tree into `(chosen, others)` by a predicate on path and leaf. Each has None where the other has the leaf.

    `merge(*split(tree, predicate)) == tree`.
    """
    chosen = map_with_path(lambda path, leaf: bool(predicate(path, leaf)), tree)
    return (
        map(lambda leaf, keep: leaf if keep else None, tree, chosen),
        map(lambda leaf, keep: None if keep else leaf, tree, chosen),
    )


def split_as(tree: Tree, other: Tree) -> tuple[Tree, Tree]:
    """Split a tree into `(chosen, others)` by where another tree of its structure has leaves: None there is `others`.

    Raises:
        FzeroError: where the structures differ otherwise.
    """
    leaves, treedef = _flatten_with_none(tree)
    given, other_def = _flatten_with_none(other)
    if treedef != other_def:
        raise mismatch(flatten(tree)[1], flatten(other)[1])
    if all(leaf is not None for leaf in given):
        return tree, unflatten(treedef, [None] * len(leaves))
    return (
        unflatten(treedef, [None if at is None else leaf for leaf, at in zip(leaves, given)]),
        unflatten(treedef, [leaf if at is None else None for leaf, at in zip(leaves, given)]),
    )


def merge(tree: Tree, other: Tree) -> Tree:
    """Merge two trees into one that has every leaf of both: the inverse of `split`.

    Raises:
        FzeroError: where both trees have a leaf, or where their structures differ.
    """
    left, treedef = _flatten_with_none(tree)
    right, other_def = _flatten_with_none(other)
    if treedef != other_def:
        raise mismatch(treedef, other_def)
    for key, a, b in zip(keys(treedef), left, right):
        if a is not None and b is not None:
            raise FzeroError(dotted(key), "both trees have this leaf", "merge takes the two results of split")
    return unflatten(treedef, [b if a is None else a for a, b in zip(left, right)])


def mismatch(expected: TreeDef, got: TreeDef) -> FzeroError:
    """The error for two trees of different structures. It names the first leaf path that only one of them has."""
    want, have = ([dotted(key) for key in keys(treedef)] for treedef in (expected, got))
    missing, surplus = [p for p in want if p not in set(have)], [p for p in have if p not in set(want)]
    sizes = f"({len(want)} leaves expected, {len(have)} given)"
    if missing and missing[0] in _none_paths(got):
        way_out = "a frozen leaf has no gradient: take such leaves out of both trees with fzero.tree.split"
        return FzeroError(missing[0], f"this leaf is None {sizes}", way_out)
    if missing:
        return FzeroError(missing[0], f"this leaf is missing {sizes}", "give a tree of the same structure")
    if surplus:
        return FzeroError(surplus[0], f"this leaf was not expected {sizes}", "give a tree of the same structure")
    return FzeroError("", f"trees differ in their containers: {expected} against {got}", "give the same containers")


def _none_paths(treedef: TreeDef, head: tuple[str | int, ...] = ()) -> set[str]:
    """The dotted paths at which a tree has None."""
    if treedef.type is type(None):
        return {dotted(head)}
    if treedef.is_leaf():
        return set()
    children = zip(_names(treedef), treedef.children())
    return set().union(*(_none_paths(child, (*head, name)) for name, child in children))


def _flatten_with_none(tree: Tree) -> tuple[list[Any], TreeDef]:
    """As `flatten`, with each None as a leaf."""
    _adopt_nodes(len(torch_private.pytree_nodes), hugging_face.count_modules())
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)


def _leaves_as(treedef: TreeDef, other: Tree) -> list[Any]:
    """The leaves of `other`; an error unless `other` has the structure `treedef`."""
    other_leaves, other_def = flatten(other)
    if other_def != treedef:
        raise mismatch(treedef, other_def)
    return other_leaves
