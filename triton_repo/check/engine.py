"""Check of the engine that a configuration names: folder, sizes against parameters, release and GPU that run it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtpipe.engines import find_backend
from trtpipe.engines.backends.base import EngineBackend
from trtpipe.engines.errors import TrtpipeError
from trtpipe.engines.json_input import read_json
from trtpipe.engines.nvidia import Gpu
from trtpipe.engines.passport import NAME as PASSPORT
from trtpipe.engines.passport import Passport, objections, read_passport
from trtpipe.engines.precision import FP8_SMS
from trtpipe.engines.quantization import QuantAlgo
from trtpipe.engines.toolchain import Toolchain
from trtpipe.triton_repo.check import values
from trtpipe.triton_repo.check.engine_files import check_agreement, check_mapping, check_rank_files, check_weights
from trtpipe.triton_repo.check.faults import ERROR, WARNING, Location, Report
from trtpipe.triton_repo.check.models import Model
from trtpipe.triton_repo.check.paths import locate, tell_not_here
from trtpipe.triton_repo.check.release import Release, release_key
from trtpipe.triton_repo.check.tensors import LOGITS
from trtpipe.triton_repo.check.text import PLACEHOLDER, type_name
from trtpipe.triton_repo.check.tokenizer import GENERATION, Vocabulary

_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16"}
# Bits of build_config.speculative_decoding_mode, and the decoding mode that each requires; 1 stands for none.
SPECULATION = {1: None, 2: None, 4: "medusa", 8: "lookahead", 16: "redrafter", 32: "eagle"}
_SPECULATIVE = ("medusa", "lookahead", "redrafter", "eagle")
_STATIC = ("V1", "v1")
_UNPAGED = "is on, and the engine's prompt attention does not read a paged KV cache"
_PAGE = "turn it off, or build the engine with --use_paged_context_fmha enable"
# From this release on the executor refuses static batching.
STATIC_UNTIL = "0.20.0"
# Smallest share of an engine's vocabulary that its own tokenizer has.
_LEAST_VOCABULARY = 0.75
_ENCODERS = ("Encoder", "MLLaMA", "Mllama", "Whisper", "Enc", "DecoderModel")


@dataclass(frozen=True, kw_only=True)
class EngineFolder:
    """Facts of an engine folder on this machine, from its config.json; `hf` is that of a Hugging Face folder."""

    path: Path
    version: str | None
    pretrained: dict[str, Any]
    build: dict[str, Any]
    passport: Passport | None = None
    plugins: dict[str, Any] = field(default_factory=dict)
    hf: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def backend(self) -> EngineBackend | None:
        """The backend of the passport's runtime; None without a passport, and for a runtime that is not known."""
        return None if self.passport is None else find_backend(self.passport.runtime)

    def size(self, name: str) -> int | None:
        return _whole(self.build.get(name))

    @property
    def compiles(self) -> bool:
        """Whether the folder has the form that trtllm-build reads or writes, so that its config.json has a release."""
        return self.passport is None or (self.backend is not None and self.backend.FORM == "trtllm")

    @property
    def mapping(self) -> dict[str, Any]:
        return _mapping(self.pretrained.get("mapping"))

    @property
    def world_size(self) -> int | None:
        mapping = self.mapping
        sizes = [_whole(mapping.get(name, 1)) for name in ("tp_size", "pp_size", "cp_size")]
        if any(size is None for size in sizes) or not {"tp_size", "world_size"} & set(mapping):
            return None
        out = 1
        for size in sizes:
            out *= size or 1
        return out


def find_engine(model: Model, name: str, models: dict[str, Model], report: Report) -> EngineFolder | None:
    """Find the engine that a path parameter names, if it is on this machine; report its faults."""
    text = model.value(name)
    if text is None or PLACEHOLDER.search(text):
        return None
    where = model.at_parameter(name)
    place = locate(text, report.repository, models)
    if place.absent:
        report.error(
            "engine-folder",
            where,
            f"is '{text}', which is not there",
            why=place.why,
            remedy="name the folder of config.json and the rank files",
        )
        return None
    if place.path is None:
        tell_not_here(where, text, report)
        return None
    return read_engine(place.path, where, text, report, mapped=place.mapped)


def read_engine(
    folder: Path, where: Location, text: str, report: Report, *, mapped: bool = False
) -> EngineFolder | None:
    """Read an engine folder that `text` names at `where`; report its faults.

    mapped  whether a path of the container was found in the repository, whose engine may be elsewhere
    """
    if not folder.is_dir():
        report.error("engine-folder", where, f"is '{text}', which is not a folder", remedy="name the folder it is in")
        return None
    passport = _passport(folder, report)
    files = {path.name for path in folder.iterdir() if path.is_file()}
    ranks = any(re.fullmatch(r"rank\d+\.(engine|safetensors)", file) for file in files)
    if mapped and "config.json" not in files and not ranks:
        tell_not_here(where, text, report)
        return None
    if "config.json" not in files:
        inner = sorted(path.parent.name for path in folder.glob("*/config.json"))
        report.error(
            "engine-folder",
            where,
            f"is '{text}', which has no config.json",
            why="the backend reads the engine's sizes from it",
            remedy=f"name {text.rstrip('/')}/{inner[0]}"
            if len(inner) == 1
            else "copy the whole folder that trtllm-build wrote",
        )
        return None
    return _read(folder, where, text, passport, report)


def _read(folder: Path, where: Location, text: str, passport: Passport | None, report: Report) -> EngineFolder | None:
    try:
        raw = read_json(folder / "config.json", "engine config")
    except TrtpipeError as error:
        report.error(
            "engine-config", folder / "config.json", "cannot be read", why=error.why or error.what,
            remedy="copy it from the build again",
        )  # fmt: skip
        return None
    backend = None if passport is None else find_backend(passport.runtime)
    if passport is not None and backend is None:
        report.warning(
            "passport", (folder / PASSPORT, "runtime"), f"is {passport.runtime}, which this version does not know",
            why="the engine is not checked", remedy="check it with the version that built it",
        )  # fmt: skip
        return EngineFolder(path=folder, version=None, pretrained={}, build={}, passport=passport)
    folder_of_hf = backend is not None and backend.FORM == "hf"
    kind = None
    if folder_of_hf and "build_config" in raw:
        kind = "an engine of TensorRT-LLM, not a Hugging Face model folder, as its passport says"
    elif not folder_of_hf and not any(isinstance(raw.get(f"{word}_config"), dict) for word in ("build", "builder")):
        kind = "a Hugging Face model folder, not an engine" if "architectures" in raw else None
        kind = "a TensorRT-LLM checkpoint, not an engine" if "architecture" in raw else kind
        if kind is None:
            report.error(
                "engine-config", where, f"is '{text}', which has a config.json without sizes",
                "it has no build_config", "build the engine with trtllm-build, and name its folder",
            )  # fmt: skip
            return None
    elif folder_of_hf and not raw.get("architectures"):
        kind = "no Hugging Face model folder: its config.json names no architecture"
    if kind is not None:
        remedy = "build the engine again, and name its folder"
        report.error("engine-folder", where, f"is '{text}', which is {kind}", remedy=remedy)
        return None
    if folder_of_hf:
        check_weights(folder, report)
        engine = EngineFolder(path=folder, version=None, pretrained={}, build={}, passport=passport, hf=raw)
        check_agreement(engine, report)
        return engine
    plugins = _mapping(_mapping(raw.get("build_config")).get("plugin_config"))
    engine = EngineFolder(
        path=folder,
        version=raw["version"] if isinstance(raw.get("version"), str) else None,
        pretrained=_mapping(raw.get("pretrained_config")),
        build=_mapping(raw.get("build_config")),
        passport=passport,
        plugins=plugins or _mapping(raw.get("plugin_config")),
    )
    check_mapping(engine, report)
    check_rank_files(engine, where, report)
    check_agreement(engine, report)
    return engine


def _passport(folder: Path, report: Report) -> Passport | None:
    if not (folder / PASSPORT).is_file():
        return None
    try:
        return read_passport(folder)
    except TrtpipeError as error:
        report.error("passport", folder / PASSPORT, "cannot be read", why=error.why or error.what, remedy=error.remedy)
        return None


def check_engine(model: Model, engine: EngineFolder, release: Release, report: Report) -> None:
    """Check the parameters and tensors of an engine model against the engine's sizes and features."""
    _check_sizes(model, engine, report)
    _check_cache(model, engine, report)
    _check_strategy(model, engine, release, report)
    _check_features(model, engine, report)
    _check_decoding(model, engine, report)
    _check_logits(model, engine, report)


def _tell(model: Model, report: Report, findings: Sequence[tuple[bool, str, str, str, str, str, str]]) -> None:
    """Report the findings whose first value is true; then follow severity, rule, parameter, what, why and remedy."""
    for wrong, severity, rule, name, what, why, remedy in findings:
        if wrong:
            report.add(severity, rule, model.at_parameter(name), what, why, remedy)


def _check_sizes(model: Model, engine: EngineFolder, report: Report) -> None:
    for name in ("max_batch_size", "max_seq_len", "max_num_tokens", "max_beam_width"):
        value = engine.build.get(name)
        if value is not None and _whole(value) is None:
            report.error(
                "engine-config", (engine.config, name), f"is {value!r}", "the backend reads a number",
                "copy it from the build again",
            )  # fmt: skip
    limit = engine.size("max_batch_size")
    if limit is not None and model.batch > limit:
        report.error(
            "batch-above-engine",
            model.at_field("max_batch_size"),
            f"is {model.batch}, above the engine's max_batch_size {limit}",
            why="the engine runs no more requests at once",
            remedy=f"give {limit}, or build the engine for more",
        )
    beams, most = _number(model, "max_beam_width"), engine.size("max_beam_width")
    tokens, prompt = engine.size("max_num_tokens"), engine.size("max_input_len")
    whole = tokens is None or prompt is None or prompt <= tokens or _flag(model, "enable_chunked_context")
    # fmt: off
    _tell(model, report, (
        (beams is not None and most is not None and beams > most, ERROR, "beam-width", "max_beam_width",
         f"is {beams}, above the engine's max_beam_width {most}", "the model does not load",
         f"give {most}, or build the engine with --max_beam_width {beams}"),
        (not whole, ERROR, "prompt-limit", "enable_chunked_context",
         f"is off, and the engine takes prompts of {prompt} tokens in steps of {tokens}",
         "prompts that do not fit one step are refused",
         "set enable_chunked_context true, or build the engine with a larger max_num_tokens"),
    ))
    # fmt: on


def _check_cache(model: Model, engine: EngineFolder, report: Report) -> None:
    paged = engine.plugins.get("use_paged_context_fmha")
    chunks, reuse = _flag(model, "enable_chunked_context"), _flag(model, "enable_kv_cache_reuse")
    no_reuse = model.value("enable_kv_cache_reuse") in values.CPP_FALSE
    no_onboarding = model.value("kv_cache_onboard_blocks") in values.CPP_FALSE
    external = engine.build.get("speculative_decoding_mode") in (2, "draft_tokens_external")
    host = _number(model, "kv_cache_host_memory_bytes", values.SIZE)
    sinks = (_number(model, "sink_token_length") or 0) > 0
    cap, longest = _number(model, "max_tokens_in_paged_kv_cache"), engine.size("max_seq_len")
    windows, read = values.read_ints(model.value("max_attention_window_size") or "")
    widest = max(windows) if read and windows else None
    seen = longest if longest is None or widest is None else min(longest, widest)
    # fmt: off
    _tell(model, report, (
        (paged is False and chunks, ERROR, "paged-attention", "enable_chunked_context", _UNPAGED,
         "the model does not load", _PAGE),
        (paged is False and reuse, ERROR, "paged-attention", "enable_kv_cache_reuse", _UNPAGED,
         "the backend turns it off again", _PAGE),
        (sinks and reuse, ERROR, "paged-attention", "enable_kv_cache_reuse", "is on, and sink_token_length has a value",
         "blocks of a prompt with attention sinks are not shared", "turn one of them off"),
        (bool(host) and no_reuse, WARNING, "paged-attention", "kv_cache_host_memory_bytes",
         f"is {host}, and enable_kv_cache_reuse is off", "host memory keeps blocks for reuse only",
         "turn enable_kv_cache_reuse on, or leave it out"),
        (engine.build.get("gather_context_logits") is True and reuse, WARNING, "paged-attention",
         "enable_kv_cache_reuse", "is on, and the engine returns the logits of prompts",
         "the backend turns reuse off for such an engine", "turn it off"),
        (external and no_reuse, ERROR, "engine-feature", "enable_kv_cache_reuse",
         "is off, and the engine checks another model's drafts", "the model does not load", "turn it on"),
        (paged is True and no_onboarding, ERROR, "paged-attention", "kv_cache_onboard_blocks",
         "is off, and the engine's prompt attention reads a paged KV cache", "the model does not load", "leave it out"),
        (longest is not None and widest is not None and widest > longest, WARNING, "attention-window",
         "max_attention_window_size", f"is {widest}, above the engine's max_seq_len {longest}",
         "the backend takes the smaller one", ""),
        (sinks and model.value("max_attention_window_size") is None, WARNING, "attention-window", "sink_token_length",
         "is given, and max_attention_window_size is not", "without a window every token stays in sight",
         "give both, or leave it out"),
        (cap is not None and seen is not None and 0 < cap < seen, ERROR, "kv-cache-tokens",
         "max_tokens_in_paged_kv_cache", f"is {cap}, and one sequence may have {seen} tokens",
         "the cache has to hold one whole sequence", f"give at least {seen}, or leave it out"),
    ))
    # fmt: on


def _check_strategy(model: Model, engine: EngineFolder, release: Release, report: Report) -> None:
    """Check the batching strategy: in-flight batching needs the attention plugin, packed prompts and a paged cache."""
    strategy = model.value("gpt_model_type")
    kind = engine.build.get("kv_cache_type")
    kind = kind.lower() if isinstance(kind, str) else None
    lacks = [
        told
        for told, absent in (
            (
                "a paged KV cache",
                kind == "continuous" or (kind is None and engine.plugins.get("paged_kv_cache") is False),
            ),
            ("packed prompts", engine.plugins.get("remove_input_padding") is False),
            ("the attention plugin", engine.plugins.get("gpt_attention_plugin", "") in (None, False)),
        )
        if absent
    ]
    if lacks and strategy is not None and strategy not in _STATIC:
        report.error(
            "batching-strategy",
            model.at_parameter("gpt_model_type"),
            f"is {strategy}, and the engine was built without {' and '.join(lacks)}",
            why="the model does not load",
            remedy="build the engine with trtllm-build's defaults",
        )
    elif kind == "disabled" and not lacks:
        report.warning(
            "batching-strategy",
            (engine.config, "kv_cache_type"),
            "is disabled",
            why="such an engine gives one token for each request",
            remedy="build the engine with --kv_cache_type paged",
        )
    elif strategy in _STATIC and not lacks and not release.reaches(STATIC_UNTIL):  # else `check_static` reports it
        report.warning(
            "static-batching",
            model.at_parameter("gpt_model_type"),
            f"is {strategy}",
            why="a batch then runs to its end before others join, and the engine could do better",
            remedy="give inflight_fused_batching",
        )


def check_static(model: Model, release: Release, report: Report) -> None:
    """Report static batching in a release that refuses it; this needs no engine."""
    strategy = model.value("gpt_model_type") or ""
    if strategy.upper() == _STATIC[0] and release.reaches(STATIC_UNTIL):
        report.error(
            "static-batching",
            model.at_parameter("gpt_model_type"),
            f"is {strategy}",
            why=f"{release.told()} has no static batching, and the model does not load",
            remedy="give inflight_fused_batching",
        )


def _check_features(model: Model, engine: EngineFolder, report: Report) -> None:
    share = values.read_float(model.value("gpu_weights_percent") or "").value
    streamed = share is not None and share < 1 and engine.build.get("weight_streaming") is False
    architecture = engine.pretrained.get("architecture")
    decoder_alone = isinstance(architecture, str) and not any(word in architecture for word in _ENCODERS)
    crossed = bool(model.value("cross_kv_cache_fraction")) and not model.value("encoder_model_path")
    adapters = bool(model.value("lora_prefetch_dir")) and engine.plugins.get("lora_plugin", "") is None
    # fmt: off
    _tell(model, report, (
        (streamed, ERROR, "engine-feature", "gpu_weights_percent",
         f"is {share or 0:g}, and the engine was built without weight streaming", "",
         "leave it out, or build the engine with --weight_streaming"),
        (adapters, ERROR, "engine-feature", "lora_prefetch_dir", "is given, and the engine was built without LoRA",
         "the backend passes it over", "leave it out, or build the engine with --lora_plugin"),
        (crossed and decoder_alone, ERROR, "engine-feature", "cross_kv_cache_fraction",
         "is given, and the engine has no encoder", "the model does not load", "leave it out"),
    ))
    # fmt: on


def _check_decoding(model: Model, engine: EngineFolder, report: Report) -> None:
    mode = model.value("decoding_mode")
    raw = engine.build.get("speculative_decoding_mode")
    built: str | None
    if isinstance(raw, str):
        built = next((one for one in _SPECULATIVE if one in raw.lower()), None)
        built = "redrafter" if "explicit" in raw.lower() else built
    elif raw in SPECULATION:
        built = SPECULATION[raw]
    else:
        return
    for word in ("medusa", "eagle"):
        tree = model.value(f"{word}_choices")
        if tree and values.is_tree(tree) and word not in (built, mode):
            report.warning(
                "decoding-mode",
                model.at_parameter(f"{word}_choices"),
                f"is given, and the engine was not built for {word}",
                why="nothing reads it",
                remedy="leave it out",
            )
    if mode is None or mode == "auto":
        return
    where = model.at_parameter("decoding_mode")
    if built != (mode if mode in _SPECULATIVE else None):
        report.error(
            "decoding-mode",
            where,
            f"is {mode}, and the engine was built {'for ' + built if built else 'without speculative decoding'}",
            why="the backend takes the engine's",
            remedy=f"give {built}" if built else "leave it out",
        )
    elif mode == "beam_search" and (_number(model, "max_beam_width") or 1) == 1:
        report.error(
            "decoding-mode",
            where,
            "is beam_search, and max_beam_width is 1",
            why="the backend then samples",
            remedy="raise max_beam_width, or leave decoding_mode out",
        )


def _check_logits(model: Model, engine: EngineFolder, report: Report) -> None:
    declared = {**model.inputs(), **model.outputs()}
    found = {name: type_name(declared[name].data_type) for name in LOGITS if name in declared}
    expected = _TYPES.get(str(engine.pretrained.get("logits_dtype")))
    wrong = [name for name, word in found.items() if expected and word != expected]
    if wrong and not report.blames(model.name, wrong[0]):
        report.error(
            "logits-type",
            model.at_tensor("input" if wrong[0] in model.inputs() else "output", wrong[0]),
            f"is {found[wrong[0]]}, and the engine's logits are {expected}",
            why="a request for them ends in an assertion",
            remedy=f"give {expected} to all logits, in the ensemble too",
        )
        report.blame(model.name, *found)


def check_release(
    model: Model, engine: EngineFolder, release: Release, toolchain: Toolchain | None, report: Report
) -> None:
    """Report an engine of another release: it runs only on its own release, which TensorRT-LLM does not check."""
    anywhere = engine.backend is not None and engine.backend.ANYWHERE
    if anywhere or (engine.version or "").startswith("reference"):
        return
    if toolchain is not None and engine.compiles and "tensorrt_llm" not in toolchain.runtimes:
        return  # a release without engines, which the check of the runtime reports
    made = release_key(engine.version)
    stamped = release_key(engine.passport.toolchain) if engine.passport is not None else None
    if made is None and engine.compiles:
        report.warning(
            "engine-release",
            (engine.config, "version"),
            "is missing" if engine.version is None else f"is '{engine.version}', which is no release",
            why="builders before 0.8 wrote none, and an engine runs on the release that built it",
            remedy="build the engine again",
        )
    elif toolchain is not None:
        asked = release_key(toolchain.name)
        for key, name, path in (
            (made, engine.version, engine.config),
            (stamped, engine.passport.toolchain if engine.passport else None, engine.path / PASSPORT),
        ):
            if key is not None and key != asked:
                report.error(
                    "engine-release",
                    (path, "version" if path == engine.config else "toolchain"),
                    f"is {name}, and the repository is for TensorRT-LLM {toolchain.name}",
                    why="an engine runs on the release that built it",
                    remedy=f"build it with {toolchain.name}, or serve it with {name}",
                )
                return
    elif made is not None and stamped is not None and made != stamped:
        report.error(
            "passport",
            (engine.path / PASSPORT, "toolchain"),
            f"is {engine.passport.toolchain if engine.passport else ''}, and config.json says {engine.version}",
            remedy="build the engine again",
        )


def check_gpus(
    model: Model, engine: EngineFolder, gpus: Sequence[Gpu], toolchain: Toolchain | None, report: Report
) -> None:
    """Check whether this machine can run the engine."""
    if engine.passport is not None:
        told = _objections(engine.passport, gpus, toolchain)
        _tell_objections(model.at_parameter("gpt_model_path"), told, report)
        return
    where = model.at_parameter("gpt_model_path")
    quantization = _mapping(engine.pretrained.get("quantization"))
    algo = next((algo for algo in QuantAlgo if algo.value == quantization.get("quant_algo")), None)
    fp8 = (algo is not None and algo.row.operands == "fp8") or quantization.get("kv_cache_quant_algo") == "FP8"
    if fp8 and gpus and all(gpu.sm < min(FP8_SMS) for gpu in gpus):
        report.error(
            "engine-gpu", where, f"names an engine in FP8, and this machine has {gpus[0].describe()}",
            f"SM{min(FP8_SMS)} and newer have FP8", "serve it elsewhere, or build it in another precision",
        )  # fmt: skip
    elif engine.world_size is not None and engine.world_size > len(gpus):
        report.error(
            "engine-gpu",
            where,
            f"names an engine of {engine.world_size} rank(s), and this machine has {len(gpus)} GPU(s)",
            remedy="serve it elsewhere, or build it for fewer",
        )
    elif not (engine.version or "").startswith("reference"):
        report.warning(
            "engine-gpu", where, "names an engine of which nothing says for which GPU it was built",
            f"it has no {PASSPORT}, and an engine runs on its own compute capability only", "see where it was built",
        )  # fmt: skip


def check_passport(
    where: Location, folder: Path, gpus: Sequence[Gpu] | None, toolchain: Toolchain | None, report: Report
) -> Passport | None:
    """Check the passport of an LLM API model's folder, and return it; only folders of this project have one."""
    passport = _passport(folder, report)
    if passport is None:
        return None
    if toolchain is not None and release_key(passport.toolchain) not in (None, release_key(toolchain.name)):
        report.error(
            "engine-release",
            (folder / PASSPORT, "toolchain"),
            f"is {passport.toolchain}, and the repository is for TensorRT-LLM {toolchain.name}",
            remedy=f"build it with {toolchain.name}, or serve it with {passport.toolchain}",
        )
    if gpus is not None:
        _tell_objections(where, _objections(passport, gpus, toolchain), report)
    return passport


def _objections(passport: Passport, gpus: Sequence[Gpu], toolchain: Toolchain | None) -> list[str]:
    floor = toolchain.driver if toolchain is not None and passport.toolchain == toolchain.name else None
    return objections(passport, gpus, floor=floor)


def _tell_objections(where: Location, told: list[str], report: Report) -> None:
    for objection in told:
        report.error(
            "engine-gpu",
            where,
            "names an engine that this machine cannot run",
            why=objection,
            remedy="build it for this GPU, or serve it elsewhere",
        )


def check_vocabulary(engine: EngineFolder, vocabularies: list[Vocabulary], report: Report) -> None:
    """Compare the tokenizer's ids with the engine's. Models pad their vocabulary, by a few percent at most."""
    most = _whole({**engine.hf, **engine.pretrained}.get("vocab_size"))
    if most is None:
        return
    for vocabulary in vocabularies:
        why, remedy = "it is another model's tokenizer", "copy that of the engine's model"
        if vocabulary.size > most:
            told = f"has {vocabulary.size:,} tokens, and the engine {most:,}"
            report.error("tokenizer-vocabulary", vocabulary.path, told, why, remedy)
        elif vocabulary.ids < _LEAST_VOCABULARY * most:
            told = f"has {vocabulary.ids:,} tokens, and the engine {most:,}"
            report.warning("tokenizer-vocabulary", vocabulary.path, told, why, remedy)
        elif vocabulary.ids > most:
            told = f"adds tokens up to the id {vocabulary.ids - 1:,}, and the engine has {most:,}"
            report.warning("tokenizer-vocabulary", vocabulary.path, told, "a prompt with one fails", remedy)
        for name, number in vocabulary.named.items():
            if number >= most:
                at, told = (
                    (vocabulary.path.with_name(GENERATION), name),
                    f"names {number:,}, and the engine has {most:,} tokens",
                )
                add = report.error if name == "eos_token_id" else report.warning
                add("tokenizer-end", at, told, why, remedy)


def _number(model: Model, name: str, bounds: tuple[int, int] = values.INT32) -> int | None:
    text = model.value(name)
    value = values.read_int(text, bounds).value if text else None
    return None if value is None else int(value)


def _flag(model: Model, name: str) -> bool:
    text = model.value(name) or ""
    return text.lower() in ("1", "true") if model.python_runtime else text in values.CPP_TRUE


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
