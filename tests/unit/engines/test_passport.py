"""An engine's passport: what it says, which machines it lets pass, and why it keeps the others out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from trtpipe.configs.facts import find_gpu, find_toolchain
from trtpipe.engines.backends.base import Target
from trtpipe.engines.base import Mapping
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import ArtefactRefused
from trtpipe.engines.nvidia import Gpu
from trtpipe.engines.passport import Passport, make_passport, objections, read_passport, remarks, require_target
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo, Quantization

GIB = 2**30


def target(**mapping: int) -> Target:
    quantization = Quantization(quant_algo=QuantAlgo.FP8, kv_cache_quant_algo=KvCacheQuantAlgo.FP8)
    return Target(
        gpu=find_gpu("h100"), mapping=Mapping(**mapping), quantization=quantization, toolchain=find_toolchain(None)
    )


def passport(at: Target | None = None, **changes: Any) -> Passport:
    made = make_passport(
        at or target(), BuildConfig(), runtime="tensorrt_llm", sms=(90,),
        versions={"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48"}, dtype="bfloat16", rank_bytes=9 * GIB,
        checkpoint="c0ffee", settings=("max_batch_size",), made={"gpu": "NVIDIA H100 80GB HBM3"}, accuracy=None,
        weights={"model": "org/tiny", "revision": "v1"},
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def gpu(name: str = "NVIDIA H100 80GB HBM3", sm: int = 90, driver: str = "590.44.01", gib: int = 80) -> Gpu:
    return Gpu(index=0, name=name, sm=sm, driver=driver, total_mib=gib * 1024, used_mib=0)


def test_what_it_says_and_that_it_is_read_back(tmp_path: Path) -> None:
    made = passport(target(tp_size=2))
    made.write(tmp_path)
    assert json.loads((tmp_path / "passport.json").read_text()) == {
        "runtime": "tensorrt_llm",
        "gpu": "h100",
        "sm": 90,
        "sms": [90],
        "toolchain": "1.2.1",
        "image": find_toolchain(None).image,
        "versions": {"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48"},
        "tp_size": 2,
        "pp_size": 1,
        "dtype": "bfloat16",
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "rank_bytes": 9 * GIB,
        "checkpoint": "c0ffee",
        "build_config": {"max_batch_size": 64},
        "made": {"gpu": "NVIDIA H100 80GB HBM3"},
        "accuracy": None,
        "weights": {"model": "org/tiny", "revision": "v1"},
    }
    assert read_passport(tmp_path) == made
    assert (made.world_size, made.target()) == (2, "h100 (SM90)")


@pytest.mark.parametrize(
    ("changes", "gpus", "expected"),
    [
        ({}, [gpu()], []),
        ({}, [dataclasses.replace(gpu(), total_mib=None, used_mib=None)], []),
        ({}, [gpu("NVIDIA H200")], []),
        ({"sms": None}, [], []),
        ({"sms": (89, 90)}, [gpu("NVIDIA L4", 89)], []),
        ({}, [], ["it is for h100 (SM90), and this machine has no NVIDIA GPU"]),
        (
            {},
            [gpu("NVIDIA A100-SXM4-80GB", 80)] * 2,
            ["it is for h100 (SM90), and this machine has NVIDIA A100-SXM4-80GB (SM80)"],
        ),
        ({"tp_size": 4}, [gpu(), gpu()], ["it has 4 ranks, and this machine has 2 GPU(s) that run it"]),
        ({}, [gpu(gib=8)], ["a rank's weights take 9.0 GiB, and the GPU has 8.0"]),
        ({}, [gpu(driver="575.57.08")], ["TensorRT-LLM 1.2.1 needs driver 590.44.01, and this machine has 575.57.08"]),
        (
            {"tp_size": 2},
            [gpu(driver="535.1")],
            [
                "it has 2 ranks, and this machine has 1 GPU(s) that run it",
                "TensorRT-LLM 1.2.1 needs driver 590.44.01, and this machine has 535.1",
            ],
        ),
    ],
)
def test_an_engine_runs_on_its_own_kind_of_gpu_alone(
    changes: dict[str, Any], gpus: list[Gpu], expected: list[str]
) -> None:
    assert objections(passport(**changes), gpus, floor=find_toolchain(None).driver) == expected


@pytest.mark.parametrize(("runtime", "ranks"), [("vllm", 4), ("trtllm_pytorch", 4), ("vllm", 2)])
def test_the_loader_of_a_hugging_face_folder_splits_its_weights(runtime: str, ranks: int) -> None:
    # What such a passport states is the size of the folder.
    made = passport(runtime=runtime, tp_size=ranks, toolchain=None, rank_bytes=131 * GIB + 2)
    machine = [gpu()] * ranks
    assert objections(made, machine) == []
    small = [gpu(gib=24)] * ranks
    share = {2: "65.5", 4: "32.8"}[ranks]
    assert objections(made, small) == [f"a rank's weights take {share} GiB, and the GPU has 24.0"]


def test_weights_of_a_rank() -> None:
    stated: dict[str, Any] = {"rank_bytes": 10, "tp_size": 2, "pp_size": 2}
    runtimes = ("reference", "tensorrt_llm", "trtllm_pytorch", "vllm", "of_another_version")
    assert [passport(runtime=name, **stated).gpu_bytes for name in runtimes] == [10, 10, 3, 3, 10]


def test_the_same_capability_on_another_product_is_worth_a_word() -> None:
    assert remarks(passport(), [gpu()]) == []
    assert remarks(passport(), [gpu("NVIDIA H200")]) == [
        "its kernels were chosen on NVIDIA H100 80GB HBM3; on NVIDIA H200 it runs, and others may be faster"
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gpu": "a100"}, "for gpu a100, and h100 is asked for"),
        ({"tp_size": 2}, "for tp_size 2, and 1 is asked for"),
        ({"toolchain": "0.21.0"}, "for toolchain 0.21.0, and 1.2.1 is asked for"),
    ],
)
def test_packaging_takes_no_engine_of_another_target(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    require_target(passport(), target(), tmp_path)
    with pytest.raises(ArtefactRefused, match=told):
        require_target(passport(**changes), target(), tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rank_bytes": "1"}, "rank_bytes: Input should be a valid integer"),
        ({"rank_bytes": -1}, "rank_bytes -1 is not a size"),
        ({"rank_bytes": float("nan")}, "rank_bytes: Input should be"),
        ({"tp_size": 0}, "tp_size 0 and pp_size 1 are not numbers of ranks"),
        ({"tp_size": 10**9}, "tp_size 1000000000 and pp_size 1 are not numbers of ranks"),
        ({"image": 1}, "image: Input should be a valid string"),
        ({"sms": ["90"]}, r"sms\.0: Input should be a valid integer"),
        ({"build_config": None}, "build_config: Input should be"),
        ({"made": {"gpu": 1}}, r"made\.gpu: Input should be a valid string"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_one_that_says_anything_else_is_refused(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    passport().write(tmp_path)
    path = tmp_path / "passport.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ArtefactRefused, match=told):
        read_passport(tmp_path)


def test_one_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "passport.json").write_text('{"runtime": "tensorrt_llm"}')
    with pytest.raises(ArtefactRefused, match=r"passport\.json is of another version: .*; build the engine again"):
        read_passport(tmp_path)
