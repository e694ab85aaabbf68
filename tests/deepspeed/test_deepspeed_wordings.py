"""What a newcomer reads: errors name the nearest thing that is there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_models import Classifier, make_batches, make_engine, run_loop

from fzero import FzeroError

ADAM: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.9], "weight_decay": 0.1}}
}
CONFIG = {"train_batch_size": 8, "gradient_clipping": 0.0} | ADAM
X, Y = make_batches(1)[0]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"zero_optimisation": {"stage": 1}}, r"(?m)the nearest one is the block zero_optimization$"),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1.0}}}, "or write lr, the nearest one"),
        ({"optimizer": {"type": "AdamW", "params": {"weigt_decay": 1.0}}}, "or write weight_decay, the nearest one"),
        ({"train_batch_size": 3}, r"is 3, which is no multiple of 1 steps x 2 ranks; give a multiple of 2"),
        (
            {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2},
            r"is 9, which is no multiple of 2 a rank x 2 ranks; give a multiple of 4",
        ),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
            r"is 8, and 2 a rank x 3 steps x 2 ranks are 12; leave one",
        ),
    ],
)
def test_a_mistake_in_the_configuration_names_the_way_out(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(FzeroError, match=said):
        make_engine(CONFIG | changed)


def test_a_mistake_in_backward_names_the_way_out() -> None:
    engine = make_engine(CONFIG)
    loss = engine(X, Y)
    with pytest.raises(FzeroError, match=r"of type float, not a tensor of one number; give the tensor, without .item"):
        engine.backward(loss.item())
    engine.backward(loss)
    with pytest.raises(FzeroError, match=r"are taken already; call engine\(...\) again for each backward, or give ret"):
        engine.backward(loss)


def test_a_wrong_tag_names_those_that_are_there(tmp_path: Path) -> None:
    engine = make_engine(CONFIG)
    engine.save_checkpoint(str(tmp_path), tag="best")
    engine.save_checkpoint(str(tmp_path), tag="last")
    with pytest.raises(FzeroError, match=r"global_step7: does not exist; .* has best, last; give a tag that engine.sa"):
        engine.load_checkpoint(str(tmp_path), "global_step7")
    with pytest.raises(FzeroError, match="has no tag"):
        engine.load_checkpoint(str(tmp_path / "nothere"), "x")


def test_a_checkpoint_of_another_model_names_weights_first(tmp_path: Path) -> None:
    model = Classifier()
    model.blocks.append(torch.nn.Linear(8, 8))
    deep, flat = make_engine(CONFIG, model=model), make_engine(CONFIG)
    for saved, other, said in ((flat, deep, "lacks 6"), (deep, flat, "has 6")):
        saved.save_checkpoint(str(tmp_path), tag="best")
        with pytest.raises(
            FzeroError, match=said + r" leaves .*: params.blocks.2.bias, params.blocks.2.weight, opt_st"
        ):
            other.load_checkpoint(str(tmp_path), "best")


def test_a_batch_of_another_size_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fzero")
    engine, text = make_engine(CONFIG), "has 4 rows, and the configuration says 8"
    run_loop(engine, [(X, Y)])
    assert "rows" not in caplog.text
    run_loop(engine, [(X[:4], Y[:4])] * 2)
    assert caplog.text.count(text) == 1
    assert "engine: begin(params, scale, batch) is traced with open sizes" in caplog.text
    assert "argument 2.args.x: " in caplog.text or "argument 2.args.y: " in caplog.text  # traced again, because of it


def test_an_argument_of_the_model_has_its_name() -> None:
    with pytest.raises(FzeroError, match=r"argument 2\.args\.x: 7 rows do not divide by 2 ranks"):
        make_engine(CONFIG)(X[:7], Y)
    with pytest.raises(FzeroError, match=r"argument 2\.kwargs\.y: 7 rows do not divide by 2 ranks"):
        make_engine(CONFIG)(X, y=Y[:7])


def test_misused_methods_name_the_argument(tmp_path: Path) -> None:
    engine = make_engine(CONFIG)
    for misuse, said in (
        (
            lambda: engine.train_batch([(X, Y)]),
            r"engine\.train_batch: got a list, not an iterator of batches; give iter",
        ),
        (lambda: engine.train_step(3, (X, Y)), r"engine\.train_step: got a int, not a state; give engine\.state"),
        (lambda: engine.scale(None), r"engine\.scale: got a value of type NoneType, not a tensor of one number"),
        (lambda: engine.set_train_batch_size("8"), r"train_batch_size: is '8'; give a whole number"),
        (lambda: engine.set_gradient_accumulation_boundary("no"), r"is_boundary: is 'no'; give True or False"),
        (lambda: engine.train("on"), r"mode: is 'on'; give True or False"),
        (lambda: engine.save_checkpoint(3), r"save_dir: is 3; give a text or a path"),
        (lambda: engine.save_checkpoint(tmp_path, client_state=[1]), r"client_state: is \[1\]; give a dict or None"),
        (lambda: engine.load_checkpoint(3), r"load_dir: is 3; give a text or a path"),
        (
            lambda: make_engine(CONFIG, model_parameters=iter(())),
            r"model_parameters: has no parameter; give model\.par",
        ),
    ):
        with pytest.raises(FzeroError, match=said):
            misuse()


def test_groups_have_the_numbers_of_the_optimizer() -> None:
    groups = make_engine(CONFIG).optimizer.param_groups
    assert groups == ({"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1},)
    model = Classifier()
    given = torch.optim.SGD(
        [{"params": model.head.parameters(), "momentum": 0.5}, {"params": model.blocks.parameters()}]
    )
    groups = make_engine(CONFIG, model=model, optimizer=given).optimizer.param_groups
    assert groups == tuple({"lr": 1e-3, "momentum": x, "weight_decay": 0.0} for x in (0.5, 0.0))
