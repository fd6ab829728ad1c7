"""The Helm chart and the resources of KServe: the same pods as the manifests."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.unit.deploy.cases import CASES, GROUPS, charted, engine, made, read, resources, schema, templates
from trtpipe.configs.facts import find_gpu
from trtpipe.pipeline.deploy.kubernetes import manifests, plan, write


def rendered(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The chart's resources by kind and name, as Helm would render what its templates contain."""

    def value(match: re.Match[str]) -> str:
        return json.dumps(functools.reduce(lambda at, key: at[key], match[1].split("."), values))

    found = {}
    for path, text in charted(name).items():
        if path.startswith("templates/"):
            condition = re.match(r"\{\{- if \.Values\.(\w+) \}\}\n", text)
            if condition is None or values[condition[1]]:
                text = re.sub(r"\{\{- (if \.Values\.\w+|end) \}\}\n", "", text)
                text = re.sub(r"\{\{ toJson \.Values\.([\w.]+) \}\}", value, text)
                one = read(re.sub(r'\{\{ "\{\{" \}\}', "{{", text))
                found[f"{one['kind']}/{one['metadata']['name']}"] = one
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_chart_renders_to_the_base_with_its_own_values(name: str) -> None:
    values = read(charted(name)["values.yaml"])
    jsonschema.Draft7Validator(json.loads(charted(name)["values.schema.json"])).validate(values)
    assert values["podMonitor"] is False
    assert rendered(name, {**values, "podMonitor": True}) == resources(name)
    assert set(resources(name)) - set(rendered(name, values)) == {"PodMonitor/llama3-8b-h100-fp8"}


def test_a_chart_s_values_are_explained_change_the_manifests_and_are_checked() -> None:
    text = charted("tp2")["values.yaml"]
    values = read(text)
    lines = text.splitlines()
    assert (
        lines[lines.index("# image of the server") + 1] == "image: nvcr.io/nvidia/tritonserver:26.06-trtllm-python-py3"
    )
    leaves = [key for value in values.values() for key in (value if isinstance(value, dict) else [None])]
    assert len([line for line in lines if line.lstrip().startswith("# ")]) == len(leaves)
    assert set(values["autoscaling"]) == {
        "minReplicas", "maxReplicas", "waitingPerReplica", "unansweredPerReplica", "scaleDownSeconds"
    }  # fmt: skip
    changed = {**values, "image": "mirror/triton:1", "tolerations": [], "claim": "others",
               "resources": {**values["resources"], "cpu": "32"}}  # fmt: skip
    pod = rendered("tp2", changed)["Deployment/llama3-8b-h100-fp8"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "mirror/triton:1"
    assert pod["containers"][0]["resources"]["requests"]["cpu"] == "32"
    assert (pod["tolerations"], pod["volumes"][0]["persistentVolumeClaim"]["claimName"]) == ([], "others")
    check = jsonschema.Draft7Validator(json.loads(charted("tp2")["values.schema.json"]))
    check.validate({**changed, "resources": {"cpu": 32, "memory": "64Gi", "shm": "4Gi"}})  # as `helm --set` reads it
    for wrong in ({**values, "images": "x"}, {**values, "tolerations": "x"}, {**values, "resources": {"gpu": "1"}}):
        assert list(check.iter_errors(wrong)), wrong


@pytest.mark.process
@pytest.mark.skipif(shutil.which("helm") is None, reason="no helm")
@pytest.mark.parametrize("name", CASES)
def test_helm_itself_accepts_the_chart_and_renders_the_same(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    write(case.passport, find_gpu(case.gpu), case.config(), tmp_path / "out")
    where = str(tmp_path / "out" / "chart")
    environment = {**os.environ, "HOME": str(tmp_path)}

    def helm(*words: str, fails: bool = False) -> str:
        done = subprocess.run(["helm", *words], capture_output=True, text=True, env=environment, check=False)
        assert (done.returncode != 0) == fails, done.stderr + done.stdout
        return done.stderr if fails else done.stdout

    helm("lint", "--strict", where)
    documents = filter(None, yaml.safe_load_all(helm("template", "x", where, "--set", "podMonitor=true")))
    assert {f"{one['kind']}/{one['metadata']['name']}": one for one in documents} == resources(name)
    assert "imagge" in helm("template", "x", where, "--set", "imagge=y", fails=True)


@pytest.mark.parametrize("name", [name for name in CASES if name not in GROUPS])
def test_kserve_gets_the_same_pod_in_two_halves(name: str) -> None:
    made_here = made(name)
    check = jsonschema.Draft202012Validator(schema("kserve"))
    runtime, service = (made_here[f"kserve/{file}.yaml"] for file in ("servingruntime", "inferenceservice"))
    for resource in (runtime, service):
        check.validate(resource)
    predictor = service["spec"]["predictor"]
    assert predictor["model"]["runtime"] == runtime["metadata"]["name"]
    assert predictor["model"]["modelFormat"] in runtime["spec"]["supportedModelFormats"]
    assert predictor["deploymentStrategy"]["rollingUpdate"] == (
        {"maxUnavailable": 1, "maxSurge": 0} if name == "fixed" else {"maxUnavailable": 0, "maxSurge": 1}
    )
    template = next(templates(name))
    pod = dict(template["spec"])
    pod.pop("topologySpreadConstraints")
    halves = {**runtime["spec"], **predictor}
    main, *others = halves["containers"]
    # KServe sends requests to the first port of this container.
    assert main["name"] == "kserve-container"
    assert main["ports"][0]["name"] == ("http" if name == "fixed" else "openai")
    assert [*others, {**main, "name": pod["containers"][-1]["name"]}] == pod["containers"]
    assert {key: halves[key] for key in pod if key != "containers"} == {
        key: value for key, value in pod.items() if key != "containers"
    }
    assert (runtime["spec"]["labels"], runtime["spec"]["annotations"]) == (
        template["metadata"]["labels"], template["metadata"]["annotations"]
    )  # fmt: skip


def test_what_kserve_watches_changes_with_the_runtime() -> None:
    """It replaces pods for a changed InferenceService alone."""

    def annotations(image: str | None = None, **changes: Any) -> dict[str, str]:
        config = CASES["one"].config()
        built = plan(engine(**changes), find_gpu("h100"), replace(config, image=image or config.image))
        found: dict[str, str] = manifests(built)["kserve/inferenceservice.yaml"]["metadata"]["annotations"]
        return found

    seen = [annotations(), annotations(image="other:1"), annotations(build_config={"max_batch_size": 8})]
    assert len({tuple(sorted(one.items())) for one in seen}) == 3
    assert annotations() == seen[0]


def test_kserve_gets_no_group() -> None:
    assert not [path for path in made("group") if path.startswith("kserve/")]
