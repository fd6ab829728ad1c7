"""What getting to a deployment costs, by hand, and from stages that ran here."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.unit.planner.test_advice import PRICES, question
from trtpipe.pipeline.planner.advice import Candidate, advise
from trtpipe.pipeline.planner.preparation import Preparation, Took, amount, recorded
from trtpipe.pipeline.store.manifest import Record
from trtpipe.pipeline.store.store import Store

MODEL = 2 * 8_030_261_248


def prepared(dtype: str, runtime: str = "tensorrt_llm", took: tuple[Took, ...] = ()) -> tuple[Candidate, Preparation]:
    what = question("llama3-8b", "h200", dtypes=(dtype,), tps=(1,), prices=PRICES, runtime=runtime, took=took)
    (one,) = advise(what).candidates
    assert one.preparation is not None
    return one, one.preparation


def test_stages_of_each_way_to_an_engine() -> None:
    one, found = prepared("fp8-kv")
    seconds = {part.stage: part.seconds for part in found.parts}
    assert list(seconds) == ["download", "calibrate", "quantize", "verify", "build"]
    assert seconds["download"] == pytest.approx(MODEL / 200e6, rel=1e-3)
    # Measured on this card: 12.1 s for 512 samples of 512 tokens (docs/measurements/quantize.md).
    assert seconds["calibrate"] == pytest.approx(12.1, rel=0.15)
    # One rank, and 1.1 s for each of 9.1 GB: the tables stay in 16 bits.
    assert seconds["build"] == pytest.approx(30 + 1.1 * 9.1, rel=0.02)
    assert found.money == pytest.approx(3.5 * found.seconds / 3600)
    assert "download 80 s" in found.describe()
    assert one.to_json()["preparation"]["cost"] == found.money
    assert [part.stage for part in prepared("bf16")[1].parts] == ["download", "convert", "build"]
    assert [part.stage for part in prepared("bf16", "vllm")[1].parts] == ["download"]
    searched = {part.stage: part.seconds for part in prepared("int4-awq")[1].parts}
    assert searched["calibrate"] > 20 * seconds["calibrate"]


def test_a_stage_that_ran_here_counts_by_its_bytes(tmp_path: Path) -> None:
    def record(stage: str, **settings: str) -> Record:
        return Record(stage=stage, stage_version=1, inputs={}, settings=settings, tools={})

    def work(out: Path) -> dict[str, list[str]]:
        (out / "file").write_bytes(bytes(1000))
        time.sleep(0.01)  # a manifest's seconds have three digits
        return {}

    store = Store(tmp_path)
    for made in (record("download"), record("build", gpu="h100", runtime="tensorrt_llm")):
        store.make(made, work)
    took = recorded(tmp_path)
    assert {(one.stage, one.size) for one in took} == {("download", 1000), ("build", 1000)}
    here = Took(stage="download", seconds=100, size=MODEL // 2, settings={})
    other = Took(stage="build", seconds=7, size=9 * 10**9, settings={"gpu": "h100", "runtime": "tensorrt_llm"})
    first, *rest = prepared("fp8-kv", took=(*took, here, other))[1].parts
    assert first.recorded
    assert first.seconds == pytest.approx(200, rel=1e-3)
    # Another card's build does not count, nor what is a millionth of the size.
    assert not any(part.recorded for part in rest)


@pytest.mark.parametrize(
    ("money", "shown"),
    [(12.345, "12.35"), (0.1, "0.10"), (0.0999, "0.100"), (0.05, "0.050"), (0.00437, "0.0044"), (0.0, "0.00")],
)
def test_an_amount_has_two_digits_at_least(money: float, shown: str) -> None:
    assert amount(money) == shown
