"""Speculative decoding in the reference runtime: fewer steps, and the same answers token for token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.random_models import random_model
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.engine_process.request import Output, Request
from trtpipe.engines.reference.runtime import Runtime
from trtpipe.engines.reference.scheduler import Chunk, Sequence
from trtpipe.engines.reference.speculation import PromptLookup
from trtpipe.engines.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 40
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15,
}  # fmt: skip
REPEATING = tuple([3, 1, 4, 1, 5, 9, 2, 6] * 4)
PROMPTS = [REPEATING, REPEATING[:17], (*REPEATING[:24], 7, 7), tuple(range(20)), (5,), tuple(range(7, 18)), REPEATING]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, top_k=8, seed=5),
    SamplingParams(top_p=0.9, seed=11),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1),
    SamplingParams(top_k=4, min_tokens=12, seed=3, presence_penalty=0.2),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(draft model or None, changed settings) -> engine folder of float32 weights; a draft is "same" or "other"."""
    folders: dict[str, Path] = {}

    def folder(name: str, vocab: int) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            seed = {"same": 1, "other": 2}.get(name.partition("-")[0], 1)
            random_model(seed=seed, vocab_size=vocab, **SHAPE).save_pretrained(folders[name])
        return folders[name]

    def make(draft: str | None = None, vocab: int = VOCAB, **settings: Any) -> Path:
        out = tmp_path_factory.mktemp("engine")
        convert(folder(f"same-{vocab}", vocab), out, dtype=DataType.FLOAT32, mapping=Mapping())
        limits = {
            "max_batch_size": 8, "max_input_len": 64, "max_seq_len": 128, "max_num_tokens": 128, "max_beam_width": 1,
        }  # fmt: skip
        engine = {
            "pretrained_config": json.loads((out / "config.json").read_text()),
            "build_config": {**limits, **settings, "plugin_config": {"tokens_per_block": 8}},
        }
        (out / "config.json").write_text(json.dumps(engine))
        if draft:
            shutil.copytree(folder(f"{draft}-{vocab}", vocab), out / "draft")
        return out

    return make


def run(runtime: Runtime, requests: list[Request], together: bool = True) -> dict[Any, list[Output]]:
    out: dict[Any, list[Output]] = {request.id: [] for request in requests}
    for request in requests:
        runtime.submit(request)
        while runtime.has_work and (not together or request is requests[-1]):
            for output in runtime.step():
                out[output.id].append(output)
    return out


def answers(outputs: dict[Any, list[Output]]) -> dict[Any, tuple[list[int], Any]]:
    return {name: ([t for o in own for t in o.tokens], own[-1].finish) for name, own in outputs.items()}


def requests(**more: Any) -> list[Request]:
    return [
        Request(
            id=(p, s), prompt=prompt, max_tokens=30, sampling=sampling, end_id=17, stop_words=((6, 3), (8,)), **more
        )
        for p, prompt in enumerate(PROMPTS)
        for s, sampling in enumerate(SAMPLINGS)
    ]


NGRAM = {"speculative_decoding_mode": "ngram", "max_draft_len": 4}
DRAFT = {"speculative_decoding_mode": "draft_model", "max_draft_len": 3, "speculative_model": "draft"}


@dataclass(frozen=True)
class Answered:
    """Answers of a runtime to `requests`, and afterwards to the same prompts with its answers appended."""

    runtime: Runtime
    first: dict[Any, list[Output]]
    again: dict[Any, list[Output]]


def ask(folder: Path, policy: Any) -> Answered:
    runtime = Runtime(folder, policy=policy, kv_cache_tokens=512)
    run(runtime, requests()[:1])  # a prefix to reuse
    first = run(runtime, requests(return_log_probs=True))
    longer = [Request(id=n, prompt=p + tuple(answers(first)[(n, 0)][0]), max_tokens=9) for n, p in enumerate(PROMPTS)]
    return Answered(runtime, first, run(runtime, longer))


@pytest.fixture(scope="module", params=["guaranteed_no_evict", "max_utilization"])
def plain(request: pytest.FixtureRequest, engines: Callable[..., Path]) -> tuple[str, Answered]:
    """A policy, and the answers without drafts."""
    return request.param, ask(engines(), request.param)


@pytest.mark.parametrize(
    ("draft", "settings"), [(None, NGRAM), pytest.param("same", DRAFT, marks=pytest.mark.slow), ("other", DRAFT)]
)
def test_answers_are_the_same_and_take_fewer_steps(
    engines: Callable[..., Path], draft: str | None, settings: dict[str, Any], plain: tuple[str, Answered]
) -> None:
    policy, without = plain
    guessing = ask(engines(draft, **settings), policy)
    expected, found = without.first, guessing.first
    assert answers(found) == answers(expected)
    for name, own in expected.items():
        theirs = [value for output in found[name] for value in output.log_probs]
        np.testing.assert_allclose(theirs, [value for output in own for value in output.log_probs], atol=1e-4)
    stats = guessing.runtime.stats()
    assert stats["kv_reused_blocks"] > 0
    assert stats["kv_used_blocks"] == 0
    # A token that was accepted is one step less of its request.
    steps = sum(len(own) for own in expected.values()) - sum(len(own) for own in found.values())
    assert 0 < steps <= stats["accepted_draft_tokens"] <= stats["draft_tokens"]
    # Blocks that drafts were written to serve later requests.
    assert answers(guessing.again) == answers(without.again)


def test_the_model_itself_as_draft_is_accepted_always(engines: Callable[..., Path]) -> None:
    runtime = Runtime(engines("same", **DRAFT))
    outputs = run(runtime, [Request(id=0, prompt=PROMPTS[3], max_tokens=25)])[0]
    # The first token is the prompt's; then three drafts and one more in each step.
    assert [len(output.tokens) for output in outputs] == [1, 4, 4, 4, 4, 4, 4]
    assert {name: runtime.stats()[name] for name in ("decode_steps", "draft_tokens", "accepted_draft_tokens")} == {
        "decode_steps": 6, "draft_tokens": 18, "accepted_draft_tokens": 18,
    }  # fmt: skip


def test_a_step_takes_drafts_only_where_prompts_leave_room(engines: Callable[..., Path]) -> None:
    runtime = Runtime(engines("same", **DRAFT, max_num_tokens=32), enable_chunked_context=True)
    runtime.submit(Request(id=0, prompt=(5,), max_tokens=20))
    runtime.step()
    runtime.submit(Request(id=1, prompt=tuple(range(39)), max_tokens=5))
    # One token of the first request, and 31 of the prompt; then 8 of it, and 3 draft tokens.
    assert [len(output.tokens) for output in runtime.step()] == [1]
    assert {output.id: len(output.tokens) for output in runtime.step()} == {0: 4, 1: 1}


def test_sampled_tokens_have_the_models_distribution(engines: Callable[..., Path]) -> None:
    from scipy.stats import chisquare

    vocab, count = 6, 1200
    prompt = (1, 2, 3, 4, 1, 2, 3, 4, 1, 2)
    limits = {"max_batch_size": 64, "max_num_tokens": 1024}
    plain = Runtime(engines(vocab=vocab, **limits))
    runtime = Runtime(engines("other", vocab=vocab, **DRAFT, **limits))
    sampled = [
        Request(id=seed, prompt=prompt, max_tokens=3, sampling=SamplingParams(temperature=1.0, top_p=1.0, seed=seed))
        for seed in range(count)
    ]
    third = [own[0][2] for own in answers(run(runtime, sampled)).values()]
    assert 0 < runtime.stats()["accepted_draft_tokens"] < runtime.stats()["draft_tokens"]

    def following(start: tuple[int, ...]) -> torch.Tensor:
        logits = run(plain, [Request(id=0, prompt=start, max_tokens=1, return_generation_logits=True)])[0][0]
        assert logits.generation_logits is not None
        return torch.from_numpy(logits.generation_logits[0]).double().softmax(dim=0)

    expected = torch.zeros(vocab, dtype=torch.float64)
    for first, a in enumerate(following(prompt)):
        for second, b in enumerate(following((*prompt, first))):
            expected += a * b * following((*prompt, first, second))
    # The answers follow from the seeds, so that this is no matter of luck. A wrong rule of acceptance gives 1e-9.
    assert chisquare(np.bincount(third, minlength=vocab), expected.numpy() * count).pvalue > 0.01


@pytest.mark.parametrize(
    ("tokens", "count", "draft"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], 4, [4, 9, 1, 2]),
        # The longest end that was there before counts, then its last place.
        ([1, 2, 3, 8, 2, 3, 7, 1, 2, 3], 1, [8]),
        ([2, 3, 8, 2, 3, 7, 5, 2, 3], 2, [7, 5]),
        # What repeats is taken to go on repeating.
        ([5, 6, 5, 6], 5, [5, 6, 5, 6, 5]),
        ([7, 7, 7], 3, [7, 7, 7]),
        ([1, 2, 3], 3, []),
        ([1], 3, []),
    ],
)  # fmt: skip
def test_prompt_lookup(tokens: list[int], count: int, draft: list[int]) -> None:
    sequence = Sequence(Request(id=0, prompt=tuple(tokens), max_tokens=9))
    assert PromptLookup().propose([Chunk(sequence, 0, len(tokens), room=count)]) == [draft]


def test_prompt_lookup_follows_a_text_that_grows() -> None:
    tokens = [int(digit) for digit in np.random.default_rng(0).integers(0, 3, 200)]
    sequence, lookup = Sequence(Request(id=0, prompt=tuple(tokens[:5]), max_tokens=999)), PromptLookup()
    for size in range(5, 200):
        sequence.tokens = tokens[:size]
        chunk = Chunk(sequence, size - 1, size, room=3)
        assert lookup.propose([chunk]) == PromptLookup().propose([chunk])
