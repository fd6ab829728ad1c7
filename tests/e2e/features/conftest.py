"""The server that the tests of this folder share: adapters, drafts of another model and traces do not meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli, Served
from tests.support.adapters import write_adapter
from tests.support.factories import hf_folder
from tests.support.otlp import Collector, collector

TARGET = "adapted.cpu.fp32"


@dataclass(frozen=True)
class Front:
    """The server, the folders behind it, and what it tells a collector of traces."""

    served: Served
    model: Path
    run: Path
    received: Collector

    @property
    def engine(self) -> Path:
        return (self.run / "engine").resolve()


@pytest.fixture(scope="package")
def front(cli: Cli, serve: Callable[..., Served], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A model with an adapter that drafts for itself."""
    folder = tmp_path_factory.mktemp("models") / "adapted"
    model = hf_folder(folder, dtype="F32", max_position_embeddings=8192, seed=3)
    adapter = write_adapter(model.parent / "first", model, size=3)
    settings = (
        "build.max_batch_size=4", "build.max_input_len=64", "build.max_seq_len=8192", "build.max_num_tokens=64",
        "build.max_lora_rank=8", "build.speculative_decoding_mode=draft_model", "build.max_draft_len=3",
        f"build.speculative_model={model}", "serving.bls_instance_count=1",
    )  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    cli.ok("build", "--model", str(model), "--gpu", "cpu", "--dtype", "fp32", "--lora", f"first={adapter}", *words)
    with pytest.MonkeyPatch.context() as patch, collector() as received:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        served = serve(TARGET, "--otlp-endpoint", received.url)
        yield Front(served, model, cli.folder / "runs" / TARGET, received)
        cli.kill_server(TARGET)
