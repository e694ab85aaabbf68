"""Together: the calls of a Trainer that all ranks make together. A rank that makes another call is an error on all."""

from __future__ import annotations

from typing import Any

import transformers

from fzero.ranks.agreement import meet
from fzero.ranks.homes import find_home
from fzero.ranks.live import Live
from fzero.ranks.members import Members


class Together(transformers.Trainer):
    """The part of the Trainer where ranks meet, before transformers and accelerate exchange what has no fixed size.

    Callbacks run on each rank. So ranks meet behind the callbacks that precede such an exchange, too.
    """

    mesh: Any

    @property
    def _members(self) -> Members | None:
        """The ranks that act together; None where one process has them all."""
        home = find_home(self.mesh)
        return home.members if isinstance(home, Live) else None

    def _meet(self, call: str) -> None:
        """Return once all ranks are in this call.

        Raises:
            FzeroError: on all ranks, where one is in another call.
        """
        meet(self._members, call)

    def evaluate(self, *args: Any, **named: Any) -> dict[str, float]:
        """As transformers' `evaluate`. All ranks call it together."""
        self._meet("trainer.evaluate")
        return super().evaluate(*args, **named)

    def predict(self, *args: Any, **named: Any) -> Any:
        """As transformers' `predict`. All ranks call it together."""
        self._meet("trainer.predict")
        return super().predict(*args, **named)

    def _run_epoch(self, *args: Any, **named: Any) -> None:
        self._meet("trainer.train, for an epoch")
        super()._run_epoch(*args, **named)

    def get_batch_samples(self, *args: Any, **named: Any) -> Any:
        """As transformers' `get_batch_samples`: the batches of an update, and the items of all ranks in them."""
        self._meet("trainer.train, for the batches of an update")
        return super().get_batch_samples(*args, **named)

    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        self._meet("trainer.train, behind an update")
        super()._maybe_log_save_evaluate(*args, **named)
