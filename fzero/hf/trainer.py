"""Trainer: transformers' Trainer with parameters, gradients and optimizer state in slices."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from fzero import optim, tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.mesh import mesh_shape
from fzero.base.state import State
from fzero.deepspeed.quantized import quantize_frozen
from fzero.hf.alike import list_arguments, list_model
from fzero.hf.checks import (
    check_frozen,
    check_model,
    check_plugins,
    check_same,
    check_training_arguments,
    check_type,
    check_values,
    refuse_gradients,
    refuse_model,
    refuse_use,
)
from fzero.hf.codes import quantize_base, read_quantize
from fzero.hf.generation import Generator
from fzero.hf.padding import cut_to_own, pad_to_longest
from fzero.hf.plan import check_mesh, enable_checkpointing, find_spread, hide, make_plan, place
from fzero.hf.pretrained import Pretrained, join_slices, refuse_merge
from fzero.hf.progress import MemoryTracker, TracedState
from fzero.hf.scaling import Scaler, make_unscale
from fzero.hf.sharing import check_sharable, check_whole, find_sharing, share_forwards
from fzero.hf.signatures import join_signatures
from fzero.hf.sliced import call_narrow
from fzero.hf.styles import Axis
from fzero.hf.tensor_plans import TensorPlan
from fzero.hf.together import Plain
from fzero.hf.updates import Updates, clip_to_norm
from fzero.hf.wishes import Capacity, Wish, check_mesh_of, choose_wish
from fzero.hf.wrapped import Wrapped
from fzero.optim.groups import convert_optimizer
from fzero.optim.kinds import Group
from fzero.program.plan import check_stage
from fzero.ranks.together import tell_others
from fzero.training.live import LiveModel
from fzero.training.meshes import EVENLY, PORT, find_local_rank, make_mesh
from fzero.training.models import (
    Bound,
    Call,
    average_buffers,
    carry_buffers,
    copy_without_values,
    find_store,
    lower_modes,
    partition_buffers,
    partition_model,
)
from fzero.training.programs import compile_function, make_sums
from fzero.training.spent import spend_model

CONSTRUCT = "fzero.hf.Trainer"
_log = logging.getLogger("fzero")


class Trainer(Updates):
    """transformers' Trainer, with its arguments.

        trainer = fzero.hf.Trainer(model=model, args=TrainingArguments("out"), train_dataset=dataset)
        trainer.train()

    * `mesh`: a mesh of torch, or a `VirtualMesh` to run all ranks in this process, where each batch of this process is
      cut over the ranks. By default all ranks lie along one axis, "fsdp".
    * `stage`: as in `fzero.shard`. By default 3, or what `deepspeed` or `fsdp_config` of the arguments says.
    * `tp`, `ep`, `sp`, `plan`, `capacity`: axes of `mesh`, rules and room for tokens, as in `fzero.hf.parallel`. Ranks
      along these axes take the same batches, but for `ep` with a `capacity` (docs/hf_parallel.md).
    * `quantize`: "nf4", "nf4-dq" (double quantization) or "int8", or a dict of keywords of `fzero.quantize`: frozen
      weights of the base model are held and gathered as codes, as in QLoRA.

    `model` may be what `fzero.hf.from_pretrained` returns; its `params` become unusable, as those that a step updates.
    The values of any other model are those of rank 0. They move into slices: `trainer.model` is `model` without its
    values, and a use of its old values raises an `FzeroError`. `trainer.sharded` is the state: parameters and optimizer
    state, trees of `Sharded` leaves.

    `compute_loss` of transformers, or of a subclass, is traced, so it is a pure function of its arguments. torch's
    optimizer holds groups of parameters and their rates, which a schedule moves; each update is a program.

    Raises:
        FzeroError: for an argument or an optimizer that is not supported; with `tp`, `ep`, `sp` as `fzero.hf.parallel`.
    """

    _allowed: Collection[str] = ()  # of the TrainingArguments that are refused by name

    @check_arguments
    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *more: Any,
        mesh: Any = None,
        stage: int | None = None,
        quantize: Any = None,
        tp: Axis | None = None,
        ep: Axis | None = None,
        sp: Axis | None = None,
        plan: TensorPlan | None = None,
        capacity: Capacity = "same",
        **named: Any,
    ) -> None:
        self._coding, self._wish = read_quantize(quantize), Wish(tp, ep, sp, plan, capacity)
        self.mesh, self._is_given = mesh, mesh is not None or isinstance(model, Pretrained)
        self._groups: list[Group] = []
        self._options: list[dict[str, Any]] = []  # of the groups of torch's optimizer, which an update takes once
        self._has_warned = False  # of padding
        self._wrapped: Wrapped | None = None
        self._generator: Generator | None = None
        self._structure: Any = None  # the model that `sharded` has the values of
        pretrained = model if isinstance(model, Pretrained) else None
        if pretrained is not None:
            self._wish = choose_wish(self._wish, pretrained.wish)
            self.mesh = pretrained.mesh if self.mesh is None else self.mesh
        check_mesh_of(self._wish, self.mesh)
        self.mesh = self._wish.lay_state(self.mesh)
        args = transformers.TrainingArguments("tmp_trainer") if args is None else args  # as transformers
        device = args.device.type if isinstance(args, transformers.TrainingArguments) else None  # makes the group
        if self.mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            self.mesh = make_mesh(find_local_rank(args), PORT, None, device)
        with tell_others(self._members, CONSTRUCT):
            self._construct(pretrained, model, args, stage, *more, **named)

    def _construct(
        self, pretrained: Pretrained | None, model: Any, args: Any, stage: int | None, *more: Any, **named: Any
    ) -> None:
        """`__init__` of a rank. An error in here is one on all ranks."""
        check_type(args)
        self._meet(CONSTRUCT, lambda: [*self._list_own(stage), *list_arguments(args)])
        check_stage(3 if stage is None else stage)
        check_training_arguments(args, self._allowed)
        self._plan = make_plan(args, stage)
        self.stage = self._plan.stage
        if pretrained is not None:
            self._take(pretrained)
        elif isinstance(model, nn.Module):
            check_model(model)
            check_values(model)
        elif model is not None:
            raise refuse_model("model", model)
        with hide(args):
            super().__init__(model if pretrained is None else pretrained.model, args, *more, **named)
        self._memory_tracker.__class__ = MemoryTracker
        check_plugins(self)
        if self._plan.scaler is not None:
            self.accelerator.scaler = Scaler(self._find_scale, self._drop)
        spread = EVENLY if self._is_given else find_spread(self._plan, args)
        if self.mesh is None or spread != EVENLY:
            self.mesh = make_mesh(find_local_rank(args), PORT, None, args.device.type, spread=spread)
        check_mesh(self._plan, args, mesh_shape(self.mesh))
        self._adopt()
        if pretrained is not None:  # nothing is refused from here on
            spend_model(self.model, self.args.device, refuse_use)

    def _list_own(self, stage: int | None) -> list[str]:
        """A line for each argument that transformers' Trainer lacks, but the mesh."""
        coding = {name: "a function" if callable(x) else x for name, x in (self._coding or {}).items()}
        sharing = [f"configuration {name}: {value}" for name, value in self._wish._asdict().items()]
        return [f"configuration stage: {stage}", f"configuration quantize: {coding or None}", *sharing]

    def _take(self, pretrained: Pretrained) -> None:
        """Train parameters that are in slices already."""
        check_model(pretrained.model)
        check_values(pretrained.model)
        pretrained.check_mesh(self.mesh)
        buffers = partition_buffers(pretrained.model, lower_modes(pretrained.model).buffers, pretrained.mesh)
        check_sharable(self._wish, pretrained.model, buffers)
        self._sharing = find_sharing(pretrained.model, self._wish, pretrained.mesh)
        params = place(self._quantize(pretrained.params, pretrained.model), self._plan)
        self.mesh, self.sharded = pretrained.mesh, State(params=params, buffers=buffers)
        self._structure, self._held = pretrained.model, pretrained.partition

    def _adopt(self) -> None:
        """Cut the parameters of `self.model` into slices, unless this was done."""
        if self.model is self._structure:
            return
        if self.model_init is None:
            check_same(self.model, self._structure)
        check_model(self.model)
        check_values(self.model)
        self._meet("the model of a Trainer", lambda: list(list_model(self.model)))
        if self._plan.is_checkpointed:
            enable_checkpointing(self.model)
        self._groups = [] if self.optimizer is None else convert_optimizer(self.optimizer, self.model)
        store = find_store(self.model)
        lowered = lower_modes(self.model)
        check_sharable(self._wish, self.model, lowered.buffers)
        self._sharing = find_sharing(self.model, self._wish, self.mesh)
        self._held = {"split": self._sharing.split or None, **self._plan.held}
        params = partition_model(self.model, lowered.params, store, self.mesh, **self._held)
        params = self._quantize(params, copy_without_values(self.model))
        self.sharded = State(params=params, buffers=partition_buffers(self.model, lowered.buffers, self.mesh))
        self._wrapped = None
        spend_model(self.model, self.args.device, refuse_use)
        self._structure = self.model

    def _quantize(self, params: tree.Tree, structure: nn.Module) -> tree.Tree:
        """Parameters in slices, with the frozen ones as codes that the arguments ask for."""
        settings = self._plan.settings
        if self._coding is not None:
            return quantize_base(params, structure, self._coding)
        return quantize_frozen(params) if settings is not None and settings.quantizes_frozen else params

    def call_model_init(self, trial: Any = None) -> Any:
        """As transformers' `call_model_init`: a new model of `model_init`."""
        made = super().call_model_init(trial)
        if not isinstance(made, nn.Module):
            raise refuse_model("model_init", made)
        return made

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: slices alone go to the device."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """What the loop calls. A training run makes its programs anew: it may have changed the structure, by
        activation checkpointing for example."""
        self._adopt()
        if self._wrapped is None or training:
            check_frozen(self.model, self.sharded.params)
            share = functools.partial(share_forwards, sharing=self._sharing)
            lowered = LiveModel(self.model, tree.paths(self.sharded.buffers), share)
            self._wrapped = self._compile_evaluation(carry_buffers(lowered.evaluate, lowered.buffers))
            if training:
                self._compile_training(carry_buffers(lowered.train, lowered.buffers))
        return self._wrapped

    @property
    def _how(self) -> dict[str, Any]:
        """How programs are made: keywords of `fzero.shard`."""
        return self._plan.how

    def _compile(self, what: str, function: Callable[..., Any], *, has_batch: bool = False) -> Any:
        data = self._data if has_batch else self._data_of_state
        return compile_function(function, self.mesh, title=f"Trainer: {what}", data=data, **self._how)

    def _compile_evaluation(self, evaluate: Call) -> Wrapped:
        """The model whose calls compute outputs in evaluation mode."""

        def forward(params: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
            output = check_whole(self._call(Bound(evaluate, params, buffers), *args, **kwargs))
            # a number would become the mean over ranks; one element stays this rank's own
            return tree.map(lambda x: x.reshape(1) if isinstance(x, Tensor) and not x.ndim else x, output)

        self._forward = self._compile("evaluation step", forward, has_batch=True)
        return Wrapped(self.model, self._infer)

    def _compile_training(self, train: Call) -> None:
        """Make the programs of an update."""
        model = self.model

        def share(params: Any, buffers: Any, inputs: Any, items: Any, steps: int | None) -> tuple[Tensor, Any]:
            called = Bound(train, params, buffers)
            bound = Wrapped(model, functools.partial(self._call, called))
            held, self.state = self.state, TracedState(self.state)
            try:
                loss = self.compute_loss(bound, dict(inputs), num_items_in_batch=items)
            finally:
                self.state = held
            loss = loss if steps is None else loss / steps
            return loss, (loss, average_buffers(called.buffers))

        def clip(sums: Any) -> tuple[Any, Tensor]:
            return clip_to_norm(sums, self.args.max_grad_norm)

        def update(params: Any, opt_state: Any, sums: Any, rates: Any) -> tuple[Any, Any]:
            updates, opt_state = self._make(rates["learning_rate"]).update(sums, opt_state, params)
            return optim.apply_updates(params, updates), opt_state

        begin, add = make_sums(share)
        self._begin, self._add = (self._compile("training step", each, has_batch=True) for each in (begin, add))
        self._clip = self._compile("clipping of gradients", clip)
        self._norm = self._compile("norm of gradients", optim.global_norm)
        self._update = self._compile("update", update)
        if self._plan.scaler is not None:
            self._unscale = self._compile("unscaling of gradients", make_unscale(self._plan.scaler))
        self._sums: Any = None  # of gradients, since the last update

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The output of a function of the model in the dtype of compute, in float32 as accelerate returns it."""
        if self._plan.compute is not None:
            cast = self._plan.cast
            function = function.decorate(cast) if isinstance(function, Bound) else cast(function)
        return call_narrow(function, self.args.device.type, self._plan.autocast, *args, **kwargs)

    def _infer(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self._wrapped is not None and self._wrapped.training:
            raise refuse_gradients()
        padded = self._pad(kwargs)
        if "num_items_in_batch" in padded:
            padded["num_items_in_batch"] = self._share_items(padded["num_items_in_batch"])
        output = self._forward(self.sharded.params, self.sharded.buffers, args, padded)
        if isinstance(output, dict) and isinstance(output.get("loss"), Tensor):
            output["loss"] = output["loss"].mean()  # on a virtual mesh it has one element a rank
        config = getattr(self.model, "config", None)
        sizes = [x for x in vars(self.model if config is None else config).values() if isinstance(x, int)]
        return cut_to_own(output, kwargs, padded, self.label_names, sizes)

    def _pad(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs with the lengths of the longest rank."""
        return pad_to_longest(inputs, self._members, self.label_names, self._pad_token, self._structure)

    @property
    def _pad_token(self) -> int:
        """What stands behind the tokens of a row that is too short."""
        token = getattr(getattr(self.model, "config", None), "pad_token_id", None)
        if token is None:
            token = getattr(self.processing_class, "pad_token_id", None)
        return 0 if token is None else token

    def generate(self, *args: Any, **named: Any) -> Any:
        """What `trainer.model.generate` of transformers returns for these arguments, from the present parameters. All
        ranks call `generate` together, each with its own prompts (`fzero.hf.Generator`).

        Raises:
            FzeroError: for a model without `generate`, or with running statistics; where another rank raises an error.
        """
        self._adopt()
        if self.sharded.buffers is not None:
            problem = f"{type(self.model).__name__} has running statistics, which generate does not read"
            way_out = "save_model(folder), and call generate of fzero.hf.from_pretrained(folder)"
            raise FzeroError("generate", problem, way_out)
        if self._generator is None or self._generator.given is not self.model:
            how = {**self._wish.of_equal_examples(), **self._how}
            self._generator = Generator(self.model, self.mesh, call=self._call, **how)
        return self._generator(self.sharded.params, *args, **named)

    def merge_and_unload(self) -> Pretrained:
        """The base model with the present adapters as part of its weights, in slices: `Pretrained.merge_and_unload`.
        All ranks call it together.

            trainer.merge_and_unload().save_pretrained("folder")

        Raises:
            FzeroError: for a model with running statistics; as `Pretrained.merge_and_unload`.
        """
        self._meet("trainer.merge_and_unload")
        refuse_merge(self._wish, self.model)
        self._adopt()
        if self.sharded.buffers is not None:
            problem = f"{type(self.model).__name__} has running statistics, which are not in slices"
            raise FzeroError("merge_and_unload", problem, "save_model(folder), and merge with peft")
        return join_slices(copy_without_values(self.model), self.sharded.params, self.mesh).merge_and_unload()

    # gradients

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The loss of a batch, the mean over ranks, after its gradients were added to those of the update."""
        self.model.train()  # as in transformers: a loss may look
        given = self._prepare_inputs(inputs)
        self._warn_of_padding(given, inputs := self._pad(given))
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            counts = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            is_scaled = counts or self.compute_loss_func is not None
        steps = None if is_scaled else self.current_gradient_accumulation_steps
        named = {"inputs": inputs, "items": self._share_items(num_items_in_batch), "steps": steps}
        held = self.sharded
        if self._sums is None:
            (loss, buffers), self._sums = self._begin(held.params, held.scale, (held.buffers,), named)
        else:
            (loss, buffers), self._sums = self._add(held.params, self._sums, held.scale, (held.buffers,), named)
        self.sharded = held._replace(buffers=buffers)
        return loss.to(self.args.device)

    def _warn_of_padding(self, given: Mapping[str, Any], padded: Mapping[str, Any]) -> None:
        """Say once that a loss of the user's own sees padding that the collator did not make."""
        is_own = self.compute_loss_func is not None or type(self).compute_loss is not Plain.compute_loss
        shapes = {name: x.shape for name, x in given.items() if isinstance(x, Tensor)}
        if is_own and not self._has_warned and any(padded[name].shape != shape for name, shape in shapes.items()):
            self._has_warned = True
            _log.warning(
                "Batches are padded to the longest of all ranks, with -100 in labels and 0 in masks. compute_loss is "
                "not that of transformers: a loss that counts padding changes. Mask the loss, or let the collator pad "
                "to one length"
            )

    def _share_items(self, items: Any) -> Any:
        """The count of items that a rank's loss is divided by. Virtual ranks each take their part of a batch of this
        process, and the mean of their losses needs their part of the count."""
        ratio = self._count_parts()
        return items if items is None or ratio == 1 else items / ratio


Trainer.__init__.__signature__ = join_signatures(Plain.__init__, Trainer.__init__)  # type: ignore[attr-defined]
