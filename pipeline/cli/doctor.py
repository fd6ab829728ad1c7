"""Check of what this machine can do, and what to install for the rest. Changes nothing, and asks the hub once."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trtpipe.configs import facts
from trtpipe.engines import load_backend
from trtpipe.engines.errors import HostError, UsageError
from trtpipe.engines.extras import install_command
from trtpipe.engines.files import size_text
from trtpipe.engines.nvidia import read_gpus
from trtpipe.engines.toolchain import version_key
from trtpipe.engines.trtllm_build import PROGRAM
from trtpipe.pipeline.cli.config import read_config
from trtpipe.pipeline.errors import translate
from trtpipe.pipeline.execution.executors import DockerExecutor, find_program
from trtpipe.pipeline.execution.hardware import require_image, visible_gpus
from trtpipe.pipeline.serving import engine_python, http_streams, triton_package
from trtpipe.pipeline.serving.servers import running
from trtpipe.pipeline.store.store import Store, host

# A model whose licence must be accepted, and how long the hub may take to tell of it.
GATED = "meta-llama/Meta-Llama-3-8B-Instruct"
HUB_SECONDS = 3.0
# Free disk space below which even the demo fails: 0.3 GB a copy of the model, a few copies.
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
    yield Finding(
        subject="http streams",
        state="ok",
        detail=f"{http_streams.capacity()} at once without loss; for more raise {http_streams.SETTING}",
    )
    yield _packages("reference runtime", ("torch", "transformers", "xgrammar"), "serve")
    yield _checked("vllm runtime", _vllm)
    yield _packages("GGUF reader", ("transformers", "gguf", "accelerate", "torch"), "gguf")
    yield _packages("quantization", ("nvidia-modelopt", "transformers", "torch"), "quantize")
    yield _checked("nvidia driver", _driver)
    yield _checked("toolchains", _toolchains)
    program = find_program(PROGRAM)
    yield Finding(
        subject=PROGRAM,
        state="ok" if program else "missing",
        detail=program or "not in this environment: engines are built in the toolchain's image, with --executor docker",
    )
    yield _checked("docker", _docker)
    yield _checked("hugging face", _hub)
    for server in running(store):
        yield Finding(subject=f"server {server.name}", state="ok", detail=server.endpoints.http_url)


def _checked(subject: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(subject=subject, state="ok", detail=check())
    except HostError as error:
        return Finding(subject=subject, state="missing", detail=str(error))
    except Exception as error:
        ours = translate(error)
        if ours is None:
            raise
        return Finding(subject=subject, state="fault", detail=str(ours))


def _store(store: Store) -> str:
    folder = store.home
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if not folder.is_dir():
        raise HostError(f"{folder} is not a folder", remedy="set TRTPIPE_HOME to a folder of yours")
    if not os.access(folder, os.W_OK):
        raise HostError(f"{folder} cannot be written", remedy="set TRTPIPE_HOME to a folder of yours")
    if free < DISK_GB * 1e9:
        raise HostError(f"{store.home} has {size_text(free)} free", remedy="free some space or set TRTPIPE_HOME")
    return f"{store.home}, {free / 1e9:.0f} GB free"


def _server() -> str:
    found = triton_package.find_installation()
    return f"{found.server} (nvidia-pytriton {found.version}, numpy {importlib.metadata.version('numpy')})"


def _packages(subject: str, names: tuple[str, ...], extra: str) -> Finding:
    try:
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    except importlib.metadata.PackageNotFoundError as error:
        return Finding(subject=subject, state="missing", detail=f"no {error.name}; run `{install_command(extra)}`")
    return Finding(subject=subject, state="ok", detail=versions)


def _vllm() -> str:
    """The package of the environment in which `serve` would run vLLM."""
    asked, on_cpu = read_config().engine_python, not visible_gpus()
    backend = load_backend("vllm")
    python = str(asked or engine_python.beside() or sys.executable)
    needs = backend.NEEDS_ON_CPU if on_cpu else backend.NEEDS
    assert needs is not None
    return f"{engine_python.require(python, needs)} of {python}"


def _driver() -> str:
    gpus = read_gpus()
    if not gpus:
        raise HostError("no GPU is visible", why="CUDA_VISIBLE_DEVICES hides all of them")
    return f"{gpus[0].driver}; " + "; ".join(f"GPU {gpu.index} {gpu.describe()}" for gpu in gpus)


def _toolchains() -> str:
    """Releases that this machine's driver can run, as text."""
    driver = read_gpus()[0].driver if visible_gpus() else ""
    known = facts.load_toolchains()
    if not driver:
        raise HostError("none runs without an NVIDIA GPU", why=f"known: {', '.join(known)}")
    able = [name for name, one in known.items() if one.driver is not None and one.supports_driver(driver)]
    if not able:
        lowest = min((one.driver for one in known.values() if one.driver is not None), key=version_key)
        raise HostError(f"driver {driver} is too old for all of them", remedy=f"update it to {lowest} or newer")
    return "this driver runs " + ", ".join(able)


def _docker() -> str:
    return DockerExecutor(require_image(facts.find_toolchain(None))).require()


def _hub() -> str:
    """Whether the hub answers, and whether a model with a licence to accept is open to this user."""
    from huggingface_hub.constants import ENV_VARS_TRUE_VALUES

    from trtpipe.pipeline.sources.hub import check_access

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ENV_VARS_TRUE_VALUES:
        raise HostError("not asked", why="HF_HUB_OFFLINE is set", remedy="what is in the local cache can be used")
    try:
        check_access(GATED, HUB_SECONDS)
    except UsageError:
        return f"the hub answers, and has no {GATED}"
    return f"the hub answers, and gated models such as {GATED} are open to you"
