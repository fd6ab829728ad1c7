"""Texts: exact in tokens with every kind of tokenizer, unlike each other from the first words on, fixed by the seed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tests.support.small_tokenizers import KINDS, RUN_OVER, make
from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.pipeline.bench.load.texts import Texts, count_tokens, load_tokenizer


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make(kind, tmp_path_factory.mktemp("tokenizer") / "it") for kind in (*KINDS, RUN_OVER)}


@pytest.fixture(scope="module", params=[*KINDS, RUN_OVER])
def tokenizer(request: pytest.FixtureRequest, files: dict[str, Path]) -> Tokenizer:
    return load_tokenizer(files[request.param])


@pytest.fixture(scope="module")
def byte_level(files: dict[str, Path]) -> Tokenizer:
    return load_tokenizer(files["byte-level"])


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text).ids)


@given(seed=st.integers(0, 2**32), lengths=st.lists(st.integers(4, 200), min_size=1, max_size=20))
def test_a_text_has_exactly_the_tokens_asked_for(tokenizer: Tokenizer, seed: int, lengths: list[int]) -> None:
    made = Texts(tokenizer, seed).prompts(lengths, rng(seed))
    assert [tokens(tokenizer, text) for text in made] == lengths
    assert len(set(made)) == len(made)


def test_texts_of_a_tokenizer_without_tokens_over_two_words_need_no_second_look(files: dict[str, Path]) -> None:
    apart = {kind for kind, path in files.items() if Texts(load_tokenizer(path), 0)._apart}
    assert apart == {"byte-level", "both ends", "unsplit"}


def test_texts_differ_within_their_first_words(byte_level: Tokenizer) -> None:
    texts = Texts(byte_level, 0)
    made = [text for _ in range(4) for text in texts.prompts([64, 30] * 250, rng())]
    assert len({" ".join(text.split()[:6]) for text in made}) == 2000
    assert len({text.split()[0] for text in made}) > 10


def test_special_tokens_are_counted(files: dict[str, Path]) -> None:
    words = {}
    for kind in ("byte-level", "both ends"):
        texts = Texts(load_tokenizer(files[kind]), 0)
        words[kind] = (len(texts.prompts([8], rng())[0].split()), texts.special, texts.trailing)
    assert words == {"byte-level": (7, 1, 0), "both ends": (6, 2, 1)}


def test_the_seed_fixes_the_texts(tokenizer: Tokenizer) -> None:
    def draw(seed: int) -> list[str]:
        return Texts(tokenizer, seed).prompts([12] * 10, rng(seed))

    assert draw(0) == draw(0)
    assert not set(draw(0)) & set(draw(1))


def test_an_opening_makes_the_first_tokens_of_a_text(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    texts = Texts(tokenizer, 0)
    openings = [texts.opening(12, rng(number)) for number in range(3)]
    made = texts.prompts([40, 41, 60, 30, 40], rng(), [*openings, openings[0], []])
    assert [tokens(tokenizer, text) for text in made] == [40, 41, 60, 30, 40]
    first = [tokenizer.encode(text).ids[:12] for text in made]
    # Where a token may hold parts of two words, the last ones before the border may differ.
    exact = 12 if request.node.callspec.params["tokenizer"] != RUN_OVER else 9
    assert first[0][:exact] == first[3][:exact]
    assert len({tuple(ids) for ids in first}) >= 4
    assert all(text.startswith(texts._between.join(opening)) for text, opening in zip(made, openings, strict=False))


def test_a_block_is_the_same_whatever_comes_before_it(byte_level: Tokenizer) -> None:
    texts = Texts(byte_level, 0)
    block, other = texts.block(rng(1), 30), texts.block(rng(2), 30)
    assert block == texts.block(rng(1), 30) != other
    alone, after = texts.fit(list(block), 31), texts.fit([*other, *block], 61)
    # Its first word has a space before it or has not, which is another token.
    assert byte_level.encode(alone).ids[2:] == byte_level.encode(after).ids[32:]


@pytest.mark.parametrize("length", [4, 20, 300])
def test_words_that_make_other_tokens_than_planned_are_made_to_fit(tokenizer: Tokenizer, length: int) -> None:
    texts = Texts(tokenizer, 0)
    text = texts.fit(texts.block(rng(), length - texts.special), length)
    assert tokens(tokenizer, text) == length


answers = st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from(
    ["", " ", "\n\n", "The end.", " bee cow", "s", "<s>", "ee\u0301", "1 2 3 ", "</s>ant"]
)


@given(answer=answers, new=st.integers(1, 9), before=st.integers(2, 20))
def test_the_next_prompt_of_a_conversation_is_counted_as_a_whole(
    tokenizer: Tokenizer, answer: str, new: int, before: int
) -> None:
    texts = Texts(tokenizer, 0)
    (prompt,) = texts.prompts([before + texts.special], rng())
    for _ in range(2):
        counted = tokens(tokenizer, prompt)
        following, found = texts.follow(prompt, counted, answer, texts.words(rng(), new))
        assert following.startswith(prompt + answer)
        assert found == tokens(tokenizer, following)
        prompt = following


def test_where_tokens_run_over_words_a_conversation_is_counted_from_its_start(files: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(files[RUN_OVER])
    texts = Texts(tokenizer, 0)
    for prompt in texts.prompts([20] * 100, rng()):
        following, found = texts.follow(prompt, 20, " dog elk", ["fox", "gnu"])
        assert found == tokens(tokenizer, following)


def test_a_text_that_writes_the_first_special_token_gets_no_second_one(byte_level: Tokenizer) -> None:
    texts = Texts(byte_level, 0)
    assert texts.count(["ant bee", "<s>ant bee", " <s>ant"]) == [3, 3, tokens(byte_level, " <s>ant")]
    assert texts.count([]) == []


def test_no_room_for_a_word(byte_level: Tokenizer) -> None:
    texts = Texts(byte_level, 0)
    with pytest.raises(UsageError, match=r"a prompt of 1 tokens has no room for a word of its own.*at least 2 input"):
        texts.prompts([1], rng())
    with pytest.raises(UsageError, match="10 are special tokens or shared with others; give at least 11 input tokens"):
        texts.prompts([10], rng(), [texts.opening(10, rng())])


def test_running_out_of_distinct_prompts_is_said_and_not_hidden_by_repeats(byte_level: Tokenizer) -> None:
    texts = Texts(byte_level, 0)
    made = texts.prompts([2] * 19, rng())
    assert len(set(made)) == 19
    with pytest.raises(UsageError, match="no more than 19 distinct prompts of 2 tokens; raise the number of input tok"):
        texts.prompts([2], rng())
    assert len(set(texts.prompts([3] * 19 * 19, rng()))) == 19 * 19


def test_a_length_that_no_words_make_is_said(files: dict[str, Path]) -> None:
    texts = Texts(load_tokenizer(files["letters"]), 0)
    # What is shared with others is not cut, so nothing is left to change.
    with pytest.raises(UsageError, match=r"no text of exactly 5 tokens was found; ask for another number"):
        texts.prompts([5], rng(), [["long"]])


def test_every_beginning_is_used_before_they_run_out(files: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(files["letters"])
    for seed in range(6):
        assert len(set(Texts(tokenizer, seed).prompts([2] * 26 * 26, rng()))) == 26 * 26


def test_a_vocabulary_without_words_is_refused() -> None:
    with pytest.raises(InputDataError, match="knows no two words"):
        Texts(Tokenizer(models.BPE({"1": 0, "2": 1}, [])), 0)


def test_truncation_and_padding_stored_in_the_file_are_undone(files: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(files["byte-level"]))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert count_tokens(load_tokenizer(tmp_path / "tokenizer.json"), " bee cow dog elk fox gnu") == 6


def test_a_missing_or_damaged_tokenizer_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match=r"tokenizer\.json is not a file"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(InputDataError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path / "tokenizer.json")
