"""docs/loads.md names everything that a load file, a prompt file and a failed request can have."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.support.paths import ROOT
from trtpipe.pipeline.bench.load.files import names
from trtpipe.pipeline.bench.load.loads import ARRIVALS, Closed, Open, Replay, Staged
from trtpipe.pipeline.bench.load.prompt_files import LENGTHS, PROMPTS, SAMPLING
from trtpipe.pipeline.bench.load.work import Sessions, SharedPrefix, Work
from trtpipe.pipeline.bench.results.slo import aliases

PAGE = (ROOT / "docs" / "loads.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", PAGE))))
# The one that `find_load` sets.
OURS = {"folder"}


@pytest.mark.parametrize("kind", [Closed, Open, Staged, Replay, Work, SharedPrefix, Sessions])
def test_every_key_of_a_load_file(kind: type) -> None:
    assert {field.name for field in dataclasses.fields(kind)} - OURS <= NAMED


def test_every_key_of_a_prompt_file_and_every_word_of_an_objective() -> None:
    assert {*PROMPTS, *LENGTHS, *SAMPLING, *aliases(), *ARRIVALS} <= NAMED


def test_every_load_that_is_shipped() -> None:
    assert f"a file of configs/load: {', '.join(names())}" in PAGE


def test_every_class_of_failure() -> None:
    sources = [*(ROOT / "pipeline" / "bench").rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    kinds = set(re.findall(r'(?:BadAnswer|\.fail|Failure\.of|self\._fail)\(\s*"([A-Z]\w+)"', code))
    kinds |= set(re.findall(r'kind, told = "([A-Z]\w+)"', code))
    assert {"ServerError", "ConnectionLost", "Stalled", "WrongLength"} < kinds
    assert kinds <= NAMED
