"""Lists, adds and removes LoRA adapters of a running server, in the folder that its gateway and engine read."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtpipe.engines import load_backend
from trtpipe.engines.adapters import FOLDER, AdapterFolder, InstalledAdapter, check_name
from trtpipe.engines.base import DataType
from trtpipe.engines.checkpoint.config import parse_config
from trtpipe.engines.errors import ArtefactRefused, UsageError, suggestion
from trtpipe.engines.hf.adapter import WEIGHTS, lay_out
from trtpipe.engines.hf.adapter_check import checked_adapter
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.json_input import read_json
from trtpipe.engines.model_config import Geometry
from trtpipe.engines.passport import Passport, read_passport
from trtpipe.pipeline.gateway.model_names import require_free
from trtpipe.pipeline.serving.servers import Served, Server, require_own
from trtpipe.pipeline.store.store import Store
from trtpipe.triton_repo.layout import ADAPTER_FOLDER, ENGINE_FOLDER


def added_folder(server_folder: Path) -> Path:
    """Folder of the files of adapters that were added to a running server. The files of a removed adapter stay there
    until the server is started again, since a runtime may still read them."""
    return server_folder / "adapters"


def keep_added(before: Path, after: Path, server_folder: Path) -> None:
    """Link the adapters that were added to the model folder `before` into `after`, the folder that replaces it. Raises
    ArtefactRefused for one that the new engine does not take, before anything is linked.

    An adapter that the new engine was built with replaces an added one of its name.
    """
    new = after / "1" / FOLDER
    built = AdapterFolder(new if new.is_dir() else None)
    added = [one for one in _added(before, server_folder) if built.find(one.name) is None]
    if added and not new.is_dir():
        raise ArtefactRefused(
            f"the new engine was built without adapters, and '{added[0].name}' was added to the server",
            remedy=f"run `trtpipe lora remove {added[0].name}` first, or build with --set build.lora_plugin=auto",
        )
    for one in added:
        largest = read_passport(after / "1").build_config["max_lora_rank"]
        if one.rank > largest:
            raise ArtefactRefused(
                f"adapter '{one.name}' has rank {one.rank}, and the new engine takes {largest}",
                remedy=f"run `trtpipe lora remove {one.name}` first, or build with a larger build.max_lora_rank",
            )
    for one in added:
        (new / one.path.name).symlink_to(one.path.resolve())


def _added(model: Path, server_folder: Path) -> list[InstalledAdapter]:
    added = added_folder(server_folder).resolve()
    return [one for one in AdapterFolder(model / "1" / FOLDER).all() if added in one.path.resolve().parents]


def find(store: Store, server: Server, served: Served) -> AdapterFolder:
    """The adapters of a served target. Raises UsageError for an engine that was built without LoRA."""
    if not (served.repository / ADAPTER_FOLDER).is_dir():
        fixed = _why_fixed(server, read_passport(served.repository / ENGINE_FOLDER))
        later = "" if fixed else ", or with --set build.lora_plugin=auto to add adapters later"
        raise UsageError(
            f"{served.name} takes no adapters",
            why="its engine was built without them",
            remedy=f"build it with --lora NAME=FOLDER{later}",
        )
    if server.native:
        return AdapterFolder(served.repository / ADAPTER_FOLDER)
    return AdapterFolder(_server_folder(store, server) / "models" / served.model(ADAPTER_FOLDER))


def add(store: Store, server: Server, served: Served, name: str, source: Path) -> InstalledAdapter:
    """Add the adapter in the folder `source` as `name`; the next request can use it.

    Raises UsageError for a name that is taken, also by a model, or invalid, a rank above the engine's, a runtime whose
    adapters are fixed and a server of another user; InputDataError for a folder that is not an adapter of the model.
    """
    check_name(name)
    require_own(server)
    require_free([taken for one in server.served for taken in one.model_names], served.model_names, name)
    there, passport = find(store, server, served), _require_changeable(server, served)
    model = _model(served.repository / ENGINE_FOLDER, passport)
    adapter = checked_adapter(source, model, passport.build_config["max_lora_rank"], DataType(passport.dtype))
    assert there.path is not None
    _require_new(there, served, name)
    added = added_folder(_server_folder(store, server))
    added.mkdir(exist_ok=True)
    made = lay_out(adapter, name, Path(tempfile.mkdtemp(dir=added)))
    try:
        with _locked(there.path):
            _require_new(there, served, name)  # another command may have added it since
            _link(there.path / made.name, made)
    except BaseException:
        shutil.rmtree(made.parent)
        raise
    found = there.find(name)
    assert found is not None
    return found


def remove(store: Store, server: Server, served: Served, name: str) -> None:
    """Remove an adapter: new requests cannot use it, running ones keep it. Raises UsageError for an unknown name, and
    for a server of another user."""
    require_own(server)
    there = find(store, server, served)
    _require_changeable(server, served)
    assert there.path is not None
    with _locked(there.path):
        found = there.find(name)
        if found is None:
            known = [one.name for one in there.all()]
            remedy = suggestion(name, known) if known else "add one with `trtpipe lora add`"
            raise UsageError(f"{served.name} has no adapter '{name}'", remedy=remedy)
        found.path.unlink()


def _require_new(there: AdapterFolder, served: Served, name: str) -> None:
    if there.find(name) is not None:
        raise UsageError(
            f"{served.name} has an adapter '{name}' already",
            remedy=f"run `trtpipe lora remove {name}` first, or give another name",
        )


def _require_changeable(server: Server, served: Served) -> Passport:
    """The engine's passport. Raises UsageError for a runtime whose adapters are fixed while it runs."""
    passport = read_passport(served.repository / ENGINE_FOLDER)
    why = _why_fixed(server, passport)
    if why:
        raise UsageError(
            f"the adapters of {served.name} cannot change while it is served", why=why,
            remedy="build it again with other --lora options, and start it again",
        )  # fmt: skip
    return passport


def _why_fixed(server: Server, passport: Passport) -> str:
    """Why adapters of an engine cannot change while it runs; "" where they can."""
    if server.native:
        return "the runtime's own server takes adapters only when it starts"
    return load_backend(passport.runtime).SAME_ADAPTERS


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
def _locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on the folder, so that two commands cannot add the same name."""
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def stored_bytes(adapter: InstalledAdapter) -> int:
    """Bytes of the file with an adapter's matrices."""
    return (adapter.path / WEIGHTS).stat().st_size
