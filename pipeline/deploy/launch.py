"""Command of a container: tritonserver, or mpirun with a process for each rank. A list of words, no shell line.

It is not the command of `trtpipe serve`, which listens on loopback: here whoever reaches the port is a client, so
models are not loaded and unloaded by request, and no rank but the first listens at all.
"""

from __future__ import annotations

from pathlib import Path

from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import ServedBy
from trtpipe.engines.passport import Passport
from trtpipe.pipeline.deploy.config import DeployConfig
from trtpipe.pipeline.deploy.placement import Placement
from trtpipe.triton_repo.launch import ENGINE_MODEL, HISTOGRAMS, SILENT, mpi_command

# Paths and ports inside a container.
MODELS = "/models"
SCRIPTS = "/opt/trtpipe"
TEMPORARY = "/tmp"
API_KEYS = "/etc/trtpipe/keys/api-keys"
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
GATEWAY_PORT = {"openai": 9000}
RENDEZVOUS_PORT = 8003
RENDEZVOUS = "rendezvous.py"
LLM_API_LAUNCHER = "trtllm-llmapi-launch"
# Endpoints, proxies and clients take a moment to stop sending to a pod that is about to end.
LINGER_SECONDS = 10
# Time between the end of one phase of termination and the next.
MARGIN_SECONDS = 5
# The server is told after the gateway in front of it has stopped taking requests: it then closes its port, and idle
# connections 5 s later.
PRE_STOP_SECONDS = LINGER_SECONDS + 5 + MARGIN_SECONDS


def own_image(passport: Passport) -> bool:
    """Whether the engine needs our image, since NVIDIA's lacks its runtime. `trtpipe serve` knows the paths in ours."""
    return load_backend(passport.runtime).SERVED_BY is ServedBy.ENGINE_PROCESS


def server_words(passport: Passport, config: DeployConfig, placement: Placement) -> list[str]:
    """The command of a pod that answers requests: the only pod of its replica, or the leader of several."""
    seconds = exit_seconds(passport, config, placement)
    if own_image(passport):
        addresses = [word for name, port in PORTS.items() for word in (f"--{name}-port", str(port))]
        return [
            "trtpipe", "serve", MODELS, "--no-openai", "--host", "0.0.0.0", *addresses,
            "--ready-timeout", str(config.startup_seconds), "--drain", str(seconds),
            # `deploy` has judged the repository. The image's trtpipe may be a newer one, with other templates.
            "--allow-model-code",
        ]  # fmt: skip
    if not uses_mpi(passport, placement):
        return _server(0, seconds)
    # mpirun counts usable cores as slots for ranks; our ranks need GPUs, which are counted already.
    slots = ["--oversubscribe"] if placement.pods == 1 else []
    ranks = [_rank(passport, rank, seconds) for rank in range(passport.world_size)]
    words = mpi_command(ranks, kill_seconds=_kill_seconds(config, placement), options=slots)
    if placement.pods == 1:
        return words
    return [*_rendezvous("lead"), str(placement.pods - 1), str(placement.ranks), str(RENDEZVOUS_PORT), *words]


def gateway_words(config: DeployConfig, *, keys: bool) -> list[str]:
    """The command of the gateway beside a server. It is told to end when the pod is, and goes on until clients know."""
    drain = config.termination_grace_seconds - LINGER_SECONDS - MARGIN_SECONDS
    return [
        "trtpipe", "gateway", MODELS, "--triton", f"127.0.0.1:{PORTS['grpc']}", "--served-model-name", config.name,
        "--host", "0.0.0.0", "--port", str(GATEWAY_PORT["openai"]), "--workers", str(config.gateway_workers),
        "--linger", str(LINGER_SECONDS), "--drain", str(drain), *(["--api-keys-file", API_KEYS] if keys else []),
    ]  # fmt: skip


def worker_words() -> list[str]:
    return [*_rendezvous("work"), str(RENDEZVOUS_PORT)]


def uses_mpi(passport: Passport, placement: Placement) -> bool:
    """Whether mpirun starts the ranks: those of the LLM API start themselves where they are on one node."""
    served_by = load_backend(passport.runtime).SERVED_BY
    return passport.world_size > 1 and (
        served_by is ServedBy.TENSORRTLLM or (served_by is ServedBy.LLM_API and placement.pods > 1)
    )


def exit_seconds(passport: Passport, config: DeployConfig, placement: Placement) -> int:
    """Seconds that a server that is told to end may go on with the requests it has."""
    left = config.termination_grace_seconds - PRE_STOP_SECONDS - MARGIN_SECONDS
    return left if not uses_mpi(passport, placement) else _kill_seconds(config, placement) - MARGIN_SECONDS


def answer_seconds(passport: Passport, config: DeployConfig, placement: Placement) -> int:
    """Seconds after which a pod that is told to end cuts off the answers that still run."""
    waits = _kill_seconds(config, placement) if uses_mpi(passport, placement) else 0
    return PRE_STOP_SECONDS + waits + exit_seconds(passport, config, placement)


def _kill_seconds(config: DeployConfig, placement: Placement) -> int:
    """Seconds that mpirun waits before it ends the ranks, and again before it kills them; other pods' ranks follow."""
    left = config.termination_grace_seconds - PRE_STOP_SECONDS - MARGIN_SECONDS
    return left // (2 if placement.pods == 1 else 4)


def _rank(passport: Passport, rank: int, exit_timeout: int) -> list[str]:
    """The process of a rank under mpirun. TensorRT-LLM's launcher of the LLM API runs a command in rank 0, whose LLM
    then finds the other ranks, in which the launcher waits for it."""
    if load_backend(passport.runtime).SERVED_BY is ServedBy.TENSORRTLLM:
        return _server(rank, exit_timeout)
    return [LLM_API_LAUNCHER, *(_server(0, exit_timeout) if rank == 0 else [])]


def _server(rank: int, exit_timeout: int) -> list[str]:
    words = ["tritonserver", f"--model-repository={MODELS}", "--disable-auto-complete-config"]
    words += [f"--exit-timeout-secs={exit_timeout}"]
    # Two servers of one pod share /dev/shm, and would take each other's regions for their own.
    words += [f"--backend-config=python,shm-region-prefix-name=rank{rank}_"]
    if rank == 0:
        return [*words, *(f"--{name}-port={port}" for name, port in PORTS.items()), HISTOGRAMS]
    return [*words, "--model-control-mode=explicit", f"--load-model={ENGINE_MODEL}", *SILENT]


def _rendezvous(role: str) -> list[str]:
    return ["python3", str(Path(SCRIPTS) / RENDEZVOUS), role]
