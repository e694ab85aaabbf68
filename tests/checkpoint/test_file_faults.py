"""Files that changed places, were replaced or damaged, paths and numbers of all kinds: right, or an error by name.

`python tests/checkpoint/file_faults.py` tries all values in all places of the JSON files, and prints a table.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from file_faults import AS_SAID, run_all


@pytest.mark.filterwarnings("ignore")
def test_what_is_read_is_right_or_an_error_by_name(tmp_path: Path) -> None:
    found = run_all(tmp_path, every=40)
    bad = [outcome for outcome in found if outcome.end in ("silent", "raw") and outcome.row not in AS_SAID]
    assert not bad, "\n".join(map(str, bad))
    ends = Counter(outcome.end for outcome in found)
    assert ends["named"] > 500 and ends["right"] > 60 and ends["silent"] == len(AS_SAID)
