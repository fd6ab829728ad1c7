"""Pod specifications: resources, permissions and probes of the containers."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath
from typing import Any

from trtpipe.engines.gpu import GpuSpec
from trtpipe.pipeline.deploy import liveness, rendezvous
from trtpipe.pipeline.deploy.config import DeployConfig
from trtpipe.pipeline.deploy.launch import (
    API_KEYS,
    GATEWAY_PORT,
    MARGIN_SECONDS,
    MODELS,
    PORTS,
    PRE_STOP_SECONDS,
    RENDEZVOUS_PORT,
    SCRIPTS,
    TEMPORARY,
    gateway_words,
    own_image,
)
from trtpipe.pipeline.deploy.target import Target
from trtpipe.pipeline.deploy.values import Lifted

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
LOST_NODE_SECONDS = 30


def pod_spec(target: Target, component: str, words: list[str]) -> dict[str, Any]:
    """A pod of the server or a worker, which runs the command `words`."""
    config, gpu = target.config, target.gpu
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
        spec["nodeSelector"] = Lifted("nodeSelector", {GPU_PRODUCT: config.product or gpu.product})
    spec["tolerations"] = Lifted("tolerations", _tolerations(config, gpu))
    if config.priority_class is not None:
        spec["priorityClassName"] = config.priority_class
    if config.runtime_class is not None:
        spec["runtimeClassName"] = config.runtime_class
    if config.image_pull_secret is not None:
        spec["imagePullSecrets"] = Lifted("imagePullSecrets", [{"name": config.image_pull_secret}])
    if config.model_image is not None:
        spec["initContainers"] = [_copying(config)]
    answers = component == "server"
    spec["containers"] = [_container(target, component, words)]
    if answers and target.gateway_image is not None:
        spec["containers"].append(_gateway(target))
    spec["volumes"] = _volumes(target, keys=answers)
    return spec


def _tolerations(config: DeployConfig, gpu: GpuSpec) -> list[dict[str, Any]]:
    tolerations: list[dict[str, Any]] = []
    if not gpu.is_cpu:
        tolerations.append({"key": GPU, "operator": "Exists", "effect": "NoSchedule"})
    for taint in config.tolerations:
        name, _, effect = taint.rpartition(":")
        key, equals, value = name.partition("=")
        which = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
        tolerations.append({"key": key, **which, "effect": effect})
    # A node that was taken away is waited for five minutes, if nothing else is said.
    for condition in ("not-ready", "unreachable"):
        tolerations.append(
            {
                "key": f"node.kubernetes.io/{condition}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": LOST_NODE_SECONDS,
            }
        )
    return tolerations


def _container(target: Target, component: str, words: list[str]) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": component,
        "image": Lifted("image", target.image),
        "imagePullPolicy": "IfNotPresent",
        # Not `command`: the image's entry point sets up the driver and CUDA's compatibility libraries.
        "args": words,
        # Paths in a repository's configuration may be relative to it.
        "workingDir": MODELS,
        "env": _environment(ours=own_image(target.passport), secret=target.secret),
        "resources": _resources(target),
        "securityContext": _restricted(),
        "volumeMounts": _mounts(target),
    }
    if component != "server":
        # A worker has nothing to probe: its process ends with the leader's, and the group is made anew.
        return container
    container["ports"] = _ports(PORTS if not target.grouped else {**PORTS, "rendezvous": RENDEZVOUS_PORT})
    # The port opens when all models are loaded, minutes after the start.
    tries = math.ceil(target.config.startup_seconds / PROBE_SECONDS)
    container["startupProbe"] = _probe("/v2/health/ready", "http", PROBE_SECONDS, tries)
    # `trtpipe serve` sees a process that has died, and loads again: its port is closed for as long as a start takes.
    container["livenessProbe"] = (
        _probe("/v2/health/live", "http", PROBE_SECONDS, tries) if own_image(target.passport) else _liveness()
    )
    container["readinessProbe"] = _probe("/v2/health/ready", "http", 5, 3)
    # Requests go on arriving until every client knows that the pod ends; only then is the server told.
    container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_SECONDS)]}}}
    return container


def _gateway(target: Target) -> dict[str, Any]:
    """The gateway beside the server. It is told to end at once, and does as its options --linger and --drain say."""
    mounts = _mounts(target, scripts=False)
    mounts = [mount for mount in mounts if mount["name"] != "shm"]
    if target.keys_secret is not None:
        mounts.append({"name": "keys", "mountPath": str(PurePosixPath(API_KEYS).parent), "readOnly": True})
    workers, collector = target.config.gateway_workers, target.config.otlp_endpoint
    environment = _environment(ours=True, secret=None)
    if collector is not None:
        environment.append({"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": Lifted("traces.endpoint", collector)})
    return {
        "name": "gateway",
        "image": Lifted("gatewayImage", target.gateway_image),
        "imagePullPolicy": "IfNotPresent",
        "command": gateway_words(target.config, keys=target.keys_secret is not None),
        "workingDir": MODELS,
        "env": environment,
        "resources": {"requests": {"cpu": str(workers), "memory": f"{workers}Gi"}},
        "securityContext": _restricted(),
        "volumeMounts": mounts,
        "ports": _ports(GATEWAY_PORT),
        "livenessProbe": _probe("/health/live", "openai", PROBE_SECONDS, 6),
        # It is ready when the engine's model is, and not any more once it is told to end.
        "readinessProbe": _probe("/health/ready", "openai", 5, 3),
    }


def _ports(ports: dict[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]


def _probe(path: str, port: str, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _liveness() -> dict[str, Any]:
    """Probe of a tritonserver that no `trtpipe serve` watches: the script of `liveness`. A server that fails it ends no
    request that waits, so it gets less time to end than a healthy one."""
    script = Path(liveness.__file__).read_text(encoding="utf-8")
    return {
        "exec": {"command": ["python3", "-I", "-S", "-c", script, str(PORTS["http"]), "/proc", TEMPORARY]},
        "periodSeconds": PROBE_SECONDS,
        "timeoutSeconds": 10,
        "failureThreshold": 6,
        "terminationGracePeriodSeconds": PRE_STOP_SECONDS + 2 * MARGIN_SECONDS,
    }


def _environment(*, ours: bool, secret: str | None) -> list[dict[str, Any]]:
    """Variables of a container, which runs trtpipe for `ours`, and shares the group's `secret`, if any."""
    values = {
        # The image's own home is not writable.
        "HOME": TEMPORARY,
        "PYTHONDONTWRITEBYTECODE": "1",
        # A server fetches nothing when it starts.
        "HF_HUB_OFFLINE": "1",
    }
    if ours:
        values["TRTPIPE_HOME"] = f"{TEMPORARY}/trtpipe"
    plain: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in values.items()]
    if secret is None:
        return plain
    return [*plain, {"name": rendezvous.SECRET, "valueFrom": {"secretKeyRef": {"name": secret, "key": SECRET_KEY}}}]


def _resources(target: Target) -> dict[str, Any]:
    """Resource requests. Only GPUs have a limit: a CPU limit slows the steps down, and a memory limit that is a guess
    kills a server that loads."""
    passport, config, placement = target.passport, target.config, target.placement
    # The reference runtime holds all ranks in one process, computes in float32, and keeps its cache beside them.
    ranks = 3 * passport.world_size if target.gpu.is_cpu else placement.ranks
    memory = f"{math.ceil((ranks * passport.gpu_bytes + target.host_bytes + BASE_BYTES) / GIB)}Gi"
    requests: dict[str, Any] = {
        "cpu": Lifted("resources.cpu", str(config.cpus * placement.ranks)),
        "memory": Lifted("resources.memory", config.memory or memory),
    }
    if config.model_image is not None:
        requests["ephemeral-storage"] = f"{math.ceil(passport.gpu_bytes * passport.world_size * 1.1 / GIB) + 2}Gi"
    if target.gpu.is_cpu:
        return {"requests": requests}
    resource = f"nvidia.com/mig-{target.gpu.mig}" if target.gpu.mig else GPU
    return {"requests": requests, "limits": {resource: str(placement.ranks)}}


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
        "image": Lifted("modelImage", config.model_image),
        "command": ["cp", "-R", f"/{config.repository_path}/.", COPIED],
        "resources": {"requests": {"cpu": "1", "memory": "256Mi"}},
        "securityContext": _restricted(),
        "volumeMounts": [{"name": "models", "mountPath": COPIED}],
    }


def _mounts(target: Target, *, scripts: bool = True) -> list[dict[str, Any]]:
    models: dict[str, Any] = {"name": "models", "mountPath": MODELS, "readOnly": True}
    if target.config.model_image is None and target.config.repository_path:
        models["subPath"] = target.config.repository_path
    mounts = [models, {"name": "shm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": TEMPORARY}]
    if scripts and target.scripts is not None:
        mounts.append({"name": "scripts", "mountPath": SCRIPTS, "readOnly": True})
    return mounts


def _volumes(target: Target, *, keys: bool) -> list[dict[str, Any]]:
    config = target.config
    source: dict[str, Any] = {"emptyDir": {}}
    if config.pvc is not None:
        source = {"persistentVolumeClaim": {"claimName": Lifted("claim", config.pvc), "readOnly": True}}
    elif config.host_path is not None:
        source = {"hostPath": {"path": config.host_path, "type": "Directory"}}
    volumes: list[dict[str, Any]] = [
        {"name": "models", **source},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": Lifted("resources.shm", config.shm_size)}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if target.scripts is not None:
        volumes.append({"name": "scripts", "configMap": {"name": target.scripts}})
    if keys and target.keys_secret is not None:
        file = PurePosixPath(API_KEYS).name
        secret = {"secretName": Lifted("apiKeysSecret", target.keys_secret), "items": [{"key": file, "path": file}]}
        volumes.append({"name": "keys", "secret": {**secret, "defaultMode": 0o440}})
    return volumes
