"""The loader of `training_data`: DeepSpeed's order, which is that of torch's DistributedSampler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_models import MESH, make_batches, make_engine, make_model
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import fzero.deepspeed
from fzero import FzeroError, VirtualMesh

CONFIG = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam"}}
DATA = [(x, y) for batch in make_batches(4) for x, y in zip(*batch)][:29]


def start(data: Any = DATA, mesh: Any = MESH, **how: Any) -> Any:
    config = CONFIG | {key: how.pop(key) for key in list(how) if key.startswith("dataloader")}
    return fzero.deepspeed.initialize(model=make_model(), config=config, mesh=mesh, training_data=data, **how)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches_are_those_of_torchs_distributed_sampler(ranks: int, drop_last: bool) -> None:
    """29 examples are no multiple: some are repeated, and the last batch of each rank is smaller."""
    loader = start(mesh=VirtualMesh(fsdp=ranks), dataloader_drop_last=drop_last).training_dataloader
    samplers = [DistributedSampler(DATA, ranks, rank) for rank in range(ranks)]  # type: ignore[arg-type, var-annotated]
    for epoch in (0, 5):
        loader.data_sampler.set_epoch(epoch)
        for each in samplers:
            each.set_epoch(epoch)
        plain = zip(*(DataLoader(DATA, 4, sampler=each, drop_last=drop_last) for each in samplers))  # type: ignore[arg-type]
        expected = [torch.cat([x for x, _ in parts]) for parts in plain]
        found = [x for x, _ in loader]
        assert len(loader) == len(found) == len(expected) and all(map(torch.equal, found, expected))
        assert all(map(torch.equal, found, [x for x, _ in loader]))  # each epoch has one order


def test_train_batch_goes_round_the_data() -> None:
    engine, _, loader, _ = start()
    other = make_engine(CONFIG)
    for batch in [*loader, *loader][:6]:
        assert engine.train_batch().item() == other.train_batch(iter([batch])).item()


def test_a_collate_function_makes_the_batches() -> None:
    loader = start(collate_fn=lambda rows: len(rows)).training_dataloader
    assert list(loader) == [8, 8, 8, 6]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield DATA[0]


class Unsized:
    def __getitem__(self, index: int) -> Any:
        return DATA[index]


def test_data_without_a_batch_is_named() -> None:
    for data, how, said in (
        ([], {}, r"training_data: has 0 examples, and a batch of 2 ranks 8; give more"),
        (DATA[:7], {"dataloader_drop_last": True}, r"training_data: has 7 examples, and a batch .* 8; give"),
        (Unsized(), {}, r"training_data: is a Unsized without a length; give it __len__"),
        (3, {}, r"dataset: is a int; give a map-style"),
    ):  # fmt: skip
        with pytest.raises(FzeroError, match=said):
            start(data, **how)


def test_an_iterable_dataset_has_its_own_order() -> None:
    loader = start(Endless(), dataloader_drop_last=True).training_dataloader
    assert next(iter(loader))[0].shape == (8, 8)
