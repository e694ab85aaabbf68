"""Pretrained: a model of files in slices, which no rank holds whole, and its files again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from fzero import build, checkpoint, lower, tree
from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.mesh import lay_state
from fzero.hf.adapters import add_adapters, gather_adapters, has_adapters, save_adapters
from fzero.hf.codes import quantize_base, read_quantize, suggest
from fzero.hf.generation import Generator
from fzero.hf.merging import dequantize_leaves, list_leaves, merge_adapters
from fzero.hf.sharing import check_sharable, find_sharing, share_forwards
from fzero.hf.styles import Axis
from fzero.hf.tensor_plans import TensorPlan
from fzero.hf.wishes import Capacity, Wish, check_mesh_of
from fzero.ranks.live import find_ranks
from fzero.ranks.together import do_together, gather_words
from fzero.training.meshes import PORT, find_local_rank, make_mesh
from fzero.training.models import copy_without_values
from fzero.values.lowering import Apply


class Pretrained(NamedTuple):
    """A model in slices.

    `model` has the structure, with parameters on the meta device, and `params` the values. `apply(params, ...)` is the
    model's function, in evaluation mode. `generator(params, ...)` is `generate` with other parameters than these.
    `wish` says along which axes ranks share the model, and `partition` has the keywords of `fzero.partition`.
    """

    model: nn.Module
    params: tree.Tree
    apply: Apply
    mesh: Any
    generator: Generator
    wish: Wish = Wish()
    partition: Mapping[str, Any] = MappingProxyType({})

    def check_mesh(self, mesh: Any) -> None:
        """Refuse another mesh than that of the slices; None is none."""
        if mesh is not None and find_ranks(mesh) is not find_ranks(self.mesh):
            raise FzeroError("mesh", "is not that of from_pretrained", "leave it out")

    def generate(self, *args: Any, **named: Any) -> Any:
        """What transformers' `model.generate` returns for these arguments. All ranks call `generate` together, each
        with its own prompts (`fzero.hf.Generator`).

        Raises:
            FzeroError: for a model without `generate`; where another rank raises an error.
        """
        return self.generator(self.params, *args, **named)

    def merge_and_unload(self) -> Pretrained:
        """The base model with the adapters as part of its weights, as `merge_and_unload` of peft returns it, in slices.
        Codes become numbers. All ranks call together. This value stays as it is. The merged model is one whose layers
        ranks do not share: its slices lie along all axes of the mesh.

        Raises:
            FzeroError: for virtual tokens, and for adapters of two modules that share a weight; for a model whose
                layers ranks share, and that has no adapters.
        """
        refuse_merge(self.wish, self.model)
        model, params = merge_adapters(self.model, self.params, self.mesh)
        return join_slices(model, params, self.mesh)

    @check_arguments
    def save_pretrained(self, folder: str | os.PathLike[str], params: tree.Tree | None = None, **how: Any) -> None:
        """Write parameters, by default those of this value, as a folder that `from_pretrained` reads. All ranks call
        `save_pretrained` together; each writes its own slices. Codes become numbers. Of a model of peft rank 0 writes
        the adapters, as peft does. `how` are keywords of `fzero.checkpoint.export_hf`.

        Raises:
            FzeroError: for a folder that exists; for `how` beside adapters; as `fzero.checkpoint.export_hf`.
        """
        params = self.params if params is None else params
        if not has_adapters(self.model):
            checkpoint.export_hf(folder, dequantize_leaves(params, self.mesh), self.model, **how)
            return
        if how:
            way_out = "leave it out, or save merge_and_unload()"
            raise FzeroError(
                f"save_pretrained: {next(iter(how))}", "is given, and files of adapters are peft's", way_out
            )
        on = find_ranks(self.mesh)
        whole = gather_adapters(self.model, list_leaves(params), rank=on.ranks[0])

        def write() -> None:
            if on.number == 0:
                if Path(folder).exists():
                    raise FzeroError(str(folder), "exists", "remove it, or give another folder")
                save_adapters(Path(folder), self.model, whole)

        gather = gather_words(on.members, "save_pretrained", f"to {folder}")
        do_together(gather, write, str(folder), "write files", "mend that, and save again")


@check_arguments
def from_pretrained(
    name_or_path: str | os.PathLike[str],
    mesh: Any = None,
    *,
    cls: Any = None,
    seed: int = 0,
    partition: Any = None,
    peft_config: Any = None,
    quantize: Any = None,
    tp: Axis | None = None,
    ep: Axis | None = None,
    sp: Axis | None = None,
    plan: TensorPlan | None = None,
    capacity: Capacity = "same",
    **named: Any,
) -> Pretrained:
    """The model of a folder, or of a name on the Hub, in slices.

        pretrained = fzero.hf.from_pretrained("folder", mesh)
        logits = fzero.shard(pretrained.apply, mesh)(pretrained.params, input_ids).logits  # with tp, data=("fsdp",)
        trainer = fzero.hf.Trainer(pretrained, args, train_dataset=dataset)

    All ranks call `from_pretrained` together. A rank holds its slices and one whole tensor, the one that is read, as in
    `fzero.build`. By default the mesh is one axis of all ranks.

    * `cls`: a class of transformers with `from_pretrained`, by default `AutoModelForCausalLM`.
    * `seed`: of weights that the files lack, such as a new head.
    * `partition`: a dict of keywords of `fzero.partition`, such as `{"unit": 256}` for an optimizer of 8 bits.
    * `peft_config`: a configuration of peft, whose adapters are put into the model: `peft.get_peft_model`.
    * `quantize`: "nf4", "nf4-dq" (double quantization) or "int8", or a dict of keywords of `fzero.quantize`: frozen
      weights of the base model become codes, with `peft_config` for QLoRA.
    * `tp`, `ep`, `sp`, `plan`, `capacity`: the axes of `mesh` whose ranks share layers, experts and the places of rows,
      further rules, and room for tokens, as in `fzero.hf.parallel`. A rank holds slices of its parts.
    * `named`: further arguments of `cls.from_pretrained`.

    Raises:
        FzeroError: for `device_map` and `quantization_config`, and for files that bitsandbytes quantized; for a `cls`
            that reads no files; as `fzero.build`, and with `tp`, `ep` or `sp` as `fzero.hf.parallel`; for
            `split` in `partition` beside these.
    """
    import transformers

    coding = read_quantize(quantize)
    _refuse_places(named)
    _refuse_codes(Path(name_or_path))
    wish = Wish(tp, ep, sp, plan, capacity)
    check_mesh_of(wish, mesh)
    if mesh is None:
        mesh = make_mesh(find_local_rank(None), PORT, None)
    chosen = transformers.AutoModelForCausalLM if cls is None else cls
    if not callable(getattr(chosen, "from_pretrained", None)):
        way_out = "give a class of transformers with from_pretrained, such as transformers.AutoModel"
        raise FzeroError("from_pretrained: cls", f"is {cls!r:.80}", way_out)
    made: list[nn.Module] = []
    how: dict[str, Any] = dict(partition or {})
    mesh = lay_state(mesh, how.pop("state")) if "state" in how else wish.lay_state(mesh)
    if wish.axes:
        if "split" in how:
            raise FzeroError("partition: split", "is given, and tp, ep or sp say how to split", "give rules as plan=")
        how["split"] = {}  # that of the plan, once there is a model

    def construct() -> nn.Module:
        model = chosen.from_pretrained(name_or_path, **named)
        made.append(model if peft_config is None else add_adapters(model, peft_config).eval())
        check_sharable(wish, made[0], None)
        sharing = find_sharing(made[0], wish, mesh)
        if wish.axes:
            how["split"].update(sharing.split)
        stack.enter_context(share_forwards(made[0], sharing))
        return made[0]

    with ExitStack() as stack:
        params, apply = build(construct, mesh, seed=seed, **how)
    model = copy_without_values(made[0])
    if coding is not None:
        params = quantize_base(params, model, coding)
    return Pretrained(model, params, apply, mesh, Generator(model, mesh, **wish.of_equal_examples()), wish, how)


def join_slices(model: Any, params: tree.Tree, mesh: Any) -> Pretrained:
    """The value of a model without values, and its parameters in slices."""
    return Pretrained(model, params, lower(model.eval())[1], mesh, Generator(model, mesh))


def refuse_merge(wish: Wish, model: Any) -> None:
    """Refuse to merge a model without adapters whose layers ranks share: the merged one is a model that they do not."""
    if wish.axes and not has_adapters(model):
        problem = f"the model is shared along {wish.axes}, and has no adapters"
        raise FzeroError("merge_and_unload", problem, "save it as it is, by save_model or save_pretrained")


def _refuse_places(named: Mapping[str, Any]) -> None:
    """Refuse arguments that say where values lie, and in which form."""
    if named.get("device_map") is not None:
        problem = f"is {named['device_map']!r:.80}, and slices lie where the mesh says"
        raise FzeroError("from_pretrained: device_map", problem, "leave it out")
    config = named.get("quantization_config")
    if config is not None:
        problem = f"is a {type(config).__name__}, which packs whole weights"
        raise FzeroError("from_pretrained: quantization_config", problem, f"give {suggest(config)} in its place")


def _refuse_codes(folder: Path) -> None:
    """Refuse the files of a model that bitsandbytes quantized."""
    file = folder / "config.json"
    config = json.loads(file.read_text()).get("quantization_config") if file.is_file() else None
    if config and config.get("quant_method") == "bitsandbytes":
        way_out = f"give the files of the model in full precision, and {suggest(config)}"
        raise FzeroError(str(file), "says that the weights are codes of bitsandbytes", way_out)
