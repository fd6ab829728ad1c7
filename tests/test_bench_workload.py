"""Prompts: exact length, distinct, fixed by the seed."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from engines.errors import InputDataError, UsageError
from pipeline.bench.workload import count_tokens, load_tokenizer, prompts

WORDS = "ant bee cow dog elk fox gnu hen ibis jay kiwi lark mole newt owl pig quail rat seal toad"


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE like Llama 3's, trained on twenty words, that puts one special token in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 50, trainer)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("tokens", [3, 4, 17, 64, 513])
def test_a_prompt_has_exactly_the_tokens_asked_for(tokenizer_json: Path, tokens: int) -> None:
    tokenizer = load_tokenizer(tokenizer_json)
    made = list(islice(prompts(tokenizer, tokens=tokens, seed=1), 50))
    assert {len(tokenizer.encode(text).ids) for text in made} == {tokens}
    assert len(set(made)) == 50


def test_the_special_token_in_front_is_one_of_them(tokenizer_json: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_json)
    text = next(prompts(tokenizer, tokens=8, seed=1))
    assert count_tokens(tokenizer, text) == 7


def test_the_seed_fixes_the_prompts(tokenizer_json: Path) -> None:
    def draw(seed: int) -> list[str]:
        return list(islice(prompts(load_tokenizer(tokenizer_json), tokens=12, seed=seed), 10))

    assert draw(0) == draw(0)
    assert not set(draw(0)) & set(draw(1))


def test_truncation_and_padding_stored_in_the_file_are_undone(tokenizer_json: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert count_tokens(load_tokenizer(tmp_path / "tokenizer.json"), " bee cow dog elk fox gnu") == 6


def test_no_room_for_a_word(tokenizer_json: Path) -> None:
    with pytest.raises(UsageError, match="at least 2 input tokens"):
        next(prompts(load_tokenizer(tokenizer_json), tokens=1, seed=0))


def test_running_out_of_distinct_prompts_is_said_and_not_hidden_by_repeats(tokenizer_json: Path) -> None:
    with pytest.raises(UsageError, match="distinct prompts of 2 tokens; raise the number of input tokens"):
        list(prompts(load_tokenizer(tokenizer_json), tokens=2, seed=0))


def test_a_vocabulary_without_words_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"1": 0, "2": 1}, []))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputDataError, match="knows no two words"):
        next(prompts(load_tokenizer(tmp_path / "tokenizer.json"), tokens=4, seed=0))


def test_a_missing_or_damaged_tokenizer_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match=r"tokenizer\.json is not a file"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(InputDataError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path / "tokenizer.json")
