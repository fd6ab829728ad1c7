"""Size of vLLM's KV cache on a CPU, and where a number of tokens is asked for. vLLM itself: tests/e2e/test_vllm.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.factories import hf_folder
from trtpipe.engines.backends.vllm import cache_size

# Two layers of two heads of 8, keys and values: 256 bytes for a token in float32.
ARGUMENTS = {"max_num_seqs": 4, "max_model_len": 100, "block_size": 32, "dtype": "float32", "kv_cache_dtype": "auto"}


@pytest.mark.parametrize(
    ("changes", "tokens", "blocks", "token_bytes"),
    [
        ({}, None, 14, 256),  # 4 sequences of 100 tokens, and the block that vLLM keeps
        ({}, 640, 21, 256),
        ({}, 50, 5, 256),  # one sequence at least
        ({"dtype": "bfloat16"}, None, 14, 128),
        ({"kv_cache_dtype": "fp8"}, None, 14, 64),
        ({"max_num_seqs": 10**6}, None, 131073, 256),  # 1 GiB
    ],
)
def test_it_holds_the_tokens_asked_for(
    tmp_path: Path, changes: dict[str, object], tokens: int | None, blocks: int, token_bytes: int
) -> None:
    found = cache_size(hf_folder(tmp_path / "tiny"), {**ARGUMENTS, **changes}, tokens)
    assert found == {"num_gpu_blocks_override": blocks, "kv_cache_memory_bytes": blocks * 32 * token_bytes}


def test_a_quantized_folder_has_the_cache_of_its_model(tmp_path: Path) -> None:
    model = hf_folder(tmp_path / "tiny")
    plain = cache_size(model, ARGUMENTS, None)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    assert cache_size(model, ARGUMENTS, None) == plain
