"""Download from the hub, whose config.json and the space on disk are judged first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import CONFIG
from tests.support.hub_server import Hub
from tests.unit.stages.conftest import WANTED, names, refusal, run
from tests.unit.test_runner import SIZES, Recorder
from trtpipe.engines.errors import InputDataError, TrtpipeError
from trtpipe.engines.files import DiskFull
from trtpipe.engines.hf.folder import UnknownModel
from trtpipe.engines.model_source import HubSource
from trtpipe.pipeline.layers import set_layer
from trtpipe.pipeline.resolve import resolve
from trtpipe.pipeline.runner import execute
from trtpipe.pipeline.stages.download import DOWNLOAD
from trtpipe.pipeline.store.digests import Digests
from trtpipe.pipeline.store.store import Store


@pytest.mark.loopback
def test_a_repository_is_pinned_and_its_commit_recorded(server: Hub, folder: Path, out: Path, tmp_path: Path) -> None:
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    template = "additional_chat_templates/tool_use.jinja"
    others = {"additional_chat_templates/rag.jinja": b"", "README.md": b"", "pytorch_model.bin": b""}
    commit = server.add("acme/tiny", {**content, template: b"for tools", **others})
    source = HubSource(repo_id="acme/tiny")
    assert DOWNLOAD.sources(source, Digests(tmp_path / "digests.json")) == {"acme/tiny": commit}
    # The branch moves between planning and downloading: what was planned is what is downloaded.
    server.add("acme/tiny", {**content, "config.json": b"{}"})
    assert run(source, out) == {"source": "Hugging Face acme/tiny@main", "commit": commit}
    assert names(out) == ["additional_chat_templates", *WANTED]
    assert names(out / "additional_chat_templates") == ["tool_use.jinja"]
    assert (out / template).read_bytes() == b"for tools"
    assert {name: (out / name).read_bytes() for name in WANTED} == content
    assert not any(path.is_symlink() for path in out.iterdir())


@pytest.mark.loopback
def test_a_repository_of_another_kind(server: Hub, folder: Path, out: Path) -> None:
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    server.add("acme/bert", {**content, "config.json": b'{"architectures": ["BertModel"]}'})
    assert "describes a BertModel" in refusal(HubSource(repo_id="acme/bert"), out, UnknownModel, 3)
    assert names(out) == []


def built(model: str, tmp_path: Path, *assignments: str, until: str = "download", **options: Any) -> None:
    spec = resolve(
        [
            ("option", {"model": model, "gpu": "cpu", "dtype": "fp32", **options}),
            set_layer(SIZES),
            set_layer(list(assignments)),
        ]
    )
    execute(spec, Store(tmp_path / "home"), Recorder(), until=until)


@pytest.mark.loopback
@pytest.mark.parametrize(
    ("config", "options", "line"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, {}, "describes a GemmaForCausalLM"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            {},
            "is quantized by gptq: the methods read here are modelopt, compressed-tensors, fp8; start from",
        ),
        ({"mlp_bias": True}, {}, "has biases in its feed-forward layers"),
        ({}, {"tp": 3}, "tp_size 3 does not divide the 4 attention heads; tp sizes that fit: 1, 2, 4"),
        ({}, {"pp": 9}, "pp_size 9 exceeds the 2 layers"),
        ({"max_position_embeddings": 100}, {}, "build.max_seq_len asks for sequences of 128 tokens, tiny takes 100"),
        (
            {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 100},
            {"gpu": "h100", "dtype": "bf16"},
            "tiny on h100 does not fit: the weights take 750.0 GiB of 78.1 on each of 1; use a smaller --dtype",
        ),
    ],
)
def test_config_json_comes_first_and_is_judged(
    server: Hub,
    folder: Path,
    in_folder: Path,
    tmp_path: Path,
    config: dict[str, Any],
    options: dict[str, Any],
    line: str,
) -> None:
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    server.add("acme/tiny", {**content, "config.json": json.dumps({**CONFIG, **config}).encode()})
    with pytest.raises(TrtpipeError) as error:
        built("acme/tiny", tmp_path, **options)
    assert line in str(error.value)
    assert server.fetched() == ["config.json"]


@pytest.mark.loopback
def test_the_tokenizer_is_judged_before_the_weights_come(
    server: Hub, folder: Path, in_folder: Path, tmp_path: Path
) -> None:
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    server.add("acme/tiny", {**content, "tokenizer.json": b"{}"})
    with pytest.raises(InputDataError, match=r"tokenizer\.json is not a tokenizer"):
        built("acme/tiny", tmp_path)
    assert server.fetched() == ["config.json", "tokenizer.json"]


@pytest.mark.loopback
@pytest.mark.parametrize(
    ("kind", "free", "until"), [("hub", 1000, "download"), ("hub", 100_000, "convert"), ("folder", 1000, "convert")]
)
def test_the_disk_for_what_is_to_come_is_looked_at_first(
    server: Hub,
    folder: Path,
    in_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    free: int,
    until: str,
) -> None:
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert 50_000 < sum(map(len, content.values())) < 100_000
    server.add("acme/tiny", content)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    with pytest.raises(DiskFull, match=r"the build of (tiny|given) needs about [\d.]+ kB of disk") as error:
        built("acme/tiny" if kind == "hub" else str(folder), tmp_path, until=until)
    assert error.value.exit_code == 4
    assert "`trtpipe gc`" in error.value.remedy
    assert server.fetched() == (["config.json"] if kind == "hub" else [])


def test_the_disk_for_a_package_is_looked_at_first(
    in_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=64 << 20))
    with pytest.raises(
        DiskFull, match=r"^the build of smollm2-135m needs about 977\.0 MB of disk and .* has 67\.1 MB free"
    ):
        built("smollm2-135m", tmp_path, until="convert")


@pytest.mark.loopback
def test_a_repository_without_a_tokenizer_is_refused_first(
    server: Hub, folder: Path, in_folder: Path, tmp_path: Path
) -> None:
    content = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "tokenizer.json"}
    server.add("acme/tiny", content)
    with pytest.raises(InputDataError, match=r"acme/tiny has no tokenizer\.json"):
        built("acme/tiny", tmp_path)
    assert server.fetched() == []
