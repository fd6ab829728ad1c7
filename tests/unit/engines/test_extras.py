"""The command that a message names for a missing extra installs it where the user stands."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from trtpipe.engines import extras
from trtpipe.engines.extras import install_command

PIP = [sys.executable, "-m", "pip", "install"]
METADATA = """Metadata-Version: 2.4
Name: trtpipe
Version: 9
Provides-Extra: serve
Provides-Extra: sign
Provides-Extra: test
Requires-Dist: numpy>=1.26
Requires-Dist: uvloop>=0.21; sys_platform != "win32"
Requires-Dist: nvidia-pytriton==0.7.0; extra == "serve"
Requires-Dist: securesystemslib[crypto]>=1.6; extra == "sign"
Requires-Dist: pytest; extra == "test"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install trtpipe, as an installer records it, where there is no clone."""
    monkeypatch.setattr(extras, "CLONE", tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    folder = tmp_path / "trtpipe-9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda origin: (folder / "direct_url.json").write_text(json.dumps(origin))


def test_a_clone_is_installed_with_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shlex.split(install_command("serve"))[-2:] == ["-e", f"{extras.CLONE}[serve]"]
    with monkeypatch.context() as bare:
        bare.setattr("importlib.metadata.distributions", lambda **options: ())
        command = install_command("serve")
    assert shlex.split(command)[:5] == ["uv", "pip", "install", "--python", sys.executable]


def test_a_file_is_installed_again_with_the_extra(installed: Any, tmp_path: Path) -> None:
    wheel = tmp_path / "a folder" / "trtpipe-9-py3-none-any.whl"
    installed({"url": wheel.as_uri(), "archive_info": {}})
    assert shlex.split(install_command("serve")) == [*PIP, "nvidia-pytriton==0.7.0"]  # the file is gone
    wheel.parent.mkdir()
    wheel.touch()
    assert shlex.split(install_command("serve")) == [*PIP, f"{wheel}[serve]"]
    # A tool is made anew: an extra that it has, here pytest alone, is named too.
    kept = ",".join(sorted({"serve", "test", *extras._present()}))
    assert "test" in extras._present()
    (tmp_path / "pipx_metadata.json").touch()
    assert shlex.split(install_command("serve")) == ["pipx", "install", "--force", f"{wheel}[{kept}]"]
    (tmp_path / "uv-receipt.toml").touch()
    assert shlex.split(install_command("serve")) == ["uv", "tool", "install", f"{wheel}[{kept}]"]


def test_a_commit_is_installed_with_the_extra(installed: Any) -> None:
    installed({"url": "https://host.example/trtpipe.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}})
    assert shlex.split(install_command("sign")) == [*PIP, "trtpipe[sign] @ git+https://host.example/trtpipe.git@abc"]


@pytest.mark.parametrize("origin", [{}, [], {"url": "https://host.example/trtpipe.whl"}])
def test_elsewhere_the_packages_of_the_extra_are_named(installed: Any, origin: Any) -> None:
    installed(origin)
    assert shlex.split(install_command("sign")) == [*PIP, "securesystemslib[crypto]>=1.6"]
