"""The example of docs/python.md, as its reader runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.e2e.conftest import Cli
from tests.support.paths import ROOT

pytestmark = pytest.mark.real


def test_the_example_of_the_page_runs_as_printed(cli: Cli, target: str) -> None:
    """It takes the download of `target`, and is of another precision, so that both may be served."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=cli.folder, env=cli.environment(), capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    advised, built, faults, answer, continued, *measured = done.stdout.splitlines()
    assert re.match(r"\d x (l40s|h100) \S+ \w+", advised)
    assert built == "smollm2-135m.cpu.bf16 ['download', 'tokenizer', 'convert', 'build', 'package']"
    assert faults == "[]"
    assert answer == "The capital of France is Paris."
    assert continued == " Paris."
    assert [line.split()[:2] for line in measured] == [
        [protocol, load] for protocol in ("grpc", "http") for load in "12"
    ]
    report = json.loads((cli.folder / "report.json").read_text())
    assert [level["requests"]["succeeded"] for level in report["results"]] == [4, 4, 4, 4]
    assert report["engine"]["gpu"] == "cpu"
    assert "smollm2-135m.cpu.bf16" not in [server["server"] for server in json.loads(cli.ok("ps", "--json").out)]
