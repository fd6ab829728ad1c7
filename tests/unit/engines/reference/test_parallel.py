"""Tensor-parallel ranks in processes of their own, over gloo: the same numbers as in one process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.factories import hf_folder
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.checkpoint.layout import rank_file
from trtpipe.engines.engine_process.request import Request
from trtpipe.engines.errors import TrtpipeError
from trtpipe.engines.files import write_json
from trtpipe.engines.json_input import read_json
from trtpipe.engines.model_config import EmbeddingSharding
from trtpipe.engines.reference.runtime import Runtime

pytestmark = [pytest.mark.process, pytest.mark.loopback]

LIMITS = {
    "max_batch_size": 4, "max_input_len": 32, "max_seq_len": 64, "max_num_tokens": 32, "max_beam_width": 1,
    "plugin_config": {"tokens_per_block": 8},
}  # fmt: skip
# Runs an engine in ranks apart, says who they are, and goes on stepping until it is ended.
ENDLESS = """
import psutil, sys
from pathlib import Path
from trtpipe.engines.engine_process.request import Request
from trtpipe.engines.reference.runtime import Runtime
runtime = Runtime(Path(sys.argv[1]), apart=True)
print(psutil.Process().children()[0].pid, flush=True)
for number in range(10**6):
    runtime.submit(Request(id=number, prompt=(1, 2, 3), max_tokens=20))
    while runtime.has_work:
        runtime.step()
"""


def engine(folder: Path, embedding: EmbeddingSharding, *, pp: int = 1, tied: bool = False) -> Path:
    out = folder / "engine"
    out.mkdir()
    source = hf_folder(folder / "hf", tie_word_embeddings=tied)
    convert(source, out, dtype=DataType.FLOAT32, mapping=Mapping(tp_size=2, pp_size=pp), embedding=embedding)
    config = {"version": "test", "pretrained_config": read_json(out / "config.json", "config"), "build_config": LIMITS}
    write_json(out / "config.json", config)
    return out


def logits(runtime: Runtime) -> np.ndarray[Any, Any]:
    """Of three requests at once: of every prompt token and every new one."""
    found: list[np.ndarray[Any, Any]] = []
    for number in range(3):
        wanted: dict[str, Any] = {"return_context_logits": True, "return_generation_logits": True}
        runtime.submit(Request(id=number, prompt=tuple(range(3 + number, 14)), max_tokens=12, **wanted))
    while runtime.has_work:
        for output in runtime.step():
            for one in (output.context_logits, output.generation_logits):
                if one is not None:
                    found.append(one)
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("embedding", "pp", "tied"),
    [
        (EmbeddingSharding.NONE, 2, False),
        pytest.param(EmbeddingSharding.VOCABULARY, 1, True, marks=pytest.mark.slow),
        pytest.param(EmbeddingSharding.HIDDEN, 1, True, marks=pytest.mark.slow),
    ],
)
def test_apart_they_compute_the_same_numbers(tmp_path: Path, embedding: EmbeddingSharding, pp: int, tied: bool) -> None:
    folder = engine(tmp_path, embedding, pp=pp, tied=tied)
    together = logits(Runtime(folder, apart=False))
    runtime = Runtime(folder, apart=True)
    try:
        apart = logits(runtime)
    finally:
        runtime.close()
    # Two numbers have one sum; how wide a product is computed may depend on the threads.
    torch.testing.assert_close(torch.from_numpy(apart), torch.from_numpy(together), atol=1e-5, rtol=1e-5)
    assert len(apart) == 11 + 10 + 9 + 3 * 12
    assert apart.std() > 0.03


def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    folder = engine(tmp_path, EmbeddingSharding.NONE)
    path = rank_file(folder, 1)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TrtpipeError, match="rank1"):
        Runtime(folder, apart=True)


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that runs an engine of two ranks, in mid-work, and the process of its second rank."""
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    process = subprocess.Popen(
        [sys.executable, script, engine(tmp_path, EmbeddingSharding.NONE)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def test_the_engine_ends_with_a_rank_that_is_killed(endless: tuple[subprocess.Popen[str], int]) -> None:
    process, rank = endless
    os.kill(rank, signal.SIGKILL)
    assert process.wait(60) == 1
    assert process.stderr is not None
    assert "a tensor-parallel rank has ended, and with it the engine" in process.stderr.read()


@pytest.mark.slow  # that a process ends with the one that started it, test_process.py says
def test_a_rank_ends_with_the_engine_that_is_killed(endless: tuple[subprocess.Popen[str], int]) -> None:
    process, rank = endless
    descriptor = os.pidfd_open(rank)
    process.kill()
    assert select.select([descriptor], [], [], 60)[0]
