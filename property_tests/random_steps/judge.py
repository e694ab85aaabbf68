"""The outcome of a random step: equal to plain torch, refused by an `FzeroError`, or one of what must not be.

equal     each result, new state and held value is plain torch's, up to rounding
refused   fzero raises an FzeroError
raw       something else is raised, or an FzeroError that asks for a bug report
wrong     a value differs, or ranks drift apart
invalid   plain torch refuses the step, or its values are no moderate numbers
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fzero
from fzero import tree
from property_tests.random_steps.program import Program

TOLERANCES = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-2, "bfloat16": 6e-2}
"""Narrowest dtype of a step -> the largest difference, in units of the largest element of a result and of 1."""


class Verdict(NamedTuple):
    """The outcome of a step and its reason, without names and numbers, so that reasons can be counted."""

    outcome: str
    reason: str = ""
    detail: str = ""


class Drift(Exception):
    """A value that differs from plain torch's."""


def judge(program: Program) -> Verdict:
    """The outcome of a step."""
    if "torch.inference_mode()" in program.contexts and not _differentiates_in_inference_mode():
        return Verdict("invalid", "torch.func has gradients of zero in inference mode")
    with _silence(), torch.random.fork_rng(devices=[]):
        try:
            expected = list(_plain(program))
        except Exception as error:
            return Verdict("invalid", _summary(error), _trace())
        if any(not _is_moderate(leaf) for call in expected for leaf in tree.leaves(call.values)):
            return Verdict("invalid", "values that are no moderate numbers")
        try:
            with tempfile.TemporaryDirectory() if program.on_disk else contextlib.nullcontext("") as folder:
                _check(program, expected, folder)
        except Drift as error:
            return Verdict("wrong", _summary(error), str(error))
        except fzero.FzeroError as error:
            outcome = "raw" if "please report" in str(error) else "refused"
            outcome = "wrong" if "ranks that must hold the same value" in str(error) else outcome
            return Verdict(outcome, _summary(error), str(error))
        except Exception as error:
            return Verdict("raw", _summary(error), _trace())
    return Verdict("equal")


class Call(NamedTuple):
    """What one call of the step gives in plain torch: trees of values, of which `own` is one tree for each rank."""

    new: Any
    out: Any
    results: Any
    own: list[Any]

    @property
    def values(self) -> Any:
        return self.new, self.out, self.results, self.own


def _plain(program: Program) -> Iterator[Call]:
    """What each call gives in plain torch."""
    world = program.world
    scripts = [program.define() for _ in range(world + 1)]  # each with caches of its own
    p = scripts[0]["params"]()
    s = scripts[0]["init"](p)
    for number, (rows, context) in enumerate(zip(program.rows, program.contexts)):
        batch = scripts[0]["batch"](rows * world)
        parts = list(zip(*(piece.chunk(world) for piece in batch)))
        given = [batch, *parts] if program.own or program.is_local else [batch]
        if number:
            _between(program, scripts)
        found = []
        for script, examples in zip(scripts, given):
            if program.is_local and examples is batch:
                found.append(None)
                continue
            with _context(context):
                found.append(script["step"](*tree.map(torch.clone, (p, s)), *map(torch.clone, examples)))
        own = [result[3] for result in found[1:]]
        if program.is_local:
            new, out, results = tree.map(_mean, *(result[:3] for result in found[1:]))
        else:
            new, out, results = found[0][:3]
        yield tree.map(lambda leaf: leaf.detach().clone(), Call(new, out, results, own))
        p, s = tree.map(lambda leaf: leaf.detach().clone(), (new, out))


def _mean(*values: Any) -> Any:
    """The mean of the ranks' values; the first where they are integers."""
    if not values[0].is_floating_point():
        return values[0]
    return torch.stack([value.double() for value in values]).mean(0).to(values[0].dtype)


def _check(program: Program, expected: list[Call], folder: str) -> None:
    """Run the step on virtual ranks, and compare each call. State on a disk lies in the folder."""
    mesh, script = fzero.VirtualMesh(**dict(program.mesh)), program.define()
    plain = script["params"]()
    host, disk = fzero.host(), fzero.disk(folder) if folder else None
    places = [host if name in program.on_host else disk if name in program.on_disk else None for name in "ps"]
    p = fzero.partition(plain, mesh, to=places[0])
    s = fzero.partition(script["init"](plain), mesh, like=p, to=places[1])
    step = fzero.simulate(script["step"], mesh, **program.options)
    tolerance = _tolerance(program)
    kept: list[tuple[str, Any, Any]] = _hold(program, p)  # what a user holds: must not change under them
    for number, (rows, context, call) in enumerate(zip(program.rows, program.contexts, expected), start=1):
        batch = script["batch"](rows * program.world)
        if number > 1:
            _between(program, [script])
        if not program.donate:
            kept.append((f"arguments of call {number}", (p, s), tree.map(lambda leaf: _full(leaf).clone(), (p, s))))
        kept.append((f"batch of call {number}", batch, tree.map(torch.clone, batch)))
        with _context(context):
            new, out, results, own = step(p, s, *batch)
        _compare_trees(f"call {number} new", new, call.new, tolerance)
        _compare_trees(f"call {number} out", out, call.out, tolerance)
        _compare_trees(f"call {number} results", results, call.results, tolerance, are_results=True)
        _compare_own(f"call {number} own", own, call.own, tolerance)
        for where, values, copies in kept:
            _compare_held(f"{where} after call {number}", values, copies)
        shown = (results, own)
        kept.append((f"results of call {number}", shown, tree.map(lambda leaf: _full(leaf).clone(), shown)))
        p, s = new, out


def _hold(program: Program, p: Any) -> list[tuple[str, Any, Any]]:
    """What a user makes of the leaf `w` before the first call, and a copy."""
    if not program.held:
        return []
    held = eval(f"p['w']{program.held}", {"p": p, "torch": torch})
    return [("held value", held, _full(held).clone())]


def _compare_held(where: str, values: Any, copies: Any) -> None:
    """Refuse values that changed. A value may say that it was donated."""
    for path, value, copy in zip(tree.paths(values), tree.leaves(values), tree.leaves(copies)):
        with contextlib.suppress(fzero.FzeroError):
            _compare(f"{where} {path}", _full(value), copy, 0.0)


def _full(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, fzero.Sharded) else value


def _between(program: Program, scripts: list[dict[str, Any]]) -> None:
    for script in scripts:
        exec(program.between, script)


@cache
def _differentiates_in_inference_mode() -> bool:
    """False for torch 2.11, where gradients of torch.func are zeros there. Those of fzero are the same everywhere."""
    with torch.inference_mode():
        return torch.func.grad(torch.square)(torch.ones(())).item() == 2


def _context(text: str) -> Any:
    return eval(text, {"torch": torch}) if text else contextlib.nullcontext()


def _tolerance(program: Program) -> float:
    text = program.source() + " ".join(program.contexts)
    return max(
        tolerance
        for name, tolerance in TOLERANCES.items()
        if name in text or (name == "float32" and ".float()" in text) or (name == "bfloat16" and ".bfloat16()" in text)
    )


def _compare_trees(where: str, got: Any, expected: Any, tolerance: float, *, are_results: bool = False) -> None:
    if tree.paths(got) != tree.paths(expected):
        raise Drift(f"{where}: other structure: {tree.paths(got)} and {tree.paths(expected)}")
    for path, a, b in zip(tree.paths(got), map(_full, tree.leaves(got)), tree.leaves(expected)):
        _compare(f"{where} {path}", _repeat(a, b) if are_results else a, b, tolerance)


def _repeat(got: Tensor, expected: Tensor) -> Tensor:
    """Rows that all ranks have alike come once: so often, then, as the whole batch has them."""
    if 0 < got.ndim == expected.ndim and 0 < len(got) < len(expected) and not len(expected) % len(got):
        return got.repeat(len(expected) // len(got), *[1] * (got.ndim - 1))
    return got


def _compare_own(where: str, got: Any, expected: list[Any], tolerance: float) -> None:
    """Values of each rank's own: a floating number is averaged, others are joined along dim 0, unless all ranks have
    the same."""
    if not expected:
        return
    for position, (path, a) in enumerate(zip(tree.paths(got), tree.leaves(got))):
        values, a = [tree.leaves(one)[position] for one in expected], _full(a)
        if values[0].ndim == 0 and values[0].is_floating_point():
            _compare(f"{where} {path}", a, _mean(*values), tolerance)
        elif a.shape == values[0].shape and all(torch.equal(value, values[0]) for value in values):
            _compare(f"{where} {path}", a, values[0], tolerance)
        else:
            joined = torch.cat(values) if values[0].ndim else torch.stack(values)
            _compare(f"{where} {path}", a, joined, tolerance)


def _compare(where: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        raise Drift(f"{where}: {_form(got)} where plain torch has {_form(expected)}")
    if not expected.numel():
        return
    a, b = got.detach().double(), expected.detach().double()
    allowed = tolerance * (1 + float(b.abs().max())) if expected.is_floating_point() else 0.0
    distance = float((a - b).abs().max())
    if not distance <= allowed:
        raise Drift(f"{where}: differs by {distance:.3g}: {_show(got)} where plain torch has {_show(expected)}")


def _form(x: Tensor) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _show(x: Tensor) -> str:
    return str([float(f"{value:.5g}") for value in x.detach().double().reshape(-1)[:6].tolist()])


def _is_moderate(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
        return True
    largest = float(leaf.double().abs().max())
    return math.isfinite(largest) and largest < 1e3


def _summary(error: BaseException) -> str:
    """An error's type and first line, without names of leaves and numbers."""
    text = error.problem if isinstance(error, fzero.FzeroError) else (str(error) or "?").split("\n")[0]
    text = re.sub(r" \(step_\d+\.py:.*", "", text)
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'..'", text)
    text = re.sub(r"\([^()]*line \d+[^()]*\)|<step \d+>:\d+", "", text)
    text = re.sub(r"\[[^\]]*\]", "[..]", re.sub(r"-?\d+(\.\d+)?(e[-+]\d+)?", "#", text))
    return f"{type(error).__name__}: {text[:110]}"


def _trace() -> str:
    return "".join(traceback.format_exc().splitlines(True)[-14:])


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """No warnings and no log."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
