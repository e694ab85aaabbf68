"""Prepared: a model in slices under the loop of others. It is called as a whole model; its optimizer moves slices."""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.utils.generic import find_labels

from fzero import checkpoint, iter_full, optim, partition, tree
from fzero.base.errors import FzeroError
from fzero.base.state import State
from fzero.base.torch_private import version_of
from fzero.deepspeed.functions import NoLoss, find_loss
from fzero.deepspeed.programs import list_names
from fzero.hf.alike import list_model
from fzero.hf.checks import check_frozen, check_model, check_values
from fzero.hf.files import move_model
from fzero.hf.generation import Generator
from fzero.hf.padding import cut_to_own, pad_to_longest
from fzero.hf.sliced import Call, Held, Sliced, call_narrow, stand_for
from fzero.hf.updates import clip_to_norm, forget_parameters, make_at_rates, read_rates
from fzero.optim.groups import check_options, convert_optimizer, list_options
from fzero.optim.kinds import Group
from fzero.program.plan import check_stage
from fzero.ranks.agreement import agree, digest
from fzero.ranks.live import find_ranks
from fzero.ranks.together import do_together, gather_words
from fzero.training.models import (
    WHOLE,
    copy_without_values,
    find_store,
    init_state,
    lower_modes,
    partition_buffers,
    partition_model,
)
from fzero.training.outputs import join_numbers, keep_numbers
from fzero.training.programs import add_sums, compile_function
from fzero.training.spent import spend_model

ITEMS = "num_items_in_batch"
"""The argument of transformers' models that the sum of losses is divided by. Virtual ranks each take their share."""
_log = logging.getLogger("fzero")


class Words(NamedTuple):
    """What a user wrote: the names that errors and the log have for it."""

    owner: str
    prepare: str
    backward: str
    clip: str
    save: str
    read: str  # how to read values, as the way out of an error
    clips: str  # how to clip gradients, likewise


class How(NamedTuple):
    """How a model computes, and the words for what is done with it."""

    mesh: Any
    stage: int
    device: torch.device
    autocast: torch.dtype | None
    compile: bool
    words: Words

    def make(self, title: str, function: Callable[..., Any], **how: Any) -> Any:
        """The program of a function."""
        named = f"{self.words.owner}: {title}"
        return compile_function(function, self.mesh, title=named, stage=self.stage, compile=self.compile, **how)


class _Open(NamedTuple):
    """A call that computed gradients ahead, of its share of the loss that it returned."""

    loss: Tensor
    version: int
    grads: tree.Tree
    share: float

    def is_of(self, loss: Any, share: float) -> bool:
        """Whether a loss is the one that was returned, as it was: nothing was written to it, and no hook is on it."""
        is_same = loss is self.loss and version_of(loss) == self.version and share == self.share
        return is_same and not loss._backward_hooks


class Prepared:
    """A model in slices.

    * `stand_in` is the model that `accelerator.prepare` returns. Its output has a gradient, and a backward pass adds
      to the sums of gradients.
    * `take_optimizer` gives the model an optimizer of torch, which holds groups and rates. `update` moves the
      parameters by the sums.

    Where the model returns its loss, and `backward` takes that loss, a call computes the gradients in the same
    program. Any other loss costs a second forward pass. `find_share()` is the share of a loss in an update.

    Raises:
        FzeroError: for a model that cannot be cut; on all ranks, where their models differ.
    """

    def __init__(self, model: nn.Module, how: How, find_share: Callable[[], float]) -> None:
        check_stage(how.stage)
        check_model(model)
        check_values(model)
        self.structure, self.how, self._on = model, how, find_ranks(how.mesh)
        self._find_share = find_share
        lines = [f"configuration stage: {how.stage}", *list_model(model)]
        agree(self._on.members, digest(lines), lambda: lines, what=how.words.prepare)
        persist = WHOLE if how.stage == 0 else 0
        lowered = lower_modes(model)
        params = partition_model(model, lowered.params, find_store(model), how.mesh, persist=persist)
        self.state = State(params=params, buffers=partition_buffers(model, lowered.buffers, how.mesh), opt_state=None)
        self._ids = {id(x): path for path, x in model.named_parameters()}
        self._names = list_names(model.forward)
        self._labels = find_labels(type(model)) or ["labels"]
        spend_model(model, how.device, functools.partial(_refuse_use, how.words))
        compute = functools.partial(_compute, how.device.type, how.autocast)
        self._sliced = Sliced(model, how.make, compute, len(self._on.numbers))
        methods: dict[str, Any] = {"zero_grad": self.zero_grad, "state_dict": self.gather, "no_sync": nullcontext}
        if hasattr(model, "generate"):
            methods["generate"] = self.generate
        if isinstance(model, transformers.PreTrainedModel):
            methods["save_pretrained"] = self.save_pretrained
        self.stand_in = stand_for(model, self._call, **methods)
        self._generator: Generator | None = None
        self._groups: list[Group] | None = None
        self._sums: Any = None  # of gradients, since the last zero_grad
        self._is_updated = False  # by gradients that zero_grad has not dropped yet
        self._open: _Open | None = None
        self._computes_ahead = True
        self._clip = how.make("clipping of gradients", lambda sums, most: clip_to_norm(sums, most["max_norm"]))
        self._clip_value = how.make("clipping of gradients by value", _clip_value)
        self._add_sums = how.make("sums of gradients", add_sums)

    # calls

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model for this rank's batch. All ranks call the model together."""
        named = {**dict(zip(self._names, args)), **kwargs} if len(args) <= len(self._names) else dict(kwargs)
        if named.get(ITEMS) is not None:  # a number that changes would be a program each time
            named[ITEMS] = torch.as_tensor(named[ITEMS], device=self.how.device) / len(self._on.numbers)
        padded = pad_to_longest(named, self._on.members, self._labels, self._pad_token, self.structure)
        at = [padded.pop(name) for name in self._names[: len(args)]] if len(args) <= len(self._names) else args
        held = Held(self.state.params, self.state.buffers)
        if not torch.is_grad_enabled():
            output, after = self._sliced.forward(held, at, padded)
            output = join_numbers(output)
        else:
            output, after = self._follow(held, at, padded)
        if self.structure.training:
            self.state = self.state._replace(buffers=after.buffers)
        sizes = [x for x in vars(getattr(self.structure, "config", self.structure)).values() if isinstance(x, int)]
        return cut_to_own(output, named, {**padded, **dict(zip(self._names, at))}, self._labels, sizes)

    def _follow(self, held: Held, args: Any, kwargs: Any) -> tuple[Any, Held]:
        """`(output with a gradient, values behind the call)`."""
        check_frozen(self.structure, held.params)
        for path, x in zip(tree.paths((args, kwargs)), tree.leaves((args, kwargs))):
            if isinstance(x, Tensor) and x.requires_grad:
                problem = "requires a gradient, which ends at a model in slices"
                raise FzeroError(f"argument {path}", problem, "put what computes it and the model into one nn.Module")
        self._open = None
        if self._computes_ahead and self.structure.training:
            share = self._find_share()
            try:
                output, after, grads = self._sliced.differentiate(held, args, kwargs, self._add, share)
            except NoLoss:
                self._compute_behind("the model returns no loss")
            else:
                output = join_numbers(output)
                loss = find_loss(output)
                self._open = _Open(loss, version_of(loss), grads, share)
                return output, after
        output, after = self._sliced.follow(held, args, kwargs, self._add)
        return join_numbers(output), after

    def _compute_behind(self, reason: str) -> None:
        if self._on.number == 0:
            text = "fzero: %s: %s: backward runs the model again. Give %s the model's loss"
            _log.info(text, self.how.words.owner, reason, self.how.words.backward)
        self._computes_ahead = False

    @property
    def _pad_token(self) -> int:
        return getattr(getattr(self.structure, "config", None), "pad_token_id", None) or 0

    # gradients

    def take_loss(self, loss: Any) -> bool:
        """Add the gradients that the last call computed ahead, where `loss` is what that call returned, as it was.
        Returns whether it was."""
        opened = self._open
        if opened is None or not opened.is_of(loss, self._find_share()):
            return False
        self._open = None
        self._check_dropped()
        self._sums = opened.grads if self._sums is None else self._add_sums(self._sums, opened.grads)
        return True

    def _add(self, call: Call, find_sums: Callable[[Any], Any]) -> None:
        if call.held.params is not self.state.params:
            problem = "the parameters have changed since the call of the model whose output the loss depends on"
            raise FzeroError(self.how.words.backward, problem, "call the model again before backward")
        self._check_dropped()
        if self._open is not None:
            self._open = None
            self._compute_behind("the loss is not the one that the model returned last")
        self._sums = find_sums(self._sums)

    def _check_dropped(self) -> None:
        """Refuse gradients that would add to those of an update before."""
        if self._is_updated:
            problem = "is not called between two updates, so gradients of the first would be in the second"
            raise FzeroError("optimizer.zero_grad", problem, "call optimizer.zero_grad() behind optimizer.step()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the sums of gradients."""
        self._sums, self._is_updated = None, False

    def owns(self, parameters: Collection[Any]) -> bool:
        """Whether one of these parameters is the model's."""
        return any(id(x) in self._ids for x in parameters)

    def check_all(self, parameters: Collection[Any]) -> None:
        """Refuse parameters that are not all trained ones of this model.

        Raises:
            FzeroError: with the first that is missing, or that is another model's.
        """
        given = {self._ids.get(id(x)) for x in parameters}
        missing = [path for path, x in self.structure.named_parameters() if x.requires_grad and path not in given]
        if missing or None in given:
            what = f"without {missing[0]}" if missing else "with parameters of another model"
            problem = f"is called {what}: gradients of one model are clipped together"
            raise FzeroError(self.how.words.clip, problem, "give model.parameters(), model by model")

    def clip_norm(self, most: float) -> Tensor:
        """The norm of the sums of gradients, which are scaled down to the norm `most`."""
        if self._sums is None:
            return torch.zeros((), device=self.how.device)
        most_of_all_ranks = partition({"max_norm": torch.tensor(float(most))}, self.how.mesh, persist=WHOLE)
        self._sums, norm = self._clip(self._sums, most_of_all_ranks)
        return norm

    def clip_value(self, most: float) -> None:
        """Bound each element of the sums of gradients."""
        if self._sums is not None:
            self._sums = self._clip_value(self._sums, float(most))

    # updates

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the model by an optimizer of torch, from now on.

        Raises:
            FzeroError: for a type that is not converted; for a second optimizer; for parameters of another model.
        """
        if self._groups is not None:
            problem = f"{type(self.structure).__name__} has an optimizer already"
            raise FzeroError(self.how.words.prepare, problem, "give one optimizer with groups of parameters")
        self._groups = convert_optimizer(optimizer, self.structure)
        made = make_at_rates(self._groups, [group.rate for group in self._groups])
        self.state = self.state._replace(opt_state=init_state(made, self.state.params, None))
        self._options = list_options(optimizer)
        self._ids |= {id(x): self._ids[id(x)] for group in optimizer.param_groups for x in group["params"]}
        forget_parameters(optimizer)
        groups = self._groups

        def update(params: Any, opt_state: Any, sums: Any, rates: Any) -> tuple[Any, Any]:
            updates, opt_state = make_at_rates(groups, rates["learning_rate"]).update(sums, opt_state, params)
            return optim.apply_updates(params, updates), opt_state

        self._update = self.how.make("update", update)

    def drop_optimizer(self) -> None:
        """Forget the optimizer, its state and the gradients."""
        self._groups, self.state = None, self.state._replace(opt_state=None)
        self.zero_grad()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the parameters by the sums of gradients, at the rates that the groups have now. As in torch, nothing
        happens without gradients.

        Raises:
            FzeroError: for an option of a group that has changed; for gradients that were used before.
        """
        self._check_dropped()
        if self._sums is None:
            return
        check_options(optimizer, self._options)
        rates, held = read_rates(optimizer, self.how.mesh), self.state
        params, opt_state = self._update(held.params, held.opt_state, self._sums, rates)
        self.state, self._sums, self._is_updated = held._replace(params=params, opt_state=opt_state), None, True

    # values

    def generate(self, *args: Any, **named: Any) -> Any:
        """What the model's `generate` returns, from slices. All ranks call it together."""
        if self._generator is None:
            compute = functools.partial(_swap, self.how)
            self._generator = Generator(self.structure, self.how.mesh, call=compute, stage=self.how.stage)
        return self._generator(self.state.params, *args, **named)

    def list_values(self) -> dict[str, Any]:
        """Parameters, and running statistics that training changes, by their names in the model."""
        held = (self.state.params, self.state.buffers)
        return {path: leaf for each in held for path, leaf in zip(tree.paths(each), tree.leaves(each))}

    def gather(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Tensor]:
        """The `state_dict` of the model, whole on each rank. All ranks call it together. A module around the model
        gives a `destination`."""
        values = {path: x.detach().clone() for path, x in iter_full(self.list_values())}
        copied = copy_without_values(self.structure, tree.paths(self.state.buffers))
        paths = {id(x): path for path, x in (*copied.named_parameters(), *copied.named_buffers())}
        found = copied.state_dict(prefix=prefix, keep_vars=True)
        made = {name: values.get(paths.get(id(x), ""), x) for name, x in found.items()}
        if destination is None:
            return made
        destination.update(made)
        return destination

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, state_dict: Mapping[str, Any] | None = None,
        save_function: Any = None, push_to_hub: bool = False, max_shard_size: int | str = "50GB", **named: Any,
    ) -> None:  # fmt: skip
        """The files of transformers' `save_pretrained`. All ranks call it together, and each writes its own slices."""
        if state_dict is not None or push_to_hub or named:
            given = "state_dict" if state_dict is not None else "push_to_hub" if push_to_hub else next(iter(named))
            raise FzeroError(f"save_pretrained: {given}", "is not supported for a model in slices", "leave it out")
        folder = Path(save_directory)
        beside = folder.with_name(f"{folder.name}.weights")
        self.write(
            folder, "save_pretrained", lambda: shutil.rmtree(beside, ignore_errors=True)
        )  # of a save that was killed
        checkpoint.export_hf(beside, self.list_values(), self.structure, max_shard_size=max_shard_size)

        def finish() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            move_model(beside, folder)

        self.write(folder, "save_pretrained", finish)

    def write(self, folder: Path, what: str, write: Callable[[], None]) -> None:
        """Call `write`, which is part of `what`, on the first rank. All ranks return together, or raise."""
        gather = gather_words(self._on.members, what, f"to {folder}")
        do = write if self._on.number == 0 else lambda: None
        do_together(gather, do, str(folder), "write files", "mend that, and save again")

    def save(self, folder: Path) -> None:
        """Write parameters, running statistics and optimizer state. All ranks call it together.

        Raises:
            FzeroError: for gradients that wait for an update, which no file would have.
        """
        if self._sums is not None:
            problem = "gradients are waiting for an update, and no file would have them"
            raise FzeroError(self.how.words.save, problem, "call it behind optimizer.step() of an update")
        checkpoint.save(folder, self.state, step=0, keep=1, overwrite=True)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, on any number of ranks."""
        if not folder.is_dir():
            problem = "has no slices of this model"
            raise FzeroError(str(folder), problem, f"give a folder that {self.how.words.save} wrote")
        self.state = checkpoint.load(folder, self.state)
        self.zero_grad()


def _compute(device: str, dtype: torch.dtype | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The output of a model. No method: a step that reached a loop's Trainer would depend on all of it."""
    return keep_numbers(call_narrow(function, device, dtype, *args, **kwargs))


def _swap(how: How, apply: Callable[..., Any], params: tree.Tree, **inputs: Any) -> Any:
    return call_narrow(apply, how.device.type, how.autocast, params, **inputs)


def _clip_value(sums: Any, most: float) -> Any:
    return tree.map(lambda x: x.clamp(-most, most), sums)


def _refuse_use(words: Words, path: str, what: str) -> FzeroError:
    """The error for the use `what` of a parameter at `path`, or of the model itself."""
    problem = f"{what} needs values, which are in slices since {words.prepare}"
    way_out = words.clips if what == ".grad" else words.read
    return FzeroError(f"model: {path}" if path else "model", problem, way_out)
