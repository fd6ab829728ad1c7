"""Model repositories in the shape of NVIDIA's templates, of several releases, filled rightly: for the tests of the
check. The tables say what a template declares: name, type, dims, flags, first release, and the last one if it is gone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.factories import write_tokenizer

ENGINE_INPUTS = """
input_ids INT32 -1 optional,ragged 0.5.0
encoder_input_features FP16 -1,-1 optional,ragged 0.15.0
encoder_output_lengths INT32 1 optional,scalar 0.15.0
input_lengths INT32 1 required,scalar 0.5.0
request_output_len INT32 1 required,scalar 0.5.0
num_return_sequences INT32 1 optional,scalar 0.14.0
draft_input_ids INT32 -1 optional,ragged 0.7.0
decoder_input_ids INT32 -1 optional,ragged 0.11.0
decoder_input_lengths INT32 1 optional,scalar 0.11.0
draft_logits LOGITS -1,-1 optional,ragged 0.9.0
draft_acceptance_threshold FP32 1 optional,scalar 0.10.0
end_id INT32 1 optional,scalar 0.5.0
pad_id INT32 1 optional,scalar 0.5.0
stop_words_list INT32 2,-1 optional,ragged 0.6.0
bad_words_list INT32 2,-1 optional,ragged 0.6.0
embedding_bias FP32 -1 optional,ragged 0.6.0
beam_width INT32 1 optional,scalar 0.5.0
temperature FP32 1 optional,scalar 0.5.0
runtime_top_k INT32 1 optional,scalar 0.5.0
runtime_top_p FP32 1 optional,scalar 0.5.0
runtime_top_p_min FP32 1 optional,scalar 0.10.0
runtime_top_p_decay FP32 1 optional,scalar 0.10.0
runtime_top_p_reset_ids INT32 1 optional,scalar 0.10.0
len_penalty FP32 1 optional,scalar 0.5.0
early_stopping BOOL 1 optional,scalar 0.10.0
repetition_penalty FP32 1 optional,scalar 0.5.0
min_length INT32 1 optional,scalar 0.5.0 0.19.0
min_tokens INT32 1 optional,scalar 0.20.0
beam_search_diversity_rate FP32 1 optional,scalar 0.10.0
presence_penalty FP32 1 optional,scalar 0.5.0
frequency_penalty FP32 1 optional,scalar 0.8.0
random_seed UINT64 1 optional,scalar 0.5.0 0.19.0
seed UINT64 1 optional,scalar 0.20.0
return_log_probs BOOL 1 optional,scalar 0.6.0
return_context_logits BOOL 1 optional,scalar 0.8.0
return_generation_logits BOOL 1 optional,scalar 0.8.0
return_perf_metrics BOOL 1 optional,scalar 0.19.0
return_num_input_tokens BOOL 1 optional,scalar 0.20.0
return_num_output_tokens BOOL 1 optional,scalar 0.20.0
exclude_input_in_output BOOL 1 optional,scalar 0.14.0
stop BOOL 1 optional,scalar 0.5.0
streaming BOOL 1 optional,scalar 0.5.0
prompt_embedding_table FP16 -1,-1 optional,ragged 0.6.0
prompt_table_extra_ids UINT64 -1 optional,ragged 0.13.0
prompt_vocab_size INT32 1 optional,scalar 0.6.0
cross_attention_mask BOOL -1,-1 optional,ragged 0.15.0
mrope_rotary_cos_sin FP32 -1 optional 0.19.0
mrope_position_deltas INT64 1 optional 0.19.0
lora_task_id UINT64 1 optional,scalar 0.9.0
lora_weights FP16 -1,-1 optional,ragged 0.8.0
lora_config INT32 -1,3 optional,ragged 0.8.0
context_phase_params UINT8 -1 optional,ragged 0.14.0
skip_cross_attn_blocks BOOL 1 optional,ragged 0.16.0
retention_token_range_starts INT32 -1 optional,ragged 0.17.0
retention_token_range_ends INT32 -1 optional,ragged 0.17.0
retention_token_range_priorities INT32 -1 optional,ragged 0.17.0
retention_token_range_durations_ms INT32 -1 optional,ragged 0.17.0
retention_decode_priority INT32 1 optional,ragged 0.17.0
retention_decode_duration_ms INT32 1 optional,ragged 0.17.0
guided_decoding_guide_type STRING 1 optional,ragged 0.19.0
guided_decoding_guide STRING 1 optional,ragged 0.19.0
lookahead_window_size INT32 1 optional,ragged 0.19.0
lookahead_ngram_size INT32 1 optional,ragged 0.19.0
lookahead_verification_set_size INT32 1 optional,ragged 0.19.0
"""
ENGINE_OUTPUTS = """
output_ids INT32 -1,-1 - 0.5.0
sequence_length INT32 -1 - 0.6.0
cum_log_probs FP32 -1 - 0.6.0
output_log_probs FP32 -1,-1 - 0.6.0
context_logits LOGITS -1,-1 - 0.8.0
generation_logits LOGITS -1,-1,-1 - 0.8.0
batch_index INT32 1 - 0.12.0
sequence_index INT32 1 - 0.14.0
context_phase_params UINT8 -1 - 0.14.0
kv_cache_alloc_new_blocks INT32 1 - 0.16.0
kv_cache_reused_blocks INT32 1 - 0.16.0
kv_cache_alloc_total_blocks INT32 1 - 0.16.0
arrival_time_ns INT64 1 - 0.19.0
first_scheduled_time_ns INT64 1 - 0.19.0
first_token_time_ns INT64 1 - 0.19.0
last_token_time_ns INT64 1 - 0.19.0
acceptance_rate FP32 1 - 0.19.0
total_accepted_draft_tokens INT32 1 - 0.19.0
total_draft_tokens INT32 1 - 0.19.0
num_input_tokens INT32 1 - 0.20.0
num_output_tokens INT32 1 - 0.20.0
"""
INNER = ("output_ids ", "sequence_length ", "context_phase_params ")
PREPROCESSING_INPUTS = """
QUERY STRING 1 required 0.5.0
DECODER_QUERY STRING 1 optional 0.11.0
IMAGE_BYTES UINT8 -1,-1,-1,-1 optional 0.15.0
IMAGE_URL STRING 1 optional 0.15.0
IMAGE_SIZES INT64 -1,2 optional 0.20.0
VIDEO_BYTES UINT8 -1,-1,-1,-1 optional 0.16.0
REQUEST_OUTPUT_LEN INT32 1 required 0.5.0
BAD_WORDS_DICT STRING -1 optional 0.5.0
STOP_WORDS_DICT STRING -1 optional 0.5.0
EMBEDDING_BIAS_WORDS STRING -1 optional 0.6.0
EMBEDDING_BIAS_WEIGHTS FP32 -1 optional 0.6.0
END_ID INT32 1 optional 0.8.0
PAD_ID INT32 1 optional 0.8.0
PROMPT_TABLE_EXTRA_ID UINT64 1 optional 0.13.0
"""
PREPROCESSING_OUTPUTS = """
INPUT_ID INT32 -1 - 0.5.0
REQUEST_INPUT_LEN INT32 1 - 0.5.0
DECODER_INPUT_ID INT32 -1 - 0.11.0
REQUEST_DECODER_INPUT_LEN INT32 1 - 0.11.0
BAD_WORDS_IDS INT32 2,-1 - 0.5.0
STOP_WORDS_IDS INT32 2,-1 - 0.5.0
EMBEDDING_BIAS FP32 -1 - 0.6.0
REQUEST_OUTPUT_LEN INT32 -1 - 0.5.0
OUT_END_ID INT32 1 - 0.8.0
OUT_PAD_ID INT32 1 - 0.8.0
OUT_PROMPT_TABLE_EXTRA_IDS UINT64 -1 - 0.13.0
PIXEL_VALUES FP16 -1,-1,-1,-1 - 0.15.0
ASPECT_RATIO_IDS INT64 -1 - 0.15.0
ASPECT_RATIO_MASK INT64 -1,-1 - 0.15.0
CROSS_ATTENTION_MASK INT64 -1,-1,-1 - 0.15.0
IMAGE_SIZES INT64 2 - 0.16.0
IS_VIDEO_INPUT BOOL 1 - 0.16.0
ATTENTION_MASK INT64 -1 - 0.19.0
IMAGE_GRID_THW INT64 3 - 0.19.0
VISION_INPUT_ID INT32 -1 - 0.19.0
"""
CLIENT_INPUTS = """
text_input STRING 1 required 0.5.0
decoder_text_input STRING 1 optional 0.11.0
max_tokens INT32 1 required 0.5.0
num_return_sequences INT32 1 optional 0.14.0
bad_words STRING -1 optional 0.5.0
stop_words STRING -1 optional 0.5.0
exclude_input_in_output BOOL 1 optional 0.16.0
end_id INT32 1 optional 0.5.0
pad_id INT32 1 optional 0.5.0
top_k INT32 1 optional 0.5.0
top_p FP32 1 optional 0.5.0
temperature FP32 1 optional 0.5.0
length_penalty FP32 1 optional 0.5.0
repetition_penalty FP32 1 optional 0.5.0
min_length INT32 1 optional 0.5.0 0.19.0
min_tokens INT32 1 optional 0.20.0
presence_penalty FP32 1 optional 0.5.0
frequency_penalty FP32 1 optional 0.8.0
random_seed UINT64 1 optional 0.5.0 0.19.0
seed UINT64 1 optional 0.20.0
return_log_probs BOOL 1 optional 0.6.0
return_context_logits BOOL 1 optional 0.8.0
return_generation_logits BOOL 1 optional 0.8.0
return_perf_metrics BOOL 1 optional 0.19.0
return_num_input_tokens BOOL 1 optional 0.20.0
return_num_output_tokens BOOL 1 optional 0.20.0
beam_width INT32 1 optional 0.5.0
stream BOOL 1 optional 0.5.0
prompt_embedding_table FP16 -1,-1 optional 0.6.0
prompt_table_extra_id UINT64 1 optional 0.13.0
prompt_vocab_size INT32 1 optional 0.6.0
embedding_bias_words STRING -1 optional 0.6.0
embedding_bias_weights FP32 -1 optional 0.6.0
lora_task_id UINT64 1 optional 0.15.0
lora_weights FP16 -1,-1 optional,ragged 0.15.0
lora_config INT32 -1,3 optional,ragged 0.15.0
guided_decoding_guide_type STRING 1 optional,ragged 0.19.0
guided_decoding_guide STRING 1 optional,ragged 0.19.0
"""
# The engine's, but for those that another model takes.
CLIENT_OUTPUTS = "\n".join(
    ("text_output STRING -1 - 0.5.0", *(row for row in ENGINE_OUTPUTS.split("\n")[1:-1] if not row.startswith(INNER)))
)
BLS_INPUTS = """
text_input STRING 1 required 0.7.0
decoder_text_input STRING 1 optional 0.11.0
image_input FP16 -1,3,-1,-1 optional 0.12.0
image_bytes_input UINT8 -1,-1,-1,-1 optional 0.16.0
image_url_input STRING 1 optional 0.16.0
video_bytes_input UINT8 -1,-1,-1,-1 optional 0.16.0
max_tokens INT32 1 required 0.7.0
bad_words STRING -1 optional 0.7.0
stop_words STRING -1 optional 0.7.0
exclude_input_in_output BOOL 1 optional 0.16.0
end_id INT32 1 optional 0.7.0
pad_id INT32 1 optional 0.7.0
top_k INT32 1 optional 0.7.0
top_p FP32 1 optional 0.7.0
temperature FP32 1 optional 0.7.0
length_penalty FP32 1 optional 0.7.0
repetition_penalty FP32 1 optional 0.7.0
min_length INT32 1 optional 0.7.0 0.19.0
min_tokens INT32 1 optional 0.20.0
presence_penalty FP32 1 optional 0.7.0
frequency_penalty FP32 1 optional 0.8.0
random_seed UINT64 1 optional 0.7.0 0.19.0
seed UINT64 1 optional 0.20.0
return_log_probs BOOL 1 optional,scalar 0.7.0
return_context_logits BOOL 1 optional,scalar 0.8.0
return_generation_logits BOOL 1 optional,scalar 0.8.0
num_return_sequences INT32 1 optional,scalar 0.14.0
beam_width INT32 1 optional 0.7.0
stream BOOL 1 optional 0.7.0
prompt_embedding_table FP16 -1,-1 optional 0.7.0
prompt_vocab_size INT32 1 optional 0.7.0
prompt_table_extra_id UINT64 1 optional 0.13.0
embedding_bias_words STRING -1 optional 0.7.0
embedding_bias_weights FP32 -1 optional 0.7.0
num_draft_tokens INT32 1 optional 0.9.0
use_draft_logits BOOL 1 optional,scalar 0.9.0
lora_task_id UINT64 1 optional,scalar 0.15.0
lora_weights FP16 -1,-1 optional,ragged 0.15.0
lora_config INT32 -1,3 optional,ragged 0.15.0
return_perf_metrics BOOL 1 optional,scalar 0.19.0
return_num_input_tokens BOOL 1 optional,scalar 0.20.0
return_num_output_tokens BOOL 1 optional,scalar 0.20.0
guided_decoding_guide_type STRING 1 optional 0.19.0
guided_decoding_guide STRING 1 optional 0.19.0
"""
# The parameters of the engine model: key, token, first release.
ENGINE_PARAMETERS = """
max_beam_width max_beam_width 0.6.0
FORCE_CPU_ONLY_INPUT_TENSORS =no 0.5.0
gpt_model_type batching_strategy 0.5.0
gpt_model_path engine_dir 0.5.0
encoder_model_path encoder_engine_dir 0.11.0
max_tokens_in_paged_kv_cache max_tokens_in_paged_kv_cache 0.5.0
max_attention_window_size max_attention_window_size 0.7.0
sink_token_length sink_token_length 0.10.0
batch_scheduler_policy batch_scheduler_policy 0.5.0
kv_cache_free_gpu_mem_fraction kv_cache_free_gpu_mem_fraction 0.5.0
cross_kv_cache_fraction cross_kv_cache_fraction 0.14.0
kv_cache_host_memory_bytes kv_cache_host_memory_bytes 0.10.0
kv_cache_onboard_blocks kv_cache_onboard_blocks 0.10.0
exclude_input_in_output exclude_input_in_output 0.6.0
cancellation_check_period_ms cancellation_check_period_ms 0.10.0
stats_check_period_ms stats_check_period_ms 0.10.0
iter_stats_max_iterations iter_stats_max_iterations 0.10.0
request_stats_max_iterations request_stats_max_iterations 0.10.0
enable_kv_cache_reuse enable_kv_cache_reuse 0.7.0
normalize_log_probs normalize_log_probs 0.8.0
enable_chunked_context enable_chunked_context 0.8.0
gpu_device_ids gpu_device_ids 0.8.0
participant_ids participant_ids 0.13.0
num_nodes num_nodes 0.19.0
lora_cache_optimal_adapter_size lora_cache_optimal_adapter_size 0.9.0
lora_cache_max_adapter_size lora_cache_max_adapter_size 0.9.0
lora_cache_gpu_memory_fraction lora_cache_gpu_memory_fraction 0.9.0
lora_cache_host_memory_bytes lora_cache_host_memory_bytes 0.9.0
lora_prefetch_dir lora_prefetch_dir 0.19.0
decoding_mode decoding_mode 0.9.0
executor_worker_path =/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker 0.10.0
lookahead_window_size lookahead_window_size 0.19.0
lookahead_ngram_size lookahead_ngram_size 0.19.0
lookahead_verification_set_size lookahead_verification_set_size 0.19.0
medusa_choices medusa_choices 0.9.0
eagle_choices eagle_choices 0.16.0
gpu_weights_percent gpu_weights_percent 0.10.0
enable_context_fmha_fp32_acc enable_context_fmha_fp32_acc 0.12.0
multi_block_mode multi_block_mode 0.12.0
cuda_graph_mode cuda_graph_mode 0.15.0
cuda_graph_cache_size cuda_graph_cache_size 0.15.0
speculative_decoding_fast_logits speculative_decoding_fast_logits 0.15.0
tokenizer_dir tokenizer_dir 0.19.0
guided_decoding_backend guided_decoding_backend 0.19.0
xgrammar_tokenizer_info_path xgrammar_tokenizer_info_path 0.19.0
"""
TEXT_PARAMETERS = {
    "preprocessing": """
tokenizer_dir tokenizer_dir 0.5.0
add_special_tokens add_special_tokens 0.9.0
visual_model_path visual_model_path 0.12.0 0.18.2
multimodal_model_path multimodal_model_path 0.19.0
gpt_model_path engine_dir 0.12.0
max_num_images max_num_images 0.15.0
""",
    "postprocessing": """
tokenizer_dir tokenizer_dir 0.5.0
skip_special_tokens skip_special_tokens 0.11.0
""",
    "tensorrt_llm_bls": """
accumulate_tokens accumulate_tokens 0.7.0
tensorrt_llm_model_name tensorrt_llm_model_name 0.9.0
tensorrt_llm_draft_model_name tensorrt_llm_draft_model_name 0.9.0
multimodal_encoders_name multimodal_encoders_name 0.13.0
""",
}
POSTPROCESSING_INPUTS = """
TOKENS_BATCH INT32 -1,-1 required 0.5.0
SEQUENCE_LENGTH INT32 -1 required 0.6.0
"""
POSTPROCESSING_OUTPUTS = "OUTPUT STRING -1 - 0.5.0"
LLMAPI_INPUTS = """
text_input STRING -1 required 0.19.0
streaming BOOL 1 optional 0.19.0
sampling_param_best_of INT32 1 optional 0.19.0
sampling_param_temperature FP32 1 optional 0.19.0
sampling_param_top_k INT32 1 optional 0.19.0
sampling_param_top_p FP32 1 optional 0.19.0
sampling_param_max_tokens INT32 1 optional 0.19.0
sampling_param_stop STRING -1 optional 0.19.0
sampling_param_seed UINT64 1 optional 0.19.0
return_finish_reason BOOL 1 optional 0.19.0
stop BOOL 1 optional 0.19.0
"""
LLMAPI_OUTPUTS = """
text_output STRING -1 - 0.19.0
finish_reason STRING -1 - 0.19.0
cumulative_logprob FP32 -1 - 0.19.0
"""
# Who feeds whom in the ensemble: the client's names, then those of preprocessing's outputs.
TO_PREPROCESSING = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
}
RENAMED = {"top_k": "runtime_top_k", "top_p": "runtime_top_p", "length_penalty": "len_penalty", "stream": "streaming"}
PREPROCESSED = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_DECODER_INPUT_LEN": "decoder_input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
}
FILLED = {
    "batching_strategy": "inflight_fused_batching",
    "engine_dir": "tensorrt_llm/1",
    "tokenizer_dir": "preprocessing/1/tokenizer",
    "kv_cache_free_gpu_mem_fraction": "0.9",
    "exclude_input_in_output": "true",
}
SCRIPT = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
ENGINE_CONFIG: dict[str, Any] = {
    "version": "1.2.1",
    "pretrained_config": {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "vocab_size": 300,
        "hidden_size": 4096,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1, "cp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    },
    "build_config": {
        "max_input_len": 2048,
        "max_seq_len": 4096,
        "max_batch_size": 8,
        "max_beam_width": 1,
        "max_num_tokens": 8192,
        "kv_cache_type": "paged",
        "gather_context_logits": False,
        "speculative_decoding_mode": 1,
        "weight_streaming": False,
        "plugin_config": {
            "gpt_attention_plugin": "auto",
            "remove_input_padding": True,
            "paged_kv_cache": True,
            "tokens_per_block": 32,
            "use_paged_context_fmha": True,
            "lora_plugin": None,
        },
    },
}
MODEL_YAML = """
model: TinyLlama/TinyLlama-1.1B-Chat-v1.0
backend: "pytorch"

tensor_parallel_size: 1
pipeline_parallel_size: 1
kv_cache_config:
  free_gpu_memory_fraction: 0.9

triton_config:
  max_batch_size: 0
  decoupled: False
"""


@dataclass
class Repository:
    """A repository on disk, and ways to change it."""

    path: Path

    def config(self, model: str) -> Path:
        return self.path / model / "config.pbtxt"

    def text(self, model: str) -> str:
        return self.config(model).read_text()

    def edit(self, model: str, old: str, new: str, count: int = 1) -> None:
        text = self.text(model)
        assert old in text, old
        self.config(model).write_text(text.replace(old, new, count))

    def parameter(self, model: str, key: str, value: str) -> None:
        """Give a parameter a value, adding it where it is not."""
        text, pattern = self.text(model), rf'(key: "{key}"\n  value: {{ string_value: )"[^"]*"'
        if re.search(pattern, text):
            self.config(model).write_text(re.sub(pattern, lambda found: f'{found[1]}"{value}"', text))
        else:
            self.config(model).write_text(text + parameter(key, value))

    def drop_parameter(self, model: str, key: str) -> None:
        text = self.text(model)
        after = re.sub(rf'parameters: {{\n  key: "{key}"\n.*?\n}}\n', "", text, flags=re.DOTALL)
        assert after != text, key
        self.config(model).write_text(after)

    def drop_tensor(self, model: str, name: str) -> None:
        text = self.text(model)
        after = re.sub(rf'  {{\n    name: "{name}"\n.*?\n  }},?\n', "", text, count=1, flags=re.DOTALL)
        assert after != text, name
        self.config(model).write_text(after)

    def tensor(self, model: str, name: str, old: str, new: str) -> None:
        """Change something within one tensor's declaration."""
        before, mark, after = self.text(model).partition(f'name: "{name}"')
        head, brace, tail = after.partition("\n  }")
        assert old in head, (name, old)
        self.config(model).write_text(before + mark + head.replace(old, new, 1) + brace + tail)

    def engine(self, place: str, value: Any) -> None:
        """Set a value of the engine's config.json, as in build_config.max_batch_size; None for dropping it."""
        path = self.path / "tensorrt_llm" / "1" / "config.json"
        config = json.loads(path.read_text())
        *folders, key = place.split(".")
        target = config
        for folder in folders:
            target = target[folder]
        target[key] = value
        path.write_text(json.dumps(config))


def inflight(path: Path, release: str = "1.2.1", *, unfilled: bool = False, **filled: str) -> Repository:
    """NVIDIA's five models as the release's template has them, optional tokens made empty, or left as placeholders."""
    values = {**FILLED, **filled}
    tables = {
        "tensorrt_llm": (ENGINE_INPUTS, ENGINE_OUTPUTS),
        "preprocessing": (PREPROCESSING_INPUTS, PREPROCESSING_OUTPUTS),
        "postprocessing": (POSTPROCESSING_INPUTS, POSTPROCESSING_OUTPUTS),
        "ensemble": (CLIENT_INPUTS, CLIENT_OUTPUTS),
        "tensorrt_llm_bls": (BLS_INPUTS, CLIENT_OUTPUTS),
    }
    for model, (inputs, outputs) in tables.items():
        folder = path / model
        (folder / "1").mkdir(parents=True)
        head = "# Copyright\n\n" + f'name: "{model}"\n'
        head += {"ensemble": 'platform: "ensemble"\n', "tensorrt_llm": 'backend: "tensorrtllm"\n'}.get(
            model, 'backend: "python"\n'
        )
        head += "max_batch_size: 8\n"
        if model.startswith("tensorrt_llm"):
            head += "model_transaction_policy {\n  decoupled: true\n}\n"
        if model == "tensorrt_llm" or (model == "preprocessing" and key(release) >= (0, 19)):
            queue = "  default_queue_policy: { max_queue_size: 0 }\n" if key(release) >= (0, 12) else ""
            head += "dynamic_batching {\n  preferred_batch_size: [ 8 ]\n  max_queue_delay_microseconds: 0\n" + queue
            head += "}\n"
        body = head + tensors("input", inputs, release) + tensors("output", outputs, release)
        if model == "ensemble":
            body += "# nobody reads ${this}\n" + scheduling(release)
            (folder / "1" / ".tmp").touch()
        else:
            body += "instance_group [\n  {\n    count: 1\n    kind: KIND_CPU\n  }\n]\n"
            table = ENGINE_PARAMETERS if model == "tensorrt_llm" else TEXT_PARAMETERS[model]
            for row in rows(table, release, columns=2):
                token = row[1]
                # The engine model's own tokenizer_dir is for the Python runtime's guided decoding.
                given = values.get(token) if (model, token) != ("tensorrt_llm", "tokenizer_dir") else None
                left = f"${{{token}}}" if unfilled else ""
                body += parameter(row[0], token[1:] if token[0] == "=" else given or left)
            (folder / "1" / "model.py").write_text(SCRIPT)
        (folder / "config.pbtxt").write_text(body)
    engine = path / "tensorrt_llm" / "1"
    (engine / "config.json").write_text(json.dumps({**ENGINE_CONFIG, "version": release}))
    (engine / "rank0.engine").write_bytes(b"engine")
    (path / "preprocessing" / "1" / "tokenizer").mkdir()
    write_tokenizer(path / "preprocessing" / "1" / "tokenizer")
    return Repository(path)


def llmapi(path: Path, settings: str = MODEL_YAML) -> Repository:
    """NVIDIA's single model of the LLM API."""
    folder = path / "tensorrt_llm" / "1"
    folder.mkdir(parents=True)
    body = 'name: "tensorrt_llm"\nbackend: "python"\n# max_batch_size: 64\n'
    body += "instance_group [\n  {\n    count: 1\n    kind: KIND_CPU\n  }\n]\n"
    body += tensors("input", LLMAPI_INPUTS, "1.2.1") + tensors("output", LLMAPI_OUTPUTS, "1.2.1")
    (path / "tensorrt_llm" / "config.pbtxt").write_text(body)
    (folder / "model.py").write_text("from helpers import get_parameter\n" + SCRIPT)
    (folder / "helpers.py").write_text("def get_parameter():\n    pass\n")
    (folder / "model.yaml").write_text(settings)
    return Repository(path)


def key(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:3])


def rows(table: str, release: str, columns: int) -> Iterator[list[str]]:
    """The rows of a table that a release has; after `columns` come the first release, and the last."""
    for line in table.strip().splitlines():
        row = line.split()
        since, until = row[columns], row[columns + 1] if len(row) > columns + 1 else "99"
        if key(since) <= key(release) <= key(until):
            yield row


def parameter(name: str, value: str) -> str:
    return f'parameters: {{\n  key: "{name}"\n  value: {{ string_value: "{value}" }}\n}}\n'


def tensors(kind: str, table: str, release: str) -> str:
    declared = []
    for name, dtype, dims, flags, *_ in rows(table, release, columns=4):
        dtype = "FP32" if dtype == "LOGITS" else dtype
        lines = [f'name: "{name}"', f"data_type: TYPE_{dtype}", f"dims: [ {dims.replace(',', ', ')} ]"]
        if "scalar" in flags:
            lines.append("reshape: { shape: [ ] }")
        if "optional" in flags:
            lines.append("optional: true")
        if "ragged" in flags:
            lines.append("allow_ragged_batch: true")
        declared.append("  {\n    " + "\n    ".join(lines) + "\n  }")
    return f"{kind} [\n" + ",\n".join(declared) + "\n]\n"


def scheduling(release: str) -> str:
    """The ensemble's three steps."""
    client = {row[0] for row in rows(CLIENT_INPUTS, release, columns=4)}
    made = {row[0] for row in rows(PREPROCESSING_OUTPUTS, release, columns=4)}
    engine = {row[0] for row in rows(ENGINE_INPUTS, release, columns=4)}
    reports = [row[0] for row in rows(CLIENT_OUTPUTS, release, columns=4) if row[0] != "text_output"]
    direct = [name for name in client if name not in TO_PREPROCESSING]
    inner = {theirs: f"_{theirs}" for theirs in PREPROCESSED if theirs in made}
    steps = [
        ("preprocessing", {theirs: ours for ours, theirs in TO_PREPROCESSING.items() if ours in client}, inner),
        (
            "tensorrt_llm",
            {PREPROCESSED[made]: name for made, name in inner.items()}
            | {RENAMED.get(name, name): name for name in sorted(direct) if RENAMED.get(name, name) in engine},
            {"output_ids": "_TOKENS_BATCH", "sequence_length": "_SEQUENCE_LENGTH", **{name: name for name in reports}},
        ),
        (
            "postprocessing",
            {"TOKENS_BATCH": "_TOKENS_BATCH", "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH"},
            {"OUTPUT": "text_output"},
        ),
    ]
    text = []
    for model, inputs, outputs in steps:
        maps = [("input_map", one) for one in inputs.items()] + [("output_map", one) for one in outputs.items()]
        lines = [f'      {kind} {{ key: "{theirs}" value: "{ours}" }}' for kind, (theirs, ours) in maps]
        text.append(f'    {{\n      model_name: "{model}"\n      model_version: -1\n' + "\n".join(lines) + "\n    }")
    return "ensemble_scheduling {\n  step [\n" + ",\n".join(text) + "\n  ]\n}\n"
