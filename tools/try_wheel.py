"""Try wheel: builds the sdist, and the wheel from the sdist, and tries the wheel as users have it. `make wheel`.

It trains, saves, loads and exports, the README's first code runs, and `mypy --strict` reads a user's script.

The wheel is installed into a new environment. That has the run-time dependencies that the wheel declares, and theirs,
and nothing else: they are links to the packages of this environment, because an installation of torch takes minutes. So
an import of what is not declared fails, as for users.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from setuptools import build_meta

ROOT = Path(__file__).resolve().parents[1]
LIFE = """
import sys
from pathlib import Path
import torch, fzero, fzero.checkpoint, fzero.data, fzero.deepspeed
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

assert "site-packages" in fzero.__file__ and "numpy" not in sys.modules, fzero.__file__
folder = Path(sys.argv[1])
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
torch.manual_seed(0)
whole, apply = fzero.lower(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)))
optimizer = fzero.optim.adamw(0.01)


def train_step(params, opt_state, x):
    loss, grads = fzero.value_and_grad(lambda params: apply(params, x).square().mean())(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return fzero.optim.apply_updates(params, updates), opt_state, loss


params = fzero.partition(whole, mesh)
opt_state, step, losses = optimizer.init(params), fzero.shard(train_step, mesh), []
for _ in range(4):
    params, opt_state, loss = step(params, opt_state, torch.randn(4, 8))
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
state = {"params": params, "opt_state": opt_state}
fzero.checkpoint.save(folder / "checkpoint", state, step=4)
found = fzero.checkpoint.load(folder / "checkpoint", state)
fzero.save_safetensors(found["params"], folder / "model.safetensors")
read = fzero.load_safetensors(folder / "model.safetensors", mesh=mesh, like=found["params"])
for one, other in zip(*(fzero.tree.leaves(fzero.unpartition(x)) for x in (found["params"], read))):
    assert torch.equal(one, other)
dist.barrier()
dist.destroy_process_group()
"""
TYPED = """
import fzero
import torch
from fzero import initializers, tree
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
whole, apply = fzero.lower(nn.Linear(8, 1))
optimizer = fzero.optim.adamw(0.01)


def rule(path: str, leaf: Tensor) -> initializers.Initializer:
    return initializers.normal(0.02)


def loss_of(params: tree.Tree, x: Tensor) -> Tensor:
    out: Tensor = apply(params, x)
    return out.square().mean()


def train_step(params: tree.Tree, opt_state: tree.Tree, x: Tensor) -> tuple[tree.Tree, tree.Tree, Tensor]:
    loss, grads = fzero.value_and_grad(loss_of)(params, x)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return fzero.optim.apply_updates(params, updates), opt_state, loss


born = fzero.init(whole, mesh, rule, seed=1)
params = fzero.partition(whole, mesh, persist=0)
step = fzero.shard(train_step, mesh, stage=3, memory="1 GiB")
params, opt_state, loss = step(params, optimizer.init(params), torch.randn(4, 8))
"""
MISTAKES = (
    ("stage=3", 'stage="3"', "arg-type"),
    ("stage=3", "stages=3", "call-arg"),
    ("persist=0", "persist=None", "arg-type"),
    ("lower(nn.Linear(8, 1))", "lower(nn.Linear)", "arg-type"),
    ("adamw(0.01)", "adamw(nn.Linear)", "arg-type"),
    ("seed=1", 'seed="1"', "arg-type"),
)
"""What a line of `TYPED` has, what it has then, and the code of mypy's error in that line."""


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        _, wheel = build(Path(made))
        try_wheel(Path(made), wheel)


def try_wheel(folder: Path, wheel: Path) -> None:
    """Live with a wheel, in a folder that is empty but for what `build` made."""
    python = install(folder / "environment", wheel)
    run(python, "-c", f"import fzero; assert fzero.__version__ == {wheel.name.split('-')[1]!r}", at=folder)
    (folder / "life.py").write_text(LIFE)
    run(python, *TORCHRUN, "life.py", str(folder), at=folder)
    (folder / "train.py").write_text(first_code((ROOT / "README.md").read_text()))
    run(python, "train.py", at=folder)
    run(python, *TORCHRUN, "train.py", at=folder)
    try_types(folder, python)
    print(f"{wheel.name}: trains, saves, loads and exports on two ranks, has types, and the README's first code runs")


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist of this tree, and the wheel of that."""
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        return _build(folder)


def _build(folder: Path) -> tuple[Path, Path]:
    source, dist = folder / "source", folder / "dist"
    shutil.copytree(ROOT, source, ignore=lambda _, names: {name for name in names if name not in PACKED})
    shutil.copytree(ROOT / "fzero", source / "fzero", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "README.md").write_text(make_absolute((ROOT / "README.md").read_text(), *read_project(ROOT)))
    os.chdir(source)
    sdist = build_meta.build_sdist(str(dist))
    with tarfile.open(dist / sdist) as archive:
        archive.extractall(folder, filter="data")
    os.chdir(folder / sdist.removesuffix(".tar.gz"))
    name = build_meta.build_wheel(str(dist))
    os.chdir(folder)
    return dist / sdist, dist / name


LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?!\w+:|#)([^)]+\))")
"""A relative link of Markdown, or an image."""


def make_absolute(text: str, address: str | None, version: str) -> str:
    """A page whose relative links lead to the tag of a version in the project's repository, for PyPI, which shows the
    README and does not rewrite its links. Without an address the links stay as they are."""
    if address is None:
        return text
    kinds = {"": "blob", "!": "raw"}
    return LINK.sub(lambda link: f"{link[1]}{link[2]}{address}/{kinds[link[1]]}/v{version}/{link[3]}", text)


def read_project(root: Path) -> tuple[str | None, str]:
    """The address of the repository, `Source` of [project.urls], and the version of a tree."""
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"].get("urls", {})
    line = next(line for line in (root / "fzero" / "__init__.py").read_text().splitlines() if "__version__ =" in line)
    return urls.get("Source"), line.split('"')[1]


PACKED = ("pyproject.toml", "README.md", "LICENSE")


def install(place: Path, wheel: Path) -> Path:
    """The interpreter of a new environment with the wheel and what it declares."""
    venv.create(place)
    python = place / "bin" / "python"
    site = next(place.glob("lib/python*/site-packages"))
    run(sys.executable, "-m", "pip", "-q", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    for name in find_dependencies(metadata.Distribution.at(next(site.glob("fzero-*.dist-info")))):
        for path, target in list_entries(metadata.distribution(name)).items():
            (site / path).symlink_to(target)
    run(sys.executable, "-m", "pip", "-q", "--python", str(python), "check")
    return python


def find_dependencies(of: metadata.Distribution) -> set[str]:
    """The names of the packages that a package needs without extras, and of those that they need."""
    found, todo = set[str](), [of]
    while todo:
        for line in todo.pop().requires or []:
            needed = Requirement(line)
            name = canonicalize_name(needed.name)
            if name not in found and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
                found.add(name)
                todo.append(metadata.distribution(name))
    return found


def list_entries(of: metadata.Distribution) -> dict[str, Path]:
    """The folders and files of a package beside other packages."""
    names = {path.parts[0] for path in of.files or [] if path.parts[0] not in ("..", "__pycache__")}
    return {name: Path(str(of.locate_file(name))) for name in names}


def try_types(folder: Path, python: Path) -> None:
    """`mypy --strict` accepts `TYPED` with the wheel, and finds each of `MISTAKES`."""
    texts, expected = {"typed.py": TYPED}, set[tuple[str, ...]]()
    for number, (right, wrong, code) in enumerate(MISTAKES):
        assert TYPED.count(right) == 1, right
        texts[f"mistake{number}.py"] = TYPED.replace(right, wrong)
        expected.add((f"mistake{number}.py", str(TYPED[: TYPED.index(right)].count("\n") + 1), code))
    for name, text in texts.items():
        (folder / name).write_text(text)
    check = (sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python))
    said = run(*check, *texts, at=folder, fails=True)
    if (found := set(re.findall(r"^(.*):(\d+): error: .*\[(.*)\]$", said, re.MULTILINE))) != expected:
        sys.exit(f"mypy should say {sorted(expected - found)}, and not {sorted(found - expected)}: {said}")


def first_code(text: str) -> str:
    """The first code block of a page."""
    found = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def run(*command: str | Path, at: Path | None = None, fails: bool = False) -> str:
    """What a command prints without this process's own packages in sight. The output of one that fails is shown, unless
    it is to fail."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), cwd=at, env=clean, capture_output=True, text=True)
    if fails != bool(done.returncode):
        print(done.stdout, done.stderr)
        sys.exit(f"{'did not fail' if fails else 'failed'}: {' '.join(map(str, command))[:200]}")
    return done.stdout


if __name__ == "__main__":
    main()
