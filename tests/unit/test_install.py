"""What an install of trtpipe without extras brings, all that `trtpipe bench` needs; and what README says of it."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

HEAVY = {"torch", "transformers", "nvidia-pytriton", "nvidia-modelopt", "accelerate", "ray", "pyarrow"}
MOST_MB = 200


def brought(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> set[str]:
    """The distributions that this one asks for with these extras, and those that they ask for; itself too."""
    if (name, extras) in seen:
        return set()
    seen.add((name, extras))
    found = {name}
    for text in importlib.metadata.requires(name) or ():
        wanted = Requirement(text)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            found |= brought(canonicalize_name(wanted.name), frozenset(wanted.extras), seen)
    return found


def test_the_install_for_bench_alone_is_small() -> None:
    names = brought("trtpipe", frozenset(), set())
    assert {"numpy", "tokenizers", "tritonclient", "uvloop", "grpcio"} <= names
    assert not names & HEAVY
    paths = {Path(str(file.locate())) for name in names for file in importlib.metadata.files(name) or ()}
    # As the packages are; what Python compiles of them comes on top, and is a cache.
    total = sum(path.stat().st_size for path in paths if path.is_file() and path.suffix != ".pyc") / 1e6
    assert 50 < total < MOST_MB


def test_the_pythons_that_are_named_are_those_that_an_installer_takes() -> None:
    """With a later one `uv tool install .` succeeds, and the extra `serve` cannot be installed into it."""
    found = re.search(r'^requires-python = "(.+?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    taken = SpecifierSet(found[1])
    minors = [minor for minor in range(20) if f"3.{minor}" in taken]
    named = ", ".join(f"3.{minor}" for minor in minors[:-1]) + f" or 3.{minors[-1]}"
    assert f"Python {named};" in (ROOT / "docs" / "install.md").read_text()


def test_the_readme_fits_a_terminal() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 80


def test_the_image_is_built_from_files_that_docker_is_given() -> None:
    """A slow test builds it."""
    given = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert not {name for name in given if not (ROOT / name).exists()}
    named = set(re.findall(r"/src/([\w.-]+)", (ROOT / "Dockerfile").read_text()))
    assert named == {"constraints.txt"}
    assert named <= given
