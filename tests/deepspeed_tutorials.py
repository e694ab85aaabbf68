"""The calls of DeepSpeed's public tutorials, as small cases. Each takes the library, DeepSpeed or `fzero.deepspeed`.

    python tests/deepspeed_tutorials.py LIBRARY FILE

writes what each case returns, the losses, or the error that it raises, as JSON. deepspeed_tutorials.json beside this
file has what DeepSpeed 0.19.8 returned: `tools/deepspeed_table.py` wrote it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

F = nn.functional
ADAM = {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
CONFIG: dict[str, Any] = {"train_batch_size": 4, "gradient_clipping": 1.0, "optimizer": ADAM}
STEPS = 3


class Case(NamedTuple):
    """The calls of one page. `run(library, folder)` returns losses; `refused` is what the error says here."""

    pages: str
    calls: str
    run: Callable[[Any, Path], list[float]]
    refused: str = ""
    compare: bool = True  # with DeepSpeed, where it runs the case on a CPU


CASES: dict[str, Case] = {}


def case(pages: str, calls: str, **how: Any) -> Callable[[Any], Any]:
    def add(run: Callable[[Any, Path], list[float]]) -> Any:
        CASES[run.__name__] = Case(pages, calls, run, **how)
        return run

    return add


class Net(nn.Module):
    """A classifier of small images."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(36, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1))


class Loss(Net):
    """A model that returns its loss."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x).float(), y)


def images(count: int = STEPS * 4) -> list[tuple[Tensor, int]]:
    """Stand-ins for CIFAR-10, of 8 x 8 pixels."""
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 8, 8, generator=draw), i % 10) for i in range(count)]


def batches() -> Iterator[Any]:
    return iter(torch.utils.data.DataLoader(images(), batch_size=4))


def train(engine: Any) -> list[float]:
    """The loop of the page "Training API"."""
    losses = []
    for x, y in batches():
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@case("getting-started, initialize", "add_config_arguments, initialize(args, model, model_parameters), loop")
def getting_started(library: Any, folder: Path) -> list[float]:
    (folder / "ds.json").write_text(json.dumps(CONFIG | {"fp16": {"enabled": False}, "zero_optimization": True}))
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    args = library.add_config_arguments(parser).parse_args(["--deepspeed_config", str(folder / "ds.json")])
    model = Loss()
    engine, _, _, _ = library.initialize(args=args, model=model, model_parameters=model.parameters())
    return train(engine)


@case("getting-started, model-checkpointing", "save_checkpoint(client_state=), load_checkpoint")
def checkpoints(library: Any, folder: Path) -> list[float]:
    model = Loss()
    engine = library.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    train(engine)
    engine.save_checkpoint(str(folder), "first", client_state={"step": 3})
    other = Loss()
    engine = library.initialize(model=other, model_parameters=other.parameters(), config=CONFIG)[0]
    path, client_state = engine.load_checkpoint(str(folder), "first")
    assert path is not None
    return [float(client_state["step"]), *train(engine)]


@case("cifar-10, cifar10_deepspeed.py", "training_data=, get_accelerator, a loss outside of the model, eval")
def cifar(library: Any, folder: Path) -> list[float]:
    get_accelerator = importlib.import_module(f"{library.__name__}.accelerator").get_accelerator
    net, zero = Net(), {"stage": 2, "allgather_partitions": True, "overlap_comm": True, "cpu_offload": False}
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 10}}
    config = CONFIG | {"scheduler": schedule, "zero_optimization": zero, "prescale_gradients": False}
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    engine, _, loader, _ = library.initialize(
        model=net, model_parameters=parameters, training_data=images(14), config=config
    )
    device, criterion, losses = get_accelerator().device_name(engine.local_rank), nn.CrossEntropyLoss(), []
    assert len(loader) == 4 and not engine.bfloat16_enabled() and not engine.fp16_enabled()
    for epoch in range(3):
        loader.data_sampler.set_epoch(max(epoch - 1, 0))  # the page calls it never: two epochs of one order
        for inputs, labels in loader:
            loss = criterion(engine(inputs.to(device)), labels.to(device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        outputs = engine(next(batches())[0])
        _, predicted = torch.max(outputs.data, 1)
    return [*losses, *outputs.sum(0).tolist()] if predicted.shape == (4,) else []


@case("gan", "two engines, several backward passes, a generator through a discriminator, zero_grad", compare=False)
def gan(library: Any, folder: Path) -> list[float]:
    torch.manual_seed(0)
    nets = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1), nn.Sigmoid()), nn.Linear(3, 6)
    engines = []
    for net in nets:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.5, 0.999))
        config = {"train_batch_size": 4, "gradient_clipping": 0.0}
        engines.append(library.initialize(model=net, optimizer=optimizer, config=config)[0])
    (d, g), criterion, losses = engines, nn.BCELoss(), []
    draw = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        d.zero_grad()
        real, noise, label = torch.randn(4, 6, generator=draw), torch.randn(4, 3, generator=draw), torch.ones(4, 1)
        of_real = criterion(d(real), label)
        d.backward(of_real)
        fake = g(noise)
        of_fake = criterion(d(fake.detach()), label * 0)
        d.backward(of_fake)
        d.step()
        g.zero_grad()
        of_generator = criterion(d(fake), label)
        g.backward(of_generator)
        g.step()
        losses += [of_real.item(), of_fake.item(), of_generator.item()]
    return losses


@case(
    "gan_deepspeed_train.py",
    "the module in the place of its engine",
    refused="model: 0.weight: linear needs values, which are in the slices of an engine since initialize",
)
def gan_by_module(library: Any, folder: Path) -> list[float]:
    net = nn.Sequential(nn.Linear(6, 1), nn.Sigmoid())
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    engine = library.initialize(model=net, optimizer=optimizer, config={"train_batch_size": 4})[0]
    loss = nn.BCELoss()(net(torch.ones(4, 6)), torch.ones(4, 1))
    engine.backward(loss)
    engine.step()
    return [loss.item()]


@case("HelloDeepSpeed/train_bert_ds.py", "keywords of a batch, log_dist, parameters, stage 1, save and load")
def bert(library: Any, folder: Path) -> list[float]:
    log_dist = importlib.import_module(f"{library.__name__}.utils").log_dist
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1},
    }
    net = Loss()
    model, _, _, _ = library.initialize(model=net, model_parameters=net.parameters(), config=config)
    log_dist(f"{sum(p.numel() for p in model.parameters())} parameters", ranks=[0])
    model.train()
    losses = []
    for step, (x, y) in enumerate(batches()):
        loss = model(**{"x": x, "y": y})
        model.backward(loss)
        model.step()
        losses.append(loss.item())
        model.save_checkpoint(save_dir=str(folder), client_state={"checkpoint_step": step})
    _, client_state = model.load_checkpoint(load_dir=str(folder))
    return [*losses, float(client_state["checkpoint_step"])]


@case("bert-pretraining", "accumulation, is_gradient_accumulation_boundary, get_global_grad_norm, loss.mean()")
def bert_pretraining(library: Any, folder: Path) -> list[float]:
    net, config = Loss(), CONFIG | {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}
    engine = library.initialize(model=net, model_parameters=net.parameters(), config=config)[0]
    found = []
    for x, y in [*batches(), *batches()]:
        loss = engine(x, y)
        found.append(loss.item())
        loss = loss.mean()
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            found.append(float(engine.global_steps))
        engine.step()
    return [*found, *engine.get_lr(), float(engine.train_micro_batch_size_per_gpu())]


@case("imagenet/main.py", "a client SGD, a loss outside of the model, train and eval")
def imagenet(library: Any, folder: Path) -> list[float]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    model, optimizer, _, _ = library.initialize(model=net, optimizer=optimizer, lr_scheduler=None, config={
        "train_batch_size": 4, "gradient_clipping": 0.0})  # fmt: skip
    criterion, losses = nn.CrossEntropyLoss(), []
    for x, y in batches():
        model.train()
        loss = criterion(model(x), y)
        model.backward(loss)
        model.step()
        model.eval()
        losses += [loss.item(), criterion(model(x), y).item()]
    return [*losses, optimizer.param_groups[0]["lr"]]


@case(
    "imagenet/main.py",
    "a scheduler that the loop moves, not the engine",
    refused="was 0.1 in initialize; give initialize(lr_scheduler=) the scheduler",
)
def imagenet_scheduler(library: Any, folder: Path) -> list[float]:
    net = Loss()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    config = {"train_batch_size": 4, "gradient_clipping": 0.0}
    engine = library.initialize(model=net, optimizer=optimizer, config=config)[0]
    losses = train(engine)
    scheduler.step()
    return [*losses, *train(engine)]


@case("zero, zero3", "zero.Init, GatheredParameters, register_external_parameter, empty_partition_cache")
def zero(library: Any, folder: Path) -> list[float]:
    config = CONFIG | {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 4}
    with library.zero.Init(config_dict_or_path=config):
        model = Loss()
    library.zero.register_external_parameter(model, model.head.weight)
    with library.zero.GatheredParameters(model.head.weight, modifier_rank=0), torch.no_grad():
        # no constant: gradients of the layers below would be rounding, which Adam blows up
        weight = model.head.weight
        weight.copy_(torch.linspace(-0.1, 0.1, weight.numel()).view(weight.shape))
    with library.zero.Init(enabled=False):
        nn.Linear(2, 2)
    engine = library.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    losses = train(engine)
    engine.empty_partition_cache()
    return losses


@case("zero3", "safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state, safe_set_full_fp32_param")
def states(library: Any, folder: Path) -> list[float]:
    utils, model = importlib.import_module(f"{library.__name__}.utils"), Loss()
    config = CONFIG | {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.0}
    engine = library.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    train(engine)
    x, y = next(batches())
    engine.backward(engine(x, y))
    found = []
    for _, parameter in model.named_parameters():
        found.append(utils.safe_get_full_grad(parameter).norm().item())
        found.append(utils.safe_get_full_fp32_param(parameter).norm().item())
        found.append(utils.safe_get_full_optimizer_state(parameter, "exp_avg").norm().item())
        found.append(utils.safe_get_full_optimizer_state(parameter, "exp_avg_sq").norm().item())
    engine.step()
    for _, parameter in model.named_parameters():
        utils.safe_set_full_fp32_param(parameter, utils.safe_get_full_fp32_param(parameter) * 0 + 0.01)
        found.append(utils.safe_get_full_fp32_param(parameter).norm().item())
    return found


@case("model-checkpointing", "get_fp32_state_dict_from_zero_checkpoint, save_16bit_model")
def recovered(library: Any, folder: Path) -> list[float]:
    recovery, model = importlib.import_module(f"{library.__name__}.utils.zero_to_fp32"), Loss()
    config = CONFIG | {"zero_optimization": {"stage": 2}}
    engine = library.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    train(engine)
    engine.save_checkpoint(str(folder / "run"))
    engine.save_16bit_model(str(folder / "weights"))
    weights = recovery.get_fp32_state_dict_from_zero_checkpoint(str(folder / "run"))
    saved = torch.load(folder / "weights" / "pytorch_model.bin")
    return [*(weights[name].norm().item() for name in sorted(weights)), float(len(saved))]


@case("lrrt", "LRRangeTest in the configuration, lr_scheduler.get_last_lr")
def range_test(library: Any, folder: Path) -> list[float]:
    params = {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 5}
    return follow_rates(library, {"type": "LRRangeTest", "params": params | {"lr_range_test_staircase": False}})


@case("one-cycle", "OneCycle in the configuration")
def one_cycle(library: Any, folder: Path) -> list[float]:
    params = {
        "cycle_first_step_size": 2, "cycle_first_stair_count": 1, "cycle_second_step_size": 2, "decay_step_size": 2,
        "cycle_second_stair_count": 1, "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "decay_lr_rate": 0.001,
        "cycle_min_mom": 0.85, "cycle_max_mom": 0.99, "decay_mom_rate": 0.0,
    }  # fmt: skip
    return follow_rates(library, {"type": "OneCycle", "params": params})


def follow_rates(library: Any, scheduler: dict[str, Any]) -> list[float]:
    model = Loss()
    config = CONFIG | {"scheduler": scheduler}
    engine, _, _, handle = library.initialize(model=model, model_parameters=model.parameters(), config=config)
    found = []
    for x, y in batches():
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        found += [loss.item(), *handle.get_last_lr()]
    return found


@case("schedulers, optimizers", "lr_schedules.WarmupLR and torch's AdamW of the client")
def client_schedule(library: Any, folder: Path) -> list[float]:
    schedules, model = importlib.import_module(f"{library.__name__}.runtime.lr_schedules"), Loss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = schedules.WarmupLR(optimizer, warmup_min_lr=0.0, warmup_max_lr=1e-2, warmup_num_steps=4)
    config = {"train_batch_size": 4, "gradient_clipping": 0.0}
    return train(library.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0])


@case("optimizers, zero-offload", "FusedAdam, DeepSpeedCPUAdam", compare=False)
def client_adam(library: Any, folder: Path) -> list[float]:
    adam, losses = importlib.import_module(f"{library.__name__}.ops.adam"), []
    for make in (adam.FusedAdam, adam.DeepSpeedCPUAdam):
        model = Loss()
        config = {"train_batch_size": 4, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
        losses += train(library.initialize(model=model, optimizer=make(model.parameters(), lr=1e-2), config=config)[0])
    return losses


@case("activation-checkpointing", "checkpointing.configure, checkpointing.checkpoint", compare=False)
def activations(library: Any, folder: Path) -> list[float]:
    class Again(Loss):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            x = library.checkpointing.checkpoint(lambda x: F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1), x)
            return F.cross_entropy(self.head(x), y)

    library.checkpointing.configure(None, partition_activations=True)
    assert library.checkpointing.is_configured()
    model = Again()
    return train(library.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0])


@case("training", "set_gradient_accumulation_boundary, coalesce_grad_reduction, engine.scale(loss).backward()")
def boundaries(library: Any, folder: Path) -> list[float]:
    model, config = Loss(), CONFIG | {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}
    config |= {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.0}
    engine = library.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    losses = []
    for number, (x, y) in enumerate(batches()):
        engine.set_gradient_accumulation_boundary(number == STEPS - 1)
        loss = engine(x, y)
        engine.backward(loss)
        losses.append(loss.item())
    engine.step()
    engine.set_gradient_accumulation_boundary(True)
    with engine.coalesce_grad_reduction():
        for x, y in batches():
            loss = engine(x, y)
            engine.backward(loss)
            losses.append(loss.item())
    engine.step()
    for number, (x, y) in enumerate(batches()):
        engine.set_gradient_accumulation_boundary(number == STEPS - 1)
        loss = engine(x, y)
        engine.scale(loss).backward()
        losses.append(loss.item())
    engine.step()
    return [*losses, engine(x, y).item(), float(engine.get_global_grad_norm())]


@case("training", "managed_gradient_accumulation false, backward(loss / n, scale_wrt_gas=False)")
def unmanaged(library: Any, folder: Path) -> list[float]:
    model, config = Loss(), CONFIG | {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}
    config |= {"zero_optimization": {"stage": 2}, "managed_gradient_accumulation": False}
    engine = library.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    losses = []
    for count in (1, 3):
        for x, y in list(batches())[:count]:
            loss = engine(x, y)
            engine.backward(loss / count, scale_wrt_gas=False)
            losses.append(loss.item())
        engine.step()
    return [*losses, engine(*next(batches())).item(), float(engine.global_steps)]


@case("flops-profiler, monitor", "flops_profiler and csv_monitor in the configuration")
def monitors(library: Any, folder: Path) -> list[float]:
    model = Loss()
    blocks = {
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "run"},
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(folder / "profile.txt")},
    }
    engine = library.initialize(model=model, model_parameters=model.parameters(), config=CONFIG | blocks)[0]
    losses = train(engine)
    assert any((folder / "run").iterdir()) and (folder / "profile.txt").read_text()
    return losses


@case("megatron, comm", "deepspeed.comm: get_rank, get_world_size, barrier, all_reduce")
def comm(library: Any, folder: Path) -> list[float]:
    dist = importlib.import_module(f"{library.__name__}.comm")
    library.init_distributed()
    values = torch.ones(2)
    dist.all_reduce(values)
    dist.barrier()
    return [float(dist.get_rank()), float(dist.get_world_size()), *values.tolist()]


@case(
    "comms-logging", "comm.log_summary", refused="log_summary: is not here; print(engine.report(batch)) lists the bytes"
)
def log_summary(library: Any, folder: Path) -> list[float]:
    importlib.import_module(f"{library.__name__}.comm").log_summary()
    return []


@case("pipeline", "PipelineModule", refused="PipelineModule: is not here; initialize takes a plain module")
def pipeline(library: Any, folder: Path) -> list[float]:
    library.PipelineModule([nn.Linear(2, 2)], num_stages=1)
    return []


@case(
    "mixture-of-experts",
    "moe.layer.MoE",
    refused="moe: is not here; fzero.hf.parallel(model, mesh, ep=...) gives ranks experts",
)
def moe(library: Any, folder: Path) -> list[float]:
    library.moe.layer.MoE(hidden_size=4, expert=nn.Linear(4, 4))
    return []


@case(
    "autotp-training",
    "tp_model_init",
    refused="tp_model_init: is not here; fzero.hf.parallel(model, mesh, tp=...) splits layers",
)
def tensor_parallel(library: Any, folder: Path) -> list[float]:
    library.tp_model_init(Net(), tp_size=1, dtype=torch.float32)
    return []


@case("inference-tutorial", "init_inference", refused="init_inference: is not here; there is no engine for inference")
def inference(library: Any, folder: Path) -> list[float]:
    library.init_inference(Net())
    return []


@case("zero3", "zero.TiledLinear", refused="TiledLinear: is not here; give nn.Linear")
def tiled_linear(library: Any, folder: Path) -> list[float]:
    library.zero.TiledLinear(4, 4)
    return []


@case("zeropp", "zero_hpz_partition_size", refused="mesh: 1 ranks are no nodes of 2; give a number of ranks")
def zeropp(library: Any, folder: Path) -> list[float]:
    model, block = Loss(), {"stage": 3, "zero_hpz_partition_size": 2}
    library.initialize(model=model, config=CONFIG | {"zero_optimization": block})
    return []


def main(name: str, out: Path) -> None:
    library, found = importlib.import_module(name), {}
    for key, each in CASES.items():
        if name == "deepspeed" and (each.refused or not each.compare):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[key] = each.run(library, Path(folder))
            except Exception as error:
                found[key] = f"{type(error).__name__}: {error}"
    out.write_text(json.dumps(found, indent=1) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
