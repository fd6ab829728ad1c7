"""Token ids to text.

A streamed answer arrives as many small requests. Those of one answer carry its request's key, and the last one says
so: the text is continued exactly where it stopped, with spaces and characters that span tokens, and is whole at the
end. NVIDIA's C++ backend tells neither. There the client's request id stands for the key, and only an empty response
is known to be a last one; without an id, and where no answer is streamed, each response is decoded by itself. Needs a
single instance: the state lives here.

When the client of a stream goes away this is the one model of an ensemble that is told, and it stops the stream's
request in the engine, by the same name. With `STOP` another model has it do the same, by the id.
"""

import collections
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils
import trtpipe_text as text

# Streams remembered at once; the end of one that fails is not announced here, so the oldest is forgotten instead.
MAX_STREAMS = 8192


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.tokenizer = text.load_tokenizer(text.resolve_folder(config, "tokenizer_dir", args["model_repository"]))
        self.skip_special_tokens = text.flag(config, "skip_special_tokens", True)
        self.streaming = text.flag(config, "decoupled", True)  # else each answer is one response
        self.engine = text.parameter(config, "tensorrt_llm_model_name")
        self.cancel_period = int(text.parameter(config, "cancellation_check_period_ms", "100")) / 1000
        self.streams = collections.OrderedDict()  # name of a sequence -> Detokenizer
        self.asked = text.Streams()
        self.looked = collections.OrderedDict()  # name of a request -> when its client was last known to be there

    def execute(self, requests):
        responses = []
        for request in requests:
            try:
                responses.append(self._respond(request))
            except Exception as error:  # one request's fault must not fail those that came with it
                responses.append(_failed(str(error), pb_utils.TritonError.INTERNAL))
        return responses

    def _respond(self, request):
        key = _number(request, "REQUEST_KEY")
        name = request.request_id() if key is None else str(key)
        last = _number(request, "LAST_RESPONSE")
        if _number(request, "STOP"):
            self._stop(name)
        elif not last:
            self._look_for_client(name, request)
        tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
        lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
        if name:  # each sequence of a request is a text of its own
            name = f"{name}/{_number(request, 'BATCH_INDEX') or 0}/{_number(request, 'SEQUENCE_INDEX') or 0}"
        pieces = []
        for row, row_lengths in zip(tokens, lengths, strict=True):
            for beam, length in zip(row, row_lengths, strict=True):
                pieces.append(self._decode(name, beam[:length].tolist(), len(row) * len(tokens), last))
        output = np.array([piece.encode("utf-8") for piece in pieces], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)])

    def _look_for_client(self, name, request):
        """When the client of a stream has gone away, stop its request in the engine.

        Triton marks the ensemble's next step as cancelled and tells nobody else: not the engine, which streams on.
        The text goes on until the engine ends it: an ensemble that fails in mid-stream is never released by Triton.
        """
        now = time.monotonic()
        # Without a name a stop request can name nothing. Asking takes 0.05 ms, so not for every token.
        if not name or now - self.looked.get(name, 0.0) < self.cancel_period:
            return
        _remember(self.looked, name, now)
        if request.is_cancelled():
            self._stop(name)

    def _stop(self, name):
        """End the engine's request of this name, if there is one, by the one means that NVIDIA's backend and ours know.

        Not in a thread: what a model that is not decoupled asks outside of `execute` Triton may never hear, and may
        crash on. It takes half a millisecond.
        """
        zero = np.zeros((1, 1), dtype=np.int32)
        request = pb_utils.InferenceRequest(
            model_name=self.engine,
            request_id=name,
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

    def _decode(self, name, ids, sequences, last):
        """The text that a response adds to its sequence.

        last  whether it is the sequence's last response; None where the backend does not tell
        """
        if not name or sequences != 1 or not self.streaming:
            return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)
        detokenizer = self.streams.pop(name, None) or text.Detokenizer(self.tokenizer, self.skip_special_tokens)
        piece = detokenizer.push(ids)
        if last or (last is None and not ids):  # only an end-of-text response is empty
            return piece + detokenizer.flush()
        _remember(self.streams, name, detokenizer)
        return piece


def _remember(streams, name, value):
    """Keep a value as the newest, and forget the oldest beyond MAX_STREAMS."""
    streams[name] = value
    streams.move_to_end(name)
    if len(streams) > MAX_STREAMS:
        streams.popitem(last=False)


def _number(request, name):
    """A scalar input; None where it is not given."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)[0].item()


def _failed(reason, code):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(reason, code))
