"""The server that the tests of this folder share, which the last of them kills."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.conftest import Cli, Served
from tests.support.factories import hf_folder

INSTANCES = 3
SETTINGS = (
    "build.max_batch_size=2", "build.max_input_len=64", "build.max_seq_len=8192", "build.max_num_tokens=64",
    "build.max_beam_width=1", "serving.max_queue_size=2", f"serving.engine_instance_count={INSTANCES}",
)  # fmt: skip


@pytest.fixture(scope="package")
def tiny(cli: Cli, serve: Callable[[str], Served], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tiny model whose longest answer takes many seconds, with room for two requests in flight and two waiting.

    Several of Triton's processes stand before its engine process.
    """
    model = hf_folder(tmp_path_factory.mktemp("models") / "faulty", dtype="F32", max_position_embeddings=8192)
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    cli.ok("build", "--model", str(model), "--gpu", "cpu", "--dtype", "fp32", *words)
    server = serve("faulty.cpu.fp32")
    yield server
    cli.kill_server(server.name)
