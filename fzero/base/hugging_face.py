"""Classes of transformers that are trees, and that transformers does not register as trees itself.

A cache and its layers have their attributes as children. A batch that a tokenizer or a feature extractor returns has
its items as children, and no others: its encodings are objects of the tokenizer, and differ from batch to batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_CACHES = "transformers.cache_utils"
_BATCHES = {
    "transformers.tokenization_utils_base": "BatchEncoding",
    "transformers.feature_extraction_utils": "BatchFeature",
}

OWN_HASHES = ("_original_object_hash",)
"""Attributes in which a configuration remembers its own hash, which is another one in each process."""


class Node(NamedTuple):
    """How optree takes the objects of a class apart, and builds them."""

    cls: type
    flatten: Callable[[Any], tuple[list[Any], Any, tuple[Any, ...]]]
    unflatten: Callable[[Any, Any], Any]


def count_modules() -> int:
    """How many of the modules that define such classes have been imported."""
    return sum(name in sys.modules for name in (_CACHES, *_BATCHES))


def is_cache(value: Any) -> bool:
    """Whether an object is a cache of keys and values, or a layer of one."""
    return is_cache_module(type(value).__module__)


def is_cache_module(name: str) -> bool:
    """Whether a module is the one that defines caches."""
    return name == _CACHES


def iter_nodes() -> Iterator[Node]:
    """The classes of the modules that have been imported. This function imports none."""
    caches = vars(sys.modules[_CACHES]).values() if _CACHES in sys.modules else ()
    for cls in caches:
        if isinstance(cls, type) and cls.__module__ == _CACHES:
            yield Node(cls, _flatten_attributes, _build_from_attributes(cls))
    for module, name in _BATCHES.items():
        if module in sys.modules:
            yield make_node_of_items(getattr(sys.modules[module], name))


def make_node_of_items(cls: type) -> Node:
    """The node of a mapping: its items are its children."""
    return Node(cls, _flatten_items, _build_from_items(cls))


def _flatten_attributes(value: Any) -> tuple[list[Any], Any, tuple[Any, ...]]:
    names = tuple(vars(value))
    return list(vars(value).values()), names, names


def _build_from_attributes(cls: Any) -> Callable[[Any, Any], Any]:
    def build(names: Any, children: Any) -> Any:
        made = cls.__new__(cls)
        vars(made).update(zip(names, children))
        return made

    return build


def _flatten_items(value: Any) -> tuple[list[Any], Any, tuple[Any, ...]]:
    names = tuple(value.keys())
    return list(value.values()), names, names


def _build_from_items(cls: type) -> Callable[[Any, Any], Any]:
    return lambda names, children: cls(dict(zip(names, children)))
