"""A kustomize base for an engine: a Deployment for one node, a LeaderWorkerSet for several, and what goes with it; and
the same manifests as a Helm chart and for KServe.

Manifests are plain values that a test reads back; YAML is only their written form. The README.md beside them says
what a person should know before applying them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trtpipe.engines.backends.base import require_nodes
from trtpipe.engines.errors import ArtefactRefused, UsageError
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.passport import Passport
from trtpipe.pipeline.deploy import kserve, launch, readme, rendezvous
from trtpipe.pipeline.deploy.config import DeployConfig, dns_name
from trtpipe.pipeline.deploy.placement import Placement, place
from trtpipe.pipeline.deploy.pods import pod_spec
from trtpipe.pipeline.deploy.prometheus import FULL, FULLNESS, UNANSWERED, adapter_rules, pod_monitor, waiting_metric
from trtpipe.pipeline.deploy.target import Target, repository_digest
from trtpipe.pipeline.deploy.values import Lifted, lifted, to_template, to_yaml, values_schema, values_yaml
from trtpipe.pipeline.serving.host_memory import cache_bytes
from trtpipe.pipeline.store.folders import new_folder

Manifest = dict[str, Any]

BASE = "base"
PROMETHEUS = "components/prometheus"
OVERLAY = "overlays/prometheus"
ADAPTER = "prometheus-adapter.values.yaml"
KUSTOMIZATION = "kustomization.yaml"
KSERVE = "kserve"
CHART = "chart"
# A rollout that shows no progress for this long after a server should be ready is reported as failed.
PROGRESS_MARGIN_SECONDS = 600


def write(
    passport: Passport, gpu: GpuSpec, config: DeployConfig, out: Path, repository: Path | None = None
) -> list[Path]:
    """Write the base, its optional parts and a README.md into the new folder `out`; returns the paths.

    repository  the model repository that is deployed: what is in it makes the pods new ones

    Raises UsageError for a request that no cluster can meet, ArtefactRefused for an engine that does not belong on
    these nodes.
    """
    target = plan(passport, gpu, config, repository)
    texts = {path: to_yaml(manifest) for path, manifest in manifests(target).items()}
    texts |= chart(target)
    texts["README.md"] = readme.text(target)
    with new_folder(out) as folder:
        for path, text in texts.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    return [out / path for path in texts]


def plan(passport: Passport, gpu: GpuSpec, config: DeployConfig, repository: Path | None = None) -> Target:
    """The target of a deployment. Raises UsageError or ArtefactRefused."""
    _require_gpu(passport, gpu, config)
    # On the CPU one process holds all ranks, and there are no GPUs to count.
    placement = Placement(1, 1) if gpu.is_cpu else place(passport.tp_size, passport.pp_size, config.gpus_per_node)
    ranks = passport.world_size
    larger = f", or give --set gpus_per_node={ranks} where a node has as many"
    require_nodes(passport.runtime, ranks, placement.pods, ArtefactRefused, more=larger)
    image = config.image or (None if launch.own_image(passport) else passport.image)
    if image is None:
        ours = launch.own_image(passport)
        raise UsageError(
            f"no image is given for the runtime {passport.runtime}",
            why="NVIDIA's image does not hold it"
            if ours
            else f"no document names an image with tritonserver and TensorRT-LLM {passport.toolchain}",
            remedy=f"give --image, one that holds {'trtpipe and what the runtime needs' if ours else 'both'}",
        )
    return Target(
        passport=passport, gpu=gpu, config=config, placement=placement, name=dns_name(config.name), image=image,
        gateway_image=_gateway_image(passport, config),
        repository=None if repository is None else repository_digest(repository),
        host_bytes=0 if repository is None else cache_bytes(repository, passport, placement.ranks),
    )  # fmt: skip


def manifests(target: Target) -> dict[str, Manifest]:
    """Every manifest by its path in the folder."""
    base = dict(_base(target))
    out = {f"{BASE}/{path}": manifest for path, manifest in base.items()}
    out[f"{BASE}/{KUSTOMIZATION}"] = _kustomization(namespace=target.config.namespace, resources=list(base))
    out[f"{PROMETHEUS}/podmonitor.yaml"] = pod_monitor(target)
    out[f"{PROMETHEUS}/{KUSTOMIZATION}"] = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "resources": ["podmonitor.yaml"],
    }
    # Beside the base, not in it: kustomize reports a cycle for a base that holds its own overlay.
    out[f"{OVERLAY}/{KUSTOMIZATION}"] = _kustomization(
        namespace=target.config.namespace, resources=[f"../../{BASE}"], components=[f"../../{PROMETHEUS}"]
    )
    rules = adapter_rules(target.passport.pp_size, gateway=target.gateway_image is not None)
    out[ADAPTER] = {"rules": {"custom": rules}}
    if not target.grouped:
        out |= {f"{KSERVE}/{path}": manifest for path, manifest in kserve.manifests(target, _server(target)).items()}
    return out


def chart(target: Target) -> dict[str, str]:
    """A Helm chart of the same manifests: path in the folder -> text."""
    base, monitor = dict(_base(target)), pod_monitor(target)
    values = {**lifted([*base.values(), monitor]), "podMonitor": False}
    about = {
        "apiVersion": "v2",
        "name": target.name,
        "description": f"{target.config.name}, served by Triton",
        "type": "application",
        "version": "0.1.0",
        "appVersion": target.passport.toolchain or target.passport.runtime,
        "kubeVersion": ">=1.29.0-0",
    }
    return {
        f"{CHART}/Chart.yaml": to_yaml(about),
        f"{CHART}/values.yaml": values_yaml(values),
        f"{CHART}/values.schema.json": json.dumps(values_schema(values), indent=2) + "\n",
        **{f"{CHART}/templates/{path}": to_template(manifest) for path, manifest in base.items()},
        f"{CHART}/templates/podmonitor.yaml": to_template(monitor, condition="podMonitor"),
    }


def _gateway_image(passport: Passport, config: DeployConfig) -> str | None:
    """Raises UsageError when nothing says which image holds trtpipe."""
    if not config.openai:
        return None
    image = config.gateway_image or (config.image if launch.own_image(passport) else None)
    if image is None:
        raise UsageError(
            "no image is given for the OpenAI-compatible gateway",
            why="NVIDIA's image does not hold it",
            remedy="give --gateway-image, one that holds trtpipe, or --no-openai for Triton's own protocols alone",
        )
    return image


def _require_gpu(passport: Passport, gpu: GpuSpec, config: DeployConfig) -> None:
    """Refuse an engine that the nodes cannot run. Raises ArtefactRefused or UsageError."""
    if passport.sms is None and not gpu.is_cpu:
        raise ArtefactRefused(
            f"engines of the {passport.runtime} runtime are not deployed on GPUs",
            why=f"trtpipe's image of it computes on the CPU, and would hold {gpu.name} GPUs without using them",
            remedy=f"build it with `--gpu cpu`, or with another --runtime for {gpu.name}",
        )
    if gpu.is_cpu:
        if passport.sms is not None:
            raise ArtefactRefused(
                f"this engine is for {passport.target()}, and nodes without a GPU are asked for",
                remedy=f"deploy it to {passport.gpu}, or build with `--gpu cpu`",
            )
        return
    if passport.sms is not None and gpu.sm not in passport.sms:
        raise ArtefactRefused(
            f"this engine is for {passport.target()}, and {gpu.describe()} is asked for",
            remedy=f"deploy it to {passport.gpu}, or build with `trtpipe build --gpu {gpu.name}`",
        )
    gpu.require_ranks(passport.world_size)
    if not (config.product or gpu.product):
        raise UsageError(
            f"the product name of {gpu.name} is not known",
            why="pods find their nodes by the label nvidia.com/gpu.product",
            remedy=f"give it with --set product=NAME, or as `product:` in $TRTPIPE_HOME/gpus/{gpu.name}.yaml",
        )
    if gpu.memory_gib is not None and passport.gpu_bytes >= gpu.memory_gib * 2**30:
        raise ArtefactRefused(
            f"a rank's weights take {passport.gpu_bytes / 2**30:.1f} GiB, and {gpu.name} has {gpu.memory_gib:g}",
            remedy="build with a larger tp_size",
        )


def _base(target: Target) -> Iterator[tuple[str, Manifest]]:
    if target.grouped:
        yield "leaderworkerset.yaml", _leader_worker_set(target)
        yield "configmap.yaml", _config_map(target)
    else:
        yield "deployment.yaml", _deployment(target)
    yield "service.yaml", _service(target)
    yield "service-headless.yaml", _service(target, headless=True)
    yield "poddisruptionbudget.yaml", _pod_disruption_budget(target)
    yield "networkpolicy.yaml", _network_policy(target)
    if target.grouped:
        yield "networkpolicy-group.yaml", _group_network_policy(target)
    if target.replicas[0] != target.replicas[1]:
        yield "horizontalpodautoscaler.yaml", _autoscaler(target)


def _metadata(target: Target, name: str) -> Manifest:
    return {"name": name, "labels": target.labels()}


def _template(target: Target, component: str, words: list[str]) -> Manifest:
    annotations = {
        # A volume may get another repository under the same path: a changed digest makes Kubernetes replace the pods.
        **({} if target.repository is None else {"trtpipe/repository": target.repository[:16]}),
        "trtpipe/passport": _digest(json.dumps(asdict(target.passport), sort_keys=True)),
        "trtpipe/checkpoint": target.passport.checkpoint,
        "trtpipe/engine": f"{target.passport.runtime} {target.passport.toolchain or ''}".strip(),
    }
    if target.grouped:
        annotations["trtpipe/scripts"] = _digest(_script())
    metadata = {"labels": target.labels(component), "annotations": annotations}
    return {"metadata": metadata, "spec": pod_spec(target, component, words)}


def _server(target: Target) -> Manifest:
    return _template(target, "server", launch.server_words(target.passport, target.config, target.placement))


def _fixed_replicas(target: Target) -> Manifest:
    """`replicas`, unless the autoscaler decides: each `kubectl apply` would reset the autoscaler's number."""
    least, most = target.replicas
    return {"replicas": Lifted("replicas", least)} if least == most else {}


def _deployment(target: Target) -> Manifest:
    template = _server(target)
    template["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": key,
            # Two replicas on one node are better than a replica that waits for another node.
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": target.selector()},
            "matchLabelKeys": ["pod-template-hash"],
        }
        for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
    ]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(target, target.workload),
        "spec": {
            **_fixed_replicas(target),
            "revisionHistoryLimit": 3,
            "progressDeadlineSeconds": target.config.startup_seconds + PROGRESS_MARGIN_SECONDS,
            "selector": {"matchLabels": target.selector()},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": target.rolling_update},
            "template": template,
        },
    }


def _leader_worker_set(target: Target) -> Manifest:
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _metadata(target, target.workload),
        "spec": {
            **_fixed_replicas(target),
            # The leader is ready when its workers' ranks are: workers that waited for it would wait for ever.
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": target.rolling_update},
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {
                "size": target.placement.pods,
                # MPI does not take a rank back: when one ends, all restart.
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": _server(target),
                "workerTemplate": _template(target, "worker", launch.worker_words()),
            },
        },
    }


def _config_map(target: Target) -> Manifest:
    assert target.scripts is not None
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(target, target.scripts),
        "data": {launch.RENDEZVOUS: _script()},
    }


def _script() -> str:
    return Path(rendezvous.__file__).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _service(target: Target, *, headless: bool = False) -> Manifest:
    """One address for all replicas; headless, the address of each, for gRPC clients that balance load themselves,
    because a channel stays with the replica it was opened to."""
    spec: Manifest = {"clusterIP": "None"} if headless else {"type": "ClusterIP"}
    spec["selector"] = target.selector()
    spec["ports"] = [
        {"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in target.ports.items()
    ]
    name = f"{target.name}-headless" if headless else target.name
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(target, name), "spec": spec}


def _pod_disruption_budget(target: Target) -> Manifest:
    """Two replicas and more: one pod at a time, however many there are by then. Where there may be a single one, it is
    evicted only by a person, and of several that there are by then no more pods at a time than half of the replicas."""
    single, pods = target.config.replicas_min == 1, target.placement.pods
    # Rounded up by Kubernetes: of n replicas, n / 2 pods may go, rounded down.
    least = f"{(100 * pods - 50) // pods}%"
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(target, target.name),
        "spec": {
            **({"minAvailable": least} if single else {"maxUnavailable": 1}),
            "selector": {"matchLabels": target.selector(None)},
            # A pod that does not become ready would block a drain of its node, and serves nobody.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


_TCP = {"protocol": "TCP"}
_DNS = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, **_TCP}]}


def _network_policy(target: Target) -> Manifest:
    """Ingress: the ports. Egress: none but DNS and the collector of traces, if any: all else is in the pod."""
    collector = target.collector_port
    egress = [] if collector is None else [_DNS, {"ports": [{"port": Lifted("traces.port", collector), **_TCP}]}]
    ports = [{"port": name, **_TCP} for name in target.ports]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(target, target.name),
        "spec": {
            "podSelector": {"matchLabels": target.selector()},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"ports": ports}],
            "egress": egress,
        },
    }


def _group_network_policy(target: Target) -> Manifest:
    """All traffic between the pods of the set, since MPI and NCCL choose their ports; and DNS, to find the leader."""
    peers = [{"podSelector": {"matchLabels": target.selector(None)}}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(target, target.workload),
        "spec": {
            "podSelector": {"matchLabels": target.selector(None)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": peers}],
            "egress": [{"to": [dict(peer) for peer in peers]}, _DNS],
        },
    }


def _autoscaler(target: Target) -> Manifest:
    least, most = target.replicas
    kind, version = ("LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1") if target.grouped else ("Deployment", "apps/v1")
    config = target.config
    waiting = Lifted("autoscaling.waitingPerReplica", str(config.waiting_per_replica))
    wanted: dict[str, Any] = {waiting_metric(target.passport.pp_size): waiting, FULLNESS: FULL}
    if target.gateway_image is not None:
        wanted[UNANSWERED] = Lifted("autoscaling.unansweredPerReplica", str(config.unanswered_per_replica))
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": _metadata(target, target.name),
        "spec": {
            "scaleTargetRef": {"apiVersion": version, "kind": kind, "name": target.workload},
            "minReplicas": Lifted("autoscaling.minReplicas", least),
            "maxReplicas": Lifted("autoscaling.maxReplicas", most),
            "metrics": [
                {
                    "type": "Pods",
                    "pods": {"metric": {"name": name}, "target": {"type": "AverageValue", "averageValue": value}},
                }
                for name, value in wanted.items()
            ],
            "behavior": {
                # A burst that the present replicas will soon have worked off is no reason for another replica.
                "scaleUp": {
                    "stabilizationWindowSeconds": 30,
                    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
                },
                # A replica that took minutes to load is not given up for a lull.
                "scaleDown": {
                    "stabilizationWindowSeconds": Lifted("autoscaling.scaleDownSeconds", config.scale_down_seconds),
                    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 300}],
                },
            },
        },
    }


def _kustomization(*, namespace: str, resources: list[str], components: list[str] | None = None) -> Manifest:
    out: Manifest = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        "resources": resources,
    }
    return {**out, "components": components} if components else out
