"""Deployments of the tests: engines, their settings, and the manifests that are made of them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import yaml

from tests.support.paths import DATA
from tests.unit.engines.test_passport import passport, target
from trtpipe.configs.facts import find_gpu
from trtpipe.engines.passport import Passport
from trtpipe.pipeline.deploy.config import DeployConfig
from trtpipe.pipeline.deploy.kubernetes import chart, manifests, plan
from trtpipe.pipeline.deploy.values import to_yaml

# The oldest that the base is for, the newest there is, and some between.
VERSIONS = ("1.29", "1.32", "1.35", kubernetes_validate.latest_version())
OURS = "registry.example.com/trtpipe:1"
GATEWAY = "registry.example.com/gateway:1"


def engine(tp: int = 1, pp: int = 1, **changes: Any) -> Passport:
    return passport(target(tp_size=tp, pp_size=pp), **changes)


def reference(**changes: Any) -> Passport:
    return engine(
        **{"runtime": "reference", "gpu": "cpu", "sm": None, "sms": None, "toolchain": None, "image": None, **changes}
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """One deployment: an engine, its GPU, and the settings beside the defaults."""

    passport: Passport
    gpu: str = "h100"
    settings: dict[str, Any] = dataclasses.field(default_factory=lambda: {"pvc": "models"})

    def config(self, **more: Any) -> DeployConfig:
        return DeployConfig(**{"name": "llama3-8b.h100.fp8", "gateway_image": GATEWAY, **self.settings, **more})


CASES = {
    "one": Case(engine()),
    "tp2": Case(engine(2), settings={"pvc": "models", "replicas_min": 2, "namespace": "llm"}),
    "group": Case(engine(8, 2), settings={"model_image": "registry.example.com/llama@sha256:c0ffee"}),
    "wide": Case(engine(16), settings={"pvc": "models", "replicas_min": 2, "surge": False, "replicas_max": 2}),
    "fixed": Case(
        engine(),
        settings={
            "pvc": "models", "replicas_max": 1, "repository_path": "", "surge": False, "openai": False,
            "gateway_image": None,
        },
    ),
    "dressed": Case(
        engine(4),
        settings={
            "model_image": "models", "priority_class": "serving", "runtime_class": "nvidia", "memory": "64Gi",
            "image_pull_secret": "registry", "product": "NVIDIA-H100-PCIe", "image": "mirror/triton:26.06",
            "gateway_workers": 3, "api_keys_secret": "ours", "termination_grace_seconds": 300,
            "otlp_endpoint": "http://collector.tracing:4318",
            "tolerations": ("cloud.google.com/gke-spot=true:NoSchedule", "spot:NoExecute"),
        },
    ),
    "trial": Case(
        reference(), "cpu", {"host_path": "/srv/models", "image": OURS, "gateway_image": None, "api_keys": False}
    ),
    "slice": Case(engine(gpu="a100-mig-3g.40gb", sm=80, sms=(80,)), "a100-mig-3g.40gb"),
    "vllm": Case(engine(2, runtime="vllm", toolchain=None, image=None), settings={"pvc": "models", "image": OURS}),
    "llmapi": Case(engine(2, runtime="trtllm_pytorch")),
    "llmapis": Case(engine(8, 2, runtime="trtllm_pytorch")),
}  # fmt: skip

# Those of several pods.
GROUPS = ("group", "wide", "llmapis")
# libyaml's: PyYAML's own takes ten times as long.
read = functools.partial(yaml.load, Loader=yaml.CSafeLoader)


@functools.cache
def made(name: str, /, **more: Any) -> dict[str, dict[str, Any]]:
    """The manifests of a case, as they are read back from their YAML; not to be changed, since they are kept."""
    case = CASES[name]
    built = manifests(plan(case.passport, find_gpu(case.gpu), case.config(**more)))
    return {path: read(to_yaml(manifest)) for path, manifest in built.items()}


def resources(name: str, /, **more: Any) -> dict[str, dict[str, Any]]:
    """Those a cluster gets of the base and its component, by kind and name."""
    paths = ("base/", "components/")
    found = [one for path, one in made(name, **more).items() if path.startswith(paths)]
    found = [one for one in found if one["kind"] not in ("Kustomization", "Component")]
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in found}


def one(name: str, kind: str, **more: Any) -> dict[str, Any]:
    (found,) = [value for key, value in resources(name, **more).items() if key.startswith(kind + "/")]
    return found


def templates(name: str, /, **more: Any) -> Iterator[dict[str, Any]]:
    """The pod templates, the serving one first."""
    for resource in resources(name, **more).values():
        if resource["kind"] == "Deployment":
            yield resource["spec"]["template"]
        if resource["kind"] == "LeaderWorkerSet":
            group = resource["spec"]["leaderWorkerTemplate"]
            yield from (group["leaderTemplate"], group["workerTemplate"])


def container(name: str, /, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = next(templates(name, **more))["spec"]["containers"][0]
    return found


def gateway(name: str, /, **more: Any) -> dict[str, Any]:
    (found,) = [one for one in next(templates(name, **more))["spec"]["containers"] if one["name"] == "gateway"]
    return found  # type: ignore[no-any-return]


def servers(words: list[str]) -> list[list[str]]:
    """The commands of the ranks."""
    starts = [index for index, word in enumerate(words) if word == "tritonserver"]
    ends = [words.index(":", start) if ":" in words[start:] else len(words) for start in starts]
    return [words[start:end] for start, end in zip(starts, ends, strict=True)]


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"{name}.schema.json").read_text())
    return found


@functools.cache
def charted(name: str) -> dict[str, str]:
    case = CASES[name]
    return {
        path.removeprefix("chart/"): text
        for path, text in chart(plan(case.passport, find_gpu(case.gpu), case.config())).items()
    }
