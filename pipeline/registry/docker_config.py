"""Credentials that `docker login` keeps for a registry: in Docker's configuration, or with a credential helper."""

from __future__ import annotations

import base64
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.json_input import parse_json, read_json

MAX_CONFIG_BYTES = 1 << 20
HELPER_SECONDS = 30
# What credential helpers say where they have no credentials for a registry.
ABSENT = "credentials not found in native keychain"
# User name that a credential helper gives with an identity token.
OF_IDENTITY = "<token>"
# `docker login` without a host logs in to Docker Hub, and uses this name.
DOCKER_HUB = "https://index.docker.io/v1/"
DOCKER_HUB_HOST = "registry-1.docker.io"
OF_DOCKER_HUB = ("docker.io", "index.docker.io", DOCKER_HUB_HOST)


@dataclass(frozen=True)
class Credentials:
    """Credentials of a registry: one of `basic` and `identity`, or the reason why there are none.

    basic     "user:password" in base64
    identity  an identity token, which the registry's token server takes instead, as Azure's does
    failure   why a credential helper gave neither
    """

    basic: str = ""
    identity: str = ""
    failure: str = ""


def credentials(host: str) -> Credentials | None:
    """What is kept for the registry `host`, which may have a port, or why a helper failed; None where nothing is kept.

    Raises InputDataError for a configuration that is malformed.
    """
    path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    if not path.is_file():
        return None
    config = read_json(path, "Docker's configuration", max_bytes=MAX_CONFIG_BYTES)
    auths, helpers = (_object(config, name, path) for name in ("auths", "credHelpers"))
    for key, entry in auths.items():
        if _host(key) not in _names(host) or not isinstance(entry, dict):
            continue
        if isinstance(token := entry.get("identitytoken"), str) and token:
            return Credentials(identity=token)  # `auth` then has a user name alone
        if isinstance(kept := entry.get("auth"), str) and kept:
            if not re.fullmatch(r"[A-Za-z0-9+/=_-]+", kept):
                raise InputDataError(f"{path} holds no base64 for {key}", remedy=f"run `docker login {host}`")
            return Credentials(basic=kept)
    failed: Credentials | None = None
    for name in _names(host):
        helper = helpers.get(name) or config.get("credsStore")
        if isinstance(helper, str) and (told := _ask(helper, DOCKER_HUB if host in OF_DOCKER_HUB else name)):
            if not told.failure:
                return told
            failed = failed or told
    return failed


def _object(config: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise InputDataError(f"`{name}` in {path} is not an object", remedy="run `docker login` again")
    return value


def _host(key: str) -> str:
    """The host of a key: keys are hosts, or URLs of hosts."""
    return key.partition("://")[2].partition("/")[0] if "://" in key else key.partition("/")[0]


def _names(host: str) -> tuple[str, ...]:
    """The names under which a registry's credentials may be kept, the closest first."""
    if host in OF_DOCKER_HUB:
        return OF_DOCKER_HUB
    name, separator, port = host.partition(":")
    other = {"localhost": "127.0.0.1", "127.0.0.1": "localhost"}.get(name)
    return (host,) if other is None else (host, f"{other}{separator}{port}")


def _ask(helper: str, server: str) -> Credentials | None:
    """Credentials for a server from the program docker-credential-HELPER, or why it failed; None where it has none."""
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run([program, "get"], input=server.encode(), capture_output=True, timeout=HELPER_SECONDS)
    except subprocess.TimeoutExpired:
        return Credentials(failure=f"{program} gives no credentials within {HELPER_SECONDS} seconds")
    except (OSError, ValueError) as error:
        return Credentials(failure=f"{program} cannot be run: {getattr(error, 'strerror', None) or error}")
    if done.returncode != 0:
        # Helpers print what failed to stdout.
        text = (done.stdout.strip() or done.stderr.strip()).decode(errors="replace")
        if ABSENT in text:
            return None
        line = "".join(letter for letter in text.partition("\n")[0][:200] if letter.isprintable())
        return Credentials(failure=f"{program} gives no credentials: {line or f'it exits with {done.returncode}'}")
    try:
        told = parse_json(done.stdout, max_bytes=MAX_CONFIG_BYTES)
        user, secret = told["Username"], told["Secret"]
    except (ValueError, KeyError, TypeError):
        return Credentials(failure=f"{program} gives no credentials: its answer has no `Username` and `Secret`")
    if user == OF_IDENTITY:
        return Credentials(identity=str(secret))
    return Credentials(basic=base64.b64encode(f"{user}:{secret}".encode()).decode())
