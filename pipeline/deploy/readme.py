"""README.md of a written base: what a person should know before applying it, and the reasons for its settings."""

from __future__ import annotations

from trtpipe.configs.facts import load_toolchains
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.passport import Passport
from trtpipe.pipeline.deploy import launch
from trtpipe.pipeline.deploy.config import DeployConfig
from trtpipe.pipeline.deploy.placement import Placement
from trtpipe.pipeline.deploy.pods import GPU_PRODUCT, SECRET_KEY, USER
from trtpipe.pipeline.deploy.prometheus import FULLNESS, SERIES, waiting_metric

# The model that clients use, and its name for the number of tokens.
FRONT = ("ensemble", "max_tokens")


def text(
    passport: Passport, gpu: GpuSpec, config: DeployConfig, placement: Placement, *,
    name: str, workload: str, replicas: tuple[int, int], secret: str | None,
) -> str:  # fmt: skip
    """The whole file."""
    scaled = replicas[0] != replicas[1]
    sections = [
        _head(passport, config, placement, workload),
        _needs(passport, gpu, config, placement, scaled),
        _apply(passport, config, placement, name, workload, secret),
        _repository(config),
        _scaling(passport, config, replicas) if scaled else _fixed(passport, replicas[0]),
        _updates(passport, config, placement, workload),
        _network(passport, config, placement),
    ]
    if placement.pods > 1:
        sections.append(_group(placement))
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _head(passport: Passport, config: DeployConfig, placement: Placement, workload: str) -> str:
    pods = "one pod" if placement.pods == 1 else f"{placement.pods} pods with {placement.ranks} ranks each"
    rules = ""
    if passport.runtime in launch.WITH_REQUEST_METRICS:
        rules = "\n| `prometheus-adapter.values.yaml` | Helm values of prometheus-adapter: rules for the autoscaler |"
    return f"""
# {config.name} on Kubernetes

Written by `trtpipe deploy k8s` for an engine of {passport.runtime} {passport.toolchain or ""} on {passport.target()},
tp {passport.tp_size}, pp {passport.pp_size}. A replica is {pods}.

| path | what it is |
|---|---|
| `base/` | the kustomize base: `{workload}`, its services, disruption budget, network policy and autoscaler |
| `components/prometheus/` | optional: a PodMonitor, for the Prometheus operator |
| `overlays/prometheus/` | the base with that component |{rules}

Change things in an overlay of your own beside these, so that the base can be written again.
"""


def _needs(passport: Passport, gpu: GpuSpec, config: DeployConfig, placement: Placement, scaled: bool) -> str:
    lines = ["Kubernetes 1.29 or newer."]
    if not gpu.is_cpu:
        lines.append(
            "NVIDIA's device plugin and GPU feature discovery. Pods go to nodes labelled "
            f"`{GPU_PRODUCT}={config.product or gpu.product}`: an engine runs on no other compute capability, and "
            "TensorRT-LLM finds out only after it has read it."
        )
    toolchain = load_toolchains().get(passport.toolchain or "")
    if toolchain is not None:
        lines.append(f"NVIDIA driver {toolchain.driver} or newer on these nodes, for TensorRT-LLM {toolchain.name}.")
    if placement.pods > 1:
        lines.append("The LeaderWorkerSet controller, 0.6 or newer (`leaderworkerset.x-k8s.io/v1`).")
    if scaled:
        lines.append("Prometheus and prometheus-adapter; without them there are always the replicas there are.")
    if passport.runtime in launch.OURS:
        also = ", and vLLM" if passport.runtime == "vllm" else ""
        lines.append(f"The image `{config.image}`: with `trtpipe[serve]`{also}, and readable for user {USER}.")
    if passport.runtime == "reference":
        lines.append("Patience: this runtime is for trying things out. It is no TensorRT-LLM, and slow.")
    return "## What the cluster needs\n\n" + "\n".join(f"- {line}" for line in lines)


def _apply(
    passport: Passport, config: DeployConfig, placement: Placement, name: str, workload: str, secret: str | None
) -> str:
    kind = "deployment" if placement.pods == 1 else "leaderworkerset"
    wait = (
        f"kubectl -n {config.namespace} rollout status deployment/{workload}"
        if placement.pods == 1
        else f"kubectl -n {config.namespace} wait --for=condition=Available leaderworkerset/{workload} --timeout=1h"
    )
    model, key = ("tensorrt_llm", "sampling_param_max_tokens") if passport.runtime == "trtllm_pytorch" else FRONT
    known = ""
    if secret is not None:
        known = f"""
The pods of a group know each other by a secret, which no file here holds. Make it once:

```sh
kubectl -n {config.namespace} create secret generic {secret} --from-literal={SECRET_KEY}="$(openssl rand -hex 32)"
```
"""
    return f"""
## Apply
{known}
```sh
kubectl apply -k base        # or overlays/prometheus
{wait}
kubectl -n {config.namespace} port-forward service/{name} 8000:8000
curl -s localhost:8000/v2/models/{model}/generate -d '{{"text_input": "Hello", "{key}": 8}}'
```

A server has {config.startup_seconds} s to become ready (startup probe); its port opens when every model is loaded. When
it does not, `kubectl -n {config.namespace} describe {kind}/{workload}` and the pod's log say why. The first pull of the
image takes tens of gigabytes, and does not count.
"""


def _repository(config: DeployConfig) -> str:
    path = config.repository_path
    if config.pvc is not None:
        where = f"""
The repository is read from the claim `{config.pvc}`, folder `/{path}`: put there what `./runs/TARGET/repository` holds,
and nothing else, since Triton takes every folder for a model (`lost+found` in the root of a disk too). The claim must
be one that several nodes can mount (ReadOnlyMany or ReadWriteMany) as soon as there is more than one pod. It is mounted
read-only; files must be readable for user {USER}.
"""
    elif config.host_path is not None:
        where = f"""
The repository is read from the folder `{config.host_path}` of the node, `/{path}` in it. That is for a cluster of one
node, to try things out: other nodes have no such folder, and the Pod Security Standards forbid it.
"""
    else:
        where = f"""
The repository is copied from `/{path}` of the image `{config.model_image}` by an init container, which needs `cp`:

```dockerfile
FROM busybox:stable
COPY repository /{path}
```

A copy costs disk of the node (asked for as ephemeral storage) and a minute or two. Kubernetes can mount an image as a
volume instead, but has that switched on only from 1.35, and this base is for 1.29: there, replace the init container
and the volume `models` by `image: {{reference: ...}}` in an overlay.
"""
    return f"""
## The model repository
{where}
The pods carry the digest of the engine's passport as an annotation. After another build, write this base again and
apply it: the digest makes the pods new ones. Overwriting the files under running servers does not reload them.
"""


def _scaling(passport: Passport, config: DeployConfig, replicas: tuple[int, int]) -> str:
    waiting = waiting_metric(passport.pp_size)
    stages = ""
    if passport.pp_size > 1:
        stages = f"""
With {passport.pp_size} pipeline stages a step schedules one of {passport.pp_size} batches, and the backend reports the
others as waiting. The rule takes them off, hence a metric of its own name.
"""
    return f"""
## Scaling: {replicas[0]} to {replicas[1]} replicas

The autoscaler follows two metrics of the serving pods, and does what the more demanding one asks for:

- `{waiting}`, on average at most {config.waiting_per_replica}: requests that the engine has taken in and cannot run,
  for want of KV cache. From `{SERIES}{{request_type="waiting"}}`.
- `{FULLNESS}`, on average at most 0.9: requests taken in, of those that the engine takes in at all
  (`active` / `max`). TensorRT-LLM takes in no more than its maximum batch size; who waits beyond that is in a queue
  that no metric shows, so a full engine is the sign. This metric also keeps replicas that are busy while nobody waits.

Triton's own queue time (`nv_inference_queue_duration_us`) would not do: it ends when a request is handed to the engine,
and the wait inside counts as computing.
{stages}
Install the rules with the adapter, and scrape the pods:

```sh
helm upgrade --install prometheus-adapter prometheus-community/prometheus-adapter \\
  --namespace monitoring --values prometheus-adapter.values.yaml   # merge them into your values if you have some
kubectl apply -k overlays/prometheus
kubectl get --raw "/apis/custom.metrics.k8s.io/v1beta1/namespaces/{config.namespace}/pods/*/{waiting}"
```

One replica is added a minute at most. One goes when there has been less to do for {config.scale_down_seconds} s: what
took minutes to load is not given up for a lull. `replicas` is left to the autoscaler, so that `kubectl apply` does not
set it back.
"""


def _fixed(passport: Passport, replicas: int) -> str:
    why = (
        f"`replicas_min` and `replicas_max` are both {replicas}."
        if passport.runtime in launch.WITH_REQUEST_METRICS
        else f"A {passport.runtime} server does not report how many requests wait, so nothing says when to add one."
    )
    return f"## Scaling\n\nThere are always {replicas} replica(s). {why}"


def _updates(passport: Passport, config: DeployConfig, placement: Placement, workload: str) -> str:
    gpus = "" if passport.sms is None else f" and needs {passport.world_size} free GPU(s)"
    update = (
        f"An update starts the successor first{gpus}. When there are none it waits, and the old replica serves on: add "
        "a node, or write the base with `surge` off."
        if config.surge
        else "An update ends a replica before its successor starts, which takes no spare GPUs; with one replica nobody "
        "is served while the engine loads."
    )
    budget = (
        f"The disruption budget lets nobody evict the only replica: draining its node waits until you restart it "
        f"elsewhere (`kubectl -n {config.namespace} rollout restart`, or delete the pod)."
        if config.replicas_min == 1
        else "The disruption budget lets one pod be evicted at a time."
    )
    mpi = ""
    if launch.uses_mpi(passport):
        mpi = f"""
Under mpirun the first part of that time passes before the servers are told at all: Open MPI waits equally long before
it ends its ranks and before it kills them (`odls_base_sigkill_timeout`, 1 s if left alone, which would cut off every
request). So a pod with {placement.ranks} ranks takes its time to leave even when it is idle.
"""
    return f"""
## Updates, evictions, and leaving

{update}

{budget}

A pod that leaves serves on for {launch.PRE_STOP_SECONDS} s, until endpoints and clients know; then Triton takes no new
requests and finishes those it has. After {config.termination_grace_seconds} s
(`terminationGracePeriodSeconds`) it is killed: make that more than your longest answer takes.
{mpi}"""


def _network(passport: Passport, config: DeployConfig, placement: Placement) -> str:
    out = "reach each other and DNS" if placement.pods > 1 else "reach nothing"
    control = (
        "With `trtpipe serve`, whoever reaches the ports can also load and unload models."
        if passport.runtime in launch.OURS
        else "Models cannot be loaded or unloaded through the ports."
    )
    rights = "Pods meet the Pod Security Standard `restricted`"
    if config.host_path is not None:
        rights += ", but for the folder of the node"
    return f"""
## Network and rights

- Everybody in the cluster may reach the ports 8000 (HTTP), 8001 (gRPC) and 8002 (metrics), and nothing else; the pods
  {out}. Triton asks for no password: put a gateway with keys in front before anyone outside can reach
  it, and narrow `ingress` to that in an overlay. A service mesh or a tracing collector needs a rule of its own.
- {control}
- A gRPC channel stays with the replica it was opened to. Clients that balance themselves use the headless service
  (`dns:///` and `round_robin`).
- {rights}: user {USER}, no capabilities, no token of the cluster, a root file
  system that nobody writes to.
"""


def _group(placement: Placement) -> str:
    return f"""
## {placement.pods} pods that are one server

The leader runs mpirun, and serves; a worker holds {placement.ranks} further ranks. Workers dial the leader
(`LWS_LEADER_ADDRESS`, port {launch.RENDEZVOUS_PORT}) and run the one command they are handed, Open MPI's own daemon:
no ssh, no kubectl, no token (`{launch.RENDEZVOUS}` in the ConfigMap; tried with Open MPI 4.1, and version 5 has other
parameters). Both show each other that they know the group's secret, and every line between them is authenticated.
Open MPI's own ports are not: the network policy of the group keeps others out of those, in a cluster whose network
enforces policies.

When a pod or a rank ends, the whole group is made anew (`RecreateGroupOnPodRestart`).

- Pods of a group talk through the pod network. For InfiniBand, RoCE or EFA, add the device's resource, the capability
  `IPC_LOCK` and NCCL's variables to both templates in an overlay (a JSON patch: a LeaderWorkerSet has no strategic
  merge).
- Two groups that start at once can each hold half of the GPUs and wait for ever. Keep as many nodes as the groups
  need, or let the LeaderWorkerSet controller schedule gangs. Its annotation
  `leaderworkerset.sigs.k8s.io/exclusive-topology` keeps a group within one rack or block.
"""
