"""API keys and certificate of the gateway, read from files. Light, so that `serve` can check them before it starts."""

from __future__ import annotations

import hashlib
import os
import ssl
from pathlib import Path

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.json_input import read_bounded
from trtpipe.pipeline.gateway.options import GatewayOptions

KEYS_VARIABLE = "TRTPIPE_API_KEYS"
# Of a file of keys or certificates: a device without an end would take all memory.
MAX_BYTES = 1 << 20


def check(options: GatewayOptions) -> None:
    """Read the files that a worker will read. Raises InputDataError for unusable keys or an unusable certificate."""
    check_files(options.api_keys_file, options.tls_cert, options.tls_key)


def check_files(keys: Path | None, certificate: Path | None, key: Path | None) -> None:
    """As `check`, of the files alone."""
    read_keys(keys)
    if certificate is not None and key is not None:
        _check_certificate(certificate, key)


def stamps(options: GatewayOptions) -> list[tuple[int, ...] | None]:
    """Device, inode, time and size of each file of keys and certificate, by which a change is seen; None for a file
    that cannot be looked at. Links are followed, since a Secret of Kubernetes is one."""
    return [_stamp(file) for file in (options.api_keys_file, options.tls_cert, options.tls_key) if file is not None]


def _stamp(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def read_keys(file: Path | None) -> tuple[bytes, ...]:
    """Digests of the API keys in `file` (one a line, # for comments) and the environment. Raises InputDataError, also
    for a file or a variable that is there and holds none: the gateway would be open where its owner thinks it closed.
    """
    given = os.environ.get(KEYS_VARIABLE)
    keys = [] if given is None else _keys(given.replace(",", "\n"), KEYS_VARIABLE)
    if given is not None and not keys:
        raise InputDataError(
            f"{KEYS_VARIABLE} holds no API key", remedy="write keys with commas between them, or unset it"
        )
    if file is not None:
        what = f"the API keys in {file}"
        try:
            text = read(what, file).decode("utf-8-sig")
        except ValueError as error:
            raise _unreadable(what, error) from None
        own = _keys(text, str(file))
        if not own:
            raise InputDataError(f"{file} holds no API key", remedy="write one key a line")
        keys += own
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def read(what: str, file: Path) -> bytes:
    """The bytes of a file of keys or certificates, which a message names by `what`. Raises InputDataError."""
    try:
        return read_bounded(file, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise _unreadable(what, error) from None


def _keys(text: str, place: str) -> list[str]:
    """The keys in the lines of `text`. Raises InputDataError, which names `place` and quotes no key."""
    lines = (line.strip() for line in text.splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not all(key.isascii() for key in keys):
        raise InputDataError(
            f"an API key in {place} has a letter outside ASCII",
            why="clients send a key in an HTTP header, and differ in how they write such a letter",
            remedy="choose a key of ASCII letters and digits",
        )
    return keys


def _check_certificate(certificate: Path, key: Path) -> None:
    for what, file in (("certificate", certificate), ("key", key)):
        read(f"the {what} {file}", file)
    try:
        # Nobody can be asked for a password: workers have no terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise InputDataError(
            f"{certificate} and {key} are not a certificate and its key",
            why=error.reason or str(error),
            remedy="give PEM files that belong together, the key without a password",
        ) from None


def _unreadable(what: str, error: OSError | ValueError) -> InputDataError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return InputDataError(f"{what} cannot be read", why=why, remedy="name a file that this user can read")
