"""Forecast: a step of AdamW of a model of transformers, traced on a virtual mesh from meta tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.base.placement import host
from fzero.hf.parallelize import parallel
from fzero.optim.base import apply_updates
from fzero.optim.presets import adamw
from fzero.planner.summary import SHARED, Traced, count_groups
from fzero.program.rates import Rates
from fzero.simulation import simulate
from fzero.values.gradients import value_and_grad
from fzero.values.microbatches import accumulate
from fzero.values.precision import precision
from fzero.values.regions import DOTS


class Recipe(NamedTuple):
    """What is trained, and how: `batch` rows of `length` tokens for each group of ranks that share examples, in
    `microbatches`, float32 weights and state, `compute` in another dtype. `remat` is a key of `REMAT`: what the
    backward pass computes again. `memory` is a budget in bytes, in the place of the `stage`. With `offload` the state
    of the optimizer lies on the host. With `sequence_parallel` ranks along "tp" have parts of rows between layers."""

    batch: int = 1
    length: int = 4096
    microbatches: int = 1
    stage: int | None = None
    memory: str | None = None
    remat: str | None = None
    compute: torch.dtype = torch.bfloat16
    offload: bool = False
    sequence_parallel: bool = False


def _select_half() -> Any:
    """A policy that keeps attention and every other matrix product of a layer, from the first on. It is torchtitan's
    selective activation checkpointing with the option "op" (pytorch/torchtitan at 9dec370)."""
    products = 0

    def keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
        nonlocal products
        name = operation.__name__.partition(".")[0]
        products += name == "mm"
        return name in DOTS and (name != "mm" or products % 2 == 1)

    return create_selective_checkpoint_contexts(keep)


REMAT: dict[str, dict[str, Any]] = {
    "layers": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": _select_half},
}
"""What is computed again -> the keywords of torch.utils.checkpoint around each layer: all of a layer, or all but
attention and every other matrix product."""


def read_config(config: Path) -> Any:
    """The configuration in a config.json of transformers."""
    if not config.exists():
        raise FzeroError(str(config), "is not there", "give a config.json, or a folder that has one")
    with _name_problems(config):
        return AutoConfig.from_pretrained(config, local_files_only=True)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The names that configurations of transformers have for the number of experts of a layer."""


def has_experts(config: Path) -> bool:
    """Whether the layers of a model have experts."""
    described = read_config(config).get_text_config()
    return any(getattr(described, name, None) for name in _EXPERTS)


def make_model(config: Path, remat: str | None) -> Any:
    """The model of a config.json of transformers, a decoder, on the meta device."""
    described = read_config(config)
    with _name_problems(config), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described, dtype=torch.float32).train()
    if remat is not None:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # before 5.24
        enable(REMAT[remat])
    return model


@contextmanager
def _name_problems(config: Path) -> Iterator[None]:
    """Errors of transformers, of any class, because it checks a configuration by classes of others."""
    try:
        yield
    except Exception as error:
        problem = f"is no configuration of a decoder of transformers: {error}"
        raise FzeroError(str(config), problem, "give a config.json, or a folder that has one") from error


def trace_step(config: Path, mesh: VirtualMesh, recipe: Recipe, rates: Rates) -> Traced:
    """The program of a step. Along the axes `SHARED` of the mesh ranks share examples: these are the axes of
    `fzero.hf.parallel`. Along "pp" microbatches go through stages of the model, else one comes after the other.

    Raises:
        FzeroError: for a configuration that is none, for sizes that the mesh does not divide, for a budget that no plan
            fits, as `fzero.hf.parallel` and `fzero.simulate`.
    """
    optimizer, shared = adamw(1e-4), [axis for axis in mesh.names if axis in SHARED]
    params, differentiate = _make_gradients(config, mesh, recipe, shared)

    def train_step(params: Any, state: Any, batch: Tensor) -> Any:
        loss, grads = differentiate(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return apply_updates(params, updates), state, loss

    batch = torch.empty(count_groups(mesh) * recipe.batch, recipe.length, dtype=torch.int64, device="meta")
    data = tuple(axis for axis in mesh.names if axis not in shared)
    step = simulate(train_step, mesh, stage=recipe.stage, memory=recipe.memory, data=data)
    step.schedule_for(rates)
    program = step.trace(params, optimizer.init(params, to=host() if recipe.offload else None), batch)
    return Traced(program, sum(leaf.numel() for leaf in tree.leaves(params)), batch.numel())


def _make_gradients(config: Path, mesh: VirtualMesh, recipe: Recipe, shared: list[str]) -> tuple[Any, Any]:
    """Parameters, and a function of them and a batch: the loss and its gradients."""
    axes: dict[str, Any] = {axis: axis if axis in shared else None for axis in SHARED}
    if recipe.sequence_parallel:
        if axes["tp"] is None:
            problem = f'is given, and {mesh} has no "tp"'
            raise FzeroError("--sequence-parallel", problem, 'give "tp", whose ranks have parts of rows between layers')
        axes["sp"] = tuple(axis for axis in ("sp", "tp") if axes[axis] is not None)
    if axes["pp"] is not None:
        axes["num_microbatches"] = recipe.microbatches
    params, apply = parallel(make_model(config, recipe.remat), mesh, **axes)

    @precision(recipe.compute, reduce=torch.float32, output=torch.float32)
    def loss_of(params: Any, batch: Tensor) -> Tensor:
        loss: Tensor = apply(params, input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def sum_of(params: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
        return loss_of(params, batch) * batch.numel(), (batch >= 0).sum()

    is_whole = recipe.microbatches == 1 or axes["pp"] is not None
    return params, value_and_grad(loss_of) if is_whole else accumulate(sum_of, recipe.microbatches)
