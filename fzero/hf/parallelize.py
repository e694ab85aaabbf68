"""Parallelize: a model of transformers becomes parameters in parts and slices, and its function, by its own plans."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from fzero import FzeroError, axis_size, lower, partition, tree
from fzero.base.arguments import check_arguments
from fzero.hf.head_counts import check_counts
from fzero.hf.styles import Axis, Cut, find_style
from fzero.hf.tensor_plans import Rule, TensorPlan, generalize, list_rules
from fzero.ranks.live import find_ranks
from fzero.values.lowering import Apply


@check_arguments
def parallel(
    model: nn.Module,
    mesh: Any,
    *,
    tp: Axis | None = "tp",
    ep: Axis | None = None,
    plan: TensorPlan | None = None,
    **how: Any,
) -> tuple[tree.Tree, Apply]:
    """`(params, apply)`: `fzero.lower(model)` with parameters that `fzero.partition` has split and cut on a mesh.

        params, apply = fzero.hf.parallel(model, mesh, tp="tp")
        step = fzero.shard(train_step, mesh, data=("fsdp",))

    The ranks along `tp` share layers as the model's own `tp_plan` says, and the ranks along `ep` share experts, as its
    `ep_plan` says. Both are model axes: their ranks take the same examples. An axis is a name, a tuple of names, or
    None for no such ranks. transformers has plans for most decoders; GPT-2, BERT, T5 and Whisper have plans of fzero.

    `plan` adds rules to these, or replaces them: names of modules and parameters, in which "*" is a number, and styles
    of transformers, such as `{"lm_head": "replicate"}`. `how` are keywords of `fzero.partition`.

    The model stays as it is. Outside of `shard`, `apply` is its function on one device.

    Raises:
        FzeroError: for a model without a plan; for a rule that names nothing, and a style that is not known; for heads,
            experts, or another dim that the ranks do not divide; for a weight that is tied to one with another rule; as
            `fzero.lower` and `fzero.partition`.
    """
    if "split" in how:
        raise FzeroError("split", "is given, and hf.parallel finds it from the plan", "give rules as plan=")
    sizes = find_ranks(mesh).mesh
    axes = {axis: sizes.join((axis,) if isinstance(axis, str) else axis) for axis in (tp, ep) if axis is not None}
    for axis in axes.values():
        if sizes.shard_axis in sizes.split(axis):
            way_out = 'give the mesh an axis "fsdp" besides, of one rank if need be'
            raise FzeroError(repr(axis), f"is the axis over which {sizes} cuts all state", way_out)
    rules = _agree_on_ties(model, list_rules(model, plan, tp, ep))
    count = {axis: sizes.size(name) for axis, name in axes.items()}
    check_counts(model, rules, count)
    with _replace_forwards(model, rules):
        params, apply = lower(model)
    split = _find_splits(model, rules)
    return partition(params, mesh, split=split or None, **how), apply


@contextmanager
def _replace_forwards(model: nn.Module, rules: Mapping[str, Rule]) -> Iterator[None]:
    """Within this context, modules run with the effects of their rules."""
    replaced: list[tuple[nn.Module, Any]] = []

    def replace(module: nn.Module, run: Callable[..., Any]) -> None:
        replaced.insert(0, (module, vars(module).get("forward")))
        module.forward = run

    try:
        for name, module in model.named_modules():
            rule = rules.get(name)
            if rule is not None and rule.style.effect is not None:
                replace(module, _run_with(rule, module, module.forward))
        replace(model, _name_shapes(model, {rule.axis for rule in rules.values()}))
        yield
    finally:
        for module, before in replaced:
            if before is None:
                del module.forward
            else:
                module.forward = before


def _run_with(rule: Rule, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    effect, axis = rule.style.effect, rule.axis
    assert effect is not None

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return effect(module, axis, forward, *args, **kwargs)

    return run


def _name_shapes(model: nn.Module, axes: Iterable[Axis]) -> Callable[..., Any]:
    """The forward of a model, with the module where shapes do not fit on ranks that have parts."""
    forward = model.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            is_of_shapes = any(word in str(error) for word in ("shape", "size", "dim"))
            if type(error) is not RuntimeError or not is_of_shapes or all(axis_size(axis) == 1 for axis in axes):
                raise
            problem = f"its forward does not fit parts of its weights: {str(error).splitlines()[0][:300]}"
            name = _find_module(model, error) or type(model).__name__
            raise FzeroError(name, problem, "leave its layers whole: plan={name: 'replicate'}") from error

    return run


def _find_module(model: nn.Module, error: BaseException) -> str:
    """The innermost module whose forward raised an error."""
    names = {id(module): name for name, module in model.named_modules()}
    found, frame = "", error.__traceback__
    while frame is not None:
        found = names.get(id(frame.tb_frame.f_locals.get("self"))) or found
        frame = frame.tb_next
    return found


# leaves

Use = tuple[nn.Module, str, str]
"""A module, its name, and the name by which it holds a leaf."""


def _list_uses(model: nn.Module) -> dict[int, tuple[Tensor, list[Use]]]:
    """The places of each leaf, a tied one has several."""
    found: dict[int, tuple[Tensor, list[Use]]] = {}
    for path, module in model.named_modules():
        for name, leaf in module.named_parameters(recurse=False):
            found.setdefault(id(leaf), (leaf, []))[1].append((module, path, name))
    return found


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _find_rule(rules: Mapping[str, Rule], path: str, name: str) -> Rule | None:
    """The rule of a leaf: its own, else the one of its module."""
    return rules.get(_join(path, name), rules.get(path))


def _cut(rules: Mapping[str, Rule], leaf: Tensor, use: Use) -> tuple[Axis, Cut] | None:
    module, path, name = use
    rule = _find_rule(rules, path, name)
    cut = None if rule is None else rule.style.cut(module, name, leaf)
    return None if rule is None or cut is None else (rule.axis, cut)


def _agree_on_ties(model: nn.Module, rules: dict[str, Rule]) -> dict[str, Rule]:
    """Rules in which all modules that share a leaf have the same parts of it.

    An embedding, or a head, without a rule gets the one that fits the other. One with the rule to be whole makes the
    other whole.
    """
    rules = dict(rules)
    for leaf, uses in _list_uses(model).values():
        if len(uses) == 1:
            continue
        cuts = {use[1]: _cut(rules, leaf, use) for use in uses}
        given = {cut for cut in cuts.values() if cut is not None}
        if not given:
            continue
        wants_whole = any(cuts[path] is None and _find_rule(rules, path, name) is not None for _, path, name in uses)
        if wants_whole or len(given) > 1:
            _make_whole(rules, uses)
            continue
        axis, cut = next(iter(given))
        for module, path, _ in uses:
            style = _fit(module, cut) if cuts[path] is None else None
            if style is not None:
                found = find_style(style)
                assert found is not None
                rules[path] = Rule(style, found, axis)
    return rules


def _fit(module: nn.Module, cut: Cut) -> str | None:
    """The style by which a module whose input and output are whole has parts of a leaf."""
    if isinstance(module, nn.Embedding):
        return "embedding_rowwise" if cut == (0, 1) else "embedding_colwise"
    if isinstance(module, nn.Linear):
        return "colwise_gather_output" if cut == (0, 1) else "rowwise_split_input"
    return None


def _make_whole(rules: dict[str, Rule], uses: list[Use]) -> None:
    for _, path, name in uses:
        rule = _find_rule(rules, path, name)
        if rule is not None and not rule.style.is_whole:
            others = ", ".join(_join(*use[1:]) for use in uses if use[1] != path)
            problem = f"has the style {rule.name!r}, and is one leaf with {others}, which has another"
            raise FzeroError(_join(path, name), problem, "give both one rule, as plan=")
        rules.pop(path, None)
        rules.pop(_join(path, name), None)


def _find_splits(model: nn.Module, rules: Mapping[str, Rule]) -> dict[str, tuple[Any, ...]]:
    """The `split` of `fzero.partition`. Layers with the same parts are one rule."""
    cuts: dict[str, tuple[Any, ...] | None] = {}
    first = {id(leaf): path for path, leaf in model.named_parameters()}
    for key, (leaf, uses) in _list_uses(model).items():
        found = next((cut for use in uses if (cut := _cut(rules, leaf, use)) is not None), None)
        cuts[first[key]] = None if found is None else (found[0], *found[1])
    split: dict[str, tuple[Any, ...]] = {}
    done = set[str]()
    for path, cut in cuts.items():
        if cut is None or path in done:
            continue
        pattern = generalize(path)
        alike = [other for other in cuts if fnmatchcase(other, pattern)] if pattern != path else [path]
        pattern = pattern if all(cuts[other] == cut for other in alike) else path
        split[pattern] = cut
        done.update(alike if pattern != path else [path])
    return split
