"""Stages of the optimizers: their collectives, dtypes, operations and errors. `test_reference` has their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from programs import layers, names, trained
from torch import Tensor

import fzero
from fzero import optim, passes, tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.optim import factors, fused, operations

MESH = VirtualMesh(fsdp=8)

MAKERS: dict[str, Callable[[], optim.GradientTransformation]] = {
    "sgd": lambda: optim.sgd(0.1, momentum=0.9),
    "adam": optim.adam,
    "adamw": optim.adamw,
    "amsgrad": optim.amsgrad,
    "nadam": optim.nadam,
    "adagrad": optim.adagrad,
    "rmsprop": lambda: optim.rmsprop(momentum=0.9),
    "rmsprop, centered": lambda: optim.rmsprop(centered=True),
    "lion": lambda: optim.lion(1e-2),
    "lamb": lambda: optim.lamb(1e-2),
    "adafactor": optim.adafactor,
    "schedule_free": lambda: optim.schedule_free(optim.adamw(b1=0.0), 1e-3),
}


def step_once(
    optimizer: optim.GradientTransformation, params: tree.Tree, grads: tree.Tree, state: Any = None
) -> tuple[tree.Tree, Any]:
    state = optimizer.init(params) if state is None else state
    updates, state = optimizer.update(grads, state, params)
    return optim.apply_updates(params, updates), state


# programs


def traced(optimizer: optim.GradientTransformation, count: int) -> fzero.Program:
    """The program of a training step of so many layers, whose updates `split` does not cut in two."""
    case = trained(optimizer, layers(count), MESH)
    chosen = [rewrite for rewrite in passes.defaults(stage=3) if rewrite is not passes.split]
    return fzero.simulate(case.step, MESH, passes=chosen).trace(*case.args)


@pytest.mark.parametrize("name", MAKERS)
def test_more_leaves_are_no_more_list_operations(name: str) -> None:
    few, many = ([n for n in names(traced(MAKERS[name](), count)) if is_of_lists(n)] for count in (1, 3))
    assert few == many != []


def is_of_lists(name: str) -> bool:
    return name.startswith("_foreach_") or name.removesuffix("_") in OURS


OURS = {*operations.STAGES, *operations.SUMS, *operations.MAPS, "adagrad", "adamw", "momentum", "sgd"}


@pytest.mark.parametrize(("name", "expected"), [("lamb", 1), ("adafactor", 2), ("lion", 0)])
def test_sums_over_leaves_are_few_collectives(name: str, expected: int) -> None:
    """LAMB's norms of parameters and updates are one. Adafactor's rows, columns and norms of parameters are one, and
    the norms of what these scale another."""
    program = traced(MAKERS[name](), 3)
    sums = [node for node in program.graph.nodes if node.name.startswith("all_reduce") and node.args[1] == "sum"]
    assert len(sums) == expected
    if name == "adafactor":  # rows and columns of 3 matrices of 5 x 5, and 6 norms; then 6 norms
        moved = [entry.nbytes for entry in program.comm() if entry.op == "all_reduce"]
        assert sorted(moved)[-2:] == [6 * 4, (3 * 10 + 6) * 4]


def test_the_factors_of_a_matrix_are_all_of_its_state() -> None:
    params = {"w": torch.randn(40, 30), "experts": torch.randn(3, 4, 5), "b": torch.randn(7)}
    held = fzero.partition(params, MESH)
    state = optim.scale_by_factored_rms().init(held)
    sizes = {path: x.numel() for path, x in zip(tree.paths(state), tree.leaves(state))}
    assert sizes == {"count": 1, "v_row.experts": 12, "v_row.w": 40, "v_col.experts": 15, "v_col.w": 30, "v.b": 7}
    assert all(x.is_replicated for x in tree.leaves((state.v_row, state.v_col)))


# dtypes


@pytest.mark.parametrize("name", MAKERS)
def test_bfloat16_parameters_train_and_dtypes_stay(name: str) -> None:
    optimizer = MAKERS[name]()
    params = {"w": torch.randn(6, 5).bfloat16(), "b": torch.randn(5).bfloat16()}
    grads = tree.map(torch.randn_like, params)
    state = optimizer.init(params)
    dtypes = [x.dtype for x in tree.leaves(state)]
    new, state = step_once(optimizer, params, grads, state)
    new, state = step_once(optimizer, new, grads, state)
    assert [x.dtype for x in tree.leaves(state)] == dtypes and {x.dtype for x in tree.leaves(new)} == {torch.bfloat16}
    assert all(x.isfinite().all() for x in tree.leaves((new, state)))


@pytest.mark.parametrize("name", MAKERS)
def test_state_may_be_bfloat16(name: str) -> None:
    """A step from bfloat16 state is the step from the same numbers in float32, whose new state is then rounded."""
    torch.manual_seed(0)
    params = {"w": torch.randn(6, 5), "b": torch.randn(5)}
    grads = [tree.map(torch.randn_like, params) for _ in range(2)]
    optimizer = MAKERS[name]()
    narrow = optim.cast_state(optimizer, torch.bfloat16)
    state = narrow.init(params)
    assert {x.dtype for x in tree.leaves(state) if x.ndim} == {torch.bfloat16}
    assert [x.dtype for x in tree.leaves(state) if not x.ndim] == [
        x.dtype for x in tree.leaves(optimizer.init(params)) if not x.ndim
    ]
    once, state = step_once(narrow, params, grads[0], state)
    same = tree.map(lambda x, like: x.to(like.dtype), state, optimizer.init(params))
    got, got_state = step_once(narrow, once, grads[1], state)
    want, want_state = step_once(optimizer, once, grads[1], same)
    rounding = 2**-8 if "adafactor" in name or name == "sgd" else 0.0  # which read the rounded new state
    for a, b in zip(tree.leaves(got), tree.leaves(want)):
        torch.testing.assert_close(a, b, rtol=rounding, atol=1e-7)
    for a, b in zip(tree.leaves(got_state), tree.leaves(want_state)):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=2**-7, atol=0)


def test_a_mask_narrows_the_first_moment_alone() -> None:
    optimizer = optim.cast_state(optim.adamw(), torch.bfloat16, mask=lambda path, leaf: ".mu." in path)
    state = optimizer.init({"w": torch.ones(3)})
    assert (state[0].mu["w"].dtype, state[0].nu["w"].dtype) == (torch.bfloat16, torch.float32)


# formulas that torch.optim does not show


def test_an_update_of_lion_has_length_one_everywhere() -> None:
    params, grads = {"w": torch.zeros(5)}, {"w": torch.tensor([3.0, -1e-20, 0.0, 1e20, -2.0])}
    updates, _ = optim.scale_by_lion().update(grads, optim.scale_by_lion().init(params))
    assert updates["w"].tolist() == [1.0, -1.0, 0.0, 1.0, -1.0]


def test_the_trust_ratio_is_one_where_a_norm_is_zero() -> None:
    params = {"zero": torch.zeros(3), "one": torch.ones(4), "still": torch.ones(2)}
    grads = {"zero": torch.ones(3), "one": torch.full((4,), 0.5), "still": torch.zeros(2)}
    updates, _ = optim.scale_by_trust_ratio().update(grads, optim.EmptyState(), params)
    assert [x.tolist() for x in tree.leaves(updates)] == [[1.0] * 4, [0.0] * 2, [1.0] * 3]
    updates, _ = optim.scale_by_trust_ratio(4.0, 3.0, 1.0).update(grads, optim.EmptyState(), params)
    torch.testing.assert_close(updates["one"], torch.full((4,), 0.5 * 3.0 * 4.0 / (4.0 + 1.0)))


def test_blocks_are_scaled_by_root_mean_squares() -> None:
    params, grads = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}, {"a": torch.ones(2), "b": torch.ones(2) * 8}
    updates, _ = optim.scale_by_param_block_rms(0.5).update(grads, optim.EmptyState(), params)
    torch.testing.assert_close(updates, {"a": torch.full((2,), 12.5**0.5), "b": torch.full((2,), 4.0)})


def test_the_average_is_found_from_parameters_and_state() -> None:
    """With a constant rate x is the mean of all z, here of -1 and -2, after the first, which is y itself."""
    optimizer = optim.schedule_free(optim.sgd(1.0), 1.0, b1=0.5)
    params = {"w": torch.zeros(3), "frozen": None}
    grads = {"w": torch.ones(3), "frozen": None}
    state = None
    for _ in range(2):
        params, state = step_once(optimizer, params, grads, state)
    average = optim.schedule_free_eval_params(state, params)
    torch.testing.assert_close(average["w"], torch.full((3,), -1.5))
    torch.testing.assert_close(params["w"], torch.full((3,), 0.5 * -1.5 + 0.5 * -2.0))


def test_a_rate_of_zero_moves_no_average() -> None:
    optimizer = optim.schedule_free(optim.sgd(0.0), 0.0)
    params, state = step_once(optimizer, torch.ones(3), torch.ones(3))
    assert params.tolist() == [1.0] * 3 and state.weight_sum.item() == 0.0


# operations


SHAPES = [(3, 4), (5,), (), (0, 2)]


def arguments(
    dtype: torch.dtype, updates: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> dict[str, tuple[Any, ...]]:
    """Name of a stage's operation -> arguments."""
    grads = [torch.randn(shape).to(updates) for shape in shapes]
    one, other, more = ([torch.rand(shape).to(dtype) for shape in shapes] for _ in range(3))
    count, weight = torch.tensor(3, dtype=torch.int32), torch.tensor(0.3, dtype=torch.float64)
    return {
        "scale_by_adam": (grads, one, other, count, 0.9, 0.99, 1e-8),
        "scale_by_amsgrad": (grads, one, other, more, count, 0.9, 0.99, 1e-8),
        "scale_by_nadam": (grads, one, other, count, weight, weight, 0.9, 0.99, 1e-8),
        "scale_by_lion": (grads, one, 0.9, 0.99),
        "scale_by_rss": (grads, one, 1e-10),
        "scale_by_rms": (grads, one, 0.9, 1e-8),
        "scale_by_stddev": (grads, [0.1 * x for x in one], [1 + x for x in other], 0.9, 1e-8),
        "scale_by_floored_rms": (grads, one, weight, [1e-3 for _ in shapes]),
        "schedule_free": (grads, one, more, weight, 0.9),
    }


@pytest.mark.parametrize("updates", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", operations.STAGES)
def test_a_stage_is_a_lawful_operation(name: str, dtype: torch.dtype, updates: torch.dtype) -> None:
    operation, args = operations.STAGES[name], arguments(dtype, updates)[name]
    torch.library.opcheck(operation.default, args, test_utils=("test_schema", "test_faketensor"))
    scaled, *states = operation(*args)
    assert {x.dtype for x in scaled} == {torch.promote_types(dtype, updates)}
    assert all({x.dtype for x in state} == {dtype} for state in states)
    assert [x.shape for x in scaled] == [x.shape for x in args[0]]
    assert operation(*([] if isinstance(arg, list) else arg for arg in args))[0] == []


@pytest.mark.parametrize("name", [n for n in operations.STAGES if "tensors" in operations.STAGES[n].overloads()])
def test_hyperparameters_may_be_tensors(name: str) -> None:
    operation, args = operations.STAGES[name], arguments(torch.float64, torch.float64)[name]
    given = [torch.tensor(x, dtype=torch.float64) if isinstance(x, float) else x for x in args]
    for got, want in zip(operation(*given), operation(*args)):
        torch.testing.assert_close(list(got), list(want), rtol=1e-13, atol=1e-15)  # a few roundings of 1e-16


@pytest.mark.parametrize("name", operations.STAGES)
def test_a_stage_refuses_to_be_differentiated(name: str) -> None:
    args = arguments(torch.float32, torch.float32)[name]
    args[0][0].requires_grad_()
    with pytest.raises(FzeroError, match=f"{name}: has no derivative"):
        operations.STAGES[name](*args)[0][0].sum().backward()


def arguments_of_leaves(leaves: list[Tensor]) -> dict[str, tuple[Any, ...]]:
    """Name of an operation on whole leaves -> arguments."""
    shapes = [factors.matrices_of(x.shape) for x in leaves]
    sizes, whole = [size for of in shapes for size in of], operations.list_whole(len(leaves))
    rows, columns = ([torch.rand(of.number * of[side]) for of in shapes] for side in (1, 2))
    return {
        "sums_of_squares": (leaves, [2 for _ in leaves], torch.float64),
        "scale_each": (leaves, torch.rand(3), list(range(len(leaves)))),
        "average_rows_and_columns": (leaves, sizes, *whole),
        "scale_by_factors": (leaves, rows, columns, [1e-3 for _ in leaves], sizes, *whole),
    }


@pytest.mark.parametrize("name", [*operations.STAGES, *arguments_of_leaves([torch.rand(2, 3)])])
def test_an_operation_refuses_forward_mode(name: str) -> None:
    """An autograd kernel as torch makes it gives a tangent of zero."""
    known = arguments(torch.float32, torch.float32) | arguments_of_leaves([torch.rand(4, 6), torch.rand(3, 2)])
    first, *others = known[name]
    operation = getattr(torch.ops.fzero, name).default
    with pytest.raises(FzeroError, match=f"{name}: has no derivative; update outside the differentiated function"):
        torch.func.jvp(lambda x: operation([x, *first[1:]], *others), (first[0],), (torch.ones_like(first[0]),))


@pytest.mark.parametrize("name", [*operations.SUMS, *operations.MAPS])
def test_an_operation_on_whole_leaves_is_lawful(name: str) -> None:
    args = arguments_of_leaves([torch.randn(3, 4), torch.randn(2, 3, 2).bfloat16(), torch.zeros(0, 2)])[name]
    torch.library.opcheck(
        (operations.SUMS | operations.MAPS)[name].default, args, test_utils=("test_schema", "test_faketensor")
    )


TABLES = operations.STAGES | operations.SUMS | operations.MAPS


@pytest.mark.parametrize("name", [name for name in TABLES if name != "average_rows_and_columns"])
def test_an_operation_computes_each_leaf_on_its_own(name: str) -> None:
    """A leaf has the same results beside leaves of other dtypes and alone, because passes cut these lists by leaf.
    They do not cut `average_rows_and_columns`, which has two results for a leaf."""
    leaves = [torch.randn(3, 4, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    given = [(arguments(x.dtype, x.dtype, [(3, 4)]) | arguments_of_leaves([x]))[name] for x in leaves]

    def compute(rows: list[tuple[Any, ...]]) -> list[list[Tensor]]:
        columns = zip(zip(*rows), given[0])
        args = [[x for arg in args for x in arg] if isinstance(first, list) else first for args, first in columns]
        results = TABLES[name](*args)
        return list(results) if isinstance(results, tuple) else [results]

    together, alone = compute(given), [compute([row]) for row in given]
    for position, columns in enumerate(alone):
        for got, (expected,) in zip(together, columns, strict=True):
            assert got[position].dtype == expected.dtype and got[position].equal(expected)


# torch's kernels


def lists(count: int) -> list[list[Tensor]]:
    return [[torch.rand(4, 3), torch.rand(())] for _ in range(count)]


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1, dtype=torch.float64)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_fused_momentum_is_the_formula(rate: Any, nesterov: bool) -> None:
    params, grads, traces = lists(3)
    new = [0.9 * t + (g + 0.3 * p) for p, g, t in zip(params, grads, traces)]
    steps = [g + 0.3 * p + 0.9 * t if nesterov else t for p, g, t in zip(params, grads, new)]
    want = [p - 0.1 * step for p, step in zip(params, steps)]
    fused.fused_momentum_(params, grads, traces, rate, 0.9, nesterov, 0.3)
    torch.testing.assert_close(params, want)
    torch.testing.assert_close(traces, new)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_fused_sgd_and_adagrad_are_the_formulas(rate: Any) -> None:
    params, grads, sums = lists(3)
    want = [p - 0.1 * (g + 0.3 * p) for p, g in zip(params, grads)]
    descended = [p.clone() for p in params]
    fused.fused_sgd_(descended, grads, rate, 0.3)
    torch.testing.assert_close(descended, want)
    decayed = [g + 0.3 * p for p, g in zip(params, grads)]
    new = [s + g * g for s, g in zip(sums, decayed)]
    want = [p - 0.1 * g / (s.sqrt() + 1e-3) for p, g, s in zip(params, decayed, new)]
    fused.fused_adagrad_(params, grads, sums, rate, 1e-3, 0.3)
    torch.testing.assert_close(params, want)
    torch.testing.assert_close(sums, new)


def test_a_condition_that_is_false_changes_no_bit() -> None:
    no = torch.tensor(False)
    params, grads, one, other = lists(4)
    before = [[x.clone() for x in column] for column in (params, grads, one, other)]
    fused.fused_adamw_(params, grads, one, other, torch.tensor(1), 0.1, 0.9, 0.99, 1e-8, 0.1, where=no)
    fused.fused_sgd_(params, grads, 0.1, 0.1, where=no)
    fused.fused_momentum_(params, grads, one, 0.1, 0.9, False, 0.1, where=no)
    fused.fused_adagrad_(params, grads, one, 0.1, 1e-3, 0.1, where=no)
    for column, same in zip((params, grads, one, other), before):
        torch.testing.assert_close(column, same, rtol=0, atol=0)
    fused.fused_sgd_(params, grads, 0.1, 0.0, where=torch.tensor(True))
    torch.testing.assert_close(params, [p - 0.1 * g for p, g in zip(before[0], grads)])


# errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.lion(0.1, b1=1.0), r"^scale_by_lion: b1 is 1\.0; a decay rate lies in \[0, 1\)"),
        (lambda: optim.lion(0.1, b2=-0.1), r"^scale_by_lion: b2 is -0\.1"),
        (lambda: optim.amsgrad(b1=1.0), r"^scale_by_amsgrad: b1 is 1\.0; a decay rate lies in \[0, 1\)"),
        (lambda: optim.amsgrad(weight_decay=-1.0), r"^amsgrad: weight_decay is -1\.0"),
        (lambda: optim.nadam(b2=1.5), r"^scale_by_nadam: b2 is 1\.5"),
        (lambda: optim.nadam(momentum_decay=-1.0), r"^scale_by_nadam: momentum_decay is -1\.0"),
        (lambda: optim.adagrad(lr_decay=-1.0), r"^adagrad: lr_decay is -1\.0; give one that is at least 0"),
        (lambda: optim.adagrad(initial_accumulator_value=-1.0), r"^scale_by_rss: initial_accumulator_value is -1\.0"),
        (lambda: optim.rmsprop(decay=1.0), r"^scale_by_rms: decay is 1\.0"),
        (lambda: optim.rmsprop(eps=float("nan")), r"^scale_by_rms: eps is nan"),
        (lambda: optim.rmsprop(centered=True, eps=-1.0), r"^scale_by_stddev: eps is -1\.0"),
        (lambda: optim.sgd(weight_decay=-0.1), r"^sgd: weight_decay is -0\.1"),
        (lambda: optim.lamb(0.1, eps=-1e-6), r"^scale_by_adam: eps is -1e-06"),
        (lambda: optim.scale_by_trust_ratio(min_norm=-1.0), r"^scale_by_trust_ratio: min_norm is -1\.0"),
        (lambda: optim.adafactor(decay_rate=-0.8), r"^scale_by_factored_rms: decay_rate is -0\.8"),
        (
            lambda: optim.adafactor(clipping_threshold=0.0),
            r"^clip_by_block_rms: threshold is 0\.0; give a positive one",
        ),
        (lambda: optim.adafactor(eps=(None, -1.0)), r"^scale_by_param_block_rms: min_scale is -1\.0"),
        (lambda: optim.schedule_free(optim.sgd(), 0.1, b1=1.0), r"^schedule_free: b1 is 1\.0; give one in \(0, 1\)"),
        (lambda: optim.schedule_free(optim.sgd(), 0.1, b1=0.0), r"^schedule_free: b1 is 0\.0"),
        (lambda: optim.cast_state(optim.adam(), torch.int32), r"^cast_state: dtype is torch\.int32; give a floating"),
    ],
)
def test_bad_hyperparameters_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(FzeroError, match=message):
        make()


@pytest.mark.parametrize("name", MAKERS)
def test_gradients_of_other_structure_or_shape_name_the_leaf(name: str) -> None:
    optimizer = MAKERS[name]()
    params = {"w": torch.ones(4, 3), "b": torch.ones(3)}
    state = optimizer.init(params)
    with pytest.raises(FzeroError, match="^w: "):
        optimizer.update({"b": params["b"]}, state, params)
    with pytest.raises(FzeroError, match="^w: "):
        optimizer.update({"w": torch.ones(5, 3), "b": params["b"]}, state, params)
    with pytest.raises(FzeroError, match="^b: "):
        optimizer.update({"w": params["w"], "b": torch.ones(2)}, state, params)


@pytest.mark.parametrize("name", ["sgd, decay", "lamb", "adafactor", "schedule_free"])
def test_parameters_are_asked_for(name: str) -> None:
    optimizer = optim.sgd(weight_decay=0.1) if name == "sgd, decay" else MAKERS[name]()
    params = {"w": torch.ones(4, 3)}
    with pytest.raises(FzeroError, match="has no parameters; pass them: update"):
        optimizer.update(params, optimizer.init(params))


@pytest.mark.parametrize("name", MAKERS)
def test_integer_parameters_are_named(name: str) -> None:
    with pytest.raises(FzeroError, match=r"^table: dtype is torch\.int64"):
        MAKERS[name]().init({"table": torch.ones(3, 2, dtype=torch.int64)})


def test_the_state_of_another_optimizer_is_no_average() -> None:
    with pytest.raises(FzeroError, match="the state is a tuple; give the state of schedule_free: one part"):
        optim.schedule_free_eval_params(optim.chain(optim.trace(0.9)).init(torch.ones(2)), torch.ones(2))


def test_schedule_free_leaves_frozen_leaves_alone_and_takes_a_whole_number_as_rate() -> None:
    params = {"w": torch.nn.Parameter(torch.ones(3)), "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False)}
    optimizer = optim.schedule_free(optim.sgd(1), 1)
    state = optimizer.init(params)
    updates, state = optimizer.update({"w": torch.ones(3), "frozen": None}, state, params)
    new = optim.apply_updates(params, updates)
    assert new["frozen"] is params["frozen"] and state.z["frozen"] is None
    assert optim.schedule_free_eval_params(state, new)["frozen"] is params["frozen"]
    alone, _ = optimizer.update({"w": torch.ones(3)}, optimizer.init({"w": params["w"]}), {"w": params["w"]})
    assert torch.equal(updates["w"], alone["w"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.adamw(-1e-3), r"^scale_by_learning_rate: learning_rate is -0\.001; give one that is at least 0"),
        (lambda: optim.lion(float("nan")), "^scale_by_learning_rate: learning_rate is nan"),
        (lambda: optim.adam("1e-3"), "^scale_by_learning_rate: learning_rate is '1e-3'"),  # type: ignore[arg-type]
        (lambda: optim.adamw(weight_decay=-0.1), r"^add_decayed_weights: weight_decay is -0\.1"),
        (lambda: optim.adamw(b1=None), "^scale_by_adam: b1 is None; a decay rate lies in"),  # type: ignore[arg-type]
        (lambda: optim.clip_by_global_norm("1"), "^clip_by_global_norm: max_norm is '1'"),  # type: ignore[arg-type]
        (lambda: optim.loss_scale.dynamic(init_scale=float("inf")), "^loss_scale.dynamic: init_scale is inf"),
        (lambda: optim.loss_scale.dynamic(window=1.5), r"window is 1\.5; give a positive whole"),  # type: ignore[arg-type]
        (lambda: optim.loss_scale.standard(1e39), r"^loss_scale.standard: init_scale is 1e\+39; give a positive one"),
    ],
)
def test_numbers_that_torch_refuses_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(FzeroError, match=message):
        make()
