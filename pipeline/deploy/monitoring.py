"""Monitoring of a served repository: a Grafana dashboard, a Prometheus scrape config and alert rules.

The files are data in templates/. The dashboard is Grafana's classic JSON model, in the schema version that Grafana 11.6
and 12 write (newer ones update older dashboards when they load them); one serves any number of servers and
repositories. The scrape config gets the addresses of the servers, the alert rules the names of the models.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from trtpipe.engines.errors import UsageError
from trtpipe.engines.yaml_input import load_yaml

FOLDER = "monitoring"
DASHBOARD, SCRAPE, ALERTS = "grafana-dashboard.json", "prometheus.yml", "alerts.yml"
TARGETS = ("localhost:8002",)

_TEMPLATES = Path(__file__).parent / "templates"


def write_monitoring(repository_models: Iterable[str], out: Path, *, targets: Sequence[str] = TARGETS) -> Path:
    """Write OUT/monitoring/ for a repository with these models, served at `targets` (host:port of the metrics).

    Returns the folder. Raises UsageError if `out` is a model repository: Triton takes each folder in it for a model.
    """
    if out.is_dir() and any(out.glob("*/config.pbtxt")):
        raise UsageError(
            f"{out} is a model repository",
            why=f"Triton would take the folder '{FOLDER}' in it for a model",
            remedy="name a folder beside it",
        )
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DASHBOARD).write_bytes((_TEMPLATES / DASHBOARD).read_bytes())
    for name, content in ((SCRAPE, _scrape_config(targets)), (ALERTS, _alert_rules(sorted(set(repository_models))))):
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False, width=120), encoding="utf-8")
    return folder


def _scrape_config(targets: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = load_yaml(_TEMPLATES / SCRAPE)
    config["scrape_configs"][0]["static_configs"][0]["targets"] = list(targets)
    return config


def _alert_rules(models: Sequence[str]) -> dict[str, Any]:
    content: dict[str, Any] = load_yaml(_TEMPLATES / ALERTS)
    (group,) = content["groups"]
    missing = group["rules"].pop()
    for model in models:
        rule = copy.deepcopy(missing)
        rule["expr"] = rule["expr"].replace('"MODEL"', json.dumps(model))
        rule["labels"]["model"] = model
        group["rules"].append(rule)
    return content
