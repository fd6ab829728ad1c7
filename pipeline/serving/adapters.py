"""Adapters of a running server: listed, added and removed in its own folder, into which gateway and engine look."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtpipe.engines import load_backend
from trtpipe.engines.adapters import FOLDER, AdapterFolder, Placed, check_name
from trtpipe.engines.checkpoint.config import parse_config
from trtpipe.engines.errors import UsageError, suggestion
from trtpipe.engines.hf.adapter import WEIGHTS, lay_out, located_pairs, read_adapter, require_rank
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.json_input import read_json
from trtpipe.engines.lora_arrays import check_finite
from trtpipe.engines.model_config import Geometry
from trtpipe.engines.passport import Passport, read_passport
from trtpipe.pipeline.serving.servers import Served, Server
from trtpipe.pipeline.store.store import Store
from trtpipe.triton_repo.layout import ADAPTER_FOLDER, ENGINE_FOLDER


def added_folder(server_folder: Path) -> Path:
    """Folder with the files of the adapters that were added to a server. They stay until it is started again, since a
    runtime may still read those of an adapter that was removed."""
    return server_folder / "adapters"


def keep_added(before: Path, after: Path, server_folder: Path) -> None:
    """Link the adapters that were added to the model folder `before` into the one that takes its place."""
    added, new = added_folder(server_folder).resolve(), after / "1" / FOLDER
    if new.is_dir():
        for one in AdapterFolder(before / "1" / FOLDER).all():
            if added in one.path.resolve().parents and not (new / one.path.name).exists():
                (new / one.path.name).symlink_to(one.path.resolve())


def find(store: Store, server: Server, served: Served) -> AdapterFolder:
    """The adapters of a served target. Raises UsageError for an engine that takes none."""
    if not (served.repository / ADAPTER_FOLDER).is_dir():
        raise UsageError(
            f"{served.name} takes no adapters",
            why="its engine was built without them",
            remedy="build it with --lora NAME=FOLDER, or with --set build.lora_plugin=auto to add adapters later",
        )
    if server.native:
        return AdapterFolder(served.repository / ADAPTER_FOLDER)
    return AdapterFolder(_server_folder(store, server) / "models" / served.model(ADAPTER_FOLDER))


def add(store: Store, server: Server, served: Served, name: str, source: Path) -> Placed:
    """Add the adapter in `source` as `name`; the next request can use it.

    Raises UsageError, or InputDataError for a folder that is no adapter of the model.
    """
    check_name(name)
    there, passport = find(store, server, served), _changeable(server, served)
    adapter = read_adapter(source)
    located_pairs(adapter, _model(served.repository / ENGINE_FOLDER, passport))
    require_rank(adapter, passport.build_config["max_lora_rank"])
    check_finite(adapter)
    added = added_folder(_server_folder(store, server))
    added.mkdir(exist_ok=True)
    made = lay_out(adapter, name, Path(tempfile.mkdtemp(dir=added)))
    assert there.path is not None
    with _alone(there.path):
        if there.find(name) is not None:
            raise UsageError(
                f"{served.name} has an adapter '{name}' already",
                remedy=f"run `trtpipe lora remove {name}` first, or give another name",
            )
        _link(there.path / made.name, made)
    found = there.find(name)
    assert found is not None
    return found


def remove(store: Store, server: Server, served: Served, name: str) -> None:
    """Remove an adapter: new requests cannot name it, and those that use it go on to their end. Raises UsageError."""
    there = find(store, server, served)
    _changeable(server, served)
    assert there.path is not None
    with _alone(there.path):
        found = there.find(name)
        if found is None:
            known = [one.name for one in there.all()]
            remedy = suggestion(name, known) if known else "it has none"
            raise UsageError(f"{served.name} has no adapter '{name}'", remedy=remedy)
        found.path.unlink()


def _changeable(server: Server, served: Served) -> Passport:
    """The engine's passport. Raises UsageError where a running server keeps its adapters."""
    passport = read_passport(served.repository / ENGINE_FOLDER)
    why = load_backend(passport.runtime).SAME_ADAPTERS
    if server.native:
        why = "the runtime's own server is given them when it starts"
    if why:
        raise UsageError(
            f"the adapters of {served.name} cannot change while it is served", why=why,
            remedy="build it again with other --lora options, and start it again",
        )  # fmt: skip
    return passport


def _model(engine: Path, passport: Passport) -> Geometry:
    if load_backend(passport.runtime).FORM == "hf":
        return read_model_config(engine, quantized=True)
    path = engine / "config.json"
    return parse_config(read_json(path, "engine config")["pretrained_config"], str(path))


def _server_folder(store: Store, server: Server) -> Path:
    return store.home / "servers" / server.name


def _link(link: Path, made: Path) -> None:
    partial = link.with_name(f".{link.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    partial.symlink_to(made.resolve())
    partial.rename(link)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, so that two commands do not add the same name."""
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def stored_bytes(adapter: Placed) -> int:
    """Bytes of an adapter's matrices as it was saved."""
    return (adapter.path / WEIGHTS).stat().st_size
