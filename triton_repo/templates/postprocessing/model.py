"""Token ids to text.

A streamed answer arrives as many small requests. Those of one stream carry the client's request id, so that the
text is continued exactly where it stopped: spaces and characters that span tokens survive. Without an id each
piece is decoded by itself. Needs a single instance: the state lives here.

When the client of a stream goes away this is the one model of an ensemble that is told, and it stops the stream's
request in the engine, by the same id. With `STOP` another model has it do the same.
"""

import collections
import json
import time

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
        self.engine = text.parameter(config, "tensorrt_llm_model_name")
        self.cancel_period = int(text.parameter(config, "cancellation_check_period_ms", "100")) / 1000
        self.streams = collections.OrderedDict()  # id -> Detokenizer
        self.asked = text.Streams()
        self.looked = collections.OrderedDict()  # id -> when its client was last known to be there

    def execute(self, requests):
        responses = []
        for request in requests:
            try:
                responses.append(self._respond(request))
            except Exception as error:  # one request's fault must not fail those that came with it
                responses.append(_failed(str(error), pb_utils.TritonError.INTERNAL))
        return responses

    def _respond(self, request):
        stream_id = request.request_id()
        stop = pb_utils.get_input_tensor_by_name(request, "STOP")
        if stop is not None and stop.as_numpy().any():
            self._stop(stream_id)
        else:
            self._look_for_client(stream_id, request)
        tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
        lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
        if stream_id:  # each sequence of a request is a text of its own
            for name in ("BATCH_INDEX", "SEQUENCE_INDEX"):
                index = pb_utils.get_input_tensor_by_name(request, name)
                stream_id = f"{stream_id}/{0 if index is None else int(index.as_numpy().reshape(-1)[0])}"
        pieces = []
        for row, row_lengths in zip(tokens, lengths, strict=True):
            for beam, length in zip(row, row_lengths, strict=True):
                pieces.append(self._decode(stream_id, beam[:length].tolist(), len(row) * len(tokens)))
        output = np.array([piece.encode("utf-8") for piece in pieces], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)])

    def _look_for_client(self, stream_id, request):
        """When the client of a stream has gone away, stop its request in the engine.

        Triton marks the ensemble's next step as cancelled and tells nobody else: not the engine, which streams on.
        The text goes on until the engine ends it: an ensemble that fails in mid-stream is never released by Triton.
        """
        now = time.monotonic()
        # Without an id there is nothing to name in a stop request. Asking takes 0.05 ms, so not for every token.
        if not stream_id or now - self.looked.get(stream_id, 0.0) < self.cancel_period:
            return
        _remember(self.looked, stream_id, now)
        if request.is_cancelled():
            self._stop(stream_id)

    def _stop(self, stream_id):
        """End the engine's request of this id, if there is one, by the one means that NVIDIA's backend and ours know.

        Not in a thread: what a model that is not decoupled asks outside of `execute` Triton may never hear, and may
        crash on. It takes half a millisecond.
        """
        zero = np.zeros((1, 1), dtype=np.int32)
        request = pb_utils.InferenceRequest(
            model_name=self.engine,
            request_id=stream_id,
            requested_output_names=["output_ids", "sequence_length"],
            inputs=[
                pb_utils.Tensor("input_ids", zero),
                pb_utils.Tensor("input_lengths", zero),
                pb_utils.Tensor("request_output_len", zero),
                pb_utils.Tensor("stop", np.array([[True]])),
            ],
        )
        for _ in self.asked.ask(request):
            pass

    def _decode(self, stream_id, ids, sequences):
        if not stream_id or sequences != 1:
            return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)
        detokenizer = self.streams.pop(stream_id, None) or text.Detokenizer(self.tokenizer, self.skip_special_tokens)
        if not ids:  # only an end-of-text response is empty: the stream is over
            return detokenizer.flush()
        _remember(self.streams, stream_id, detokenizer)
        return detokenizer.push(ids)


def _remember(streams, stream_id, value):
    """Keep a value as the newest, and forget the oldest beyond MAX_STREAMS."""
    streams[stream_id] = value
    streams.move_to_end(stream_id)
    if len(streams) > MAX_STREAMS:
        streams.popitem(last=False)


def _failed(reason, code):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(reason, code))
