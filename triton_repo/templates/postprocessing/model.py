"""Token ids to text.

A streamed answer arrives as many small requests. Those of one stream carry the client's request id, so that the
text is continued exactly where it stopped: spaces and characters that span tokens survive. Without an id each
piece is decoded by itself. Needs a single instance: the state lives here.
"""

import collections
import json

import numpy as np
import triton_python_backend_utils as pb_utils
import trtpipe_text as text

# Streams remembered at once; the end of a stream is not announced here, so the oldest is forgotten instead.
MAX_STREAMS = 8192


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.tokenizer = text.load_tokenizer(text.resolve_folder(config, "tokenizer_dir", args["model_repository"]))
        self.skip_special_tokens = text.flag(config, "skip_special_tokens", True)
        self.streams = collections.OrderedDict()

    def execute(self, requests):
        responses = []
        for request in requests:
            tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
            lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
            pieces = []
            for row, row_lengths in zip(tokens, lengths, strict=True):
                for beam, length in zip(row, row_lengths, strict=True):
                    pieces.append(self._decode(request.request_id(), beam[:length].tolist(), len(row) * len(tokens)))
            output = np.array([piece.encode("utf-8") for piece in pieces], dtype=object).reshape(len(tokens), -1)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)]))
        return responses

    def _decode(self, stream_id, ids, sequences):
        if not stream_id or sequences != 1:
            return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)
        detokenizer = self.streams.pop(stream_id, None) or text.Detokenizer(self.tokenizer, self.skip_special_tokens)
        if not ids:  # only an end-of-text response is empty: the stream is over
            return detokenizer.flush()
        self.streams[stream_id] = detokenizer
        if len(self.streams) > MAX_STREAMS:
            self.streams.popitem(last=False)
        return detokenizer.push(ids)
