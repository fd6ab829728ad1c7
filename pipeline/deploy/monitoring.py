"""Monitoring of a served repository and its gateway: a Grafana dashboard, a Prometheus scrape config and alert rules.

The files are data in templates/. The dashboard is Grafana's classic JSON model, in the schema version that Grafana 11.6
and 12 write (newer ones update older dashboards when they load them); one serves any number of servers and
repositories. The scrape config gets the addresses of the servers, the alert rules the names of the models.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from trtpipe.engines.errors import HostError, UsageError
from trtpipe.engines.yaml_input import load_yaml
from trtpipe.pipeline.store.folders import write_together

DASHBOARD, SCRAPE, ALERTS = "grafana-dashboard.json", "prometheus.yml", "alerts.yml"
SERVERS, GATEWAYS = ("localhost:8002",), ("localhost:9000",)

_TEMPLATES = Path(__file__).parent / "templates"


def write_monitoring(
    repository_models: Iterable[str], out: Path, *,
    targets: Sequence[str] = SERVERS, gateways: Sequence[str] = GATEWAYS, key_file: Path | None = None,
) -> None:  # fmt: skip
    """Write the files into the folder `out`, for a repository with these models.

    targets, gateways  where the servers' and the gateways' metrics are, host:port or URL. Without gateways there is no
                       job and no alert of them
    key_file           file with a key of the gateways, as Prometheus finds it

    Raises UsageError for an invalid address, a key without a gateway, and if `out` is a model repository or a folder in
    one: Triton takes each folder there for a model. Raises HostError where they cannot be written.
    """
    config = _scrape_config(targets, gateways, key_file)
    for repository in (out, out.absolute().parent):
        if any(repository.glob("*/config.pbtxt")):
            raise UsageError(
                f"{repository} is a model repository", why="Triton would take a folder in it for a model",
                remedy="name a folder beside it",
            )  # fmt: skip
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", remedy="name a folder")
    rules = _alert_rules(sorted(set(repository_models)), gateway=bool(gateways))
    made = {name: yaml.safe_dump(one, sort_keys=False, width=120) for name, one in ((SCRAPE, config), (ALERTS, rules))}
    made[DASHBOARD] = (_TEMPLATES / DASHBOARD).read_text(encoding="utf-8")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_together({out / name: text for name, text in made.items()})
    except OSError as error:
        why = error.strerror or str(error)
        raise HostError(f"{out} cannot be written", why=why, remedy="name another folder, or make room there") from None


def _scrape_config(targets: Sequence[str], gateways: Sequence[str], key_file: Path | None) -> dict[str, Any]:
    config: dict[str, Any] = load_yaml(_TEMPLATES / SCRAPE)
    if key_file is not None and not gateways:
        raise UsageError(
            "a key of the gateways is given, and there is no gateway", remedy="name gateways, or leave the key out"
        )
    for job, where in zip(config["scrape_configs"], (targets, gateways), strict=True):
        found = [_address(one) for one in dict.fromkeys(where)]
        plain, encrypted = ([address for scheme, address in found if scheme == one] for one in ("http", "https"))
        job["static_configs"] = [{"targets": plain}] if plain else []
        if encrypted:
            job["static_configs"].append({"targets": encrypted, "labels": {"__scheme__": "https"}})
    if key_file is not None:
        job["authorization"] = {"credentials_file": str(key_file)}
    if not gateways:
        config["scrape_configs"].remove(job)
    return config


def _address(text: str) -> tuple[str, str]:
    """Scheme and host:port of an address or a URL. Raises UsageError."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port
        good = good and parts.path in ("", "/", "/metrics")
    except ValueError:  # of the port, or of a bracket
        good = False
    if not good or re.search(r"[\s,@]", text):
        raise UsageError(f"'{text}' is not the address of metrics", remedy="give host:port, as gpu-1:8002")
    # A server that listens on all addresses is found on this machine.
    return parts.scheme, f"localhost:{parts.port}" if parts.hostname == "0.0.0.0" else parts.netloc


def _alert_rules(models: Sequence[str], *, gateway: bool) -> dict[str, Any]:
    content: dict[str, Any] = load_yaml(_TEMPLATES / ALERTS)
    (group,) = content["groups"]
    missing = group["rules"].pop()
    if not gateway:
        group["rules"] = [rule for rule in group["rules"] if 'job="trtpipe-gateway"' not in rule["expr"]]
    for model in models:
        rule = copy.deepcopy(missing)
        rule["expr"] = rule["expr"].replace('"MODEL"', json.dumps(model))
        rule["labels"]["model"] = model
        group["rules"].append(rule)
    return content
