"""Check of a model repository before Triton loads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trtpipe.pipeline.api.arguments import checked

if TYPE_CHECKING:
    from trtpipe.triton_repo.check.faults import Fault


def find_folder(repository: str | Path) -> Path:
    """The folder of a model repository: of a target in ./runs, or the folder itself. Raises UsageError."""
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.run_folder import SEE_TARGETS, find_run

    run = find_run(str(repository))
    if run is None and not Path(repository).exists():
        raise UsageError(f"there is no folder or target '{repository}'", remedy=SEE_TARGETS)
    return Path(repository) if run is None else run.linked("repository")


@checked
def check(
    repository: str | Path, *, toolchain: str | None = None, here: bool = False, allow_model_code: bool = False
) -> list[Fault]:
    """Find the faults of a model repository, errors first; empty for a sound one.

    repository        a target in ./runs, or a model repository, ours or anybody's
    toolchain         TensorRT-LLM release that will serve it; detected if left out
    here              whether this machine's GPUs are to serve it
    allow_model_code  whether code that is of no known template is accepted

    Raises UsageError for a folder that is not there and an unknown release, HostError where the GPUs cannot be asked.
    """
    from trtpipe.configs import facts
    from trtpipe.configs.home import default_home
    from trtpipe.pipeline import compatibility
    from trtpipe.pipeline.execution import hardware
    from trtpipe.pipeline.store.store import Store
    from trtpipe.triton_repo.check import ERROR, check_repository
    from trtpipe.triton_repo.check.code import foreign_code
    from trtpipe.triton_repo.check.faults import Fault

    folder = find_folder(repository)
    release = None if toolchain is None else facts.find_toolchain(toolchain)
    faults = check_repository(folder, toolchain=release, gpus=hardware.installed_gpus() if here else None)
    if any(fault.rule == "no-models" for fault in faults):
        return faults  # any folder, such as /tmp, whose files take long to look through
    store = Store(default_home())
    _, damage = compatibility.judge_stored(folder, store)
    if damage is not None and not any(fault.severity == ERROR for fault in faults):
        again = compatibility.whole_again(str(repository), store)
        whole = {"path": ".", "where": "", "rule": "engine-file"}
        faults.insert(0, Fault(severity=ERROR, what="is damaged", why=damage, remedy=again, **whole))
    if not allow_model_code:
        faults += foreign_code(folder)
    return faults
