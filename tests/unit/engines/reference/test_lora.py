"""LoRA adapters in the reference runtime: several in one batch, against models with the adapters merged, and PEFT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters import merged, write_adapter
from tests.support.paths import GOLDEN
from tests.support.random_models import random_model
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.engine_process.request import Request, RequestRefused
from trtpipe.engines.hf.adapter import ROLES, lay_out, located_pairs, read_adapter
from trtpipe.engines.hf.adapter_check import read_matrix
from trtpipe.engines.reference.engine_config import read_engine_config
from trtpipe.engines.reference.linear import Int8PerToken
from trtpipe.engines.reference.lora import Adapters, device_bytes
from trtpipe.engines.reference.matmul import int8_operand
from trtpipe.engines.reference.mlp import GatedMlp, make_branches
from trtpipe.engines.reference.runtime import Runtime

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, NEW = 101, 12
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
BUILD = {
    "max_batch_size": 8, "max_input_len": 64, "max_seq_len": 96, "max_num_tokens": 32, "max_beam_width": 1,
    "plugin_config": {"tokens_per_block": 8},
}  # fmt: skip
ATTENTION = ("q", "k", "v", "o")
# The first three have a common start of two blocks; with 32 tokens a step, prompts are computed beside answers.
PROMPTS = [
    tuple((3 * i + 1) % VOCAB for i in range(20)),
    (*((3 * i + 1) % VOCAB for i in range(17)), 9),
    tuple((3 * i + 1) % VOCAB for i in range(16)),
    (5,),
]


class Case:
    """A model in transformers and as an engine, and two adapters of it of different ranks in a folder."""

    def __init__(self, root: Path, family: str, roles: tuple[str, ...], **config: Any) -> None:
        self.root = root
        self.model = random_model(family, seed=1, **SHAPE, **config)
        self.model.save_pretrained(root / "hf")
        self.folder = root / "lora"
        self.folder.mkdir()
        self.sources = [
            write_adapter(root / "a", root / "hf", rank=4, roles=roles, seed=1),
            write_adapter(root / "b", root / "hf", rank=3, roles=roles[1:], seed=2, use_rslora=True),
        ]
        placed = [lay_out(read_adapter(one), one.name, self.folder) for one in self.sources]
        self.numbers = [0, *(int(path.name) for path in placed)]

    def engine(self, tp: int = 1) -> Path:
        out = self.root / f"tp{tp}"
        if not out.exists():
            out.mkdir()
            convert(self.root / "hf", out, dtype=DataType.FLOAT32, mapping=Mapping(tp_size=tp))
            config = json.loads((out / "config.json").read_text())
            config = {"version": "test", "pretrained_config": config, "build_config": BUILD}
            (out / "config.json").write_text(json.dumps(config))
        return out

    def runtime(self, tp: int = 1, **options: Any) -> Runtime:
        return Runtime(self.engine(tp), device="cpu", adapters=self.folder, enable_chunked_context=True, **options)

    def expected(self) -> list[list[list[int]]]:
        """Greedy tokens by adapter (none first) and prompt, as transformers generates them."""
        models = [self.model, *(merged(self.model, one) for one in self.sources)]
        return [[greedy(model, prompt) for prompt in PROMPTS] for model in models]


def greedy(model: Any, prompt: tuple[int, ...]) -> list[int]:
    with torch.inference_mode():
        out = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def run(runtime: Runtime, asked: list[tuple[int, tuple[int, ...]]]) -> tuple[list[list[int]], list[int]]:
    """Tokens and reused blocks of requests, (adapter, prompt) each, which are all in flight at once."""
    for index, (adapter, prompt) in enumerate(asked):
        runtime.submit(Request(id=index, prompt=prompt, max_tokens=NEW, adapter=adapter))
    tokens: list[list[int]] = [[] for _ in asked]
    reused = [0] * len(asked)
    while runtime.has_work:
        for output in runtime.step():
            tokens[output.id] += output.tokens
            reused[output.id] = output.reused_blocks
    return tokens, reused


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("llama"), "llama", ("q", "k", "v", "o", "gate", "up", "down"))


@pytest.fixture(scope="module")
def llama_tokens(llama: Case) -> list[list[list[int]]]:
    return llama.expected()


def check(case: Case, expected: list[list[list[int]]], runtime: Runtime) -> None:
    """Every prompt with every adapter, in one batch."""
    asked = [(number, prompt) for prompt in PROMPTS for number in case.numbers]
    wanted = [expected[index][place] for place in range(len(PROMPTS)) for index in range(len(case.numbers))]
    assert run(runtime, asked)[0] == wanted


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_adapters_in_one_batch_equal_merged_models(llama: Case, llama_tokens: list[list[list[int]]], tp: int) -> None:
    """With 4 ranks, two ranks hold the same key and value heads."""
    assert len({str(tokens) for tokens in llama_tokens}) == 3  # the adapters change the answers
    check(llama, llama_tokens, llama.runtime(tp))


@pytest.mark.process
@pytest.mark.loopback
def test_ranks_in_processes_of_their_own(llama: Case, llama_tokens: list[list[list[int]]]) -> None:
    runtime = llama.runtime(2, apart=True)
    try:
        check(llama, llama_tokens, runtime)
        damaged = llama.folder / "77"
        shutil.copytree(llama.folder / str(llama.numbers[1]), damaged)
        weights = damaged / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-8])
        told = r"^the adapter [^ /]+ does not load; see the server's log$"
        with pytest.raises(RequestRefused, match=told) as refused:
            runtime.submit(Request(id="x", prompt=(1,), max_tokens=1, adapter=77))
        assert f"{weights} is damaged" in str(refused.value.__cause__)
        check(llama, llama_tokens, runtime)
        shutil.rmtree(damaged)
    finally:
        runtime.close()


def test_an_adapter_that_is_removed_while_it_loads_serves_the_request_that_named_it(
    llama: Case, llama_tokens: list[list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, number = tmp_path / "lora", llama.numbers[1]
    shutil.copytree(llama.folder, folder)
    runtime = Runtime(llama.engine(), device="cpu", adapters=folder, enable_chunked_context=True)
    load = runtime._model.load_adapter

    def load_and_remove(number: int, path: Path) -> None:
        load(number, path)
        shutil.rmtree(path)

    monkeypatch.setattr(runtime._model, "load_adapter", load_and_remove)
    assert run(runtime, [(number, PROMPTS[0]), (0, PROMPTS[0])])[0] == [llama_tokens[1][0], llama_tokens[0][0]]
    with pytest.raises(RequestRefused, match=f"no adapter has the number {number}"):
        runtime.submit(Request(id=0, prompt=PROMPTS[0], max_tokens=1, adapter=number))


def test_attention_of_a_model_with_experts(tmp_path: Path) -> None:
    case = Case(tmp_path, "mixtral", ATTENTION, **EXPERTS)
    check(case, case.expected(), case.runtime(2))


def test_blocks_are_shared_by_requests_of_one_adapter_alone(llama: Case, llama_tokens: list[list[list[int]]]) -> None:
    runtime, prompt = llama.runtime(), PROMPTS[0]
    none, first, second = llama.numbers
    for number, index in ((first, 1), (second, 2), (none, 0)):
        # A prompt of 20 tokens has two full blocks. The first request of an adapter finds none, the second one both.
        assert run(runtime, [(number, prompt)]) == ([llama_tokens[index][0]], [0])
        assert run(runtime, [(number, prompt)]) == ([llama_tokens[index][0]], [2])


def test_an_adapter_is_removed_while_it_is_in_use(llama: Case, llama_tokens: list[list[list[int]]]) -> None:
    runtime, number = llama.runtime(), llama.numbers[1]
    runtime.submit(Request(id="running", prompt=PROMPTS[0], max_tokens=NEW, adapter=number))
    tokens = [token for output in runtime.step() for token in output.tokens]
    place, away = llama.folder / str(number), llama.root / "away"
    place.rename(away)
    try:
        with pytest.raises(RequestRefused, match=f"no adapter has the number {number}"):
            runtime.submit(Request(id="late", prompt=PROMPTS[0], max_tokens=NEW, adapter=number))
        # Loading another one drops those that are gone, but not the one in use.
        runtime.submit(Request(id="other", prompt=PROMPTS[0], max_tokens=1, adapter=llama.numbers[2]))
        while runtime.has_work:
            tokens += [token for output in runtime.step() if output.id == "running" for token in output.tokens]
        assert tokens == llama_tokens[1][0]
    finally:
        away.rename(place)
    assert run(runtime, [(number, PROMPTS[1])])[0] == [llama_tokens[1][1]]


def test_a_runtime_without_adapters_refuses_them(llama: Case) -> None:
    runtime = Runtime(llama.engine(), device="cpu")
    with pytest.raises(RequestRefused, match="no adapter has the number 5"):
        runtime.submit(Request(id=0, prompt=(1,), max_tokens=1, adapter=5))


def test_adapters_beside_quantized_linears_take_the_inputs_as_they_are() -> None:
    """Each output is raised by one, so that the sums show what was added where; the inputs are not rounded to codes."""
    generator = torch.Generator().manual_seed(0)

    def linear(features: int, out: int) -> Int8PerToken:
        codes = torch.randint(-127, 128, (out, features), generator=generator, dtype=torch.int8)
        return Int8PerToken(int8_operand(codes), torch.full((out,), 0.01))

    gate, up, down = linear(8, 12), linear(8, 12), linear(12, 8)
    mlp, x = GatedMlp(make_branches(gate, up), down), torch.randn(3, 8, generator=generator)
    seen: dict[str, torch.Tensor] = {}

    def add(given: torch.Tensor, outputs: Sequence[tuple[str, torch.Tensor]]) -> None:
        for role, out in outputs:
            seen[role] = given
            out += 1

    found = mlp.adapted(mlp.encode(x), x, add, x.dtype)
    inner = torch.nn.functional.silu(gate(x) + 1) * (up(x) + 1)
    assert torch.equal(found, down(inner) + 1)
    assert [torch.equal(seen[role], wanted) for role, wanted in (("gate", x), ("up", x), ("down", inner))] == [True] * 3


def test_tokens_of_peft(llama: Case) -> None:
    """The golden tokens are of PEFT's own generate: see tests/support/peft_tokens.py."""
    wanted = json.loads((GOLDEN / "lora.json").read_text(encoding="utf-8"))
    assert wanted["prompts"] == [list(prompt) for prompt in PROMPTS]
    asked = [(number, prompt) for number in llama.numbers[1:] for prompt in PROMPTS]
    assert run(llama.runtime(), asked)[0] == [tokens for adapter in wanted["tokens"] for tokens in adapter]


def test_adapters_come_and_go_and_none_is_in_memory_twice(llama: Case, tmp_path: Path) -> None:
    """Six adapters of one rank; the second leaves, and one without q takes its place."""
    hf = llama.root / "hf"
    sources = [write_adapter(tmp_path / str(n), hf, rank=4, seed=n) for n in range(1, 7)]
    sources.append(write_adapter(tmp_path / "7", hf, rank=4, roles=ROLES[1:], seed=7))
    adapters = Adapters(read_engine_config(llama.engine())[0], [0], torch.float32, torch.device("cpu"))
    for number, source in enumerate(sources[:6], 1):
        adapters.load(number, source)
    adapters.drop(2)
    adapters.load(7, sources[6])
    used = [1, 7, 6, 3, 1]
    step = adapters.plan([(number, 1) for number in used])
    assert step is not None
    x = torch.randn(len(used), 64, generator=torch.Generator().manual_seed(0))
    for role in "qo":
        found, wanted = torch.zeros(len(used), 64), torch.zeros(len(used), 64)
        step.of(1, 0).add(x, [(role, found)])
        for row, number in enumerate(used):
            pair = located_pairs(read_adapter(sources[number - 1]), adapters._config).get((1, role))
            if pair is not None:
                a, b = (torch.from_numpy(read_matrix(side)).float() for side in pair)
                wanted[row] = 8 / 4 * (b @ (a @ x[row]))
        torch.testing.assert_close(found, wanted)
    # Of a rank: two layers, 64 + 64 features for q and o, 64 + 32 for k and v, 64 + 96 for gate, up and down. Six
    # adapters are there, and no place is free.
    features = 2 * (2 * 128 + 2 * 96 + 3 * 160)
    kept = (side for stack in adapters._stacks.values() for pair in stack.matrices.values() for side in pair)
    assert sum(side.nbytes for side in kept) == 6 * 4 * features * 4


def test_bytes_of_the_adapters_in_a_folder(llama: Case, tmp_path: Path) -> None:
    """One of rank 4 and one of rank 3 without q, in 16 bits; a damaged one counts as none."""
    folder = tmp_path / "lora"
    shutil.copytree(llama.folder, folder)
    damaged = folder / "77"
    shutil.copytree(folder / str(llama.numbers[1]), damaged)
    (damaged / "adapter_model.safetensors").write_bytes(b"")
    without_q = 2 * (128 + 2 * 96 + 3 * 160)
    assert device_bytes(folder, torch.bfloat16) == 2 * (4 * (without_q + 2 * 128) + 3 * without_q)
    assert device_bytes(None, torch.bfloat16) == device_bytes(tmp_path / "none", torch.bfloat16) == 0
