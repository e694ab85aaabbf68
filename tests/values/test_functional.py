"""torch.func inside a sharded step equals the same step on plain tensors with the batch of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Outcome, run_cases, values
from programs import MESH, Case, apply, calls, dense, layers, loss, mlp, on_rows, rows, whole
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fzero
from fzero import FzeroError, optim, passes, tree
from fzero.base.mesh import VirtualMesh
from fzero.program import ops

Params = tree.Tree
Step = Callable[[Params, Tensor], Any]
WIDTH = 3


def params() -> Params:
    """Two layers of 12 elements (3 ranks hold 12, 0 and 0), a 0-d leaf, and a table that all ranks hold a part of."""
    return {**layers(2, width=WIDTH), "scale": torch.tensor(0.7), "table": torch.linspace(-1, 1, 45).view(15, 3)}


def on_params(step: Step, mesh: VirtualMesh = MESH) -> Case:
    """`step(params, x)` with this rank's rows `x`, [2, WIDTH]."""
    return on_rows(step, params(), mesh=mesh, width=WIDTH)


def directions(p: Params) -> Params:
    """A tangent for each leaf."""
    return tree.map(lambda leaf: torch.cos(3 * leaf) + 0.5, p)


def penalty(p: Params) -> Tensor:
    """Functions that run on slices: elementwise ones, beside a number and beside a full tensor, and reductions."""
    table, mask = p["table"], torch.ones(15, 3).tril()
    numbers = [table.norm(), (table * mask).square().mean(), table.abs().sum() * p["scale"], (table * p["scale"]).max()]
    lists = torch._foreach_mul([leaf["w"] for leaf in p["layers"]], [p["scale"], p["scale"] + 1])
    return sum(numbers) + sum(item.exp().min() for item in lists) + p["scale"] ** 3


def objective(p: Params, x: Tensor) -> Tensor:
    return p["scale"] * loss(p, x) + 0.1 * penalty(p)


def one(p: Params, x: Tensor) -> Tensor:
    """The loss of one example [WIDTH]; weights meet it elementwise."""
    hidden = torch.tanh(x @ p["layers"][0]["w"] + p["layers"][0]["b"])
    return (hidden * p["layers"][1]["b"] * p["scale"] + x).square().sum()


def product(p: Params, x: Tensor) -> Params:
    """A Hessian times a vector."""
    return jvp(lambda p: grad(objective)(p, x), (p,), (directions(p),))[1]


def curvature(fn: Callable[[Params], Tensor], p: Params) -> tuple[Tensor, Tensor]:
    """The first and the second derivative in one direction."""
    by = directions(p)
    return jvp(lambda p: jvp(fn, (p,), (by,))[1], (p,), (by,))


def with_aux(p: Params, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    out = mlp(p, x)
    return out.square().mean(), {"rows": out, "decayed": p["layers"][0]["w"] * 0.5}


def descended(p: Params, x: Tensor) -> Params:
    """After a step of gradient descent."""
    return tree.map(lambda leaf, g: leaf - 0.1 * g, p, grad(objective)(p, x))


def clipped(p: Params, x: Tensor) -> Params:
    """A step of DP-SGD without its noise (Abadi et al., https://arxiv.org/abs/1607.00133)."""
    of_examples = vmap(fzero.grad(one), in_dims=(None, 0))
    grads = of_examples(fzero.unpartition(p), x)  # leaves [N, *shape]  N examples of this rank
    norms = sum(g.reshape(len(x), -1).square().sum(1) for g in tree.leaves(grads)).sqrt()
    scales = (1 / norms).clamp(max=1.0)
    average = tree.map(lambda g: torch.einsum("n,n...->...", scales, g) / len(x), grads)
    return tree.map(lambda leaf, g: leaf - 0.1 * g, p, fzero.pmean(average, "fsdp"))


def along(p: Params, x: Tensor, by: Tensor) -> Tensor:
    """The loss at a distance `by` from the parameters, in two directions."""
    return loss(tree.map(lambda leaf, step: leaf + by[0] * step + by[1] * leaf.square(), p, directions(p)), x)


def line(p: Params, x: Tensor) -> Tensor:
    """[4] losses on a line through the parameters."""
    return fzero.pmean(vmap(lambda by: along(p, x, torch.stack([by, by * by])))(torch.linspace(0, 1, 4)), "fsdp")


def field(p: Params, x: Tensor) -> Tensor:
    """A scalar field at one point [WIDTH]."""
    return mlp(p, x[None]).sum()


def laplacian(p: Params, x: Tensor, second: Callable[..., Any]) -> Tensor:
    """The mean square of a field's Laplacian over points, as a physics-informed loss has it."""
    return vmap(lambda point: second(functools.partial(field, p))(point).trace())(x).square().mean()


def adversarial(p: Params, x: Tensor) -> tuple[Params, Params, Tensor, Tensor]:
    """One step of each of two models, with two losses and two optimizers."""
    maker, judge = p["layers"]
    fooled, for_maker = fzero.value_and_grad(lambda maker: dense(judge, dense(maker, x)).mean())(maker)
    caught, for_judge = fzero.value_and_grad(lambda judge: dense(judge, x - dense(maker, x)).mean())(judge)
    return stepped(optim.sgd(0.1), maker, for_maker), stepped(optim.adamw(0.01), judge, for_judge), fooled, caught


def stepped(optimizer: optim.GradientTransformation, p: Params, grads: Params) -> Params:
    updates, _ = optimizer.update(grads, optimizer.init(p), p)
    return optim.apply_updates(p, updates)


STEPS: dict[str, Step] = {
    "grad": lambda p, x: grad(objective)(p, x),
    "grad_and_value": lambda p, x: grad_and_value(with_aux, has_aux=True)(p, x),
    "value_and_grad": lambda p, x: fzero.value_and_grad(with_aux, has_aux=True)(p, x),
    "vjp": lambda p, x: vjp(lambda p: mlp(p, x), p)[1](torch.cos(x) / len(x)),
    "jvp": lambda p, x: jvp(lambda p: objective(p, x), (p,), (directions(p),)),
    "jvp of rows": lambda p, x: jvp(lambda p: mlp(p, x), (p,), (directions(p),)),
    "jvp with aux": lambda p, x: jvp(lambda p: with_aux(p, x), (p,), (directions(p),), has_aux=True),
    "jvp of a step": lambda p, x: jvp(lambda p: descended(p, x), (p,), (directions(p),)),
    "jvp of a batch": lambda p, x: jvp(lambda x: mlp(p, x), (x,), (torch.cos(x),)),
    "forward over reverse": product,
    "forward over fzero.grad": lambda p, x: jvp(lambda p: fzero.grad(objective)(p, x), (p,), (directions(p),))[1],
    "reverse over forward": lambda p, x: grad(lambda p: jvp(lambda p: objective(p, x), (p,), (directions(p),))[1])(p),
    "forward over forward": lambda p, x: curvature(
        lambda p: loss(p, x) * p["table"].norm() + (p["scale"] * p["table"]).max(), p
    ),
    "reverse over reverse": lambda p, x: grad(lambda p: optim.global_norm(grad(objective)(p, x)))(p),
    "fzero.grad over itself": lambda p, x: fzero.grad(lambda p: optim.global_norm(fzero.grad(objective)(p, x)))(p),
    "through a step": lambda p, x: grad(lambda p: objective(descended(p, x), x))(p),
    "jacrev of rows": lambda p, x: vmap(jacrev(lambda point: mlp(p, point[None])[0]))(x),
    "jacfwd of rows": lambda p, x: vmap(jacfwd(lambda point: mlp(p, point[None])[0]))(x),
    "hessian of a field": lambda p, x: vmap(hessian(functools.partial(field, p)))(x),
    "jacrev of a batch": lambda p, x: jacrev(lambda x: mlp(p, x).sum(1))(x).sum(1),
    "jacrev of whole values": lambda p, x: fzero.pmean(
        jacrev(lambda p: mlp(p, x).mean(0))(fzero.unpartition(p)), "fsdp"
    ),
    "jacfwd of whole values": lambda p, x: fzero.pmean(
        jacfwd(lambda p: mlp(p, x).mean(0))(fzero.unpartition(p)), "fsdp"
    ),
    "hessian of a layer": lambda p, x: fzero.pmean(
        hessian(lambda layer: dense(layer, x).square().mean())(fzero.unpartition(p["layers"][0])), "fsdp"
    ),
    "hessian along directions": lambda p, x: fzero.pmean(
        hessian(functools.partial(along, p, x))(torch.ones(2)), "fsdp"
    ),
    "jacfwd along directions": lambda p, x: jacfwd(lambda by: mlp(tree.map(lambda leaf: by * leaf, p), x))(
        torch.ones(())
    ),
    "a line of losses": line,
    "gradient of a line": lambda p, x: grad(lambda p: line(p, x).sum())(p),
    "a model for one example": lambda p, x: grad(lambda p: vmap(functools.partial(one, p))(x).mean())(p),
    "product of a model for one example": lambda p, x: jvp(
        grad(lambda p: vmap(functools.partial(one, p))(x).mean()), (p,), (directions(p),)
    )[1],
    "gradients of examples": lambda p, x: vmap(grad(one), in_dims=(None, 0))(fzero.unpartition(p), x),
    "clipped gradients of examples": clipped,
    "laplacian": lambda p, x: grad(laplacian)(p, x, lambda f: jacrev(jacrev(f))),
    "several losses": lambda p, x: (grad(loss)(p, x), fzero.value_and_grad(objective)(p, x), grad(penalty)(p)),
    "several models": adversarial,
}


READ_WHILE_TRACED = {"jacfwd of whole values", "hessian of a layer", "hessian"}
"""Steps that torch 2.11 cannot trace: its jacfwd of several tensors reads numbers out of a tensor."""


def skip_what_torch_cannot_trace(name: str) -> None:
    if name in READ_WHILE_TRACED and torch.__version__ < "2.12":
        pytest.skip("in torch 2.11 jacfwd of several tensors reads numbers, which a traced tensor does not have")


@pytest.mark.parametrize(("name", "world"), [(name, world) for i, name in enumerate(STEPS) for world in (1 + i % 2, 3)])
def test_a_transform_in_a_step_is_that_of_the_whole_batch(name: str, world: int) -> None:
    skip_what_torch_cannot_trace(name)
    assert_as_unsharded(on_params(STEPS[name], VirtualMesh(fsdp=world)))


def assert_as_unsharded(case: Case) -> None:
    """The simulated step equals the unsharded one, up to rounding: ranks add in another order.

    A result that is not state is uniform, or of this rank's rows.
    """
    program = apply(case.trace(), *passes.defaults(stage=3, in_place=False))
    got, expected = whole(program, case.run(program)), case.unsharded()
    for path, want in expected.items():
        parts = [got[path]] if got[path].shape == want.shape else got[path].chunk(case.mesh.size())
        for part in parts:
            torch.testing.assert_close(part, want, rtol=2e-5, atol=2e-6, msg=lambda text, path=path: f"{path}: {text}")


def test_on_two_axes() -> None:
    """Forward mode, and forward over reverse, with reductions over two mesh axes."""

    def step(p: Params, x: Tensor) -> Any:
        return product(p, x), jvp(lambda p: objective(p, x), (p,), (directions(p),))[1]

    assert_as_unsharded(on_params(step, VirtualMesh(replica=2, fsdp=2)))


LAZY_ZEROS = {
    "hessian in vmap in grad": lambda p, x: grad(laplacian)(p, x, hessian),
    "constant factor in jvp of jvp": lambda p, x: curvature(lambda p: (p["table"] * torch.ones(15, 3).tril()).sum(), p),
}


@pytest.mark.parametrize("name", LAZY_ZEROS)
def test_lazy_zeros_are_plain_ones(name: str) -> None:
    """Forward mode makes `_efficientzerotensor`, which torch would trace as copies and meta tensors."""
    assert_as_unsharded(on_params(LAZY_ZEROS[name]))


# forward and reverse mode are transposes: <J t, y> = <t, J' y>

MAPS: dict[str, Callable[[Params, Tensor], Tensor]] = {
    "gather": lambda p, x: mlp(p, x),
    "slices": lambda p, x: penalty(p),
    "psum": lambda p, x: fzero.psum(mlp(p, x).square(), "fsdp"),
    "pmean": lambda p, x: fzero.pmean(mlp(p, x), "fsdp").cos(),
    "pmax": lambda p, x: fzero.pmax(mlp(p, x), "fsdp") ** 2,
    "psum of pmax of examples": lambda p, x: vmap(
        lambda x: fzero.psum(x * fzero.pmax(mlp(p, x[None])[0], "fsdp"), "fsdp")
    )(x),
    "a gradient": lambda p, x: optim.global_norm(grad(objective)(p, x)),
}


@pytest.mark.parametrize("name", MAPS)
def test_forward_and_reverse_mode_are_transposes(name: str) -> None:
    """The two products are equal after a sum over ranks: a plain value's cotangent waits for its mean over ranks."""

    def step(p: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        t = directions(p)
        value, pushed = jvp(lambda p: MAPS[name](p, x), (p,), (t,))
        y = torch.sin(5 * value) + x.mean()  # another one on each rank
        (pulled,) = vjp(lambda p: MAPS[name](p, x), p)[1](y)
        return (pushed * y).sum(), sum((a * b).sum() for a, b in zip(tree.leaves(t), tree.leaves(pulled)))

    case = on_params(step, VirtualMesh(fsdp=3))
    forward, reverse = whole(program := case.trace(), case.run(program)).values()
    torch.testing.assert_close(forward, reverse, rtol=2e-5, atol=2e-6)


def test_uses_in_a_vmap_share_one_gather() -> None:
    program = on_params(STEPS["a model for one example"]).trace()
    used = [node for node in calls(program, ops.gather) if node.args[1] == "layers.0"]
    assert sorted(node.args[2] for node in used) == [0, 1]  # its b and its w


def test_a_collective_under_vmap_is_elementwise() -> None:
    def step(p: Params, x: Tensor) -> tuple[Tensor, ...]:
        by_name = lambda x: (fzero.psum(x, "fsdp"), fzero.pmean(x.sum(), "fsdp"), fzero.pmax(x, "fsdp"))  # noqa: E731
        return *vmap(by_name, in_dims=1)(x), vmap(lambda x: x + fzero.axis_index("fsdp"))(x)

    case = on_params(step)
    first, second = rows(MESH, width=WIDTH).chunk(2)
    for rank, got in enumerate(case.run(case.trace())):
        expected = [(first + second).T, (first + second).sum(0) / 2, torch.maximum(first, second).T]
        torch.testing.assert_close(got, [*expected, (first, second)[rank] + rank])


# refusals: which, of which leaf, why, and the way out

BATCH = r"a Sharded holds one slice of the leaf, not a batch of them; take the leaf whole before the transform"
MIX = r"would mix the i-th example of each rank's batch; take the leaf whole before the transform"
REFUSED: dict[str, tuple[Step, str]] = {
    "gradients of examples": (
        lambda p, x: vmap(grad(lambda p, x: (x @ p["table"].T).sum()), in_dims=(None, 0))(p, x),
        r"table: vmap over its scatter: the mean over ranks that the transpose of its gather takes " + MIX,
    ),
    "norms of gradients of examples": (
        lambda p, x: vmap(lambda x: optim.global_norm(grad(one)(p, x)))(x),
        r"[\w.]+: vmap over its scatter: the mean over ranks that the transpose of its gather takes " + MIX,
    ),
    "gradients of examples of a sum of slices": (
        lambda p, x: vmap(grad(lambda p, x: p["table"].norm() * x.sum()), in_dims=(None, 0))(p, x),
        r"table: vmap over its mean: the mean over ranks that the transpose of its use takes " + MIX,
    ),
    "jacrev": (
        lambda p, x: jacrev(lambda p: x @ p["table"].T)(p),
        r"table: vmap over its scatter: the mean over ranks that the transpose of its gather takes " + MIX,
    ),
    "jacfwd": (
        lambda p, x: jacfwd(lambda table: x @ table.T)(p["table"]),
        r"table: a transform maps over this leaf, to slices of \[32, 32\] where a rank holds \[32\]: jacrev, jacfwd, "
        r"hessian, and in_dims and out_dims of vmap know no dimensions of a Sharded; take the leaf whole before ",
    ),
    "hessian": (
        lambda p, x: hessian(loss)(p, x),
        r"layers.0.w: a transform maps over this leaf, to slices of \[57, 9\]",
    ),
    "jacrev of a sharded result": (
        lambda p, x: jacrev(lambda by: by * p["table"])(torch.ones(())),
        r"table: a transform maps over this leaf, to slices of \[32, 32\] where a rank holds \[32\]: ",
    ),
    "vmap over a leaf": (
        lambda p, x: vmap(lambda row: x @ row)(p["table"]),
        r"table: a transform maps over this leaf, to slices of \[\] where a rank holds \[32\]: ",
    ),
    "vmap to a leaf": (
        lambda p, x: vmap(lambda x: p["table"])(x),
        r"table: a transform maps over this leaf, to slices of \[2, 32\] where a rank holds \[32\]: ",
    ),
    "slices of a batch": (
        lambda p, x: vmap(lambda x: p["table"].slice_of(x.sum() * torch.ones(15, 3)).sum())(x),
        r"table: vmap over its take: " + BATCH,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_transform_cannot_do_is_refused(name: str) -> None:
    skip_what_torch_cannot_trace(name)
    step, message = REFUSED[name]
    with pytest.raises(FzeroError, match=f"(?m)^{message}.*with fzero.unpartition, .* with fzero.pmean$"):
        on_params(step).trace()


def test_a_tangent_of_another_leaf_is_named() -> None:
    step: Step = lambda p, x: jvp(torch.sin, (p["table"],), (p["scale"],))  # noqa: E731
    with pytest.raises(
        FzeroError, match=r"different leaves.*table on VirtualMesh\(fsdp=2\).*scale on VirtualMesh\(fsdp=2\)"
    ):
        on_params(step).trace()


# on live ranks


def sharded(mesh: DeviceMesh, step: Step) -> Any:
    return fzero.unpartition(fzero.shard(step, mesh)(fzero.partition(params(), mesh), own_rows(mesh)))


def eager(mesh: DeviceMesh, step: Step) -> Any:
    """Outside a step, functions of slices run on slices in forward mode too."""
    return fzero.unpartition(step(fzero.partition(params(), mesh), own_rows(mesh)))


def own_rows(mesh: DeviceMesh) -> Tensor:
    return all_rows().chunk(mesh.size())[mesh.get_rank()]


def all_rows() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def pushed(p: Params, x: Tensor) -> Tensor:
    return jvp(lambda p: objective(p, x), (p,), (directions(p),))[1]


ON_RANKS = {f"{run.__name__} {step.__name__}": (run, step) for run in (sharded, eager) for step in (pushed, product)}
ON_RANKS["sharded clipped"] = (sharded, clipped)


@pytest.fixture(scope="module")
def on_ranks() -> dict[str, list[Outcome]]:
    return run_cases(2, {name: functools.partial(run, step=step) for name, (run, step) in ON_RANKS.items()})


@pytest.mark.parametrize("name", ON_RANKS)
def test_a_transform_on_live_ranks(on_ranks: dict[str, list[Outcome]], name: str) -> None:
    run, step = ON_RANKS[name]
    got, expected = values(on_ranks[name]), step(params(), all_rows())
    if run is eager and isinstance(expected, Tensor):  # each rank's own
        got = [sum(got) / len(got)]
    for result in got:
        torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-6)


def test_attention_whose_mask_an_outer_gradient_differentiates() -> None:
    """torch's kernel for CPU has no derivative by a mask."""
    leaves = {"w": torch.eye(WIDTH) / 2, "bias": torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH)}
    x = rows(MESH, width=WIDTH)

    def attend(w: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        heads = (x[:, None, None] * torch.linspace(1, 2, WIDTH)[:, None]) @ w
        mask = bias.expand(len(x), 1, WIDTH, WIDTH)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).square().sum()

    def step(p: Params, x: Tensor) -> Any:
        def penalized(p: Params) -> Tensor:
            full = tree.map(lambda leaf: leaf.full_tensor(), p)
            return fzero.grad(lambda w: attend(w, full["bias"], x))(full["w"]).square().sum()

        return fzero.grad(penalized)(p)

    got = fzero.unpartition(fzero.simulate(step, MESH)(fzero.partition(leaves, MESH), torch.cat([x, x])))
    w, bias = (leaves[name].clone().requires_grad_() for name in ("w", "bias"))
    (inner,) = torch.autograd.grad(attend(w, bias, x), w, create_graph=True)
    expected = torch.autograd.grad(inner.square().sum(), (w, bias))
    torch.testing.assert_close((got["w"], got["bias"]), expected, rtol=1e-4, atol=1e-5)
