"""Collectives over axes, and a model axis, on four real ranks: the bits of virtual ranks; unlike batches are named."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import axes
import parallel_layers
import pytest
import split_optimizers
import torch
import torch.distributed as dist
from processes import Outcome, Refusal, refusal, run_cases, values
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero
from fzero import VirtualMesh, checkpoint, tree
from fzero.parallel import ragged_all_to_all

SHAPES: tuple[tuple[tuple[int, ...], tuple[str, ...], Any], ...] = (
    ((2, 2), ("b", "fsdp"), "b"),
    ((2, 2), ("fsdp", "a"), ("fsdp", "a")),
    ((2, 1, 2), ("b", "fsdp", "a"), ("b", "fsdp")),
)
"""The sizes and names of a mesh, and axes of it."""


def grid(sizes: tuple[int, ...] = (2, 2), names: tuple[str, ...] = ("fsdp", "tp")) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def all_collectives(mesh: DeviceMesh) -> bool:
    """Whether each collective gives this rank the bits that it gives the virtual rank."""
    for sizes, names, over in SHAPES:
        shape = VirtualMesh(**dict(zip(names, sizes)))
        x = axes.rows_of(shape)

        def several(x: Tensor, over: Any = over, names: tuple[str, ...] = names) -> list[Tensor]:
            return [collective(x, over) + 0 * fzero.axis_index(names) for collective in axes.COLLECTIVES.values()]

        expected = axes.on_ranks(several, shape, x)
        got = fzero.shard(several, grid(sizes, names), data=names)(x.chunk(4)[dist.get_rank()])
        if not all(torch.equal(a, b.chunk(4)[dist.get_rank()]) for a, b in zip(got, expected)):
            return False
    return True


def ragged(mesh: DeviceMesh) -> list[Any]:
    """Whether rows and their gradients have the bits of virtual ranks, and what is said of too many rows."""
    over, right = ("fsdp", "tp"), []
    for sizes, names, axis in (((4,), ("fsdp",), "fsdp"), ((2, 2), over, over), ((2, 2), over, "tp")):
        shape, real = VirtualMesh(**dict(zip(names, sizes))), grid(sizes, names)

        def there(x: Tensor, to: Tensor, axis: Any = axis) -> Any:
            def loss(x: Tensor) -> Tensor:
                return ragged_all_to_all(x.sin(), to[0], axis, 21)[0].square().sum()

            return ragged_all_to_all(x, to[0], axis, 21)[0], fzero.grad(loss)(x)

        x, to = axes.ragged_rows(shape, axis)
        expected = fzero.simulate(there, shape, data=names)(x.flatten(0, 1), to)
        step, rank = fzero.shard(there, real, data=names), dist.get_rank()
        right.append(
            all(torch.equal(a, b.chunk(4)[rank]) for a, b in zip(step(x[rank], to[rank : rank + 1]), expected))
        )
    step(torch.ones(99, 3, dtype=axes.F64), torch.full((1, 2), 20 * (rank < 2)))
    return [*right, refusal(lambda: step(x[rank], to[rank : rank + 1]))]


def layered(mesh: DeviceMesh) -> list[Any]:
    """The loss and the gradients of experts along a data axis, and of a pipeline."""
    rank = dist.get_rank()
    experts = parallel_layers.route(capacity=2.0).on_rank(grid(names=("fsdp", "ep")), slice(2 * rank, 2 * rank + 2))
    half = slice(rank // 2 * 8, rank // 2 * 8 + 8)
    return [experts, parallel_layers.stage(2).on_rank(grid(names=("fsdp", "pp")), half)]


def trained(mesh: DeviceMesh) -> Any:
    """Three steps on a model axis: losses, and the parameters whole."""
    mesh = grid()
    params = fzero.partition(axes.WEIGHTS, mesh)
    state, losses = axes.ADAMW.init(params), list[Tensor]()
    step = fzero.shard(axes.train(axes.on_a_sequence), mesh, data=("fsdp",))
    for _ in range(3):
        params, state, loss = step(params, state, axes.EXAMPLES.chunk(2)[dist.get_rank() // 2])
        losses.append(loss)
    return losses, fzero.unpartition(params)


def split(mesh: DeviceMesh, folder: Path, state: tuple[str, ...] | None = None) -> Any:
    """Three steps of split leaves on four ranks, saved between them, and gone on with on other axes."""
    mesh, step, lie = grid(), axes.train(axes.split_sequence), state
    params = fzero.partition(axes.WEIGHTS, mesh, split=axes.SPLIT, state=lie)
    state, batch = axes.ADAMW.init(params), axes.EXAMPLES.chunk(2)[dist.get_rank() // 2]
    for _ in range(2):
        params, state, _ = fzero.shard(step, mesh, data=("fsdp",))(params, state, batch)
    checkpoint.save(folder, {"params": params, "state": state}, step=2)
    other = grid((1, 4))
    like = fzero.partition(tree.map(torch.zeros_like, axes.WEIGHTS), other, split=axes.SPLIT, state=lie)
    loaded = checkpoint.load(folder, {"params": like, "state": axes.ADAMW.init(like)})
    on_one, whole = (fzero.unpartition(loaded["params"], rank=rank) for rank in (1, None))
    is_right = on_one["up"] is None if dist.get_rank() != 1 else all(torch.equal(on_one[x], whole[x]) for x in whole)
    params, _, loss = fzero.shard(step, other, data=("fsdp",))(loaded["params"], loaded["state"], axes.EXAMPLES)
    return loss, fzero.unpartition(params), is_right


def optimized(mesh: DeviceMesh) -> Any:
    """Two steps of optimizers that look at whole leaves, from state that the last rank alone has."""
    mesh, whole, laid = grid(), split_optimizers.WHOLE, ("fsdp", "tp")
    given = whole if dist.get_rank() == 3 else tree.map(lambda x: x.to("meta"), whole)
    params = fzero.partition(given, mesh, split=split_optimizers.SPLIT, unit=256, source_rank=3, chunk=1000, state=laid)
    states = split_optimizers.init(params)
    step = fzero.shard(split_optimizers.step, mesh, data=("fsdp",))
    batch = split_optimizers.EXAMPLES.chunk(2)[dist.get_rank() // 2]
    params, states, _ = step(params, states, batch)
    return fzero.unpartition(step(params, states, batch))


def moved(mesh: DeviceMesh, folder: Path, state: tuple[str, ...] | None = None) -> Any:
    """Whole leaves of a module that is built in parts: by chunks, behind an edit, and in files."""
    torch.manual_seed(0)
    whole, _ = fzero.lower(Feedforward())
    rules = {"up.weight": ("tp", 0), "down.weight": ("tp", 1)}
    held, _ = fzero.build(Feedforward, grid(), split=rules, chunk=1000, state=state)
    held = fzero.update_leaf(held, "up.weight", lambda w: 2 * w)
    whole["up"]["weight"] = 2 * whole["up"]["weight"].detach()
    chunks = dict[str, list[Tensor]]()
    for path, (_, piece) in fzero.iter_full(held, chunk=1000):
        chunks.setdefault(path, []).append(piece)
    fzero.save_safetensors(held, folder / "held")
    checkpoint.save_dcp(folder / "dcp", held)
    if dist.get_rank() == 0:
        fzero.save_safetensors(whole, folder / "whole")
        dcp_to_torch_save(folder / "dcp", folder / "dcp.pt")
        assert (folder / "held").read_bytes() == (folder / "whole").read_bytes()
        read = torch.load(folder / "dcp.pt")
        assert all(torch.equal(read[path], x) for path, x in zip(tree.paths(whole), tree.leaves(whole)))
    return [torch.equal(torch.cat(chunks[path]), x.view(-1)) for path, x in zip(tree.paths(whole), tree.leaves(whole))]


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 64), nn.Linear(64, 24)


def unlike(mesh: DeviceMesh) -> list[Any]:
    """Ranks along tp with other batches, then with equal ones."""
    step = fzero.shard(lambda x, y: fzero.psum(x * fzero.axis_index("tp"), "tp") + y, grid(), data=("fsdp",))
    x = torch.ones(3)
    found: list[Any] = [refusal(lambda: step(x, torch.full((3,), float(dist.get_rank() == 3))))]
    return [*found, step(x, x * (dist.get_rank() // 2))]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    functions = (all_collectives, layered, ragged, trained, optimized, unlike)
    cases: dict[str, Any] = {each.__name__: each for each in functions}
    for each, name in itertools.product((split, moved), ("", " with state along both")):
        how: dict[str, Any] = {"state": ("fsdp", "tp")} if name else {}
        cases[each.__name__ + name] = partial(each, folder=tmp_path_factory.mktemp("files"), **how)
    return run_cases(4, cases)


def test_collectives_have_the_bits_of_virtual_ranks(outcomes: dict[str, list[Outcome]]) -> None:
    assert values(outcomes["all_collectives"]) == [True] * 4


def test_ragged_rows_have_the_bits_of_virtual_ranks(outcomes: dict[str, list[Outcome]]) -> None:
    for *right, refused in values(outcomes["ragged"]):
        assert right == [True] * 3 and isinstance(refused, Refusal)
        assert refused.message.startswith("ragged_all_to_all over 'tp': 40 rows come to a rank, and its bound is 21; ")


def test_layers_of_parts_are_those_of_one_device(outcomes: dict[str, list[Outcome]]) -> None:
    layers = parallel_layers.route(capacity=2.0), parallel_layers.stage(2)
    for found in values(outcomes["layered"]):
        torch.testing.assert_close(found, [each.on_one_device() for each in layers], rtol=1e-12, atol=1e-14)


def test_a_model_axis_trains_as_one_device(outcomes: dict[str, list[Outcome]]) -> None:
    step = axes.train(axes.on_a_sequence)
    params, state, losses = axes.WEIGHTS, axes.ADAMW.init(axes.WEIGHTS), []
    for _ in range(3):
        params, state, loss = step(params, state, axes.EXAMPLES)
        losses.append(loss)
    for found in values(outcomes["trained"]):
        torch.testing.assert_close(found, (losses, params), rtol=1e-12, atol=1e-14)
    for loss, found, is_right in values(outcomes["split"]) + values(outcomes["split with state along both"]):
        torch.testing.assert_close((loss, found), (losses[-1], params), rtol=1e-12, atol=1e-14)
        assert is_right


def test_optimizers_of_whole_leaves_train_split_ones_as_one_device(outcomes: dict[str, list[Outcome]]) -> None:
    step, whole = split_optimizers.step, split_optimizers.WHOLE
    params, states, _ = step(whole, split_optimizers.init(whole), split_optimizers.EXAMPLES)
    right = step(params, states, split_optimizers.EXAMPLES)
    for found in values(outcomes["optimized"]):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)


def test_whole_leaves_come_out_of_parts(outcomes: dict[str, list[Outcome]]) -> None:
    assert values(outcomes["moved"]) == values(outcomes["moved with state along both"]) == [[True] * 4] * 4


def test_unlike_batches_are_named_on_all_ranks(outcomes: dict[str, list[Outcome]]) -> None:
    for rank, (refused, after) in enumerate(values(outcomes["unlike"])):
        assert isinstance(refused, Refusal) and refused.kind == "FzeroError"
        assert refused.message.startswith("argument 1: differs between ranks along 'tp', which take the same batch; ")
        assert after.tolist() == [1.0 + rank // 2] * 3
