"""The commands of docs/tutorial.md, in its order, as its reader types them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import TRTPIPE, Cli
from tests.support.paths import ROOT

BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FREE = "trtpipe serve --http-port 0 --grpc-port 0 --metrics-port 0 --openai-port 0"


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(900)
def test_the_commands_of_the_page_do_what_it_says(cli: Cli, target: str, tmp_path: Path) -> None:
    """Only the ports are others, which may be taken. It shares the artefacts of `target`, in a home of its own."""
    home, work = Cli(tmp_path, tmp_path / "home"), {}
    home.home.mkdir(exist_ok=True)
    (home.home / "artefacts").symlink_to(cli.home / "artefacts")
    environment = {**home.environment(), "PATH": f"{TRTPIPE.parent}{os.pathsep}{os.environ['PATH']}"}
    address = ""
    try:
        for kind, block in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text()):
            script = block.replace("trtpipe serve", FREE).replace("http://127.0.0.1:9000", address)
            program = ["bash", "-ec", script] if kind == "sh" else [sys.executable, "-c", script]
            done = subprocess.run(
                program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
            )
            assert done.returncode == 0, f"{block}\n{done.stderr}"
            work[block.split("\n")[0]] = done.stdout
            if "trtpipe serve" in block:
                (server,) = json.loads(home.ok("ps", "--json").out)
                address = server["openai"]
    finally:
        home.run("stop", "--all")
    answers = [out for out in work.values() if "capital of France is Paris" in out]
    assert len(answers) == 3  # of generate, curl and Python
    assert target in work["trtpipe ls"]
    reports = sorted((tmp_path / "reports").glob("*/report.json"))
    assert [len(json.loads(path.read_text())["levels"]) for path in reports if path.parent.name != "latest"] == [2, 2]
    assert (tmp_path / "compare.html").exists()
    assert json.loads(home.ok("ps", "--json").out) == []
