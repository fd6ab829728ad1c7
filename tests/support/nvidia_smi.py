"""An nvidia-smi for tests: a script on PATH that answers the one query that is asked, for GPUs the test makes up."""

from __future__ import annotations

from pathlib import Path

import pytest

H100 = "NVIDIA H100 80GB HBM3, 9.0"
A100 = "NVIDIA A100-SXM4-80GB, 8.0"


def install(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *gpus: str,
    driver: str = "595.10.01",
    total: int = 81559,
    used: int = 4,
) -> Path:
    """Put it first on PATH; each GPU is a product and its compute capability. Returns the script."""
    lines = "\n".join(f"{index}, {gpu}, {driver}, {total}, {used}, GPU-{index}a8b" for index, gpu in enumerate(gpus))
    return install_script(monkeypatch, folder, f'while read -r line; do echo "$line"; done <<END\n{lines}\nEND')


def install_script(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return path
