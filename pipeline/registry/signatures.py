"""Signatures of in-toto statements: DSSE envelopes, signed and verified with key files.

An envelope (https://github.com/secure-systems-lab/dsse) holds a payload, its type, and signatures over both. The key id
of a signature is a hint that anyone can write, and cosign leaves it empty: each signature is tried with each key.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtpipe.engines.errors import ArtefactRefused, HostError, InputDataError, kind_of
from trtpipe.engines.extras import install_command
from trtpipe.engines.json_input import parse_json, read_bounded

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
    from securesystemslib.signer import SSlibKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
# An RSA key of 16,384 bits has 13 KB in PEM form.
MAX_KEY_BYTES = 64 << 10
# Verification of one signature takes up to a millisecond.
MAX_SIGNATURES = 64
# Signature schemes of RSA keys: cosign uses the first, in-toto's own tools the second.
RSA_SCHEMES = ("rsa-pkcs1v15-sha256", "rsassa-pss-sha256")

Statement = dict[str, Any]


def require_public_keys(files: Sequence[Path]) -> None:
    """Raises InputDataError for a file that is not a public key, HostError where the library is not installed."""
    for file in files:
        _public_keys(file)


def verify_envelope(envelope: bytes, keys: Sequence[Path]) -> Statement:
    """The in-toto statement in a DSSE envelope that at least one of the keys signed.

    keys  public keys in PEM form: ECDSA (P-256, P-384, P-521), Ed25519 or RSA

    Raises ArtefactRefused where none of the keys signed it or its content is not a statement, InputDataError
    for a malformed envelope or a file that is not a public key, HostError where the library is not installed.
    """
    public = [key for path in keys for key in _public_keys(path)]
    payload, payload_type, signatures = _parts(envelope)
    if payload_type != PAYLOAD_TYPE:
        raise ArtefactRefused(
            "the signed envelope holds no in-toto statement", why=f"its payload type is {payload_type[:80]!r}"
        )
    if not _signed(payload, signatures, public):
        raise ArtefactRefused(
            "the signature was not verified",
            why=f"none of {len(signatures)} in the envelope was made with one of the given keys for this statement",
            remedy="give the public key of whoever signed it; a statement that was changed afterwards has none",
        )
    try:
        statement = parse_json(payload)
    except ValueError as error:
        raise InputDataError("the signed statement is not JSON", why=str(error)) from None
    if not isinstance(statement, dict):
        raise InputDataError(f"the signed statement is {kind_of(statement)}, not an object")
    return statement


def sign_statement(statement: Statement, private_key: Path) -> bytes:
    """A DSSE envelope of the statement, as JSON text, with one signature.

    private_key  PEM form without a password: ECDSA (P-256, P-384, P-521), Ed25519 or RSA

    Raises InputDataError for a file that is not such a key, HostError where the library is not installed.
    """
    key = _private_key(private_key)
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import CryptoSigner

    envelope = Envelope(json.dumps(statement).encode(), PAYLOAD_TYPE, {})
    envelope.sign(CryptoSigner(key, _schemes(key.public_key(), private_key)[0]))
    return json.dumps(envelope.to_dict()).encode() + b"\n"


def _parts(envelope: bytes) -> tuple[bytes, str, list[bytes]]:
    """(payload, its type, signatures) of an envelope. Raises InputDataError."""
    try:
        told = parse_json(envelope)
        found = told["signatures"]
        if not isinstance(found, list) or len(found) > MAX_SIGNATURES:
            raise ValueError(f"`signatures` is not a list of at most {MAX_SIGNATURES}")
        if not isinstance(told["payloadType"], str):
            raise ValueError("`payloadType` is not a string")
        return _decoded(told["payload"]), told["payloadType"], [_decoded(one["sig"]) for one in found]
    except KeyError as error:
        why = f"it lacks `{error.args[0]}`"
    except TypeError:
        why = "its fields are of other types"
    except ValueError as error:
        why = str(error)
    raise InputDataError("the signed envelope is malformed", why=why, remedy="have it signed again") from None


def _decoded(text: Any) -> bytes:
    """Decode standard or URL-safe base64, because DSSE allows both."""
    if not isinstance(text, str):
        raise ValueError("a field that should hold base64 is not a string")
    return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)


def _signed(payload: bytes, signatures: Sequence[bytes], keys: Sequence[SSlibKey]) -> bool:
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import UnverifiedSignatureError
    from securesystemslib.signer import Signature

    # The library's `verify` demands matching key ids, and no two equal ones: cosign's are all empty.
    signed = Envelope(payload, PAYLOAD_TYPE, {}).pae()
    for signature in signatures:
        for key in keys:
            try:
                key.verify_signature(Signature(key.keyid, signature.hex()), signed)
            except UnverifiedSignatureError:
                continue
            return True
    return False


def _public_keys(path: Path) -> list[SSlibKey]:
    """The key in a file, once for each signature scheme it supports."""
    _need_libraries()
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    return _schemes(_load(path, "public", load_pem_public_key), path)


def _private_key(path: Path) -> Any:
    _need_libraries()
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    return _load(path, "private", lambda data: load_pem_private_key(data, password=None))


def _load(path: Path, kind: str, load: Callable[[bytes], Any]) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        data = read_bounded(path, MAX_KEY_BYTES)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputDataError(f"the {kind} key {path} cannot be read", why=why) from None
    if b"BEGIN ENCRYPTED" in data:
        raise InputDataError(
            f"the {kind} key {path} has a password", remedy="make one without with `openssl genpkey -algorithm ed25519`"
        )
    try:
        return load(data)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InputDataError(
            f"{path} is not a {kind} key in PEM form",
            remedy="make a pair with `openssl genpkey -algorithm ed25519 -out key.pem` and "
            "`openssl pkey -in key.pem -pubout -out key.pub`",
        ) from None  # fmt: skip


def _schemes(key: PublicKeyTypes, path: Path) -> list[SSlibKey]:
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from securesystemslib.signer import SSlibKey

    schemes = RSA_SCHEMES if isinstance(key, RSAPublicKey) else (None,)
    try:
        return [SSlibKey.from_crypto(key, scheme=scheme) for scheme in schemes]
    except (ValueError, AttributeError):
        raise InputDataError(
            f"the key {path} is of a kind that is not supported", remedy="take ECDSA P-256, Ed25519 or RSA"
        ) from None


def _need_libraries() -> None:
    try:
        import cryptography.exceptions  # noqa: F401
        import securesystemslib.dsse  # noqa: F401
    except ImportError as error:
        raise HostError(
            "signatures need securesystemslib and cryptography",
            why=str(error),
            remedy=f"run `{install_command('sign')}`",
        ) from None
