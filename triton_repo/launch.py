"""Command that starts tritonserver on a model repository: one process, or one process per rank under mpirun.

TensorRT-LLM's backend runs one rank per process: rank 0 serves all models, the others load only the engine model and
answer no requests. The engine determines the number of ranks; with another number upstream's launcher hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ENGINE_MODEL = "tensorrt_llm"
HISTOGRAMS = "--metrics-config=histogram_latencies=true"
# Only rank 0 answers requests.
SILENT = ("--allow-http=false", "--allow-grpc=false", "--allow-metrics=false")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a tritonserver.

    program           path, or name on PATH
    repository        path of the model repository for the server
    models            models to load at the start; later, models are loaded and unloaded on request
    backends, caches  folders that replace the server's default ones
    exit_timeout      seconds that in-flight requests have when the server ends
    histograms        whether it is to publish the time to the first response, which Triton 24.10 and older cannot
    root              whether the server runs as root, which mpirun must be told
    traces_url        URL that spans of requests are sent to; None for no traces
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
    histograms: bool = False
    root: bool = False
    traces_url: str | None = None


def server_command(options: ServerOptions, *, world_size: int = 1) -> list[str]:
    """Command and arguments for `world_size` ranks on one machine."""
    if world_size == 1:
        return [options.program, *_arguments(options, list(options.models), 0)]
    ranks = [[options.program, *_arguments(options, list(options.models), 0)]]
    ranks += [[options.program, *_arguments(options, [ENGINE_MODEL], rank), *SILENT] for rank in range(1, world_size)]
    root = ["--allow-run-as-root"] if options.root else []
    return mpi_command(ranks, kill_seconds=options.exit_timeout, options=root)


def mpi_command(ranks: Sequence[Sequence[str]], *, kill_seconds: int, options: Sequence[str] = ()) -> list[str]:
    """The command of mpirun that starts a process for each of `ranks`, which are commands; `options` are mpirun's.

    kill_seconds  seconds that mpirun waits before it ends the ranks, and again before it kills them
    """
    words = [
        "mpirun",
        # mpirun's default binds each of two ranks, with all threads of its server, to one core.
        "--bind-to", "none",
        # mpirun's default is 1: in-flight requests would be killed a second after the server is asked to end.
        "--mca", "odls_base_sigkill_timeout", str(kill_seconds),
        *options,
    ]  # fmt: skip
    for rank, command in enumerate(ranks):
        words += [":"] if rank else []
        words += ["-n", "1", *command]
    return words


def trace_arguments(url: str) -> list[str]:
    """Arguments of tritonserver that send its spans to `url`, only for requests that carry a trace context."""
    of_mode = (f"url={url}", "resource=service.name=triton")
    settings = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=0", *(f"opentelemetry,{one}" for one in of_mode))
    return [f"--trace-config={setting}" for setting in settings]


def region_prefix(http: int) -> str:
    """Prefix of the names of a server's shared memory regions."""
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
        # Servers of one machine share /dev/shm; without a prefix they would use each other's regions.
        f"--backend-config=python,shm-region-prefix-name={region_prefix(options.http)}{rank}_",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={options.exit_timeout}",
        *([HISTOGRAMS] if options.histograms and not rank else []),
        *(trace_arguments(options.traces_url) if options.traces_url and not rank else []),
    ]
