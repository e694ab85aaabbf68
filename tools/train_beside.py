"""Updates of a model by a sharded step beside those of plain torch, and tables of many models: what the pages of models
of others have in common (`trained_models.py`, `timm_models.py`).

Two virtual ranks take an update of AdamW with clipping for each batch, whose sizes may change. Plain torch takes the
same ones, with the mean of the losses of all parts of a batch. Losses and parameters are compared. The name of a model
draws a `Way` to train it: stage, turns of accumulation, checkpointing, a memory budget.

Some models compute parts in single precision, whatever their weights are, and there the roundings of a derivative show.
A model that is further from autograd's training than allowed is equal if it is near to that of `torch.func`.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import random
import re
import signal
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from parallel_models import loss_of
from tiny_models import UntriedError

import fzero
from fzero import optim, tree

ROOT = Path(__file__).parents[1]
SECONDS = 180
"""Of the processor, for a model."""
RANKS = 2
RATE, DECAY, NORM, EPS = 1e-3, 0.1, 1.0, 1e-4
ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Of a loss, and of the largest change of a parameter."""
OUTCOMES = ("equal", "refused", "raw", "wrong", "untried")
Batch = dict[str, Any]
Trained = tuple[list[float], dict[str, Any]]
"""The losses, and the parameters afterwards by name."""


class Way(NamedTuple):
    """How a model is trained. With a budget `memory` is the peak that stage 3 has at the largest batch."""

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


def draw_way(name: str) -> Way:
    """The way of a name, the same in each run."""
    draw = random.Random(zlib.crc32(name.encode()))
    return Way(draw.choice([1, 2, 3, 3]), draw.choice([1, 1, 2]), draw.random() < 0.3, draw.random() < 0.2)


def prepare(model: Any) -> None:
    """Give a model weights of some size, for none of which its code has a special case, and keep running statistics."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.eval()
    with torch.no_grad():
        for leaf in model.parameters():
            leaf.copy_(torch.nan_to_num(leaf) + 0.05 * torch.randn_like(leaf))


def apply_to(call: Callable[..., Any], batch: Batch) -> Any:
    """The output for a batch, of which "" is an argument without a name."""
    named = {key: x for key, x in batch.items() if key}
    return call(batch[""], **named) if "" in batch else call(**named)


def check_plain(model: Any, batches: Sequence[Batch]) -> None:
    """Let a copy of a model compute its losses.

    Raises:
        UntriedError: for a loss that is no finite number, or follows from no parameter.
    """
    for batch in batches:
        loss = loss_of(apply_to(copy.deepcopy(model), batch))
        if not loss.requires_grad or not loss.isfinite():
            raise UntriedError(f"a loss of {loss}")


def differentiate(model: Any, part: Batch, scale: float) -> float:
    """Add the gradient of the loss of a part of a batch, times `scale`, as autograd has it. Returns that loss."""
    loss = loss_of(apply_to(model, part)) * scale
    loss.backward()
    return loss.item()


def differentiate_by_func(model: Any, part: Batch, scale: float) -> float:
    """The same, as `torch.func` has it: some derivatives are other formulas there, which have derivatives, too."""
    leaves = {name: x.detach() for name, x in model.named_parameters() if x.requires_grad}
    held = {name: x for name, x in model.named_parameters() if name not in leaves} | dict(model.named_buffers())

    def loss_at(given: dict[str, Any]) -> Any:
        call = lambda *args, **kwargs: torch.func.functional_call(model, held | given, args, kwargs)  # noqa: E731
        return loss_of(apply_to(call, part)) * scale

    grads, loss = torch.func.grad_and_value(loss_at)(leaves)
    for name, leaf in model.named_parameters():
        if name in grads:
            leaf.grad = grads[name] if leaf.grad is None else leaf.grad + grads[name]
    return loss.item()


def train_plain(model: Any, batches: Sequence[Batch], turns: int, take: Any = differentiate) -> Trained:
    """Losses, and the parameters afterwards, of plain torch: each update has the mean of the losses of all parts."""
    rows = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(rows, RATE, (0.9, 0.95), EPS, weight_decay=DECAY)
    losses, count = [], RANKS * turns
    for batch in batches:
        optimizer.zero_grad()
        parts = [{key: x.chunk(count)[i] for key, x in batch.items()} for i in range(count)]
        losses.append(sum(take(model, part, 1 / count) for part in parts))
        for leaf in rows:  # as fzero has it: a gradient for each
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        norm = torch.nn.utils.get_total_norm([leaf.grad for leaf in rows])
        for leaf in rows if norm > NORM else ():  # torch's own clipping adds 1e-6 to the norm
            leaf.grad.mul_(NORM / norm)
        optimizer.step()
    return losses, {name: x.detach() for name, x in model.named_parameters()}


def train_sharded(model: Any, batches: Sequence[Batch], way: Way) -> Trained:
    """The same of a sharded step on virtual ranks."""
    mesh = fzero.VirtualMesh(fsdp=RANKS)
    params, apply = fzero.lower(model)
    params = fzero.partition(params, mesh)
    optimizer = optim.chain(
        optim.clip_by_global_norm(NORM), optim.adamw(RATE, b1=0.9, b2=0.95, eps=EPS, weight_decay=DECAY)
    )
    state = optimizer.init(params)

    def loss_on(params: Any, batch: Any) -> Any:
        return loss_of(apply_to(lambda *args, **kwargs: apply(params, *args, **kwargs), batch))

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
        largest = max(batches, key=lambda batch: sum(x.numel() for x in batch.values()))
        options = {"memory": fzero.simulate(train_step, mesh).trace(params, state, largest).memory().peak}
    step, losses = fzero.simulate(train_step, mesh, **options), []
    for batch in batches:
        params, state, loss = step(params, state, batch)
        losses.append(loss.mean().item())
    whole = fzero.unpartition(params)
    return losses, dict(zip(tree.paths(whole), tree.leaves(whole)))


def compare(model: Any, batches: Sequence[Batch], way: Way, checkpoint: Callable[[Any], None]) -> Found:
    """What came of a model that is trained in a way, where `checkpoint(model)` checkpoints the layers of one that can.

    Raises:
        UntriedError: where plain torch does not train it.
    """
    if way.is_checkpointed:
        try:
            checkpoint(copy.deepcopy(model))
        except (AttributeError, AssertionError, ValueError):  # the model has none
            way = way._replace(is_checkpointed=False)
    found = Found("equal", "", type(model).__name__, str(way))
    start = {name: x.detach().clone() for name, x in model.named_parameters()}
    try:
        theirs, fresh = copy.deepcopy(model), copy.deepcopy(model)
        for each in (model, theirs) if way.is_checkpointed else ():
            checkpoint(each)
        losses, params = train_plain(theirs, batches, way.turns)
        if not all(map(math.isfinite, losses)) or not all(x.isfinite().all() for x in params.values()):
            raise UntriedError("does not stay finite")
    except TimeoutError:
        raise
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
    off = measure((own_losses, own), (losses, params), start)
    if max(off) <= allowed:
        return found
    spread = max(measure(train_plain(copy.deepcopy(fresh), batches, way.turns), (losses, params), start))
    if spread > allowed:
        raise UntriedError(f"draws random numbers: two trainings of plain torch are {spread:.1e} apart")
    text = f"losses are {off[0]:.1e} apart, parameters {off[1]:.1e}"
    try:
        near = max(measure((own_losses, own), train_plain(fresh, batches, way.turns, differentiate_by_func), start))
    except RuntimeError as error:  # torch.func does not take the model
        return found._replace(outcome="wrong", why=f"{text}; torch.func: {' '.join(str(error).split())[:100]}")
    if near <= allowed:
        return found._replace(why=f"{text}; from those with derivatives of torch.func {near:.1e}")
    return found._replace(outcome="wrong", why=text)


def measure(ours: Trained, theirs: Trained, start: dict[str, Any]) -> tuple[float, float]:
    """How far losses are apart, of a loss, and parameters, of the largest change of one since the start; infinity where
    one of ours is missing, or no number, which is no larger than any."""
    apart = [abs(a - b) / max(abs(b), 1e-3) for a, b in zip(ours[0], theirs[0], strict=True)]
    change = max((theirs[1][name] - x).abs().max().item() for name, x in start.items() if x.numel())
    off = [
        (ours[1][name] - x).abs().max().item() / change if name in ours[1] else math.inf
        for name, x in theirs[1].items()
        if x.numel()
    ]
    first, second = (max(x if math.isfinite(x) else math.inf for x in each) for each in (apart, off))
    return first, second


_ROW = re.compile(r"^\| (\w+) \| (.*) \| (.*) \| (\w+) \|$", re.MULTILINE)
_REASON = re.compile(r"^\* (\w+): (\w+)\. `(.*)`$", re.MULTILINE)


def read_outcomes(page: str) -> dict[str, Found]:
    """The outcomes that the text of a page has, by name: what `Table.render` made the page of."""
    rows = {name: Found(outcome, "", *whose) for name, *whose, outcome in _ROW.findall(page) if outcome in OUTCOMES}
    reasons = {name: rows.get(name, Found(outcome))._replace(why=why) for name, outcome, why in _REASON.findall(page)}
    return rows | reasons


class Table:
    """The outcomes of models by name, and the page that they make, which is where they are kept.

    Args:
        name: of the page in docs/.
        names: all models.
        judge: what came of a model by its name; an `UntriedError` where it was not made.
        head: the text of the page, with {counts}, {rows}, {reasons} and `facts` in it.
    """

    def __init__(self, name: str, names: Sequence[str], judge: Callable[[str], Found], head: str, **facts: Any) -> None:
        self._names, self._judge, self._head, self._facts = names, judge, head, facts
        self._page = ROOT / "docs" / f"{name}.md"
        known = read_outcomes(self._page.read_text(encoding="utf-8")) if self._page.exists() else {}
        self.found = {key: x for key, x in known.items() if key in names}

    def run(self, about: str) -> None:
        """Judge the models that the command line names, and write what it asks for."""
        parser = argparse.ArgumentParser(description=about.partition("\n")[0])
        parser.add_argument("names", nargs="*", help="all by default; outcomes of the others are those of the page")
        parser.add_argument("--rest", action="store_true", help="those of which the page has no outcome")
        parser.add_argument("--write", action="store_true", help=f"write each outcome into docs/{self._page.name}")
        parser.add_argument("--workers", type=int, default=1)
        given = parser.parse_args()
        chosen = given.names or [x for x in self._names if not (given.rest and x in self.found)]
        judge = _Judge(self._judge)
        with multiprocessing.get_context("spawn").Pool(given.workers, _start, maxtasksperchild=16) as pool:
            for name, found in zip(chosen, pool.imap(judge, chosen)):
                self.found[name] = found
                print(name, *found, flush=True)
                if given.write:
                    self._page.write_text(self.render(), encoding="utf-8")

    def render(self) -> str:
        """The page of the table."""
        counts = Counter(x.outcome for x in self.found.values())
        rows = sorted(self.found.items())
        return self._head.format(
            torch=torch.__version__.partition("+")[0],
            allowed=ALLOWED[torch.float64],
            allowed_single=ALLOWED[torch.float32],
            seconds=SECONDS,
            counts=f"{len(self.found)} of {len(self._names)} were tried: "
            + ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
            + ".",
            rows="\n".join(f"| {x} | {y.model} | {y.way} | {y.outcome} |" for x, y in rows if y.outcome != "untried"),
            reasons="\n".join(f"* {x}: {y.outcome}. `{shorten(y.why)}`" for x, y in rows if y.why),
            **self._facts,
        )


class _Judge:
    """`judge`, within `SECONDS` of the processor, with an outcome where no model was made, too."""

    def __init__(self, judge: Callable[[str], Found]) -> None:
        self._judge = judge

    def __call__(self, name: str) -> Found:
        signal.signal(signal.SIGPROF, lambda *_: (_ for _ in ()).throw(TimeoutError(f"no end in {SECONDS} s")))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            return self._judge(name)
        except (UntriedError, TimeoutError) as error:
            return Found("untried", str(error)[:300])
        except Exception as error:
            return Found("untried", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def shorten(why: str) -> str:
    """A reason without folders of this machine."""
    text = re.sub(r"\S*/(?=(transformers|timm|torch|tools)/)", "", why)
    return " ".join(text.replace("`", "'").split())[:300].strip()


def _start() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
