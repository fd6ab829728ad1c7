"""`trtpipe bench`: what is refused before a request is sent, and whose timestamps are taken."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.factories import write_passport
from tests.unit.cli.conftest import Run, remember
from trtpipe.engines.errors import HostError, UsageError
from trtpipe.pipeline.api import bench as api
from trtpipe.pipeline.api import bench_options
from trtpipe.pipeline.bench.monitors import server
from trtpipe.pipeline.bench.options import BenchOptions, Target
from trtpipe.pipeline.bench.results.report import SCHEMA, BenchReport
from trtpipe.pipeline.bench.selftest import OUTPUT_TOKENS, TTFT_S
from trtpipe.pipeline.cli import bench
from trtpipe.pipeline.serving import servers, tritonserver
from trtpipe.pipeline.store.store import Store
from trtpipe.triton_repo.layout import ENGINE_FOLDER


def test_a_report_s_place_is_tried_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for report in (tmp_path / "file" / "report.json", tmp_path / "file" / "deep" / "report.json"):
        with pytest.raises(HostError, match=rf"{report} cannot be written: {report.parent} is not a folder"):
            api.check_place(report)
    for report in (tmp_path, Path()):
        with pytest.raises(UsageError, match=rf"^{report} is a folder; give the name of a file$"):
            api.check_place(report)
    api.check_place(tmp_path / "new" / "deep" / "report.json")
    # A run that fails before it has figures leaves no folders behind.
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_link_to_the_latest_that_cannot_be_made_is_a_note(
    run: Run, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_folder / "reports" / "latest").mkdir(parents=True)
    measured = BenchReport(command=[], options={}, tokenizer_sha256=None, started="")
    monkeypatch.setattr(api, "measure", lambda *arguments: measured)
    done = run("bench", "--protocol", "grpc", "--grpc-url", "localhost:8001", "--tokenizer", __file__, "--json")
    assert (done.status, json.loads(done.out)["schema"]) == (0, SCHEMA)
    assert "reports/latest cannot be made: Is a directory" in done.err


def test_a_report_may_be_given_a_folder(run: Run, in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (in_folder / "there").mkdir()
    monkeypatch.setattr(
        api, "measure", lambda *arguments: BenchReport(command=[], options={}, tokenizer_sha256=None, started="")
    )
    for place in ("new/", "there", "there/", "file"):
        asked = ("bench", "--protocol", "grpc", "--grpc-url", "localhost:8001", "--tokenizer", __file__)
        done = run(*asked, "--report", place, "--json")
        assert done.status == 0, done.err
    found = sorted(path.relative_to(in_folder).as_posix() for path in in_folder.rglob("*") if not path.suffix)
    assert found == ["file", "new", "there"]
    for folder in ("new", "there"):
        assert json.loads(Path(folder, "report.json").read_text())["schema"] == SCHEMA
    assert not Path("reports").exists()


@pytest.mark.parametrize("key", ["sk-1\nsk-2", "sk-1\x7f", "schlüssel", "sk-\u4e00"])
def test_a_key_that_cannot_be_sent_is_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("TRTPIPE_API_KEY", key)
    with pytest.raises(UsageError) as error:
        bench_options.headers()
    assert str(error.value) == (
        "the key in TRTPIPE_API_KEY has a control character or a letter outside ASCII: it is sent in an HTTP header; "
        "give the key alone"
    )


@pytest.mark.parametrize(
    ("key", "headers"),
    [
        ("sk-1\n", {"Authorization": "Bearer sk-1"}),
        (" sk-1\r\n", {"Authorization": "Bearer sk-1"}),
        ("\n", {}),
        ("", {}),
    ],
)
def test_white_space_around_a_key_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, key: str, headers: dict[str, str]
) -> None:
    monkeypatch.setenv("TRTPIPE_API_KEY", key)
    assert bench_options.headers() == headers


@pytest.mark.parametrize(
    ("linux", "words", "kernel"),
    [
        (True, [], True),
        (True, ["--kernel-timestamps"], True),
        (True, ["--no-kernel-timestamps"], False),
        (True, ["--transport", "tritonclient"], False),
        (True, ["--transport", "tritonclient", "--no-kernel-timestamps"], False),
        (False, [], False),
        (False, ["--no-kernel-timestamps"], False),
    ],
)
def test_whose_stamps_a_measurement_takes(
    run: Run, monkeypatch: pytest.MonkeyPatch, linux: bool, words: list[str], kernel: bool
) -> None:
    taken: list[bool] = []
    monkeypatch.setattr(bench_options, "LINUX", linux)
    monkeypatch.setattr(bench, "_measure", lambda options, *rest, **more: taken.append(options.wiring.kernel_stamps))
    given = ["--protocol", "grpc", "--grpc-url", "localhost:8001", "--tokenizer", __file__]
    assert run("bench", *given, *words).status == 0
    assert taken == [kernel]


@pytest.mark.parametrize("command", [["bench"], ["bench", "selftest"]])
def test_stamps_of_the_kernel_where_there_are_none(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    done = run(*command, "--kernel-timestamps", "--transport", "tritonclient")
    assert (done.status, done.error()) == (
        2,
        "--kernel-timestamps is of our own reader: tritonclient's libraries read for themselves; "
        "leave it out, or leave out --transport tritonclient",
    )
    monkeypatch.setattr(bench_options, "LINUX", False)
    done = run(*command, "--kernel-timestamps")
    assert (done.status, done.error()) == (2, "only Linux stamps what it receives; leave --kernel-timestamps out")


def test_a_self_test_takes_token_gaps_whose_requests_end_in_time(run: Run) -> None:
    done = run("bench", "selftest", "--itl", "4001")
    assert (done.status, done.error().startswith("--itl is 4001.0; give a number from 0.1 to 4000")) == (2, True)
    assert BenchOptions.timeout_s > TTFT_S + (OUTPUT_TOKENS - 1) * 4.0


@pytest.fixture
def measured(store: Store, in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is measured, of a server whose engine takes prompts of 1024 tokens and 2048 in all."""
    engine = in_folder / ENGINE_FOLDER
    engine.mkdir(parents=True)
    write_passport(engine, build_config={"max_input_len": 1024, "max_seq_len": 2048})
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    names: list[str] = []
    monkeypatch.setattr(bench, "_measure", lambda options, served, *rest, **more: names.append(served.name))
    remember(store, "a", repository=in_folder)
    return names


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (["--input-tokens", "1025"], "max_input_len"),
        (["--output-tokens", "1985"], "max_seq_len"),
        (["--input-tokens", "2048", "--output-tokens", "uniform:1,9"], "max_input_len"),
        (["--input-tokens", "1024", "--output-tokens", "uniform:1025,1100"], "max_seq_len"),
        (["--input-tokens", "1024", "--output-tokens", "1024"], None),
        (["--input-tokens", "uniform:1,5000"], None),
        (["--input-tokens", "mix:0.5*2048+0.5*lognormal:1024,0.5"], None),
        (["--prompts", __file__, "--output-tokens", "5000"], None),
    ],
)
def test_lengths_beyond_the_engine_are_refused_before_a_request(
    measured: list[str], run: Run, words: list[str], limit: str | None
) -> None:
    done = run("bench", "--protocol", "grpc", *words)
    if limit is None:
        assert (done.status, measured) == (0, ["a"])
    else:
        assert (done.status, measured) == (2, [])
        assert f"its {limit} is" in done.error()
        assert f"--set build.{limit}=" in done.error()


@pytest.mark.parametrize(
    ("work", "told"),
    [
        ("{input_tokens: 'uniform:3072,5120', max_total_tokens: 8192}", "prompts of 3,072 tokens"),
        ("{input_tokens: 'lognormal:1100,0.5'}", "prompts of 1,100 tokens"),
        ("{input_tokens: 'lognormal:1100,0.5', max_total_tokens: 1025}", None),  # longer ones are left out
        ("{input_tokens: 'empirical:lengths.txt'}", "prompts of 1,500 tokens"),
    ],
)
def test_lengths_of_which_the_engine_takes_none_are_refused_before_a_request(
    measured: list[str], run: Run, in_folder: Path, work: str, told: str | None
) -> None:
    (in_folder / "lengths.txt").write_text("1500\n1600\n")
    (in_folder / "own.yaml").write_text(f"name: own\ndescription: x\nload: {{rate: 1, duration_s: 1}}\nwork: {work}\n")
    done = run("bench", "--protocol", "grpc", "--load", "own.yaml")
    if told is None:
        assert (done.status, measured) == (0, ["a"])
    else:
        assert (done.status, measured) == (2, [])
        assert done.error() == (
            f"{told} are more than a takes: its max_input_len is 1,024; ask for fewer or, if the model takes them, "
            "build with a larger build.max_input_len; on a GPU `build --load` chooses it"
        )


def test_a_repetition_knows_the_engine_that_is_served_at_its_addresses(
    store: Store, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    remember(store, "a", repository=in_folder)
    (served,) = servers.find_running(store, "a").served

    def at(url: str, tokenizer: Path) -> str | None:
        options = SimpleNamespace(targets=[Target(protocol="grpc", url=url, model="x")], tokenizer=tokenizer)
        found = bench_options.served_at(options)  # type: ignore[arg-type]
        return None if found is None else found.name

    own = served.tokenizer / "tokenizer.json"
    assert at("127.0.0.1:2", own) == "a"
    assert at("127.0.0.1:2", in_folder / "tokenizer.json") is None
    assert at("127.0.0.1:4", own) is None
    for path, text in ((own, "{}"), (in_folder / "tokenizer.json", "{}"), (in_folder / "other.json", "[]")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert at("127.0.0.1:2", in_folder / "tokenizer.json") == "a", "built again"
    assert at("127.0.0.1:2", in_folder / "other.json") is None


@pytest.mark.loopback
def test_an_address_of_metrics_that_does_not_answer_is_told_before_the_load(run: Run, tmp_path: Path) -> None:
    with socket.socket() as taken:  # and nobody listens there
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/metrics"
        given = ("--grpc-url", "127.0.0.1:1", "--tokenizer", tmp_path, "--metrics-url", url)
        (tmp_path / "tokenizer.json").touch()
        done = run("bench", *given, "--protocol", "grpc", "--concurrency", "1", "--requests", "1")
    assert done.status == 4
    assert done.error() == (
        f"no metrics could be read from {url}: Connection refused; give the server's metrics page, such as "
        "http://host:8002/metrics of Triton or http://host:8000/metrics of vLLM, or leave --metrics-url out"
    )


@pytest.mark.parametrize("page", [b"", b'{"object": "list"}', b"<html></html>"])
def test_a_page_without_metrics_is_told_before_the_load(page: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_read_page", lambda url: (page, ""))
    with pytest.raises(HostError, match="no metrics could be read from http://h/x: its page has no Prometheus metrics"):
        server.require_metrics("http://h/x")


def test_a_page_of_metrics_that_nobody_reads_is_told_before_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "# TYPE {0} gauge\n{0} 1\n"
    monkeypatch.setattr(server, "_read_page", lambda url: (page.format("sglang:num_running_reqs").encode(), ""))
    with pytest.raises(HostError, match=r"its page has none of the metrics of Triton, .* or vLLM, which are read"):
        server.require_metrics("http://h/x")
    for known in ("vllm:num_requests_running", "nv_gpu_utilization"):
        monkeypatch.setattr(server, "_read_page", lambda url, name=known: (page.format(name).encode(), ""))
        server.require_metrics("http://h/x")
