"""Pages of one program: docs/howto/ has a page for each task, others have examples. Their code runs in one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [*sorted((DOCS / "howto").glob("*.md")), DOCS / "jax.md", *sorted(DOCS.glob("*by_example.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(code, str(page), "exec"), {"__name__": page.stem})
