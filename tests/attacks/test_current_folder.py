"""Modules in the current folder with the names of ours, of Python's and of libraries: none of them may run.

Each command stands in a folder full of such modules. Every one notes its name and its process when it is imported.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.factories import hf_folder
from tests.unit.test_runner import SIZES
from trtpipe.engines.process import LAUNCHER, python_command

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

PYTHON_310 = sorted(Path.home().glob(".pyenv/versions/3.10.*/bin/python"))

OURS = ("trtpipe", "pipeline", "engines", "configs", "triton_repo")
OTHERS = (
    "json", "re", "torch", "numpy", "yaml", "typing", "transformers", "multiprocessing", "asyncio", "pip", "tests",
    "tokenizers", "modelopt", "uvicorn", "socket", "tempfile", "ctypes", "__future__", "sitecustomize", "usercustomize",
)  # fmt: skip
# With PYTHONPATH=. Python imports these before any line of ours.
EARLY = {"sitecustomize", "usercustomize"}
NOTE = """import os
with open({path!r}, "a") as file:
    file.write(f"{{os.getpid()}} {name}\\n")
"""
# As pip writes it for `[project.scripts]`.
SCRIPT = """#!{python}
import sys
from {module} import {function}
if __name__ == '__main__':
    if sys.argv[0].endswith('.exe'):
        sys.argv[0] = sys.argv[0][:-4]
    sys.exit({function}())
"""


def script(path: Path) -> Path:
    """The trtpipe command, as an installation has it."""
    project = (LAUNCHER.parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    entry = next(line for line in project.splitlines() if line.startswith("trtpipe = "))
    module, function = entry.split('"')[1].split(":")
    path.write_text(SCRIPT.format(python=sys.executable, module=module, function=function))
    path.chmod(0o755)
    return path


class Trap:
    """The folder, and what was imported from it."""

    def __init__(self, base: Path) -> None:
        self.folder = base / "trap"
        self.folder.mkdir()
        self._notes = base / "imported"
        for name in OURS:
            (self.folder / name).mkdir()
            (self.folder / name / "__init__.py").write_text(NOTE.format(path=str(self._notes), name=name))
        for name in OTHERS:
            (self.folder / f"{name}.py").write_text(NOTE.format(path=str(self._notes), name=name))
        self.trtpipe = script(base / "trtpipe")
        self.environment = {**os.environ, "TRTPIPE_HOME": str(base / "home")}

    def imported(self, *, but_of: int = 0) -> set[str]:
        """Names of modules since it was last asked; those that Python imports by itself in `but_of` do not count."""
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        self._notes.unlink(missing_ok=True)
        found = {(int(pid), name) for pid, name in (line.split() for line in lines)}
        return {name for pid, name in found if not (pid == but_of and name in EARLY)}

    def run(self, command: list[str], pythonpath: str | None = None, statuses: Sequence[int] = (0,)) -> str:
        """Run the command and return its output. It must import nothing, and end with one of the statuses."""
        environment = {name: value for name, value in self.environment.items() if name != "PYTHONPATH"}
        if pythonpath is not None:
            environment["PYTHONPATH"] = pythonpath
        with subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            out, err = process.communicate()
        early = process.pid if pythonpath is not None else 0
        assert self.imported(but_of=early) == set(), err
        assert process.returncode in statuses, err
        return out


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    return Trap(tmp_path)


@pytest.fixture
def here(trap: Trap) -> Callable[..., str]:
    """`here("convert", ..)` runs trtpipe in the trap, with no PYTHONPATH and with two that name it."""

    def run(*words: str, pythonpath: str | None = None, statuses: Sequence[int] = (0,)) -> str:
        if pythonpath is not None:  # with it Python looks there for the package of the command itself
            shutil.rmtree(trap.folder / "trtpipe", ignore_errors=True)
        return trap.run([str(trap.trtpipe), *words], pythonpath, statuses)

    return run


# Unset; the folder itself by its name; an empty entry, as `PYTHONPATH=$PYTHONPATH:/opt/lib` leaves one.
PATHS = pytest.mark.parametrize(
    "pythonpath", [":/nowhere", *(pytest.param(one, marks=pytest.mark.slow) for one in (None, "."))]
)


def test_a_plain_python_imports_modules_of_the_current_folder(trap: Trap) -> None:
    subprocess.run([sys.executable, "-c", "import pipeline, json"], cwd=trap.folder, env=trap.environment, check=True)
    assert trap.imported() == {"pipeline", "json"}


@PATHS
def test_commands_of_one_process(here: Callable[..., str], trap: Trap, pythonpath: str | None) -> None:
    assert here("--help", pythonpath=pythonpath).startswith("Usage: trtpipe")
    hf_folder(trap.folder / "tiny")
    here("convert", "tiny", "converted", pythonpath=pythonpath)
    assert "no problem found" in here("inspect", "converted", pythonpath=pythonpath)
    here("restore", "converted", "restored", pythonpath=pythonpath)


@pytest.mark.real
@pytest.mark.slow
def test_workers_with_torch(here: Callable[..., str], trap: Trap) -> None:
    hf_folder(trap.folder / "tiny")
    (trap.folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 50)
    sizes = ("--samples", "4", "--seq-len", "16", "--calib", "text.txt")
    here("quantize", "tiny", "quantized", "--quant", "fp8", *sizes)
    measured = ("--text", "text.txt", "--rows", "2", "--seq-len", "16", "--json")
    answer = here("verify", "tiny", "quantized", *measured, pythonpath=".")
    assert "perplexity" in answer


@pytest.mark.slow
@pytest.mark.parametrize("pythonpath", [None, "."])
def test_the_load_tester_and_its_server(here: Callable[..., str], pythonpath: str | None) -> None:
    answer = here("bench", "selftest", "--protocol", "grpc", "--streams", "4", pythonpath=pythonpath)
    assert "a core of this client can take" in answer


def test_pip_imports_no_module_of_the_current_folder(trap: Trap) -> None:
    trap.run([*python_command("pip"), "--version"])


def test_the_module_of_the_command_itself(trap: Trap) -> None:
    """`python -m` finds `pipeline` in the current folder, before a line of ours; what that imports comes from ours."""
    for name in OURS:
        (trap.folder / name / "__init__.py").unlink()
        (trap.folder / name).rmdir()
    environment = {name: value for name, value in trap.environment.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "trtpipe", "models"], cwd=trap.folder, env=environment, capture_output=True, check=True
    )
    assert done.stdout
    # runpy is looked up in it, by Python.
    assert trap.imported() <= {"re", "typing"}


@pytest.mark.parametrize("how", [["-m", "trtpipe"], [str(LAUNCHER), "trtpipe"]])
def test_absolute_entries_of_pythonpath_stay(tmp_path: Path, how: list[str]) -> None:
    """An entry of PYTHONPATH that names a folder outright; and not our own, which may be a site-packages."""
    stated = tmp_path / "stated"
    stated.mkdir()
    (stated / "sitecustomize.py").write_text("import atexit, sys; atexit.register(lambda: print(sys.path))")
    environment = {**os.environ, "PYTHONPATH": f"{stated}::relative"}
    done = subprocess.run(
        [sys.executable, *how, "--version"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    path = json.loads(done.stdout.splitlines()[1].replace("'", '"'))
    assert path[0] == str(stated)
    assert not {"", str(tmp_path), str(tmp_path / "relative")} & set(path)
    # Where an installation has put it, after the libraries of Python.
    assert str(LAUNCHER.parent.parent) not in path[:4]


@pytest.mark.slow
@pytest.mark.real
def test_a_server_and_all_it_starts(here: Callable[..., str], trap: Trap) -> None:
    pythonpath = "."
    hf_folder(trap.folder / "tiny")
    sizes = [word for size in (*SIZES, "serving.bls_instance_count=1") for word in ("--set", size)]
    here("build", "--model", "tiny", "--gpu", "cpu", "--dtype", "fp32", *sizes, pythonpath=pythonpath)
    ports = [word for name in ("http", "grpc", "metrics", "openai") for word in (f"--{name}-port", "0")]
    try:
        here("serve", "--detach", "--gateway-workers", "2", *ports, pythonpath=pythonpath)
        here("generate", "Hello", "--max-tokens", "4", "--raw", pythonpath=pythonpath)
        here(
            "bench", "--concurrency", "2", "--requests", "4", "--input-tokens", "8", "--output-tokens", "4",
            "--workers", "2", pythonpath=pythonpath, statuses=(0, 5),  # 5: the machine was too busy for a measurement
        )  # fmt: skip
    finally:
        here("stop", pythonpath=pythonpath)


# Python 3.10 knows neither `-P` nor PYTHONSAFEPATH. The one here does not have trtpipe installed.

ASKING = """
import json, multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
from trtpipe import telling

if __name__ == "__main__":
    told = {"argv": sys.argv, "path": sys.path, "own": telling.place()}
    if "spawn" in sys.argv:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            told["spawned"] = pool.submit(telling.place).result()
    print(json.dumps(told))
"""
TELLING = """
def place():
    import trtpipe
    return trtpipe.__file__
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The launcher in a tiny package with the name of ours, beside a module that must not hide Python's."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "trtpipe").mkdir()
    (folder / "trtpipe" / "__init__.py").touch()
    (folder / "trtpipe" / LAUNCHER.name).write_bytes(LAUNCHER.read_bytes())
    (folder / "trtpipe" / "asking.py").write_text(ASKING)
    (folder / "trtpipe" / "telling.py").write_text(TELLING)
    (folder / "json.py").write_text("raise RuntimeError('a module beside our package, not of it')")
    return folder


INTERPRETERS = pytest.mark.parametrize(
    "python",
    [
        pytest.param(sys.executable, id="this"),
        pytest.param(
            str(PYTHON_310[-1]) if PYTHON_310 else "", id="3.10",
            marks=pytest.mark.skipif(not PYTHON_310, reason="no Python 3.10 of pyenv"),
        ),
    ],
)  # fmt: skip


@INTERPRETERS
@PATHS
def test_the_launcher_in_another_environment(trap: Trap, copied: Path, python: str, pythonpath: str | None) -> None:
    if python != sys.executable and pythonpath is not None:
        (trap.folder / "re.py").unlink()  # which Python 3.10 imports before a line of ours
    answer = trap.run([python, str(copied / "trtpipe" / LAUNCHER.name), "trtpipe.asking", "a b", "c"], pythonpath)
    told = json.loads(answer)
    assert told["argv"] == ["trtpipe.asking", "a b", "c"]
    assert told["own"] == str(copied / "trtpipe" / "__init__.py")
    assert not {"", ".", str(trap.folder), str(copied)} & set(told["path"])


@INTERPRETERS
def test_what_a_child_spawns_finds_our_package(trap: Trap, copied: Path, python: str) -> None:
    if python != sys.executable:  # what multiprocessing starts there is `python -c`, with the current folder first
        for path in trap.folder.glob("*.py"):
            path.unlink()
    answer = trap.run([python, str(copied / "trtpipe" / LAUNCHER.name), "trtpipe.asking", "spawn"])
    assert json.loads(answer)["spawned"] == str(copied / "trtpipe" / "__init__.py")
