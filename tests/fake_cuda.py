"""Fake CUDA: runs a function in a process where autograd finds a CUDA device, which computes nothing. A helper of the
tests.

    run(fn, 7)   -> fn(7), in which fake tensors on "cuda:0" can be differentiated

A build of torch without CUDA refuses this. `fake_cuda.cpp`, which the compiler at hand makes a library of, gives torch
the device that it looks for. Where CUDA is at hand, nothing is built.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

SOURCE = Path(__file__).with_suffix(".cpp")
TORCH = Path(torch.__file__).parent


def run(fn: Callable[..., Any], *args: Any, timeout: float = 240.0) -> Any:
    """`fn(*args)` of the process. `fn` is importable; its result is pickled. Skips the test where nothing can be built.

    Raises:
        RuntimeError: where `fn` raises, with its traceback.
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths}
    with TemporaryDirectory() as folder:
        if not torch.cuda.is_available():
            environment["LD_PRELOAD"] = str(_build(Path(folder)))
        command = [sys.executable, __file__]
        given = pickle.dumps((fn, args))
        done = subprocess.run(command, input=given, env=environment, capture_output=True, timeout=timeout, check=False)
    if done.returncode:
        raise RuntimeError(f"the process failed with {done.returncode}:\n{done.stderr.decode()}")
    return pickle.loads(done.stdout)


def _build(folder: Path) -> Path:
    """The library to preload, in a folder."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if torch.version.cuda or compiler is None or not (TORCH / "include").exists():
        lacking = "a GPU" if torch.version.cuda else "a C++ compiler" if compiler is None else "torch's headers"
        pytest.skip(f"a fake CUDA device needs {lacking}")
    library = folder / "fake_cuda.so"
    include = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    link = [f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    flags = ["-shared", "-fPIC", "-O1", "-std=c++20"]
    subprocess.run([compiler, *flags, *include, str(SOURCE), "-o", str(library), *link], check=True)
    return library


if __name__ == "__main__":
    out = os.dup(1)
    os.dup2(2, 1)  # what `fn` prints is no part of its result
    fn, args = pickle.load(sys.stdin.buffer)
    result = pickle.dumps(fn(*args))
    with os.fdopen(out, "wb") as stream:
        stream.write(result)
