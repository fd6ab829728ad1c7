"""What is deployed, and where: the input of every manifest."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.passport import Passport
from trtpipe.pipeline.deploy import launch
from trtpipe.pipeline.deploy.config import DeployConfig
from trtpipe.pipeline.deploy.placement import Placement
from trtpipe.pipeline.gateway.traces import collector_port
from trtpipe.pipeline.store.digests import combined, sha256_file
from trtpipe.pipeline.store.manifest import read_manifest
from trtpipe.triton_repo.layout import ENGINE_FOLDER

AUTOSCALED_TO = 4
# Larger files beside an engine's passport are its weights.
WEIGHTS_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server answers requests, and beside it the gateway; workers, if any, hold further ranks of its engine.

    gateway_image  None where there is no gateway
    repository     digest of the model repository; None where it is not at hand
    host_bytes     of the host's memory that the KV cache of a pod takes
    """

    passport: Passport
    gpu: GpuSpec
    config: DeployConfig
    placement: Placement
    name: str
    image: str
    gateway_image: str | None
    repository: str | None = None
    host_bytes: int = 0

    @property
    def grouped(self) -> bool:
        return self.placement.pods > 1

    @property
    def workload(self) -> str:
        # The controller of a LeaderWorkerSet makes a headless service of its name, for its pods to find each other.
        return f"{self.name}-group" if self.grouped else self.name

    @property
    def ports(self) -> dict[str, int]:
        """Ports of a pod that answers: those of the server, and the gateway's."""
        return launch.PORTS if self.gateway_image is None else {**launch.PORTS, **launch.GATEWAY_PORT}

    @property
    def collector_port(self) -> int | None:
        """Port of the collector of traces; None where there are no traces."""
        url = self.config.otlp_endpoint
        return None if url is None else collector_port("--otlp-endpoint", url)

    @property
    def replicas(self) -> tuple[int, int]:
        least = self.config.replicas_min
        return least, self.config.replicas_max or max(least, AUTOSCALED_TO)

    @property
    def rolling_update(self) -> dict[str, int]:
        """Settings of a rolling update. With `surge` the successor starts first: an update never takes capacity away,
        and waits when no GPU is free. Without it the old pod ends first."""
        return {"maxUnavailable": 0, "maxSurge": 1} if self.config.surge else {"maxUnavailable": 1, "maxSurge": 0}

    @property
    def scripts(self) -> str | None:
        return f"{self.name}-scripts" if self.grouped else None

    @property
    def secret(self) -> str | None:
        """Name of the secret that the pods of a group share."""
        return f"{self.name}-rendezvous" if self.grouped else None

    @property
    def keys_secret(self) -> str | None:
        """Name of the secret with the gateway's API keys; None where it asks for none."""
        if self.gateway_image is None or not self.config.api_keys:
            return None
        return self.config.api_keys_secret or f"{self.name}-api-keys"

    def selector(self, component: str | None = "server") -> dict[str, str]:
        """Labels that select the pods that answer, the workers, or all pods for None."""
        whole = {"app.kubernetes.io/name": "tritonserver", "app.kubernetes.io/instance": self.name}
        return whole if component is None else {**whole, "app.kubernetes.io/component": component}

    def labels(self, component: str = "server") -> dict[str, str]:
        return {**self.selector(component), "app.kubernetes.io/managed-by": "trtpipe"}


def repository_digest(repository: Path) -> str:
    """Digest of what is in a model repository: of a target, as its manifest has it; else of its files, but that weights
    beside the passport, which names their checkpoint, count by size, since they may be many GB. Raises OSError."""
    made = read_manifest(repository.resolve().parent / "manifest.json")
    if made is not None:
        return made.content
    engine, found = repository / ENGINE_FOLDER, []
    for folder, _, names in os.walk(repository, followlinks=True):
        for path in (Path(folder) / name for name in names):
            size = path.stat().st_size
            weights = path.parent == engine and size >= WEIGHTS_BYTES
            found.append((path.relative_to(repository).as_posix(), str(size) if weights else sha256_file(path)))
    return combined(found)
