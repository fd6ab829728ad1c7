"""Advice: what is ranked, what is refused and why, and what follows from prices and rates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trtpipe.configs.facts import find_gpu, find_shape
from trtpipe.engines.base import DataType
from trtpipe.engines.errors import UsageError
from trtpipe.engines.hf.stored import Stored
from trtpipe.engines.quantization import QuantAlgo, Quantization
from trtpipe.pipeline.bench.load.work import Sessions, SharedPrefix, Work
from trtpipe.pipeline.bench.results.slo import parse_objective
from trtpipe.pipeline.planner.advice import Advice, Candidate, Question, advise
from trtpipe.pipeline.planner.demand import Demand
from trtpipe.pipeline.planner.memory import Adapters
from trtpipe.pipeline.planner.whatif import what_ifs

SHORT = Work(input_tokens=128, output_tokens=64)
PRICES = {"a100": 1.5, "h100": 2.5, "h200": 3.5, "l4": 0.5}


def question(model: str, gpus: str, *slo: str, work: Work = SHORT, reuse: bool = False, **fields: Any) -> Question:
    return Question(
        model=model, shape=find_shape(model)[1], gpus=tuple(find_gpu(one) for one in gpus.split(",")),
        demand=Demand(work, reuse=reuse), objectives=tuple(parse_objective(one) for one in slo), **fields,
    )  # fmt: skip


def named(found: Advice) -> dict[str, Candidate]:
    return {one.name: one for one in found.candidates}


def test_options_are_ranked_by_cost_within_the_objectives() -> None:
    found = advise(question("llama3-8b", "a100,h100", "ttft:300ms", "tpot:30ms", tps=(1,), prices=PRICES, rate=200))
    first, second = found.candidates
    assert (first.name, second.name) == ("1 x h100 fp8-kv", "1 x a100 int8-sq")
    assert first.best is not None
    assert first.cost == pytest.approx(2.5 / (first.best.tokens_per_s * 3600) * 1e6)
    assert first.cost is not None
    assert second.cost is not None
    assert first.cost < second.cost
    assert first.rate is not None
    assert first.replicas == -(-200 // first.rate)
    assert first.best.meets(found.question.objectives)
    # It is answered as fast as it is asked: the simulation has reached its steady state.
    assert first.best.requests_per_s == pytest.approx(first.rate, rel=0.1)
    assert first.best.tokens_per_s == pytest.approx(64 * first.rate, rel=0.1)
    assert found.remarks[0].startswith(f"up to {second.rate:.3g} clients/s 1 x a100 int8-sq does it for 1.50 an hour")
    assert "FP8 unavailable" in second.reason
    json.dumps(found.to_json())


def test_a_release_is_planned_for_with_what_it_can_do() -> None:
    """As a build of that toolchain refuses it: engines end with 1.2, and 0.21 has no LLM API."""
    (ended,) = advise(question("llama3-8b", "h100", release="1.3.0rc29", tps=(1,))).candidates
    assert ended.best is None
    assert ended.reason.startswith("TensorRT-LLM 1.3.0rc29 builds no engines: they ended with 1.2")
    early = advise(question("llama3-8b", "h100", runtime="trtllm_pytorch", release="0.21.0", tps=(1,))).candidates[0]
    assert early.reason.startswith("toolchain 0.21.0 does not serve the runtime trtllm_pytorch")
    (able,) = advise(question("llama3-8b", "h100", release="0.21.0", tps=(1,))).candidates
    assert able.best is not None


def test_as_many_gpus_as_a_host_has_are_planned() -> None:
    for gpu, tps in (("gh200", [1]), ("gh200-144gb", [1, 2]), ("h100", [1, 2, 4, 8])):
        assert sorted(one.tp for one in advise(question("llama3-8b", gpu, dtypes=("bf16",))).candidates) == tps


def test_a_mig_slice_is_planned_alone() -> None:
    (one,) = advise(question("llama3-8b", "a100-mig-1g.10gb", dtypes=("bf16",))).candidates
    assert (one.tp, one.reason) == (1, "does not fit: the weights take 15.0 GiB of 8.0 on each of 1")


def test_tighter_objectives_never_allow_more() -> None:
    rates = []
    for limit in (12, 20, 40):
        (one,) = advise(question("llama3-8b", "h100", f"tpot:{limit}ms", tps=(1,))).candidates
        rates.append(one.rate or 0)
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_without_a_price_gpus_are_ranked_by_what_one_gives() -> None:
    found = advise(question("llama3-8b", "l4,h100", tps=(1,), prices={"l4": 0.5}))
    assert [one.gpu.name for one in found.candidates] == ["h100", "l4"]
    assert found.candidates[0].cost is None
    assert found.remarks == (
        "no price is known for h100: ranked by tokens/s of a GPU; give --price NAME=PRICE_PER_HOUR, "
        "or price_per_hour in gpus/NAME.yaml of TRTPIPE_HOME",
    )
    # Neither a GPU that is refused nor the CPU, on which nothing is planned, needs a price.
    found = advise(question("llama3-8b", "cpu,v100,h100", tps=(1,), prices={"h100": 2.5}))
    assert found.priced
    assert found.to_json()["ranked_by"] == "cost"
    assert not any("no price" in one for one in found.remarks)
    # Also where an option of the priced GPU cannot serve.
    found = advise(question("smollm2-135m", "l4,h100", tps=(1, 2), prices={"l4": 0.5}))
    assert found.remarks[0].startswith("no price is known for h100: ")


def test_what_cannot_serve_says_why() -> None:
    found = advise(question("llama3-70b", "v100,a100,l4,cpu", dtypes=("fp8", "bf16"), tps=(1,)))
    reasons = {(one.gpu.name, one.dtype): one.reason for one in found.candidates}
    assert reasons["v100", "fp8"].startswith("v100 (SM70) cannot run TensorRT-LLM engines: TensorRT-LLM removed Volta")
    assert reasons["a100", "fp8"].startswith("fp8 does not run on a100 (SM80): it is known to run on SM89")
    assert reasons["a100", "bf16"] == "does not fit: the weights take 131.4 GiB of 78.5 on each of 1"
    assert reasons["cpu", "bf16"].startswith("no engine runs on a CPU")
    assert found.remarks == ()
    impossible = advise(question("llama3-8b", "h100", "ttft:1ms", tps=(1,))).candidates[0]
    assert impossible.reason.startswith("too slow for one client alone: TTFT p99 ")
    assert impossible.reason.endswith(" ms of 1 ms")


def test_what_is_asked_wrongly_is_refused() -> None:
    with pytest.raises(UsageError, match="rate is 0; give a positive number"):
        question("llama3-8b", "h100", rate=0.0)
    with pytest.raises(UsageError, match="the load asks for sequences of 9000 tokens, llama3-8b takes 8192"):
        advise(question("llama3-8b", "h100", work=Work(input_tokens=8000, output_tokens=1000)))


def test_turns_carry_their_history() -> None:
    work = Work(input_tokens=100, output_tokens=50, sessions=Sessions(turns=3, user_tokens=20), max_total_tokens=1000)
    demand = Demand(work)
    lengths = demand.lengths()
    # 100; 100 + 50 + 20; 170 + 50 + 20.
    assert demand.turns == 3
    assert lengths.mean_input == (100 + 170 + 240) / 3
    assert lengths.longest == 290
    reused = {one.input: one.reused for one in Demand(work, reuse=True).requests(1.0)}
    assert reused == {100: 0, 170: 150, 240: 220}


def test_a_cache_that_is_found_again_makes_prompts_shorter() -> None:
    work = Work(input_tokens=2000, output_tokens=20, shared_prefix=SharedPrefix(share=1.0, tokens=1900))
    (cold,) = advise(question("llama3-8b", "h100", work=work, tps=(1,))).candidates
    (warm,) = advise(question("llama3-8b", "h100", work=work, tps=(1,), reuse=True)).candidates
    assert cold.single is not None
    assert warm.single is not None
    assert warm.single.ttft.mean() < 0.5 * cold.single.ttft.mean()


@pytest.mark.filterwarnings("error")
def test_what_ifs_of_answers_of_one_token_have_no_time_per_output_token() -> None:
    work = Work(input_tokens=128, output_tokens=1)
    asked = question("llama3-8b", "h100", work=work, tps=(1,))
    (one,) = advise(asked).candidates
    assert one.option is not None
    found = [change.to_json() for change in what_ifs(one.option, asked)]
    assert [change["tpot"] for change in found] == [None] * len(found)
    assert sum(change["ttft"] is not None for change in found) > 6
    json.dumps(found, allow_nan=False)


def test_what_ifs() -> None:
    asked = question("llama3-8b", "h100", tps=(1,))
    (one,) = advise(asked).candidates
    assert one.option is not None
    found = {change.name: change for change in what_ifs(one.option, asked)}
    grouped = found["every head with its own keys and values"]
    assert grouped.kv_tokens is not None
    assert grouped.kv_tokens[0] == pytest.approx(4 * grouped.kv_tokens[1], rel=0.02)
    wide = found["--dtype bf16"]
    assert wide.tpot is not None
    assert 1.3 < wide.tpot[1] / wide.tpot[0] < 2
    # 2 x 6.98e9 operations for 65,536 bytes.
    assert (
        "14 billion operations for each token that is kept, 212,992 for each byte of cache" in found["no KV cache"].said
    )
    bare = found["no KV cache"]
    assert bare.tpot is not None
    assert bare.tokens_per_s is not None
    # 160 tokens computed for one, of which a step without a cache has room for few.
    assert bare.tpot[1] > bare.tpot[0]
    assert bare.tokens_per_s[1] < bare.tokens_per_s[0] / 20
    window = found["streaming window of 1024 tokens"]
    assert window.tokens_per_s is not None
    assert window.tokens_per_s[1] == window.tokens_per_s[0]
    assert window.said == "a sequence of 192 tokens, the mean, fits it: nothing changes"
    drafts = found["prompt lookup of 4 draft tokens"]
    assert "3.0 tokens a step: an assumed 50 % of the drafts are accepted" in drafts.said
    assert drafts.tpot is not None
    # A step alone is bound by the weights, which five tokens read no more often than one.
    assert 2.5 < drafts.tpot[0] / drafts.tpot[1] < 3.05
    for share, (least, most) in {0.0: (1.0, 1.2), 1.0: (0.19, 0.25)}.items():
        changed = {change.name: change for change in what_ifs(one.option, asked, share)}[drafts.name]
        assert changed.tpot is not None
        assert least < changed.tpot[1] / changed.tpot[0] < most
    adapted = question("llama3-8b", "h100", tps=(1,), adapters=Adapters(number=4, rank=8))
    (with_adapters,) = advise(adapted).candidates
    assert with_adapters.option is not None
    row = "8 LoRA adapters of rank 16"
    assert row in found
    assert row not in {change.name for change in what_ifs(with_adapters.option, adapted)}
    with pytest.raises(UsageError, match="an acceptance rate of 45 is not possible"):
        what_ifs(one.option, asked, 45)
    host = found["64 GiB of KV cache in the host's memory"]
    assert host.kv_tokens is not None
    # 64 GiB of 65,536 bytes a token.
    assert host.kv_tokens[1] - host.kv_tokens[0] == 1 << 20
    # 64 tokens of 65,536 bytes at 55.7 GB/s.
    assert "whose first 64 tokens are among them reads them in 0.1 ms" in host.said
    whole = found["prompts in one piece (no chunked context)"]
    assert whole.ttft is not None
    assert whole.ttft[0] == whole.ttft[1]  # a prompt of 128 tokens is one piece anyway


def test_what_ifs_are_what_a_build_of_the_runtime_takes() -> None:
    asked = question("llama3-8b", "h100", tps=(1,), runtime="trtllm_pytorch")
    (one,) = advise(asked).candidates
    assert one.option is not None
    found = {change.name: change for change in what_ifs(one.option, asked)}
    assert found["--dtype bf16"].tpot is not None
    assert found["--dtype int8"].tpot is None
    assert found["--dtype int8"].said.startswith("the runtime trtllm_pytorch does not run W8A8_SQ_PER_CHANNEL: ")


def test_a_model_that_came_quantized_has_no_other_precision_to_compare() -> None:
    fp8 = Stored(method="fp8", quantization=Quantization(quant_algo=QuantAlgo.FP8), dtype=DataType.BFLOAT16)
    asked = question("llama3-8b", "h100", tps=(1,), runtime="vllm", stored=fp8)
    (one,) = advise(asked).candidates
    assert one.option is not None
    assert [change.name for change in what_ifs(one.option, asked) if "--dtype" in change.name] == []
