"""Optimizers: against torch.optim, and against results by hand."""

from __future__ import annotations

import operator
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fzero import optim, tree
from fzero.base.errors import FzeroError
from fzero.optim import fused, kernels

ROUNDING = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-14},  # some 100 operations of 1e-16
    torch.float32: {"rtol": 2e-6, "atol": 2e-7},  # some 20 operations of 6e-8
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-9},  # a few roundings to 8 bits, each up to 2**-9
}


class Block(NamedTuple):
    weight: Tensor
    bias: Tensor


def random_tree(seed: int = 0, dtype: torch.dtype = torch.float32) -> tree.Tree:
    """Two blocks, a 0-d and an empty leaf, and a None where a frozen leaf was."""
    draw = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    blocks = [Block(leaf(3, 4), leaf(4)) for _ in range(2)]
    return {"blocks": blocks, "empty": leaf(0, 3), "frozen": None, "scale": leaf()}


def train(optimizer: optim.GradientTransformation, params: tree.Tree, grads: list[tree.Tree]) -> tree.Tree:
    state = optimizer.init(params)
    for grad in grads:
        updates, state = optimizer.update(grad, state, params)
        params = optim.apply_updates(params, updates)
    return params


def train_torch(make: type[torch.optim.Optimizer], params: tree.Tree, grads: list[tree.Tree], **options) -> tree.Tree:
    leaves, treedef = tree.flatten(params)
    weights = [leaf.clone().requires_grad_() for leaf in leaves]
    optimizer = make(weights, foreach=False, **options)
    for grad in grads:
        for weight, given in zip(weights, tree.leaves(grad)):
            weight.grad = given.clone()
        optimizer.step()
    return tree.unflatten(treedef, [weight.detach() for weight in weights])


def assert_close(got: tree.Tree, want: tree.Tree, **tolerance: float) -> None:
    assert tree.paths(got) == tree.paths(want)
    for a, b in zip(tree.leaves(got), tree.leaves(want)):
        torch.testing.assert_close(a, b, **tolerance)


def assert_equal(got: tree.Tree, want: tree.Tree) -> None:
    assert_close(got, want, rtol=0, atol=0)


def filled(like: tree.Tree, value: float) -> tree.Tree:
    return tree.map(lambda leaf: torch.full_like(leaf, value), like)


# presets against torch.optim


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (optim.adam(0.01), torch.optim.Adam, {"lr": 0.01}),
        (optim.adam(0.1, 0.0, 0.9, 1e-3), torch.optim.Adam, {"lr": 0.1, "betas": (0.0, 0.9), "eps": 1e-3}),
        (optim.adamw(), torch.optim.AdamW, {}),
        (optim.adamw(0.01, weight_decay=1e-4), torch.optim.AdamW, {"lr": 0.01, "weight_decay": 1e-4}),
        (
            optim.adamw(0.01, 0.8, 0.95, 1e-5, 0.3),
            torch.optim.AdamW,
            {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.3},
        ),
        (optim.sgd(0.1), torch.optim.SGD, {"lr": 0.1}),
        (optim.sgd(0.1, momentum=0.9), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (
            optim.sgd(0.1, momentum=0.9, nesterov=True),
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        ),
    ],
)
def test_presets_equal_torch_optim(dtype, ours, theirs, options):
    params, grads = random_tree(0, dtype), [random_tree(seed, dtype) for seed in range(1, 7)]
    assert_close(train(ours, params, grads), train_torch(theirs, params, grads, **options), **ROUNDING[dtype])


def test_the_first_adam_step_is_the_sign_of_the_gradient():
    # m / sqrt(v) = (1 - b1) g / (1 - b1) / sqrt((1 - b2) g**2 / (1 - b2)) = sign(g)
    params, grads = random_tree(0, torch.float64), random_tree(1, torch.float64)
    stage = optim.scale_by_adam(eps=0.0)
    updates, state = stage.update(grads, stage.init(params))
    assert_close(updates, tree.map(torch.sign, grads), **ROUNDING[torch.float64])
    assert state.count.item() == 1
    assert state.count.dtype == torch.int32


def test_bias_correction_is_exact_in_float32():
    # 1 - 0.999f alone would be off by 1e-5; constant gradients keep m / sqrt(v) at 1
    params, grads = {"w": torch.zeros(5)}, {"w": torch.full((5,), 3.0)}
    stage = optim.scale_by_adam(eps=0.0)
    state = stage.init(params)
    for _ in range(5):
        updates, state = stage.update(grads, state)
        torch.testing.assert_close(updates["w"], torch.ones(5), rtol=1e-6, atol=0)  # ten float32 operations


def test_schedule_sees_the_steps_so_far():
    params, ones = random_tree(0), filled(random_tree(0), 1.0)
    schedule = optim.join_schedules([optim.constant_schedule(0.5), optim.constant_schedule(0.25)], [1])
    moved = train(optim.sgd(schedule), params, [ones, ones, ones])
    assert_close(moved, tree.map(lambda p: p - 1.0, params), **ROUNDING[torch.float32])  # 0.5 + 0.25 + 0.25


def test_a_schedule_may_return_a_number():
    params, ones = random_tree(0), filled(random_tree(0), 1.0)
    assert_equal(train(optim.sgd(lambda count: 0.5), params, [ones]), tree.map(lambda p: p - 0.5, params))


# dtypes, empty trees, memory


def test_bfloat16_parameters_with_float32_updates_keep_their_dtypes():
    params, grads = random_tree(0, torch.bfloat16), random_tree(1, torch.float32)
    for optimizer in (optim.adamw(0.01), optim.sgd(optim.constant_schedule(0.01), momentum=0.9)):
        state = optimizer.init(params)
        dtypes = [leaf.dtype for leaf in tree.leaves(state)]
        for _ in range(2):
            updates, state = optimizer.update(grads, state, params)
            params = optim.apply_updates(params, updates)
        assert [leaf.dtype for leaf in tree.leaves(state)] == dtypes
        assert {leaf.dtype for leaf in tree.leaves(params)} == {torch.bfloat16}


def test_bfloat16_adamw_is_float32_adamw_rounded():
    params, grads = random_tree(0, torch.bfloat16), [random_tree(1, torch.bfloat16)]
    wide = train(optim.adamw(0.01), *tree.map(lambda leaf: leaf.float(), (params, grads)))
    assert_close(
        tree.map(lambda leaf: leaf.float(), train(optim.adamw(0.01), params, grads)), wide, **ROUNDING[torch.bfloat16]
    )


def test_apply_updates_rounds_the_sum_once():
    # 1 + 2**-8 + 2**-18 rounds up in bfloat16; the update rounded first, to 2**-8, would be a tie and fall to 1
    moved = optim.apply_updates(torch.ones(2, dtype=torch.bfloat16), torch.full((2,), 2**-8 + 2**-18))
    assert_equal(moved, torch.full((2,), 1 + 2**-7, dtype=torch.bfloat16))


@pytest.mark.parametrize("empty", [{}, [], {"frozen": None, "blocks": []}])
def test_empty_trees_work(empty):
    clipped = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.constant_schedule(0.1)))
    for optimizer in (clipped, optim.sgd(0.1, momentum=0.9)):
        state = optimizer.init(empty)
        updates, _ = optimizer.update(empty, state, empty)
        assert optim.apply_updates(empty, updates) == empty


def test_inputs_are_left_as_they_were():
    params, grads = random_tree(0), random_tree(1)
    optimizer = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1))
    given = (params, grads, optimizer.init(params))
    before = tree.map(torch.clone, given)
    train(optimizer, params, [grads])
    optimizer.update(grads, given[2], params)
    assert_equal(given, before)


# masks


def test_mask_sees_path_and_leaf_and_spares_the_others():
    params, grads = random_tree(0), random_tree(1)
    seen = []

    def mask(path, leaf):
        seen.append((path, tuple(leaf.shape)))
        return leaf.ndim > 1 and path.startswith("blocks.1")

    updates, _ = optim.add_decayed_weights(0.5, mask).update(grads, optim.EmptyState(), params)
    assert seen == [(path, tuple(leaf.shape)) for path, leaf in zip(tree.paths(params), tree.leaves(params))]
    for path, got, grad, param in zip(tree.paths(grads), *map(tree.leaves, (updates, grads, params))):
        if path == "blocks.1.weight":
            torch.testing.assert_close(got, grad + 0.5 * param)
        else:
            assert got is grad


def test_adamw_with_a_mask_is_torch_with_two_groups():
    params, grads = random_tree(0, torch.float64), [random_tree(seed, torch.float64) for seed in range(1, 5)]
    got = train(optim.adamw(0.01, weight_decay=0.3, mask=lambda path, leaf: leaf.ndim > 1), params, grads)
    decayed = train_torch(torch.optim.AdamW, params, grads, lr=0.01, weight_decay=0.3)
    plain = train_torch(torch.optim.AdamW, params, grads, lr=0.01, weight_decay=0.0)
    assert_close(got, tree.map(lambda a, b: a if a.ndim > 1 else b, decayed, plain), **ROUNDING[torch.float64])


# clipping


def test_global_norm_is_the_norm_of_all_elements():
    assert optim.global_norm({"a": torch.tensor([3.0]), "b": [torch.tensor(4.0), None]}).item() == 5.0
    assert optim.global_norm({}).item() == 0.0


def test_global_norm_of_half_precision_does_not_overflow():
    for dtype in (torch.float16, torch.bfloat16):
        norm = optim.global_norm([torch.full((4,), 1024.0, dtype=dtype)])  # 1024**2 is beyond float16
        assert norm.dtype == torch.float32
        assert norm.item() == 2048.0


def test_a_complex_element_counts_with_its_absolute_value():
    for dtype in (torch.complex64, torch.complex128):
        norm = optim.global_norm([torch.tensor([3 + 4j, 0], dtype=dtype), torch.tensor([12.0])])
        assert norm.dtype == dtype.to_real()
        assert norm.item() == 13.0


def clip(max_norm, grads):
    stage = optim.clip_by_global_norm(max_norm)
    return stage.update(grads, stage.init(grads))[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
@pytest.mark.parametrize("size", [1e-3, 50.0, 500.0])
def test_clipping_is_torchs_clip_grad_norm(dtype, size):
    # torch adds 1e-6 to the norm, and rounds the norm and the factor to the gradients' dtype
    grads = [size * leaf.to(torch.promote_types(dtype, torch.float32)) for leaf in tree.leaves(random_tree(1))]
    grads = [grad.to(dtype) * (0.6 + 0.8j if dtype.is_complex else 1) for grad in grads]
    weights = [torch.zeros_like(grad).requires_grad_() for grad in grads]
    for weight, grad in zip(weights, grads):
        weight.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(weights, 0.5)
    clipped = clip(0.5, grads)
    tolerance = 4 * torch.finfo(dtype).eps + 1e-6 / norm.item()
    torch.testing.assert_close(optim.global_norm(grads).to(norm.dtype), norm, rtol=tolerance, atol=0)
    for got, weight in zip(clipped, weights):
        torch.testing.assert_close(got, weight.grad, rtol=tolerance, atol=torch.finfo(dtype).smallest_normal)


def test_clipping_scales_to_the_norm_or_not_at_all():
    grads = random_tree(1, torch.float64)
    norm = torch.cat([leaf.reshape(-1) for leaf in tree.leaves(grads)]).norm().item()
    clipped = clip(0.5, grads)
    assert_close(clipped, tree.map(lambda g: g * 0.5 / norm, grads), **ROUNDING[torch.float64])
    untouched = clip(2 * norm, grads)
    assert_equal(untouched, grads)


def test_clipping_keeps_zeros_and_dtypes():
    zeros = filled(random_tree(0, torch.bfloat16), 0.0)
    clipped = clip(1.0, zeros)
    assert_equal(clipped, zeros)


# chain and the small stages


def test_chain_runs_in_order_and_keeps_a_state_each():
    params, ones = random_tree(0), filled(random_tree(0), 1.0)
    stages = optim.chain(optim.scale(3.0), optim.add_decayed_weights(1.0), optim.trace(0.5), optim.identity())
    state = stages.init(params)
    assert [type(part) for part in state] == [optim.EmptyState, optim.EmptyState, optim.TraceState, optim.EmptyState]
    updates, state = stages.update(ones, state, params)
    assert_equal(updates, tree.map(lambda p: 3 + p, params))
    updates, state = stages.update(ones, state, params)
    assert_close(updates, tree.map(lambda p: 1.5 * (3 + p), params), **ROUNDING[torch.float32])
    assert_equal(state[2].trace, updates)


def test_chains_nest():
    params, grads = random_tree(0), [random_tree(seed) for seed in range(1, 4)]
    flat = optim.chain(optim.trace(0.9), optim.scale(2.0), optim.scale_by_learning_rate(0.1))
    nested = optim.chain(optim.chain(optim.trace(0.9), optim.scale(2.0)), optim.scale_by_learning_rate(0.1))
    assert_equal(train(nested, params, grads), train(flat, params, grads))


def test_the_empty_chain_is_the_identity():
    grads = random_tree(1)
    assert optim.chain().update(grads, ()) == (grads, ())
    assert optim.identity().update(grads, optim.EmptyState()) == (grads, optim.EmptyState())


# errors


def without(full: tree.Tree, key: str) -> tree.Tree:
    return {name: child for name, child in full.items() if name != key}


@pytest.mark.parametrize("optimizer", [optim.adamw(0.1), optim.adam(0.1), optim.sgd(0.1, momentum=0.9)])
def test_gradients_of_other_structure_name_the_leaf(optimizer):
    params = random_tree(0)
    state = optimizer.init(params)
    with pytest.raises(FzeroError, match=r"^scale: this leaf is missing \(6 leaves expected, 5 given\)"):
        optimizer.update(without(params, "scale"), state, params)
    with pytest.raises(FzeroError, match=r"^frozen: this leaf was not expected \(6 leaves expected, 7 given\)"):
        optimizer.update(params | {"frozen": torch.zeros(2)}, state, params)
    with pytest.raises(FzeroError, match=r"^scale: shape \(2,\) given, \(\) expected"):
        optimizer.update(params | {"scale": torch.zeros(2)}, state, params)


def test_parameters_of_other_structure_name_the_leaf():
    grads = random_tree(1)
    with pytest.raises(FzeroError, match=r"^scale: this leaf was not expected"):
        optim.add_decayed_weights(0.1).update(grads, optim.EmptyState(), without(grads, "scale"))
    with pytest.raises(FzeroError, match=r"^scale: this leaf is missing"):
        optim.apply_updates(grads, without(grads, "scale"))


def test_decay_without_parameters_says_to_pass_them():
    optimizer = optim.adamw(0.1)
    params = random_tree(0)
    with pytest.raises(FzeroError, match=r"pass them: update\(updates, state, params\)"):
        optimizer.update(params, optimizer.init(params))


@pytest.mark.parametrize("optimizer", [optim.adamw(0.1), optim.sgd(0.1, momentum=0.9)])
def test_integer_parameters_are_named(optimizer):
    with pytest.raises(FzeroError, match=r"^blocks\.0\.table: dtype is torch\.int64.*fzero\.tree\.split"):
        optimizer.init({"blocks": [{"table": torch.arange(3), "weight": torch.zeros(3)}]})


def test_a_state_of_another_chain_is_refused():
    grads = random_tree(1)
    with pytest.raises(FzeroError, match="the state has 1 parts, the chain 2"):
        optim.sgd(0.1).update(grads, optim.chain(optim.identity()).init(grads))


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.adam(0.1, b1=1.0),
        lambda: optim.adamw(0.1, b2=-0.1),
        lambda: optim.adamw(0.1, eps=-1e-8),
        lambda: optim.sgd(0.1, momentum=1.0),
        lambda: optim.clip_by_global_norm(0.0),
        lambda: optim.clip_by_global_norm(float("nan")),
    ],
)
def test_bad_hyperparameters_are_refused(make):
    with pytest.raises(FzeroError):
        make()


# tracing


def traced_nodes(fn, *args):
    graph_module = make_fx(fn, tracing_mode="fake")(*args)
    calls = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    return graph_module, [str(node.target) for node in calls if node.target is not operator.getitem]


def test_a_traced_adamw_has_one_node_a_stage():
    optimizer = optim.adamw(0.01, weight_decay=0.1, mask=lambda path, leaf: leaf.ndim > 1)
    params = {"blocks": [{"weight": torch.randn(4, 3), "bias": torch.randn(3)} for _ in range(15)]}
    grads = tree.map(torch.randn_like, params)
    state = optimizer.init(params)
    treedef = tree.flatten((params, grads, state))[1]

    def step(leaves):
        params, grads, state = tree.unflatten(treedef, leaves)
        updates, state = optimizer.update(grads, state, params)
        return tree.leaves((optim.apply_updates(params, updates), state))

    leaves = tree.leaves((params, grads, state))
    graph_module, nodes = traced_nodes(step, leaves)
    assert len(nodes) < 15
    assert sorted(nodes) == [
        "aten._foreach_add.List",  # weight decay
        "aten._foreach_add.List",  # apply_updates
        "aten._foreach_mul.Scalar",  # learning rate
        "aten.add.Tensor",  # step count
        "fzero.scale_by_adam.default",
    ]
    for got, want in zip(graph_module(leaves), step(leaves)):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_schedules_and_clipping_trace_without_looking_at_values():
    schedule = optim.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(schedule, momentum=0.9))
    params, grads = torch.randn(4, 3), torch.randn(4, 3)
    state = optimizer.init(params)

    (failed, _, _), treedef = tree.flatten(state)

    def step(params, grads, *state):
        updates, _ = optimizer.update(grads, tree.unflatten(treedef, state), params)
        return optim.apply_updates(params, updates)

    program, _ = traced_nodes(step, params, grads, *tree.leaves(state))
    for count in range(7):
        args = (params, grads, failed, torch.ones(4, 3), torch.tensor(count, dtype=torch.int32))
        torch.testing.assert_close(program(*args), step(*args), rtol=0, atol=0)


# kernels


def adam_lists(dtype: torch.dtype = torch.float32, updates: torch.dtype = torch.float32):
    shapes = [(3, 4), (5,), (), (0, 2)]
    grads = [torch.randn(shape).to(updates) for shape in shapes]
    mu = [torch.randn(shape).to(dtype) for shape in shapes]
    nu = [torch.rand(shape).to(dtype) for shape in shapes]
    return grads, [mu[0].t().contiguous().t(), *mu[1:]], nu


@pytest.mark.parametrize("updates", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_by_adam_is_a_lawful_operation(dtype, updates):
    args = (*adam_lists(dtype, updates), torch.tensor(3, dtype=torch.int32), 0.9, 0.999, 1e-8)
    torch.library.opcheck(kernels.scale_by_adam.default, args, test_utils=("test_schema", "test_faketensor"))
    scaled, mu, nu = kernels.scale_by_adam(*args)
    assert {leaf.dtype for leaf in scaled} == {torch.promote_types(dtype, updates)}
    assert {leaf.dtype for leaf in (*mu, *nu)} == {dtype}


def test_scale_by_adam_takes_leaves_of_several_dtypes():
    lists = [[*a, *b] for a, b in zip(adam_lists(torch.float64, torch.float64), adam_lists(torch.bfloat16))]
    together = kernels.scale_by_adam(*lists, torch.tensor(3), 0.9, 0.999, 1e-8)
    for i in range(len(lists[0])):
        alone = kernels.scale_by_adam(*([column[i]] for column in lists), torch.tensor(3), 0.9, 0.999, 1e-8)
        for a, b in zip(together, alone):
            torch.testing.assert_close(a[i], b[0])


def test_scale_by_adam_reaches_leaves_under_its_name():
    class Leaf:
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return func.__name__

    leaf = Leaf()
    assert kernels.scale_by_adam([leaf], [leaf], [leaf], torch.tensor(1), 0.9, 0.999, 1e-8) == "scale_by_adam"


def test_scale_by_adam_refuses_to_be_differentiated():
    grads, mu, nu = adam_lists()
    grads[0].requires_grad_()
    scaled, _, _ = kernels.scale_by_adam(grads, mu, nu, torch.tensor(1), 0.9, 0.999, 1e-8)
    with pytest.raises(FzeroError, match="scale_by_adam: has no derivative"):
        scaled[0].sum().backward()


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01), torch.tensor(0.01, dtype=torch.float64)])
@pytest.mark.parametrize(
    ("dtype", "updates"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_fused_adamw_equals_the_chain(dtype, updates, rate):
    if isinstance(rate, Tensor) and dtype == torch.float64:
        rate = rate.clone().fill_(2**-7)  # exact in float32, which the rate is rounded to
    params, grads = random_tree(0, dtype), [random_tree(seed, updates) for seed in range(1, 5)]
    want = train(optim.adamw(rate, 0.9, 0.99, 1e-8, 0.1), params, grads)
    weights = tree.map(torch.clone, params)
    mu, nu = tree.map(torch.zeros_like, (params, params))
    count = torch.tensor(0, dtype=torch.int32)
    for grad in grads:
        count = count + 1
        lists = map(tree.leaves, (weights, grad, mu, nu))
        fused.fused_adamw_(*lists, count, rate, 0.9, 0.99, 1e-8, 0.1)
    assert_close(weights, want, **ROUNDING[dtype])


def test_fused_adamw_of_nothing_does_nothing():
    fused.fused_adamw_([], [], [], [], torch.tensor(1), 0.1, 0.9, 0.999, 1e-8, 0.1)


@pytest.mark.parametrize("which", range(4))
def test_fused_adamw_minds_strides(which):
    # torch._fused_adamw_ on CPU pairs elements by their place in memory
    lists = [torch.rand(4, 3) for _ in range(4)]
    want = [x.clone() for x in lists]
    fused.fused_adamw_(*([x] for x in want), torch.tensor(2), 0.1, 0.9, 0.999, 1e-8, 0.1)
    got = [x.clone() for x in lists]
    got[which] = torch.empty(3, 8).t()[::2].copy_(lists[which])
    fused.fused_adamw_(*([x] for x in got), torch.tensor(2), 0.1, 0.9, 0.999, 1e-8, 0.1)
    assert_equal(got, want)


def test_fused_adamw_writes_into_views_and_nowhere_else():
    memory = torch.zeros(31)
    grads, mu, nu = torch.randn(3, 30).unbind()
    param = memory[1:]  # unaligned
    fused.fused_adamw_([param], [grads], [mu.clone()], [nu.abs()], torch.tensor(1), 0.1, 0.9, 0.999, 1e-8, 0.1)
    assert memory[0] == 0
    assert memory[1:].count_nonzero() == 30


# the package


def test_all_is_what_is_exported():
    public = {name: value for name, value in vars(optim).items() if not name.startswith("_")}
    assert sorted(optim.__all__) == sorted(name for name, value in public.items() if not isinstance(value, ModuleType))


STAGES = [
    optim.identity(), optim.chain(optim.identity()), optim.trace(0.9), optim.scale_by_adam(), optim.scale_by_lion(),
    optim.scale_by_rms(), optim.scale_by_rss(), optim.scale_by_stddev(), optim.scale_by_nadam(), optim.scale_by_muon(),
    optim.scale_by_adam8bit(), optim.scale_by_factored_rms(), optim.scale_by_schedule(lambda count: 0.1),
    optim.clip_by_global_norm(1.0), optim.ema(0.9), optim.schedule_free(optim.sgd(0.1), 0.1),
    optim.masked(optim.identity(), lambda path, leaf: True), optim.apply_if_finite(optim.identity(), 1),
    optim.multi_transform({0: optim.identity()}, lambda path, leaf: 0), optim.muon(0.1, where=lambda path, leaf: True),
    optim.inject_hyperparams(optim.sgd)(lambda count: 0.1),
]  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_refuses_the_state_of_any_other(stage: optim.GradientTransformation) -> None:
    """Many states have a count, mu or nu: a stage that took any of these would go on from another's numbers."""
    params = {"w": torch.ones(2, 2)}
    own = type(stage.init(params))
    stage.update(params, stage.init(params), params)
    for state in (other.init(params) for other in STAGES):
        if type(state) is not own:
            with pytest.raises(FzeroError, match="the state is of type|the state has [0-9]+ parts"):
                stage.update(params, state, params)
    with pytest.raises(FzeroError, match="the state is of type NoneType"):
        stage.update(params, None, params)
