"""Structures of trees as plain data: `list_nodes` takes one apart, `build` puts one together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optree

from fzero.base.tree import NAMESPACE, TreeDef

Node = tuple[Any, int, Any, Any]
"""The class of a node (None for a leaf), the number of its children, what its class keeps besides children, and, for a
class of optree's own, the node with the positions of its children in their places."""


def list_nodes(treedef: TreeDef) -> Iterator[Node]:
    """The nodes of a structure, each in front of its children."""
    if treedef.is_leaf():
        yield None, 0, None, None
        return
    children, kind = treedef.children(), treedef.type
    count, top = len(children), treedef.one_level()
    assert kind is not None and top is not None  # no leaf
    found: list[Any] = []
    top.walk(range(count), lambda kind, data, _: found.append(data), lambda x: x)
    is_custom = optree.register_pytree_node.get(kind, namespace=NAMESPACE) is not None and not _is_own(kind)
    yield kind, count, found[0] if is_custom else None, None if is_custom else top.unflatten(range(count))
    for child in children:
        yield from list_nodes(child)


def _is_own(kind: Any) -> bool:
    entry = optree.register_pytree_node.get(kind)  # without a namespace: the classes that optree knows by itself
    return entry is not None or optree.is_namedtuple_class(kind) or optree.is_structseq_class(kind)


def build(nodes: Iterator[Node]) -> TreeDef:
    """The structure of the next nodes: the inverse of `list_nodes`."""
    kind, count, data, container = next(nodes)
    if kind is None:
        return optree.treespec_leaf(namespace=NAMESPACE)
    children = [build(nodes) for _ in range(count)]
    if container is None and kind is type(None):
        return optree.treespec_none(namespace=NAMESPACE)
    if container is None:
        entry: Any = optree.register_pytree_node.get(kind, namespace=NAMESPACE)
        return optree.treespec_from_collection(entry.unflatten_func(data, children), namespace=NAMESPACE)
    top = optree.tree_structure(container, namespace=NAMESPACE)
    filled: Any = optree.tree_unflatten(top, children)
    return optree.treespec_from_collection(filled, namespace=NAMESPACE)
