"""Keys that change what is computed, beside plain torch: `adam_w_mode`; and those of activation checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_models import ROWS, Classifier, make_batches, make_engine, make_model, run_loop
from torch import Tensor, nn

import fzero.deepspeed
from fzero import FzeroError

PLAIN = {"train_batch_size": ROWS, "gradient_clipping": 0.0, "zero_optimization": {"stage": 2}}
PARAMS = {"lr": 0.05, "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.5}
MODES: dict[str, tuple[dict[str, Any], Any]] = {
    "Adam decouples its decay": ({"type": "Adam", "params": PARAMS}, torch.optim.AdamW),
    "Adam, true": ({"type": "Adam", "params": {**PARAMS, "adam_w_mode": True}}, torch.optim.AdamW),
    "Adam, false": ({"type": "Adam", "params": {**PARAMS, "adam_w_mode": False}}, torch.optim.Adam),
    "AdamW": ({"type": "AdamW", "params": PARAMS}, torch.optim.AdamW),
    "AdamW, false": ({"type": "AdamW", "params": {**PARAMS, "adam_w_mode": False}}, torch.optim.AdamW),
    "Adam of torch, false": (
        {"type": "Adam", "params": {**PARAMS, "torch_adam": True, "adam_w_mode": False}}, torch.optim.Adam,
    ),
}  # fmt: skip
"""DeepSpeed's AdamW decays as AdamW in any case, and its Adam does unless `adam_w_mode` is false."""


def train_plain(make: Any) -> tuple[list[float], nn.Module]:
    model = make_model()
    optimizer = make(model.parameters(), lr=0.05, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.5)
    losses = []
    for batch in make_batches(6):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("case", MODES)
def test_adam_w_mode_says_where_the_decay_goes(case: str) -> None:
    optimizer, make = MODES[case]
    losses, model = train_plain(make)
    engine = make_engine({**PLAIN, "optimizer": optimizer})
    assert run_loop(engine, make_batches(6)) == pytest.approx(losses, rel=1e-5)
    for path, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, model.get_parameter(path).detach(), rtol=1e-4, atol=1e-6)


def test_both_modes_differ() -> None:
    assert train_plain(torch.optim.Adam)[0][-1] != pytest.approx(train_plain(torch.optim.AdamW)[0][-1], rel=1e-3)


# activation checkpointing


class Checkpointed(Classifier):
    """The model with DeepSpeed's function around each block of two wide layers."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.wide = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 8), nn.Tanh()) for _ in range(3)
        )

    def scores(self, x: Tensor) -> Tensor:
        for block in self.wide:
            x = fzero.deepspeed.checkpointing.checkpoint(block, x) if self.checkpoints else block(x)
        return super().scores(x)


def make_checkpointed(checkpoints: bool, block: dict[str, Any] | None) -> Any:
    torch.manual_seed(0)
    config = {**PLAIN, "optimizer": {"type": "AdamW", "params": PARAMS}}
    config |= {} if block is None else {"activation_checkpointing": block}
    return make_engine(config, model=Checkpointed(checkpoints))


BLOCK = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 3}


def test_the_block_changes_no_number_and_the_function_lowers_the_peak() -> None:
    whole, again = make_checkpointed(False, None), make_checkpointed(True, BLOCK)
    batch = tuple(torch.cat([x] * 64) for x in make_batches(1)[0])
    peaks = [engine.report(*batch).peak for engine in (whole, again)]
    assert peaks[1] < 0.8 * peaks[0]
    batches = make_batches(4)
    assert run_loop(again, batches) == pytest.approx(run_loop(whole, batches), rel=1e-6)


def test_saved_values_on_the_host_are_refused_by_name() -> None:
    config = {**PLAIN, "activation_checkpointing": {"cpu_checkpointing": True}}
    message = r"checkpointing\.configure: cpu_checkpointing: is True; give fzero\.remat"
    with pytest.raises(FzeroError, match=message):
        fzero.deepspeed.checkpointing.configure(None, deepspeed_config=config)
    fzero.deepspeed.checkpointing.configure(None, deepspeed_config={**config, "activation_checkpointing": BLOCK})
