"""Renderer of a Triton model repository from an engine, a tokenizer and a ServingConfig.

Five models: preprocessing, tensorrt_llm, postprocessing, ensemble (the three as a graph) and tensorrt_llm_bls (the
three as a script); for the LLM API one model (llmapi.py). An undefined name in a template is an error, and every
config.pbtxt is parsed with Triton's own protobuf before the repository is accepted.
"""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from trtpipe.configs.facts import find_toolchain
from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import ServedBy
from trtpipe.engines.base import Engine
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.files import copy_files, place
from trtpipe.engines.hf.draft import place_draft
from trtpipe.engines.hf.folder import TOKENIZER_FILES, require_tokenizer
from trtpipe.engines.json_input import read_json
from trtpipe.engines.lora_arrays import ARRAY_WEIGHTS
from trtpipe.engines.passport import Passport, read_passport
from trtpipe.triton_repo import llmapi, tensors
from trtpipe.triton_repo.check import check_configs
from trtpipe.triton_repo.layout import ADAPTER_FOLDER, ENGINE_FOLDER, TOKENIZER_FOLDER, TOKENIZER_INFO
from trtpipe.triton_repo.llmapi import place_llmapi
from trtpipe.triton_repo.serving import ServingConfig
from trtpipe.triton_repo.shared_text import tokenizer_info

TEMPLATES = Path(__file__).parent / "templates"
# Module that the text models share; its name must be unique, since a stub imports it through sys.path.
SHARED = "trtpipe_text.py"
# Postprocessing keeps the state of streams, so there can be only one instance.
POSTPROCESSING_INSTANCES = 1
BLS_INSTANCES = 4
# Default size of the C++ backend's cache of adapters in the host's memory.
LORA_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ModelRepository:
    """A folder for `tritonserver --model-repository`, and the names of its models."""

    path: Path
    models: tuple[str, ...] = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")


def render(
    engine: Engine, tokenizer: Path, serving: ServingConfig, out: Path, *, adapters: Path | None = None
) -> ModelRepository:
    """Write the repository into the existing folder `out`, with the folders of `adapters`. Raises InputDataError for an
    engine that cannot be served.

    The engine's files are hard links where the file system allows it, so that a repository takes no disk space.
    """
    require_tokenizer(tokenizer)
    passport = read_passport(engine.path)
    if _takes_adapters(passport):
        _place_adapters(adapters, out / ADAPTER_FOLDER)
    if load_backend(passport.runtime).SERVED_BY is ServedBy.LLM_API:
        repository = ModelRepository(path=out, models=(llmapi.MODEL,))
        values = place_llmapi(engine, serving, TEMPLATES, out, find_toolchain(passport.toolchain).sampler)
        _write_config("llmapi", values, out / llmapi.MODEL)
        # Such as the end tokens, where config.json alone states them.
        lacking = [name for name in TOKENIZER_FILES if not (out / ENGINE_FOLDER / name).exists()]
        copy_files(tokenizer, out / ENGINE_FOLDER, lacking)
        check_configs(out, repository.models)
        return repository
    repository = ModelRepository(path=out)
    for model in repository.models:
        (out / model / "1").mkdir(parents=True, exist_ok=True)
    for source in sorted(engine.path.iterdir()):
        if source.is_file():
            place(source, out / ENGINE_FOLDER / source.name)
    place_draft(engine.path, out / ENGINE_FOLDER)
    (out / TOKENIZER_FOLDER).mkdir()
    copy_files(tokenizer, out / TOKENIZER_FOLDER, TOKENIZER_FILES)
    (out / TOKENIZER_INFO).write_text(tokenizer_info(tokenizer), encoding="utf-8")
    for model, values in _values(passport, serving, adapters, _vocabulary(engine.path)).items():
        template = "tensorrt_llm_bls" if model == "ensemble" and serving.ensemble == "script" else model
        _write_config(template, values, out / model)
        script = TEMPLATES / template / "model.py"
        if script.is_file():
            shutil.copyfile(script, out / model / "1" / "model.py")
            shutil.copyfile(TEMPLATES / "shared" / SHARED, out / model / "1" / SHARED)
    # Triton requires a version folder even for an ensemble, and tools such as git drop empty folders.
    (out / "ensemble" / "1" / ".keep").touch()
    check_configs(out, repository.models)
    return repository


def _takes_adapters(passport: Passport) -> bool:
    return bool(passport.build_config.get("lora_plugin", "disable") != "disable")


def _place_adapters(adapters: Path | None, out: Path) -> None:
    """Link the adapters' files into `out`, which a server may have to find empty."""
    out.mkdir(parents=True)
    (out / ".keep").touch()
    for folder in sorted(adapters.iterdir()) if adapters is not None else ():
        (out / folder.name).mkdir()
        for source in sorted(folder.iterdir()):
            place(source, out / folder.name / source.name)


def _adapter_parameters(passport: Passport, prefix: str, adapters: Path | None) -> dict[str, str]:
    """Parameters of the C++ backend for the adapters that it loads when it starts; our backend reads the folder too."""
    if not _takes_adapters(passport):
        return {}
    rank = str(passport.build_config["max_lora_rank"])
    arrays = sum(path.stat().st_size for path in adapters.glob(f"*/{ARRAY_WEIGHTS}")) if adapters is not None else 0
    # An adapter that does not fit is dropped, and its requests are refused.
    room = {"lora_cache_host_memory_bytes": str(2 * arrays)} if 2 * arrays > LORA_CACHE_BYTES else {}
    return {
        **room,
        "lora_prefetch_dir": prefix + ADAPTER_FOLDER,
        "lora_cache_max_adapter_size": rank,
        "lora_cache_optimal_adapter_size": rank,
    }


def _write_config(template: str, values: dict[str, Any], folder: Path) -> None:
    text = _environment().get_template(f"{template}/config.pbtxt.j2").render(values)
    (folder / "config.pbtxt").write_text(text.strip() + "\n", encoding="utf-8")


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # protobuf text, not HTML
    )
    environment.filters["pbstring"] = _pbstring
    return environment


def _pbstring(value: str) -> str:
    """Escape for a double-quoted protobuf text string."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _vocabulary(engine: Path) -> int:
    """Number of the engine's logits, more than its tokenizer has ids where the model pads its vocabulary."""
    path = engine / "config.json"
    config = read_json(path, "engine config")
    size = {**config, **config.get("pretrained_config", {})}.get("vocab_size")
    if type(size) is not int:
        raise InputDataError(f"{path} has no vocab_size", remedy="build the engine again")
    return size


def _values(
    passport: Passport, serving: ServingConfig, adapters: Path | None, vocabulary: int
) -> dict[str, dict[str, Any]]:
    """Values of each model's template."""
    limit: int = passport.build_config["max_batch_size"]
    batch = serving.triton_max_batch_size or limit
    if batch > limit:
        raise InputDataError(
            f"serving.triton_max_batch_size {batch} exceeds the engine's max_batch_size {limit}",
            remedy="lower it, or raise build.max_batch_size",
        )
    ours = load_backend(passport.runtime).SERVED_BY is ServedBy.ENGINE_PROCESS
    prefix = serving.repository_root.rstrip("/") + "/" if serving.repository_root else ""
    tokenizer_dir = prefix + TOKENIZER_FOLDER
    text_parameters = {"tokenizer_dir": tokenizer_dir}
    watching = {
        "tensorrt_llm_model_name": "tensorrt_llm",
        "cancellation_check_period_ms": str(serving.cancellation_check_period_ms),
    }
    skip = {"skip_special_tokens": _boolean(serving.skip_special_tokens)}
    graph = {
        "max_batch_size": batch,
        "inputs": tensors.CLIENT_INPUTS,
        "outputs": tensors.CLIENT_OUTPUTS,
        "steps": _ensemble_steps(ours),
    }
    script = {
        "max_queue_size": serving.max_queue_size,
        "decoupled": serving.decoupled,
        "inputs": tensors.CLIENT_INPUTS,
        "outputs": tensors.CLIENT_OUTPUTS,
        "parameters": {
            **text_parameters,
            **skip,
            **watching,
            "preprocessing_model_name": "preprocessing",
            "postprocessing_model_name": "postprocessing",
            "accumulate_tokens": _boolean(serving.accumulate_tokens),
            "exclude_input_in_output": _boolean(serving.exclude_input_in_output),
            "to_preprocessing": json.dumps(tensors.PASSED_TO_PREPROCESSING),
            "to_engine": json.dumps(tensors.PASSED_TO_ENGINE),
            "preprocessed": json.dumps(tensors.PREPROCESSED),
        },
    }
    # As `ensemble`, the script serves all requests and must keep the engine busy; `tensorrt_llm_bls` need not.
    script_ensemble = {"instance_count": serving.bls_instance_count or limit, **script}
    return {
        "preprocessing": {
            "max_batch_size": batch,
            "inputs": tensors.PREPROCESSING_INPUTS,
            "outputs": tensors.PREPROCESSING_OUTPUTS,
            "parameters": {
                **text_parameters,
                "add_special_tokens": _boolean(serving.add_special_tokens),
                "vocab_size": str(vocabulary),
            },
            "instance_count": serving.preprocessing_instance_count,
        },
        "tensorrt_llm": {
            "max_batch_size": batch,
            "decoupled": serving.decoupled,
            "max_queue_delay_microseconds": serving.max_queue_delay_microseconds,
            "max_queue_size": serving.max_queue_size,
            "inputs": tensors.ENGINE_INPUTS + (tensors.OWN_INPUTS if ours else ()),
            "outputs": tensors.ENGINE_OUTPUTS + (tensors.OWN_OUTPUTS if ours else ()),
            "parameters": {**_engine_parameters(prefix, serving), **_adapter_parameters(passport, prefix, adapters)},
            "instance_count": serving.engine_instance_count or 1,
        },
        "postprocessing": {
            "max_batch_size": batch,
            "inputs": tensors.POSTPROCESSING_INPUTS,
            "outputs": tensors.POSTPROCESSING_OUTPUTS,
            "parameters": {**text_parameters, **skip, **watching, "decoupled": _boolean(serving.decoupled)},
            "instance_count": POSTPROCESSING_INSTANCES,
        },
        "ensemble": {"name": "ensemble", **(script_ensemble if serving.ensemble == "script" else graph)},
        "tensorrt_llm_bls": {
            "name": "tensorrt_llm_bls",
            "instance_count": serving.bls_instance_count or BLS_INSTANCES,
            **script,
        },
    }


def _boolean(value: bool) -> str:
    return "true" if value else "false"


def _engine_parameters(prefix: str, serving: ServingConfig) -> dict[str, str]:
    """`parameters` of the engine model. The backend silently replaces a value that it cannot parse by a default, so
    every value is written in the one spelling that it accepts."""
    out = {
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": prefix + ENGINE_FOLDER,
        "max_beam_width": "1",
        "batch_scheduler_policy": serving.batch_scheduler_policy,
        "kv_cache_free_gpu_mem_fraction": str(serving.kv_cache_free_gpu_mem_fraction),
        "enable_kv_cache_reuse": _boolean(serving.enable_kv_cache_reuse is not False),
        "enable_chunked_context": _boolean(serving.enable_chunked_context is not False),
        "multi_block_mode": _boolean(serving.multi_block_mode),
        "exclude_input_in_output": _boolean(serving.exclude_input_in_output),
        "normalize_log_probs": _boolean(serving.normalize_log_probs),
        "cancellation_check_period_ms": str(serving.cancellation_check_period_ms),
        "stats_check_period_ms": str(serving.stats_check_period_ms),
        # Guided decoding: the C++ backend reads the information file, a backend in Python may read the tokenizer.
        "tokenizer_dir": prefix + TOKENIZER_FOLDER,
        "guided_decoding_backend": "xgrammar",
        "xgrammar_tokenizer_info_path": prefix + TOKENIZER_INFO,
    }
    for name in (
        "max_tokens_in_paged_kv_cache", "max_attention_window_size", "sink_token_length", "kv_cache_host_memory_bytes",
    ):  # fmt: skip
        value = getattr(serving, name)
        if value is not None:
            out[name] = str(value)
    return out


def _ensemble_steps(ours: bool) -> list[dict[str, Any]]:
    """Steps of the ensemble: preprocessing -> tensorrt_llm -> postprocessing. Internal names start with "_".

    ours  whether the engine model has OWN_OUTPUTS
    """
    inner = {ours: "_" + ours for ours in tensors.PREPROCESSED}
    inner |= {"OUT_END_ID": "_PREPROCESSOR_END_ID", "OUT_PAD_ID": "_PREPROCESSOR_PAD_ID"}
    return [
        {
            "model": "preprocessing",
            "inputs": {theirs: ours for ours, theirs in tensors.PASSED_TO_PREPROCESSING.items()},
            "outputs": inner,
        },
        {
            "model": "tensorrt_llm",
            "inputs": {
                **{theirs: inner[ours] for ours, theirs in tensors.PREPROCESSED.items()},
                **{theirs: ours for ours, theirs in tensors.PASSED_TO_ENGINE.items()},
            },
            "outputs": {
                "output_ids": "_TOKENS_BATCH",
                "sequence_length": "_SEQUENCE_LENGTH",
                **{tensor.name: tensor.name for tensor in tensors.REPORT_OUTPUTS},
                **({"request_key": "_REQUEST_KEY", "last_response": "_LAST_RESPONSE"} if ours else {}),
            },
        },
        {
            "model": "postprocessing",
            "inputs": {
                "TOKENS_BATCH": "_TOKENS_BATCH",
                "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH",
                # Index of the response's sequence within the request, where a request has several sequences.
                "BATCH_INDEX": "batch_index",
                "SEQUENCE_INDEX": "sequence_index",
                **({"REQUEST_KEY": "_REQUEST_KEY", "LAST_RESPONSE": "_LAST_RESPONSE"} if ours else {}),
            },
            "outputs": {"OUTPUT": "text_output"},
        },
    ]
