"""Text to token ids, stop and bad word lists, and logit bias. One tokenizer per instance, no remote code."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils
import trtpipe_text as text


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        folder = text.resolve_folder(config, "tokenizer_dir", args["model_repository"])
        self.tokenizer = text.load_tokenizer(folder)
        self.add_special_tokens = text.flag(config, "add_special_tokens", True)
        self.end_ids, self.pad_id, self.bos = text.special_ids(folder, self.tokenizer)
        self.vocab_size = int(text.parameter(config, "vocab_size"))  # the engine's

    def execute(self, requests):
        responses = []
        for request in requests:
            try:
                responses.append(pb_utils.InferenceResponse(self._outputs(request)))
            except ValueError as error:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))))
        return responses

    def _outputs(self, request):
        prompts = [self._encode(row) for row in _strings(request, "QUERY")]
        batch = len(prompts)
        longest = max(len(ids) for ids in prompts)
        lengths = np.array([[len(ids)] for ids in prompts], dtype=np.int32)
        ids = np.full((batch, longest), self.pad_id, dtype=np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt

        output_len = _array(request, "REQUEST_OUTPUT_LEN")
        if output_len is None:
            raise ValueError("max_tokens is missing")
        end = _array(request, "END_ID")
        stop = _words(request, "STOP_WORDS_DICT", batch, self._ids)
        if end is None:
            end = np.full((batch, 1), self.end_ids[0] if self.end_ids else -1, dtype=np.int32)
            # The engine takes one end id; the model's others end the text as stop words of one token.
            stop = [words + [[token] for token in self.end_ids[1:]] for words in stop]
        pad = _array(request, "PAD_ID")
        if pad is None:
            pad = np.full((batch, 1), self.pad_id, dtype=np.int32)
        extra = _array(request, "PROMPT_TABLE_EXTRA_ID")
        extra_ids = np.zeros((batch, 0), dtype=np.uint64) if extra is None else np.repeat(extra, longest, axis=1)
        bad = _words(request, "BAD_WORDS_DICT", batch, self._ids)
        return [
            pb_utils.Tensor("INPUT_ID", ids),
            pb_utils.Tensor("REQUEST_INPUT_LEN", lengths),
            # Decoder-only models ignore these two; the ensemble needs every mapped tensor to exist.
            pb_utils.Tensor("DECODER_INPUT_ID", np.full((batch, 1), self.pad_id, dtype=np.int32)),
            pb_utils.Tensor("REQUEST_DECODER_INPUT_LEN", np.ones((batch, 1), dtype=np.int32)),
            pb_utils.Tensor("BAD_WORDS_IDS", text.pack_words(bad)),
            pb_utils.Tensor("STOP_WORDS_IDS", text.pack_words(stop)),
            pb_utils.Tensor("EMBEDDING_BIAS", self._bias(request, batch)),
            pb_utils.Tensor("REQUEST_OUTPUT_LEN", output_len.astype(np.int32)),
            pb_utils.Tensor("OUT_END_ID", end.astype(np.int32)),
            pb_utils.Tensor("OUT_PAD_ID", pad.astype(np.int32)),
            pb_utils.Tensor("OUT_PROMPT_TABLE_EXTRA_IDS", extra_ids),
        ]

    def _encode(self, row):
        prompt = row[0]
        # A chat template writes the beginning-of-sequence token itself; a second one would change the answer.
        special = self.add_special_tokens and not (self.bos and prompt.startswith(self.bos))
        ids = self.tokenizer.encode(prompt, add_special_tokens=special).ids
        if not ids:
            raise ValueError("the prompt is empty")
        return ids

    def _ids(self, word):
        return self.tokenizer.encode(word, add_special_tokens=False).ids

    def _bias(self, request, batch):
        words, weights = _strings(request, "EMBEDDING_BIAS_WORDS"), _array(request, "EMBEDDING_BIAS_WEIGHTS")
        if not any(words):
            return np.zeros((batch, 0), dtype=np.float32)
        bias = np.zeros((batch, self.vocab_size), dtype=np.float32)
        for row, row_words in enumerate(words):
            row_weights = [] if weights is None else weights[row]
            if len(row_words) != len(row_weights):
                raise ValueError("embedding_bias_words and embedding_bias_weights differ in length")
            for word, weight in zip(row_words, row_weights, strict=True):
                ids = self._ids(word)
                if max(ids, default=0) >= self.vocab_size:
                    raise ValueError(f"embedding_bias_words: the engine has no token {max(ids)}, which is of '{word}'")
                bias[row, ids] += weight
        return bias


def _array(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def _strings(request, name):
    array = _array(request, name)
    if array is None:
        return []
    try:
        return [[item.decode("utf-8") for item in row] for row in array.reshape(len(array), -1)]
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not UTF-8") from None


def _words(request, name, batch, encode):
    """Token-id lists of a word list, per request of the batch. Empty strings, which clients send for 'none', drop."""
    rows = _strings(request, name) or [[] for _ in range(batch)]
    return [[encode(word) for word in row if word] for row in rows]
