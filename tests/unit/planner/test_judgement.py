"""One judgement: what `plan` calls impossible, `settings` and `build` refuse with the same words, before a download."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import CHECKPOINT, PHI3, QWEN3_MOE, hf_folder
from trtpipe.configs.facts import find_gpu, find_model, find_shape
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.split import check_mapping
from trtpipe.engines.errors import UsageError
from trtpipe.engines.hf import compressed_tensors
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.hf.stored import Stored
from trtpipe.engines.quantization import QuantAlgo, Quantization
from trtpipe.engines.reference.rope import rotary_tables
from trtpipe.pipeline.bench.load.files import find_load
from trtpipe.pipeline.bench.load.work import Work
from trtpipe.pipeline.layers import set_layer
from trtpipe.pipeline.planner.advice import Question, advise
from trtpipe.pipeline.planner.demand import Demand
from trtpipe.pipeline.planner.judgement import require_hosts
from trtpipe.pipeline.planner.precision import planned_precision
from trtpipe.pipeline.resolve import resolve
from trtpipe.pipeline.spec import BuildSpec

H100 = {"gpu": "h100", "dtype": "bf16"}
GROUPS = "groups of 64 (--group-size 64 or --set group_size=64)"


def made(model: str, *assignments: str, **options: Any) -> BuildSpec:
    return resolve([("option", {"model": model, **H100, **options}), set_layer(list(assignments))])


def refused(model: str, *assignments: str, **options: Any) -> str:
    with pytest.raises(UsageError) as error:
        made(model, *assignments, **options)
    return str(error.value)


def planned(
    model: str, gpu: str, dtype: str, tp: int = 1, load: str | None = None, runtime: str = "tensorrt_llm",
    group_size: int | None = None, moe_ep: int | None = None,
) -> str:  # fmt: skip
    """What `trtpipe plan` says of one option that cannot serve."""
    work = find_load(load).work if load else Work(input_tokens="512", output_tokens="256")
    asked = Question(
        model=model, shape=find_shape(model)[1], gpus=(find_gpu(gpu),), demand=Demand(work), dtypes=(dtype,), tps=(tp,),
        runtime=runtime, group_size=group_size, moe_eps=() if moe_ep is None else (moe_ep,),
    )  # fmt: skip
    asked = dataclasses.replace(asked, stored=find_model(model, source=None, revision=None).stored)
    try:
        (one,) = advise(asked).candidates
    except UsageError as error:
        return str(error)
    assert one.best is None
    return one.reason


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("llama3-70b", {"tp": 1}, "does not fit: the weights take 131.4 GiB of 78.1 on each of 1"),
        ("llama3-8b", {"tp": 3}, "tp_size 3 does not divide the 32 attention heads; tp sizes that fit: 1, 2, 4, 8, 16"),
        ("llama3-8b", {"gpu": "a100-mig-3g.40gb", "tp": 2}, "2 ranks cannot be on MIG slices (a100-mig-3g.40gb)"),
        ("llama3-8b", {"gpu": "v100"}, "v100 (SM70) cannot run TensorRT-LLM engines: TensorRT-LLM removed Volta"),
        (
            "llama3-8b",
            {"gpu": "l4", "dtype": "fp8-block", "runtime": "trtllm_pytorch"},
            "fp8-block does not run on l4 (SM89): it is known to run on SM90, SM100, SM103; use --dtype fp8, fp8-kv, "
            "int4-awq, int8-wo, w4a8-awq or bf16 here",
        ),
        ("llama3-8b", {"dtype": "w4a8-awq", "runtime": "vllm"}, "the runtime vllm does not run W4A8_AWQ"),
        ("tinyllama-1.1b", {"load": "chat"}, "the load asks for sequences of 6126 tokens, tinyllama-1.1b takes 2048"),
        ("llama2-7b", {"load": "chat"}, "the load asks for sequences of 6126 tokens, llama2-7b takes 4096"),
    ],
)
def test_plan_and_settings_say_the_same(model: str, options: dict[str, Any], words: str) -> None:
    assert words in refused(model, **options)
    assert words in planned(model, **{**H100, **options})


@pytest.mark.parametrize(
    ("model", "options", "remedy"),
    [
        # Each remedy works, below.
        ("llama2-7b", {"dtype": "int4-awq", "tp": 4}, f"use {GROUPS}, or tp sizes that fit: 1, 2"),
        ("smollm2-135m", {"dtype": "int4-awq"}, f"with {GROUPS} tp sizes that fit: 1, 3"),
        (
            "smollm2-135m",
            {"dtype": "w4a8-awq"},
            "with a precision without groups, blocks or tiles, such as fp8 or bf16, tp sizes that fit: 1, 3",
        ),
        ("smollm2-135m", {"dtype": "int8-wo", "tp": 9}, "intermediate_size 1536; tp sizes that fit: 1, 3"),
    ],
)
def test_a_remedy_names_what_works(model: str, options: dict[str, Any], remedy: str) -> None:
    assert remedy in refused(model, **options)
    assert remedy in planned(model, **{**H100, **options})


@pytest.mark.parametrize(
    ("model", "tp", "remedy"),
    [("llama2-7b", 4, "tp sizes that fit: 1, 2"), ("smollm2-135m", 1, "start from the model's bf16 or fp16 folder")],
)
def test_a_model_that_came_quantized_is_given_no_other_precision(model: str, tp: int, remedy: str) -> None:
    awq = Quantization(quant_algo=QuantAlgo.W4A16_AWQ, group_size=128)
    with pytest.raises(UsageError) as error:
        check_mapping(find_shape(model)[1], Mapping(tp_size=tp), quantization=awq, stored=True)
    assert error.value.remedy == remedy


def test_what_the_remedies_name_is_not_refused() -> None:
    assert made("llama2-7b", dtype="int4-awq", tp=4, group_size=64).quantization.group_size == 64
    assert made("llama2-7b", dtype="int4-awq", tp=2).mapping.tp_size == 2
    assert made("smollm2-135m", dtype="int4-awq", group_size=64, tp=3).mapping.tp_size == 3
    assert made("smollm2-135m", "group_size=64", dtype="int4-awq", tp=3).mapping.tp_size == 3
    assert made("smollm2-135m", dtype="int8-wo", tp=3).mapping.tp_size == 3
    assert {made("smollm2-135m", dtype=dtype, tp=3).mapping.tp_size for dtype in ("fp8", "bf16")} == {3}
    assert made("llama3-70b", tp=2).build.max_batch_size >= 8


def test_sizes_that_are_given_are_judged_too() -> None:
    assert refused("llama3-8b", "build.max_seq_len=100000000") == (
        "build.max_seq_len asks for sequences of 100000000 tokens, llama3-8b takes 8192; "
        "set build.max_seq_len=8192 or less"
    )
    assert "llama3.1-8b on l4 does not fit: " in refused("llama3.1-8b", "build.max_seq_len=131072", gpu="l4", tp=1)
    # A window bounds the cache of a sequence.
    window = "serving.max_attention_window_size=4096"
    assert made("llama3.1-8b", "build.max_seq_len=131072", window, gpu="l4", tp=1).build.max_batch_size > 1
    # The weights are not in the GPU's memory.
    assert made("llama3-70b", "build.weight_streaming=true", tp=1).build.weight_streaming
    tight = made("llama3-8b", "build.max_batch_size=2")
    assert (tight.build.max_batch_size, tight.build.max_num_tokens) == (2, 2 * 2048)


def test_vllm_s_kv_cache_is_judged_as_vllm_computes_it() -> None:
    long = ("build.max_seq_len=16384", "build.max_batch_size=1", "build.max_num_tokens=2048")
    assert refused("llama3.1-70b", *long, dtype="fp8", runtime="vllm", tp=1) == (
        "llama3.1-70b on h100 does not fit: 2.2 GiB are left for the KV cache with "
        "serving.kv_cache_free_gpu_mem_fraction=0.9, and a sequence of 16384 tokens takes 5.0; use --tp 2 or more, or "
        "a smaller --dtype or a larger GPU"
    )
    assert made("llama3.1-70b", *long, dtype="fp8", runtime="vllm").mapping.tp_size == 2
    assert made("llama3.1-70b", *long, dtype="fp8").mapping.tp_size == 1
    # Of 79.6 GiB, 0.9 are 71.7; TensorRT-LLM takes 0.9 of what 16.9 GiB leave.
    batches = [made("llama3-8b", runtime=one).build.max_batch_size for one in ("vllm", "tensorrt_llm")]
    assert batches == [448, 480]


def test_the_share_and_the_blocks_that_are_given_are_planned_with() -> None:
    def batch(*assignments: str) -> int:
        return made("llama3-8b", *assignments, tp=1).build.max_batch_size

    share = "serving.kv_cache_free_gpu_mem_fraction="
    assert (batch(), batch(f"{share}0.9"), batch(f"{share}0.3")) == (480, 480, 160)
    assert batch("build.tokens_per_block=1024", "build.max_seq_len=2560") < batch("build.max_seq_len=2560")
    small = f"{share}0.01"
    assert made("llama3-8b", small, gpu="l4").mapping.tp_size == 2
    assert refused("llama3-8b", small, gpu="l4", tp=1) == (
        "llama3-8b on l4 does not fit: 0.1 GiB are left for the KV cache with "
        "serving.kv_cache_free_gpu_mem_fraction=0.01, and a sequence of 2048 tokens takes 0.2; raise "
        "serving.kv_cache_free_gpu_mem_fraction, or use --tp 2 or more, or a smaller --dtype or a larger GPU"
    )
    # A larger share alone would not do.
    assert "raise" not in refused("llama3.1-8b", small, "build.max_seq_len=131072", gpu="l4", tp=1)


@pytest.mark.parametrize(
    ("given", "batch", "tokens"),
    [
        ((), 448, 8192),
        (("build.max_num_tokens=256",), 256, 256),
        (("build.speculative_decoding_mode=ngram", "build.max_draft_len=4"), 448, 8192),
        (("build.speculative_decoding_mode=ngram", "build.max_draft_len=20"), 448, 448 * 21),
        (
            ("build.max_num_tokens=256", "build.speculative_decoding_mode=ngram", "build.max_draft_len=4"),
            51, 256,
        ),
        (("build.max_batch_size=500", "build.speculative_decoding_mode=ngram", "build.max_draft_len=20"), 500, 10500),
    ],
)  # fmt: skip
def test_planned_sizes_go_with_those_that_are_given(given: tuple[str, ...], batch: int, tokens: int) -> None:
    build = made("llama3-8b", *given, runtime="vllm").build
    assert (build.max_batch_size, build.max_num_tokens) == (batch, tokens)


def test_planned_sizes_have_room_for_all_beams() -> None:
    build = made("llama3-8b", "build.max_beam_width=20").build
    assert (build.max_batch_size, build.max_num_tokens) == (480, 9600)
    spec = made("llama3-8b", "build.max_beam_width=20", "build.max_num_tokens=1024")
    assert spec.build.max_batch_size == 51
    (told,) = (one.source for one in spec.values if one.name == "build.max_batch_size")
    assert told == "the plan: what a step of 1024 tokens has room for"


def test_groups_of_experts_are_planned_as_they_are_built() -> None:
    """Four GPUs have whole experts each; a part of each expert on four has no whole groups of 128."""
    assert refused("qwen3-30b-a3b", dtype="int4-awq", tp=4).startswith("groups of 128 do not divide the 192 and ")
    spec = made("qwen3-30b-a3b", dtype="int4-awq", tp=4, moe_ep=4)
    assert (spec.mapping.tp_size, spec.mapping.moe_ep_size) == (4, 4)
    assert made("mixtral-8x7b", moe_ep=4).mapping == Mapping(tp_size=4, moe_ep_size=4)
    assert made("mixtral-8x7b", moe_tp=4).mapping == Mapping(tp_size=4)
    # Whatever --tp is given: no multiple of 3 would do.
    told = "moe_ep_size 3 does not divide the 8 experts; --moe-ep values that fit: 1, 2, 4, 8; --tp is a multiple of it"
    assert refused("mixtral-8x7b", moe_ep=3) == refused("mixtral-8x7b", tp=4, moe_ep=3) == told
    assert planned("mixtral-8x7b", "h100", "bf16", moe_ep=3) == told
    assert "mixtral-8x22b on l4 does not fit: " in refused("mixtral-8x22b", gpu="l4", moe_ep=2)
    assert refused("llama3-8b", moe_tp=4).startswith("moe_tp_size 4 does not make tp_size 1")


def test_two_hosts_are_named_and_not_chosen() -> None:
    told = "llama3.1-405b on h100 does not fit: the weights take 756.0 GiB of 78.1 on each of 1; use "
    smaller = "a smaller --dtype or a larger GPU"
    assert refused("llama3.1-405b") == f"{told}--tp 8 --pp 2 on two hosts, or {smaller}"
    assert refused("llama3.1-405b", "build.max_num_tokens=4096") == refused("llama3.1-405b")
    assert refused("llama3.1-405b", runtime="vllm") == f"{told}{smaller}"  # which is served on one
    assert made("llama3.1-405b", tp=8, pp=2).build.max_batch_size > 8
    assert (
        "16 h100 are more than the 8 of a host: the network between hosts is not predicted; "
        "`trtpipe settings --tp 8 --pp 2` says whether it fits two hosts"
    ) in planned("llama3.1-405b", "h100", "bf16", tp=16)


def test_a_host_of_fewer_gpus_may_be_written() -> None:
    others = "a smaller --dtype or a larger GPU, or write host_gpus into gpus/gh200.yaml of TRTPIPE_HOME"
    assert refused("llama3.1-70b", gpu="gh200").endswith(f"; use --tp 1 --pp 2 on two hosts, or {others}")
    assert refused("llama3.1-70b", gpu="gh200", runtime="vllm").endswith(f"; use {others}")


def test_ranks_of_vllm_are_on_one_host_as_deploy_has_them() -> None:
    told = (
        "a vllm engine of 16 ranks needs 2 nodes: on several, vLLM wants a Ray cluster, which is not written here; "
        "build with --runtime tensorrt_llm or trtllm_pytorch, or with fewer ranks, or write host_gpus into "
        "gpus/h100.yaml of TRTPIPE_HOME"
    )
    assert refused("llama3.1-405b", runtime="vllm", tp=8, pp=2) == told
    assert refused("llama3.1-405b", runtime="vllm", tp=16) == told
    assert planned("llama3.1-405b", "h100", "bf16", tp=16, runtime="vllm") == told
    # Nor is a mapping advised that would be refused.
    assert refused("llama3.1-405b", runtime="vllm", pp=2).endswith("; use a smaller --dtype or a larger GPU")
    assert made("llama3.1-405b", runtime="trtllm_pytorch", tp=8, pp=2).mapping.world_size == 16
    assert refused("llama3-8b", gpu="gh200", runtime="vllm", tp=2).startswith("a vllm engine of 2 ranks needs 2 nodes:")
    assert made("llama3-8b", gpu="gh200-144gb", runtime="vllm", tp=2).mapping.tp_size == 2
    require_hosts("vllm", 16, dataclasses.replace(find_gpu("h100"), host_gpus=16))


def test_a_slice_that_is_too_small_is_told_as_one() -> None:
    told = "does not fit: the weights take 15.0 GiB of 8.0 on each of 1"
    line = refused("llama3-8b", gpu="a100-mig-1g.10gb")
    assert line == f"llama3-8b on a100-mig-1g.10gb {told}; use a smaller --dtype or a larger GPU"


def test_no_size_stands_for_none_fits() -> None:
    for gpu in ("l4", "a10", "a100", "h100"):
        for model in ("llama3-8b", "llama3-70b"):
            for tp in (1, 2, 4):
                try:
                    assert made(model, gpu=gpu, tp=tp).build.max_batch_size > 1
                except UsageError as error:
                    assert "does not fit" in str(error)  # noqa: PT017


def test_a_short_model_gets_the_length_that_it_takes(tmp_path: Path) -> None:
    folder = str(hf_folder(tmp_path / "tiny"))
    for options in ({"gpu": "h100", "dtype": "fp8"}, {"gpu": "cpu", "dtype": "fp8"}):
        value = {one.name: (one.value, one.source) for one in made(folder, **options).values}
        assert value["calibration.seq_len"] == (256, "the most that tiny takes")
        assert value["build.max_seq_len"] == (256, "the most that tiny takes")
        assert value["build.max_input_len"] == (128, "half of what tiny takes")
    assert "build.max_seq_len asks for sequences of 257 tokens, tiny takes 256" in refused(
        folder, "build.max_seq_len=257", "build.max_input_len=64", gpu="cpu"
    )
    assert "calibration.seq_len is 512, and the model takes 256 tokens" in refused(
        folder, "calibration.seq_len=512", gpu="cpu", dtype="fp8"
    )


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 8192),
        ({"rope_type": "llama3", "factor": 8.0}, 8192),
        ({"type": "linear", "factor": 4.0}, 32768),
    ],
)
def test_the_longest_sequence_is_as_trtllm_build_computes_it(scaling: dict[str, Any] | None, longest: int) -> None:
    model = dataclasses.replace(find_shape("llama3-8b")[1], rotary_scaling=scaling)
    assert model.longest_sequence == longest


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_the_longest_sequence_of_yarn_is_the_one_that_vllm_takes(tmp_path: Path) -> None:
    folder = str(hf_folder(tmp_path / "tiny", rope_scaling=YARN))
    asked = ("build.max_seq_len=1024", "build.max_input_len=64")
    assert made(folder, *asked, runtime="tensorrt_llm").build.max_seq_len == 1024
    assert refused(folder, *asked, runtime="vllm") == (
        "build.max_seq_len asks for sequences of 1024 tokens, tiny takes 256: with the rotary scaling yarn vllm takes "
        "no more than max_position_embeddings; set build.max_seq_len=256 or less, or another max_position_embeddings "
        "in config.json"
    )
    assert made(folder, "build.max_input_len=64", runtime="vllm").build.max_seq_len == 256


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("scaling", "longest", "stated"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 256, "max_position_embeddings"),
        ({**LONGROPE, "original_max_position_embeddings": 64}, 64, "original_max_position_embeddings"),
        (LONGROPE, 256, None),
        ({"rope_type": "linear", "factor": 2.0}, 512, None),
    ],
)
def test_the_reference_runtime_plans_lengths_at_which_it_loads(
    tmp_path: Path, scaling: dict[str, Any], longest: int, stated: str | None
) -> None:
    folder = hf_folder(tmp_path / "tiny", rope_scaling=scaling)
    options = {"gpu": "cpu", "dtype": "fp32", "runtime": "reference"}
    spec = made(str(folder), **options)
    assert spec.build.max_seq_len == longest
    model = read_model_config(folder)
    config = dataclasses.replace(
        CHECKPOINT, head_size=model.head_size, max_position_embeddings=256, rotary_scaling=model.rotary_scaling
    )
    assert rotary_tables(config, longest)[0].shape == (longest, model.head_size)
    line = refused(str(folder), f"build.max_seq_len={longest + 1}", "build.max_input_len=32", **options)
    kind = scaling["rope_type"]
    why = f": with the rotary scaling {kind} reference takes no more than {stated}" if stated else ""
    assert line == (
        f"build.max_seq_len asks for sequences of {longest + 1} tokens, tiny takes {longest}{why}; "
        f"set build.max_seq_len={longest} or less"
    )


def test_only_the_reference_runtime_refuses_dynamic_scaling_with_alpha(tmp_path: Path) -> None:
    folder = str(hf_folder(tmp_path / "tiny", rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 1000.0}))
    assert refused(folder, gpu="cpu", runtime="reference") == (
        "the reference runtime does not compute the rotary scaling 'dynamic with alpha' of tiny: it computes "
        "linear, llama3, yarn, dynamic, longrope; use --runtime trtllm_pytorch or vllm"
    )
    for runtime in ("trtllm_pytorch", "vllm"):
        assert made(folder, runtime=runtime).build.max_seq_len == 256


@pytest.mark.parametrize(
    ("runtime", "kinds"),
    [
        ("tensorrt_llm", ("linear", "llama3", "yarn")),
        ("trtllm_pytorch", ("linear", "llama3", "yarn", "dynamic", "longrope")),
        ("vllm", ("linear", "llama3", "yarn", "dynamic", "longrope", "su", "ntk")),
        ("reference", ("linear", "llama3", "yarn", "dynamic", "longrope")),
    ],
)
def test_a_rotary_scaling_that_the_runtime_does_not_compute_is_refused(
    tmp_path: Path, runtime: str, kinds: tuple[str, ...]
) -> None:
    gpu = "cpu" if runtime == "reference" else "h100"
    taken = []
    for kind in ("linear", "llama3", "yarn", "dynamic", "longrope", "su", "ntk", "spiral"):
        folder = str(hf_folder(tmp_path / kind, rope_scaling={"type": kind, "factor": 2.0}))
        try:
            made(folder, runtime=runtime, gpu=gpu)
        except UsageError as error:
            assert f"the {runtime} runtime does not compute the rotary scaling '{kind}' of {kind}" in str(error)  # noqa: PT017
        else:
            taken.append(kind)
    assert tuple(taken) == kinds


def test_the_runtimes_that_compute_a_rotary_scaling_are_named(tmp_path: Path) -> None:
    folder = str(hf_folder(tmp_path / "tiny", rope_scaling={"type": "ntk", "factor": 2.0}))
    for line in (refused(folder), planned(folder, "h100", "bf16")):
        assert line.startswith("the tensorrt_llm runtime does not compute the rotary scaling 'ntk' of ")
        assert line.endswith("tiny: it computes linear, llama3, yarn; use --runtime vllm")


def test_only_tensorrt_llm_has_no_pipeline_stages_of_a_phi_3(tmp_path: Path) -> None:
    folder = str(hf_folder(tmp_path / "tiny", **PHI3))
    assert made(folder, runtime="vllm", pp=2).mapping.pp_size == 2
    for runtime in ("tensorrt_llm", "trtllm_pytorch"):
        line = refused(folder, runtime=runtime, pp=2)
        assert line.startswith("pp_size 2 is not for a Phi3ForCausalLM: TensorRT-LLM cannot divide its layers")


ROWS = compressed_tensors.make(Quantization(quant_algo=QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN), ["lm_head"])


def quantized_experts(folder: Path, config: dict[str, Any], **sizes: Any) -> Path:
    """A model with experts whose config.json says that it came quantized."""
    path = hf_folder(folder, **{**QWEN3_MOE, **sizes}, max_position_embeddings=1024) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return folder


def test_experts_that_came_quantized_are_judged_before_a_download(tmp_path: Path) -> None:
    folder = quantized_experts(tmp_path / "tiny", ROWS)
    line = (
        "experts are not quantized with FP8_PER_CHANNEL_PER_TOKEN in the format trtllm: no runtime computes them so; "
        "use --runtime vllm, or start from the unquantized model"
    )
    assert refused(str(folder), dtype="auto") == line
    assert planned(str(folder), "h100", "auto") == line
    assert made(str(folder), dtype="auto", runtime="vllm").precision.stored == "compressed-tensors"


def modelopt(algo: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"]}


def test_a_remedy_for_experts_that_came_quantized_names_no_runtime_that_refuses_them(tmp_path: Path) -> None:
    fresh = "start from the unquantized model"
    rows = str(quantized_experts(tmp_path / "rows", modelopt("FP8_PER_CHANNEL_PER_TOKEN")))
    for runtime, form in (("tensorrt_llm", "trtllm"), ("trtllm_pytorch", "hf"), ("vllm", "hf")):
        assert refused(rows, dtype="auto", runtime=runtime) == (
            f"experts are not quantized with FP8_PER_CHANNEL_PER_TOKEN in the format {form}: no runtime computes them "
            f"so; {fresh}"
        )
    coded = Quantization(quant_algo=QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN)
    stored = Stored(method="modelopt", quantization=coded, dtype=DataType.BFLOAT16)
    with pytest.raises(UsageError, match=fresh):  # so does `plan`
        planned_precision("m", find_shape("qwen3-30b-a3b")[1], stored, find_gpu("h100"), "vllm", "auto")
    smooth = str(quantized_experts(tmp_path / "smooth", modelopt("W8A8_SQ_PER_CHANNEL")))
    for runtime in ("tensorrt_llm", "trtllm_pytorch", "vllm"):
        assert refused(smooth, dtype="auto", runtime=runtime).endswith(f"; {fresh}")
    compressed = str(quantized_experts(tmp_path / "compressed", ROWS))
    for runtime in ("reference", "vllm"):
        line = refused(compressed, dtype="auto", runtime=runtime, gpu="cpu")
        assert line.endswith(f"; {fresh}")
        assert "--runtime" not in line
    assert refused(compressed, dtype="auto", runtime="trtllm_pytorch").endswith("; use --runtime vllm")


# Of at least one FP8 block in each direction.
BLOCKS = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128}


def test_experts_in_formats_that_are_not_written_are_read(tmp_path: Path) -> None:
    blocks = {
        "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "modelopt": modelopt("fp8_pb_wo"),
    }
    rows = str(quantized_experts(tmp_path / "rows", modelopt("W8A16"), **BLOCKS))
    assert made(rows, dtype="auto", runtime="trtllm_pytorch").precision.stored == "modelopt"
    for method, config in blocks.items():
        folder = str(quantized_experts(tmp_path / method, config, **BLOCKS))
        assert made(folder, dtype="auto", runtime="vllm").precision.stored == method


def test_a_setting_that_trtllm_build_would_turn_off_for_the_family() -> None:
    assert refused("mistral-7b", "build.reduce_fusion=true", tp=2) == (
        "build.reduce_fusion is not for a MistralForCausalLM: trtllm-build would turn it off with only a line in its "
        "log; leave it out"
    )
    assert made("llama3-8b", "build.reduce_fusion=true", tp=2).build.reduce_fusion


def test_a_recorded_spec_is_not_judged_again() -> None:
    recorded = made("llama3-8b", tp=1)
    layer = {**recorded.settings, "model": "llama3-70b"}
    assert "does not fit" in refused("llama3-70b", tp=1)
    assert resolve([("export", layer)], model=recorded.model).build == recorded.build
