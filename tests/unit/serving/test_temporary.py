"""The temporary folder of a server."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from trtpipe.pipeline.serving import temporary


def test_another_start_removes_what_a_killed_server_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    folder = tmp_path / "servers" / "a"
    temporary.remove(folder)  # it has none
    first, second = (temporary.make(folder) for _ in range(2))
    assert (Path(first["TMPDIR"]).exists(), Path(second["TMPDIR"]).is_dir()) == (False, True)
    assert second["TORCHINDUCTOR_CACHE_DIR"].startswith("/tmp/torchinductor_")
    temporary.remove(folder)
    assert not Path(second["TMPDIR"]).exists()
    assert list(folder.iterdir()) == []


def test_the_path_of_a_socket_in_it_is_short_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (deep := tmp_path / ("d" * 60)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    made = temporary.make(tmp_path / "a")["TMPDIR"]
    assert len(made) + len("/2f1b6f9e-8a3c-4a60-9d35-5c1b0a7e4f11") <= 107
    assert list(deep.iterdir()) == []
    temporary.remove(tmp_path / "a")
    assert not Path(made).exists()
