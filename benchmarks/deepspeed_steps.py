"""DeepSpeed's ZeRO stages. It lives in an environment of its own, which `deepspeed_environment.sh` makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from training import Batch, Contender, Setup, adamw, loss_of


def zero(build: Callable[[], nn.Module], mesh: DeviceMesh, bf16: bool, stage: int, offload: bool = False) -> Contender:
    """`deepspeed.initialize` with torch's AdamW. Stage 3 releases weights inside of a step, which it must be told to do
    for a model as small as these. With `offload` optimizer state lies on the host, at stage 3 parameters too."""
    import deepspeed  # here: where fzero's ranks run it is not installed

    model = build()
    block = sum(parameter.numel() for parameter in model.get_submodule("blocks.0").parameters())
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model), config=config(stage, bf16, block, offload), dist_init_required=False
    )

    def step(batch: Batch) -> Tensor:
        loss = loss_of(engine(batch["inputs"]), batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Contender(step)


def config(stage: int, bf16: bool, bucket: int, offload: bool = False) -> dict[str, Any]:
    """DeepSpeed's configuration, with a bucket of so many elements: its buffer for gradients has all of them, by
    default 500 million, however small a model is."""
    release = {"stage3_max_live_parameters": 0, "stage3_param_persistence_threshold": 0} if stage == 3 else {}
    places = ("offload_optimizer", "offload_param")[: stage - 1] if offload else ()
    return {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed wants one and prints rates of it; steps do not depend on it
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket}
        | release
        | {place: {"device": "cpu"} for place in places},
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW, as everybody's
        "gradient_clipping": 0.0,  # its default is a norm of 1, and nobody else clips
        "bf16": {"enabled": bf16},
        "steps_per_print": 10**9,
    }


CONTENDERS: dict[str, Setup] = {
    **{f"deepspeed-{stage}": partial(zero, stage=stage) for stage in (1, 2, 3)},
    **{f"deepspeed-{stage}-offload": partial(zero, stage=stage, offload=True) for stage in (2, 3)},
}
