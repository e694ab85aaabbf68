"""Updates: the part of the Trainer that scales and clips gradients, makes the optimizer, and updates by programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fzero import optim, partition, tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.state import State
from fzero.hf.ds_config import list_held_groups, make_schedule
from fzero.hf.files import Files
from fzero.hf.optimizers import choose_optimizer, separate_embeddings
from fzero.hf.together import Plain
from fzero.optim.base import GradientTransformation
from fzero.optim.groups import GroupHolder, check_options, convert_optimizer, join, list_groups, list_options
from fzero.optim.kinds import Group
from fzero.training.models import WHOLE, copy_without_values, forget_values, init_state


class Updates(Files):
    """The part of the Trainer between the gradients of an update and new parameters. `_sums` are the gradients."""

    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    sharded: State
    _sums: Any
    _groups: list[Group]
    _options: list[dict[str, Any]]
    _unscale: Callable[..., Any]
    _clip: Callable[..., Any]
    _norm: Callable[..., Any]
    _update: Callable[..., Any]

    def _measure(self) -> None:
        """Divide the gradients of an update by the loss scale, and note whether they are finite."""
        if self._plan.scaler is not None:
            self._sums, scale, finite = self._unscale(self._sums, self.sharded.scale)
            self.sharded = self.sharded._replace(scale=scale)
            self.accelerator.scaler.is_finite = bool(finite)

    def _drop(self) -> None:
        self._sums = None

    def _find_scale(self) -> torch.Tensor:
        return self.sharded.scale.scale.full_tensor()

    def _clip_grad_norm(self, model: nn.Module) -> float:
        self._measure()
        self._sums, norm = self._clip(self._sums)
        return float(norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            return grad_norm
        self._measure()
        return float(self._norm(self._sums))

    # updates

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer of torch that the arguments name. It holds groups and rates; its step is our update.

        Raises:
            FzeroError: for a type that is not converted.
        """
        self._adopt()
        if self.sharded.opt_state is None:
            like = copy_without_values(self.model) if self.optimizer is None else self.model
            self._take_optimizer_of_config(like)
            optimizer = super().create_optimizer(like)
            separate_embeddings(optimizer, like)
            self._groups = self._groups or convert_optimizer(optimizer, like)
            made, plan = self._make([group.rate for group in self._groups]), self._plan
            state = init_state(made, self.sharded.params, plan.optimizer_at, plan.offload_ratio)
            scale = None if plan.scaler is None else plan.scaler.init(self.sharded.params)
            self.sharded = self.sharded._replace(opt_state=state, scale=scale)
            optimizer.register_step_post_hook(lambda *_: self._advance())
            self._options = list_options(optimizer)
            forget_parameters(optimizer)
        return self.optimizer

    def _take_optimizer_of_config(self, like: nn.Module) -> None:
        """Make the optimizer of a ds_config, where there is one, and none is given."""
        settings = self._plan.settings
        if self.optimizer is None and settings is not None and settings.optimizer is not None:
            trained = {path: x for path, x in like.named_parameters() if x.requires_grad}
            kind, params = settings.optimizer
            self._groups = list_groups(kind, params, trained.values(), like, "optimizer.type")
            self.optimizer = GroupHolder(list_held_groups(self._groups, trained), kind=kind, lr=0.0)

    @check_arguments
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As transformers' `create_scheduler`. The scheduler of a ds_config goes before that of the arguments."""
        settings, keys = self._plan.settings, self._plan.keys
        if self.lr_scheduler is None and settings is not None and keys is not None and "scheduler.type" in keys:
            chosen = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = make_schedule(self.args, keys, self._groups, chosen, num_training_steps)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """As transformers' `get_optimizer_cls_and_kwargs`. The names of bitsandbytes need no bitsandbytes."""
        return choose_optimizer(args) or Plain.get_optimizer_cls_and_kwargs(args, model)

    def get_optimizer_group(self, param: Any = None) -> Any:
        """As transformers' `get_optimizer_group`: the group of a parameter of the model. The parameters in a group are
        those of the model, which have no values."""
        if self.optimizer is None:
            return super().get_optimizer_group(param)  # which refuses
        own = [(path, x) for path, x in self.model.named_parameters() if x.requires_grad]
        held = [[x for path, x in own if group.paths is None or path in group.paths] for group in self._groups]
        for group, params in zip(self.optimizer.param_groups, held, strict=True):
            if any(x is param for x in params):
                return {**group, "params": params}
        return held

    def _make(self, rates: Any) -> GradientTransformation:
        """The optimizer of all groups, at these rates."""
        return make_at_rates(self._groups, rates)

    def _advance(self) -> None:
        """Update the state by the sums of gradients, at the rates that the groups have now."""
        if self._sums is None and self._plan.scaler is not None and not self.accelerator.scaler.is_finite:
            return
        if self._sums is None:
            raise FzeroError("optimizer.step", "is called without gradients", "let the Trainer call it")
        check_options(self.optimizer, self._options)
        rates, held = read_rates(self.optimizer, self.mesh), self.sharded
        params, opt_state = self._update(held.params, held.opt_state, self._sums, rates)
        self.sharded, self._sums = held._replace(params=params, opt_state=opt_state), None


def make_at_rates(groups: Sequence[Group], rates: Any) -> GradientTransformation:
    """The optimizer of all groups, at these rates."""
    return join(groups, [group.make(learning_rate=rate, **group.options) for group, rate in zip(groups, rates)])


def read_rates(optimizer: torch.optim.Optimizer, mesh: Any) -> Any:
    """The rates that the groups have now, as an argument of a program."""
    rates = [torch.tensor(float(group["lr"]), dtype=torch.float64) for group in optimizer.param_groups]
    return partition({"learning_rate": rates}, mesh, persist=WHOLE)  # named for errors


def forget_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Take the values of parameters and the state out of an optimizer: both are in slices."""
    optimizer.state.clear()  # Adagrad's is on the meta device already
    for group in optimizer.param_groups:
        group["params"] = [forget_values(x) for x in group["params"]]


def clip_to_norm(sums: Any, most: Any) -> tuple[Any, Tensor]:
    """`(sums, norm)`: gradients scaled down to the norm `most`, and the norm before, as torch's `clip_grad_norm_`."""
    norm = optim.global_norm(sums)
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    return tree.map(lambda x: x * factor.to(x.dtype), sums), norm
