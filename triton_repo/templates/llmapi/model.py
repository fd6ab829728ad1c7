"""TensorRT-LLM's LLM API as a Triton model, under the names of NVIDIA's `llmapi` template: text in, text out.

A client that has a tokenizer, as the gateway does, sends `input_ids` and asks for `output_ids` instead; these inputs
and outputs, and those that go with them, are in addition to NVIDIA's. One event loop in a thread of its own runs every
request; `execute` only hands them over. What is served, and how, is in model.yaml beside this file: the arguments of
`LLM`, and `triton_config`.
"""

import asyncio
import collections
import contextlib
import ctypes
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
    "sampling_param_repetition_penalty": ("repetition_penalty", float),
    "sampling_param_min_tokens": ("min_tokens", int),
    "sampling_param_seed": ("seed", int),
    "sampling_param_best_of": ("best_of", int),
}

# Type of a guide -> name in GuidedDecodingParams.
GUIDES = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar", "structural_tag": "structural_tag"}

# Label -> value, from the statistics of a step.
REQUESTS = {
    "active": lambda step, batch: step["numActiveRequests"],
    "max": lambda step, batch: step["maxNumActiveRequests"],
    "scheduled": lambda step, batch: batch["numScheduledRequests"],
    "context": lambda step, batch: batch["numContextRequests"],
    # Of the C++ backend these are the active requests that the step left out. Here more wait to become active.
    "waiting": lambda step, batch: (
        step["numQueuedRequests"] + max(0, step["numActiveRequests"] - batch["numScheduledRequests"])
    ),
}
BATCHER = {
    "total_context_tokens": lambda step, batch: batch["numCtxTokens"],
    "generation_requests": lambda step, batch: batch["numGenRequests"],
    "paused_requests": lambda step, batch: batch["numPausedRequests"],
}
CACHE = {
    "max": lambda step, cache: cache["maxNumBlocks"],
    "free": lambda step, cache: cache["freeNumBlocks"],
    "used": lambda step, cache: cache["usedNumBlocks"],
    "tokens_per": lambda step, cache: cache["tokensPerBlock"],
    "reused": lambda step, cache: cache["reusedBlocks"],
    "fraction": lambda step, cache: cache["usedNumBlocks"] / max(1, cache["maxNumBlocks"]),
}
MEMORY = {
    "gpu": lambda step, part: step["gpuMemUsage"],
    "cpu": lambda step, part: step["cpuMemUsage"],
    "pinned": lambda step, part: step["pinnedMemUsage"],
}
# Name, description, label, part of the statistics, values.
FAMILIES = (
    ("nv_trt_llm_request_metrics", "TRT LLM request metrics", "request_type", "inflightBatchingStats", REQUESTS),
    ("nv_trt_llm_inflight_batcher_metrics", "TRT LLM inflight_batcher-specific metrics",
     "inflight_batcher_specific_metric", "inflightBatchingStats", BATCHER),
    ("nv_trt_llm_kv_cache_block_metrics", "TRT LLM KV cache block metrics", "kv_cache_block_type", "kvCacheStats",
     CACHE),
    ("nv_trt_llm_runtime_memory_metrics", "TRT LLM runtime memory metrics", "memory_type", "", MEMORY),
    ("nv_trt_llm_general_metrics", "General TRT LLM metrics", "general_type", "",
     {"iteration_counter": lambda step, part: step["iter"]}),
)  # fmt: skip
# Family of speculation, which is counted here: the engine tells of each step alone.
SPECULATION = "trtpipe_speculation"
DRAFTS = {
    "decode_steps": lambda part: part["numRequestsWithDraftTokens"],
    "draft_tokens": lambda part: part["numDraftTokens"],
    "accepted_draft_tokens": lambda part: part["numAcceptedTokens"],
}
# The engine tells of its steps alone: when the last request has ended, it does not say that none is left.
IDLE = {"active", "scheduled", "context", "waiting", *BATCHER}
LENGTHS = (("nv_llm_input_token_len", "total_input_tokens"), ("nv_llm_output_token_len", "total_output_tokens"))
BUCKETS = (10.0, 50.0, 100.0, 500.0, 1000.0)


class TritonPythonModel:
    def initialize(self, args):
        from tensorrt_llm import LLM, SamplingParams
        from tensorrt_llm.llmapi import GuidedDecodingParams

        self.sampling_params, self.guided_decoding_params = SamplingParams, GuidedDecodingParams
        self.adapters = _adapters(Path(__file__).parent / "lora")
        settings = yaml.safe_load((Path(__file__).parent / "model.yaml").read_text(encoding="utf-8"))
        triton = settings.pop("triton_config")
        self.decoupled = json.loads(args["model_config"])["model_transaction_policy"]["decoupled"]
        self.cancel_period = triton["cancellation_check_period_ms"] / 1000
        self.stats_period = triton["stats_check_period_ms"] / 1000
        self.max_queue_size = triton["max_queue_size"]
        self.max_batch_size = settings["max_batch_size"]
        # A relative path counts from the root of the model repository.
        settings["model"] = str(Path(args["model_repository"]).parent / settings["model"])
        self.bos = _bos(Path(settings["model"]))
        self.llm = LLM(**settings)
        self.metrics = _Metrics(args["model_name"], args["model_version"])
        self.answering = 0
        self.running = collections.defaultdict(set)  # request id -> tasks of the requests that have it
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self._report(), self.loop)

    def execute(self, requests):
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._serve(request, request.get_response_sender()), self.loop)

    def finalize(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.metrics.keep()
        self.llm.shutdown()

    async def _serve(self, request, sender):
        try:
            if _value(request, "stop", False):
                self._stop(request, sender)
                return
            if self.max_queue_size and self.answering >= self.max_batch_size + self.max_queue_size:
                # Triton's own queue stays empty, since execute returns at once.
                reason = f"Maximum queue size of {self.max_queue_size} has been reached, please try again later"
                _fail(sender, reason, pb_utils.TritonError.UNAVAILABLE)
                return
            identity, task = request.request_id(), asyncio.current_task()
            self.running[identity].add(task)
            self.answering += 1
            try:
                await self._generate(request, sender)
            finally:
                self.answering -= 1
                self.running[identity].discard(task)
                if not self.running[identity]:
                    del self.running[identity]
        except asyncio.CancelledError:
            _fail(sender, "the request was stopped", pb_utils.TritonError.CANCELLED)
        except ValueError as error:
            _fail(sender, str(error), pb_utils.TritonError.INVALID_ARG)
        except Exception as error:
            _fail(sender, str(error) or type(error).__name__)

    def _stop(self, request, sender):
        """A request whose `stop` is true ends all of the same id."""
        identity = request.request_id()
        if not identity:
            raise ValueError("Trying to stop a request but request ID is not provided")
        for task in self.running.get(identity, ()):
            task.cancel()
        sender.send(pb_utils.InferenceResponse([_texts("text_output", [""])]), flags=FINAL)

    async def _generate(self, request, sender):
        streaming = bool(_value(request, "streaming", False))
        if streaming and not self.decoupled:
            raise ValueError("Streaming is only supported if model is deployed using decoupled mode.")
        prompt, wanted = _prompt(request), set(request.requested_output_names())
        sampling, adapter = self._sampling(request, wanted, prompt), self._adapter(request)
        answer = self.llm.generate_async(prompt, sampling, lora_request=adapter, streaming=streaming)
        watch = asyncio.create_task(self._watch(sender, answer))
        finished = False
        try:
            async for part in answer:
                if streaming or part.finished:
                    finished = part.finished
                    tensors = _tensors(request, wanted, prompt, part.outputs[0], new=streaming)
                    if finished:
                        self.metrics.count(len(part.prompt_token_ids), len(part.outputs[0].token_ids))
                    # The last response with tensors has the final flag: a script cannot read one without any.
                    sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL if finished else 0)
            if not finished:
                sender.send(flags=FINAL)
        except BaseException:
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

    def _adapter(self, request):
        name = _value(request, "lora_name")
        if name is None:
            return None
        if name.decode("utf-8") not in self.adapters:
            raise ValueError(f"no adapter is called '{name.decode('utf-8')}'")
        return self.adapters[name.decode("utf-8")]

    def _sampling(self, request, wanted, prompt):
        chosen = {}
        if self.bos and isinstance(prompt, str) and prompt.startswith(self.bos):
            # A chat template writes the beginning-of-sequence token itself; a second one would change the answer.
            chosen["add_special_tokens"] = False
        for name, (theirs, kind) in SAMPLING.items():
            value = _value(request, name)
            if value is not None:
                chosen[theirs] = kind(value)
        stop = _array(request, "sampling_param_stop")
        if stop is not None:
            chosen["stop"] = [word.decode("utf-8") for word in stop if word]
        end = _value(request, "sampling_param_end_id")
        if end is not None:
            chosen.update({"ignore_eos": True} if end < 0 else {"end_id": int(end)})
        ends = _array(request, "sampling_param_stop_token_ids")
        if ends is not None:
            chosen["stop_token_ids"] = ends.tolist()
        if _value(request, "return_log_probs", False):
            chosen["logprobs"] = 1
        kind = _value(request, "guided_decoding_guide_type", b"").decode("utf-8")
        if kind:
            chosen["guided_decoding"] = self._guided_decoding(kind, _value(request, "guided_decoding_guide", b""))
        # Text that nobody asks for would be made for nothing.
        return self.sampling_params(**chosen, detokenize="text_output" in wanted)

    def _guided_decoding(self, kind, guide):
        if kind == "json":
            return self.guided_decoding_params(json_object=True)
        if kind not in GUIDES:
            raise ValueError(f"guided_decoding_guide: no type of a guide is called '{kind}'")
        return self.guided_decoding_params(**{GUIDES[kind]: guide.decode("utf-8")})

    async def _report(self):
        """Publish the engine's statistics as metrics while the model is loaded."""
        try:
            await asyncio.gather(self._read_statistics(), self._publish_metrics())
        except Exception as error:  # a server without these metrics is better than none
            pb_utils.Logger.log_warn(f"the model has no metrics: {type(error).__name__}: {error}")

    async def _read_statistics(self):
        """Keep the statistics of the engine's last step."""
        while True:
            async for statistics in self.llm.get_stats_async(timeout=1):
                self.metrics.take(statistics)
            await asyncio.sleep(self.stats_period)

    async def _publish_metrics(self):
        while True:
            await asyncio.sleep(self.stats_period)
            self.metrics.publish(idle=self.answering == 0)


class _Metrics:
    """Metric families of NVIDIA's C++ backend, so that dashboards and autoscaling rules need no change."""

    def __init__(self, model, version):
        self.labels = {"model": model, "version": version}
        self.statistics = None
        gauge, histogram = pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.HISTOGRAM
        self.families = {
            name: pb_utils.MetricFamily(name=name, description=description, kind=gauge)
            for name, description, *_ in FAMILIES
        }
        self.drafts = dict.fromkeys(DRAFTS, 0)
        self.gauges = {}  # (label, value) -> the metric, and what it was set to
        self.families[SPECULATION] = pb_utils.MetricFamily(
            name=SPECULATION, description="Speculative decoding, so far", kind=gauge
        )
        self.lengths = []
        for name, value in LENGTHS:
            family = pb_utils.MetricFamily(name=name, description="TRT LLM response metrics", kind=histogram)
            self.families[name] = family  # a metric lives as long as its family
            labels = {**self.labels, "response_metric_type": value}
            self.lengths.append(family.Metric(labels=labels, buckets=list(BUCKETS)))

    def count(self, *lengths):
        """A request has ended: the tokens of its prompt and of its answer."""
        for metric, tokens in zip(self.lengths, lengths, strict=True):
            metric.observe(float(tokens))

    def take(self, statistics):
        """The statistics of a step."""
        self.statistics = statistics
        part = statistics.get("specDecodingStats") or {}
        with contextlib.suppress(KeyError, TypeError):  # a release that does not tell has no metric
            for key, read in DRAFTS.items():
                self.drafts[key] += int(read(part))

    def publish(self, idle):
        """Set the gauges to the statistics of the last step; before the first one there are none."""
        step = self.statistics
        if step is None:
            return
        for name, _, label, part, values in FAMILIES:
            for value, read in values.items():
                try:
                    number = float(read(step, step[part] if part else None))
                except (KeyError, TypeError):  # what a release does not tell has no metric
                    continue
                self._set(name, label, value, 0.0 if idle and value in IDLE else number)
        if any(self.drafts.values()):
            for key, number in self.drafts.items():
                self._set(SPECULATION, "speculation_type", key, float(number))

    def keep(self):
        """Never delete these metrics, not even when the interpreter ends: the server has one metric for equal names and
        labels, and deleted by this stub it is gone for the version that has replaced it (triton-inference-server/server
        issue 8663)."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def _set(self, family, label, value, number):
        """Each setting is a message to the server, so that a value that stays is not set again."""
        if (label, value) not in self.gauges:
            metric = self.families[family].Metric(labels={**self.labels, label: value})
            self.gauges[label, value] = [metric, None]
        metric, before = self.gauges[label, value]
        if number != before:
            metric.set(number)
            self.gauges[label, value][1] = number


def _adapters(folder):
    """Requests of the LLM API by the names of the adapters beside this file, whose folders have their numbers."""
    if not folder.is_dir():
        return {}
    from tensorrt_llm.executor.request import LoRARequest

    out = {}
    for path in sorted(folder.iterdir()):
        if path.name.isdigit():
            name = json.loads((path / "adapter.json").read_text(encoding="utf-8"))["name"]
            out[name] = LoRARequest(name, int(path.name), str(path.resolve()))
    return out


def _bos(folder):
    """The beginning-of-sequence text of a tokenizer, whose config has it plain or as an object; None without one."""
    path = folder / "tokenizer_config.json"
    token = json.loads(path.read_text(encoding="utf-8")).get("bos_token") if path.is_file() else None
    return token.get("content") if isinstance(token, dict) else token


def _prompt(request):
    """A text, or a list of token ids."""
    ids, text = _array(request, "input_ids"), _array(request, "text_input")
    if (ids is None) == (text is None):
        raise ValueError("give text_input or input_ids")
    if ids is not None:
        return ids.tolist()
    if text.size != 1:
        raise ValueError("text_input must hold exactly one prompt")
    return text[0].decode("utf-8")


def _tensors(request, wanted, prompt, output, new):
    """The tensors of a response, those that the request wants; `new` ones hold what has come since the last."""
    out = []
    if "text_output" in wanted:
        text = output.text_diff if new else output.text
        keep_prompt = not new and not _value(request, "sampling_param_exclude_input_from_output", True)
        out.append(_texts("text_output", [prompt + text if keep_prompt and isinstance(prompt, str) else text]))
    # A client that sends text and names no outputs gets NVIDIA's alone.
    if "output_ids" in wanted and not isinstance(prompt, str):
        ids = output.token_ids_diff if new else output.token_ids
        out.append(pb_utils.Tensor("output_ids", np.array(ids, dtype=np.int32)))
        if "output_log_probs" in wanted and _value(request, "return_log_probs", False):
            entries = output.logprobs_diff if new else output.logprobs
            if any(token not in entry for token, entry in zip(ids, entries, strict=False)):
                raise RuntimeError("this release of TensorRT-LLM gave no log-probability of a token that it chose")
            values = [entry[token].logprob for token, entry in zip(ids, entries, strict=False)]
            out.append(pb_utils.Tensor("output_log_probs", np.array(values, dtype=np.float32)))
    for name in ("finish_reason", "stop_reason"):
        if name in wanted and _value(request, f"return_{name}", False):
            out.append(_texts(name, [str(getattr(output, name))]))
    if "cumulative_logprob" in wanted and _value(request, "return_cumulative_logprob", False):
        out.append(pb_utils.Tensor("cumulative_logprob", np.array([output.cumulative_logprob], dtype=np.float32)))
    return out


def _array(request, name):
    """The elements of an input; None without any."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None or not tensor.as_numpy().size else tensor.as_numpy().reshape(-1)


def _value(request, name, default=None):
    array = _array(request, name)
    return default if array is None else array[0]


def _texts(name, values):
    return pb_utils.Tensor(name, np.array([value.encode("utf-8") for value in values], dtype=object))


def _fail(sender, reason, code=None):
    error = pb_utils.TritonError(reason) if code is None else pb_utils.TritonError(reason, code)
    sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
