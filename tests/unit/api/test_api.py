"""What `import trtpipe` offers, without a server."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import trtpipe
from tests.support.factories import hf_folder, write_passport, write_tokenizer
from tests.support.paths import ROOT
from trtpipe.pipeline.api import bench as api
from trtpipe.pipeline.api.arguments import checked
from trtpipe.pipeline.api.bench import measure
from trtpipe.pipeline.api.bench_options import choose
from trtpipe.pipeline.bench.load.loads import Closed, Open
from trtpipe.pipeline.bench.mock_server.child import MockServerProcess
from trtpipe.pipeline.bench.protocols.connect import Wiring
from trtpipe.pipeline.layers import LORA, SCALARS
from trtpipe.pipeline.serving import tritonserver
from trtpipe.pipeline.serving.servers import Served
from trtpipe.triton_repo.layout import ENGINE_FOLDER


@pytest.mark.process
def test_the_import_loads_nothing_and_every_name_is_there() -> None:
    script = "import sys; before = {*sys.modules}; import trtpipe; print(sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "['trtpipe']\n"
    assert set(trtpipe.__all__) <= set(dir(trtpipe))
    assert all(getattr(trtpipe, name).__name__ == name for name in trtpipe.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        getattr(trtpipe, "nothing")  # noqa: B009  mypy knows that it is not there


def test_a_type_checker_sees_what_a_program_sees() -> None:
    tree = ast.parse((ROOT / "trtpipe" / "__init__.py").read_text())
    typed = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name != "import_module"
    }
    loaded = {name: f"trtpipe.{module}" for module, names in trtpipe._MODULES.items() for name in names}
    assert typed == loaded
    assert sorted(loaded) == trtpipe.__all__
    assert (ROOT / "trtpipe" / "py.typed").exists()


def test_the_page_s_example_names_what_is_there() -> None:
    """A slow test runs it."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    options = {"build": trtpipe.BuildOptions.__annotations__, "bench": trtpipe.BenchArguments.__annotations__}
    called = []
    for node in ast.walk(ast.parse(example)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if ast.unparse(node.func.value) == "trtpipe":
                called.append(name)
                known = {*inspect.signature(getattr(trtpipe, name)).parameters, *options.get(name, ())}
                assert {word.arg for word in node.keywords} <= known, name
    assert sorted(called) == ["bench", "build", "check", "plan", "serve"]


def test_settings_say_where_each_is_from() -> None:
    spec = trtpipe.settings(recipe="smollm2-cpu", dtype="bf16", tp=None, set={"build.max_batch_size": 4})
    assert spec.target == "smollm2-135m.cpu.bf16"
    assert spec.build.max_batch_size == 4
    sources = {value.name: value.source for value in spec.values}
    assert (sources["model"], sources["dtype"]) == ("recipe smollm2-cpu.yaml", "option")
    assert sources["build.max_batch_size"] == "--set"
    assert trtpipe.BuildOptions.__annotations__.keys() == {*SCALARS, LORA, "recipe", "set"}


def test_what_is_returned_has_a_short_repr(tmp_path: Path) -> None:
    spec = trtpipe.settings(model="smollm2-135m", gpu="cpu", dtype="fp32")
    shown = "<BuildSpec target='smollm2-135m.cpu.fp32'>"
    built = trtpipe.Built(spec=spec, folder=Path("runs/a"), stages=())
    report = trtpipe.BenchReport(command=[], options={}, tokenizer_sha256=None, started="now")
    proof = trtpipe.Proof(version="1", date="today", machine={}, model="a", runtime="vllm", lanes=(), refused={})
    advice = trtpipe.plan("llama3-8b", gpu=["h100"], dtype="bf16", tp=[1])
    assert list(map(repr, (spec, built, report, proof, advice))) == [
        shown, "<Built target='smollm2-135m.cpu.fp32' folder=PosixPath('runs/a')>",
        "<BenchReport target=None started='now' finished=''>", "<Proof model='a' runtime='vllm' date='today'>",
        "<Advice model='llama3-8b' runtime='tensorrt_llm' priced=False>",
    ]  # fmt: skip
    migration = trtpipe.Migration(source=Path("a"), spec=spec, rows=(), recipe={})
    assert repr(migration) == f"<Migration source=PosixPath('a') spec={shown}>"
    study = trtpipe.Study(target="a", question={}, folder=tmp_path)
    assert repr(study) == f"<Study target='a' state='interrupted' folder={tmp_path!r}>"


def test_settings_that_contradict_each_other_leave_what_was_given_alone() -> None:
    given = {"build": {"max_batch_size": 4}, "build.max_seq_len": 1536}
    assert trtpipe.settings(model="smollm2", gpu="cpu", set=given).build.max_seq_len == 1536
    assert given["build"] == {"max_batch_size": 4}
    with pytest.raises(trtpipe.UsageError, match="contradicts"):
        trtpipe.settings(model="smollm2", gpu="cpu", set={"build": 3, "build.max_seq_len": 1024})
    with pytest.raises(trtpipe.UsageError, match="did you mean 'model'"):
        trtpipe.settings(modle="smollm2", gpu="cpu")  # type: ignore[call-arg]


@pytest.mark.process
def test_a_build_and_what_it_made(in_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = trtpipe.settings(model=str(hf_folder(in_folder / "tiny", dtype="F32")), gpu="cpu", dtype="fp32")
    with pytest.raises(trtpipe.UsageError, match="gpu"):
        trtpipe.build(spec, gpu="cpu")
    caplog.set_level(logging.INFO, "trtpipe")
    early = trtpipe.build(spec, until="convert")
    assert [stage.stage for stage in early.stages] == ["download", "tokenizer", "convert"]
    with pytest.raises(trtpipe.InputDataError, match="repository"):
        _ = early.repository
    built = trtpipe.build(spec)
    assert [stage.reused for stage in built.stages[:3]] == [True] * 3
    assert "convert: reused (same inputs and settings)" in caplog.messages
    assert built.folder == in_folder / "runs" / "tiny.cpu.fp32"
    assert trtpipe.check(built.target) == trtpipe.check(built.repository) == []
    (folder := in_folder / "copy" / "deep").mkdir(parents=True)
    (folder / "script.py").write_text("pass")
    assert [fault.rule for fault in trtpipe.check(folder.parent)] == ["no-models"]


def test_a_plan_has_the_best_first_and_says_why_not() -> None:
    advice = trtpipe.plan("llama3-70b", gpu=["h100"], dtype="bf16", tp=[1, 4], price={"h100": 2.5})
    assert [(one.tp, one.best is None) for one in advice.candidates] == [(4, False)]
    assert advice.candidates[0].hourly == 10.0
    assert "does not fit" in trtpipe.plan("llama3-70b", gpu="h100", dtype="bf16", tp=1).candidates[0].reason
    for price in (0, float("nan")):
        with pytest.raises(trtpipe.UsageError, match="not a price"):
            trtpipe.plan("llama3-8b", price={"h100": price})
    with pytest.raises(trtpipe.UsageError, match="h200 is of a GPU that is not compared; add it to --gpu h100"):
        trtpipe.plan("llama3-8b", gpu="h100", price={"h200": 2.5})


def test_arguments_of_a_benchmark() -> None:
    server = {"grpc_url": "localhost:8001", "protocol": "grpc", "tokenizer": Path("tokenizer.json")}
    options, served = choose(**server, concurrency=2, input_tokens=32, slo="ttft:500ms", seed=None)  # type: ignore[arg-type]
    assert served is None
    assert options.loads == (Closed(concurrency=2),)
    assert (options.work.input_tokens, options.seed, options.objectives[0].limit) == ("32", 0, 500)
    options, _ = choose(**server, rate=[1.5, 3], requests=10)  # type: ignore[arg-type]
    assert [load.rate for load in options.loads if isinstance(load, Open)] == [1.5, 3]


@pytest.mark.parametrize(
    ("function", "name", "near"),
    [
        (trtpipe.bench, "concurency", "concurrency"),
        (trtpipe.build, "modell", "model"),
        (trtpipe.plan, "gpus", "gpu"),
        (trtpipe.Client, "sever", "server"),
        (partial(trtpipe.Client.stream, cast(Any, object()), "Hello"), "temprature", "temperature"),
    ],
)
def test_an_argument_that_there_is_not_is_told_with_the_nearest(function: Any, name: str, near: str) -> None:
    with pytest.raises(trtpipe.UsageError, match=f"unknown argument '{name}'; did you mean '{near}'"):
        function(**{name: 2})


@pytest.mark.process
@pytest.mark.loopback
def test_a_benchmark_where_an_event_loop_runs_as_in_a_notebook(
    known: MockServerProcess, tokenizer: Path, tmp_path: Path
) -> None:
    states: list[str] = []

    async def cell() -> trtpipe.BenchReport:
        return trtpipe.bench(
            protocol="grpc", grpc_url=f"127.0.0.1:{known.grpc_port}", tokenizer=tokenizer, concurrency=2, requests=4,
            output_tokens=4, report=f"{tmp_path}/new/",
            progress=lambda at: states.append(at.state),
        )  # fmt: skip

    report = asyncio.run(cell())
    assert report.results[0].requests["succeeded"] == 4
    assert report.failures() == {}
    assert (states[0], states[-1]) == ("begun", "ended")
    assert (tmp_path / "new" / "report.html").exists()


@pytest.mark.process
@pytest.mark.loopback
def test_ctrl_c_in_a_notebook_ends_a_benchmark_with_what_was_measured(
    known: MockServerProcess, tokenizer: Path
) -> None:
    """The load runs in a thread there, which gets no signals."""
    main = threading.main_thread().ident
    assert main is not None
    pressed: list[int] = []

    def press(at: Any) -> None:
        if at.live.done >= 2 and not pressed:
            pressed.append(at.live.done)
            signal.pthread_kill(main, signal.SIGINT)

    async def cell() -> trtpipe.BenchReport:
        return trtpipe.bench(
            protocol="grpc", grpc_url=f"127.0.0.1:{known.grpc_port}", tokenizer=tokenizer, concurrency=2,
            duration=3600, output_tokens=4, progress=press,
        )  # fmt: skip

    loop = asyncio.new_event_loop()  # not asyncio.run, which takes the first Ctrl-C itself
    report = loop.run_until_complete(cell())
    loop.close()
    assert report.interrupted
    assert report.results[0].requests["succeeded"] >= 2


def test_what_a_report_says_of_its_client_is_measured_outside_of_a_notebook_s_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked(*given: object) -> None:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        seen.append(given)

    async def cell() -> None:
        measure(options, None)

    seen: list[object] = []
    made = trtpipe.BenchReport(command=[], options={}, tokenizer_sha256=None, started="")
    monkeypatch.setattr("trtpipe.pipeline.bench.run.run", lambda *given: made)
    monkeypatch.setattr("trtpipe.pipeline.bench.selftest.state_error", looked)
    options: Any = SimpleNamespace(tokenizer=tmp_path / "tokenizer.json", wiring=Wiring(transport="tritonclient"))
    asyncio.run(cell())
    assert len(seen) == 1


def test_a_measurement_is_not_lost_where_the_engine_s_gpu_or_passport_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / ENGINE_FOLDER
    engine.mkdir(parents=True)
    monkeypatch.setattr("trtpipe.pipeline.execution.hardware.installed_gpus", list)
    options: Any = SimpleNamespace(tokenizer=tmp_path / "tokenizer.json", wiring=Wiring())
    served, notes = Served(name="a", repository=tmp_path), list[str]()

    def measured() -> trtpipe.BenchReport:
        made = trtpipe.BenchReport(command=[], options={}, tokenizer_sha256=None, started="")
        monkeypatch.setattr("trtpipe.pipeline.bench.run.run", lambda *given: made)
        return measure(options, served, note=notes.append)

    report = measured()
    assert (report.target, report.engine) == ("a", None)
    assert notes == [
        f"the report does not say which engine was measured: {engine} has no passport.json: nothing says for which GPU "
        "and version it was built; build the engine again"
    ]
    write_passport(engine, runtime="tensorrt_llm", gpu="h100", sm=90)
    report = measured()
    assert report.engine is not None
    assert (report.engine["gpu"], report.engine["sm"], len(notes)) == ("h100", 90, 1)
    served = replace(served, source=tmp_path / "runs" / "b")  # which was loaded into the server of a
    assert measured().target == "b"


@pytest.mark.parametrize("protocol", ["grpc,http", ["grpc", "http"]])
def test_protocols_are_a_text_or_a_list(protocol: Any) -> None:
    given: dict[str, Any] = {"concurrency": 1, "requests": 1, "tokenizer": "tokenizer.json"}
    options, _ = checked(choose)(grpc_url="a:1", http_url="a:2", protocol=protocol, **given)
    assert [(one.protocol, one.url) for one in options.targets] == [("grpc", "a:1"), ("http", "a:2")]


def test_numbers_of_numpy_are_numbers() -> None:
    one, two, several = np.int64(1), np.int32(2), np.array([1, 4])
    given: dict[str, Any] = {"concurrency": several, "requests": np.int64(8), "seed": np.int64(3)}
    options, _ = checked(choose)(grpc_url="a:1", protocol="grpc", tokenizer=Path("tokenizer.json"), **given)
    assert json.loads(json.dumps(options.to_json()))["seed"] == 3
    assert [type(load.concurrency) for load in options.loads if isinstance(load, Closed)] == [int, int]
    spec = trtpipe.settings(recipe="smollm2-cpu", tp=one, set={"build.max_batch_size": two})  # type: ignore[arg-type]
    assert (spec.mapping.tp_size, spec.build.max_batch_size) == (1, 2)


def test_a_benchmark_of_an_adapter_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = SimpleNamespace(adapter="support", model="m:support", server="s", target="m")
    asked: list[Any] = []

    def choose(target: str, **arguments: Any) -> None:
        asked.append((target, arguments))
        raise ArithmeticError

    monkeypatch.setattr(api, "choose", choose)
    for given in ({}, {"protocol": ["chat"], "openai_model": None, "server": "s"}):
        with pytest.raises(ArithmeticError):
            api.bench.__wrapped__(client, **given)  # type: ignore[attr-defined]
    assert asked == [
        ("m", {"openai_model": "m:support", "protocol": protocol, "server": "s"})
        for protocol in ("completions", "chat")
    ]
    with pytest.raises(trtpipe.UsageError, match="protocol grpc measures the model without the adapter support"):
        api.bench.__wrapped__(client, protocol="grpc")  # type: ignore[attr-defined]


def test_one_server_is_measured() -> None:
    client: Any = SimpleNamespace(adapter=None, model="m", server="a", target="m")
    with pytest.raises(trtpipe.UsageError, match="server is b, and the client's is a; leave out server"):
        api.bench.__wrapped__(client, server="b")  # type: ignore[attr-defined]
    both = {
        "--grpc-url says what is measured, and so does --server": {"server": "a", "grpc_url": "h:1"},
        "--http-url says what is measured, and so does --target": {"target": "m", "http_url": "http://h:1"},
    }
    for words, given in both.items():
        with pytest.raises(trtpipe.UsageError, match=f"{words}; leave one of them out"):
            api.bench.__wrapped__(**given, tokenizer=Path("tokenizer.json"))  # type: ignore[attr-defined]
    words = "openai_url says what is measured, and so does the client; leave out openai_url"
    for asked in (client, SimpleNamespace(adapter="support", model="m:support", server="a", target="m")):
        with pytest.raises(trtpipe.UsageError, match=words):
            api.bench.__wrapped__(asked, openai_url="http://h:1/v1")  # type: ignore[attr-defined]


def test_a_client_needs_a_server() -> None:
    with pytest.raises(trtpipe.UsageError, match="no server is running"):
        trtpipe.Client()
    with pytest.raises(trtpipe.UsageError, match="no server named 'x' is running"):
        trtpipe.Client("target", server="x")


def test_a_client_renders_messages_as_the_gateway_does(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    client = object.__new__(trtpipe.Client)
    vars(client)["_served"] = SimpleNamespace(tokenizer=tmp_path, name="t")
    parts = ({"type": "text", "text": "one "}, {"type": "text", "text": "two"})
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "parsed": None}
    ]  # fmt: skip
    assert client.prompt(messages) == "<s>[system]Be brief.[user]one two"
    assert client.prompt(deque(map(MappingProxyType, messages))) == client.prompt(messages)
    assert client.prompt("Hi") == "<s>[user]Hi"
    refused: list[tuple[list[dict[str, Any]], str]] = [
        ([], "'messages': List should have at least 1 item"),
        ([{"role": "king", "content": "x"}], "'messages.0.role': "),
        ([{"role": "user", "content": "x", "colour": 1}], "unknown field 'messages.0.colour'"),
        ([{"role": "user"}], "'messages.0.content' is missing"),
        ([{"role": "user", "content": object()}], "the messages are not JSON: Object of type object is not"),
    ]
    for wrong, told in refused:
        with pytest.raises(trtpipe.UsageError, match=re.escape(told)):
            client.prompt(wrong)


NEVER_LEFT = """
import contextlib, subprocess, sys
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
import trtpipe
from trtpipe.pipeline.serving import repositories, serve, servers
from trtpipe.pipeline.serving.ports import Endpoints

process = subprocess.Popen(
    ["/opt/tritonserver", "-c", "sleep 600 & wait"], executable="/bin/sh", start_new_session=True,
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
points = Endpoints(host="127.0.0.1", http=1, grpc=2, metrics=3)
served = servers.Served(name="t", repository=Path(sys.argv[1]))
running = servers.Server(name="s", pid=process.pid, served=(served,), log=Path("/l"), endpoints=points)
repositories.find_repository = lambda target: SimpleNamespace(name="t")

def launch(targets, store, options, note):
    servers.remember(store, running)
    return running, process

serve.launch = launch
stack = contextlib.ExitStack()
stack.enter_context(trtpipe.serve("t", openai_port=None))
print(process.pid, running.alive)
"""


@pytest.mark.process
def test_a_server_whose_block_is_never_left_ends_with_the_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEVER_LEFT, tmp_path],
        env={**os.environ, "TRTPIPE_HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=False,
        timeout=60, cwd=tmp_path,
    )  # fmt: skip
    pid, was_alive = done.stdout.split()
    assert (done.returncode, was_alive, done.stderr) == (0, "True", "")
    ended = not tritonserver.alive(int(pid))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(int(pid), signal.SIGKILL)
    assert ended
    assert not list((tmp_path / "home" / "servers").glob("*.json"))
