"""How errors name ranks. Roll calls stand in tests/faults: they take real processes."""

from __future__ import annotations

from datetime import timedelta

from fzero.ranks.failure import format_seconds, group_by_word, name_ranks


def test_one_rank_or_some_are_named() -> None:
    assert name_ranks([2]) == "rank 2"
    assert name_ranks([0, 1]) == "ranks 0, 1"


def test_no_more_than_eight_ranks_are_named() -> None:
    assert name_ranks(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert name_ranks(range(512)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 504 more"


def test_ranks_that_say_the_same_stand_together() -> None:
    assert group_by_word({2: "a", 1: "b", 0: "a"}) == {"a": [0, 2], "b": [1]}


def test_seconds_are_short() -> None:
    assert [format_seconds(timedelta(minutes=30)), format_seconds(timedelta(milliseconds=2500))] == ["1800 s", "2.5 s"]
