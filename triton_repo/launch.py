"""The command that starts tritonserver on a model repository: one process, or one for each rank under mpirun.

TensorRT-LLM's backend runs a rank in each process: rank 0 serves every model, the others load the engine's alone and
never answer. The number of ranks is the engine's, not the user's: upstream's launcher takes any, and hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ENGINE_MODEL = "tensorrt_llm"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a tritonserver is told.

    program           its path, or its name on PATH
    repository        the model repository, as the server sees it
    models            what is loaded at the start; models are loaded and unloaded by request later
    backends, caches  folders other than the server's own
    exit_timeout      seconds that requests in flight have when it ends
    root              whether it runs as root, which mpirun wants to be told
    """

    program: str = "tritonserver"
    repository: str
    models: Sequence[str]
    host: str
    http: int
    grpc: int
    metrics: int
    backends: str | None = None
    caches: str | None = None
    exit_timeout: int = 30
    root: bool = False


def server_command(options: ServerOptions, *, world_size: int = 1) -> list[str]:
    """The words of the command, for `world_size` ranks on one machine."""
    if world_size == 1:
        return [options.program, *_arguments(options, list(options.models), 0)]
    words = ["mpirun", *_mpi_options(options)]
    for rank in range(world_size):
        models = list(options.models) if rank == 0 else [ENGINE_MODEL]
        silent = [f"--allow-{name}=false" for name in ("http", "grpc", "metrics")] if rank else []
        words += ["-n", "1", options.program, *_arguments(options, models, rank), *silent]
        words += [":"] if rank + 1 < world_size else []
    return words


def _mpi_options(options: ServerOptions) -> list[str]:
    return [
        # Its default ties each of two ranks to one core, with all threads of its server.
        "--bind-to", "none",
        # Its default is 1: requests in flight would die a second after the server is told to end.
        "--mca", "odls_base_sigkill_timeout", str(options.exit_timeout),
        *(["--allow-run-as-root"] if options.root else []),
    ]  # fmt: skip


def region_prefix(http: int) -> str:
    """What the names of a server's shared memory regions begin with."""
    return f"trtpipe{http}_"


def _arguments(options: ServerOptions, models: list[str], rank: int) -> list[str]:
    places = [("--backend-directory", options.backends), ("--cache-directory", options.caches)]
    return [
        f"--model-repository={options.repository}",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in models),
        *(f"{flag}={folder}" for flag, folder in places if folder),
        f"--http-address={options.host}",
        f"--http-port={options.http}",
        f"--grpc-address={options.host}",
        f"--grpc-port={options.grpc}",
        f"--metrics-address={options.host}",
        f"--metrics-port={options.metrics}",
        # Servers of one machine share /dev/shm, and would take each other's regions for their own.
        f"--backend-config=python,shm-region-prefix-name={region_prefix(options.http)}{rank}_",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={options.exit_timeout}",
    ]
