"""Options that the gateway takes from a model's repository."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engines.test_passport import passport
from trtpipe.engines.errors import TrtpipeError, UsageError
from trtpipe.pipeline.serving.launch_options import (
    LaunchOptions,
    check_alone,
    gateway_model,
    gateway_options,
    require_gateway,
)
from trtpipe.pipeline.serving.ports import Endpoints
from trtpipe.pipeline.serving.servers import Served
from trtpipe.triton_repo.layout import ENGINE_FOLDER


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        ("qwen2.5-7b", None, "hermes"),
        ("meta-llama/Llama-3.1-8B-Instruct", None, "llama3_json"),
        ("qwen2.5-7b", "pythonic", "pythonic"),
        ("somebody/else", None, None),
        (None, None, None),
    ],
)
def test_the_format_of_tool_calls_is_that_of_the_model_file(
    tmp_path: Path, model: str | None, given: str | None, expected: str | None
) -> None:
    engine = tmp_path / ENGINE_FOLDER
    engine.mkdir(parents=True)
    (tmp_path / "tensorrt_llm/config.pbtxt").touch()
    limits = {"max_input_len": 8, "max_seq_len": 16}
    weights = {} if model is None else {"model": model}
    dataclasses.replace(passport(), weights=weights, build_config=limits).write(engine)
    assert gateway_model(str(tmp_path), (), given).tool_format == expected


@pytest.mark.parametrize(
    ("given", "seconds"), [({}, (600, 5)), ({"timeout_s": 60}, (60, 5)), ({"drain_s": 60}, (600, 60))]
)
def test_the_gateway_s_times_for_an_answer_are_those_of_serve(
    tmp_path: Path, given: dict[str, Any], seconds: tuple[int, int]
) -> None:
    limits = {"max_input_len": 8, "max_seq_len": 16}
    built = dataclasses.replace(passport(), build_config=limits)
    options = LaunchOptions(openai=0, **given)
    endpoints = Endpoints(host="127.0.0.1", http=1, grpc=2, metrics=3)
    served = Served(name="a", repository=tmp_path)
    chosen = gateway_options([served], [built], tmp_path, endpoints, 0, options)
    assert (chosen.timeout_s, chosen.drain_s) == seconds


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--api-keys-file", {"api_keys_file": Path("keys")}),
        ("--tls-cert", {"tls_cert": Path("cert.pem"), "tls_key": Path("key.pem")}),
        ("--served-model-name", {"model_names": ("llama",)}),
        ("--cors-origin", {"cors_origins": ("*",)}),
        ("--tool-format", {"tool_format": "hermes"}),
        ("--no-reasoning", {"reasoning": False}),
        ("--gateway-workers", {"gateway_workers": 2}),
        ("--otlp-endpoint", {"otlp_endpoint": "http://localhost:4318"}),
        ("--timeout", {"timeout_s": 60}),
    ],
)
def test_an_option_of_the_gateway_is_refused_where_none_is_started(option: str, given: dict[str, Any]) -> None:
    require_gateway(LaunchOptions(openai=0, **given))
    with pytest.raises(
        UsageError, match=f"{option} is for the gateway, and --no-openai starts none; leave out {option}"
    ):
        require_gateway(LaunchOptions(openai=None, **given))


@pytest.mark.parametrize(
    ("given", "targets", "words"),
    [
        ({"tool_format": "hermse"}, 1, "unknown format of tool calls 'hermse'; did you mean 'hermes'?"),
        ({"cors_origins": ("app.example",)}, 1, "'app.example' is not an origin"),
        ({"server": "dokcer"}, 1, "unknown server 'dokcer'; did you mean 'docker'?"),
        ({"tool_format": "hermes"}, 2, "--tool-format is for one target"),
        ({"front": "native"}, 2, "a runtime's own server is of one target"),
        ({"front": "native", "tool_format": "hermes"}, 1, "--tool-format is for the gateway"),
        ({"api_keys_file": Path("absent")}, 1, "the API keys in absent cannot be read"),
        ({"otlp_endpoint": "localhost"}, 1, "--otlp-endpoint"),
    ],
)
def test_what_is_wrong_whatever_is_served_is_refused_first(given: dict[str, Any], targets: int, words: str) -> None:
    with pytest.raises(TrtpipeError) as caught:
        check_alone(LaunchOptions(**{"openai": 0, **given}), targets)
    assert str(caught.value).startswith(words)
