"""Likelihoods and greedy answers of tiny models, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.factories import write_tokenizer
from tests.support.random_models import random_model
from trtpipe.engines.accuracy import scoring, scoring_worker
from trtpipe.engines.accuracy.scoring import Continuation, Generation, answer
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.errors import InputDataError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Imported before the guard of a single test is up: a dependency of it runs lscpu on import."""
    import transformers  # noqa: F401


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(module: str, spec: dict[str, Any], log: Path, *, what: str, progress: Any) -> None:
        assert module == "trtpipe.engines.accuracy.scoring_worker"
        scoring_worker.work(spec, progress)

    monkeypatch.setattr(scoring, "run_worker", run)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("models") / "llama"
    model = random_model(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=259, max_position_embeddings=256, initializer_range=0.2,
    ).float()  # fmt: skip
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder, model


PAIRS = [
    Continuation(context=[5], tokens=[7]),
    Continuation(context=[*range(10, 90)], tokens=[3, 4, 5]),
    Continuation(context=[9, 8], tokens=[*range(100, 107)]),
]


@pytest.mark.parametrize("tp", [0, 2], ids=["huggingface", "checkpoint of two ranks"])
def test_what_a_model_answers_is_what_transformers_says(llama: tuple[Path, Any], tmp_path: Path, tp: int) -> None:
    folder, model = llama
    other = folder
    if tp:
        other = tmp_path / "checkpoint"
        other.mkdir()
        convert(folder, other, dtype=DataType.FLOAT32, mapping=Mapping(tp_size=tp))
    prompts = [[65, 66, 67], [70], [*range(40, 120)]]
    steps: list[tuple[int, int]] = []
    replies = answer(
        other,
        PAIRS,
        [Generation(prompt=prompt, max_tokens=6, until=[]) for prompt in prompts],
        tokenizer=folder, ends=[], device="cpu", log=tmp_path / "log",
        progress=lambda done, total: steps.append((done, total)),
    )  # fmt: skip
    with torch.inference_mode():
        for pair, found in zip(PAIRS, replies.likelihoods, strict=True):
            logits = model(torch.tensor([[*pair.context, *pair.tokens]])).logits[0].log_softmax(-1)
            rows = logits[len(pair.context) - 1 : -1]
            expected = float(rows[range(len(pair.tokens)), pair.tokens].sum())
            assert found == pytest.approx(expected, abs=2e-4)
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        for prompt, text in zip(prompts, replies.texts, strict=True):
            ids = [*prompt]
            for _ in range(6):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            assert text == tokenizer.decode(ids[len(prompt) :])
    assert steps[-1] == (6, 6)


def test_an_answer_ends_at_a_text_an_end_token_or_the_limit(llama: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = llama
    ids = [65, 66, 67]
    with torch.inference_mode():
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(folder / "tokenizer.json")).decode
    whole = decode(ids[3:])
    stop = next(char for char in whole[1:] if char not in ("\ufffd", whole[0]))

    def text(until: list[str], ends: list[int]) -> str:
        asked = [Generation(prompt=ids[:3], max_tokens=8, until=until)]
        options: dict[str, Any] = {"tokenizer": folder, "device": "cpu", "log": tmp_path / "log"}
        return answer(folder, [], asked, ends=ends, **options).texts[0]

    assert text([], []) == whole
    assert text(["never in it", stop], []) == whole[: whole.index(stop)]
    end = ids[5]
    assert text([], [end]) == decode(ids[3 : 3 + ids[3:].index(end)])


def test_a_damaged_model_is_refused(llama: tuple[Path, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "damaged"
    folder.mkdir()
    tensors = load_file(llama[0] / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((llama[0] / "config.json").read_bytes())
    with pytest.raises(InputDataError, match="gives numbers that are not finite"):
        answer(folder, PAIRS, [], tokenizer=llama[0], ends=[], device="cpu", log=tmp_path / "log")


def test_batches_hold_requests_of_similar_length() -> None:
    assert scoring_worker.batches([5, 1000, 4, 900, 3], 905) == [[(4, 3), (2, 4), (0, 5)], [(3, 900)], [(1, 1000)]]
    assert [len(batch) for batch in scoring_worker.batches([1] * 130, 10_000)] == [64, 64, 2]
