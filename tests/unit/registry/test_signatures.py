"""Signed statements: every kind of key, and every way in which a signature must not count."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, padding, rsa

from trtpipe.engines.errors import ArtefactRefused, HostError, InputDataError
from trtpipe.pipeline.registry.signatures import sign_statement, verify_envelope

STATEMENT = {"_type": "https://in-toto.io/Statement/v1", "subject": [{"name": "engine", "digest": {"sha256": "é"}}]}
KINDS: dict[str, Callable[[], Any]] = {
    "p256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "p384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "ed25519": ed25519.Ed25519PrivateKey.generate,
    "rsa": lambda: rsa.generate_private_key(public_exponent=65537, key_size=2048),
}


def write_pair(folder: Path, key: Any, name: str = "key", password: bytes | None = None) -> tuple[Path, Path]:
    """(private key, public key) as files in PEM form."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    encryption: Any = serialization.NoEncryption()
    if password is not None:
        encryption = serialization.BestAvailableEncryption(password)
    pem = serialization.Encoding.PEM
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_pair(tmp_path, KINDS["p256"]())


def changed(envelope: bytes, **fields: Any) -> bytes:
    return json.dumps({**json.loads(envelope), **fields}).encode()


def packed(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


@pytest.mark.parametrize("kind", KINDS)
def test_a_signed_statement_comes_back(tmp_path: Path, kind: str) -> None:
    private, public = write_pair(tmp_path, KINDS[kind]())
    envelope = sign_statement(STATEMENT, private)
    assert json.loads(envelope)["payloadType"] == "application/vnd.in-toto+json"
    assert verify_envelope(envelope, [public]) == STATEMENT


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_statement_is_refused(tmp_path: Path, kind: str) -> None:
    private, public = write_pair(tmp_path, KINDS[kind]())
    envelope = sign_statement(STATEMENT, private)
    other = packed(json.dumps({**STATEMENT, "subject": []}).encode())
    with pytest.raises(ArtefactRefused, match="signature was not verified"):
        verify_envelope(changed(envelope, payload=other), [public])


@pytest.mark.parametrize("kind", KINDS)
def test_another_key_of_the_same_kind_is_refused(tmp_path: Path, kind: str) -> None:
    private, _ = write_pair(tmp_path, KINDS[kind]())
    _, other = write_pair(tmp_path, KINDS[kind](), "other")
    with pytest.raises(ArtefactRefused, match="none of 1 in the envelope was made with one of the given keys"):
        verify_envelope(sign_statement(STATEMENT, private), [other])


def test_an_envelope_of_another_writer(tmp_path: Path) -> None:
    """As cosign makes one with a key: no key id, ECDSA P-256 over the encoding that DSSE defines."""
    key = ec.generate_private_key(ec.SECP256R1())
    _, public = write_pair(tmp_path, key)
    signature = key.sign(b'DSSEv1 28 application/vnd.in-toto+json 7 {"a":1}', ec.ECDSA(hashes.SHA256()))
    told = {
        "payloadType": "application/vnd.in-toto+json", "payload": packed(b'{"a":1}'),
        "signatures": [{"keyid": "", "sig": packed(signature)}],
    }  # fmt: skip
    assert verify_envelope(json.dumps(told).encode(), [public]) == {"a": 1}
    told["signatures"] = [{"sig": base64.urlsafe_b64encode(signature).decode()}]
    assert verify_envelope(json.dumps(told).encode(), [public]) == {"a": 1}


def test_rsa_of_both_paddings(tmp_path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    _, public = write_pair(tmp_path, key)
    signed = b"DSSEv1 28 application/vnd.in-toto+json 2 {}"
    paddings = (padding.PKCS1v15(), padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH))
    for one in paddings:
        told = {
            "payloadType": "application/vnd.in-toto+json", "payload": packed(b"{}"),
            "signatures": [{"sig": packed(key.sign(signed, one, hashes.SHA256()))}],
        }  # fmt: skip
        assert verify_envelope(json.dumps(told).encode(), [public]) == {}


def test_one_signature_of_several_by_one_key_of_several(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    private, public = pair
    others = [write_pair(tmp_path, KINDS[kind](), kind) for kind in ("ed25519", "rsa")]
    envelopes = [json.loads(sign_statement(STATEMENT, one)) for one in (others[0][0], private)]
    signatures = [envelope["signatures"][0] for envelope in envelopes]
    both = changed(json.dumps(envelopes[0]).encode(), signatures=signatures)
    assert verify_envelope(both, [others[1][1], public]) == STATEMENT
    with pytest.raises(ArtefactRefused, match="none of 2"):
        verify_envelope(both, [others[1][1]])


def test_a_key_id_proves_nothing(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    mine = json.loads(sign_statement(STATEMENT, pair[0]))["signatures"][0]
    attacker, _ = write_pair(tmp_path, KINDS["p256"](), "attacker")
    forged = json.loads(sign_statement(STATEMENT, attacker))
    forged["signatures"][0]["keyid"] = mine["keyid"]
    with pytest.raises(ArtefactRefused, match="signature was not verified"):
        verify_envelope(json.dumps(forged).encode(), [pair[1]])


def test_another_payload_type(pair: tuple[Path, Path]) -> None:
    envelope = changed(sign_statement(STATEMENT, pair[0]), payloadType="text/html")
    with pytest.raises(ArtefactRefused, match="holds no in-toto statement: its payload type is 'text/html'"):
        verify_envelope(envelope, [pair[1]])


def test_no_signatures_and_no_keys(pair: tuple[Path, Path]) -> None:
    envelope = sign_statement(STATEMENT, pair[0])
    with pytest.raises(ArtefactRefused, match="none of 0"):
        verify_envelope(changed(envelope, signatures=[]), [pair[1]])
    with pytest.raises(ArtefactRefused, match="none of 1"):
        verify_envelope(envelope, [])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"payload": "***"}, "base64"),
        ({"payload": "YQ"}, "padding"),
        ({"payload": "é"}, "ASCII"),
        ({"payload": None}, "not a string"),
        ({"payloadType": 7}, "`payloadType` is not a string"),
        ({"signatures": {}}, "`signatures` is not a list"),
        ({"signatures": [{"sig": "YQ=="}] * 65}, "at most 64"),
        ({"signatures": ["sig"]}, "other types"),
        ({"signatures": [{"keyid": "a"}]}, "lacks `sig`"),
        ({"signatures": [{"sig": "*"}]}, "base64"),
    ],
)
def test_malformed_envelopes(pair: tuple[Path, Path], fields: dict[str, Any], why: str) -> None:
    envelope = sign_statement(STATEMENT, pair[0])
    with pytest.raises(InputDataError, match=f"the signed envelope is malformed: .*{why}"):
        verify_envelope(changed(envelope, **fields), [pair[1]])


@pytest.mark.parametrize("text", [b"", b"[]", b"7", b"null", b"<html>", b"[" * 9999, b"{}", b'{"payload": "\xff"}'])
def test_what_is_no_envelope(pair: tuple[Path, Path], text: bytes) -> None:
    with pytest.raises(InputDataError, match="the signed envelope is malformed"):
        verify_envelope(text, [pair[1]])


@pytest.mark.parametrize("signature", [b"", b"\0", b"0" * 70, b"\x30\x06\x02\x01\x00\x02\x01\x00"])
def test_a_signature_of_noise_is_refused(tmp_path: Path, signature: bytes) -> None:
    pairs = [write_pair(tmp_path, make(), name) for name, make in KINDS.items()]
    envelope = changed(sign_statement(STATEMENT, pairs[0][0]), signatures=[{"sig": packed(signature)}])
    with pytest.raises(ArtefactRefused, match="signature was not verified"):
        verify_envelope(envelope, [public for _, public in pairs])


@pytest.mark.parametrize("payload", [b"[]", b"x", b'{"a": 1'])
def test_a_signed_payload_that_is_no_object(tmp_path: Path, payload: bytes) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    _, public = write_pair(tmp_path, key)
    signed = b"DSSEv1 28 application/vnd.in-toto+json %d %s" % (len(payload), payload)
    told = {
        "payloadType": "application/vnd.in-toto+json", "payload": packed(payload),
        "signatures": [{"sig": packed(key.sign(signed))}],
    }  # fmt: skip
    with pytest.raises(InputDataError, match="the signed statement is"):
        verify_envelope(json.dumps(told).encode(), [public])


def test_files_that_are_not_keys(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    private, public = pair
    envelope = sign_statement(STATEMENT, private)
    garbage, large = tmp_path / "garbage.pub", tmp_path / "large.pub"
    garbage.write_bytes(b"-----BEGIN PUBLIC KEY-----\n" + packed(b"garbage").encode() + b"\n-----END PUBLIC KEY-----\n")
    large.write_bytes(b"-" * 100_000)
    unsupported = write_pair(tmp_path, dsa.generate_private_key(2048), "dsa")
    for path, words in (
        (tmp_path / "absent.pub", "the public key .*absent.pub cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (large, "cannot be read: it has more than 65,536 bytes"),
        (garbage, "garbage.pub is not a public key in PEM form"),
        (private, "key.pem is not a public key in PEM form"),
        (unsupported[1], "dsa.pub is of a kind that is not supported"),
    ):
        with pytest.raises(InputDataError, match=words):
            verify_envelope(envelope, [public, path])
    for path, words in (
        (public, "key.pub is not a private key in PEM form"),
        (unsupported[0], "dsa.pem is of a kind that is not supported"),
        (write_pair(tmp_path, KINDS["p256"](), "locked", b"word")[0], "the private key .*locked.pem has a password"),
    ):
        with pytest.raises(InputDataError, match=words):
            sign_statement(STATEMENT, path)


def test_signing_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path]) -> None:
    envelope = sign_statement(STATEMENT, pair[0])
    monkeypatch.setitem(sys.modules, "securesystemslib.dsse", None)
    for call in (lambda: verify_envelope(envelope, [pair[1]]), lambda: sign_statement(STATEMENT, pair[0])):
        with pytest.raises(HostError, match=r"pip install .*\[sign\]"):
            call()


@pytest.mark.process
def test_openssl_verifies_what_we_sign(tmp_path: Path) -> None:
    """Another implementation than the one that signs."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    for kind in ("p256", "rsa"):
        private, public = write_pair(tmp_path, KINDS[kind](), kind)
        told = json.loads(sign_statement(STATEMENT, private))
        payload = base64.b64decode(told["payload"])
        (tmp_path / "signed").write_bytes(b"DSSEv1 28 application/vnd.in-toto+json %d %s" % (len(payload), payload))
        (tmp_path / "signature").write_bytes(base64.b64decode(told["signatures"][0]["sig"]))
        command = ["openssl", "dgst", "-sha256", "-verify", str(public), "-signature", "signature", "signed"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout == "Verified OK\n", done.stderr
