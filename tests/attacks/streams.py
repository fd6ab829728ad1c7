"""A server under load: streams through every door, and what each was told at its end, and when."""

from __future__ import annotations

import collections
import json
import queue
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from tests.e2e.conftest import Cli
from tests.support.kserve import infer_inputs
from trtpipe.pipeline.cli.console_serve import facts
from trtpipe.pipeline.serving.servers import recorded
from trtpipe.pipeline.store.store import Store

# What no client gets to the end of while a test looks at it.
LONG = 8000
KEY = "key-of-this-test-alone"
# Doors (protocol and model) that a stream may come through.
DOORS = (
    ("http", "tensorrt_llm"), ("grpc", "tensorrt_llm"), ("whole", "tensorrt_llm"),
    ("http", "ensemble"), ("grpc", "ensemble"), ("whole", "ensemble"),
    ("http", "tensorrt_llm_bls"), ("grpc", "tensorrt_llm_bls"),
    ("gateway", ""), ("gateway", ""),
)  # fmt: skip


@dataclass
class Attacked:
    """A running server; its processes and pid change when it is started again."""

    cli: Cli
    name: str
    record: dict[str, Any]

    @property
    def pid(self) -> int:
        return int(self.record["pid"])

    def refresh(self) -> None:
        """Read its record anew, as `trtpipe ps --json` shows it."""
        found = (facts(server) for server in recorded(Store(self.cli.home)) if server.name == self.name)
        self.record = next(found, self.record)

    def state(self) -> dict[str, Any]:
        """What the store knows of it: the pids of gateway and watchdog too."""
        path = self.cli.home / "servers" / f"{self.name}.json"
        return dict(json.loads(path.read_text()))

    def log(self) -> str:
        return str((self.cli.home / "logs" / f"serve-{self.name}.log").read_text(errors="replace"))

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The engine, and the stubs of each model."""
        out = collections.defaultdict(list)
        for process in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.Error):
                words = process.cmdline()  # a zombie has none
                if any("trtpipe.engines.engine_process.server" in word for word in words):
                    out["engine"].append(process)
                for word in words:
                    if instance := re.fullmatch(r"(\w+)_0_\d", word):
                        out[instance[1]].append(process)
        return out

    def kill(self, victim: str) -> float:
        """Kill all processes of the victim; when."""
        found = self.processes()[victim]
        assert found, f"no process of {victim}"
        for process in found:
            process.kill()
        return time.monotonic()

    def ready(self) -> tuple[bool, bool]:
        """Whether server and gateway call themselves ready."""
        return self._is_200(f"{self.record['http']}/v2/health/ready"), self._is_200(
            f"{self.record['openai']}/health/ready"
        )

    def works(self) -> bool:
        """Whether every door answers."""
        with suppress(httpx.HTTPError, ValueError):
            for model in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls"):
                url = f"{self.record['http']}/v2/models/{model}/generate"
                reply = httpx.post(url, json=ask(model, 2, stream=False), timeout=60, verify=False)
                if "error" in reply.json():
                    return False
            return self.completion(2).status_code == 200
        return False

    def completion(self, tokens: int) -> httpx.Response:
        body = {"model": self.name, "prompt": "Hello", "max_tokens": tokens, "ignore_eos": True}
        return httpx.post(
            f"{self.record['openai']}/v1/completions", json=body, headers=AUTHORISED, timeout=60, verify=False
        )

    def recover(self, seconds: float = 90.0) -> None:
        """Return when every door answers again."""
        deadline = time.monotonic() + seconds
        while not self.works():
            assert time.monotonic() < deadline, "the server does not answer again:\n" + self.log()[-3000:]
            time.sleep(0.1)
        self.refresh()

    @staticmethod
    def _is_200(url: str) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(url, timeout=5, verify=False).status_code == 200
        return False


AUTHORISED = {"authorization": f"Bearer {KEY}"}


def ask(model: str, tokens: int = LONG, *, stream: bool = True) -> dict[str, Any]:
    if model == "tensorrt_llm":
        start = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": tokens, "streaming": stream}
    else:
        start = {"text_input": "Hello", "max_tokens": tokens, "stream": stream}
    return {**start, "end_id": -1}


class Stream:
    """One client. `told` is how its request ended, in words; "" when it seems to have been answered whole."""

    def __init__(self, attacked: Attacked, kind: str, model: str) -> None:
        self.kind, self.model = kind, model
        self.events = 0
        self.begun = threading.Event()
        self.told: str | None = None
        self.at: float | None = None
        self._attacked = attacked
        self._left = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"{self.kind} {self.model} ({self.events} events): {self.told!r}"

    def _run(self) -> None:
        try:
            told = getattr(self, f"_{self.kind}")()
        except (httpx.HTTPError, OSError) as error:
            told = f"{type(error).__name__}: {error}"
        self.at = time.monotonic()
        self.told = told
        self.begun.set()

    def join(self, deadline: float) -> bool:
        """Whether it has been told until then."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self.told is not None

    def leave(self) -> None:
        """Go away at the next event."""
        self._left = True
        self._thread.join(30)

    def _begin(self) -> None:
        self.events += 1
        self.begun.set()

    def _http(self) -> str:
        error = ""
        url = f"{self._attacked.record['http']}/v2/models/{self.model}/generate_stream"
        with httpx.stream("POST", url, json=ask(self.model), timeout=600, verify=False) as reply:
            for line in reply.iter_lines():
                self._begin()
                if "error" in line:
                    error = line
                if self._left:
                    break
        return error

    def _whole(self) -> str:
        url = f"{self._attacked.record['http']}/v2/models/{self.model}/generate"
        threading.Timer(0.3, self._begin).start()  # it says nothing before its end
        reply = httpx.post(url, json=ask(self.model, stream=False), timeout=600, verify=False)
        return reply.text if reply.status_code != 200 else ""

    def _grpc(self) -> str:
        from tritonclient.grpc import InferenceServerClient

        arrived: queue.Queue[Any] = queue.Queue()
        client = InferenceServerClient(self._attacked.record["grpc"])
        client.start_stream(callback=lambda result, error: arrived.put((result, error)))
        client.async_stream_infer(self.model, infer_inputs(ask(self.model)), enable_empty_final_response=True)
        while True:
            result, error = arrived.get(timeout=600)
            if error is not None:
                self.at = time.monotonic()
                return f"error: {error}"
            self._begin()
            if result.get_response().parameters["triton_final_response"].bool_param:
                return ""

    def _gateway(self) -> str:
        error = ""
        record = self._attacked.record
        body = {"model": self._attacked.name, "prompt": "Hello", "max_tokens": LONG, "stream": True, "ignore_eos": True}
        url = f"{record['openai']}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=AUTHORISED, timeout=600, verify=False) as reply:
            for line in reply.iter_lines():
                self._begin()
                if "error" in line:
                    error = line
                if self._left:
                    break
        return error


def load(attacked: Attacked, doors: tuple[tuple[str, str], ...] = DOORS) -> list[Stream]:
    """Streams through these doors, all of them begun."""
    streams = [Stream(attacked, kind, model) for kind, model in doors]
    for stream in streams:
        assert stream.begun.wait(60), stream
        assert stream.told is None, stream
    return streams


def untold(streams: list[Stream], killed: float, seconds: float) -> Iterator[Stream]:
    """Those that have not been told of a failure until `seconds` after the kill."""
    return (stream for stream in streams if not stream.join(killed + seconds) or not stream.told)
