"""Together: the calls of a Trainer that all ranks make together. A rank that makes another call, differs in what ranks
must have alike, or leaves a call by an error, is an error on all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch.distributed as dist
import transformers
from accelerate.data_loader import DataLoaderDispatcher

from fzero.base.arguments import check_arguments
from fzero.hf.alike import (
    describe_batches,
    list_arguments,
    list_control,
    list_data,
    list_functions,
    list_order,
    list_progress,
)
from fzero.ranks.agreement import agree, digest
from fzero.ranks.failure import hang_up
from fzero.ranks.live import find_ranks
from fzero.ranks.members import Members
from fzero.ranks.together import tell_others
from fzero.ranks.virtual import ALONE

DISPATCH = "a batch that rank 0 gives to all ranks"
Plain: TypeAlias = transformers.Trainer
"""The class of transformers. A script may put ours in its place: `transformers.Trainer = fzero.hf.Trainer`."""


class Together(Plain):
    """The part of the Trainer where ranks meet, before transformers and accelerate exchange what has no fixed size.

    Callbacks, data sets and metrics run on each rank. So ranks meet behind all that precedes such an exchange, too.
    """

    mesh: Any
    preprocess_logits_for_metrics: Any
    _is_dispatched = False  # whether rank 0 draws the batches of all ranks

    @property
    def _members(self) -> Members:
        """The ranks that act together."""
        return (ALONE if self.mesh is None else find_ranks(self.mesh)).members

    def _meet(self, call: str, list_lines: Callable[[], list[str]] = list) -> None:
        """Return once all ranks are in this call, and have its lines alike.

        Raises:
            FzeroError: on all ranks, where one is in another call, or has another line; where one left by an error.
        """
        if not self._members.is_alone:
            lines = [f"call of {call}", *list_lines()]
            agree(self._members, digest(lines), lambda: lines, what=call)

    @contextmanager
    def _act(self, call: str, list_lines: Callable[[], list[str]] = list) -> Iterator[None]:
        """What all ranks do together, from its first moment to its last. An error of one rank alone is one on all."""
        with tell_others(self._members, call):
            self._meet(call, list_lines)
            yield
            self._meet(f"the end of {call}")

    def _list_alike(self, name: str, dataset: Any) -> list[str]:
        """What a run, or an evaluation, takes from the Trainer and from its data."""
        return [*list_arguments(self.args), *list_functions(self), *list_data(name, dataset)]

    def evaluate(self, eval_dataset: Any = None, *args: Any, **named: Any) -> dict[str, float]:
        """As transformers' `evaluate`. All ranks call it together."""
        held = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(held, str) and isinstance(self.eval_dataset, dict):
            held = self.eval_dataset.get(held)
        with self._act("trainer.evaluate", lambda: self._list_alike("eval_dataset", held)):
            found = super().evaluate(eval_dataset, *args, **named)
            self._check_flags()
            return found

    def predict(self, test_dataset: Any, *args: Any, **named: Any) -> Any:
        """As transformers' `predict`. All ranks call it together."""
        with self._act("trainer.predict", lambda: self._list_alike("test_dataset", test_dataset)):
            found = super().predict(test_dataset, *args, **named)
            self._check_flags()
            return found

    def _check_flags(self) -> None:
        """Raise for what the last calls of programs have noted, which no further call would raise for."""
        for name in ("_begin", "_add", "_forward"):
            program = getattr(self, name, None)
            if program is not None:
                program.check_flags()

    def evaluation_loop(self, dataloader: Any, *args: Any, **named: Any) -> Any:
        """As transformers' `evaluation_loop`, where all ranks draw each batch, or come to the end, together."""
        given = self.preprocess_logits_for_metrics

        def preprocess(*args: Any) -> Any:
            logits = given(*args)
            self._meet("preprocess_logits_for_metrics")
            return logits

        self.preprocess_logits_for_metrics = None if given is None else preprocess
        try:
            return super().evaluation_loop(Drawn(dataloader, self._draw_all), *args, **named)
        finally:
            self.preprocess_logits_for_metrics = given

    def _draw_all(self, loader: Any) -> Iterator[Any]:
        """All batches of an evaluation."""
        iterator, is_dispatched, call = iter(loader), isinstance(loader, DataLoaderDispatcher), "a batch of evaluation"
        while True:
            batches = self._draw(iterator, 1, is_dispatched, call)
            self._meet(call, lambda drawn=batches: [describe_batches(drawn)])  # type: ignore[misc]
            if not batches:
                return
            yield batches[0]

    def _draw(self, iterator: Iterator[Any], count: int, is_dispatched: bool, call: str) -> list[Any]:
        """The next `count` batches, or those that are left.

        Where rank 0 draws for all, each batch is an exchange of accelerate. An error in there ends the exchange.
        """
        members = self._members
        is_shared = is_dispatched and not members.is_alone
        if is_shared:
            self._meet(call)
        since = time.monotonic()
        try:
            return [batch for _, batch in zip(range(count), iterator)]
        except Exception as error:
            if not is_shared:
                raise
            if dist.group.WORLD is not None:
                hang_up([dist.group.WORLD])  # of accelerate, whose ranks wait there for this one
            if isinstance(error, RuntimeError) and _is_of_torch_distributed(error):
                raise members.diagnose(DISPATCH, since) from error
            members.leave(DISPATCH, error)
            raise

    def _run_epoch(self, *args: Any, **named: Any) -> None:
        loader = named.get("train_dataloader")
        self._is_dispatched = isinstance(loader, DataLoaderDispatcher)

        def list_lines() -> list[str]:
            return [*list_progress(self, named), *list_order(loader)]

        self._meet("trainer.train, for an epoch", list_lines)
        super()._run_epoch(*args, **named)

    @check_arguments
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """As transformers' `get_batch_samples`: the batches of an update, and the items of all ranks in them."""
        call = "trainer.train, for the batches of an update"
        batches = self._draw(epoch_iterator, num_batches, self._is_dispatched, call)
        self._meet(call, lambda: [describe_batches(batches)])
        return super().get_batch_samples(iter(batches), num_batches, device)

    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        self._meet("trainer.train, behind an update", lambda: list(list_control(self.control)))
        super()._maybe_log_save_evaluate(*args, **named)

    def store_flos(self) -> None:
        """As transformers' `store_flos`: the sum of the operations of all ranks."""
        best = self.state.best_global_step
        self._meet("a log or a save of trainer.train", lambda: [f"control best_global_step: {best}"])
        super().store_flos()


class Drawn:
    """A loader whose batches `draw` draws. All else is that of the loader."""

    def __init__(self, loader: Any, draw: Callable[[Any], Iterator[Any]]) -> None:
        self._loader, self._draw = loader, draw

    def __iter__(self) -> Iterator[Any]:
        return self._draw(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _is_of_torch_distributed(error: BaseException) -> bool:
    """Whether an error was raised in a collective of torch."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("torch.distributed"):
            return True
        trace = trace.tb_next
    return False
