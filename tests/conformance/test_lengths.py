"""Operators of torch's database in batches that change in size. docs/open_sizes.md has all of them."""

from __future__ import annotations

import random

from conformance import lengths, operators


def test_some_operators_are_those_of_plain_torch_at_each_size() -> None:
    names = sorted(operators.names())
    random.Random(0).shuffle(names)
    found = {name: lengths.judge(name, samples=4) for name in ("addcmul", "matmul", "cov", *names[:12])}
    verdicts = {(name, way): verdict for name, row in found.items() for way, verdict in row.items()}
    assert {key: x for key, x in verdicts.items() if x.outcome in ("wrong", "raw")} == {}
    assert sum(verdict.outcome == "open" for verdict in verdicts.values()) > len(verdicts) // 2
    assert found["addcmul"]["rows"].outcome == found["cov"]["last"].outcome == "open"
