"""What a program started by owner_only.py creates, looked at by its mode."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from trtpipe.pipeline.serving import owner_only

# As Boost.Interprocess makes a region of shared memory: created, then given its mode.
PROGRAM = """
import os, subprocess, sys
for name in sys.argv[1:]:
    file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
    os.fchmod(file, 0o644)
    os.write(file, b"prompt")
if len(sys.argv) == 2:
    subprocess.run([sys.executable, "-c", open(sys.argv[0]).read(), sys.argv[1] + ".child", sys.argv[1] + ".other"])
"""


@pytest.mark.process
def test_no_file_is_open_to_others_nor_are_those_of_its_children(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    plain = tmp_path / "plain"
    subprocess.run([sys.executable, script, plain, tmp_path / "second"], check=True, umask=0o022)
    assert stat.S_IMODE(plain.stat().st_mode) == 0o644, "the program does what the mask alone does not stop"
    made = tmp_path / "made"
    done = subprocess.run(
        [sys.executable, "-I", owner_only.__file__, sys.executable, script, made], capture_output=True, check=True
    )
    assert done.stderr == b""
    files = sorted(tmp_path.glob("made*"))
    assert len(files) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {path.read_text() for path in files} == {"prompt"}


@pytest.mark.process
def test_other_modes_are_set_and_the_status_is_the_program_s(tmp_path: Path) -> None:
    code = (
        "import os, sys; os.chmod(sys.argv[1], 0o640); os.fchmod(os.open(sys.argv[1], os.O_RDWR), 0o750); sys.exit(7)"
    )
    path = tmp_path / "file"
    path.touch()
    done = subprocess.run([sys.executable, "-I", owner_only.__file__, sys.executable, "-c", code, path], check=False)
    assert done.returncode == 7
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
