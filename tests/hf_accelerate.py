"""A classifier and a loop of accelerate that its tests share. The loop has no line that is fzero's."""

from __future__ import annotations

import functools
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers.modeling_outputs import SequenceClassifierOutput

LENGTHS = (5, 3, 4, 2)
MOST = 0.2
"""The norm to which gradients are clipped."""


class Classifier(nn.Module):
    """A classifier of the mean of unmasked tokens. Two of its weights are one."""

    def __init__(self, is_tied: bool = True) -> None:
        super().__init__()
        self.embed, self.up, self.down, self.head = nn.Embedding(11, 8), *(nn.Linear(8, n) for n in (8, 8, 3))
        if is_tied:
            self.down.weight = self.up.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> SequenceClassifierOutput:
        x = self.down(self.up(self.embed(input_ids)).tanh())
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return SequenceClassifierOutput(None if labels is None else cross_entropy(logits, labels), logits)


def make_rows(count: int = 20) -> list[dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(1, 11, (LENGTHS[i % 4],), generator=draws),
            "labels": torch.randint(3, (), generator=draws),
        }
        for i in range(count)
    ]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as long as its longest row."""
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": ids.ne(0).long(),
        "labels": torch.stack([row["labels"] for row in rows]),
    }


def start(cls: Any, **named: Any) -> Any:
    """An Accelerator, whatever others this process had."""
    torch.manual_seed(0)
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return cls(cpu=True, **named)


def prepare(accelerator: Any, model: nn.Module | None = None, rows: int = 4) -> Any:
    """A model, its optimizer with two groups, a loader and a schedule, prepared."""
    model = Classifier() if model is None else model
    groups = [
        {"params": [x for x in model.parameters() if x.ndim > 1], "weight_decay": 0.1},
        {"params": [x for x in model.parameters() if x.ndim < 2], "lr": 0.05},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)
    loader = DataLoader(make_rows(), batch_size=rows, collate_fn=collate)  # type: ignore[arg-type]
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return accelerator.prepare(model, optimizer, loader, scheduler)


def train(
    accelerator: Any, prepared: Any, *, skip: int = 0, folder: Any = None, is_outside: bool = False
) -> dict[str, Any]:
    """Two epochs: `losses`, `norms` and `rates` of each batch, the metric behind them, and the `weights`.

    `skip` batches are left out, and the state is saved to `folder` behind the first epoch.
    """
    model, optimizer, loader, scheduler = prepared
    log: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    for epoch in range(2):
        if epoch * len(loader) < skip:
            continue
        for batch in loader:
            with accelerator.accumulate(model):
                output = model(**batch)
                loss = cross_entropy(output.logits, batch["labels"]) if is_outside else output.loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    log["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), MOST)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            log["losses"].append(loss.item())
            log["rates"].append(scheduler.get_last_lr())
        if not epoch and folder is not None:
            accelerator.save_state(folder)
    return {**log, **evaluate(accelerator, model, loader)}


@torch.no_grad()
def evaluate(accelerator: Any, model: Any, loader: Any) -> dict[str, Any]:
    model.eval()
    found = [accelerator.gather_for_metrics((model(**batch).logits, batch["labels"])) for batch in loader]
    logits, labels = (torch.cat(each) for each in zip(*found))
    weights = {name: x.clone() for name, x in accelerator.get_state_dict(model).items()}
    return {"metric": float(cross_entropy(logits, labels)), "rows": len(labels), "weights": weights}


def assert_equal(got: dict[str, Any], expected: dict[str, Any], atol: float = 1e-5) -> None:
    assert list(got["weights"]) == list(expected["weights"])
    assert got["rows"] == expected["rows"]
    assert len(got["losses"]) > 2 and any(norm > MOST for norm in expected["norms"])
    close = functools.partial(torch.testing.assert_close, atol=atol, rtol=0.0)
    for name in ("losses", "norms", "rates", "metric", "weights"):
        close(got[name], expected[name], msg=lambda text, name=name: f"{name}: {text}")
