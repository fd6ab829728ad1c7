"""Parts of the gateway without a server: options, templates, stop strings, requests, statuses, counters."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.factories import write_tokenizer
from tests.support.gateways import chat
from tests.unit.gateway.conftest import options
from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.pipeline.gateway import access, shared_counters, supervisor
from trtpipe.pipeline.gateway.failure import Failure, of_status, of_text
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.gateway.requests import ChatRequest, CompletionRequest, parse
from trtpipe.pipeline.gateway.shared_counters import ROW_BYTES, SharedCounters
from trtpipe.pipeline.gateway.stops import Stops
from trtpipe.pipeline.net.h2.status import Code, Status


def test_options_survive_the_way_to_a_worker_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("api_keys_file", "tls_cert", "tls_key")}
    models = (ServedModel(name="a", tokenizer=tmp_path, aliases=("b",)),)
    whole = options(tmp_path, models=models, cors_origins=("*",), port=1, **files)
    assert GatewayOptions.from_json(whole.to_json()) == whole
    assert whole.url == "https://127.0.0.1:1"
    for fields in (
        {"models": ()},
        {"models": (whole.models[0],) * 2},
        {"models": (ServedModel(name="a", tokenizer=tmp_path, aliases=("a",)),)},
        {"models": (ServedModel(name="", tokenizer=tmp_path),)},
        {"cors_origins": ("app.example",)},
        {"cors_origins": ("https://app.example/",)},
        {"grpc_url": "localhost"},
        {"grpc_url": "localhost:70000"},
        {"grpc_url": "http://localhost:1/x"},
        {"tls_cert": None},
        {"workers": 0},
        {"workers": 100_000},
        {"port": 70_000},
    ):
        with pytest.raises(UsageError):
            GatewayOptions(**{**whole.__dict__, **fields})
    assert options(tmp_path, host="::1").url == "http://[::1]:9000"
    assert options(tmp_path, host="0.0.0.0").url == "http://0.0.0.0:9000"
    both = {"tls_cert": tmp_path / "c.pem", "tls_key": tmp_path / "k.pem"}
    assert options(tmp_path, host="0.0.0.0", **both).url == "https://127.0.0.1:9000"


def test_a_file_of_keys_that_grew_after_its_check_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "check", lambda options: None)
    keys = tmp_path / "keys"
    keys.touch()
    os.truncate(keys, access.MAX_BYTES + 1)
    with pytest.raises(InputDataError, match=f"{keys} cannot be read: it has more than 1,048,576 bytes"):
        supervisor._copy_files(options(tmp_path, api_keys_file=keys))


def test_a_model_without_a_chat_template_and_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    from trtpipe.pipeline.gateway.text import Text

    with pytest.raises(InputDataError, match="holds no tokenizer"):
        Text(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "do_sample": true}')
    text = Text(tmp_path)
    assert text.defaults == {"temperature": 0.6, "top_p": 0.9}
    with pytest.raises(Failure, match="no chat template"):
        text.render([{"role": "user", "content": "x"}])


@given(
    text=st.text("abc", max_size=30),
    words=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_strings_are_found_however_the_text_is_cut(text: str, words: list[str], cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    stops = Stops(tuple(words))
    out = ""
    found = False
    for piece in pieces:
        more, found = stops.push(piece)
        out += more
        if found:
            break
    if not found:
        out += stops.flush()
    # The first to be complete ends the text; among those of one piece the one that begins first.
    ends = [text.find(word) for word in words if word in text]
    assert found == bool(ends)
    if not ends:
        assert out == text
    else:
        assert text.startswith(out)
        assert not any(word in out for word in words)
        assert len(out) >= min(ends)


def test_stop_strings_that_end_in_skipped_text_do_not_count() -> None:
    stops = Stops(("ab", "xabc"))
    assert (stops.skip("ab xab"), stops.push("d"), stops.flush()) == ("ab ", ("xabd", False), "")
    assert (stops.skip("ab xab"), stops.push("c")) == ("ab ", ("", True))
    assert (stops.skip("a"), stops.push("b")) == ("", ("", True))
    assert Stops(()).skip("ab") == "ab"


def test_requests_are_what_they_say() -> None:
    asked = parse(json.dumps(chat(stop="x", logprobs=True)).encode(), ChatRequest)
    assert isinstance(asked, ChatRequest)
    assert (asked.stops(), asked.wants_log_probs(), asked.include_usage) == (("x",), (True, 0), False)
    completion = parse(b'{"model":"m","prompt":[[1],[2,3]]}', CompletionRequest)
    assert isinstance(completion, CompletionRequest)
    assert completion.prompts(2) == [[1], [2, 3]]


def test_every_status_has_an_answer() -> None:
    for code in Code:
        assert 400 <= of_status(Status(code, "words")).status < 600
        assert of_status(Status(code, "words", lost=True)).status in (503, 504)
    assert of_text("model is not ready").status == 503
    assert of_text("guided_decoding_guide: this grammar cannot be used: queue is not ready").status == 400
    assert of_text("vLLM refuses it: min_tokens must be less, and the queue is not ready").status == 400
    assert of_text("in ensemble 'ensemble', vLLM refuses it: temperature must be non-negative").status == 400
    assert of_text("no adapter has the number 7").code == "model_not_found"


def test_every_refusal_is_counted_by_its_own_status() -> None:
    """A status that has no counter would count as a fault of the server."""
    sources = Path(shared_counters.__file__).parent.glob("*.py")
    raised = {int(status) for path in sources for status in re.findall(r"\bFailure\(\s*(\d{3})\b", path.read_text())}
    assert {401, 413, 415, 504} <= raised <= set(shared_counters.STATUSES)


def test_boards_add_up() -> None:
    file = os.memfd_create("board")
    os.truncate(file, ROW_BYTES * 2)
    first, second = SharedCounters(file, 0, 2), SharedCounters(file, 1, 2)
    first.answered("chat", 200)
    second.answered("chat", 200)
    second.answered("completions", 501)
    second.answered("completions", 418)
    second.observe("first_token", 0.03)
    second.observe("inter_token", 0.02, 3)
    first.observe("inter_token", 7.0)
    second.add("running")
    second.add("waiting")
    for board in (first, second):
        text = board.text()
        assert 'requests_total{endpoint="chat",status="200"} 2' in text
        assert 'requests_total{endpoint="completions",status="500"} 1' in text
        assert 'requests_total{endpoint="completions",status="501"} 1' in text
        assert 'first_token_seconds_bucket{le="0.025"} 0' in text
        assert 'first_token_seconds_bucket{le="0.05"} 1' in text
        assert 'inter_token_seconds_bucket{le="0.015"} 0' in text
        assert 'inter_token_seconds_bucket{le="0.02"} 3' in text
        assert 'inter_token_seconds_bucket{le="2.5"} 3' in text
        assert 'inter_token_seconds_bucket{le="+Inf"} 4' in text
        assert "inter_token_seconds_count 4\n" in text
        assert "inter_token_seconds_sum 7.06\n" in text
        assert "trtpipe_gateway_running 1" in text
        assert "trtpipe_gateway_waiting 1" in text
    assert (first.own("running"), second.own("running")) == (0, 1)
    renewed = SharedCounters(file, 1, 2)
    os.close(file)
    # A worker that is replaced answers nothing any more.
    assert (renewed.total("running"), renewed.total("waiting")) == (0, 0)
