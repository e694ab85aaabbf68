"""`python -m fzero doctor`: what it finds in one process, and what it tries between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run

from fzero import FzeroError
from fzero.__main__ import main
from fzero.doctor import Facts, choose_shape, compare_versions, find_advice, try_collectives
from fzero.ranks.live import live


def test_one_process_is_described(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert main(["doctor"]) == 0
    lines = {line.partition(" ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert f"torch {torch.__version__}" in lines["versions"] and "NCCL_DEBUG=WARN" in lines["environment"]
    assert lines["ranks"].endswith("torchrun --nproc-per-node 2 -m fzero doctor")


def test_what_to_change_is_said() -> None:
    none = list(find_advice(cores=8, threads=1, local=8, shared=1 << 33, files=1 << 16))
    much = list(find_advice(cores=8, threads=4, local=4, shared=1 << 26, files=1024))
    assert none == [x for x in none if x.startswith(("torch ", "the kernel"))]  # of this machine
    assert [x for x in much if x not in none] == [
        "4 ranks of 4 threads share 8 cores: set OMP_NUM_THREADS=2, or start fewer ranks",
        "/dev/shm has 64.0 MiB, which data loaders of several processes and NCCL may fill: in a container give "
        "--shm-size=8g",
        "a process may open 1024 files, and many ranks or shards need more: ulimit -n 65536",
    ]


def test_versions_that_differ_between_ranks_are_named() -> None:
    facts = [Facts({}, {"torch": version, "numpy": "2"}, []) for version in ("2.13", "2.12", "2.13")]
    assert list(compare_versions(facts)) == ["torch differs: 2.13 on ranks [0, 2], 2.12 on ranks [1]: install one"]


def test_a_mesh_has_the_ranks_that_there_are() -> None:
    assert choose_shape("fsdp=2, tp=4", 8).sizes == {"fsdp": 2, "tp": 4} and choose_shape(None, 3).sizes == {"fsdp": 3}
    assert choose_shape("node=2,local=4", 8).shard_axis == "node+local" and choose_shape("dp=8", 8).shard_axis == "dp"
    for text, problem in (
        ("fsdp", "is 'fsdp'; write axes"),
        ("fsdp=2", "there are 8 ranks"),
        ("sp=2, tp=4", "none of the axes .* is the shard axis"),
        ("fsdp=2,fsdp=4", "once"),
    ):
        with pytest.raises(FzeroError, match=f"^--mesh: .*{problem}"):
            choose_shape(text, 8)


def tried(mesh: Any) -> list[tuple[str, bool, bool]]:
    on = live(mesh)
    return [(x.name, x.is_right, x.seconds > 0 < x.rate) for x in try_collectives(on, "fsdp", 0.0)]


def test_collectives_are_tried_between_ranks() -> None:
    names = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
    assert run(2, tried) == [[(name, True, True) for name in names]] * 2
