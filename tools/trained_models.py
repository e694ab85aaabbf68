"""Every model folder of transformers, tiny: updates of a sharded step beside plain torch, at lengths that change.

    python tools/trained_models.py --write           # all, and docs/trained_models.md
    python tools/trained_models.py llama t5          # some; outcomes of the others are those in build/

A model has a configuration with the sizes of `tiny_models.py`, weights of some size, and double precision. Its folder's
name draws a `Way` to train it: stage, turns of accumulation, checkpointing, a memory budget. Two virtual ranks take an
update of AdamW with clipping for each of `LENGTHS`. Plain torch takes the same ones, with the mean of the losses of all
parts of a batch. Losses and parameters are compared.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import multiprocessing
import random
import re
import signal
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tiny_models
import torch
import transformers
from parallel_models import loss_of
from tiny_models import UntriedError

import fzero
from fzero import optim, tree

ROOT = Path(__file__).parents[1]
PAGE, JOURNAL = ROOT / "docs" / "trained_models.md", ROOT / "build" / "trained_models.json"
SECONDS, LARGEST = 90, 6_000_000
"""Of the processor, and parameters, of a model that is tried."""
RANKS, LENGTHS = 2, (8, 12, 10, 8)
"""The lengths of the updates: the program of all lengths is made at the second."""
RATE, DECAY, NORM, EPS = 1e-3, 0.1, 1.0, 1e-4
ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Of a loss, and of the largest change of a parameter."""
OUTCOMES = ("equal", "refused", "raw", "wrong", "untried")


class Way(NamedTuple):
    """How a model is trained. With a budget `memory` is the peak that stage 3 has at the longest batch."""

    stage: int = 3
    turns: int = 1
    is_checkpointed: bool = False
    has_budget: bool = False

    def __str__(self) -> str:
        parts = ["memory"] if self.has_budget else [f"stage {self.stage}"]
        parts += [f"{self.turns} turns"] if self.turns > 1 else []
        parts += ["checkpointing"] if self.is_checkpointed else []
        return ", ".join(parts)


class Found(NamedTuple):
    """What came of a model: one of `OUTCOMES`, and why; its class, and the way."""

    outcome: str
    why: str = ""
    model: str = ""
    way: str = ""


def draw_way(folder: str) -> Way:
    """The way of a folder, the same in each run."""
    draw = random.Random(zlib.crc32(folder.encode()))
    return Way(draw.choice([1, 2, 3, 3]), draw.choice([1, 1, 2]), draw.random() < 0.3, draw.random() < 0.2)


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
            for module in model.modules():
                if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                    module.eval()
            with torch.no_grad():
                for leaf in model.parameters():
                    leaf.copy_(torch.nan_to_num(leaf) + 0.05 * torch.randn_like(leaf))
            for dtype in (torch.float64, torch.float32):
                model = model.to(dtype)
                try:
                    for length in dict.fromkeys(LENGTHS):
                        batch = draw_batch(model, length, 0)
                        loss = loss_of(copy.deepcopy(model)(**batch))
                        if not loss.requires_grad or not loss.isfinite():
                            raise UntriedError(f"a loss of {loss}")
                    return model
                except RuntimeError as error:
                    if "dtype" not in str(error):
                        raise
        except Exception as error:
            errors.append(f"{model_class.__name__}: {type(error).__name__} {' '.join(str(error).split())[:160]}")
    raise UntriedError("; ".join(errors[:3]) or "no model")


def train_plain(model: Any, batches: list[dict[str, Any]], turns: int) -> tuple[list[float], dict[str, Any]]:
    """Losses, and the parameters afterwards, of plain torch: each update has the mean of the losses of all parts."""
    rows = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(rows, RATE, (0.9, 0.95), EPS, weight_decay=DECAY)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for i in range(RANKS * turns):
            part = {key: x.chunk(RANKS * turns)[i] for key, x in batch.items()}
            loss = loss_of(model(**part)) / (RANKS * turns)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(rows, NORM)
        for leaf in rows:  # as fzero has it: a gradient for each
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        optimizer.step()
        losses.append(total)
    return losses, {name: x.detach() for name, x in model.named_parameters()}


def train_sharded(model: Any, batches: list[dict[str, Any]], way: Way) -> tuple[list[float], dict[str, Any]]:
    """The same of a sharded step on virtual ranks."""
    if way.is_checkpointed:
        model.gradient_checkpointing_enable()
    mesh = fzero.VirtualMesh(fsdp=RANKS)
    params, apply = fzero.lower(model)
    params = fzero.partition(params, mesh)
    optimizer = optim.chain(
        optim.clip_by_global_norm(NORM), optim.adamw(RATE, b1=0.9, b2=0.95, eps=EPS, weight_decay=DECAY)
    )
    state = optimizer.init(params)

    def loss_on(params: Any, batch: Any) -> Any:
        return loss_of(apply(params, **batch))

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        if way.turns > 1:
            sums = fzero.accumulate(lambda p, b: (loss_on(p, b), torch.ones(())), way.turns)
            loss, grads = sums(params, batch)
        else:
            loss, grads = fzero.value_and_grad(loss_on)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    options: dict[str, Any] = {"stage": way.stage}
    if way.has_budget:
        longest = max(zip(LENGTHS, batches), key=lambda x: x[0])[1]
        options = {"memory": fzero.simulate(train_step, mesh).trace(params, state, longest).memory().peak}
    step, losses = fzero.simulate(train_step, mesh, **options), []
    for batch in batches:
        params, state, loss = step(params, state, batch)
        losses.append(loss.mean().item())
    whole = fzero.unpartition(params)
    return losses, dict(zip(tree.paths(whole), tree.leaves(whole)))


def compare(folder: str) -> Found:
    """What came of a folder's model."""
    model, way = make(folder), draw_way(folder)
    if way.is_checkpointed and not model.supports_gradient_checkpointing:
        way = way._replace(is_checkpointed=False)
    found = Found("equal", "", type(model).__name__, str(way))
    try:
        batches = [draw_batch(model, length, i) for i, length in enumerate(LENGTHS)]
        start = {name: x.detach().clone() for name, x in model.named_parameters()}
        theirs = copy.deepcopy(model)
        if way.is_checkpointed:
            theirs.gradient_checkpointing_enable()
        losses, params = train_plain(theirs, batches, way.turns)
    except Exception as error:
        raise UntriedError(f"plain torch: {type(error).__name__} {error}") from error
    try:
        own_losses, own = train_sharded(model, batches, way)
    except fzero.FzeroError as error:
        return found._replace(outcome="refused", why=" ".join(str(error).split()))
    except TimeoutError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return found._replace(outcome="raw", why=why)
    allowed = ALLOWED[next(model.parameters()).dtype]
    apart = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(own_losses, losses))
    change = max((params[name] - x).abs().max().item() for name, x in start.items())
    off = {name: (own[name] - params[name]).abs().max().item() / change for name in params.keys() & own.keys()}
    worst = max(off, key=lambda name: off[name])
    if apart <= allowed and off[worst] <= allowed:
        return found
    return found._replace(outcome="wrong", why=f"losses are {apart:.1e} apart, {worst} {off[worst]:.1e}")


def judge(folder: str) -> Found:
    """`compare`, where no model was made too."""
    signal.signal(signal.SIGPROF, lambda *_: (_ for _ in ()).throw(TimeoutError(f"no end in {SECONDS} s")))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return compare(folder)
    except (UntriedError, TimeoutError) as error:
        return Found("untried", str(error)[:300])
    except Exception as error:
        return Found("untried", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _start() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()


HEAD = """# Every model folder of transformers

`python tools/trained_models.py --write` makes this page, with transformers {version} and torch {torch}.

A model has a tiny configuration, weights of some size, no dropout, and double precision where its own code allows it.
Running statistics of batch norms are those of its start. It reads tokens where it can, else pixels or sound. Two
virtual ranks take {updates} updates of AdamW with clipping, at lengths of {lengths}: the second length makes the
program of all lengths. The folder's name draws how: the stage, whether gradients of two turns add up, whether layers
are checkpointed, and whether a memory budget of stage 3's own peak chooses. Plain torch takes the same updates, with
the mean of the losses of all parts of a batch. Models are *equal* if losses differ by at most {allowed:.0e} of the
loss, and parameters by at most {allowed:.0e} of the largest change of one; in single precision by {allowed_single:.0e}.

*untried* are models that plain torch did not train here: no tiny configuration was found, a package is missing, they
want inputs of another kind, have more than {largest} parameters, or take more than {seconds} seconds.

{counts}

| folder | model | way | outcome |
|---|---|---|---|
{rows}

## Why

{reasons}
"""


def render(table: dict[str, Found]) -> str:
    """The page of a table."""
    counts = Counter(x.outcome for x in table.values())
    tried = {folder: x for folder, x in sorted(table.items()) if x.outcome != "untried"}
    return HEAD.format(
        version=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        updates=len(LENGTHS),
        lengths=", ".join(map(str, LENGTHS)),
        allowed=ALLOWED[torch.float64],
        allowed_single=ALLOWED[torch.float32],
        largest=f"{LARGEST:,}",
        seconds=SECONDS,
        counts=f"{len(table)} of {len(list_folders())} folders were tried: "
        + ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
        + ".",
        rows="\n".join(f"| {folder} | {x.model} | {x.way} | {x.outcome} |" for folder, x in tried.items()),
        reasons="\n".join(
            f"* {folder}: {x.outcome}. `{shorten(x.why)}`" for folder, x in sorted(table.items()) if x.why
        ),
    )


def shorten(why: str) -> str:
    """A reason without folders of this machine."""
    text = re.sub(r"\S*/(?=transformers/|tools/)", "", why)
    return " ".join(text.replace("`", "'").split())[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", help="model folders of transformers; all by default")
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    known = json.loads(JOURNAL.read_text()) if JOURNAL.exists() else {}
    table = {folder: Found(*x) for folder, x in known.items()}
    JOURNAL.parent.mkdir(exist_ok=True)
    chosen = given.folders or list_folders()
    with multiprocessing.get_context("spawn").Pool(given.workers, _start, maxtasksperchild=16) as pool:
        for folder, found in zip(chosen, pool.imap(judge, chosen)):
            table[folder] = found
            JOURNAL.write_text(json.dumps(table))
            print(folder, *found, flush=True)
    if given.write:
        PAGE.write_text(render(table), encoding="utf-8")


if __name__ == "__main__":
    main()
