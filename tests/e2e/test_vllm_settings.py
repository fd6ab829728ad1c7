"""vLLM's own parser and config accept the command line of `vllm serve` for an engine, with each of its features."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.adapters import write_adapter
from tests.support.factories import hf_folder, write_safetensors
from tests.unit.test_runner import plan
from trtpipe.engines import load_backend
from trtpipe.engines.adapters import FOLDER
from trtpipe.engines.hf.adapter import lay_out, read_adapter
from trtpipe.engines.speculation import DRAFT
from trtpipe.pipeline.serving.engine_python import beside

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(
        beside() is None, reason="no vLLM beside this environment: `make setup-vllm`, on Linux x86-64 and Python 3.11"
    ),
]

# Reads command lines of the server, as JSON, and writes what vLLM makes of each.
PARSER = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
for line in sys.stdin:
    args = parser.parse_args(json.loads(line))
    made = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    speculative, lora, transfer = made.speculative_config, made.lora_config, made.kv_transfer_config
    print("FOUND", json.dumps({
        "sequences": made.scheduler_config.max_num_seqs,
        "speculation": speculative and [speculative.method, speculative.num_speculative_tokens],
        "ngrams": speculative and [speculative.prompt_lookup_min, speculative.prompt_lookup_max],
        "draft": speculative and speculative.draft_model_config.model,
        "lora": lora and [lora.max_lora_rank, lora.max_loras, lora.max_cpu_loras],
        "modules": [one.name for one in args.lora_modules or ()],
        "offloading": transfer and transfer.kv_connector,
    }))
"""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"speculative_decoding_mode": "ngram", "max_draft_len": 4},
    "draft_model": {"speculative_decoding_mode": "draft_model", "max_draft_len": 3},
    "eagle3": {"speculative_decoding_mode": "eagle3", "max_draft_len": 2},
    "lora": {"lora_plugin": "auto", "max_lora_rank": 9},
    "offloading": {},
}


def engine(root: Path, name: str) -> Path:
    """The files of an engine that vLLM's config reads."""
    folder = hf_folder(root / name, max_position_embeddings=256)
    build = dict(CASES[name])
    if build.get("speculative_decoding_mode") in ("draft_model", "eagle3"):
        draft = hf_folder(folder / DRAFT, num_hidden_layers=1, max_position_embeddings=256)
        build["speculative_model"] = str(draft)
    if name == "eagle3":
        path = folder / DRAFT / "config.json"
        head = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 64}
        path.write_text(json.dumps({**json.loads(path.read_text()), **head}))
        tensor = {"fc.weight": np.zeros((2, 6), np.uint16)}  # by which a head is told from a model
        write_safetensors(folder / DRAFT / "model.safetensors", tensor, "BF16")
    spec = plan(folder, gpu="cpu", dtype="bf16", runtime="vllm", build={"max_seq_len": 128, **build})
    for file, text in load_backend("vllm").rendered(spec.build, spec.engine_target).items():
        (folder / file).write_text(text)
    if name == "lora":
        (folder / FOLDER).mkdir()
        lay_out(read_adapter(write_adapter(root / "adapter", folder, rank=2)), "sql", folder / FOLDER)
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root, python = tmp_path_factory.mktemp("engines"), beside()
    lines = []
    for name in CASES:
        folder = engine(root, name)
        server = load_backend("vllm").native_server(
            folder, folder, host="127.0.0.1", port=9, names=("tiny",), on_cpu=True
        )
        more = ["--kv-offloading-size", "0.5"] if name == "offloading" else []
        lines.append(json.dumps([*server.command, *more]))
    environment = {**os.environ, **server.environment, "VLLM_CACHE_ROOT": str(root / "cache")}
    done = subprocess.run(
        [str(python), "-c", PARSER], input="\n".join(lines), env=environment, capture_output=True, text=True,
        timeout=300, cwd=root, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line.removeprefix("FOUND")) for line in done.stdout.splitlines() if line.startswith("FOUND")]
    return dict(zip(CASES, told, strict=True))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", {"speculation": None, "lora": None, "modules": [], "offloading": None}),
        ("ngram", {"speculation": ["ngram", 4], "ngrams": [2, 4]}),
        ("draft_model", {"speculation": ["draft_model", 3], "draft": "draft_model/draft"}),
        ("eagle3", {"speculation": ["eagle3", 2], "draft": "eagle3/draft"}),
        ("lora", {"lora": [16, 8, 64], "modules": ["tiny:sql"]}),
        ("offloading", {"offloading": "OffloadingConnector"}),
    ],
)
def test_settings_are_vllm_s(found: dict[str, dict[str, Any]], name: str, expected: dict[str, Any]) -> None:
    mine = found[name]
    if "draft" in expected:
        assert mine.pop("draft").endswith(expected.pop("draft"))
    assert {key: mine[key] for key in expected} == expected
