"""Site pages: a hook of mkdocs (mkdocs.yml). It adds what is not in docs/, and mends links that lead out of docs/.

* README.md is the first page; CHANGELOG.md, CONTRIBUTING.md and benchmarks/README.md are pages too.
* `api/` has a page for each public module, of the names of tools/api.py, from their docstrings (mkdocstrings).
* errors.md gets the list of all errors, by code, of tools/errors.py.
* A file of the repository that a page links is copied to `files/`; a folder becomes a page that lists its files.

All links of pages are relative, and work in a repository's own view of its files as well.
"""

from __future__ import annotations

import ast
import functools
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent))

import api
import errors
import named_in_examples

find_uses = functools.cache(named_in_examples.find_uses)
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages outside of docs/, and what they are called on the site."""
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
FOLDER = "files"


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages of the repository, of linked files and of public modules."""
    sources = {name: (api.ROOT / name).read_text() for name in PAGES}
    linked = {path.relative_to(api.ROOT).as_posix(): path.read_text() for path in (api.ROOT / "docs").rglob("*.md")}
    for source, text in (sources | linked).items():
        for target in find_outside(text, source):
            place = place_of(target)
            if (api.ROOT / target).is_dir():
                names = sorted(path.name for path in (api.ROOT / target).iterdir())
                for name in names:
                    add(files, config, f"{FOLDER}/{target}/{name}", path=api.ROOT / target / name)
                add(
                    files,
                    config,
                    place,
                    text="\n".join([f"# {target}", "", *(f"* [{name}]({name})" for name in names)]),
                )
            else:
                add(files, config, place, path=api.ROOT / target)
    for source, text in sources.items():
        add(files, config, PAGES[source], text=mend_links(text, source))
    for path in sorted((api.ROOT / "examples").glob("*.py")):  # the pages of names link them
        add(files, config, f"{FOLDER}/examples/{path.name}", path=path)
    for public, text in list_api_pages().items():
        add(files, config, f"api/{public}.md", text=text)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """The text of a page of docs/, with links that lead to where the site has their targets."""
    source = f"docs/{page.file.src_uri}"
    if source == errors.PAGE:
        markdown += f"\n## All errors\n\n{errors.render()}"
    return markdown if page.file.generated_by else mend_links(markdown, source)


def add(files: Files, config: Any, place: str, *, text: str | None = None, path: Path | None = None) -> None:
    if files.get_file_from_path(place) is None:
        content = {"content": text} if text is not None else {"abs_src_path": str(path)}
        files.append(File.generated(config, place, **content))


def resolve(source: str, link: str) -> str:
    """The path in the repository that a page's link leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def place_of(target: str) -> str:
    """Where the site has a file or folder of the repository."""
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"{FOLDER}/{target}/index.md" if (api.ROOT / target).is_dir() else f"{FOLDER}/{target}"


def find_outside(text: str, source: str) -> list[str]:
    """The targets of a page's links that are no pages."""
    targets = [resolve(source, match[2]) for match in LINK.finditer(text)]
    return [
        each for each in targets if each not in PAGES and not each.startswith("docs/") and (api.ROOT / each).exists()
    ]


def mend_links(text: str, source: str) -> str:
    """Return a page's text whose links lead to their targets on the site. A link without a target stays as it is, and
    mkdocs reports it."""
    start = posixpath.dirname(place_of(source)) or "."

    def mend(match: re.Match[str]) -> str:
        target = resolve(source, match[2])
        if not (api.ROOT / target).exists():
            return match[0]
        return f"{match[1]}{posixpath.relpath(place_of(target), start)}{match[3]}"

    return LINK.sub(mend, text)


def list_api_pages() -> dict[str, str]:
    """Public module -> its page, for mkdocstrings: the module's docstring, and a section for each name."""
    modules = dict(api.list_modules())
    pages = {}
    for public, module in modules.items():
        names = {f"{public}.{name}": api.find(module, name) for name in api.list_names(module)}
        pages[public] = write_module_page(public, module, names)
    pages["fzero"] += write_sections({name: api.find_place(place) for name, place in api.RETURNED.items()})
    variants = {name: api.find_place(name) for name in api.list_variants()}
    return pages | {"fzero.variants": write_module_page("fzero.variants", "fzero.variants", variants)}


def write_module_page(public: str, module: str, names: dict[str, api.Found]) -> str:
    head = f"# {public}\n\n::: {module}\n    options: {{members: false, show_root_heading: false}}\n\n"
    return head + write_sections(names)


def write_sections(names: dict[str, api.Found]) -> str:
    """A section for each name that is no module, with an anchor of its public name."""
    return "".join(write_section(name, found) for name, found in names.items() if found.node is not None)


def write_section(name: str, found: api.Found) -> str:
    anchor = f'<a id="{name}"></a>\n\n'
    if isinstance(found.node, ast.Assign) and isinstance(
        found.node.targets[0], ast.Tuple
    ):  # which griffe does not read
        doc = ast.get_docstring(ast.parse(api.MODULES[found.module].read_text()))
        section = f"## {name}\n\n{doc}\n\n"
    else:
        options = f"heading: {name}, toc_label: {name.rpartition('.')[2]}"
        section = f"::: {found.module}.{found.name}\n    options: {{{options}}}\n\n"
    links = ", ".join(f"[{file}](../{place_of(file)})" for file in find_uses().get(name, ()))
    return anchor + section + (f"In code that the tests run: {links}\n\n" if links else "")
