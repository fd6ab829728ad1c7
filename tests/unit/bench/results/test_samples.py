"""Samples of prompts and answers: which are kept, and how much of them."""

from __future__ import annotations

import pytest

from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.results.samples import Samples


def asked(count: int, *, failed: tuple[int, ...] = (), open_ones: tuple[int, ...] = (), warm: int = 0) -> Samples:
    """Samples of so many requests, `r0: p0` to the last."""
    samples = Samples()
    for number in range(count):
        request = InFlightRequest(f"r{number}", b"", input_tokens=1, max_tokens=1)
        request.warmup = number < warm
        samples.note(request, f"p{number}")
        if number in failed:
            request.fail("Timeout", "late")
        elif number not in open_ones:
            request.end(1)
    return samples


@pytest.mark.parametrize(
    ("samples", "ids"),
    [
        (asked(0), []),
        (asked(2), ["r0", "r1"]),
        (asked(4), ["r0", "r1", "r2"]),
        (asked(100), ["r0", "r54", "r88"]),
        (asked(100, failed=(0, 88), open_ones=(54,)), ["r1", "r20", "r33"]),
        (asked(9, warm=3), ["r4", "r7"]),
        (asked(3, failed=(0, 1, 2)), []),
    ],
)
def test_the_first_and_two_later_ones_that_were_answered(samples: Samples, ids: list[str]) -> None:
    found = samples.read(lambda request: f"answer to {request.id}")
    assert [one["id"] for one in found] == ids
    for one in found:
        assert one["prompt"] == f"p{one['id'][1:]}"
        assert one["answer"] == f"answer to {one['id']}"


def test_long_texts_are_cut_and_half_a_surrogate_pair_can_be_written() -> None:
    samples = Samples()
    request = InFlightRequest("r", b"", input_tokens=1, max_tokens=1)
    samples.note(request, "é" * 2001)
    request.end(1)
    (found,) = samples.read(lambda _: "a\ud800b")
    assert (len(found["prompt"]), found["prompt_characters"]) == (2000, 2001)
    assert (found["answer"], found["answer_characters"]) == ("a?b", 3)
