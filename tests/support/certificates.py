"""A certificate of this machine's own names, made with openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

with_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a self-signed certificate for localhost and 127.0.0.1; the paths of it and of its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key
