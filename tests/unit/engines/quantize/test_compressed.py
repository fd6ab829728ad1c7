"""compressed-tensors folders beside llm-compressor's own of the same weights and scales; folding, and refusals."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.compressed_folders import CASES, DTYPES, digest, folder, write_model
from trtpipe.configs.facts import load_quant_recipes
from trtpipe.engines import BACKENDS
from trtpipe.engines.backends.base import checkpoint_form, runtimes_of
from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.hf import compressed_tensors
from trtpipe.engines.precision import with_group_size, with_kv_cache
from trtpipe.engines.quantization import COMPRESSED_TENSORS, QuantAlgo, Quantization
from trtpipe.engines.quantize import formats, job
from trtpipe.engines.quantize.folding import fold
from trtpipe.engines.quantize.packing import pack_int32
from trtpipe.engines.quantize.scales import LayerScales, LinearScales, save_scales
from trtpipe.engines.quantize.worker import work

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[4]
GOLDEN = ROOT / "tests/golden/llmcompressor.json"
NAMES = SourceNames()
LAYERS = 2


def quantization_of(case: str) -> Quantization:
    return dataclasses.replace(load_quant_recipes()[case].quantization, group_size=64 if case == "int4-awq" else 128)


def scales_of(theirs: dict[str, float], quantization: Quantization) -> list[LayerScales]:
    """The scales that llm-compressor found, as those of a calibration, and no smoothing."""
    largest = 127.5 if quantization.quant_algo is QuantAlgo.W8A8_SQ_PER_CHANNEL else 448.0
    widths = {name: 192 if name == NAMES.down else 128 for name in NAMES.linears}

    def amax(name: str) -> torch.Tensor | None:
        return torch.tensor(theirs[name] * largest) if name in theirs else None

    return [
        LayerScales(
            linears={
                name: LinearScales(
                    input_amax=amax(f"{NAMES.layer(index)}{name}.input_scale"),
                    smooth=torch.ones(width) if quantization.pre_quant_scale else None,
                )
                for name, width in widths.items()
            },
            k_amax=amax(f"{NAMES.layer(index)}self_attn.k_scale"),
            v_amax=amax(f"{NAMES.layer(index)}self_attn.v_scale"),
        )
        for index in range(LAYERS)
    ]


def written(scratch: Path, quantization: Quantization, scales: list[LayerScales], dtype: str) -> Path:
    """The tiny Llama as our worker writes it, in this process."""
    write_model(scratch / "model", dtype)
    save_scales(scales, scratch / "scales", quantization, NAMES)
    (scratch / "out").mkdir()
    spec = {
        "source": str(scratch / "model"), "out": str(scratch / "out"), "format": COMPRESSED_TENSORS, "dtype": dtype,
        "device": "cpu", "quantization": dataclasses.asdict(quantization), "scales_in": str(scratch / "scales"),
        "scales_out": None,
    }  # fmt: skip
    work(spec, lambda done, total: None)
    return scratch / "out"


def compare(theirs: dict[str, Any], out: Path, dtype: str) -> None:
    """Config, names, types and shapes, and every byte; codes in bfloat16 see below."""
    config, tensors = folder(out)
    assert config == theirs["quantization_config"]
    got = {name: digest(tensor) for name, tensor in tensors.items()}
    assert sorted(got) == sorted(theirs["tensors"])
    for name, (kind, shape, sha) in theirs["tensors"].items():
        assert got[name][:2] == [kind, shape], name
        # Where the model's type is bfloat16, llm-compressor rounds a weight over its scale to bfloat16 before it rounds
        # it to a code; the codes here are those of the exact quotient.
        if dtype == "float32" or not name.endswith(("_proj.weight", "weight_packed")):
            assert got[name][2] == sha, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_a_folder_is_llm_compressors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, dtype: str) -> None:
    # Its scales for four bits; ours are for AWQ.
    theirs_format = dataclasses.replace(formats.COMPRESSED_TENSORS, int4_max=7.5)
    monkeypatch.setattr("trtpipe.engines.quantize.encode.COMPRESSED_TENSORS", theirs_format)
    theirs = json.loads(GOLDEN.read_text())[f"{case} {dtype}"]
    quantization = quantization_of(case)
    out = written(tmp_path, quantization, scales_of(theirs["scalars"], quantization), dtype)
    compare(theirs, out, dtype)
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert compressed_tensors.parse(said, "config.json") == quantization


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(3600)
def test_the_golden_file_is_what_llm_compressor_writes(tmp_path: Path) -> None:
    """In an environment of its own: it wants other releases of transformers and numpy (2 GB, minutes)."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv/bin/python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "torch==2.13.0", "llmcompressor==0.14.0.1"], check=True)
    # -P: a module beside the script would hide one of llm-compressor's.
    script = [python, "-P", str(ROOT / "tests/support/compressed_folders.py"), str(tmp_path), str(tmp_path / "found")]
    subprocess.run(script, check=True)
    assert json.loads((tmp_path / "found").read_text()) == json.loads(GOLDEN.read_text())


def test_codes_are_packed_from_the_lowest_bits() -> None:
    four = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1, 7]], dtype=torch.int8)
    assert pack_int32(four, 4).tolist() == [[0x76543210, 0xF]]
    eight = torch.tensor([[-128, -127, -1, 0, 127]], dtype=torch.int8)
    assert pack_int32(eight, 8).tolist() == [[0x7F0100 - (1 << 31), 0xFF]]


# Smoothing


def block(
    x: torch.Tensor, linears: dict[str, torch.Tensor], others: dict[str, torch.Tensor], vectors: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Attention of four query heads of two on two key/value heads, and the MLP, without norms' means and residuals."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        out = (x * vectors.get(name, torch.ones(()))) @ linears[name].T
        return out + others[f"{name}.bias"] if f"{name}.bias" in others else out

    normed = x * others["input_layernorm.weight"]
    q, k, v = (linear(name, normed).view(len(x), -1, 2).transpose(0, 1) for name in (NAMES.q, NAMES.k, NAMES.v))
    k, v = (each.repeat_interleave(2, dim=0) for each in (k, v))
    mixed = (q @ k.transpose(1, 2)).softmax(-1) @ v
    x = linear(NAMES.o, mixed.transpose(0, 1).flatten(1))
    normed = x * others["post_attention_layernorm.weight"]
    gated = torch.nn.functional.silu(linear(NAMES.gate, normed)) * linear(NAMES.up, normed)
    return linear(NAMES.down, gated)


def test_folded_smoothing_changes_no_output_and_no_larger_input() -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    shapes = {
        NAMES.q: (8, 8), NAMES.k: (4, 8), NAMES.v: (4, 8), NAMES.o: (8, 8), NAMES.gate: (6, 8), NAMES.up: (6, 8),
        NAMES.down: (8, 6),
    }  # fmt: skip
    linears = {name: random(*shape) for name, shape in shapes.items()}
    # Linears of one input have one vector.
    one, two = random(8).exp(), random(8).exp()
    vectors = {NAMES.q: one, NAMES.k: one, NAMES.v: one, NAMES.gate: two, NAMES.up: two}
    vectors |= {NAMES.o: random(8).exp(), NAMES.down: random(6).exp()}
    others = {
        "input_layernorm.weight": random(8), "post_attention_layernorm.weight": random(8),
        f"{NAMES.v}.bias": random(4), f"{NAMES.q}.bias": random(8),
    }  # fmt: skip
    x, before = random(5, 8), dict(others)
    folded, largest = fold({name: (weight, vectors[name]) for name, weight in linears.items()}, others, NAMES, 2)
    plain = {name: weight for name, (weight, none) in folded.items() if none is None}
    expected = block(x, linears, before, vectors)
    assert torch.allclose(block(x, plain, others, {}), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    shared = vectors[NAMES.o].view(2, 2, 2).amin(dim=1).flatten()
    assert torch.allclose(plain[NAMES.v], linears[NAMES.v] * shared[:, None])
    assert largest == pytest.approx(float(shared.max()))
    assert torch.equal(others[f"{NAMES.q}.bias"], before[f"{NAMES.q}.bias"])


# Which runtime takes which format


@pytest.mark.parametrize(
    ("algo", "forms"),
    [
        ("FP8", {"reference": "trtllm", "tensorrt_llm": "trtllm", "trtllm_pytorch": "hf", "vllm": "hf"}),
        ("W8A8_SQ_PER_CHANNEL", {"reference": "trtllm", "tensorrt_llm": "trtllm", "vllm": "compressed-tensors"}),
        ("INT8_PER_CHANNEL_PER_TOKEN", {"vllm": "compressed-tensors"}),
        (
            "W4A16_AWQ",
            {
                "reference": "trtllm",
                "tensorrt_llm": "trtllm",
                "trtllm_pytorch": "hf",
                "vllm": "compressed-tensors",
            },
        ),
        ("W4A8_AWQ", {"reference": "trtllm", "tensorrt_llm": "trtllm", "trtllm_pytorch": "hf"}),
    ],
)
def test_a_runtime_takes_an_algorithm_in_a_format_that_it_reads(algo: str, forms: dict[str, str]) -> None:
    assert {runtime: checkpoint_form(runtime, QuantAlgo[algo]) for runtime in forms} == forms
    for runtime in BACKENDS.keys() - forms.keys():
        with pytest.raises(UsageError, match=f"^the runtime {runtime} does not run {algo}: it does not read the form"):
            checkpoint_form(runtime, QuantAlgo[algo])
    assert runtimes_of(QuantAlgo[algo]) == [runtime for runtime in forms if runtime != "reference"]


# What bad input gets


@pytest.mark.parametrize(
    ("case", "form", "message"),
    [
        (
            "w4a8-awq", COMPRESSED_TENSORS,
            "w4a8-awq cannot be written as compressed-tensors: that format has no place for W4A8_AWQ; "
            "use --format trtllm or hf",
        ),
        (
            "int8-pc-pt", "hf",
            "int8-pc-pt cannot be written as hf: that format has no place for INT8_PER_CHANNEL_PER_TOKEN; "
            "use --format compressed-tensors",
        ),
        (
            "fp8-block", "hf",
            "blocks of 128 do not divide the 128 and 192 input features at tp_size 1; with a precision without",
        ),
        ("int4-awq", COMPRESSED_TENSORS, "groups of 128 do not divide the 128 and 192 input features at tp_size 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path, case: str, form: str, message: str) -> None:
    write_model(tmp_path / "model", "bfloat16")
    with pytest.raises(UsageError) as error:
        job.check(tmp_path / "model", load_quant_recipes()[case], job.Layout(form=form))
    assert str(error.value).startswith(message)
    nvfp4 = with_kv_cache(load_quant_recipes()["fp8"], "nvfp4")
    with pytest.raises(UsageError, match=r"^an NVFP4 KV cache cannot be written as compressed-tensors: its scales"):
        job.check(tmp_path / "model", nvfp4, job.Layout(form=COMPRESSED_TENSORS))
    job.check(tmp_path / "model", with_group_size(load_quant_recipes()["int4-awq"], 64), job.Layout(form=form))


def test_a_linear_without_a_scale_is_named(tmp_path: Path) -> None:
    quantization = quantization_of("fp8-kv")
    found = [dataclasses.replace(one, linears={}) for one in scales_of({}, quantization)]
    with pytest.raises(InputDataError, match=r"scales lacks 'model\.layers\.0\.self_attn\.q_proj\.input_amax': the re"):
        written(tmp_path, quantization, found, "bfloat16")


def altered(**changes: Any) -> dict[str, Any]:
    """A config of INT8 with `changes` to its only scheme's weights."""
    config = compressed_tensors.make(Quantization(quant_algo=QuantAlgo.INT8_PER_CHANNEL_PER_TOKEN), ["lm_head"])
    config["config_groups"]["group_0"]["weights"].update(changes)
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (altered(symmetric=False), "weights cannot be read: it is not symmetric, and zero points are not read here"),
        (altered(actorder="group"), "weights cannot be read: its actorder is group, and reordered groups are not"),
        (
            altered(strategy="tensor"),
            "has int8 tensor weights and int8 token dynamic inputs: the schemes read",
        ),
        (altered(num_bits="8"), "weights: num_bits '8' and group_size 0 are not whole numbers"),
        ({**altered(), "ignore": []}, "cannot be read: it does not ignore lm_head, and quantized heads are not read"),
        (
            {**altered(), "ignore": ["lm_head", "model.layers.0.mlp.down_proj"]},
            "cannot be read: it ignores 'model.layers.0.mlp.down_proj', and layers of mixed precision are not read",
        ),
        ({**altered(), "config_groups": {}}, "config_groups is not an object with a scheme"),
        ({**altered(), "format": None, "config_groups": {"a": {}, "b": {}}}, "cannot be read: it has 2 schemes, a, b"),
        ({**altered(), "sparsity_config": {"format": "x"}}, "cannot be read: it has a sparsity_config"),
        (
            {**altered(), "kv_cache_scheme": {"num_bits": 8, "type": "int"}},
            "cannot be read: its KV cache is int8",
        ),
    ],
)
def test_a_config_that_is_not_computed_here_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputDataError) as error:
        compressed_tensors.parse(config, "config.json")
    assert str(error.value).startswith("config.json")
    assert message in str(error.value)


@pytest.mark.parametrize(
    "entry",
    [
        "model.layers.0.mlp.gate",
        "re:.*mlp.gate$",
        "re:.*\\.mlp\\.gate$",
        "re:^model.layers.3.mlp.gate",
        "re:mlp.gate.*",
    ],
)
def test_the_router_is_left_out_by_name_or_expression(entry: str) -> None:
    config = {**altered(), "ignore": ["lm_head", entry]}
    read = compressed_tensors.parse(config, "config.json", router="mlp.gate")
    assert read.quant_algo is QuantAlgo.INT8_PER_CHANNEL_PER_TOKEN
    for router, ignored in (("", entry), ("mlp.gate", "re:.*mlp.gate_proj$")):
        with pytest.raises(InputDataError, match="layers of mixed precision are not read here"):
            compressed_tensors.parse({**config, "ignore": ["lm_head", ignored]}, "config.json", router=router)


def test_sparse_weights_that_are_stored_with_their_zeros_are_read() -> None:
    dense = {"format": "dense", "global_sparsity": 0.14, "sparsity_structure": "unstructured"}
    read = compressed_tensors.parse({**altered(), "sparsity_config": dense}, "config.json")
    assert read.quant_algo is QuantAlgo.INT8_PER_CHANNEL_PER_TOKEN
