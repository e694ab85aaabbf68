"""Named in examples: which public names stand in code of examples/ and docs/ that the tests run.

    python tools/named_in_examples.py              a line for each module, and the sum
    python tools/named_in_examples.py --missing    and the names that stand in none

A name that stands in a file counts as used, and nothing looks whether that line runs. Classes that users do not
construct are left out (`RESULTS` in tools/api.py).
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator

from api import RESULTS, ROOT, find, list_modules, list_names, list_variants

WHOLE = (
    "accelerate budget by_example checkpoints_of_others data deepspeed_by_example fsdp2 offload operations"
    " ops_by_example parallel passes quantized runs_by_example testing variants howto/accumulate howto/check"
    " howto/files howto/freeze howto/launch howto/layers howto/memory howto/offload howto/resume jax"
)
PAGES: dict[str, int | None] = dict.fromkeys(WHOLE.split()) | {"axes": 1, "metrics": 1}
"""Pages whose Python code the tests run: all blocks, or so many of the first."""


def list_code() -> Iterator[tuple[str, str]]:
    """`(file, code)`; the blocks of a page are one text."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield f"examples/{path.name}", path.read_text()
    for name, count in PAGES.items():
        text = (ROOT / "docs" / f"{name}.md").read_text()
        yield f"docs/{name}.md", "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[:count])


def find_uses() -> dict[str, list[str]]:
    """Dotted name of fzero -> the files whose code has it."""
    uses: dict[str, list[str]] = {}
    for file, code in list_code():
        for name in find_names(code):
            uses.setdefault(name, []).append(file)
    return uses


def find_names(code: str) -> set[str]:
    """The dotted names of fzero that a text uses, through its imports: `{"fzero.optim", "fzero.optim.adamw"}`."""
    parsed, bound, found = ast.parse(code), dict[str, str](), set[str]()
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_ours(alias.name):
                    bound[alias.asname or "fzero"] = alias.name if alias.asname else "fzero"
        elif isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(parsed):
        if isinstance(node, ast.Name | ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in bound:
                found.add(f"{bound[root]}.{rest}".rstrip("."))
    return found


def is_ours(module: str) -> bool:
    return module.partition(".")[0] == "fzero"


def list_public() -> dict[str, list[str]]:
    """Module -> its public names that are no modules and that users construct or call."""
    found = {
        public: [
            f"{public}.{name}"
            for name in list_names(module)
            if find(module, name).node is not None and f"{public}.{name}" not in RESULTS
        ]
        for public, module in list_modules()
    }
    return found | {"fzero.variants": list_variants()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--missing", action="store_true", help="list the names that stand in no such code")
    missing = parser.parse_args().missing
    used = find_uses().keys()
    public = list_public()
    for module, names in public.items():
        without = [name for name in names if name not in used]
        print(f"{module:40}{len(names) - len(without):4} of {len(names):3}")
        if missing:
            print(*(f"    {name}" for name in without), sep="\n")
    names = {name for each in public.values() for name in each}
    print(f"{'all':40}{len(names & used):4} of {len(names):3}")


if __name__ == "__main__":
    main()
