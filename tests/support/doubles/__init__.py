"""Stand-ins for programs that need an NVIDIA GPU: each enforces its program's contract and does none of its work."""

from __future__ import annotations

import sys
from pathlib import Path


def install_trtllm_build(folder: Path, first: str = "") -> Path:
    """Put it there under its name; `first` are lines of shell that it begins with. Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    double = folder / "trtllm_build.py"
    double.write_text(Path(__file__).with_name("trtllm_build.py").read_text())
    path = folder / "trtllm-build"
    path.write_text(f'#!/bin/sh\n{first}\nexec {sys.executable} {double} "$@"\n')
    path.chmod(0o755)
    return path


def install_llm_api(version_folder: Path) -> None:
    """Put the double of `tensorrt_llm` beside a model's script, where Triton lets it find modules."""
    package = version_folder / "tensorrt_llm"
    package.mkdir()
    (package / "__init__.py").write_text(Path(__file__).with_name("llm_api.py").read_text())
    (package / "executor").mkdir()
    (package / "executor" / "__init__.py").touch()
    (package / "executor" / "request.py").write_text("from tensorrt_llm import LoRARequest\n")
