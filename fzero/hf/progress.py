"""Progress: the state of a Trainer while a loss is traced. What changes would be a constant of the program."""

from __future__ import annotations

from typing import Any, NoReturn

from transformers.trainer_utils import TrainerMemoryTracker

from fzero.base.errors import FzeroError

CHANGING = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history"),
    *("best_metric", "best_global_step", "best_model_checkpoint", "stateful_callbacks"),
)
"""The attributes of transformers' TrainerState that change while a model trains."""


class TracedState:
    """The `TrainerState` that `compute_loss` reads while it is traced: without the attributes that change."""

    def __init__(self, state: Any) -> None:
        vars(self)["_state"] = state

    def __getattr__(self, name: str) -> Any:
        if name in CHANGING:
            raise _refuse(f"self.state.{name}", "changes from update to update")
        return getattr(vars(self)["_state"], name)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise _refuse(f"self.state.{name}", "is set")


class MemoryTracker(TrainerMemoryTracker):
    """transformers' own, of `skip_memory_metrics=False`. It counts in a thread, also while a loss is traced: a trace
    looks for what the step changes, and not into objects of classes of ours."""


def _refuse(where: str, problem: str) -> FzeroError:
    way_out = (
        "give a number that changes as a tensor of the batch, in a training_step of your own: "
        'super().training_step(model, {**inputs, "number": torch.tensor(...)}, num_items_in_batch)'
    )
    return FzeroError(f"compute_loss: {where}", f"{problem}, and compute_loss is traced once for all updates", way_out)
