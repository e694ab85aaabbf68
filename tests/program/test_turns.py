"""Lists that passes add to loops: state that is like a leaf of each layer, two loops over the same layers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import Program, ops, passes, tree

pytestmark = pytest.mark.usefixtures("shared_traces")

MESH = fzero.VirtualMesh(replica=2, fsdp=2)
AVERAGE = 0.5


def smooth(program: Program) -> Program:
    """Returns moving averages of gradients, which are state like their leaves."""
    program = program.copy()
    for number, node in enumerate(program.graph.find_nodes(op="call_function", target=ops.scatter)):
        program, average = program.add_state(f"smooth.{number}", like=node)
        users = list(node.users)
        with program.graph.inserting_before(node.next):
            new = program.emit(torch.ops.aten.lerp.Scalar, average, node, AVERAGE)
        for user in users:
            user.replace_input_with(node, new)
        program.return_state(f"smooth.{number}", new)
    return program


def layers() -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    return [{"w": torch.randn(6, 6, generator=draw) / 3} for _ in range(2)]


def turn(h: Tensor, _: None, layer: Any) -> tuple[Tensor, None]:
    return (h @ layer["w"]).tanh(), None


def scan_twice(params: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        x, _ = fzero.scan(turn, x, layers=params)
    return x.square().mean()


def loop_once(params: Any, x: Tensor) -> Tensor:
    h, _ = fzero.scan(turn, x, layers=params)
    return h.square().mean()


@pytest.mark.parametrize(("loss", "states"), [(loop_once, 2), (scan_twice, 4)])
def test_state_of_each_row_is_like_its_layer(loss: Any, states: int) -> None:
    """Averages of gradients, of three steps, are plain torch's. Two loops over the same layers keep their own."""
    chosen = passes.insert(passes.defaults(stage=3), smooth, before="bucket")
    step, params = fzero.simulate(fzero.grad(loss), MESH, passes=chosen), fzero.partition(layers(), MESH)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    state = step.init_pass_state(params, x)
    assert len(state) == states and {x.shape for x in state.values()} == {(6, 6)}
    expected = tree.map(torch.zeros_like, layers())
    for number in range(3):
        grads, state = step(params, x * (number + 1), pass_state=state)
        plain = fzero.grad(loss)(layers(), x * (number + 1))
        expected = tree.map(functools.partial(torch.lerp, weight=AVERAGE), expected, plain)
        for got, wanted in zip(tree.leaves(fzero.unpartition(grads)), tree.leaves(expected)):
            torch.testing.assert_close(got, wanted)


def test_what_is_no_loop_or_no_body_is_named() -> None:
    program = fzero.simulate(loop_once, MESH).trace(fzero.partition(layers(), MESH), torch.ones(8, 6))
    with pytest.raises(fzero.FzeroError, match=r"^loop .*: the function of map_bodies returned None for its body"):
        ops.map_bodies(program, lambda body: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(fzero.FzeroError, match=r": is no loop; give a node of program\.find\(ops\.loop\)"):
        ops.copy_body(program.returned[0])
