"""The engine: equal to plain torch, equal to its own functional step, and misuse is named."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_models import MESH, Classifier, make_batches, make_engine, make_model, run_loop
from safetensors.torch import load_file
from tied_model import TiedModel
from torch import Tensor, nn

import fzero
import fzero.deepspeed
from fzero import FzeroError, tree
from fzero.optim import tables

PLAIN = {"train_batch_size": 16, "gradient_accumulation_steps": 2, "gradient_clipping": 0.3}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, clip: float = 0.3) -> list[float]:
    """The losses of torch's own loop, two batches an update."""
    losses = []
    for number, batch in enumerate(batches):
        loss = model(*batch)
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("stage", [0, 3])
def test_the_loop_equals_plain_torch(stage: int) -> None:
    plain = make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    expected = train_plainly(plain, optimizer, make_batches(8))
    engine = make_engine(PLAIN | ADAMW | {"zero_optimization": {"stage": stage}})
    losses = run_loop(engine, make_batches(8))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)  # sums of halves
    for path, value in plain.state_dict().items():
        torch.testing.assert_close(engine.module_state_dict()[path], value, rtol=1e-4, atol=1e-5)
    assert engine.global_steps == 4 and engine.micro_steps == 8 and engine.get_lr() == [1e-2]


def test_groups_of_an_optimizer_of_torch_are_kept() -> None:
    plain, model = make_model(), make_model()

    def group(module: Classifier) -> list[dict[str, Any]]:
        return [
            {"params": module.blocks.parameters(), "lr": 2e-2, "weight_decay": 0.0},
            {"params": [module.head.weight]},
        ]

    optimizer = torch.optim.AdamW(group(plain), lr=1e-2, weight_decay=0.1)
    expected = train_plainly(plain, optimizer, make_batches(4))
    engine = make_engine(PLAIN, model=model, optimizer=torch.optim.AdamW(group(model), lr=1e-2, weight_decay=0.1))
    losses = run_loop(engine, make_batches(4))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    assert engine.get_lr() == [2e-2, 1e-2]
    torch.testing.assert_close(engine.module_state_dict()["head.bias"], make_model().head.bias.detach(), rtol=0, atol=0)


def test_a_function_that_makes_an_optimizer_and_one_of_fzero_work() -> None:
    by_torch = make_engine(PLAIN, optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    by_fzero = make_engine(PLAIN, optimizer=fzero.optim.sgd(0.1, momentum=0.9))
    assert run_loop(by_torch, make_batches(4)) == run_loop(by_fzero, make_batches(4))


def test_train_batch_and_train_step_are_the_loop() -> None:
    config = PLAIN | ADAMW | {"zero_optimization": {"stage": 2}}
    losses = run_loop(make_engine(config), make_batches(4))
    expected = [(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2]
    engine, batches = make_engine(config), iter(make_batches(4))
    found = [engine.train_batch(batches).item() for _ in range(2)]
    assert found == pytest.approx(expected, rel=1e-6)  # sums of two float32 numbers
    state, a = engine.train_step(make_engine(config).state, *make_batches(4)[:2])
    state, b = engine.train_step(state, *make_batches(4)[2:])
    assert [a.item(), b.item()] == found and state.step == 2


def test_gradients_that_are_dropped_do_not_count() -> None:
    x, y = make_batches(1)[0]
    engine, other = (
        make_engine(PLAIN | ADAMW),
        make_engine(PLAIN | ADAMW | {"train_batch_size": 8} | {"gradient_accumulation_steps": 1}),
    )
    run_loop(engine, [(x * 100, y)])
    engine.zero_grad()
    run_loop(engine, [(x, y)])
    run_loop(other, [(x, y)])
    assert engine.get_global_grad_norm() == pytest.approx(other.get_global_grad_norm() / 2)


def test_a_loss_may_be_a_function_of_the_model() -> None:
    class Scores(Classifier):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.scores(x)

    torch.manual_seed(0)
    engine = make_engine(
        PLAIN | ADAMW, model=Scores(), loss=lambda model, x, y: nn.functional.cross_entropy(model(x), y)
    )
    assert run_loop(engine, make_batches(4)) == run_loop(make_engine(PLAIN | ADAMW), make_batches(4))


def test_evaluation_returns_outputs_without_gradients() -> None:
    class Dropping(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            scores = self.scores(nn.functional.dropout(x, training=self.training))
            return {"loss": nn.functional.cross_entropy(scores, y), "scores": scores}

    torch.manual_seed(0)
    model = Dropping()
    x, y = make_batches(1)[0]
    expected = model.eval()(x, y)["scores"].detach()
    engine = make_engine(PLAIN | ADAMW, model=model.train())
    torch.testing.assert_close(engine.eval()(x, y)["scores"], expected)
    output = engine.train()(x, y)
    assert output["scores"].shape == (8, 4)
    engine.backward(output["loss"])
    engine.step()


def test_a_checkpoint_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    config = PLAIN | ADAMW | {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}}
    engine = make_engine(config)
    run_loop(engine, make_batches(4))
    assert engine.save_checkpoint(str(tmp_path), client_state={"epoch": 3})
    expected = run_loop(engine, make_batches(4, seed=1))
    other = make_engine(config | {"zero_optimization": {"stage": 1}})
    folder, client_state = other.load_checkpoint(str(tmp_path))
    assert folder == str(tmp_path / "global_step2") and client_state == {"epoch": 3} and other.global_steps == 2
    assert run_loop(other, make_batches(4, seed=1)) == pytest.approx(expected, rel=1e-3)  # stages sum in float16
    assert make_engine(config).load_checkpoint(str(tmp_path / "none")) == (None, None)


def test_state_on_nvme_trains_as_on_the_device(tmp_path: Path) -> None:
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_optimizer": place, "offload_param": place}
    expected = run_loop(make_engine(PLAIN | ADAMW | {"zero_optimization": {"stage": 3}}), make_batches(4))
    engine = make_engine(PLAIN | ADAMW | {"zero_optimization": zero})
    assert run_loop(engine, make_batches(4)) == pytest.approx(expected, rel=1e-6)  # norms are summed elsewhere
    places = {leaf.place for leaf in tree.leaves(engine.state) if isinstance(leaf, fzero.Sharded)}
    assert fzero.disk(tmp_path) in places


def test_the_model_is_saved_in_the_dtype_of_compute(tmp_path: Path) -> None:
    engine = make_engine(PLAIN | ADAMW | {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}})
    engine.save_16bit_model(str(tmp_path))
    saved = torch.load(tmp_path / "pytorch_model.bin")
    for path, value in make_model().state_dict().items():
        torch.testing.assert_close(saved[path], value.to(torch.bfloat16), rtol=0, atol=0)


def test_a_step_that_overflows_is_skipped_and_halves_the_scale() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    engine = make_engine(PLAIN | ADAMW | {"fp16": fp16, "zero_optimization": {"stage": 2}})
    before = engine.module_state_dict()
    run_loop(engine, make_batches(2))
    assert engine.skipped_steps == 1 and engine.loss_scale == 2.0**23 and engine.global_steps == 1
    for path, value in engine.module_state_dict().items():
        assert torch.equal(value, before[path])


MISUSES: dict[str, tuple[Any, str]] = {
    "no loss at all": (lambda engine, batch: engine.backward(None), r"engine\.backward: got a value of type NoneType"),
    "a step out of order": (lambda engine, batch: engine.step(), r"engine\.step: is called without a backward"),
    "two calls": (
        lambda engine, batch: [run_loop(engine, [batch]), engine(*batch), engine(*batch)],
        r"engine: is called again, and the loss before was not given to engine\.backward, in the middle of an accumul",
    ),
    "too few batches": (
        lambda engine, batch: engine.train_step(engine.state, batch),
        r"engine\.train_step: got 1 batches, gradient_accumulation_steps is 2",
    ),
    "no data": (lambda engine, batch: engine.train_batch(), r"engine\.train_batch: there is no training_data"),
    "saved between": (
        lambda engine, batch: [engine.backward(engine(*batch)), engine.save_checkpoint("nowhere")],
        r"engine\.save_checkpoint: gradients are waiting for an update",
    ),
    "values without frozen ones": (
        lambda engine, batch: engine.module_state_dict(exclude_frozen_parameters=True),
        r"module_state_dict: exclude_frozen_parameters: is True, which is not supported; leave it out",
    ),
    "a rate by hand": (
        lambda engine, batch: engine.optimizer.param_groups[0].__setitem__("lr", 1.0),
        r"param_groups: lr: is set to 1\.0; give a scheduler",
    ),
    "the optimizer's step": (lambda engine, batch: engine.optimizer.step(), r"optimizer\.step: .*engine\.step\(\)"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_named(name: str) -> None:
    misuse, said = MISUSES[name]
    with pytest.raises(FzeroError, match=said):
        misuse(make_engine(PLAIN | ADAMW), make_batches(1)[0])


def test_train_batch_names_outputs_without_a_loss() -> None:
    class Text(nn.Module):
        def __init__(self, output: Any) -> None:
            super().__init__()
            self.weight, self.output = nn.Parameter(torch.ones(2)), output

        def forward(self, x: Tensor) -> Any:
            return self.output(self.weight * x)

    x = torch.ones(2, 2)
    for output, said in (
        (lambda x: x, r"loss: is torch\.float32 of shape \(1, 2\), not one floating number"),
        (lambda x: {"logits": x}, r"output of the model: is a dict without a loss; return the loss"),
    ):
        with pytest.raises(FzeroError, match=said):
            make_engine(PLAIN | ADAMW, model=Text(output)).train_batch(iter([x, x]))


ARGUMENTS = [
    ({"model": None}, r"model: is NoneType; give a torch\.nn\.Module"),
    ({"config": None}, r"config: is missing; give one, a dict or a path"),
    ({"config_params": PLAIN}, r"config: is given 2 times: config, config_params"),
    ({"mpu": 1}, r"initialize: mpu: is 1, which is not supported; give mesh="),
    ({"optimizer": 3}, r"optimizer: is a int; give an optimizer"),
    (
        {"config": PLAIN | {"optimizer": {"type": "OneBitLamb"}}},
        r"optimizer\.type: is 'OneBitLamb', which is not supported",
    ),
    ({"config": PLAIN | {"optimizer": {"type": "Adam", "params": {"lrr": 1}}}}, r"params\.lrr: is 1, which is not"),
    (
        {"config": PLAIN | ADAMW | {"scheduler": {"type": "Linear"}}},
        r"scheduler\.type: is 'Linear'; DeepSpeed has LRRangeTest",
    ),
    (
        {"config": PLAIN | ADAMW | {"scheduler": {"type": "WarmupDecayLR"}}},
        r"scheduler\.params\.total_num_steps: is missing; WarmupDecayLR needs it",
    ),
]


@pytest.mark.parametrize(("given", "said"), ARGUMENTS)
def test_bad_arguments_are_named(given: dict[str, Any], said: str) -> None:
    how = {"model": make_model(), "config": PLAIN | ADAMW, "mesh": MESH} | given
    with pytest.raises(FzeroError, match=said):
        fzero.deepspeed.initialize(**how)


def test_arguments_of_a_program_name_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(PLAIN | ADAMW))
    parser = fzero.deepspeed.add_config_arguments(ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")])
    assert make_engine(None, args=args).get_batch_info() == (16, 4, 2)


def test_an_engine_without_an_optimizer_evaluates_and_names_the_missing_one() -> None:
    engine = make_engine(PLAIN)
    x, y = make_batches(1)[0]
    assert engine.eval()(x, y).ndim == 0
    engine.train()
    with pytest.raises(FzeroError, match=r"engine\.step: there is no optimizer; give the config"):
        run_loop(engine, make_batches(2))


def test_the_module_of_an_engine_has_its_names() -> None:
    engine = make_engine(PLAIN | ADAMW)
    assert sorted(tree.paths(engine.params)) == sorted(name for name, _ in engine.module.named_parameters())


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=6),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_torch_moves_rates_and_betas(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LENGTH", 50)  # a table of as many rates as the test needs
    plain = make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    scheduler, rates = SCHEDULERS[name](optimizer), []
    optimizer.register_step_post_hook(lambda *_: (scheduler.step(), rates.append(optimizer.param_groups[0]["lr"])))
    expected = train_plainly(plain, optimizer, make_batches(8))
    model = make_model()
    mine = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = make_engine(PLAIN, model=model, optimizer=mine, lr_scheduler=SCHEDULERS[name](mine))
    losses, found = [], []
    for batch in make_batches(8):
        losses += run_loop(engine, [batch])
        found += engine.lr_scheduler.get_last_lr()
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    assert found[1::2] == pytest.approx(rates, rel=1e-6)  # a table is float32
    if name == "OneCycleLR":
        with pytest.raises(FzeroError, match=r"lr_scheduler: has rates for 7 updates, and 7 are done"):
            run_loop(engine, make_batches(8))
        return
    config = PLAIN | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}}}
    by_function = make_engine(config, lr_scheduler=SCHEDULERS[name])
    assert run_loop(by_function, make_batches(8)) == losses


def test_a_scheduler_that_the_engine_does_not_move_is_named() -> None:
    """A loop of its own calls `scheduler.step()`: the rates of torch's optimizer reach no step."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    optimizer.step()  # without gradients; torch warns of a scheduler that goes first
    engine = make_engine(PLAIN, model=model, optimizer=optimizer)
    run_loop(engine, make_batches(2))
    scheduler.step()
    with pytest.raises(FzeroError, match=r"optimizer: group 0: lr: is 0\.01\d* now, and was 0\.1 in initialize; give"):
        run_loop(engine, make_batches(2))


def test_schedulers_that_are_not_converted_are_named() -> None:
    for make, said in (
        (lambda optimizer: 3, r"lr_scheduler: is a builtins\.int, which is not converted; give a scheduler"),
    ):
        with pytest.raises(FzeroError, match=said):
            make_engine(PLAIN | ADAMW, lr_scheduler=make)
    with pytest.raises(FzeroError, match=r"scheduler: is .*, and there is no optimizer"):
        make_engine(PLAIN, lr_scheduler=SCHEDULERS["LambdaLR"])


def test_weights_of_a_checkpoint_of_deepspeed_are_loaded() -> None:
    run = Path(__file__).parents[1] / "formats" / "deepspeed" / "stage3-three-ranks"
    engine = make_engine(PLAIN | ADAMW | {"zero_optimization": {"stage": 3}}, model=TiedModel())
    with pytest.raises(FzeroError, match=r"is DeepSpeed's own, of which an engine reads weights alone; .*load_module"):
        engine.load_checkpoint(str(run))
    folder, client_state = engine.load_checkpoint(str(run), load_module_only=True)
    assert folder == str(run / "step3") and client_state == {}
    expected = load_file(run / "expected.safetensors")
    values = engine.module_state_dict()
    assert torch.equal(values["layers.1.weight"], expected["model.layers.1.weight"])
    assert torch.equal(values["fixed"], expected["model.fixed"])
