"""Faults planted in NVIDIA's templates and in our own repositories: each is found, with its class and its subject."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository_changes import (
    A100,
    H100,
    PYTHON_RUNTIME,
    Change,
    both,
    edit,
    engine,
    made,
    move,
    param,
    params,
    remove,
    rendered,
    says,
    tensor,
    world,
    write,
)
from tests.support.triton_repositories import Repository, inflight, llmapi
from trtpipe.configs.facts import find_toolchain
from trtpipe.triton_repo.check import RULES, check_repository

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4977\n"
PAGE = "<!DOCTYPE html>\n<html><body>Sign in</body></html>\n"
TEXTS = ("preprocessing", "postprocessing")
TOKENIZER = "preprocessing/1/tokenizer"
ENGINE = "tensorrt_llm/1"
RUNTIMES = ("tensorrt_llm", "reference", "vllm", "trtllm_pytorch")
BASES: dict[str, Callable[[Path], Repository]] = {
    "nvidia": lambda path: inflight(path / "models"),
    "llmapi": lambda path: llmapi(path / "models"),
    **{runtime: partial(rendered, runtime=runtime) for runtime in RUNTIMES},
}


def passport(**changes: Any) -> Change:
    return lambda repository: made(repository.path / ENGINE, **changes)


def sized(name: str, size: int) -> Change:
    """Cut the file to `size` bytes, or make it as long with zeros."""
    return lambda repository: os.truncate(repository.path / name, size)


def old_builder(repository: Repository) -> None:
    folder = repository.path / ENGINE
    (folder / "config.json").write_text(json.dumps({"builder_config": {"max_batch_size": 8}, "plugin_config": {}}))
    (folder / "rank0.engine").rename(folder / "llama_float16_tp1_rank0.engine")


def json_file(name: str, **changes: Any) -> Change:
    """Change keys of a JSON file; None drops one."""

    def change(repository: Repository) -> None:
        path = repository.path / name
        value = {**(json.loads(path.read_text()) if path.is_file() else {}), **changes}
        path.write_text(json.dumps({key: one for key, one in value.items() if one is not None}))

    return change


def added_token(number: int) -> Change:
    def change(repository: Repository) -> None:
        path = repository.path / TOKENIZER / "tokenizer.json"
        value = json.loads(path.read_text())
        value["added_tokens"].append({**value["added_tokens"][0], "id": number, "content": "<far>"})
        path.write_text(json.dumps(value))

    return change


def tokenizer_dir(text: str) -> Change:
    return both(*(param("tokenizer_dir", text, model) for model in TEXTS))


def group(model: str, text: str) -> Change:
    """Another instance group."""
    return edit(model, "count: 1\n    kind: KIND_CPU", text)


def shards(repository: Repository) -> list[Path]:
    return sorted((repository.path / ENGINE).glob("model-*.safetensors"))


def unsharded(repository: Repository) -> None:
    for path in shards(repository):
        path.unlink()


def shard(act: Callable[[Path], object]) -> Change:
    return lambda repository: act(shards(repository)[1])


def appended(text: str) -> Change:
    """Settings behind those of our model.yaml."""

    def change(repository: Repository) -> None:
        with (repository.path / ENGINE / "model.yaml").open("a") as file:
            file.write(text)

    return change


def own_folder(text: str) -> Change:
    """The LLM API's model in a folder of the repository."""
    return says("TinyLlama/TinyLlama-1.1B-Chat-v1.0", text)


# Name, repository, the edit, and the finding expected: severity, rule, and its file and place. ASKED has arguments.
# fmt: off
FAULTS: list[tuple[str, str, Change, str, str, str]] = [
    # The engine's folder.
    ("engine folder missing", "nvidia", param("gpt_model_path", "tensorrt_llm/2"), "error", "engine-folder",
     "tensorrt_llm/config.pbtxt: parameter gpt_model_path"),
    ("engine folder empty", "nvidia", both(write("tensorrt_llm/empty/x", ""), remove("tensorrt_llm/empty/x"),
                                           param("gpt_model_path", "tensorrt_llm/empty")),
     "error", "engine-folder", "parameter gpt_model_path"),
    ("engine without config.json", "tensorrt_llm", remove(f"{ENGINE}/config.json"), "error", "engine-folder",
     "parameter gpt_model_path"),
    ("engine one folder deeper", "nvidia", both(write("tensorrt_llm/1/llama/x", ""), remove("tensorrt_llm/1/llama/x"),
                                                *(move(f"{ENGINE}/{name}", f"{ENGINE}/llama/{name}")
                                                  for name in ("config.json", "rank0.engine"))),
     "error", "engine-folder", "parameter gpt_model_path"),
    ("engine in the old place", "nvidia", both(move("tensorrt_llm/1", "tensorrt_llm/2")), "error", "engine-folder",
     "parameter gpt_model_path"),
    ("engine folder of the container", "nvidia", param("gpt_model_path", "/engines/llama/fp8"), "warning", "not-here",
     "parameter gpt_model_path"),
    ("engine of a mount, not copied", "nvidia", both(param("gpt_model_path", "/models/tensorrt_llm/1"),
                                                     remove(f"{ENGINE}/config.json"), remove(f"{ENGINE}/rank0.engine")),
     "warning", "not-here", "parameter gpt_model_path"),
    ("engine in a bucket", "nvidia", param("gpt_model_path", "s3://bucket/llama"), "warning", "not-here",
     "parameter gpt_model_path"),
    ("encoder of the container", "nvidia", param("encoder_model_path", "/engines/encoder"), "warning", "not-here",
     "parameter encoder_model_path"),
    ("home folder", "tensorrt_llm", param("gpt_model_path", "~/engines/llama"), "error", "engine-folder",
     "parameter gpt_model_path"),
    ("engine path is the config", "nvidia", param("gpt_model_path", f"{ENGINE}/config.json"), "error", "engine-folder",
     "parameter gpt_model_path"),
    ("checkpoint for an engine", "nvidia", json_file(f"{ENGINE}/config.json", build_config=None,
                                                     architecture="LlamaForCausalLM"),
     "error", "engine-folder", "parameter gpt_model_path"),
    # Its files.
    ("rank file missing", "tensorrt_llm", remove(f"{ENGINE}/rank0.engine"), "error", "engine-ranks",
     "parameter gpt_model_path"),
    ("rank file empty", "nvidia", write(f"{ENGINE}/rank0.engine", ""), "error", "engine-file", "rank0.engine"),
    ("rank file a pointer", "nvidia", write(f"{ENGINE}/rank0.engine", POINTER), "error", "engine-file", "rank0.engine"),
    ("rank file a web page", "nvidia", write(f"{ENGINE}/rank0.engine", PAGE), "error", "engine-file", "rank0.engine"),
    ("rank file a broken link", "nvidia", both(remove(f"{ENGINE}/rank0.engine"), lambda repository: (
        repository.path / ENGINE / "rank0.engine").symlink_to("../../blobs/4d7a")), "error", "engine-ranks",
     "gpt_model_path"),
    ("second rank cut short", "nvidia", both(world(2), sized(f"{ENGINE}/rank0.engine", 9000)), "error", "engine-file",
     "rank1.engine"),
    ("rank file below its weights", "tensorrt_llm", passport(rank_bytes=16 << 30), "warning", "engine-file",
     "rank0.engine"),
    ("safetensors cut short", "reference", sized(f"{ENGINE}/rank0.safetensors", 100), "error", "engine-file",
     "rank0.safetensors"),
    ("safetensors a pointer", "reference", write(f"{ENGINE}/rank0.safetensors", POINTER), "error", "engine-file",
     "rank0.safetensors"),
    ("two ranks, one file", "nvidia", world(2, files=1), "error", "engine-ranks", "gpt_model_path"),
    ("four ranks, two files", "nvidia", world(4, files=2), "error", "engine-ranks", "gpt_model_path"),
    ("rank files of another build", "nvidia", world(1, files=2), "warning", "engine-ranks", "gpt_model_path"),
    (".part beside it", "nvidia", write(f"{ENGINE}/rank1.engine.part", "x"), "warning", "engine-file", ".part"),
    (".incomplete beside it", "tensorrt_llm", write(f"{ENGINE}/rank0.engine.4d7a.incomplete", "x"), "warning",
     "engine-file", ".incomplete"),
    ("engine config a pointer", "nvidia", write(f"{ENGINE}/config.json", POINTER), "error", "engine-config",
     "config.json"),
    ("engine config cut short", "tensorrt_llm", sized(f"{ENGINE}/config.json", 200), "error", "engine-config",
     "config.json"),
    ("engine config empty", "nvidia", write(f"{ENGINE}/config.json", ""), "error", "engine-config", "config.json"),
    ("engine of an old builder", "nvidia", old_builder, "warning", "engine-release", "config.json: version"),
    ("engine of no release", "nvidia", json_file(f"{ENGINE}/config.json", version=None), "warning", "engine-release",
     "config.json: version"),
    ("engine of another release", "nvidia", engine("version", "0.16.0"), "error", "engine-release",
     "config.json: version"),
    ("engine without a mapping", "nvidia", engine("pretrained_config.mapping", {}), "warning", "engine-config",
     "config.json: mapping"),
    ("mapping against itself", "nvidia", engine("pretrained_config.mapping", {"world_size": 4, "tp_size": 1,
                                                                              "pp_size": 1}),
     "error", "engine-config", "config.json: mapping"),
    ("sizes that are no mapping", "nvidia", json_file(f"{ENGINE}/config.json", build_config=[]), "error",
     "engine-config", "parameter gpt_model_path"),
    ("size in quotes", "nvidia", engine("build_config.max_batch_size", "8"), "error", "engine-config",
     "config.json: max_batch_size"),
    ("rank file of another name", "nvidia", move(f"{ENGINE}/rank0.engine", f"{ENGINE}/rank_0.engine"), "error",
     "engine-ranks", "gpt_model_path"),
    ("weights called an engine", "reference", move(f"{ENGINE}/rank0.safetensors", f"{ENGINE}/rank0.engine"), "error",
     "engine-ranks", "gpt_model_path"),
    ("space behind a path", "nvidia", param("gpt_model_path", f"{ENGINE} "), "error", "value-space",
     "parameter gpt_model_path"),
    ("encoder that is the decoder", "nvidia", param("encoder_model_path", ENGINE), "error", "engine-folder",
     "parameter encoder_model_path"),
    ("FP8 on an A100", "nvidia", engine("pretrained_config.quantization", {"quant_algo": "FP8"}), "error",
     "engine-gpu", "gpt_model_path"),
    ("INT4 weights with FP8 inputs on an A100", "nvidia", engine("pretrained_config.quantization", {
        "quant_algo": "W4A8_AWQ"}), "error", "engine-gpu", "gpt_model_path"),
    ("engine of an unknown GPU", "nvidia", param("max_beam_width", "1"), "warning", "engine-gpu", "gpt_model_path"),
    # Its passport.
    ("passport of tp 2", "tensorrt_llm", passport(tp_size=2), "error", "passport", "passport.json: tp_size"),
    ("passport of pp for tp", "tensorrt_llm", both(world(2), passport(pp_size=2)), "error", "passport",
     "passport.json: tp_size"),
    ("passport's dtype", "tensorrt_llm", passport(dtype="float16"), "error", "passport", "passport.json: dtype"),
    ("passport's precision", "tensorrt_llm", passport(quant_algo="FP8"), "error", "passport",
     "passport.json: quant_algo"),
    ("passport's KV cache", "tensorrt_llm", passport(kv_cache_quant_algo="INT8"), "error", "passport",
     "passport.json: kv_cache_quant_algo"),
    ("engine's precision", "tensorrt_llm", engine("pretrained_config.quantization", {
        "quant_algo": "FP8", "kv_cache_quant_algo": None}), "error", "passport", "passport.json: quant_algo"),
    ("passport's batch", "tensorrt_llm", passport(build_config={"max_batch_size": 64}), "error", "passport",
     "passport.json: max_batch_size"),
    ("passport's length", "tensorrt_llm", passport(build_config={"max_seq_len": 32768}), "error", "passport",
     "passport.json: max_seq_len"),
    ("passport's release", "tensorrt_llm", passport(toolchain="1.0.0"), "error", "passport",
     "passport.json: toolchain"),
    ("passport of the reference", "reference", passport(runtime="reference", sms=None, toolchain=None, dtype="float32"),
     "error", "passport", "passport.json: dtype"),
    ("passport lost", "reference", remove(f"{ENGINE}/passport.json"), "warning", "passport", "passport.json"),
    ("passport's dtype of a folder", "vllm", passport(runtime="vllm", dtype="float16"), "error", "passport",
     "passport.json: dtype"),
    ("passport cut short", "tensorrt_llm", sized(f"{ENGINE}/passport.json", 60), "error", "passport", "passport.json"),
    ("passport of an unknown runtime", "tensorrt_llm", passport(runtime="sglang"), "warning", "passport",
     "passport.json: runtime"),
    ("passport of a folder", "tensorrt_llm", passport(runtime="vllm"), "error", "engine-folder", "gpt_model_path"),
    # A Hugging Face folder for an engine.
    ("model without config.json", "vllm", remove(f"{ENGINE}/config.json"), "error", "engine-folder", "gpt_model_path"),
    ("model without an architecture", "vllm", json_file(f"{ENGINE}/config.json", architectures=None), "error",
     "engine-folder", "gpt_model_path"),
    ("model's config cut short", "vllm", sized(f"{ENGINE}/config.json", 40), "error", "engine-config", "config.json"),
    ("shard missing", "vllm", shard(Path.unlink), "error", "engine-file", "model.safetensors.index.json"),
    ("shard cut short", "vllm", shard(lambda path: os.truncate(path, 500)), "error", "engine-file", "model-00002"),
    ("shard a pointer", "vllm", shard(lambda path: path.write_text(POINTER)), "error", "engine-file", "model-00002"),
    ("shard empty", "trtllm_pytorch", shard(lambda path: path.write_text("")), "error", "engine-file", "model-00002"),
    ("shard still arriving", "trtllm_pytorch", shard(lambda path: path.rename(f"{path}.incomplete")), "error",
     "engine-file", "model.safetensors.index.json"),
    ("index cut short", "vllm", sized(f"{ENGINE}/model.safetensors.index.json", 90), "error", "engine-file",
     "index.json"),
    ("index of nothing", "vllm", write(f"{ENGINE}/model.safetensors.index.json", "{}"), "error", "engine-file",
     "index.json: weight_map"),
    ("no weights", "trtllm_pytorch", both(remove(f"{ENGINE}/model.safetensors.index.json"),
                                          unsharded),
     "error", "engine-file", ENGINE),
    ("tokenizer of a smaller model", "vllm", json_file(f"{ENGINE}/config.json", vocab_size=200), "error",
     "tokenizer-vocabulary", "tokenizer.json"),
    ("shard missing, and no index", "vllm", both(remove(f"{ENGINE}/model.safetensors.index.json"), shard(Path.unlink)),
     "error", "engine-file", ENGINE),
    ("passport's precision of a folder", "vllm", passport(runtime="vllm", quant_algo="FP8"), "error", "passport",
     "passport.json: quant_algo"),
    ("folder quantized, passport not", "trtllm_pytorch", json_file(f"{ENGINE}/hf_quant_config.json", quantization={}),
     "error", "passport", "passport.json: quant_algo"),
    ("LLM API's config cut short", "trtllm_pytorch", sized(f"{ENGINE}/config.json", 40), "error", "llmapi-model",
     "config.json"),
    ("LLM API's tokenizer elsewhere", "trtllm_pytorch", appended("tokenizer: tensorrt_llm/2\n"), "error",
     "llmapi-model", "model.yaml: tokenizer"),
    # The configuration against the engine.
    ("batch above the engine's", "tensorrt_llm", both(engine("build_config.max_batch_size", 4),
                                                      passport(build_config={})), "error",
     "batch-above-engine", "tensorrt_llm/config.pbtxt: max_batch_size"),
    ("beams above the engine's", "tensorrt_llm", param("max_beam_width", "4"), "error", "beam-width",
     "parameter max_beam_width"),
    ("length of the engine in the configuration", "tensorrt_llm", param("max_seq_len", "32768"), "error",
     "engine-limit", "parameter max_seq_len"),
    ("window above the length", "nvidia", param("max_attention_window_size", "8192"), "warning", "attention-window",
     "parameter max_attention_window_size"),
    ("reuse without paged context", "tensorrt_llm", both(
        param("enable_chunked_context", "false"), engine("build_config.plugin_config.use_paged_context_fmha", False)),
     "error", "paged-attention", "parameter enable_kv_cache_reuse"),
    ("reuse with sinks", "nvidia", params(enable_kv_cache_reuse="true", sink_token_length="4",
                                          max_attention_window_size="2048"), "error", "paged-attention",
     "parameter enable_kv_cache_reuse"),
    ("sinks without a window", "nvidia", params(sink_token_length="4", enable_kv_cache_reuse="false"), "warning",
     "attention-window", "parameter sink_token_length"),
    ("host memory without reuse", "nvidia", params(kv_cache_host_memory_bytes="1000000000",
                                                   enable_kv_cache_reuse="false"), "warning", "paged-attention",
     "parameter kv_cache_host_memory_bytes"),
    ("tree without medusa", "nvidia", param("medusa_choices", "{0}, {0, 0}"), "warning", "decoding-mode",
     "parameter medusa_choices"),
    ("adapters without the plugin", "nvidia", param("lora_prefetch_dir", ENGINE), "error", "engine-feature",
     "parameter lora_prefetch_dir"),
    ("medusa on a plain engine", "nvidia", param("decoding_mode", "medusa"), "error", "decoding-mode",
     "parameter decoding_mode"),
    ("logits' type", "nvidia", engine("pretrained_config.logits_dtype", "float16"), "error", "logits-type",
     "context_logits"),
    # The tokenizer.
    ("tokenizer missing", "tensorrt_llm", remove(TOKENIZER), "error", "tokenizer-folder", "parameter tokenizer_dir"),
    ("tokenizer empty", "nvidia", both(remove(f"{TOKENIZER}/tokenizer.json"),
                                       remove(f"{TOKENIZER}/tokenizer_config.json")),
     "error", "tokenizer-folder", "parameter tokenizer_dir"),
    ("tokenizer one folder deeper", "nvidia", tokenizer_dir("preprocessing/1"), "error", "tokenizer-folder",
     "parameter tokenizer_dir"),
    ("tokenizer in the engine's folder", "nvidia", tokenizer_dir(ENGINE), "error", "tokenizer-folder",
     "parameter tokenizer_dir"),
    ("tokenizer of the container", "nvidia", tokenizer_dir("/models/llama/hf"), "warning", "not-here",
     "parameter tokenizer_dir"),
    ("tokenizer of a mount, not copied", "nvidia", both(
        tokenizer_dir(f"/models/{TOKENIZER}"), remove(f"{TOKENIZER}/tokenizer.json"),
        remove(f"{TOKENIZER}/tokenizer_config.json")), "warning", "not-here", "parameter tokenizer_dir"),
    ("tokenizer of the hub", "nvidia", tokenizer_dir("meta-llama/Llama-3.1-8B"), "warning", "not-here",
     "parameter tokenizer_dir"),
    ("hub's tokenizer for our script", "tensorrt_llm", both(tokenizer_dir("meta-llama/Llama-3.1-8B"), param(
        "tokenizer_dir", "meta-llama/Llama-3.1-8B", "tensorrt_llm_bls")), "error", "tokenizer-folder",
     "parameter tokenizer_dir"),
    ("our script without tokenizer.json", "tensorrt_llm", move(f"{TOKENIZER}/tokenizer.json",
                                                               f"{TOKENIZER}/tokenizer.model"),
     "error", "tokenizer-folder", "parameter tokenizer_dir"),
    ("tokenizer.json cut short", "tensorrt_llm", sized(f"{TOKENIZER}/tokenizer.json", 300), "error",
     "tokenizer-damaged", "tokenizer.json"),
    ("chat template cut short", "tensorrt_llm", write(f"{TOKENIZER}/chat_template.jinja", "{% if x %}{{"), "error",
     "tokenizer-damaged", "tokenizer"),
    ("tokenizer.json a web page", "nvidia", write(f"{TOKENIZER}/tokenizer.json", PAGE), "error", "tokenizer-damaged",
     "tokenizer.json"),
    ("tokenizer.json without a model", "nvidia", write(f"{TOKENIZER}/tokenizer.json", "{}"), "error",
     "tokenizer-damaged", "tokenizer.json"),
    ("tokenizer.json a list", "nvidia", write(f"{TOKENIZER}/tokenizer.json", "[]"), "error", "tokenizer-damaged",
     "tokenizer.json"),
    ("sentencepiece a pointer", "nvidia", both(remove(f"{TOKENIZER}/tokenizer.json"), write(
        f"{TOKENIZER}/tokenizer.model", POINTER)), "error", "tokenizer-damaged", "tokenizer.model"),
    ("sentencepiece empty", "nvidia", both(remove(f"{TOKENIZER}/tokenizer.json"), write(
        f"{TOKENIZER}/tokenizer.model", "")), "error", "tokenizer-damaged", "tokenizer.model"),
    ("vocabulary without merges", "nvidia", both(remove(f"{TOKENIZER}/tokenizer.json"), write(
        f"{TOKENIZER}/vocab.json", '{"a": 0}')), "warning", "tokenizer-folder", "parameter tokenizer_dir"),
    ("settings cut short", "nvidia", sized(f"{TOKENIZER}/tokenizer_config.json", 20), "error", "tokenizer-damaged",
     "tokenizer_config.json"),
    ("tokenizer still arriving", "nvidia", write(f"{TOKENIZER}/tokenizer.model.incomplete", "x"), "warning",
     "tokenizer-damaged", ".incomplete"),
    ("tokenizer still arriving in the hub's cache", "nvidia", write(
        f"{TOKENIZER}/.cache/huggingface/download/x.incomplete", "x"), "warning", "tokenizer-damaged", ".incomplete"),
    ("too small a vocabulary", "nvidia", engine("pretrained_config.vocab_size", 128256), "warning",
     "tokenizer-vocabulary", "tokenizer.json"),
    ("too large a vocabulary", "nvidia", engine("pretrained_config.vocab_size", 200), "error",
     "tokenizer-vocabulary", "tokenizer.json"),
    ("token beyond the engine", "nvidia", added_token(300), "warning", "tokenizer-vocabulary", "tokenizer.json"),
    ("end unknown to the vocabulary", "tensorrt_llm", json_file(f"{TOKENIZER}/tokenizer_config.json",
                                                                eos_token="<|eot_id|>"),
     "error", "tokenizer-end", "tokenizer_config.json: eos_token"),
    ("padding unknown to the vocabulary", "nvidia", json_file(f"{TOKENIZER}/tokenizer_config.json", pad_token="[PAD]"),
     "warning", "tokenizer-end", "tokenizer_config.json: pad_token"),
    ("end id beyond the vocabulary", "nvidia", json_file(f"{TOKENIZER}/generation_config.json",
                                                         eos_token_id=[1, 128009]),
     "error", "tokenizer-end", "generation_config.json: eos_token_id"),
    ("end id of another model", "nvidia", json_file(f"{TOKENIZER}/generation_config.json", eos_token_id=2),
     "warning", "tokenizer-end", "generation_config.json: eos_token_id"),
    ("settings missing", "tensorrt_llm", remove(f"{TOKENIZER}/tokenizer_config.json"), "warning", "tokenizer-end",
     "tokenizer_config.json: eos_token"),
    ("end id in words", "nvidia", json_file(f"{TOKENIZER}/generation_config.json", eos_token_id="</s>"), "error",
     "tokenizer-end", "generation_config.json: eos_token_id"),
    ("padding id beyond the vocabulary", "nvidia", json_file(f"{TOKENIZER}/generation_config.json", eos_token_id=1,
                                                             pad_token_id=32000), "warning", "tokenizer-end",
     "generation_config.json: pad_token_id"),
    ("end of another model's map", "nvidia", json_file(f"{TOKENIZER}/special_tokens_map.json", eos_token="<|end|>"),
     "error", "tokenizer-end", "special_tokens_map.json: eos_token"),
    # Instance groups and GPUs.
    ("no instance", "nvidia", group("preprocessing", "count: 0\n    kind: KIND_CPU"), "warning", "instance-group",
     "preprocessing/config.pbtxt: count"),
    ("fewer than none", "nvidia", group("tensorrt_llm_bls", "count: -1\n    kind: KIND_CPU"), "warning",
     "instance-group", "tensorrt_llm_bls/config.pbtxt: count"),
    ("GPU of a script without a GPU", "reference", group("preprocessing", "count: 1\n    kind: KIND_GPU"), "error",
     "instance-group", "preprocessing/config.pbtxt: instance_group"),
    ("GPU that is not there", "tensorrt_llm", group("preprocessing", "count: 1\n    kind: KIND_GPU\n    gpus: [ 7 ]"),
     "error", "instance-group", "preprocessing/config.pbtxt: instance_group"),
    ("GPU twice", "tensorrt_llm", group("preprocessing", "count: 1\n    kind: KIND_GPU\n    gpus: [ 0, 0 ]"), "warning",
     "instance-group", "preprocessing/config.pbtxt: instance_group"),
    ("engine without a group", "nvidia", edit(
        "tensorrt_llm", "instance_group [\n  {\n    count: 1\n    kind: KIND_CPU\n  }\n]\n", ""), "warning",
     "instance-group", "tensorrt_llm/config.pbtxt: instance_group"),
    ("engine of no kind", "tensorrt_llm", group("tensorrt_llm", "count: 1"), "warning", "instance-group",
     "tensorrt_llm/config.pbtxt: instance_group"),
    ("GPU of a CPU instance", "tensorrt_llm", group("tensorrt_llm", "count: 1\n    kind: KIND_CPU\n    gpus: [ 0 ]"),
     "error", "instance-group", "tensorrt_llm/config.pbtxt: instance_group"),
    ("negative GPU", "nvidia", group("preprocessing", "count: 1\n    kind: KIND_GPU\n    gpus: [ -1 ]"), "error",
     "instance-group", "preprocessing/config.pbtxt: instance_group"),
    ("streams on every GPU", "tensorrt_llm", group("postprocessing", "count: 1\n    kind: KIND_GPU"), "warning",
     "instances", "postprocessing/config.pbtxt: instance_group"),
    ("nothing runs", "nvidia", group("postprocessing", "count: 1\n    kind: KIND_CPU\n    passive: true"), "error",
     "instance-group", "postprocessing/config.pbtxt: instance_group"),
    ("two engines on the same GPUs", "nvidia", edit("tensorrt_llm", "count: 1", "count: 2"), "error", "instances",
     "tensorrt_llm/config.pbtxt: count"),
    ("two groups of engines", "nvidia", group("tensorrt_llm", "kind: KIND_CPU\n  },\n  {\n    kind: KIND_CPU"), "error",
     "instances", "tensorrt_llm/config.pbtxt"),
    ("both instances on one GPU", "nvidia", both(edit("tensorrt_llm", "count: 1", "count: 2"),
                                                 param("gpu_device_ids", "0;0")), "warning", "gpu-ids",
     "parameter gpu_device_ids"),
    ("GPUs of two, one instance", "nvidia", param("gpu_device_ids", "0;1"), "error", "gpu-ids",
     "parameter gpu_device_ids"),
    ("GPUs against ranks", "tensorrt_llm", param("gpu_device_ids", "0,1"), "error", "gpu-ids",
     "parameter gpu_device_ids"),
    ("GPU ids beyond the machine", "tensorrt_llm", param("gpu_device_ids", "3"), "error", "gpu-ids",
     "parameter gpu_device_ids"),
    ("participants of one instance", "nvidia", both(
        edit("tensorrt_llm", "count: 1", "count: 2"), params(gpu_device_ids="0;1", participant_ids="1")), "error",
     "gpu-ids", "parameter participant_ids"),
    ("only the tokenizer's settings", "nvidia", remove(f"{TOKENIZER}/tokenizer.json"), "warning", "tokenizer-folder",
     "parameter tokenizer_dir"),
    ("two nodes, one rank", "nvidia", param("num_nodes", "2"), "error", "gpu-ids", "parameter num_nodes"),
    ("our postprocessing twice", "vllm", edit("postprocessing", "count: 1", "count: 2"), "error", "instances",
     "postprocessing/config.pbtxt: count"),
    ("LLM API instances alike", "trtllm_pytorch", edit("tensorrt_llm", "count: 1", "count: 2"), "error", "instances",
     "tensorrt_llm/config.pbtxt: count"),
    ("LLM API's instances on one GPU", "trtllm_pytorch", both(edit("tensorrt_llm", "count: 1", "count: 2"), param(
        "gpu_device_ids", "0;0")), "warning", "gpu-ids", "parameter gpu_device_ids"),
    ("LLM API's GPUs beyond the machine", "llmapi", both(edit("tensorrt_llm", "count: 1", "count: 2"), param(
        "gpu_device_ids", "0;9")), "error", "gpu-ids", "parameter gpu_device_ids"),
    ("LLM API against its passport", "trtllm_pytorch", passport(runtime="trtllm_pytorch", tp_size=2), "error",
     "passport", "model.yaml: tensor_parallel_size"),
    ("LLM API's model of the container", "llmapi", own_folder("/models/llama"), "warning", "not-here",
     "model.yaml: model"),
    ("LLM API's model of the hub", "llmapi", own_folder("meta-llama/Llama-3.1-8B"), "warning", "not-here",
     "model.yaml: model"),
    # Batches, streams, the graph.
    ("decoupled tokenizer", "nvidia", edit("preprocessing", "max_batch_size: 8",
                                           "max_batch_size: 8\nmodel_transaction_policy { decoupled: true }"),
     "error", "decoupled", "preprocessing/config.pbtxt: decoupled"),
    ("decoupled detokenizer", "tensorrt_llm", edit("postprocessing", "max_batch_size: 8",
                                                   "max_batch_size: 8\nmodel_transaction_policy { decoupled: true }"),
     "error", "decoupled", "postprocessing/config.pbtxt: decoupled"),
    ("engine that does not stream", "tensorrt_llm", edit("tensorrt_llm", "decoupled: true", "decoupled: false"),
     "error", "decoupled", "tensorrt_llm_bls/config.pbtxt: decoupled"),
    ("batch of a step", "tensorrt_llm", both(edit("preprocessing", "max_batch_size: 8", "max_batch_size: 4"),
                                             remove("tensorrt_llm_bls")), "error", "batch-size",
     "ensemble/config.pbtxt: max_batch_size"),
    ("preferred batch", "nvidia", edit("tensorrt_llm", "preferred_batch_size: [ 8 ]", "preferred_batch_size: [ 64 ]"),
     "error", "batch-size", "tensorrt_llm/config.pbtxt: preferred_batch_size"),
    ("wrong input_map", "tensorrt_llm", edit("ensemble", 'key: "input_ids"', 'key: "input_id"'), "error",
     "ensemble-input", "ensemble/config.pbtxt: step"),
    ("types along the graph", "tensorrt_llm", tensor("temperature", "TYPE_FP32", "TYPE_FP16", "ensemble"), "error",
     "ensemble-type", "ensemble/config.pbtxt"),
    ("dims along the graph", "nvidia", tensor("bad_words", "dims: [ -1 ]", "dims: [ -1, -1 ]", "ensemble"), "error",
     "ensemble-shape", "ensemble/config.pbtxt"),
    ("no version folder", "tensorrt_llm", remove("ensemble/1"), "error", "version-folder", "ensemble"),
    ("version named v1", "nvidia", both(remove("ensemble/1"), write("ensemble/v1/.keep", "")), "error",
     "version-folder", "ensemble"),
    ("name of another folder", "tensorrt_llm", edit("postprocessing", 'name: "postprocessing"', 'name: "post"'),
     "error", "model-name", "postprocessing/config.pbtxt: name"),
    ("warm-up data missing", "nvidia", edit(
        "postprocessing", "max_batch_size: 8", 'max_batch_size: 8\nmodel_warmup { name: "w" batch_size: 1 inputs { '
        'key: "TOKENS_BATCH" value { data_type: TYPE_INT32 dims: [1, 4] input_data_file: "tokens" } } }'), "error",
     "warmup", "postprocessing/config.pbtxt: model_warmup"),
    ("a delay of a minute", "nvidia", edit("tensorrt_llm", "microseconds: 0", "microseconds: 60000000"), "warning",
     "queue-policy", "tensorrt_llm/config.pbtxt: max_queue_delay_microseconds"),
    ("script without code", "nvidia", write("preprocessing/1/model.py", "# comes with the image\n"), "warning",
     "model-script", "preprocessing/1/model.py"),
    ("module of our script missing", "tensorrt_llm", remove("preprocessing/1/trtpipe_text.py"), "error",
     "script-import", "preprocessing/1/model.py: line 7"),
    ("warm-up of another tensor", "nvidia", edit(
        "postprocessing", "max_batch_size: 8", 'max_batch_size: 8\nmodel_warmup { name: "w" batch_size: 1 inputs { '
        'key: "TOKENS" value { data_type: TYPE_INT32 dims: [1, 4] zero_data: true } } }'), "error", "warmup",
     "postprocessing/config.pbtxt: model_warmup"),
    # Backends and parameters.
    ("backend's spelling", "tensorrt_llm", edit("tensorrt_llm", 'backend: "tensorrtllm"', 'backend: "tensorrt-llm"'),
     "error", "backend", "tensorrt_llm/config.pbtxt: backend"),
    ("placeholder in a path", "nvidia", param("tokenizer_dir", "/models/${model}", "preprocessing"), "error",
     "placeholder", "parameter tokenizer_dir"),
    ("misspelt parameter", "tensorrt_llm", param("kv_cache_free_gpu_memory_fraction", "0.5"), "error",
     "unknown-parameter", "parameter kv_cache_free_gpu_memory_fraction"),
    ("misspelt parameter of the script", "nvidia", param("tensorrt_llm_model", "tensorrt_llm", "tensorrt_llm_bls"),
     "error", "unknown-parameter", "tensorrt_llm_bls/config.pbtxt: parameter tensorrt_llm_model"),
    ("script's engine elsewhere", "tensorrt_llm", param("tensorrt_llm_model_name", "llama", "tensorrt_llm_bls"),
     "error", "model-missing", "parameter tensorrt_llm_model_name"),
    ("environment missing", "nvidia", param("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/env.tar.gz",
                                            "preprocessing"), "error", "script-environment",
     "parameter EXECUTION_ENV_PATH"),
    ("environment of the container", "nvidia", param("EXECUTION_ENV_PATH", "/opt/env.tar.gz", "postprocessing"),
     "warning", "not-here", "parameter EXECUTION_ENV_PATH"),
    ("guided decoding's file elsewhere", "nvidia", params(
        guided_decoding_backend="xgrammar", xgrammar_tokenizer_info_path="/engines/info.json"), "warning", "not-here",
     "parameter xgrammar_tokenizer_info_path"),
    ("python runtime's lists", "nvidia", both(PYTHON_RUNTIME, edit("tensorrt_llm", "count: 1", "count: 2"),
                                              param("gpu_device_ids", "0;1")), "error", "list-value",
     "parameter gpu_device_ids"),
]
# fmt: on
ASKED: dict[str, dict[str, Any]] = {
    "engine of another release": {"toolchain": find_toolchain("1.2.1")},
    "GPU of a script without a GPU": {"gpus": []},
    "FP8 on an A100": {"gpus": [A100]},
    "INT4 weights with FP8 inputs on an A100": {"gpus": [A100]},
    "engine of an unknown GPU": {"gpus": [H100]},
    "LLM API's GPUs beyond the machine": {"gpus": [H100, H100]},
    **{name: {"gpus": [H100]} for name in ("GPU that is not there", "GPU twice", "GPU ids beyond the machine")},
}


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case[0].replace(" ", "-"))
def test_a_planted_fault_is_found(tmp_path: Path, case: tuple[str, str, Change, str, str, str]) -> None:
    name, base, change, severity, rule, subject = case
    repository = BASES[base](tmp_path)
    change(repository)
    faults = check_repository(repository.path, **ASKED.get(name, {}))
    found = [fault for fault in faults if base != "llmapi" or rule == "not-here" or fault.rule != "not-here"]
    assert [(fault.severity, fault.rule) for fault in found] == [(severity, rule)], "\n".join(map(str, faults))
    assert subject in f"{found[0].path}: {found[0].where}"
    assert rule in RULES


def ends_by_its_own_word(path: Path) -> Repository:
    """Our scripts take the end of a text from generation_config.json."""
    repository = rendered(path)
    json_file(f"{TOKENIZER}/generation_config.json", eos_token_id=[2, 3])(repository)
    return repository


# Repositories without a fault; NVIDIA's of each release are in test_check.py.
# fmt: off
CLEAN: dict[str, Callable[[Path], Repository]] = {
    **{runtime: partial(rendered, runtime=runtime) for runtime in RUNTIMES},
    **{f"{runtime} on two GPUs": partial(rendered, runtime=runtime, tp_size=2) for runtime in RUNTIMES},
    **{f"{runtime} in a container": partial(rendered, runtime=runtime, repository_root="/models")
       for runtime in ("tensorrt_llm", "trtllm_pytorch")},
    "script": lambda path: rendered(path, ensemble="script", bls_instance_count=8, preprocessing_instance_count=4),
    "no streaming": lambda path: rendered(path, decoupled=False, exclude_input_in_output=False),
    "small cache": lambda path: rendered(path, max_tokens_in_paged_kv_cache=8192, max_attention_window_size=2048),
    "sinks": lambda path: rendered(path, enable_kv_cache_reuse=False, sink_token_length=4,
                                   max_attention_window_size=2048),
    "ends by its own word": ends_by_its_own_word,
    "several stubs": lambda path: rendered(path, "vllm", engine_instance_count=4, max_queue_size=100),
}
# fmt: on


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_repository_has_no_finding(tmp_path: Path, name: str) -> None:
    faults = check_repository(CLEAN[name](tmp_path).path, toolchain=find_toolchain("1.2.1"), gpus=[H100, H100])
    assert [str(fault) for fault in faults] == []


def test_the_table_has_at_least_the_promised_faults() -> None:
    assert len({case[0] for case in FAULTS}) == len(FAULTS) >= 150
    assert ASKED.keys() <= {case[0] for case in FAULTS}
    assert len(CLEAN) >= 14
