"""`zero.Init` and `zero.GatheredParameters`: models are born sharded, edited, and train as whole ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_models import MESH, Classifier, make_batches, make_model, run_loop
from processes import run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fzero
import fzero.deepspeed
from fzero import FzeroError
from fzero.deepspeed import zero

CONFIG = {
    "train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}  # fmt: skip
WIDTH = 40
"""Of weights of more elements than stay whole in a constructor."""


class Wide(Classifier):
    """A model whose weights are born sharded."""

    def __init__(self) -> None:
        super().__init__(WIDTH)


def widen(batches: Any) -> Any:
    return [(x.repeat(1, WIDTH // 8), y) for x, y in batches]


def train(model: nn.Module, mesh: Any, batches: Any) -> list[float]:
    engine = fzero.deepspeed.initialize(model=model, config=CONFIG, mesh=mesh).engine
    return run_loop(engine, batches)


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_model_that_is_born_sharded_trains_as_a_whole_one(is_inside: bool) -> None:
    torch.manual_seed(3)
    expected = train(Wide(), MESH, widen(make_batches(2)))
    torch.manual_seed(3)
    with zero.Init(config=CONFIG, mesh=MESH):
        model = Wide()
        if is_inside:
            engine = fzero.deepspeed.initialize(model=model, config=CONFIG, mesh=MESH).engine
            assert type(torch.zeros(2000)) is not torch.Tensor  # the context goes on behind initialize
    if not is_inside:
        engine = fzero.deepspeed.initialize(model=model, config=CONFIG, mesh=MESH).engine
    assert run_loop(engine, widen(make_batches(2))) == expected
    with pytest.raises(FzeroError, match="model: blocks.0.weight: sum needs values"):
        model.blocks[0].weight.sum()


def edit(mesh: DeviceMesh) -> dict[str, Any]:
    """What two ranks make of a model whose rank 1 edits: its losses, and those of ordinary models beside it."""
    torch.manual_seed(mesh.get_local_rank())  # zero.Init takes the draws of rank 0
    with zero.Init():
        model = Wide()
    weight, bias = model.blocks[0].weight, model.head.bias
    with zero.GatheredParameters([weight, bias], modifier_rank=1), torch.no_grad():
        if mesh.get_local_rank() == 1:
            weight.mul_(2)
            weight[0] = 7.0
            bias.fill_(0.5)
    with zero.GatheredParameters(weight):
        seen = weight.detach()[0].clone() + 0
    part = slice(4 * mesh.get_local_rank(), 4 * mesh.get_local_rank() + 4)
    batches = [(x[part], y[part]) for x, y in widen(make_batches(2))]
    found = train(model, None, batches)
    torch.manual_seed(mesh.get_local_rank())
    plain = Wide()  # of which initialize takes the values of rank 0
    with torch.no_grad():
        plain.blocks[0].weight.mul_(2)[0] = 7.0
        plain.head.bias.fill_(0.5)
    return {"found": found, "expected": train(plain, mesh, batches), "seen": float(seen.sum())}


def test_two_ranks_take_the_draws_of_rank_0_and_the_edits_of_the_other() -> None:
    first, second = run(2, edit)
    assert first == second and first["found"] == first["expected"] and first["seen"] == 7.0 * WIDTH


def edit_after_an_error(mesh: DeviceMesh) -> dict[str, Any]:
    """What a rank is told where only the other is in the context, and what an edit gives afterwards."""
    with zero.Init(mesh=mesh):
        model = nn.Linear(64, 64)
    other, said = fzero.partition({"w": torch.ones(4)}, mesh)["w"], []
    for whole in (model.weight, nn.Linear(2, 2).weight):
        try:
            if mesh.get_local_rank() == 0:
                other.sum()
            else:
                with zero.GatheredParameters(whole, modifier_rank=0):
                    pass
        except FzeroError as error:
            said.append(str(error))
    with zero.GatheredParameters(model.weight, modifier_rank=0), torch.no_grad():
        model.weight.fill_(float(mesh.get_local_rank()))
    with zero.GatheredParameters(model.weight):
        seen = model.weight.detach().clone() + 0
    return {"said": said, "seen": float(seen.abs().sum())}


def test_an_edit_behind_an_error_reaches_all_ranks() -> None:
    for found in run(2, edit_after_an_error):
        assert len(found["said"]) == 2 and all("ranks call different functions" in said for said in found["said"])
        assert found["seen"] == 0.0


def test_what_is_not_supported_is_named() -> None:
    engine = fzero.deepspeed.initialize(model=make_model(), config=CONFIG, mesh=MESH).engine
    for params in (engine.module.parameters(), engine.params["head"]["weight"]):
        with pytest.raises(FzeroError, match=r"zero\.GatheredParameters: .* is an engine's; .*update_leaf"):
            zero.GatheredParameters(params)
    for how, said in (
        ({"dtype": torch.float16}, r"zero\.Init: dtype: is torch\.float16, and weights stay float32; leave it out"),
        ({"remote_device": "nvme"}, r"zero\.Init: remote_device: is 'nvme'; leave it out: offload_param"),
        ({"mpu": 1}, r"zero\.Init: mpu: is 1, which is not supported; give mesh="),
        ({"config": {"zero": 1}}, r"zero: is no key of DeepSpeed's configuration"),
    ):
        with pytest.raises(FzeroError, match=said):
            zero.Init(**how)


def test_a_rank_that_there_is_not_edits_nothing() -> None:
    with pytest.raises(FzeroError, match=r"modifier_rank: is 3, the mesh has ranks \[0\]; name one of them"):  # noqa: SIM117
        with zero.GatheredParameters(nn.Parameter(torch.ones(2)), modifier_rank=3):
            pass


def test_disabled_contexts_do_nothing() -> None:
    with zero.Init(enabled=False, mesh=MESH):
        model = Wide()
    assert type(model.head.weight) is nn.Parameter
    with zero.GatheredParameters(model.parameters(), enabled=False), torch.no_grad():
        model.head.bias.fill_(1.0)
    assert model.head.bias.sum() == 4.0
