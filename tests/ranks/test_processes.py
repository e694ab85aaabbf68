"""Whether a process has ended, as another one on its host can tell."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fzero.ranks import processes
from fzero.ranks.processes import has_ended, this_process

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")


def process_of(child: subprocess.Popen[bytes]) -> processes.Process:
    return this_process()._replace(number=child.pid, start=processes._read_status(child.pid)[0])


def test_a_process_has_ended_when_it_is_a_zombie_and_when_it_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    theirs = process_of(child)
    assert not has_ended(theirs) and not has_ended(this_process())
    child.kill()
    while processes._read_status(child.pid)[1]:
        time.sleep(0.01)
    assert has_ended(theirs)  # nobody has waited for it: it is a zombie
    child.communicate()
    assert has_ended(theirs)


def test_another_process_may_have_the_same_number() -> None:
    assert has_ended(this_process()._replace(start="1"))


def test_nothing_is_known_of_a_process_of_another_host() -> None:
    assert not has_ended(this_process()._replace(place=("another boot", "pid:[1]"), number=2**22 + 1))


UNKNOWN = """
import runpy, sys
module = runpy.run_path(sys.argv[1])
this_process, has_ended = module["this_process"], module["has_ended"]
print(this_process().place == this_process().place, has_ended(this_process()._replace(start="1")))
"""


def test_nothing_is_known_where_proc_counts_as_another_namespace_does() -> None:
    """As in a container that sees the /proc of its host."""
    spaces = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if not shutil.which("unshare") or subprocess.run([*spaces, "true"], capture_output=True).returncode:
        pytest.skip("this system lets no user make a namespace of processes")
    command = [*spaces, sys.executable, "-c", UNKNOWN, processes.__file__]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False False\n"
