"""docs/deepspeed.md: the table of keys is the one that the code has."""

from __future__ import annotations

import sys

from test_docs import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import deepspeed_keys


def test_the_table_of_keys_is_current() -> None:
    assert deepspeed_keys.TABLE.read() == deepspeed_keys.render(), "run: python tools/deepspeed_keys.py"
