"""A runtime's own server in place of Triton. A small program answers in vLLM's place; test_vllm has the real one."""

from __future__ import annotations

import errno
import json
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import trtpipe
from tests.support.factories import hf_folder
from trtpipe.configs.home import default_home
from trtpipe.engines import load_backend
from trtpipe.engines.backends import vllm
from trtpipe.engines.errors import StageFailed, TrtpipeError, UsageError
from trtpipe.pipeline.serving import serve, temporary
from trtpipe.pipeline.serving.engine_python import beside
from trtpipe.pipeline.serving.launch_options import LaunchOptions
from trtpipe.pipeline.serving.repositories import Found
from trtpipe.pipeline.serving.servers import Server, recorded, remember
from trtpipe.pipeline.store.store import Store

pytestmark = [pytest.mark.process, pytest.mark.loopback]

# Answers as vLLM does, and writes down what it was started with and asked for.
SERVER = """#!/bin/sh
[ "$1" = -I ] && echo 0.32.0 && exit  # the version of vLLM that is installed
exec {python} {program} "$@"
"""
PROGRAM = """
import http.server, json, os, sys
words = sys.argv[1:]
options = dict(zip(words[words.index("--model")::2], words[words.index("--model") + 1::2]))
if os.environ.get("BROKEN"):
    print("(EngineCore pid=7) ERROR 11-25 22:10:00 [core.py:95] ValueError: no memory is left")
    sys.exit("RuntimeError: Engine core initialization failed. See root cause above.")
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def answer(self, kind, body):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer("text/plain", b"")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        print("asked", json.dumps({"path": self.path, **asked}, sort_keys=True), flush=True)
        choices = {"choices": [{"text": "Paris", "delta": {"content": "Paris"}}]}
        if asked.get("stream"):
            self.answer("text/event-stream", f"data: {json.dumps(choices)}\\n\\ndata: [DONE]\\n\\n".encode())
        else:
            self.answer("application/json", json.dumps(choices).encode())
print("words", json.dumps(words), flush=True)
print("offline", os.environ["HF_HUB_OFFLINE"], os.environ["VLLM_NO_USAGE_STATS"], flush=True)
print("temporary", os.environ["TMPDIR"], os.environ["VLLM_RPC_BASE_PATH"], flush=True)
print("cache", os.environ["VLLM_CACHE_ROOT"], flush=True)
http.server.ThreadingHTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def target(in_folder: Path) -> str:
    """A target of the vllm runtime for this machine's processor."""
    built = trtpipe.build(model=str(hf_folder(in_folder / "tiny")), gpu="cpu", runtime="vllm", dtype="fp32")
    return built.target


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter in whose environment the small program is vLLM."""
    (tmp_path / "vllm.py").write_text(PROGRAM)
    file = tmp_path / "python"
    file.write_text(SERVER.format(python=sys.executable, program=tmp_path / "vllm.py"))
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def server(target: str, python: str) -> Iterator[Server]:
    with trtpipe.serve(target, front="native", engine_python=python):
        (found,) = recorded(Store(default_home()))
        yield found


def logged(server: Server, word: str) -> list[str]:
    return [line.removeprefix(f"{word} ") for line in server.log.read_text().splitlines() if line.startswith(word)]


def test_it_is_started_with_the_settings_of_the_engine(server: Server, target: str) -> None:
    words = json.loads(logged(server, "words")[0])
    engine = default_home() / "servers" / target / "native" / target
    given = dict(zip(words[0::2], words[1::2], strict=False))
    assert given["--model"] == str(engine)
    assert given["--config"] == str(engine / "engine_args.yaml")
    assert given["--served-model-name"] == target
    assert given["--port"] == str(server.endpoints.http)
    assert Path(given["--tokenizer"], "tokenizer.json").is_file()
    assert "max-model-len" in (engine / "engine_args.yaml").read_text()
    assert logged(server, "offline") == ["1 1"]
    assert logged(server, "cache") == [str(default_home() / "vllm")]


def test_it_has_answered_one_request_before_it_counts_as_started(server: Server, target: str) -> None:
    assert [json.loads(line) for line in logged(server, "asked")] == [
        {"path": "/v1/completions", "model": target, "prompt": "Hello", "max_tokens": 1}
    ]


def test_a_client_asks_it_greedily_unless_told_otherwise(server: Server, target: str) -> None:
    client = trtpipe.Client()
    assert client.openai_url == f"http://127.0.0.1:{server.endpoints.http}/v1"
    assert client.generate("Where?", max_tokens=5, stop=["."]) == "Paris"
    assert client.generate("Where?", max_tokens=5, top_k=3, seed=7) == "Paris"
    greedy, sampled = [json.loads(line) for line in logged(server, "asked")][1:]
    # As from Triton: without the values that the model recommends.
    common = {
        "path": "/v1/completions", "model": target, "prompt": "Where?", "max_tokens": 5, "stream": True,
        "top_p": 1.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert greedy == {**common, "stop": ["."], "temperature": 0.0, "top_k": 0}
    assert sampled == {**common, "stop": [], "temperature": 1.0, "top_k": 3, "seed": 7}


def test_a_prompt_that_begins_with_the_first_token_gets_no_second_one(server: Server) -> None:
    client = trtpipe.Client()
    for prompt in ("<s>Where?", "Where? <s>"):
        assert client.generate(prompt) == "Paris"
    with_token, without = [json.loads(line) for line in logged(server, "asked")][1:]
    assert (with_token["prompt"], with_token["add_special_tokens"]) == ("<s>Where?", False)
    assert "add_special_tokens" not in without


def test_it_is_ended_with_what_it_started(target: str, python: str) -> None:
    with trtpipe.serve(target, front="native", engine_python=python):
        (found,) = recorded(Store(default_home()))
        assert found.alive
        [told] = logged(found, "temporary")
        folder, sockets = map(Path, told.split())
        assert folder == sockets
        assert (folder.is_dir(), stat.S_IMODE(folder.stat().st_mode)) == (True, 0o700)
        (folder / "left").touch()
    assert not found.alive
    assert not folder.exists()
    assert recorded(Store(default_home())) == []


def test_it_may_have_been_ended_before_and_another_of_its_name_goes_on(target: str, python: str) -> None:
    store = Store(default_home())
    with trtpipe.serve(target, front="native", engine_python=python):
        serve.stop(store, None)
    assert recorded(store) == []
    with trtpipe.serve(target, front="native", engine_python=python):
        (found,) = serve.stop(store, None)
        other = subprocess.Popen(["sleep", "600"])
        started = replace(found, pid=other.pid, native="sleep")
        while not started.alive:  # /proc has no command line of it at first
            time.sleep(0.01)
        remember(store, started)
    assert [(one.name, one.pid, one.died) for one in recorded(store)] == [(target, other.pid, None)]
    serve.stop(store, None)
    other.wait(10)
    with (  # noqa: PT012
        pytest.raises(FileNotFoundError, match="of the program itself"),
        trtpipe.serve(target, front="native", engine_python=python),
    ):
        (found,) = recorded(store)
        (store.home / "servers" / f"{target}.json").unlink()
        raise FileNotFoundError(errno.ENOENT, "of the program itself")
    assert not found.alive
    temporary.remove(store.home / "servers" / target)  # a server without a record is not cleaned up


def test_a_start_that_fails_tells_the_first_reason(target: str, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(StageFailed, match="vllm does not start: ValueError: no memory is left"):  # noqa: SIM117
        with trtpipe.serve(target, front="native", engine_python=python):
            pass
    assert recorded(Store(default_home())) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"front": "nativ"}, "unknown front 'nativ'; did you mean 'native'"),
        ({"openai": None}, "--no-openai is for the gateway"),
        ({"cors_origins": ("*",)}, "--cors-origin is for the gateway"),
        ({"tool_format": "hermes"}, "--tool-format is for the gateway"),
        ({"tls_cert": Path("cert.pem"), "tls_key": Path("key.pem")}, "--tls-cert is for the gateway"),
        ({"model_names": ("",)}, "--served-model-name is empty"),
        ({"tls_cert": Path("cert.pem")}, "TLS needs a certificate and a key"),
        ({"model_names": ("meta/llama",)}, "a name of --served-model-name holds a /"),
    ],
)
def test_what_it_does_not_do_is_refused_before_it_starts(
    options: dict[str, object], words: str, target: str, python: str
) -> None:
    with pytest.raises(TrtpipeError, match=words.replace("-", r"\-").replace("/", r"\/")):  # noqa: PT012
        chosen = LaunchOptions(**{"front": "native", "openai": 0, "engine_python": python, **options})  # type: ignore[arg-type]
        serve.launch(
            [Found(target, Path("runs", target, "repository").resolve())], Store(default_home()), chosen, print
        )
    assert not list((default_home() / "logs").glob("serve-*"))
    assert not (default_home() / "servers").exists()


@pytest.mark.parametrize("runtime", ["reference", "tensorrt_llm"])
def test_a_runtime_without_a_server_of_its_own_says_so(runtime: str) -> None:
    with pytest.raises(UsageError, match="--front triton"):
        load_backend(runtime).native_server(
            Path("engine"), Path("tokenizer"), host="127.0.0.1", port=9000, names=("a",), on_cpu=False
        )


def test_that_there_is_no_such_server_is_said_before_its_port_is_looked_at(in_folder: Path) -> None:
    built = trtpipe.build(model=str(hf_folder(in_folder / "tiny")), gpu="cpu", dtype="fp32")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match="the reference runtime has no server of its own"),
        trtpipe.serve(built.target, front="native", openai_port=taken.getsockname()[1]),
    ):
        pass
    assert not (default_home() / "servers").exists()


@pytest.mark.parametrize(
    ("variables", "cache"),
    [
        ({"TRTPIPE_HOME": "/srv/trtpipe"}, "/srv/trtpipe/vllm"),
        ({"TRTPIPE_HOME": "/srv/trtpipe", "VLLM_CACHE_ROOT": "/var/cache/vllm"}, None),
        ({"TRTPIPE_HOME": "home"}, None),
        ({"TRTPIPE_HOME": ""}, None),
    ],
)
def test_what_vllm_compiles_is_in_our_home_unless_another_place_is_given(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], cache: str | None
) -> None:
    """The user of a service may have no home folder that can be written."""
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert vllm.environment().get("VLLM_CACHE_ROOT") == cache


def test_trtllm_serve_calls_the_model_by_the_name_of_its_folder() -> None:
    made = load_backend("trtllm_pytorch").native_server(
        Path("/store/native/llama"), Path("/tok"), host="127.0.0.1", port=9000, names=("llama",), on_cpu=False
    )
    assert made.in_image
    assert (made.program, made.command[0]) == ("trtllm-serve", "/store/native/llama")
    assert made.command[-4:] == ("--host", "127.0.0.1", "--port", "9000")


@pytest.mark.skipif(beside() is None, reason="no vLLM beside this environment: `make setup-vllm`")
def test_vllm_on_a_cpu_has_what_its_own_server_imports() -> None:
    """A slow test starts that server."""
    names = ("uvicorn", "watchfiles", "prometheus_fastapi_instrumentator", "model_hosting_container_standards")
    program = f"import importlib.util; print([name for name in {names} if importlib.util.find_spec(name) is None])"
    done = subprocess.run([str(beside()), "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "[]\n"
