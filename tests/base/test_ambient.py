"""Ambient: settings around a call belong to a program, and a step computes under them what plain torch computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

import fzero
from fzero import optim, tree
from fzero.base.ambient import find_ambient
from fzero.optim import apply_updates

MESH = fzero.VirtualMesh(fsdp=3)


@contextmanager
def setting(change: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


@contextmanager
def removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast in half": lambda: torch.autocast("cpu", dtype=torch.float16),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "dtype": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "device": lambda: torch.device("meta"),
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "precision": lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "a mode": BaseTorchFunctionMode,
    "a hook": lambda: removed(nn.modules.module.register_module_forward_hook(lambda module, args, output: output)),
}


def raw(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"w": (4, 4), "v": (4, 4), "b": (4,), "s": ()}
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def examples(rows: int = 6) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_program_belongs_to_its_settings(name: str) -> None:
    params, x = fzero.partition(raw(), MESH), examples(2)
    step = fzero.simulate(lambda p, x: x @ p["w"], MESH)
    pipeline, before = step._pipeline, find_ambient()

    def program() -> Any:
        return pipeline.prepare(*tree.flatten((params, x)))

    outside = program()
    with SETTINGS[name]():
        assert find_ambient() != before and find_ambient() == find_ambient()
        inside = program()
        assert inside is not outside and program() is inside
    assert find_ambient() == before and program() is outside


@pytest.mark.parametrize("name", SETTINGS)
def test_training_under_a_setting_is_that_of_plain_torch(name: str) -> None:
    """In its context and outside, one after the other, with state that was made in the other one."""
    sgd = optim.sgd(0.1, momentum=0.9)

    def step(params: Any, state: Any, x: Tensor) -> Any:
        grads = fzero.grad(lambda p: F.relu(x @ p["w"] + p["b"]).float().square().mean() * p["s"].float())(params)
        updates, state = sgd.update(grads, state, params)
        return apply_updates(params, updates), state

    plain, x = raw(), examples()
    params, sharded = fzero.partition(plain, MESH), fzero.simulate(step, MESH)
    plain_state, state = sgd.init(plain), sgd.init(params)
    for context in (SETTINGS[name], nullcontext, SETTINGS[name]):
        with context():
            plain, plain_state = step(plain, plain_state, x)
            params, state = sharded(params, state, x)
    bits = 8e-3 if "autocast" in name else 1e-6  # each rank's product is rounded to bfloat16
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=bits, atol=bits), fzero.unpartition(params), plain)


# autocast


def cast(dtype: torch.dtype = torch.bfloat16, enabled: bool = True) -> Any:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


def without(params: Any, x: Tensor) -> Tensor:
    with cast(enabled=False):
        return x @ params["w"].float()


CAST: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": lambda p, x: F.linear(x, p["w"], p["b"]),
    "twice": lambda p, x: torch.tanh(x @ p["w"]) @ p["w"] * p["s"],
    "of leaves": lambda p, x: x @ (p["w"] @ p["v"]),
    "on slices": lambda p, x: (p["w"] + p["v"]).exp() * p["w"] ** 2,
    "norm": lambda p, x: p["w"].norm() + p["v"].sum(),
    "layer_norm": lambda p, x: F.layer_norm(x @ p["w"], (4,), p["b"]),
    "remat": lambda p, x: fzero.remat(lambda p, x: torch.tanh(x @ p["w"]) @ p["v"])(p, x),
    "off inside": without,
    "softmax": lambda p, x: F.softmax(x @ p["w"], -1) @ p["b"],
}  # fmt: skip


@pytest.mark.parametrize("where", ["inside", "around", "both"])
@pytest.mark.parametrize("name", CAST)
def test_autocast_is_that_of_plain_torch(name: str, where: str) -> None:
    """Bit for bit on one rank, but for the order in which gradients of two uses add up; to bfloat16 on three ranks."""

    def step(params: Any, x: Tensor) -> Tensor:
        with cast() if where != "around" else nullcontext():
            return CAST[name](params, x)

    with cast() if where != "inside" else nullcontext():
        for dtype in (torch.float32, torch.bfloat16) if where == "both" else (torch.float32,):
            x, given = examples(), raw(dtype)
            for fn in (step, fzero.value_and_grad(lambda p, x: step(p, x).float().mean())):
                expected = tree.leaves(fn(given, x))
                for world, stage in ((1, 3), (3, 1), (3, 3)):
                    mesh = fzero.VirtualMesh(fsdp=world)
                    got = fzero.simulate(fn, mesh, stage=stage)(fzero.partition(given, mesh), x)
                    for a, b in zip(tree.leaves(fzero.unpartition(got)), expected, strict=True):
                        is_exact = world == 1 and fn is step and name != "norm"
                        torch.testing.assert_close(a, b, **dict.fromkeys(("rtol", "atol"), 0 if is_exact else 2e-2))


def test_a_cast_of_a_captured_weight_stays_in_its_trace() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    x = examples(2)
    with cast():
        before = x @ weight  # autocast remembers this weight's cast
        step = fzero.simulate(lambda x: x @ weight, 1)
        assert torch.equal(step(x), before)
        after = x @ weight
        assert type(after) is Tensor and torch.equal(after, before)
        with torch.no_grad():
            weight.mul_(2)
        assert torch.equal(step(x), 2 * before)


def test_planning_needs_no_default_device() -> None:
    params, x = fzero.partition(raw(), MESH), examples()
    with torch.device("meta"):
        step = fzero.simulate(fzero.value_and_grad(lambda p, x: (x @ p["w"]).mean()), MESH)
        program = step.trace(params, x)
        assert program.memory().peak and program.timeline().seconds and str(program)
        value = step(params, x)[0]
    torch.testing.assert_close(value, (x @ raw()["w"]).mean())


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.linear else result


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


DOUBLINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a mode": Doubling,
    "a hook": lambda: removed(nn.modules.module.register_module_forward_hook(double)),
}


@pytest.mark.parametrize("name", DOUBLINGS)
def test_what_sees_each_operation_counts_in_the_calls_around_which_it_is(name: str) -> None:
    linear, x = nn.Linear(4, 2), examples()
    params, apply = fzero.lower(linear)
    params, step = fzero.partition(params, MESH), fzero.simulate(lambda p, x: apply(p, x), MESH)
    for around in (nullcontext, DOUBLINGS[name], nullcontext, DOUBLINGS[name]):
        with around():
            torch.testing.assert_close(step(params, x), linear(x).detach())


@pytest.mark.parametrize("differentiate", [fzero.grad, torch.func.grad], ids=["fzero", "torch.func"])
def test_detect_anomaly_finds_nan_in_a_gradient_when_the_step_runs(differentiate: Any) -> None:
    def step(p: Any, x: Tensor) -> Any:
        return tree.map(lambda w, g: w - g, p, differentiate(lambda p: (x * p["w"].abs().sqrt()).sum())(p))

    x, around = torch.ones(3, 4), torch.autograd.set_detect_anomaly
    given, zeros = raw(), {name: torch.zeros_like(w) for name, w in raw().items()}
    given = {"w": given["b"]}
    step = fzero.simulate(step, MESH, donate=False)
    params, wrong = fzero.partition(given, MESH), fzero.partition({"w": zeros["b"]}, MESH)
    expected = step(params, x)
    assert step(wrong, x)["w"].isnan().any()
    with around(True):
        torch.testing.assert_close(fzero.unpartition(step(params, x)), fzero.unpartition(expected))
        with pytest.raises(RuntimeError, match=r"test_ambient\.py:\d+ in step: .*: \w+Backward0 returned nan values"):
            step(wrong, x)
    assert step(wrong, x)["w"].isnan().any()


INSIDE: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "zeros": (lambda: torch.zeros(2), False),
    "arange": (lambda: torch.arange(3.0), False),
    "a quotient": (lambda: torch.arange(3) / 2, False),
    "a dtype": (lambda: torch.zeros(2, dtype=torch.float64), True),
    "a sum of integers": (lambda: torch.arange(3).sum(), True),
    "a cast": (lambda: torch.arange(3).to(torch.float16), True),
    "a number": (lambda: torch.tensor(1.5), True),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_default_dtype_inside_of_a_step_is_that_of_plain_torch_or_refused(name: str) -> None:
    make, is_said = INSIDE[name]

    def step(x: Tensor) -> Any:
        outside = torch.zeros(2)
        with SETTINGS["dtype"]():
            return make(), outside, x + 1

    x = torch.ones(3, 2)
    if is_said:
        torch.testing.assert_close(fzero.simulate(step, MESH)(x), step(x))
    else:
        with pytest.raises(fzero.FzeroError, match=r"set_default_dtype\(torch.float64\) inside .* dtype=torch.float64"):
            fzero.simulate(step, MESH)(x)
