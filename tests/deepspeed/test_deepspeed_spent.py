"""A model that was given to initialize: each use of its old values is an error that names the way out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_models import make_batches, make_engine, make_model
from torch import nn

import fzero
from fzero import FzeroError
from fzero.deepspeed.utils import safe_get_full_fp32_param
from fzero.deepspeed.zero import GatheredParameters

CONFIG = {"train_batch_size": 8, "gradient_clipping": 0.0}
BATCH = make_batches(1)[0]

USES: dict[str, Callable[[Any], Any]] = {
    "call": lambda net: net(*BATCH),
    "part": lambda net: net.head(torch.ones(1, 8)),
    "state_dict": lambda net: net.state_dict(),
    "load_state_dict": lambda net: net.load_state_dict(make_model().state_dict()),
    "pickle": lambda net: pickle.dumps(net),
    "deepcopy": lambda net: copy.deepcopy(net),
    "zero_grad": lambda net: net.zero_grad(),
    "clip": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0),
    "freeze": lambda net: net.requires_grad_(False),
    "half": lambda net: net.half(),
    "data": lambda net: net.head.weight.data,
    "sum": lambda net: sum(x.sum() for x in net.parameters()),
    "init": lambda net: nn.init.zeros_(net.head.bias),
    "lower": lambda net: fzero.lower(net)[1](fzero.lower(net)[0], *BATCH),
    "initialize": lambda net: make_engine(CONFIG, model=net),
    "gathered": lambda net: GatheredParameters(net.head.weight),
}


@pytest.fixture(scope="module")
def given() -> tuple[Any, Any, torch.optim.Optimizer]:
    net = make_model()
    optimizer = torch.optim.Adam(net.parameters())
    return make_engine(CONFIG, model=net, optimizer=optimizer), net, optimizer


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("which", ["model", "engine.module"])
def test_a_use_of_old_values_is_named(which: str, use: str, given: Any) -> None:
    engine, net, _ = given
    with pytest.raises(FzeroError, match=r"engine|initialize"):
        USES[use](net if which == "model" else engine.module)


def test_the_optimizer_that_was_given_has_no_gradients_to_clear(given: Any) -> None:
    for call in (given[2].zero_grad, given[2].step):
        with pytest.raises(FzeroError, match=r"model: blocks.0.weight: .grad needs values.*engine.zero_grad\(\)"):
            call()


def test_the_structure_stays(given: Any) -> None:
    engine, net, _ = given
    for module in (net, engine.module):
        assert [(name, x.shape, x.dtype) for name, x in module.named_parameters()] == [
            (name, x.shape, x.dtype) for name, x in make_model().named_parameters()
        ]
        assert all(isinstance(x, nn.Parameter) and x.requires_grad for x in module.parameters())
        assert next(module.parameters()).device == engine.device and "Spent" in repr(next(module.parameters()))
        whole = safe_get_full_fp32_param(module.head.weight)
        assert whole is not None and torch.equal(whole, make_model().head.weight)


def test_a_parameter_that_a_graph_holds_is_replaced_in_the_module() -> None:
    net = make_model()
    loss, held = net(*BATCH), net.head.weight
    make_engine(CONFIG, model=net)
    assert net.head.weight is not held and held.shape == (4, 8)
    with pytest.raises(RuntimeError, match="poisoned"):  # torch's error: other parameters were let go
        loss.backward()
    with pytest.raises(FzeroError, match=r"model: .* needs values"):
        net(*BATCH)


def test_a_model_that_initialize_refuses_keeps_its_values() -> None:
    net = make_model()
    with pytest.raises(FzeroError, match="training_data: has 1 examples"):
        make_engine(CONFIG | {"dataloader_drop_last": True}, model=net, training_data=[torch.ones(8)])
    make_engine(CONFIG, model=net)


def test_a_tied_parameter_is_taken_under_both_names() -> None:
    net = make_model()
    net.blocks[1].weight = net.blocks[0].weight
    make_engine(CONFIG, model=net)
    with pytest.raises(FzeroError, match=r"model: blocks.0.weight: detach needs values"):
        net.blocks[1].weight.detach()


def test_a_transformers_model_is_taken(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    net = transformers.GPT2LMHeadModel(config)
    make_engine(CONFIG, model=net)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    for use in (lambda: net(ids), net.state_dict, lambda: net.save_pretrained(tmp_path)):
        with pytest.raises(FzeroError, match=r"model: transformer.* needs values"):
            use()
