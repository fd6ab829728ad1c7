"""Values that the manifests share with a Helm chart: plain in the kustomize base, settable in the chart's templates.

A manifest holds `Lifted(key, value)` where a chart's user may set something. The base is written with the value, the
template with a reference to the key, and values.yaml with the values of all keys: nothing is written twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

# Key -> what it is. values.yaml and its schema hold those that the manifests of a target use.
MEANINGS = {
    "image": "image of the server",
    "gatewayImage": "image of the gateway, with trtpipe in it",
    "imagePullSecrets": "existing secrets for private registries: [{name: NAME}]",
    "replicas": "number of replicas",
    "autoscaling.minReplicas": "smallest number of replicas",
    "autoscaling.maxReplicas": "largest number of replicas",
    "autoscaling.waitingPerReplica": "requests that may wait in an engine, on average, before a replica is added",
    "autoscaling.unansweredPerReplica": "requests of a gateway that may be without a token before a replica is added",
    "autoscaling.scaleDownSeconds": "how long the load must have been lower before a replica is removed",
    "resources.cpu": "CPU cores of the server",
    "resources.memory": "host memory of the server",
    "resources.shm": "size of /dev/shm",
    "nodeSelector": "labels of the nodes",
    "tolerations": "taints of nodes that pods bear; spot nodes have one on most clouds",
    "claim": "PersistentVolumeClaim that holds the model repository",
    "modelImage": "image that holds the model repository",
    "traces.endpoint": "collector of traces, OTLP over HTTP; empty for none",
    "traces.port": "port of the collector, which the network policy opens",
    "apiKeysSecret": "existing secret: api-keys, one a line, and metrics-key, one of them for Prometheus",
    "podMonitor": "whether to write a PodMonitor, for the Prometheus operator",
}


@dataclass(frozen=True)
class Lifted:
    """A value of a manifest that a chart's user may set by `key`, one of MEANINGS."""

    key: str
    value: Any


class _Plain(yaml.SafeDumper):
    """YAML dumper for readers: no anchors or aliases, and texts of several lines as they are."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Template(_Plain):
    """The same, with a mark where a chart's user may set something."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


def _represent_value(dumper: yaml.SafeDumper, lifted: Lifted) -> yaml.Node:
    return dumper.represent_data(lifted.value)


def _represent_mark(dumper: yaml.SafeDumper, lifted: Lifted) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", f"LIFTED({lifted.key})")


_Plain.add_representer(str, _represent_text)
_Plain.add_representer(Lifted, _represent_value)
_Template.add_representer(Lifted, _represent_mark)


def to_yaml(manifest: Any) -> str:
    return yaml.dump(manifest, Dumper=_Plain, sort_keys=False, width=1000)


def to_template(manifest: Any, *, condition: str | None = None) -> str:
    """A template of a chart, whose values are JSON, which is YAML wherever it stands; `condition` is the key of a value
    without which the template is empty."""
    text = yaml.dump(manifest, Dumper=_Template, sort_keys=False, width=1000)
    text = re.sub(r"\{\{", '{{ "{{" }}', text)
    text = re.sub(r"LIFTED\(([\w.]+)\)", r"{{ toJson .Values.\1 }}", text)
    return text if condition is None else f"{{{{- if .Values.{condition} }}}}\n{text}{{{{- end }}}}\n"


def lifted(manifests: Iterable[Any]) -> dict[str, Any]:
    """Key -> value of all that can be set in the manifests, in the order of MEANINGS."""
    found = {one.key: one.value for manifest in manifests for one in _all(manifest)}
    return {key: found[key] for key in MEANINGS if key in found}


def values_yaml(values: dict[str, Any]) -> str:
    """values.yaml, each value after a comment that says what it is."""
    lines: list[str] = []
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        if group and f"{group}:" not in lines:
            lines.append(f"{group}:")
        indent = "  " if group else ""
        text = yaml.dump({name: value}, Dumper=_Plain, sort_keys=False, width=1000)
        lines += [f"{indent}{line}" for line in (f"# {MEANINGS[key]}", *text.splitlines())]
    return "\n".join(lines) + "\n"


def values_schema(values: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of values.yaml: Helm refuses a misspelt key, and a value of another kind."""
    schema: dict[str, Any] = _object()
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        at = schema["properties"].setdefault(group, _object()) if group else schema
        # `helm --set resources.cpu=8` sends a number, which is a quantity as well.
        quantity = isinstance(value, str) and value[:1].isdigit()
        kind = ["string", "number"] if quantity else _KINDS[type(value)]
        at["properties"][name] = {"type": kind, "description": MEANINGS[key]}
    # Helm adds it.
    schema["properties"]["global"] = {"type": "object"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


_KINDS = {str: "string", int: "integer", bool: "boolean", list: "array", dict: "object"}


def _object() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def _all(manifest: Any) -> Iterator[Lifted]:
    if isinstance(manifest, Lifted):
        yield manifest
    elif isinstance(manifest, dict):
        for value in manifest.values():
            yield from _all(value)
    elif isinstance(manifest, list):
        for value in manifest:
            yield from _all(value)
