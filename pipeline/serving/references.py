"""References of run folders and running servers to artefacts of a store, which `trtpipe gc` keeps.

Whatever cannot be read is an error, so that no artefact is dropped for lack of knowledge. Where machines share a store,
the run folders and servers of the others refer to what they have written into it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtpipe.engines.errors import HostError, InputDataError
from trtpipe.engines.json_input import load_json
from trtpipe.pipeline.run_folder import RUNS, WRITE_AGAIN_SECONDS, RunFolder
from trtpipe.pipeline.serving.servers import Served, Server, read_server, running
from trtpipe.pipeline.store.store import Store, machine

DAY_SECONDS = 86400


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A run folder or a server of another machine.

    name       path of the run folder, or name of the server
    file       its root, or its record, in the store
    artefacts  folders of the store that it refers to, resolved
    """

    name: str
    machine: str
    file: Path
    artefacts: frozenset[Path]


@dataclass(frozen=True, kw_only=True)
class _Root:
    """What `RunFolder.start` wrote into the store; earlier versions wrote the path alone."""

    file: Path
    run: RunFolder
    machine: str
    id: str | None
    inode: int | None
    written: float
    artefacts: frozenset[Path]


def references(store: Store, others_after: int | None = None) -> set[Path]:
    """The folders of referenced artefacts, resolved. Run folders that were deleted no longer count.

    others_after  number of days after which a run folder of another machine that was not built counts no longer
    Raises HostError where a run folder, a root or the record of a server cannot be read.
    """
    kept = {folder.resolve() for root in _roots(store) if _here(root) for folder in _kept(root.run, store)}
    kept |= {folder for other in elsewhere(store, others_after) for folder in other.artefacts}
    return kept | {served.repository.parent.resolve() for server in running(store) for served in server.served}


def elsewhere(store: Store, others_after: int | None = None) -> list[Elsewhere]:
    """Run folders and servers of other machines that share the store. `others_after` and errors as `references`."""
    runs = [
        Elsewhere(name=str(root.run.path), machine=root.machine, file=root.file, artefacts=root.artefacts)
        for root in _roots(store) if _is_elsewhere(root) and not _is_old(root, others_after)
    ]  # fmt: skip
    servers = [
        Elsewhere(
            name=server.name, machine=server.machine, file=path,
            artefacts=frozenset(folder for served in server.served for folder in _folders(served, store)),
        )
        for path, server in _servers(store) if server.machine != machine() and server.died is None
    ]  # fmt: skip
    return runs + servers


def forget_deleted(store: Store, others_after: int | None = None) -> None:
    """Remove the roots of this machine's run folders that were deleted, so that other machines know of it too, and
    those of other machines that count no longer (`others_after`, as `references`)."""
    if not _forgettable(store, others_after):
        return
    with store.referring():  # a build may have written one anew
        for file in _forgettable(store, others_after):
            file.unlink(missing_ok=True)


def _forgettable(store: Store, others_after: int | None) -> list[Path]:
    deleted = [root for root in _roots(store) if root.id is not None and root.machine == machine() and not _here(root)]
    old = [root for root in _roots(store) if _is_elsewhere(root) and _is_old(root, others_after)]
    return [root.file for root in deleted + old]


def _roots(store: Store) -> Iterator[_Root]:
    for file in sorted((store.home / "roots").glob("*.json")):
        try:
            raw = load_json(file)
            yield _Root(
                file=file,
                run=_run(Path(raw["run"]), raw.get("id"))
                if raw.get("machine") == machine()
                else RunFolder(Path(raw["run"])),
                machine=str(raw.get("machine", machine())),
                id=raw.get("id"),
                inode=raw.get("inode"),
                written=file.stat().st_mtime,
                artefacts=frozenset((store.home / folder).resolve() for folder in raw.get("artefacts", ())),
            )
        except FileNotFoundError:  # another command has removed it
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(file, error, "remove it if that run is gone: its next build writes it again") from None


def _run(path: Path, identity: str | None) -> RunFolder:
    """The run folder that was at `path` of this machine: under the name that it has got since beside it, or in
    ./runs."""
    if identity is not None and RunFolder(path).id != identity:  # another may have taken its name
        for folder in (path.parent, RUNS):
            with contextlib.suppress(OSError):
                for named in map(RunFolder, sorted(folder.iterdir())):
                    if named.id == identity:
                        return RunFolder(named.path.resolve())
    return RunFolder(path)


def _here(root: _Root) -> bool:
    """Whether its run folder is there, on this machine or on a disk that it shares. Raises HostError where that of this
    machine cannot be read."""
    mine = root.machine == machine()
    try:
        root.run.path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        if not mine:
            return False
        remedy = f"make it readable, or remove {root.file} if that run is gone"
        raise _unreadable(root.run.path, error, remedy) from None
    return mine or root.run.id == root.id


def _is_elsewhere(root: _Root) -> bool:
    """Whether its run folder is another machine's, and at most a copy of it is there. Raises as `_here`."""
    return root.machine != machine() and not (_here(root) and root.inode in (None, root.run.inode))


def _is_old(root: _Root, days: int | None) -> bool:
    return days is not None and time.time() - root.written > days * DAY_SECONDS + WRITE_AGAIN_SECONDS


def _kept(run: RunFolder, store: Store) -> list[Path]:
    try:
        return run.folders(store)
    except (OSError, ValueError) as error:
        raise _unreadable(run.path / "run.json", error, "build that target again, or remove its run folder") from None


def _folders(served: Served, store: Store) -> list[Path]:
    """The artefact's folder as the other machine names it, and at this machine's path of the store."""
    folder = served.repository.parent
    return [folder.resolve(), (store.home / Path(*folder.parts[-3:])).resolve()]


def _servers(store: Store) -> Iterator[tuple[Path, Server]]:
    for path in sorted((store.home / "servers").glob("*.json")):
        try:
            yield path, read_server(path)
        except (OSError, ValueError, InputDataError) as error:
            if not path.exists():  # another command has removed it
                continue
            raise _unreadable(path, error, "remove it if that server is gone") from None


def _unreadable(path: Path, error: Exception, remedy: str) -> HostError:
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return HostError(f"{path} cannot be read, so nothing is dropped", why=why, remedy=remedy)
