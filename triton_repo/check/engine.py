"""Check of the parameters and tensors of an engine model against the engine's sizes and features."""

from __future__ import annotations

from collections.abc import Sequence

from trtpipe.triton_repo.check import values
from trtpipe.triton_repo.check.engine_folder import EngineFolder, positive
from trtpipe.triton_repo.check.faults import ERROR, WARNING, Report
from trtpipe.triton_repo.check.models import Model
from trtpipe.triton_repo.check.release import Release
from trtpipe.triton_repo.check.tensors import LOGITS
from trtpipe.triton_repo.check.text import type_name

_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16"}
# Bits of build_config.speculative_decoding_mode, and the decoding mode that each requires; 1 stands for none.
SPECULATION = {1: None, 2: None, 4: "medusa", 8: "lookahead", 16: "redrafter", 32: "eagle"}
_SPECULATIVE = ("medusa", "lookahead", "redrafter", "eagle")
_STATIC = ("V1", "v1")
_UNPAGED = "is on, and the engine's prompt attention does not read a paged KV cache"
_PAGE = "turn it off, or build the engine with --use_paged_context_fmha enable"
# From this release on the executor refuses static batching.
STATIC_UNTIL = "0.20.0"
_ENCODERS = ("Encoder", "MLLaMA", "Mllama", "Whisper", "Enc", "DecoderModel")


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
        if value is not None and positive(value) is None:
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


def _number(model: Model, name: str, bounds: tuple[int, int] = values.INT32) -> int | None:
    text = model.value(name)
    value = values.read_int(text, bounds).value if text else None
    return None if value is None else int(value)


def _flag(model: Model, name: str) -> bool:
    text = model.value(name) or ""
    return text.lower() in ("1", "true") if model.python_runtime else text in values.CPP_TRUE
