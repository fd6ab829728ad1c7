"""Reader of the tokenizer in a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.json_input import MAX_BYTES, check_values, read_bounded

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`/tokenizer.json. Raises InputDataError where there is none or it cannot be read."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputDataError(
            f"{folder} has no tokenizer.json",
            why="text cannot be tokenized",
            remedy="copy tokenizer.json from the original model, or download the model again",
        )
    try:
        data = read_bounded(path, MAX_BYTES)
        check_values(data)  # the library takes 500 bytes or more for each value
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises no narrower class
        raise InputDataError(f"{path} is not a tokenizer", why=str(error), remedy="download the model again") from None
