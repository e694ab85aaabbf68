"""The rematerialize pass recomputes the right values at the right place, and changes nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, reduce
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from programs import MESH, Case, Outputs, apply, assert_same, calls, dense, differentiated, layers, moved, names
from torch import Tensor
from torch.utils.checkpoint import SelectiveCheckpointContext

import fzero
from fzero import VirtualMesh, tree
from fzero.base.errors import FzeroError
from fzero.passes import bucket, defaults, release, rematerialize
from fzero.program import ops
from fzero.program.program import Program
from fzero.program.rates import GUESSES
from fzero.program.records import storage

WIDTH = 8
Function = Callable[..., Any]
Wrap = Callable[[Function], Function]


def plain(fn: Function) -> Function:
    return fn


def dots(fn: Function) -> Function:
    return fzero.remat(fn, "dots")


def blocks(count: int, *, width: int = WIDTH) -> tree.Tree:
    """`{"layers": [{"up": [width, 4 * width], "down": [4 * width, width]}, ...]}`"""
    draw = torch.Generator().manual_seed(0)
    return {
        "layers": [
            {
                "up": torch.randn(width, 4 * width, generator=draw) / width**0.5,
                "down": torch.randn(4 * width, width, generator=draw) / (4 * width) ** 0.5,
            }
            for _ in range(count)
        ]
    }


def on_blocks(step: Function, count: int = 4, *, batch: int = 16) -> Case:
    """`step(params, x)` with `blocks` and a batch [batch, WIDTH]."""
    draws = [torch.Generator().manual_seed(number) for number in range(MESH.size())]
    x = torch.cat([torch.randn(batch, WIDTH, generator=draw) for draw in draws])
    return Case(step, MESH, (fzero.partition(blocks(count), MESH), x))


def loss_of(block: Function) -> Function:
    """The mean square behind all layers."""
    return lambda p, x: reduce(lambda x, layer: block(layer, x), p["layers"], x).square().mean()


def gelu(layer: Any, x: Tensor) -> Tensor:
    return x + F.gelu(x @ layer["up"]) @ layer["down"]


def dropped(layer: Any, x: Tensor) -> Tensor:
    return x + F.dropout(F.gelu(x @ layer["up"]), 0.2) @ layer["down"]


def relu_in_place(layer: Any, x: Tensor) -> Tensor:
    return x + F.relu(x @ layer["up"], inplace=True) @ layer["down"]


def overwriting(layer: Any, x: Tensor) -> Tensor:
    h = torch.sin(x @ layer["up"])
    squashed = h.exp()
    copy = h.clone()
    copy.mul_(2).add_(squashed)
    copy[:, 0].zero_()
    return x + torch.tanh(copy) @ layer["down"]


def adding_to_its_result(layer: Any, x: Tensor) -> Tensor:
    y = F.gelu(x @ layer["up"]) @ layer["down"]
    return y.add_(x)


def attention(layer: Any, x: Tensor) -> Tensor:
    heads = (x @ layer["up"]).view(1, 16, 4, WIDTH).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return F.layer_norm(x + mixed.transpose(1, 2).reshape(16, -1) @ layer["down"], (WIDTH,))


def attention_with_dropout(layer: Any, x: Tensor) -> Tensor:
    heads = (x @ layer["up"]).view(1, 16, 4, WIDTH).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2)
    return F.layer_norm(x + mixed.transpose(1, 2).reshape(16, -1) @ layer["down"], (WIDTH,))


def normalized(layer: Any, x: Tensor) -> Tensor:
    return x + F.gelu(F.batch_norm(x @ layer["up"], None, None, training=True)) @ layer["down"]


def averaged(layer: Any, x: Tensor) -> Tensor:
    h = F.gelu(x @ layer["up"])
    return x + (h - fzero.pmean(h, "fsdp")) @ layer["down"]


def viewed(layer: Any, x: Tensor) -> Tensor:
    return (F.gelu(x @ layer["up"]) @ layer["down"]).view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH)


def cast(layer: Any, x: Tensor) -> Tensor:
    up, down = (layer[name].to(torch.bfloat16) for name in ("up", "down"))
    return x + (F.gelu(x.bfloat16() @ up) @ down).float()


BLOCKS = [
    gelu, dropped, relu_in_place, overwriting, adding_to_its_result, attention, attention_with_dropout, normalized,
    averaged, viewed, cast,
]  # fmt: skip


def whole_loss(wrap: Wrap) -> Function:
    return fzero.value_and_grad(wrap(loss_of(dropped)))


def nested(wrap: Wrap) -> Function:
    return fzero.value_and_grad(wrap(loss_of(wrap(dropped))))


def gradient_inside(wrap: Wrap) -> Function:
    return wrap(fzero.value_and_grad(loss_of(dropped)))


def functorch(wrap: Wrap) -> Function:
    return torch.func.grad_and_value(loss_of(wrap(dropped)))


def second_derivative(wrap: Wrap) -> Function:
    """The gradient of a gradient's norm: each value of a region is used in two backward passes."""

    def penalty(p: Any, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: loss_of(wrap(dropped))(p, x))(x).square().sum().sqrt()

    return fzero.value_and_grad(wrap(penalty))


def jvp(wrap: Wrap) -> Function:
    return lambda p, x: torch.func.jvp(lambda x: loss_of(wrap(gelu))(p, x), (x,), (torch.ones_like(x),))


def forward_over_reverse(wrap: Wrap) -> Function:
    def step(p: Any, x: Tensor) -> Any:
        return torch.func.jvp(torch.func.grad(lambda x: loss_of(wrap(gelu))(p, x)), (x,), (torch.ones_like(x),))

    return step


def hessian(wrap: Wrap) -> Function:
    return lambda p, x: torch.func.hessian(lambda row: loss_of(wrap(gelu))(p, row[None]))(x[0])


def per_example(wrap: Wrap) -> Function:
    def of_one(p: Any, row: Tensor) -> Tensor:
        return loss_of(wrap(dropped))(p, row[None])

    return lambda p, x: torch.func.vmap(lambda row: torch.func.grad(of_one, 1)(p, row), randomness="different")(x)


def microbatches(wrap: Wrap) -> Function:
    def step(p: Any, x: Tensor) -> Any:
        grads = [fzero.grad(loss_of(wrap(dropped)))(p, part) for part in x.split(4)]
        return tree.map(lambda *each: sum(each[1:], each[0]), *grads)

    return step


def with_aux(wrap: Wrap) -> Function:
    def block(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.gelu(x @ layer["up"])
        return x + h @ layer["down"], h.mean()

    def loss(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        means = []
        for layer in p["layers"]:
            x, mean = wrap(block)(layer, x)
            means.append(mean)
        return x.square().mean(), torch.stack(means)

    return fzero.value_and_grad(loss, has_aux=True)


TRANSFORMS = [
    whole_loss, nested, gradient_inside, functorch, second_derivative, jvp, forward_over_reverse, hessian, per_example,
    microbatches, with_aux,
]  # fmt: skip
STEPS: dict[str, Callable[[Wrap], Function]] = {
    **{block.__name__: lambda wrap, block=block: fzero.value_and_grad(loss_of(wrap(block))) for block in BLOCKS},
    **{transform.__name__: transform for transform in TRANSFORMS},
}


def passed(case: Case, *, stage: int = 3) -> Program:
    return apply(case.trace(), *defaults(stage=stage, in_place=False))


@cache
def expected(name: str) -> Outputs:
    """What a step of `STEPS` returns without marks and passes."""
    case = on_blocks(STEPS[name](plain), 2)
    return case.run(case.trace())


@pytest.mark.parametrize("wrap", [fzero.remat, dots])
@pytest.mark.parametrize("name", STEPS)
def test_results_are_the_same_bit_for_bit(name: str, wrap: Wrap) -> None:
    case = on_blocks(STEPS[name](wrap), 2)
    assert_same(case.run(apply(case.trace(), rematerialize)), expected(name))


ON_HOST = [
    "attention_with_dropout", "overwriting", "viewed", "cast", "nested", "gradient_inside", "second_derivative",
    "microbatches", "with_aux",
]  # fmt: skip


@pytest.mark.parametrize("name", ON_HOST)
def test_results_with_values_on_the_host_are_the_same_bit_for_bit(name: str) -> None:
    """Over a link so fast that every value has time to go and come back."""
    case = on_blocks(STEPS[name](lambda fn: fzero.remat(fn, "offload")), 2)
    traced = replace(case.trace(), measured=GUESSES["cpu"]._replace(link=1e30))
    program = apply(traced, partial(rematerialize, least=0))
    assert names(program).count("to_host") == names(program).count("to_device") > 2
    assert_same(case.run(program), expected(name))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["dropped", "averaged", "nested"])
def test_every_stage_gives_the_same(name: str, stage: int) -> None:
    case = on_blocks(STEPS[name](fzero.remat), 2)
    assert_same(case.run(passed(case, stage=stage)), expected(name))


@pytest.mark.parametrize("block", BLOCKS)
def test_memory_falls_and_no_collective_is_added(block: Function) -> None:
    case, marked = (on_blocks(fzero.value_and_grad(loss_of(wrap(block))), 4) for wrap in (plain, fzero.remat))
    before, after = passed(case), passed(marked)
    assert after.memory().peak < before.memory().peak
    assert sorted(moved(after)) == sorted(moved(before))


def test_without_marks_nothing_changes() -> None:
    program = on_blocks(fzero.value_and_grad(loss_of(dropped))).trace()
    assert rematerialize(program).lines() == program.lines()


def test_a_second_time_nothing_changes() -> None:
    program = rematerialize(on_blocks(fzero.value_and_grad(loss_of(fzero.remat(dropped)))).trace())
    assert rematerialize(program).lines() == program.lines()


def test_memory_grows_by_a_layers_input_a_layer() -> None:
    def peak(count: int, wrap: Wrap) -> int:
        return passed(on_blocks(fzero.value_and_grad(loss_of(wrap(gelu))), count, batch=256)).memory().peak

    # What a further layer adds when the backward pass begins: its slice of two leaves of 8 * 32, a half of each, and
    # its input, [256, 8] float32; without remat also [256, 32] before gelu and behind it.
    held = 8 * 32 * 4 + 256 * 8 * 4
    assert peak(6, fzero.remat) - peak(5, fzero.remat) == held
    assert peak(6, plain) - peak(5, plain) == held + 2 * 256 * 32 * 4


def test_nested_regions_keep_less_than_the_outer_alone() -> None:
    def grouped(wrap: Wrap) -> Function:
        def group(part: Any, x: Tensor) -> Tensor:
            return reduce(lambda x, layer: wrap(gelu)(layer, x), part, x)

        def loss(p: Any, x: Tensor) -> Tensor:
            stack = p["layers"]
            parts = [stack[start : start + 4] for start in range(0, len(stack), 4)]
            return reduce(lambda x, part: fzero.remat(group)(part, x), parts, x).square().mean()

        return fzero.value_and_grad(loss)

    outer, both = (on_blocks(grouped(wrap), 16) for wrap in (plain, fzero.remat))
    assert passed(both).memory().peak < passed(outer).memory().peak
    assert_same(both.run(passed(both)), outer.run(passed(outer)))


def test_within_what_is_computed_again_a_gradient_recomputes_its_own_regions() -> None:
    def products(inner: Wrap) -> int:
        def slope(layer: Any, x: Tensor) -> Tensor:
            return fzero.grad(lambda x: inner(gelu)(layer, x).square().sum())(x)

        case = on_blocks(fzero.value_and_grad(loss_of(fzero.remat(slope))), 2)
        return names(apply(case.trace(), rematerialize)).count("mm")

    assert products(fzero.remat) == products(plain) + 2  # x @ up, once a layer


def test_what_is_computed_again_has_memory_of_its_own() -> None:
    program = apply(on_blocks(fzero.value_and_grad(loss_of(fzero.remat(gelu)))).trace(), rematerialize)
    computed = calls(program, torch.ops.aten.gelu.default)
    assert len({storage(node) for node in computed}) == len(computed) == 8


# what is kept


def count(wrap: Wrap, *counted: str, block: Function = dropped) -> int:
    found = names(apply(on_blocks(fzero.value_and_grad(loss_of(wrap(block)))).trace(), rematerialize))
    return sum(map(found.count, counted))


def test_dots_are_computed_once() -> None:
    assert count(dots, "mm") == count(plain, "mm")
    assert count(fzero.remat, "mm") == count(plain, "mm") + 4  # one a layer: the other is a term of its result
    assert count(dots, "gelu") == count(fzero.remat, "gelu") == count(plain, "gelu") + 4


def test_views_of_what_is_kept_are_not_made_again() -> None:
    def block(layer: Any, x: Tensor) -> Tensor:
        return torch.sin(x.unsqueeze(0)).sum(0) @ layer["up"] @ layer["down"]

    assert count(fzero.remat, "sin", block=block) == count(plain, "sin", block=block) + 4
    assert count(fzero.remat, "unsqueeze", block=block) == count(plain, "unsqueeze", block=block)


def test_what_reads_memory_that_is_overwritten_behind_the_region_is_kept() -> None:
    def block(wrap: Wrap) -> Function:
        def apply(layer: Any, x: Tensor) -> Tensor:
            h = x * 1
            y = wrap(lambda h: torch.cos(torch.sin(torch.exp((h + 1).mul_(0.5)))))(h)
            h.mul_(2)
            return (y + h) @ layer["up"] @ layer["down"]

        return apply

    plainly, marked = (on_blocks(fzero.value_and_grad(loss_of(block(wrap)))) for wrap in (plain, fzero.remat))
    before, after = plainly.trace(), apply(marked.trace(), rematerialize)
    assert names(after).count("mul_") == names(before).count("mul_")
    assert names(after).count("sin") == names(before).count("sin") + 3  # the first layer needs no gradient of x
    assert_same(marked.run(after), plainly.run(before))


def test_attention_is_a_dot() -> None:
    attend = "_scaled_dot_product_flash_attention_for_cpu"
    assert count(dots, attend, block=attention) == count(plain, attend, block=attention) == 4
    assert count(fzero.remat, attend, block=attention) == 8


def test_a_policy_is_asked_once_for_each_operation_of_torch() -> None:
    if torch.__version__ < "2.13":
        pytest.skip("torch 2.11 shows no results to a policy")
    asked: list[tuple[Any, tuple[int, ...]]] = []

    def policy(context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> bool:
        asked.append((operation, tuple(context.op_output.shape)))
        return operation is torch.ops.aten.gelu.default

    assert count(lambda fn: fzero.remat(fn, policy), "gelu") == 4
    aten = torch.ops.aten
    expected = {(aten.mm.default, (16, 32)), (aten.gelu.default, (16, 32)), (aten.mm.default, (16, 8))}
    assert expected <= set(asked) and "bernoulli" in str(asked)
    assert [name for name, _ in asked].count(aten.gelu.default) == 4
    assert all(operation.namespace == "aten" for operation, _ in asked)


def test_a_policy_that_counts_is_asked_once_for_all_programs_of_a_trace() -> None:
    asked: list[Any] = []

    def policy(context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> bool:
        asked.append(operation)
        return len(asked) % 2 == 0

    program = on_blocks(fzero.value_and_grad(loss_of(fzero.remat(gelu, policy)))).trace()
    first = names(apply(program, rematerialize))
    count = len(asked)
    assert names(apply(program, rematerialize)) == first
    assert len(asked) == count > 0


def test_another_policy_is_refused() -> None:
    with pytest.raises(FzeroError, match="policy: is 'all'; give None"):
        fzero.remat(gelu, "all")
    with pytest.raises(FzeroError, match=r"policy: has .*aten\.mm.*, which is no operation.*mm\.default"):
        fzero.remat(gelu, [torch.ops.aten.mm])


def test_masks_are_drawn_again_by_their_number() -> None:
    program = apply(on_blocks(fzero.value_and_grad(loss_of(fzero.remat(dropped)))).trace(), rematerialize)
    numbers = [node.args[0] for node in calls(program, ops.draw)]
    assert numbers == [0, 1, 2, 3, 3, 2, 1, 0]


def test_collectives_along_data_axes_are_not_repeated() -> None:
    wrapped = on_blocks(fzero.value_and_grad(loss_of(fzero.remat(averaged))))
    before = wrapped.trace()
    assert sorted(moved(rematerialize(before))) == sorted(moved(before))


def test_collectives_along_model_axes_repeat_without_a_policy_and_with_local() -> None:
    """Columns and rows around a sum and a gather: the last scatter of a block is its result, which nobody needs again.
    The repeated sums are not joined with those of the forward pass, where they would stay until their use."""

    def block(layer: Any, x: Tensor) -> Tensor:
        hidden = F.gelu(fzero.all_gather(x, "tp") @ layer["up"]) @ layer["down"]
        mean = fzero.psum(hidden, "tp").sin()
        return x + fzero.psum_scatter(hidden * mean, "tp")

    mesh, held = VirtualMesh(fsdp=1, tp=2), {f"layers.*.{name}": ("tp", dim) for name, dim in (("up", 1), ("down", 0))}
    params, x = fzero.partition(blocks(3), mesh, split=held), torch.randn(64, WIDTH)

    def take(wrap: Wrap) -> tuple[Any, dict[str, int], int]:
        def loss(params: Any, x: Tensor) -> Tensor:
            own = x.unflatten(0, (2, -1)).index_select(0, fzero.axis_index("tp").reshape(1)).squeeze(0)
            return fzero.psum(loss_of(wrap(block))(params, own), "tp")

        step = fzero.simulate(fzero.value_and_grad(loss), mesh, data=("fsdp",))
        program = step.trace(params, x)
        counts = Counter(entry.op for entry in program.comm() if entry.axis == "tp" and entry.nbytes > 4)
        return fzero.unpartition(step(params, x)), counts, program.memory().peak

    results, once, most = take(plain)
    for wrap in (dots, partial(fzero.remat, policy="offload")):
        assert take(wrap)[1] == once
    peaks = [most]
    for wrap in (partial(fzero.remat, policy="local"), fzero.remat):
        again, counts, peak = take(wrap)
        torch.testing.assert_close(again, results, rtol=0, atol=0)
        assert counts == once + Counter(all_gather=3, all_reduce=3)
        peaks.append(peak)
    assert peaks == sorted(peaks, reverse=True) and len({*peaks}) == 3


def test_a_region_in_a_local_one_decides_by_itself() -> None:
    alone, within = (
        apply(on_blocks(fzero.value_and_grad(loss_of(wrap(gelu)))).trace(), rematerialize)
        for wrap in (fzero.remat, lambda fn: fzero.remat(fzero.remat(fn), policy="local"))
    )
    assert names(within) == names(alone) != names(on_blocks(fzero.value_and_grad(loss_of(gelu))).trace())


def test_a_result_that_only_the_backward_pass_needs_is_computed_again() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        return fzero.remat(torch.tanh)(x @ p["layers"][0]["up"]).square().sum()  # its value is not asked for

    program = apply(on_blocks(fzero.grad(loss)).trace(), rematerialize)
    assert names(program).count("tanh") == 1


# with release


def test_a_layer_is_gathered_for_its_forward_pass_and_once_for_recomputation_and_backward() -> None:
    wrapped = fzero.remat(lambda x, layer: torch.sin(dense(layer, x)))
    case = differentiated(lambda p, x: reduce(wrapped, p["layers"], x).square().mean(), layers(4), MESH)
    program = apply(case.trace(), rematerialize, bucket, lambda program: release(program, stage=3))
    assert [line for line in moved(program) if "gather" in line] == [
        *(f"all_gather layers.{i}" for i in (0, 1, 2, 3)),
        *(f"all_gather layers.{i}" for i in (2, 1, 0)),
    ]


def test_at_stage_2_a_layer_is_gathered_once() -> None:
    program = passed(on_blocks(fzero.value_and_grad(loss_of(fzero.remat(gelu)))), stage=2)
    assert [line for line in moved(program) if "gather" in line] == [f"all_gather layers.{i}" for i in range(4)]
