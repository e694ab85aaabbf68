"""Sharing: how ranks share the layers of a model: the parts of leaves, and what forwards join, by rules of plans."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn

from fzero import axis_index, axis_size, tree
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh, mesh_shape
from fzero.hf.adapter_plans import check_adapters, find_model
from fzero.hf.caches import find_caches, find_parts
from fzero.hf.head_counts import check_counts
from fzero.hf.losses import share_loss
from fzero.hf.places import find_blocks, keep_places
from fzero.hf.rotation import check_rotation
from fzero.hf.sequence import Parts, check_sequence, choose_way, cut_sequence
from fzero.hf.styles import Axis, Cut, Style, find_style, list_names, send_tokens
from fzero.hf.tensor_plans import Rule, generalize, list_rules
from fzero.hf.vocabulary import find_axis_of_logits, spread_vocabulary
from fzero.hf.wishes import Wish


class Sharing(NamedTuple):
    """How ranks share the layers of a model. `split` is that of `fzero.partition`, empty where no leaf has parts.
    `sequence` says which ranks have parts of a sequence, and how attention sees all of it."""

    rules: Mapping[str, Rule]
    split: Mapping[str, tuple[Any, ...]]
    sequence: Parts | None = None
    stages: Axis | None = None  # the axis of ranks that have stages of a pipeline


ALONE = Sharing({}, {})
"""Of a model whose layers each rank computes whole."""


def find_sharing(model: nn.Module, wish: Wish, mesh: Any, stages: Axis | None = None) -> Sharing:
    """How the ranks of a mesh share a model, whose layers are stages of a pipeline along the axis `stages`.

    Raises:
        FzeroError: as `fzero.hf.parallel`.
    """
    sizes = mesh_shape(mesh)
    axes = wish.find_axes(sizes)
    if axes:
        check_adapters(model)
    sequence = None
    if wish.sp is not None:
        sequence = _find_parts(find_model(model), wish, sizes)
    if wish.plan is not None and wish.tp is None and wish.ep is None:
        raise FzeroError("plan", "is given, and neither tp nor ep", 'name the axis, as in tp="tp"')
    if wish.tp is None and wish.ep is None and stages is None:
        return Sharing({}, {}, sequence)
    rules = list_rules(model, wish.plan, wish.tp, wish.ep) if (wish.tp, wish.ep) != (None, None) else {}
    if stages is not None:
        rules = spread_vocabulary(model, rules, stages, sizes)
    rules = _agree_on_ties(model, rules)
    if wish.sends:
        rules = _send_tokens(rules, wish)
    check_counts(model, rules, {x.axis: sizes.size(sizes.join(list_names(x.axis))) for x in rules.values()})
    return Sharing(rules, _find_splits(find_cuts(model, rules)), sequence, stages)


def _find_parts(model: Any, wish: Wish, mesh: VirtualMesh) -> Parts:
    """Which ranks have parts of a sequence, for a wish with `sp`.

    Raises:
        FzeroError: for a model that ranks cannot have parts of a sequence of, and one whose keys cannot be rotated.
    """
    assert wish.sp is not None
    check_sequence(model, wish.sp)
    if wish.around is None and wish.rotate:
        problem = "is given, and in attention ranks along sp, which is tp, have all places"
        raise FzeroError("rotate", problem, 'leave it out, or give sp an axis besides, as in sp=("sp", "tp")')
    if wish.rotate:
        check_rotation(model)
    world, shared = (1 if axis is None else mesh.size(mesh.join(list_names(axis))) for axis in (wish.around, wish.tp))
    return Parts(wish.around, wish.between, "rotated" if wish.rotate else choose_way(model, world, shared))


def _send_tokens(rules: Mapping[str, Rule], wish: Wish) -> dict[str, Rule]:
    """Rules by which tokens go to the ranks of their experts.

    Raises:
        FzeroError: for a rule of `ep` that needs the same tokens on all ranks.
    """
    assert wish.capacity != "same"
    effect, made = send_tokens(wish.capacity), dict(rules)
    for name, rule in rules.items():
        if rule.axis == wish.ep and rule.name == "ep_dispatch_experts":
            made[name] = rule._replace(style=Style(rule.style.cut, effect, sends=True))
        elif rule.axis == wish.ep and rule.style.effect is not None:
            problem = f"has the style {rule.name!r}, which joins what ranks make of the same tokens"
            raise FzeroError(name, problem, "leave capacity out")
    return made


def check_sharable(wish: Wish, model: Any, buffers: Any) -> None:
    """Refuse a model whose layers ranks cannot share here.

    Raises:
        FzeroError: for running statistics.
    """
    if not wish.axes:
        return
    words = " and ".join(word for word, axis in zip(wish._fields, wish[:3]) if axis is not None)
    way_out = f"leave {words} out, or train it by fzero.hf.parallel and fzero.shard"
    if buffers is not None:
        problem = f"{type(model).__name__} has running statistics, which are those of whole layers"
        raise FzeroError("model", problem, way_out)


def check_whole(output: Any) -> Any:
    """An output of a model in a step, which is the same on ranks that take the same examples. Caches that are not
    become None: nobody reads them.

    Raises:
        FzeroError: naming what a rank has a part of.
    """
    for name, x in find_caches(output).items() if isinstance(output, dict) else ():
        if any(map(find_parts, tree.leaves(x))):
            output[name] = None
    for path, leaf in zip(tree.paths(output), tree.leaves(output)):
        axes = find_parts(leaf)
        if axes:
            problem = f"is a part on each rank along {axes[0]!r}: {list(leaf.shape)}"
            raise FzeroError(f"output {path}", problem, "leave it out, such as output_attentions")
    return output


@contextmanager
def share_forwards(model: nn.Module, sharing: Sharing) -> Iterator[None]:
    """Within this context, modules run with the effects of their rules: so does a function that is lowered there."""
    rules = sharing.rules
    if not rules and sharing.sequence is None and sharing.stages is None:
        yield
        return
    replaced: list[tuple[nn.Module, Any]] = []

    def replace(module: nn.Module, run: Callable[..., Any]) -> None:
        replaced.insert(0, (module, vars(module).get("forward")))
        module.forward = run

    try:
        for name, module in model.named_modules():
            rule = rules.get(name)
            if rule is not None and rule.style.effect is not None:
                replace(module, _run_with(rule, module, module.forward))
        if sharing.sequence is not None and sharing.sequence.between is not None:
            for block in find_blocks(model, [name for name, rule in rules.items() if rule.style.effect is not None]):
                replace(block, keep_places(block.forward))
        if sharing.sequence is not None:
            base = find_model(model)
            replace(base, cut_sequence(base, sharing.sequence))
        if sharing.stages is not None:
            replace(model, share_loss(model, find_axis_of_logits(model, rules, sharing.stages)))
        alike = {} if sharing.stages is None else {sharing.stages: False}
        around = None if sharing.sequence is None else sharing.sequence.around
        replace(model, _name_shapes(model, _list_sending(rules) | alike, {} if around is None else {around: False}))
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


def _list_sending(rules: Mapping[str, Rule]) -> dict[Axis, bool]:
    """Each axis of rules, and whether tokens go from rank to rank along it."""
    found: dict[Axis, bool] = {}
    for rule in rules.values():
        found[rule.axis] = found.get(rule.axis, False) or rule.style.sends
    return found


def _check_examples(model: nn.Module, axes: Mapping[Axis, bool]) -> None:
    """Refuse other examples along an axis than the rules are for: the result would be another one, silently."""
    for axis, sends in axes.items():
        names, alike = {*list_names(axis)}, {*find_parts(axis_index(axis))}
        if axis_size(axis) == 1 or (not alike if sends else names <= alike):
            continue
        name, where = min(names & alike if sends else names - alike), type(model).__name__
        if sends:
            problem = f"has the same examples along {name!r}, and capacity= sends each rank's own tokens"
            raise FzeroError(where, problem, f"name {name!r} in data=, or leave capacity out")
        problem = f"has other examples on each rank along {name!r}, whose ranks share layers or rows"
        raise FzeroError(where, problem, f"leave {name!r} out of data=; for experts of such ranks give capacity=")


def _name_shapes(model: nn.Module, axes: Mapping[Axis, bool], of_rows: Mapping[Axis, bool]) -> Callable[..., Any]:
    """The forward of a model, with the module where shapes do not fit on ranks that have parts of leaves. Ranks along
    `of_rows` have parts of rows."""
    forward = model.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        _check_examples(model, {**axes, **of_rows})
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


def find_cuts(model: nn.Module, rules: Mapping[str, Rule]) -> dict[str, tuple[Any, ...] | None]:
    """For each parameter the axis, dim and number of parts by which ranks have parts of it; None for a whole one."""
    cuts: dict[str, tuple[Any, ...] | None] = {}
    first = {id(leaf): path for path, leaf in model.named_parameters()}
    for key, (leaf, uses) in _list_uses(model).items():
        found = next((cut for use in uses if (cut := _cut(rules, leaf, use)) is not None), None)
        cuts[first[key]] = None if found is None else (found[0], *found[1])
    return cuts


def _find_splits(cuts: Mapping[str, tuple[Any, ...] | None]) -> dict[str, tuple[Any, ...]]:
    """The `split` of `fzero.partition`. Layers with the same parts are one rule."""
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
