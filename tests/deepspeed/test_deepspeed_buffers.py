"""Running statistics: an engine trains a model whose forward changes buffers as plain torch does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fzero.deepspeed
from fzero import FzeroError, VirtualMesh, tree
from fzero.base.torch_private import NormBase
from fzero.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

RATE, ROWS = 0.1, 8
cross_entropy = nn.functional.cross_entropy


class Pictures(nn.Module):
    """Scores of pictures, or the loss of scores where labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor(0.5))  # a buffer that never changes
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        scores = self.head(self.body(x - self.shift))
        return scores if y is None else cross_entropy(scores, y)


def make_pictures() -> Pictures:
    torch.manual_seed(0)
    return Pictures()


def make_batches(count: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(ROWS, 2, 4, 4, generator=draws) + i, torch.randint(0, 3, (ROWS,), generator=draws))
        for i in range(count)
    ]


def make_engine(model: nn.Module, ranks: int = 1, steps: int = 1, **how: Any) -> Any:
    config = how.pop("extra", {}) | {
        "train_batch_size": ROWS * steps,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
    }
    config.setdefault("zero_optimization", {"stage": 3})
    return fzero.deepspeed.initialize(model=model, config=config, mesh=VirtualMesh(fsdp=ranks), **how).engine


def train_plain(model: nn.Module, batches: Any, ranks: int = 1, steps: int = 1) -> list[float]:
    """The losses of plain torch. Each rank normalizes its own part of a batch. Gradients and running statistics are
    means over ranks, behind each batch."""
    names, losses = [name for name, _ in model.named_buffers()], []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for number, (x, y) in enumerate(batches, 1):
        before, after, found = copy.deepcopy(dict(model.named_buffers())), [], []
        for part, labels in zip(x.chunk(ranks), y.chunk(ranks)):
            model.load_state_dict(before, strict=False)
            loss = cross_entropy(model(part), labels)
            (loss / ranks / steps).backward()
            found.append(loss.item())
            after.append(copy.deepcopy(dict(model.named_buffers())))
        mean = {name: torch.stack([each[name].double() for each in after]).mean(0) for name in names}
        model.load_state_dict(mean, strict=False)
        losses.append(sum(found) / ranks)
        if number % steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def train_inside(engine: Any, batches: Any) -> list[float]:
    """The loop of a model, or of `loss=`, that returns its loss."""
    losses = []
    for x, y in batches:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_outside(engine: Any, batches: Any) -> list[float]:
    losses = []
    for x, y in batches:
        loss = cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def assert_equal(engine: Any, model: nn.Module, *, tolerance: float = 1e-6) -> None:
    """Parameters, running statistics and evaluation are those of plain torch, up to the order of sums."""
    held, expected = engine.module_state_dict(), model.state_dict()
    expected.pop("shift", None)
    assert held.keys() == expected.keys()
    for name, value in held.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)
    x, _ = make_batches(1, seed=9)[0]
    with torch.no_grad():
        torch.testing.assert_close(engine.eval()(x), model.eval()(x), rtol=tolerance, atol=tolerance)
    engine.train(), model.train()


@pytest.mark.parametrize("way", [train_inside, train_outside])
@pytest.mark.parametrize(("ranks", "steps"), [(1, 2), (2, 1), (2, 2)])
def test_running_statistics_are_those_of_plain_torch(way: Any, ranks: int, steps: int) -> None:
    plain = make_pictures()
    engine = make_engine(make_pictures(), ranks, steps)
    assert way(engine, make_batches(4)) == pytest.approx(train_plain(plain, make_batches(4), ranks, steps), rel=1e-5)
    assert plain.body[1].num_batches_tracked == 4
    assert_equal(engine, plain, tolerance=2e-6)


def test_a_loss_that_calls_the_model_twice_moves_statistics_twice() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y) + cross_entropy(model(2 * x), y)

    plain, batches = make_pictures(), make_batches(2)
    engine = make_engine(make_pictures(), loss=loss)
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    for x, y in batches:
        loss(plain, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    train_inside(engine, batches)
    assert plain.body[1].num_batches_tracked == 4
    held = engine.module_state_dict()
    for name in held:
        torch.testing.assert_close(held[name], plain.state_dict()[name], rtol=2e-6, atol=2e-6)


def test_the_second_loss_and_calls_without_gradients_count_as_forwards() -> None:
    """The first loss that is not the returned one is computed again; statistics are not."""
    plain, engine = make_pictures(), make_engine(make_pictures())
    (x, y), (other, _) = make_batches(2)
    for model in (plain, engine):
        with torch.no_grad():
            model(other)
    engine.backward(2 * engine(x, y))  # computed ahead for engine(x, y)
    (2 * plain(x, y)).backward()
    engine.step()
    torch.optim.SGD(plain.parameters(), lr=RATE).step()
    assert plain.body[1].num_batches_tracked == 2
    assert_equal(engine, plain)


def test_a_checkpointed_layer_moves_statistics_once() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(super().forward, x, use_reentrant=False)

    plain, model = make_pictures(), make_pictures()
    model.body = Checkpointed(*model.body)
    engine, batches = make_engine(model), make_batches(2)
    assert train_outside(engine, batches) == pytest.approx(train_plain(plain, batches), rel=1e-5)
    assert_equal(engine, plain)


def test_an_argument_gets_its_gradient() -> None:
    plain, engine = make_pictures(), make_engine(make_pictures())
    (x, y), (other, _) = make_batches(2)
    found = []
    for model in (plain, engine):
        given = x.clone().requires_grad_()
        loss = cross_entropy(model(given), y) + cross_entropy(model(other), y)  # as a discriminator is used
        model.backward(loss) if model is engine else loss.backward()
        found.append(given.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
    assert int(engine.module_state_dict()["body.1.num_batches_tracked"]) == 2


def test_the_functional_step_is_the_loop() -> None:
    engine, other = make_engine(make_pictures(), 2, 2), make_engine(make_pictures(), 2, 2)
    batches = make_batches(4)
    train_inside(engine, batches)
    state = other.state
    for pair in (batches[:2], batches[2:]):
        state, _ = other.train_step(state, *pair)
    other.state = state
    found = other.module_state_dict()
    assert all(torch.equal(value, found[name]) for name, value in engine.module_state_dict().items())


@pytest.mark.parametrize("module_only", [False, True])
def test_a_checkpoint_has_the_statistics(tmp_path: Path, module_only: bool) -> None:
    engine, other = make_engine(make_pictures(), 2), make_engine(Pictures(), 1)
    train_inside(engine, make_batches(2))
    engine.save_checkpoint(str(tmp_path))
    other.load_checkpoint(str(tmp_path), load_module_only=module_only)
    held, found = engine.module_state_dict(), other.module_state_dict()
    weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    engine.save_16bit_model(str(tmp_path))
    saved = torch.load(tmp_path / "pytorch_model.bin")
    for values in (found, weights, saved):
        assert values.keys() == held.keys()
        assert all(torch.equal(value, values[name]) for name, value in held.items())
    Pictures().load_state_dict(held | {"shift": torch.tensor(0.5)})


def test_the_module_has_no_old_statistics() -> None:
    engine = make_engine(make_pictures())
    assert {name for name, x in engine.module.named_buffers() if not x.is_meta} == {"shift"}


def test_bf16_keeps_statistics_in_float32() -> None:
    engine = make_engine(make_pictures(), 2, extra={"bf16": {"enabled": True}})
    exact = make_engine(make_pictures(), 2)
    for each in (engine, exact):
        train_inside(each, make_batches(2))
    expected = dict(zip(tree.paths(exact.state.buffers), tree.leaves(exact.state.buffers)))
    for path, leaf in zip(tree.paths(engine.state.buffers), tree.leaves(engine.state.buffers)):
        assert leaf.dtype == expected[path].dtype
        torch.testing.assert_close(leaf.full_tensor(), expected[path].full_tensor(), rtol=0.02, atol=0.02)  # of bf16


def list_norms() -> list[tuple[type, int]]:
    """Every layer of torch with running statistics, with the dimensions of its batch, but those that are refused."""
    kinds = [each for each in vars(nn).values() if isinstance(each, type) and issubclass(each, NormBase)]
    kept = [each for each in kinds if each is not nn.SyncBatchNorm and "Lazy" not in each.__name__]
    assert len(kept) == 6  # BatchNorm and InstanceNorm of 1, 2 and 3 dimensions
    return [(each, int(each.__name__[-2])) for each in kept]


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
@pytest.mark.parametrize(("kind", "dims"), list_norms())
def test_every_normalization_layer_is_that_of_torch(kind: Any, dims: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 2, 1),
        nn.Unflatten(2, (4,) + (1,) * (dims - 1)),
        kind(2, **{"track_running_stats": True} | options),
    )
    plain, engine = copy.deepcopy(model), make_engine(model, loss=lambda model, x: model(x).square().mean())
    x = torch.randn(ROWS, 2, 4)
    engine.backward(engine(x))
    engine.step()
    plain(x).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=RATE).step()
    held, expected = engine.module_state_dict(), plain.state_dict()
    assert held.keys() == expected.keys()
    for name, value in held.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("ranks", "momentum"), [(1, 0.1), (2, None), (4, 0.1)])
def test_sync_batch_norm_is_batch_norm_of_the_whole_batch(ranks: int, momentum: float | None) -> None:
    plain = make_pictures()
    plain.body[1].momentum = momentum  # type: ignore[assignment]
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    engine = make_engine(model, ranks)
    assert isinstance(model.body[1], nn.SyncBatchNorm)  # the model itself stays as it is
    losses = []
    for batch in make_batches(4):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses == pytest.approx(train_plain(plain, make_batches(4)), rel=1e-5)  # sums in another order
    values = engine.module_state_dict()
    for name, value in plain.state_dict().items():
        if name in values:
            torch.testing.assert_close(values[name], value, rtol=1e-4, atol=1e-6)
    x = make_batches(1, seed=3)[0][0]
    torch.testing.assert_close(engine.eval()(x), plain.eval()(x).detach(), rtol=1e-4, atol=1e-5)


def test_sync_batch_norm_of_a_process_group_is_refused() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(make_pictures(), process_group=object())
    with pytest.raises(
        FzeroError, match=r"body\.1: is a SyncBatchNorm of a process group, .*; leave process_group out"
    ):
        make_engine(model)


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm_is_that_of_torch(norm: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(norm(nn.Linear(4, 8)), nn.Tanh(), norm(nn.Linear(8, 1)))
    engine = make_engine(copy.deepcopy(plain), 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    for x in torch.randn(3, ROWS, 4):
        loss, expected = engine(x).square().mean(), plain(x).square().mean()
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)  # sums over ranks
    x = torch.randn(ROWS, 4)
    torch.testing.assert_close(engine.eval()(x), plain.eval()(x).detach(), rtol=1e-5, atol=1e-6)
    values = engine.module_state_dict()
    assert values.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6)
