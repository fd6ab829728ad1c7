"""Where credentials of registries of images come from, and which hosts may have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtpipe.engines.errors import InputDataError
from trtpipe.pipeline.registry.docker_config import Credentials, credentials
from trtpipe.pipeline.registry.oci_client import OciClient
from trtpipe.pipeline.registry.sites import may_have_credentials


@pytest.mark.parametrize(
    ("registry", "others", "strangers"),
    [
        ("registry-1.docker.io", ["auth.docker.io", "docker.io", "AUTH.DOCKER.IO."], ["docker.io.x", "evil.io"]),
        ("registry.gitlab.com", ["gitlab.com", "registry.gitlab.com"], ["gitlab.com.evil.example", "notgitlab.com"]),
        ("registry.digitalocean.com", ["api.digitalocean.com"], ["com", "evil.com"]),
        ("registry.eu.team.example", ["auth.eu.team.example"], ["team.example", "auth.us.team.example"]),
        ("ghcr.io", ["ghcr.io", "auth.ghcr.io"], ["io", "quay.io", "evilghcr.io"]),
        ("victim.azurecr.io", ["victim.azurecr.io"], ["evil.azurecr.io", "azurecr.io"]),
        ("1.dkr.ecr.us-east-1.amazonaws.com", [], ["2.dkr.ecr.us-east-1.amazonaws.com", "evil.s3.amazonaws.com"]),
        ("victim.github.io", [], ["evil.github.io"]),
        ("shop.co.uk", ["registry.shop.co.uk"], ["evil.co.uk", "co.uk"]),
        ("registry.shop.co.uk", ["shop.co.uk", "auth.shop.co.uk"], ["evil.co.uk"]),
        ("10.0.0.5", ["10.0.0.5"], ["11.0.0.5", "10.0.0.6", "0.0.5"]),
        ("[::1]", ["[::1]"], ["[::2]"]),
        ("localhost", ["localhost", "named.example"], ["evil", "example", "other.named.example"]),
    ],
)  # fmt: skip
def test_which_hosts_are_of_one_site(
    registry: str, others: list[str], strangers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTPIPE_AUTH_HOSTS", "first.example, named.example")
    assert [host for host in others if not may_have_credentials(host, registry)] == []
    assert [host for host in strangers if may_have_credentials(host, registry)] == []
    monkeypatch.delenv("TRTPIPE_AUTH_HOSTS")
    assert not may_have_credentials("", registry)


def helper(folder: Path, name: str, script: str) -> None:
    path = folder / f"docker-credential-{name}"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.process
def test_where_credentials_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    file = tmp_path / "docker" / "config.json"
    assert credentials("registry.example") is None
    auths: dict[str, Any] = {
        "one.example": {"auth": "b25l"}, "https://two.example/v1/": {"auth": "dHdv"}, "asked.example": {},
        "three.example:5000": {"auth": "dGhyZWU="}, "localhost:5000": {"auth": "aGVyZQ=="},
        "https://index.docker.io/v1/": {"auth": "aHVi"},
        "azure.example": {"auth": "MDAwMDAwMDAtMDAwMC0wMDAwLTAwMDAtMDAwMDAwMDAwMDAwOg==", "identitytoken": "eyJ.one"},
    }  # fmt: skip
    helpers = {"asked.example": "works", "broken.example": "broken", "absent.example": "absent"}
    helpers["helped.example"] = "identity"
    helpers |= {f"{name}.example": name for name in ("locked", "silent", "stderr")}
    file.write_text(json.dumps({"auths": auths, "credHelpers": helpers, "credsStore": "store"}))
    helper(tmp_path, "works", 'cat >"$0.asked"; echo \'{"Username": "ali", "Secret": "open sesame"}\'')
    helper(tmp_path, "identity", 'cat >/dev/null; echo \'{"Username": "<token>", "Secret": "eyJ.two"}\'')
    helper(tmp_path, "broken", "echo '[]'")
    helper(tmp_path, "store", "echo 'credentials not found in native keychain'; exit 1")
    helper(tmp_path, "locked", "printf 'the chain\\033 is locked\\nsecond line\\n'; exit 1")
    helper(tmp_path, "silent", "exit 3")
    helper(tmp_path, "stderr", "echo 'no such project' >&2; exit 1")
    assert [credentials(host) for host in ("one.example", "two.example", "three.example:5000", "three.example")] == [
        Credentials("b25l"), Credentials("dHdv"), Credentials("dGhyZWU="), None,
    ]  # fmt: skip
    assert credentials("127.0.0.1:5000") == Credentials("aGVyZQ==")
    assert credentials("registry-1.docker.io") == Credentials("aHVi")
    assert credentials("asked.example") == Credentials("YWxpOm9wZW4gc2VzYW1l")
    assert credentials("azure.example") == Credentials(identity="eyJ.one")
    assert credentials("helped.example") == Credentials(identity="eyJ.two")
    assert (tmp_path / "docker-credential-works.asked").read_text() == "asked.example"
    assert credentials("other.example") is None
    failing = ("broken", "absent", "locked", "silent", "stderr")
    assert [credentials(f"{name}.example") for name in failing] == [
        Credentials(failure=f"docker-credential-{why}")
        for why in (
            "broken gives no credentials: its answer has no `Username` and `Secret`",
            "absent cannot be run: No such file or directory",
            "locked gives no credentials: the chain is locked",
            "silent gives no credentials: it exits with 3",
            "stderr gives no credentials: no such project",
        )
    ]
    for text, why in (
        ("[", "is not JSON"),
        ("[]", "holds a list"),
        ('{"auths": []}', None),
        ('{"auths": 7}', "`auths` in"),
    ):
        file.write_text(text)
        if why is None:
            assert credentials("one.example") is None
            continue
        with pytest.raises(InputDataError, match=why):
            credentials("one.example")
    file.write_text('{"auths": {"one.example": {"auth": "a\\r\\nb"}}}')
    with pytest.raises(InputDataError, match="no base64"):
        credentials("one.example")


def test_docker_io_is_docker_hubs_registry() -> None:
    client = OciClient("docker.io", "oci://docker.io/team/models")
    assert client.base == "https://registry-1.docker.io"
    client.require_own("https://registry-1.docker.io/v2/team/models/blobs/uploads/1")
    assert OciClient("docker.io.example", "").base == "https://docker.io.example"
