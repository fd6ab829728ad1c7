"""A real tritonserver with our repository and our `tensorrtllm` backend, as clients meet it."""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.e2e.conftest import USED, Served
from tests.e2e.smollm2.conftest import TOKENS

pytestmark = pytest.mark.real


def grpc_stream(served: Served, text: str, model: str = "ensemble") -> str:
    from trtpipe.engines.sampling import SamplingParams
    from trtpipe.pipeline.serving.generate import stream

    return "".join(stream(served.grpc, text, SamplingParams(), model=model, max_tokens=TOKENS))


def pieces(events: Iterator[dict[str, Any]]) -> list[str]:
    return [event["text_output"] for event in events]


def http_stream(served: Served, text: str, model: str = "ensemble") -> str:
    return "".join(pieces(served.stream(model, text_input=text, max_tokens=TOKENS)))


def http_whole(served: Served, text: str, model: str = "ensemble") -> str:
    return str(served.generate(model, text_input=text, max_tokens=TOKENS)["text_output"])


@pytest.mark.parametrize(
    ("ask", "model"),
    [
        (grpc_stream, "tensorrt_llm_bls"), (http_stream, "ensemble"), (http_whole, "tensorrt_llm_bls"),
        pytest.param(grpc_stream, "ensemble", marks=pytest.mark.slow),
        pytest.param(http_stream, "tensorrt_llm_bls", marks=pytest.mark.slow),
        pytest.param(http_whole, "ensemble", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_greedy_text_is_that_of_transformers(
    served: Served, texts: tuple[str, ...], expected_texts: list[str], ask: Callable[..., str], model: str
) -> None:
    """Both protocols, streamed and whole, through both front models, eight requests in flight together."""
    with ThreadPoolExecutor(len(texts)) as pool:
        assert list(pool.map(lambda text: ask(served, text, model), texts)) == expected_texts


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Ελλάδα " * 4, "Ελλάδα Ελλάδα Ελλάδα Ελ"),
        pytest.param("😀" * 10, "😀" * 8, marks=pytest.mark.slow),  # the next test has some
    ],
)
def test_streamed_text_keeps_spaces_and_characters_that_span_tokens(served: Served, prompt: str, answer: str) -> None:
    """The model goes on with what it sees; an emoji is three tokens here, and Greek has spaces before words."""
    ask: dict[str, Any] = {"text_input": prompt.strip(), "max_tokens": 24}
    with ThreadPoolExecutor(2) as pool:
        asked = served.stream(id=uuid.uuid4().hex, **ask), served.stream("tensorrt_llm_bls", **ask)
        through_ensemble, through_bls = pool.map(pieces, asked)
    assert "".join(through_ensemble).strip() == answer
    assert through_bls[:24] == through_ensemble
    # Of a letter's first byte, and of the space that its token may have before it.
    assert {"", " "} & set(through_ensemble), "no piece was held back: the test has lost its point"


def test_a_character_cut_by_max_tokens(served: Served) -> None:
    """It is U+FFFD, as decoding has it; the next answer of the same id has none of it."""
    ask: dict[str, Any] = {"text_input": "😀" * 10, "max_tokens": 11}
    with ThreadPoolExecutor(3) as pool:
        whole = pool.submit(served.generate, **ask)
        through_bls, through_ensemble = pool.map(
            pieces, (served.stream("tensorrt_llm_bls", **ask), served.stream(id="cut", **ask))
        )
    assert whole.result()["text_output"] == "😀" * 3 + "�"
    assert "".join(through_bls) == "".join(through_ensemble) == "😀" * 3 + "�"
    assert served.generate(id="cut", **ask)["text_output"] == "😀" * 3 + "�"


def test_a_burst_of_short_requests_leaves_the_server_well(served: Served) -> None:
    """Requests that end while the backend looks for clients that went away: asking too late would crash the server."""
    ask: dict[str, Any] = {"text_input": "Water boils at", "max_tokens": 2, "return_num_output_tokens": True}
    with ThreadPoolExecutor(16) as pool:
        counts = list(pool.map(lambda _: served.generate(**ask)["num_output_tokens"], range(64)))
    assert counts == [2] * 64
    assert served.gauges()[USED] == 0


def test_sampling_options_do_what_they_say(served: Served) -> None:
    ask: dict[str, Any] = {"text_input": "The capital of France is", "max_tokens": 5}
    hot: list[dict[str, Any]] = [{"temperature": 1.5, "top_k": 50, "seed": seed} for seed in (7, 7, *range(5))]
    greedily: list[dict[str, Any]] = [
        {}, {"bad_words": [" Paris"]}, {"stop_words": [" Paris"]},
        {"embedding_bias_words": [" Rome"], "embedding_bias_weights": [100.0]},
    ]  # fmt: skip
    with ThreadPoolExecutor(len(hot)) as pool:
        first, again, *others = pool.map(lambda more: served.generate(**ask, **more)["text_output"], hot)
        greedy, without, stopped, biased = pool.map(
            lambda more: served.generate(**ask, **more)["text_output"], greedily
        )
    assert first == again
    assert len(set(others)) > 1
    assert "Paris" in greedy
    assert "Paris" not in without
    assert stopped == greedy[: greedy.index(" Paris") + len(" Paris")]
    assert biased.startswith(" Rome")


def test_the_model_ends_at_its_end_of_text_unless_told_otherwise(served: Served, tokenizer: Tokenizer) -> None:
    ask: dict[str, Any] = {
        "text_input": "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n",
        "max_tokens": 32,
    }
    counted: dict[str, Any] = {"return_num_output_tokens": True, "return_num_input_tokens": True}
    with ThreadPoolExecutor(3) as pool:
        options: list[dict[str, Any]] = [{}, {"end_id": -1}, {"min_tokens": 20}]
        ended, endless, late = pool.map(lambda more: served.generate(**ask, **counted, **more), options)
    assert ended["num_output_tokens"] < 32
    assert ended["num_input_tokens"] == len(tokenizer.encode(ask["text_input"]).ids)
    assert endless["num_output_tokens"] == 32
    assert late["num_output_tokens"] >= 20
    assert endless["text_output"].startswith(ended["text_output"])


def test_log_probs_come_when_asked_for(served: Served) -> None:
    ask: dict[str, Any] = {"text_input": "The capital of France is", "max_tokens": 3}
    assert "output_log_probs" not in served.generate(**ask)
    reply = served.generate(**ask, return_log_probs=True)
    each = np.array(reply["output_log_probs"])
    assert each.shape == (3,)
    assert (each <= 0).all()
    # normalize_log_probs, the default: the mean
    assert reply["cum_log_probs"] == pytest.approx(each.mean(), rel=1e-5)


def test_a_prompt_s_beginning_is_reused(served: Served) -> None:
    ask: dict[str, Any] = {"text_input": "A long beginning, " * 40 + str(time.time_ns()), "max_tokens": 2}
    fresh = served.generate(**ask, return_perf_metrics=True)
    again = served.generate(**ask, return_perf_metrics=True)
    assert again["kv_cache_reused_blocks"] >= 4
    assert again["kv_cache_reused_blocks"] > fresh["kv_cache_reused_blocks"]
    assert again["text_output"] == fresh["text_output"]


@pytest.mark.parametrize(
    ("body", "telling"),
    [
        ({"text_input": "word " * 2000, "max_tokens": 4}, "max_input_len"),
        ({"text_input": "hello", "max_tokens": 5000}, "max_seq_len"),
        ({"text_input": "hello", "max_tokens": 0}, "max_tokens"),
        ({"text_input": "", "max_tokens": 4}, "the prompt is empty"),
        ({"text_input": "hello", "max_tokens": 4, "beam_width": 2}, "beam_width"),
        ({"text_input": "hello", "max_tokens": 4, "guided_decoding_guide": "x"}, "guided_decoding_guide"),
    ],
)
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_an_impossible_request_gets_a_named_error(
    served: Served, body: dict[str, Any], telling: str, model: str
) -> None:
    assert telling in served.generate(model, **body)["error"]


def test_a_stop_request_ends_the_one_of_its_id(served: Served, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Count: one, two,").ids
    seen: list[dict[str, Any]] = []
    begun = threading.Event()

    def follow() -> None:
        ask = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 800, "end_id": -1}
        for event in served.stream("tensorrt_llm", id="to-be-stopped", streaming=True, **ask):
            seen.append(event)
            begun.set()

    thread = threading.Thread(target=follow)
    thread.start()
    assert begun.wait(60)
    reply = served.generate(
        "tensorrt_llm", id="to-be-stopped", stop=True, input_ids=[0], input_lengths=1, request_output_len=1
    )
    assert "error" not in reply
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert len(seen) < 700
    assert "error" not in seen[-1]


def test_a_request_with_several_rows_and_copies_answers_each(served: Served, tokenizer: Tokenizer) -> None:
    """Over gRPC, where a request can carry a batch: every row and copy ends, named by its indexes."""
    import queue

    from tritonclient.grpc import InferenceServerClient, InferInput

    rows = [tokenizer.encode(text).ids for text in ("The capital of France is", "Water")]
    longest = max(map(len, rows))
    arrays = {
        "input_ids": np.array([row + [0] * (longest - len(row)) for row in rows], np.int32),
        "input_lengths": np.array([[len(row)] for row in rows], np.int32),
        "request_output_len": np.array([[4], [4]], np.int32),
        "num_return_sequences": np.array([[2], [2]], np.int32),
    }
    inputs = []
    for name, array in arrays.items():
        item = InferInput(name, list(array.shape), "INT32")
        item.set_data_from_numpy(array)
        inputs.append(item)
    arrived: queue.Queue[Any] = queue.Queue()
    with InferenceServerClient(served.grpc) as client:
        client.start_stream(callback=lambda result, error: arrived.put((result, error)))
        client.async_stream_infer("tensorrt_llm", inputs, enable_empty_final_response=True)
        got: dict[tuple[int, int], list[int]] = {}
        while len(got) < 4:
            result, error = arrived.get(timeout=60)
            assert error is None
            place = (int(result.as_numpy("batch_index")[0, 0]), int(result.as_numpy("sequence_index")[0, 0]))
            got[place] = result.as_numpy("output_ids").reshape(-1).tolist()
        client.stop_stream()
    assert set(got) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert got[0, 0] == got[0, 1] != got[1, 0]
    assert " Paris" in tokenizer.decode(got[0, 0])


def test_generate_streams_an_answer_through_the_chat_template(served: Served) -> None:
    chat = served.cli.ok("generate", "What is the capital of France?", "--server", served.name)
    assert chat.out == "The capital of France is Paris.\n"
    raw = served.cli.ok("generate", "The capital of France is", "--raw", "--max-tokens", "3", "--server", served.name)
    assert raw.out.startswith(" Paris")
    # "Paris" is no token of the answer: the engine does not see it.
    stopped = served.cli.ok("generate", "The capital of France is", "--raw", "--stop", "Paris", "--server", served.name)
    assert stopped.out == " \n"


def test_chat_answers_each_line_of_its_input(served: Served) -> None:
    chat = served.cli.run(
        "chat", "--server", served.name, "--temperature", "0", text="What is the capital of France?\n"
    )
    assert (chat.status, chat.out) == (0, "The capital of France is Paris.\n")


def test_bench_writes_a_report_of_triton_and_of_the_gateway(served: Served, tmp_path: Path) -> None:
    """A busy machine makes a run INVALID (status 5), and says so; what was measured is there all the same."""
    report = tmp_path / "report.json"
    done = served.cli.run(
        "bench", "--server", served.name, "--protocol", "grpc,chat", "--concurrency", "2",
        "--requests", "4", "--output-tokens", "4", "--input-tokens", "16", "--report", str(report),
    )  # fmt: skip
    assert done.status in (0, 5), done.err
    value = json.loads(report.read_text())
    assert (done.status == 0) == value["verdict"]["valid"], done.err
    protocols = ("grpc", "chat")
    load_points = [(load_point["protocol"], load_point["load"]["concurrency"]) for load_point in value["levels"]]
    assert load_points == [(protocol, 2) for protocol in protocols]
    for load_point in value["levels"]:
        assert load_point["requests"]["succeeded"] == 4, load_point["errors"]
        assert load_point["wrong_length"] == 0
        assert load_point["token_count_source"] == ("server" if load_point["protocol"] == "grpc" else "usage")
        assert load_point["metrics"]["time_to_first_token"]["p50"] > 0
    assert all(word in done.out for word in ("TTFT", "ITL", "TPOT", "tokens/s", "requests/s"))
    # What was measured, down to its bytes.
    digests = [value["repository_sha256"], value["engine"]["content"], value["engine"]["checkpoint"]]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert len(set(digests)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("connections", [1, 3])
def test_the_reader_of_bench_keeps_to_windows_with_a_real_triton(
    served: Served, smollm2_hf: Path, monkeypatch: pytest.MonkeyPatch, connections: int
) -> None:
    """Answers larger than a stream's window, and a prompt larger than Triton's: it is refused for its length, which
    Triton can say only of what it has read whole.
    """
    from trtpipe.engines.errors import StageFailed
    from trtpipe.pipeline.bench.load.loads import Closed
    from trtpipe.pipeline.bench.load.work import Work
    from trtpipe.pipeline.bench.options import BenchOptions, Target
    from trtpipe.pipeline.bench.protocols.connect import Wiring
    from trtpipe.pipeline.bench.run import run
    from trtpipe.pipeline.net.h2 import connection, frames

    monkeypatch.setattr(connection, "STREAM_WINDOW", 2048)
    monkeypatch.setattr(connection, "CONNECTION_WINDOW", frames.DEFAULT_WINDOW + 1)

    def measure(requests: int, **work: Any) -> Any:
        options = BenchOptions(
            targets=(Target(protocol="grpc", url=served.grpc, model="ensemble"),),
            tokenizer=smollm2_hf / "tokenizer.json",
            loads=(Closed(concurrency=requests // 2, requests=requests),),
            work=Work(**work),
            wiring=Wiring(connections=connections),
        )
        return run(options, None, None)

    answered = measure(4, input_tokens=16, output_tokens=12)
    assert answered.results[0].requests["succeeded"] == 4
    assert answered.results[0].wrong_length == 0
    assert answered.endpoints[0]["connections"] == connections
    with pytest.raises(StageFailed, match="the prompt has 20000 tokens, this engine takes 512"):
        measure(4, input_tokens=20000, output_tokens=8)
