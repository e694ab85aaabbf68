"""Zero: DeepSpeed's contexts of parameters. `Init` cuts a model that is constructed, `GatheredParameters` edits.

with fzero.deepspeed.zero.Init():
    model = MyLargeModel()
engine, *_ = fzero.deepspeed.initialize(model=model, config="ds_config.json")
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ContextDecorator, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fzero.base.errors import FzeroError
from fzero.deepspeed.absent import make_getattr, refuse_arguments
from fzero.deepspeed.reading import read_config
from fzero.ranks.agreement import meet
from fzero.ranks.live import find_ranks
from fzero.ranks.ranks import Ranks, check_rank
from fzero.ranks.virtual import ALONE
from fzero.state.build.deferred import Deferred, defer_tensors
from fzero.state.build.store import Allocation, Store
from fzero.training.meshes import PORT, find_local_rank, make_mesh
from fzero.training.spent import Spent
from fzero.values.functions import is_sharded

__getattr__ = make_getattr(__name__, ("GatheredParameters", "Init", "register_external_parameter"))


class Init(ContextDecorator):
    """A context in which a constructor's large parameters are cut over the ranks as they are made.

    The model is a module for `initialize`, which makes slices of its parameters. All ranks run the same constructor
    together, with the random state of rank 0. Nothing in torch is replaced. `initialize` inside of the context suspends
    it, and the module of `module=` stays whole until `initialize` cuts it. As a decorator it is around a function that
    constructs.

    Where state lies and in which dtype a step computes is a matter of the configuration that `initialize` gets. So
    `config`, `remote_device` and `pin_memory` say nothing more here; a configuration is checked.

    Raises:
        FzeroError: for an argument that is not supported.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
        *,
        mesh: Any = None,
    ) -> None:
        given = {
            "data_parallel_group": (data_parallel_group, "give mesh="),
            "mpu": (mpu, "give mesh="),
            "zero_param_parallel_group": (zero_param_parallel_group, "give mesh="),
            "sequence_data_parallel_group": (sequence_data_parallel_group, "give mesh="),
            "param_swapper": (param_swapper, "leave it out"),
            "zero_quantized_weights": (zero_quantized_weights, "leave it out"),
            "zero_quantized_nontrainable_weights": (zero_quantized_nontrainable_weights, "fzero.quantize holds codes"),
        }
        refuse_arguments("zero.Init", given)
        if dtype not in (None, torch.float32):
            way_out = "leave it out: fp16 or bf16 of the configuration says in which dtype a step computes"
            raise FzeroError("zero.Init: dtype", f"is {dtype}, and weights stay float32", way_out)
        if remote_device not in (None, "none", "cpu"):
            way_out = "leave it out: offload_param of the configuration says where parameters lie"
            raise FzeroError("zero.Init: remote_device", f"is {remote_device!r}", way_out)
        chosen = config if config is not None else config_dict_or_path
        if chosen is not None:
            read_config(chosen)
        self._enabled, self._mesh, self._stack = enabled and module is None, mesh, ExitStack()

    def __enter__(self) -> Init:
        if self._enabled:
            on = _ranks_of(self._mesh)
            if not on.members.is_alone:
                own = torch.get_rng_state()
                torch.set_rng_state(_broadcast(on, own.clone(), on.ranks[0]))
                if on.number:  # rank 0 goes on behind its draws, as without the context
                    self._stack.callback(torch.set_rng_state, own)
            self._stack.enter_context(defer_tensors(Store(on)))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


def register_external_parameter(module: nn.Module, parameter: Any) -> None:
    """Nothing: a parameter of the model is gathered where it is used, in whichever module that is."""


unregister_external_parameter = register_external_parameter


class GatheredParameters:
    """A context in which parameters of a model of `Init` are whole on every rank, to read and to edit.

    At the end rank `modifier_rank` sends its values to all ranks. Without it each rank keeps its part of its own
    values. All ranks enter together. Parameters that are whole anyway are sent, too.

    Raises:
        FzeroError: for parameters of an engine, and for a rank that there is not.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
    ) -> None:
        listed = [params] if isinstance(params, Tensor) else list(params) if isinstance(params, Iterable) else []
        self._params = list({id(x): x for x in listed if isinstance(x, Tensor)}.values()) if enabled else []
        self._rank = modifier_rank
        self._swaps: list[tuple[Deferred, Allocation, Allocation]] = []  # parameter, its memory, and that of the block
        for value in self._params:
            if is_sharded(value) or isinstance(value, Spent):
                problem = f"a {tuple(value.shape)} parameter is an engine's"
                way_out = (
                    "read engine.module_state_dict(); edit with engine.state = engine.state._replace("
                    "params=fzero.update_leaf(engine.params, path, fn))"
                )
                raise FzeroError("zero.GatheredParameters", problem, way_out)

    def __enter__(self) -> None:
        alone = Store(ALONE)  # within the block ranks work apart
        cut = [value for value in self._params if isinstance(value, Deferred)]
        # before one rank gathers and cuts: which of them a rank has whole depends on what it did before
        for on in dict.fromkeys(value.allocation.store.on for value in cut):
            what = "fzero.deepspeed.zero.GatheredParameters"
            meet(on.members, f"{what} of {[list(value.shape) for value in cut]}", what=what)
        taken: dict[Allocation, Allocation] = {}
        for held in dict.fromkeys(value.allocation for value in cut):
            held.store.bring([held])
            assert held.flat is not None
            taken[held] = alone.adopt(held.flat.clone())
            held.store.cut(held)
        # only now, as an error above leaves no parameter in memory of one rank
        self._swaps = [(value, value.allocation, taken[value.allocation]) for value in cut]
        for value, _, own in self._swaps:
            value.allocation = own

    def __exit__(self, *error: Any) -> None:
        swaps, self._swaps = self._swaps, []
        try:
            for held, own in dict.fromkeys((held, own) for _, held, own in swaps):
                own.store.bring([own])
                assert own.flat is not None
                sent = own.flat if self._rank is None else _broadcast(held.store.on, own.flat, self._rank)
                held.store.replace(held, sent)
        finally:
            for value, held, _ in swaps:
                value.allocation = held
        for plain in self._params:
            if self._rank is not None and not isinstance(plain, Deferred):
                with torch.no_grad():
                    plain.copy_(_broadcast(_find_all_ranks(), plain.detach(), self._rank))


def _ranks_of(mesh: Any) -> Ranks:
    """The ranks of a mesh; for None, of the mesh of all ranks."""
    return find_ranks(make_mesh(find_local_rank(None), PORT, None) if mesh is None else mesh)


def _find_all_ranks() -> Ranks:
    """All ranks, where there is a process group."""
    return _ranks_of(None) if dist.is_initialized() else ALONE


def _broadcast(on: Ranks, values: Tensor, rank: int) -> Tensor:
    """`values` of a global rank, on every rank of a mesh."""
    check_rank("modifier_rank", rank, on.ranks)
    if on.members.is_alone:
        return values
    sent, what = values.cpu().contiguous(), "broadcast of a parameter in fzero.deepspeed.zero"
    meet(on.members, f"{what}: {values.dtype} {list(values.shape)} of rank {rank}", what=what)
    with on.members.begin(what):
        dist.broadcast(sent, rank, group=on.members.group)
    return sent.to(values.device)
