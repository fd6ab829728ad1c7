"""Source of calibration text: a calibration dataset of configs/calibration, or a user's file."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtpipe.configs import facts, read
from trtpipe.engines.base import CalibrationConfig
from trtpipe.engines.errors import HostError, InputDataError, UsageError, suggestion
from trtpipe.engines.extras import install_command
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.hf.tokenizer import read_tokenizer
from trtpipe.engines.model_config import ModelConfig
from trtpipe.pipeline.sources import hub
from trtpipe.pipeline.store.digests import Digests, sha256_file

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from tokenizers import Tokenizer

    from trtpipe.engines.quantize.samples import Chat

HELDOUT = "heldout"


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A file of configs/calibration.

    kind      `file` (shipped beside it, with its sha256) or `hub` (a pinned data set of the hub)
    field     column of the hub's parquet files that holds the text
    """

    name: str
    kind: str
    license: str
    file: str = ""
    sha256: str = ""
    repo_id: str = ""
    revision: str = ""
    files: tuple[str, ...] = ()
    field: str = "text"


def load_data_sets() -> dict[str, DataSet]:
    """Every data set of configs/calibration by its name."""
    folder = facts.CONFIGS / "calibration"
    sets = [read.build(DataSet, read.read_yaml(path), path.name) for path in sorted(folder.glob("*.yaml"))]
    return {one.name: one for one in sets}


def digest(data: str, digests: Digests) -> str:
    """Identity of the text: a file's content digest, or the commit and files of a data set. Raises UsageError."""
    known = _find(data)
    if isinstance(known, Path):
        return digests.file(known)
    return known.sha256 or f"{known.repo_id}@{known.revision}:{','.join(known.files)}:{known.field}"


def absolute(data: str) -> str:
    """The same data in any working folder. Raises UsageError."""
    known = _find(data)
    return str(known.absolute()) if isinstance(known, Path) else data


def samples(model: Path, calibration: CalibrationConfig) -> npt.NDArray[np.int32]:
    """[samples, seq_len] token ids of the data for the model in folder `model`.

    Raises UsageError for unknown data, HostError when the hub does not deliver, InputDataError for unusable text.
    """
    from trtpipe.engines.quantize.samples import make_samples

    config, tokenizer = read_model_config(model, quantized=True), read_tokenizer(model)
    require_length(config, calibration)
    read = texts(calibration.data, _chat(model, tokenizer))
    return make_samples(read, tokenizer, calibration, vocab_size=config.vocab_size)


def _chat(model: Path, tokenizer: Tokenizer) -> Chat:
    """What makes the text of a conversation with the chat template of the model in folder `model`."""
    from trtpipe.engines.hf import chat_template

    @functools.cache
    def template() -> chat_template.ChatTemplate:
        found = chat_template.read_template(model)
        if found is None:
            raise InputDataError(
                f"{model} has no chat template", why="the data has messages", remedy="give texts under `text`"
            )
        return chat_template.compile_template(model, found)

    def chat(messages: list[dict[str, Any]]) -> str:
        try:
            # Without a date the text would depend on the day. This one is Llama 3's own default.
            day = {"date_string": "26 Jul 2024", "strftime_now": date(2024, 7, 26).strftime}
            text = template()(messages, day, prompt=False)
        except InputDataError as error:
            if error.remedy == chat_template.RAW:
                error.remedy = "give texts under `text`"
            raise
        # Many templates write the token that the tokenizer would put before the text.
        bos = chat_template.special_tokens(model).get("bos_token", "")
        return text.removeprefix(bos) if tokenizer.token_to_id(bos) in tokenizer.encode("").ids[:1] else text

    return chat


def unread(data: str) -> list[str]:
    """A notice of texts and answers in a user's .jsonl file that are not read."""
    from trtpipe.engines.quantize.samples import unread_keys

    known = _find(data)
    if not isinstance(known, Path) or known.suffix != ".jsonl":
        return []
    used, others = unread_keys(known)
    names = ", ".join(f"'{name}'" for name in others)
    return [f"{known}: of its objects only '{used}' is read, not {names}"] if others else []


def require_length(model: ModelConfig, calibration: CalibrationConfig) -> None:
    """Raises UsageError for rows that are longer than the model's sequences."""
    if calibration.seq_len > model.longest_sequence:
        raise UsageError(
            f"calibration.seq_len is {calibration.seq_len}, and the model takes {model.longest_sequence} tokens",
            remedy=f"use --set calibration.seq_len={model.longest_sequence} or less",
        )


def texts(data: str, chat: Chat | None = None) -> Iterator[str]:
    """The texts of a data set or file; `chat` makes that of a conversation."""
    from trtpipe.engines.quantize.samples import read_texts

    known = _find(data)
    if isinstance(known, Path):
        return read_texts(known, chat)
    if known.kind == "file":
        path = facts.CONFIGS / "calibration" / known.file
        if sha256_file(path) != known.sha256:
            raise InputDataError(f"{path} is not the file we ship", remedy="install trtpipe again")
        return read_texts(path)
    return _column(known)


def _find(data: str) -> DataSet | Path:
    sets = load_data_sets()
    if data in sets:
        return sets[data]
    path = Path(data)
    with contextlib.suppress(RuntimeError):  # `~somebody` without a home
        path = path.expanduser()
    if path.is_file():
        return path
    raise UsageError(f"no text '{data}'", why="it is neither a file nor a data set", remedy=suggestion(data, sets))


def _column(data: DataSet) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise HostError("pyarrow is not installed", remedy=f"run `{install_command('quantize')}`") from None
    for name in data.files:
        path = hub.download_data(data.repo_id, data.revision, name)
        for batch in parquet.ParquetFile(path).iter_batches(columns=[data.field]):
            yield from (text for text in batch.column(0).to_pylist() if text and text.strip())
