"""Download from a GGUF file, which a process of its own reads into safetensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import CONFIG, GGUF_KEYS, gguf_bytes, hf_folder
from tests.unit.stages.conftest import WANTED, names, refusal, run
from trtpipe.engines.errors import HostError, InputDataError
from trtpipe.engines.extras import install_command
from trtpipe.engines.hf import gguf_worker as gguf_import
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.hf.layout import with_older_names
from trtpipe.engines.model_source import FolderSource, GgufSource, HubSource
from trtpipe.pipeline.resolve import resolve
from trtpipe.pipeline.runner import wanted_record, why
from trtpipe.pipeline.stages import download
from trtpipe.pipeline.stages.download import DOWNLOAD
from trtpipe.pipeline.store.store import Store


def test_a_gguf_file(tmp_path: Path, out: Path, worker: list[dict[str, Any]]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes())
    told: list[str] = []
    assert run(GgufSource(path=str(path)), out, told.append) == {"source": f"GGUF file {path}"}
    assert told == ["reading model.gguf into safetensors"]
    assert worker == [{"gguf": str(path), "out": str(out), "bytes": gguf_bytes()}]
    assert names(out) == WANTED


@pytest.mark.parametrize("content", [b"", b"GGU", b"ggml....", b"version https://git-lfs.github.com/spec/v1\n"])
def test_what_is_no_gguf_file(tmp_path: Path, out: Path, worker: list[dict[str, Any]], content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert refusal(GgufSource(path=str(path)), out, InputDataError, 3) == (
        f"{path} is not a GGUF file: it begins with {content[:4]!r}; download it again"
    )
    assert worker == []


def test_a_gguf_file_that_is_not_there(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "model.gguf"
    line = refusal(GgufSource(path=str(path)), out, InputDataError, 3)
    assert line == f"GGUF file {path} cannot be read: No such file or directory"


def test_what_the_reader_made_is_checked(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_bytes())
    monkeypatch.setattr(download, "run_worker", lambda *args, **kwargs: hf_folder(out, tokenizer=False))
    assert "has no tokenizer.json" in refusal(GgufSource(path=str(tmp_path / "model.gguf")), out, InputDataError, 3)


def test_the_readers_versions_are_part_of_the_key() -> None:
    assert sorted(DOWNLOAD.tools(GgufSource(path="x.gguf"))) == ["gguf", "gguf_reader", "torch", "transformers"]
    assert DOWNLOAD.tools(FolderSource(path="x")) == DOWNLOAD.tools(HubSource(repo_id="a/b")) == {}


def test_a_model_that_an_earlier_reader_made_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes())
    spec = resolve([("option", {"model": str(path), "gpu": "cpu", "dtype": "fp32"})])
    wanted = wanted_record(DOWNLOAD, spec, {}, Store(tmp_path / "home"))
    last = replace(wanted, tools={name: version for name, version in wanted.tools.items() if name != "gguf_reader"})
    assert last.key != wanted.key
    assert why(last, wanted) == "tools: gguf_reader None -> 3"


@pytest.mark.parametrize(("keys", "kv_heads"), [({}, 4), ({"llama.attention.head_count_kv": 2}, 2)])
def test_a_file_that_states_no_kv_heads_has_one_for_each_head(
    tmp_path: Path, keys: dict[str, int], kv_heads: int
) -> None:
    import gguf

    stated = {name: GGUF_KEYS[name] for name in ("general.architecture", "llama.attention.head_count")}
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(stated | keys, {}))
    # transformers takes the keys from `fields`, and permutes q and k where it finds both numbers.
    fields = gguf_import._read(gguf.GGUFReader, path).fields
    names = ("llama.attention.head_count", "llama.attention.head_count_kv")
    assert [fields[name].contents() for name in names] == [4, kv_heads]


def test_the_bytes_that_the_reader_has_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf
    import numpy as np

    source = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    for name, count in (("a", 4), ("b", 12)):
        writer.add_tensor(name, np.arange(count, dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    monkeypatch.setattr(gguf, "dequantize", gguf.dequantize)  # restored afterwards
    told: list[tuple[int, int]] = []
    gguf_import._report_reading(source, lambda done, total: told.append((done, total)))
    values = [gguf.dequantize(one.data, one.tensor_type).tolist() for one in gguf.GGUFReader(str(source)).tensors]
    assert values == [list(range(4)), list(range(12))]
    assert told == [(0, 64), (16, 64), (64, 64)]


def test_a_host_without_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "GGUF_READERS", ("a-package-nobody-has",))
    with pytest.raises(HostError) as error:
        DOWNLOAD.tools(GgufSource(path="x.gguf"))
    assert error.value.exit_code == 4
    assert error.value.remedy == f"run `{install_command('gguf')}`"


def test_rotary_settings_are_written_in_both_spellings(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    # As transformers 5 saves it.
    config = {**CONFIG, "rope_parameters": {"rope_theta": 5e5, **linear}, "dtype": "bfloat16"}
    del config["rope_theta"], config["torch_dtype"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    before = read_model_config(tmp_path)
    written = with_older_names(config)
    path.write_text(json.dumps(written))
    assert (written["rope_theta"], written["rope_scaling"], written["torch_dtype"]) == (5e5, linear, "bfloat16")
    assert read_model_config(tmp_path) == before


def tokenizer_file(
    path: Path, model: str, pre: str | None, tokens: list[str], *, types: list[int] | None = None, eos: int = 1,
    flags: dict[str, bool] | None = None,
) -> Path:  # fmt: skip
    """A GGUF file of the keys of a tokenizer whose first tokens are BOS and, where `eos` is not another, EOS."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    if types is not None:
        writer.add_token_types(types)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(eos)
    for name, value in (flags or {}).items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file):
        write()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "it's 12345", ["it", "'s", "Ġ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", "it's 12345", ["it", "'s", "Ġ", "123", "45"]),
        ("llama-bpe", "IT'S  (a)\n\n b", ["IT", "'S", "Ġ", "Ġ(", "a", ")ĊĊ", "Ġb"]),
        ("llama-bpe", "1,5 \n\tx  ", ["1", ",", "5", "ĠĊ", "ĉx", "ĠĠ"]),
    ],
)
def test_a_text_is_split_as_the_file_says(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    from tokenizers import Tokenizer

    folder = hf_folder(tmp_path / "made")
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    source = tokenizer_file(tmp_path / "model.gguf", "gpt2", pre, sorted(tokens, key=lambda name: tokens[name]))
    gguf_import._correct_tokenizer(source, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_piece_that_is_a_token_stays_it_in_llama_3(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    ids = {}
    for pre in ("smollm", "llama-bpe"):
        folder = hf_folder(tmp_path / pre)
        raw = json.loads((folder / "tokenizer.json").read_text())
        raw["model"]["vocab"]["abc"] = 258  # no merges make it
        (folder / "tokenizer.json").write_text(json.dumps(raw))
        source = tokenizer_file(tmp_path / "model.gguf", "gpt2", pre, list(raw["model"]["vocab"]))
        gguf_import._correct_tokenizer(source, folder)
        ids[pre] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("abc").ids
    assert ids["llama-bpe"] == [0, 258]
    assert len(ids["smollm"]) == 3


@pytest.mark.parametrize(
    ("model", "pre", "keys", "begins"),
    [
        ("llama", None, {}, True),
        ("llama", None, {"add_bos_token": False}, False),
        ("gpt2", "llama-bpe", {}, True),
        ("gpt2", "llama-bpe", {"add_bos_token": False}, False),
        ("gpt2", "smollm", {}, False),
        ("gpt2", "smollm", {"add_bos_token": True}, True),
    ],
)
def test_a_text_begins_and_ends_with_the_tokens_of_the_file(
    tmp_path: Path, model: str, pre: str | None, keys: dict[str, bool], begins: bool
) -> None:
    from tokenizers import Tokenizer

    folder = hf_folder(tmp_path / "made")
    # As transformers writes it.
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "<s>"}')
    source = tokenizer_file(tmp_path / "model.gguf", model, pre, ["<s>", "</s>"], flags=keys)
    gguf_import._correct_tokenizer(source, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("a").tokens == (["<s>", "a"] if begins else ["a"])
    assert tokenizer.encode("a", "b").type_ids == ([0, 0, 1, 1] if begins else [0, 1])
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {
        "bos_token": "<s>", "eos_token": "</s>", "eos_token_id": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("model", "pre"), [("llama", None), ("gpt2", "llama-bpe")])
def test_a_text_is_searched_for_the_user_defined_tokens_of_the_file(
    tmp_path: Path, model: str, pre: str | None
) -> None:
    from tokenizers import Tokenizer

    folder = hf_folder(tmp_path / "made")
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["vocab"] |= {"<|im_start|>": 258, "<|im_end|>": 259}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    source = tokenizer_file(
        tmp_path / "model.gguf", model, pre, list(raw["model"]["vocab"]), types=[3, 3, *[1] * 256, 4, 4], eos=259
    )
    gguf_import._correct_tokenizer(source, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>a<|im_end|>").tokens == ["<s>", "<|im_start|>", "a", "<|im_end|>"]
    # The end of an answer is no part of its text; other tokens that the user defined are.
    assert tokenizer.decode(tokenizer.encode("<|im_start|>a<|im_end|>").ids) == "<|im_start|>a"
