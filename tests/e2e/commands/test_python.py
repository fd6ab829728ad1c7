"""The example of docs/python.md, as its reader runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli
from tests.support.paths import ROOT

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_the_example_of_the_page_runs_as_printed(cli: Cli, target: str, tmp_path: Path) -> None:
    """It shares the artefacts of `target`, in a home of its own: its server has the name of another test's."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    (home / "artefacts").symlink_to(cli.home / "artefacts")
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, env={**os.environ, "TRTPIPE_HOME": str(home)},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    advised, built, faults, answer, continued, *measured = done.stdout.splitlines()
    assert re.match(r"\d x (l40s|h100) \S+ \w+", advised)
    assert built == f"{target} ['download', 'tokenizer', 'convert', 'build', 'package']"
    assert faults == "[]"
    assert answer == "The capital of France is Paris."
    assert continued == " Paris."
    loads = [line.split()[:2] for line in measured]
    assert loads == [[protocol, load] for protocol in ("grpc", "http") for load in "12"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert [level["requests"]["succeeded"] for level in report["levels"]] == [4, 4, 4, 4]
    assert report["engine"]["gpu"] == "cpu"
    assert list((home / "servers").glob("*.json")) == []
