"""The tests of `make test` with each pair of Python and torch that fzero is for, and a table of their results.

    make versions                              the pairs that have no result of this commit, one after another
    make versions ARGS="3.13"                  those with Python 3.13, again
    PIP_CONSTRAINT=/dev/null make versions     where pip is told to take no torch above a certain one

An environment with torch for CUDA has some gigabytes. It lies in build/versions/, is used again by a run that was
stopped, and is removed when all tests pass (`ARGS=--keep` leaves it there). What the tests print lies beside it.
Interpreters are those on PATH and those of pyenv.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "versions"


class Pair(NamedTuple):
    """A version of Python, and what pip is asked for."""

    python: str
    torch: str

    @property
    def environment(self) -> Path:
        return FOLDER / self.python

    @property
    def output(self) -> Path:
        """The file of what the tests print. Its first line has the commit and the versions."""
        return FOLDER / f"{self.python}.txt"


PAIRS = (Pair("3.11", "torch==2.11.*"), Pair("3.12", "torch==2.13.*"), Pair("3.13", "torch"))
"""The oldest torch, the one that fzero is developed on, and the newest."""
COLUMNS = ("python", "torch", "passed", "failed", "skipped", "seconds")
ASK = "import platform, torch; print('python', platform.python_version(), 'torch', torch.__version__)"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pythons", nargs="*", help="such as 3.13; without: those that have no result of this commit")
    parser.add_argument("--keep", action="store_true", help="do not remove environments")
    options = parser.parse_args()
    if unknown := set(options.pythons) - {pair.python for pair in PAIRS}:
        parser.error(f"no pair has Python {', '.join(unknown)}")
    commit = _read("git", "describe", "--always", "--dirty")
    for pair in PAIRS:
        is_open = commit.endswith("-dirty") or not read_row(pair, commit)
        if pair.python in options.pythons or (not options.pythons and is_open):
            test(pair, commit)
            if not options.keep and read_row(pair, commit)[3:4] == ["0"]:
                shutil.rmtree(pair.environment)
    rows = [list(COLUMNS), *(row for pair in PAIRS if (row := read_row(pair, commit)))]
    print(f"commit {commit}:")
    print("\n".join("  ".join(cell.rjust(14) for cell in row) for row in rows))
    sys.exit(any(row[3] != "0" for row in rows[1:]))


def test(pair: Pair, commit: str) -> None:
    """Make an environment, or go on with the one that is there, and run `make test` in it."""
    programs, ready = pair.environment / "bin", pair.environment / "ready"
    subprocess.run([find_interpreter(pair.python), "-m", "venv", pair.environment], check=True)
    pip = [programs / "python", "-m", "pip", "install", "-q", "--upgrade", pair.torch, "-e", f"{ROOT}[test]"]
    subprocess.run(pip, check=True)
    ready.touch()
    with pair.output.open("w") as output:
        print(commit, _read(str(programs / "python"), "-c", ASK), file=output, flush=True)
        command = ["make", "test", f"BIN={programs}", f"READY={ready}", "ARGS=-rs"]
        subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    print(f"Python {pair.python}: {pair.output.relative_to(ROOT)} has what the tests printed", flush=True)


def read_row(pair: Pair, commit: str) -> list[str]:
    """The cells of a pair's row; none without a result of this commit."""
    head, _, text = pair.output.read_text().partition("\n") if pair.output.exists() else ("", "", "")
    made = re.fullmatch(rf"{commit} python (.*) torch (.*)", head)
    ends = re.findall(r"^=+ (.*) in ([\d.]+)s.* =+$", text, re.MULTILINE)
    if made is None or not ends:
        return []
    counts, seconds = ends[-1]
    passed, failed, errors, skipped = (
        int(found[1]) if (found := re.search(rf"(\d+) {word}", counts)) else 0
        for word in ("passed", "failed", "error", "skipped")
    )
    return [*made.groups(), str(passed), str(failed + errors), str(skipped), seconds]


def find_interpreter(version: str) -> str:
    """The path of a version of Python. pyenv starts the versions that a variable names: here all of them."""
    if shutil.which("pyenv"):
        os.environ["PYENV_VERSION"] = ":".join(_read("pyenv", "versions", "--bare").split())
    return _read(f"python{version}", "-c", "import sys; print(sys.executable)")


def _read(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
