"""`fzero.scan` against the turns one by one, on plain tensors and on virtual ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import calls, names
from torch import Tensor, nn

import fzero
from fzero import ops, optim, tree
from fzero.passes import defaults

pytestmark = pytest.mark.usefixtures("shared_traces")

Step = Callable[[Any, Tensor], Any]
WIDTH, TURNS, ROWS = 4, 3, 6  # rows of each turn, over all ranks


def params() -> Any:
    torch.manual_seed(0)
    shapes = {"w": (WIDTH, WIDTH), "b": (WIDTH,), "odd": (3,), "s": ()}
    return {name: 0.3 * torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def batch() -> Tensor:
    """[rows, turns, width]: ranks cut along dim 0, turns along dim 1."""
    return torch.randn(ROWS, TURNS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def turns_of(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def loss(p: Any, x: Tensor) -> Tensor:
    return (torch.tanh(x @ p["w"] + p["b"]) * p["s"]).square().mean() + p["odd"].square().sum()


def one_by_one(body: Callable[..., Any], carry: Any, xs: Any = None, length: int | None = None) -> Any:
    """What `scan` means, written as in JAX's documentation."""
    count = tree.leaves(xs)[0].shape[0] if tree.leaves(xs) else length
    ys = []
    for i in range(count):
        carry, y = body(carry, tree.map(lambda x: x[i], xs))  # noqa: B023
        ys.append(y)
    return carry, tree.map(lambda *each: torch.stack(each), ys[0], *ys[1:])


def differs_between_ranks_later(scan: Any, p: Any, x: Tensor) -> Any:
    """The carry begins the same on all ranks."""
    zero = torch.zeros((), dtype=torch.float64)
    total, seen = scan(lambda t, row: (t + loss(p, row), t), zero, turns_of(x))
    return fzero.pmean(total, "fsdp"), fzero.pmean(seen, "fsdp")


def meets_state(scan: Any, p: Any, x: Tensor) -> Any:
    """A leaf stays in slices beside a carry that all ranks share, and is gathered beside one that they do not."""

    def body(carry: Any, row: Tensor) -> Any:
        shared, own = carry
        own = own + row.mean()
        return (shared * 0.5, own), ((p["b"] * shared).sum(), fzero.pmean((p["b"] * own).sum(), "fsdp"))

    one = torch.ones((), dtype=torch.float64)
    (shared, _), ys = scan(body, (one, one), turns_of(x))
    return shared, ys


def trains(scan: Any, p: Any, x: Tensor) -> Any:
    """Steps of gradient descent in a loop: parameters are the carry."""

    def body(p: Any, row: Tensor) -> Any:
        value, grads = fzero.value_and_grad(loss)(p, row)
        return tree.map(lambda a, g: a - 0.1 * g, p, grads), fzero.pmean(value, "fsdp")

    return scan(body, p, turns_of(x))


def trains_with_momentum(scan: Any, p: Any, x: Tensor) -> Any:
    """The carry has optimizer state, with a count."""
    optimizer = optim.chain(optim.trace(0.9), optim.scale_by_schedule(lambda count: -0.1 / (1 + count)))

    def body(carry: Any, row: Tensor) -> Any:
        p, state = carry
        updates, state = optimizer.update(fzero.grad(loss)(p, row), state, p)
        return (optim.apply_updates(p, updates), state), None

    (p, state), _ = scan(body, (p, optimizer.init(p)), turns_of(x))
    return p, state


def is_nested(scan: Any, p: Any, x: Tensor) -> Any:
    def outer(h: Tensor, row: Tensor) -> Any:
        inner, ys = scan(lambda c, each: (c + (each @ p["w"]).sin().mean(), c), h, row.reshape(2, -1, WIDTH))
        return inner * p["s"], ys.sum()

    h, ys = scan(outer, torch.zeros((), dtype=torch.float64), turns_of(x).repeat(1, 2, 1))
    return fzero.pmean(h, "fsdp"), fzero.pmean(ys, "fsdp")


def swaps(scan: Any, p: Any, x: Tensor) -> Any:
    """Leaves of the carry change places, stay as they are, and are rows of xs."""

    def body(carry: Any, row: Tensor) -> Any:
        a, b, same, last = carry
        return (b, a + 1, same, row), (last.sum() + same.sum(), b)

    start = (
        torch.zeros(2),
        torch.ones(2),
        p["b"].full_tensor() if isinstance(p["b"], fzero.Sharded) else p["b"],
        x[:, 0],
    )
    (a, b, same, last), (sums, bs) = scan(body, start, turns_of(x))
    return a, b, same.clone(), fzero.pmean(last.sum(), "fsdp"), fzero.pmean(sums, "fsdp"), bs


def writes(scan: Any, p: Any, x: Tensor) -> Any:
    """Writes into what a turn has made."""

    def body(total: Tensor, row: Tensor) -> Any:
        h = row @ p["w"]
        h.mul_(2).add_(p["b"])
        buffer = torch.zeros(2, dtype=h.dtype)
        buffer[1] = h.sum()
        return total + buffer, buffer

    total, ys = scan(body, torch.zeros(2, dtype=torch.float64), turns_of(x))
    return fzero.pmean(total, "fsdp"), fzero.pmean(ys, "fsdp")


def is_differentiated(scan: Any, p: Any, x: Tensor) -> Any:
    """The loop is in a loss."""

    def total(p: Any) -> Tensor:
        h, ys = scan(lambda h, row: (torch.tanh(row @ p["w"] + h), (h * p["s"]).sum()), x[:, 0] * 0, turns_of(x))
        return h.square().mean() + ys.square().mean()

    value, grads = fzero.value_and_grad(total)(p)
    return fzero.pmean(value, "fsdp"), grads


def has_regions(scan: Any, p: Any, x: Tensor) -> Any:
    def body(total: Tensor, row: Tensor) -> Any:
        value, grads = fzero.value_and_grad(lambda p: fzero.remat(loss)(p, row))(p)
        return tree.map(torch.add, total, grads), value

    total, values = scan(body, tree.map(torch.zeros_like, p), turns_of(x))
    return total, fzero.pmean(values, "fsdp")


def is_in_inference_mode(scan: Any, p: Any, x: Tensor) -> Any:
    """A value that nothing trains by. The loop writes over its carry."""
    with torch.inference_mode():
        start = torch.zeros((), dtype=torch.float64)
        total, _ = scan(lambda t, row: (t + (row @ p["w"]).mean(), None), start, turns_of(x))
    return fzero.pmean(total.clone(), "fsdp")


TABLE = torch.arange(3.0, dtype=torch.float64)


def captures(scan: Any, p: Any, x: Tensor) -> Any:
    total, _ = scan(lambda t, row: (t + (TABLE * p["odd"]).sum() * row.mean(), None), TABLE[0] * 0, turns_of(x))
    return fzero.pmean(total, "fsdp")


def counts(scan: Any, p: Any, x: Tensor) -> Any:
    """No xs."""
    return scan(lambda t, _: (t * 2 + 1, t), torch.tensor(1), length=5)


def computes_nothing(scan: Any, p: Any, x: Tensor) -> Any:
    """The carry becomes a value from outside, in a loop of loops that only pass values on."""
    last, zero = torch.arange(3.0), torch.zeros(3)

    def outer(c: Any, row: Tensor) -> Any:
        a, b = scan(lambda a, _: (last, a), c[0], length=2)
        return (a, c[0]), (b, row)

    (a, b), (ys, rows) = scan(outer, (zero, zero), turns_of(x))
    return a.clone(), b, ys, fzero.pmean(rows.sum((1, 2)), "fsdp")


def follows_captured(scan: Any, p: Any, x: Tensor) -> Any:
    """Autograd, not torch.func, differentiates a carry and a y with respect to what the body captures."""
    w = x[:1, 0].mean(0).requires_grad_()
    total, ys = scan(lambda t, row: (t + (row * w).sin().sum(), (w * t).sum()), x[0, 0, 0] * 0, turns_of(x))
    return fzero.pmean(torch.autograd.grad(total + ys.sum() + w.square().sum(), w)[0], "fsdp")


def follows_operands(scan: Any, p: Any, x: Tensor) -> Any:
    """Autograd differentiates with respect to the carry in front of the loop, and to xs."""
    start, rows = x[:, 0].mean().requires_grad_(), turns_of(x).clone().requires_grad_()
    total, _ = scan(lambda t, row: (t * row.mean(), None), start, rows)
    ga, gb = torch.autograd.grad(total + start.square() + rows.square().sum(), (start, rows))
    return fzero.pmean(ga, "fsdp"), fzero.pmean(gb.sum(1), "fsdp")


def trains_by_autograd(scan: Any, p: Any, x: Tensor) -> Any:
    """Autograd differentiates inside of a turn."""

    def body(w: Tensor, row: Tensor) -> Any:
        w = w.detach().requires_grad_()
        (g,) = torch.autograd.grad((row @ w).square().mean(), w)
        return w.detach() - 0.1 * fzero.pmean(g, "fsdp"), None

    return scan(body, torch.ones(WIDTH, dtype=torch.float64), turns_of(x))[0]


def has_no_turns(scan: Any, p: Any, x: Tensor) -> Any:
    """A loop without turns in a loss."""
    if scan is one_by_one:
        return fzero.grad(lambda p: p["b"].square().sum())(p)

    def total(p: Any) -> Tensor:
        full = p["b"].full_tensor() if isinstance(p["b"], fzero.Sharded) else p["b"]
        h, ys = scan(lambda h, _: (h @ p["w"], h.sum()), full, length=0)
        return h.square().sum() + ys.sum()

    return fzero.grad(total)(p)


UNROLLED = [is_differentiated, follows_captured, follows_operands, has_no_turns]
STEPS = [
    differs_between_ranks_later, meets_state, trains, trains_with_momentum, is_nested, swaps, writes, has_regions,
    captures, counts, computes_nothing, trains_by_autograd, *UNROLLED, is_in_inference_mode,
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_a_scan_is_its_turns_one_by_one(step: Any) -> None:
    torch.testing.assert_close(step(fzero.scan, params(), batch()), step(one_by_one, params(), batch()), rtol=0, atol=0)


CELLS = [
    [(1, 1, True), (2, 2, False), (2, 3, True), (3, 1, False)],
    [(1, 3, False), (2, 1, True), (3, 2, True), (3, 3, False)],
]
"""(world, stage, donate). Steps take turns: each is tried at every stage."""


@pytest.mark.parametrize(
    ("step", "world", "stage", "donate"), [(step, *cell) for i, step in enumerate(STEPS) for cell in CELLS[i % 2]]
)
def test_a_step_with_a_scan_is_the_step_with_its_turns(step: Any, world: int, stage: int, donate: bool) -> None:
    torch.testing.assert_close(simulated(step, fzero.scan, world, stage, donate), turns_one_by_one(step, world))


@functools.cache
def turns_one_by_one(step: Any, world: int) -> Any:
    """A step without a scan, at one stage: other stages compute the same."""
    return simulated(step, one_by_one, world, 3, True)


def simulated(step: Any, scan: Any, world: int, stage: int, donate: bool) -> Any:
    mesh = fzero.VirtualMesh(fsdp=world)
    sharded = fzero.simulate(lambda p, x: step(scan, p, x), mesh, stage=stage, donate=donate)
    return fzero.unpartition(sharded(fzero.partition(params(), mesh), batch()))


@pytest.mark.parametrize("step", [step for step in STEPS if step not in UNROLLED])
def test_the_program_does_not_grow_with_the_turns(step: Any) -> None:
    mesh, traced = fzero.VirtualMesh(fsdp=2), []

    def find_sizes(turns: int) -> tuple[int, int]:
        sharded = fzero.simulate(lambda p, x: step(fzero.scan, p, x), mesh)
        program = sharded.trace(fzero.partition(params(), mesh), batch()[:, :1].repeat(1, turns, 1))
        traced.append(program)
        return len(program.graph.nodes), len(str(program).splitlines())

    assert find_sizes(2) == find_sizes(64)
    assert len(calls(traced[0], ops.loop)) == 1


@pytest.mark.parametrize(("step", "loops"), [(follows_captured, 0), (follows_operands, 2)])
def test_autograd_takes_the_turns_one_by_one_where_they_capture_what_it_follows(step: Any, loops: int) -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    simulated = fzero.simulate(lambda p, x: step(fzero.scan, p, x), mesh)
    assert len(calls(simulated.trace(fzero.partition(params(), mesh), batch()), ops.loop)) == loops


def test_a_derivative_of_a_loop_is_not_differentiated_by_autograd() -> None:
    def step(p: Any, x: Tensor) -> Any:
        w = (p["w"] * 1).full_tensor().requires_grad_()
        h, _ = fzero.scan(lambda h, row: (torch.tanh(h) * row.mean(), None), w, turns_of(x))
        (first,) = torch.autograd.grad(h.square().sum(), w, create_graph=True)
        return fzero.pmean(torch.autograd.grad(first.square().sum(), w)[0], "fsdp")

    mesh = fzero.VirtualMesh(fsdp=2)
    with pytest.raises(fzero.FzeroError, match=r"derivative of a loop is differentiated again.*nest fzero.grad"):
        fzero.simulate(step, mesh)(fzero.partition(params(), mesh), batch())


def test_a_captured_network_that_requires_grad_leaves_the_loop_a_loop() -> None:
    """As the teacher of a distillation does, in `accumulate`: autograd follows it, and nobody differentiates it."""
    torch.manual_seed(0)
    teacher, mesh = nn.Linear(WIDTH, 1, dtype=torch.float64), fzero.VirtualMesh(fsdp=2)

    def step(p: Any, x: Tensor, microbatches: int = 2) -> Any:
        def sums(p: Any, x: Tensor) -> Any:
            return (x @ p["w"] - teacher(x)).square().sum(), x.shape[0]

        return fzero.accumulate(sums, microbatches)({"w": p["w"]}, x)

    sharded, x = fzero.simulate(step, mesh), batch()[:4, 0]
    p = fzero.partition(params(), mesh)
    assert len(calls(sharded.trace(p, x), ops.loop)) == 1
    (loss, grads), (expected, wanted) = sharded(p, x), step(params(), x, 1)
    torch.testing.assert_close((loss, fzero.unpartition(grads)["w"]), (expected.detach(), wanted["w"].detach()))


def test_the_body_is_traced_once_or_twice() -> None:
    mesh, seen = fzero.VirtualMesh(fsdp=2), []

    def step(p: Any, x: Tensor) -> Any:
        def body(total: Tensor, row: Tensor) -> Any:
            seen.append(row.shape)
            return total + row.mean(), None

        return fzero.scan(body, x.mean(), turns_of(x))[0], fzero.scan(body, torch.zeros(()).double(), turns_of(x))[0]

    fzero.simulate(step, mesh).trace(fzero.partition(params(), mesh), batch())
    assert len(seen) == 1 + 2


def test_each_turn_draws_anew_and_a_seed_repeats_them() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    drop = nn.Dropout(0.5)
    step = fzero.simulate(lambda x: fzero.scan(lambda c, _: (c, drop(x)), torch.zeros(()), length=8)[1], mesh)

    def draw() -> Tensor:
        torch.manual_seed(3)
        return step(torch.ones(4, 64))

    first = draw()
    assert len({tuple(row.flatten().tolist()) for row in first}) == 16  # 8 turns of 2 ranks
    assert torch.equal(first, draw())


def test_the_carry_is_updated_in_place() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    step = fzero.simulate(lambda p, x: trains(fzero.scan, p, x), mesh)
    program = step.trace(fzero.partition(params(), mesh), batch())
    (loop,) = calls(program, ops.loop)
    assert [argument.donated for argument in loop.args[0].arguments[:4]] == [True] * 4
    assert loop.args[2] == program.placeholders[:4] and all(argument.donated for argument in program.arguments[:4])
    given = fzero.partition(params(), mesh)
    step(given, batch())
    with pytest.raises(fzero.FzeroError, match="donated|updated in place"):
        given["w"].full_tensor()


def test_a_loop_with_no_turns_returns_the_carry_and_no_rows() -> None:
    mesh, x = fzero.VirtualMesh(fsdp=2), torch.zeros(4, 0, 3)
    body = lambda c, row: (c + row.sum(), {"y": row * 2, "n": torch.tensor([1, 2])})  # noqa: E731
    plain, ys = fzero.scan(body, torch.tensor(5.0), x.transpose(0, 1))
    assert plain == 5 and ys["y"].shape == (0, 4, 3) and ys["n"].shape == (0, 2) and ys["n"].dtype == torch.int64
    carry, ys = fzero.simulate(lambda x: fzero.scan(body, torch.tensor(5.0), x.transpose(0, 1)), mesh)(x)
    assert carry == 5 and ys["n"].shape == (0, 2)


def refused(body: Any, carry: Any, message: str, *xs: Any, length: int | None = None) -> Any:
    return pytest.param(body, carry, xs[0] if xs else None, length, message, id=message[:30])


@pytest.mark.parametrize(
    ("body", "carry", "xs", "length", "message"),
    [
        refused(lambda c, x: c, torch.ones(2), "the body returns a Tensor; return a pair", length=2),
        refused(lambda c, x: (c[:1], x), torch.ones(2), r"scan: carry: has shape \(2,\), and \(1,\) behind", length=2),
        refused(
            lambda c, x: ({"a": c["a"].double()}, x), {"a": torch.ones(2)},
            r"carry a: has dtype torch.float32, and torch.float64", length=2,
        ),
        refused(lambda c, x: ((c, c), x), torch.ones(2), "scan: carry", length=2),
        refused(lambda c, x: (c, 3), torch.ones(2), "scan: y: is 3, which is no tensor", length=2),
        refused(lambda c, x: (c, None), 0.0, "scan: carry: is 0.0, which is no tensor; give torch.tensor", length=2),
        refused(lambda c, x: (c, None), torch.ones(1), "xs 1: has 3 rows, xs 0 has 2", (torch.ones(2), torch.ones(3))),
        refused(lambda c, x: (c, None), torch.ones(1), "xs: has 2 rows, length has 3", torch.ones(2), length=3),
        refused(lambda c, x: (c, None), torch.ones(1), "xs: is 0-d", torch.ones(())),
        refused(lambda c, x: (c, None), torch.ones(1), "has no xs, no length and no layers"),
        refused(lambda c, x: (c, None), torch.ones(1), "length: is -1", length=-1),
        refused(lambda c, x: (c, None), torch.ones(1), "length: is 2.0; give a whole number", length=2.0),
        refused(lambda c, x: (c, None), torch.ones(1), "length: is True; give a whole number", length=True),
        refused(lambda c, x: ([*c], x), (torch.ones(1),), "scan: carry: trees differ", length=1),
        refused(lambda c, x: (c.to("meta"), x), torch.ones(1), "carry: has device cpu, and meta behind", length=1),
    ],
)  # fmt: skip
def test_bad_input_is_named(body: Any, carry: Any, xs: Any, length: int | None, message: str) -> None:
    with pytest.raises(fzero.FzeroError, match=message):
        fzero.scan(body, carry, xs, length)


def leaves_a_value_behind(p: Any, x: Tensor) -> Any:
    kept = []

    def body(c: Tensor, row: Tensor) -> Any:
        kept.append(row.sin())
        return c, None

    fzero.scan(body, x.sum(), turns_of(x))
    return kept[0].sum()


def leaves_a_value_of_a_first_try_behind(p: Any, x: Tensor) -> Any:
    """The body is traced again, because its carry begins the same on all ranks, and does not stay so."""
    kept = []

    def body(c: Tensor, row: Tensor) -> Any:
        kept.append(row.sin())
        return c + row.mean(), None

    fzero.scan(body, torch.zeros((), dtype=torch.float64), turns_of(x))
    return kept[0].sum()


def moves_statistics(p: Any, x: Tensor) -> Any:
    """Statistics of a captured module would have to be a carry."""
    norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    return fzero.scan(lambda c, row: (c + norm(row).square().sum(), None), zero, turns_of(x))[0]


WEIGHT = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))


def differentiates_captured_parameters(p: Any, x: Tensor) -> Any:
    total, _ = fzero.scan(lambda t, row: (t + (row @ WEIGHT).sum(), None), x.sum() * 0, turns_of(x))
    return torch.autograd.grad(total, WEIGHT)[0]


def drifts(p: Any, x: Tensor) -> Any:
    return fzero.scan(lambda p, row: (tree.map(lambda a: a.full_tensor() + row.sum(), p), None), p, turns_of(x))[0]


def writes_into_what_is_outside(p: Any, x: Tensor) -> Any:
    h = x.sum(1)

    def body(c: Tensor, row: Tensor) -> Any:
        return c + h.add_(row).sum(), None

    return fzero.scan(body, x.sum(), turns_of(x))[0]


def becomes_state(p: Any, x: Tensor) -> Any:
    return fzero.scan(lambda c, row: (p["b"] * 2, None), torch.zeros(WIDTH, dtype=torch.float64), turns_of(x))[0]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (leaves_a_value_behind, r"test_loops.py:\d+ in body.* is used outside of it.*return it from the body"),
        (leaves_a_value_of_a_first_try_behind, r"test_loops.py:\d+ in body.* is used outside of it.*return it"),
        (moves_statistics, r"test_loops.py:\d+ in <lambda>.* is used outside of it"),
        (differentiates_captured_parameters, "scan: a loop of a step is differentiated.*that its body captures; give"),
        (drifts, "carry b: is state .b., and differs between ranks behind a turn.*pmean"),
        (writes_into_what_is_outside, r"add_ writes into it, .*test_loops.py:\d+ in body"),
        (becomes_state, "is a plain tensor, and state .b. behind a turn"),
    ],
)
def test_what_a_step_may_not_do_in_a_scan(step: Step, message: str) -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    with pytest.raises(fzero.FzeroError, match=message):
        fzero.simulate(step, mesh)(fzero.partition(params(), mesh), batch())


def test_gathers_stay_in_the_loop_at_stage_3_and_stand_in_front_of_it_at_stage_2() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    case = fzero.partition(params(), mesh), batch()

    def gathers(stage: int) -> tuple[int, int]:
        step = fzero.simulate(
            lambda p, x: differs_between_ranks_later(fzero.scan, p, x), mesh, passes=defaults(stage=stage)
        )
        program = step.trace(*case)
        (loop,) = calls(program, ops.loop)
        return names(program).count("all_gather"), names(loop.args[0]).count("all_gather")

    assert gathers(3) == (0, 3) and gathers(2) == gathers(1) == (3, 0)
