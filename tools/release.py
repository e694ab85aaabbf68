"""Release: builds the sdist and the wheel, checks them, and stops before the upload. `make release`.

    python tools/release.py               refuses where something is missing; else leaves both files in dist/
    python tools/release.py --rehearse    says what is missing, and does the rest all the same

docs/stability.md has the steps.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from email.parser import BytesParser
from pathlib import Path

import api
from packaging.metadata import Metadata
from try_wheel import LINK, PACKED, ROOT, build, read_project, try_wheel

GENERATED = ("PKG-INFO", "setup.cfg")
"""What setuptools adds to an sdist, beside the folder fzero.egg-info."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rehearse", action="store_true", help="go on although something is missing")
    rehearses = parser.parse_args().rehearse
    obstacles = list(find_obstacles(ROOT))
    for each in obstacles:
        print(f"missing: {each}", file=sys.stderr)
    if obstacles and not rehearses:
        sys.exit("no release: mend these, or rehearse it with --rehearse")
    with tempfile.TemporaryDirectory() as made:
        files = build(Path(made))
        if wrong := [*check_files(*files), *check_metadata(*files)]:
            sys.exit("\n".join(wrong))
        try_wheel(Path(made), files[1])
        dist = ROOT / "dist"
        dist.mkdir(exist_ok=True)
        kept = [Path(shutil.copy(file, dist)) for file in files]
    for file in kept:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        print(f"{file.relative_to(ROOT)}  {file.stat().st_size:,} bytes  sha256 {digest}")
    names = " ".join(str(file.relative_to(ROOT)) for file in kept)
    if obstacles:
        print("A rehearsal: these files are not for an upload.")
    else:
        print(f"Nothing was uploaded. This would: python -m twine upload {names}")


def find_obstacles(root: Path) -> Iterator[str]:
    """What a release of a tree lacks."""
    version, date, _ = api.read_section((root / "CHANGELOG.md").read_text())
    address, stated = read_project(root)
    if version != stated:
        yield f"CHANGELOG.md begins with {version}, fzero/__init__.py says {stated}"
    if not date:
        yield f"the section {version} of CHANGELOG.md has no date"
    if api.LISTING.read_text() != api.render(api.list_surface()):
        yield "docs/api.txt is not that of the source: python tools/api.py --write"
    if address is None:
        links = len(LINK.findall((root / "README.md").read_text()))
        yield f"pyproject.toml has no Source in [project.urls]: {links} links of the README would lead nowhere on PyPI"
    if changed := run_git(root, "status", "--porcelain"):
        yield f"changes that are not committed: {', '.join(line[3:] for line in changed.splitlines()[:5])}"
    if run_git(root, "tag", "--list", f"v{stated}"):
        yield f"the tag v{stated} is there already"


def run_git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def check_files(sdist: Path, wheel: Path) -> Iterator[str]:
    """What both files have beyond the package's own and the records of the tools, and what they lack."""
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "fzero").rglob("*.py")} | {"fzero/py.typed"}
    with tarfile.open(sdist) as archive:
        inside = {member.name.partition("/")[2] for member in archive if member.isfile()}
    packed = {name for name in inside if not name.startswith("fzero.egg-info/")} - set(GENERATED)
    yield from compare_files(sdist.name, packed, package | set(PACKED))
    inside = set(zipfile.ZipFile(wheel).namelist())
    yield from compare_files(wheel.name, {name for name in inside if ".dist-info/" not in name}, package)
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in inside):
        yield f"{wheel.name} has no licence"


def compare_files(name: str, found: set[str], expected: set[str]) -> Iterator[str]:
    yield from (f"{name} has {path}, which is no file of the package" for path in sorted(found - expected))
    yield from (f"{name} lacks {path}" for path in sorted(expected - found))


def check_metadata(sdist: Path, wheel: Path) -> Iterator[str]:
    """What an index would refuse: fields are checked by `packaging`, as PyPI does."""
    with tarfile.open(sdist) as archive:
        member = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert member is not None
        texts = {sdist.name: member.read()}
    with zipfile.ZipFile(wheel) as zipped:
        (path,) = (name for name in zipped.namelist() if name.endswith(".dist-info/METADATA"))
        texts[wheel.name] = zipped.read(path)
    for name, text in texts.items():
        metadata = Metadata.from_email(text, validate=True)
        address, stated = read_project(ROOT)
        if str(metadata.version) != stated:
            yield f"{name} is of version {metadata.version}, the source is {stated}"
        if metadata.description_content_type != "text/markdown" or not metadata.description:
            yield f"{name} does not describe itself in Markdown"
        if address is not None and (links := LINK.findall(metadata.description or "")):
            yield f"{name} has {len(links)} relative links in its description, such as {links[0][2]}"
    one, other = (sorted(BytesParser().parsebytes(text).items()) for text in texts.values())
    if one != other:
        yield f"the fields of both differ: {sorted(set(one) ^ set(other))}"


if __name__ == "__main__":
    main()
