"""Options, a whole run over an in-memory server, and the file it leaves."""

from __future__ import annotations

import ast
import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import pipeline.bench.run
from engines.errors import HostError, StageFailed, UsageError
from pipeline.bench import BenchOptions, Progress, run_bench
from pipeline.bench.client import INPUT_TYPES, Endpoint
from pipeline.bench.record import RequestFailed, RequestRecord, Response
from pipeline.bench.report import BenchReport, write_report


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    letters = [chr(97 + number) * size for number in range(26) for size in range(1, 30)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(letters)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


class FakeTransport:
    """Answers each request with its tokens, two to a response, 1 ms apart."""

    def __init__(self, protocol: str, url: str, model: str) -> None:
        self.endpoint = Endpoint(
            protocol=protocol,
            url=url,
            server_name="triton",
            server_version="2.51.0",
            model=model,
            model_versions=("1",),
            ranks={name: 2 for name in INPUT_TYPES if name != "min_tokens"},
            outputs=frozenset(["text_output", "num_output_tokens"]),
        )
        self.prompts: list[str] = []
        self.closed = False

    async def send(self, prompt: str, record: RequestRecord) -> None:
        self.prompts.append(prompt)
        record.sent_ns = record.due_ns
        left = record.max_tokens
        while left:
            await asyncio.sleep(0.001)
            record.responses.append(Response(time.perf_counter_ns(), min(2, left), "x y"))
            left -= min(2, left)
        await self.ended(record)

    async def ended(self, record: RequestRecord) -> None:
        """For a subclass that fails."""

    async def close(self) -> None:
        self.closed = True


def use(monkeypatch: pytest.MonkeyPatch, kind: type[FakeTransport]) -> list[FakeTransport]:
    made: list[FakeTransport] = []

    async def connect(protocol: str, url: str, model: str) -> FakeTransport:
        made.append(kind(protocol, url, model))
        return made[-1]

    monkeypatch.setattr(pipeline.bench.run, "connect", connect)
    return made


def options(tokenizer: Path, **changes: Any) -> BenchOptions:
    defaults: dict[str, Any] = {
        "grpc_url": "localhost:8001",
        "http_url": "http://localhost:8000",
        "concurrency": (1, 2),
        "input_tokens": 5,
        "output_tokens": 4,
        "requests_per_level": 6,
    }
    return BenchOptions(tokenizer=tokenizer, **{**defaults, **changes})


def test_a_run_measures_every_protocol_at_every_concurrency(
    tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = use(monkeypatch, FakeTransport)
    steps: list[Progress] = []
    report = run_bench(options(tokenizer_json), progress=steps.append)
    assert [(result.protocol, result.concurrency) for result in report.results] == [
        ("grpc", 1),
        ("grpc", 2),
        ("http", 1),
        ("http", 2),
    ]
    for result in report.results:
        assert (result.requests["measured"], result.requests["succeeded"], result.wrong_length) == (6, 6, 0)
        assert (result.errors, result.stopped, result.token_count_source) == ([], None, "server")
        assert result.metrics["output_sequence_length"]["mean"] == 4
    assert not report.partial
    assert all(transport.closed for transport in made)
    # No prompt is used twice in a run, over levels and protocols: a prefix cache finds nothing.
    prompts = [prompt for transport in made for prompt in transport.prompts]
    assert len(set(prompts)) == len(prompts)
    last = steps[-1]
    assert (last.protocol, last.concurrency, last.done, last.total, last.failed) == ("http", 2, 6, 6, 0)


def test_the_file_has_all_it_takes_to_judge_a_run(
    tokenizer_json: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, FakeTransport)
    report = run_bench(options(tokenizer_json, seed=7))
    path = tmp_path / "new" / "report.json"
    write_report(report, path)
    value = json.loads(path.read_text())
    assert list(value) == [
        "schema",
        "partial",
        "started",
        "finished",
        "options",
        "tokenizer_sha256",
        "engine",
        "endpoints",
        "client",
        "host",
        "metrics",
        "statistics",
        "window",
        "results",
    ]
    assert value["schema"] == "trtpipe.bench/1"
    assert value["options"]["seed"] == 7
    assert value["started"] < value["finished"]
    assert value["started"].endswith("+00:00")
    assert value["endpoints"][0]["server"] == "triton 2.51.0"
    assert value["endpoints"][0]["inputs_not_declared"] == ["min_tokens"]
    assert value["client"]["httpx"]
    assert value["host"]["cores"] >= 1
    assert set(value["metrics"]) == set(value["results"][0]["metrics"])
    assert [item.name for item in path.parent.iterdir()] == ["report.json"]


def test_rows_of_a_table(tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeTransport)
    report = run_bench(options(tokenizer_json, http_url=None, concurrency=(2,)))
    (row,) = report.rows()
    assert (row["protocol"], row["concurrency"], row["requests"], row["failed"]) == ("grpc", 2, 6, 0)
    assert row["ttft_p50"] == report.results[0].metrics["time_to_first_token"]["p50"]
    assert row["tokens_per_s"] > row["requests_per_s"] > 0


def test_failures_are_counted_by_class_and_the_rest_is_measured(
    tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Flaky(FakeTransport):
        async def ended(self, record: RequestRecord) -> None:
            if len(self.prompts) % 3 == 0:
                raise RequestFailed("ServerError", f"no {len(self.prompts)}")

    use(monkeypatch, Flaky)
    report = run_bench(options(tokenizer_json, http_url=None, concurrency=(1,), requests_per_level=18))
    (result,) = report.results
    # The trial request was the first and the warm-up the second: of 18 measured every third fails, from the first on.
    assert result.requests == {"measured": 18, "succeeded": 12, "failed": 6, "warmup": 1, "warmup_failed": 0}
    assert result.errors == [{"kind": "ServerError", "count": 6, "messages": ["no 3", "no 6", "no 9"]}]
    assert result.metrics["time_to_first_token"]["n"] == 12
    assert not report.partial


def test_answers_of_another_length_are_a_finding(tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(FakeTransport):
        async def ended(self, record: RequestRecord) -> None:
            del record.responses[1:]

    use(monkeypatch, Short)
    (result,) = run_bench(options(tokenizer_json, http_url=None, concurrency=(1,))).results
    assert result.wrong_length == 6


def test_a_first_request_that_fails_ends_the_run(tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(FakeTransport):
        async def ended(self, record: RequestRecord) -> None:
            raise RequestFailed("ServerError", "no engine")

    made = use(monkeypatch, Dead)
    with pytest.raises(
        StageFailed, match="first request to 'ensemble' at localhost:8001 failed: ServerError: no engine"
    ):
        run_bench(options(tokenizer_json))
    assert [transport.closed for transport in made] == [True]


def test_ctrl_c_keeps_what_was_measured_and_says_so(tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupts(FakeTransport):
        async def ended(self, record: RequestRecord) -> None:
            if len(self.prompts) == 12:
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(5)

    made = use(monkeypatch, Interrupts)
    report = run_bench(options(tokenizer_json, concurrency=(1, 2)))
    # Trial 1, level 1: 1 warm-up and 6 measured; the twelfth request is the fourth of level 2.
    assert [(result.concurrency, result.interrupted) for result in report.results] == [(1, False), (2, True)]
    assert report.results[0].requests["succeeded"] == 6
    assert report.results[1].requests["measured"] < 6
    assert report.results[1].errors == []
    assert report.partial
    assert report.to_dict()["partial"] is True
    assert report.finished
    assert all(transport.closed for transport in made)


def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    report = BenchReport(options={}, tokenizer_sha256="", started="")

    def fails(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(HostError, match=r"report\.json cannot be written: No space left on device"):
        write_report(report, path)
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"grpc_url": None, "http_url": None}, "no URL to measure"),
        ({"protocols": ("gprc",)}, "did you mean 'grpc'?"),
        ({"protocols": ("http",), "http_url": None}, "no http URL to measure"),
        ({"concurrency": ()}, "concurrency must be"),
        ({"concurrency": (4, 0)}, "concurrency must be"),
        ({"concurrency": (4,), "requests_per_level": 7}, "give at least 8"),
        ({"duration_s": 3.0}, "both requests_per_level and duration_s"),
        ({"duration_s": 0.0, "requests_per_level": None}, "duration_s is 0.0"),
        ({"output_tokens": 0}, "output_tokens is 0"),
        ({"warmup": -1}, "warmup is -1"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        options(Path("tokenizer.json"), **changes)
    assert says in str(caught.value)


def test_defaults_follow_from_what_is_given() -> None:
    made = BenchOptions(tokenizer=Path("t"), http_url="http://localhost:8000")
    assert made.chosen_protocols() == ("http",)
    assert [made.requests_at(level) for level in (1, 4, 16)] == [20, 20, 64]


def imports(path: Path) -> set[str]:
    """Modules that importing the file at `path` imports: not those in functions or for type checkers."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_importing_the_package_loads_its_options_and_nothing_heavy() -> None:
    folder = Path(pipeline.bench.__file__).parent
    assert imports(folder / "__init__.py") == {"__future__", "collections.abc", "typing", "pipeline.bench.options"}
    assert imports(folder / "options.py") == {"__future__", "dataclasses", "pathlib", "engines.errors"}


def test_the_package_knows_nothing_of_ours_but_the_errors() -> None:
    ours = {"pipeline", "engines", "triton_repo", "configs"}
    for path in Path(pipeline.bench.__file__).parent.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        used = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        used |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        foreign = {name for name in used if name.split(".")[0] in ours and not name.startswith("pipeline.bench.")}
        assert foreign <= {"engines.errors"}, path.name
        assert not any(isinstance(node, ast.Call) and ast.unparse(node.func) == "print" for node in nodes), path.name
