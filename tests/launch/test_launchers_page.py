"""docs/launchers.md: scripts that bash and YAML read, and variables that are the ones of the code."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fzero.launch import environment

PAGE = (Path(__file__).parents[2] / "docs" / "launchers.md").read_text()
CODE = Path(environment.__file__).read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
FILES = [yaml.safe_load(text) for language, text in BLOCKS if language == "yaml"]


def check_bash(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert done.returncode == 0 and not done.stderr, f"{done.stderr}\n{text}"


def find_strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    return [text for each in value for text in find_strings(each)] if isinstance(value, list) else [str(value)]


def test_scripts_are_scripts() -> None:
    scripts = [text for language, text in BLOCKS if language == "bash"]
    commands = [text for file in FILES for text in find_strings(file) if "torchrun --" in text]
    assert (len(scripts), len(commands)) == (5, 2)
    for text in scripts + commands:
        check_bash(text)
    for language, text in BLOCKS:
        if language == "python":
            ast.parse(text)
    with pytest.raises(AssertionError):
        check_bash("for x in 1; torchrun")


def test_manifests_start_as_many_pods_as_ranks_expect() -> None:
    jobs, pytorch, _ = FILES
    (workers,) = jobs["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    (command,) = container["args"]
    assert job["parallelism"] == job["completions"] == int(re.findall(r"--nnodes (\d+)", command)[0])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(re.findall(r"--nproc-per-node (\d+)", command)[0])
    # the name of the first pod: of the set, the job, its index and that of the pod, in the set's own subdomain
    assert f"--master-addr {jobs['metadata']['name']}-{workers['name']}-0-0.{jobs['metadata']['name']} " in command
    replicas = pytorch["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"] and replicas["Master"]["replicas"] == 1
    (pod,) = replicas["Master"]["template"]["spec"]["containers"]
    assert pod["name"] == "pytorch"  # the only container that the operator gives variables to
    assert pod["resources"]["limits"]["nvidia.com/gpu"] == int(pytorch["spec"]["nprocPerNode"])


def test_the_table_names_the_variables_that_are_read() -> None:
    table = PAGE.partition("| launcher |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([A-Z][A-Z_]+)`", table))
    assert len(named) > 15
    assert not {name for name in named if name not in CODE and name.removeprefix("OMPI_COMM_WORLD_") not in CODE}
