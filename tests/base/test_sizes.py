"""Sizes in bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fzero.base.errors import FzeroError
from fzero.base.sizes import parse_size


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1, 1),
        (4096, 4096),
        (np.int64(4096), 4096),
        (torch.tensor(4096), 4096),
        ("17B", 17),
        ("40GiB", 40 * 2**30),
        ("64MiB", 64 * 2**20),
        ("1.5KiB", 1536),
        (".5 KB", 500),
        ("5gb", 5 * 10**9),
        (" 2 TiB ", 2**41),
        ("3TB", 3 * 10**12),
        ("1.0001KB", 1000),
        ("9007199254740993B", 2**53 + 1),  # more than a float holds
    ],
)
def test_sizes(given: Any, expected: int) -> None:
    assert parse_size("memory", given) == expected


@pytest.mark.parametrize(
    "given",
    [0, -1, True, 1.5, None, "", "40", "GiB", "-1GiB", "40 Gigabytes", "IB", "0.1B", "1e3MB", "9" * 5000 + "GiB"],
)
def test_what_is_no_size_is_named(given: object) -> None:
    with pytest.raises(FzeroError) as refused:
        parse_size("memory", given)  # type: ignore[arg-type]
    assert str(refused.value).startswith(f"memory: is {given!r}; give a number of bytes above 0")


@pytest.mark.parametrize("given", [2**63, 10**40, "9" * 30 + "B", "8388608.0 TiB"])
def test_more_bytes_than_there_can_be(given: int | str) -> None:
    with pytest.raises(FzeroError, match=f"^chunk: is more than {2**63 - 1} bytes; give"):
        parse_size("chunk", given)
    assert parse_size("chunk", 2**63 - 1) == 2**63 - 1
