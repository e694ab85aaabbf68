"""Outside: a Trainer whose `compute_loss` is ordinary code around the calls of a model in slices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fzero import tree
from fzero.hf.checks import check_frozen
from fzero.hf.padding import cut_to_own, pad_to_longest, pad_to_rung
from fzero.hf.sliced import Call, Held, Sliced, refuse_stale, stand_for
from fzero.hf.together import Plain
from fzero.hf.trainer import Trainer
from fzero.ranks.live import find_ranks
from fzero.training.programs import compile_function
from fzero.training.spent import let_freeze

OF_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What a collator says of packed rows beside `position_ids`, for kernels that are not here. Masks are made from
`position_ids`."""


class Outside(Trainer):
    """`fzero.hf.Trainer` whose `compute_loss` runs outside of programs.

    While `compute_loss` runs, `self.model` is called as a whole model. A call is a program, and its output has a
    gradient (`Sliced`). So `compute_loss` may look at values, call the model several times, and change the state of the
    Trainer. An update computes the forward pass once more than `fzero.hf.Trainer` does.
    """

    model_wrapped: Any
    _may_share = False
    _sliced: Sliced | None = None
    _is_bound = False

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """As in `Trainer`."""
        if training:
            self._sliced = None
        return super()._wrap_model(model, training, dataloader)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As transformers' `training_step`: its backward pass adds to the sums of gradients."""
        with torch.autograd.set_multithreading_enabled(False):  # programs run in this thread, on GPUs too
            return Plain.training_step(self, model, inputs, num_items_in_batch)

    @contextmanager
    def _bind(self) -> Iterator[Any]:
        """A context in which `self.model` and `self.model_wrapped` are called, and generate, as a whole model."""
        if self._is_bound:
            yield self.model
            return
        self._adopt()
        structure, wrapped = self.model, self.model_wrapped
        self.model = self.model_wrapped = stand_for(structure, self._call_model, generate=self._generate_from_slices)
        self._is_bound = True
        try:
            with let_freeze(structure):
                yield self.model
        finally:
            self.model, self.model_wrapped, self._is_bound = structure, wrapped, False

    def _generate_from_slices(self, *args: Any, **named: Any) -> Any:
        bound, self.model = self.model, self._structure
        try:
            return self.generate(*args, **named)
        finally:
            self.model = bound

    def _call_model(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model for this rank's batch. All ranks call the model together."""
        if self._sliced is None:
            self._sliced = self.make_sliced(self._structure, "model")
        held = Held(self.sharded.params, self.sharded.buffers)
        compute: Any = self._sliced.forward
        if torch.is_grad_enabled():
            check_frozen(self._structure, self.sharded.params)
            compute = functools.partial(self._sliced.follow, add=self._add_gradients)
        output, after = self.compute(compute, held, args, kwargs)
        if self.model.training:
            self.sharded = self.sharded._replace(buffers=after.buffers)
        return output

    def _add_gradients(self, call: Call, find_sums: Callable[[Any], Any]) -> None:
        if call.held.params is not self.sharded.params:
            raise refuse_stale(call)
        self._sums = find_sums(self._sums)

    def make_sliced(self, structure: nn.Module, what: str) -> Sliced:
        """The calls of a model in slices of the mesh. `what` is its name in logs."""

        def compile(name: str, function: Callable[..., Any], **how: Any) -> Any:
            return compile_function(function, self.mesh, title=f"Trainer: {name} of the {what}", **self._how, **how)

        return Sliced(structure, compile, self._call, self.virtual_ranks)

    def _pad(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """As in `Trainer`, and further, to one of few lengths: `compute_loss` sees no padding, whatever it computes."""
        labels = {*self.label_names, "labels"}
        is_packed = "position_ids" in inputs  # then positions begin anew in each row
        most = None if is_packed else getattr(self._structure.config, "max_position_embeddings", None)
        padded = pad_to_longest(inputs, self._members, labels, self._pad_token, self._structure)
        return pad_to_rung(padded, labels, self._pad_token, most)

    @property
    def virtual_ranks(self) -> int:
        """How many ranks of the mesh run in this process."""
        return len(find_ranks(self.mesh).numbers)

    def compute(self, compute: Callable[..., Any], held: Held, args: Any, kwargs: dict[str, Any]) -> Any:
        """What `compute` returns for inputs that are padded to one length on all ranks, cut to that of this rank."""
        given = {name: x for name, x in kwargs.items() if name not in OF_PACKING}
        padded = self._pad(given)
        output, after = compute(held, args, padded)
        return self._cut(output, given, padded), after

    def _cut(self, output: Any, given: Mapping[str, Any], padded: Mapping[str, Any]) -> Any:
        """An output without the results at padding. Those of a fused head are of all positions but the last."""
        if not given.get("fused_lm_head"):
            sizes = [x for x in vars(self._structure.config).values() if isinstance(x, int)]
            return cut_to_own(output, given, padded, self.label_names, sizes)
        more = padded["labels"].shape[1] - given["labels"].shape[1]
        if not more:
            return output
        return tree.map(lambda x: x[:, : x.shape[1] - more] if isinstance(x, Tensor) and x.ndim == 2 else x, output)
