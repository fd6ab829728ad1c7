"""Models with experts: the reference runtime's text is transformers', however ranks divide the experts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.expert_models import EXPERTS, FAMILIES, PROMPTS, answers, make
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.engine_process.request import Request
from trtpipe.engines.model_config import Experts
from trtpipe.engines.reference.experts import Expert, ExpertMlp, route
from trtpipe.engines.reference.linear import Plain
from trtpipe.engines.reference.runtime import Runtime

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 64


@dataclass(frozen=True)
class Tiny:
    """A model's folder, and its answers to PROMPTS."""

    folder: Path
    answers: list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    return Tiny(folder, answers(make(request.param, folder), NEW))


def engine(source: Path, out: Path, mapping: Mapping, batch: int) -> Path:
    out.mkdir()
    convert(source, out, dtype=DataType.FLOAT32, mapping=mapping)
    path = out / "config.json"
    limits = {
        "max_batch_size": batch, "max_input_len": 128, "max_seq_len": 192, "max_num_tokens": 4096, "max_beam_width": 1,
        "plugin_config": {"tokens_per_block": 8},
    }  # fmt: skip
    path.write_text(
        json.dumps({"version": "test", "pretrained_config": json.loads(path.read_text()), "build_config": limits})
    )
    return out


def texts(folder: Path, prompts: list[tuple[int, ...]], **options: Any) -> tuple[list[list[int]], int]:
    """The answers, and the number of blocks that were reused for them."""
    runtime = Runtime(folder, **options)
    out: dict[Any, list[int]] = {number: [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        runtime.submit(Request(id=number, prompt=prompt, max_tokens=NEW))
    while runtime.has_work:
        for output in runtime.step():
            out[output.id] += output.tokens
    return list(out.values()), runtime.stats()["kv_reused_blocks"]


@pytest.mark.parametrize(
    ("tp", "pp", "ep"),
    [
        (1, 1, 1), (4, 2, 2), pytest.param(2, 2, 1, marks=pytest.mark.slow),
        pytest.param(4, 1, 4, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_twenty_prompts_at_once(tiny: Tiny, tmp_path: Path, tp: int, pp: int, ep: int) -> None:
    mapping = Mapping(tp_size=tp, pp_size=pp, moe_ep_size=ep)
    found, _ = texts(engine(tiny.folder, tmp_path / "engine", mapping, 20), PROMPTS)
    assert found == tiny.answers
    # Not one answer for all, or the equality would say little.
    assert len({tuple(answer) for answer in tiny.answers}) == len(PROMPTS)


def test_prompts_one_after_another_with_a_shared_start(tiny: Tiny, tmp_path: Path) -> None:
    found, reused = texts(engine(tiny.folder, tmp_path / "engine", Mapping(), 1), PROMPTS[:6])
    assert found == tiny.answers[:6]
    assert reused >= 4 * 5  # 40 tokens in blocks of 8, for all but the first prompt of either start


@pytest.mark.parametrize(("normalize", "shares"), [(True, [0.731059, 0.268941]), (False, [0.665241, 0.244728])])
def test_shares_of_a_token(normalize: bool, shares: list[float]) -> None:
    # Scores 3, 2, 1 and -inf, almost: the softmax over all of them, or over the best two.
    router = torch.tensor([[1.0], [3.0], [-1e9], [2.0]])
    facts = Experts(count=4, top_k=2, normalize=normalize, intermediate_size=1)
    found, chosen = route(router.t(), facts)
    assert chosen.tolist() == [[1, 3]]
    torch.testing.assert_close(found, torch.tensor([shares]), atol=1e-6, rtol=0)


def test_a_rank_computes_its_own_experts_only() -> None:
    weights = torch.arange(EXPERTS).float()
    held = [Expert(Plain(torch.ones(2, 1)), Plain(weight.reshape(1, 1))) for weight in weights]
    facts = Experts(count=EXPERTS, top_k=EXPERTS, normalize=True, intermediate_size=1)
    x = torch.tensor([[1.0], [2.0]])
    whole = ExpertMlp(facts, torch.zeros(EXPERTS, 1), 0, held)(x)
    halves = [ExpertMlp(facts, torch.zeros(EXPERTS, 1), first, held[first : first + 4])(x) for first in (0, 4)]
    # silu(x) * x, times the mean of 0 to 7.
    torch.testing.assert_close(whole, torch.nn.functional.silu(x) * x * 3.5)
    torch.testing.assert_close(halves[0] + halves[1], whole)
