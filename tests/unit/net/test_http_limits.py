"""The limited HTTP client over TLS, through a proxy, and after redirects."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterable
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.attacks.registry_servers import Answer, Request, drip, serving
from tests.support.hub_server import Hub
from tests.unit.sources.test_hub import use
from trtpipe.engines.errors import HostError
from trtpipe.pipeline.net import http_limits
from trtpipe.pipeline.net.http_limits import AnswerRefused, LimitedClient, patience
from trtpipe.pipeline.registry import oci_client
from trtpipe.pipeline.registry.address import open_registry
from trtpipe.pipeline.sources import hub

pytestmark = pytest.mark.loopback


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Of a server that this process believes."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    (tmp_path / "server.pem").write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    return context


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(http_limits, "ANSWER_SECONDS", 0.6)
    monkeypatch.setattr(http_limits, "SLOWEST", 1000)


def test_https_does_not_lead_to_http(tls: ssl.SSLContext) -> None:
    asked: list[Request] = []
    with serving(lambda request: [Answer(200, {}, b"plain").wire()], asked) as plain:

        def talk(request: Request) -> Iterable[bytes]:
            return [Answer(307, {"Location": f"http://{plain}/"}).wire() if "away" in request.path else Answer().wire()]

        with serving(talk, tls=tls) as address, LimitedClient(https=True) as client:
            assert client.get(f"https://{address}/").status_code == 200
            with pytest.raises(AnswerRefused, match=r"it redirects from https to http://127\.0\.0\.1"):
                client.get(f"https://{address}/away")
            with pytest.raises(AnswerRefused):
                client.get(f"http://{plain}/")
    assert asked == []


def test_a_certificate_of_a_companys_own_is_told_how_to_be_trusted(
    tls: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    monkeypatch.setattr(oci_client, "is_local", lambda host: False)
    with serving(lambda request: [Answer().wire()], tls=tls) as address:
        use(Hub(url=f"https://{address}"), tmp_path / "hf", monkeypatch)
        tries = (
            lambda: open_registry(f"oci://{address}/team/models"),
            lambda: open_registry("hf://team/models").targets(),
            lambda: hub.resolve_commit("acme/tiny", "main"),
            lambda: hub.fetch_config("acme/tiny", "0" * 40),
        )
        for one in tries:
            with pytest.raises(HostError, match="CERTIFICATE_VERIFY_FAILED") as error:
                one()
            assert error.value.remedy == "SSL_CERT_FILE names the certificates that are trusted"
    huggingface_hub.close_session()


def test_a_registry_of_another_machine_without_https(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci_client, "is_local", lambda host: False)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)

    def answer() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(1 << 16)
            sock.sendall(Answer(400).wire())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(HostError, match=r"WRONG_VERSION_NUMBER|record layer failure") as error:
            open_registry(f"oci://127.0.0.1:{listener.getsockname()[1]}/team/models")
        thread.join()
    assert error.value.remedy == (
        "it does not speak https, and plain http is for this machine alone; check its address"
    )


def test_another_host_is_not_told_who_asks() -> None:
    asked: list[Request] = []
    with serving(lambda request: [Answer().wire()], asked) as other:
        place = f"http://localhost:{other.partition(':')[2]}/"
        redirect = Answer(307, {"Location": place}).wire()
        with serving(lambda request: [redirect]) as address, LimitedClient(https=False) as client:
            assert client.get(f"http://{address}/", headers={"Authorization": "Basic me"}).status_code == 200
    assert [request.headers.get("authorization") for request in asked] == [None]


@pytest.mark.parametrize("way", ["plain", "tls", "proxy"])
@pytest.mark.usefixtures("soon")
def test_limits_hold_on_every_way(way: str, tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch) -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 100000\r\n\r\n"
    answers = {
        "/drip": lambda: drip([head, *[b"x"] * 50], 0.1),
        "/silence": lambda: drip([head, *[b""] * 50], 0.1),
        # 10 times as fast as the slowest, for longer than a small answer may take.
        "/slow": lambda: drip([head, *[b"x" * 2000] * 50], 0.02),
    }
    with serving(lambda request: answers[httpx.URL(request.path).path](), tls=tls if way == "tls" else None) as address:
        url = f"{'https' if way == 'tls' else 'http'}://{address}"
        if way == "proxy":
            monkeypatch.setenv("HTTP_PROXY", f"http://{address}")
            url = "http://nowhere.example"
        with LimitedClient(https=way == "tls") as client:
            for place, kind in (("/drip", AnswerRefused), ("/silence", httpx.ReadTimeout)):
                with client.stream("GET", url + place) as answer, pytest.raises(kind):
                    answer.read()
            with client.stream("GET", url + "/slow") as answer:
                assert sum(len(piece) for piece in answer.iter_raw()) == 100_000
            with pytest.raises(AnswerRefused, match="too long"):
                client.get(url + "/slow")


@pytest.mark.parametrize("way", ["plain", "tls"])
def test_another_thread_ends_the_wait_for_an_answer(way: str, tls: ssl.SSLContext) -> None:
    few = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nfew"
    with (
        serving(lambda request: drip([few], 20), tls=tls if way == "tls" else None) as address,
        LimitedClient(https=way == "tls") as client,
        client.stream("GET", f"{'https' if way == 'tls' else 'http'}://{address}/") as answer,
    ):
        pieces = answer.iter_raw()
        assert next(pieces) == b"few"
        threading.Timer(0.2, client.end).start()
        with pytest.raises(AnswerRefused, match=r"^its answer is no longer wanted$"):
            next(pieces)


@pytest.mark.usefixtures("soon")
def test_patience_gives_a_slow_answer_more_time() -> None:
    """A server that works before it answers."""
    with (
        serving(lambda request: drip([b"", b"", Answer(200, {}, b"done").wire()], 0.5)) as address,
        LimitedClient(https=False) as client,
    ):
        with pytest.raises(httpx.ReadTimeout, match="nothing came for 0 seconds"):
            client.get(f"http://{address}/")
        with patience(5):
            assert client.get(f"http://{address}/").content == b"done"


def test_nothing_is_decompressed() -> None:
    import gzip

    body = gzip.compress(bytes(1 << 20))
    with (
        serving(lambda request: [Answer(200, {"Content-Encoding": "gzip"}, body).wire()]) as address,
        LimitedClient(https=False) as client,
        pytest.raises(AnswerRefused, match=r"its answer is compressed \(gzip\)"),
    ):
        client.get(f"http://{address}/")
