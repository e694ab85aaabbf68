"""Every model folder of transformers, tiny: updates of a sharded step beside plain torch, at lengths that change.

    python tools/trained_models.py --write           # all, and docs/trained_models.md
    python tools/trained_models.py --rest --write    # those of which the page has no outcome
    python tools/trained_models.py llama t5          # some

A model has a configuration with the sizes of `tiny_models.py`, weights of some size, and double precision. Its folder's
name draws a `Way` to train it: stage, turns of accumulation, checkpointing, a memory budget. Two virtual ranks take an
update of AdamW with clipping for each of `LENGTHS`. Plain torch takes the same ones, with the mean of the losses of all
parts of a batch. Losses and parameters are compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny_models
import torch
import transformers
from tiny_models import UntriedError
from train_beside import Found, Table, check_plain, compare, draw_way, prepare

LARGEST = 6_000_000
"""Parameters of a model that is tried."""
WRONG_IN_TORCH = {
    "levit": "a batch norm of one image, in evaluation, has a wrong derivative on CPU where its output is transposed",
}
"""Folders whose models plain torch does not train right in batches of this tool, by finite differences."""
LENGTHS = (8, 12, 10, 8)
"""The lengths of the updates: the program of all lengths is made at the second."""


def list_folders() -> list[str]:
    """All model folders of transformers that have a configuration and a model."""
    root = Path(transformers.__file__).parent / "models"
    return sorted({x.parent.name for x in root.glob("*/modeling_*.py")} & {
        x.parent.name for x in root.glob("*/configuration_*.py")})  # fmt: skip


HEADS = (
    "ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "ForSequenceClassification", "ForImageClassification",
    "ForAudioClassification", "ForPreTraining", "TextModel", "Model", "Encoder", "",
)  # fmt: skip


def _list_classes(folder: str) -> Iterator[tuple[Any, Any]]:
    """Configurations and models of a folder, those with a loss first."""
    models = tiny_models.list_models(folder)
    for head in HEADS:
        for name, model in models.items():
            if (
                name.endswith(head)
                and not name.endswith("PreTrainedModel")
                and "forward" in {key for x in model.__mro__[:-3] for key in vars(x)}
            ):
                yield tiny_models.config_of(model), model


WIDTHS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "n_mels")
"""Attributes of a configuration that say how wide the features of sound are."""


def draw_batch(model: Any, length: int, seed: int) -> dict[str, Any]:
    """A batch for a model: `ROWS` rows of this length, and the labels that its loss takes.

    Raises:
        UntriedError: for a model that takes neither tokens, nor pixels, nor sound.
    """
    draws = torch.Generator().manual_seed(seed)
    given, config, rows = inspect.signature(model.forward).parameters, model.config, tiny_models.ROWS
    dtype = next(model.parameters()).dtype
    name = type(model).__name__
    batch: dict[str, Any] = {}
    if "input_ids" in given:
        batch["input_ids"] = torch.randint(3, tiny_models.SPECIAL, (rows, length), generator=draws)
        if name.startswith("PaliGemma"):
            batch["token_type_ids"] = torch.ones_like(batch["input_ids"])
    elif "pixel_values" in given:
        vision = getattr(config, "vision_config", config)
        size, channels = getattr(vision, "image_size", 32), getattr(vision, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        batch["pixel_values"] = torch.randn(rows, channels, height, width, generator=draws).to(dtype)
    elif "input_values" in given:
        batch["input_values"] = torch.randn(rows, 800 + 80 * length, generator=draws).to(dtype)
    elif "input_features" in given:
        width = next((getattr(config, x) for x in WIDTHS if hasattr(config, x)), 80)
        batch["input_features"] = torch.randn(rows, 4 * length, width, generator=draws).to(dtype)
    else:
        raise UntriedError(f"{name} takes {', '.join(list(given)[:3])}")
    if "labels" in given and ("input_ids" not in given or "Classification" in name):
        batch["labels"] = torch.randint(getattr(config, "num_labels", 2), (rows,), generator=draws)
    elif "labels" in given:
        batch["labels"] = batch["input_ids"]
    elif "decoder_input_ids" in given and "input_ids" in batch:
        batch["decoder_input_ids"] = batch["input_ids"]
    return batch


def make(folder: str) -> Any:
    """A tiny model of a folder that plain torch trains, in training mode.

    Raises:
        UntriedError: where there is none.
    """
    if folder in WRONG_IN_TORCH:
        raise UntriedError(f"plain torch: {WRONG_IN_TORCH[folder]}")
    errors = []
    for config_class, model_class in _list_classes(folder):
        try:
            torch.manual_seed(0)
            config = tiny_models.shrink(config_class)
            with torch.device("meta"):
                count = sum(x.numel() for x in model_class(config).parameters())
            if count > LARGEST:
                raise UntriedError(f"has {count} parameters")
            torch.manual_seed(0)
            model = model_class(config).double().train()
            tiny_models.batch_experts(model)
            prepare(model)
            for dtype in (torch.float64, torch.float32):
                model = model.to(dtype)
                try:
                    check_plain(model, [draw_batch(model, length, 0) for length in dict.fromkeys(LENGTHS)])
                    return model
                except RuntimeError as error:
                    if "dtype" not in str(error):
                        raise
        except Exception as error:
            errors.append(f"{model_class.__name__}: {type(error).__name__} {' '.join(str(error).split())[:160]}")
    raise UntriedError("; ".join(errors[:3]) or "no model")


def judge(folder: str) -> Found:
    """What came of a folder's model."""
    transformers.utils.logging.set_verbosity_error()
    model, way = make(folder), draw_way(folder)
    batches = [draw_batch(model, length, i) for i, length in enumerate(LENGTHS)]
    return compare(model, batches, way, lambda model: model.gradient_checkpointing_enable())


HEAD = """# Every model folder of transformers

`python tools/trained_models.py --write` makes this page, with transformers {version} and torch {torch}.

A model has a tiny configuration, weights of some size, no dropout, and double precision where its own code allows it.
Running statistics of batch norms are those of its start. It reads tokens where it can, else pixels or sound. Two
virtual ranks take {updates} updates of AdamW with clipping, at lengths of {lengths}: the second length makes the
program of all lengths. The folder's name draws how: the stage, whether gradients of two turns add up, whether layers
are checkpointed, and whether a memory budget of stage 3's own peak chooses. Plain torch takes the same updates, with
the mean of the losses of all parts of a batch. Models are *equal* if losses differ by at most {allowed:.0e} of the
loss, and parameters by at most {allowed:.0e} of the largest change of one; in single precision by {allowed_single:.0e}.
Where code of a model computes in single precision, a derivative of `torch.func` may round otherwise than autograd's: a
model that is further from autograd's training is equal if it is as near to that of `torch.func`, and listed below.

The vision model of phi4_multimodal has eager attention: with sdpa it is causal where transformers drops a mask of ones,
which it does in plain torch, and neither in `torch.compile` nor in a step.

*untried* are models that plain torch did not train here: no tiny configuration was found, a package is missing, they
want inputs of another kind, draw random numbers, have more than {largest} parameters, or take more than {seconds}
seconds.

{counts}

| folder | model | way | outcome |
|---|---|---|---|
{rows}

## Why

{reasons}
"""


def main() -> None:
    facts = {
        "version": transformers.__version__,
        "updates": len(LENGTHS),
        "largest": f"{LARGEST:,}",
        "lengths": ", ".join(map(str, LENGTHS)),
    }
    Table("trained_models", list_folders(), judge, HEAD, **facts).run(__doc__ or "")


if __name__ == "__main__":
    main()
