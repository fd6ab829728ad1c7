"""Sliding windows: the reference runtime's text is transformers' beyond them, from prompts, decoding and reuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.expert_models import PROMPTS, SIZES, answers
from tests.support.random_models import random_model
from tests.unit.engines.reference.test_experts import NEW, Tiny, engine, texts
from trtpipe.engines.accuracy.models import open_model
from trtpipe.engines.base import Mapping
from trtpipe.engines.checkpoint.config import CheckpointError, read_config
from trtpipe.engines.checkpoint.restore import restore
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.reference.layer import run_layer
from trtpipe.engines.reference.rope import rotary_tables

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 20
# `model_type` -> its settings, and the windows that a checkpoint states.
FAMILIES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "mistral": ({"sliding_window": WINDOW}, [WINDOW]),
    "phi3": ({"sliding_window": WINDOW}, [WINDOW]),
    "qwen2": ({"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}, [256, WINDOW]),
}


def make(family: str, **changes: Any) -> Any:
    sizes = {name: value for name, value in SIZES.items() if name != "num_experts_per_tok"}
    return random_model(family, **{**sizes, **FAMILIES[family][0], **changes})


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp(request.param)
    model = make(request.param)
    model.save_pretrained(folder)
    return Tiny(folder, answers(model, NEW))


@pytest.mark.parametrize("tp", [1, 2])
def test_twenty_prompts_at_once(tiny: Tiny, tmp_path: Path, tp: int) -> None:
    built = engine(tiny.folder, tmp_path / "engine", Mapping(tp_size=tp), 20)
    assert texts(built, PROMPTS)[0] == tiny.answers


def test_prompts_in_parts_with_a_shared_start(tiny: Tiny, tmp_path: Path) -> None:
    built = engine(tiny.folder, tmp_path / "engine", Mapping(), 2)
    path = built / "config.json"
    config = json.loads(path.read_text())
    config["build_config"]["max_num_tokens"] = 24
    path.write_text(json.dumps(config))
    found, reused = texts(built, PROMPTS[:6], enable_chunked_context=True)
    assert found == tiny.answers[:6]
    assert reused >= 4 * 4  # 40 tokens in blocks of 8, for all but the first two prompts, which start together


def test_whole_sequences_are_computed_with_it_too(tiny: Tiny) -> None:
    from transformers import AutoModelForCausalLM

    model, source = AutoModelForCausalLM.from_pretrained(tiny.folder), open_model(tiny.folder, torch.device("cpu"))
    ids = torch.tensor(PROMPTS[:2])
    hidden, tables = torch.nn.functional.embedding(ids, source.embedding()[0]), rotary_tables(source.config, 64)
    with torch.no_grad():
        wanted = model(ids, output_hidden_states=True).hidden_states
    first = run_layer(source.config, source.layer(0), hidden, *tables)
    torch.testing.assert_close(first, wanted[1], atol=1e-4, rtol=0)
    norm = source.head().final_norm
    last = run_layer(source.config, source.layer(1), first, *tables)
    last = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + source.config.norm_epsilon) * norm
    torch.testing.assert_close(last, wanted[2], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_states_the_windows_and_gives_them_back(tmp_path: Path, family: str) -> None:
    make(family).save_pretrained(tmp_path / "hf")
    built = engine(tmp_path / "hf", tmp_path / "engine", Mapping(), 1)
    path = built / "config.json"
    config = json.loads(path.read_text())["pretrained_config"]
    assert config["runtime_defaults"] == {"max_attention_window": FAMILIES[family][1]}
    path.write_text(json.dumps(config))
    (tmp_path / "back").mkdir()
    restore(built, tmp_path / "back")
    folders = [read_model_config(tmp_path / name) for name in ("hf", "back")]
    assert [model.attention_windows for model in folders] == [tuple(FAMILIES[family][1])] * 2
    path.write_text(json.dumps({**config, "runtime_defaults": {"max_attention_window": [0]}}))
    with pytest.raises(CheckpointError, match=r"max_attention_window is \[0\], not a list of positive numbers"):
        read_config(built)


def test_without_its_window_a_model_is_another(tiny: Tiny) -> None:
    # Were it not, the tests above would pass on a runtime that attends to all tokens.
    family = json.loads((tiny.folder / "config.json").read_text())["model_type"]
    off = {"use_sliding_window": False} if family == "qwen2" else {"sliding_window": None}
    differ = [a != b for a, b in zip(answers(make(family, **off), NEW), tiny.answers, strict=True)]
    assert sum(differ) > 15
