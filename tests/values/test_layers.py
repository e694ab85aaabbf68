"""`fzero.scan` over equal layers, against the layers one by one: the loop, its backward pass, and what both cost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import calls, measure_peak
from torch import Tensor, nn
from torch.nn import functional

import fzero
from fzero import ops, optim, tree
from fzero.program.ops.loops import Loop
from fzero.program.records import early_of

pytestmark = pytest.mark.usefixtures("shared_traces")

WIDTH, LAYERS, ROWS = 4, 3, 6
Scan = Callable[..., Any]


def params(count: int = LAYERS) -> Any:
    torch.manual_seed(0)

    def layer() -> Any:
        shapes = {"w": (WIDTH, WIDTH), "b": (WIDTH,), "n": (WIDTH,), "s": ()}
        return {name: 0.5 * torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}

    first, head = (torch.randn(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
    return {"first": {"w": first}, "blocks": [layer() for _ in range(count)], "head": {"w": head}}


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def one_by_one(body: Callable[..., Any], carry: Any, xs: Any = None, *, layers: Any) -> Any:
    """What `scan` means."""
    ys = []
    for i, layer in enumerate(layers):
        carry, y = body(carry, tree.map(lambda x: x[i], xs), layer)  # noqa: B023
        ys.append(y)
    return carry, tree.map(lambda *each: torch.stack(each), ys[0], *ys[1:])


def block(h: Tensor, p: Any) -> Tensor:
    return h + torch.tanh(functional.layer_norm(h, (WIDTH,), p["n"]) @ p["w"].T + p["b"]) * p["s"]


# a loss from params, a batch and a scan


def is_plain(scan: Scan, p: Any, x: Tensor) -> Tensor:
    h, _ = scan(lambda h, _, layer: (block(h, layer), None), x @ p["first"]["w"], layers=p["blocks"])
    return (h @ p["head"]["w"]).square().mean()


def begins_with_the_batch(scan: Scan, p: Any, x: Tensor) -> Tensor:
    """The carry has no derivative in front of the loop."""
    h, _ = scan(lambda h, _, layer: (block(h, layer), None), x, layers=p["blocks"])
    return h.square().mean()


def has_rows(scan: Scan, p: Any, x: Tensor) -> Tensor:
    """Rows of xs, with and without derivative, and several y."""
    xs = x.T[:LAYERS], (x @ p["first"]["w"]).T[:LAYERS]

    def body(h: Tensor, rows: Any, layer: Any) -> Any:
        h = block(h + (rows[0] * rows[1])[:, None], layer)
        return h, (h.mean(), h[0], rows[1] * 2)

    h, (means, firsts, doubled) = scan(body, x, xs, layers=p["blocks"])
    return h.square().mean() + (means * means[0]).sum() + firsts.sin().sum() + doubled.square().sum()


def uses_a_leaf_twice(scan: Scan, p: Any, x: Tensor) -> Tensor:
    body = lambda h, _, layer: (block(block(h, layer), layer) @ layer["w"], (layer["s"] * 2).sum())  # noqa: E731
    h, ys = scan(body, x, layers=p["blocks"])
    return h.square().mean() + ys.prod()


def leaves_a_leaf_out(scan: Scan, p: Any, x: Tensor) -> Tensor:
    h, _ = scan(lambda h, _, layer: (h @ layer["w"], None), x, layers=p["blocks"])
    return h.square().mean()


def has_several_carries(scan: Scan, p: Any, x: Tensor) -> Tensor:
    """A count, a carry that stays, one without derivative behind the turn, and one that nothing uses."""

    def body(carry: Any, _: Any, layer: Any) -> Any:
        h, count, kept, cut, unused = carry
        return (block(h + kept * cut, layer), count + 1, kept, h.detach() * 0.5, unused + h.mean()), count

    start = x, torch.tensor(0), x @ p["first"]["w"], x, torch.zeros((), dtype=torch.float64)
    (h, count, kept, cut, _), counts = scan(body, start, layers=p["blocks"])
    return (h * count + kept).square().mean() + cut.sum() + counts.sum()


def captures_a_table(scan: Scan, p: Any, x: Tensor) -> Tensor:
    table = torch.arange(WIDTH, dtype=torch.float64) * x.mean()
    h, _ = scan(lambda h, _, layer: (block(h + table, layer), None), x @ p["first"]["w"], layers=p["blocks"])
    return h.square().mean()


def captures_a_parameter(scan: Scan, p: Any, x: Tensor) -> Tensor:
    h, _ = scan(lambda h, _, layer: (block(h @ p["head"]["w"], layer), None), x, layers=p["blocks"])
    return (h @ p["head"]["w"]).square().mean()


def captures_a_value(scan: Scan, p: Any, x: Tensor) -> Tensor:
    shift = x @ p["first"]["w"]
    h, _ = scan(lambda h, _, layer: (block(h + shift, layer), shift), x, layers=p["blocks"])
    return (h * shift).square().mean()


def has_regions(scan: Scan, p: Any, x: Tensor) -> Tensor:
    h, _ = scan(lambda h, _, layer: (fzero.remat(block)(h, layer), None), x @ p["first"]["w"], layers=p["blocks"])
    return h.square().mean()


def is_in_a_region(scan: Scan, p: Any, x: Tensor) -> Tensor:
    inner = fzero.remat(lambda h: scan(lambda h, _, q: (block(h, q), None), h, layers=p["blocks"])[0])
    return inner(x @ p["first"]["w"]).square().mean()


def writes(scan: Scan, p: Any, x: Tensor) -> Tensor:
    def body(h: Tensor, _: Any, layer: Any) -> Any:
        y = h @ layer["w"]
        y.mul_(0.5).add_(layer["b"])
        y[0] = 1.0
        return functional.relu(y, inplace=True), None

    h, _ = scan(body, x @ p["first"]["w"], layers=p["blocks"])
    return h.square().mean()


def has_views(scan: Scan, p: Any, x: Tensor) -> Tensor:
    """Views of the carry, of temporaries and of leaves, which the backward pass uses."""

    def body(h: Tensor, _: Any, layer: Any) -> Any:
        a, b = (h @ layer["w"]).chunk(2, -1)
        return torch.cat([a * b.sin(), (h.T.reshape(-1, 2)[: len(h)] * layer["n"][1:3])], -1), None

    h, _ = scan(body, x @ p["first"]["w"], layers=p["blocks"])
    return h.square().mean()


def has_attention(scan: Scan, p: Any, x: Tensor) -> Tensor:
    def body(h: Tensor, _: Any, layer: Any) -> Any:
        q = functional.layer_norm(h, (WIDTH,), layer["n"]).view(1, 1, -1, WIDTH)
        out = functional.scaled_dot_product_attention(q @ layer["w"], q, q, is_causal=True)
        return h + out.view(h.shape), None

    h, _ = scan(body, x @ p["first"]["w"], layers=p["blocks"])
    return h.square().mean()


def is_nested(scan: Scan, p: Any, x: Tensor) -> Tensor:
    """A loop in a turn, which is differentiated too."""

    def body(h: Tensor, _: Any, layer: Any) -> Any:
        rows = torch.stack([h, h * 2]).sum(1)
        inner, _ = fzero.scan(lambda c, row: (c + (row @ layer["w"]).sin(), None), layer["b"].sin() + rows[0], rows)
        return block(h + inner, layer), None

    h, _ = scan(body, x, layers=p["blocks"])
    return h.square().mean()


def runs_twice(scan: Scan, p: Any, x: Tensor) -> Tensor:
    """Two loops over the same layers."""
    once = lambda h: scan(lambda h, _, layer: (block(h, layer), None), h, layers=p["blocks"])[0]  # noqa: E731
    return once(once(x @ p["first"]["w"]).sin()).square().mean()


def takes_plain_layers(scan: Scan, p: Any, x: Tensor) -> Tensor:
    """Layers that are computed from others."""
    layers = [tree.map(lambda leaf: leaf.sin(), layer) for layer in p["blocks"]]
    layers = [{**layer, "w": layer["w"] @ p["first"]["w"]} for layer in layers]
    h, _ = scan(lambda h, _, layer: (block(h, layer), None), x, layers=layers)
    return h.square().mean()


def has_layers_of_unequal_kinds(scan: Scan, p: Any, x: Tensor) -> Tensor:
    """The first layer is the same on all ranks, the others are not."""
    w = p["first"]["w"] @ p["head"]["w"]
    layers = [{"w": w * (1 if i == 0 else x.mean())} for i in range(LAYERS)]
    h, _ = scan(lambda h, _, layer: (torch.tanh(h @ layer["w"]), None), x, layers=layers)
    return h.square().mean()


def casts_layers_of_unequal_kinds(scan: Scan, p: Any, x: Tensor) -> Tensor:
    w = p["first"]["w"] @ p["head"]["w"]
    layers = [{"w": (w * (1 if i == 0 else x.mean())).float()} for i in range(LAYERS)]
    h, _ = scan(lambda h, _, layer: (torch.tanh(h @ layer["w"]), None), x.float(), layers=layers)
    return h.square().mean()


def shares_a_leaf(scan: Scan, p: Any, x: Tensor) -> Tensor:
    """The last layer has a leaf of the layer before it, and the first two have not."""
    layers = [*p["blocks"][:-1], {**p["blocks"][-1], "w": p["blocks"][-2]["w"]}]
    h, _ = scan(lambda h, _, layer: (block(h, layer), None), x @ p["first"]["w"], layers=layers)
    return h.square().mean()


def has_layers_of_unequal_strides(scan: Scan, p: Any, x: Tensor) -> Tensor:
    """A view of the first layer's value is a copy of the second's."""
    w = p["first"]["w"] @ p["head"]["w"]
    layers = [{"w": w if i != 1 else (w * 2).T} for i in range(LAYERS)]
    h, _ = scan(
        lambda h, _, layer: (torch.tanh(h @ layer["w"] + layer["w"].reshape(-1)[:WIDTH]), None), x, layers=layers
    )
    return h.square().mean()


def shares_a_layer(scan: Scan, p: Any, x: Tensor) -> Tensor:
    """Layers in another order, one of them twice, and one that the head uses too."""
    first, *_, last = p["blocks"]
    h, _ = scan(lambda h, _, layer: (block(h, layer), None), x @ p["first"]["w"], layers=[last, first, last])
    return (h @ first["w"]).square().mean()


def norms_its_slices(scan: Scan, p: Any, x: Tensor) -> Tensor:
    """A value of slices that is no leaf, used by the backward pass."""

    def body(h: Tensor, _: Any, layer: Any) -> Any:
        scale = layer["w"] * (1 + layer["w"].square().sum().sqrt())
        return h + h @ scale, None

    h, _ = scan(body, x, layers=p["blocks"])
    return h.square().mean()


LOSSES = [
    is_plain, begins_with_the_batch, has_rows, uses_a_leaf_twice, leaves_a_leaf_out, has_several_carries,
    captures_a_table, captures_a_parameter, captures_a_value, has_regions, is_in_a_region, writes, has_views,
    has_attention, is_nested, runs_twice, takes_plain_layers, has_layers_of_unequal_kinds, norms_its_slices,
    casts_layers_of_unequal_kinds, shares_a_leaf, shares_a_layer,
    has_layers_of_unequal_strides,
]  # fmt: skip
UNROLLED = [captures_a_parameter, captures_a_value, is_in_a_region, shares_a_leaf, has_layers_of_unequal_strides]


def train(loss: Any, scan: Scan) -> Any:
    optimizer = optim.adamw(1e-2)

    def step(p: Any, state: Any, x: Tensor) -> Any:
        value, grads = fzero.value_and_grad(lambda p: loss(scan, p, x))(p)
        updates, state = optimizer.update(grads, state, p)
        return optim.apply_updates(p, updates), state, value, grads

    return step, optimizer


@functools.cache
def step_plainly(loss: Any, world: int) -> Any:
    """The step of so many ranks in plain torch, layer by layer: each rank has the loss of its rows, and loss and
    gradients are means over ranks."""
    p, optimizer = params(), optim.adamw(1e-2)
    values, grads = zip(*(
        fzero.value_and_grad(lambda p, x=x: loss(one_by_one, p, x))(p) for x in batch().chunk(world)
    ))  # fmt: skip
    mean = tree.map(lambda *each: sum(each) / world, *grads)
    updates, state = optimizer.update(mean, optimizer.init(p), p)
    return optim.apply_updates(p, updates), state, torch.stack(values).mean(), mean


CELLS = [[(1, True), (2, False), (3, True)], [(1, False), (2, True), (3, False)]]
"""(stage, donate). Losses take turns: each is tried at every stage, on two or on three ranks, for one trace serves all
stages. Some are tried on one rank too."""
WORLDS = {loss: 2 + i % 2 for i, loss in enumerate(LOSSES)}
ALONE = [is_plain, has_rows, has_several_carries, captures_a_parameter, is_nested, shares_a_layer]


@pytest.mark.parametrize(
    ("loss", "world", "stage", "donate"),
    [
        *((loss, WORLDS[loss], *cell) for i, loss in enumerate(LOSSES) for cell in CELLS[i % 2]),
        *((loss, 1, 1 + i % 3, i % 2 == 0) for i, loss in enumerate(ALONE)),
    ],
)
def test_a_step_with_layers_in_a_loop_is_the_step_with_its_layers(
    loss: Any, world: int, stage: int, donate: bool
) -> None:
    step, optimizer = train(loss, fzero.scan)
    mesh = fzero.VirtualMesh(fsdp=world)
    p = fzero.partition(params(), mesh)
    got = fzero.simulate(step, mesh, stage=stage, donate=donate)(p, optimizer.init(p), batch())
    torch.testing.assert_close(fzero.unpartition(got), step_plainly(loss, world))


@pytest.mark.parametrize("loss", LOSSES)
def test_outside_of_a_step_scan_is_its_layers(loss: Any) -> None:
    p = params()
    got, expected = (
        fzero.value_and_grad(lambda p, scan=scan: loss(scan, p, batch()))(p) for scan in (fzero.scan, one_by_one)
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss is not has_rows])
def test_the_program_has_two_loops_and_does_not_grow_in_them(loss: Any) -> None:
    mesh = fzero.VirtualMesh(fsdp=WORLDS[loss])
    step, optimizer = train(loss, fzero.scan)

    def trace(count: int) -> Any:
        p = fzero.partition(params(count), mesh)
        return fzero.simulate(step, mesh).trace(p, optimizer.init(p), batch())

    programs = [trace(count) for count in (3, 5)]
    loops = [calls(program, ops.loop) for program in programs]
    if loss in UNROLLED:
        assert loops == [[], []]
        return
    assert len(loops[0]) == len(loops[1]) == (4 if loss is runs_twice else 2)
    for small, large in zip(*loops):
        assert len(small.args[0].graph.nodes) == len(large.args[0].graph.nodes)


def test_each_turn_gathers_and_scatters_its_own_layer() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)

    def list_comm(scan: Scan) -> Any:
        step, optimizer = train(is_plain, scan)
        p = fzero.partition(params(), mesh)
        program = fzero.simulate(step, mesh).trace(p, optimizer.init(p), batch())
        return sorted((each.op, each.bucket, each.nbytes) for each in program.comm())

    assert list_comm(fzero.scan) == list_comm(one_by_one)


def test_stages_1_and_2_gather_layers_once() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)
    step, optimizer = train(is_plain, fzero.scan)
    p = fzero.partition(params(), mesh)

    def count(stage: int) -> int:
        program = fzero.simulate(step, mesh, stage=stage).trace(p, optimizer.init(p), batch())
        return sum(each.op == "all_gather" and str(each.bucket).startswith("blocks") for each in program.comm())

    assert [count(stage) for stage in (1, 2, 3)] == [LAYERS, LAYERS, 2 * LAYERS]


@pytest.mark.parametrize("is_remat", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_the_predicted_peak_is_what_ranks_hold(world: int, stage: int, is_remat: bool) -> None:
    width, rows = 64, 96
    p = {"blocks": [{name: torch.randn(width, width) for name in "ab"} for _ in range(6)]}

    def layer(h: Tensor, q: Any) -> Tensor:
        return h + torch.tanh(h @ q["a"]).sin() @ q["b"]

    body = fzero.remat(layer) if is_remat else layer

    def loss(p: Any, x: Tensor) -> Tensor:
        return fzero.scan(lambda h, _, q: (body(h, q), None), x, layers=p["blocks"])[0].square().mean()

    mesh = fzero.VirtualMesh(fsdp=world)
    step = fzero.simulate(lambda p, x: fzero.value_and_grad(loss)(p, x), mesh, stage=stage)
    args = fzero.partition(p, mesh), torch.randn(rows, width)
    program, most = measure_peak(step, *args)
    early = sum(each.meta["val"].nbytes for loop in calls(program, ops.loop) for each in early_of(loop)) // 2
    assert most <= program.memory().peak
    assert program.memory().peak - early == pytest.approx(most, rel=0.05)


def has_a_gain(h: Tensor, q: Any) -> Tensor:
    """What is gathered of `n` is no leaf of the layer, but a function of the leaf's slice."""
    return h + torch.tanh(functional.layer_norm(h, (len(q["n"]),)) * (1 + q["n"]) @ q["w"][: len(q["n"])])


def has_parts(h: Tensor, q: Any) -> Tensor:
    """The backward pass uses one part of a product."""
    part, other = (h @ q["w"]).chunk(2, -1)
    return h + part.sin() + other + q["n"]


@pytest.mark.parametrize("is_remat", [True, False])
@pytest.mark.parametrize("layer", [has_a_gain, has_parts])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_turn_keeps_nothing_alive_beside_what_the_backward_pass_uses(world: int, layer: Any, is_remat: bool) -> None:
    """Neither a gathered layer nor a whole product, of which it uses a part."""
    width, rows, count = 16, 6, 4
    shapes = {"w": (width, 2 * width), "n": (width,)}
    p = {"blocks": [{name: torch.randn(shape) / 8 for name, shape in shapes.items()} for _ in range(count)]}
    if layer is has_a_gain:
        p = tree.map(lambda x: x.T[:width].T.contiguous() if x.ndim > 1 else x, p)
    body = fzero.remat(layer) if is_remat else layer

    def loss(scan: Scan, p: Any, x: Tensor) -> Tensor:
        h, _ = scan(lambda h, _, q: (body(h, q), None), x, layers=p["blocks"])
        return h.square().mean()

    mesh, x = fzero.VirtualMesh(fsdp=world), torch.randn(world * rows, width)
    step = fzero.simulate(fzero.value_and_grad(functools.partial(loss, fzero.scan)), mesh)
    sharded = fzero.partition(p, mesh)
    program, most = measure_peak(step, sharded, x)
    forward, _ = calls(program, ops.loop)
    kept = [node.meta["val"] for node in Loop(*forward.args).body.output.args[0]]
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in kept)
    assert max(value.numel() for value in kept) == rows * width  # no layer
    early = sum(each.meta["val"].nbytes for loop in calls(program, ops.loop) for each in early_of(loop))
    assert most <= program.memory().peak <= 1.05 * most + early
    torch.testing.assert_close(
        fzero.unpartition(step(sharded, x)), fzero.value_and_grad(functools.partial(loss, one_by_one))(p, x)
    )


def test_each_layer_drops_its_own_elements_and_the_backward_pass_the_same() -> None:
    """With `remat` the backward pass draws again."""
    mesh, drop = fzero.VirtualMesh(fsdp=2), nn.Dropout(0.5)
    p = {"blocks": [{"w": torch.ones(8)} for _ in range(4)]}

    def find_gradient(wrap: Any) -> Any:
        body = wrap(lambda h, q: h + drop(q["w"].expand(2, 8)))
        loss = lambda p, x: fzero.scan(lambda h, _, q: (body(h, q), None), x, layers=p["blocks"])[0].sum()  # noqa: E731
        torch.manual_seed(0)
        return fzero.unpartition(
            fzero.simulate(fzero.value_and_grad(loss), mesh)(fzero.partition(p, mesh), torch.zeros(4, 8))
        )

    value, grads = find_gradient(lambda body: body)
    assert len({tuple(layer["w"].tolist()) for layer in grads["blocks"]}) == 4
    torch.testing.assert_close(value, sum(layer["w"].sum() for layer in grads["blocks"]))  # the loss is linear
    torch.testing.assert_close(find_gradient(fzero.remat), (value, grads))


@pytest.mark.parametrize(
    ("dtype", "stage", "sync"),
    [
        (torch.float32, 1, "each"),
        (torch.float32, 2, "once"),
        (torch.float32, 3, "each"),
        (torch.bfloat16, 1, "once"),
        (torch.bfloat16, 2, "each"),
        (torch.bfloat16, 3, "once"),
    ],
)
def test_a_loop_over_layers_in_a_loop_over_microbatches(dtype: torch.dtype, stage: int, sync: Any) -> None:
    """In bfloat16 the loop is as near to the exact gradient as the layers one by one are."""
    mesh = fzero.VirtualMesh(fsdp=2)

    def step(scan: Scan, dtype: torch.dtype | None = None) -> Any:
        def sums(p: Any, x: Tensor) -> Any:
            h, _ = scan(lambda h, _, layer: (block(h, layer), None), x @ p["first"]["w"], layers=p["blocks"])
            return (h @ p["head"]["w"]).double().square().sum(), x.shape[0]

        reduced = sums if dtype is None else fzero.precision(dtype, reduce=torch.float32)(sums)
        return fzero.accumulate(reduced, 3, sync=sync)

    def run(scan: Scan) -> Any:
        p = fzero.partition(tree.map(lambda leaf: leaf.float(), params()), mesh)
        return fzero.unpartition(fzero.simulate(step(scan, dtype), mesh, stage=stage)(p, batch().float()))

    exact, got, expected = step(one_by_one)(params(), batch()), run(fzero.scan), run(one_by_one)
    if dtype is torch.float32:
        torch.testing.assert_close(got, expected)
    for path, *leaves in zip(tree.paths(exact), *map(tree.leaves, (exact, got, expected))):
        true, loop, plain = (leaf.double() for leaf in leaves)
        size = true.abs().max()
        assert (loop - true).abs().max() <= 1.5 * (plain - true).abs().max() + torch.finfo(dtype).eps * size, path


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "layers: is empty; give at least one layer"),
        ([{"w": torch.ones(2)}, {"w": torch.ones(3)}], r"layers 1 w: has shape \(3,\), and \(2,\) in layer 0"),
        ([{"w": torch.ones(2)}, {"w": torch.ones(2).double()}], "layers 1 w: has dtype torch.float64"),
        ([{"w": torch.ones(2)}, {"v": torch.ones(2)}], "layers 1"),
        ([{"w": torch.ones(2)}, {"w": 3}], "layers 1 w: is 3, which is no tensor"),
    ],
)
def test_unequal_layers_are_named(layers: Any, message: str) -> None:
    with pytest.raises(fzero.FzeroError, match=message):
        fzero.scan(lambda h, _, layer: (h, None), torch.ones(2), layers=layers)


@pytest.mark.parametrize("is_row", [True, False])
def test_what_is_written_behind_the_loop_is_not_what_the_turns_read(is_row: bool) -> None:
    """Autograd refuses such a step without a loop. With one the gradient is that at the values of the turns."""
    mesh = fzero.VirtualMesh(fsdp=2)

    def find_gradient(copy: Any) -> Any:
        def loss(p: Any, x: Tensor) -> Tensor:
            values = torch.stack([x[:4] * i for i in range(1, LAYERS + 1)])
            given: Any = copy(values) if is_row else [copy(value) for value in values]
            layers = p["blocks"] if is_row else [{**q, "t": t} for q, t in zip(p["blocks"], given)]
            body = lambda h, row, q: (block(h * (row if is_row else q["t"]).sin(), q), None)  # noqa: E731
            h, _ = fzero.scan(body, x[:4], given if is_row else None, layers=layers)
            for each in [given] if is_row else given:
                each.mul_(0)
            return h.square().mean()

        step = fzero.simulate(fzero.value_and_grad(loss), mesh)
        return fzero.unpartition(step(fzero.partition(params(), mesh), torch.cat([batch(), batch()])))

    torch.testing.assert_close(find_gradient(lambda x: x), find_gradient(torch.clone))


def test_a_mapped_derivative_is_named() -> None:
    mesh = fzero.VirtualMesh(fsdp=2)

    def find_jacobian(p: Any, x: Tensor) -> Tensor:
        def apply(v: Tensor) -> Tensor:
            return fzero.scan(lambda h, _, q: (block(h, q), None), v * x, layers=p["blocks"])[0].sum(0)

        return torch.func.jacrev(apply)(torch.ones(WIDTH, dtype=torch.float64))

    with pytest.raises(fzero.FzeroError, match=r"derivative of a loop is mapped, .*; take torch.func.jacfwd"):
        fzero.simulate(find_jacobian, mesh)(fzero.partition(params(), mesh), batch())


def test_layers_xs_and_length_agree() -> None:
    with pytest.raises(fzero.FzeroError, match="xs: has 3 rows, layers has 2; give equal numbers of rows"):
        fzero.scan(lambda h, x, layer: (h, None), torch.ones(2), torch.ones(3), layers=[{}, {}])


# a leaf of the carry that stays the same


def has_a_factor(writes: bool, p: Any, x: Tensor) -> Tensor:
    """A carry that stays, with `writes` until something writes over it behind the loop."""

    def body(carry: Any, row: Tensor) -> Any:
        h, factor = carry
        return (torch.tanh(h * factor + row), factor), None

    factor = torch.cat([p["w"]]) * 2
    (h, _), _ = fzero.scan(body, (x[0], factor), x)
    if writes:
        factor.detach().mul_(0)
    return h.square().mean()


def test_the_backward_pass_keeps_a_carry_that_stays_once() -> None:
    mesh, width = fzero.VirtualMesh(fsdp=2), 1000
    p, x = fzero.partition({"w": torch.randn(width)}, mesh), torch.randn(40, width)
    step, overwriting = (
        fzero.simulate(fzero.value_and_grad(functools.partial(has_a_factor, writes)), mesh) for writes in (False, True)
    )
    program, most = measure_peak(step, p, x)
    forward, _ = calls(program, ops.loop)
    assert Loop(*forward.args).kept == 2  # h in front of a turn, and the result of tanh
    assert most == program.memory().peak
    got, changed = fzero.unpartition(step(p, x)), fzero.unpartition(overwriting(p, x))
    torch.testing.assert_close(changed, got)  # copies are kept there
    whole = fzero.unpartition(p)
    each = [fzero.grad(lambda p, rows=rows: has_a_factor(False, p, rows))(whole)["w"] for rows in x.chunk(2)]
    torch.testing.assert_close(got[1]["w"], (each[0] + each[1]) / 2)


def test_a_loop_without_derivative_in_a_region_is_kept() -> None:
    """Beside a loop that has a backward pass."""

    def loss(wrap: Any, p: Any, x: Tensor) -> Tensor:
        def scaled(h: Tensor) -> Tensor:
            total, _ = fzero.scan(lambda c, row: (c + row.sin(), None), x[0] * 0, x)
            return (h * total).square()

        h, _ = fzero.scan(lambda h, _, layer: (block(h, layer), None), x, layers=p["blocks"])
        return wrap(scaled)(h).mean()

    mesh, x = fzero.VirtualMesh(fsdp=2), batch()
    p = fzero.partition(params(), mesh)
    plain, kept = (
        fzero.simulate(fzero.value_and_grad(functools.partial(loss, wrap)), mesh)
        for wrap in (lambda fn: fn, fzero.remat)
    )
    torch.testing.assert_close(tree.leaves(fzero.unpartition(kept(p, x))), tree.leaves(fzero.unpartition(plain(p, x))))
    assert len(calls(kept.trace(p, x), ops.loop)) == 3
