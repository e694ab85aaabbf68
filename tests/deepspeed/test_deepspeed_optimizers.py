"""Optimizers of a configuration, and of torch: equal to DeepSpeed's formulas and to torch over 20 updates.

The formulas were run beside DeepSpeed 0.19.8 too, whose FusedLamb needs a GPU; its Muon does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed_models import ROWS, make_engine
from torch import Tensor, nn

from fzero import FzeroError
from fzero.optim.groups import list_groups

UPDATES = 20
BATCH = {"train_batch_size": ROWS, "gradient_clipping": 0.0}
Step = Callable[[str, Tensor, Tensor, dict[str, Any], int], None]
"""(name, parameter, gradient, state, updates so far + 1): one update of a parameter in place."""


class Words(nn.Module):
    """A model with an embedding, a head, a wide and a tall matrix, and a stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.up = nn.Linear(8, 16)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.down = nn.Linear(16, 8)
        self.lm_head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.embedding(x)))
        hidden = hidden + torch.tanh(self.convolution(hidden.transpose(1, 2))).transpose(1, 2)
        return nn.functional.cross_entropy(self.lm_head(self.down(hidden).mean(1)), y)


def make_words() -> Words:
    torch.manual_seed(0)
    return Words()


def make_examples() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randint(0, 12, (ROWS, 5), generator=draw), torch.randint(0, 4, (ROWS,), generator=draw))
        for _ in range(UPDATES)
    ]


def train_by_hand(model: nn.Module, step: Step) -> dict[str, Tensor]:
    state: dict[str, dict[str, Any]] = {name: {} for name, _ in model.named_parameters()}
    for number, batch in enumerate(make_examples(), 1):
        model.zero_grad()
        model(*batch).backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                step(name, parameter, parameter.grad, state[name], number)
    return dict(model.state_dict())


def train_engine(engine: Any) -> dict[str, Tensor]:
    for batch in make_examples():
        engine.backward(engine(*batch))
        engine.step()
    return engine.module_state_dict()


def average(state: dict[str, Any], gradient: Tensor, b1: float, b2: float) -> tuple[Tensor, Tensor]:
    """Adam's means, which are not corrected."""
    m, v = state.get("m", torch.zeros_like(gradient)), state.get("v", torch.zeros_like(gradient))
    state["m"], state["v"] = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
    return state["m"], state["v"]


def step_lamb(name: str, p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """deepspeed/ops/csrc/lamb/fused_lamb_cuda_kernel.cu"""
    m, v = average(state, g, 0.9, 0.999)
    u = m / (v.sqrt() + 1e-8) + 0.1 * p
    ratio = (p.norm() / u.norm()).clamp(0.01, 0.5) if p.norm() > 0 and u.norm() > 0 else 1.0
    p -= 1e-2 * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t) * ratio * u


def step_muon(name: str, p: Tensor, g: Tensor, state: dict[str, Any], t: int) -> None:
    """deepspeed/runtime/zero/muon/original_muon.py, with Newton-Schulz in float32."""
    if p.ndim < 2 or "embed" in name or "lm_head" in name:
        m, v = average(state, g, 0.9, 0.95)
        p *= 1 - 3e-3 * 1.0
        p -= 3e-3 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-10)
        return
    mean = state["m"] = state.get("m", torch.zeros_like(g)).lerp(g, 0.1)
    x = g.lerp(mean, 0.9)
    x = x.mT if g.shape[-2] > g.shape[-1] else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = x.mT if g.shape[-2] > g.shape[-1] else x
    p *= 1 - 1e-2 * 1.0
    p -= 1e-2 * max(1.0, g.shape[-2] / g.shape[-1]) ** 0.5 * x


LAMB = {"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.1, "max_coeff": 0.5}}
MUON = {"type": "Muon", "params": {"lr": 1e-2, "adam_lr": 3e-3, "momentum": 0.9, "weight_decay": 1.0}}


@pytest.mark.parametrize(("optimizer", "step", "atol"), [(LAMB, step_lamb, 2e-5), (MUON, step_muon, 1e-2)])
def test_an_optimizer_of_a_configuration_is_deepspeeds(optimizer: dict[str, Any], step: Step, atol: float) -> None:
    """Lamb: rounding of sums. Muon: bfloat16 moves a matrix by at most 5 % of 20 updates at a rate of 1e-2; DeepSpeed's
    own methods, "standard" in bfloat16 and "gram" in float16, are 7.6e-3 apart in this run."""
    engine = make_engine(BATCH | {"optimizer": optimizer, "zero_optimization": {"stage": 3}}, model=make_words())
    expected, first = train_by_hand(make_words(), step), make_words().state_dict()
    for name, value in train_engine(engine).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=atol if value.ndim > 1 else atol / 10)
        assert (value - first[name]).abs().max() > (5 * atol if value.ndim > 1 else atol), name
    assert engine.get_lr() == ([1e-2] if step is step_lamb else [1e-2, 3e-3])


OF_TORCH = {
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1, weight_decay=0.1),
    "Muon": lambda model: torch.optim.Muon([model.up.weight, model.down.weight], lr=0.02, weight_decay=0.5),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_an_optimizer_of_torch_is_converted(name: str) -> None:
    plain, model = make_words(), make_words()
    optimizer: Any = OF_TORCH[name](plain)
    for batch in make_examples():
        optimizer.zero_grad()
        plain(*batch).backward()
        optimizer.step()
    engine = make_engine(BATCH | {"zero_optimization": {"stage": 1}}, model=model, optimizer=OF_TORCH[name](model))
    atol = 2e-5 if name == "Adafactor" else 0.02 * UPDATES / 2**7  # one rounding to bfloat16 an update
    for path, value in train_engine(engine).items():
        torch.testing.assert_close(value, plain.state_dict()[path], rtol=0, atol=atol)


def list_rates(kind: str, params: dict[str, Any], groups: Any, model: nn.Module) -> list[tuple[float, int]]:
    """The rate of each group, and how many parameters it has."""
    found = list_groups(kind, params, groups, model, "optimizer.type")
    return [(group.rate, len(group.paths or ())) for group in found]


def test_muon_splits_each_group_by_deepspeeds_rules() -> None:
    model = make_words()
    assert list_rates("muon", {}, model.parameters(), model) == [(0.02, 3), (3e-4, 6)]
    rates = {"lr": 0.1, "muon_lr": 0.2}
    assert list_rates("Muon", rates, model.parameters(), model) == [(0.2, 3), (0.1, 6)]
    groups = [{"params": [model.up.weight, model.up.bias], "lr": 0.3}, {"params": model.lm_head.parameters()}]
    assert list_rates("Muon", rates, groups, model) == [(0.3, 1), (0.3, 1), (0.1, 2)]
    model.up.weight.requires_grad_(False)
    assert list_rates("Muon", {}, [model.up.weight, model.up.bias], model) == [(3e-4, 1)]


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("OneBitAdam", {}, r"optimizer\.type: is 'OneBitAdam', which is not supported; there are Adam, AdamW, .*Lamb"),
        ("Lamb", {"eps_inside_sqrt": True}, r"params\.eps_inside_sqrt: is True, which is not supported"),
        ("Lamb", {"max_grad_norm": 1.0}, r"params\.max_grad_norm: is 1\.0; give gradient_clipping"),
        ("Muon", {"ns_method": "exact"}, r'params\.ns_method: is \'exact\'; give "gram" or "standard"'),
        ("Muon", {"per_head_muon": True}, r"params\.per_head_muon: is True, which is not supported"),
    ],
)
def test_what_an_optimizer_cannot_do_is_named(kind: str, params: dict[str, Any], said: str) -> None:
    model = make_words()
    with pytest.raises(FzeroError, match=said):
        list_groups(kind, params, model.parameters(), model, "optimizer.type")
