"""The reference runtime end to end: tiny random Llamas, converted, against transformers' logits and tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.random_models import random_model
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.config import read_config
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.engine_process.request import FloatArray, Output, Request, RequestRefused
from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.engines.reference import admission
from trtpipe.engines.reference.runtime import Runtime
from trtpipe.engines.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 101
LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True},
    "llama3": {"rope_parameters": LLAMA3},
    "wide": {"head_dim": 32, "num_hidden_layers": 2},
    "qwen2": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3", "head_dim": 32},
}
BUILD: dict[str, Any] = {
    "max_batch_size": 8,
    "max_input_len": 64,
    "max_seq_len": 128,
    "max_num_tokens": 128,
    "max_beam_width": 1,
    "plugin_config": {"tokens_per_block": 8},
}
# Lengths around the block size of 8, and a common start.
PROMPTS = [
    tuple((7 * i + 3) % VOCAB for i in range(1)),
    tuple((5 * i + 11) % VOCAB for i in range(8)),
    tuple((3 * i + 1) % VOCAB for i in range(40)),
    tuple((3 * i + 1) % VOCAB for i in range(33)),
    (*((3 * i + 1) % VOCAB for i in range(24)), 9, 9),
    tuple((11 * i) % VOCAB for i in range(17)),
]
NEW = 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """name -> (HF folder, the same model in transformers), made once each."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in made:
            values = {
                "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
                "initializer_range": 0.15,
            }  # fmt: skip
            model = random_model(seed=len(made), **{**values, **MODELS[name]})
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name] = folder, model
        return made[name]

    return make


@pytest.fixture(scope="module")
def engines(models: Callable[[str], tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(model, tp, pp, changed limits) -> engine folder of float32 weights."""

    def make(name: str = "plain", tp: int = 1, pp: int = 1, **limits: Any) -> Path:
        out = tmp_path_factory.mktemp("engine")
        convert(models(name)[0], out, dtype=DataType.FLOAT32, mapping=Mapping(tp_size=tp, pp_size=pp))
        write_engine_config(out, **limits)
        return out

    return make


def write_engine_config(folder: Path, **limits: Any) -> None:
    path = folder / "config.json"
    engine = {
        "version": "test",
        "pretrained_config": json.loads(path.read_text()),
        "build_config": {**BUILD, **limits},
    }
    path.write_text(json.dumps(engine))


@pytest.fixture(scope="module")
def plain(engines: Callable[..., Path]) -> Path:
    return engines()


@pytest.fixture(scope="module")
def small_steps(engines: Callable[..., Path]) -> Path:
    return engines(max_num_tokens=40)


@pytest.fixture(scope="module")
def expected(models: Callable[[str], tuple[Path, Any]]) -> list[list[int]]:
    """transformers' greedy continuation of each prompt by the plain model."""
    model = models("plain")[1]
    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        full = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
        out.append(full[0, len(prompt) :].tolist())
    return out


def run(runtime: Runtime, *requests: Request) -> dict[Any, list[Output]]:
    """All requests to their end, submitted at once; outputs by request."""
    out: dict[Any, list[Output]] = {request.id: [] for request in requests}
    for request in requests:
        runtime.submit(request)
    while runtime.has_work:
        for output in runtime.step():
            out[output.id].append(output)
    return out


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def greedy(runtime: Runtime, prompts: list[tuple[int, ...]], new: int = NEW) -> list[list[int]]:
    outputs = run(runtime, *(Request(id=i, prompt=p, max_tokens=new) for i, p in enumerate(prompts)))
    return [tokens(outputs[i]) for i in range(len(prompts))]


def check_logits(got: FloatArray | None, want: torch.Tensor) -> None:
    assert got is not None
    torch.testing.assert_close(torch.from_numpy(got), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("plain", 1, 1),
        ("plain", 2, 1),
        # More ranks than key/value heads, and a vocabulary that does not divide.
        ("plain", 4, 3),
        ("tied", 1, 1),
        ("tied", 2, 2),
        ("biased", 1, 1),
        ("biased", 2, 1),
        ("llama3", 1, 2),
        ("wide", 2, 1),
        ("qwen2", 1, 1),
        ("qwen3", 4, 1),
    ],
)
def test_logits_are_those_of_transformers(
    models: Callable[[str], tuple[Path, Any]], engines: Callable[..., Path], name: str, tp: int, pp: int
) -> None:
    model = models(name)[1]
    runtime = Runtime(engines(name, tp, pp), enable_chunked_context=True)
    requests = [
        Request(id=i, prompt=p, max_tokens=5, return_context_logits=True, return_generation_logits=True)
        for i, p in enumerate(PROMPTS)
    ]
    for request, outputs in zip(requests, run(runtime, *requests).values(), strict=True):
        sequence = [*request.prompt, *tokens(outputs)]
        with torch.no_grad():
            want = model(torch.tensor([sequence])).logits[0]
        length = len(request.prompt)
        check_logits(outputs[0].context_logits, want[:length])
        assert all(output.context_logits is None for output in outputs[1:])
        got = np.concatenate([output.generation_logits for output in outputs])
        check_logits(got, want[length - 1 : -1])
        # Far apart, or agreement would say little.
        assert want.std() > 0.5


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("head", [True, False], ids=["head", "no-head"])
def test_sharded_embeddings(
    models: Callable[[str], tuple[Path, Any]], engines: Callable[..., Path], dim: int, head: bool
) -> None:
    from safetensors.torch import load_file, save_file

    folder = engines("tied", 2)
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_config"].update(use_parallel_embedding=True, embedding_sharding_dim=dim)
    (folder / "config.json").write_text(json.dumps(config))
    for rank in range(2):
        path = folder / f"rank{rank}.safetensors"
        stored = load_file(path)
        whole = stored["transformer.vocab_embedding.weight"]
        padded = torch.nn.functional.pad(whole, (0, 0, 0, 1))
        part = padded[rank * 51 : rank * 51 + 51] if dim == 0 else whole[:, rank * 32 : rank * 32 + 32]
        stored["transformer.vocab_embedding.weight"] = part.contiguous()
        if not head:
            del stored["lm_head.weight"]
        save_file(stored, path)
    prompt = tuple(range(90, 101))
    outputs = run(Runtime(folder), Request(id=0, prompt=prompt, max_tokens=1, return_context_logits=True))[0]
    with torch.no_grad():
        check_logits(outputs[0].context_logits, models("tied")[1](torch.tensor([prompt])).logits[0])


def test_greedy_tokens_alone_and_together(plain: Path, expected: list[list[int]]) -> None:
    assert [greedy(Runtime(plain), [prompt])[0] for prompt in PROMPTS] == expected
    assert greedy(Runtime(plain), PROMPTS) == expected


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_greedy_tokens_of_a_qwen(
    models: Callable[[str], tuple[Path, Any]], engines: Callable[..., Path], name: str
) -> None:
    # Each two begin alike, for 31 of 40 tokens.
    prompts = [
        tuple((3 * i * (1 + number // 2) + number * (i > 30) + 1) % VOCAB for i in range(40)) for number in range(20)
    ]
    runtime = Runtime(engines(name), kv_cache_tokens=4096)
    found = greedy(runtime, prompts)
    with torch.no_grad():
        logits = models(name)[1](torch.tensor([[*p, *new] for p, new in zip(prompts, found, strict=True)])).logits
    # Each token follows from those before it, so all are what transformers would have generated.
    assert logits[:, 39:-1].argmax(-1).tolist() == found
    assert len({tuple(new) for new in found}) == 20
    # Again, from the cache; alone; and over ranks and stages.
    assert greedy(runtime, prompts) == found
    assert runtime.stats()["kv_reused_blocks"] >= 20 * 4
    alone = Runtime(engines(name))
    assert [greedy(alone, [prompt])[0] for prompt in prompts[::5]] == found[::5]
    assert greedy(Runtime(engines(name, 2, 3)), prompts) == found


def test_greedy_tokens_of_requests_that_join_and_leave(plain: Path, expected: list[list[int]]) -> None:
    runtime = Runtime(plain, enable_kv_cache_reuse=False)
    got: list[list[int]] = [[] for _ in PROMPTS]
    for index, prompt in enumerate(PROMPTS):
        runtime.submit(Request(id=index, prompt=prompt, max_tokens=NEW - 3 * index))
        for _ in range(3):
            for output in runtime.step():
                got[output.id] += output.tokens
    while runtime.has_work:
        for output in runtime.step():
            got[output.id] += output.tokens
    assert got == [want[: NEW - 3 * index] for index, want in enumerate(expected)]


def test_greedy_tokens_of_chunked_prompts(engines: Callable[..., Path], expected: list[list[int]]) -> None:
    runtime = Runtime(engines(max_num_tokens=11), enable_chunked_context=True)
    assert greedy(runtime, PROMPTS) == expected


def test_greedy_tokens_with_prefix_reuse(plain: Path, expected: list[list[int]]) -> None:
    runtime = Runtime(plain)
    assert greedy(runtime, PROMPTS) == expected
    outputs = run(runtime, *(Request(id=i, prompt=p, max_tokens=NEW) for i, p in enumerate(PROMPTS)))
    assert [tokens(outputs[i]) for i in range(len(PROMPTS))] == expected
    # Full blocks of 8 that leave a token to compute: of 1, 8, 40, 33, 26 and 17 tokens.
    assert [outputs[i][0].reused_blocks for i in range(len(PROMPTS))] == [0, 0, 4, 4, 3, 2]
    # 40 + 20 tokens end in the eighth block, and its last token is never stored.
    assert outputs[2][-1].allocated_blocks == 4
    # Those 13, and 7 of prompts that waited in the first run for one that begins alike.
    assert runtime.stats()["kv_reused_blocks"] == 20


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no-reuse"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
def test_greedy_tokens_under_preemption(
    engines: Callable[..., Path], expected: list[list[int]], reuse: bool, chunked: bool
) -> None:
    runtime = Runtime(
        engines(max_num_tokens=48),
        kv_cache_tokens=96,
        policy="max_utilization",
        enable_kv_cache_reuse=reuse,
        enable_chunked_context=chunked,
    )
    got: list[list[int]] = [[] for _ in PROMPTS]
    paused = 0
    for index, prompt in enumerate(PROMPTS):
        runtime.submit(Request(id=index, prompt=prompt, max_tokens=NEW))
    while runtime.has_work:
        for output in runtime.step():
            got[output.id] += output.tokens
        paused = max(paused, runtime.stats()["paused_requests"])
    assert paused > 0
    assert got == expected
    assert runtime.stats()["kv_used_blocks"] == 0


def test_log_probs_of_prompts_in_parts_and_beside_a_cached_one(
    models: Callable[[str], tuple[Path, Any]], small_steps: Path
) -> None:
    runtime = Runtime(small_steps, enable_chunked_context=True)
    run(runtime, Request(id="before", prompt=PROMPTS[2], max_tokens=1))
    requests = [Request(id=i, prompt=p, max_tokens=2, return_prompt_log_probs=True) for i, p in enumerate(PROMPTS)]
    for prompt, outputs in zip(PROMPTS, run(runtime, *requests).values(), strict=True):
        want = models("plain")[1](torch.tensor([prompt])).logits[0, :-1].log_softmax(dim=-1)
        got, likeliest = outputs[0].prompt_log_probs, outputs[0].prompt_likeliest
        assert got is not None
        assert likeliest is not None
        assert got.shape == (2, len(prompt) - 1)
        np.testing.assert_allclose(got[0], want.gather(1, torch.tensor([prompt[1:]]).T)[:, 0].detach(), atol=1e-4)
        np.testing.assert_allclose(got[1], want.max(dim=-1).values.detach(), atol=1e-4)
        assert likeliest.tolist() == want.argmax(dim=-1).tolist()
        assert outputs[1].prompt_log_probs is None


def test_context_logits_of_prompts_in_parts_and_after_preemption(plain: Path, small_steps: Path) -> None:
    def requests() -> list[Request]:
        return [Request(id=i, prompt=p, max_tokens=NEW, return_context_logits=True) for i, p in enumerate(PROMPTS)]

    whole = run(Runtime(plain), *requests())
    tight = Runtime(small_steps, kv_cache_tokens=96, policy="max_utilization", enable_chunked_context=True)
    for _ in range(2):
        # The second time every prompt is in the cache, and still has all of its logits.
        parts = run(tight, *requests())
        for index, prompt in enumerate(PROMPTS):
            want = whole[index][0].context_logits
            assert want is not None
            assert want.shape == (len(prompt), VOCAB)
            check_logits(parts[index][0].context_logits, torch.from_numpy(want))
            assert all(output.context_logits is None for output in parts[index][1:])


def test_seeded_tokens_do_not_depend_on_load_or_preemption(plain: Path, engines: Callable[..., Path]) -> None:
    def request(index: int) -> Request:
        sampling = SamplingParams(seed=index, top_p=0.9, temperature=1.5, frequency_penalty=0.2)
        return Request(id=index, prompt=PROMPTS[index], max_tokens=NEW, sampling=sampling)

    alone = [tokens(run(Runtime(plain), request(i))[i]) for i in range(len(PROMPTS))]
    together = run(Runtime(plain), *(request(i) for i in range(len(PROMPTS))))
    tight = Runtime(engines(max_num_tokens=48), kv_cache_tokens=96, policy="max_utilization")
    pressed = run(tight, *(request(i) for i in range(len(PROMPTS))))
    assert [tokens(together[i]) for i in range(len(PROMPTS))] == alone
    assert [tokens(pressed[i]) for i in range(len(PROMPTS))] == alone
    # Every output carries one token: none was put out twice.
    assert all(len(output.tokens) == 1 for outputs in pressed.values() for output in outputs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lower_precision_stays_near(models: Callable[[str], tuple[Path, Any]], plain: Path, dtype: str) -> None:
    request = Request(id=0, prompt=PROMPTS[2], max_tokens=2, return_context_logits=True)
    outputs = run(Runtime(plain, compute_dtype=dtype), request)[0]
    with torch.no_grad():
        want = models("plain")[1](torch.tensor([request.prompt])).logits[0].numpy()
    got = outputs[0].context_logits
    assert got is not None
    assert got.dtype == np.float32
    assert np.corrcoef(got.ravel(), want.ravel())[0, 1] > 0.999


def test_a_request_that_overflows_harms_no_other(engines: Callable[..., Path], expected: list[list[int]]) -> None:
    from safetensors.torch import load_file, save_file

    folder = engines()
    stored = load_file(folder / "rank0.safetensors")
    # No other prompt or continuation contains it.
    poison = next(t for t in range(VOCAB) if all(t not in {*p, *e} for p, e in zip(PROMPTS, expected, strict=True)))
    stored["transformer.vocab_embedding.weight"][poison] = torch.nan
    save_file(stored, folder / "rank0.safetensors")
    # Blocks are few, so that those of the poisoned requests are soon used again.
    runtime = Runtime(folder, kv_cache_tokens=168, enable_kv_cache_reuse=False)
    bad = [Request(id=f"bad {i}", prompt=(poison,) * (3 + 20 * i), max_tokens=4 + 20 * i) for i in range(3)]
    good = [Request(id=i, prompt=p, max_tokens=NEW) for i, p in enumerate(PROMPTS)]
    outputs = run(runtime, bad[2], *good[:3], bad[1], *good[3:], bad[0])
    assert [tokens(outputs[i]) for i in range(len(PROMPTS))] == expected
    assert [len(tokens(outputs[f"bad {i}"])) for i in range(3)] == [4, 24, 44]
    sampling = SamplingParams(top_p=0.9, repetition_penalty=1.1)
    drawn = tokens(run(runtime, Request(id="drawn", prompt=(poison,), max_tokens=3, sampling=sampling))["drawn"])
    assert all(0 <= token < VOCAB for token in drawn)


def test_the_end_token_is_not_put_out(plain: Path, expected: list[list[int]]) -> None:
    end = expected[1][4]
    first = expected[1].index(end)
    outputs = run(Runtime(plain), Request(id=0, prompt=PROMPTS[1], max_tokens=NEW, end_id=end))[0]
    assert tokens(outputs) == expected[1][:first]
    assert (outputs[-1].tokens, outputs[-1].finish) == ([], "end_id")


def test_a_stop_word_is_put_out_and_ends(plain: Path, expected: list[list[int]]) -> None:
    word = tuple(expected[5][3:5])
    outputs = run(Runtime(plain), Request(id=0, prompt=PROMPTS[5], max_tokens=NEW, stop_words=(word,)))[0]
    assert tuple(tokens(outputs)[-2:]) == word
    assert [output.finish for output in outputs] == [None] * (len(outputs) - 1) + ["stop_words"]
    assert tokens(outputs) == expected[5][: len(outputs)]


def test_log_probs_sum_up(models: Callable[[str], tuple[Path, Any]], plain: Path) -> None:
    sampling = SamplingParams(top_p=0.9, temperature=3.0, seed=5)
    request = Request(id=0, prompt=PROMPTS[3], max_tokens=6, sampling=sampling, return_log_probs=True)
    outputs = run(Runtime(plain), request)[0]
    sequence = torch.tensor([[*request.prompt, *tokens(outputs)]])
    with torch.no_grad():
        raw = models("plain")[1](sequence).logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
    want = raw.gather(1, sequence[0, len(request.prompt) :, None]).squeeze(1)
    assert [x for output in outputs for x in output.log_probs] == pytest.approx(want.tolist(), abs=1e-4)
    assert outputs[-1].cum_log_prob == pytest.approx(want.sum().item(), abs=1e-3)
    unasked = run(Runtime(plain), Request(id=0, prompt=PROMPTS[3], max_tokens=1))[0][0]
    assert (unasked.log_probs, unasked.cum_log_prob, unasked.generation_logits) == ([], 0.0, None)


def test_cancelling_tells_and_frees(plain: Path) -> None:
    runtime = Runtime(plain)
    for name in ("running", "waiting"):
        if name == "waiting":
            for extra in range(7):
                runtime.submit(Request(id=extra, prompt=(1,), max_tokens=9))
        runtime.submit(Request(id=name, prompt=PROMPTS[2], max_tokens=9))
        runtime.step()
    assert runtime.stats()["waiting_requests"] == 1
    runtime.cancel("running")
    runtime.cancel("waiting")
    runtime.cancel("unknown")
    for extra in range(7):
        runtime.cancel(extra)
    finishes = {output.id: output.finish for output in runtime.step()}
    assert finishes == dict.fromkeys(["running", "waiting", *range(7)], "cancelled")
    stats = runtime.stats()
    assert (runtime.has_work, stats["kv_used_blocks"], stats["kv_free_blocks"]) == (False, 0, stats["kv_max_blocks"])


def test_stats_of_a_mixed_step(plain: Path) -> None:
    runtime = Runtime(plain, kv_cache_tokens=1000)
    runtime.submit(Request(id="a", prompt=(1, 2, 3), max_tokens=9))
    runtime.step()
    runtime.submit(Request(id="b", prompt=tuple(range(10)), max_tokens=9))
    runtime.step()
    assert runtime.stats() == {
        "iteration": 2,
        "active_requests": 2,
        "max_requests": 8,
        "scheduled_requests": 2,
        "context_requests": 1,
        "generation_requests": 1,
        "total_context_tokens": 10,
        "waiting_requests": 0,
        "paused_requests": 0,
        "kv_max_blocks": 125,
        "kv_free_blocks": 122,
        "kv_used_blocks": 3,
        "kv_reused_blocks": 0,
        "tokens_per_block": 8,
    }


def test_the_cache_defaults_to_a_full_batch_of_full_sequences(plain: Path) -> None:
    assert Runtime(plain).stats()["kv_max_blocks"] == 8 * 128 // 8


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": (5, 101)}, "token id 101 is outside the vocabulary of 101"),
        ({"prompt": (-1,)}, "token id -1 is outside the vocabulary of 101"),
        ({"prompt": (1,) * 65}, "the prompt has 65 tokens, this engine takes 64 (max_input_len)"),
        ({"prompt": (1,) * 60, "max_tokens": 69}, "60 prompt tokens and max_tokens 69 make 129, this engine takes 128"),
        ({"prompt": (1,) * 41}, "a step of this engine takes 40 (max_num_tokens) and chunked context is off"),
        ({"prompt": (1,) * 40, "max_tokens": 42}, "the request needs 11 blocks of KV cache, there are 10"),
        ({"max_tokens": 0}, "max_tokens is 0, at least 1 is needed"),
        ({"beam_width": 2}, "beam width 2 is not possible"),
        ({"bad_words": ((1, 200),)}, "token id 200 is outside the vocabulary"),
        ({"end_id": 101}, "end_id 101 is outside the vocabulary"),
        ({"sampling": SamplingParams(top_k=1025)}, "top_k is 1025, it must be within 0 and 1024"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "temperature is -1.0, it must not be negative"),
        ({"sampling": SamplingParams(repetition_penalty=0.0)}, "repetition_penalty is 0.0, it must be positive"),
        ({"sampling": SamplingParams(top_p=float("nan"))}, "top_p is nan"),
        ({"embedding_bias": np.zeros(5, np.float32)}, "embedding_bias must be 101 numbers"),
    ],
)
def test_what_can_never_run_is_refused(small_steps: Path, changes: dict[str, Any], reason: str) -> None:
    runtime = Runtime(small_steps, kv_cache_tokens=80)
    with pytest.raises(RequestRefused) as error:
        runtime.submit(Request(**{"id": 0, "prompt": (1, 2), "max_tokens": 4, **changes}))
    assert reason in str(error.value)
    assert not runtime.has_work


def test_logits_beyond_what_an_answer_holds_are_refused(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a long prompt over a large vocabulary: they ended the engine of everybody."""
    monkeypatch.setattr(admission, "MOST_LOGITS_BYTES", 16_000)
    runtime = Runtime(plain)
    asked = Request(id=0, prompt=(1,) * 36, max_tokens=4, return_context_logits=True)
    runtime.submit(asked)
    with pytest.raises(RequestRefused, match=r"^logits of 40 tokens take 16\.2 kB, and an answer holds 16\.0 kB"):
        runtime.submit(replace(asked, id=1, return_generation_logits=True))


def test_a_second_request_of_the_same_id_is_refused(plain: Path) -> None:
    runtime = Runtime(plain)
    runtime.submit(Request(id="a", prompt=(1,), max_tokens=1))
    with pytest.raises(RequestRefused, match="request 'a' is still running"):
        runtime.submit(Request(id="a", prompt=(1,), max_tokens=1))
    while runtime.has_work:
        runtime.step()
    runtime.submit(Request(id="a", prompt=(1,), max_tokens=1))


def test_idle_steps_give_nothing(plain: Path) -> None:
    runtime = Runtime(plain)
    assert (runtime.step(), runtime.has_work, runtime.stats()["iteration"]) == ([], False, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "max_utilisation"}, "no batch scheduler policy is called 'max_utilisation'; did you mean"),
        ({"compute_dtype": "int8"}, "no compute type is called 'int8'"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens is 0"),
    ],
)
def test_impossible_options_are_named(plain: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Runtime(plain, **options)


def test_a_checkpoint_is_no_engine(models: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> None:
    convert(models("plain")[0], tmp_path, dtype=DataType.FLOAT32, mapping=Mapping())
    assert read_config(tmp_path).vocab_size == VOCAB
    with pytest.raises(InputDataError, match="has no pretrained_config: this is not an engine folder"):
        Runtime(tmp_path)


def test_a_build_config_that_lacks_a_limit_is_refused(engines: Callable[..., Path]) -> None:
    with pytest.raises(InputDataError, match="build_config has no usable tokens_per_block"):
        Runtime(engines(plugin_config={}))
    with pytest.raises(InputDataError, match=r"build\.max_seq_len 10"):
        Runtime(engines(max_seq_len=10))
