"""Sentences of a page."""

from __future__ import annotations

import pytest

from trtpipe.pipeline.pages.parts import sentence


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("no request failed", "No request failed."),
        ("undefined: no request failed", "Undefined: no request failed."),
        ("fp8-kv: build failed: no GPU", "fp8-kv: build failed: no GPU."),
        ("int4-awq: what ran held", "int4-awq: what ran held."),
        ("grpc, concurrency 1: it ended early", "grpc, concurrency 1: it ended early."),
        ("inter_token_latency could not be measured", "inter_token_latency could not be measured."),
    ],
)
def test_a_sentence_has_a_capital_unless_a_name_begins_it(words: str, shown: str) -> None:
    assert sentence(words) == shown
