"""What this machine can do, and what to install for what it cannot. Nothing is changed and no network is asked."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engines.errors import HostError, TrtpipeError
from pipeline import config, tritonserver
from pipeline.serve import running
from pipeline.store import Store, host

# Free disk below which even the demo fails: 0.3 GB a copy of the model, a few copies.
DISK_GB = 2.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`state` is ok, missing (something is not possible here) or fault (something is wrong)."""

    subject: str
    state: str
    detail: str


def examine(store: Store) -> list[Finding]:
    return list(_findings(store))


def _findings(store: Store) -> Iterator[Finding]:
    this = host()
    yield Finding(subject="python", state="ok", detail=f"{this['python']} on {this['system']}, {this['machine']}")
    yield _checked("store", lambda: _store(store))
    yield _checked("tritonserver", _server)
    yield _packages("reference runtime", ("torch",), "serve")
    yield _packages("GGUF reader", ("transformers", "gguf", "accelerate", "torch"), "gguf")
    yield _packages("quantization", ("nvidia-modelopt", "transformers", "torch"), "quantize")
    yield _checked("nvidia driver", _driver)
    program = shutil.which("trtllm-build")
    yield Finding(
        subject="trtllm-build",
        state="ok" if program else "missing",
        detail=program or "TensorRT engines cannot be built here; on an NVIDIA host `pip install trtpipe[engine]`",
    )
    yield _hub()
    for model in config.load_models().values():
        first, *others = (source.describe() for source in model.sources)
        detail = first + "".join(f"; with --source: {other}" for other in others)
        yield Finding(subject=f"model {model.name}", state="ok", detail=detail)
    for server in running(store):
        yield Finding(subject=f"server {server.name}", state="ok", detail=server.endpoints.http_url)


def _checked(subject: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(subject=subject, state="ok", detail=check())
    except HostError as error:
        return Finding(subject=subject, state="missing", detail=str(error))
    except TrtpipeError as error:
        return Finding(subject=subject, state="fault", detail=str(error))


def _store(store: Store) -> str:
    folder = store.home
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 1e9
    if not folder.is_dir():
        raise HostError(f"{folder} is no folder", remedy="set TRTPIPE_HOME to a folder of yours")
    if not os.access(folder, os.W_OK):
        raise HostError(f"{folder} cannot be written", remedy="set TRTPIPE_HOME to a folder of yours")
    if free < DISK_GB:
        raise HostError(f"{store.home} has {free:.1f} GB free", remedy="free some space or set TRTPIPE_HOME")
    return f"{store.home}, {free:.0f} GB free"


def _server() -> str:
    found = tritonserver.find_installation()
    return f"{found.server} (nvidia-pytriton {found.version}, numpy {importlib.metadata.version('numpy')})"


def _packages(subject: str, names: tuple[str, ...], extra: str) -> Finding:
    try:
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    except importlib.metadata.PackageNotFoundError as error:
        return Finding(subject=subject, state="missing", detail=f"no {error.name}; run `pip install trtpipe[{extra}]`")
    return Finding(subject=subject, state="ok", detail=versions)


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise HostError("no NVIDIA driver", remedy="GPU targets can be planned and converted here, not built or served")
    query = [program, "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError("nvidia-smi fails", why=str(error)) from None
    if answer.returncode:
        raise HostError("nvidia-smi fails", why=(answer.stderr or answer.stdout).strip())
    return answer.stdout.strip().replace("\n", "; ")


def _hub() -> Finding:
    endpoint = os.environ.get("HF_ENDPOINT", "the default endpoint")
    token = "with a token" if os.environ.get("HF_TOKEN") else "no HF_TOKEN set: gated models need one"
    offline = ", offline" if os.environ.get("HF_HUB_OFFLINE") else ""
    return Finding(subject="hugging face", state="ok", detail=f"{endpoint}{offline}, {token}")
