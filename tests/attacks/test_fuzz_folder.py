"""Damaged folders: each is refused by our own error class or is a sound folder; nothing else happens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.mutations import mutate
from tests.attacks.world import SHAPES
from tests.support.adapters import write_adapter
from tests.support.factories import MIXTRAL, PHI3, QWEN2, QWEN3, QWEN3_MOE, hf_folder
from tests.support.stored_folders import stored_folder
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.config import CheckpointError
from trtpipe.engines.checkpoint.convert import check_source, convert
from trtpipe.engines.checkpoint.restore import differences
from trtpipe.engines.errors import TrtpipeError
from trtpipe.engines.hf.adapter_check import checked_adapter
from trtpipe.engines.hf.draft import check_draft
from trtpipe.engines.hf.folder import locate_tensors, read_model_config
from trtpipe.engines.hf.inspection import inspect
from trtpipe.engines.hf.stored import read_stored

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": MIXTRAL,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
}


@pytest.mark.parametrize("rounds", [500, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_damage_is_always_told_in_our_own_words(tmp_path: Path, rounds: int, family: str) -> None:
    folder = hf_folder(tmp_path / "hf", shards=2, tokenizer=False, **{**SHAPES, **FAMILIES[family]})
    files = ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors")
    refusals = refused(
        folder, files, rounds, lambda: check_source(folder, read_model_config(folder), locate_tensors(folder))
    )
    # A changed epsilon or an extra key is no damage; most of the rest is.
    assert len(refusals) > rounds * 0.6


@pytest.mark.parametrize("rounds", [500, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["modelopt fp8", "ct int4", "fp8 blocks"])
def test_damage_to_a_folder_that_came_quantized_is_told_too(tmp_path: Path, case: str, rounds: int) -> None:
    folder = tmp_path / "quantized"
    stored_folder(folder, case)
    files = ["config.json", "config.json", "model.safetensors"]
    if case.startswith("modelopt"):
        details = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": details}))
        files.append("hf_quant_config.json")

    def look() -> None:
        stored, model = read_stored(folder), read_model_config(folder, quantized=True)
        if stored is not None:
            stored.check(str(folder), model, locate_tensors(folder))
            stored.describe()

    assert len(refused(folder, tuple(files), rounds, look)) > rounds * 0.4


@pytest.mark.parametrize("rounds", [200, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["mixtral", "phi3"])
def test_damage_to_a_checkpoint_is_told_too(tmp_path: Path, rounds: int, family: str) -> None:
    """`inspect` and `--verify-against` read one whose experts two groups of ranks share, and one of joined matrices."""
    experts = FAMILIES[family] | ({"num_local_experts": 2} if family == "mixtral" else {})
    source = hf_folder(tmp_path / "hf", tokenizer=False, **{**SHAPES, **experts, "sliding_window": 9})
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    convert(source, folder, dtype=None, mapping=Mapping(tp_size=2, moe_ep_size=2 if family == "mixtral" else 1))
    assert not inspect(folder).problems
    assert not differences(folder, source)

    def look() -> None:
        if problems := inspect(folder).problems:
            assert not [problem for problem in problems if "\n" in problem]
        if found := differences(folder, source):
            raise CheckpointError(found[0])

    refusals = refused(folder, ("config.json", "rank0.safetensors", "rank1.safetensors"), rounds, look)
    assert len(refusals) > rounds * 0.6


@pytest.mark.parametrize("rounds", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_damage_to_an_adapter_is_told_too(tmp_path: Path, rounds: int) -> None:
    model = hf_folder(tmp_path / "hf", tokenizer=False, **SHAPES)
    folder, facts = write_adapter(tmp_path / "adapter", model, rank=2), read_model_config(model)

    def look() -> None:
        checked_adapter(folder, facts, 2, DataType.FLOAT32)

    # Half of the rest changes a number, or what an adapter was trained with.
    assert len(refused(folder, ("adapter_config.json", "adapter_model.safetensors"), rounds, look)) > rounds * 0.4


@pytest.mark.parametrize("rounds", [200, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["draft_model", "eagle3"])
def test_damage_to_the_config_of_a_draft_model_is_told_too(tmp_path: Path, rounds: int, mode: str) -> None:
    model = read_model_config(hf_folder(tmp_path / "hf", tokenizer=False, **SHAPES))
    folder = hf_folder(tmp_path / "draft", tokenizer=False, **SHAPES)
    refusals = refused(folder, ("config.json",), rounds, lambda: check_draft(folder, mode, model))
    # Of a head, only the size of its vocabulary is known.
    assert len(refusals) > rounds * (0.3 if mode == "draft_model" else 0.1)


def refused(folder: Path, files: tuple[str, ...], rounds: int, look: Callable[[], object]) -> list[TrtpipeError]:
    """The refusals of `look` at the folder, each time with one file damaged; each is one line of our own."""
    sound = {folder / name: (folder / name).read_bytes() for name in files}
    rng = random.Random(rounds)
    refusals: list[TrtpipeError] = []
    for _ in range(rounds):
        path = rng.choice(list(sound))
        path.write_bytes(mutate(rng, path.name, sound[path]))
        try:
            look()
        except TrtpipeError as error:
            refusals.append(error)
        finally:
            path.write_bytes(sound[path])
    assert {error.exit_code for error in refusals} == {3}
    assert not [error for error in refusals if "\n" in str(error)]
    return refusals
