"""The chain preprocessing -> engine -> text as one script. Unlike the ensemble it sees the whole stream, so text is
continued exactly without a request id, stop words are also matched on the text, and a client that goes away ends
its request in the engine.

One thread follows one request; `execute` returns at once, so an instance serves many requests.
"""

import json
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import triton_python_backend_utils as pb_utils
import trtpipe_text as text


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.engine = text.parameter(config, "tensorrt_llm_model_name", "tensorrt_llm")
        self.accumulate = text.flag(config, "accumulate_tokens", False)
        self.decoupled = config["model_transaction_policy"]["decoupled"]
        self.to_preprocessing = json.loads(text.parameter(config, "to_preprocessing"))
        self.to_engine = json.loads(text.parameter(config, "to_engine"))
        self.preprocessed = json.loads(text.parameter(config, "preprocessed"))
        folder = text.resolve_folder(config, "tokenizer_dir", args["model_repository"])
        self.tokenizer = text.load_tokenizer(folder)
        self.skip_special_tokens = text.flag(config, "skip_special_tokens", True)
        self.declared = [output["name"] for output in config["output"] if output["name"] != "text_output"]
        self.threads = ThreadPoolExecutor(max_workers=int(text.parameter(config, "max_concurrent_requests")))

    def execute(self, requests):
        for request in requests:
            self.threads.submit(self._serve, request)

    def finalize(self):
        self.threads.shutdown(wait=True)

    def _serve(self, request):
        sender = request.get_response_sender()
        try:
            self._stream(request, sender)
        except Exception as error:
            failure = pb_utils.InferenceResponse(error=pb_utils.TritonError(f"tensorrt_llm_bls: {error}"))
            sender.send(failure, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _stream(self, request, sender):
        streaming = _flag(request, "stream")
        if streaming and not self.decoupled:
            raise ValueError("streaming needs a repository packaged with serving.decoupled true")
        prompt = pb_utils.get_input_tensor_by_name(request, "text_input")
        if prompt is None or prompt.as_numpy().size != 1:
            raise ValueError("text_input must hold exactly one prompt")
        stop_texts = _texts(request, "stop_words")
        engine_id = uuid.uuid4().hex
        answer = _Answer(text.Detokenizer(self.tokenizer, self.skip_special_tokens), self.accumulate and streaming)
        responses = self._engine_request(request, engine_id).exec(decoupled=True)
        stopped = False
        for response in responses:
            if response.has_error():
                raise ValueError(response.error().message())
            ids = pb_utils.get_output_tensor_by_name(response, "output_ids")
            if ids is None or stopped:
                continue
            piece = answer.extend(ids.as_numpy().reshape(-1).tolist())
            if not streaming:
                whole = self._response(response, piece + answer.finish())
                sender.send(whole, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                return
            sender.send(self._response(response, piece))
            if request.is_cancelled() or any(word in answer.whole for word in stop_texts):
                stopped = True
                self._stop(engine_id)
        rest = answer.finish()
        if rest:
            sender.send(pb_utils.InferenceResponse([_text_tensor(rest)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _engine_request(self, request, engine_id):
        inputs = []
        for ours, theirs in self.to_preprocessing.items():
            inputs += _renamed(request, ours, theirs)
        prepared = pb_utils.InferenceRequest(
            model_name="preprocessing", requested_output_names=list(self.preprocessed), inputs=inputs
        ).exec()
        if prepared.has_error():
            raise ValueError(prepared.error().message())
        engine_inputs = [
            pb_utils.Tensor(theirs, pb_utils.get_output_tensor_by_name(prepared, ours).as_numpy())
            for ours, theirs in self.preprocessed.items()
        ]
        for ours, theirs in self.to_engine.items():
            engine_inputs += _renamed(request, ours, theirs)
        wanted = [name for name in request.requested_output_names() if name in self.declared]
        return pb_utils.InferenceRequest(
            model_name=self.engine,
            request_id=engine_id,
            requested_output_names=["output_ids", "sequence_length", *wanted],
            inputs=engine_inputs,
        )

    def _stop(self, engine_id):
        """End the engine's request: a second one of the same id whose `stop` is true."""
        zero = np.zeros((1, 1), dtype=np.int32)
        stop = pb_utils.InferenceRequest(
            model_name=self.engine,
            request_id=engine_id,
            requested_output_names=["output_ids", "sequence_length"],
            inputs=[
                pb_utils.Tensor("input_ids", zero),
                pb_utils.Tensor("input_lengths", zero),
                pb_utils.Tensor("request_output_len", zero),
                pb_utils.Tensor("stop", np.array([[True]])),
            ],
        )
        for _ in stop.exec(decoupled=True):
            pass

    def _response(self, response, piece):
        outputs = [_text_tensor(piece)]
        for name in self.declared:
            tensor = pb_utils.get_output_tensor_by_name(response, name)
            if tensor is not None:
                outputs.append(pb_utils.Tensor(name, tensor.as_numpy()))
        return pb_utils.InferenceResponse(outputs)


class _Answer:
    """The text so far, and what each response shows of it: the new piece, or everything when accumulating."""

    def __init__(self, detokenizer, accumulate):
        self._detokenizer = detokenizer
        self._accumulate = accumulate
        self.whole = ""

    def extend(self, ids):
        return self._shown(self._detokenizer.push(ids))

    def finish(self):
        rest = self._detokenizer.flush()
        return self._shown(rest) if rest else ""

    def _shown(self, piece):
        self.whole += piece
        return self.whole if self._accumulate else piece


def _text_tensor(piece):
    return pb_utils.Tensor("text_output", np.array([[piece.encode("utf-8")]], dtype=object))


def _renamed(request, ours, theirs):
    tensor = pb_utils.get_input_tensor_by_name(request, ours)
    return [] if tensor is None else [pb_utils.Tensor(theirs, tensor.as_numpy())]


def _flag(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return tensor is not None and bool(tensor.as_numpy().reshape(-1)[0])


def _texts(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return [] if tensor is None else [item.decode("utf-8") for item in tensor.as_numpy().reshape(-1) if item]
