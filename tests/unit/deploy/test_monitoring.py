"""The files that watch a server: loadable, consistent, and about metric families that exist."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtpipe.engines.errors import HostError, UsageError
from trtpipe.pipeline.deploy.monitoring import ALERTS, DASHBOARD, SCRAPE, write_monitoring
from trtpipe.pipeline.gateway.shared_counters import MEANINGS, STATUSES
from trtpipe.pipeline.net.triton_metrics import KNOWN, Family

MODELS = ("ensemble", "postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls")
# Prometheus makes it for every target.
OWN = {"up"}
ENDINGS = {"counter": "_total", "histogram": "_seconds", "gauge": ""}
FAMILIES = {
    **KNOWN,
    **{
        name: Family(name=name, kind=kind, unit="", source="gateway")
        for name, kind in ((f"trtpipe_gateway_{key}{ENDINGS[kind]}", kind) for key, (kind, _) in MEANINGS.items())
    },
    "trtpipe_gateway_requests_total": Family(
        name="trtpipe_gateway_requests_total", kind="counter", unit="", source="gateway",
        label="status", values=tuple(map(str, STATUSES)),
    ),
}  # fmt: skip
# Those of Grafana's value formats that the dashboard needs, and its own suffixes.
UNITS = {"none", "reqps", "ms", "s", "percentunit", "bytes", "watt", "joule"}
# Words of PromQL that are not metrics; anything else outside of braces is one.
WORDS = {
    "absent", "and", "avg", "avg_over_time", "by", "clamp_max", "clamp_min", "histogram_quantile", "max",
    "max_over_time", "on", "or", "rate", "sum",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("target") / "monitoring"
    write_monitoring(MODELS, out)
    return out


@pytest.fixture(scope="module")
def board(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / DASHBOARD).read_text(encoding="utf-8"))
    return value


@pytest.fixture(scope="module")
def rules(folder: Path) -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((folder / ALERTS).read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions(board: dict[str, Any], rules: list[dict[str, Any]]) -> list[str]:
    return [target["expr"] for panel in panels(board) for target in panel["targets"]] + [rule["expr"] for rule in rules]


def series(expr: str) -> dict[str, list[dict[str, str]]]:
    """The metrics an expression selects -> the labels of each selection. Fails on what is not a PromQL we write."""
    found: dict[str, list[dict[str, str]]] = {}
    rest = re.sub(r"\b(by|on) \([a-z_, ]*\)", r"\1", expr)

    def take(match: re.Match[str]) -> str:
        labels = re.findall(r'(\w+)(=~|!=|=)"((?:[^"\\]|\\.)*)"', match[2] or "")
        assert ",".join(f'{name}{sign}"{value}"' for name, sign, value in labels) == (match[2] or "")
        found.setdefault(match[1], []).append({name: value for name, sign, value in labels if sign == "="})
        return "0"

    rest = re.sub(r'([a-z_]\w*)\{((?:"(?:[^"\\]|\\.)*"|[^}"])*)\}(?:\[(?:\d+[dm]|\$__rate_interval)\])?', take, rest)
    assert re.fullmatch(r"[\d.()*/+<>= ,a-z_]*", rest), rest
    assert rest.count("(") == rest.count(")")
    assert set(re.findall(r"[a-z_]+", rest)) <= WORDS, rest
    return found


def family(name: str) -> str:
    """The family a series belongs to: histograms and summaries have several names."""
    base = re.sub(r"_(sum|count|bucket)$", "", name)
    return base if FAMILIES.get(base) and FAMILIES[base].kind in ("histogram", "summary") else name


def test_an_expression_is_taken_apart_as_prometheus_would() -> None:
    expr = 'sum by (a, b) (rate(x_sum{m="a{b}",n=~".*"}[5m])) / 2 > 0.5 and on () max(up{job="j"}) == 1'
    assert series(expr) == {"x_sum": [{"m": "a{b}"}], "up": [{"job": "j"}]}
    with pytest.raises(AssertionError):
        series("rate(bare_name[5m])")
    with pytest.raises(AssertionError):
        series("summ(x{})")


def test_every_expression_is_about_known_families_labels_and_values(
    board: dict[str, Any], rules: list[dict[str, Any]]
) -> None:
    for expr in expressions(board, rules):
        found = series(expr)
        assert found, expr
        for name, selections in found.items():
            if name in OWN:
                continue
            assert family(name) in FAMILIES, expr
            known = FAMILIES[family(name)]
            for labels in selections:
                assert set(labels) <= {"job", "instance", "model", known.label}, expr
                if known.label in labels:
                    assert labels[known.label] in known.values, expr


def test_counters_are_looked_at_as_rates_and_gauges_are_not(board: dict[str, Any], rules: list[dict[str, Any]]) -> None:
    growing = {"reused", "iteration_counter"}  # gauges by name, counters by nature
    for expr in expressions(board, rules):
        for name, selections in series(expr).items():
            if name in OWN or f"absent({name}" in expr:
                continue
            known = FAMILIES[family(name)]
            for labels in selections:
                grows = known.kind != "gauge" or labels.get(known.label) in growing
                assert (f"rate({name}{{" in expr) == grows or "tokens_per" in expr, expr


def test_panels_have_ids_of_their_own_and_do_not_overlap(board: dict[str, Any]) -> None:
    everything = board["panels"]
    ids = [panel["id"] for panel in everything]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_explains_itself_and_has_a_known_unit(board: dict[str, Any]) -> None:
    for panel in panels(board):
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in UNITS or re.fullmatch(r"suffix: (tokens|steps)(/s)?", unit), panel["title"]
        assert len(panel["description"]) > 60, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0


@pytest.mark.parametrize(
    ("title", "unit"),
    [
        ("Successful requests", "reqps"),
        ("Tokens", "suffix: tokens/s"),
        ("KV cache in use", "percentunit"),
        ("Queue and compute", "ms"),
        ("First response", "ms"),
        ("Time to first token", "s"),
        ("Time between tokens", "s"),
        ("Errors of the gateway", "percentunit"),
        ("Waiting at the gateway", "none"),
        ("Tokens at the gateway", "suffix: tokens/s"),
        ("GPU power", "watt"),
        ("GPU memory", "bytes"),
    ],
)
def test_what_was_asked_for_is_there_in_its_unit(board: dict[str, Any], title: str, unit: str) -> None:
    found = [panel for panel in panels(board) if panel["title"] == title]
    assert {panel["fieldConfig"]["defaults"]["unit"] for panel in found} == {unit}


def test_a_counter_of_microseconds_becomes_milliseconds(board: dict[str, Any]) -> None:
    for expr in (target["expr"] for panel in panels(board) for target in panel["targets"]):
        if "_us{" in expr:
            assert expr.endswith(" / 1000")


def test_the_dashboard_follows_its_choosers(board: dict[str, Any]) -> None:
    assert board["schemaVersion"] >= 39
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names == ["datasource", "instance", "model", "gateway"]
    assert board["templating"]["list"][0]["type"] == "datasource"
    for panel in panels(board):
        for target in panel["targets"]:
            chooser = "gateway" if "trtpipe_gateway" in target["expr"] else "instance"
            assert f'instance=~"${chooser}"' in target["expr"], panel["title"]
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {chooser, "model", "__rate_interval"}
    queries = [variable["definition"] for variable in board["templating"]["list"][1:]]
    assert all(re.findall(r"(?:nv|trtpipe)_\w+", query)[0] in FAMILIES for query in queries)


def test_prometheus_finds_the_server_the_gateway_and_the_rules(folder: Path) -> None:
    config = yaml.safe_load((folder / SCRAPE).read_text(encoding="utf-8"))
    scraped = [(job["job_name"], job["metrics_path"], job["static_configs"]) for job in config["scrape_configs"]]
    assert scraped == [
        ("trtpipe", "/metrics", [{"targets": ["localhost:8002"]}]),
        ("trtpipe-gateway", "/metrics", [{"targets": ["localhost:9000"]}]),
    ]
    assert [(folder / name).is_file() for name in config["rule_files"]] == [True]


def test_other_targets_are_scraped_when_given(tmp_path: Path) -> None:
    write_monitoring(
        MODELS, tmp_path, targets=["gpu-1:8002", "http://0.0.0.0:18002/metrics"], gateways=["https://[::1]:9000"],
        key_file=Path("/etc/prometheus/key"),
    )  # fmt: skip
    servers, gateways = yaml.safe_load((tmp_path / SCRAPE).read_text(encoding="utf-8"))["scrape_configs"]
    assert servers["static_configs"] == [{"targets": ["gpu-1:8002", "localhost:18002"]}]
    assert {"scheme", "authorization"}.isdisjoint(servers)
    encrypted = {"__scheme__": "https"}
    assert gateways["static_configs"] == [{"targets": ["[::1]:9000"], "labels": encrypted}]
    assert gateways["authorization"] == {"credentials_file": "/etc/prometheus/key"}
    write_monitoring(MODELS, tmp_path, gateways=["https://gpu-1:9000", "10.0.0.0:9000", "10.0.0.0:9000"])
    (_, gateways) = yaml.safe_load((tmp_path / SCRAPE).read_text(encoding="utf-8"))["scrape_configs"]
    assert gateways["static_configs"] == [
        {"targets": ["10.0.0.0:9000"]}, {"targets": ["gpu-1:9000"], "labels": encrypted}
    ]  # fmt: skip
    with pytest.raises(UsageError, match="'http://gpu-1:8002/other' is not the address of metrics"):
        write_monitoring(MODELS, tmp_path, targets=["http://gpu-1:8002/other"])


def test_without_a_gateway_nothing_asks_for_one(rules: list[dict[str, Any]], tmp_path: Path) -> None:
    write_monitoring(MODELS, tmp_path, gateways=[])
    (job,) = yaml.safe_load((tmp_path / SCRAPE).read_text(encoding="utf-8"))["scrape_configs"]
    assert (job["job_name"], job["static_configs"]) == ("trtpipe", [{"targets": ["localhost:8002"]}])
    (group,) = yaml.safe_load((tmp_path / ALERTS).read_text(encoding="utf-8"))["groups"]
    left = {rule["alert"] for rule in group["rules"]}
    assert {rule["alert"] for rule in rules} - left == {
        "TrtpipeGatewayDown", "TrtpipeGatewayNotUp", "TrtpipeGatewayErrors", "TrtpipeFirstTokenSlow",
        "TrtpipeTokensSlow", "TrtpipeGatewayQueue",
    }  # fmt: skip
    assert "gateway" not in (tmp_path / ALERTS).read_text(encoding="utf-8")
    with pytest.raises(UsageError, match=r"^a key of the gateways is given, and there is no gateway; name gateways"):
        write_monitoring(MODELS, tmp_path, gateways=[], key_file=Path("key"))


@pytest.mark.parametrize(
    "wrong", ["not a host", "host", "host:", "host:99999", "ftp://host:1", "", "a:1@b:2", "[::1:1"]
)
def test_what_is_no_address_is_refused_before_anything_is_written(wrong: str, tmp_path: Path) -> None:
    for targets, gateways in ((["gpu-1:8002", wrong], ["x:1"]), (["x:1"], [wrong])):
        with pytest.raises(UsageError) as refused:
            write_monitoring(MODELS, tmp_path, targets=targets, gateways=gateways)
        assert f"'{wrong}'" in refused.value.what
        assert "host:port" in refused.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_alerts_say_what_happened_and_what_to_do(rules: list[dict[str, Any]]) -> None:
    names = {rule["alert"] for rule in rules}
    assert {"TrtpipeServerDown", "TrtpipeRequestsFail", "TrtpipeRequestsWait", "TrtpipeKvCacheFull"} <= names
    assert {"TrtpipeFirstTokenSlow", "TrtpipeTokensSlow", "TrtpipeGatewayErrors", "TrtpipeGatewayQueue"} <= names
    # Prometheus calls two rules of one name and labels a mistake.
    assert len({(rule["alert"], *rule["labels"].items()) for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert re.fullmatch(r"\d+m", rule["for"])
        assert len(rule["annotations"]["description"]) > 40
        for name, selections in series(rule["expr"]).items():
            jobs = {"trtpipe-gateway"} if name.startswith("trtpipe_gateway") else {"trtpipe", "trtpipe-gateway"}
            assert all(labels.get("job") in jobs for labels in selections), name


@pytest.mark.parametrize(("what", "job"), [("Server", "trtpipe"), ("Gateway", "trtpipe-gateway")])
def test_what_starts_is_down_only_once_it_has_been_up(rules: list[dict[str, Any]], what: str, job: str) -> None:
    """A gateway is started once its server has loaded."""
    down, starts = (next(one for one in rules if one["alert"] == f"Trtpipe{what}{end}") for end in ("Down", "NotUp"))
    up = f'up{{job="{job}"}}'
    assert down["expr"] == f"({up} == 0 and max_over_time({up}[1d]) == 1) or absent({up})"
    assert (down["for"], starts["expr"], starts["for"]) == ("1m", f"{up} == 0", "45m")


def test_where_a_server_that_is_down_is_looked_for(rules: list[dict[str, Any]]) -> None:
    """In a cluster, where a target has the label of its pod, `trtpipe ps` knows nothing of it."""
    (rule,) = [rule for rule in rules if rule["alert"] == "TrtpipeServerDown"]
    text = rule["annotations"]["description"]
    found = re.fullmatch(r".*\{\{ if \$labels\.pod \}\}(.*)\{\{- else \}\}(.*)\{\{ end \}\}", text)
    assert found
    assert "kubectl -n {{ $labels.namespace }} describe pod {{ $labels.pod }}" in found[1]
    assert ("trtpipe" in found[1], "trtpipe ps" in found[2]) == (False, True)


def test_requests_that_wait_alarm_after_five_minutes_with_the_cache_full(rules: list[dict[str, Any]]) -> None:
    (rule,) = [rule for rule in rules if rule["alert"] == "TrtpipeRequestsWait"]
    assert rule["for"] == "5m"
    assert set(series(rule["expr"])) == {"nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"}
    assert rule["expr"].endswith("> 0.95")


def test_every_model_of_the_repository_is_missed_when_it_is_gone(tmp_path: Path) -> None:
    odd = 'we"ird\\name {{ x }}'
    write_monitoring([odd, "ensemble", "ensemble"], tmp_path)
    (group,) = yaml.safe_load((tmp_path / ALERTS).read_text(encoding="utf-8"))["groups"]
    missing = [rule for rule in group["rules"] if rule["alert"] == "TrtpipeModelMissing"]
    assert [rule["labels"]["model"] for rule in missing] == ["ensemble", odd]
    assert 'model="we\\"ird\\\\name {{ x }}"' in missing[1]["expr"]
    assert missing[1]["annotations"] == missing[0]["annotations"]  # a name is never part of a template


def test_the_folder_is_never_put_into_a_model_repository(tmp_path: Path) -> None:
    """Triton would take it for a model without a configuration, and refuse to start."""
    repository = tmp_path / "repository"
    (repository / "ensemble").mkdir(parents=True)
    (repository / "ensemble" / "config.pbtxt").write_text("")
    for folder in (repository, repository / "monitoring"):
        with pytest.raises(UsageError, match=f"^{repository} is a model repository"):
            write_monitoring(MODELS, folder)
    assert [path.name for path in repository.iterdir()] == ["ensemble"]
    out = tmp_path / "monitoring"
    write_monitoring(MODELS, out)
    assert {path.name for path in out.iterdir()} == {DASHBOARD, SCRAPE, ALERTS}
    before = [path.read_bytes() for path in sorted(out.iterdir())]
    write_monitoring(reversed(MODELS), out)
    assert [path.read_bytes() for path in sorted(out.iterdir())] == before
    (tmp_path / "afile").touch()
    with pytest.raises(UsageError, match=f"^{tmp_path}/afile is a file; name a folder$"):
        write_monitoring(MODELS, tmp_path / "afile")


def test_a_disk_without_room_is_told_with_the_folder_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *arguments: Any, **more: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", full)
    out = tmp_path / "watch"
    with pytest.raises(HostError) as caught:
        write_monitoring(MODELS, out)
    assert str(caught.value) == (
        f"{out} cannot be written: No space left on device; name another folder, or make room there"
    )
    assert list(out.iterdir()) == []
