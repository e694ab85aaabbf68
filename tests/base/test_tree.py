"""Pytrees: paths, split and merge."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

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
