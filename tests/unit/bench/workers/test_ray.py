"""A load from several machines: a real Ray cluster of a head and two nodes, all on this machine."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bench_records import Row, made
from trtpipe.engines.errors import HostError, InputDataError, UsageError
from trtpipe.pipeline.bench.load.loads import Closed, Load, Open
from trtpipe.pipeline.bench.load.work import Sessions, Work
from trtpipe.pipeline.bench.loop.load_point import Driven
from trtpipe.pipeline.bench.mock_server.child import MockServerProcess
from trtpipe.pipeline.bench.options import BenchOptions, Progress, Target
from trtpipe.pipeline.bench.results.records import NONE
from trtpipe.pipeline.bench.run import run
from trtpipe.pipeline.bench.workers import ray as hosts


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={**node, "node_ip_address": "127.0.0.2"})
    made.add_node(**{**node, "node_ip_address": "127.0.0.3"})
    ray.init(address=made.address, _node_ip_address="127.0.0.2", log_to_driver=False, logging_level=logging.ERROR)
    yield made.address
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both nodes are this machine, whatever their addresses say."""
    monkeypatch.setattr(hosts, "is_local", lambda url: False)


def options(known: MockServerProcess, tokenizer: Path, *loads: Load, **fields: Any) -> BenchOptions:
    target = Target(protocol="grpc", url=f"127.0.0.1:{known.grpc_port}", model="ensemble")
    work = fields.pop("work", Work(input_tokens="uniform:8,20", output_tokens="uniform:2,9"))
    return BenchOptions(targets=(target,), tokenizer=tokenizer, loads=loads, work=work, **{"hosts": 2, **fields})


@pytest.mark.real
@pytest.mark.usefixtures("reached")
def test_two_machines_ask_what_one_would(
    known: MockServerProcess, cluster: str, tokenizer: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\nworld\nhello world\n")
    load = Open(rate=50, requests=20)
    # Long enough that both are at it together on a busy machine too: what is measured is where their windows overlap.
    closed = Closed(concurrency=4, requests=120)
    asked = options(known, tokenizer, load, closed, work=Work(prompts=prompts), ray=cluster, log_samples=True)
    report = run(asked, None, None)
    alone = run(replace(asked, hosts=0), None, None)
    assert report.hosts == ["127.0.0.2", "127.0.0.3"]
    assert [result.errors for result in report.results] == [[], []]
    assert report.results[1].client["processes"] == 2
    said = [one["prompt"] for result in report.results for one in result.samples]
    assert len(said) == 6
    assert set(said) <= {"hello", "world", "hello world"}
    both, one = report.records[0], alone.records[0]
    order, again = np.argsort(one.due), np.argsort(both.due)
    assert (one.input_tokens[order] == both.input_tokens[again]).all()
    # Clocks were compared by round trips on one machine: what is left is far below a gap of the schedule.
    assert np.abs(np.diff(one.due[order]) - np.diff(both.due[again])).max() < 5e6
    assert report.results[1].requests["succeeded"] == 120
    assert report.results[1].window_s is not None


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.usefixtures("reached")
def test_errors_there_are_those_here(known: MockServerProcess, cluster: str, tokenizer: Path, tmp_path: Path) -> None:
    tokenizer.write_text("{}")
    with pytest.raises(InputDataError, match=r"tokenizer\.json"):
        run(options(known, tokenizer, Closed(concurrency=2), ray=cluster), None, None)
    with pytest.raises(HostError, match="has 2 machines, not 5"):
        run(options(known, tokenizer, Closed(concurrency=5), hosts=5, ray=cluster), None, None)


@pytest.mark.loopback
@pytest.mark.process  # importing Ray derives a class from subprocess.Popen
def test_where_nobody_listens_ray_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    asked: list[str] = []

    def init(address: str, **options: Any) -> None:
        asked.append(address)
        raise ConnectionError("no")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = "127.0.0.1:{1}".format(*listener.getsockname())
        with pytest.raises(HostError) as caught:
            hosts.nodes(address, 2)
        assert str(caught.value) == (
            f"there is no Ray cluster at {address}: Connection refused; "
            "start one with `ray start --head`, or name the host and port that it printed with --ray"
        )
        assert asked == []
        listener.listen()
        monkeypatch.setattr(hosts, "CONNECT_S", 0.5)
        with pytest.raises(HostError, match=f"there is no Ray cluster at {address}: what listens there does not speak"):
            hosts.nodes(address, 2)
        assert asked == []
    with pytest.raises(HostError, match=r"no Ray cluster runs on this machine; start one with `ray start --head`"):
        hosts.nodes("auto", 2)
    assert asked == ["auto"]


@pytest.mark.real
def test_an_address_of_each_machine_s_own_is_refused(known: MockServerProcess, cluster: str, tokenizer: Path) -> None:
    with pytest.raises(UsageError, match=r"127\.0\.0\.1:\d+ is each machine's own; serve with --host"):
        run(options(known, tokenizer, Closed(concurrency=2), ray=cluster), None, None)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.usefixtures("reached")
def test_ctrl_c_ends_all_of_them(known: MockServerProcess, cluster: str, tokenizer: Path) -> None:
    seen: list[Progress] = []

    def look(progress: Progress) -> None:
        seen.append(progress)
        if progress.live.done and progress.live.in_flight == 4 and len(seen) > 3:
            os.kill(os.getpid(), signal.SIGINT)

    report = run(options(known, tokenizer, Closed(concurrency=4, duration_s=90.0), ray=cluster), None, look)
    assert report.interrupted
    assert report.results[0].requests["succeeded"] > 0
    assert max(one.live.in_flight for one in seen) == 4


def test_stamps_by_another_clock() -> None:
    records = made(Row(due=1, sent=2, stamps=(5,), tokens=(1,)), Row(due=3, sent=None, end=4, failed="ConnectFailed"))
    driven = Driven(records=records, clients=(), window_ns=(10, 20), cut=0, stopped=None, interrupted=False)
    by = driven.shifted(7)
    assert by.window_ns == (17, 27)
    assert (by.records.due - records.due).tolist() == [7, 7]
    assert by.records.sent.tolist() == [int(records.sent[0]) + 7, NONE]
    assert (by.records.stamps - records.stamps).tolist() == [7]


def test_files_go_along_under_their_own_names(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "p.txt").write_text("hello\n")
    target = Target(protocol="grpc", url="host:8001", model="ensemble")
    asked = BenchOptions(
        targets=(target,), tokenizer=tokenizer, work=Work(prompts=Path("p.txt"), folder=tmp_path / "in")
    )
    there = tmp_path / "there"
    files = {str(file): file.read_bytes() for file in (tokenizer, *asked.work.files)}
    placed = hosts.placed(asked, files, there)
    assert placed.tokenizer.read_bytes() == tokenizer.read_bytes()
    assert [file.read_text() for file in placed.work.files] == ["hello\n"]
    assert all(there in file.parents for file in (placed.tokenizer, *placed.work.files))


def test_lengths_in_files_are_read_from_what_went_along(tmp_path: Path, tokenizer: Path) -> None:
    for name in ("in.txt", "out.txt", "turns.txt"):
        (tmp_path / name).write_text("7\n")
    work = Work(
        input_tokens=f"empirical:{tmp_path}/in.txt", output_tokens=f"mix:0.5*8+0.5*empirical:{tmp_path}/out.txt",
        sessions=Sessions(turns=f"empirical:{tmp_path}/turns.txt", think_s=1), folder=tmp_path,
    )  # fmt: skip
    target = Target(protocol="grpc", url="host:8001", model="ensemble")
    asked = BenchOptions(targets=(target,), tokenizer=tokenizer, work=work)
    there = tmp_path / "there"
    placed = hosts.placed(asked, {str(file): file.read_bytes() for file in asked.work.files}, there)
    assert [file.relative_to(there) for file in placed.work.files] == [
        file.relative_to("/") for file in asked.work.files
    ]
    assert len(placed.work.files) == 3
    assert all(file.read_text() == "7\n" for file in placed.work.files)
    assert placed.work.sessions is not None
    assert placed.work.sessions.think_s == 1
