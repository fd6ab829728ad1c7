"""Every kind of conversion, computed: transformers' logits before it, the reference runtime's after it.

What test_runtime.py runs already (grouped heads, llama3 scaling, biases, a tied head) is here only in company it has
not there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.random_models import random_model
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.engine_process.request import Output, Request
from trtpipe.engines.hf.folder import INDEX_NAME
from trtpipe.engines.model_config import EmbeddingSharding
from trtpipe.engines.reference.runtime import Runtime

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 101
LIMIT = 64
NEW = 6
# Longer than a block of the cache, and with the last row of the vocabulary, which ends beside the padding.
PROMPT = (*((7 * i + 3) % VOCAB for i in range(37)), VOCAB - 1, 0)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
BUILD: dict[str, Any] = {
    "max_batch_size": 2,
    "max_input_len": LIMIT - NEW,
    "max_seq_len": LIMIT,
    "max_num_tokens": LIMIT,
    "max_beam_width": 1,
    "plugin_config": {"tokens_per_block": 8},
}
LONG = {"short_factor": [1.0 + 0.5 * i for i in range(4)], "long_factor": [9.0] * 4}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-mscale": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 1.0,
        "mscale_all_dim": 0.5, "beta_fast": 16.0, "beta_slow": 2.0,
    },
    "longrope": {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": LIMIT, **LONG},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of transformers and how it is converted.

    config      changes to SIZES
    family      its `model_type`
    stored      element type of the Hugging Face folder
    shard_size  of its files; small ones make several and an index
    spelling    of its rotary settings: transformers' major version
    """

    config: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    stored: torch.dtype = torch.float32
    shard_size: str = "1GB"
    spelling: int = 5
    tp: int = 1
    pp: int = 1
    ep: int = 1
    embedding: EmbeddingSharding = EmbeddingSharding.NONE


def rope(name: str, base: float = 10000.0) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": base, **SCALINGS[name]}}


VOCABULARY, HIDDEN = EmbeddingSharding.VOCABULARY, EmbeddingSharding.HIDDEN
MHA = {"num_key_value_heads": 4}
# Narrower heads than hidden_size / heads would be, as Mistral Nemo has.
NARROW, WIDE = {"head_dim": 4}, {"head_dim": 16}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True, **WIDE}
CASES: dict[str, Case] = {
    "heads of their own": Case(config=MHA),
    "heads of their own, tp 2": Case(config=MHA, tp=2),
    "heads of their own, tp 4": Case(config=MHA, tp=4),
    "one key/value head, tp 4": Case(config={"num_key_value_heads": 1}, tp=4),
    "base 500000": Case(config={"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "base 500000, transformers 4": Case(
        config={"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, spelling=4
    ),
    **{f"{name} scaling": Case(config=rope(name)) for name in SCALINGS if name != "llama3"},
    "linear scaling, transformers 4": Case(config=rope("linear", 20000.0), spelling=4),
    "llama3 scaling, transformers 4, tp 2": Case(config=rope("llama3", 500000.0), spelling=4, tp=2),
    "mistral": Case(family="mistral", config={"sliding_window": None}),
    "mistral, narrow heads": Case(family="mistral", config={**NARROW, "sliding_window": None}, tp=2),
    "mistral, narrow heads, more ranks than kv heads": Case(
        family="mistral", config={**NARROW, "sliding_window": None}, tp=4, pp=2
    ),
    "mistral, a window no sequence fills": Case(family="mistral", config={"sliding_window": LIMIT}),
    "qwen2, more ranks than kv heads": Case(family="qwen2", config={"tie_word_embeddings": True}, tp=4, pp=2),
    # As Qwen's cards say how longer texts are read, by which positions are rotated otherwise below that too.
    "qwen2, yarn, transformers 4": Case(family="qwen2", config=rope("yarn", 1000000.0), spelling=4),
    "qwen2, wide heads, from bfloat16": Case(family="qwen2", config=WIDE, stored=torch.bfloat16, tp=2),
    # Heads wider than hidden_size / heads.
    "qwen3": Case(family="qwen3", config=WIDE),
    "qwen3, tied, more ranks than kv heads": Case(
        family="qwen3", config={**WIDE, "tie_word_embeddings": True}, tp=4, pp=3
    ),
    "qwen3, yarn, shards": Case(family="qwen3", config={**WIDE, **rope("yarn", 1e6)}, shard_size="10KB", tp=2),
    "mixtral": Case(family="mixtral"),
    "mixtral, tp 2": Case(family="mixtral", tp=2),
    "mixtral, groups of experts": Case(family="mixtral", tp=4, ep=2, pp=2, shard_size="10KB"),
    "mixtral, whole experts": Case(family="mixtral", tp=4, ep=4, stored=torch.bfloat16),
    "qwen3_moe, groups of experts": Case(family="qwen3_moe", config=MOE, tp=4, ep=2, pp=2),
    "qwen3_moe, shares that do not sum to 1": Case(family="qwen3_moe", config={**MOE, "norm_topk_prob": False}),
    "phi3": Case(family="phi3"),
    "phi3, tied, more ranks than kv heads, shards": Case(
        family="phi3", config={"tie_word_embeddings": True}, tp=4, shard_size="10KB"
    ),
    "phi3, heads of their own, from bfloat16": Case(family="phi3", config=MHA, stored=torch.bfloat16, tp=2),
    "biases, more ranks than kv heads": Case(config={"attention_bias": True}, tp=4),
    "biases, narrow heads, stages": Case(config={"attention_bias": True, **NARROW}, tp=2, pp=2),
    "tied, tp 4": Case(config={"tie_word_embeddings": True}, tp=4),
    "tied, shards of a file": Case(config={"tie_word_embeddings": True}, shard_size="10KB", tp=2),
    "shards": Case(shard_size="10KB"),
    "shards, tp 2, pp 2": Case(shard_size="10KB", tp=2, pp=2),
    "from bfloat16": Case(stored=torch.bfloat16),
    "from bfloat16, tp 2": Case(stored=torch.bfloat16, tp=2),
    "from float16, shards": Case(stored=torch.float16, shard_size="10KB"),
    "pp 2, a remainder": Case(pp=2),
    "pp 3, a remainder": Case(config={"num_hidden_layers": 5}, pp=3),
    "tp 2, pp 2": Case(tp=2, pp=2),
    "tp 4, pp 3": Case(config={**MHA, "num_hidden_layers": 4}, tp=4, pp=3),
    "embedding by vocabulary": Case(tp=2, embedding=VOCABULARY),
    "embedding by hidden size": Case(tp=2, embedding=HIDDEN),
    "embedding by vocabulary, tp 4, pp 2": Case(tp=4, pp=2, embedding=VOCABULARY),
    "embedding by hidden size, tp 4, pp 2": Case(tp=4, pp=2, embedding=HIDDEN),
    "tied embedding by vocabulary": Case(config={"tie_word_embeddings": True}, tp=4, embedding=VOCABULARY),
    "tied embedding by hidden size": Case(config={"tie_word_embeddings": True}, tp=4, embedding=HIDDEN),
    "embedding by vocabulary on one rank": Case(embedding=VOCABULARY),
    # Three rows to a rank: the last one has nothing but zeros.
    "a rank without a word": Case(config={"vocab_size": 9}, tp=4, embedding=VOCABULARY),
}


# What is cut in them, others cut too.
ALSO = frozenset({
    "heads of their own", "heads of their own, tp 2", "base 500000, transformers 4", "mistral, narrow heads", "qwen3",
    "mixtral", "mixtral, tp 2", "phi3, heads of their own, from bfloat16", "biases, narrow heads, stages",
    "tied, shards of a file", "shards", "shards, tp 2, pp 2", "from bfloat16", "from bfloat16, tp 2", "tp 2, pp 2",
    "pp 2, a remainder", "embedding by vocabulary", "embedding by hidden size",
})  # fmt: skip


def model_of(case: Case, **changes: Any) -> Any:
    """The case's model with random values, in float32."""
    return random_model(case.family, **{**SIZES, **case.config, **changes})


def save(model: Any, case: Case, folder: Path) -> None:
    model.to(case.stored).save_pretrained(folder, max_shard_size=case.shard_size)
    assert (folder / INDEX_NAME).is_file() == (case.shard_size != "1GB")
    if case.spelling == 4:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        parameters = config.pop("rope_parameters")
        config["rope_theta"] = parameters.pop("rope_theta")
        config["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
        config["torch_dtype"] = config.pop("dtype")
        path.write_text(json.dumps(config))


def engine(case: Case, source: Path, out: Path) -> Path:
    out.mkdir()
    mapping = Mapping(tp_size=case.tp, pp_size=case.pp, moe_ep_size=case.ep)
    convert(source, out, dtype=DataType.FLOAT32, mapping=mapping, embedding=case.embedding)
    path = out / "config.json"
    content = {"version": "test", "pretrained_config": json.loads(path.read_text()), "build_config": BUILD}
    path.write_text(json.dumps(content))
    return out


def logits_by_transformers(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in ALSO else []) for name in CASES]
)
def test_logits_after_conversion_are_those_before(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    from transformers import AutoModelForCausalLM

    save(model_of(case), case, tmp_path / "hf")
    # Read back: rounded where the folder's type is shorter, and with the settings as config.json spells them.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    runtime = Runtime(engine(case, tmp_path / "hf", tmp_path / "engine"))
    prompt = tuple(token % model.config.vocab_size for token in PROMPT)
    runtime.submit(
        Request(id=0, prompt=prompt, max_tokens=NEW, return_context_logits=True, return_generation_logits=True)
    )
    outputs: list[Output] = []
    while runtime.has_work:
        outputs += runtime.step()
    answer = [token for output in outputs for token in output.tokens]
    assert len(answer) == NEW
    want = logits_by_transformers(model, [*prompt, *answer])
    # Far apart, or agreement would say little.
    assert want.std() > 0.5
    context = outputs[0].context_logits
    assert context is not None
    got = np.concatenate([context, *(output.generation_logits for output in outputs)])
    # The last row of the prompt's logits is also the first of the answer's; the last token of all is never run.
    rows = [*range(len(prompt)), *range(len(prompt) - 1, len(prompt) + NEW - 1)]
    torch.testing.assert_close(torch.from_numpy(got), want[rows], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "dynamic"])
def test_without_its_scaling_a_model_is_another(name: str) -> None:
    # Were it not, the test above would pass on a checkpoint that has lost it. Dynamic scaling begins beyond LIMIT.
    case = Case(config=rope(name))
    unscaled = {"rope_type": "default", "rope_theta": 10000.0}
    scaled, plain = model_of(case), model_of(case, rope_parameters=unscaled)
    tokens = list(PROMPT)
    apart = (logits_by_transformers(scaled, tokens) - logits_by_transformers(plain, tokens)).abs().max()
    assert apart > 0.01
