"""The download stage as tests run it, and what stands in for the hub and for the reader of GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.support.factories import hf_folder
from tests.support.hub_server import Hub, serving
from tests.unit.sources.test_hub import use
from trtpipe.engines import files
from trtpipe.engines.errors import TrtpipeError
from trtpipe.engines.model_source import Source
from trtpipe.engines.process import Progress
from trtpipe.pipeline.sources import hub
from trtpipe.pipeline.stages import download
from trtpipe.pipeline.stages.base import Job
from trtpipe.pipeline.stages.download import DOWNLOAD

WANTED = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
LINKED = 10_000


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The artefact's folder, empty; the weights count as large, the rest as small."""
    monkeypatch.setattr(files, "LINK_FROM_BYTES", LINKED)
    folder = tmp_path / "store" / "files"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "given")


def job(
    settings: Any, out: Path, show: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total: None, **inputs: Path,
) -> Job:  # fmt: skip
    return Job(
        settings=settings, inputs=inputs, digests={}, out=out, log=out.parent / "log", progress=progress, show=show
    )


def run(
    source: Source, out: Path, show: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:  # fmt: skip
    return DOWNLOAD.run(job(source, out, show, progress))


def refusal(source: Source, out: Path, kind: type[TrtpipeError], exit_code: int) -> str:
    with pytest.raises(kind) as error:
        run(source, out)
    assert error.value.exit_code == exit_code
    return str(error.value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """In place of the reader's process: makes the folder it would make, and keeps what it was asked."""
    asked: list[dict[str, Any]] = []

    def run_worker(module: str, spec: dict[str, Any], log: Path, *, what: str, progress: Progress) -> None:
        assert (module, what) == ("trtpipe.engines.hf.gguf_worker", "reading the GGUF file")
        asked.append({**spec, "bytes": Path(spec["gguf"]).read_bytes()})
        hf_folder(Path(spec["out"]))

    monkeypatch.setattr(download, "run_worker", run_worker)
    return asked


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as running:
        use(running, tmp_path / "hf", monkeypatch)
        yield running
        huggingface_hub.close_session()
    hub.resolve_commit.cache_clear()
