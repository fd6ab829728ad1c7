"""The comparison with the original on tiny Llamas: against transformers, with known damage, and what is told of it."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.support.random_models import random_model
from trtpipe.configs import facts
from trtpipe.engines.accuracy import job, worker
from trtpipe.engines.accuracy.distributions import Distributions
from trtpipe.engines.accuracy.job import LayerError, Measured, Saturation
from trtpipe.engines.accuracy.models import vocabulary_rows
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.errors import HostError, InputDataError, StageFailed, UsageError
from trtpipe.engines.model_config import EmbeddingSharding
from trtpipe.engines.precision import Thresholds
from trtpipe.engines.quantization import KvCacheQuantAlgo
from trtpipe.engines.quantize.worker import work as quantize
from trtpipe.pipeline.accuracy import gate
from trtpipe.pipeline.accuracy import page as accuracy_page
from trtpipe.pipeline.accuracy.gate import Report
from trtpipe.pipeline.cli import console

VOCAB = 131
LAYERS = 3
ROWS = np.random.default_rng(1).integers(0, VOCAB, (5, 24), dtype=np.int32)
STRICT = Thresholds(perplexity_ratio=1.05, mean_kl=0.05, top1_agreement=0.9)
# ModelOpt's configuration, the weights' algorithm and the cache's.
CASES: dict[str, tuple[str, str, str | None]] = {
    "fp8-kv": ("FP8_DEFAULT_CFG", "FP8", "FP8"),
    "int8-sq": ("INT8_SMOOTHQUANT_CFG", "W8A8_SQ_PER_CHANNEL", None),
    "int4-awq": ("INT4_AWQ_CFG", "W4A16_AWQ", None),
    "w4a8-awq": ("W4A8_AWQ_BETA_CFG", "W4A8_AWQ", None),
}
STATIC = {"attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj"}


# ModelOpt, and torch under it, warn of many things that are not ours.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Imported before the guard of a single test is up: a dependency of both runs lscpu on import."""
    import transformers  # noqa: F401

    if importlib.util.find_spec("modelopt") is not None:
        import modelopt.torch.quantization  # noqa: F401


def save_model(folder: Path, *, dtype: torch.dtype, **changes: Any) -> Any:
    """Write a random model in `dtype`, a Llama unless `changes` name another family, and return it."""
    sizes = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64, "initializer_range": 0.08,
    }  # fmt: skip
    model = random_model(**{**sizes, **changes})
    model.to(dtype).save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder, dtype=torch.bfloat16)
    return folder


Quantized = Callable[..., Path]


@pytest.fixture(scope="module")
def quantized(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """(case, form, ranks) -> its folder, calibrated with the rows that are compared later; made once each."""
    base = tmp_path_factory.mktemp("quantized")
    np.save(base / "rows.npy", ROWS)

    def make(case: str, form: str = "trtllm", **mapping: int) -> Path:
        out, scales = base / "-".join([case, form, *map(str, mapping.values())]), base / f"{case}.safetensors"
        if out.is_dir():
            return out
        pytest.importorskip("modelopt")
        out.mkdir()
        modelopt, algo, cache = CASES[case]
        spec = {
            "source": str(llama), "out": str(out), "format": form, "dtype": "bfloat16", "device": "cpu",
            "quantization": {"quant_algo": algo, "kv_cache_quant_algo": cache, "group_size": 64},
            "modelopt": modelopt, "samples": str(base / "rows.npy"), "batch_tokens": 10000, "scratch": str(base),
            "hidden_bytes": 1 << 30, "mapping": {"tp_size": 1, "pp_size": 1, **mapping}, "embedding": "none",
            "toolchain": None, "scales_in": str(scales) if scales.is_file() else None, "scales_out": str(scales),
        }  # fmt: skip
        quantize(spec, lambda done, total: None)
        return out

    return make


Compare = Callable[..., Measured]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """`measure` with the worker's work done in this process."""

    def run(module: str, spec: dict[str, Any], log: Path, *, what: str, progress: Any) -> None:
        assert module == "trtpipe.engines.accuracy.worker"
        worker.work(json.loads(json.dumps(spec)), progress)

    monkeypatch.setattr(job, "run_worker", run)

    def measure(original: Path, other: Path, rows: Any = ROWS, **options: Any) -> Measured:
        return gate.measure(original, other, rows, device="cpu", log=tmp_path / "log", **options)

    return measure


def damaged(folder: Path, out: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a one-rank checkpoint with one tensor changed."""
    out.mkdir()
    tensors = load_file(folder / "rank0.safetensors")
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, out / "rank0.safetensors")
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    return out


# What is measured.


@pytest.mark.parametrize(
    "changes",
    [{"attention_bias": True}, {"family": "qwen2"}, {"family": "qwen3", "head_dim": 64}],
    ids=["llama", "qwen2", "qwen3"],
)
def test_likelihood_is_transformers(tmp_path: Path, compare: Compare, changes: dict[str, Any]) -> None:
    model = save_model(tmp_path / "hf", dtype=torch.float32, **changes)
    ids = torch.from_numpy(ROWS).long()
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].reshape(-1, VOCAB)
    expected = float(functional.cross_entropy(logits, ids[:, 1:].flatten()))
    found = compare(tmp_path / "hf", tmp_path / "hf")
    assert found.original_nll == pytest.approx(expected, abs=1e-5)
    assert found.original_perplexity == pytest.approx(math.exp(expected), rel=1e-4)
    assert (found.rows, found.seq_len, found.positions) == (5, 24, 5 * 23)
    assert (found.original_dtype, found.quant_algo, found.kv_cache_quant_algo) == ("float32", None, None)


@pytest.mark.parametrize("embedding", list(EmbeddingSharding))
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 3)])
def test_a_conversion_changes_nothing(
    llama: Path, tmp_path: Path, compare: Compare, tp: int, pp: int, embedding: EmbeddingSharding
) -> None:
    (tmp_path / "out").mkdir()
    convert(llama, tmp_path / "out", dtype=DataType.BFLOAT16, mapping=Mapping(tp_size=tp, pp_size=pp),
            embedding=embedding)  # fmt: skip
    found = compare(llama, tmp_path / "out")
    assert [layer.layer for layer in found.layers] == [0, 1, 2]
    assert found.saturation == ()
    if tp == 1:
        assert found.original_nll == found.quantized_nll
        assert (found.mean_kl, found.p99_kl, found.top1_agreement) == (0, 0, 1)
        assert all((layer.local, layer.accumulated) == (0, 0) for layer in found.layers)
    else:
        # The sum over ranks is rounded to bfloat16 once more.
        assert found.mean_kl < 1e-3
        assert found.perplexity_ratio == pytest.approx(1, abs=1e-2)
        assert all(0 < layer.local < 0.02 for layer in found.layers)


def test_plain_folders_and_float32_originals(llama: Path, tmp_path: Path, compare: Compare) -> None:
    save_model(tmp_path / "exact", dtype=torch.float32)
    found = compare(tmp_path / "exact", llama)
    assert (found.original_dtype, found.quantized_dtype) == ("float32", "bfloat16")
    assert 0 < found.mean_kl < 1e-3
    assert all(0 < layer.local < 0.02 for layer in found.layers)


@pytest.mark.parametrize(
    ("case", "most_kl", "most_error"),
    [("fp8-kv", 0.02, 0.15), ("int8-sq", 0.002, 0.05), ("int4-awq", 0.15, 0.4), ("w4a8-awq", 0.15, 0.4)],
)
def test_quantizing_costs_a_little(
    quantized: Quantized, llama: Path, compare: Compare, case: str, most_kl: float, most_error: float
) -> None:
    found = compare(llama, quantized(case))
    assert most_kl / 10 < found.mean_kl < most_kl
    assert found.mean_kl < found.p99_kl
    # A random model's first choice is barely ahead of its second.
    assert 0.4 < found.top1_agreement < 1
    assert found.perplexity_ratio == pytest.approx(1, abs=0.05)
    assert all(most_error / 10 < layer.local < most_error for layer in found.layers)
    _, algo, cache = CASES[case]
    assert (found.quant_algo, found.kv_cache_quant_algo) == (algo, cache)
    names = {entry.linear for entry in found.saturation}
    assert names == (set() if case == "int4-awq" else STATIC | ({"attention.kv_cache"} if cache else set()))
    # Calibrated with the same rows, so that only a rounding can go beyond the largest number seen: in SmoothQuant,
    # where all channels have the same largest number, that is once in each.
    assert all(entry.share < 0.01 for entry in found.saturation)
    inputs = {entry.linear: entry.inputs for entry in found.saturation if entry.layer == 1}
    tokens = ROWS.size
    sizes = {"attention.kv_cache": 128, "mlp.proj": 256}
    assert inputs == {name: tokens * sizes.get(name, 128) for name in names}


@pytest.mark.parametrize("case", ["fp8-kv", "int8-sq"])
def test_form_and_ranks_change_little(quantized: Quantized, llama: Path, compare: Compare, case: str) -> None:
    one = compare(llama, quantized(case))
    others = [compare(llama, quantized(case, tp_size=2, pp_size=3))]
    if case == "fp8-kv":
        # Smoothed matrices of this form are rounded anew, and each has the scale of its own.
        others.append(compare(llama, quantized(case, "hf")))
    for other in others:
        assert other.quant_algo == one.quant_algo
        assert other.mean_kl == pytest.approx(one.mean_kl, rel=0.5)
        assert other.original_nll == one.original_nll
        for layer, same in zip(one.layers, other.layers, strict=True):
            assert same.local == pytest.approx(layer.local, rel=0.3)
        inputs = {(entry.layer, entry.linear): entry.inputs for entry in one.saturation}
        assert inputs == {(entry.layer, entry.linear): entry.inputs for entry in other.saturation}


@pytest.mark.parametrize("linear", ["attention.dense", "mlp.fc"])
def test_a_broken_scale_is_found(
    quantized: Quantized, llama: Path, tmp_path: Path, compare: Compare, linear: str
) -> None:
    name = f"transformer.layers.1.{linear}.weights_scaling_factor"
    broken = damaged(quantized("fp8-kv"), tmp_path / "broken", name, lambda scale: scale * 4)
    found = compare(llama, broken)
    report = Report(recipe="fp8-kv", thresholds=STRICT, measured=found)
    assert report.worst[0].layer == 1
    assert found.layers[1].local > 5 * max(found.layers[0].local, found.layers[2].local)
    # What comes after it is fed with the damage, and does no more.
    assert found.layers[2].accumulated > 5 * found.layers[0].accumulated
    assert report.failures
    assert "layer 1" in str(report.refusal())


@pytest.mark.parametrize("case", ["fp8-kv", "int8-sq"])
def test_clipped_inputs_are_counted(
    quantized: Quantized, llama: Path, tmp_path: Path, compare: Compare, case: str
) -> None:
    name = "transformer.layers.2.mlp.proj.activation_scaling_factor"
    found = compare(llama, damaged(quantized(case), tmp_path / "small", name, lambda scale: scale / 16))
    worst = Report(recipe=case, thresholds=STRICT, measured=found).saturated[0]
    assert (worst.layer, worst.linear) == (2, "mlp.proj")
    assert 0.01 < worst.share < 0.6
    assert sum(entry.beyond for entry in found.saturation) - worst.beyond < worst.beyond / 10


def test_a_clipped_cache_is_counted(quantized: Quantized, llama: Path, tmp_path: Path, compare: Compare) -> None:
    name = "transformer.layers.0.attention.kv_cache_scaling_factor"
    found = compare(llama, damaged(quantized("fp8-kv"), tmp_path / "small", name, lambda scale: scale / 1024))
    worst = Report(recipe="fp8-kv", thresholds=STRICT, measured=found).saturated[0]
    assert (worst.layer, worst.linear) == (0, "attention.kv_cache")


def test_batches_and_slices_change_nothing(
    quantized: Quantized, llama: Path, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compare(llama, quantized("int8-sq"))
    monkeypatch.setattr(worker, "BATCH_TOKENS", {"cpu": 50})
    monkeypatch.setattr(worker, "POSITIONS", 7)
    monkeypatch.setattr(worker, "VOCABULARY", 10)
    parts = compare(llama, quantized("int8-sq"))
    assert parts.saturation == whole.saturation
    for name in ("original_nll", "quantized_nll", "mean_kl", "p99_kl", "top1_agreement"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-3, abs=1e-5)


def test_two_comparisons_of_the_same_are_equal(quantized: Quantized, llama: Path, compare: Compare) -> None:
    assert compare(llama, quantized("int8-sq")) == compare(llama, quantized("int8-sq"))


def test_progress_ends_at_the_bytes_of_both(llama: Path, compare: Compare) -> None:
    told: list[tuple[int, int]] = []
    compare(llama, llama, progress=lambda done, total: told.append((done, total)))
    assert len(told) == LAYERS + 1
    assert told == sorted(told)
    assert told[-1] == (2 * (llama / "model.safetensors").stat().st_size,) * 2


@pytest.mark.process
def test_a_comparison_in_a_child_process_leaves_no_files(llama: Path, tmp_path: Path) -> None:
    found = gate.measure(llama, llama, ROWS[:1], device="cpu", log=tmp_path / "log")
    assert (found.mean_kl, found.device) == (0, "cpu")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".accuracy")] == []


# What is refused.


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab_size": VOCAB + 1}, "its vocab_size is 132, the original's is 131"),
        ({"hidden_size": 64}, "its hidden_size is 64, the original's is 128"),
        ({"num_hidden_layers": 2}, "its num_hidden_layers is 2, the original's is 3"),
    ],
)
def test_models_that_do_not_belong_together(
    llama: Path, tmp_path: Path, compare: Compare, changes: dict[str, int], told: str
) -> None:
    save_model(tmp_path / "other", dtype=torch.bfloat16, **changes)
    with pytest.raises(InputDataError, match=told):
        compare(llama, tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("transformer.layers.1.mlp.proj.weight", "layer 1 of .*broken"),
        ("transformer.vocab_embedding.weight", "the embedding of .*broken"),
        ("lm_head.weight", "the head of .*broken"),
    ],
)
def test_numbers_that_are_not_finite(llama: Path, tmp_path: Path, compare: Compare, name: str, told: str) -> None:
    (tmp_path / "out").mkdir()
    convert(llama, tmp_path / "out", dtype=DataType.BFLOAT16, mapping=Mapping())

    def spoil(weight: torch.Tensor) -> torch.Tensor:
        weight[0] = math.nan
        return weight

    broken = damaged(tmp_path / "out", tmp_path / "broken", name, spoil)
    # The embedding of a token that no row has is never looked up.
    rows = ROWS.copy()
    rows[0, 0] = 0
    with pytest.raises(InputDataError, match=told):
        compare(llama, broken, rows)


def test_a_damaged_original_is_named(llama: Path, tmp_path: Path, compare: Compare) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.2.input_layernorm.weight"][5] = math.inf
    (tmp_path / "bad").mkdir()
    save_file(tensors, tmp_path / "bad" / "model.safetensors")
    (tmp_path / "bad" / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(InputDataError, match=r"layer 2 of .*bad"):
        compare(tmp_path / "bad", llama)


def test_a_quantized_folder_is_compared_with_its_checkpoint_or_run_alone(
    llama: Path, quantized: Quantized, compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = quantized("fp8-kv", "hf")
    same, cost = compare(folder, quantized("fp8-kv")), compare(llama, folder)
    # In the checkpoint q, k and v share a scale, and those of the cache are not below one.
    assert same.original_nll == cost.quantized_nll
    assert 0 < same.mean_kl < 0.02
    alone = gate.measure_alone(folder, ROWS, device="cpu", log=tmp_path / "log")
    assert (alone.quantized_nll, alone.saturation) == (cost.quantized_nll, cost.saturation)
    assert (alone.quant_algo, alone.kv_cache_quant_algo, alone.positions) == ("FP8", "FP8", cost.positions)
    report = gate.AloneReport(recipe="fp8-kv", measured=replace(alone, quantized_nll=math.log(100.0)))
    assert report.failures == []
    console.accuracy(report)
    assert "perplexity 100; the model came quantized, and its original was not" in capsys.readouterr().out
    accuracy_page.write(report, tmp_path / "report")
    told = json.loads((tmp_path / "report" / "accuracy.json").read_text())
    assert (told["passed"], told["quantized_perplexity"], told["mean_kl"]) == (True, pytest.approx(100), None)
    assert "of the quantized model alone" in (tmp_path / "report" / "accuracy.html").read_text()
    bare = replace(report.measured, quant_algo=None, kv_cache_quant_algo=None)
    plain = replace(report, recipe="none", measured=bare)
    console.accuracy(plain)
    out = " ".join(capsys.readouterr().out.split())
    assert ("unquantized" in out, "came quantized" in out, "the model is not quantized" in out) == (True, False, True)
    accuracy_page.write(plain, tmp_path / "plain")
    told = json.loads((tmp_path / "plain" / "accuracy.json").read_text())
    assert (told["original_perplexity"], told["quantized_perplexity"]) == (plain.measured.quantized_perplexity, None)
    assert (told["original_nll"], "quantized_nll" in told) == (bare.quantized_nll, False)
    page = (tmp_path / "plain" / "accuracy.html").read_text()
    assert ("of the unquantized model alone" in page, "came quantized" in page) == (True, False)
    guess = replace(report, measured=replace(alone, quantized_nll=math.log(132.0)))
    assert guess.failures == ["perplexity 132 is that of a guess among 131 tokens, or worse"]
    assert "pass --accept-accuracy to build" in str(guess.refusal())
    plain_guess = replace(plain, measured=replace(bare, quantized_nll=math.log(132.0)))
    assert str(plain_guess.refusal()).endswith("take another revision of the model")


def test_rows_that_cannot_be_run(llama: Path, compare: Compare, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no next token"):
        compare(llama, llama, ROWS[:, :1])
    with pytest.raises(UsageError, match="the model takes 64"):
        compare(llama, llama, np.zeros((1, 65), np.int32))
    scaled = tmp_path / "scaled"
    shutil.copytree(llama, scaled)
    config = json.loads((scaled / "config.json").read_text())
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 32, **factors}
    config.pop("rope_parameters", None)
    (scaled / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    with pytest.raises(UsageError, match="the model takes 32; use --seq-len 32 or less"):
        compare(scaled, scaled, np.zeros((1, 33), np.int32))
    # As the accuracy gate's tasks are judged: to the length that the scaling makes.
    (scaled / "config.json").write_text(json.dumps({**config, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}))
    assert compare(scaled, scaled, np.zeros((1, 65), np.int32)).seq_len == 65
    with pytest.raises(UsageError, match="the model takes 128; use --seq-len 128 or less"):
        compare(scaled, scaled, np.zeros((1, 129), np.int32))
    with pytest.raises(InputDataError, match="outside the vocabulary"):
        compare(llama, llama, ROWS + VOCAB)
    with pytest.raises(UsageError, match="did you mean 'cuda'"):
        job.measure(llama, llama, ROWS, device="cude", log=Path("log"))


# Distributions.


@pytest.mark.parametrize("step", [3, 8, 40])
def test_slices_of_the_vocabulary(step: int) -> None:
    generator = torch.Generator().manual_seed(0)
    one = 30 * torch.randn(16, 40, generator=generator)
    two = one + torch.randn(16, 40, generator=generator)
    targets = torch.randint(0, 40, (16,), generator=generator)
    both = Distributions(targets)
    for first in range(0, 40, step):
        for at in (slice(0, 10), slice(10, 16)):
            words = slice(first, first + step)
            both.add(at, first, one[at, words], two[at, words])
    p, q = one.double().log_softmax(-1), two.double().log_softmax(-1)
    torch.testing.assert_close(both.divergence(), (p.exp() * (p - q)).sum(-1), atol=1e-5, rtol=1e-5)
    for nll, exact in zip(both.nll(), (p, q), strict=True):
        torch.testing.assert_close(nll, -exact.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    assert torch.equal(both.agreement(), one.argmax(-1) == two.argmax(-1))


def test_equal_logits_prefer_the_first() -> None:
    both = Distributions(torch.zeros(1, dtype=torch.int64))
    for first in range(3):
        both.add(slice(0, 1), first, torch.tensor([[1.0]]), torch.tensor([[1.0 + (first == 1)]]))
    assert (int(both.original.best), int(both.quantized.best)) == (0, 1)


def test_rows_over_several_parts() -> None:
    whole = torch.arange(14.0).reshape(7, 2)
    parts = (whole[:3], whole[3:6], torch.cat((whole[6:], torch.zeros(2, 2))))
    for first, last in [(0, 7), (2, 4), (3, 6), (1, 7), (6, 7)]:
        assert torch.equal(vocabulary_rows(parts, first, last), whole[first:last])


# The verdict.


def measured(**changes: Any) -> Measured:
    """Twelve layers; 27.4 and 31.2 are the perplexities."""
    layers = tuple(LayerError(layer=i, local=0.01 + (i == 7) * 0.5, accumulated=0.02 * (i + 1)) for i in range(12))
    values: dict[str, Any] = {
        "rows": 16, "seq_len": 256, "device": "cpu", "quant_algo": "W8A8_SQ_PER_CHANNEL", "kv_cache_quant_algo": None,
        "original_dtype": "bfloat16", "quantized_dtype": "bfloat16", "original_nll": math.log(27.4),
        "quantized_nll": math.log(31.2), "mean_kl": 0.0123, "p99_kl": 0.2, "top1_agreement": 0.9312, "layers": layers,
        "saturation": (
            Saturation(layer=3, linear="mlp.proj", beyond=12, inputs=1000),
            Saturation(layer=4, linear="mlp.proj", beyond=0, inputs=1000),
            Saturation(layer=5, linear="mlp.fc", beyond=40, inputs=2000),
        ),
    }  # fmt: skip
    return Measured(**{**values, **changes})


LOOSE = Thresholds(perplexity_ratio=1.15, mean_kl=0.02, top1_agreement=0.93)


def test_within_the_thresholds() -> None:
    report = Report(recipe="int8-sq", thresholds=LOOSE, measured=measured())
    assert report.failures == []
    assert report.line() == (
        "perplexity 31.2, 1.139 times the original's; KL divergence 0.0123 nats; same first choice at 93.1 %"
    )


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (
            {"perplexity_ratio": 1.10},
            "perplexity 31.2 is 1.14 times the original's 27.4, int8-sq allows 1.10",
        ),
        (
            {"perplexity_ratio": 1.138},
            "perplexity 31.2 is 1.139 times the original's 27.4, int8-sq allows 1.138",
        ),
        ({"mean_kl": 0.01}, "the mean KL divergence is 0.012 nats, int8-sq allows 0.010"),
        ({"mean_kl": 0.01229}, "the mean KL divergence is 0.01230 nats, int8-sq allows 0.01229"),
        ({"top1_agreement": 0.95}, "both prefer the same token at 93.1 % of positions, int8-sq asks for 95.0 %"),
    ],
)
def test_beyond_a_threshold(limits: dict[str, float], told: str) -> None:
    report = Report(recipe="int8-sq", thresholds=replace(LOOSE, **limits), measured=measured())
    assert report.failures == [told]
    refusal = report.refusal(Path("runs/m"))
    assert isinstance(refusal, StageFailed)
    assert str(refusal) == (
        f"the accuracy gate failed: {told}: most goes wrong in layer 7, 51 % of what it adds; see runs/m/accuracy.html,"
        " then choose another recipe or better calibration text, or pass --accept-accuracy to build"
    )
    assert "accuracy.html" not in str(report.refusal())


def test_everything_fails_when_nothing_is_left() -> None:
    lost = measured(quantized_nll=5000.0, mean_kl=4996.0, top1_agreement=0.0)
    report = Report(recipe="fp8", thresholds=LOOSE, measured=lost)
    assert len(report.failures) == 3
    assert report.failures[0].startswith("perplexity 1.014e+304 is 1.01e+304 times")
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("algo", "cache", "name"),
    [
        ("FP8", None, "fp8"),
        ("FP8", "FP8", "fp8-kv"),
        (None, None, "none"),
        ("W8A8_SQ_PER_CHANNEL", None, "int8-sq"),
        ("W8A8_SQ_PER_CHANNEL", "INT8", "int8-sq"),
        (None, "FP8", "none"),
    ],
)
def test_the_recipe_of_a_measured_model(algo: str | None, cache: str | None, name: str) -> None:
    found = measured(quant_algo=algo, kv_cache_quant_algo=cache)
    recipe = gate.matching_recipe(found, facts.load_quant_recipes())
    assert (recipe.name, recipe.kv_cache_quant_algo) == (name, cache and KvCacheQuantAlgo(cache))


# Reports.


class Page(HTMLParser):
    """Tags must nest; text by tag, and every attribute."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1], " ".join(data.split())))


@pytest.mark.parametrize("count", [1, 12, 126])
def test_the_page(tmp_path: Path, count: int) -> None:
    layers = tuple(LayerError(layer=i, local=0.1 / (i + 1), accumulated=0.01 * i) for i in range(count))
    name = '<script>alert("x")</script> & co'
    report = Report(recipe=name, thresholds=STRICT, measured=measured(layers=layers))
    accuracy_page.write(report, tmp_path / "deep" / "report")
    text = (tmp_path / "deep" / "report" / "accuracy.html").read_text(encoding="utf-8")
    assert text.count("<script") == 2  # those of the page itself
    page = Page(text)
    assert ("h1", f"Accuracy of {name}") in page.texts
    titles = [text for tag, text in page.texts if tag == "title" and text.startswith("layer ")]
    assert [title.partition(":")[0] for title in titles] == 2 * [f"layer {i}" for i in range(count)]
    assert (titles[0], titles[count]) == ("layer 0: local 10 %", "layer 0: accumulated 0 %")
    cells = [text for tag, text in page.texts if tag == "th"]
    assert {str(i) for i in range(count)} <= set(cells)
    # The whole chart fits a phone, however many layers there are.
    assert ("svg", "viewbox", "0 0 340 210") in page.attributes
    # Nothing is fetched.
    assert not {name for _, name, _ in page.attributes} & {"src", "href", "srcset", "xlink:href"}
    assert "url(" not in text
    for failure in report.failures:
        assert any(failure.lower() + "." == text.lower() for tag, text in page.texts if tag == "li")


def test_the_page_tells_of_clipping(tmp_path: Path) -> None:
    report = Report(recipe="int8-sq", thresholds=LOOSE, measured=measured())
    assert [(entry.layer, entry.share) for entry in report.saturated] == [(5, 0.02), (3, 0.012)]
    texts = Page(accuracy_page.render(report)).texts
    assert ("li", "The accuracy gate passed.") in texts
    assert ("td", "1.2 %") in texts
    about = [text for text in texts if "next tokens of held-out text" in text[1]]
    elsewhere = Page(accuracy_page.render(report, "mine.txt")).texts
    assert (len(about), any("next tokens of mine.txt" in text for _, text in elsewhere)) == (1, True)
    none = replace(report, measured=measured(saturation=()))
    assert any("no scale is fixed" in text for _, text in Page(accuracy_page.render(none)).texts)
    fitting = replace(report, measured=measured(saturation=measured().saturation[1:2]))
    assert any("every number fits" in text for _, text in Page(accuracy_page.render(fitting)).texts)


def test_reports_are_written_again_and_elsewhere(tmp_path: Path) -> None:
    report = Report(recipe="int8-sq", thresholds=STRICT, measured=measured())
    for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        accuracy_page.write(report, folder)
        assert sorted(path.name for path in folder.iterdir()) == ["accuracy.html", "accuracy.json"]
    value = json.loads((tmp_path / "b" / "accuracy.json").read_text())
    assert value["passed"] is False
    assert value["failures"] == report.failures
    assert (value["positions"], value["worst_layers"][0]) == (16 * 255, 7)
    assert value["quantized_perplexity"] == pytest.approx(31.2)
    assert value["layers"][7] == {"layer": 7, "local": 0.51, "accumulated": 0.16}
    assert value["saturation"][0] == {"layer": 3, "linear": "mlp.proj", "beyond": 12, "inputs": 1000}
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match="cannot be written"):
        accuracy_page.write(report, tmp_path / "file")


def test_the_console_tells_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(recipe="int8-sq", thresholds=STRICT, measured=measured())
    console.accuracy(report)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["perplexity", "27.4", "31.2", "-"] in lines
    assert ["perplexity", "ratio", "-", "1.139", "at", "most", "1.05"] in lines
    assert ["same", "first", "choice", "-", "93.1", "%", "at", "least", "90", "%"] in lines
    assert ["layer", "7", "51", "%", "16", "%"] in lines
    assert ["layer", "5", "mlp.fc", "40", "2000", "2", "%"] in lines
    assert lines[-1][:2] == ["failed:", "perplexity"]
    console.accuracy(replace(report, thresholds=LOOSE))
    assert capsys.readouterr().out.splitlines()[-1] == "int8-sq passes the accuracy gate"
