"""A model of each module of timm: updates of a sharded step beside plain torch, in batches whose sizes change.

    python tools/timm_models.py --write              # all, and docs/timm_models.md
    python tools/timm_models.py resnet swin_transformer

A module's smallest models by name are tried, at the smallest of `IMAGES` that they take, in double precision. How it is
trained, and what is compared, says `train_beside.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import timm
import torch
from tiny_models import UntriedError
from train_beside import Batch, Found, Table, check_plain, compare, draw_way, prepare

ROWS = (8, 12, 8)
"""Rows of the updates: the program of all numbers of rows is made at the second."""
LARGEST = 30_000_000
"""Parameters of a model that is tried."""
IMAGES, CLASSES, TRIES = (32, 64, 96, 224), 5, 4
DEPTHS: tuple[dict[str, Any], ...] = ({"depths": (1, 1, 2, 1)}, {"depths": (1, 2, 1)}, {"depth": 2}, {})
"""Fewer layers than a model has by its name, for a constructor that takes a number of them."""
SMALL = (
    "test", "atto", "zepto", "femto", "pico", "nano", "xxxs", "xxs", "xxt", "micro", "mini", "tiny", "tine", "xs", "ti",
    "lite", "small", "_t", "_s", "18", "26", "050", "b0", "base",
)  # fmt: skip
"""Parts of names of small models, the smallest first."""


def list_small(module: str) -> list[str]:
    """The models of a module, those with names of small ones first."""
    found = timm.list_models(module=module)
    return sorted(found, key=lambda name: next((i for i, x in enumerate(SMALL) if x in name), len(SMALL)))


def _list_tries(module: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Names of models, sizes of images, and what the constructor is given for these."""
    for name in list_small(module)[:TRIES]:
        for size in IMAGES:
            for sizes in ({"img_size": size}, {}):
                for depths in DEPTHS:
                    yield name, size, sizes | depths


def draw_batch(size: int, rows: int, seed: int) -> Batch:
    """Images; `loss_of` takes the mean square of what a model makes of them."""
    draws = torch.Generator().manual_seed(seed)
    return {"": torch.randn(rows, 3, size, size, generator=draws, dtype=torch.float64)}


def make(module: str) -> tuple[Any, int, str]:
    """A model of a module that plain torch trains, in training mode, the size of its images, and its name.

    Raises:
        UntriedError: where there is none.
    """
    errors: dict[str, str] = {}
    for name, size, given in _list_tries(module):
        try:
            with torch.device("meta"):
                count = sum(x.numel() for x in timm.create_model(name, num_classes=CLASSES, **given).parameters())
            if count > LARGEST:
                raise UntriedError(f"has {count} parameters")
            torch.manual_seed(0)
            model = timm.create_model(name, num_classes=CLASSES, **given).double().train()
            prepare(model)
            for part in model.modules():
                if isinstance(part, (torch.nn.Dropout, torch.nn.Dropout2d)) or "DropPath" in type(part).__name__:
                    part.eval()
                if isinstance(getattr(part, "drop_rate", None), float):
                    part.drop_rate = 0.0
            check_plain(model, [draw_batch(size, 2, 0)])
            return model, size, name
        except Exception as error:
            errors[name] = f"{name}: {type(error).__name__} {' '.join(str(error).split())[:160]}"
    raise UntriedError("; ".join(list(errors.values())[:3]) or "no model")


def judge(module: str) -> Found:
    """What came of a model of a module."""
    warnings.simplefilter("ignore")
    model, size, name = make(module)
    way = draw_way(module)
    batches = [draw_batch(size, rows, i) for i, rows in enumerate(ROWS)]
    found = compare(model, batches, way, lambda model: model.set_grad_checkpointing())
    return found._replace(model=f"{name}, images of {size}")


HEAD = """# Models of timm

`python tools/timm_models.py --write` makes this page, with timm {version} and torch {torch}.

A module of timm gives one of its smallest models, in double precision, without dropout, and with the running statistics
of batch norms that it starts with; of models that take numbers of layers, with few layers. Two virtual ranks take
{updates} updates of AdamW with clipping, for {numbers} images: the second batch makes the program of all numbers of
rows. The module's name draws how: the stage, whether gradients of two turns add up, whether layers are checkpointed,
and whether a memory budget of stage 3's own peak chooses. Plain torch takes the same updates, with the mean of the
losses of all parts of a batch. Models are *equal* if losses differ by at most {allowed:.0e} of the loss, and parameters
by at most {allowed:.0e} of the largest change of one; where that is not so, and they are as near to the training of
`torch.func`, the reason says it.

*untried* are modules of which plain torch trained no model here: those that were tried have more than {largest}
parameters, want other inputs, or take more than {seconds} seconds.

{counts}

| module | model | way | outcome |
|---|---|---|---|
{rows}

## Why

{reasons}
"""


def main() -> None:
    facts = {
        "version": timm.__version__,
        "updates": len(ROWS),
        "numbers": ", ".join(map(str, ROWS)),
        "largest": f"{LARGEST:,}",
    }
    Table("timm_models", timm.list_modules(), judge, HEAD, **facts).run(__doc__ or "")


if __name__ == "__main__":
    main()
