"""Pod specifications: resources, permissions and probes of the containers."""

from __future__ import annotations

import math
from typing import Any

from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.passport import Passport
from trtpipe.pipeline.deploy import rendezvous
from trtpipe.pipeline.deploy.config import DeployConfig
from trtpipe.pipeline.deploy.launch import (
    MODELS,
    PORTS,
    PRE_STOP_SECONDS,
    RENDEZVOUS_PORT,
    SCRIPTS,
    TEMPORARY,
    own_image,
)
from trtpipe.pipeline.deploy.placement import Placement

# Triton's images have a user with this number, triton-server; so does our image.
USER = 1000
GPU = "nvidia.com/gpu"
GPU_PRODUCT = "nvidia.com/gpu.product"
# Where the container that copies mounts the volume that the server reads.
COPIED = "/repository"
# Key of the one value in a group's Secret.
SECRET_KEY = "secret"
GIB = 2**30
# Memory of a server, its Python models, CUDA and NCCL.
BASE_BYTES = 8 * GIB
PROBE_SECONDS = 10


def pod_spec(
    passport: Passport, gpu: GpuSpec, config: DeployConfig, placement: Placement, *,
    image: str, words: list[str], answers: bool, scripts: str | None, secret: str | None,
) -> dict[str, Any]:  # fmt: skip
    """A pod that runs the command `words`; with `answers` it has ports and probes. `scripts` is the ConfigMap of its
    scripts, `secret` the Secret by which the pods of a group recognise each other."""
    spec: dict[str, Any] = {
        # The pod does not use the cluster's API.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": config.termination_grace_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if not gpu.is_cpu:
        spec["nodeSelector"] = {GPU_PRODUCT: config.product or gpu.product}
        spec["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    if config.priority_class is not None:
        spec["priorityClassName"] = config.priority_class
    if config.runtime_class is not None:
        spec["runtimeClassName"] = config.runtime_class
    if config.image_pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": config.image_pull_secret}]
    if config.model_image is not None:
        spec["initContainers"] = [_copying(config)]
    spec["containers"] = [_container(passport, gpu, config, placement, image, words, answers, scripts, secret)]
    spec["volumes"] = _volumes(config, scripts)
    return spec


def _container(
    passport: Passport, gpu: GpuSpec, config: DeployConfig, placement: Placement, image: str, words: list[str],
    answers: bool, scripts: str | None, secret: str | None,
) -> dict[str, Any]:  # fmt: skip
    container: dict[str, Any] = {
        "name": "server" if answers else "worker",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        # Not `command`: the image's entry point sets up the driver and CUDA's compatibility libraries.
        "args": words,
        # Paths in a repository's configuration may be relative to it.
        "workingDir": MODELS,
        "env": _environment(passport, secret),
        "resources": _resources(passport, gpu, config, placement),
        "securityContext": _restricted(),
        "volumeMounts": _mounts(config, scripts),
    }
    if not answers:
        # A worker has nothing to probe: its process ends with the leader's, and the group is made anew.
        return container
    ports = dict(PORTS) if placement.pods == 1 else {**PORTS, "rendezvous": RENDEZVOUS_PORT}
    container["ports"] = [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]
    # The port opens when all models are loaded, minutes after the start.
    tries = math.ceil(config.startup_seconds / PROBE_SECONDS)
    container["startupProbe"] = _probe("ready", PROBE_SECONDS, tries)
    container["livenessProbe"] = _probe("live", PROBE_SECONDS, 6)
    container["readinessProbe"] = _probe("ready", 5, 3)
    # Requests go on arriving until every client knows that the pod ends; only then is the server told.
    container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_SECONDS)]}}}
    return container


def _probe(state: str, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": f"/v2/health/{state}", "port": "http"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _environment(passport: Passport, secret: str | None) -> list[dict[str, Any]]:
    values = {
        # The image's own home is not writable.
        "HOME": TEMPORARY,
        "PYTHONDONTWRITEBYTECODE": "1",
        # A server fetches nothing when it starts.
        "HF_HUB_OFFLINE": "1",
    }
    if own_image(passport):
        values["TRTPIPE_HOME"] = f"{TEMPORARY}/trtpipe"
    plain: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in values.items()]
    if secret is None:
        return plain
    return [*plain, {"name": rendezvous.SECRET, "valueFrom": {"secretKeyRef": {"name": secret, "key": SECRET_KEY}}}]


def _resources(passport: Passport, gpu: GpuSpec, config: DeployConfig, placement: Placement) -> dict[str, Any]:
    """Resource requests. Only GPUs have a limit: a CPU limit slows the steps down, and a memory limit that is a guess
    kills a server that loads."""
    # The reference runtime holds all ranks in one process, computes in float32, and keeps its cache beside them.
    ranks = 3 * passport.world_size if gpu.is_cpu else placement.ranks
    weights = ranks * passport.rank_bytes
    requests = {
        "cpu": str(config.cpus * placement.ranks),
        "memory": config.memory or f"{math.ceil((weights + BASE_BYTES) / GIB)}Gi",
    }
    if config.model_image is not None:
        requests["ephemeral-storage"] = f"{math.ceil(passport.rank_bytes * passport.world_size * 1.1 / GIB) + 2}Gi"
    return {"requests": requests} if gpu.is_cpu else {"requests": requests, "limits": {GPU: str(placement.ranks)}}


def _restricted() -> dict[str, Any]:
    """Settings that the Pod Security Standard `restricted` asks for, and a read-only root file system."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def _copying(config: DeployConfig) -> dict[str, Any]:
    """A container that copies the repository. An image as a volume needs no copy, but is off before Kubernetes 1.35."""
    return {
        "name": "models",
        "image": config.model_image,
        "command": ["cp", "-R", f"/{config.repository_path}/.", COPIED],
        "resources": {"requests": {"cpu": "1", "memory": "256Mi"}},
        "securityContext": _restricted(),
        "volumeMounts": [{"name": "models", "mountPath": COPIED}],
    }


def _mounts(config: DeployConfig, scripts: str | None) -> list[dict[str, Any]]:
    models: dict[str, Any] = {"name": "models", "mountPath": MODELS, "readOnly": True}
    if config.model_image is None and config.repository_path:
        models["subPath"] = config.repository_path
    mounts = [models, {"name": "shm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": TEMPORARY}]
    if scripts is not None:
        mounts.append({"name": "scripts", "mountPath": SCRIPTS, "readOnly": True})
    return mounts


def _volumes(config: DeployConfig, scripts: str | None) -> list[dict[str, Any]]:
    source: dict[str, Any] = {"emptyDir": {}}
    if config.pvc is not None:
        source = {"persistentVolumeClaim": {"claimName": config.pvc, "readOnly": True}}
    elif config.host_path is not None:
        source = {"hostPath": {"path": config.host_path, "type": "Directory"}}
    volumes: list[dict[str, Any]] = [
        {"name": "models", **source},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": config.shm_size}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if scripts is not None:
        volumes.append({"name": "scripts", "configMap": {"name": scripts}})
    return volumes
