"""Strategy: how Lightning's Trainer trains a model in slices.

Works with `import lightning` and with `import pytorch_lightning`, whichever the script has imported.
"""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fzero import tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.mesh import SHARD_AXIS
from fzero.hf.prepared import How, Prepared, Words
from fzero.program.plan import check_stage

if TYPE_CHECKING or ("pytorch_lightning" not in sys.modules or "lightning.pytorch" in sys.modules):
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy
else:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy

SLICES, REST = "slices", "lightning.ckpt"
"""What lies in the folder of a checkpoint: parameters and state of the optimizer, and all that Lightning keeps."""
PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")
WORDS = Words(
    owner="Lightning",
    prepare="trainer.fit",
    backward="training_step, or self.manual_backward,",
    clip="self.clip_gradients",
    save="trainer.save_checkpoint",
    read="trainer.save_checkpoint(path, weights_only=True) writes whole values; load and change a model before fit",
    clips="gradient_clip_val of the Trainer and self.clip_gradients clip gradients",
)


class Strategy(DDPStrategy):
    """A strategy of Lightning's Trainer: parameters, gradients and optimizer state are in slices.

        trainer = L.Trainer(strategy=fzero.lightning.Strategy(), devices=8, precision="bf16-mixed")
        trainer.fit(module, loader)

    A LightningModule is as it was for DDP: `training_step` calls its model, and `configure_optimizers` returns one
    optimizer of torch over its parameters. In slices is the child that has all parameters. Where several children have
    some, the LightningModule itself is, and it calls `self(...)`, its `forward`, and no child.

    * `mesh`: a mesh of torch, or a `VirtualMesh` to run all ranks in this process, where each batch of this process is
      cut over the ranks. By default all ranks lie along one axis, "fsdp".
    * `stage`, `compile`: as in `fzero.shard`.
    * `process_group_backend`, `timeout`, `start_method`: as in Lightning's `DDPStrategy`.

    A checkpoint is a folder, which any number of ranks reads; one of weights alone is a file of Lightning, with whole
    values. All ranks save together.

    Raises:
        FzeroError: for an unknown stage. In `fit`: for what is not supported, by name.
    """

    @check_arguments
    def __init__(
        self,
        *,
        mesh: Any = None,
        stage: int = 3,
        compile: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: str = "popen",
    ) -> None:
        check_stage(stage)
        named: Any = {"process_group_backend": process_group_backend, "timeout": timeout, "start_method": start_method}
        super().__init__(**named)
        self._given, self._stage, self._compile = mesh, stage, compile
        self._prepared: Prepared | None = None
        self._module: Any = None  # the LightningModule whose model this is
        self._prefix = ""  # of the model's parameters in those of the LightningModule
        self._returned: Any = None  # the loss that training_step returned last

    @property
    def mesh(self) -> Any:
        """The mesh of the ranks. Torch's process group has to be there."""
        if self._given is None:
            self._given = init_device_mesh(self.root_device.type, (self.world_size,), mesh_dim_names=(SHARD_AXIS,))
        return self._given

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    # set-up

    def setup(self, trainer: pl.Trainer) -> None:
        """Cut the model into slices, and take its optimizer. All ranks call it together."""
        module = self.lightning_module
        assert module is not None and self.accelerator is not None
        _check_trainer(trainer, self._layer_sync)
        self.accelerator.setup(trainer)
        is_new = self._module is not module
        if is_new:
            self.precision_plugin.convert_module(module)
        fits = trainer.state.fn == "fit"
        if fits:
            self.setup_optimizers(trainer)
        if is_new:
            self._prepare(module, trainer)
        if fits:
            self._take_optimizer()
        self.setup_precision_plugin()
        self.precision_plugin.clip_gradients = self._clip

    def _prepare(self, module: pl.LightningModule, trainer: pl.Trainer) -> None:
        name = _find_part(module)
        self._prefix = f"{name}." if name else ""
        part = module.get_submodule(name) if name else copy.copy(module)  # `copy` leaves the Trainer out
        how = How(self.mesh, self._stage, self.root_device, None, self._compile, WORDS)

        def find_share() -> float:
            return 1 / trainer.accumulate_grad_batches if module.automatic_optimization else 1.0

        prepared, self._module = Prepared(part, how, find_share), module
        self._prepared = prepared
        for child in module.children():  # metrics, say; the part lies where its slices do
            if not any(True for _ in child.parameters()):
                child.to(self.root_device)
        module.zero_grad = prepared.zero_grad
        if name:
            for parent in list(module.modules()):  # under each name that the model has
                for key, child in parent._modules.items():
                    if child is part:
                        parent._modules[key] = prepared.stand_in
            return

        def forward(*args: Any, **kwargs: Any) -> Any:
            part.training = module.training
            return prepared.stand_in(*args, **kwargs)

        module.forward = forward

    def _take_optimizer(self) -> None:
        optimizers: list[Any] = self._optimizers
        if len(optimizers) != 1:
            problem = f"returns {len(optimizers)} optimizers"
            way_out = "return one, with groups of parameters"
            raise FzeroError("configure_optimizers", problem, way_out)
        prepared, (optimizer,) = self._find(), optimizers
        prepared.drop_optimizer()
        prepared.take_optimizer(optimizer)
        optimizer.__class__ = _join_zero_grad(type(optimizer), prepared)  # Lightning's own optimizer inherits it
        self.optimizers = [optimizer]

    def _find(self) -> Prepared:
        assert self._prepared is not None
        return self._prepared

    # steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        self._returned = output.get("loss") if isinstance(output, Mapping) else output
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        module, precision = self.lightning_module, self.precision_plugin
        assert module is not None
        loss = precision.pre_backward(closure_loss, module)
        returned = self._returned if module.automatic_optimization else closure_loss
        self._returned = None  # Lightning's own loss is the returned one, divided by batches of an update
        is_own = type(module).backward is not pl.LightningModule.backward
        if args or kwargs or is_own or not self._find().take_loss(returned):
            with torch.autograd.set_multithreading_enabled(False):  # programs run in this thread, on GPUs too
                precision.backward(loss, module, optimizer, *args, **kwargs)
        return precision.post_backward(loss, module)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)  # parameters have no gradients there
        self._find().update(optimizer)
        return result

    def _clip(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        if clip_val > 0 and gradient_clip_algorithm == "value":
            self._find().clip_value(clip_val)
        elif clip_val > 0:
            self._find().clip_norm(clip_val)

    # checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What is not in slices. `save_checkpoint` knows whether values are asked for whole."""
        return dict(self._list_buffers())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder with slices, or for weights alone a file. All ranks call it together."""
        if storage_options is not None:
            raise FzeroError("storage_options", "is given, and slices are files of a folder", "leave it out")
        path = Path(self.broadcast(filepath))
        if "optimizer_states" not in checkpoint:
            whole = {f"{self._prefix}{name}": x for name, x in self._find().gather().items()}
            checkpoint["state_dict"] = {**checkpoint["state_dict"], **whole}
            self._write(path, lambda: self.checkpoint_io.save_checkpoint(checkpoint, path))
            return
        made = path.with_name(f"{path.name}.part")  # so that what has the name is complete
        self._write(path, lambda: shutil.rmtree(made, ignore_errors=True))
        self._find().save(made / SLICES)

        def finish() -> None:
            self.checkpoint_io.save_checkpoint(checkpoint, made / REST)
            shutil.rmtree(path, ignore_errors=True)
            made.rename(path)

        self._write(path, finish)

    def _list_buffers(self) -> dict[str, Tensor]:
        """The buffers that are not in slices: constants of the model, and those of modules beside it."""
        module, carried = self.lightning_module, tree.paths(self._find().state.buffers)
        assert module is not None
        in_slices = {f"{self._prefix}{path}" for path in carried}
        found = {
            f"{path}.{name}".lstrip("."): x
            for path, child in module.named_modules()
            for name, x in child.named_buffers(recurse=False)
            if name not in child._non_persistent_buffers_set
        }
        return {name: x for name, x in found.items() if name not in in_slices}

    def _write(self, path: Path, write: Callable[[], None]) -> None:
        """Call `write` on the first rank. All ranks return together, or raise."""
        self._find().write(path, WORDS.save, write)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the folder that `save_checkpoint` wrote, on any number of ranks."""
        path = Path(checkpoint_path)
        if not (path / SLICES).is_dir():
            problem = "has no slices of this model"
            way_out = "give a folder that this strategy saved, or load whole weights into the module before fit"
            raise FzeroError(str(path), problem, way_out)
        self._find().load(path / SLICES)
        return super().load_checkpoint(path / REST, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take buffers. `load_checkpoint` has read the slices."""
        buffers, given = self._list_buffers(), checkpoint["state_dict"]
        if strict and buffers.keys() != given.keys():
            name = min(buffers.keys() ^ given.keys())
            problem = "is in the module alone" if name in buffers else "is in the checkpoint alone"
            raise FzeroError(f"buffer {name}", problem, "load it into the module that was saved, or set strict_loading")
        for name in buffers.keys() & given.keys():
            buffers[name].copy_(given[name])

    def teardown(self) -> None:
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def _join_zero_grad(cls: Any, prepared: Prepared) -> Any:
    """A class of optimizers whose `zero_grad` drops the gradients of a model in slices."""

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        prepared.zero_grad()

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "zero_grad": zero_grad})


def _check_trainer(trainer: pl.Trainer, layer_sync: Any) -> None:
    """Refuse what of a Trainer is not supported."""
    if trainer.precision not in PRECISIONS:
        raise FzeroError("Trainer: precision", f"is {trainer.precision!r}", f"give one of {', '.join(PRECISIONS)}")
    if layer_sync is not None:
        problem = "is True, and statistics of batch norms are means over the ranks already"
        raise FzeroError("Trainer: sync_batchnorm", problem, "leave it out")


def _find_part(module: pl.LightningModule) -> str | None:
    """The name of the child that has all parameters. None where the LightningModule itself is the model.

    Raises:
        FzeroError: where there is neither.
    """
    names = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    if len(names) == 1 and not any(True for _ in module.parameters(recurse=False)):
        return names[0]
    if not names or type(module).forward is pl.LightningModule.forward:
        problem = f"has parameters in {', '.join(names)}" if names else "has no parameters in a child"
        way_out = "put what computes the output into one nn.Module, a child, or into forward, and call self(...)"
        raise FzeroError(type(module).__name__, problem, way_out)
    return None
