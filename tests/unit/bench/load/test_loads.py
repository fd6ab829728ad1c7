"""Loads: what they refuse, what they are called, and the warm-up of a closed loop's slots."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.load.loads import Closed, Load, Open, Replay, Stage, Staged, exact

STAGES = (Stage(duration_s=10, start=0, end=4), Stage(duration_s=5, start=4, end=4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Closed(concurrency=0), "concurrency is 0; give 1 or more"),
        (lambda: Closed(concurrency=8, requests=15), "15 requests are too few for a throughput at concurrency 8; "
         "give at least 16, twice the concurrency"),
        (lambda: Closed(concurrency=1, requests=2, duration_s=1), "both requests and duration_s are given; "),
        (lambda: Closed(concurrency=1, duration_s=0), "duration_s is 0; give a positive number of seconds"),
        (lambda: Closed(concurrency=1, warmup=-1), "warmup is -1; give 0 or more"),
        (lambda: Closed(concurrency=1, ramp_s=float("nan")), "ramp_s is nan; "),
        (lambda: Open(rate=0, requests=1), "rate is 0; "),
        (lambda: Open(rate=float("inf"), requests=1), "rate is inf; "),
        (lambda: Open(rate=1), "an open loop has no end; give requests or duration_s"),
        (lambda: Open(rate=1, requests=0), "requests is 0; give 1 or more"),
        (lambda: Open(rate=1, requests=1, duration_s=1), "both requests and duration_s are given; "),
        (lambda: Open(rate=1, requests=1, arrivals="poison"), "unknown arrivals 'poison'; did you mean 'poisson'?"),
        (lambda: Open(rate=1, requests=1, burstiness=0.5), "burstiness does not apply to poisson arrivals; "),
        (lambda: Open(rate=1, requests=1, arrivals="gamma", burstiness=0), "burstiness is 0; "),
        (lambda: Open(rate=1, requests=1, max_in_flight=0), "max_in_flight is 0; "),
        (lambda: Open(rate=1, requests=1, warmup_s=1, warmup_fraction=0.1), "both warmup_s and warmup_fraction "),
        (lambda: Open(rate=1, requests=1, cooldown_fraction=1), "cooldown_fraction is 1; give 0 to below 1"),
        (lambda: Open(rate=1, requests=1, cooldown_s=-1), "cooldown_s is -1; "),
        (lambda: Stage(duration_s=0, start=1, end=1), "a stage lasts 0 s; "),
        (lambda: Stage(duration_s=1, start=-1, end=1), "a stage's rate is negative or endless; "),
        (lambda: Staged(stages=()), "the stages make no request; "),
        (lambda: Staged(stages=STAGES, warmup_s=9, cooldown_s=6), "nothing is left to measure: 9 s of warm-up and "
         "6 s of cool-down: the schedule takes 15 s; shorten them"),
        (lambda: Replay(trace=Path("x"), speedup=0), "speedup is 0; "),
        (lambda: Replay(trace=Path("x"), requests=1, duration_s=1), "both requests and duration_s are given; "),
        (lambda: Closed(concurrency=10**400), "concurrency is beyond all bounds: each is an open stream or connectio"),
        (lambda: Closed(concurrency=1, requests=10**8), "requests is 100,000,000: all are kept in memory, with their "),
        (lambda: Closed(concurrency=1, duration_s=float("inf")), "duration_s is inf; give a positive number of "),
        (lambda: Open(rate=1e300, requests=1), "rate is 1e+300; give a positive number of requests a second, at most"),
        (lambda: Open(rate=1e-300, requests=1), "the load lasts 1.2e+300 s; give a higher rate, or fewer requests"),
        (lambda: Open(rate=1e6, duration_s=1000), "the load has 1,200,000,000 requests; make it one of at most 10,000"),
        (lambda: Open(rate=1, requests=9, arrivals="gamma", burstiness=1e-300), "burstiness is 1e-300; give 0.01 to "),
        (lambda: Staged(stages=(Stage(duration_s=1e6, start=1e6, end=1e6),)), "the load has 1,000,000,000,000 "),
        (lambda: Staged(stages=STAGES * 6000), "there are 12,000 stages; give at most 10,000"),
        (lambda: Replay(trace=Path("x"), speedup=1e-300), "speedup is 1e-300; give 1e-06 to 1e+06"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("load", "label", "entry"),
    [
        (
            Closed(concurrency=16),
            "16 in flight",
            {"kind": "closed", "concurrency": 16, "warmup": 1, "cooldown": True, "ramp_s": 0.0},
        ),
        (
            Open(rate=2.5, duration_s=1, arrivals="constant", max_in_flight=9),
            "2.5 requests/s",
            {"kind": "open", "arrivals": "constant", "rate": 2.5, "max_in_flight": 9},
        ),
        (
            Open(rate=20, requests=1, arrivals="gamma", burstiness=0.5),
            "20 requests/s",
            {"kind": "open", "arrivals": "gamma", "rate": 20, "max_in_flight": None, "burstiness": 0.5},
        ),
        (
            Staged(stages=STAGES),
            "2 stages to 4 requests/s",
            {
                "kind": "open",
                "arrivals": "stages",
                "process": "poisson",
                "rate": 40 / 15,
                "stages": [{"duration_s": 10, "from": 0, "to": 4}, {"duration_s": 5, "from": 4, "to": 4}],
                "max_in_flight": None,
            },
        ),
        (
            Replay(trace=Path("a/b.jsonl"), speedup=2),
            "b.jsonl at 2 times its speed",
            {"kind": "open", "arrivals": "trace", "trace": "a/b.jsonl", "speedup": 2, "max_in_flight": None},
        ),
    ],
)
def test_a_load_point_says_what_it_is(load: Load, label: str, entry: dict[str, object]) -> None:
    assert (load.label, load.entry()) == (label, entry)
    assert json.loads(json.dumps(load.entry())) == load.entry()


def test_a_closed_loop_measures_four_requests_a_slot_and_twenty_at_least() -> None:
    assert Closed(concurrency=2).measured_requests == 20
    assert Closed(concurrency=16).measured_requests == 64
    assert Closed(concurrency=16, requests=40).measured_requests == 40
    assert Closed(concurrency=16, duration_s=3).measured_requests is None


def test_the_first_warm_up_request_of_each_slot_is_shorter_so_that_slots_do_not_end_together() -> None:
    load = Closed(concurrency=4)
    assert [load.warmup_lengths(slot, 10) for slot in range(4)] == [[10], [3, 10], [5, 10], [8, 10]]
    assert Closed(concurrency=2, warmup=2).warmup_lengths(1, 1) == [1, 1, 1]
    assert Closed(concurrency=2, warmup=0).warmup_lengths(1, 10) == []


def test_a_stage_makes_the_integral_of_its_rate_in_decimals() -> None:
    # 1.1 x 10 is 11.000000000000002 in floats, which would be a twelfth request.
    assert Stage(duration_s=10, start=1.1, end=1.1).arrivals == 11
    assert Stage(duration_s=0.1, start=0, end=0.2).arrivals == Fraction(1, 100)
    assert exact(1e-7) == Fraction(1, 10**7)
