"""The command that installs an extra of trtpipe where the user stands: no package index has trtpipe."""

from __future__ import annotations

import shlex
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trtpipe.engines.json_input import parse_json

CLONE = Path(__file__).resolve().parents[1]


def install_command(extra: str) -> str:
    """The command that adds the packages of `extra` to this environment, quoted for a shell."""
    origin = _origin()
    if origin is None:
        words = list(_packages(extra).values())
    elif origin.startswith("git+"):
        words = [f"trtpipe[{extra}] @ {origin}"]
    else:
        words = [f"{origin}[{extra}]"]
        if tool := _tool():  # which makes all of its environment anew
            kept = ",".join(sorted({extra, *_present()}))
            return f"{tool} {shlex.quote(f'{origin}[{kept}]')}"
    words = ["-e", *words] if origin == str(CLONE) else words
    if not any(
        metadata.distributions(name="pip")
    ):  # looking for the module would make setuptools keep its distutils out
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *words])
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.join(words)}"


def is_tool() -> bool:
    """Whether uv or pipx installed this environment as a tool."""
    return bool(_tool())


def _tool() -> str:
    """The command that installs this environment as a tool: uv and pipx write these files into it; "" for another."""
    kinds = (("uv-receipt.toml", "uv tool install"), ("pipx_metadata.json", "pipx install --force"))
    return next((command for file, command in kinds if (Path(sys.prefix) / file).exists()), "")


def _origin() -> str | None:
    """What this trtpipe was installed from: a path that is still there, or git+URL; None where neither is known."""
    if (CLONE / "pyproject.toml").is_file():
        return str(CLONE)
    try:
        told = metadata.distribution("trtpipe").read_text("direct_url.json")  # of PEP 610
        record = parse_json(told) if told else {}
        url = str(record["url"])
        if "vcs_info" in record:
            return f"git+{url}@{record['vcs_info']['commit_id']}"
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None
    path = unquote(urlsplit(url).path)
    return path if url.startswith("file:") and Path(path).exists() else None


def _present() -> list[str]:
    """The extras whose packages are all installed."""
    extras = metadata.metadata("trtpipe").get_all("Provides-Extra") or []
    return [extra for extra in extras if all(any(metadata.distributions(name=name)) for name in _packages(extra))]


def _packages(extra: str) -> dict[str, str]:
    """The packages that the extra adds: name -> requirement."""
    from packaging.requirements import Requirement

    out = {}
    for line in metadata.requires("trtpipe") or ():
        one = Requirement(line)
        if one.marker and one.marker.evaluate({"extra": extra}) and not one.marker.evaluate({"extra": ""}):
            one.marker = None
            out[one.name] = str(one)
    return out
