"""Parallelize: a model of transformers becomes parameters in parts and slices, and its function, by its own plans."""

from __future__ import annotations

from typing import Any

from torch import nn

from fzero import FzeroError, lower, partition, tree
from fzero.base.arguments import check_arguments
from fzero.base.mesh import lay_state
from fzero.hf.pipelines import make_stages
from fzero.hf.sharing import find_sharing, share_forwards
from fzero.hf.styles import Axis
from fzero.hf.tensor_plans import TensorPlan
from fzero.hf.wishes import Capacity, Wish
from fzero.values.lowering import Apply


@check_arguments
def parallel(
    model: nn.Module,
    mesh: Any,
    *,
    tp: Axis | None = "tp",
    ep: Axis | None = None,
    sp: Axis | None = None,
    pp: Axis | None = None,
    num_microbatches: int | None = None,
    plan: TensorPlan | None = None,
    capacity: Capacity = "same",
    rotate: bool = False,
    **how: Any,
) -> tuple[tree.Tree, Apply]:
    """`(params, apply)`: `fzero.lower(model)` with parameters that `fzero.partition` has split and cut on a mesh.

        params, apply = fzero.hf.parallel(model, mesh, tp="tp")
        step = fzero.shard(train_step, mesh, data=("fsdp",))

    The ranks along `tp` share layers as the model's own `tp_plan` says, and the ranks along `ep` share experts, as its
    `ep_plan` says. The ranks along `sp` each compute a part of the places of every row, but for attention, which sees
    all places. All three are model axes: their ranks take the same examples, but for `ep` with `capacity`. An axis is a
    name, a tuple of names, or None for no such ranks. transformers has plans for most decoders; GPT-2, BERT, T5 and
    Whisper have plans of fzero.

    With `capacity` the ranks along `ep` take different examples, so `data` of `fzero.shard` names `ep`: each token goes
    to the ranks of its experts, and what they make of it comes back (`fzero.parallel.experts`). A rank has room for
    `capacity` times the mean of the tokens that come; None has room for all. Where more come, the next call of the step
    raises. `fzero.parallel.experts` says what travels.

    The ranks along `pp` have stages of the model: of L equal layers in one list, L / N each, through which the rows of
    a batch go in `num_microbatches` equal parts, by default as many as ranks (`fzero.parallel.pipeline`). `pp` is a
    model axis, in front of `tp` and `ep` in the mesh. Leaves of layers are stacked in `params`, [L, ...] at
    `model.layers.mlp...`, and `fzero.hf.save_pretrained` writes files of them. The embedding and the head are cut by
    words over the ranks, where these divide them. Layers are computed again in the backward pass.

    With `sp` the axis of `tp`, ranks have all places in the layers that they share, and each has its own between them:
    the residual stream, norms and the loss (the sequence parallelism of Megatron). With `sp=("sp", "tp")` they cut the
    parts that ranks along the other axes have: in layers they have such a part, and attention goes around the others.

    With `rotate` keys and values go around the ranks along `sp`, and a rank has those of one other at a time: for rows
    so long that keys of all places do not fit, and ranks that do not divide the heads
    (`fzero.parallel.ring_attention`). Ranks have places from the head and the tail of a row, so that a causal mask
    gives all the same work.

    `plan` adds rules to these, or replaces them: names of modules and parameters, in which "*" is a number, and styles
    of transformers, such as `{"lm_head": "replicate"}`. `how` are keywords of `fzero.partition`. Without `state` among
    them, state lies along the axes of the mesh for it, and along `sp`, but for axes of `tp`, and `ep` with `capacity`:
    no rank along these has a copy of another's slices.

    The model stays as it is. Outside of `shard`, `apply` is its function on one device.

    Raises:
        FzeroError: for a model without a plan; for a rule that names nothing, and a style that is not known; for heads,
            experts, or another dim that the ranks do not divide; for a weight that is tied to one with another rule;
            for `rotate` without `sp`, or where `sp` is `tp`, and for an attention that is no softmax of scores by
            places; with `sp` for a type of model, an attention or noise that was not tried on parts of a sequence, and
            for axes that have some of those of `tp` and not all, or one of `ep`; with `pp` for layers that differ, that
            the ranks do not divide, or that draw random numbers, and beside `sp` and `capacity`; for `capacity` without
            `ep`, or where `ep` is an axis of `tp`; as `fzero.lower` and `fzero.partition`. A step raises it for
            examples that are the same along an axis, and should not be, or the other way round; for inputs, outputs and
            losses of which ranks cannot have parts.
    """
    if "split" in how:
        raise FzeroError("split", "is given, and hf.parallel finds it from the plan", "give rules as plan=")
    wish = Wish(tp, ep, sp, plan, capacity, rotate)
    if rotate and sp is None:
        raise FzeroError("rotate", "is given without sp", 'name the axis, as in sp="sp"')
    if pp is not None:
        return make_stages(model, mesh, wish, pp, num_microbatches, how)
    if num_microbatches is not None:
        raise FzeroError("num_microbatches", "is given without pp", 'name the axis, as in pp="pp"')
    mesh = lay_state(mesh, how.pop("state")) if "state" in how else wish.lay_state(mesh)
    sharing = find_sharing(model, wish, mesh)
    with share_forwards(model, sharing):
        params, apply = lower(model)
    return partition(params, mesh, split=sharing.split or None, **how), apply
