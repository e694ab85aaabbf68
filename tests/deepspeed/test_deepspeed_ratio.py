"""`offload_optimizer.ratio`: part of the optimizer state lies on the host, and losses stay the same."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed_models import make_batches, make_engine, run_loop

from fzero import FzeroError, tree


def make(ratio: float, stage: int = 3, **keys: Any) -> Any:
    place = {"device": "cpu", "ratio": ratio}
    return make_engine(
        {
            "train_batch_size": 8, "gradient_clipping": 0.3,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage, "offload_optimizer": place, **keys},
        }
    )  # fmt: skip


def count_offloaded(engine: Any) -> tuple[int, int]:
    """Elements of optimizer state on the host, and all of them; numbers of all ranks do not count."""
    leaves = [leaf for leaf in tree.leaves(engine.state.opt_state) if leaf.ndim]
    return sum(leaf.numel() for leaf in leaves if leaf.place is not None), sum(leaf.numel() for leaf in leaves)


def test_a_ratio_of_the_state_lies_on_the_host() -> None:
    layers = {"blocks.0": 72, "blocks.1": 72, "head": 36}
    expected, whole = run_loop(make(1.0), make_batches(3)), 2 * sum(layers.values())
    for ratio, away in ((0.5, layers["blocks.1"] + layers["head"]), (0.0, 0), (1.0, whole // 2)):
        engine = make(ratio)
        assert count_offloaded(engine) == (2 * away, whole)
        losses = run_loop(engine, make_batches(3))
        assert losses == pytest.approx(expected, rel=1e-6)  # the host has another kernel
        assert count_offloaded(engine) == (2 * away, whole)


def test_parameters_on_the_host_do_not_matter() -> None:
    assert count_offloaded(make(0.5, offload_param={"device": "cpu"})) == count_offloaded(make(0.5))


def test_other_ratios_are_refused() -> None:
    with pytest.raises(FzeroError, match=r"offload_optimizer\.ratio: is 1\.5; give a number from 0 to 1"):
        make(1.5)
    with pytest.raises(
        FzeroError, match=r"offload_optimizer\.ratio: is 0\.5 at stage 2; give zero_optimization\.stage 3"
    ):
        make(0.5, stage=2)
