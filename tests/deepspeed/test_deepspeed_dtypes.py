"""Keys about dtypes, sums and groups of ranks: each is equal to torch, or to the same said in another way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_models import Classifier, make_batches, make_engine, make_model, run_loop
from torch import Tensor

import fzero.deepspeed
from fzero import FzeroError, VirtualMesh, tree
from fzero.deepspeed.reading import read_config
from fzero.deepspeed.settings import settle

PLAIN = {"train_batch_size": 16, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}
NARROW = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def test_a_sum_of_gradients_is_the_mean_times_ranks() -> None:
    def make(rate: float, **keys: Any) -> Any:
        return make_engine(PLAIN | {"optimizer": {"type": "SGD", "params": {"lr": rate}}} | keys)

    means, sums = make(0.2), make(0.1, gradient_allreduce_op="sum")
    assert run_loop(means, make_batches(4)) == run_loop(sums, make_batches(4))
    assert sums.get_global_grad_norm() == 2 * means.get_global_grad_norm()


class Autocast(Classifier):
    """The model with autocast of its own."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, y)


def test_autocast_is_that_of_torch_around_the_module() -> None:
    torch.manual_seed(0)
    by_model = make_engine(PLAIN | ADAMW, model=Autocast())
    by_config = make_engine(PLAIN | ADAMW | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    losses = run_loop(by_config, make_batches(4))
    assert losses == run_loop(by_model, make_batches(4)) != run_loop(make_engine(PLAIN | ADAMW), make_batches(4))
    x, y = make_batches(1)[0]
    assert torch.equal(by_config.eval()(x, y), by_model.eval()(x, y))


def test_bfloat16_parameters_train_as_torchs() -> None:
    plain = make_model().bfloat16()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    config = PLAIN | ADAMW | {"bf16": NARROW, "zero_optimization": {"stage": 2}}
    engine = fzero.deepspeed.initialize(model=make_model(), config=config, mesh=VirtualMesh(fsdp=1)).engine
    floating = [x for x in tree.leaves((engine.params, engine.state.opt_state)) if x.ndim and x.is_floating_point()]
    assert {x.dtype for x in floating} == {torch.bfloat16} and len(floating) == 3 * len(list(plain.parameters()))
    for number, (x, y) in enumerate(make_batches(8)):
        (plain(x.bfloat16(), y) / 2).backward()
        run_loop(engine, [(x, y)])
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    for path, value in plain.state_dict().items():  # four updates of 1e-2, each rounded once to one of 256 steps
        found = engine.module_state_dict()[path]
        atol = 4 * value.abs().max().item() / 256
        torch.testing.assert_close(found, value, rtol=0, atol=atol)


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"bf16": NARROW, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
        r'data_types\.grad_accum_dtype: is "fp32", and with bf16\.bf16_master.* in bfloat16; give one of both',
    ),
    ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, r"bf16_optimizer_states: is true, .*; give both"),
    ({"bf16": NARROW | {"enabled": False}}, r"bf16_master_weights_and_grads: is true at stage 0; give bf16\.enabled"),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, r"torch_autocast\.dtype: is 'float16'; give"),
    (
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "bf16": {"enabled": True}},
        r"torch_autocast\.enabled: is true, and compute is torch\.bfloat16; give one of both",
    ),
]


@pytest.mark.parametrize(("config", "said"), BAD)
def test_dtypes_that_contradict_each_other_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(FzeroError, match=said):
        settle(read_config(PLAIN | config), 2)
