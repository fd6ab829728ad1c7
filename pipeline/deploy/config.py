"""Settings of a deployment to Kubernetes, with every default, and names that a cluster accepts."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.gateway.traces import collector_port

# Kubernetes allows 63 characters. Controllers append to the names of what they make: group, worker, revision hash.
NAME_LENGTH = 40
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
QUANTITY = re.compile(r"[1-9][0-9]*(Ki|Mi|Gi|Ti|k|M|G|T)?")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
STORAGE = ("pvc", "model_image", "host_path")
# Fields that have an option of their own; the others are given by --set.
OPTIONS = ("namespace", "image", "gateway_image", "otlp_endpoint", *STORAGE)
# As `kubectl taint` writes them: key=value:Effect, key:Effect.
TAINT = re.compile(r"[\w./-]+(=[\w.-]*)?:(NoSchedule|PreferNoSchedule|NoExecute)")


@dataclass(frozen=True, kw_only=True)
class DeployConfig:
    """Settings of an engine's deployment.

    name                       the target; resources are named after it, in letters that a cluster accepts
    namespace                  namespace of the resources
    image                      container image of the server; None takes the one of the engine's toolchain
    openai                     whether a gateway is in the pod
    gateway_image              image of the gateway, with trtpipe in it; None takes the server's where trtpipe runs that
    gateway_workers            number of the gateway's processes
    otlp_endpoint              collector that the gateway sends traces to, OTLP over HTTP; None for no traces
    api_keys                   whether the gateway asks its clients for a key
    api_keys_secret            name of an existing secret with the keys; None takes NAME-api-keys
    image_pull_secret          name of an existing secret for a private registry
    pvc                        where the model repository is, one of the three: a PersistentVolumeClaim that every
                               replica can read
    model_image                or an image that holds it
    host_path                  or a folder of the node, on a cluster of one node
    repository_path            the repository's folder in the volume or image
    replicas_min               fewest replicas
    replicas_max               most replicas; their number is fixed when it equals replicas_min. None takes four, or the
                               minimum if it is more
    waiting_per_replica        requests that may wait for the engine, on average, before a replica is added
    unanswered_per_replica     requests at the gateway that may have no token, on average, before a replica is added
    scale_down_seconds         how long the load must have been lower before a replica is removed
    gpus_per_node              GPUs of a node: an engine with more ranks is divided over nodes
    product                    value of the node label nvidia.com/gpu.product; None takes the engine's GPU
    cpus                       CPU cores asked for, for each rank
    memory                     host memory asked for, for each pod; None takes what its ranks' weights need
    shm_size                   /dev/shm of a pod: Python models and ranks talk through it
    startup_seconds            how long a server may take to become ready: loading included, image pull excluded
    termination_grace_seconds  how long a pod that is told to end may take for the requests it has
    surge                      replace a replica by starting its successor first, which takes spare GPUs; without
                               surge, the old replica ends first, and is out of service meanwhile
    tolerations                taints of nodes that the pods bear, beside that of GPUs, as `kubectl taint` writes them
    priority_class             name of an existing PriorityClass
    runtime_class              name of an existing RuntimeClass, where GPUs need one
    """

    name: str
    namespace: str = "default"
    image: str | None = None
    openai: bool = True
    gateway_image: str | None = None
    gateway_workers: int = 1
    otlp_endpoint: str | None = None
    api_keys: bool = True
    api_keys_secret: str | None = None
    image_pull_secret: str | None = None
    pvc: str | None = None
    model_image: str | None = None
    host_path: str | None = None
    repository_path: str = "models"
    replicas_min: int = 1
    replicas_max: int | None = None
    waiting_per_replica: int = 4
    unanswered_per_replica: int = 16
    scale_down_seconds: int = 600
    gpus_per_node: int = 8
    product: str | None = None
    cpus: int = 4
    memory: str | None = None
    shm_size: str = "4Gi"
    startup_seconds: int = 1800
    termination_grace_seconds: int = 180
    surge: bool = True
    tolerations: tuple[str, ...] = ()
    priority_class: str | None = None
    runtime_class: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in STORAGE if getattr(self, name) is not None]
        if len(given) != 1:
            raise UsageError(
                f"{' and '.join(map(option, given))} are given"
                if given
                else "nothing says where the model repository is",
                why="it is in a PersistentVolumeClaim, in an image, or in a folder of the node",
                remedy="give exactly one of " + ", ".join(map(option, STORAGE)),
            )
        idle = None if self.api_keys and self.openai else self.api_keys_secret
        if idle is not None:
            off = "openai" if self.api_keys else "api_keys"
            raise UsageError(
                f"{off} is false, and no gateway asks for the keys of api_keys_secret {idle}",
                remedy="leave one of them out",
            )
        object.__setattr__(self, "repository_path", _relative(self.repository_path))
        if self.model_image is not None and not self.repository_path:
            raise UsageError(
                "repository_path is empty",
                why="the root of an image holds more than a model repository",
                remedy="put the repository into a folder of the image, such as models",
            )
        if self.host_path is not None and (not self.host_path.startswith("/") or ".." in self.host_path.split("/")):
            raise UsageError(f"--host-path '{self.host_path}' is not an absolute path", remedy="give one from the root")
        for name, pattern, what in (
            ("namespace", LABEL, "a DNS label"),
            ("pvc", SUBDOMAIN, "a DNS name"),
            ("image_pull_secret", SUBDOMAIN, "a DNS name"),
            ("priority_class", SUBDOMAIN, "a DNS name"),
            ("runtime_class", SUBDOMAIN, "a DNS name"),
            ("product", LABEL_VALUE, "the value of a node label"),
            ("api_keys_secret", SUBDOMAIN, "a DNS name"),
            ("image", IMAGE, "an image reference"),
            ("gateway_image", IMAGE, "an image reference"),
            ("model_image", IMAGE, "an image reference"),
            ("memory", QUANTITY, "a quantity such as 64Gi"),
            ("shm_size", QUANTITY, "a quantity such as 4Gi"),
        ):
            value = getattr(self, name)
            if value is not None and not pattern.fullmatch(value):
                raise UsageError(f"{option(name)} '{value}' is not {what}", remedy="correct it")
        for name, least in (
            ("replicas_min", 1),
            ("waiting_per_replica", 1),
            ("unanswered_per_replica", 1),
            ("gateway_workers", 1),
            ("scale_down_seconds", 0),
            ("gpus_per_node", 1),
            ("cpus", 1),
            ("startup_seconds", 10),
            # Below this, no time is left for the requests between the phases of termination.
            ("termination_grace_seconds", 60),
        ):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}", remedy=f"give at least {least}")
        for taint in self.tolerations:
            if not TAINT.fullmatch(taint):
                raise UsageError(
                    f"'{taint}' is not a taint", remedy="write it as key=value:NoSchedule, as `kubectl taint` does"
                )
        if self.gateway_image is not None and not self.openai:
            raise UsageError(
                "--gateway-image is given, and there is no gateway", remedy="leave out --gateway-image or --no-openai"
            )
        if self.otlp_endpoint is not None:
            if not self.openai:
                raise UsageError(
                    "--otlp-endpoint is given, and there is no gateway",
                    why="the gateway sends the traces",
                    remedy="leave out --otlp-endpoint or --no-openai",
                )
            collector_port("--otlp-endpoint", self.otlp_endpoint)
        if self.scale_down_seconds > 3600:
            raise UsageError(
                f"scale_down_seconds is {self.scale_down_seconds}", remedy="give at most 3600, as Kubernetes does"
            )
        if self.replicas_max is not None and self.replicas_max < self.replicas_min:
            raise UsageError(
                f"replicas_max {self.replicas_max} is below replicas_min {self.replicas_min}", remedy="raise it"
            )


def option(field: str) -> str:
    """The option by which a user sets the field."""
    return f"--{field.replace('_', '-')}" if field in OPTIONS else field


def dns_name(text: str) -> str:
    """A name for resources, at most 40 long: a DNS label that starts with a letter, as services must.

    A name that is too long keeps its beginning and gets a digest, so that two targets stay two. Raises UsageError
    when nothing of `text` can be kept.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not plain:
        raise UsageError(f"'{text}' makes no name for a cluster", remedy="give one of letters, digits and dashes")
    if not plain[0].isalpha():
        plain = f"m-{plain}"
    if len(plain) <= NAME_LENGTH:
        return plain
    return f"{plain[: NAME_LENGTH - 9].rstrip('-')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _relative(path: str) -> str:
    """`path` from the root of a volume, without a slash at either end. Raises UsageError when it leads out."""
    plain = PurePosixPath(path.strip("/")).as_posix() if path.strip("/") else ""
    if ".." in plain.split("/"):
        raise UsageError(f"repository_path '{path}' leads out of the volume", remedy="leave out the dots")
    return "" if plain == "." else plain
