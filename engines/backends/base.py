"""Interface of an engine backend; `engines.BACKENDS` names the modules that implement it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trtpipe.engines import BACKENDS, load_backend
from trtpipe.engines.base import Checkpoint, DataType, Engine, Mapping
from trtpipe.engines.build_config import LORA, SPECULATIVE, BuildConfig, changed
from trtpipe.engines.errors import TrtpipeError, UsageError
from trtpipe.engines.executor import Executor
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import COMPRESSED_TENSORS, KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.engines.toolchain import Toolchain


@dataclass(frozen=True, kw_only=True)
class Target:
    """Target of an engine build: GPU, mapping, quantization, toolchain, and the type of what is not quantized.

    stored  method by which the model's files are quantized already; "" where they are not
    """

    gpu: GpuSpec
    mapping: Mapping
    quantization: Quantization
    toolchain: Toolchain
    stored: str = ""
    dtype: DataType = DataType.BFLOAT16


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """Where an engine is built: executor of the build program, its log file, callback for each line of the log, and the
    GPUs that the program may use, as in Task."""

    executor: Executor
    log: Path
    show: Callable[[str], None] = lambda line: None
    gpus: tuple[int | str, ...] | None = None


class ServedBy(str, enum.Enum):
    """Program that executes an engine under tritonserver."""

    # NVIDIA's C++ backend `tensorrtllm`; each rank is a server under mpirun.
    TENSORRTLLM = "tensorrtllm"
    # NVIDIA's Python model of the LLM API, which takes text and starts its own ranks.
    LLM_API = "llmapi"
    # A process of ours, which the stubs of our Python backend share, and which starts its own ranks.
    ENGINE_PROCESS = "engine process"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What an engine process needs of an environment of its own.

    package  distribution that executes the engines, with the versions that are known to work
    install  arguments of `pip install` for it in a new environment
    target   target of the Makefile that makes this environment in a checkout; "" for none
    """

    package: str
    install: tuple[str, ...]
    target: str = ""


@dataclass(frozen=True, kw_only=True)
class NativeServer:
    """How a runtime's own OpenAI-compatible server is started.

    program      a program of the toolchain's image, or a Python module of the environment with the runtime
    command      its arguments
    in_image     which of the two
    environment  variables that it needs
    """

    program: str
    command: tuple[str, ...]
    in_image: bool
    environment: dict[str, str]

    @property
    def name(self) -> str:
        """Name of the program in messages: "vllm" for a module of it."""
        return self.program.partition(".")[0]


class EngineBackend(Protocol):
    """Engine backend of one runtime.

    FORM      checkpoint format it reads: "trtllm", or "hf" for a Hugging Face folder
    SETTINGS  the settings of BuildConfig that it uses; any other setting that is changed is refused
    COMPILED  whether an engine holds code for one GPU, so that only a machine with that GPU can build it
    ANYWHERE  whether its engines run on any machine, with or without a GPU
    ON_CPU    whether it makes engines for `--gpu cpu`
    SERVED_BY program that executes its engines under tritonserver
    PROCESS   module that an engine process executes engines with; "" for another SERVED_BY
    NEEDS, NEEDS_ON_CPU  what an engine process needs of an environment of its own, for a GPU and for a CPU; None where
              it runs in this environment
    SEQUENCES_PER_STUB  sequences whose tokens one stub can forward; None where one stub is enough for any number
    OLD_GPUS  why it runs on no GPU before SM80; "" where the file of such a GPU says it
    WEIGHT_ONLY  algorithms that it computes with the weights alone on a GPU without tensor cores for the operands
    MORE_SMS  SMs that it has kernels for, beyond those of a recipe's file: algorithm -> SMs
    READS     quantized Hugging Face folders that it reads as they are: method -> algorithms, None for a KV cache alone
    ONE_NODE  why its ranks must be on one node; "" where they can be on several
    NOTICE    what a user should know before choosing it; "" for nothing
    FIXED     settings and request inputs that it does not follow: dotted name -> (what holds instead, the reason).
              None holds where it has nothing of the kind
    MEANS     settings that it takes in another sense: dotted name -> the sense
    SPECULATES  modes of `build.speculative_decoding_mode` that it has
    ARRAYS    whether it loads adapters from NumPy arrays, as TensorRT-LLM's C++ backend does, not as PEFT saves them
    ALL_STAGES  whether it divides the layers of models of every family over pipeline stages
    ROTARY    kinds of rotary scaling that it computes, as `ModelConfig.rotary_kind` names them
    LENGTH_AS_STATED  those of them with which it takes no sequence longer than a number of config.json, unlike
              trtllm-build: kind -> the number's name; where that is not stated, max_position_embeddings
    SAME_ADAPTERS  why a running server keeps the adapters that it has started with; "" where they can change
    """

    FORM: str
    SETTINGS: tuple[str, ...]
    COMPILED: bool
    ANYWHERE: bool
    ON_CPU: bool
    SERVED_BY: ServedBy
    PROCESS: str
    NEEDS: Needs | None
    NEEDS_ON_CPU: Needs | None
    SEQUENCES_PER_STUB: int | None
    OLD_GPUS: str
    WEIGHT_ONLY: tuple[QuantAlgo, ...]
    MORE_SMS: dict[QuantAlgo, tuple[int, ...]]
    READS: dict[str, tuple[QuantAlgo | None, ...]]
    ONE_NODE: str
    NOTICE: str
    FIXED: dict[str, tuple[Any, str]]
    MEANS: dict[str, str]
    SPECULATES: tuple[str, ...]
    ARRAYS: bool
    ALL_STAGES: bool
    ROTARY: tuple[str, ...]
    LENGTH_AS_STATED: dict[str, str]
    SAME_ADAPTERS: str

    def tool_versions(self, toolchain: Toolchain) -> dict[str, str]:
        """Versions that determine the engine's bytes; part of the artefact's key."""

    def runs_on(self, target: Target, sms: tuple[int, ...]) -> tuple[int, ...] | None:
        """Compute capabilities that run an engine for `target`, of `sms`, which run its formats; None for any machine,
        with or without a GPU."""

    def resolve(self, build: BuildConfig, target: Target) -> tuple[BuildConfig, dict[str, str]]:
        """Return `build` with every None resolved, and a reason for each choice made here. Raises UsageError for an
        impossible combination, before anything is downloaded."""

    def rendered(self, build: BuildConfig, target: Target) -> dict[str, str]:
        """Settings files of the engine, name -> text; they depend on `build` and `target` alone."""

    def build(
        self, checkpoint: Checkpoint, out: Path, build: BuildConfig, target: Target, workshop: Workshop
    ) -> tuple[Engine, dict[str, str]]:
        """Write the engine folder, without its passport, into the existing empty folder `out`. Returns the engine and
        facts about where it was built."""

    def native_server(
        self, engine: Path, tokenizer: Path, *, host: str, port: int, names: tuple[str, ...], on_cpu: bool
    ) -> NativeServer:
        """The runtime's own server of an engine folder, which calls the model by `names`; `engine` has the first as its
        own name. Raises UsageError for a runtime without one."""


# Most adapters of a step, and most in the host's memory, of runtimes that reserve room for them. Requests of more
# adapters take turns, and adapters beyond those in memory are read from the disk when a request names them.
MAX_LORAS, MAX_CPU_LORAS = 8, 64
# Formats of quantized Hugging Face folders that are written, the preferred first -> their `quant_method`.
METHODS = {"hf": "modelopt", COMPRESSED_TENSORS: COMPRESSED_TENSORS}


def checkpoint_form(runtime: str, algo: QuantAlgo | None) -> str:
    """Checkpoint format for `runtime`: of those that can hold `algo` the first that it reads. Raises UsageError."""
    form = _form(load_backend(runtime), algo)
    if form is None:
        assert algo is not None
        others = f"--runtime {' or '.join(runtimes_of(algo))}, or " if runtimes_of(algo) else ""
        raise UsageError(
            f"the runtime {runtime} does not run {algo.value}",
            why=f"it does not read the formats that can hold it ({', '.join(algo.row.formats)})",
            remedy=f"use {others}another --dtype",
        )
    return form


def require_form(runtime: str, target: Target) -> None:
    """Raises UsageError when no checkpoint format brings the target's quantization to `runtime`, and for a GPU on which
    that runtime does not compute it.

    A model that came quantized is not written, but read as it is.
    """
    algo, sm = target.quantization.quant_algo, target.gpu.sm
    backend = load_backend(runtime)
    native = algo is None or sm is None or not algo.row.native or sm in algo.row.native
    if algo is not None and not native and algo not in backend.WEIGHT_ONLY:
        others = [name for name in BACKENDS if algo in load_backend(name).WEIGHT_ONLY]
        raise UsageError(
            f"the runtime {runtime} does not run {algo.value} on {target.gpu.describe()}",
            why=f"its kernels need {', '.join(f'SM{one}' for one in algo.row.native)}",
            remedy=f"use --runtime {' or '.join(others)}, which computes with the weights alone there, "
            "or another --dtype",
        )
    if not target.stored:
        checkpoint_form(runtime, target.quantization.quant_algo)


def require_weights(runtime: str, target: Target) -> None:
    """Raises UsageError for a quantized KV cache alone: no Hugging Face folder is written with its scales."""
    cache = target.quantization.kv_cache_quant_algo
    if not target.stored and cache is not None and target.quantization.quant_algo is None:
        # No folder that is written here has scales of an INT8 cache, whatever its weights.
        quantized = "" if cache is KvCacheQuantAlgo.INT8 else ", or a --dtype that quantizes the weights"
        raise UsageError(
            f"the runtime {runtime} does not run unquantized weights with an {cache.value} KV cache",
            why="the Hugging Face folder of such a model has no scales of the cache",
            remedy=f"use --kv-cache none{quantized}",
        )


def runtimes_of(algo: QuantAlgo | None) -> list[str]:
    """Runtimes for a GPU that run `algo`."""
    return [runtime for runtime in BACKENDS if not load_backend(runtime).ANYWHERE and reads(runtime, algo)]


def readers(method: str, algo: QuantAlgo | None, *, experts: bool = False) -> list[str]:
    """Runtimes that read, as they are, folders that came quantized by `method` with `algo`; with `experts`, of such a
    model."""
    form = form_of(method)
    if experts and algo is not None and form is not None and form not in algo.row.expert_formats:
        return []
    return [runtime for runtime in BACKENDS if algo in load_backend(runtime).READS.get(method, ())]


def form_of(method: str) -> str | None:
    """Checkpoint format of folders that came quantized by `method`; None for a method that is only read."""
    return next((form for form, name in METHODS.items() if name == method), None)


def reads(runtime: str, algo: QuantAlgo | None, *, experts: bool = False) -> bool:
    """Whether `runtime` reads a checkpoint format that can hold `algo`; with `experts`, for such a model."""
    form = _form(load_backend(runtime), algo)
    return form is not None and (not experts or algo is None or form in algo.row.expert_formats)


def _form(backend: EngineBackend, algo: QuantAlgo | None) -> str | None:
    if algo is None:
        return backend.FORM
    read = [form for form, method in METHODS.items() if algo in backend.READS.get(method, ())]
    forms = read if backend.FORM == "hf" else [backend.FORM]
    return next((form for form in forms if form in algo.row.formats), None)


def require_nodes(
    runtime: str, ranks: int, nodes: int, kind: type[TrtpipeError] = UsageError, more: str = ""
) -> None:  # fmt: skip
    """Raises `kind` where the ranks of an engine of `runtime` cannot be on as many nodes; `more` ends its remedy."""
    if nodes == 1 or not load_backend(runtime).ONE_NODE:
        return
    others = [name for name in BACKENDS if not (load_backend(name).ONE_NODE or load_backend(name).ANYWHERE)]
    raise kind(
        f"a {runtime} engine of {ranks} ranks needs {nodes} nodes",
        why=load_backend(runtime).ONE_NODE,
        remedy=f"build with --runtime {' or '.join(others)}, or with fewer ranks{more}",
    )


def longest_sequence(model: ModelConfig, runtime: str) -> int:
    """Tokens of the longest sequence of `model` that `runtime` takes."""
    stated = load_backend(runtime).LENGTH_AS_STATED.get(model.rotary_kind or "")
    if stated is None:
        return model.longest_sequence
    return int((model.rotary_scaling or {}).get(stated) or model.max_position_embeddings)


def settings_of(build: BuildConfig, settings: tuple[str, ...]) -> tuple[str, ...]:
    """A backend's SETTINGS, with those of adapters and of speculation where the engine has them."""
    more = (*(LORA if build.takes_adapters else ()), *(SPECULATIVE if build.speculates else ()))
    return tuple(dict.fromkeys((*settings, *more)))


def refuse_others(build: BuildConfig, settings: tuple[str, ...], runtime: str, why: str) -> None:
    """Raises UsageError when `build` changes a setting that `runtime` does not use."""
    for name in changed(build):
        if name not in settings_of(build, settings):
            raise UsageError(f"build.{name} is not for the {runtime} runtime", why=why, remedy="leave it out")


def require_speculation(build: BuildConfig, runtime: str) -> None:
    """Raises UsageError for a mode of speculation that `runtime` does not have, naming those that it has."""
    mode = build.speculative_decoding_mode
    has = load_backend(runtime).SPECULATES
    if mode is None or mode in has:
        return
    others = [name for name in BACKENDS if mode in load_backend(name).SPECULATES]
    raise UsageError(
        f"build.speculative_decoding_mode={mode} is not for the {runtime} runtime",
        why=f"it speculates by {', '.join(has)}",
        remedy=f"use one of these, or --runtime {' or '.join(others)}",
    )
