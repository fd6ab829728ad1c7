"""Hosts that may receive the credentials of a registry: its own host, and hosts of the same site."""

from __future__ import annotations

import ipaddress
import os

# Hosts that the user allows to receive a registry's credentials, separated by commas.
AUTH_HOSTS = "TRTPIPE_AUTH_HOSTS"
# Domains in which anybody can register a name: hosts within them are not of one site. From the Public Suffix List, the
# domains of registries, storage and other HTTP services.
SHARED = (
    "amazonaws.com", "on.aws", "cloudfront.net", "azurecr.io", "azurewebsites.net", "azure.com", "cloudapp.net",
    "appspot.com", "run.app", "web.app", "cloudfunctions.net", "github.io", "gitlab.io", "pages.dev", "workers.dev",
    "herokuapp.com", "fly.dev", "onrender.com", "vercel.app", "netlify.app", "ngrok.io", "ngrok.app", "ngrok.dev",
    "ngrok-free.app", "ngrok-free.dev", "trycloudflare.com", "jfrog.io", "digitaloceanspaces.com", "ondigitalocean.app",
    "up.railway.app", "hf.space", "eu.org", "nip.io", "sslip.io", "duckdns.org", "ddns.net", "dyndns.org",
)  # fmt: skip


def may_have_credentials(other: str, registry: str) -> bool:
    """Whether the host `other`, which a registry names for tokens, may receive the registry's credentials.

    Both hosts are without a port. Allowed are the registry's own host, hosts within it, and hosts of its parent domain
    (registry-1.docker.io uses auth.docker.io, registry.gitlab.com gitlab.com); also hosts in TRTPIPE_AUTH_HOSTS.
    """
    other, registry = other.lower().rstrip("."), registry.lower().rstrip(".")
    if not other:
        return False
    if other == registry or other in os.environ.get(AUTH_HOSTS, "").lower().replace(" ", "").split(","):
        return True
    if _address(registry) or _address(other):
        return False
    return any(
        other == site or other.endswith(f".{site}")
        for site in (registry, registry.partition(".")[2])
        if not _shared(site)
    )


def _address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _shared(domain: str) -> bool:
    """Whether anybody can register a name in this domain; also true for one label (io), and for such as co.uk."""
    labels = domain.split(".")
    if len(labels) < 2 or (len(labels) == 2 and len(labels[0]) <= 3 and len(labels[1]) == 2):
        return True
    return any(domain == shared or domain.endswith(f".{shared}") for shared in SHARED)
