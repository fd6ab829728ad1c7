"""The check of model repositories: sound ones of every release pass, each single fault is named by its rule."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.factories import write_safetensors
from tests.support.repository_changes import (
    A100,
    H100,
    PYTHON_RUNTIME,
    Change,
    both,
    drop,
    edit,
    engine,
    made,
    move,
    param,
    params,
    remove,
    rendered,
    replace_all,
    tensor,
    untensor,
    world,
    write,
)
from tests.support.repository_faults import RELEASES, expect, looked_into, told
from tests.support.triton_repositories import SCRIPT, Repository, inflight
from trtpipe.configs.facts import find_toolchain
from trtpipe.triton_repo.check import RULES, WARNING, RepositoryError, check_configs, check_repository
from trtpipe.triton_repo.check.models import FILES as MODEL_FILES
from trtpipe.triton_repo.check.models import PLATFORMS
from trtpipe.triton_repo.combine import link_models

ALL = ("tensorrt_llm", "preprocessing", "postprocessing", "ensemble", "tensorrt_llm_bls")
OTHER_TOKENIZER = {"model": {"vocab": {"</s>": 0, **{str(number): number for number in range(1, 300)}}}}
LONG_VOCABULARY = {"model": {"vocab": {"</s>": 0, **{str(number): number for number in range(1, 400)}}}}
NVIDIA_PREPROCESSING = """
import json
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        model_config = json.loads(args["model_config"])
        tokenizer_dir = model_config["parameters"]["tokenizer_dir"]["string_value"]
        vision = model_config["parameters"]["multimodal_model_path"]["string_value"]
        if vision:
            engine = model_config["parameters"]["hf_model_path"]["string_value"]
        output_names = ["INPUT_ID", "PIXEL_VALUES"]
        for name in output_names:
            pb_utils.get_output_config_by_name(model_config, name)["data_type"]
"""
NVIDIA_DECODER = """
class TritonDecoder:
    def __init__(self):
        self._llm_outputs = ["output_ids", "sequence_length", "num_input_tokens"]
        self.input_names = ["text_input", "seed", "min_tokens"]
"""


def model_of(name: str, line: str, file: str) -> Change:
    """A further model without a backend: a line of its config.pbtxt, and a file."""
    tensors = "[ { name: 'X' data_type: TYPE_FP32 dims: [ 1 ] } ]"
    config = f"name: '{name}'\nmax_batch_size: 8\n{line}\ninput {tensors}\noutput {tensors.replace('X', 'Y')}\n"
    return both(write(f"{name}/config.pbtxt", config), write(f"{name}/{file}", "x"))


# name, change, rule; warnings say so.
# fmt: off
WRONG: list[tuple[Any, ...]] = [
    # The text.
    ("unquoted", edit("tensorrt_llm", "max_batch_size: 8", "max_batch_size: ${triton_max_batch_size}"), "placeholder"),
    ("unquoted type", tensor("draft_logits", "TYPE_FP32", "${logits_datatype}"), "placeholder"),
    ("unquoted count", edit("preprocessing", "count: 1", "count: ${preprocessing_instance_count}"), "placeholder"),
    ("broken", edit("postprocessing", "max_batch_size: 8", "max_batch_size: eight"), "syntax"),
    ("quoted number", edit("postprocessing", "max_batch_size: 8", 'max_batch_size: "8"'), "syntax"),
    ("unknown field", edit("postprocessing", "max_batch_size: 8", "max_batchsize: 8"), "syntax"),
    ("numpy's type", tensor("INPUT_ID", "TYPE_INT32", "int32", "preprocessing"), "syntax"),
    ("unknown type", tensor("OUTPUT", "TYPE_STRING", "TYPE_BYTES", "postprocessing"), "syntax"),
    ("field twice", edit("postprocessing", "max_batch_size: 8", "max_batch_size: 8\nmax_batch_size: 8"), "syntax"),
    ("no such escape", edit("postprocessing", 'backend: "python"', 'backend: "pyt\\hon"'), "syntax"),
    ("unclosed", edit("postprocessing", "instance_group [", "instance_group [ ["), "syntax"),
    ("quoted boolean", edit("tensorrt_llm", "decoupled: true", 'decoupled: "true"'), "syntax"),
    ("yes", edit("tensorrt_llm", "decoupled: true", "decoupled: yes"), "syntax"),
    ("negative delay", edit("tensorrt_llm", "microseconds: 0", "microseconds: -1"), "syntax"),
    # The layout.
    ("other name", edit("tensorrt_llm", 'name: "tensorrt_llm"', 'name: "llm"'), "model-name"),
    ("no version", remove("ensemble/1"), "version-folder"),
    ("leading zero", move("ensemble/1", "ensemble/01"), "version-folder"),
    (
        "absent version",
        edit("postprocessing", "max_batch_size: 8", "max_batch_size: 8 version_policy { specific { versions: 2 } }"),
        "version-folder",
    ),
    ("byte order mark", lambda repository: repository.config("ensemble").write_text("\ufeff"), "config-unreadable"),
    ("not UTF-8", lambda repository: repository.config("ensemble").write_bytes(b"\xff"), "config-unreadable"),
    ("no config", remove("postprocessing/config.pbtxt"), "config-missing"),
    ("no config, not called", write("extra/1/model.py", SCRIPT), "config-missing", WARNING),
    ("stray folder", write("engines/readme", ""), "not-a-model", WARNING),
    ("no script", remove("preprocessing/1/model.py"), "model-script"),
    ("no class", write("preprocessing/1/model.py", "class Model:\n    pass\n"), "model-script"),
    ("broken script", write("preprocessing/1/model.py", "class TritonPythonModel(\n"), "model-script"),
    ("no library", write("tensorrt_llm_bls/1/model.py", f"from lib.decode import x\n{SCRIPT}"), "script-import"),
    # The backend.
    ("no backend", edit("tensorrt_llm", 'backend: "tensorrtllm"', 'backend: "${triton_backend}"'), "backend"),
    ("misspelt backend", edit("tensorrt_llm", 'backend: "tensorrtllm"', 'backend: "tensorrt_llm"'), "backend"),
    ("backend's case", edit("preprocessing", 'backend: "python"', 'backend: "Python"'), "backend"),
    ("platform", edit("preprocessing", 'backend: "python"', 'platform: "python"'), "backend"),
    ("wrong backend", edit("tensorrt_llm", 'backend: "tensorrtllm"', 'backend: "vllm"'), "backend"),
    ("own backend", edit("preprocessing", 'backend: "python"', 'backend: "ours"'), "backend", WARNING),
    ("own backend of its name", model_of("x.ours", "", "1/any"), "backend", WARNING),
    ("misspelt backend of its name", model_of("x.onnxruntim", "", "1/any"), "backend"),
    ("no backend for the first version", both(write("x/1/any", ""), model_of("x", "", "2/model.py")), "backend"),
    ("no backend beside a name with dots", both(move("postprocessing", "a.b"), lambda repository: repository.edit(
        "a.b", 'name: "postprocessing"\n', ""), lambda repository: repository.edit("a.b", 'backend: "python"\n', ""),
        remove("a.b/1/model.py"), edit("ensemble", 'model_name: "postprocessing"', 'model_name: "a.b"')), "backend"),
    ("ensemble's backend", edit("ensemble", 'platform: "ensemble"', 'backend: "python"'), "backend"),
    # Triton's core.
    ("preferred", edit("tensorrt_llm", "preferred_batch_size: [ 8 ]", "preferred_batch_size: [ 16 ]"), "batch-size"),
    ("preferred none", edit("tensorrt_llm", "batch_size: [ 8 ]", "batch_size: [ 0 ]"), "batch-size"),
    (
        "GPUs of a CPU instance",
        edit("postprocessing", "kind: KIND_CPU", "kind: KIND_CPU\n    gpus: [ 0 ]"),
        "instance-group",
    ),
    ("GPU instances", edit("tensorrt_llm", "kind: KIND_CPU", "kind: KIND_GPU"), "instance-group", WARNING),
    ("no dims", tensor("OUTPUT", "dims: [ -1 ]", "", "postprocessing"), "tensor"),
    ("dims of nothing", tensor("DECODER_QUERY", "dims: [ 1 ]", "dims: [ 0 ]", "preprocessing"), "tensor"),
    ("no type", tensor("DECODER_QUERY", "data_type: TYPE_STRING", "", "preprocessing"), "tensor"),
    ("reshape", tensor("end_id", "shape: [ ]", "shape: [ 2 ]"), "tensor"),
    (
        "twice",
        edit("postprocessing", "input [\n", 'input [\n{ name: "TOKENS_BATCH" data_type: TYPE_INT32 dims: [-1,-1] },\n'),
        "duplicate-tensor",
    ),
    (
        "priorities",
        edit("tensorrt_llm", "dynamic_batching {", "dynamic_batching {\n  priority_levels: 2"),
        "queue-policy",
    ),
    (
        "ordering",
        edit(
            "tensorrt_llm",
            "dynamic_batching {",
            "dynamic_batching {\n  preserve_ordering: true priority_levels: 2 default_priority_level: 1",
        ),
        "queue-policy",
    ),
    (
        "cache of streams",
        edit("tensorrt_llm", "model_transaction_policy", "response_cache { enable: true }\nmodel_transaction_policy"),
        "response-cache",
    ),
    ("instances of a graph", edit("ensemble", "input [", "instance_group [ { count: 1 } ]\ninput ["), "ensemble"),
    # The graph.
    ("missing step", edit("ensemble", 'model_name: "postprocessing"', 'model_name: "post"'), "ensemble-model"),
    (
        "version of a step",
        edit("ensemble", 'model_name: "postprocessing"\n      model_version: -1', 'model_name: "postprocessing"\n'
             "      model_version: 2"),
        "ensemble-model",
    ),
    ("no version of a step", edit("ensemble", "      model_version: -1\n", ""), "ensemble-model"),
    ("output twice", edit("preprocessing", "output [\n", 'output [\n{ name: "INPUT_ID" data_type: TYPE_INT32 '
                          "dims: [-1] },"), "ensemble-output"),
    ("itself", edit("ensemble", 'model_name: "postprocessing"', 'model_name: "ensemble"'), "ensemble-flow"),
    ("two sides", both(edit("postprocessing", "input [\n", 'input [\n{ name: "X" data_type: TYPE_INT32 dims: [-1] '
                                                            "optional: true},"),
                       edit("ensemble", 'value: "_TOKENS_BATCH" }\n      input_map', 'value: "_TOKENS_BATCH" }\n'
                            '      input_map { key: "X" value: "_INPUT_ID" }\n      input_map')), "ensemble-decoupled"),
    ("unknown input", edit("ensemble", 'key: "input_ids"', 'key: "inputs_ids"'), "ensemble-input"),
    ("unknown output", edit("ensemble", 'key: "cum_log_probs"', 'key: "cum_logprobs"'), "ensemble-output"),
    ("broken flow", edit("ensemble", 'key: "INPUT_ID" value: "_INPUT_ID"', 'key: "INPUT_ID" value: "_INPUT"'),
     "ensemble-flow"),
    ("broken promise", edit("ensemble", 'key: "OUTPUT" value: "text_output"', 'key: "OUTPUT" value: "text"'),
     "ensemble-flow"),
    ("unfed", edit("ensemble", 'input_map { key: "QUERY" value: "text_input" }', ""), "ensemble-input"),
    ("unfed engine", edit("ensemble", 'input_map { key: "input_lengths" value: "_REQUEST_INPUT_LEN" }', ""),
     "ensemble-input"),
    ("unused input", edit("ensemble", 'input_map { key: "temperature" value: "temperature" }', ""), "ensemble-flow"),
    ("made twice", edit("ensemble", 'key: "OUTPUT" value: "text_output"', 'key: "OUTPUT" value: "cum_log_probs"'),
     None),
    ("circle", edit("ensemble", 'key: "DECODER_QUERY" value: "decoder_text_input"',
                    'key: "DECODER_QUERY" value: "_TEXT"'), None),
    ("type along the graph", tensor("temperature", "TYPE_FP32", "TYPE_FP64", "ensemble"), "ensemble-type"),
    ("BF16 prompt table", tensor("prompt_embedding_table", "TYPE_FP16", "TYPE_BF16"), "ensemble-type"),
    ("shape along the graph", tensor("stop_words", "dims: [ -1 ]", "dims: [ -1, -1 ]", "ensemble"), "ensemble-shape"),
    ("scalar along the graph", tensor("text_input", "dims: [ 1 ]", "dims: [ 2 ]", "ensemble"), "ensemble-shape"),
    ("batch of a step", edit("postprocessing", "max_batch_size: 8", "max_batch_size: 4"), None),
    ("no steps", lambda repository: repository.config("ensemble").write_text(
        repository.text("ensemble").partition("ensemble_scheduling")[0]), "ensemble"),
    # Parameters: presence.
    ("no strategy", drop("gpt_model_type"), "missing-parameter"),
    ("unfilled strategy", param("gpt_model_type", "${batching_strategy}"), "placeholder"),
    ("empty strategy", param("gpt_model_type", ""), "missing-parameter"),
    ("unfilled engine", param("gpt_model_path", "${engine_dir}"), "placeholder"),
    ("prefetch unfilled", param("lora_prefetch_dir", "${lora_prefetch_dir}"), "unfilled-parameter", WARNING),
    ("beams unfilled", param("max_beam_width", "${max_beam_width}"), "unfilled-parameter", WARNING),
    ("half filled engine", param("gpt_model_path", "/engines/${model}"), "placeholder"),
    ("no engine", drop("gpt_model_path"), "missing-parameter"),
    ("no tokenizer", drop("tokenizer_dir", "preprocessing"), "missing-parameter"),
    ("unfilled tokenizer", param("tokenizer_dir", "${tokenizer_dir}", "postprocessing"), "placeholder"),
    ("key of 0.19", drop("guided_decoding_backend"), "missing-parameter"),
    ("keys of 0.19", both(drop("tokenizer_dir"), drop("guided_decoding_backend"), drop("xgrammar_tokenizer_info_path")),
     "missing-parameter"),
    ("misspelt", param("kv_cache_free_gpu_memory_fraction", "0.5"), "unknown-parameter"),
    ("other case", param("Enable_Chunked_Context", "true"), "unknown-parameter"),
    ("of another model", param("add_special_tokens", "false"), "unknown-parameter"),
    ("nobody's", param("colour", "blue"), "unknown-parameter", WARNING),
    ("engine's size", param("max_num_tokens", "16384"), "engine-limit"),
    ("engine's length", param("max_seq_len", "16384"), "engine-limit"),
    ("dead", param("max_num_sequences", "64"), "dead-parameter", WARNING),
    ("dead path", param("worker_path", "/opt/worker"), "dead-parameter", WARNING),
    ("overlap", param("enable_trt_overlap", "true"), "dead-parameter", WARNING),
    ("dead vision path", param("visual_model_path", "/vision", "preprocessing"), "dead-parameter", WARNING),
    ("given twice", lambda repository: repository.config("tensorrt_llm").write_text(
        repository.text("tensorrt_llm") + 'parameters: {\n  key: "gpt_model_type"\n  value: { string_value: "V1" }\n}\n'
        'parameters: {\n  key: "gpt_model_type"\n  value: { string_value: "inflight_batching" }\n}\n'),
     "duplicate-parameter"),
    # Parameters: values.
    ("yes", param("enable_chunked_context", "yes"), "boolean-value"),
    ("on", param("multi_block_mode", "on"), "boolean-value"),
    ("mixed case", param("exclude_input_in_output", "tRUE"), "boolean-value"),
    ("trailing space", param("exclude_input_in_output", "true "), "boolean-value"),
    ("special tokens", param("add_special_tokens", "off", "preprocessing"), "boolean-value"),
    ("accumulate", param("accumulate_tokens", "on", "tensorrt_llm_bls"), "boolean-value"),
    ("words for a number", param("max_tokens_in_paged_kv_cache", "all"), "number-value"),
    ("thousands", param("kv_cache_host_memory_bytes", "1e9"), "number-value"),
    ("units", param("lora_cache_host_memory_bytes", "1GiB"), "number-value"),
    ("too long", param("max_tokens_in_paged_kv_cache", "99999999999"), "number-value"),
    ("negative size", param("kv_cache_host_memory_bytes", "-1"), "number-value"),
    ("decimal comma", param("kv_cache_free_gpu_mem_fraction", "0,9"), "number-value"),
    ("percent", param("kv_cache_free_gpu_mem_fraction", "90%"), "number-value"),
    ("the whole memory", param("kv_cache_free_gpu_mem_fraction", "1.0"), "range-value"),
    ("above it", param("kv_cache_free_gpu_mem_fraction", "90"), "range-value"),
    ("no memory", param("kv_cache_free_gpu_mem_fraction", "0"), "range-value"),
    ("no number, which Python reads", both(edit("tensorrt_llm", 'backend: "tensorrtllm"', 'backend: "python"'),
                                           param("kv_cache_free_gpu_mem_fraction", "nan")), "range-value"),
    ("no beams", param("max_beam_width", "0"), "range-value"),
    ("no sink", param("sink_token_length", "0"), "range-value"),
    ("streamed share", param("gpu_weights_percent", "80"), "range-value"),
    ("strategy", param("gpt_model_type", "inflight_fused_batch"), "choice-value"),
    ("strategy's case", param("gpt_model_type", "INFLIGHT_FUSED_BATCHING"), "choice-value"),
    ("policy", param("batch_scheduler_policy", "guaranteed_no_evict_"), "choice-value"),
    ("policy's case", param("batch_scheduler_policy", "MAX_UTILIZATION"), "choice-value"),
    ("decoding", param("decoding_mode", "topk"), "choice-value"),
    ("guided", param("guided_decoding_backend", "outlines"), "choice-value"),
    ("colons", param("gpu_device_ids", "0:1"), "list-value"),
    ("empty entry", param("gpu_device_ids", "0,,1"), "list-value"),
    ("a GPU twice", param("gpu_device_ids", "0,0"), "list-value"),
    ("windows", param("max_attention_window_size", "1024;2048"), "list-value"),
    ("tree", param("medusa_choices", "[[0],[0,0]]"), "list-value"),
    ("lookahead", param("decoding_mode", "lookahead"), None),
    ("guided by nothing", param("guided_decoding_backend", "xgrammar"), "guided-decoding"),
    ("half guided", param("xgrammar_tokenizer_info_path", "/info.json"), "guided-decoding"),
    # Tensors.
    ("no input_ids", both(untensor("input_ids"), edit("ensemble", 'input_map { key: "input_ids" value: "_INPUT_ID" }',
                                                      ""), edit("ensemble", 'output_map { key: "INPUT_ID" value: '
                                                                '"_INPUT_ID" }', "")), "missing-tensor"),
    ("no output_ids", untensor("output_ids"), "missing-tensor"),
    ("misspelt tensor", both(edit("tensorrt_llm", 'name: "runtime_top_k"', 'name: "runtime_topk"'),
                             edit("ensemble", 'key: "runtime_top_k"', 'key: "runtime_topk"')), "unknown-tensor"),
    ("misspelt in the engine", edit("tensorrt_llm", 'name: "runtime_top_k"', 'name: "runtime_topk"'), "unknown-tensor"),
    ("unknown tensor", edit("tensorrt_llm", "input [\n", 'input [\n{ name: "mood" data_type: TYPE_FP32 dims: [1] '
                            "optional: true },\n"), "unknown-tensor", WARNING),
    ("old seed", both(edit("tensorrt_llm", 'name: "seed"', 'name: "random_seed"'),
                      edit("ensemble", 'key: "seed"', 'key: "random_seed"')), "renamed-tensor"),
    ("old length", both(edit("tensorrt_llm", 'name: "min_tokens"', 'name: "min_length"'),
                        edit("ensemble", 'key: "min_tokens"', 'key: "min_length"')), "renamed-tensor"),
    ("type", both(tensor("end_id", "TYPE_INT32", "TYPE_INT64"), tensor("OUT_END_ID", "TYPE_INT32", "TYPE_INT64",
                                                                      "preprocessing")), None),
    ("type of the engine alone", tensor("runtime_top_k", "TYPE_INT32", "TYPE_INT64"), "tensor-type"),
    ("type of an output", tensor("OUTPUT", "TYPE_STRING", "TYPE_INT32", "postprocessing"), "tensor-type"),
    ("type of the text", tensor("INPUT_ID", "TYPE_INT32", "TYPE_INT64", "preprocessing"), "tensor-type"),
    ("type of the script", tensor("temperature", "TYPE_FP32", "TYPE_INT32", "tensorrt_llm_bls"), "tensor-type"),
    ("shape of stop words", tensor("stop_words_list", "dims: [ 2, -1 ]", "dims: [ -1 ]"), "tensor-shape"),
    ("shape of ids", tensor("output_ids", "dims: [ -1, -1 ]", "dims: [ -1 ]"), "tensor-shape"),
    ("demanded", tensor("repetition_penalty", "optional: true", ""), "required-input", WARNING),
    ("logits", tensor("context_logits", "TYPE_FP32", "TYPE_FP16"), "logits-type"),
    ("BF16 logits", tensor("generation_logits", "TYPE_FP32", "TYPE_BF16"), "tensor-type"),
    ("script's output", both(write("preprocessing/1/model.py", NVIDIA_PREPROCESSING),
                             untensor("PIXEL_VALUES", "preprocessing")), "missing-tensor"),
    ("script's parameter", both(write("preprocessing/1/model.py", NVIDIA_PREPROCESSING),
                                drop("multimodal_model_path", "preprocessing")), "missing-parameter"),
    ("script's call", both(write("tensorrt_llm_bls/1/lib/decode.py", NVIDIA_DECODER), untensor("num_input_tokens"),
                           edit("ensemble", 'output_map { key: "num_input_tokens" value: "num_input_tokens" }', ""),
                           untensor("num_input_tokens", "ensemble")), "missing-tensor"),
    ("script's name", both(write("tensorrt_llm_bls/1/lib/decode.py", NVIDIA_DECODER),
                           edit("tensorrt_llm_bls", 'name: "seed"', 'name: "random_seed"')), "renamed-tensor"),
    # The engine.
    ("engine elsewhere", param("gpt_model_path", "engines/llama"), "engine-folder"),
    ("home folder", param("gpt_model_path", "~/engines"), "engine-folder"),
    ("engine is a file", param("gpt_model_path", "tensorrt_llm/1/rank0.engine"), "engine-folder"),
    ("no engine config", remove("tensorrt_llm/1/config.json"), "engine-folder"),
    ("a checkpoint", write("tensorrt_llm/1/config.json", '{"architecture": "LlamaForCausalLM"}'), "engine-folder"),
    ("a model folder", write("tensorrt_llm/1/config.json", '{"architectures": ["LlamaForCausalLM"]}'), "engine-folder"),
    ("broken engine config", write("tensorrt_llm/1/config.json", "{"), "engine-config"),
    ("no sizes", write("tensorrt_llm/1/config.json", '{"version": "1.2.1"}'), "engine-config"),
    ("no rank file", remove("tensorrt_llm/1/rank0.engine"), "engine-ranks"),
    ("batch", engine("build_config.max_batch_size", 4), "batch-above-engine"),
    ("beams", param("max_beam_width", "4"), "beam-width"),
    ("long prompts", engine("build_config.max_input_len", 16384), "prompt-limit"),
    ("chunks", both(param("enable_chunked_context", "true"),
                    engine("build_config.plugin_config.use_paged_context_fmha", False)), "paged-attention"),
    ("reuse", both(param("enable_kv_cache_reuse", "True"),
                   engine("build_config.plugin_config.use_paged_context_fmha", False)), "paged-attention"),
    ("reuse and logits", both(param("enable_kv_cache_reuse", "true"),
                              engine("build_config.gather_context_logits", True)), "paged-attention", WARNING),
    ("onboarding", param("kv_cache_onboard_blocks", "false"), "paged-attention"),
    ("small cache", param("max_tokens_in_paged_kv_cache", "2560"), "kv-cache-tokens"),
    ("wide window", param("max_attention_window_size", "8192"), "attention-window", WARNING),
    ("contiguous cache", engine("build_config.kv_cache_type", "continuous"), "batching-strategy"),
    ("padded prompts", engine("build_config.plugin_config.remove_input_padding", False), "batching-strategy"),
    ("no plugin", engine("build_config.plugin_config.gpt_attention_plugin", None), "batching-strategy"),
    ("no cache", engine("build_config.kv_cache_type", "DISABLED"), "batching-strategy", WARNING),
    ("V1", param("gpt_model_type", "V1"), "static-batching"),
    ("V1 in its time", both(engine("version", "0.16.0"), drop("num_nodes")), None),
    ("not medusa", both(engine("build_config.speculative_decoding_mode", 4), param("decoding_mode", "top_k")),
     "decoding-mode"),
    ("one beam", param("decoding_mode", "beam_search"), "decoding-mode"),
    ("streamed weights", param("gpu_weights_percent", "0.5"), "engine-feature"),
    ("adapters", param("lora_prefetch_dir", "/adapters"), "engine-feature"),
    ("adapter of a superscript", both(
        engine("build_config.plugin_config.lora_plugin", "auto"), write("tensorrt_llm/1/lora/²/adapter.json", "{}"),
        params(lora_prefetch_dir="tensorrt_llm/1/lora", lora_cache_max_adapter_size="64")), "engine-feature", WARNING),
    ("cross attention", param("cross_kv_cache_fraction", "0.5"), "engine-feature"),
    ("draft target", both(engine("build_config.speculative_decoding_mode", 2), param("enable_kv_cache_reuse", "false")),
     "engine-feature"),
    ("ranks and GPUs", both(world(2), param("gpu_device_ids", "0")), "gpu-ids"),
    ("too many GPUs", param("gpu_device_ids", "0,1"), "gpu-ids"),
    ("ranks and participants", both(world(2), param("participant_ids", "1")), "gpu-ids"),
    ("instances and GPUs", both(edit("tensorrt_llm", "count: 1", "count: 2"), param("gpu_device_ids", "0;1;2")),
     "gpu-ids"),
    # The tokenizer.
    ("no tokenizer folder", replace_all("1/tokenizer", "1/tokeniser", "preprocessing", "postprocessing"),
     "tokenizer-folder"),
    ("a word", replace_all("preprocessing/1/tokenizer", "tokenizer", "preprocessing", "postprocessing"),
     "tokenizer-folder", WARNING),
    ("tokenizer is a file", replace_all("1/tokenizer", "1/tokenizer/tokenizer.json", "preprocessing", "postprocessing"),
     "tokenizer-folder"),
    ("broken tokenizer", write("preprocessing/1/tokenizer/tokenizer.json", "{"), "tokenizer-damaged"),
    ("a pointer", write("preprocessing/1/tokenizer/tokenizer.json", "version https://git-lfs.github.com/spec/v1\n"),
     "tokenizer-damaged"),
    ("an empty one", write("preprocessing/1/tokenizer/tokenizer.json", ""), "tokenizer-damaged"),
    ("another model's", write("preprocessing/1/tokenizer/tokenizer.json", json.dumps(LONG_VOCABULARY)),
     "tokenizer-vocabulary"),
    ("two tokenizers", both(write("postprocessing/1/tokenizer/tokenizer_config.json", '{"eos_token": "</s>"}'),
                            write("postprocessing/1/tokenizer/tokenizer.json", json.dumps(OTHER_TOKENIZER)),
                            param("tokenizer_dir", "postprocessing/1/tokenizer", "postprocessing")),
     "tokenizers-differ"),
    ("two unseen ones", both(param("tokenizer_dir", "/models/llama2", "preprocessing"),
                             param("tokenizer_dir", "/models/llama3", "postprocessing")), "tokenizers-differ", WARNING),
    ("endless", write("preprocessing/1/tokenizer/tokenizer_config.json", '{"bos_token": "<s>"}'), "tokenizer-end",
     WARNING),
    # Between models.
    ("streams", edit("tensorrt_llm_bls", "decoupled: true", "decoupled: false"), "decoupled"),
    ("streams the other way", edit("tensorrt_llm", "decoupled: true", "decoupled: false"), "decoupled"),
    ("nobody there", param("tensorrt_llm_model_name", "llama", "tensorrt_llm_bls"), "model-missing"),
    ("no drafts", param("tensorrt_llm_draft_model_name", "tensorrt_llm_draft", "tensorrt_llm_bls"), "model-missing"),
    ("batch of the script", edit("tensorrt_llm_bls", "max_batch_size: 8", "max_batch_size: 16"), "batch-size"),
    # The Python runtime of the engine model.
    ("python: yes", both(PYTHON_RUNTIME, param("exclude_input_in_output", "yes")), "boolean-value"),
    ("python: number", both(PYTHON_RUNTIME, param("max_beam_width", "1.0")), "number-value"),
    ("python: policy", both(PYTHON_RUNTIME, param("batch_scheduler_policy", "fair")), "choice-value"),
    ("python: overlap", both(PYTHON_RUNTIME, param("enable_trt_overlap", "true")), "dead-parameter"),
    ("python: guided", both(PYTHON_RUNTIME, param("guided_decoding_backend", "xgrammar")), "guided-decoding"),
    ("python: not read", both(PYTHON_RUNTIME, param("num_nodes", "2")), "dead-parameter", WARNING),
    ("python: script", both(PYTHON_RUNTIME, remove("tensorrt_llm/1/model.py")), "model-script"),
]
# fmt: on
# What several rules would see, or what has a rule that the table's name does not tell.
SEVERAL = {
    "V1 in its time": {"template-release"},
    "made twice": {"ensemble-output", "ensemble-flow", "ensemble-type"},
    "circle": {"ensemble-flow"},
    "batch of a step": {"batch-size"},
    "lookahead": {"lookahead", "decoding-mode"},
    "type": {"tensor-type"},
}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return inflight(tmp_path / "repository")


@pytest.mark.parametrize("release", RELEASES)
def test_a_template_filled_rightly_is_sound(tmp_path: Path, release: str) -> None:
    assert told(check_repository(inflight(tmp_path / "models", release).path)) == ""


@pytest.mark.parametrize("release", RELEASES)
def test_a_template_with_optional_parameters_unfilled_is_only_remarked_upon(tmp_path: Path, release: str) -> None:
    faults = check_repository(inflight(tmp_path / "models", release, unfilled=True).path)
    assert {(fault.rule, fault.severity) for fault in faults} == {("unfilled-parameter", WARNING)}, told(faults)
    # One line a model, however many they are; what the release does not read is left out.
    assert len({fault.path for fault in faults}) == len(faults)
    (engine,) = (fault for fault in faults if fault.path == "tensorrt_llm/config.pbtxt")
    names = engine.where.removeprefix("parameter ").split(", ")
    assert {"max_beam_width", "batch_scheduler_policy", "decoding_mode"} <= set(names)
    assert "enable_trt_overlap" not in names


def test_unfilled_parameters_are_named_in_one_line(repository: Repository) -> None:
    for name in ("max_beam_width", "enable_kv_cache_reuse"):
        repository.parameter("tensorrt_llm", name, f"${{{name}}}")
    assert told(check_repository(repository.path)) == (
        "warning [unfilled-parameter] tensorrt_llm/config.pbtxt: parameter enable_kv_cache_reuse, max_beam_width: "
        "still hold their placeholders: the model takes its default for each; "
        'fill in what you mean to set, and write "" for a default you mean'
    )


@pytest.mark.parametrize("damage", [remove("postprocessing/1/model.py"), write("postprocessing/1/model.py", "def (")])
def test_what_a_script_reads_is_not_guessed_where_it_is_missing_or_broken(
    repository: Repository, damage: Change
) -> None:
    # Ours has it; of NVIDIA's models only the BLS reads it.
    add = 'parameters: {\n  key: "tensorrt_llm_model_name"\n  value: { string_value: "tensorrt_llm" }\n}\n'
    config = repository.path / "postprocessing" / "config.pbtxt"
    config.write_text(config.read_text() + add)
    expect(repository, "unknown-parameter")
    damage(repository)
    expect(repository, "model-script")


def test_a_draft_model_is_not_the_model_that_it_drafts_for(repository: Repository) -> None:
    repository.parameter("tensorrt_llm_bls", "tensorrt_llm_draft_model_name", "tensorrt_llm_draft")
    fault = expect(repository, "model-missing")
    assert (fault.what, fault.remedy) == ("names the model 'tensorrt_llm_draft', which is not in the repository", "")


def test_a_tokenizer_that_several_models_miss_is_told_once_with_all_of_them(repository: Repository) -> None:
    shutil.rmtree(repository.path / "preprocessing" / "1" / "tokenizer")
    fault = expect(repository, "tokenizer-folder")
    assert fault.path == "postprocessing/config.pbtxt"
    assert fault.what == "is 'preprocessing/1/tokenizer', as in preprocessing, which is not there"


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[0])
def test_a_single_fault_is_named(repository: Repository, case: tuple[Any, ...]) -> None:
    name, change, rule, *severity = case
    change(repository)
    if rule is None:
        faults = check_repository(repository.path)
        assert faults
        assert {fault.rule for fault in faults} <= SEVERAL[name], told(faults)
        return
    expect(repository, rule, *severity)


# Unusual, and right.
# fmt: off
HARMLESS: list[tuple[str, Change]] = [
    ("a comment", edit("tensorrt_llm", "# Copyright", "# enable_trt_overlap: ${enable_trt_overlap}")),
    ("a comment behind", edit("tensorrt_llm", "max_batch_size: 8", "max_batch_size: 8 # ${triton_max_batch_size}")),
    ("output twice", edit("ensemble", "output [\n", 'output [\n  { name: "kv_cache_alloc_total_blocks" '
                          "data_type: TYPE_INT32 dims: [ 1 ] },\n")),
    ("overlap unfilled", param("enable_trt_overlap", "${enable_trt_overlap}")),
    ("overlap off", param("enable_trt_overlap", "false")),
    ("empty values", params(max_tokens_in_paged_kv_cache="", enable_chunked_context="", batch_scheduler_policy="")),
    ("dead and unfilled", param("max_num_sequences", "${max_num_sequences}")),
    ("True", param("enable_chunked_context", "True")),
    ("FALSE", param("enable_kv_cache_reuse", "FALSE")),
    ("1", param("normalize_log_probs", "1")),
    ("leading space", param("cancellation_check_period_ms", " 100")),
    ("leading zero", param("max_tokens_in_paged_kv_cache", "08192")),
    ("a whole number as a float", param("stats_check_period_ms", "50.0")),
    ("short fraction", param("kv_cache_free_gpu_mem_fraction", ".85")),
    ("scientific", param("kv_cache_free_gpu_mem_fraction", "9e-1")),
    ("other strategy", param("gpt_model_type", "inflight_batching")),
    ("policy", param("batch_scheduler_policy", "max_utilization")),
    ("a cap of one sequence", param("max_tokens_in_paged_kv_cache", "4096")),
    ("a small cap with a window", params(max_tokens_in_paged_kv_cache="2560", max_attention_window_size="2048")),
    ("windows", param("max_attention_window_size", "4096, 1024")),
    ("no chunks without the kernel", engine("build_config.plugin_config.use_paged_context_fmha", False)),
    ("long prompts in chunks", both(engine("build_config.max_input_len", 16384),
                                    param("enable_chunked_context", "true"))),
    ("container's paths", both(param("gpt_model_path", "/engines/llama/1"),
                               param("tokenizer_dir", "/workspace/llama", "preprocessing"),
                               param("tokenizer_dir", "/workspace/llama/", "postprocessing"))),
    ("mounted repository", both(param("gpt_model_path", "/models/tensorrt_llm/1"),
                                param("tokenizer_dir", "/models/preprocessing/1/tokenizer", "preprocessing"),
                                param("tokenizer_dir", "/models/preprocessing/1/tokenizer", "postprocessing"))),
    ("mounted engine", both(param("gpt_model_path", "/models/tensorrt_llm/1"), remove("tensorrt_llm/1/config.json"),
                            remove("tensorrt_llm/1/rank0.engine"))),
    ("remote engine", param("gpt_model_path", "s3://bucket/engine")),
    ("hub's tokenizer", both(param("tokenizer_dir", "meta-llama/Llama-3.1-8B", "preprocessing"),
                             param("tokenizer_dir", "meta-llama/Llama-3.1-8B", "postprocessing"))),
    ("sentencepiece", both(write("preprocessing/1/tokenizer/tokenizer.model", "x"),
                           remove("preprocessing/1/tokenizer/tokenizer.json"))),
    ("two ranks", world(2)),
    ("two ranks and GPUs", both(world(2), param("gpu_device_ids", "0,1"), param("participant_ids", "1,2"))),
    ("two instances", both(edit("tensorrt_llm", "count: 1", "count: 2"), param("gpu_device_ids", "0;1"))),
    ("trailing separators", both(world(2), param("gpu_device_ids", "0, 1,;"))),
    ("more tokenizers", edit("preprocessing", "count: 1", "count: 8")),
    ("no streaming", replace_all("decoupled: true", "decoupled: false", "tensorrt_llm", "tensorrt_llm_bls")),
    ("policy of the graph", edit("ensemble", "max_batch_size: 8",
                                 "max_batch_size: 8\nmodel_transaction_policy { decoupled: false }")),
    ("smaller ensemble", edit("ensemble", "max_batch_size: 8", "max_batch_size: 4")),
    ("smaller batches", replace_all("max_batch_size: 8", "max_batch_size: 8 ", *ALL)),
    ("several sizes", edit("tensorrt_llm", "preferred_batch_size: [ 8 ]", "preferred_batch_size: [ 1, 4, 8 ]")),
    ("queue", edit("tensorrt_llm", "max_queue_size: 0", "max_queue_size: 100, timeout_action: REJECT")),
    ("engine alone", both(*(remove(model) for model in ALL if model != "tensorrt_llm"),
                          remove("tensorrt_llm/1/model.py"), param("gpt_model_path", "/engines"))),
    ("no script model", remove("tensorrt_llm_bls")),
    ("no ensemble", remove("ensemble")),
    ("no backend", edit("postprocessing", 'backend: "python"\n', "")),
    ("platforms", both(*(model_of(platform, f'platform: "{platform}"', "1/any") for platform in PLATFORMS))),
    ("files", both(*(model_of(name.replace(".", "_"), "", f"1/{name}") for name in MODEL_FILES if name != "model.py"))),
    ("backend of its name", both(model_of("x.identity", "", "1/any"), model_of("y.onnxruntime", "", "1/model.py"))),
    ("named file", model_of("named", 'default_model_filename: "model.onnx"', "1/model.onnx")),
    ("no name", edit("postprocessing", 'name: "postprocessing"\n', "")),
    ("two versions", write("postprocessing/2/model.py", SCRIPT)),
    ("stray files", both(write("README.md", ""), write("tensorrt_llm_bls/1/multi_lora.json", "{}"),
                         write("preprocessing/docs/notes.txt", ""))),
    ("newer Python", write("postprocessing/1/model.py", "x = f'{\"a\" if 1 else f\"{2!r}\"}'\n" + SCRIPT)),
    ("own parameter", both(write("postprocessing/1/model.py", SCRIPT + "    KEY = 'colour'\n"),
                           param("colour", "blue", "postprocessing"))),
    ("own tensor", edit("preprocessing", "input [\n", 'input [\n{ name: "CHAT" data_type: TYPE_STRING dims: [-1] '
                        "optional: true },\n")),
    ("own names in the graph", replace_all("text_input", "prompt", "ensemble")),
    ("renamed engine", both(move("tensorrt_llm", "llama"), lambda repository: repository.edit(
        "llama", 'name: "tensorrt_llm"', 'name: "llama"'), edit("ensemble", 'model_name: "tensorrt_llm"',
                                                               'model_name: "llama"'),
        param("tensorrt_llm_model_name", "llama", "tensorrt_llm_bls"),
        lambda repository: repository.parameter("llama", "gpt_model_path", "llama/1"))),
    ("adapters in BF16", both(tensor("lora_weights", "TYPE_FP16", "TYPE_BF16"),
                              tensor("lora_weights", "TYPE_FP16", "TYPE_BF16", "ensemble"),
                              tensor("lora_weights", "TYPE_FP16", "TYPE_BF16", "tensorrt_llm_bls"))),
    ("FP16 logits", both(*(tensor(name, "TYPE_FP32", "TYPE_FP16", model)
                           for model in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls")
                           for name in ("context_logits", "generation_logits")),
                         tensor("draft_logits", "TYPE_FP32", "TYPE_FP16"),
                         engine("pretrained_config.logits_dtype", "float16"))),
    ("early stopping", tensor("early_stopping", "TYPE_BOOL", "TYPE_INT32")),
    ("medusa", both(engine("build_config.speculative_decoding_mode", 4), params(
        decoding_mode="medusa", medusa_choices="{0}, {0, 0}, {1}, {0, 1}"))),
    ("lookahead", both(engine("build_config.speculative_decoding_mode", "lookahead_decoding"), params(
        decoding_mode="lookahead", lookahead_window_size="4", lookahead_ngram_size="3",
        lookahead_verification_set_size="4"))),
    ("beams", both(engine("build_config.max_beam_width", 4), params(max_beam_width="4", decoding_mode="beam_search"))),
    ("guided", params(guided_decoding_backend="xgrammar", xgrammar_tokenizer_info_path="/engines/info.json")),
    ("streamed weights", both(engine("build_config.weight_streaming", True), param("gpu_weights_percent", "0.5"))),
    ("adapters", both(engine("build_config.plugin_config.lora_plugin", "auto"), params(
        lora_prefetch_dir="/adapters", lora_cache_max_adapter_size="64"))),
    ("an older engine's words", both(engine("build_config.kv_cache_type", "PAGED"), engine("version", "1.2.1.post1"))),
    ("little is known", write("tensorrt_llm/1/config.json", '{"version": "1.2.1", "build_config": {}}')),
    ("a reference engine", both(engine("version", "reference-1"), remove("tensorrt_llm/1/rank0.engine"),
                                  lambda repository: write_safetensors(
                                      repository.path / "tensorrt_llm/1/rank0.safetensors", {}, "BF16"))),
    ("no engine here", both(remove("tensorrt_llm/1/config.json"), remove("tensorrt_llm/1/rank0.engine"),
                            param("gpt_model_path", "/opt/engines"))),
    ("more tokens than the tokenizer", engine("pretrained_config.vocab_size", 340)),
    ("encoder", both(param("encoder_model_path", "/engines/encoder"), param("cross_kv_cache_fraction", "0.5"),
                     param("gpt_model_path", "/engines/decoder"))),
    ("python runtime", both(PYTHON_RUNTIME, params(exclude_input_in_output="TRUE", decoding_mode="auto",
                                                   batch_scheduler_policy="MAX_UTILIZATION"))),
    ("nvidia's script", write("preprocessing/1/model.py", NVIDIA_PREPROCESSING)),
    ("nvidia's decoder", write("tensorrt_llm_bls/1/lib/decode.py", NVIDIA_DECODER)),
    ("other spelling", edit("postprocessing", 'parameters: {\n  key: "tokenizer_dir"\n  value: {',
                            'parameters { key: "tokenizer_dir", value {')),
    ("drafts", both(lambda repository: shutil.copytree(repository.path / "tensorrt_llm", repository.path / "draft"),
                    lambda repository: repository.edit("draft", 'name: "tensorrt_llm"', 'name: "draft"'),
                    param("tensorrt_llm_draft_model_name", "draft", "tensorrt_llm_bls"),
                    param("kv_cache_free_gpu_mem_fraction", "0.4"), lambda repository: repository.parameter(
                        "draft", "kv_cache_free_gpu_mem_fraction", "0.3"))),
]
# fmt: on


@pytest.mark.parametrize(("name", "change"), HARMLESS, ids=[name for name, _ in HARMLESS])
def test_what_is_unusual_and_right_is_left_alone(repository: Repository, name: str, change: Change) -> None:
    change(repository)
    assert told(looked_into(check_repository(repository.path))) == ""


def test_the_tables_are_long_and_every_rule_is_somewhere() -> None:
    assert len(WRONG) >= 80
    assert len(HARMLESS) >= 40
    assert len({case[0] for case in WRONG}) > len(WRONG) - 5
    covered = {case[2] for case in WRONG} | set().union(*SEVERAL.values())
    elsewhere = {"no-models", "engine-gpu", "engine-release", "release-runtime", "passport", "shared-gpu", "not-here",
                 "template-release", "model-code", "engine-file", "script-environment", "warmup",
                 "value-space", "llmapi-settings", "llmapi-argument", "llmapi-model", "llmapi-policy",
                 "instances"}  # fmt: skip
    assert set(RULES) == covered - {None} | elsewhere


def test_streams_meet_one_instance_of_our_postprocessing(tmp_path: Path) -> None:
    repository = rendered(tmp_path)
    repository.edit("postprocessing", "count: 1", "count: 2")
    expect(repository, "instances")


@pytest.mark.parametrize("runtime", ["tensorrt_llm", "reference", "vllm", "trtllm_pytorch"])
def test_our_own_repositories_are_sound(tmp_path: Path, runtime: str) -> None:
    repository = rendered(tmp_path, runtime)
    assert told(check_repository(repository.path, toolchain=find_toolchain(None), gpus=[H100])) == ""
    if runtime != "reference":
        assert "this machine has NVIDIA A100 (SM80)" in str(expect(repository, "engine-gpu", gpus=[A100]))


def test_targets_of_one_server_have_tokenizers_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name, size in (("a.", 300), ("b.", 400)):
        (tmp_path / name).mkdir()
        made = rendered(tmp_path / name, "reference").path
        vocabulary = {"</s>": 0, **{str(number): number for number in range(1, size)}}
        (tokenizer,) = made.rglob("tokenizer.json")
        tokenizer.write_text(json.dumps({"model": {"vocab": vocabulary}}))
        (config,) = (file for file in made.rglob("config.json") if "pretrained_config" in file.read_text())
        config.write_text(re.sub('"vocab_size": [0-9]+', f'"vocab_size": {size}', config.read_text()))
        assert told(check_repository(made)) == ""
        link_models(made, name, out)
    assert "vocabulary" not in told(check_repository(out))


def test_our_scripts_are_stricter_than_the_templates(tmp_path: Path) -> None:
    repository = rendered(tmp_path)
    repository.parameter("preprocessing", "add_special_tokens", "yes")
    assert expect(repository, "boolean-value").why == "the script refuses it"


def test_an_engine_is_for_its_gpus(repository: Repository) -> None:
    folder = repository.path / "tensorrt_llm" / "1"
    made(folder)
    assert check_repository(repository.path, gpus=[H100]) == []
    assert "this machine has NVIDIA A100 (SM80)" in str(expect(repository, "engine-gpu", gpus=[A100]))
    assert "has no NVIDIA GPU" in str(expect(repository, "engine-gpu", gpus=[]))
    (folder / "passport.json").unlink()
    world(2)(repository)
    assert "2 rank(s), and this machine has 1 GPU(s)" in str(expect(repository, "engine-gpu", gpus=[H100]))
    made(folder, tp_size=2)
    repository.parameter("tensorrt_llm", "gpu_device_ids", "2,3")
    assert "names GPU 2, and this machine has 2" in str(expect(repository, "gpu-ids", gpus=[H100, H100]))


def test_a_passport_is_of_its_engine(repository: Repository) -> None:
    folder = repository.path / "tensorrt_llm" / "1"
    made(folder, tp_size=2)
    assert "tp_size: is 2, and the engine's config.json says 1" in str(expect(repository, "passport"))
    made(folder, toolchain="1.0.0")
    assert "config.json says 1.2.1" in str(expect(repository, "passport"))
    (folder / "passport.json").write_text("{}")
    expect(repository, "passport")


def test_engines_on_one_gpu_leave_each_other_memory(repository: Repository) -> None:
    shutil.copytree(repository.path / "tensorrt_llm", repository.path / "second")
    repository.edit("second", 'name: "tensorrt_llm"', 'name: "second"')
    expect(repository, "shared-gpu", WARNING)
    repository.parameter("second", "gpu_device_ids", "1")
    repository.parameter("tensorrt_llm", "gpu_device_ids", "0")
    assert check_repository(repository.path) == []


def test_disaggregated_models_are_named(tmp_path: Path) -> None:
    repository = inflight(tmp_path / "models")
    front = repository.path / "disaggregated_serving_bls" / "1"
    front.mkdir(parents=True)
    (front / "model.py").write_text(SCRIPT)
    text = repository.text("tensorrt_llm").replace('"tensorrt_llm"', '"disaggregated_serving_bls"')
    text = text.replace("tensorrtllm", "python").partition("parameters: {")[0]
    (front.parent / "config.pbtxt").write_text(text)
    for key in ("context_model_name", "generation_model_name"):
        repository.parameter("disaggregated_serving_bls", key, "tensorrt_llm")
    assert told(check_repository(repository.path)) == ""
    repository.parameter("disaggregated_serving_bls", "context_model_name", "context")
    expect(repository, "model-missing")


def test_a_folder_without_models_says_what_to_give(tmp_path: Path) -> None:
    assert "give a model repository" in str(check_repository(tmp_path / "nowhere")[0])
    assert "as --model-repository" in str(check_repository(tmp_path)[0])
    inflight(tmp_path / "all_models")
    assert "give the folder all_models in it" in str(check_repository(tmp_path)[0])
    assert "give the folder above" in str(check_repository(tmp_path / "all_models" / "ensemble")[0])


def test_a_fault_says_where_what_why_and_what_to_do(repository: Repository) -> None:
    repository.parameter("tensorrt_llm", "enable_chunked_context", "yes")
    line = repository.text("tensorrt_llm").splitlines().index('  key: "enable_chunked_context"') + 1
    fault = expect(repository, "boolean-value")
    assert str(fault) == (
        f"tensorrt_llm/config.pbtxt: parameter enable_chunked_context, line {line}: is 'yes': the backend cannot read "
        "it and takes its default, false; write true (True, true, TRUE, 1, False, false, FALSE, 0 are read)"
    )
    repository.edit("ensemble", "max_batch_size: 8", "max_batch_size: ${triton_max_batch_size}")
    assert check_repository(repository.path)[0].where == "line 5, column 17"


def test_packaging_stops_at_the_first_error_of_the_configurations(repository: Repository) -> None:
    check_configs(repository.path, ALL)
    repository.parameter("tensorrt_llm", "colour", "blue")
    check_configs(repository.path, ALL)
    with pytest.raises(RepositoryError, match="is missing"):
        check_configs(repository.path, (*ALL, "second"))
    repository.edit("postprocessing", "max_batch_size: 8", "max_batch_size: 4")
    with pytest.raises(RepositoryError, match="postprocessing takes 4") as caught:
        check_configs(repository.path, ALL)
    assert str(repository.config("ensemble")) in str(caught.value)


FILES = [
    *(f"{model}/config.pbtxt" for model in ALL),
    *(f"{model}/1/model.py" for model in ALL if model != "ensemble"),
    "tensorrt_llm/1/config.json",
    "preprocessing/1/tokenizer/tokenizer.json",
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return inflight(tmp_path_factory.mktemp("sound") / "models")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(FILES),
    start=st.floats(0, 1),
    length=st.integers(0, 400),
    instead=st.one_of(
        st.binary(max_size=40), st.sampled_from([b"${", b'"', b"{" * 300, b"\\", b"\x00", b"[[", b"1e999"])
    ),
)
def test_damaged_files_are_faults_and_never_exceptions(
    sound: Repository, name: str, start: float, length: int, instead: bytes
) -> None:
    path = sound.path / name
    before = path.read_bytes()
    at = int(start * len(before))
    try:
        path.write_bytes(before[:at] + instead + before[at + length :])
        for fault in check_repository(sound.path, gpus=[H100], toolchain=find_toolchain(None)):
            assert fault.rule in RULES
            assert "\n" not in str(fault)
    finally:
        path.write_bytes(before)
