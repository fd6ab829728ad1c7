"""What a request holds for each family of models, and what an answer's bytes mean, by hand-written messages."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from tests.support.llm_servers import contents
from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.load.workload import RequestSpec
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.loop.request_factory import RequestFactory
from trtpipe.pipeline.bench.protocols.endpoint import ENGINE, LLMAPI, TEXT, Endpoint
from trtpipe.pipeline.bench.protocols.http_setup import Site
from trtpipe.pipeline.bench.protocols.openai_http import OpenAiHttp
from trtpipe.pipeline.bench.protocols.transport import Answer, BadAnswer, Codec
from trtpipe.pipeline.bench.protocols.triton_grpc import TritonGrpc
from trtpipe.pipeline.bench.protocols.triton_http import TritonHttp
from trtpipe.pipeline.net.h2 import triton

SITE = Site.of("http://host:8000/v1")


def tokenize(text: str) -> list[int]:
    return [len(word) for word in text.split()]


# A model's inputs


def endpoint(*inputs: str, outputs: tuple[str, ...] = ("text_output",)) -> Endpoint:
    return Endpoint(
        protocol="grpc", url="host:8001", server_name="triton", server_version="2", model="m", model_versions=("1",),
        inputs=dict.fromkeys(inputs, ("INT32", 2)), outputs=frozenset(outputs),
    )  # fmt: skip


TEXT_MODEL = endpoint(*TEXT.inputs)
ENGINE_MODEL = endpoint(*ENGINE.inputs, outputs=("output_ids",))
LLMAPI_MODEL = endpoint(*LLMAPI.inputs)


def more(made: Endpoint, *inputs: str) -> Endpoint:
    return replace(made, inputs={**made.inputs, **dict.fromkeys(inputs, ("INT32", 2))})


def test_the_family_of_a_model() -> None:
    assert (TEXT_MODEL.family(), ENGINE_MODEL.family(), LLMAPI_MODEL.family()) == (TEXT, ENGINE, LLMAPI)
    for inputs, outputs, missing in [
        (("text_input", "stream"), ("text_output",), "max_tokens"),
        (("text_input", "max_tokens", "stream"), (), "text_output"),
        (("input_ids", "input_lengths", "request_output_len"), ("output_ids",), "streaming"),
        (("text_input", "sampling_param_max_tokens"), ("text_output",), "streaming"),
    ]:
        with pytest.raises(UsageError, match=f"'m' at host:8001 takes no prompt: it declares no {missing}; name the"):
            endpoint(*inputs, outputs=outputs).family()
    with pytest.raises(
        UsageError, match=r"'m' at host:8001 is of Triton's vLLM backend: .*; measure it by --openai-url"
    ):
        endpoint("text_input", "stream", "sampling_parameters", "exclude_input_in_output").family()


def values(made: Endpoint, **options: Any) -> dict[str, Any]:
    return made.values("one three", 9, options, tokenize)


def test_a_request_to_each_family() -> None:
    assert values(TEXT_MODEL) == {"text_input": "one three", "max_tokens": 9, "stream": True}
    assert values(more(TEXT_MODEL, "return_num_output_tokens", "top_k", "other")) == {
        "text_input": "one three", "max_tokens": 9, "stream": True, "return_num_output_tokens": True, "top_k": 1,
    }  # fmt: skip
    ids = {"input_ids": [3, 5], "input_lengths": 2, "request_output_len": 9, "streaming": True}
    assert values(ENGINE_MODEL) == ids
    assert values(more(ENGINE_MODEL, "exclude_input_in_output", "runtime_top_k")) == ids | {
        "exclude_input_in_output": True, "runtime_top_k": 1,
    }  # fmt: skip
    asked = {"text_input": "one three", "sampling_param_max_tokens": 9, "streaming": True}
    assert values(LLMAPI_MODEL) == asked
    assert values(more(LLMAPI_MODEL, "sampling_param_exclude_input_from_output", "sampling_param_top_k")) == asked | {
        "sampling_param_exclude_input_from_output": True, "sampling_param_top_k": 1,
    }  # fmt: skip


SAMPLING = {
    "temperature": 0.5, "top_k": 5, "top_p": 0.9, "seed": 7, "repetition_penalty": 1.1, "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("made", "option", "value", "names"),
    [
        *((TEXT_MODEL, name, value, [name]) for name, value in SAMPLING.items()),
        (TEXT_MODEL, "seed", 7, ["random_seed"]),
        (TEXT_MODEL, "min_tokens", 4, ["min_tokens"]),
        (TEXT_MODEL, "min_tokens", 4, ["min_length"]),
        (TEXT_MODEL, "stop", ["x"], ["stop_words"]),
        (ENGINE_MODEL, "top_k", 5, ["runtime_top_k"]),
        (ENGINE_MODEL, "top_p", 0.9, ["runtime_top_p"]),
        (ENGINE_MODEL, "seed", 7, ["random_seed"]),
        (ENGINE_MODEL, "seed", 7, ["seed"]),
        (ENGINE_MODEL, "min_tokens", 4, ["min_length"]),
        (ENGINE_MODEL, "temperature", 0.5, ["temperature"]),
        *((LLMAPI_MODEL, name, 3, [f"sampling_param_{name}"]) for name in ("temperature", "top_k", "top_p", "seed")),
        (LLMAPI_MODEL, "stop", ["x"], ["sampling_param_stop"]),
    ],
)
def test_options_by_the_names_of_every_release(made: Endpoint, option: str, value: Any, names: list[str]) -> None:
    given = values(more(made, *names), **{option: value})
    assert given == values(made) | {names[0]: value}
    assert "top_k" not in given or option == "top_k"


def test_the_newer_name_is_taken_where_a_model_has_both() -> None:
    given = values(more(TEXT_MODEL, "random_seed", "seed", "min_length", "min_tokens"), seed=7, min_tokens=4)
    assert given == values(TEXT_MODEL) | {"seed": 7, "min_tokens": 4}


def test_the_end_token_is_ruled_out_by_an_id_that_is_none() -> None:
    assert values(more(TEXT_MODEL, "end_id"), ignore_eos=True) == values(TEXT_MODEL) | {"end_id": -1}


def test_greedy_unless_an_option_says_how_to_sample() -> None:
    made = more(TEXT_MODEL, "top_k", "top_p", "temperature", "seed")
    assert values(made, seed=3)["top_k"] == 1
    assert values(made, top_k=7)["top_k"] == 7
    assert "top_k" not in values(made, top_p=0.5)
    assert values(made, temperature=0.5) == values(TEXT_MODEL) | {"temperature": 0.5, "top_p": 1.0}
    assert values(made, temperature=0) == values(TEXT_MODEL) | {"temperature": 0}
    assert values(made, temperature=0.5, top_k=7) == values(TEXT_MODEL) | {"temperature": 0.5, "top_k": 7}
    assert values(more(TEXT_MODEL, "temperature"), temperature=0.5) == values(TEXT_MODEL) | {"temperature": 0.5}


@pytest.mark.parametrize("made", [TEXT_MODEL, ENGINE_MODEL, LLMAPI_MODEL])
def test_an_option_without_an_input(made: Endpoint) -> None:
    for name, value in {**SAMPLING, "stop": ["x"], "beam_width": 2}.items():
        with pytest.raises(UsageError, match=f"'m' has no input for the sampling option '{name}'; leave it out"):
            values(made, **{name: value})
    # Without these an answer may be shorter, which the report says.
    assert values(made, min_tokens=3, ignore_eos=True) == values(made)


@pytest.mark.parametrize(
    ("option", "value", "telling"),
    [("seed", -1, "UINT64"), ("temperature", "hot", "FP32"), ("top_k", 1 << 40, "INT32"), ("top_k", 0.5, "INT32")],
)
def test_a_value_that_its_input_cannot_hold(option: str, value: Any, telling: str) -> None:
    kinds = {"seed": "UINT64", "temperature": "FP32", "top_k": "INT32", "text_input": "BYTES", "stream": "BOOL"}
    inputs = {name: (kinds.get(name, "INT32"), 2) for name in (*TEXT.inputs, "seed", "temperature", "top_k")}
    codec = TritonGrpc(replace(TEXT_MODEL, inputs=inputs), tokenize)
    with pytest.raises(UsageError, match=f"input '{option}' is of type {telling}"):
        codec.encode("r", "p", 1, {option: value})


def test_inputs_without_a_batch_dimension() -> None:
    inputs = {"text_input": ("BYTES", 1), "max_tokens": ("INT64", 1), "stream": ("BOOL", 3), "stop_words": ("BYTES", 1)}
    codec = TritonGrpc(replace(TEXT_MODEL, inputs=inputs), tokenize)
    sent = service_pb2.ModelInferRequest.FromString(codec.encode("r", "p", 2, {"stop": ["a", "b"]}))
    assert {name: shape for name, (_, shape, _) in contents(sent).items()} == {
        "text_input": [1], "max_tokens": [1], "stream": [1, 1, 1], "stop_words": [2],
    }  # fmt: skip
    assert contents(sent)["max_tokens"][2] == b"\2\0\0\0\0\0\0\0"


def test_a_conversation_goes_to_a_chat_as_it_is() -> None:
    """The server renders it with the model's template; others get what it was rendered to."""
    said = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    ask = RequestSpec("<s>su", 3, 5, 0, options={"min_tokens": 5}, messages=said)

    def body(codec: Codec) -> Any:
        return json.loads(RequestFactory().make(codec, ask).message.partition(b"\r\n\r\n")[2])

    assert body(OpenAiHttp(SITE, "m", chat=True))["messages"] == list(said)
    assert body(OpenAiHttp(SITE, "m", chat=False))["prompt"] == "<s>su"
    ask = replace(ask, messages=None)
    assert body(OpenAiHttp(SITE, "m", chat=True))["messages"] == [{"role": "user", "content": "<s>su"}]


def test_a_prompt_is_kept_only_for_a_turn_that_may_follow() -> None:
    """Of a long one more than its answer would be kept."""
    once, turn = RequestSpec("p", 1, 8, 0), RequestSpec("p", 1, 8, 0, last=False)
    assert RequestFactory().make(OpenAiHttp(SITE, "m", chat=False), once).ask is None
    assert RequestFactory().make(OpenAiHttp(SITE, "m", chat=False), turn).ask is turn


def test_a_length_that_is_asked_for_is_exact_and_a_least_one_is_not() -> None:
    def made(length: int | None, **options: Any) -> tuple[bool, int, int]:
        exchange = RequestFactory().make(
            OpenAiHttp(SITE, "m", chat=False), RequestSpec("p", 1, 8, 0, options=options), length
        )
        body = json.loads(exchange.message.partition(b"\r\n\r\n")[2])
        return exchange.exact, body["min_tokens"], body["max_tokens"]

    assert made(None, ignore_eos=True, min_tokens=8) == (True, 8, 8)
    assert made(3, ignore_eos=True, min_tokens=8) == (True, 3, 3)  # a shortened one, of a warm-up
    assert made(None, min_tokens=5) == made(None, ignore_eos=True, min_tokens=5) == (False, 5, 8)
    assert made(3, min_tokens=5) == (False, 3, 3)


def test_openai_s_answers_are_greedy_unless_asked_otherwise() -> None:
    codec = OpenAiHttp(SITE, "m", chat=False)

    def body(**options: Any) -> Any:
        return json.loads(codec.encode("r", "p", 1, options).partition(b"\r\n\r\n")[2])

    assert body()["temperature"] == 0
    assert body(stop=["x"])["temperature"] == 0
    assert "temperature" not in body(top_p=0.9)
    assert body(temperature=0.7)["temperature"] == 0.7


@pytest.mark.parametrize(("owner", "penalties"), [("trtpipe", [1, 1.5]), ("vllm", [None, 1.5]), (None, [None, 1.5])])
def test_a_gateway_of_ours_leaves_out_the_penalty_that_the_model_recommends(
    monkeypatch: pytest.MonkeyPatch, owner: str | None, penalties: list[float | None]
) -> None:
    """As over Triton's protocols, which know of no recommendation; other servers get OpenAI's fields alone."""
    listing = {"data": [{"id": "other", "owned_by": "trtpipe"}, {"id": "m", "owned_by": owner}]}
    monkeypatch.setattr(Site, "ask", lambda *given: (200, listing))
    codec = OpenAiHttp.find(SITE, "m", chat=False)
    bodies = [codec.encode("r", "p", 1, options) for options in ({}, {"repetition_penalty": 1.5}, {"top_p": 0.9})]
    sent = [json.loads(one.partition(b"\r\n\r\n")[2]) for one in bodies]
    assert [one.get("repetition_penalty") for one in sent] == [*penalties, None]
    assert [one.get("temperature") for one in sent] == [0, 0, None]


# What an answer holds

COUNTED = replace(TEXT_MODEL, outputs=frozenset(["text_output", "num_output_tokens"]))


def received(*messages: bytes) -> InFlightRequest:
    """What came, each at a moment of its own: 10, 20, ..."""
    exchange = InFlightRequest("r", b"", input_tokens=1, max_tokens=5)
    for number, message in enumerate(messages, 1):
        exchange.receive(message, 10 * number)
    exchange.end(1000)
    return exchange


def sse(*values: Any) -> InFlightRequest:
    events = [value if isinstance(value, str) else json.dumps(value, separators=(",", ":")) for value in values]
    return received(*(b"data: " + event.encode() + b"\n\n" for event in events))


def read(codec: Codec, exchange: InFlightRequest) -> Answer | tuple[str, str]:
    try:
        return codec.decode(exchange)
    except BadAnswer as bad:
        return bad.kind, str(bad)


def infer(outputs: dict[str, bytes], *, final: bool = False, error: str = "") -> bytes:
    out = service_pb2.ModelStreamInferResponse(error_message=error)
    out.infer_response.parameters[triton.FINAL].bool_param = final
    for name, data in outputs.items():
        out.infer_response.outputs.add(name=name)
        out.infer_response.raw_output_contents.append(data)
    return bytes(out.SerializeToString())


def text(words: str, count: int | None = None, **options: Any) -> bytes:
    counted = {} if count is None else {"num_output_tokens": struct.pack("<i", count)}
    return infer({"text_output": triton.pack_strings([words]), **counted}, **options)


def test_triton_s_answers_over_grpc() -> None:
    counted, plain, engine = (TritonGrpc(made, tokenize) for made in (COUNTED, TEXT_MODEL, ENGINE_MODEL))
    last = infer({}, final=True)
    # The final flag may ride on the last tokens or come alone; a response that counts nothing carries no token.
    assert read(counted, received(text("a", 1), text("bc", 2, final=True))) == Answer([10, 20], [1, 2])
    assert read(counted, received(text("", 0), text("bc", 2), last)) == Answer([20], [2])
    assert read(plain, received(text("a"), text(""), text("é"), last)) == Answer([10, 30], None, "aé")
    assert read(engine, received(infer({"output_ids": b"1234" * 3}), infer({"output_ids": b""}), last)) == Answer(
        [10], [3]
    )
    assert read(plain, received(last)) == Answer([], None, "")
    assert plain.text(received(text("a"), last, text("b"))) == "ab"
    assert plain.text(received(text("a"), b"\xff\xff\xff")) == ""
    ids = infer({"output_ids": struct.pack("<2i", 7, -1)})
    assert engine.text(received(ids, infer({"output_ids": b"12345"}), last), str) == "[7, -1, 875770417]"
    assert counted.text(received(text("a", 1), text("", 0), text("\U0001f600", 2), last)) == "a\U0001f600"


def test_a_character_over_two_responses() -> None:
    """A token may be a part of one; only the whole is text."""
    halves = [infer({"text_output": triton.pack_strings([piece])}) for piece in (b"\xc3", b"\xa9")]
    codec = TritonGrpc(TEXT_MODEL, tokenize)
    assert read(codec, received(*halves, infer({}, final=True))) == Answer([10, 20], None, "é")


@pytest.mark.parametrize(
    ("messages", "kind", "telling"),
    [
        ([text("a", 1)], "TruncatedStream", "it ended after 1 responses without a final one"),
        ([], "TruncatedStream", "after 0 responses"),
        ([text("a", 1), infer({}, error="in ensemble, engine died")], "ServerError", "in ensemble, engine died"),
        ([b"\xff\xff\xff"], "MalformedResponse", ""),
        ([infer({"num_output_tokens": b"\1\0\0\0"}, final=True)], "MalformedResponse", "text_output"),
        ([text("a", final=True)], "MalformedResponse", "num_output_tokens"),
        ([infer({"text_output": b"", "num_output_tokens": b"\1"})], "MalformedResponse", ""),
    ],
)
def test_what_is_no_answer_over_grpc(messages: list[bytes], kind: str, telling: str) -> None:
    found = read(TritonGrpc(COUNTED, tokenize), received(*messages))
    assert found[0] == kind
    assert telling in str(found[1])


@pytest.mark.parametrize("data", [b"", b"\5\0\0\0a", triton.pack_strings(["a", "b"]), b"\1"])
def test_a_text_that_is_none_over_grpc(data: bytes) -> None:
    found = read(TritonGrpc(TEXT_MODEL, tokenize), received(infer({"text_output": data}, final=True)))
    assert found[0] == "MalformedResponse"


def test_triton_s_answers_over_http() -> None:
    counted, plain, engine = (TritonHttp(SITE, made, tokenize) for made in (COUNTED, TEXT_MODEL, ENGINE_MODEL))
    one = {"text_output": "a", "num_output_tokens": 1}
    assert read(counted, sse(one, {"num_output_tokens": 0, "text_output": ""}, {**one, "num_output_tokens": 12})) == (
        Answer([10, 30], [1, 12])
    )
    # Also where the count comes first, and one is the beginning of another.
    first = [{"num_output_tokens": count, "text_output": "a"} for count in (1, 12, 1, 1, 0)]
    assert read(counted, sse(*first)) == Answer([10, 20, 30, 40], [1, 12, 1, 1])
    # Triton unwraps what holds one element; other servers do not.
    assert read(counted, sse({"num_output_tokens": [3], "text_output": ["a"]})) == Answer([10], [3])
    # Words of an answer are not its count.
    assert read(counted, sse({"text_output": '"num_output_tokens":7,"error":', "num_output_tokens": 2})) == (
        Answer([10], [2])
    )
    assert read(plain, sse({"text_output": "a"}, {"text_output": ""}, {"text_output": "é"})) == (
        Answer([10, 30], None, "aé")
    )
    assert read(engine, sse({"output_ids": 5}, {"output_ids": [5, 6]}, {"output_ids": []})) == Answer([10, 20], [1, 2])
    assert read(counted, sse()) == Answer([], [])
    assert counted.text(sse(one, one)) == plain.text(sse(one, one)) == "aa"
    assert counted.text(sse(one, {"error": "x"})) == engine.text(sse({"output_ids": 5})) == ""
    assert engine.text(sse({"output_ids": 5}, {"output_ids": [6, "7", None, 8]}), str) == "[5, 6, 8]"
    assert counted.text(sse(one), str) == "a"


def test_openai_s_answers() -> None:
    chat, plain = (OpenAiHttp(SITE, "m", chat=chat) for chat in (True, False))
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    words = [{"choices": [{"delta": {"content": word}}]} for word in ("a", "é")]
    thought = {"choices": [{"delta": {"reasoning_content": "hm", "content": None}}]}
    end = {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": None}
    usage: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}}
    assert read(chat, sse(role, thought, *words, end, usage, "[DONE]")) == Answer(
        [20, 30, 40], None, "hmaé", 9, 5, ended=True
    )
    usage["usage"] = {"completion_tokens": 9}
    assert read(chat, sse(*words, usage, "[DONE]")) == Answer([10, 20], None, "aé", 9)
    assert read(chat, sse(role, *words, end, "[DONE]")) == Answer([20, 30], None, "aé", ended=True)
    assert read(plain, sse(*({"choices": [{"text": word}]} for word in ("", "a", "", "b")), "[DONE]")) == (
        Answer([20, 30, 40], None, "ab", None)
    )
    assert read(plain, sse("[DONE]")) == Answer([], None, "", None)
    assert chat.text(sse(*words, "[DONE]")) == "aé"
    assert chat.text(sse(*words)) == ""


def delta(finish: str | None = None, **said: Any) -> dict[str, Any]:
    return {"choices": [{"delta": said, "finish_reason": finish}]}


def counted(tokens: int, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": tokens, **more}}


def test_tokens_without_a_text_are_responses() -> None:
    """vLLM sends a chunk without a text for a special token and for a part of a character."""
    role, word, empty = delta(role="assistant", content=""), delta(content="a"), delta(content="")
    assert read(CODECS["chat"], sse(role, word, empty, word, empty, delta("length"), counted(4), "[DONE]")) == (
        Answer([20, 30, 40, 50], None, "aa", 4)
    )
    # The last token's chunk has the reason of the end, with a text or without one.
    last = delta("length", content="a")
    assert read(CODECS["chat"], sse(role, word, last, counted(2), "[DONE]")) == Answer([20, 30], None, "aa", 2)
    last = delta("length", content="")
    assert read(CODECS["chat"], sse(role, word, last, counted(2), "[DONE]")) == Answer([20, 30], None, "a", 2)
    assert read(CODECS["chat"], sse(role, word, last, counted(1), "[DONE]")) == Answer([20], None, "a", 1)
    # Our gateway ends an answer so over /v1/completions: a response before had two tokens.
    two, end = ({"choices": [{"text": text, "finish_reason": why}]} for text, why in (("ab", None), ("", "length")))
    assert read(CODECS["completions"], sse(two, end, counted(2), "[DONE]")) == Answer([10], None, "ab", 2)
    thoughts = [delta(**{name: ""}) for name in ("reasoning", "reasoning_content")]
    found = read(CODECS["chat"], sse(role, delta(reasoning="b", reasoning_content="b"), *thoughts, "[DONE]"))
    assert found == Answer([20, 30, 40], None, "b")


def test_tool_calls_are_tokens_too() -> None:
    def part(**function: str) -> dict[str, Any]:
        return delta(tool_calls=[{"index": 0, "function": function}])

    role = delta(role="assistant", content=None, tool_calls=[])
    begun, empty, rest = part(name="f", arguments=""), part(arguments=""), part(arguments="{}")
    exchange = sse(role, begun, empty, rest, delta("tool_calls"), counted(3), "[DONE]")
    assert read(CODECS["chat"], exchange) == Answer([20, 30, 40], None, "f{}", 3, ended=True)
    assert read(CODECS["chat"], sse(delta(tool_calls=5), "[DONE]"))[0] == "MalformedResponse"


def test_reasoning_that_is_not_streamed_came_in_no_response() -> None:
    def unstreamed(usage: dict[str, Any], *chunks: dict[str, Any]) -> int:
        found = read(CODECS["chat"], sse(*chunks, delta(content="a"), usage, "[DONE]"))
        assert isinstance(found, Answer)
        return found.unstreamed

    usage = counted(9, completion_tokens_details={"reasoning_tokens": 8})
    assert unstreamed(usage) == 8
    assert unstreamed(usage, delta(reasoning_content="b")) == 0
    assert unstreamed(counted(5, completion_tokens_details={"reasoning_tokens": 8})) == 5
    assert unstreamed(counted(9, completion_tokens_details=None)) == 0


def test_a_conversation_goes_on_without_the_reasoning() -> None:
    """Chat templates leave out the reasoning of earlier turns, as chat clients do."""
    exchange = sse(
        delta(reasoning="why"), delta(content="so"), delta(tool_calls=[{"function": {"name": "f"}}]), "[DONE]"
    )
    assert (CODECS["chat"].text(exchange), CODECS["chat"].content(exchange)) == ("whysof", "so")
    assert CODECS["chat"].content(sse(delta(content="so"))) == ""
    assert CODECS["http"].content(sse({"text_output": "so", "num_output_tokens": 1})) == "so"
    assert TritonGrpc(TEXT_MODEL, tokenize).content(received(text("so"))) == "so"


ODD = [1, None, [], "x", True, [1], {"error": None}, {"choices": None}, {"choices": 1}, {"choices": [None]}]


@pytest.mark.parametrize(
    ("codec", "event", "kind"),
    [
        *((codec, event, None) for codec in ("http", "engine", "completions", "chat") for event in ODD),
        *((codec, "{", "MalformedResponse") for codec in ("http", "engine", "completions", "chat")),
        ("http", {"error": "died"}, "ServerError"),
        ("http", {"error": "died", "num_output_tokens": 3}, "ServerError"),
        ("http", {"text_output": "a"}, None),
        ("http", {"text_output": ["a", "b"]}, "MalformedResponse"),
        ("http", {"text": "a"}, "MalformedResponse"),
        ("completions", {"error": {"message": "died", "code": 5}}, "ServerError"),
        ("completions", {"error": "died"}, "ServerError"),
        ("completions", {"error": {}}, "MalformedResponse"),
        ("completions", {"choices": [], "usage": 5}, "MalformedResponse"),
        ("completions", {"object": "error", "message": "died"}, "ServerError"),
        ("completions", {"choices": [], "usage": {"completion_tokens": -3}}, "MalformedResponse"),
        ("completions", {"choices": [], "usage": {"completion_tokens": 4.9}}, "MalformedResponse"),
        ("completions", {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": -1}}, "MalformedResponse"),
        ("completions", {"choices": [{"text": 5}]}, "MalformedResponse"),
        ("chat", {"choices": [{"delta": {"content": 5}}]}, "MalformedResponse"),
        ("chat", {"choices": [{"delta": "a"}]}, "MalformedResponse"),
        ("chat", {}, "MalformedResponse"),
    ],
)
def test_what_is_no_answer_over_http(codec: str, event: Any, kind: str | None) -> None:
    found = read(CODECS[codec], sse(event, *(["[DONE]"] if codec in ("completions", "chat") else [])))
    if kind is None:
        assert isinstance(found, Answer) or found[0] in ("MalformedResponse", "ServerError")
    else:
        assert found[0] == kind


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": [{"index": 0, "content_filter_offsets": {}}]},
        {"choices": [{"delta": None}]},
        {"choices": [{"delta": {"content": None}}], "error": None},
        {"choices": [], "usage": {"completion_tokens": None}},
        {"choices": [], "usage": {"prompt_tokens": 3}},
        "",
    ],
    ids=["filter", "no delta", "no error", "no count", "prompt alone", "empty"],
)
def test_what_servers_send_besides_tokens_is_none_and_no_fault(odd: Any) -> None:
    word: dict[str, Any] = {"choices": [{"delta": {"content": "a"}}]}
    usage = {"usage": {"completion_tokens": 2.0, "prompt_tokens": 3}}
    found = read(CODECS["chat"], sse(word, odd, word, usage, "[DONE]"))
    assert found == Answer([10, 30], None, "aa", 2, 3)


def test_what_a_model_thinks_are_tokens_too() -> None:
    words = [{"choices": [{"delta": {"content": "", name: "a"}}]} for name in ("reasoning", "reasoning_content")]
    assert read(CODECS["chat"], sse(*words, "[DONE]")) == Answer([10, 20], None, "aa", None)


CODECS: dict[str, Codec] = {
    "http": TritonHttp(SITE, COUNTED, tokenize),
    "engine": TritonHttp(SITE, ENGINE_MODEL, tokenize),
    "completions": OpenAiHttp(SITE, "m", chat=False),
    "chat": OpenAiHttp(SITE, "m", chat=True),
}
KEYS = st.sampled_from([
    "error", "message", "text_output", "num_output_tokens", "output_ids", "choices", "text", "delta", "content",
    "reasoning_content", "usage", "completion_tokens",
])  # fmt: skip
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | st.sampled_from(["", "a", "[DONE]"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=3), st.sampled_from(sorted(CODECS)))
def test_no_answer_over_http_can_break_the_reader(events: list[Any], name: str) -> None:
    exchange = sse(*events, "[DONE]")
    found = read(CODECS[name], exchange)
    if isinstance(found, Answer):
        assert set(found.stamps_ns) <= set(exchange.stamps)
        assert found.tokens is None or len(found.tokens) == len(found.stamps_ns)
    assert isinstance(CODECS[name].text(exchange), str)


@given(st.lists(st.sampled_from([text("a", 1), text("b"), infer({"output_ids": b"12345"}), infer({}, final=True)]),
                max_size=4), st.data())  # fmt: skip
def test_no_answer_over_grpc_can_break_the_reader(messages: list[bytes], data: Any) -> None:
    for made in (COUNTED, TEXT_MODEL, ENGINE_MODEL):
        damaged = [bytearray(message) for message in messages]
        for message in damaged:
            for _ in range(data.draw(st.integers(0, 2))):
                message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
        exchange = received(*map(bytes, damaged))
        codec = TritonGrpc(made, tokenize)
        found = read(codec, exchange)
        assert isinstance(found, Answer) or found[0] in ("MalformedResponse", "ServerError", "TruncatedStream")
        assert isinstance(codec.text(exchange), str)
