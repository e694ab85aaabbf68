"""The laws of the house: rooms and the arrows between them, names, homes of operations, private names of torch."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from conftest import LONGEST
from tiers import SLOW

import fzero

PACKAGE = Path(fzero.__file__).parent
MAX_LINES = 400
MAX_LINES_OF_VARIANT = 60
MAX_PUBLIC = 45

ROOMS = (
    "base | files layout optim launch | ranks | program | values | tracing passes execution state"
    " | budget formats pages | general | cache | fzero"
    " | variants data checkpoint parallel testing metrics | training | deepspeed | hf | lightning | planner | __main__"
)
"""The rooms, from the bottom, a level between bars: folders of the package, the modules beside them, "fzero", and the
command line."""

LEVELS = [level.split() for level in ROOMS.split("|")]


def modules() -> dict[str, Path]:
    """`{"optim.base": .../fzero/optim/base.py, ...}`; a package has its folder's name, fzero itself ""."""
    parts = {path: path.relative_to(PACKAGE).with_suffix("").parts for path in sorted(PACKAGE.rglob("*.py"))}
    return {".".join(part[:-1] if part[-1] == "__init__" else part): path for path, part in parts.items()}


MODULES = modules()
VARIANTS = [name for name in MODULES if name.startswith("variants.")]


def parse(name: str) -> ast.Module:
    return parse_file(MODULES[name])


@functools.cache
def parse_file(file: Path) -> ast.Module:
    """A file's tree, which all tests share and none changes."""
    return ast.parse(file.read_text())


@functools.cache
def walk(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree, which is walked once for all tests."""
    if isinstance(tree, ast.Module):
        return (tree, *(node for statement in tree.body for node in walk(statement)))
    return tuple(ast.walk(tree))


def imports(name: str, *, typing: bool = True) -> Iterator[str]:
    """The modules of fzero that a module imports, anywhere in its file; with `typing` those for annotations too."""
    body = parse(name).body
    if not typing:
        body = [node for node in body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))]
    for node in (node for statement in body for node in walk(statement)):
        if isinstance(node, ast.Import):
            yield from (inside(alias.name) for alias in node.names if is_fzero(alias.name))
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(name, node)
            if is_fzero(origin):
                attributes = [inside(f"{origin}.{alias.name}") for alias in node.names]
                yield from (attribute if attribute in MODULES else inside(origin) for attribute in attributes)


def absolute(name: str, node: ast.ImportFrom) -> str:
    """The dotted module that `from ... import` names, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    package = ["fzero", *name.split(".")] if name else ["fzero"]
    depth = len(package) - node.level + (MODULES[name].name == "__init__.py")
    return ".".join([*package[:depth], *([node.module] if node.module else [])])


def is_fzero(module: str) -> bool:
    return module.split(".")[0] == "fzero"


def inside(module: str) -> str:
    return module.partition(".")[2]


def room(name: str) -> str:
    """The folder that a module is in, "fzero" for what is in none. The command line is above all rooms."""
    first = name.split(".")[0]
    return first if first == "__main__" or ((PACKAGE / first).is_dir() and first) else "fzero"


def arrows() -> dict[str, set[str]]:
    """Room -> the rooms that it imports from."""
    found: dict[str, set[str]] = {room(name): set() for name in MODULES}
    for name in MODULES:
        found[room(name)] |= {room(other) for other in imports(name)} - {room(name)}
    return found


def test_every_room_has_its_level() -> None:
    assert sorted(arrows()) == sorted(name for level in LEVELS for name in level)


def test_arrows_point_downwards(subtests: pytest.Subtests) -> None:
    height = {each: number for number, level in enumerate(LEVELS) for each in level}
    for name in MODULES:
        with subtests.test(name):
            others = {other for other in imports(name) if room(other) != room(name)}
            upwards = sorted(other for other in others if height[room(other)] >= height[room(name)])
            assert not upwards, f"fzero.{name} ({room(name)}) imports from its own level or above: {upwards}"


def test_a_room_says_what_lives_there(subtests: pytest.Subtests) -> None:
    for name in sorted({room(name) for name in MODULES} - {"fzero", "__main__"}):
        with subtests.test(name):
            doc = ast.get_docstring(parse(name))
            advice = f"fzero/{name}/__init__.py says in at most eight lines what lives there"
            assert doc and len(doc.splitlines()) <= 8, advice


def test_no_import_is_cyclic() -> None:
    list(TopologicalSorter({name: set(imports(name, typing=False)) - {name} for name in MODULES}).static_order())


def test_imports_inside_functions_and_relative_ones_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "base.py"
    file.write_text(
        "def f():\n    from ..base import tree\n    from .kernels import g\n    import fzero.base.mesh, torch\n"
    )
    monkeypatch.setitem(MODULES, "optim.base", file)
    assert sorted(imports("optim.base")) == ["base.mesh", "base.tree", "optim.kernels"]


def test_all_is_what_is_exported() -> None:
    listed = list(getattr(fzero, "__all__", ()))
    assert len(listed) == len(set(listed)), "a name stands twice in __all__"
    missing = [name for name in listed if not hasattr(fzero, name)]
    assert not missing, f"__all__ names what fzero does not have: {missing}"
    unlisted = {name for name, value in vars(fzero).items() if is_public(name, value)} - set(listed)
    assert not unlisted, f"public names that __all__ does not list: {sorted(unlisted)}"


def test_an_import_is_quick_and_rooms_beside_the_core_are_attributes() -> None:
    code = "import sys, fzero; print(*dir(fzero)); assert 'torch._dynamo' not in sys.modules, 'takes two seconds'; "
    code += "fzero.checkpoint.save, fzero.data.loader; fzero.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    rooms = {"checkpoint", "data", "deepspeed", "hf", "initializers", "launch", "lightning", "metrics", "parallel"}
    rooms |= {"testing"}
    assert {name for name in done.stdout.split() if not name.startswith("_")} == {*fzero.__all__, *rooms}
    assert "module 'fzero' has no attribute 'nothing'" in done.stderr


def is_public(name: str, value: object) -> bool:
    """Submodules become attributes of a package by being imported: they are public only where `__all__` lists them."""
    return not name.startswith("_") and not isinstance(value, ModuleType)


def test_files_are_short() -> None:
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in MODULES.values()}
    long = {name: count for name, count in lines.items() if count > MAX_LINES}
    assert not long, f"a long file is usually two files (limit {MAX_LINES}): {long}"


def test_public_names_are_few() -> None:
    count = len(fzero.__all__)
    assert count <= MAX_PUBLIC, f"{count} names at the top (limit {MAX_PUBLIC}): put a new one in a subpackage"


# names of classes

MAX_CLASS_NAMES_OF_SEVERAL = 4


def test_files_of_tests_have_names_of_their_own() -> None:
    """They are no packages, so that Python knows one file of a name. Property tests are packages."""
    names = [
        path.name for path in Path(__file__).parent.rglob("*.py") if path.name not in ("__init__.py", "conftest.py")
    ]
    assert sorted(set(names)) == sorted(names)


def test_few_class_names_have_two_meanings() -> None:
    """Of public ones. A few are names of others, such as Accelerator and OneCycle."""
    homes: dict[str, list[str]] = {}
    for name in MODULES:
        for each in parse(name).body:
            if isinstance(each, ast.ClassDef) and not each.name.startswith("_"):
                homes.setdefault(each.name, []).append(name)
    found = {each: names for each, names in homes.items() if len(names) > 1}
    advice = "name a class after what it is for, as TensorPlan beside Plan"
    assert len(found) <= MAX_CLASS_NAMES_OF_SEVERAL, f"{len(found)} names of classes are of several: {found}; {advice}"
    assert "Plan" not in found, "a Plan is what is decided about a program"


def test_words_of_the_architecture_are_classes_with_one_home() -> None:
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text().split("## Words")[1].split("## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .+ \| `(fzero/[\w/]+\.py)` \|$", page, flags=re.MULTILINE)
    classes = [
        (each.name, f"fzero/{name.replace('.', '/')}.py")
        for name in MODULES for each in parse(name).body if isinstance(each, ast.ClassDef)
    ]  # fmt: skip
    assert rows
    assert rows == [each for row in rows for each in classes if each[0] == row[0]]


# names of functions

IRREGULAR = frozenset(
    "begun bound built chosen dealt done drawn found given gone held kept known left lost made meant met seen sent "
    "shown spent taken told understood won written".split()
)
"""Participles without -ed. Those that are verbs as well (cut, put, read, run, split, spread) are not among them."""
PUBLIC_PARTICIPLES = {
    "base.tree.dotted": "a public name, fzero.tree.dotted: `dotted(key)` is the dotted path of a key",
    "training.meshes.init_distributed": "DeepSpeed's name",
    "hf.pipelines.save_pretrained": "transformers' name",
    "hf.pretrained.from_pretrained": "transformers' name",
    "optim.wrappers.masked": "optax's name",
    "values.tiles.tiled": "a public name, as TiledMLP's: `tiled(fn, ...)` is `fn` in parts",
}
NOT_PARTICIPLES = frozenset("bed deepspeed embed feed need red seed shed speed".split())


def is_participle(name: str) -> bool:
    """Whether a function's name ends in a participle: "calibrated", "_plan_made". Predicates may: "is_sharded"."""
    words = name.strip("_").split("_")
    if words[0] in ("is", "has", "are"):
        return False
    return words[-1] in IRREGULAR or (words[-1].endswith("ed") and words[-1] not in NOT_PARTICIPLES)


def test_participles_are_recognized() -> None:
    names = "fitted _agreed told _copy_donated is_fitted _has_sharded seed split feed fused_adamw_ find_origins".split()
    assert [name for name in names if is_participle(name)] == names[:4]


def test_functions_are_verbs(subtests: pytest.Subtests) -> None:
    for name in MODULES:
        with subtests.test(name):
            functions = [
                each.name for each in parse(name).body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
            ]
            found = [each for each in functions if is_participle(each) and f"{name}.{each}" not in PUBLIC_PARTICIPLES]
            assert not found, f"name {found} after what they do (calibrate, plan_header), not after what was done"


# homes of operations


@functools.cache
def names_in(tree: ast.Module) -> set[str]:
    """Identifiers of a file's code and the strings in it, but for docstrings. `a.b` is there as "b" and as "a.b"."""
    names: set[str] = set()
    docs = {id(node.value) for node in walk(tree) if isinstance(node, ast.Expr)}
    for node in walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Attribute(value=value, attr=name):
                names |= {name, f"{value.id}.{name}"} if isinstance(value, ast.Name) else {name}
            case ast.alias(name=name) | ast.keyword(arg=str(name)):
                names.add(name)
            case ast.Constant(value=str(text)) if id(node) not in docs:
                names.add(text)
    return names


BRIDGES = frozenset({"deepspeed", "formats", "hf", "parallel", "training", "variants"})
"""Rooms that name what others name."""


def files_that_name(pattern: str, *, beside: frozenset[str] = frozenset({"ranks"})) -> list[str]:
    """The modules, but for those of rooms `beside`, whose code has a name or string that the pattern is found in."""
    search = re.compile(pattern).search
    return [name for name in MODULES if room(name) not in beside and any(map(search, names_in(parse(name))))]


@pytest.mark.parametrize(("collective", "limit"), [("all_gather", 11), ("reduce_scatter", 8), ("all_reduce", 9)])
def test_collectives_are_named_in_few_files(collective: str, limit: int) -> None:
    """Four of them are the transports and what these have in common, and up to three have the public name. A new
    collective needs no transport, and is named in three: its record, its exchange and its public name
    (docs/operations.md)."""
    found = files_that_name(rf"(?<![a-z]){collective}(?![a-z])", beside=BRIDGES)
    advice = "read the operation's record (starts, moves, together, mean_of), or its exchange's name"
    assert len(found) <= limit, f"{len(found)} files name {collective} (limit {limit}): {found}; {advice}"


def test_the_kernel_of_adamw_is_named_in_few_files() -> None:
    found = files_that_name(r"(^|_)adamw_|^ops\.adamw$|^adamw\b(?!$)")
    found.remove("deepspeed.ops.adam")  # an argument of DeepSpeed has the name
    found.remove("hf.optimizers")  # names of optimizers of transformers
    advice = "read the operation's record (in_place, replaces, gradients), or the kernel's (fzero.optim.fused)"
    assert len(found) <= 3, f"{len(found)} files name AdamW's kernel (limit 3): {found}; {advice}"


WHO = {"Live", "Ranks", "Tracer", "Virtual", "VirtualMesh"}


def names_of_instances(tree: ast.AST) -> set[str]:
    """The classes that a file asks for: `isinstance(x, (a.B, C))` has "B" and "C"."""
    return {
        name
        for node in walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance"
        for each in ast.walk(node.args[1]) if (name := getattr(each, "attr", getattr(each, "id", None)))
    }  # fmt: skip


def test_few_files_ask_who_performs() -> None:
    found = [name for name in MODULES if names_of_instances(parse(name)) & WHO]
    advice = "Ranks has number, numbers, members, agree and choose_device, which need no question"
    assert len(found) <= 5, f"{len(found)} files ask for the class of who takes part (limit 5): {found}; {advice}"


def test_few_files_give_names_to_files() -> None:
    """What ranks write together appears by one rename: of `Publication`, or of a checkpoint in its folder."""
    found = files_that_name(r"^os\.(rename|replace)$|^(flock|lockf)$")
    advice = "write it with fzero.state.publishing"
    assert len(found) <= 2, f"{len(found)} files rename or lock files (limit 2): {found}; {advice}"


def is_record(name: str) -> bool:
    """Whether a module says which argument of an operation is where: it has records of operations, or names for
    arguments."""
    return name.startswith(("program.arguments", "program.ops", "program.records")) or "ops.define" in names_in(
        parse(name)
    )


def counted_arguments(tree: ast.AST) -> list[str]:
    """The arguments that a file takes by their number: `node.args[0]`, `node.args[1:]`. Arguments of an object's own
    (`self.args`) are not of a node."""
    return [
        ast.unparse(node)
        for node in walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute)
        if node.value.attr == "args" and ast.unparse(node.value) != "self.args"
        if any(isinstance(each, ast.Constant) for each in ast.walk(node.slice))
    ]  # fmt: skip


def test_few_files_count_the_arguments_of_nodes() -> None:
    """A reader cannot know what `node.args[3]` is."""
    found = [name for name in MODULES if not is_record(name) and counted_arguments(parse(name))]
    advice = "read arguments by name, with the classes of fzero.program.arguments"
    assert len(found) <= 5, f"{len(found)} files count arguments (limit 5): {found}; {advice}"


def test_counted_arguments_are_seen() -> None:
    code = "a.args[0]; b.c.args[1:]; d.args[-1].args[i]; self.args[0]; e.args[at]; args[0]; f.args"
    assert sorted(counted_arguments(ast.parse(code))) == ["a.args[0]", "b.c.args[1:]", "d.args[-1]"]


def test_questions_for_a_class_are_seen() -> None:
    code = "isinstance(a, Live), isinstance(b, (m.Virtual, int)), isinstance(c, Ranks | None), issubclass(d, Tracer)"
    assert names_of_instances(ast.parse(code)) == {"Live", "m", "Virtual", "int", "Ranks"}


def test_names_are_found_in_code_and_not_in_docstrings() -> None:
    tree = ast.parse('"""all_gather"""\nfrom m import a\ndef f(b, c=1):\n    """d"""\n    return ops.g(x="y", h=1)\n')
    assert names_in(tree) == {"a", "f", "b", "c", "ops", "g", "ops.g", "x", "y", "h"}


# private names of torch

PRIVATE_HOMES = {f"base.torch_private{part}" for part in ("", "_functions", "_operators", "_symbols", "_traces")}


def private_names(tree: ast.Module) -> Iterator[str]:
    """The private names of torch that a file uses: imported, or as an attribute of what it imports from torch.

    Names of operators are not among them: `torch.ops.aten._to_copy`, `torch._foreach_add`.
    """
    bound: dict[str, str] = {}
    for node in walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield from [alias.name] * is_private(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from [f"{node.module}.{alias.name}"] * is_private(f"{node.module}.{alias.name}")
    for node in walk(tree):
        if isinstance(node, ast.Attribute):
            root, *rest = list_parts(node)
            name = ".".join([bound.get(root, ""), *rest])
            if root in bound and is_private(name):
                yield name


def list_parts(node: ast.AST) -> list[str]:
    """The names of `a.b.c`, in order; "" for a value that is no name."""
    if isinstance(node, ast.Attribute):
        return [*list_parts(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def is_private(name: str) -> bool:
    is_operator = name.startswith("torch.ops.") or name.startswith("torch._foreach_")
    return not is_operator and any(re.match(r"_(?!_)", part) for part in name.split("."))


def test_private_names_of_torch_stand_in_two_files(subtests: pytest.Subtests) -> None:
    for name in MODULES.keys() - PRIVATE_HOMES:
        with subtests.test(name):
            found = sorted(set(private_names(parse(name))))
            assert not found, f"{found}: put a function into fzero/base/torch_private.py that says what it is"


def test_private_names_are_seen() -> None:
    code = """
import torch, torch.utils._pytree
import torch.distributed as dist
from torch import Tensor, fx
from torch._subclasses import FakeTensor
torch._C._jit.f, dist._get(), Tensor._make(), fx.Node.__name__, torch.ops.aten._to_copy, torch._foreach_add, x._y
"""
    assert sorted(set(private_names(ast.parse(code)))) == [
        "torch.Tensor._make", "torch._C", "torch._C._jit", "torch._C._jit.f", "torch._subclasses.FakeTensor",
        "torch.distributed._get", "torch.utils._pytree",
    ]  # fmt: skip


# types

CENTRAL = ("on", "program", "layout", "mesh")
MESH_OF_THE_USER = (
    "base.mesh", "formats.foreign", "formats.hugging_face", "checkpoint.loading", "checkpoint.stopping",
    "data.loader", "data.padding", "data.parts", "deepspeed.engine", "deepspeed.initialize",
    "deepspeed.loading", "deepspeed.programs", "deepspeed.saving", "deepspeed.status", "deepspeed.zero",
    "hf.accelerator", "hf.files", "hf.generation", "hf.merging", "hf.padding", "hf.parallelize", "hf.pipelines",
    "hf.prepared", "hf.pretrained", "hf.sharing", "hf.together", "hf.trainer", "hf.trl_trainers", "hf.updates",
    "hf.wishes", "metrics.meter", "testing.operations", "training.models", "training.programs", "ranks.live",
    "lightning.strategy",
    "state.build.build", "state.init", "state.partition", "state.safetensors.loading",
    "transform",
)  # fmt: skip
"""Modules that take a user's mesh, a `VirtualMesh` or torch's `DeviceMesh`. torch.distributed, whose class that is, is
an optional part of torch, so `mesh` may be `Any` there."""


def untyped(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """`(line, name)` of the arguments and attributes of central names that are `Any`."""
    for node in walk(tree):
        match node:
            case ast.arg(arg=name, annotation=annotation) if annotation is not None:
                pass
            case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name), annotation=annotation):
                pass
            case _:
                continue
        if name in CENTRAL and re.search(r"\bAny\b", re.sub(r"\[.*\]", "", ast.unparse(annotation))):
            yield node.lineno, name


def test_central_objects_are_typed(subtests: pytest.Subtests) -> None:
    for name in MODULES:
        with subtests.test(name):
            found = [each for each in untyped(parse(name)) if each[1] != "mesh" or name not in MESH_OF_THE_USER]
            assert not found, f"`Any` for {found}: give the class, or a small Protocol where rooms forbid it"


# data

DATA = [name for name in MODULES if room(name) == "data"]


@pytest.mark.parametrize("name", DATA)
def test_data_uses_public_names_and_the_ranks(name: str) -> None:
    inner = {other for other in imports(name) if room(other) != "data"} - {"", *fzero.__all__}
    assert inner <= {"ranks.live", "base.arguments", "base.mesh"}, (
        f"fzero.{name} imports {sorted(inner)}: data uses `from fzero import ...`"
    )


# layers


PARALLEL = [name for name in MODULES if room(name) == "parallel"]


@pytest.mark.parametrize("name", PARALLEL)
def test_layers_use_public_names_and_are_short(name: str) -> None:
    """A user could have written each: what is not at the top is the exchange of rows, along which axes values are the
    same, and checked arguments."""
    inner = {other for other in imports(name) if room(other) != "parallel"} - {"", *fzero.__all__}
    advice = "a layer uses `import fzero` and what `fzero.parallel` exports"
    known = {"values.ragged", "values.collectives", "base.arguments"}
    assert inner <= known, f"fzero.{name} imports {sorted(inner)}: {advice}"
    for each in walk(parse(name)):
        if isinstance(each, ast.FunctionDef) and each.end_lineno is not None:
            lines = each.end_lineno - each.lineno + 1
            assert lines <= MAX_LINES_OF_VARIANT, f"fzero.{name}.{each.name} has {lines} lines"


# variants


def test_nothing_imports_a_variant_but_the_configuration_that_names_it() -> None:
    found = [name for name in MODULES if room(name) != "variants" and "variants" in map(room, imports(name))]
    advice = "move what they share into a room, variants are for users"
    assert found == ["deepspeed.quantized"], f"{found} import a variant: {advice}"


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_use_public_names_only(name: str) -> None:
    inner = {other for other in imports(name) if not other.startswith("variants.")} - {"", *fzero.__all__}
    assert not inner, f"fzero.{name} imports {sorted(inner)}: a variant uses `from fzero import ...` and fzero.variants"
    roots = {
        module.split(".")[0]
        for node in walk(parse(name)) if isinstance(node, (ast.Import, ast.ImportFrom))
        for module in ([absolute(name, node)] if isinstance(node, ast.ImportFrom) else [x.name for x in node.names])
    }  # fmt: skip
    others = roots - {"fzero", "torch", *sys.stdlib_module_names}
    assert not others, f"fzero.{name} imports {sorted(others)}: a variant needs torch and the standard library only"


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_short(name: str) -> None:
    lines = len(MODULES[name].read_text().splitlines())
    advice = "share a helper with other variants, or generalize fzero.ops"
    assert lines <= MAX_LINES_OF_VARIANT, f"fzero.{name} has {lines} lines (limit {MAX_LINES_OF_VARIANT}): {advice}"


# what users install


def test_the_version_has_one_home_and_the_package_has_types() -> None:
    """A source tree that is not installed has the version too, which every checkpoint says."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fzero.__version__"}
    assert (PACKAGE / "py.typed").exists()
    assert set(project["project"]["optional-dependencies"]) >= {"hf", "deepspeed", "data"}
    askers = {name for name, path in MODULES.items() if 'version("fzero")' in path.read_text()}
    assert not askers, f"{askers} ask for an installed version: import fzero.__version__"


NEEDED = {"torch", "optree", "einops"}
"""The `dependencies` of pyproject.toml. numpy is not there, and torch's exchange of objects needs it."""
OPTIONAL = {"transformers", "accelerate", "safetensors", "huggingface_hub", "peft", "trl"}
OPTIONAL |= {"hypothesis", "lightning", "pytorch_lightning"}


def test_modules_import_what_is_declared() -> None:
    allowed, wrong = NEEDED | OPTIONAL | {"fzero", *sys.stdlib_module_names}, {}
    for name, path in MODULES.items():
        roots = set()
        for node in walk(parse(name)):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                roots.add(absolute(name, node).split(".")[0])
        of_torch = set(re.findall(r"dist\.\w+_object(?:_list)?\(", path.read_text()))
        if found := (roots - allowed) | of_torch:
            wrong[name] = found
    assert not wrong, f"{wrong}: declare packages in pyproject.toml; ranks exchange objects by fzero.ranks.objects"


# the order of a run of the tests


def test_benchmarks_examples_and_tools_import_names_that_exist() -> None:
    """A benchmark may need an hour, so tests run few of them; a name that moved is found here."""
    missing = list[str]()
    for path in (
        path for folder in ("benchmarks", "examples", "tools") for path in (PACKAGE.parent / folder).glob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fzero":
                module = importlib.import_module(node.module or "")
                names = (alias.name for alias in node.names)
                gone = [name for name in names if not (hasattr(module, name) or find_spec(f"{node.module}.{name}"))]
                missing += [f"{path.name}: {node.module}.{name}" for name in gone]
    assert not missing


def test_the_files_that_begin_first_exist() -> None:
    root = Path(__file__).parents[1]
    found = {path.name for folder in ("tests", "property_tests") for path in (root / folder).rglob("test_*.py")}
    assert set(LONGEST) <= found


def test_the_slow_functions_exist() -> None:
    root = Path(__file__).parents[1]
    files = [path for folder in ("tests", "property_tests") for path in (root / folder).rglob("test_*.py")]
    functions = {name for path in files for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)}
    assert functions >= SLOW
