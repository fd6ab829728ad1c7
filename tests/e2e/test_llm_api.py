"""A repository of the LLM API, as it is packaged, behind a real tritonserver and the gateway.

TensorRT-LLM runs on NVIDIA GPUs alone, so a double takes its place, which repeats the prompt and then ends; it refuses
arguments and sampling parameters that TensorRT-LLM does not have. Everything else is what production runs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import TRTPIPE, until
from tests.support.adapters import write_adapter
from tests.support.doubles import install_llm_api
from tests.support.factories import hf_folder
from tests.unit.test_runner import Recorder
from trtpipe.engines.sampling import SamplingParams
from trtpipe.pipeline.resolve import resolve
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.runner import execute
from trtpipe.pipeline.serving import model_control, model_links, ports, triton_package, tritonserver
from trtpipe.pipeline.serving.generate import stream
from trtpipe.pipeline.serving.servers import Served
from trtpipe.pipeline.store.store import Store

pytestmark = pytest.mark.real

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
SIZES = {"max_batch_size": 4, "max_input_len": 64, "max_seq_len": 8192, "max_num_tokens": 64}


@dataclass(frozen=True)
class Front:
    """Where the gateway and its Triton answer."""

    openai: str
    http: str
    grpc: str
    metrics: str
    repository: Path

    def ask(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.openai}/v1/{path}", json={"model": "tiny", **body}, timeout=120)

    def chat(self, text: str, **body: Any) -> dict[str, Any]:
        answer = self.ask("chat/completions", messages=[{"role": "user", "content": text}], **body)
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        return whole

    def gauges(self) -> dict[str, float]:
        found = re.findall(
            r'^(nv_(?:trt_)?llm\w+)\{.*?(?:request_type|_specific_metric|kv_cache_block_type|memory_type)='
            r'"(\w+)".*\} (\S+)$', httpx.get(self.metrics, timeout=10).text, re.MULTILINE,
        )  # fmt: skip
        return {f"{family}.{value}": float(number) for family, value, number in found}

    def active(self) -> float:
        return self.gauges().get("nv_trt_llm_request_metrics.active", -1)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """The gateway before a tritonserver that serves the packaged repository of a tiny model."""
    work = tmp_path_factory.mktemp("llm-api")
    before = Path.cwd()
    os.chdir(work)
    try:
        model = hf_folder(work / "tiny", dtype="BF16", max_position_embeddings=8192, eos_token_id=1)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        chosen = {"model": str(model), "gpu": "h100", "dtype": "bf16", "runtime": "trtllm_pytorch", "build": SIZES}
        # The default sampler of this release ignores penalties and seeds.
        chosen["serving"] = {"max_queue_size": 2, "llm_args": {"sampler_type": "TRTLLMSampler"}}
        chosen["lora"] = {"back": str(write_adapter(work / "adapter", model))}
        spec = resolve([("option", chosen)])
        execute(spec, Store(work / "home"), Recorder())
        repository = RunFolder.of(spec.target).linked("repository").resolve()
    finally:
        os.chdir(before)
    served = Served(name="tiny", repository=repository)
    models = model_links.lay_out([served], work / "served")
    # Beside the script, and not in the repository.
    install_llm_api((models / "tensorrt_llm" / "1").resolve())
    installation, backends = triton_package.find_installation(), work / "backends"
    triton_package.prepare_backends(installation, backends)
    endpoints, log = ports.choose_endpoints("127.0.0.1", 0, 0, 0), work / "server.log"
    process = tritonserver.start_local(installation, models, ["tensorrt_llm"], backends, endpoints, log)
    try:
        model_control.wait_ready(process, endpoints.ready_url, log)
        words = [
            "gateway",
            str(repository),
            "--served-model-name",
            "tiny",
            "--triton",
            endpoints.grpc_url,
            "--port",
            "0",
        ]
        with subprocess.Popen([TRTPIPE, *words], stdout=subprocess.PIPE, text=True, cwd=work) as gateway:
            assert gateway.stdout is not None
            url = gateway.stdout.readline().removeprefix("gateway at ").partition("/v1;")[0]
            yield Front(url, endpoints.http_url, endpoints.grpc_url, endpoints.metrics_url, repository)
            gateway.send_signal(signal.SIGINT)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        tritonserver.remove_shared_memory(endpoints)


def test_a_chat_is_the_template_s_prompt_and_is_counted_in_tokens(front: Front) -> None:
    body = front.chat("Hello é", max_tokens=100)
    (choice,) = body["choices"]
    # <s> is left out of the text, and counts; so does the end.
    assert choice["message"]["content"] == "[user]Hello é"
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 15, "completion_tokens": 16, "total_tokens": 31}
    cut = front.chat("Hello", max_tokens=4)
    assert (cut["choices"][0]["message"]["content"], cut["choices"][0]["finish_reason"]) == ("[us", "length")


def test_the_form_of_an_answer_reaches_the_llm_api(front: Front) -> None:
    # The double's answer is the guide that it was given.
    asked: tuple[tuple[dict[str, Any], str], ...] = (({"regex": "a+"}, "a+"), ({"choice": ["x"]}, 'root ::= "x"'))
    for outputs, guide in asked:
        body = front.chat("Hello", max_tokens=100, structured_outputs=outputs)
        assert body["choices"][0]["message"]["content"] == guide
    refused = front.ask("completions", prompt="Hello", structured_outputs={"json": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "structured_outputs.json")


def test_an_adapter_by_the_name_of_the_model(front: Front) -> None:
    listed = httpx.get(f"{front.openai}/v1/models", timeout=60).json()["data"]
    assert [one["id"] for one in listed] == ["tiny", "tiny:back"]
    # The double's adapter turns the prompt around.
    plain, turned = (
        front.ask("completions", model=model, prompt="abc", max_tokens=100).json() for model in ("tiny", "tiny:back")
    )
    assert (plain["choices"][0]["text"], turned["choices"][0]["text"]) == ("abc", "cba")
    assert turned["model"] == "tiny:back"
    absent = front.ask("completions", model="tiny:front", prompt="abc")
    assert (absent.status_code, absent.json()["error"]["code"]) == (404, "model_not_found")


def test_a_streamed_chat_is_the_same_text_token_by_token(front: Front) -> None:
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "Hello é"}], "stream": True, "max_tokens": 100,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    with httpx.stream("POST", f"{front.openai}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    *chunks, usage = map(json.loads, lines)
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(pieces) == "[user]Hello é"
    assert len([piece for piece in pieces if piece]) > 1
    assert usage["usage"] == {"prompt_tokens": 15, "completion_tokens": 16, "total_tokens": 31}


def test_options_of_a_completion_reach_the_llm_api(front: Front) -> None:
    stopped = front.ask("completions", prompt="abcdefgh", stop=["de"], max_tokens=50).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == ("abc", "stop")
    endless = front.ask("completions", prompt="ab", ignore_eos=True, max_tokens=7).json()
    assert endless["choices"][0]["text"] == "abababa"
    assert endless["usage"]["completion_tokens"] == 7
    sampled = front.ask(
        "completions", prompt="ab", max_tokens=2, temperature=0.5, top_p=0.9, top_k=4, seed=7, presence_penalty=0.5,
        frequency_penalty=0.5, repetition_penalty=1.1, min_tokens=1,
    )  # fmt: skip
    assert sampled.status_code == 200, sampled.text
    listed = front.chat("x", max_tokens=3, logprobs=True, temperature=0)["choices"][0]["logprobs"]["content"]
    # The double's log-probability of a token is -0.25 times its id modulo 4: of 0, 60 and 86.
    assert [(entry["token"], entry["logprob"]) for entry in listed] == [("<s>", 0.0), ("[", 0.0), ("u", -0.5)]


def test_what_is_refused_has_the_status_of_who_is_at_fault(front: Front) -> None:
    long = front.ask("completions", prompt="a" * 65, max_tokens=1)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    broken = front.ask("completions", prompt="a", max_tokens=1, seed=13)
    assert broken.status_code == 500
    assert "illegal memory access" in broken.json()["error"]["message"]
    assert front.chat("still there", max_tokens=3)["usage"]["completion_tokens"] == 3


def test_a_client_that_leaves_ends_its_request_and_the_metrics_follow(front: Front) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{front.openai}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()  # closed when it is forgotten
        next(lines)
        assert until(lambda: front.active() == 1), front.gauges()
        busy = front.gauges()
        assert busy["nv_trt_llm_request_metrics.max"] == 4
        assert busy["nv_trt_llm_kv_cache_block_metrics.max"] == 64
        assert busy["nv_trt_llm_runtime_memory_metrics.gpu"] == 1 << 30
        assert busy["nv_trt_llm_kv_cache_block_metrics.used"] >= 1
    # It would go on for 16 s.
    assert until(lambda: front.active() == 0, seconds=5)
    idle = front.gauges()
    assert [idle[f"nv_trt_llm_request_metrics.{name}"] for name in ("scheduled", "context", "waiting")] == [0, 0, 0]


@pytest.mark.slow
def test_a_full_queue_is_told_at_once(front: Front) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as open_streams:
        for _ in range(4):  # as many as are active together
            url = f"{front.openai}/v1/completions"
            answer = open_streams.enter_context(httpx.stream("POST", url, json=body, timeout=60))
            assert answer.status_code == 200
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waiting = [pool.submit(front.ask, "completions", prompt="abc", max_tokens=1) for _ in range(2)]
            assert until(lambda: front.gauges()["nv_trt_llm_request_metrics.waiting"] == 2)
            refused = front.ask("completions", prompt="abc", max_tokens=1)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            open_streams.close()
            assert [one.result().status_code for one in waiting] == [200, 200]


def test_generate_sends_and_gets_text(front: Front) -> None:
    def generate(sampling: SamplingParams, *stop: str) -> str:
        model = Served(name="tiny", repository=front.repository).front
        return "".join(stream(front.grpc, "abcdefgh", sampling, model=model, max_tokens=50, stop_words=stop))

    assert generate(SamplingParams()) == "abcdefgh"
    sampled = SamplingParams(temperature=0.5, top_k=4, top_p=0.9, repetition_penalty=1.1, seed=7)
    assert generate(sampled, "zz", "de") == "abc"


def test_nvidia_s_clients_send_and_get_text(front: Front) -> None:
    def generate(**body: Any) -> dict[str, Any]:
        url = f"{front.http}/v2/models/tensorrt_llm/generate"
        reply: dict[str, Any] = httpx.post(url, json=body, timeout=60).json()
        return reply

    plain = generate(text_input="abc", sampling_param_max_tokens=2)
    assert plain == {"model_name": "tensorrt_llm", "model_version": "1", "text_output": "ab"}
    asked = {"text_input": "abc", "sampling_param_max_tokens": 2, "sampling_param_exclude_input_from_output": False}
    assert generate(**asked, return_finish_reason=True) == {
        "model_name": "tensorrt_llm", "model_version": "1", "text_output": "abcab", "finish_reason": "length",
    }  # fmt: skip
    assert "text_input or input_ids" in generate(streaming=False)["error"]
