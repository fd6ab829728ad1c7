"""Artefacts of a hostile sender: none takes the place of one's own build, and none brings code."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tests.support.factories import hf_folder
from tests.unit.test_runner import Recorder, plan
from trtpipe.engines.errors import ArtefactRefused, InputDataError, TrtpipeError
from trtpipe.pipeline.compatibility import require_trusted
from trtpipe.pipeline.registry import export, provenance, transfer
from trtpipe.pipeline.registry.address import open_registry
from trtpipe.pipeline.registry.package import describe
from trtpipe.pipeline.registry.trust import Trust
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.runner import execute, status
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages import to_finish
from trtpipe.pipeline.store.digests import combined
from trtpipe.pipeline.store.manifest import Record
from trtpipe.pipeline.store.scrub import scrub
from trtpipe.pipeline.store.store import Store

TARGET = "tiny.cpu.bf16"

Members = dict[str, bytes]


@pytest.fixture
def wanted(in_folder: Path) -> BuildSpec:
    return plan(hf_folder(in_folder / "tiny"), gpu="cpu", dtype="bf16")


@pytest.fixture
def honest(wanted: BuildSpec, tmp_path: Path) -> Store:
    """The store of whoever sends the target."""
    store = Store(tmp_path / "sender")
    execute(wanted, store, Recorder())
    return store


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private key and its public one."""
    key = generate_private_key(SECP256R1())
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


def victim(tmp_path: Path) -> Store:
    shutil.rmtree("runs")
    return Store(tmp_path / "victim")


def members(path: Path) -> Members:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def written(path: Path, content: Members) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def replaced(path: Path, name: str, data: bytes) -> Path:
    """The export with another content of one file, and every digest in it made to fit."""
    content = members(path)
    content[name] = data
    index = json.loads(content["trtpipe.json"])
    makes, _, file = name.partition("/")
    entry = index["artefacts"][makes]
    entry["files"] = [one for one in entry["files"] if one["path"] != file]
    entry["files"].append({"path": file, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    entry["content"] = combined((one["path"], one["sha256"]) for one in entry["files"])
    told = index["provenance"]
    for stage in told["predicate"]["runDetails"]["byproducts"]:
        if stage["name"] == makes:
            stage["digest"]["sha256"] = entry["content"]
            stage["annotations"]["files"] = entry["files"]
    told["predicate"]["runDetails"]["byproducts"] = [
        stage
        for stage in told["predicate"]["runDetails"]["byproducts"]
        if stage["name"] in ("model", *index["artefacts"])
    ]
    kept = told["predicate"]["runDetails"]["byproducts"]
    told["subject"] = [{"name": stage["name"], "digest": stage["digest"]} for stage in kept]
    told["predicate"]["buildDefinition"]["resolvedDependencies"] = provenance._dependencies(provenance.stages(told))
    content["trtpipe.json"] = json.dumps(index).encode()
    return written(path.with_name("hostile.tar"), content)


def zeroed(path: Path) -> Path:
    weights = "checkpoint/rank0.safetensors"
    data = members(path)[weights]
    header = 8 + int.from_bytes(data[:8], "little")
    return replaced(path, weights, data[:header] + bytes(len(data) - header))


def weights(run: RunFolder) -> bytes:
    return (run.linked("checkpoint") / "rank0.safetensors").read_bytes()


def test_zeroed_weights_with_an_honest_record_are_never_reused(
    honest: Store, wanted: BuildSpec, tmp_path: Path
) -> None:
    hostile = zeroed(export.pack(TARGET, honest, tmp_path / "out.tar"))
    right = weights(RunFolder.of(TARGET))
    store = victim(tmp_path)
    arrived = export.unpack(hostile, store)
    assert not any(weights(RunFolder.of(TARGET))[-100:]), "the attack is what it says"
    assert arrived.artefacts["checkpoint"].manifest.record == honest_record(honest)

    states = {one.stage: (one.state, one.reason) for one in status(wanted, store)}
    assert states["convert"] == ("imported", f"imported from {hostile}, not built here")
    reporter = Recorder()
    execute(arrived.spec, store, reporter, given=arrived.artefacts)
    assert f"checkpoint: imported from {hostile}, not built here" in reporter.notes
    assert RunFolder.of(TARGET).imports() == [
        f"the tokenizer was imported from {hostile}, not built here",
        f"the checkpoint was imported from {hostile}, not built here",
    ]
    told = provenance.verify(RunFolder.of(TARGET), store).lines
    assert next(line for line in told if line.startswith("checkpoint")).endswith(
        f", imported from {hostile}, not built here"
    )

    results = {one.stage: one.reused for one in execute(wanted, store, Recorder())}
    assert results == dict.fromkeys(("download", "tokenizer", "convert", "build", "package"), False)
    assert weights(RunFolder.of(TARGET)) == right
    assert [one.fault for one in scrub(store)] == [None] * 9, "five of one's own; two imported, and what they led to"


def honest_record(store: Store) -> Record:
    (folder,) = (store.home / "artefacts" / "convert").iterdir()
    return Record(**json.loads((folder / "manifest.json").read_text())["record"])


def test_trust_is_given_by_name(honest: Store, wanted: BuildSpec, tmp_path: Path) -> None:
    path = export.pack(TARGET, honest, tmp_path / "out.tar")
    store = victim(tmp_path)
    export.unpack(path, store)
    results = {one.stage: one for one in execute(wanted, store, Recorder(), trust=Trust(origins=(str(path),)))}
    assert results["convert"].reused
    assert results["convert"].reason == f"imported from {path}, not built here; its origin is trusted by name"
    by_path = Trust(origins=("../out.tar",))
    shutil.rmtree(store.home / "artefacts")
    assert {one.stage: one for one in execute(wanted, store, Recorder(), trust=by_path)}["convert"].reused
    elsewhere = Trust(origins=(str(tmp_path / "other.tar"), "oci://registry.example/team"))
    assert not any(one.reused for one in execute(wanted, Store(tmp_path / "second"), Recorder(), trust=elsewhere))


def test_trust_is_given_by_a_verified_signature(
    honest: Store, wanted: BuildSpec, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    private, public = keys
    path = export.pack(TARGET, honest, tmp_path / "out.tar", sign_key=private)
    store = victim(tmp_path)
    export.unpack(path, store, trust_keys=(public,))
    results = {one.stage: one for one in execute(wanted, store, Recorder(), trust=Trust(keys=(public,)))}
    assert results["convert"].reason.endswith("not built here; its provenance is signed by a trusted key")

    # The same envelope beside other bytes, and another's key.
    content = members(path)
    index = json.loads(content["trtpipe.json"])
    signed = index["provenance"]
    plain = {**index, "provenance": provenance.unwrapped(signed)}
    hostile = zeroed(written(tmp_path / "plain.tar", content | {"trtpipe.json": json.dumps(plain).encode()}))
    content = members(hostile)
    index = {**json.loads(content["trtpipe.json"]), "provenance": signed}
    content["trtpipe.json"] = json.dumps(index).encode()
    with pytest.raises(ArtefactRefused, match="the provenance does not hold: the checkpoint is"):
        export.unpack(written(tmp_path / "mixed.tar", content), Store(tmp_path / "third"))
    with pytest.raises(ArtefactRefused, match=r"plain\.tar|the provenance is not signed"):
        export.unpack(tmp_path / "plain.tar", Store(tmp_path / "third"), trust_keys=(public,))


def test_a_signed_target_comes_through_a_registry(honest: Store, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    shelf = open_registry(str(tmp_path / "shelf"))
    transfer.push(TARGET, shelf, honest, sign_key=private)
    store = victim(tmp_path)
    transfer.pull(TARGET, shelf, store, trust_keys=(public,))
    path = tmp_path / "shelf" / "targets" / f"{TARGET}.json"
    index = json.loads(path.read_text())
    index["provenance"]["signatures"][0]["sig"] = index["provenance"]["signatures"][0]["sig"][::-1]
    path.write_text(json.dumps(index))
    with pytest.raises(TrtpipeError):
        transfer.pull(TARGET, shelf, Store(tmp_path / "third"), trust_keys=(public,))


def test_two_origins_are_never_mixed_in_one_target(honest: Store, tmp_path: Path) -> None:
    shelf = open_registry(str(tmp_path / "shelf"))
    transfer.push(TARGET, shelf, honest)
    path = export.pack(TARGET, honest, tmp_path / "out.tar")
    store = victim(tmp_path)
    transfer.pull(TARGET, shelf, store)
    arrived = export.unpack(path, store)
    assert export.imported(TARGET, store) == arrived
    assert {origin.source for origin in RunFolder.of(TARGET).origins().values()} == {str(path)}
    assert not (RunFolder.of(TARGET).path / "engine").exists()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("tokenizer/evil.py", ArtefactRefused, r"the tokenizer holds evil\.py: only data is taken"),
        ("checkpoint/model.so", ArtefactRefused, r"the checkpoint holds model\.so: only data is taken"),
        ("checkpoint/pytorch_model.bin", ArtefactRefused, r"holds pytorch_model\.bin: only data is taken"),
        ("checkpoint/../../../out.json", InputDataError, "it leads out of its folder"),
    ],
)
def test_code_does_not_travel(
    honest: Store, tmp_path: Path, name: str, error: type[TrtpipeError], message: str
) -> None:
    hostile = replaced(export.pack(TARGET, honest, tmp_path / "out.tar"), name, b"import os")
    store = victim(tmp_path)
    with pytest.raises(error, match=message):
        export.unpack(hostile, store)
    assert not list(store.home.rglob("files/*"))


@pytest.mark.parametrize("runtime", ["vllm", "trtllm_pytorch"])
def test_settings_of_a_runtime_are_those_that_are_written_here(in_folder: Path, tmp_path: Path, runtime: str) -> None:
    asked = plan(hf_folder(in_folder / "tiny"), gpu="h100", dtype="bf16", runtime=runtime)
    sender, shelf = Store(tmp_path / "sender"), open_registry(str(tmp_path / "shelf"))
    execute(asked, sender, Recorder())
    transfer.push(asked.target, shelf, sender, ("engine", "tokenizer", "checkpoint"))
    store = victim(tmp_path)
    transfer.pull(asked.target, shelf, store, any_machine=True)

    (settings,) = RunFolder.of(asked.target).linked("engine").glob("*.yaml")
    text = settings.read_bytes() + b"trust_remote_code: true\n"
    blob = tmp_path / "shelf" / "blobs" / hashlib.sha256(text).hexdigest()
    blob.write_bytes(text)
    path = tmp_path / "shelf" / "targets" / f"{asked.target}.json"
    path.write_text(json.dumps(with_file(json.loads(path.read_text()), settings.name, text)))
    third = Store(tmp_path / "third")
    refusal = f"the engine's {settings.name} is not what trtpipe .* writes for its settings: it says what .* runs; "
    with pytest.raises(ArtefactRefused, match=refusal + r"take its checkpoint \(--only checkpoint,tokenizer\) and"):
        transfer.pull(asked.target, shelf, third, any_machine=True)
    index = json.loads(path.read_text())
    del index["artefacts"]["checkpoint"]  # as a push leaves it out
    path.write_text(json.dumps(index))
    with pytest.raises(ArtefactRefused, match=refusal + "build the target with this version, here or where it comes"):
        transfer.pull(asked.target, shelf, third, any_machine=True)
    assert not (third.home / "imported").exists(), "nothing is fetched for it"


def test_an_export_brings_no_engine(in_folder: Path, tmp_path: Path) -> None:
    asked = plan(hf_folder(in_folder / "tiny"), gpu="h100", dtype="bf16", runtime="vllm")
    sender = Store(tmp_path / "sender")
    execute(asked, sender, Recorder())
    content = members(export.pack(asked.target, sender, tmp_path / "out.tar"))
    index, made = describe(asked.target, sender, {*to_finish(asked), "engine"})
    engine = made["engine"].path
    content |= {f"engine/{file.relative_to(engine)}": file.read_bytes() for file in engine.rglob("*") if file.is_file()}
    content["engine/engine_args.yaml"] += b"trust_remote_code: true\n"
    told = with_file(json.loads(json.dumps(index)), "engine_args.yaml", content["engine/engine_args.yaml"])
    content["trtpipe.json"] = json.dumps(told).encode()
    store = victim(tmp_path)
    with pytest.raises(ArtefactRefused, match=rf"hostile\.tar holds the engine of {asked.target}: an export holds"):
        export.unpack(written(tmp_path / "hostile.tar", content), store)
    assert not list(store.home.rglob("files/*"))
    assert not Path("runs").exists()


def with_file(index: dict[str, Any], name: str, data: bytes) -> dict[str, Any]:
    """An index whose engine has another file, with every digest made to fit."""
    entry, told = index["artefacts"]["engine"], index["provenance"]
    for file in entry["files"]:
        if file["path"] == name:
            file |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    entry["content"] = combined((one["path"], one["sha256"]) for one in entry["files"])
    stages = [one for one in told["predicate"]["runDetails"]["byproducts"] if one["name"] != "repository"]
    for stage in stages:
        if stage["name"] == "engine":
            stage["digest"]["sha256"] = entry["content"]
            stage["annotations"]["files"] = entry["files"]
    told["predicate"]["runDetails"]["byproducts"] = stages
    told["subject"] = [{"name": stage["name"], "digest": stage["digest"]} for stage in stages]
    return index


def edit_script(repository: Path) -> None:
    with (repository / "preprocessing" / "1" / "model.py").open("a") as file:
        file.write("\nimport os\n")


def add_module(repository: Path) -> None:
    (repository / "tensorrt_llm" / "1" / "model.py").write_text("import os\n")


def add_package(repository: Path) -> None:
    (repository / "postprocessing" / "1" / "numpy").mkdir()
    (repository / "postprocessing" / "1" / "numpy" / "__init__.py").write_text("import os\n")


def add_library(repository: Path) -> None:
    (repository / "tensorrt_llm" / "libtriton_tensorrtllm.so").write_bytes(b"\x7fELF")


def add_link(repository: Path) -> None:
    outside = repository.parent / "outside"
    outside.mkdir()
    (outside / "evil.py").write_text("import os\n")
    (repository / "preprocessing" / "1" / "lib").symlink_to(outside)


def name_environment(repository: Path) -> None:
    path = repository / "preprocessing" / "config.pbtxt"
    row = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }\n'
    path.write_text(path.read_text() + row)


def name_script(repository: Path) -> None:
    path = repository / "preprocessing" / "config.pbtxt"
    path.write_text(path.read_text() + 'default_model_filename: "model.txt"\n')
    (repository / "preprocessing" / "1" / "model.txt").write_text("import os\n")


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (edit_script, "preprocessing/1/model.py"),
        (add_module, "tensorrt_llm/1/model.py"),
        (add_package, "postprocessing/1/numpy/__init__.py"),
        (add_library, "tensorrt_llm/libtriton_tensorrtllm.so"),
        (add_link, "preprocessing/1/lib/evil.py"),
        (name_environment, "preprocessing/config.pbtxt"),
        (name_script, "preprocessing/1/model.txt"),
    ],
)
def test_code_of_a_foreign_repository_is_named_and_not_run(
    honest: Store, tmp_path: Path, edit: Callable[[Path], None], place: str
) -> None:
    repository = tmp_path / "theirs"
    shutil.copytree(RunFolder.of(TARGET).linked("repository"), repository)
    require_trusted("theirs", repository, honest, allow_code=False)
    edit(repository)
    with pytest.raises(ArtefactRefused, match=f"theirs holds code that is of no known template: {place} .*; read it"):
        require_trusted("theirs", repository, honest, allow_code=False)
    require_trusted("theirs", repository, honest, allow_code=True)


def test_a_repository_of_ones_own_that_was_changed_is_refused(honest: Store) -> None:
    repository = RunFolder.of(TARGET).linked("repository")
    edit_script(repository)
    with pytest.raises(
        InputDataError, match=r"model\.py has \d+ bytes instead of .*build --recipe runs/.*/plan\.json`"
    ):
        require_trusted(TARGET, repository, honest, allow_code=True)


def test_a_tar_whose_member_is_larger_than_it_says_stops_at_once(honest: Store, tmp_path: Path) -> None:
    content = members(export.pack(TARGET, honest, tmp_path / "out.tar"))
    content["checkpoint/rank0.safetensors"] += bytes(200 << 20)
    path = written(tmp_path / "large.tar", content)
    store = victim(tmp_path)
    with pytest.raises(InputDataError, match=r"checkpoint/rank0\.safetensors has \d+ bytes: the index says"):
        export.unpack(path, store)
    content["trtpipe.json"] = b" " * (33 << 20) + content["trtpipe.json"]
    with pytest.raises(InputDataError, match=r"trtpipe\.json is damaged: it has more than 33,554,432 bytes"):
        export.unpack(written(path, content), store)


def test_a_tar_that_lacks_what_a_build_reads_has_nothing_downloaded(honest: Store, tmp_path: Path) -> None:
    content = members(export.pack(TARGET, honest, tmp_path / "out.tar"))
    index = json.loads(content["trtpipe.json"])
    del index["artefacts"]["tokenizer"]
    content["trtpipe.json"] = json.dumps(index).encode()
    with pytest.raises(InputDataError, match="holds no tokenizer; export the target again"):
        export.unpack(written(tmp_path / "less.tar", content), victim(tmp_path))


def test_a_record_of_another_build_does_not_fit_a_signature(
    honest: Store, wanted: BuildSpec, keys: tuple[Path, Path]
) -> None:
    """The bytes are the signer's, and the record claims them for another model."""
    from trtpipe.pipeline.registry.signatures import sign_statement
    from trtpipe.pipeline.registry.trust import ENVELOPE, signed

    private, public = keys
    found = RunFolder.of(TARGET).find("convert", honest)
    assert found is not None
    told = provenance.statement(RunFolder.of(TARGET), honest)
    (found.path.parent / ENVELOPE).write_bytes(sign_statement(told, private))
    assert signed(found, "checkpoint", [public])
    record = dataclasses.replace(found.manifest.record, inputs={"model": "0" * 64})
    moved = dataclasses.replace(found, manifest=dataclasses.replace(found.manifest, record=record))
    assert not signed(moved, "checkpoint", [public])
