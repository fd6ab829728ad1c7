"""Engines for prompts and engines for answers: the least of both sides, and the KV cache between them."""

from __future__ import annotations

import pytest

from tests.unit.planner.test_advice import question
from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.load.work import Work
from trtpipe.pipeline.planner.advice import advise
from trtpipe.pipeline.planner.cost import all_reduce
from trtpipe.pipeline.planner.disaggregation import disaggregate, transfer_ms
from trtpipe.pipeline.planner.efficiency import load_efficiency

LONG = Work(input_tokens=4000, output_tokens=100)


def test_a_split_serves_what_its_slower_side_does() -> None:
    found = advise(question("llama3-8b", "h100", "ttft:600ms", "tpot:12ms", work=LONG, tps=(1,)))
    made = disaggregate(found, 4)
    ways = {(one.prompts, one.answers): one for one in made}
    assert set(ways) == {(1, 0), (1, 1), (1, 2), (2, 1), (1, 3), (3, 1)}
    of_prompts, of_answers = ways[1, 1].of_prompts.rate, ways[1, 1].of_answers.rate
    for (n, m), one in ways.items():
        if m:
            assert one.rate == min(n * of_prompts, m * of_answers)
            assert one.gpus == n + m
    # Prompts of 4,000 tokens lengthen the steps of those that decode beside them.
    assert ways[1, 0].rate == found.candidates[0].rate
    assert made[0].answers
    assert made[0].per_gpu > ways[1, 0].per_gpu


def test_the_kv_cache_passes_over_the_link() -> None:
    (one,) = advise(question("llama3-8b", "h100", tps=(1,), dtypes=("bf16",))).candidates
    assert one.option is not None
    # 131,072 bytes a token at 0.75 of NVLink's 450 GB/s.
    assert transfer_ms(one.option, 4000) == pytest.approx(4000 * 131_072 / (0.75 * 450e9) * 1e3)
    link = all_reduce(one.gpu, 2, load_efficiency())
    assert transfer_ms(one.option, 1) == pytest.approx(131_072 * link.ring_byte_s * 1e3)


def test_what_cannot_be_split() -> None:
    found = advise(question("llama3-8b", "h100", "latency:9s", tps=(1,)))
    with pytest.raises(UsageError, match="has no request_latency"):
        disaggregate(found, 4)
    found = advise(question("llama3-8b", "h100", tps=(2,)))
    with pytest.raises(UsageError, match="1 GPUs hold no engine of 2 x h100"):
        disaggregate(found, 1)
    with pytest.raises(UsageError, match="--disaggregated is -1"):
        disaggregate(found, -1)
    found = advise(question("llama3.2-1b", "h100-mig-1g.10gb"))
    with pytest.raises(UsageError) as error:
        disaggregate(found, 4)
    assert str(error.value) == (
        "--disaggregated is for whole GPUs: no KV cache passes between MIG slices (h100-mig-1g.10gb); leave it out, or "
        "plan for whole GPUs"
    )


def test_no_kv_cache_passes_between_hosts() -> None:
    for gpu, gpus, told in (
        ("gh200", 1, "1 gh200: the network between hosts is not predicted; leave it out"),
        ("gh200", 4, "1 gh200: the network between hosts is not predicted; leave it out"),
        ("gh200-144gb", 4, "2 gh200-144gb: the network between hosts is not predicted; give 2 or fewer"),
        ("h100", 16, "8 h100: the network between hosts is not predicted; give 8 or fewer"),
    ):
        found = advise(question("llama3-8b", gpu, tps=(1,)))
        with pytest.raises(UsageError) as error:
            disaggregate(found, gpus)
        assert str(error.value) == (
            f"--disaggregated is for the GPUs of one host, and a host has {told}, or write host_gpus into "
            f"gpus/{gpu}.yaml of TRTPIPE_HOME"
        )
    assert disaggregate(advise(question("llama3-8b", "gh200-144gb", tps=(1,))), 2)
