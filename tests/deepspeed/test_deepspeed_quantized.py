"""ZeRO++ of a configuration: what moves, what is held, and how far losses are from exact ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from deepspeed_models import ROWS, make_engine, run_loop
from torch import Tensor, nn

from fzero import FzeroError, tree

CONFIG = {
    "train_batch_size": 2 * ROWS, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}  # fmt: skip
WIDTH = 64
UPDATES = 10


class Net(nn.Module):
    """A model whose first layer may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(torch.tanh(self.second(torch.tanh(self.first(x))))).float(), y)


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def make_examples() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    examples = [torch.randn(ROWS, WIDTH, generator=draw) for _ in range(2 * UPDATES)]
    return [(x, x[:, :4].argmax(1)) for x in examples]


def quantize(**keys: bool) -> dict[str, Any]:
    return CONFIG | {"zero_optimization": {"stage": 3, **{f"zero_quantized_{name}": v for name, v in keys.items()}}}


def count_bytes(engine: Any, batch: Any) -> Counter[str]:
    moved = Counter[str]()
    for (op, _), nbytes in engine.report(*batch).comm.items():
        moved[op] += nbytes
    return moved


def test_weights_and_gradients_move_as_int8_and_losses_stay_near() -> None:
    batches = make_examples()
    exact, sent = (
        make_engine(config, model=make_net()) for config in (quantize(), quantize(weights=True, gradients=True))
    )
    before, after = (count_bytes(engine, batches[0]) for engine in (exact, sent))
    code = (1 + 4 / 256) / 4  # bytes of a code and its share of a scale, beside those of a float32
    assert after["all_gather"] == pytest.approx(code * before["all_gather"], rel=0.02)  # the last block may be shorter
    assert after["all_to_all"] == pytest.approx(code * before["reduce_scatter"], rel=0.02)
    assert "reduce_scatter" not in after and "all_to_all" not in before
    expected, losses = (torch.tensor(run_loop(engine, batches)) for engine in (exact, sent))
    apart = (losses - expected).abs().max() / expected.abs().max()
    assert 0 < apart < 0.02 and losses[-1] < losses[0] / 2
    x, y = batches[0]
    assert torch.isfinite(sent.eval()(x, y))  # its program gathers codes and scatters nothing


def test_frozen_weights_are_held_as_codes() -> None:
    def make(config: dict[str, Any]) -> Any:
        model = make_net()
        model.first.requires_grad_(False)
        return make_engine(config, model=model)

    exact, held = make(quantize()), make(quantize(nontrainable_weights=True))
    paths = tree.paths(held.params)
    assert any(path.startswith("first.weight.codes-int8-") for path in paths) and "second.weight" in paths
    before, after = (count_bytes(engine, make_examples()[0])["all_gather"] for engine in (exact, held))
    assert before - after > 0.7 * 4 * WIDTH * WIDTH
    expected, losses = (torch.tensor(run_loop(engine, make_examples())) for engine in (exact, held))
    assert 0 < (losses - expected).abs().max() / expected.abs().max() < 0.02
    first = make_net().first.weight.detach()
    value = held.module_state_dict()["first.weight"]
    bound = first.abs().max() / 254  # of the largest in a block
    assert 0 < (value - first).abs().max() <= bound


def test_a_model_without_large_frozen_weights_stays_as_it_is() -> None:
    engine = make_engine(quantize(nontrainable_weights=True), model=make_net())
    assert tree.paths(engine.params) == sorted(name for name, _ in make_net().named_parameters())


@pytest.mark.parametrize("what", ["weights", "gradients", "nontrainable_weights"])
def test_other_stages_are_refused(what: str) -> None:
    config = quantize(**{what: True})
    config["zero_optimization"]["stage"] = 2
    with pytest.raises(
        FzeroError, match=rf"zero_quantized_{what}: is true at stage 2, .*; give zero_optimization.stage 3"
    ):
        make_engine(config, model=make_net())
