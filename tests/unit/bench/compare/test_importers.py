"""Results of other tools. The files in data/bench were written by the tools' own code, and shortened: AIPerf 0.13.0 and
`vllm bench serve` 0.25.0 against a server that waits 20 ms, then sends a token every 4 ms, and refuses every seventh
request.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bench_reports import lines, load_point, report, sample, save
from tests.support.paths import DATA
from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.pipeline.bench.compare import request_files
from trtpipe.pipeline.bench.compare.comparison import compare
from trtpipe.pipeline.bench.compare.importers import read_records, read_report

BENCH = DATA / "bench"
AIPERF = BENCH / "aiperf" / "profile_export_aiperf.json"
VLLM_CHAT, VLLM_RATE, VLLM = (BENCH / "vllm" / f"{name}.json" for name in ("chat", "rate", "completions"))
ALL = (AIPERF, VLLM_CHAT, VLLM_RATE, VLLM)


def only_load_point(value: dict[str, Any]) -> dict[str, Any]:
    (found,) = value["levels"]
    assert isinstance(found, dict)
    return found


def changed(tmp_path: Path, source: Path, **changes: Any) -> Path:
    """A copy of a result with other values; None drops a key."""
    value = {**json.loads(source.read_text()), **changes}
    path = tmp_path / source.name
    path.write_text(json.dumps({key: one for key, one in value.items() if one is not None}))
    return path


@pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_tool_s_result_has_the_form_of_ours(path: Path) -> None:
    ours = report([load_point(lines(5, seed=1))])
    theirs = read_report(path)
    assert set(ours) <= set(theirs)
    assert set(ours["levels"][0]) == set(only_load_point(theirs))
    assert set(only_load_point(theirs)["metrics"]) <= set(theirs["metrics"])
    for name, metric in only_load_point(theirs)["metrics"].items():
        assert set(metric) in ({"value", "interval"}, set(ours["levels"][0]["metrics"]["request_latency"])), name
    # Nobody but us judges the client, or knows the engine.
    assert theirs["verdict"]["valid"] is None
    assert theirs["engine"] is None


def test_aiperf() -> None:
    value = read_report(AIPERF)
    assert value["tool"] == {"name": "aiperf", "version": "0.13.0"}
    assert value["seed"] == 7
    assert value["command"][:4] == ["aiperf", "profile", "--model", "m"]
    assert value["endpoints"][0] == {
        "protocol": "chat", "url": "http://127.0.0.1:8000", "server": None, "model": "m"
    }  # fmt: skip
    assert (value["options"]["input_tokens"], value["options"]["output_tokens"]) == (16, 6)
    found = only_load_point(value)
    assert found["load"] == {"kind": "closed", "concurrency": 2}
    assert found["label"] == "2 in flight"
    assert found["requests"] == {
        "measured": 20, "succeeded": 17, "failed": 3, "warmup": 2, "warmup_failed": None, "cut": None
    }  # fmt: skip
    assert [(entry["kind"], entry["count"]) for entry in found["errors"]] == [("http 503", 3)]
    assert found["token_count_source"] == "tokenizer"
    metrics = found["metrics"]
    assert metrics["error_rate"]["value"] == 0.15
    assert metrics["time_to_first_token"]["p99"] == pytest.approx(81.289396)
    assert metrics["time_to_first_token"]["n"] == 17
    # What AIPerf does not compute is unknown.
    assert metrics["time_to_first_token"]["p99.9"] is None
    # Its inter_token_latency is one mean a request.
    assert "inter_token_latency" not in metrics
    assert metrics["time_per_output_token"]["mean"] == pytest.approx(4.569586, abs=1e-6)
    assert metrics["inter_chunk_latency"]["n"] == 85
    # Its rate per user is not over the whole answer; the one that is has our name.
    assert metrics["output_token_throughput_per_user"]["p50"] == pytest.approx(1000 * 6 / 45.067941, rel=1e-6)
    assert metrics["output_token_throughput_per_user_after_first_token"]["p50"] == pytest.approx(223.328, abs=1e-3)
    # Its rates are over the whole run.
    assert "output_token_throughput" not in metrics
    assert metrics["output_token_throughput_whole_run"]["value"] == pytest.approx(102 / 0.558447872, rel=0.02)
    assert metrics["request_goodput_whole_run"]["value"] == metrics["request_throughput_whole_run"]["value"]
    assert metrics["effective_concurrency_whole_run"]["value"] == pytest.approx(1.727981, abs=1e-6)


def test_aiperf_s_requests_give_its_own_figures_by_our_definitions() -> None:
    value = read_report(AIPERF)
    found = list(read_records(AIPERF, value) or [])
    assert found is not None
    assert [one["warmup"] for one in found].count(True) == 2
    assert [one["failure"]["kind"] for one in found if one["failure"]] == ["http 503"] * 3
    requests = request_files.by_load_point(found)[0][0]
    assert (len(requests), int(requests.failed.sum())) == (20, 3)
    metrics = only_load_point(value)["metrics"]
    ours = ("time_to_first_token", "request_latency", "time_per_output_token", "inter_chunk_latency")
    for name in (*ours, "output_token_throughput_per_user", "input_sequence_length", "output_sequence_length"):
        again = request_files.values(requests, name)
        assert again is not None
        assert len(again.values) == metrics[name]["n"], name
        assert np.mean(again.values) == pytest.approx(metrics[name]["mean"], rel=1e-5), name
        assert np.percentile(again.values, 99) == pytest.approx(metrics[name]["p99"], rel=1e-5), name


def phase(kind: str, **settings: Any) -> dict[str, Any]:
    return {"kind": "profiling", "type": kind, **settings}


def opened(arrivals: str, rate: float | None = None, **settings: Any) -> dict[str, Any]:
    return {"kind": "open", "arrivals": arrivals, "rate": rate, **settings}


@pytest.mark.parametrize(
    ("phases", "load"),
    [
        ([phase("poisson", rate=10.0)], opened("poisson", 10.0)),
        (
            [{"kind": "warmup", "type": "concurrency"}, phase("gamma", rate=5.0, smoothness=2.0)],
            opened("gamma", 5.0, burstiness=2.0),
        ),
        ([phase("constant", rate=5.0, concurrency=8)], opened("constant", 5.0, max_in_flight=8)),
        ([phase("fixed_schedule")], opened("trace")),
        ([phase("poisson", rate_series={})], opened("stages")),
        ([phase("concurrency")] * 2, opened("several phases")),
    ],
)
def test_aiperf_s_loads(tmp_path: Path, phases: list[dict[str, Any]], load: dict[str, Any]) -> None:
    config = {**json.loads(AIPERF.read_text())["input_config"], "phases": phases}
    assert only_load_point(read_report(changed(tmp_path, AIPERF, input_config=config)))["load"] == load


def test_aiperf_with_usage_of_each_chunk_leaves_out_the_first_chunk_s_tokens(tmp_path: Path) -> None:
    config = json.loads(AIPERF.read_text())["input_config"]
    config["endpoint"] |= {"use_server_token_count": True, "per_chunk_usage": True}
    found = only_load_point(read_report(changed(tmp_path, AIPERF, input_config=config)))
    assert "time_per_output_token" not in found["metrics"]
    assert found["metrics"]["time_per_output_token_after_first_chunk"]["mean"] == pytest.approx(4.569586, abs=1e-6)
    assert found["token_count_source"] == "usage"


def test_aiperf_leaves_out_counts_of_what_did_not_happen(tmp_path: Path) -> None:
    clean = {"completed_request_count": {"unit": "requests", "avg": 17.0}, "error_request_count": None}
    assert only_load_point(read_report(changed(tmp_path, AIPERF, **clean)))["requests"]["failed"] == 0
    broken = {"completed_request_count": {"unit": "requests", "avg": 3.0}, "request_count": None}
    requests = only_load_point(read_report(changed(tmp_path, AIPERF, **broken)))["requests"]
    assert (requests["measured"], requests["succeeded"], requests["failed"]) == (3, 0, 3)
    silent = only_load_point(
        read_report(changed(tmp_path, AIPERF, completed_request_count=None, error_request_count=None))
    )
    assert (silent["requests"]["measured"], silent["requests"]["failed"]) == (None, None)


@pytest.mark.parametrize("changes", [{"was_cancelled": True}, {"is_complete": False}])
def test_an_aiperf_run_that_ended_early_is_partial(tmp_path: Path, changes: dict[str, bool]) -> None:
    assert read_report(AIPERF)["partial"] is False
    assert read_report(changed(tmp_path, AIPERF, **changes))["partial"] is True


def test_vllm_s_completions_have_our_names() -> None:
    value = read_report(VLLM)
    found = only_load_point(value)
    assert (found["protocol"], found["load"]) == ("completions", {"kind": "closed", "concurrency": 2})
    assert (found["requests"]["succeeded"], found["requests"]["failed"], found["window_s"]) == (
        8,
        2,
        0.20366898000065703,
    )
    assert found["errors"] == [{"kind": "Service Unavailable", "count": 2, "messages": ["Service Unavailable"]}]
    metrics = found["metrics"]
    assert metrics["time_to_first_token"]["p50"] == pytest.approx(23.514318)
    assert metrics["time_to_first_token"]["p90"] is None
    assert metrics["inter_chunk_latency"]["mean"] == pytest.approx(4.288183, abs=1e-6)
    assert "inter_token_latency" not in metrics
    assert metrics["output_sequence_length"]["mean"] == 6
    assert metrics["request_goodput_whole_run"]["value"] is None
    assert metrics["error_rate"]["value"] == 0.2
    requests = request_files.by_load_point(read_records(VLLM, value) or [])[0][0]
    assert (len(requests), int(requests.failed.sum())) == (10, 2)
    # It takes the first token's time and the first gap's start by two looks at the clock.
    for name in ("time_to_first_token", "time_per_output_token", "inter_chunk_latency"):
        again = request_files.values(requests, name)
        assert again is not None
        assert np.mean(again.values) == pytest.approx(metrics[name]["mean"], rel=1e-4), name
        assert np.percentile(again.values, 99) == pytest.approx(metrics[name]["p99"], rel=1e-4), name


def test_vllm_s_chat_counts_the_role_chunk_and_is_named_so() -> None:
    value = read_report(VLLM_CHAT)
    metrics = only_load_point(value)["metrics"]
    # The server took 20 ms for the first token. vLLM says 4.
    assert metrics["time_to_first_chunk"]["p50"] == pytest.approx(3.870811, abs=1e-6)
    assert {name for name in metrics if "chunk" in name} == {
        "time_to_first_chunk", "time_per_output_token_from_first_chunk", "inter_chunk_latency_with_role_chunk",
        "request_latency_to_last_chunk",
    }  # fmt: skip
    assert not {"time_to_first_token", "time_per_output_token", "inter_chunk_latency", "request_latency"} & set(metrics)
    assert any("role chunk" in note for note in value["notes"])
    requests = request_files.by_load_point(read_records(VLLM_CHAT, value) or [])[0][0]
    again = request_files.values(requests, "inter_chunk_latency_with_role_chunk")
    assert again is not None
    assert np.mean(again.values) == pytest.approx(metrics["inter_chunk_latency_with_role_chunk"]["mean"], rel=1e-6)


def test_vllm_s_rates() -> None:
    value = read_report(VLLM_RATE)
    assert only_load_point(value)["load"] == {"kind": "open", "arrivals": "gamma", "rate": 20.0, "burstiness": 2.0}
    assert read_records(VLLM_RATE, value) is None


def test_newer_vllm_writes_latencies(tmp_path: Path) -> None:
    path = changed(tmp_path, VLLM, latencies=[0.05] * 10, queue_times=[0.0] * 10)
    found = list(read_records(path, read_report(path)) or [])
    assert found is not None
    assert found[0]["end_ns"] - found[0]["sent_ns"] == 50_000_000


def test_vllm_s_rust_client_writes_its_dates_otherwise(tmp_path: Path) -> None:
    path = changed(tmp_path, VLLM, date="2026-11-22T08:17:44Z")
    assert read_report(path)["started"] == "2026-11-22T08:17:44Z"


def test_zeros_that_vllm_writes_for_want_of_values_are_unknown(tmp_path: Path) -> None:
    zeros = dict.fromkeys(("mean_tpot_ms", "median_tpot_ms", "std_tpot_ms", "p99_tpot_ms"), 0.0)
    metric = only_load_point(read_report(changed(tmp_path, VLLM, **zeros)))["metrics"]["time_per_output_token"]
    assert set(metric.values()) == {None}
    none = only_load_point(read_report(changed(tmp_path, VLLM, completed=0, failed=0)))["metrics"]
    assert none["error_rate"]["value"] is None
    assert none["output_sequence_length"]["mean"] is None


def test_several_vllm_results_in_one_file_are_load_points(tmp_path: Path) -> None:
    path = tmp_path / "appended.json"
    path.write_text("\n".join(source.read_text().strip() for source in (VLLM, VLLM_RATE, VLLM)))
    value = read_report(path)
    assert [(found["label"], found["repeat"]) for found in value["levels"]] == [
        ("2 in flight", 0), ("20 requests/s", 0), ("2 in flight", 1)
    ]  # fmt: skip
    assert read_records(path, value) is None  # one of them has none


def test_a_traceback_becomes_one_line(tmp_path: Path) -> None:
    trace = "Traceback (most recent call last):\n  File x\naiohttp.client_exceptions.ServerDisconnectedError: gone\n"
    errors = [trace, "Service Unavailable", *[""] * 8]
    found = only_load_point(read_report(changed(tmp_path, VLLM, errors=errors)))
    assert [(entry["kind"], entry["messages"]) for entry in found["errors"]] == [
        ("ServerDisconnectedError", ["gone"]), ("Service Unavailable", ["Service Unavailable"])
    ]  # fmt: skip


def test_ours_is_read_as_it_is_and_a_folder_by_its_usual_name(tmp_path: Path) -> None:
    requests = lines(5, seed=1)
    value = report([load_point(requests)])
    path = save(tmp_path / "run", value, [requests])
    found = read_report(path)
    assert found == read_report(path.parent) == {**value, "records_sha256": found["records_sha256"]}
    assert list(read_records(path.parent, found) or []) == requests
    path.with_name("report.requests.jsonl").unlink()
    assert read_records(path, found) is None
    assert read_report(AIPERF.parent)["tool"]["name"] == "aiperf"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("{", "is not JSON"),
        ("[1]", "holds a list"),
        (
            '{"schema": "trtpipe.bench/1"}',
            "has schema trtpipe.bench/1: this version reads trtpipe.bench/2; measure again",
        ),
        ('{"schema": "trtpipe.bench/2"}', "is damaged: the report has no levels; measure again"),
        (
            '{"a": 1}',
            "we know; known are report.json of trtpipe bench and the results of aiperf (0.13 (schema 1)), vllm",
        ),
        ('{"aiperf_version": "1", "schema_version": "2.0"}', "is not a benchmark result that we know"),
        ('{"aiperf_version": "1", "schema_version": "1.0"}', "looks like a result of aiperf but cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(InputDataError) as caught:
        read_report(path)
    assert says in str(caught.value)
    assert "result.json" in str(caught.value)


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ({"prompt": "x"}, "samples of load point 0 is"),
        (None, "samples of load point 0 is null"),
        (["x"], "a sample of load point 0 is not a mapping"),
        ([{"id": "r0", "prompt": "x"}], "a sample of load point 0 has no prompt_characters"),
        ([sample(answer_characters="many")], "answer_characters of a sample of load point 0"),
        ([sample(), {**sample(), "prompt": ["x"]}], "prompt of a sample of load point 0"),
    ],
)
def test_samples_that_are_none_are_refused(tmp_path: Path, samples: Any, says: str) -> None:
    value = report([load_point(lines(2, seed=1), samples=samples)])
    with pytest.raises(InputDataError, match=says):
        read_report(save(tmp_path / "a", value))


def test_a_file_that_is_not_there_and_a_folder_without_one(tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match=r"none\.json cannot be read: No such file.*; give the path of a report"):
        read_report(tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"has no report\.json and no "):
        read_report(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InputDataError, match="is not text"):
        read_report(tmp_path / "bytes.json")


def copied(folder: Path, line: Callable[[dict[str, Any]], Any] = lambda line: line) -> Path:
    """AIPerf's result in a folder of its own, each of its requests as `line` makes it."""
    folder.mkdir()
    beside = AIPERF.with_name(AIPERF.name.removesuffix("_aiperf.json") + ".jsonl")
    found = [line(json.loads(text)) for text in beside.read_text().splitlines()]
    (folder / beside.name).write_text("".join(f"{json.dumps(one)}\n" for one in found if one is not None))
    return Path(shutil.copy(AIPERF, folder / AIPERF.name))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (lambda line: 5, r"line 1 of .* is not a JSON object: it holds a number; measure again, or remove"),
        (
            lambda line: {"metadata": line["metadata"]},
            "of aiperf but cannot be read: it lacks 'metrics'",
        ),
        (
            lambda line: None,
            r"of another run than .*\.json: it has 0 requests, and the result \d+; bring back",
        ),
    ],
    ids=["number", "no metrics", "none"],
)
def test_requests_that_cannot_be_read_are_named(
    tmp_path: Path, line: Callable[[dict[str, Any]], Any], told: str
) -> None:
    path = copied(tmp_path / "run", line)
    with pytest.raises(InputDataError, match=told):
        list(read_records(path, read_report(path)) or [])


def test_figures_that_are_none_are_refused(tmp_path: Path) -> None:
    value = json.loads(AIPERF.read_text())
    for wrong in ("fast", -5):
        value["time_to_first_token"]["p99"] = wrong
        path = tmp_path / "profile_export_aiperf.json"
        path.write_text(json.dumps(value))
        with pytest.raises(
            InputDataError, match=f"ValueError: load point 0: p99 of time_to_first_token is {wrong!r}; read"
        ):
            read_report(path)


def test_ours_meets_a_foreign_one_by_its_load_and_by_rates_of_the_whole_run(tmp_path: Path) -> None:
    requests = lines(50, seed=1, tokens=6)
    ours = save(tmp_path / "ours", report([load_point(requests, concurrency=2)]), [requests])
    found = compare([ours, AIPERF])
    told = "\n".join(found.warnings)
    assert "tool: A trtpipe 0.15.0, B aiperf 0.13.0" in told
    assert "protocol: A grpc, B chat; load points are matched by their load alone" in told
    assert "engine: B has no entry" in told
    rows = {(row.metric, row.statistic): row.cells for row in found.rows}
    ratio = rows["output_token_throughput_whole_run", "value"]
    seconds = (requests[-1]["end_ns"] - requests[0]["sent_ns"]) / 1e9
    assert ratio["A"].value == pytest.approx(300 / seconds)
    assert ratio["B"].interval is not None
    assert rows["time_per_output_token", "p50"]["B"].significant is True
    assert "inter_token_latency" not in {metric for metric, _ in rows}


def test_a_chat_by_vllm_is_not_compared_with_tokens() -> None:
    found = compare([AIPERF, VLLM_CHAT])
    told = "\n".join(found.warnings)
    assert "TTFT: not compared, since the tools do not mean the same: A has time_to_first_token, B has" in told
    assert "time_to_first_token" not in {row.metric for row in found.rows}
    assert "output_token_throughput_whole_run" in {row.metric for row in found.rows}
