"""Modules and losses of torch whose code asks for the values of tensors: in a step as in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fzero
from fzero import tree
from fzero.base.errors import FzeroError

RANKS = 2
MESH = fzero.VirtualMesh(fsdp=RANKS)
ROWS, LENGTH, WIDTH = 4, 6, 8


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_trains_as_plain(loss: Callable[..., Tensor], params: Any, *batch: Tensor, stage: int) -> None:
    """The loss and its gradients are the means over ranks of plain torch's on each rank's part of the batch."""
    value, grads = fzero.simulate(fzero.value_and_grad(loss), MESH, stage=stage)(fzero.partition(params, MESH), *batch)
    leaves = tree.map(lambda x: x.clone().requires_grad_(), params)
    expected = torch.stack([loss(leaves, *part) for part in zip(*(x.chunk(RANKS) for x in batch))]).mean()
    expected.backward()
    torch.testing.assert_close(value.mean(), expected.detach())
    torch.testing.assert_close(fzero.unpartition(grads), tree.map(lambda x: x.grad, leaves), rtol=1e-9, atol=1e-12)


# what a trace says of itself


def test_torch_is_compiling_within_a_trace_and_not_behind_it() -> None:
    seen: list[bool] = []

    def step(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        if x.ndim > 1:
            raise KeyError
        return x

    fzero.simulate(step, MESH)(torch.ones(2))
    with pytest.raises(KeyError):
        fzero.simulate(step, MESH)(torch.ones(2, 1))
    assert seen == [True, True, False]  # what fails is traced once more, as code that no compiler reads
    assert not torch.compiler.is_compiling()


def test_a_compiled_function_is_a_part_of_the_program() -> None:
    compiled = torch.compile(lambda x: x.sin() * 2, backend="eager")
    assert_trains_as_plain(lambda p, x: compiled(x @ p["w"]).mean(), {"w": draw(5, 3)}, draw(4, 5), stage=3)


def test_a_branch_on_a_random_draw_is_refused_with_the_option_behind_it() -> None:
    def drop(x: Tensor) -> Tensor:
        return x if torch.rand([]) < 0.1 else 2 * x

    with pytest.raises(FzeroError, match=r"in drop: .*: a random draw decides here .*such as layerdrop"):
        fzero.simulate(drop, MESH)(torch.ones(2))
    with pytest.raises(FzeroError, match="Python needs a value"):
        fzero.simulate(lambda x: x if torch.rand([]) < x.sum() else 2 * x, MESH)(torch.ones(2))


def test_a_branch_that_all_draws_but_0_take_is_taken_and_a_draw_of_0_raises() -> None:
    class DrawZero(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            drawn = func(*args, **(kwargs or {}))
            return drawn.zero_() if func is torch.ops.aten.rand.default else drawn

    def step(x: Tensor) -> Tensor:
        assert not torch.rand([]) < 0.0 and torch.rand(1) >= 0 and not torch.rand(1) > 1
        return x if torch.rand(1) > 0.0 else 2 * x

    run = fzero.simulate(step, MESH)
    assert run(torch.ones(2)).tolist() == [1, 1]
    with DrawZero(), pytest.raises(RuntimeError, match=r"torch\.rand drew 0"):
        run(torch.ones(2))
    with pytest.raises(FzeroError, match="a random draw decides here"):
        fzero.simulate(lambda x: x if torch.rand([], dtype=torch.float16) > 0 else 2 * x, MESH)(torch.ones(2))


# nn.Transformer

CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
PADDING = torch.arange(LENGTH) >= torch.tensor([[6], [3], [4], [5]])

MASKS: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "none": lambda padding: {},
    "causal": lambda padding: {"mask": CAUSAL},
    "another": lambda padding: {"mask": CAUSAL.T},
    "padding": lambda padding: {"src_key_padding_mask": padding},
    "both": lambda padding: {"mask": CAUSAL.isneginf(), "src_key_padding_mask": padding},
}


def encoder(norm: bool = True, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True, dtype=torch.float64)
    made = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH, dtype=torch.float64) if norm else None, **options)
    with torch.no_grad():
        for param in made.parameters():  # biases of 0, and layers alike, would hide much
            param.add_(0.1 * torch.randn_like(param))
    return made


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("name", "stage"), [*((name, 3) for name in MASKS), ("both", 1), ("both", 2)])
def test_an_encoder_trains_as_in_plain_torch(name: str, training: bool, stage: int) -> None:
    params, apply = fzero.lower(encoder().train(training))
    assert_trains_as_plain(
        lambda p, x, padding: apply(p, x, **MASKS[name](padding)).square().mean(),
        params, draw(ROWS, LENGTH, WIDTH), PADDING, stage=stage,
    )  # fmt: skip


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_an_encoder_without_gradients_is_that_of_plain_torch(name: str, norm: bool) -> None:
    """Here torch takes nested tensors for a padding mask, and returns 0 at padded positions."""
    module, x = encoder(norm).eval(), draw(ROWS, LENGTH, WIDTH)
    params, apply = fzero.lower(module)
    got = fzero.simulate(lambda p, x, padding: apply(p, x, **MASKS[name](padding)), MESH)(
        fzero.partition(params, MESH), x, PADDING
    )
    paths = tree.paths(params)

    def call(p: Any, x: Tensor, padding: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(paths, tree.leaves(p))), (x,), MASKS[name](padding))

    called = fzero.simulate(call, MESH)
    with torch.no_grad():
        expected = module(x, **MASKS[name](PADDING))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(called(fzero.partition(params, MESH), x, PADDING), expected)
    assert norm or name != "padding" or not expected[PADDING].any()


def test_a_padding_mask_of_other_numbers_is_refused_when_the_step_runs() -> None:
    params, apply = fzero.lower(encoder().eval())
    step = fzero.simulate(lambda p, x, padding: apply(p, x, src_key_padding_mask=padding), MESH)
    placed, x = fzero.partition(params, MESH), draw(ROWS, LENGTH, WIDTH)
    step(placed, x, torch.where(PADDING, -torch.inf, 0.0).double())
    with pytest.raises(
        RuntimeError, match=r"has numbers besides 0 and -inf; give the encoder enable_nested_tensor=False"
    ):
        step(placed, x, torch.where(PADDING, -1.0, 0.0).double())


def test_padding_before_other_elements_is_refused_when_the_step_runs() -> None:
    x, padding = draw(ROWS, LENGTH, WIDTH), PADDING.flip(1)
    for options in ({}, {"enable_nested_tensor": False}):
        module = encoder(**options).eval()
        params, apply = fzero.lower(module)
        step = fzero.simulate(lambda p, x, padding: apply(p, x, src_key_padding_mask=padding), MESH)  # noqa: B023
        if options:
            with torch.no_grad():
                expected = module(x, src_key_padding_mask=padding)
            torch.testing.assert_close(step(fzero.partition(params, MESH), x, padding), expected)
        else:
            with pytest.raises(RuntimeError, match="give the encoder enable_nested_tensor=False"):
                step(fzero.partition(params, MESH), x, padding)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_transformer_trains_as_in_plain_torch(training: bool, stage: int) -> None:
    torch.manual_seed(0)
    module = nn.Transformer(WIDTH, 2, 1, 1, 16, 0.0, batch_first=True, dtype=torch.float64).train(training)
    params, apply = fzero.lower(module)

    def loss(p: Any, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding, "tgt_mask": CAUSAL}
        return apply(p, source, target, **masks).square().mean()

    batch = draw(ROWS, LENGTH, WIDTH), draw(ROWS, LENGTH, WIDTH, seed=1), PADDING
    assert_trains_as_plain(loss, params, *batch, stage=stage)


@pytest.mark.parametrize(
    ("attention", "is_padded", "stage"),
    [("sdpa", True, 1), ("sdpa", True, 2), ("sdpa", True, 3), ("sdpa", False, 3), ("eager", True, 3)],
)
def test_a_decoder_of_transformers_takes_a_padded_mask(attention: str, is_padded: bool, stage: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation=attention, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    params, apply = fzero.lower(transformers.LlamaForCausalLM(config).double())

    def loss(p: Any, ids: Tensor, padding: Tensor) -> Tensor:
        labels = ids.masked_fill(padding, -100)
        return apply(p, ids, labels=labels, attention_mask=(~padding).long() if is_padded else None).loss

    ids = torch.randint(32, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    assert_trains_as_plain(loss, params, ids, PADDING, stage=stage)


# batch norm


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_cumulative_average_of_statistics_is_that_of_plain_torch(stage: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None)).double()
    params, buffers, apply = fzero.lower_stateful(module)

    def loss(params: Any, buffers: Any, x: Tensor) -> Any:
        y, buffers = apply(params, buffers, x)
        return y.square().mean(), buffers

    def step(params: Any, buffers: Any, x: Tensor) -> Any:
        (_, buffers), grads = fzero.value_and_grad(loss, has_aux=True)(params, buffers, x)
        return grads, tree.map(lambda b: fzero.pmean(b, "fsdp") if b.is_floating_point() else b, buffers)

    simulated, plain = fzero.simulate(step, MESH, stage=stage), copy.deepcopy(module)
    placed, state = fzero.partition(params, MESH), fzero.partition(buffers, MESH)
    for seed in range(3):
        x = draw(6, 5, seed=seed)
        _, state = simulated(placed, state, torch.cat([x] * RANKS))
        plain(x)
    for path, value in zip(tree.paths(state), tree.leaves(fzero.unpartition(state))):
        torch.testing.assert_close(value, plain.get_buffer(path))


def test_a_forward_that_fails_leaves_the_module_as_it_was() -> None:
    norm = nn.BatchNorm1d(4, momentum=None)
    mean = norm.running_mean
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        fzero.simulate(lambda x: norm(x[0]), MESH)(torch.ones(2, 4))
    assert norm.momentum is None and norm.running_mean is mean


# CTC

LENGTHS: dict[str, tuple[Any, Any]] = {
    "tensors": (torch.tensor([10, 9, 8, 10]), torch.tensor([3, 2, 3, 1])),
    "of no alignment": (torch.tensor([10, 2, 8, 10]), torch.tensor([3, 3, 3, 0])),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_ctc_loss_is_that_of_plain_torch(name: str, reduction: str, stage: int) -> None:
    def loss(p: Any, x: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor) -> Tensor:
        rows = (x @ p["w"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(rows, targets, lengths, target_lengths, 0, reduction, name != "tensors").sum()

    targets = torch.randint(1, 5, (ROWS, 3), generator=torch.Generator().manual_seed(0))
    assert_trains_as_plain(loss, {"w": draw(5, 5)}, draw(ROWS, 10, 5, seed=1), targets, *LENGTHS[name], stage=stage)


def test_a_ctc_loss_takes_lengths_as_numbers_and_one_example() -> None:
    x, target = draw(10, 2, 5).log_softmax(-1), torch.tensor([[1, 2, 2], [3, 1, 2]])

    def step(x: Tensor) -> Any:
        one = F.ctc_loss(x[:, 0], target[0], torch.tensor(10), torch.tensor(3), reduction="none")
        return F.ctc_loss(x, target, (10, 10), (3, 2)), one

    for got, expected in zip(fzero.simulate(step, fzero.VirtualMesh(fsdp=1))(x), step(x), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_ctc_loss_has_no_second_derivative() -> None:
    def first(p: Any) -> Tensor:
        return F.ctc_loss(p["x"], torch.ones(2, 1, dtype=torch.int64), (4, 4), (1, 1))

    params = fzero.partition({"x": draw(4, 2, 3).log_softmax(-1)}, MESH)
    with pytest.raises(FzeroError, match="no second derivative"):
        fzero.simulate(fzero.grad(lambda p: fzero.grad(first)(p)["x"].square().sum()), MESH)(params)


# least squares


@pytest.mark.parametrize("driver", [None, "gels", "gelsy", "gelsd", "gelss"])
@pytest.mark.parametrize(
    ("rows", "columns", "right"), [(6, 3, (6, 2)), (3, 6, (3, 2)), (4, 4, (4,)), (6, 3, (2, 6, 1))]
)
def test_least_squares_are_those_of_plain_torch(driver: Any, rows: int, columns: int, right: Any) -> None:
    a, b = draw(*right[:-2], rows, columns), draw(*right, seed=1)
    expected = torch.linalg.lstsq(a, b, driver=driver)
    got = fzero.simulate(lambda p: torch.linalg.lstsq(p["a"], b, driver=driver), MESH)(fzero.partition({"a": a}, MESH))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert_trains_as_plain(
        lambda p, x: torch.linalg.lstsq(p["a"], b).solution.square().sum(), {"a": a}, torch.zeros(RANKS), stage=3
    )


def test_least_squares_of_a_matrix_of_lower_rank_are_refused_when_the_step_runs() -> None:
    params = fzero.partition({"a": torch.ones(4, 3)}, MESH)
    with pytest.raises(RuntimeError, match="must have full rank"):
        fzero.simulate(lambda p: torch.linalg.lstsq(p["a"], torch.ones(4, 1)).solution, MESH)(params)
