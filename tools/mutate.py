"""Mutation testing of the partition math and of the passes: `make mutate`, or `make mutate ARGS="layout donate"`.

Runs mutmut on a copy of the repository, a module at a time, each with the tests that concern it, and prints what was
killed. Fails where that is too little, or where a mutant survives that tools/survivors.md does not explain.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPIES = ROOT / "build" / "mutate"
EXPLAINED = ROOT / "tools" / "survivors.md"
TESTS = {
    "layout/ranges": "layout/test_ranges",
    "layout/boxes": "layout/test_boxes",
    "layout/layout": "layout/test_layout",
    "passes/__init__": "passes/test_order",
    "passes/order": "passes/test_order passes/test_bucket passes/test_release",
    "passes/bucket": "passes/test_bucket passes/test_order",
    "passes/coalesce": "passes/test_coalesce passes/test_order",
    "passes/accumulate": "passes/test_release passes/test_order",
    "passes/release": "passes/test_release passes/test_order",
    "passes/split": "passes/test_split passes/test_order",
    "passes/prefetch": "passes/test_prefetch passes/test_order",
    "passes/fuse": "passes/test_fuse passes/test_order",
    "passes/donate": "passes/test_donate passes/test_order",
    "passes/rematerialize": "passes/test_rematerialize passes/test_order",
    "passes/resolve": "passes/test_resolve program/test_kinds passes/test_order",
    "passes/verify": "passes/test_verify program/test_kinds",
}
"""Module -> the tests that concern it: files in tests/, and for the partition math in property_tests/ too."""
WARM = """import gc, resource
import torch._dynamo  # what the first trace imports: 2 seconds

resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))  # bytes; a mutant may loop and collect for ever

def pytest_collection_finish():
    gc.freeze()  # and pytest collects garbage after each run
"""
"""The conftest.py of a copy: for the processes of mutants, which are forked once the tests are collected."""
LEAST = {"layout": 95.0, "passes": 85.0}
"""Percent to be killed in each of these; of the passes in all of them together."""


class Score(NamedTuple):
    """Mutants of a module. One that runs out of time counts as killed, one that no test reaches does not."""

    killed: int
    total: int
    timeouts: int
    alive: list[str]  # as tools/survivors.md has them

    def __str__(self) -> str:
        late = f"  ({self.timeouts} out of time)" if self.timeouts else ""
        return f"{self.killed:5}/{self.total:<5}{self.percent:6.1f} %{late}"

    @property
    def percent(self) -> float:
        return 100 * self.killed / max(self.total, 1)


def undecorated(source: str) -> str:
    """`source` with each decorated function as a plain one and `name = decorator(_plain_name)` behind it, since mutmut
    leaves decorated functions alone."""
    lines = source.splitlines()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for node in sorted(functions, key=lambda node: -node.lineno):
        if node.decorator_list:
            value = f"_plain_{node.name}"
            for decorator in reversed(node.decorator_list):
                value = f"{ast.unparse(decorator)}({value})"
            lines.insert(node.end_lineno or 0, f"{' ' * node.col_offset}{node.name} = {value}")
            lines[node.lineno - 1] = lines[node.lineno - 1].replace(f"def {node.name}", f"def _plain_{node.name}", 1)
            del lines[node.decorator_list[0].lineno - 1 : node.lineno - 1]
    return "\n".join(lines) + "\n"


def copied(module: str) -> Path:
    """A new copy of the repository in which mutmut finds one module to mutate."""
    copy = COPIES / module.replace("/", ".")
    shutil.rmtree(copy, ignore_errors=True)
    for folder in ("fzero", "tests", "property_tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "conftest.py").write_text(WARM)
    path = copy / "fzero" / f"{module}.py"
    path.write_text(undecorated(path.read_text()))
    folders = ("tests", "property_tests") if module.startswith("layout/") else ("tests",)
    tests = [f"{folder}/{name}.py" for folder in folders for name in TESTS[module].split()]
    settings = {
        "source_paths": ["fzero"],
        "only_mutate": [f"fzero/{module}.py"],
        "also_copy": ["property_tests", "conftest.py"],
        "do_not_mutate_patterns": [r"^\s*raise "],  # what an error says; whether it is raised is on other lines
        "pytest_add_cli_args": ["-p", "no:cacheprovider"],
        "pytest_add_cli_args_test_selection": [test for test in tests if (copy / test).exists()],
        "process_isolation": "forkserver",  # nothing is cached yet when a mutant's tests begin
        "timeout_constant": 10.0,  # seconds: a machine that is a little busy is no killed mutant
        "timeout_multiplier": 3.0,
        "use_git_change_detection": False,
        "track_dependencies": False,
    }
    section = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    (copy / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + "\n[tool.mutmut]\n" + section)
    return copy


def mutmut(copy: Path, *args: str) -> str:
    """What mutmut prints in a copy. Exits where it fails."""
    command = [sys.executable, "-m", "mutmut", *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        said = re.sub(r"\r?[\u2800-\u28ff] [^\n]*\n?", "", done.stdout)  # all but its spinner
        sys.exit(f"{' '.join(command)} in {copy} failed:\n{said}")
    return done.stdout


def mutate(module: str, workers: int) -> Score:
    """Run the mutants of a module."""
    copy = copied(module)
    mutmut(copy, "run", "--max-children", str(workers))
    mutmut(copy, "export-cicd-stats")
    count = json.loads((copy / "mutants" / "mutmut-cicd-stats.json").read_text())
    alive = re.findall(r"(\S+): (?:survived|no tests|suspicious)", mutmut(copy, "results"))
    killed = count["killed"] + count["timeout"] + count["segfault"]
    return Score(killed, count["total"], count["timeout"], [difference(copy, name) for name in alive])


def difference(copy: Path, mutant: str) -> str:
    """A mutant as `function:line in it`, the lines that it takes away and those that it puts there, not indented."""
    function = re.sub(r"^x[_ǁ]|__mutmut_\d+$|_plain_", "", mutant.rpartition(".")[2]).replace("ǁ", ".")
    _, start, *hunk = re.split(r"(?m)^@@ -(\d+).*\n", mutmut(copy, "show", mutant))[:3]
    lines = hunk[0].splitlines()
    first = next(i for i, line in enumerate(lines) if line[0] in "-+")
    changed = [f"{line[0]} {line[1:].strip()}" for line in lines if line[0] in "-+"]
    return "\n".join([f"{function}:{int(start) + first}", *changed])


def explained() -> dict[str, list[str]]:
    """Module -> the mutants that tools/survivors.md lists."""
    chapters = re.split(r"(?m)^## (.+)\n", EXPLAINED.read_text())
    return {
        module: [textwrap.dedent(block).strip() for block in re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE)]
        for module, text in zip(chapters[1::2], chapters[2::2])
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(TESTS))
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    known, scores, news = explained(), dict[str, Score](), 0
    for module in options.modules:
        module = next((name for name in TESTS if name.endswith(f"/{module}")), module)
        start = time.monotonic()
        scores[module] = score = mutate(module, options.workers)
        print(f"{module:22}{score}{time.monotonic() - start:7.0f} s", flush=True)
        listed = known.get(module, [])
        new = [mutant for mutant in score.alive if mutant not in listed]
        for title, mutants in (("survives", new), ("does not survive", [x for x in listed if x not in score.alive])):
            for mutant in mutants:
                print(textwrap.indent(f"{title}: {mutant}", "    "), flush=True)
        news += len(new)
    failures = [f"{news} mutants survive that {EXPLAINED.name} does not list"] if news else []
    for group, least in LEAST.items():
        of_group = [score for module, score in scores.items() if module.split("/")[0] == group]
        total = Score(sum(s.killed for s in of_group), sum(s.total for s in of_group), 0, [])
        if of_group:
            print(f"{group:22}{total}  of at least {least} %")
        if of_group and total.percent < least:
            failures.append(f"{group}: {total.percent:.1f} % killed, at least {least} are to be")
    sys.exit("\n".join(failures) or None)


if __name__ == "__main__":
    main()
