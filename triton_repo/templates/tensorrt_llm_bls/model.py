"""The chain preprocessing -> engine -> text as one script. Unlike the ensemble it sees the whole request, so text is
continued exactly without a request id, stop words are also matched on the text, and a client that goes away ends its
request in the engine, streamed or not.

An instance serves one request at a time: two threads of one process must not follow streams, since the Python backend
can lock itself up when one begins while another is woken. Requests at once are a matter of `instance_group`, and those
that wait are in Triton's own queue. A second thread asks every `cancellation_check_period_ms` whether the client has
gone. It begins no stream either: it has postprocessing stop the request in the engine.
"""

import collections
import json
import threading
import uuid

import numpy as np
import triton_python_backend_utils as pb_utils
import trtpipe_text as text

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
GONE = "the client has gone"
EXCLUDE_INPUT = "exclude_input_in_output"


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.name = args["model_name"]
        self.engine = text.parameter(config, "tensorrt_llm_model_name")
        self.preprocessing = text.parameter(config, "preprocessing_model_name")
        self.postprocessing = text.parameter(config, "postprocessing_model_name")
        self.accumulate = text.flag(config, "accumulate_tokens", False)
        self.exclude_input = text.flag(config, EXCLUDE_INPUT, False)
        self.decoupled = config["model_transaction_policy"]["decoupled"]
        self.to_preprocessing = json.loads(text.parameter(config, "to_preprocessing"))
        self.to_engine = json.loads(text.parameter(config, "to_engine"))
        self.preprocessed = json.loads(text.parameter(config, "preprocessed"))
        folder = text.resolve_folder(config, "tokenizer_dir", args["model_repository"])
        self.tokenizer = text.load_tokenizer(folder)
        self.skip_special_tokens = text.flag(config, "skip_special_tokens", True)
        self.declared = [output["name"] for output in config["output"] if output["name"] != "text_output"]
        self.call = None  # the request being served
        self.streams = text.Streams()
        self.closing = threading.Event()
        self.cancel_period = int(text.parameter(config, "cancellation_check_period_ms", "100")) / 1000
        self.watcher = threading.Thread(target=self._watch_client, daemon=True)
        self.watcher.start()

    def execute(self, requests):
        for request in requests:
            call = self.call = _Call(request)
            try:
                self._stream(call)
            except _Failed as error:
                call.fail(f"{self.name}: {error}", error.code)
            except Exception as error:
                call.fail(f"{self.name}: {error}", pb_utils.TritonError.INTERNAL)
            finally:
                self.call = None

    def finalize(self):
        self.closing.set()
        self.watcher.join()

    def _stream(self, call):
        request = call.request
        streaming = _flag(request, "stream")
        if streaming and not self.decoupled:
            raise _Failed("streaming needs a repository packaged with serving.decoupled true")
        prompt = pb_utils.get_input_tensor_by_name(request, "text_input")
        if prompt is None or prompt.as_numpy().size != 1:
            raise _Failed("text_input must hold exactly one prompt")
        prompt_ids, asked = self._engine_request(call)
        exclude_input = streaming or _flag(request, EXCLUDE_INPUT, self.exclude_input)
        before = [] if exclude_input else prompt_ids
        stops = _texts(request, "stop_words")
        copies = _number(request, "num_return_sequences", 1)
        answers = collections.defaultdict(lambda: _Answer(self._detokenizer(), stops, before))  # by sequence
        sent = 0
        for response in self._follow(call, asked):
            ids = pb_utils.get_output_tensor_by_name(response, "output_ids")
            if ids is None:
                # An error in mid-stream reaches a script as a last response without tensors and without its words.
                raise _Failed("the engine ended the request early", pb_utils.TritonError.UNAVAILABLE)
            answer = answers[_number(response, "sequence_index", 0)]
            if answer.stopped:
                continue
            piece = answer.extend(ids.as_numpy().reshape(-1).tolist())
            if not streaming:
                sent += 1
                answer.finish()
                call.send(self._response(call, response, answer.text), final=sent == copies)
                continue
            call.send(self._response(call, response, answer.text if self.accumulate else piece))
            if len(answers) == copies and all(one.stopped for one in answers.values()):
                self._stop(call)
        for number, answer in answers.items():
            rest = answer.finish()
            if rest:
                place = [pb_utils.Tensor("sequence_index", np.array([[number]], np.int32))] if copies > 1 else []
                shown = answer.text if self.accumulate else rest
                call.send(pb_utils.InferenceResponse([_text_tensor(shown), *place]))
        call.end()

    def _detokenizer(self):
        return text.Detokenizer(self.tokenizer, self.skip_special_tokens)

    def _follow(self, call, asked):
        """The engine's responses, to the last one: what is left unread would stay in the server's memory."""
        if call.look():
            raise _Failed(GONE, pb_utils.TritonError.CANCELLED)
        call.running = True
        try:
            for response in self.streams.ask(asked):
                if response.has_error():
                    # The last one, though the iterator does not know: asked for more it would wait for ever.
                    raise _Failed(response.error().message(), response.error().code())
                if not call.cancelled:
                    yield response
        finally:
            with call.lock:  # a stop that has begun must not outlive `execute`: Triton may crash on it
                call.running = False
        if call.cancelled:
            raise _Failed(GONE, pb_utils.TritonError.CANCELLED)

    def _watch_client(self):
        while not self.closing.wait(self.cancel_period):
            call = self.call
            if call is None or not call.look():
                continue
            with call.lock:
                # Once more each time until the engine has ended it: the first may have overtaken the request.
                if call.running:
                    self._stop(call)

    def _stop(self, call):
        pb_utils.InferenceRequest(
            model_name=self.postprocessing,
            request_id=call.engine_id,
            requested_output_names=["OUTPUT"],
            inputs=[
                pb_utils.Tensor("TOKENS_BATCH", np.zeros((1, 1, 1), dtype=np.int32)),
                pb_utils.Tensor("SEQUENCE_LENGTH", np.zeros((1, 1), dtype=np.int32)),
                pb_utils.Tensor("STOP", np.array([[True]])),
            ],
        ).exec()

    def _engine_request(self, call):
        """The ids of the prompt, and the request to the engine: for new tokens alone, among which stop words count."""
        request = call.request
        inputs = []
        for ours, theirs in self.to_preprocessing.items():
            inputs += _renamed(request, ours, theirs)
        prepared = pb_utils.InferenceRequest(
            model_name=self.preprocessing, requested_output_names=list(self.preprocessed), inputs=inputs
        ).exec()
        if prepared.has_error():
            raise _Failed(prepared.error().message(), prepared.error().code())
        engine_inputs = [
            pb_utils.Tensor(theirs, pb_utils.get_output_tensor_by_name(prepared, ours).as_numpy())
            for ours, theirs in self.preprocessed.items()
        ]
        for ours, theirs in self.to_engine.items():
            engine_inputs += _renamed(request, ours, theirs) if theirs != EXCLUDE_INPUT else []
        engine_inputs.append(pb_utils.Tensor(EXCLUDE_INPUT, np.array([[True]])))
        prompt_ids = pb_utils.get_output_tensor_by_name(prepared, "INPUT_ID").as_numpy().reshape(-1).tolist()
        wanted = call.wanted & set(self.declared) - {"sequence_index"}
        return prompt_ids, pb_utils.InferenceRequest(
            model_name=self.engine,
            request_id=call.engine_id,
            requested_output_names=["output_ids", "sequence_length", "sequence_index", *wanted],
            inputs=engine_inputs,
            parameters={"trtpipe_script": True},
        )

    def _response(self, call, response, piece):
        outputs = [_text_tensor(piece)]
        for name in call.wanted & set(self.declared):
            tensor = pb_utils.get_output_tensor_by_name(response, name)
            if tensor is not None:
                outputs.append(pb_utils.Tensor(name, tensor.as_numpy()))
        return pb_utils.InferenceResponse(outputs)


class _Failed(Exception):
    """What the client is told, and the code it gets."""

    def __init__(self, message, code=None):
        super().__init__(message)
        self.code = pb_utils.TritonError.INVALID_ARG if code is None else code


class _Call:
    """One request, its client and its run in the engine."""

    def __init__(self, request):
        self.request = request
        self.wanted = set(request.requested_output_names())
        self.sender = request.get_response_sender()
        self.engine_id = uuid.uuid4().hex
        self.lock = threading.Lock()
        self.closed = False  # the final response is sent
        self.cancelled = False
        self.running = False  # in the engine

    def look(self):
        """Whether the client has gone away. After the final response nobody may ask: the server would crash."""
        with self.lock:
            if not self.closed and not self.cancelled:
                self.cancelled = self.sender.is_cancelled()
            return self.cancelled

    def send(self, response, final=False):
        with self.lock:
            if not self.closed:
                self.closed = final
                self.sender.send(response, flags=FINAL if final else 0)

    def end(self):
        with self.lock:
            if not self.closed:
                self.closed = True
                self.sender.send(flags=FINAL)

    def fail(self, reason, code):
        self.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(reason, code)), final=True)


class _Answer:
    """The text of a sequence so far, after that of its prompt where `before` has the prompt's ids. It ends with the
    first stop word that the model writes, wherever its tokens end."""

    def __init__(self, detokenizer, stops, before):
        self._detokenizer = detokenizer
        self._stops = stops
        self.text = detokenizer.push(before)
        self._start = len(self.text)
        self.stopped = False

    def extend(self, ids):
        """Add tokens; return the new piece of the text."""
        return self._add(self._detokenizer.push(ids))

    def finish(self):
        return "" if self.stopped else self._add(self._detokenizer.flush())

    def _add(self, piece):
        before = len(self.text)
        self.text += piece
        places = {word: self.text.find(word, self._start) for word in self._stops}
        ends = [place + len(word) for word, place in places.items() if place >= 0]
        if ends:
            self.text, self.stopped = self.text[: min(ends)], True
        return self.text[before:]


def _text_tensor(piece):
    return pb_utils.Tensor("text_output", np.array([piece.encode("utf-8")], dtype=object))


def _renamed(request, ours, theirs):
    tensor = pb_utils.get_input_tensor_by_name(request, ours)
    return [] if tensor is None else [pb_utils.Tensor(theirs, tensor.as_numpy())]


def _number(tensors, name, default):
    """A scalar of a request or a response."""
    find = pb_utils.get_input_tensor_by_name
    if isinstance(tensors, pb_utils.InferenceResponse):
        find = pb_utils.get_output_tensor_by_name
    tensor = find(tensors, name)
    return default if tensor is None else int(tensor.as_numpy().reshape(-1)[0])


def _flag(request, name, default=False):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else bool(tensor.as_numpy().reshape(-1)[0])


def _texts(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return [] if tensor is None else [item.decode("utf-8") for item in tensor.as_numpy().reshape(-1) if item]
