"""The page of a plan: every option's frontier, tables, nothing from outside."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from tests.unit.planner.test_advice import PRICES, question
from trtpipe.pipeline.planner.advice import advise
from trtpipe.pipeline.planner.page import write
from trtpipe.pipeline.planner.whatif import what_ifs


def test_a_plan_s_page(tmp_path: Path) -> None:
    what = question("llama3-8b", "a100,h100,v100", "tpot:30ms", tps=(1,), prices=PRICES)
    found = advise(what)
    option = found.candidates[0].option
    assert option is not None
    write(found, what_ifs(option, what.demand), tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "<title>Plan for llama3-8b</title>" in page
    assert "prompts of 128 tokens on average" in page
    assert re.search(r"https?://(?!www\.w3\.org)", page) is None
    (drawing,) = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    marks = [one for one in ElementTree.fromstring(drawing).iter() if "mark" in one.get("class", "").split()]
    # A curve and its points for each of two GPUs: 1, 4, 16, 64 and so on in flight.
    assert len(marks) > 10
    assert "1 x h100 fp8-kv, 64 in flight" in drawing
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == ["options", "memory of each GPU", "what cannot serve it", "what if, of 1 x h100 fp8-kv"]
    assert "TensorRT-LLM removed Volta" in page
    assert "<script" not in page
