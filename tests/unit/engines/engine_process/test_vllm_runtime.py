"""vLLM behind the engine process, with a stand-in for vLLM: what it is asked, and what its answers become.

That vLLM itself does so is measured on a GPU.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from trtpipe.engines.engine_process.request import Output, Request, RequestRefused
from trtpipe.engines.engine_process.vllm_runtime import Runtime
from trtpipe.engines.sampling import SamplingParams

END = 2
SETTINGS = {
    "tensor-parallel-size": 1, "pipeline-parallel-size": 1, "max-num-seqs": 2, "max-model-len": 32,
    "max-num-batched-tokens": 16, "block-size": 16, "kv-cache-dtype": "auto",
}  # fmt: skip


@dataclass
class Asked:
    """SamplingParams of the stand-in: whatever was given."""

    given: dict[str, Any]


@dataclass
class StandIn:
    """An engine that puts out the tokens of a script, one a step and request."""

    arguments: dict[str, Any] = field(default_factory=dict)
    scripts: list[list[int]] = field(default_factory=list)
    requests: dict[str, tuple[Any, Asked, list[int]]] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    model_config: Any = field(default_factory=lambda: SimpleNamespace(get_vocab_size=lambda: 100))
    vllm_config: Any = field(default_factory=lambda: SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=8)))

    def add_request(self, name: str, prompt: Any, params: Asked) -> None:
        self.requests[name] = (prompt, params, list(self.scripts.pop(0)))

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            self.requests.pop(name, None)

    def step(self) -> list[Any]:
        out = []
        for name, (_, params, script) in list(self.requests.items()):
            token = script.pop(0)
            ended = token in (params.given["stop_token_ids"] or [])
            reason = "stop" if ended else None if script else "length"
            if reason:
                del self.requests[name]
            row = {token: SimpleNamespace(logprob=-0.5)}
            part = SimpleNamespace(token_ids=[token], finish_reason=reason, logprobs=[row])
            out.append(SimpleNamespace(request_id=name, outputs=[part]))
        return out


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """What a Runtime finds under vLLM's names."""
    stand_in = StandIn()

    def from_engine_args(arguments: dict[str, Any]) -> StandIn:
        stand_in.arguments = arguments
        return stand_in

    modules: dict[str, dict[str, Any]] = {
        "vllm": {"EngineArgs": lambda **given: given, "SamplingParams": lambda **given: Asked(given)},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA="delta")},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.llm_engine": {"LLMEngine": SimpleNamespace(from_engine_args=from_engine_args)},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return stand_in


@pytest.fixture
def runtime(engine: StandIn, tmp_path: Path) -> Runtime:
    (tmp_path / "engine_args.yaml").write_text(yaml.safe_dump(SETTINGS))
    return Runtime(tmp_path, kv_cache_free_gpu_mem_fraction=0.5, enable_kv_cache_reuse=False)


def run(runtime: Runtime, engine: StandIn, *requests: tuple[Request, list[int]]) -> list[Output]:
    for request, script in requests:
        engine.scripts.append(script)
        runtime.submit(request)
    out = []
    while runtime.has_work:
        out += runtime.step()
    return out


def request(number: int = 0, **options: Any) -> Request:
    return Request(id=(0, number), prompt=(1, 5, 6), max_tokens=4, **options)


def test_the_engine_is_loaded_as_its_folder_says(runtime: Runtime, engine: StandIn, tmp_path: Path) -> None:
    assert engine.arguments == {
        "model": str(tmp_path), "skip_tokenizer_init": True, "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.5, "disable_log_stats": True, "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1, "max_num_seqs": 2, "max_model_len": 32, "max_num_batched_tokens": 16,
        "block_size": 16, "kv_cache_dtype": "auto",
    }  # fmt: skip


def test_greedy_unless_asked_otherwise(runtime: Runtime, engine: StandIn) -> None:
    run(runtime, engine, (request(end_id=END), [7, END]))
    engine.scripts.append([7])
    asked = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, seed=3, min_tokens=2, repetition_penalty=1.1)
    bias = np.zeros(100, np.float32)
    bias[9] = -4
    runtime.submit(request(sampling=asked, embedding_bias=bias, return_log_probs=True))
    ((prompt, params, _),) = engine.requests.values()
    assert prompt == {"prompt_token_ids": [1, 5, 6]}
    assert params.given == {
        "max_tokens": 4, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 2, "seed": 3, "ignore_eos": True,
        "stop_token_ids": None, "logit_bias": {9: -4.0}, "logprobs": 0, "detokenize": False, "output_kind": "delta",
    }  # fmt: skip


def test_the_end_is_told_and_not_put_out(runtime: Runtime, engine: StandIn) -> None:
    first, second = run(runtime, engine, (request(end_id=END), [7, END]))
    assert (first.tokens, first.finish) == ([7], None)
    assert (second.tokens, second.finish) == ([], "end_id")
    assert [one.finish for one in run(runtime, engine, (request(), [7, END, 8, 9]))] == [None, None, None, "length"]


def test_stop_words_are_sequences_of_tokens(runtime: Runtime, engine: StandIn) -> None:
    out = run(runtime, engine, (request(stop_words=((8, 9),)), [8, 8, 9, 10]))
    assert [one.tokens for one in out] == [[8], [8], [9]]
    assert out[-1].finish == "stop_words"
    assert engine.aborted == ["0-0"], "vLLM would go on"
    few = SamplingParams(min_tokens=5)
    out = run(runtime, engine, (request(stop_words=((8, 9),), sampling=few), [8, 9, 8, 9]))
    assert [one.finish for one in out] == [None, None, None, "length"]


def test_log_probs_add_up(runtime: Runtime, engine: StandIn) -> None:
    out = run(runtime, engine, (request(return_log_probs=True), [7, 8]))
    assert [(one.log_probs, one.cum_log_prob) for one in out] == [([-0.5], -0.5), ([-0.5], -1.0)]


def test_a_cancelled_request_ends_in_the_next_step(runtime: Runtime, engine: StandIn) -> None:
    engine.scripts += [[7, 8, 9], [7, 8]]
    runtime.submit(request(0))
    runtime.submit(request(1))
    runtime.step()
    stats = runtime.stats()
    assert (stats["active_requests"], stats["kv_used_blocks"], stats["kv_max_blocks"]) == (2, 2, 8)
    runtime.cancel((0, 0))
    runtime.cancel((0, 7))  # nobody's
    assert [(one.id, one.finish) for one in runtime.step()] == [((0, 0), "cancelled"), ((0, 1), "length")]
    assert engine.aborted == ["0-0"]
    assert not runtime.has_work
    assert runtime.stats()["kv_used_blocks"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bad_words": ((3,),)}, "bad_words is not supported by the vllm runtime"),
        ({"return_context_logits": True}, "return_context_logits is not supported by the vllm runtime"),
        ({"beam_width": 2}, "beam_width is not supported by the vllm runtime"),
    ],
)
def test_what_vllm_cannot_do_is_refused(
    runtime: Runtime, engine: StandIn, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestRefused, match=message):
        runtime.submit(request(**options))
    assert not runtime.has_work


def test_a_request_that_is_too_long_is_refused(runtime: Runtime) -> None:
    with pytest.raises(RequestRefused, match="3 prompt tokens and max_tokens 30 exceed max_seq_len 32"):
        runtime.submit(Request(id=(0, 0), prompt=(1, 2, 3), max_tokens=30))
