"""What the text models of a repository share: words packed for the engine, and text that streams exactly."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.factories import write_tokenizer
from trtpipe import triton_repo
from trtpipe.engines.errors import InputDataError
from trtpipe.triton_repo.shared_text import read_text, tokenizer_info

PATH = Path(triton_repo.__file__).parent / "templates" / "shared" / "trtpipe_text.py"
SPEC = importlib.util.spec_from_file_location("trtpipe_text", PATH)
assert SPEC is not None
assert SPEC.loader is not None
text: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(text)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return text.load_tokenizer(folder)


def sentencepiece() -> Tokenizer:
    """Words with ▁ for their space, and <0xNN> for bytes without a token, as Llama 2 has them."""
    words = ["<unk>", "▁Hello", "▁world", "!", "▁", "é"]
    vocab = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def byte_tokens(character: str) -> list[int]:
    return [6 + byte for byte in character.encode()]


def streamed(tokenizer: Tokenizer, chunks: list[list[int]]) -> list[str]:
    detokenizer = text.Detokenizer(tokenizer, skip_special_tokens=True)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


def test_a_character_is_held_back_until_it_is_whole(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀b").ids
    assert len(ids) == 6
    assert streamed(byte_level, [[token] for token in ids]) == ["a", "", "", "", "😀", "b", ""]


def test_the_end_gives_up_what_is_unfinished(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀").ids
    assert streamed(byte_level, [ids[:3]]) == ["a", "�"]
    assert streamed(byte_level, [byte_level.encode("hi 😀").ids[:-1]]) == ["hi ", "�"]


def test_only_the_unfinished_character_is_held_back(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("é😀 b 😀").ids
    assert streamed(byte_level, [ids[:3], ids[3:11], ids[11:]]) == ["é", "😀 b ", "😀", ""]


def test_of_bytes_that_are_no_text_the_last_alone_are_held_back(byte_level: Tokenizer) -> None:
    """Or each token would take longer than the one before: they are decoded together."""
    half, decoded = byte_level.encode("é").ids[1], list[int]()

    def decode(ids: list[int], skip_special_tokens: bool) -> str:
        decoded.append(len(ids))
        return str(byte_level.decode(ids, skip_special_tokens=skip_special_tokens))

    tokenizer: Any = SimpleNamespace(decode=decode)
    pieces = streamed(tokenizer, [[half]] * 20)
    assert pieces == [*[""] * 8, "\ufffd" * 6, *[""] * 5, "\ufffd" * 6, *[""] * 5, "\ufffd" * 8]
    assert max(decoded) == 9
    # A character among them is whole all the same, and special tokens are no text.
    face = byte_level.encode("😀").ids
    assert "".join(streamed(byte_level, [[token] for token in [half] * 9 + face])) == "\ufffd" * 9 + "😀"
    assert "".join(streamed(byte_level, [[token] for token in [*face[:2], *[1] * 20, *face[2:]]])) == "😀"


def test_the_spaces_of_words_are_kept() -> None:
    tokenizer = sentencepiece()
    assert streamed(tokenizer, [[1], [2], [3], [2]]) == ["Hello", " world", "!", " world", ""]


def test_special_tokens_between_words_cost_no_space(byte_level: Tokenizer) -> None:
    hello, there = byte_level.encode("hello").ids, byte_level.encode(" there").ids
    assert "".join(streamed(byte_level, [hello, [1], [1], there])) == "hello there"


# A special token, and bytes of characters that have several: enough of them in a row are given up.
BYTES = st.sampled_from([0, *(2 + sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter) for letter in "ĢŁðÿ")])


@given(st.lists(st.lists(st.one_of(st.integers(0, 257), BYTES, BYTES), max_size=4), max_size=30))
def test_the_pieces_add_up_to_the_whole_byte_level(byte_level: Tokenizer, chunks: list[list[int]]) -> None:
    whole = byte_level.decode([token for chunk in chunks for token in chunk], skip_special_tokens=True)
    assert "".join(streamed(byte_level, chunks)) == whole


@given(st.lists(st.one_of(st.integers(1, 5).map(lambda word: [word]), st.characters(codec="utf-8").map(byte_tokens))))
def test_the_pieces_add_up_to_the_whole_sentencepiece(parts: list[list[int]]) -> None:
    """For bytes that are text; of a run of bytes that is none the library replaces every byte, looking back."""
    tokenizer = sentencepiece()
    ids = [token for part in parts for token in part]
    for size in (1, 3, 16):
        chunks = [ids[place : place + size] for place in range(0, len(ids), size)]
        assert "".join(streamed(tokenizer, chunks)) == tokenizer.decode(ids)


def test_words_are_packed_as_ids_and_end_offsets() -> None:
    packed = text.pack_words([[[5, 6], [7]], [[8]], []])
    assert packed.tolist() == [[[5, 6, 7], [2, 3, -1]], [[8, 0, 0], [1, -1, -1]], [[0, 0, 0], [-1, -1, -1]]]
    assert text.pack_words([[], []]).shape == (2, 2, 0)


@pytest.mark.parametrize(
    ("generation", "settings", "expected"),
    [
        # Llama 3 ends turns with a second id; tokenizer_config.json knows only one.
        ({"eos_token_id": [1, 9], "pad_token_id": 4}, {"eos_token": "</s>", "bos_token": "<s>"}, ([1, 9], 4, "<s>")),
        ({"eos_token_id": 9}, {}, ([9], 9, None)),
        ({}, {"eos_token": {"content": "</s>"}}, ([1], 1, None)),
        ({}, {}, ([], 0, None)),
    ],
)
def test_end_and_pad_ids_come_from_the_generation_config_first(
    tmp_path: Path, byte_level: Tokenizer, generation: dict[str, Any], settings: dict[str, Any], expected: Any
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert text.special_ids(tmp_path, byte_level) == expected


def test_flags_are_true_or_false_and_nothing_else() -> None:
    config = {"parameters": {"a": {"string_value": "True"}, "b": {"string_value": "${b}"}}}
    assert text.flag(config, "a", False) is True
    assert text.flag(config, "missing", True) is True
    with pytest.raises(ValueError, match=r"parameter b is '\$\{b\}', not true or false"):
        text.flag(config, "b", True)


def test_relative_folders_count_from_the_repository() -> None:
    config = {"parameters": {"tokenizer_dir": {"string_value": "preprocessing/1/tokenizer"}}}
    found = text.resolve_folder(config, "tokenizer_dir", "/models/postprocessing")
    assert found == Path("/models/preprocessing/1/tokenizer")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", b"\xff", "holds no tokenizer that can be read"),
        ("generation_config.json", b'{"eos_token_id": 2.5}', "holds no tokenizer that can be read"),
        ("generation_config.json", b'{"eos_token_id": ["2"]}', "the end or padding token of"),
        ("generation_config.json", b'{"pad_token_id": 4294967296}', "the end or padding token of"),
        ("tokenizer_config.json", b'{"bos_token": 7}', "is not a text; correct tokenizer_config.json"),
    ],
)
def test_a_damaged_tokenizer_is_told(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputDataError, match=said):
        read_text(tmp_path)


def test_a_vocabulary_of_absurd_ids_is_told(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 4_000_000_000}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(InputDataError, match="vocab_size is 4,000,000,001, and at most 8,388,608 are read"):
        tokenizer_info(tmp_path)
