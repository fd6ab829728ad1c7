"""A Triton backend named `tensorrtllm`, written in Python: the tensors, parameters and manners of NVIDIA's C++
backend, in front of an engine that runs in a process of its own.

The stub stays thin: it turns requests into messages and messages into responses. Several instances may share the
engine, since one hands on some 10,000 tokens a second. The engine's path and options come from config.pbtxt, which is
the file production loads.
Cancelled clients are noticed every `cancellation_check_period_ms`. An engine process that dies is reported to every
waiting request at once and started again.
"""

import contextlib
import ctypes
import itertools
import json
import os
import queue
import secrets
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from trtpipe_engine import Engine
from trtpipe_in_flight import InFlight

# Sending a response waits about 0.1 ms for the server: several threads, one per request at a time, send together.
SENDERS = 4
# An engine that dies this often in a row without an answer is broken, not unlucky.
MAX_RESTARTS = 3
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# Parameter of a request that tensorrt_llm_bls, a script, has made.
SCRIPT = "trtpipe_script"
# Metric family that NVIDIA's backend does not have.
SPECULATION = "trtpipe_speculation"
RESTARTING = "the engine process is being started again; try again in a moment"
# Most sequences of a prompt: each is a request of its own in memory.
MOST_SEQUENCES = 1024

# Inputs that change the answer and that no engine in Python has code for: refused, never ignored.
UNSUPPORTED_INPUTS = (
    "encoder_input_features",
    "draft_input_ids",
    "draft_logits",
    "prompt_embedding_table",
    "cross_attention_mask",
    "mrope_rotary_cos_sin",
    "lora_weights",
    "context_phase_params",
    "lookahead_window_size",
)
UNSUPPORTED_PARAMETERS = (
    "encoder_model_path",
    "max_attention_window_size",
    "sink_token_length",
    "medusa_choices",
    "eagle_choices",
    "lookahead_window_size",
)


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        for name in UNSUPPORTED_PARAMETERS:
            if _given(parameters, name):
                raise pb_utils.TritonModelException(f"parameter {name} is not supported by this runtime")
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.exclude_input = _boolean(parameters, "exclude_input_in_output", False)
        self.normalize_log_probs = _boolean(parameters, "normalize_log_probs", True)
        self.logits_dtype = np.float32
        self.cancel_period = int(_given(parameters, "cancellation_check_period_ms", "100")) / 1000
        policy = config.get("dynamic_batching", {}).get("default_queue_policy", {})
        self.max_queue_size = int(policy.get("max_queue_size", 0))
        self.engine, passport = _engine(parameters, args["model_repository"], self.max_queue_size)
        self.speculates = bool(passport["build_config"].get("speculative_decoding_mode"))
        self.metrics = _Metrics(args["model_name"], args["model_version"])
        self.in_flight = InFlight(args["model_name"])
        self.numbers = itertools.count()
        self.lock = threading.Lock()
        self.sequences = {}  # engine's number -> _Sequence
        self.senders = [_Sender() for _ in range(SENDERS)]
        self.closing = threading.Event()
        self.fruitless = 0  # engines that died without an answer since the last one
        self.absent = RESTARTING  # what is said while the engine cannot be reached
        self.engine.start()
        self.receiver = threading.Thread(target=self._receive, daemon=True)
        self.receiver.start()
        threading.Thread(target=self._watch_clients, daemon=True).start()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                if _scalar(request, "stop", False):
                    self._stop(request, sender)
                else:
                    self._start(request, sender)
            except _Refused as error:
                _fail(sender, str(error), error.code)
            except OSError:
                _fail(sender, self.absent, pb_utils.TritonError.UNAVAILABLE)
            except Exception as error:  # one request's fault must not fail those that came with it
                _fail(sender, f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)

    def finalize(self):
        self.closing.set()
        self.engine.stop()
        self.receiver.join()
        self.metrics.keep()
        self.in_flight.close()

    # -- requests ----------------------------------------------------------------------------------------------

    def _start(self, request, sender):
        for name in UNSUPPORTED_INPUTS:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is not None and tensor.as_numpy().size:
                raise _Refused(f"input {name} is not supported by this runtime")
        if _scalar(request, "beam_width", 1) != 1:
            raise _Refused("beam_width must be 1: this runtime has no beam search")
        streaming = bool(_scalar(request, "streaming", False))
        if streaming and not self.decoupled:
            raise _Refused("Streaming is only supported if model is deployed using decoupled mode.")
        ids = _array(request, "input_ids")
        lengths = _array(request, "input_lengths")
        if ids is None or lengths is None:
            raise _Refused("input_ids and input_lengths are required")
        ids = ids.reshape(len(lengths), -1)
        copies = int(_scalar(request, "num_return_sequences", 1))
        if not 1 <= copies <= MOST_SEQUENCES:
            raise _Refused(f"num_return_sequences must be 1 to {MOST_SEQUENCES}")
        if len(ids) * copies > 1 and not self.decoupled:
            raise _Refused("several sequences per request need decoupled mode")
        answer = _Answer(request, sender, streaming, self, rows=len(ids), copies=copies)
        submissions = []
        for row in range(len(ids)):
            if not 1 <= int(lengths.reshape(-1)[row]) <= ids.shape[1]:
                raise _Refused(f"input_lengths is {int(lengths.reshape(-1)[row])}, input_ids holds {ids.shape[1]}")
            for copy in range(copies):
                message, blob = _message(request, ids[row], int(lengths.reshape(-1)[row]), row, copy)
                message["id"] = next(self.numbers)
                message["names"] = [answer.request_id, str(answer.key)]
                sequence = _Sequence(answer, row, copy, message["prompt"])
                submissions.append((message, blob, sequence))
        answer.begin()
        with self.lock:
            for message, _, sequence in submissions:
                self.sequences[message["id"]] = sequence
        for message, blob, _ in submissions:
            try:
                self.engine.connection.send(message, blob)
            except OSError:
                # The engine died. Either the reason of its end reaches this sequence, or it was written before.
                with self.lock:
                    gone = self.sequences.pop(message["id"], None)
                if gone is not None:
                    answer.fail(self.absent, pb_utils.TritonError.UNAVAILABLE)

    def _stop(self, request, sender):
        """A request whose `stop` is true ends the one that has its id as id or as key, and gets one empty final
        response."""
        name = request.request_id()
        if not name:
            raise _Refused("Trying to stop a request but request ID is not provided")
        # It may have come through another instance.
        self.engine.connection.send({"type": "stop", "name": name})
        sender.send(pb_utils.InferenceResponse(), flags=FINAL)

    def _watch_clients(self):
        while not self.closing.wait(self.cancel_period):
            with self.lock:
                waiting = list(self.sequences.items())
            for number, sequence in waiting:
                if not sequence.cancelled and sequence.answer.is_cancelled():
                    sequence.cancelled = True
                    with contextlib.suppress(OSError):  # the receiving thread reports the engine's end
                        self.engine.connection.send({"type": "cancel", "id": number})

    # -- the engine's messages ---------------------------------------------------------------------------------

    def _receive(self):
        while not self.closing.is_set():
            received = self.engine.connection.receive()
            if received is None:
                if self.closing.is_set():
                    return
                self._engine_died()
                continue
            message, blob = received
            if message["type"] == "step":
                if message["tokens"] or message["outputs"]:
                    self.fruitless = 0
                for number, tokens, reused, allocated in message["tokens"]:
                    counts = {"reused_blocks": reused, "allocated_blocks": allocated}
                    self._deliver({"id": number, "tokens": tokens, "finish": None, **counts}, blob)
                for entry in message["outputs"]:
                    self._deliver(entry, blob)
                if "stats" in message:
                    self.metrics.update(message["stats"])
            elif message["type"] == "refused":
                self._refuse(message)
            elif message["type"] == "failed":
                self.engine.reason = message["error"]

    def _refuse(self, message):
        with self.lock:
            answer = self.sequences.pop(message["id"]).answer
            others = [number for number, sequence in self.sequences.items() if sequence.answer is answer]
        if message["full"]:
            # Triton's own queue stays empty, since execute returns at once: the bound is kept by the engine process.
            reason = f"Maximum queue size of {self.max_queue_size} has been reached, please try again later"
            fault = (reason, pb_utils.TritonError.UNAVAILABLE)
        else:
            code = pb_utils.TritonError.INTERNAL if message.get("failed") else pb_utils.TritonError.INVALID_ARG
            fault = (message["error"], code)
        self.senders[answer.serial % SENDERS].put(answer.fail, *fault)
        with contextlib.suppress(OSError):  # the engine's end comes next
            for number in others:
                self.engine.connection.send({"type": "cancel", "id": number})

    def _deliver(self, entry, blob):
        number = entry["id"]
        with self.lock:
            sequence = self.sequences.pop(number) if entry["finish"] else self.sequences[number]
        sequence.generated += len(entry["tokens"])
        if entry["finish"]:
            # Here and not where responses are sent: this thread alone uses the metrics, and ends before they do.
            self.metrics.count(len(sequence.prompt), sequence.generated)
        self._sender(sequence).put(sequence.extend, entry, blob)

    def _sender(self, sequence):
        # Always the same thread for one request, so that its responses keep their order.
        return self.senders[sequence.answer.serial % SENDERS]

    def _engine_died(self):
        """Report to all who wait, then start again, or end this process when that is of no use."""
        reason = self.engine.exit_reason()
        with self.lock:
            waiting, self.sequences = list(self.sequences.values()), {}
        for sequence in waiting:
            self._sender(sequence).put(sequence.answer.fail, reason, pb_utils.TritonError.UNAVAILABLE)
        self.fruitless += 1
        if self.fruitless > MAX_RESTARTS:
            self._leave(f"{reason}; it died {self.fruitless} times without an answer and is not started again")
        pb_utils.Logger.log_error(f"{reason}; starting it again")
        try:
            self.engine.start()
        except pb_utils.TritonModelException as error:
            if not self.closing.is_set():  # else the model is being unloaded
                self._leave(str(error))

    def _leave(self, reason):
        """End this process once everybody has been told. The watchdog of `trtpipe serve` then takes the model out of
        service and loads it again; as long as this process lives Triton calls the model ready."""
        self.absent = reason
        pb_utils.Logger.log_error(reason)
        for sender in self.senders:
            sender.close()
        os._exit(1)


class _Refused(Exception):
    """What a client is told of its request, and the code it gets."""

    def __init__(self, message, code=None):
        super().__init__(message)
        self.code = pb_utils.TritonError.INVALID_ARG if code is None else code


class _Sender:
    """A thread that sends responses in the order they are put."""

    def __init__(self):
        self.queue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def put(self, call, *args):
        self.queue.put((call, args))

    def close(self):
        """Send what has been put; not for long, since a client of Triton's may take nothing any more."""
        self.queue.put(None)
        self.thread.join(timeout=2.0)

    def _run(self):
        while (item := self.queue.get()) is not None:
            call, args = item
            try:
                call(*args)
            except Exception as error:  # a client that went away must not end the thread
                pb_utils.Logger.log_warn(f"response not sent: {error}")


class _Answer:
    """One Triton request: what it wants back, and how many of its sequences still run."""

    serials = itertools.count()

    def __init__(self, request, sender, streaming, model, rows, copies):
        self.serial = next(self.serials)
        self.request_id = request.request_id()
        # Clients may give requests the same id; the text model of an ensemble knows each by this.
        self.key = secrets.randbits(63)
        self.sender = sender
        self.streaming = streaming
        self.wanted = set(request.requested_output_names())
        self.normalize_log_probs = model.normalize_log_probs
        self.speculates = model.speculates
        exclude = _scalar(request, "exclude_input_in_output", None)
        self.exclude_input = model.exclude_input if exclude is None else bool(exclude)
        self.flags = {
            name: bool(_scalar(request, f"return_{name}", False))
            for name in (
                "log_probs",
                "context_logits",
                "generation_logits",
                "prompt_log_probs",
                "perf_metrics",
                "num_input_tokens",
                "num_output_tokens",
            )
        }
        self.rows, self.copies = rows, copies
        self.running = rows * copies
        self.in_script = bool(json.loads(request.parameters()).get(SCRIPT))
        self.in_flight = model.in_flight
        self.lock = threading.Lock()
        self.closed = False
        self.begun = False  # a response has been sent

    def begin(self):
        self.in_flight.add(1, self.in_script)

    def send(self, tensors, finished):
        if finished:
            self.running -= 1
        # The last response that carries tensors has the final flag: BLS models cannot read an empty one.
        self._send(pb_utils.InferenceResponse(_select(self.wanted, tensors)), final=self.running == 0)

    def fail(self, reason, code):
        with self.lock:
            if not self.closed:
                self.closed = True
                try:
                    _fail(self.sender, reason, code, separate_final=self.in_script and self.begun)
                finally:
                    self.in_flight.add(-1, self.in_script)

    def is_cancelled(self):
        """Whether the client has gone away. After the final response nobody may ask: the server would crash."""
        with self.lock:
            return not self.closed and self.sender.is_cancelled()

    def _send(self, response, final):
        with self.lock:
            if not self.closed:
                self.closed, self.begun = final, True
                try:
                    self.sender.send(response, flags=FINAL if final else 0)
                finally:
                    if final:
                        self.in_flight.add(-1, self.in_script)


class _Sequence:
    """One sequence in the engine, and the tokens of it that have not been sent yet."""

    def __init__(self, answer, row, copy, prompt):
        self.answer = answer
        self.row, self.copy = row, copy
        self.prompt = prompt
        self.cancelled = False
        self.tokens, self.log_probs, self.logits = [], [], []
        self.context_logits = self.prompt_log_probs = None
        self.count = 0  # tokens sent
        self.generated = 0  # tokens received from the engine
        self.arrival = time.monotonic_ns()
        self.first_scheduled = self.first_token = self.last_token = 0
        self.reused = self.allocated = 0

    def extend(self, entry, blob):
        now = time.monotonic_ns()
        # The time of the engine process, which has this machine's clock; 0 from a runtime that does not know it.
        self.first_scheduled = self.first_scheduled or entry.get("scheduled_ns", 0)
        if entry["tokens"]:
            self.first_token = self.first_token or now
            self.last_token = now
        self.tokens += entry["tokens"]
        self.count += len(entry["tokens"])
        self.log_probs += entry.get("log_probs", [])
        self.reused, self.allocated = entry["reused_blocks"], entry["allocated_blocks"]
        self.cum_log_prob = entry.get("cum_log_prob", 0.0)
        if "context_logits" in entry:
            self.context_logits = _logits(entry["context_logits"], blob)
        if "prompt_log_probs" in entry:
            offset, rows, width = entry["prompt_log_probs"]
            values = np.frombuffer(blob, np.float32, count=rows * width, offset=offset).reshape(rows, width)
            self.prompt_log_probs = values, np.frombuffer(blob, np.int32, count=width, offset=offset + values.nbytes)
        if "generation_logits" in entry:
            self.logits.append(_logits(entry["generation_logits"], blob))
        finished = bool(entry["finish"])
        if finished or (self.answer.streaming and self.tokens):
            self.answer.send(self._tensors(finished), finished)
            self.tokens, self.log_probs, self.logits, self.prompt_log_probs = [], [], [], None

    def _tensors(self, finished):
        """Every tensor this response can carry; the batch dimension is 1."""
        answer, flags = self.answer, self.answer.flags
        ids = self.tokens if answer.streaming or answer.exclude_input else self.prompt + self.tokens
        out = {
            "output_ids": np.array(ids, np.int32).reshape(1, 1, -1),
            "sequence_length": np.array([[len(ids)]], np.int32),
        }
        if "request_key" in answer.wanted:
            out["request_key"] = np.array([[answer.key]], np.uint64)
            out["last_response"] = np.array([[finished]])
        if answer.rows > 1:
            out["batch_index"] = np.array([[self.row]], np.int32)
        if answer.copies > 1:
            out["sequence_index"] = np.array([[self.copy]], np.int32)
        if flags["log_probs"]:
            cumulative = self.cum_log_prob
            if answer.normalize_log_probs and self.count:
                cumulative /= self.count
            out["cum_log_probs"] = np.array([[cumulative]], np.float32)
            out["output_log_probs"] = np.array(self.log_probs, np.float32).reshape(1, 1, -1)
        if flags["context_logits"] and self.context_logits is not None:
            out["context_logits"] = self.context_logits[None]
        if flags["generation_logits"] and self.logits:
            out["generation_logits"] = np.concatenate(self.logits)[None, None]
        if self.prompt_log_probs is not None:
            values, likeliest = self.prompt_log_probs
            out["prompt_log_probs"], out["prompt_likeliest"] = values[None], likeliest[None]
        if flags["num_input_tokens"]:
            out["num_input_tokens"] = np.array([[len(self.prompt)]], np.int32)
        if flags["num_output_tokens"]:
            out["num_output_tokens"] = np.array([[len(self.tokens)]], np.int32)
        if flags["perf_metrics"]:
            counts = {
                "kv_cache_alloc_new_blocks": self.allocated,
                "kv_cache_reused_blocks": self.reused,
                "kv_cache_alloc_total_blocks": self.allocated + self.reused,
            }
            out.update({name: np.array([[value]], np.int32) for name, value in counts.items()})
            times = {
                "arrival_time_ns": self.arrival,
                "first_scheduled_time_ns": self.first_scheduled,
                "first_token_time_ns": self.first_token,
                "last_token_time_ns": self.last_token,
            }
            out.update({name: np.array([[value]], np.int64) for name, value in times.items()})
            if not answer.speculates:  # drafts are counted for all requests together, in the metrics
                out["acceptance_rate"] = np.zeros((1, 1), np.float32)
                for name in ("total_accepted_draft_tokens", "total_draft_tokens"):
                    out[name] = np.zeros((1, 1), np.int32)
        return out


class _Metrics:
    """The metric families of NVIDIA's backend, so that dashboards and autoscaling rules need no change."""

    FAMILIES = (
        ("nv_trt_llm_request_metrics", "TRT LLM request metrics", "request_type",
         {"active": "active_requests", "max": "max_requests", "scheduled": "scheduled_requests",
          "context": "context_requests", "waiting": "waiting_requests"}),
        ("nv_trt_llm_kv_cache_block_metrics", "TRT LLM KV cache block metrics", "kv_cache_block_type",
         {"max": "kv_max_blocks", "free": "kv_free_blocks", "used": "kv_used_blocks",
          "tokens_per": "tokens_per_block", "reused": "kv_reused_blocks", "fraction": "kv_fraction"}),
        ("nv_trt_llm_inflight_batcher_metrics", "TRT LLM inflight_batcher-specific metrics",
         "inflight_batcher_specific_metric",
         {"total_context_tokens": "total_context_tokens", "generation_requests": "generation_requests",
          "paused_requests": "paused_requests"}),
        ("nv_trt_llm_general_metrics", "General TRT LLM metrics", "general_type", {"iteration_counter": "iteration"}),
    )  # fmt: skip
    LENGTHS = (("nv_llm_input_token_len", "total_input_tokens"), ("nv_llm_output_token_len", "total_output_tokens"))
    BUCKETS = (10.0, 50.0, 100.0, 500.0, 1000.0)

    def __init__(self, model, version):
        self.gauges = []  # (metric, key of the engine's statistics, family: the metric lives as long as it)
        for name, description, label, series in self.FAMILIES:
            family = pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.GAUGE)
            for value, key in series.items():
                metric = family.Metric(labels={"model": model, "version": version, label: value})
                self.gauges.append((metric, key, family))
        self.lengths = []  # (metric, family)
        for name, value in self.LENGTHS:
            kind = pb_utils.MetricFamily.HISTOGRAM
            family = pb_utils.MetricFamily(name=name, description="TRT LLM response metrics", kind=kind)
            labels = {"model": model, "version": version, "response_metric_type": value}
            self.lengths.append((family.Metric(labels=labels, buckets=list(self.BUCKETS)), family))
        self.labels = {"model": model, "version": version}
        self.speculation = {}  # key of the engine's statistics -> (metric, family); empty for an engine without

    def count(self, *lengths):
        """A request has ended: the tokens of its prompt and of its answer."""
        for (metric, _), tokens in zip(self.lengths, lengths, strict=True):
            metric.observe(float(tokens))

    def update(self, stats):
        stats["kv_fraction"] = stats["kv_used_blocks"] / max(1, stats["kv_max_blocks"])
        for metric, key, _ in self.gauges:
            metric.set(float(stats[key]))
        if "draft_tokens" in stats:
            self.speculation = self.speculation or self._speculation()
            for key, (metric, _) in self.speculation.items():
                metric.set(float(stats[key]))

    def _speculation(self):
        kind = pb_utils.MetricFamily.GAUGE
        family = pb_utils.MetricFamily(name=SPECULATION, description="Speculative decoding, so far", kind=kind)
        return {
            key: (family.Metric(labels={**self.labels, "speculation_type": key}), family)
            for key in ("decode_steps", "draft_tokens", "accepted_draft_tokens")
        }

    def keep(self):
        """Never delete these metrics, not even when the interpreter ends.

        The server has one metric for equal names and labels. Deleted by one stub, it is gone for the others, which
        then write to freed memory: another instance, or the version that has replaced this one
        (triton-inference-server/server issue 8663). So the metrics of an unloaded model keep their last values.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


def _engine(parameters, model_repository, max_queue_size):
    """The engine, and its passport."""
    path = parameters.get("gpt_model_path", "")
    # A relative path counts from the root of the model repository.
    folder = Path(model_repository).parent / path
    if not path or not (folder / "config.json").is_file():
        raise pb_utils.TritonModelException(f"gpt_model_path '{path}' holds no engine (looked in {folder})")
    options = {
        "policy": _given(parameters, "batch_scheduler_policy", "guaranteed_no_evict"),
        "enable_kv_cache_reuse": _boolean(parameters, "enable_kv_cache_reuse", True),
        "enable_chunked_context": _boolean(parameters, "enable_chunked_context", False),
        "stats_check_period_ms": int(_given(parameters, "stats_check_period_ms", "100")),
    }
    if _given(parameters, "guided_decoding_backend"):
        options["guided_decoding"] = _guided_decoding(parameters, Path(model_repository).parent)
    tokens = parameters.get("max_tokens_in_paged_kv_cache", "")
    if tokens.isdigit():
        options["kv_cache_tokens"] = int(tokens)
    if _given(parameters, "kv_cache_free_gpu_mem_fraction"):
        options["kv_cache_free_gpu_mem_fraction"] = float(parameters["kv_cache_free_gpu_mem_fraction"])
    if _given(parameters, "lora_prefetch_dir"):
        # Not only at the start: the engine process looks into the folder at each request that names an adapter.
        options["adapters"] = str(Path(model_repository).parent / parameters["lora_prefetch_dir"])
    passport = json.loads((folder / "passport.json").read_text(encoding="utf-8"))
    if passport["sm"] is None:
        options["device"] = "cpu"
    host = parameters.get("kv_cache_host_memory_bytes", "")
    if host.isdigit() and int(host) and passport["runtime"] == "vllm":
        options["kv_cache_host_memory_bytes"] = int(host)
    if max_queue_size:
        # Not from config.json, which says it of compiled engines alone.
        options["max_requests"] = int(passport["build_config"]["max_batch_size"]) + max_queue_size
    return Engine(folder, options), passport


def _guided_decoding(parameters, root):
    """Paths of what guided decoding needs, by the name of the runtime's option; as in the C++ backend, xgrammar is the
    only kind."""
    if parameters["guided_decoding_backend"] != "xgrammar":
        raise pb_utils.TritonModelException("guided_decoding_backend must be xgrammar")
    found = {}
    for option, name in (("tokenizer_info", "xgrammar_tokenizer_info_path"), ("tokenizer_dir", "tokenizer_dir")):
        found[option] = str(root / parameters.get(name, ""))
        if not parameters.get(name) or not Path(found[option]).exists():
            raise pb_utils.TritonModelException(f"{name} '{parameters.get(name, '')}' is not there")
    return found


def _message(request, ids, length, row, copy):
    """The engine's `submit` message for one row of a request, and the logit bias as bytes."""
    sampling = {
        "temperature": _scalar(request, "temperature", None, row),
        "top_k": _scalar(request, "runtime_top_k", None, row),
        "top_p": _scalar(request, "runtime_top_p", None, row),
        "repetition_penalty": _scalar(request, "repetition_penalty", None, row),
        "presence_penalty": _scalar(request, "presence_penalty", None, row),
        "frequency_penalty": _scalar(request, "frequency_penalty", None, row),
        "min_tokens": _scalar(request, "min_tokens", None, row),
        "seed": _scalar(request, "seed", None, row),
    }
    if copy:
        sampling["seed"] = (sampling["seed"] or 0) + copy
    bias = _array(request, "embedding_bias")
    message = {
        "type": "submit",
        "prompt": ids[:length].tolist(),
        "max_tokens": _scalar(request, "request_output_len", None, row),
        "sampling": sampling,
        "end_id": _scalar(request, "end_id", None, row),
        "stop_words": _unpack_words(request, "stop_words_list", row),
        "bad_words": _unpack_words(request, "bad_words_list", row),
        "adapter": _scalar(request, "lora_task_id", 0, row),
        "return_log_probs": bool(_scalar(request, "return_log_probs", False, row)),
        "return_context_logits": bool(_scalar(request, "return_context_logits", False, row)),
        "return_generation_logits": bool(_scalar(request, "return_generation_logits", False, row)),
        "return_prompt_log_probs": bool(_scalar(request, "return_prompt_log_probs", False, row)),
        "guide": _guide(request, row),
    }
    if bias is None or not bias.size:
        return message, b""
    return message, np.ascontiguousarray(bias.reshape(-1, bias.shape[-1])[row], dtype=np.float32).tobytes()


def _guide(request, row):
    """The guide of guided decoding; None without one."""
    kind = _scalar(request, "guided_decoding_guide_type", b"", row)
    text = _scalar(request, "guided_decoding_guide", b"", row)
    if not kind:
        if text:
            raise _Refused("guided_decoding_guide needs guided_decoding_guide_type")
        return None
    try:
        return {"kind": kind.decode("utf-8"), "text": text.decode("utf-8")}
    except UnicodeDecodeError:
        raise _Refused("guided_decoding_guide is no UTF-8") from None


def _unpack_words(request, name, row):
    """[2, n]: row 0 the ids one after another, row 1 where each word ends, then -1."""
    array = _array(request, name)
    if array is None or not array.size:
        return []
    ids, ends = array.reshape(-1, 2, array.shape[-1])[row]
    words, start = [], 0
    for end in ends:
        if end <= start:
            break
        words.append(ids[start:end].tolist())
        start = int(end)
    return words


def _array(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def _scalar(request, name, default, row=0):
    array = _array(request, name)
    if array is None or not array.size:
        return default
    flat = array.reshape(-1)
    value = flat[min(row, len(flat) - 1)]
    return value.item() if hasattr(value, "item") else value  # a text is no number of numpy's


def _given(parameters, name, default=""):
    """A parameter's text; the default for an empty one and for a placeholder of NVIDIA's templates."""
    text = parameters.get(name, "")
    return text if text.strip() and "${" not in text else default


def _boolean(parameters, name, default):
    """As the C++ backend reads it: what is neither of the eight spellings is the default."""
    value = parameters.get(name, "")
    if value in ("True", "true", "TRUE", "1"):
        return True
    return False if value in ("False", "false", "FALSE", "0") else default


def _logits(place, blob):
    offset, rows, width = place
    return np.frombuffer(blob, np.float32, count=rows * width, offset=offset).reshape(rows, width)


def _select(wanted, tensors):
    return [pb_utils.Tensor(name, array) for name, array in tensors.items() if name in wanted]


def _fail(sender, reason, code, separate_final=False):
    """Tell a client that its request has failed.

    The error carries the final flag. After an error Triton's gRPC server frees the state of a stream that asked for
    gRPC statuses (`triton_grpc_error`): one more response of that request crashes the server.
    Only a script that has had a response needs the flag separately: Triton 2.51 gives it no error in mid-stream (an
    error is written without the id of its request, in infer_response.cc of python_backend), and it would wait for ever.
    """
    failure = pb_utils.InferenceResponse(error=pb_utils.TritonError(reason, code))
    if separate_final:
        sender.send(failure)
        sender.send(flags=FINAL)
    else:
        sender.send(failure, flags=FINAL)
