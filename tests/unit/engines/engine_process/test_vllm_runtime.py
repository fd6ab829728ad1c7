"""vLLM's replies and refusals as those of the engine process; tests/e2e/test_vllm.py runs vLLM itself."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trtpipe.engines.engine_process.request import DEAD_END, Request, RequestRefused
from trtpipe.engines.engine_process.vllm_runtime import Runtime, _refusals, _Running
from trtpipe.engines.sampling import Guide, SamplingParams


class VLLMValidationError(Exception):
    """As vLLM 0.32 has it: no ValueError, as it was before."""


def request(**changes: Any) -> Request:
    return Request(id=(0, 1), prompt=(7, 8), max_tokens=8, sampling=SamplingParams(), **changes)


def reply(tokens: list[int], finish: str | None = None) -> Any:
    log_probs = [{token: SimpleNamespace(logprob=-float(token))} for token in tokens]
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, finish_reason=finish, logprobs=log_probs)])


def test_sampling_that_vllm_does_not_take_is_refused_and_ends_nothing() -> None:
    runtime: Any = object.__new__(Runtime)

    def sampling(asked: Request) -> None:
        raise VLLMValidationError("min_tokens must be less than\nor equal to max_tokens=5")

    runtime._sampling = sampling
    with pytest.raises(RequestRefused) as caught:
        runtime.submit(request())
    assert str(caught.value) == "vLLM refuses it: min_tokens must be less than or equal to max_tokens=5"


def test_only_refusals_are_taken_for_such() -> None:
    with (
        pytest.raises(RequestRefused, match=r"^guided_decoding_guide: vLLM refuses it: no$"),
        _refusals("guided_decoding_guide: "),
    ):
        raise ValueError("no")
    with pytest.raises(RuntimeError), _refusals():
        raise RuntimeError
    with pytest.raises(RequestRefused, match=r"^as it is$"), _refusals("mark: "):
        raise RequestRefused("as it is")


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_an_answer_that_vllm_gives_up_is_not_told_as_complete(reason: str) -> None:
    running = _Running(request(), [])
    assert running.take(reply([3])).tokens == [3]
    ended = running.take(reply([4], reason))
    assert (ended.finish, ended.failed, ended.tokens) == ("refused", True, [])
    assert ended.refusal == f"vLLM ended the request with '{reason}'; its log says more"


def test_a_guide_that_allows_no_token_is_the_client_s_fault() -> None:
    guided = request(guide=Guide("ebnf_grammar", "root ::= root"))
    ended = _Running(guided, []).take(reply([4], "error"))
    assert (ended.finish, ended.failed, ended.tokens, ended.refusal) == ("refused", False, [], DEAD_END)
    assert _Running(guided, []).take(reply([], "error")).failed  # it was not compiled, as vLLM's log says


def test_tokens_behind_a_stop_word_are_not_in_the_sum_of_log_probabilities() -> None:
    running = _Running(request(stop_words=((5,),), return_log_probs=True), [])
    output = running.take(reply([3, 5, 6, 7]))
    assert (output.tokens, output.log_probs, output.cum_log_prob) == ([3, 5], [-3.0, -5.0], -8.0)
    assert output.finish == "stop_words"


def test_the_stop_word_at_which_vllm_ends_is_output() -> None:
    asked = replace(request(end_id=2, stop_words=((5,),)), sampling=SamplingParams(min_tokens=1))
    output = _Running(asked, [2]).take(reply([3, 5], "stop"))
    assert (output.tokens, output.finish) == ([3, 5], "stop_words")
    output = _Running(asked, [2]).take(reply([3, 2], "stop"))
    assert (output.tokens, output.finish) == ([3], "end_id")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runtime without an engine, of a vLLM whose SamplingParams is a dict."""
    kinds = SimpleNamespace(
        RequestOutputKind=SimpleNamespace(DELTA="delta"), StructuredOutputsParams=lambda **given: given
    )
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **given: given))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    made: Any = object.__new__(Runtime)
    vars(made).update(_max_seq_len=64, _vocab_size=4, _guided=True, _grammar_end=9)
    return made


def test_vllm_draws_no_end_token_before_min_tokens(runtime: Any) -> None:
    asked = request(end_id=2, stop_words=((1,), (6, 7), (3,), (8,)))  # of four tokens
    made = runtime._sampling(replace(asked, sampling=SamplingParams(min_tokens=3)))
    assert (made["min_tokens"], made["stop_token_ids"]) == (3, [2, 1, 3])
    # A guide may allow the end alone.
    made = runtime._sampling(replace(asked, sampling=SamplingParams(min_tokens=3), guide=Guide("json")))
    assert (made["min_tokens"], made["stop_token_ids"]) == (0, [2, 9])
    made = runtime._sampling(asked)
    assert (made["min_tokens"], made["stop_token_ids"]) == (0, [2])


def test_a_bias_has_a_number_for_each_logit(runtime: Any) -> None:
    whole = np.array([0, 2, 0, -np.inf], np.float32)
    assert runtime._sampling(request(embedding_bias=whole))["logit_bias"] == {1: 2.0, 3: -np.inf}
    for wrong in (whole[:3], np.append(whole, whole), np.array([0, np.nan, 0, 0]), np.array([0, np.inf, 0, 0])):
        with pytest.raises(RequestRefused, match=r"^embedding_bias must be 4 numbers below infinity, one for each t"):
            runtime._sampling(request(embedding_bias=wrong))
