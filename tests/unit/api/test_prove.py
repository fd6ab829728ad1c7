"""Ctrl-C in `trtpipe prove`. Whole runs are in tests/e2e/test_prove.py."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtpipe.pipeline.api import prove


def test_a_ctrl_c_while_it_measures_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    report = SimpleNamespace(interrupted=True, broken=None, results=[])
    monkeypatch.setattr("trtpipe.pipeline.api.serve.serve", lambda *given, **more: nullcontext())
    monkeypatch.setattr("trtpipe.pipeline.api.bench.bench", lambda *given, **more: report)
    monkeypatch.setattr(prove, "_planned", lambda *given: {})
    monkeypatch.setattr(prove, "_answers", lambda client: [])
    spec: Any = SimpleNamespace(target="x")
    with pytest.raises(KeyboardInterrupt):
        prove._served(spec, Path("x"), "m", None)
