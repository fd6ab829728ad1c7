"""The scripts of a repository and of the backend, run without Triton: what they answer, and what they tell others."""

from __future__ import annotations

import asyncio
import collections
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support.doubles import python_backend
from tests.support.doubles.python_backend import InferenceRequest, InferenceResponse, Tensor, TritonError, load
from tests.support.factories import write_tokenizer
from trtpipe import triton_repo

TEMPLATES = Path(triton_repo.__file__).parent / "templates"
BACKEND = Path(triton_repo.__file__).parent / "backends" / "tensorrtllm"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(tmp_path / "tokenizer")
    return tmp_path


@pytest.fixture
def tokenizer(repository: Path) -> Tokenizer:
    return Tokenizer.from_file(str(repository / "tokenizer" / "tokenizer.json"))


@pytest.fixture
def models() -> Iterator[dict[str, Any]]:
    """The other models, which a script asks."""
    yield python_backend.MODELS
    python_backend.MODELS.clear()


def started(script: Path, repository: Path, parameters: dict[str, str], **config: Any) -> Any:
    """A script's model, initialized."""
    values = {key: {"string_value": value} for key, value in {"tokenizer_dir": "tokenizer", **parameters}.items()}
    model = load(script).TritonPythonModel()
    args = {"model_config": json.dumps({"parameters": values, **config}), "model_name": "it"}
    model.initialize({**args, "model_repository": str(repository / "it")})
    return model


@pytest.fixture
def postprocessing(repository: Path) -> Any:
    parameters = {"tensorrt_llm_model_name": "tensorrt_llm"}
    return started(TEMPLATES / "postprocessing" / "model.py", repository, parameters)


def piece(model: Any, ids: list[int], name: str = "", key: int | None = None, last: bool = False, **more: Any) -> str:
    """What postprocessing makes of one response of the engine; without a key, of NVIDIA's."""
    inputs = [
        Tensor("TOKENS_BATCH", np.array([[ids]], np.int32)), Tensor("SEQUENCE_LENGTH", np.array([[len(ids)]], np.int32))
    ]  # fmt: skip
    if key is not None:
        inputs += [Tensor("REQUEST_KEY", np.array([[key]], np.uint64)), Tensor("LAST_RESPONSE", np.array([[last]]))]
    (response,) = model.execute([InferenceRequest(inputs, request_id=name, **more)])
    return str(response.tensors["OUTPUT"].as_numpy()[0].decode())


def test_an_answer_that_ends_within_a_character_is_whole_and_in_nobody_elses(
    postprocessing: Any, tokenizer: Tokenizer
) -> None:
    cut, paris = tokenizer.encode("hi 😀").ids[:-1], tokenizer.encode("Paris").ids
    assert piece(postprocessing, cut, "same", key=7, last=True) == "hi �"
    assert piece(postprocessing, paris, "same", key=8, last=True) == "Paris"
    assert postprocessing.streams == {}


def test_a_stream_of_several_tokens_a_response_is_whole_at_its_end(postprocessing: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a 😀 b 😀").ids[:-1]
    parts = (ids[:4], ids[4:9], ids[9:])
    found = [piece(postprocessing, part, key=7, last=part is parts[-1]) for part in parts]
    assert found == ["a ", "😀 b ", "�"]


def test_streams_of_one_id_at_a_time_are_two_texts(postprocessing: Any, tokenizer: Tokenizer) -> None:
    one, other = tokenizer.encode("😀").ids, tokenizer.encode("é").ids
    assert piece(postprocessing, one[:2], "same", key=7) == ""
    assert piece(postprocessing, other, "same", key=8, last=True) == "é"
    assert piece(postprocessing, one[2:], "same", key=7, last=True) == "😀"


def test_nvidia_s_backend_tells_no_end_but_an_empty_one(postprocessing: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hi 😀").ids
    assert [piece(postprocessing, ids[:4], "id"), piece(postprocessing, [], "id")] == ["hi ", "�"]
    assert [piece(postprocessing, ids[:4], "id"), piece(postprocessing, ids[4:], "id")] == ["hi ", "😀"]
    assert piece(postprocessing, ids[:4]) == "hi �"


def test_an_answer_of_one_response_leaves_nothing_to_the_next_of_its_id(repository: Path, tokenizer: Tokenizer) -> None:
    parameters = {"tensorrt_llm_model_name": "tensorrt_llm", "decoupled": "false"}
    model = started(TEMPLATES / "postprocessing" / "model.py", repository, parameters)
    cut, paris = tokenizer.encode("hi 😀").ids[:-1], tokenizer.encode("Paris").ids
    assert [piece(model, ids, "same") for ids in (cut, paris)] == ["hi �", "Paris"]
    assert model.streams == {}


def test_a_client_that_leaves_ends_its_own_request_alone(
    postprocessing: Any, tokenizer: Tokenizer, models: dict[str, Any]
) -> None:
    stopped = []

    def stop(request: InferenceRequest) -> list[InferenceResponse]:
        stopped.append(request.request_id())
        return [InferenceResponse()]

    models["tensorrt_llm"] = stop
    ids = tokenizer.encode("hi").ids
    piece(postprocessing, ids, "same", key=7, cancelled=True)
    piece(postprocessing, ids, "same", key=8, last=True, cancelled=True)  # it has ended
    piece(postprocessing, ids, key=9)
    piece(postprocessing, ids, "of NVIDIA's", cancelled=True)
    assert stopped == ["7", "of NVIDIA's"]


@pytest.fixture
def backend() -> Any:
    doubles = SimpleNamespace(Engine=None, InFlight=None)
    return load(BACKEND / "model.py", trtpipe_engine=doubles, trtpipe_in_flight=doubles)


@pytest.mark.parametrize("text", ["", " ", "${of_the_template}"])
def test_a_parameter_without_a_value_is_its_default(backend: Any, tmp_path: Path, text: str) -> None:
    names = (
        "cancellation_check_period_ms", "stats_check_period_ms", "kv_cache_free_gpu_mem_fraction", "lora_prefetch_dir",
        "batch_scheduler_policy", "guided_decoding_backend", "max_tokens_in_paged_kv_cache", "sink_token_length",
    )  # fmt: skip
    parameters = {**dict.fromkeys(names, text), "gpt_model_path": "engine"}
    config = {"parameters": {name: {"string_value": value} for name, value in parameters.items()}}
    args = {"model_config": json.dumps(config), "model_repository": str(tmp_path / "it")}
    model = backend.TritonPythonModel()
    with pytest.raises(python_backend.TritonModelException, match=r"gpt_model_path 'engine' holds no engine"):
        model.initialize(args)
    assert model.cancel_period == 0.1
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "config.json").write_text("{}")
    (tmp_path / "engine" / "passport.json").write_text('{"sm": 90, "runtime": "reference"}')
    backend.Engine = lambda folder, options: options
    options, _ = backend._engine(parameters, args["model_repository"], 0)
    assert options == {
        "policy": "guaranteed_no_evict", "enable_kv_cache_reuse": True, "enable_chunked_context": False,
        "stats_check_period_ms": 100,
    }  # fmt: skip


def ready(backend: Any) -> Any:
    """The backend's model before an engine that takes down what it is sent."""
    model = backend.TritonPythonModel()
    sent: list[dict[str, Any]] = []
    connection = SimpleNamespace(send=lambda message, blob=b"": sent.append(message))
    vars(model).update(
        decoupled=True, exclude_input=True, normalize_log_probs=True, speculates=False, numbers=iter(range(100)),
        in_flight=SimpleNamespace(add=lambda step, script: None), lock=backend.threading.Lock(), sequences={},
        engine=SimpleNamespace(connection=connection), sent=sent, absent="gone",
    )  # fmt: skip
    return model


def engine_request(outputs: tuple[str, ...] = ("output_ids", "sequence_length"), **inputs: Any) -> InferenceRequest:
    arrays = {
        "input_ids": np.array([[5, 6]], np.int32), "input_lengths": np.array([2], np.int32),
        "request_output_len": np.array([4], np.int32),
        **{name: np.array([value]) for name, value in inputs.items()},
    }  # fmt: skip
    tensors = [Tensor(name, array) for name, array in arrays.items()]
    return InferenceRequest(tensors, request_id="same", requested_output_names=outputs)


def test_each_request_has_a_key_and_its_last_response_says_so(backend: Any) -> None:
    model = ready(backend)
    first, second = (engine_request(("output_ids", "request_key", "last_response")) for _ in range(2))
    model.execute([first, second])
    keys = [message["names"] for message in model.sent]
    assert [names[0] for names in keys] == ["same", "same"]
    assert keys[0][1] != keys[1][1]
    for finish in (None, "length"):
        entry = {"tokens": [9], "finish": finish, "reused_blocks": 0, "allocated_blocks": 1}
        sequence = model.sequences[0]
        sequence.answer.streaming = True
        sequence.extend(entry, b"")
    found = [{name: one.as_numpy().reshape(-1)[0] for name, one in sent.tensors.items()} for sent in first.sent]
    assert [(str(one["request_key"]), bool(one["last_response"])) for one in found] == [
        (keys[0][1], False),
        (keys[0][1], True),
    ]
    assert first.final


@pytest.mark.parametrize("copies", [0, -1, 1025])
def test_a_request_for_no_sequence_or_too_many_is_refused(backend: Any, copies: int) -> None:
    model, request = ready(backend), engine_request(num_return_sequences=copies)
    model.execute([request])
    error = request.sent[0].error()
    assert error is not None
    assert error.message() == "num_return_sequences must be 1 to 1024"
    assert (error.code(), request.final, model.sent) == (TritonError.INVALID_ARG, True, [])


@pytest.mark.parametrize(
    ("message", "code"),
    [({}, TritonError.INVALID_ARG), ({"failed": True}, TritonError.INTERNAL)],
)
def test_a_failure_of_the_engine_s_own_is_not_the_client_s(backend: Any, message: dict[str, Any], code: int) -> None:
    model, request = ready(backend), engine_request()
    model.senders = [SimpleNamespace(put=lambda call, *args: call(*args))] * backend.SENDERS
    model.execute([request])
    model._refuse({"id": 0, "full": False, "error": "no", **message})
    error = request.sent[0].error()
    assert error is not None
    assert (error.message(), error.code(), request.final) == ("no", code, True)


@pytest.mark.parametrize("speculates", [False, True])
def test_drafts_are_reported_as_none_only_by_an_engine_that_makes_none(backend: Any, speculates: bool) -> None:
    model = ready(backend)
    model.speculates = speculates
    names = ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")
    request = engine_request((*names, "kv_cache_reused_blocks"), return_perf_metrics=True)
    model.execute([request])
    entry = {"tokens": [9], "finish": "length", "reused_blocks": 3, "allocated_blocks": 1}
    model.sequences[0].extend(entry, b"")
    found = {name: tensor.as_numpy().item() for name, tensor in request.sent[0].tensors.items()}
    assert found == {"kv_cache_reused_blocks": 3, **({} if speculates else dict.fromkeys(names, 0))}


def biased(model: Any, **more: Any) -> InferenceResponse:
    words, weights = np.array([["a", "!!"]], object), np.array([[2.0, -1.5]], np.float32)
    texts = {"QUERY": np.array([["hi"]], object), "EMBEDDING_BIAS_WORDS": words, **more}
    inputs = [Tensor(name, np.char.encode(array.astype(str)).astype(object)) for name, array in texts.items()]
    inputs.append(Tensor("EMBEDDING_BIAS_WEIGHTS", weights))
    inputs.append(Tensor("REQUEST_OUTPUT_LEN", np.array([[4]], np.int32)))
    (response,) = model.execute([InferenceRequest(inputs)])
    return response  # type: ignore[no-any-return]


def test_a_bias_has_a_number_for_each_logit_of_the_engine(repository: Path, tokenizer: Tokenizer) -> None:
    script = TEMPLATES / "preprocessing" / "model.py"
    bias = biased(started(script, repository, {"vocab_size": "264"})).tensors["EMBEDDING_BIAS"].as_numpy()
    assert (tokenizer.get_vocab_size(), bias.shape) == (258, (1, 264))
    (a,), (exclamation, _) = tokenizer.encode("a").ids, tokenizer.encode("!!").ids
    assert {int(place): float(bias[0, place]) for place in np.flatnonzero(bias)} == {a: 2.0, exclamation: -1.5}
    error = biased(started(script, repository, {"vocab_size": str(a)})).error()
    assert error is not None
    assert error.message() == f"embedding_bias_words: the engine has no token {a}, which is of 'a'"


@pytest.fixture
def script(repository: Path, models: dict[str, Any]) -> Iterator[Any]:
    """tensorrt_llm_bls of a repository whose answers begin with the prompt, in front of its own preprocessing."""
    parameters = {
        "tensorrt_llm_model_name": "tensorrt_llm", "preprocessing_model_name": "preprocessing",
        "postprocessing_model_name": "postprocessing", "exclude_input_in_output": "false",
        "to_preprocessing": json.dumps({"text_input": "QUERY", "max_tokens": "REQUEST_OUTPUT_LEN"}),
        "to_engine": json.dumps({"exclude_input_in_output": "exclude_input_in_output", "stream": "streaming"}),
        "preprocessed": json.dumps({"INPUT_ID": "input_ids"}),
    }  # fmt: skip
    config = {"model_transaction_policy": {"decoupled": True}, "output": []}
    preprocessing = started(TEMPLATES / "preprocessing" / "model.py", repository, {"vocab_size": "264"})
    models["preprocessing"] = lambda request: preprocessing.execute([request])
    made = started(TEMPLATES / "tensorrt_llm_bls" / "model.py", repository, parameters, **config)
    yield made
    made.finalize()


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, ["a stop: go on stop"]),
        ({"exclude_input_in_output": True}, [" go on stop"]),
        ({"stream": True}, [" go", " on stop"]),
    ],
)
def test_a_stop_word_that_stands_in_the_prompt_does_not_end_the_answer(
    script: Any, tokenizer: Tokenizer, models: dict[str, Any], options: dict[str, bool], texts: list[str]
) -> None:
    asked = []

    def answer(request: InferenceRequest) -> list[InferenceResponse]:
        asked.append(request.tensors["exclude_input_in_output"].as_numpy().tolist())
        said = [" go", " on stop and on"] if options.get("stream") else [" go on stop and on"]
        ids = [np.array([[tokenizer.encode(piece).ids]], np.int32) for piece in said]
        return [InferenceResponse([Tensor("output_ids", array)]) for array in ids]

    models["tensorrt_llm"] = answer
    models["postprocessing"] = lambda request: [InferenceResponse()]
    inputs = [Tensor(name, np.array([[value]])) for name, value in options.items()]
    inputs.append(Tensor("text_input", np.array([[b"a stop:"]], object)))
    inputs.append(Tensor("stop_words", np.array([[b"stop"]], object)))
    inputs.append(Tensor("max_tokens", np.array([[9]], np.int32)))
    request = InferenceRequest(inputs)
    script.execute([request])
    assert asked == [[[True]]]
    assert [sent.tensors["text_output"].as_numpy()[0].decode() for sent in request.sent] == texts
    assert request.final


@pytest.fixture
def llm_api() -> Any:
    """The LLM API's model, in front of an engine that the test gives."""
    model = load(TEMPLATES / "llmapi" / "model.py").TritonPythonModel()
    vars(model).update(decoupled=True, max_queue_size=0, answering=0, running=collections.defaultdict(set), bos="<s>")
    return model


def test_a_stop_ends_every_request_of_its_id_that_still_runs(llm_api: Any) -> None:
    done = asyncio.Event()

    async def generate(request: InferenceRequest, sender: InferenceRequest) -> None:
        await (done.wait() if request is first else asyncio.sleep(60))

    async def serve() -> None:
        tasks = [asyncio.create_task(llm_api._serve(one, one)) for one in (first, second, third, other)]
        await asyncio.sleep(0)
        done.set()
        await tasks[0]
        await llm_api._serve(stop, stop)
        await asyncio.wait(tasks[1:3], timeout=10)
        assert [len(llm_api.running[name]) for name in ("same", "other")] == [0, 1]
        tasks[3].cancel()
        await tasks[3]

    first, second, third = (InferenceRequest(request_id="same") for _ in range(3))
    other = InferenceRequest(request_id="other")
    stop = InferenceRequest([Tensor("stop", np.array([[True]]))], request_id="same")
    llm_api._generate = generate
    asyncio.run(serve())
    errors = [sent.error() for one in (second, third) for sent in one.sent]
    assert [error and error.code() for error in errors] == [TritonError.CANCELLED] * 2
    assert (first.sent, stop.final, llm_api.answering) == ([], True, 0)


def test_a_chosen_token_without_a_log_probability_is_told_as_that(llm_api: Any) -> None:
    names = ("output_ids", "output_log_probs")
    given = [Tensor("input_ids", np.array([1, 2])), Tensor("return_log_probs", np.array([True]))]
    request = InferenceRequest(given, requested_output_names=names)
    aborted: list[Any] = []

    class Answer:
        """Of the token 7, where only that of 5, the likeliest, is listed."""

        def abort(self) -> None:
            aborted.append(self)

        def __aiter__(self) -> Any:
            return self._parts()

        async def _parts(self) -> Any:
            likeliest = {5: SimpleNamespace(logprob=-0.25)}
            output = SimpleNamespace(token_ids=[7], logprobs=[likeliest])
            yield SimpleNamespace(finished=True, prompt_token_ids=[1, 2], outputs=[output])

    vars(llm_api).update(
        adapters={}, cancel_period=60.0, sampling_params=SimpleNamespace,
        llm=SimpleNamespace(generate_async=lambda *_, **__: Answer()),
    )  # fmt: skip
    asyncio.run(llm_api._serve(request, request))
    error = request.sent[0].error()
    assert error is not None
    assert error.message() == "this release of TensorRT-LLM gave no log-probability of a token that it chose"
    assert len(aborted) == 1


@pytest.mark.parametrize(
    ("config", "prompt", "sent"),
    [
        ({"bos_token": "<s>"}, "<s>[INST] Hi", False),
        ({"bos_token": {"content": "<s>"}}, "<s>[INST] Hi", False),
        ({"bos_token": "<s>"}, "Hi <s>", None),
        ({"bos_token": None}, "<s>Hi", None),
        ({}, "<s>Hi", None),
        (None, "<s>Hi", None),
        ({"bos_token": "<s>"}, [0, 5], None),
    ],
)
def test_a_text_of_a_chat_template_gets_no_second_first_token(
    llm_api: Any, tmp_path: Path, config: dict[str, Any] | None, prompt: str | list[int], sent: bool | None
) -> None:
    """As from the preprocessing of the C++ backend; the LLM API adds its special tokens unless told otherwise."""
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    read = load(TEMPLATES / "llmapi" / "model.py")._bos
    vars(llm_api).update(sampling_params=SimpleNamespace, bos=read(tmp_path))
    sampling = llm_api._sampling(InferenceRequest(), {"text_output"}, prompt)
    assert getattr(sampling, "add_special_tokens", None) is sent


def test_the_llm_api_answers_one_prompt_a_request_and_refuses_several(llm_api: Any) -> None:
    request = InferenceRequest([Tensor("text_input", np.array([b"one", b"two"], object))])
    asyncio.run(llm_api._serve(request, request))
    error = request.sent[0].error()
    assert error is not None
    assert (error.message(), error.code()) == ("text_input must hold exactly one prompt", TritonError.INVALID_ARG)
