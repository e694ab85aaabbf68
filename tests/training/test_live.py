"""Live models: what a user changes of a model between two steps is seen, and what its code does not read is not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.training.live import LiveModel, ModuleState
from fzero.training.models import lower_modes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(2, 2), nn.Softplus()
        self.scale, self.seen, self.config, self.steps = 2.0, 0, SimpleNamespace(rate=2.0, inner={"a": [1.0]}), [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.by_rate(self.act(self.linear(x))) * self.scale * self.steps[0]

    def by_rate(self, x: Tensor) -> Tensor:
        return x * self.config.rate * self.config.inner["a"][0]

    def count(self) -> int:
        return self.seen


def set_rate(net: Net) -> None:
    net.config.rate = 5.0


def replace_config(net: Net) -> None:
    net.config = SimpleNamespace(rate=3.0, inner={"a": [2.0]})


def set_inner(net: Net) -> None:
    net.config.inner["a"][0] = 5.0


CHANGES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "an attribute": (lambda net: setattr(net, "scale", 5.0), "model.scale"),
    "an attribute of a module inside": (lambda net: setattr(net.act, "beta", 2.0), "model.act.beta"),
    "an object's attribute": (set_rate, "model.config.rate"),
    "what an object holds": (set_inner, "model.config.inner['a'][0]"),
    "another object": (replace_config, "model.config"),
    "an entry": (lambda net: net.steps.__setitem__(0, 5.0), "model.steps[0]"),
    "a hook": (lambda net: net.linear.register_forward_hook(lambda module, args, out: out * 3), "model.linear.hooks"),
    "a module": (lambda net: setattr(net, "act", nn.ReLU()), "model.act"),
    "a forward": (lambda net: setattr(net.act, "forward", lambda x: x * 3), "model.act.forward"),
    "a method": (lambda net: setattr(net, "by_rate", lambda x: x * 7), "model.by_rate"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    change, said = CHANGES[name]
    net, x = Net(), torch.randn(4, 2)
    mesh, first = fzero.VirtualMesh(fsdp=2), lower_modes(net)
    params = fzero.partition(first.params, mesh)
    train = LiveModel(net, []).train
    step = fzero.simulate(lambda params, x: train(params, x), mesh)
    for _ in range(2):
        torch.testing.assert_close(step(params, x), net(x))
    assert not caplog.messages
    change(net)
    torch.testing.assert_close(step(params, x), net(x))
    assert len(caplog.messages) == 1 and said in caplog.messages[0]


def test_what_code_does_not_read_is_no_change() -> None:
    net = Net()
    state = ModuleState(net)
    net.seen, net.note = 3, "a new attribute"  # type: ignore[assignment]
    net.eval()
    net.linear.weight.data.zero_()
    assert not state.list_changes()
