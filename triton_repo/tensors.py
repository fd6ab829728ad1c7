"""Tensor names, types and shapes of the five models of a TensorRT-LLM repository (in-flight batcher, 1.x names).

They are the interface of NVIDIA's `tensorrtllm` backend and of the models around it. Dims do not include the batch
dimension. The text models (preprocessing, ensemble, BLS) have no tensors that only encoder-decoder, vision or speech
models use; the engine model declares all tensors that its backend reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ANY = -1


@dataclass(frozen=True)
class Tensor:
    """One input or output of a Triton model.

    scalar  whether a batch row is a scalar: declared [1] with an empty reshape
    ragged  whether rows of a batch may differ in length
    """

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    scalar: bool = False
    ragged: bool = False


def _scalars(dtype: str, *names: str) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, dtype, scalar=True) for name in names)


def _ragged(dtype: str, dims: tuple[int, ...], *names: str) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, dtype, dims, ragged=True) for name in names)


# Value of `logits_datatype`, `prompt_embedding_table_data_type` and `encoder_input_features_data_type`.
LOGITS = "TYPE_FP32"
PROMPT_TABLE = "TYPE_FP16"
ENCODER_FEATURES = "TYPE_FP16"

ENGINE_INPUTS: tuple[Tensor, ...] = (
    *_ragged("TYPE_INT32", (ANY,), "input_ids"),
    *_ragged(ENCODER_FEATURES, (ANY, ANY), "encoder_input_features"),
    *_scalars("TYPE_INT32", "encoder_output_lengths"),
    Tensor("input_lengths", "TYPE_INT32", optional=False, scalar=True),
    Tensor("request_output_len", "TYPE_INT32", optional=False, scalar=True),
    *_scalars("TYPE_INT32", "num_return_sequences"),
    *_ragged("TYPE_INT32", (ANY,), "draft_input_ids", "decoder_input_ids"),
    *_scalars("TYPE_INT32", "decoder_input_lengths"),
    *_ragged(LOGITS, (ANY, ANY), "draft_logits"),
    *_scalars("TYPE_FP32", "draft_acceptance_threshold"),
    *_scalars("TYPE_INT32", "end_id", "pad_id"),
    *_ragged("TYPE_INT32", (2, ANY), "stop_words_list", "bad_words_list"),
    *_ragged("TYPE_FP32", (ANY,), "embedding_bias"),
    *_scalars("TYPE_INT32", "beam_width"),
    *_scalars("TYPE_FP32", "temperature"),
    *_scalars("TYPE_INT32", "runtime_top_k"),
    *_scalars("TYPE_FP32", "runtime_top_p", "runtime_top_p_min", "runtime_top_p_decay"),
    *_scalars("TYPE_INT32", "runtime_top_p_reset_ids"),
    *_scalars("TYPE_FP32", "len_penalty"),
    *_scalars("TYPE_BOOL", "early_stopping"),
    *_scalars("TYPE_FP32", "repetition_penalty"),
    *_scalars("TYPE_INT32", "min_tokens"),
    *_scalars("TYPE_FP32", "beam_search_diversity_rate", "presence_penalty", "frequency_penalty"),
    *_scalars("TYPE_UINT64", "seed"),
    *_scalars("TYPE_BOOL", "return_log_probs", "return_context_logits", "return_generation_logits"),
    *_scalars("TYPE_BOOL", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"),
    *_scalars("TYPE_BOOL", "exclude_input_in_output", "stop", "streaming"),
    *_ragged(PROMPT_TABLE, (ANY, ANY), "prompt_embedding_table"),
    *_ragged("TYPE_UINT64", (ANY,), "prompt_table_extra_ids"),
    *_scalars("TYPE_INT32", "prompt_vocab_size"),
    *_ragged("TYPE_BOOL", (ANY, ANY), "cross_attention_mask"),
    Tensor("mrope_rotary_cos_sin", "TYPE_FP32", (ANY,)),
    Tensor("mrope_position_deltas", "TYPE_INT64"),
    *_scalars("TYPE_UINT64", "lora_task_id"),
    *_ragged("TYPE_FP16", (ANY, ANY), "lora_weights"),
    *_ragged("TYPE_INT32", (ANY, 3), "lora_config"),
    *_ragged("TYPE_UINT8", (ANY,), "context_phase_params"),
    *_ragged("TYPE_BOOL", (1,), "skip_cross_attn_blocks"),
    *_ragged(
        "TYPE_INT32",
        (ANY,),
        "retention_token_range_starts",
        "retention_token_range_ends",
        "retention_token_range_priorities",
        "retention_token_range_durations_ms",
    ),
    *_ragged("TYPE_INT32", (1,), "retention_decode_priority", "retention_decode_duration_ms"),
    *_ragged("TYPE_STRING", (1,), "guided_decoding_guide_type", "guided_decoding_guide"),
    *_ragged("TYPE_INT32", (1,), "lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"),
)

# Outputs that a client may request beside the text; the ensemble and BLS models forward them under the same names.
REPORT_OUTPUTS: tuple[Tensor, ...] = (
    Tensor("cum_log_probs", "TYPE_FP32", (ANY,)),
    Tensor("output_log_probs", "TYPE_FP32", (ANY, ANY)),
    Tensor("context_logits", LOGITS, (ANY, ANY)),
    Tensor("generation_logits", LOGITS, (ANY, ANY, ANY)),
    Tensor("batch_index", "TYPE_INT32"),
    Tensor("sequence_index", "TYPE_INT32"),
    Tensor("kv_cache_alloc_new_blocks", "TYPE_INT32"),
    Tensor("kv_cache_reused_blocks", "TYPE_INT32"),
    Tensor("kv_cache_alloc_total_blocks", "TYPE_INT32"),
    Tensor("arrival_time_ns", "TYPE_INT64"),
    Tensor("first_scheduled_time_ns", "TYPE_INT64"),
    Tensor("first_token_time_ns", "TYPE_INT64"),
    Tensor("last_token_time_ns", "TYPE_INT64"),
    Tensor("acceptance_rate", "TYPE_FP32"),
    Tensor("total_accepted_draft_tokens", "TYPE_INT32"),
    Tensor("total_draft_tokens", "TYPE_INT32"),
    Tensor("num_input_tokens", "TYPE_INT32"),
    Tensor("num_output_tokens", "TYPE_INT32"),
)

ENGINE_OUTPUTS: tuple[Tensor, ...] = (
    Tensor("output_ids", "TYPE_INT32", (ANY, ANY)),
    Tensor("sequence_length", "TYPE_INT32", (ANY,)),
    *REPORT_OUTPUTS,
    Tensor("context_phase_params", "TYPE_UINT8", (ANY,)),
)

# Tensors of the Python-based backend that NVIDIA's backend lacks. prompt_log_probs [2, tokens - 1]: log-probabilities
# of the prompt's tokens after the first, and of the likeliest tokens in their places; prompt_likeliest: ids of the
# likeliest. request_key: number of the request, which no other request has; last_response: whether the response is the
# last of its sequence.
OWN_INPUTS: tuple[Tensor, ...] = _scalars("TYPE_BOOL", "return_prompt_log_probs")
OWN_OUTPUTS: tuple[Tensor, ...] = (
    Tensor("prompt_log_probs", "TYPE_FP32", (ANY, ANY)),
    Tensor("prompt_likeliest", "TYPE_INT32", (ANY,)),
    Tensor("request_key", "TYPE_UINT64"),
    Tensor("last_response", "TYPE_BOOL"),
)

PREPROCESSING_INPUTS: tuple[Tensor, ...] = (
    Tensor("QUERY", "TYPE_STRING", optional=False),
    Tensor("DECODER_QUERY", "TYPE_STRING"),
    Tensor("REQUEST_OUTPUT_LEN", "TYPE_INT32", optional=False),
    Tensor("BAD_WORDS_DICT", "TYPE_STRING", (ANY,)),
    Tensor("STOP_WORDS_DICT", "TYPE_STRING", (ANY,)),
    Tensor("EMBEDDING_BIAS_WORDS", "TYPE_STRING", (ANY,)),
    Tensor("EMBEDDING_BIAS_WEIGHTS", "TYPE_FP32", (ANY,)),
    Tensor("END_ID", "TYPE_INT32"),
    Tensor("PAD_ID", "TYPE_INT32"),
    Tensor("PROMPT_TABLE_EXTRA_ID", "TYPE_UINT64"),
)

PREPROCESSING_OUTPUTS: tuple[Tensor, ...] = (
    Tensor("INPUT_ID", "TYPE_INT32", (ANY,)),
    Tensor("REQUEST_INPUT_LEN", "TYPE_INT32"),
    Tensor("DECODER_INPUT_ID", "TYPE_INT32", (ANY,)),
    Tensor("REQUEST_DECODER_INPUT_LEN", "TYPE_INT32"),
    Tensor("BAD_WORDS_IDS", "TYPE_INT32", (2, ANY)),
    Tensor("STOP_WORDS_IDS", "TYPE_INT32", (2, ANY)),
    Tensor("EMBEDDING_BIAS", "TYPE_FP32", (ANY,)),
    Tensor("REQUEST_OUTPUT_LEN", "TYPE_INT32", (ANY,)),
    Tensor("OUT_END_ID", "TYPE_INT32"),
    Tensor("OUT_PAD_ID", "TYPE_INT32"),
    Tensor("OUT_PROMPT_TABLE_EXTRA_IDS", "TYPE_UINT64", (ANY,)),
)

POSTPROCESSING_INPUTS: tuple[Tensor, ...] = (
    Tensor("TOKENS_BATCH", "TYPE_INT32", (ANY, ANY), optional=False),
    Tensor("SEQUENCE_LENGTH", "TYPE_INT32", (ANY,), optional=False),
    Tensor("BATCH_INDEX", "TYPE_INT32", (1,)),
    Tensor("SEQUENCE_INDEX", "TYPE_INT32", (1,)),
    Tensor("REQUEST_KEY", "TYPE_UINT64"),
    Tensor("LAST_RESPONSE", "TYPE_BOOL"),
    Tensor("STOP", "TYPE_BOOL"),
)

POSTPROCESSING_OUTPUTS: tuple[Tensor, ...] = (Tensor("OUTPUT", "TYPE_STRING", (ANY,)),)

# Client-facing name -> engine input, for tensors that the ensemble and BLS models forward unchanged.
PASSED_TO_ENGINE: dict[str, str] = {
    "num_return_sequences": "num_return_sequences",
    "exclude_input_in_output": "exclude_input_in_output",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "temperature": "temperature",
    "length_penalty": "len_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "return_log_probs": "return_log_probs",
    "return_context_logits": "return_context_logits",
    "return_generation_logits": "return_generation_logits",
    "return_perf_metrics": "return_perf_metrics",
    "return_num_input_tokens": "return_num_input_tokens",
    "return_num_output_tokens": "return_num_output_tokens",
    "beam_width": "beam_width",
    "stream": "streaming",
    "prompt_embedding_table": "prompt_embedding_table",
    "prompt_vocab_size": "prompt_vocab_size",
    "lora_task_id": "lora_task_id",
    "lora_weights": "lora_weights",
    "lora_config": "lora_config",
    "guided_decoding_guide_type": "guided_decoding_guide_type",
    "guided_decoding_guide": "guided_decoding_guide",
}

# Client-facing name -> preprocessing input.
PASSED_TO_PREPROCESSING: dict[str, str] = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
}

# Preprocessing output -> engine input.
PREPROCESSED: dict[str, str] = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_DECODER_INPUT_LEN": "decoder_input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "EMBEDDING_BIAS": "embedding_bias",
    "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
}


def _client_inputs() -> tuple[Tensor, ...]:
    """Inputs of the ensemble and BLS models: those of the models behind them, under the client's names."""
    engine = {tensor.name: tensor for tensor in ENGINE_INPUTS}
    text = {tensor.name: tensor for tensor in PREPROCESSING_INPUTS}
    out = [replace(text[theirs], name=ours) for ours, theirs in PASSED_TO_PREPROCESSING.items()]
    for ours, theirs in PASSED_TO_ENGINE.items():
        # The engine's scalar rows are plain [1] here; only these ragged inputs stay ragged, as in NVIDIA's files.
        keeps_ragged = ours in ("lora_weights", "lora_config", "guided_decoding_guide_type", "guided_decoding_guide")
        out.append(replace(engine[theirs], name=ours, scalar=False, ragged=keeps_ragged))
    return tuple(out)


CLIENT_INPUTS: tuple[Tensor, ...] = _client_inputs()
CLIENT_OUTPUTS: tuple[Tensor, ...] = (Tensor("text_output", "TYPE_STRING", (ANY,)), *REPORT_OUTPUTS)
