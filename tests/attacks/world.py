"""The world of the fuzzer: every kind of input of the trtpipe command, made from one tiny model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

from tests.attacks.running import isolated, run_here
from tests.support import bench_reports
from tests.support.adapters import write_adapter
from tests.support.factories import hf_folder
from tests.support.paths import ROOT
from tests.support.triton_repositories import inflight, llmapi
from trtpipe.pipeline.serving import servers
from trtpipe.pipeline.serving.ports import Endpoints
from trtpipe.pipeline.serving.servers import Served, Server
from trtpipe.pipeline.store.store import Store

TARGET = "hf.cpu.fp32"
SHAPES: dict[str, Any] = {"hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1,
          "vocab_size": 300, "num_hidden_layers": 1}  # fmt: skip
SIZES = ("max_batch_size=4", "max_input_len=64", "max_seq_len=128", "max_num_tokens=64")
MODEL = ("--model", "hf", "--gpu", "cpu", "--dtype", "fp32", *(p for size in SIZES for p in ("--set", f"build.{size}")))


class World:
    """A working folder and a store, as they were made, and as the last command has left them."""

    def __init__(self, folder: Path) -> None:
        self.root, self._as_made = folder / "world", folder / "as-made"
        self.work, self.home = self.root / "work", self.root / "home"
        self.work.mkdir(parents=True)
        (self.root / "elsewhere").mkdir()
        with self.entered(), isolated():
            _furnish(self)
        shutil.copytree(self.root, self._as_made, symlinks=True)
        # What a file's stat said when it was last as it was made.
        self._state: dict[Path, Any] = {}
        self._around = {path.name for path in (*folder.iterdir(), *self.root.iterdir())}

    @contextlib.contextmanager
    def entered(self, home: str = "home") -> Iterator[None]:
        """As the current folder, with that TRTPIPE_HOME, without programs."""
        before = Path.cwd()
        os.chdir(self.work)
        try:
            with mock.patch.dict(
                os.environ, {"TRTPIPE_HOME": str(self.root / home), "PATH": "", "HF_HUB_OFFLINE": "1"}
            ):
                yield
        finally:
            os.chdir(before)

    def files(self, patterns: Iterable[str]) -> list[str]:
        """The files that the patterns match, from the root, as they were made."""
        found = {
            path.relative_to(self._as_made).as_posix()
            for pattern in patterns
            for path in self._as_made.glob(pattern)
            if path.is_file() and not path.is_symlink()
        }
        return sorted(found)

    def as_made(self, file: str) -> Path:
        return self._as_made / file

    def restore(self, *, made: Iterable[str], changed: Iterable[str], file: str) -> None:
        """Remove what was made in the working folder, and bring back changed folders and a file, if one is named."""
        for name in made:
            remove(self.work / name)
        for folder in changed:
            expected = {path.relative_to(self._as_made) for path in (self._as_made / folder).rglob("*")}
            for path in [
                path for path in (self.root / folder).rglob("*") if path.relative_to(self.root) not in expected
            ]:
                remove(path)
            for relative in sorted(expected):
                self._bring_back(relative)
        if file:
            self._bring_back(Path(file))

    def _bring_back(self, relative: Path) -> None:
        """A file or folder as it was made; one that nobody has touched is left alone."""
        source, path = self._as_made / relative, self.root / relative
        if source.is_dir() and not source.is_symlink():
            if path.is_symlink() or not path.is_dir():
                remove(path)
                path.mkdir(parents=True)
        elif (state := _state(path)) is None or state != self._state.get(relative):
            remove(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, path, follow_symlinks=False)
            self._state[relative] = _state(path)

    def strangers(self) -> set[str]:
        """What has come to be around the world, where nothing of a command belongs."""
        around = {path.name for path in (*self.root.parent.iterdir(), *self.root.iterdir())}
        return (around - self._around) | ({"/nowhere"} if Path("/nowhere").exists() else set())

    @cached_property
    def artefacts(self) -> dict[str, dict[str, str]]:
        """Digests of every file of the target's artefacts as they were made."""
        return artefacts(self._as_made / "work", self.root, self._as_made)

    @cached_property
    def exported(self) -> dict[str, str]:
        return members(self._as_made / "work" / "out.tar")


def _furnish(world: World) -> None:
    """Every kind of input, from one tiny model."""
    work = world.work
    hf_folder(work / "hf", shards=2, **SHAPES)
    write_adapter(work / "adapter", work / "hf", rank=2)
    (work / "recipe.yaml").write_text(
        "model: hf\ngpu: cpu\ndtype: fp32\nbuild:\n  max_batch_size: 4\n  max_input_len: 64\n  max_seq_len: 128\n"
        "serving:\n  max_queue_size: 16\n"
    )
    shutil.copy(ROOT / "configs" / "load" / "chat.yaml", work / "load.yaml")
    work.joinpath("lines.yaml").write_text(
        "name: lines\nload: {concurrency: [1, 2], requests: 4}\n"
        "work: {input_tokens: 'empirical:lengths.txt', output_tokens: 8, max_total_tokens: 128}\n"
    )
    (work / "lengths.txt").write_text("16 8\n32 8\n8 4\n")
    (work / "texts.txt").write_text("a paragraph of text\n\n" * 200)
    (work / "texts.jsonl").write_text('{"text": "a paragraph of text"}\n' * 200)
    (work / "prompts.jsonl").write_text('{"prompt": "hello", "max_tokens": 8, "temperature": 0.5}\n' * 4)
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "good day"}]
    (work / "sharegpt.json").write_text(json.dumps([{"id": "a", "conversations": turns}] * 3))
    (work / "trace.jsonl").write_text(
        "".join(
            json.dumps({"timestamp": 10 * n, "input_length": 16, "output_length": 8, "hash_ids": [n]}) + "\n"
            for n in range(4)
        )
    )
    inflight(work / "nvidia")
    llmapi(work / "llmapi")
    for name, seed in (("one", 1), ("two", 2)):
        bench_reports.saved(work / name, bench_reports.lines(20, seed=seed), bench_reports.lines(20, seed=seed + 5))
    (world.home / "gpus").mkdir(parents=True)
    (world.home / "gpus" / "h100.yaml").write_text("price_per_hour: 2.5\n")
    (world.home / "gpus" / "mine.yaml").write_text("name: mine\nsm: 90\nmemory_gib: 40\nbandwidth_gbs: 2000\n")
    for arguments in (
        ("build", *MODEL),
        ("convert", "hf", "checkpoint"),
        ("export", TARGET, "-o", "out.tar"),
        ("push", TARGET, "shelf"),
        ("provenance", TARGET, "-o", "statement.json"),
    ):
        made = run_here(arguments)
        assert made.code == 0, made
    repository = work / "runs" / TARGET / "repository"
    endpoints = Endpoints(host="127.0.0.1", http=1, grpc=1, metrics=1)
    servers.remember(
        Store(world.home),
        Server(
            name="hf", pid=(1 << 22) - 1, log=world.home / "logs" / "x.log", endpoints=endpoints,
            served=(Served(name="hf", repository=repository),),
        ),
    )  # fmt: skip


def _state(path: Path) -> Any:
    try:
        stat = path.lstat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mode, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def artefacts(work: Path, root: Path, instead: Path) -> dict[str, dict[str, str]]:
    """What a stage makes -> digests of its files, for every link of a run folder.

    A link into `root` is followed into `instead`.
    """
    out: dict[str, dict[str, str]] = {}
    for link in sorted(work.glob("runs/*/*")):
        target = Path(str(link.readlink()).replace(str(root), str(instead))) if link.is_symlink() else link
        if target.is_dir():
            out[link.name] = {
                path.relative_to(target).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
                for path in sorted(target.rglob("*"))
                if path.is_file()
            }
    return out


def members(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        read = {member.name: tar.extractfile(member) for member in tar if member.isfile()}
        return {name: hashlib.sha256(stream.read()).hexdigest() for name, stream in read.items() if stream}
