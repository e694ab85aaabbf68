"""A loss that is computed outside of the model: every way to write it gives the updates of plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_models import Classifier, make_batches, make_engine, run_loop
from torch import Tensor, nn

from fzero import FzeroError
from fzero.deepspeed.utils import safe_get_full_grad

CONFIG: dict[str, Any] = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.3,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
}
ONE = CONFIG | {"train_batch_size": 8, "gradient_accumulation_steps": 1}
cross_entropy = nn.functional.cross_entropy


class Scores(Classifier):
    """A model that returns what `form` makes of scores."""

    def __init__(self, form: Callable[[Tensor], Any] = lambda scores: scores, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.form, self.dropout = form, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.form(self.scores(self.dropout(x)).float())


def train_outside(engine: Any, batches: Any, find: Callable[[Any], Tensor] = lambda output: output) -> list[float]:
    """The losses of a loop that computes the loss itself."""
    losses = []
    for x, y in batches:
        loss = cross_entropy(find(engine(x)), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def assert_equal_state(engine: Any, other: Any) -> None:
    """Two engines hold equal parameters, up to the order of sums."""
    expected = other.module_state_dict() if hasattr(other, "module_state_dict") else other.state_dict()
    for path, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, expected[path], rtol=1e-4, atol=1e-5)


def train_plainly(batches: Any, steps: int, model: nn.Module | None = None) -> tuple[list[float], nn.Module]:
    """The losses of torch's own loop, `steps` batches an update, and the model."""
    model, losses = model or Scores(), []
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-2, weight_decay=0.1)
    for number, (x, y) in enumerate(batches, 1):
        loss = cross_entropy(model(x), y)
        (loss / steps).backward()
        losses.append(loss.item())
        if not number % steps:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


def test_a_loss_outside_is_plain_torchs() -> None:
    engine = make_engine(CONFIG | {"zero_optimization": {"stage": 3}}, model=Scores())
    expected, plain = train_plainly(make_batches(4), 2)
    assert train_outside(engine, make_batches(4)) == pytest.approx(expected, rel=1e-5)
    assert_equal_state(engine, plain)


def test_a_loss_outside_is_the_loss_inside_in_fp16() -> None:
    half = CONFIG | {"fp16": {"enabled": True}}
    inside, outside = make_engine(half), make_engine(half, model=Scores())
    assert train_outside(outside, make_batches(4)) == pytest.approx(run_loop(inside, make_batches(4)), rel=1e-5)
    assert_equal_state(outside, inside)
    assert outside.get_global_grad_norm() == pytest.approx(inside.get_global_grad_norm(), rel=1e-4)


def test_the_second_forward_pass_draws_what_the_first_drew() -> None:
    """A draw that no gradient depends on stands before the others: it has its number in both programs."""

    class Inside(Scores):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            torch.rand(3)
            return cross_entropy(super().forward(x), y)

    class Outside(Scores):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            noise = torch.rand(3)
            return {"scores": super().forward(x), "noise": noise}

    torch.manual_seed(1)
    inside, outside = (make_engine(ONE, model=kind(dropout=0.5)) for kind in (Inside, Outside))
    torch.manual_seed(2)
    expected = run_loop(inside, make_batches(4))
    torch.manual_seed(2)
    losses = train_outside(outside, make_batches(4), lambda output: output["scores"])
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_equal_state(outside, inside)


def test_gradients_of_the_second_pass_are_those_of_the_returned_output() -> None:
    """With dropout, the gradient of a linear layer shows which elements the returned output had dropped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False))
    engine = make_engine({"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
                          "gradient_clipping": 0.0}, model=model)  # fmt: skip
    before = engine.module_state_dict()["1.weight"][0]
    marked = torch.randn(2, 64)
    output = engine(marked)
    engine.backward(output.sum())
    engine.step()
    dropped = before - engine.module_state_dict()["1.weight"][0]  # the sum of both rows, as they were used
    kept = [(dropped[None] - marked[0] * 2 * i - marked[1] * 2 * j).abs().squeeze(0) for i in (0, 1) for j in (0, 1)]
    nearest = torch.stack(kept).min(0)
    assert nearest.values.max() < 1e-4
    i, j = (nearest.indices // 2).float(), (nearest.indices % 2).float()
    expected = torch.stack([(marked[0] * 2 * i * before).sum(), (marked[1] * 2 * j * before).sum()])
    torch.testing.assert_close(output.detach().flatten(), expected, rtol=1e-3, atol=1e-3)


FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a tensor": (lambda x: x, lambda output: output),
    "a dict": (lambda x: {"logits": x, "name": "scores", "best": x.argmax(1)}, lambda output: output["logits"]),
    "a tuple": (lambda x: (x[:, :2], x[:, 2:], x.norm()), lambda output: torch.cat(output[:2], 1)),
    "a number first": (lambda x: (x.norm(), x), lambda output: output[1]),
    "nested lists": (lambda x: [[x], {"half": x / 2}], lambda output: output[0][0] / 2 + output[1]["half"]),
}


@pytest.mark.parametrize("name", FORMS)
def test_outputs_of_every_form_have_a_gradient(name: str) -> None:
    form, find = FORMS[name]
    engine, batches = make_engine(ONE, model=Scores(form)), make_batches(2)
    expected, plain = train_plainly(batches, 1)
    assert train_outside(engine, batches, find) == pytest.approx(expected, rel=1e-5)
    assert_equal_state(engine, plain)


def test_a_loss_may_depend_on_the_loss_of_the_model_and_on_more() -> None:
    """Functions of a returned loss: in the first batch, where gradients were computed ahead, and in later ones."""

    class Both(Scores):
        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            scores = super().forward(x)
            return {"loss": cross_entropy(scores, y), "scores": scores}

    plain, engine = Both(), make_engine(CONFIG, model=Both())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for number, (x, y) in enumerate(make_batches(4)):
        expected, output = plain(x, y), engine(x, y)
        for model, found in ((None, expected), (engine, output)):
            loss = found["loss"].mean() / 2 + found["scores"].square().mean() + found["loss"] ** 2
            (loss / 2).backward() if model is None else model.backward(loss)
        engine.step()
        if number % 2:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_state(engine, plain)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 8)

    def forward(self, noise: Tensor) -> Tensor:
        return torch.tanh(self.layer(noise))


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.layers(x)).flatten()


def train_gan(netd: Any, netg: Any, backward: Any, step: Any) -> list[float]:
    """The GAN tutorial's calls: real and fake through the discriminator, one update, and the generator through it."""
    losses, criterion = [], nn.BCELoss()
    draw = torch.Generator().manual_seed(3)
    for _ in range(3):
        real, noise = torch.randn(4, 8, generator=draw), torch.randn(4, 3, generator=draw)
        netd.zero_grad()
        label = torch.ones(4)
        of_real = criterion(netd(real), label)
        backward(netd, of_real)
        fake = netg(noise)
        of_fake = criterion(netd(fake.detach()), label * 0)
        backward(netd, of_fake)
        step(netd)
        netg.zero_grad()
        of_generator = criterion(netd(fake), label)
        backward(netg, of_generator)
        step(netg)
        losses += [of_real.item(), of_fake.item(), of_generator.item()]
    return losses


HALF = {"fp16": {"enabled": True, "initial_scale_power": 10}}  # small enough that no update is skipped


@pytest.mark.parametrize("extra", [{"zero_optimization": {"stage": 2}}, HALF])
def test_a_gan_trains_as_in_torch(extra: dict[str, Any]) -> None:
    config = {"train_batch_size": 4, "gradient_clipping": 0.0} | extra
    torch.manual_seed(0)
    nets = Discriminator(), Generator()
    engines = []
    for net in copy.deepcopy(nets):
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.5, 0.999))
        engines.append(make_engine(config, model=net, optimizer=optimizer))
    found = train_gan(*engines, lambda net, loss: net.backward(loss), lambda net: net.step())
    optimizers = {net: torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.5, 0.999)) for net in nets}
    expected = train_gan(*nets, lambda net, loss: loss.backward(), lambda net: optimizers[net].step())
    is_half = "fp16" in extra  # whose products are rounded to 11 bits
    assert found == pytest.approx(expected, rel=3e-3 if is_half else 1e-5)
    if not is_half:
        for engine, net in zip(engines, nets):
            assert_equal_state(engine, net)


def test_inputs_that_require_a_gradient_get_it() -> None:
    """From a loss that the model returns, and from one outside; beside an input that needs none."""
    weights = torch.linspace(0, 1, 8)

    class Weighted(Classifier):
        def forward(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
            return (cross_entropy(self.scores(x), y, reduction="none") * w).mean()

    torch.manual_seed(0)
    plain = Weighted()
    engine = make_engine(ONE, model=Weighted())
    engine.state = make_engine(ONE, model=copy.deepcopy(plain)).state
    x, y = make_batches(1)[0]
    gradients = []
    for model in (plain, engine):
        given, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
        loss = model(given * 2, y, w=w)
        loss.backward() if model is plain else engine.backward(loss)
        gradients.append((given.grad, w.grad))
    for mine, theirs in zip(gradients[1], gradients[0]):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    engine.step()


def test_a_backward_of_torch_is_the_engines() -> None:
    half = CONFIG | {"fp16": {"enabled": True}}
    engine, other = (make_engine(half, model=Scores()) for _ in range(2))
    for x, y in make_batches(2):
        engine.scale(cross_entropy(engine(x), y)).backward()
        engine.step()
    train_outside(other, make_batches(2))
    assert_equal_state(engine, other)


def test_autocast_around_the_call_is_around_its_second_pass() -> None:
    inside, outside = make_engine(ONE), make_engine(ONE, model=Scores())
    for x, y in make_batches(2):
        with torch.autocast("cpu", torch.bfloat16):
            expected, scores = inside(x, y), outside(x)
        inside.backward(expected)
        outside.backward(cross_entropy(scores, y))
        inside.step()
        outside.step()
        norms = inside.get_global_grad_norm(), outside.get_global_grad_norm()
        assert norms[1] == pytest.approx(norms[0], rel=1e-5)  # in float32 it differs by 1e-3


def test_no_gradient_is_computed_without_grad_mode() -> None:
    engine = make_engine(ONE, model=Scores(dropout=0.5))
    x, y = make_batches(1)[0]
    with torch.no_grad():
        torch.manual_seed(5)
        output = engine(x)
    torch.manual_seed(5)
    assert not output.requires_grad and torch.equal(output, engine(x).detach())
    with torch.no_grad():
        assert not make_engine(ONE)(x, y).requires_grad


def test_a_graph_that_is_kept_is_used_twice() -> None:
    engine, plain = make_engine(ONE, model=Scores()), Scores()
    x, y = make_batches(1)[0]
    loss = cross_entropy(engine(x), y)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    engine.step()
    (2 * cross_entropy(plain(x), y)).backward()
    norm = nn.utils.get_total_norm([x.grad for x in plain.parameters() if x.grad is not None])
    assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)


def test_batches_may_share_one_step() -> None:
    """Several backward passes before a step, also with a boundary that the user says."""
    engine, batches = make_engine(CONFIG, model=Scores()), make_batches(2)
    first, second = [cross_entropy(engine(x), y) for x, y in batches]
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(first + second)
    engine.step()
    for number, (x, y) in enumerate(batches):
        engine.set_gradient_accumulation_boundary(number == 1)
        engine.backward(cross_entropy(engine(x), y) / 2, scale_wrt_gas=False)
    engine.step()
    assert engine.global_steps == 2
    assert_equal_state(engine, train_plainly(batches * 2, 2)[1])


def test_monitors_and_the_profile_see_a_loss_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}}
    engine = make_engine(ONE | written | {"flops_profiler": {"enabled": True, "profile_step": 1}}, model=Scores())
    losses = train_outside(engine, make_batches(2))
    x, y = make_batches(1)[0]
    cross_entropy(engine(x), y).backward()
    engine.step()
    rows = (tmp_path / "run" / "Train_Samples_train_loss.csv").read_text().split()
    assert [float(row.partition(",")[2]) for row in rows[1:]] == pytest.approx(losses)
    assert "profile of update 2" in capsys.readouterr().out


def test_frozen_parameters_stay_and_the_others_train() -> None:
    models = Scores(), Scores()
    for model in models:
        model.blocks.requires_grad_(False)
    plain, engine = models[0], make_engine(ONE, model=models[1])
    train_plainly(make_batches(2), 1, plain)
    train_outside(engine, make_batches(2))
    x = make_batches(1)[0][0]
    assert_equal_state(engine, plain)
    engine.backward(engine(x).sum())
    assert safe_get_full_grad(engine.module.blocks[0].weight) is None
    assert safe_get_full_grad(engine.module.head.weight) is not None


def use_old_output(engine: Any, x: Tensor, y: Tensor) -> None:
    old = engine(x)
    engine.backward(cross_entropy(engine(x), y))
    engine.step()
    engine.backward(cross_entropy(old, y))


def take_twice(engine: Any, x: Tensor, y: Tensor) -> None:
    loss = cross_entropy(engine(x), y)
    engine.backward(loss)
    engine.backward(loss)


MISUSES: dict[str, tuple[dict[str, Any], Any, type[Exception], str]] = {
    "a loss of something else": (
        ONE,
        lambda engine, x, y: [engine(x), engine.backward(nn.Linear(2, 2)(torch.ones(2)).sum())],
        FzeroError,
        r"engine\.backward: the loss does not depend on an output of this engine in training; compute it from",
    ),
    "another engine's loss": (
        ONE,
        lambda engine, x, y: engine.backward(cross_entropy(make_engine(ONE, model=Scores())(x), y)),
        FzeroError,
        r"engine\.backward: the loss does not depend on an output of this engine",
    ),
    "a detached loss": (
        ONE,
        lambda engine, x, y: engine.backward(cross_entropy(engine(x).detach(), y)),
        FzeroError,
        r"engine\.backward: the loss does not depend on an output of this engine",
    ),
    "a loss of evaluation": (
        ONE,
        lambda engine, x, y: engine.backward(cross_entropy(engine.eval()(x), y)),
        FzeroError,
        r"engine\.backward: the loss does not depend on an output of this engine in training",
    ),
    "no number": (
        ONE,
        lambda engine, x, y: engine.backward(engine(x)),
        FzeroError,
        r"engine\.backward: got a value of shape \(8, 4\), not a tensor of one number; give a mean over examples",
    ),
    "an output of before the update": (ONE, use_old_output, FzeroError, r"the parameters have changed since the call"),
    "a graph that is freed": (ONE, take_twice, RuntimeError, r"backward through the graph a second time"),
    "no loss scale": (
        ONE | {"fp16": {"enabled": True}},
        lambda engine, x, y: cross_entropy(engine(x), y).backward(),
        FzeroError,
        r"loss\.backward: runs without the loss scale of fp16; call engine\.backward\(loss\), or engine\.scale",
    ),
    "a step without gradients": (
        ONE,
        lambda engine, x, y: [engine.backward(engine(x).mean()), engine.zero_grad(), engine.step()],
        FzeroError,
        r"engine\.step: gradients were dropped by zero_grad",
    ),
    "one number as an argument": (
        ONE,
        lambda engine, x, y: engine(torch.tensor(1.0, requires_grad=True)),
        FzeroError,
        r"argument x: is one number that requires a gradient",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_a_misused_output_is_named(name: str) -> None:
    config, misuse, kind, said = MISUSES[name]
    with pytest.raises(kind, match=said):
        misuse(make_engine(config, model=Scores()), *make_batches(1)[0])


def test_a_change_in_the_middle_of_an_accumulation_is_named() -> None:
    engine = make_engine(CONFIG)
    (x, y), other = make_batches(2)
    run_loop(engine, [(x, y)])
    loss = engine(*other)
    with pytest.raises(
        FzeroError, match=r"engine\.backward: .*in the middle of an accumulation; give engine\.backward"
    ):
        engine.backward(loss * 2)
