"""The tritonserver inside the nvidia-pytriton package, and the backend folder that it is given.

The package carries the server, the Python backend and one stub for each Python; only the binary is used, not the
PyTriton API. The backend folder has the stub of this very Python.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from trtpipe import triton_repo
from trtpipe.engines import load_backend
from trtpipe.engines.engine_process import protocol
from trtpipe.engines.errors import HostError
from trtpipe.engines.extras import install_command
from trtpipe.engines.process import python_command

WIRE = Path(protocol.__file__)
BACKEND = Path(triton_repo.__file__).parent / "backends" / "tensorrtllm"


@dataclass(frozen=True, kw_only=True)
class Installation:
    """Paths of the parts of a Triton Inference Server."""

    server: Path
    python_backend: Path
    stub: Path
    libraries: Path
    caches: Path
    version: str


def find_installation() -> Installation:
    """The tritonserver of this environment. Raises HostError naming what is missing."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise HostError(
            "no tritonserver in this environment",
            why="it comes with the package nvidia-pytriton",
            remedy=f"run `{install_command('serve')}`",
        )
    package = Path(spec.origin).parent
    root = package / "tritonserver"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = Installation(
        server=root / "bin" / "tritonserver",
        python_backend=root / "backends" / "python",
        stub=root / "python_backend_stubs" / python / "triton_python_backend_stub",
        libraries=package.parent / "nvidia_pytriton.libs",
        caches=root / "caches",
        version=importlib.metadata.version("nvidia-pytriton"),
    )
    if not found.stub.is_file():
        raise HostError(f"nvidia-pytriton {found.version} has no stub for Python {python}", remedy="use Python 3.11")
    check_numpy()
    check_libpython()
    check_start_files(package.parent)
    return found


def check_folder(folder: Path) -> None:
    """Check a server's folder: Triton starts its Python backend by a shell command in which the folder stands without
    quotes, and waits without end for a backend that did not start; its Python takes the C locale. Raises HostError."""
    found = re.search(r"[^\w@%+=:,./~-]", str(folder), re.ASCII)
    if found:
        raise HostError(
            f"Triton cannot serve from {folder}",
            why=f"its Python backend does not start from a path that has {found[0]!r} in it",
            remedy="set TRTPIPE_HOME to a folder of letters and digits; a repository's own name must be so too",
        )


def check_numpy() -> None:
    """Triton's Python backend returns empty tensors under numpy 2, without an error. Raises HostError."""
    version = importlib.metadata.version("numpy")
    if int(version.split(".")[0]) >= 2:
        raise HostError(
            f"numpy {version} breaks Triton's Python backend",
            why="models become ready and then return empty tensors",
            remedy=f"run `{install_command('serve')}`, which brings an earlier one",
        )


def check_start_files(packages: Path) -> None:
    """The stub's Python ends where a .pth file, which an editable install writes, holds a path that is not ASCII: it
    reads them in the C locale, before 3.13. Triton waits for such a stub without end. Raises HostError."""
    if sys.version_info >= (3, 13):
        return
    for file in sorted(packages.glob("*.pth")):
        if not file.read_bytes().isascii():
            raise HostError(
                f"{file} holds a path that is not ASCII",
                why="Triton's Python backend cannot read it",
                remedy="move the checkout to a folder of ASCII letters and install it again, or install without -e",
            )


def check_libpython() -> None:
    """Check for libpython, which the stub loads: a Python without a shared one cannot serve. Raises HostError."""
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        return
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    folders = [sysconfig.get_config_var("LIBDIR") or "", "/usr/lib", "/usr/lib/x86_64-linux-gnu", "/usr/local/lib"]
    if not any((Path(folder) / name).is_file() for folder in folders if folder):
        raise HostError(
            f"this Python has no {name}",
            why="Triton's Python backend loads it",
            remedy="install your distribution's libpython package, or a Python built with --enable-shared",
        )


def prepare_backends(
    installation: Installation, folder: Path, runtime: str = "reference", python: str = sys.executable
) -> None:
    """Fill `folder` with the backends that a repository made here needs: `python`, and our `tensorrtllm`.

    python  the interpreter of the engine process, which may live in another environment than the server
    """
    shutil.rmtree(folder, ignore_errors=True)
    stubs = folder / "python"
    stubs.mkdir(parents=True)
    for source in installation.python_backend.iterdir():
        if source.is_file():
            # Not a link: the server refuses a library that resolves to a place outside its backend folder.
            shutil.copyfile(source, stubs / source.name)
    shutil.copy(installation.stub, stubs / "triton_python_backend_stub")
    ours = folder / "tensorrtllm"
    ours.mkdir()
    for source in BACKEND.glob("*.py"):
        shutil.copyfile(source, ours / source.name)
    shutil.copyfile(WIRE, ours / "trtpipe_wire.py")
    launch = {
        "command": [
            *python_command("trtpipe.engines.engine_process.server", python, outlives=True),
            "--protocol",
            str(protocol.VERSION),
            "--runtime",
            load_backend(runtime).PROCESS,
        ],
        # torch must not see the server's own library folders.
        "library_path": os.environ.get("LD_LIBRARY_PATH"),
    }
    (ours / "engine.json").write_text(json.dumps(launch), encoding="utf-8")
