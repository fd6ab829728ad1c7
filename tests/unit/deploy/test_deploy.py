"""Manifests for Kubernetes: what the cluster's own schemas say of them, and what no schema can say."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.commands import command_of_examples
from tests.support.golden import check_golden
from tests.unit.deploy.cases import (
    CASES,
    GATEWAY,
    GROUPS,
    OURS,
    VERSIONS,
    Case,
    charted,
    container,
    engine,
    gateway,
    made,
    one,
    read,
    reference,
    resources,
    schema,
    servers,
    templates,
)
from tests.unit.engines.test_passport import GIB
from trtpipe.configs.facts import find_gpu, find_toolchain
from trtpipe.engines.errors import ArtefactRefused, TrtpipeError, UsageError
from trtpipe.engines.passport import Passport
from trtpipe.pipeline.deploy import rendezvous
from trtpipe.pipeline.deploy.config import NAME_LENGTH, DeployConfig, dns_name
from trtpipe.pipeline.deploy.kubernetes import manifests, plan, write
from trtpipe.pipeline.deploy.launch import GATEWAY_PORT, LINGER_SECONDS, PORTS, PRE_STOP_SECONDS, answer_seconds
from trtpipe.pipeline.deploy.placement import place
from trtpipe.pipeline.deploy.values import to_yaml
from trtpipe.pipeline.store.manifest import Record
from trtpipe.pipeline.store.store import Store
from trtpipe.triton_repo.llmapi import SETTINGS

# Of all cases.
WORKLOAD = "llama3-8b-h100-fp8"


@pytest.fixture(autouse=True, scope="module")
def schemas_once() -> Iterator[None]:
    """Each check would read a megabyte of schemas again."""
    with pytest.MonkeyPatch.context() as patch:
        utils = kubernetes_validate.utils
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_fits_the_schemas_of_kubernetes(name: str, version: str) -> None:
    own = {"LeaderWorkerSet": "leaderworkerset", "PodMonitor": "podmonitor"}
    kinds = set()
    for resource in resources(name).values():
        kinds.add(resource["kind"])
        if resource["kind"] in own:
            jsonschema.Draft202012Validator(schema(own[resource["kind"]])).validate(resource)
        else:
            kubernetes_validate.validate(resource, version, strict=True)
    for template in templates(name):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
        kubernetes_validate.validate(pod, version, strict=True)
    assert {"Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"} < kinds


def test_the_schemas_do_find_mistakes() -> None:
    group, budget = one("group", "LeaderWorkerSet"), copy.deepcopy(one("one", "PodDisruptionBudget"))
    check = jsonschema.Draft202012Validator(schema("leaderworkerset"))
    for path, value in (
        (("spec", "leaderWorkerTemplate", "size"), 0),
        (("spec", "leaderWorkerTemplate", "sise"), 2),
        (("spec", "rolloutStrategy", "rollingUpdateConfiguration", "maxSurge"), 0),
        (("metadata", "name"), "8b"),
    ):
        wrong = copy.deepcopy(group)
        place_at = wrong
        for key in path[:-1]:
            place_at = place_at[key]
        place_at[path[-1]] = value
        assert list(check.iter_errors(wrong)), path
    budget["spec"]["minAvailible"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(budget, "1.29", strict=True)


@pytest.mark.parametrize("name", CASES)
def test_selectors_find_the_pods_and_nothing_is_named_that_is_not_there(name: str) -> None:
    found = resources(name)
    labels = [template["metadata"]["labels"] for template in templates(name)]
    serving = labels[0]

    def selects(selector: dict[str, str], pod: dict[str, str]) -> bool:
        return selector.items() <= pod.items()

    for key, resource in found.items():
        spec = resource.get("spec", {})
        match resource["kind"]:
            case "Service":
                assert selects(spec["selector"], serving), key
                assert not any(selects(spec["selector"], pod) for pod in labels[1:]), key
            case "Deployment" | "PodMonitor":
                assert selects(spec["selector"]["matchLabels"], serving), key
            case "PodDisruptionBudget":
                assert all(selects(spec["selector"]["matchLabels"], pod) for pod in labels), key
            case "NetworkPolicy":
                assert selects(spec["podSelector"]["matchLabels"], serving), key
                for rule in [*spec["ingress"], *spec["egress"]]:
                    for peer in [*rule.get("from", []), *rule.get("to", [])]:
                        assert all(selects(peer["podSelector"]["matchLabels"], pod) for pod in labels), key
            case "HorizontalPodAutoscaler":
                reference = spec["scaleTargetRef"]
                scaled = found[f"{reference['kind']}/{reference['name']}"]
                assert scaled["apiVersion"] == reference["apiVersion"]
    for template in templates(name):
        pod = template["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for holder in [*pod["containers"], *pod.get("initContainers", [])]:
            assert {mount["name"] for mount in holder["volumeMounts"]} <= set(volumes)
        for volume in volumes.values():
            if "secret" in volume:
                assert volume["secret"]["secretName"] in ("ours", "llama3-8b-h100-fp8-api-keys")
            if "configMap" in volume:
                data = found[f"ConfigMap/{volume['configMap']['name']}"]["data"]
                assert Path(pod["containers"][0]["args"][1]).name in data


@pytest.mark.parametrize("name", CASES)
def test_kustomize_finds_every_file_and_no_file_is_left_out(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    written = write(case.passport, find_gpu(case.gpu), case.config(), tmp_path / "out")
    files = sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert sorted(written) == files
    used = {tmp_path / "out" / "README.md", tmp_path / "out" / "prometheus-adapter.values.yaml"}
    used |= set((tmp_path / "out" / "chart").rglob("*"))
    for path in files:
        if path.name == "kustomization.yaml":
            used.add(path)
            listed = read(path.read_text())
            for entry in [*listed["resources"], *listed.get("components", [])]:
                there = (path.parent / entry).resolve()
                assert there.exists(), entry
                used.add(there if there.is_file() else there / "kustomization.yaml")
                # kustomize refuses a base that contains who asks for it.
                assert there not in path.parents
    assert set(files) <= used
    for path in files:
        if path.suffix == ".yaml" and "chart" not in path.parts:
            assert read(path.read_text()) == made(name)[path.relative_to(tmp_path / "out").as_posix()]


@pytest.mark.process
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_kustomize_itself_builds_base_and_overlay(tmp_path: Path) -> None:
    case = CASES["group"]
    write(case.passport, find_gpu(case.gpu), case.config(namespace="llm"), tmp_path / "out")
    for folder, more in (("base", set()), ("overlays/prometheus", {"PodMonitor"})):
        words = ["kubectl", "kustomize", str(tmp_path / "out" / folder)]
        done = subprocess.run(
            words, capture_output=True, text=True, check=True, env={**os.environ, "HOME": str(tmp_path)}
        )
        built = list(yaml.safe_load_all(done.stdout))
        expected = {key.split("/")[0] for key in resources("group")} - {"PodMonitor"} | more
        assert {resource["kind"] for resource in built} == expected
        assert {resource["metadata"]["namespace"] for resource in built} == {"llm"}


@pytest.mark.parametrize("name", CASES)
def test_ports_are_the_same_everywhere(name: str) -> None:
    server = container(name)
    wanted = dict(PORTS)
    holders = [server]
    if name != "fixed":
        wanted |= GATEWAY_PORT
        holders.append(gateway(name))
    declared = {port["name"]: port["containerPort"] for holder in holders for port in holder["ports"]}
    assert declared.items() >= wanted.items()
    for key, service in resources(name).items():
        if key.startswith("Service"):
            assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == wanted
    opened = [rule for rule in one_policy(name)["spec"]["ingress"] if "from" not in rule]
    assert [{port["port"] for port in rule["ports"]} for rule in opened] == [set(wanted)]
    scraped = [endpoint["port"] for endpoint in one(name, "PodMonitor")["spec"]["podMetricsEndpoints"]]
    assert scraped == ["metrics", *(["openai"] if "openai" in wanted else [])]
    for holder in holders:
        own = {port["name"] for port in holder["ports"]}
        for probe in {"startupProbe", "livenessProbe", "readinessProbe"} & set(holder):
            if "exec" in holder[probe]:
                assert holder[probe]["exec"]["command"][-3] == "8000"
            else:
                assert holder[probe]["httpGet"]["port"] in own
    text = " ".join(server["args"])
    for port, number in PORTS.items():
        assert re.search(rf"--{port}-port[= ]{number}\b", text)
    assert len(declared) == sum(len(holder["ports"]) for holder in holders)


def one_policy(name: str) -> dict[str, Any]:
    """The policy of the pods that answer."""
    return resources(name)[f"NetworkPolicy/{dns_name(CASES[name].config().name)}"]


def test_headless_and_usual_service_are_two_addresses_of_the_same_pods() -> None:
    usual, headless = (resources("one")[f"Service/llama3-8b-h100-fp8{end}"] for end in ("", "-headless"))
    assert usual["spec"]["selector"] == headless["spec"]["selector"]
    assert (usual["spec"]["type"], headless["spec"]["clusterIP"]) == ("ClusterIP", "None")
    # The controller makes one of the set's own name, and takes one that is there for its own.
    assert "Service/" + one("group", "LeaderWorkerSet")["metadata"]["name"] not in resources("group")


@pytest.mark.parametrize("name", CASES)
def test_pods_have_no_more_rights_than_they_need(name: str) -> None:
    for template in templates(name):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for holder in [*pod["containers"], *pod.get("initContainers", [])]:
            assert holder["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert {"cpu", "memory"} <= set(holder["resources"]["requests"])
        for holder in pod["containers"]:
            mounts = {mount["mountPath"]: mount for mount in holder["volumeMounts"]}
            assert mounts["/models"]["readOnly"] is True
            assert "/tmp" in mounts
            assert ("/dev/shm" in mounts) == (holder["name"] != "gateway")
            assert holder["workingDir"] == "/models"
        server = pod["containers"][0]
        # The one that is, is what the pods of a group know each other by.
        secrets = [variable["name"] for variable in server["env"] if "valueFrom" in variable]
        assert secrets == ["TRTPIPE_RENDEZVOUS_SECRET"] * (name in GROUPS)


@pytest.mark.parametrize("name", [name for name in CASES if name != "trial"])
def test_nothing_secret_and_no_place_of_a_host_is_written(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    written = write(case.passport, find_gpu(case.gpu), case.config(), tmp_path / "out")
    assert str(tmp_path) not in "".join(path.read_text() for path in written)
    text = "".join(path.read_text() for path in written if path.suffix == ".yaml")
    for word in ("hostPath", "hostNetwork", "hostIPC", "hostPID", "privileged: true", "kind: Secret", "password"):
        assert word not in text
    # The paths of a container, of an image, of the API and of HTTP.
    known = (
        "/models", "/repository", "/opt/trtpipe", "/etc/trtpipe/keys", "/tmp", "/dev/shm", "/v2/", "/health/",
        "/metrics", "/apis/", "/proc",
    )  # fmt: skip
    manifest = "\n".join(to_yaml(one) for path, one in made(name).items() if "configmap" not in path)
    for path in re.findall(r"(?<![\w.>*}/])/[a-z][\w/.-]*", manifest):
        assert path.startswith(known), path


@pytest.mark.parametrize(
    ("name", "gpus"), [("one", "1"), ("tp2", "2"), ("dressed", "4"), ("group", "8"), ("llmapi", "2"), ("vllm", "2")]
)
def test_each_rank_has_a_gpu_of_the_engine_s_kind(name: str, gpus: str) -> None:
    product = CASES[name].settings.get("product", "NVIDIA-H100-80GB-HBM3")
    for template in templates(name):
        pod = template["spec"]
        assert pod["nodeSelector"] == {"nvidia.com/gpu.product": product}
        assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": gpus}
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


def test_a_server_with_one_rank_needs_no_mpi() -> None:
    args = container("one")["args"]
    assert args[0] == "tritonserver"
    assert "--exit-timeout-secs=155" in args
    # Else nobody sees the time to the first token: it is off by default.
    assert "--metrics-config=histogram_latencies=true" in args
    assert not [word for word in args if word.startswith(("--model-control-mode", "--load-model"))]
    # The LLM API starts its ranks itself.
    assert container("llmapi")["args"] == args
    assert "command" not in container("one")


def test_ranks_are_servers_under_mpirun() -> None:
    args = container("tp2")["args"]
    assert args[: args.index("-n")] == [
        "mpirun", "--bind-to", "none", "--mca", "odls_base_sigkill_timeout", "77", "--oversubscribe"
    ]  # fmt: skip
    first, second = servers(args)
    assert {"--http-port=8000", "--grpc-port=8001", "--metrics-port=8002"} <= set(first)
    assert not [word for word in first if "load-model" in word or "control" in word]
    assert {"--model-control-mode=explicit", "--load-model=tensorrt_llm", "--allow-http=false"} <= set(second)
    assert not [word for word in second if word.startswith(tuple(f"--{name}-port" for name in PORTS))]


def test_a_group_is_a_leader_that_serves_and_workers_that_hold_ranks() -> None:
    spec = one("group", "LeaderWorkerSet")["spec"]
    group = spec["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    assert spec["startupPolicy"] == "LeaderCreated"
    assert container("group")["args"][:7] == [
        "python3", "/opt/trtpipe/rendezvous.py", "lead", "1", "8", "8003", "mpirun"
    ]  # fmt: skip
    (worker,) = group["workerTemplate"]["spec"]["containers"]
    assert worker["args"] == ["python3", "/opt/trtpipe/rendezvous.py", "work", "8003"]
    assert "ports" not in worker
    assert "livenessProbe" not in worker
    assert one("group", "ConfigMap")["data"] == {"rendezvous.py": Path(rendezvous.__file__).read_text()}
    between = resources("group")["NetworkPolicy/llama3-8b-h100-fp8-group"]["spec"]
    assert between["ingress"] == [{"from": [{"podSelector": between["podSelector"]}]}]
    # One server for each rank, over both pods.
    assert len(servers(container("group")["args"])) == 16


def test_ranks_of_the_llm_api_on_several_nodes_wait_for_the_first_which_serves() -> None:
    args = container("llmapis")["args"]
    assert args[:7] == ["python3", "/opt/trtpipe/rendezvous.py", "lead", "1", "8", "8003", "mpirun"]
    ranks = " ".join(args[args.index("-n") :]).split(" : ")
    assert ranks[0].startswith("-n 1 trtllm-llmapi-launch tritonserver --model-repository=/models")
    assert "--http-port=8000" in ranks[0]
    assert ranks[1:] == ["-n 1 trtllm-llmapi-launch"] * 15
    assert [one["name"] for one in next(templates("llmapis"))["spec"]["containers"]] == ["server", "gateway"]


def test_runtimes_of_ours_are_served_by_trtpipe_itself() -> None:
    words = ["trtpipe", "serve", "/models", "--no-openai", "--host", "0.0.0.0"]
    words += ["--http-port", "8000", "--grpc-port", "8001", "--metrics-port", "8002"]
    words += ["--ready-timeout", "1800", "--drain", "155", "--allow-model-code"]
    for name in ("trial", "vllm"):
        assert container(name)["args"] == words
        assert container(name)["image"] == OURS
        # The gateway is in the same image.
        assert gateway(name)["image"] == {"trial": OURS, "vllm": GATEWAY}[name]
    pod = next(templates("trial"))["spec"]
    assert "nodeSelector" not in pod
    assert "limits" not in pod["containers"][0]["resources"]
    assert pod["containers"][0]["resources"]["requests"] == {"cpu": "4", "memory": "35Gi"}


@given(tp=st.integers(1, 64), pp=st.integers(1, 16), gpus=st.integers(1, 16))
def test_ranks_fit_exactly(tp: int, pp: int, gpus: int) -> None:
    try:
        found = place(tp, pp, gpus)
    except UsageError:
        assert tp > gpus
        assert tp % gpus
        return
    assert found.pods * found.ranks == tp * pp
    assert found.ranks <= gpus
    if found.pods > 1:
        assert tp * pp > gpus
        # A pod holds whole stages, or a stage whole pods.
        assert found.ranks % tp == 0 or tp % found.ranks == 0
        # One pod fewer of equal ones, with whole stages, would not do.
        assert not [n for n in range(1, found.pods) if tp * pp % n == 0 and tp * pp // n <= gpus and pp % n == 0]


@given(tp=st.sampled_from([1, 2, 4, 8, 16]), pp=st.integers(1, 4), gpus=st.sampled_from([1, 2, 4, 8]))
def test_each_rank_has_a_server_a_gpu_and_memory_of_its_own(tp: int, pp: int, gpus: int) -> None:
    built = plan(engine(tp, pp), find_gpu("h100"), CASES["one"].config(gpus_per_node=gpus))
    (workload,) = [one for one in manifests(built).values() if one.get("kind") in ("Deployment", "LeaderWorkerSet")]
    spec = workload["spec"]
    group = spec.get("leaderWorkerTemplate", {"size": 1, "leaderTemplate": spec.get("template")})
    pods = [group["leaderTemplate"], *[group.get("workerTemplate")] * (group["size"] - 1)]
    limits = [int(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for pod in pods]
    assert sum(limits) == tp * pp
    assert max(limits) <= gpus
    ranks = servers(pods[0]["spec"]["containers"][0]["args"])
    assert len(ranks) == tp * pp
    assert len({word for rank in ranks for word in rank if "shm-region" in word}) == tp * pp
    assert ["--load-model=tensorrt_llm" in rank for rank in ranks] == [rank > 0 for rank in range(tp * pp)]


@given(st.text(min_size=1, max_size=120))
def test_any_target_makes_names_that_a_cluster_accepts(text: str) -> None:
    label = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
    try:
        name = dns_name(text)
    except UsageError:
        assert not re.search(r"[a-z0-9]", text.lower())
        return
    assert label.fullmatch(name)
    assert len(name) <= NAME_LENGTH
    assert dns_name(name) == name
    for tp in (1, 16):
        for resource in manifests(
            plan(engine(tp), find_gpu("h100"), DeployConfig(name=text, pvc="models", openai=False))
        ).values():
            metadata = resource.get("metadata", {"name": name, "labels": {}})
            assert label.fullmatch(metadata["name"])
            assert all(re.fullmatch(r"[\w.-]{1,63}", value) for value in metadata["labels"].values())
    # What the controller of a group makes: pods of the hundredth group, and the label of their revision.
    assert len(f"{name}-group-99-15-{'0' * 10}") <= 63


def test_long_targets_stay_apart() -> None:
    long = "meta-llama3.1-70b-instruct.h100.fp8.tp4.with-a-long-tail"
    names = {dns_name(long + end) for end in ("a", "b", ".a")}
    assert len(names) == 3
    assert {name[:31] for name in names} == {"meta-llama3-1-70b-instruct-h100"}
    assert dns_name("70b.H100_fp8") == "m-70b-h100-fp8"


@given(grace=st.integers(60, 3600), tp=st.sampled_from([1, 2, 8]), pp=st.sampled_from([1, 4]))
def test_requests_have_time_to_end_before_the_pod_is_killed(grace: int, tp: int, pp: int) -> None:
    built = plan(engine(tp, pp), find_gpu("h100"), CASES["one"].config(termination_grace_seconds=grace))
    (workload,) = [one for one in manifests(built).values() if one.get("kind") in ("Deployment", "LeaderWorkerSet")]
    spec = workload["spec"]
    pod = (spec.get("template") or spec["leaderWorkerTemplate"]["leaderTemplate"])["spec"]
    server = pod["containers"][0]
    assert pod["terminationGracePeriodSeconds"] == grace
    # The gateway is told first, takes requests for a while, and ends before the pod is killed.
    front = pod["containers"][1]
    linger, drain = (int(front["command"][front["command"].index(word) + 1]) for word in ("--linger", "--drain"))
    assert "lifecycle" not in front
    assert linger == LINGER_SECONDS < PRE_STOP_SECONDS
    assert 0 < linger + drain < grace
    assert server["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(PRE_STOP_SECONDS)]
    exit_seconds = int(next(w for w in server["args"] if "exit-timeout" in w).partition("=")[2])
    assert exit_seconds > 0
    told = answer_seconds(built.passport, built.config, built.placement)
    assert PRE_STOP_SECONDS + exit_seconds <= told <= linger + drain
    if tp * pp == 1:
        assert PRE_STOP_SECONDS + exit_seconds < grace
        return
    kill = int(server["args"][server["args"].index("odls_base_sigkill_timeout") + 1])
    assert exit_seconds < kill
    # mpirun waits, ends the ranks, waits, kills; ranks of other pods come after its own.
    assert PRE_STOP_SECONDS + kill * (2 if tp * pp <= 8 else 4) < grace


def test_a_server_may_take_its_time_to_load() -> None:
    server = container("one", startup_seconds=1801)
    probe = server["startupProbe"]
    assert probe["httpGet"]["path"] == "/v2/health/ready"
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 1801
    assert server["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    words = container("vllm", startup_seconds=1801)["args"]
    assert words[words.index("--ready-timeout") + 1] == "1801"
    assert one("one", "Deployment", startup_seconds=1801)["spec"]["progressDeadlineSeconds"] > 1801


class Live(BaseHTTPRequestHandler):
    """A tritonserver that calls itself live."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/v2/health/live" else 404)
        self.end_headers()

    def log_message(self, *words: Any) -> None: ...


def process(folder: Path, number: int, *words: str, started: int = 7) -> None:
    (folder / str(number)).mkdir(parents=True, exist_ok=True)
    (folder / str(number) / "cmdline").write_text("".join(f"{word}\0" for word in words))
    (folder / str(number) / "stat").write_text(f"{number} (a) b) S {'0 ' * 18}{started} 0\n")


@pytest.mark.loopback
@pytest.mark.process
@pytest.mark.parametrize("name", ["one", "group", "llmapi"])
def test_a_server_of_which_a_python_process_has_died_is_not_live(name: str, tmp_path: Path) -> None:
    """As Triton 2.51 starts them. One that was never there is not missed: the probe ends no healthy server."""
    probe = container(name)["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 60
    assert PRE_STOP_SECONDS < probe["terminationGracePeriodSeconds"] <= 60
    python, *words = probe["exec"]["command"][:-3]
    assert (python, words[:3]) == ("python3", ["-I", "-S", "-c"])
    assert probe["exec"]["command"][-3:] == ["8000", "/proc", "/tmp"]
    proc, folder = tmp_path / "proc", tmp_path / "tmp"
    folder.mkdir()
    stub = "/opt/tritonserver/backends/python/triton_python_backend_stub"

    def start(number: int, instance: str, program: str = stub) -> None:
        region = "rank0_0_d93f3112-48f5-403b-bf1d-3b1716d53401"
        script = f"/models/{instance[:-4]}/1/model.py"
        process(proc, number, program, script, region, "1048576", "1048576", "1", "/opt", "336", instance, "DEFAULT")

    def told(port: int) -> str:
        command = [sys.executable, *words, str(port), str(proc), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == (done.stderr == "")
        return done.stderr

    with ThreadingHTTPServer(("127.0.0.1", 0), Live) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port
        process(proc, 1, "tritonserver", "--model-repository=/models")
        assert told(port) == ""
        start(30, "preprocessing_0_0")
        start(31, "preprocessing_0_1")
        start(32, "other_0_0", program="/usr/bin/python3")
        assert told(port) == ""
        # Dead, and not collected by Triton.
        process(proc, 31)
        shutil.rmtree(proc / "32")
        assert told(port) == "a Python process has died: preprocessing_0_1\n"
        start(33, "preprocessing_0_1")
        assert told(port) == ""
        shutil.rmtree(proc / "30")
        assert told(port) == "a Python process has died: preprocessing_0_0\n"
        # The container is started again, with other models.
        process(proc, 1, "tritonserver", started=8)
        assert told(port) == ""
        shutil.rmtree(proc)
        assert told(port) == ""
        server.shutdown()
    assert "ConnectionRefusedError" in told(port)


def test_trtpipe_serve_watches_its_python_processes_itself() -> None:
    assert container("vllm")["livenessProbe"]["httpGet"] == {"path": "/v2/health/live", "port": "http"}


def test_replicas_follow_waiting_requests_and_fullness() -> None:
    spec = one("tp2", "HorizontalPodAutoscaler")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 4)
    wanted = {metric["pods"]["metric"]["name"]: metric["pods"]["target"] for metric in spec["metrics"]}
    assert wanted == {
        "trtllm_waiting_requests": {"type": "AverageValue", "averageValue": "4"},
        "trtllm_batch_fullness": {"type": "AverageValue", "averageValue": "900m"},
        "trtpipe_gateway_unanswered_requests": {"type": "AverageValue", "averageValue": "16"},
    }
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 600
    # Else every `kubectl apply` would undo what it decided.
    assert "replicas" not in one("tp2", "Deployment")["spec"]
    assert one("fixed", "Deployment")["spec"]["replicas"] == 1
    for name in ("fixed", "wide"):
        assert not [key for key in resources(name) if key.startswith("Horizontal")]


@pytest.mark.parametrize("name", CASES)
def test_the_adapter_makes_every_metric_that_is_asked_for(name: str) -> None:
    rules = made(name)["prometheus-adapter.values.yaml"]["rules"]["custom"]
    provided = {rule["name"]["as"]: rule for rule in rules}
    for resource in resources(name).values():
        if resource["kind"] == "HorizontalPodAutoscaler":
            assert {metric["pods"]["metric"]["name"] for metric in resource["spec"]["metrics"]} == set(provided)
    for rule in rules:
        assert re.match(rule["name"]["matches"], rule["seriesQuery"].partition("{")[0])
        assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
        query = rule["metricsQuery"]
        assert query.count("<<.Series>>") == query.count("<<.LabelMatchers>>") == query.count("<<.GroupBy>>")
        assert query.count("(") == query.count(")")


def test_the_gateway_is_beside_the_server_asks_for_keys_and_is_ready_when_the_model_is() -> None:
    front = gateway("one")
    assert front["image"] == GATEWAY
    assert front["command"] == [
        "trtpipe", "gateway", "/models", "--triton", "127.0.0.1:8001", "--served-model-name", "llama3-8b.h100.fp8",
        "--host", "0.0.0.0", "--port", "9000", "--workers", "1", "--linger", "10", "--drain", "165",
        "--api-keys-file", "/etc/trtpipe/keys/api-keys",
    ]  # fmt: skip
    assert front["readinessProbe"]["httpGet"] == {"path": "/health/ready", "port": "openai"}
    (keys,) = [volume for volume in next(templates("one"))["spec"]["volumes"] if volume["name"] == "keys"]
    assert keys["secret"] == {
        "secretName": "llama3-8b-h100-fp8-api-keys",
        "items": [{"key": "api-keys", "path": "api-keys"}],
        "defaultMode": 0o440,
    }
    server, gate = one("one", "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert "authorization" not in server
    credentials = {"name": "llama3-8b-h100-fp8-api-keys", "key": "metrics-key"}
    assert gate["authorization"] == {"type": "Bearer", "credentials": credentials}
    # As the alerts of `trtpipe monitoring` call them.
    assert [e["relabelings"][0]["replacement"] for e in (server, gate)] == ["trtpipe", "trtpipe-gateway"]
    # A pod that is not ready is scraped too: its server may have ended.
    assert [e["relabelings"][1:] for e in (server, gate)] == [[], []]
    assert "3" in gateway("dressed")["command"]
    assert gateway("dressed")["resources"]["requests"] == {"cpu": "3", "memory": "3Gi"}
    assert "--api-keys-file" not in gateway("trial")["command"]
    assert "keys" not in [volume["name"] for volume in next(templates("trial"))["spec"]["volumes"]]
    assert [one["name"] for one in next(templates("fixed"))["spec"]["containers"]] == ["server"]
    assert gateway("llmapi")["command"] == front["command"]
    # Workers answer nobody.
    assert [one["name"] for one in list(templates("group"))[1]["spec"]["containers"]] == ["worker"]


def test_traces_of_the_gateway_reach_the_collector_and_nothing_else() -> None:
    variable = {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector.tracing:4318"}
    assert variable in gateway("dressed")["env"]
    dns = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
    assert one_policy("dressed")["spec"]["egress"] == [dns, {"ports": [{"port": 4318, "protocol": "TCP"}]}]
    assert read(charted("dressed")["values.yaml"])["traces"] == {
        "endpoint": "http://collector.tracing:4318", "port": 4318,
    }  # fmt: skip
    assert one_policy("one")["spec"]["egress"] == []
    assert "OTEL" not in json.dumps(gateway("one"))


def test_the_command_of_the_gateway_is_one_that_trtpipe_knows() -> None:
    words = gateway("one")["command"]
    command = command_of_examples().commands["gateway"]
    context = command.make_context("gateway", list(words[2:]))
    assert (context.params["target"], context.params["linger"], context.params["port"]) == ("/models", 10, 9000)


def test_the_command_of_the_server_is_one_that_trtpipe_knows() -> None:
    words = container("vllm")["args"]
    context = command_of_examples().commands["serve"].make_context("serve", list(words[2:]))
    given = {name: context.params[name] for name in ("targets", "ready_timeout", "drain", "allow_model_code", "host")}
    assert given == {
        "targets": ("/models",), "ready_timeout": 1800, "drain": 155, "allow_model_code": True, "host": "0.0.0.0",
    }  # fmt: skip


def test_a_mig_slice_is_asked_for_by_its_own_name() -> None:
    pod = next(templates("slice"))["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": "1"}
    # With the strategy `mixed`, the label is the card's.
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}


def test_pods_go_to_preempted_nodes_only_when_asked_and_leave_lost_ones_soon() -> None:
    def tolerated(name: str) -> list[Any]:
        found: list[Any] = next(templates(name))["spec"]["tolerations"]
        return found

    lost = [{"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
            for why in ("not-ready", "unreachable")]  # fmt: skip
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert tolerated("trial") == lost
    assert tolerated("one") == [gpu, *lost]
    assert tolerated("dressed") == [
        gpu,
        {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists", "effect": "NoExecute"},
        *lost,
    ]


def test_pipeline_stages_do_not_count_as_waiting() -> None:
    plain, staged = (made(name)["prometheus-adapter.values.yaml"]["rules"]["custom"][0] for name in ("one", "group"))
    gauge = 'sum(avg_over_time(<<.Series>>{{<<.LabelMatchers>>,request_type="{}"}}[1m])) by (<<.GroupBy>>)'
    assert plain["metricsQuery"] == f"clamp_min({gauge.format('waiting')}, 0)"
    assert staged["metricsQuery"] == f"clamp_min({gauge.format('waiting')} - 1 * {gauge.format('scheduled')}, 0)"
    assert (plain["name"]["as"], staged["name"]["as"]) == ("trtllm_waiting_requests", "trtllm_waiting_requests_pp2")


def test_updates_and_evictions_take_no_capacity_unless_asked() -> None:
    def rollout(name: str) -> Any:
        spec = (resources(name).get("Deployment/llama3-8b-h100-fp8") or one(name, "LeaderWorkerSet"))["spec"]
        return spec["strategy"]["rollingUpdate"] if "strategy" in spec else (
            spec["rolloutStrategy"]["rollingUpdateConfiguration"]
        )  # fmt: skip

    assert rollout("one") == rollout("group") == {"maxUnavailable": 0, "maxSurge": 1}
    assert rollout("fixed") == rollout("wide") == {"maxUnavailable": 1, "maxSurge": 0}
    budgets = {name: one(name, "PodDisruptionBudget")["spec"] for name in ("one", "group", "tp2", "wide")}
    assert [budgets[name].get("minAvailable") for name in budgets] == ["50%", "75%", None, None]
    assert [budgets[name].get("maxUnavailable") for name in budgets] == [None, None, 1, 1]
    keys = [spread["topologyKey"] for spread in next(templates("one"))["spec"]["topologySpreadConstraints"]]
    assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]


@pytest.mark.parametrize("gpus", [16, 8, 4, 2, 1])
def test_the_only_replica_is_not_evicted_and_of_several_at_most_half(gpus: int) -> None:
    """Those that the autoscaler has added too; a group is lost with any of its pods."""
    pods = 16 // gpus
    least = one("group", "PodDisruptionBudget", gpus_per_node=gpus)["spec"]["minAvailable"]

    def evicted(replicas: int) -> int:
        """Pods at a time: Kubernetes rounds the least up."""
        return pods * replicas - math.ceil(pods * replicas * int(least.removesuffix("%")) / 100)

    assert [evicted(replicas) for replicas in (1, 2, 3, 4)] == [0, 1, 1, 2]


def test_another_engine_makes_other_pods() -> None:
    def annotations(**changes: Any) -> dict[str, str]:
        built = plan(engine(**changes), find_gpu("h100"), CASES["one"].config())
        found: dict[str, str] = manifests(built)["base/deployment.yaml"]["spec"]["template"]["metadata"]["annotations"]
        return found

    assert annotations() == annotations()
    assert annotations(build_config={"max_batch_size": 8})["trtpipe/passport"] != annotations()["trtpipe/passport"]
    assert annotations()["trtpipe/engine"] == "tensorrt_llm 1.2.1"


def test_a_change_of_the_repository_alone_makes_other_pods(tmp_path: Path) -> None:
    def annotated(repository: Path) -> str:
        built = manifests(plan(engine(8, 2), find_gpu("h100"), CASES["group"].config(), repository))
        group = built["base/leaderworkerset.yaml"]["spec"]["leaderWorkerTemplate"]
        (found,) = {group[key]["metadata"]["annotations"]["trtpipe/repository"] for key in group if "Template" in key}
        assert re.fullmatch(r"[0-9a-f]{16}", found)
        return str(found)

    def packaged(folder: Path) -> dict[str, Any]:
        (folder / "ensemble").mkdir()
        (folder / "ensemble" / "config.pbtxt").write_text("max_batch_size: 8")
        return {}

    host = tmp_path / "offloads"
    (host / "tensorrt_llm" / "1").mkdir(parents=True)
    (host / "tensorrt_llm" / "1" / SETTINGS).write_text(f"kv_cache_config: {{host_cache_size: {64 << 30}}}")
    needs = []
    for known in (None, host):
        one = manifests(plan(engine(), find_gpu("h100"), CASES["one"].config(), known))["base/deployment.yaml"]
        held = one["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"].value
        needs.append(int(held.removesuffix("Gi")))
    assert needs[1] == needs[0] + 64

    record = Record(stage="package", stage_version=1, inputs={"engine": "e"}, settings={}, tools={})
    made = Store(tmp_path / "home").make(record, packaged)
    assert annotated(made.path) == made.manifest.content[:16]

    repository = tmp_path / "r"
    for path in ("ensemble/config.pbtxt", "preprocessing/1/tokenizer/tokenizer.json",
                 "tensorrt_llm/1/adapters/fr/model.lora_weights.npy"):  # fmt: skip
        (repository / path).parent.mkdir(parents=True)
        (repository / path).write_text("before")
    weights = tmp_path / "rank0.engine"
    with weights.open("wb") as file:
        file.truncate(64 << 20)
    (repository / "tensorrt_llm" / "1" / "rank0.engine").symlink_to(weights)
    seen = [annotated(repository)]
    assert annotated(repository) == seen[0]
    for small in sorted(path for path in repository.rglob("*.*") if not path.is_symlink()):
        small.write_text("after_")
        seen.append(annotated(repository))
    assert len(set(seen)) == 4
    weights.write_bytes(b"")
    assert annotated(repository) not in seen


def test_where_the_repository_comes_from() -> None:
    def storage(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        pod = next(templates(name))["spec"]
        (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "models"]
        (volume,) = [one for one in pod["volumes"] if one["name"] == "models"]
        return volume, mount

    volume, mount = storage("one")
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert mount["subPath"] == "models"
    assert "subPath" not in storage("fixed")[1]
    assert storage("trial")[0]["hostPath"] == {"path": "/srv/models", "type": "Directory"}
    volume, mount = storage("group")
    assert (volume["emptyDir"], "subPath" in mount) == ({}, False)
    for template in templates("group"):
        (copying,) = template["spec"]["initContainers"]
        assert copying["image"] == "registry.example.com/llama@sha256:c0ffee"
        assert copying["command"] == ["cp", "-R", "/models/.", "/repository"]
        requests = template["spec"]["containers"][0]["resources"]["requests"]
        # 16 ranks of 9 GiB, and a little.
        assert requests["ephemeral-storage"] == "161Gi"


def test_what_one_target_looks_like(tmp_path: Path) -> None:
    documents = [f"# {path}\n{to_yaml(read(to_yaml(one)))}" for path, one in made("tp2").items()]
    check_golden("deploy.yaml", "---\n".join(documents))
    case = CASES["tp2"]
    write(case.passport, find_gpu(case.gpu), case.config(), tmp_path / "out")
    check_golden("deploy.md", (tmp_path / "out" / "README.md").read_text())


@pytest.mark.parametrize("name", CASES)
def test_the_readme_says_what_to_know(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    write(case.passport, find_gpu(case.gpu), case.config(), tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "kubectl apply -k base" in text
    # ./runs/TARGET/repository is a link, which neither a pod nor Docker follows.
    assert "cp -rL" in text
    assert "None" not in text
    assert not re.search(r"\{[a-z_]+[.}]", text)
    assert "\n\n\n" not in text
    if any(key.startswith("Horizontal") for key in resources(name)):
        for words in ("nv_inference_queue_duration_us", "trtllm_waiting_requests", "trtllm_batch_fullness"):
            assert words in text
    assert ("/v1/chat/completions" in text) == (name != "fixed")
    assert ("create secret generic llama3-8b-h100-fp8-api-keys" in text) == (name not in ("fixed", "trial", "dressed"))
    workload = f"leaderworkerset/{WORKLOAD}-group" if name in GROUPS else f"deployment/{WORKLOAD}"
    space = CASES[name].config().namespace
    restart = "patch" if name in GROUPS else "rollout restart"
    assert f"kubectl -n {space} {restart} {workload}" in text
    assert ("rollout restart deployment" in text) == (name not in GROUPS)
    # What an earlier base may have left.
    other = f"deployment/{WORKLOAD}" if name in GROUPS else f"leaderworkerset/{WORKLOAD}-group"
    assert f"kubectl -n {space} delete {other}" in text
    scaled = any(key.startswith("Horizontal") for key in resources(name))
    assert (f"kubectl -n {space} apply edit-last-applied {workload}" in text) == scaled
    assert (f"delete horizontalpodautoscaler/{WORKLOAD}" in text) != scaled
    assert ("has gone are replaced after 30 s" in text) == (name not in GROUPS)
    seconds = {"dressed": 289, "tp2": 169, "group": 91, "wide": 91, "llmapis": 91}.get(name, 175)
    assert f"An answer that still runs {seconds} s after its pod was told to end is cut off." in text
    assert ("The liveness probe looks for these processes too" in text) == (name not in ("trial", "vllm"))
    assert ("do not check again (`--allow-model-code`)" in text) == (name in ("trial", "vllm"))
    assert ("/opt/venv-vllm/bin/pip install 'vllm>=" in text) == (name == "vllm")
    assert ("--no-install-recommends gcc libc6-dev && python3 -m venv" in text) == (name == "vllm")
    if case.passport.toolchain:
        assert (find_toolchain(None).driver or "?") in text
    assert ("tens of gigabytes" in text) == (name not in ("trial", "vllm")), "NVIDIA's image, not ours"
    assert ("LWS_LEADER_ADDRESS" in text) == (name in GROUPS)
    assert ("odls_base_sigkill_timeout" in text) == (
        name == "llmapis" or (case.passport.runtime == "tensorrt_llm" and case.passport.world_size > 1)
    )


@pytest.mark.parametrize(
    ("made", "gpu", "settings", "kind", "told"),
    [
        (engine(), "h100", {"pvc": None}, UsageError, "nothing says where the model repository is"),
        (engine(), "h100", {"model_image": "x"}, UsageError,
         "^--pvc and --model-image are given: .*; give exactly one of --pvc, --model-image, --host-path$"),
        (engine(), "h100", {"api_keys": False, "api_keys_secret": "k"}, UsageError,
         "api_keys is false, and no gateway asks for the keys of api_keys_secret k"),
        (engine(), "h100", {"openai": False, "api_keys_secret": "k"}, UsageError, "openai is false, and no gateway"),
        (engine(), "h100", {"pvc": "Models"}, UsageError, "--pvc 'Models' is not a DNS name"),
        (engine(), "h100", {"repository_path": "../x"}, UsageError, "leads out of the volume"),
        (engine(), "h100", {"pvc": None, "host_path": "srv"}, UsageError, "--host-path 'srv' is not an absolute path"),
        (engine(), "h100", {"pvc": None, "model_image": "x", "repository_path": "/"}, UsageError, "root of an image"),
        (engine(), "h100", {"namespace": "a.b"}, UsageError, "--namespace 'a.b' is not a DNS label"),
        (engine(), "h100", {"shm_size": "much"}, UsageError, "shm_size 'much' is not a quantity"),
        (engine(), "h100", {"image": "a b"}, UsageError, "--image 'a b' is not an image reference"),
        (engine(), "h100", {"name": "..."}, UsageError, r"'\.\.\.' makes no name for a cluster"),
        (engine(), "h100", {"replicas_min": 0}, UsageError, "replicas_min is 0; give at least 1"),
        (engine(), "h100", {"replicas_min": 3, "replicas_max": 2}, UsageError, "replicas_max 2 is below"),
        (engine(), "h100", {"termination_grace_seconds": 5}, UsageError, "give at least 60"),
        (engine(), "h100", {"scale_down_seconds": 7200}, UsageError, "give at most 3600"),
        (engine(3), "h100", {"gpus_per_node": 2}, UsageError, "tensor parallelism of 3 does not fit nodes of 2 GPUs"),
        (engine(), "h100", {"gateway_image": None}, UsageError, "for the OpenAI-compatible gateway.*--gateway-image"),
        (engine(), "h100", {"gateway_image": "a b"}, UsageError, "--gateway-image 'a b' is not an image reference"),
        (engine(), "h100", {"otlp_endpoint": "collector:4318"}, UsageError, "'collector:4318' is not a URL"),
        (engine(), "h100", {"otlp_endpoint": "http://x", "openai": False, "gateway_image": None}, UsageError,
         "--otlp-endpoint is given, and there is no gateway"),
        (engine(), "h100", {"openai": False}, UsageError, "--gateway-image is given, and there is no gateway; leave"),
        (engine(), "h100", {"gateway_workers": 0}, UsageError, "gateway_workers is 0; give at least 1"),
        (engine(), "h100", {"tolerations": ("spot",)}, UsageError, "'spot' is not a taint; write it as key=value"),
        (engine(2), "h100-mig-3g.40gb", {}, UsageError, "2 ranks cannot be on MIG slices"),
        (engine(), "a100", {}, ArtefactRefused, r"for h100 \(SM90\), and a100 \(SM80\) is asked for; deploy"),
        (engine(), "cpu", {}, ArtefactRefused, r"for h100 \(SM90\), and nodes without a GPU are asked for"),
        (engine(rank_bytes=90 * GIB), "h100", {}, ArtefactRefused, r"weights take 90\.0 GiB, and h100 has 80"),
        (reference(gpu="h100", sm=90), "h100", {"image": OURS}, ArtefactRefused,
         "^engines of the reference runtime are not deployed on GPUs: trtpipe's image of it computes on the CPU, and "
         "would hold h100 GPUs without using them; build it with `--gpu cpu`, or with another --runtime for h100$"),
        (reference(), "cpu", {}, UsageError, "no image is given for .*; give --image, one that holds trtpipe"),
        (engine(runtime="llama_cpp"), "h100", {}, ArtefactRefused, "the runtime 'llama_cpp' is not known"),
        (engine(16, runtime="vllm"), "h100", {"image": OURS}, ArtefactRefused,
         "needs 2 nodes: .*Ray.*, or give --set gpus_per_node=16 where a node has as many$"),
        (engine(runtime="trtllm_pytorch", toolchain="1.3.0rc29", image=None), "h100", {}, UsageError,
         "no image is given .*: no document names an image with tritonserver and TensorRT-LLM 1.3.0rc29; give --image"),
    ],
)  # fmt: skip
def test_what_cannot_be_deployed_is_refused_with_the_reason(
    made: Passport, gpu: str, settings: dict[str, Any], kind: type[TrtpipeError], told: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=told) as refused:
        write(
            made, find_gpu(gpu), Case(made, gpu, {"name": "x", "pvc": "models", **settings}).config(), tmp_path / "out"
        )
    assert refused.value.remedy
    assert not (tmp_path / "out").exists()


def test_the_same_kind_of_gpu_under_another_name_will_do() -> None:
    made = manifests(plan(engine(), find_gpu("h200"), CASES["one"].config()))["base/deployment.yaml"]
    pod = read(to_yaml(made))["spec"]["template"]
    assert pod["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}


@pytest.mark.parametrize("runtime", ["vllm", "trtllm_pytorch"])
def test_a_folder_that_the_loader_splits_needs_gpus_for_a_share_each(runtime: str) -> None:
    passport = engine(4, runtime=runtime, rank_bytes=132 * GIB)
    given = {"name": "x", "image": OURS, "model_image": "models"}
    made = manifests(plan(passport, find_gpu("h100"), Case(passport, settings=given).config()))
    pod = read(to_yaml(made["base/deployment.yaml"]))["spec"]["template"]["spec"]
    requests = pod["containers"][0]["resources"]["requests"]
    # All weights and 8 GiB; all weights, a tenth and 2 GiB.
    assert (requests["memory"], requests["ephemeral-storage"]) == ("140Gi", "148Gi")
    alone = engine(runtime=runtime, rank_bytes=132 * GIB)
    with pytest.raises(ArtefactRefused, match=r"weights take 132\.0 GiB, and h100 has 80"):
        plan(alone, find_gpu("h100"), Case(alone, settings=given).config())


def test_a_gpu_without_a_product_name_needs_one() -> None:
    unknown = dataclasses.replace(find_gpu("h100"), name="h100-new", product="")
    with pytest.raises(UsageError, match=r"name of h100-new is not known: .*; give it with --set product=NAME, or as"):
        plan(engine(), unknown, CASES["one"].config())
    made = manifests(plan(engine(), unknown, CASES["one"].config(product="NVIDIA-H100-NEW")))["base/deployment.yaml"]
    pod = read(to_yaml(made))["spec"]["template"]
    assert pod["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-NEW"}


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(UsageError, match="not an empty folder"):
        write(engine(), find_gpu("h100"), CASES["one"].config(), tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == ["mine"]
