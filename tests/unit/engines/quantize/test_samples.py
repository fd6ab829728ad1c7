"""Calibration samples: packing loses and adds nothing, the same input gives the same rows, and bad data is named."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.support.factories import hf_folder
from trtpipe import configs
from trtpipe.engines.base import CalibrationConfig
from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.engines.quantize.samples import make_samples, read_texts
from trtpipe.pipeline.sources import calibration, hub

CALIBRATION = Path(configs.__file__).parent / "calibration"
BOS = 0
VOCAB = 258


def byte_tokenizer(*, bos: bool = False) -> Any:
    """Byte b is token b + 2, <s> is 0 and <pad> 1; with `bos`, every text begins with <s>."""
    # The 256 bytes as byte-level BPE spells them: printable ones are themselves, the others follow from U+0100.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    spelt = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(hidden)}
    vocab = {"<s>": BOS, "<pad>": 1, **{char: byte + 2 for byte, char in spelt.items()}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(["<s>", "<pad>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
        )
    return tokenizer


def ids(text: str) -> list[int]:
    return [byte + 2 for byte in text.encode()]


def sampled(texts: list[str], samples: int, seq_len: int, *, bos: bool = False, seed: int = 0) -> Any:
    config = CalibrationConfig(data="some.txt", samples=samples, seq_len=seq_len, seed=seed)
    return make_samples(texts, byte_tokenizer(bos=bos), config, vocab_size=VOCAB)


def refusal(texts: list[str], samples: int, seq_len: int) -> str:
    with pytest.raises(InputDataError) as error:
        sampled(texts, samples, seq_len)
    return str(error.value)


# --- packing ---


def test_rows_are_cut_from_one_text_after_another() -> None:
    rows = sampled(["abcdefgh"], 2, 3)
    assert rows.dtype == np.int32
    assert rows.tolist() == [[99, 100, 101], [102, 103, 104]]


def test_every_text_begins_with_its_own_bos() -> None:
    rows = sampled(["aaa", "aaa", "aaa"], 3, 4, bos=True)
    assert rows.tolist() == [[0, 99, 99, 99]] * 3


def test_a_tokenizer_without_bos_gets_none() -> None:
    assert BOS not in sampled(["aaa", "bbb"], 2, 3)


TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=1, max_size=150)


@given(texts=TEXTS, bos=st.booleans(), seed=st.integers(0, 2**70), data=st.data())
def test_rows_together_are_the_beginning_of_the_texts_in_some_order(
    texts: list[str], bos: bool, seed: int, data: st.DataObject
) -> None:
    # A number and a zero byte begin each text, so that the order can be read off the result; none may spell <s>.
    texts = [f"{index}\0{text}".replace("<", "(") for index, text in enumerate(texts)]
    total = sum(len(ids(text)) + bos for text in texts)
    seq_len = data.draw(st.integers(1, total))
    whole = sampled(texts, total // seq_len, seq_len, bos=bos, seed=seed)
    assert whole.shape == (total // seq_len, seq_len)
    every = sampled(texts, total, 1, bos=bos, seed=seed).ravel().tolist()
    assert whole.ravel().tolist() == every[: total // seq_len * seq_len]
    left = [[BOS] * bos + ids(text) for text in texts]
    while every:
        first = next(part for part in left if every[: len(part)] == part)
        left.remove(first)
        every = every[len(first) :]
    assert left == []


@given(rows=st.integers(1, 30), more=st.integers(0, 10))
def test_fewer_rows_are_the_first_of_more(rows: int, more: int) -> None:
    texts = [f"text number {index}" for index in range(60)]
    assert np.array_equal(sampled(texts, rows + more, 16)[:rows], sampled(texts, rows, 16))


@pytest.mark.parametrize("asks", ["padding", "truncation", "both"])
def test_padding_and_truncation_in_tokenizer_json_are_not_obeyed(asks: str) -> None:
    tokenizer = byte_tokenizer()
    if asks != "truncation":
        tokenizer.enable_padding(length=32, pad_id=1, pad_token="<pad>")
    if asks != "padding":
        tokenizer.enable_truncation(2)
    before = tokenizer.to_str()
    config = CalibrationConfig(data="some.txt", samples=3, seq_len=4)
    rows = make_samples(["abcdef", "ghijkl"], tokenizer, config, vocab_size=VOCAB)
    assert sorted(rows.ravel().tolist()) == ids("abcdefghijkl")
    assert tokenizer.to_str() == before


def test_the_order_is_decided_by_the_seed_alone() -> None:
    texts = [f"{index:02}" for index in range(20)]
    orders = {seed: sampled(texts, 20, 2, seed=seed).tolist() for seed in (0, 1)}
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == [ids(text) for text in texts]
    assert sampled(texts, 20, 2, seed=1).tolist() == orders[1]
    # The order of the texts themselves is another input.
    assert sampled(texts[::-1], 20, 2).tolist() != orders[0]


def test_the_demo_text_gives_these_rows_and_no_others() -> None:
    rows = make_samples(
        read_texts(CALIBRATION / "demo.txt"),
        byte_tokenizer(bos=True),
        CalibrationConfig(data="demo", samples=64, seq_len=128, seed=7),
        vocab_size=VOCAB,
    )
    digest = hashlib.sha256(rows.astype("<i4").tobytes()).hexdigest()
    assert digest == "b06644ed6087ef6a8fb7a196e7685857478f6301152bf289f811c84ed27f9378"


# --- refusals ---


@pytest.mark.parametrize(
    ("texts", "samples", "length", "line"),
    [
        (["abcdefgh"], 3, 3, "gives 2 rows of 3 tokens, not 3; use --set calibration.samples=2, or a longer file"),
        (
            ["ab", "cd"],
            10**15,
            2,
            "gives 2 rows of 2 tokens, not 1000000000000000; use --set calibration.samples=2, or a longer file",
        ),
        (["ab", "cd"], 1, 5, "gives 0 rows of 5 tokens, not 1; give a longer file"),
        ([], 1, 1, "gives 0 rows of 1 tokens, not 1; give a longer file"),
        ([""], 1, 1, "gives 0 rows of 1 tokens, not 1; give a longer file"),
    ],
)
def test_too_little_text_says_how_many_rows_it_gives(texts: list[str], samples: int, length: int, line: str) -> None:
    assert refusal(texts, samples, length) == f"some.txt {line}"


def test_a_tokenizer_of_another_model_is_refused() -> None:
    config = CalibrationConfig(data="some.txt", samples=1, seq_len=2)
    make_samples(["abc"], byte_tokenizer(), config, vocab_size=102)
    with pytest.raises(InputDataError) as error:
        make_samples(["abc"], byte_tokenizer(), config, vocab_size=101)
    assert str(error.value) == (
        "the tokenizer does not match the vocabulary: it gives token 101 ('c'), the model has 101; "
        "take the tokenizer of the model itself"
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"data": ""}, "calibration.data is empty; name a data set or a .txt or .jsonl file"),
        ({"samples": 0}, "calibration.samples is 0; give a positive number"),
        ({"seq_len": -4}, "calibration.seq_len is -4; give a positive number"),
        ({"seed": -1}, "calibration.seed is -1; give 0 or a positive number"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as error:
        CalibrationConfig(**{"data": "demo", **changes})
    assert str(error.value) == line


def test_the_settings_nobody_gave() -> None:
    config = CalibrationConfig(data="demo")
    assert (config.samples, config.seq_len, config.seed) == (512, 512, 0)


# --- files ---


def written(tmp_path: Path, name: str, content: bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_a_txt_file_is_paragraphs(tmp_path: Path) -> None:
    content = "\n\nFirst,\nsecond line.\n \t\n\nNaïve —\r\nthird.\r\n\r\nLast".encode()
    assert list(read_texts(written(tmp_path, "some.txt", content))) == [
        "First,\nsecond line.",
        "Naïve —\r\nthird.",
        "Last",
    ]


def test_a_jsonl_file_has_a_text_on_each_line(tmp_path: Path) -> None:
    objects = [
        {"id": 1, "text": "as it is\n\n"},
        {"article": "three", "prompt": "two"},
        {"article": "Ünï"},
        {"text": "  "},
    ]
    content = "\n\n".join(json.dumps(value) for value in objects).encode() + b"\n"
    assert list(read_texts(written(tmp_path, "some.jsonl", content))) == ["as it is\n\n", "two", "Ünï"]


TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize("bos", [False, True])
def test_conversations_are_read_through_the_model_s_chat_template(tmp_path: Path, bos: bool) -> None:
    model = hf_folder(tmp_path / "model", vocab_size=VOCAB)
    byte_tokenizer(bos=bos).save(str(model / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{{ '?' if add_generation_prompt }}"
    (model / "chat_template.jinja").write_text(template)
    path = written(tmp_path, "some.jsonl", json.dumps({"messages": TURNS}).encode())
    config = CalibrationConfig(data=str(path), samples=1, seq_len=10)
    # One <s>, whoever writes it.
    assert calibration.samples(model, config).tolist() == [[BOS, *ids("[hi][yes]")]]
    for messages in ([], "hi", [{"role": "user"}], [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]):
        path.write_text(json.dumps({"messages": messages}))
        cause = ": turn 1 has no text as its role or content" if messages and messages != "hi" else ""
        with pytest.raises(InputDataError, match=f"line 1 has no conversation{cause}; give messages"):
            calibration.samples(model, config)
    path.write_text(json.dumps({"messages": TURNS}))
    (model / "chat_template.jinja").write_text("{{ bos_token }}{{ strftime_now('%Y-%m-%d') }}")
    assert calibration.samples(model, config).tolist() == [[BOS, *ids("2024-07-26")][:10]]
    (model / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(InputDataError, match="cannot be applied: no; give texts under `text`"):
        calibration.samples(model, config)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(InputDataError, match="has no chat template: the data has messages; give texts under `text`"):
        calibration.samples(model, config)


def test_texts_that_are_not_read_are_told(tmp_path: Path) -> None:
    def told(**fields: Any) -> list[str]:
        path.write_text(json.dumps(fields) + "\n")
        return calibration.unread(str(path))

    path = tmp_path / "some.jsonl"
    assert told(prompt="2 + 2?", response="4", number=1) == [
        f"{path}: of its objects only 'prompt' is read, not 'response'"
    ]
    assert told(text="two", prompt="one", messages=TURNS) == [
        f"{path}: of its objects only 'text' is read, not 'prompt', 'messages'"
    ]
    assert told(text="two", id="a-1", source="web", url="there") == []
    assert told(messages=TURNS, number=1) == told(text="two") == calibration.unread("demo") == []


GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"one\n\ntw\xff\n", "{}, line 3 is not UTF-8: invalid start byte"),
        ("a.txt", b"", "{} holds no text"),
        ("a.txt", b"\n \n\t\n", "{} holds no text"),
        ("a.jsonl", b"", "{} holds no text"),
        ("a.jsonl", b'\n{"text": "  "}\n', "{} holds no text"),
        ("a.jsonl", GOOD + b'{"text": "\xc3"}\n', "{}, line 2 is not UTF-8: invalid continuation byte"),
        ("a.jsonl", GOOD + b"\n{text}\n", "{}, line 3 is not JSON: Expecting property name"),
        ("a.jsonl", GOOD + b"[" * 100_000 + b"\n", "{}, line 2 is not JSON: "),
        ("a.jsonl", GOOD + b"7" * 5000 + b"\n", "{}, line 2 is not JSON: "),
        (
            "a.jsonl",
            GOOD + b'{"messages": []}\n',
            "{}, line 2 has no text; give an object with text or prompt or article",
        ),
        ("a.jsonl", GOOD + b'"text"\n', "{}, line 2 has no text; "),
        ("a.jsonl", GOOD + b'{"text": ["good"]}\n', "{}, line 2 has no text; "),
        ("a.jsonl", GOOD + b'{"text": "\\ud800"}\n', "{}, line 2 is not JSON: it holds half of a surrogate pair"),
    ],
)
def test_bad_data_is_named_with_its_file_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = written(tmp_path, name, content)
    with pytest.raises(InputDataError) as error:
        list(read_texts(path))
    assert str(error.value).startswith(message.format(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.txt"
    with pytest.raises(InputDataError) as error:
        list(read_texts(path))
    assert str(error.value) == f"{path} cannot be read: No such file or directory"


@pytest.mark.parametrize("name", ["some.csv", "some", "some.jsonl.gz"])
def test_another_kind_of_file_is_refused_before_it_is_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError) as error:
        read_texts(tmp_path / name)
    assert str(error.value) == (
        f"{tmp_path / name} is not a file of texts; give a .txt file (paragraphs) or a .jsonl file"
    )


# --- what is shipped ---


@pytest.mark.parametrize(("name", "low", "high"), [("demo", 300_000, 400_000), ("heldout", 60_000, 100_000)])
def test_a_shipped_text_is_the_one_its_facts_name(name: str, low: int, high: int) -> None:
    facts = yaml.safe_load((CALIBRATION / f"{name}.yaml").read_text())
    content = (CALIBRATION / facts["file"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == facts["sha256"]
    assert low < len(content) < high
    assert b"Gutenberg" not in content


def test_the_held_out_text_shares_nothing_with_the_demo() -> None:
    demo, heldout = (set(read_texts(CALIBRATION / f"{name}.txt")) for name in ("demo", "heldout"))
    assert len(demo) > 500
    assert len(heldout) > 200
    assert not demo & heldout


def test_a_data_set_of_the_hub_is_pinned_to_a_commit() -> None:
    every = [yaml.safe_load(path.read_text()) for path in sorted(CALIBRATION.glob("*.yaml"))]
    assert [facts["name"] for facts in every] == ["cnn_dailymail", "demo", "heldout", "wikitext2"]
    for facts in every:
        if facts["kind"] == "hub":
            assert len(bytes.fromhex(facts["revision"])) == 20


def test_the_texts_of_a_hub_data_set_are_a_column_without_its_empty_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reader of parquet that this environment has: one that does not go with its numpy fails to load."""
    import pyarrow
    import pyarrow.parquet as parquet

    table = {"text": ["one", "", " ", None, "two"], "other": list("abcde")}
    parquet.write_table(pyarrow.table(table), tmp_path / "part.parquet")
    monkeypatch.setattr(hub, "download_data", lambda repo, revision, name: tmp_path / name)
    data = next(name for name, one in calibration.load_data_sets().items() if one.kind == "hub")
    one = replace(calibration.load_data_sets()[data], files=("part.parquet",), field="text")
    monkeypatch.setattr(calibration, "load_data_sets", lambda: {"data": one})
    assert list(calibration.texts("data")) == ["one", "two"]
