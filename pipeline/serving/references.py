"""References of run folders and running servers to artefacts of a store, which `trtpipe gc` keeps.

Whatever cannot be read is an error, so that no artefact is dropped for lack of knowledge.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trtpipe.engines.errors import HostError, InputDataError
from trtpipe.engines.json_input import load_json
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.serving.servers import read_server, running
from trtpipe.pipeline.store.store import Store


def references(store: Store) -> set[Path]:
    """The folders of referenced artefacts, resolved. Run folders that were deleted no longer count.

    Raises HostError where a run folder, a root or the record of a server cannot be read.
    """
    kept = {folder.resolve() for run in _runs(store) for folder in _kept(run, store)}
    _require_readable_servers(store)
    return kept | {served.repository.parent.resolve() for server in running(store) for served in server.served}


def _runs(store: Store) -> Iterator[RunFolder]:
    for root in sorted((store.home / "roots").glob("*.json")):
        try:
            run = RunFolder(Path(load_json(root)["run"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _unreadable(root, error, "remove it if that run is gone: its next build writes it again") from None
        try:
            run.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            raise _unreadable(run.path, error, f"make it readable, or remove {root} if that run is gone") from None
        yield run


def _kept(run: RunFolder, store: Store) -> list[Path]:
    try:
        return run.folders(store)
    except (OSError, ValueError) as error:
        raise _unreadable(run.path / "run.json", error, "build that target again, or remove its run folder") from None


def _require_readable_servers(store: Store) -> None:
    for path in sorted((store.home / "servers").glob("*.json")):
        try:
            read_server(path)
        except (OSError, ValueError, InputDataError) as error:
            raise _unreadable(path, error, "remove it if that server is gone") from None


def _unreadable(path: Path, error: Exception, remedy: str) -> HostError:
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return HostError(f"{path} cannot be read, so nothing is dropped", why=why, remedy=remedy)
