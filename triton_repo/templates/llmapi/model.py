"""TensorRT-LLM's LLM API as a Triton model: text in, text out, under the names of NVIDIA's `llmapi` template.

One event loop in a thread of its own runs every request; `execute` only hands them over. What is served, and how, is
in model.yaml beside this file: the arguments of `LLM`, and `triton_config`.
"""

import asyncio
import json
import threading
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
import yaml

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# Input -> name in SamplingParams, and how it is read.
SAMPLING = {
    "sampling_param_max_tokens": ("max_tokens", int),
    "sampling_param_temperature": ("temperature", float),
    "sampling_param_top_k": ("top_k", int),
    "sampling_param_top_p": ("top_p", float),
    "sampling_param_frequency_penalty": ("frequency_penalty", float),
    "sampling_param_presence_penalty": ("presence_penalty", float),
    "sampling_param_seed": ("seed", int),
    "sampling_param_best_of": ("best_of", int),
}


class TritonPythonModel:
    def initialize(self, args):
        from tensorrt_llm import LLM, SamplingParams

        self.sampling_params = SamplingParams
        settings = yaml.safe_load((Path(__file__).parent / "model.yaml").read_text(encoding="utf-8"))
        triton = settings.pop("triton_config")
        self.decoupled = json.loads(args["model_config"])["model_transaction_policy"]["decoupled"]
        self.cancel_period = triton["cancellation_check_period_ms"] / 1000
        # A relative path counts from the root of the model repository.
        settings["model"] = str(Path(args["model_repository"]).parent / settings["model"])
        self.llm = LLM(**settings)
        self.running = {}  # request id -> task, for those that have one
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def execute(self, requests):
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._serve(request, request.get_response_sender()), self.loop)

    def finalize(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.llm.shutdown()

    async def _serve(self, request, sender):
        try:
            if _value(request, "stop", False):
                self._stop(request, sender)
                return
            identity = request.request_id()
            if identity:
                self.running[identity] = asyncio.current_task()
            try:
                await self._generate(request, sender)
            finally:
                self.running.pop(identity, None)
        except asyncio.CancelledError:
            _fail(sender, "the request was stopped", pb_utils.TritonError.CANCELLED)
        except Exception as error:
            _fail(sender, str(error))

    def _stop(self, request, sender):
        """A request whose `stop` is true ends the one of the same id."""
        identity = request.request_id()
        if not identity:
            raise ValueError("Trying to stop a request but request ID is not provided")
        task = self.running.get(identity)
        if task is not None:
            task.cancel()
        sender.send(pb_utils.InferenceResponse([_texts("text_output", [""])]), flags=FINAL)

    async def _generate(self, request, sender):
        streaming = bool(_value(request, "streaming", False))
        if streaming and not self.decoupled:
            raise ValueError("Streaming is only supported if model is deployed using decoupled mode.")
        prompt = _value(request, "text_input")
        if prompt is None:
            raise ValueError("text_input is required")
        answer = self.llm.generate_async(prompt.decode("utf-8"), self._sampling(request), streaming=streaming)
        watch = asyncio.create_task(self._watch(sender, answer))
        keep_prompt = not _value(request, "sampling_param_exclude_input_from_output", True)
        try:
            if not streaming:
                done = await answer
                text = (prompt.decode("utf-8") if keep_prompt else "") + done.outputs[0].text
                sender.send(self._response(request, done.outputs[0], text), flags=FINAL)
                return
            async for part in answer:
                sender.send(self._response(request, part.outputs[0], part.outputs[0].text_diff))
            sender.send(flags=FINAL)
        except asyncio.CancelledError:
            answer.abort()
            raise
        finally:
            # Nobody may ask the sender after its final response.
            watch.cancel()

    async def _watch(self, sender, answer):
        """End the request in the engine when its client has gone away."""
        while True:
            await asyncio.sleep(self.cancel_period)
            if sender.is_cancelled():
                answer.abort()
                return

    def _sampling(self, request):
        chosen = {}
        for name, (theirs, kind) in SAMPLING.items():
            value = _value(request, name)
            if value is not None:
                chosen[theirs] = kind(value)
        stop = pb_utils.get_input_tensor_by_name(request, "sampling_param_stop")
        if stop is not None:
            chosen["stop"] = [word.decode("utf-8") for word in stop.as_numpy().reshape(-1) if word]
        return self.sampling_params(**chosen)

    def _response(self, request, output, text):
        wanted = request.requested_output_names()
        tensors = [_texts("text_output", [text])]
        if "finish_reason" in wanted and _value(request, "return_finish_reason", False):
            tensors.append(_texts("finish_reason", [str(output.finish_reason)]))
        if "stop_reason" in wanted and _value(request, "return_stop_reason", False):
            tensors.append(_texts("stop_reason", [str(output.stop_reason)]))
        if "cumulative_logprob" in wanted and _value(request, "return_cumulative_logprob", False):
            value = np.array([output.cumulative_logprob], dtype=np.float32)
            tensors.append(pb_utils.Tensor("cumulative_logprob", value))
        return pb_utils.InferenceResponse(tensors)


def _value(request, name, default=None):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None or not tensor.as_numpy().size else tensor.as_numpy().reshape(-1)[0]


def _texts(name, values):
    return pb_utils.Tensor(name, np.array([value.encode("utf-8") for value in values], dtype=object))


def _fail(sender, reason, code=None):
    error = pb_utils.TritonError(reason) if code is None else pb_utils.TritonError(reason, code)
    sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
