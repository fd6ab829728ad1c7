"""Detection of foreign code in a model repository: code that a server would run and that is of no known template."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from trtpipe import configs
from trtpipe.configs.read import read_yaml
from trtpipe.engines.json_input import read_bounded
from trtpipe.triton_repo.check.faults import Fault, Report
from trtpipe.triton_repo.check.models import Model, read_models

RULE = "model-code"
TEMPLATES = Path(__file__).parent.parent / "templates"
KNOWN = Path(configs.__file__).parent / "triton" / "scripts.yaml"
# Suffixes of files in a model's folder that Python or a loader may execute; the last five are pickles.
SUFFIXES = (".py", ".pyc", ".pyo", ".pth", ".so", ".sh", ".bin", ".pt", ".pkl", ".pickle", ".ckpt")
# Parameters that name a program or environment that the server starts, with their values in NVIDIA's images.
PROGRAMS = {
    "EXECUTION_ENV_PATH": (),
    "executor_worker_path": ("/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",),
}
# Larger than the script of any template; a larger file counts as unknown.
MAX_SCRIPT_BYTES = 1 << 20
# More folders than any repository has; the bound ends a walk through circular links.
MAX_FOLDERS = 10_000


def foreign_code(repository: Path) -> list[Fault]:
    """Warnings for all files and settings with code of no known template; empty where there is none."""
    report = Report(repository=repository)
    models = read_models(repository, Report(repository=repository)).values()
    scripts = {path for model in models for path in _named_scripts(model)}
    for path in _files(repository):
        if (path.suffix.lower() in SUFFIXES or path in scripts) and not _is_known(path):
            report.warning(
                RULE, path, "is not a file of a known template", "the server runs what it holds", "read it first"
            )
    for model in models:
        _check_settings(model, report)
    return report.sorted()


def _named_scripts(model: Model) -> list[Path]:
    named = model.config.default_model_filename if model.config is not None else ""
    return model.version_files(named) if named and model.backend in ("python", "") else []


def _check_settings(model: Model, report: Report) -> None:
    for name, usual in PROGRAMS.items():
        value = model.value(name)
        if value is not None and value not in usual:
            report.warning(
                RULE, model.at_parameter(name), f"names {value}",
                "the server starts it", "see what it is first",
            )  # fmt: skip
    for path in model.version_files("model.yaml"):
        try:
            asked = b"trust_remote_code" in read_bounded(path, MAX_SCRIPT_BYTES)
        except (OSError, ValueError) as error:
            report.warning(RULE, path, f"cannot be read: {error}", "it may bring code", "see what it is first")
            continue
        if asked:
            report.warning(
                RULE, (path, "trust_remote_code"), "lets the model's folder bring code", "the server runs it", "drop it"
            )


def _files(repository: Path) -> Iterator[Path]:
    """All files below `repository`, also behind links."""
    seen = set[tuple[int, int]]()
    for folder, inner, names in os.walk(repository, followlinks=True):
        stat = Path(folder).stat()
        if (stat.st_dev, stat.st_ino) in seen or len(seen) == MAX_FOLDERS:
            inner.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        yield from (Path(folder) / name for name in sorted(names))


def _is_known(path: Path) -> bool:
    try:
        data = read_bounded(path, MAX_SCRIPT_BYTES)
    except (OSError, ValueError):
        return False
    # An empty file contains no code; templates use one to mark folders.
    return not data.strip() or _digest(data) in _known()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data.replace(b"\r\n", b"\n")).hexdigest()


@cache
def _known() -> set[str]:
    rows = read_yaml(KNOWN)
    nvidia = {digest for digests in rows.values() for digest in digests}
    return nvidia | {_digest(path.read_bytes()) for path in TEMPLATES.rglob("*.py")}
