"""Pytrees: paths, split and merge."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree

from fzero import tree
from fzero.base.errors import FzeroError


class Pair(NamedTuple):
    left: object
    right: object


TREE = {"head": 1, "blocks": [{"w": 2, "b": 3}, Pair(4, (5, 6))], "frozen": None}


def test_paths_are_dict_keys_positions_and_field_names_in_sorted_order() -> None:
    assert tree.paths(TREE) == [
        "blocks.0.b", "blocks.0.w", "blocks.1.left", "blocks.1.right.0", "blocks.1.right.1", "head"
    ]  # fmt: skip


def test_a_tree_that_is_one_leaf_has_the_empty_path() -> None:
    assert tree.paths(7) == [""]


def test_fields_of_other_classes_are_named_too() -> None:
    largest = torch.ones(2, 2).max(0)  # a torch.return_types.max, of which optree knows positions
    assert tree.paths({"k": [largest, None]}) == ["k.0.values", "k.0.indices"]


def test_leaves_go_with_their_paths() -> None:
    assert dict(zip(tree.paths(TREE), tree.leaves(TREE)))["blocks.1.right.1"] == 6


def test_unflatten_undoes_flatten() -> None:
    leaves, treedef = tree.flatten(TREE)
    assert leaves == [3, 2, 4, 5, 6, 1]  # the None has none
    assert tree.unflatten(treedef, leaves) == TREE


def test_map_takes_trees_of_one_structure() -> None:
    assert tree.map(lambda a, b: a + b, {"a": 1, "b": [2]}, {"a": 10, "b": [20]}) == {"a": 11, "b": [22]}


def test_map_with_path() -> None:
    assert tree.map_with_path(lambda path, leaf: f"{path}={leaf}", {"a": [1, 2]}) == {"a": ["a.0=1", "a.1=2"]}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": 1}, "b.c: this leaf is missing (2 leaves expected, 1 given)"),
        ({"a": 1, "b": {"c": 2, "d": 3}}, "b.d: this leaf was not expected (2 leaves expected, 3 given)"),
        ({"a": 1, "b": {"d": 2}}, "b.c: this leaf is missing (2 leaves expected, 2 given)"),
    ],
)
def test_map_names_the_first_leaf_that_differs(other: tree.Tree, message: str) -> None:
    with pytest.raises(FzeroError) as error:
        tree.map(lambda a, b: a, {"a": 1, "b": {"c": 2}}, other)
    assert str(error.value).startswith(message)


def test_a_leaf_that_is_none_is_named() -> None:
    with pytest.raises(
        FzeroError, match=r"^b\.c: this leaf is None \(2 leaves expected, 1 given\); a frozen leaf has no"
    ):
        tree.map(lambda a, b: a, {"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": None}})


def test_map_tells_containers_apart() -> None:
    with pytest.raises(FzeroError, match="trees differ in their containers"):
        tree.map(lambda a, b: a, [1], (1,))


def test_split_leaves_none_where_a_leaf_went_to_the_other_tree() -> None:
    chosen, others = tree.split({"a": 1, "b": [2, 3]}, lambda path, leaf: path == "a" or leaf == 3)
    assert chosen == {"a": 1, "b": [None, 3]} and others == {"a": None, "b": [2, None]}


def test_merge_undoes_split() -> None:
    assert tree.merge(*tree.split(TREE, lambda path, leaf: leaf % 2 == 0)) == TREE


def test_merge_refuses_a_leaf_that_both_have() -> None:
    with pytest.raises(FzeroError, match=r"b\.0: both trees have this leaf"):
        tree.merge({"a": 1, "b": [2]}, {"a": None, "b": [3]})


def test_merge_refuses_trees_of_other_structure() -> None:
    with pytest.raises(FzeroError, match="b: this leaf is missing"):
        tree.merge({"a": 1, "b": 2}, {"a": None})


# classes that torch's pytree knows


@dataclasses.dataclass
class Output:
    """A dataclass that is registered with torch's pytree."""

    hidden: Any
    count: int = 0


class Registered(collections.OrderedDict[str, Any]):
    """Registered as transformers registers the outputs of its models."""


class Pairs:
    """Registered without names of its children."""

    def __init__(self, *values: Any) -> None:
        self.values = values


torch.export.register_dataclass(Output)
_pytree.register_pytree_node(
    Registered,
    lambda x: (list(x.values()), list(x)),
    lambda values, names: Registered(zip(names, values)),
    flatten_with_keys_fn=lambda x: ([(_pytree.MappingKey(key), value) for key, value in x.items()], list(x)),
)
_pytree.register_pytree_node(Pairs, lambda x: (list(x.values), None), lambda values, _: Pairs(*values))

KNOWN_TO_TORCH = [
    (Output(torch.ones(2), 3), ["hidden", "count"]),
    (Registered(b=torch.ones(2), a=[torch.ones(1)]), ["b", "a.0"]),
    (Pairs(torch.ones(2), {"k": torch.ones(1)}), ["0", "1.k"]),
]


@pytest.mark.parametrize(("value", "paths"), KNOWN_TO_TORCH, ids=["dataclass", "dict", "no names"])
def test_what_is_a_tree_to_torch_is_one_here(value: Any, paths: list[str]) -> None:
    leaves, treedef = tree.flatten([value])
    assert all(mine is theirs for mine, theirs in zip(leaves, _pytree.tree_leaves([value]), strict=True))
    assert tree.paths([value]) == [f"0.{path}" for path in paths]
    (rebuilt,) = tree.unflatten(treedef, leaves)
    assert type(rebuilt) is type(value) and tree.flatten([rebuilt])[1] == treedef


def test_a_class_that_is_registered_later_is_seen() -> None:
    class Late(Pairs):
        pass

    assert len(tree.leaves(Late(1, 2))) == 1
    _pytree.register_pytree_node(Late, lambda x: (list(x.values), None), lambda values, _: Late(*values))
    assert tree.leaves(Late(1, 2)) == [1, 2]
    assert tree.map(lambda x: 2 * x, Late(1, 2)).values == (2, 4)


def test_shapes_and_tensors_stay_leaves() -> None:
    assert tree.leaves({"a": torch.Size([2, 3]), "b": 1}) == [torch.Size([2, 3]), 1]


def test_split_and_merge_look_into_them() -> None:
    chosen, others = tree.split(Registered(b=1, a=2), lambda path, leaf: path == "b")
    assert (chosen, others) == (Registered(b=1, a=None), Registered(b=None, a=2))
    assert tree.merge(chosen, others) == Registered(b=1, a=2)


def test_outputs_of_transformers_models_are_trees() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.CausalLMOutput(loss=torch.ones(()), logits=torch.ones(2, 3))
    assert tree.paths(output) == ["loss", "logits"]
    assert tree.map(lambda x: x + 1, output).logits.tolist() == [[2.0] * 3] * 2


def test_caches_of_transformers_are_trees_of_their_attributes() -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")
    filled, empty = cache_utils.DynamicCache(), cache_utils.DynamicCache()
    filled.update(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    both = cache_utils.EncoderDecoderCache(filled, empty)
    assert "self_attention_cache.layers.0.keys" in tree.paths(both)
    moved = tree.map(lambda x: x + 1 if isinstance(x, torch.Tensor) else x, both)
    (layer,) = moved.self_attention_cache.layers
    assert type(moved) is type(both) and type(layer) is cache_utils.DynamicLayer
    assert layer.get_seq_length() == 3 and layer.keys.unique().tolist() == [2.0]
    layer.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    assert layer.get_seq_length() == 4 and filled.get_seq_length() == 3


def test_batches_of_transformers_are_trees_of_their_items() -> None:
    transformers = pytest.importorskip("transformers")
    for made in (transformers.BatchEncoding, transformers.BatchFeature):
        batch = made({"b": torch.ones(2), "a": torch.zeros(2)})
        assert tree.paths([batch]) == ["0.b", "0.a"]
        doubled = tree.map(lambda x: 2 * x, batch)
        assert type(doubled) is made and doubled["b"].tolist() == [2.0, 2.0] and list(doubled) == ["b", "a"]
