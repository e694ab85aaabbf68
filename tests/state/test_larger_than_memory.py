"""State that is larger than the memory that its process may take is made, saved and loaded on a disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_DATA, setrlimit

import torch

import fzero
from fzero import checkpoint, initializers, optim

MIB, LAYERS, ROOM = 1 << 20, 11, 32 << 20
path = Path(sys.argv[1])
mesh, place = fzero.VirtualMesh(fsdp=2), fzero.disk(path)


def draw(layers, to):
    shapes = [{"w": torch.empty(1024, 1024, device="meta")} for _ in range(layers)]
    return fzero.init({"layers": shapes}, mesh, lambda *_: initializers.normal(1.0), to=to, chunk=4 * MIB)


def save_and_load(layers, to):
    params = draw(layers, to)
    state = optim.adamw(1e-3).init(params, to=to)
    checkpoint.save(path / f"checkpoint-{layers}", (params, state), step=1)
    checkpoint.save(path / f"checkpoint-{layers}", (params, state), step=2, wait=False).wait()
    nbytes = sum(x.nbytes for x in fzero.tree.leaves((params, state)))
    like = fzero.tree.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), (params, state))
    del params, state
    params, state = checkpoint.load(path / f"checkpoint-{layers}", like, mesh, to=to, chunk=4 * MIB)
    fzero.save_safetensors(params, path / f"{layers}.safetensors")
    loaded = fzero.load_safetensors(path / f"{layers}.safetensors", like[0], mesh, to=to, chunk=4 * MIB)
    values = zip(fzero.iter_full(loaded, chunk=MIB), fzero.iter_full(draw(layers, to), chunk=MIB))
    assert all(torch.equal(x, y) for (_, (_, x)), (_, (_, y)) in values)
    assert not any(x.any() for _, (_, x) in fzero.iter_full(state, chunk=MIB))
    return nbytes


save_and_load(1, place)  # threads start, and kernels take what they need
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
setrlimit(RLIMIT_DATA, (int(status["VmData"].split()[0]) * 1024 + ROOM, RLIM_INFINITY))
assert save_and_load(LAYERS, place) > 4 * ROOM
try:
    draw(LAYERS, None)
except (MemoryError, RuntimeError) as error:
    print("in memory:", error)
"""


def test_state_four_times_as_large_as_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    names = {file.name for file in tmp_path.iterdir()}
    assert {name.partition("-")[0].partition(".")[2] or "checkpoint" for name in names} == {"checkpoint", "safetensors"}
    assert "in memory:" in done.stdout and "allocate" in done.stdout
