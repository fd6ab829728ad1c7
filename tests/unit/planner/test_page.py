"""The page of a plan: every option's frontier, tables, nothing from outside."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.unit.planner.test_advice import PRICES, question
from trtpipe.engines.errors import HostError
from trtpipe.pipeline.planner.advice import Question, advise
from trtpipe.pipeline.planner.disaggregation import disaggregate
from trtpipe.pipeline.planner.page import write
from trtpipe.pipeline.planner.tables import figure
from trtpipe.pipeline.planner.whatif import what_ifs


def test_a_plan_s_page(tmp_path: Path) -> None:
    what = question("llama3-8b", "a100,h100,v100", "tpot:30ms", tps=(1,), prices=PRICES)
    found = advise(what)
    option = found.candidates[0].option
    assert option is not None
    write(found, what_ifs(option, what), disaggregate(found, 2), tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "<title>Plan for llama3-8b</title>" in page
    assert "Prompts of 128 tokens on average" in page
    (drawing,) = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    marks = [one for one in ElementTree.fromstring(drawing).iter() if "mark" in one.get("class", "").split()]
    # A curve and its points for each of two GPUs: 1, 4, 16, 64 and so on in flight.
    assert len(marks) > 10
    assert "1 x h100 fp8-kv, 64 in flight" in drawing
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        "Throughput against speed", "Options", "Memory of each GPU", "What cannot serve it",
        "What if, of 1 x h100 fp8-kv", "Split between prompts and answers, of h100 fp8-kv",
    ]  # fmt: skip
    assert re.search(r"TensorRT-LLM removed Volta [^<]*\.</div></td>", page)
    # What is predicted of the best option; units and the currency; how to read the chart.
    assert re.search(r"Best option</p><p class=\"value\">1 x h100 fp8-kv</p><p>by cost", page)
    for heading in (
        "TTFT alone ms",
        "KV cache GiB",
        "cost of 1M tokens",
        "tokens/s of a GPU",
        "weights GiB",
        "clients/s of a GPU",
    ):
        assert f">{heading}</th>" in page
    assert "in the currency of the prices" in page
    assert "Getting to 1 x h100 fp8-kv takes about" in page
    assert "A filled mark meets all objectives" in page
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match=r"file/plan\.html cannot be written"):
        write(found, (), (), tmp_path / "file" / "plan.html")


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (12.34, "12.3"), (999.6, "1,000"), (1120.0, "1,120"), (1e6, "1,000,000")]
)
def test_a_figure_has_no_exponent(value: float, text: str) -> None:
    assert figure(value) == text


def page_of(tmp_path: Path, what: Question) -> str:
    write(advise(what), (), (), tmp_path / "plan.html")
    return (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize(
    ("runtime", "fitted"),
    [
        ("tensorrt_llm", "efficiencies were fitted to published runs of TensorRT-LLM."),
        ("vllm", "overheads were fitted to runs of vLLM 0.25 in BF16 on an H200, "),
    ],
)
def test_a_plan_says_what_its_runtime_was_fitted_to(tmp_path: Path, runtime: str, fitted: str) -> None:
    page = page_of(tmp_path, question("llama3-8b", "h100", tps=(1,), runtime=runtime))
    assert f"batching whose {fitted}" in page
    assert f"; runtime {runtime}.</p>" in page


def test_a_plan_without_a_curve_has_no_chart_of_throughput(tmp_path: Path) -> None:
    asked = question("llama3-8b", "h100", tps=(1,))
    for what in (question("llama3-8b", "h100", "ttft:1ms", tps=(1,)), replace(asked, demand=asked.demand.prompts())):
        page = page_of(tmp_path, what)
        assert "Throughput against speed" not in page
        assert "<svg" not in page
