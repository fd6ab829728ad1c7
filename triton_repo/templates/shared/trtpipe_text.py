"""Token ids to text and back, shared by the text models of this repository. Needs `tokenizers` and numpy only."""

import collections
import json
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

# What the tokenizer writes for bytes that are no whole character (yet).
UNFINISHED = "\ufffd"
# Tokens that a detokenizer holds for an unfinished character; then it gives up all but the bytes that one may lack.
MOST_HELD, MOST_BYTES = 8, 3


def parameter(config, key, default=None):
    """A string parameter of config.pbtxt."""
    entry = config["parameters"].get(key)
    return default if entry is None else entry["string_value"]


def flag(config, key, default):
    value = parameter(config, key, str(default)).strip().lower()
    if value not in ("true", "false", "1", "0"):
        raise ValueError(f"parameter {key} is '{value}', not true or false")
    return value in ("true", "1")


def resolve_folder(config, key, model_repository):
    """A folder parameter; a relative one counts from the root of the model repository."""
    folder = parameter(config, key)
    if not folder:
        raise ValueError(f"parameter {key} is missing from config.pbtxt")
    return Path(model_repository).parent / folder


def load_tokenizer(folder):
    """The fast tokenizer in `folder`. No code from the folder runs."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer.json in {folder}")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def special_ids(folder, tokenizer):
    """(end ids, pad id, beginning-of-sequence text) of the model, from its generation and tokenizer configs."""
    generation = _read(folder, "generation_config.json")
    settings = _read(folder, "tokenizer_config.json")
    ends = generation.get("eos_token_id")
    if ends is None:
        ends = tokenizer.token_to_id(_content(settings.get("eos_token")) or "")
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    pad = generation.get("pad_token_id")
    if pad is None:
        pad = tokenizer.token_to_id(_content(settings.get("pad_token")) or "")
    if pad is None:
        pad = ends[0] if ends else 0
    return ends, pad, _content(settings.get("bos_token"))


def _read(folder, name):
    path = folder / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _content(token):
    """A token's text; tokenizer_config.json writes it plain or as an object."""
    return token.get("content") if isinstance(token, dict) else token


def pack_words(rows):
    """Word lists as the engine wants them: [batch, 2, longest]; row 0 flattened ids, row 1 end offsets, then -1.

    `rows` holds, for each request, a list of token-id lists.
    """
    flat = [[token for word in words for token in word] for words in rows]
    longest = max((len(ids) for ids in flat), default=0)
    out = np.zeros((len(rows), 2, longest), dtype=np.int32)
    out[:, 1, :] = -1
    for row, (words, ids) in enumerate(zip(rows, flat, strict=True)):
        out[row, 0, : len(ids)] = ids
        ends = np.cumsum([len(word) for word in words], dtype=np.int32)
        out[row, 1, : len(ends)] = ends
    return out


class Detokenizer:
    """Turns a growing list of token ids into text pieces whose concatenation is the text of the whole list.

    Decoding a token needs the ones before it: a character may span several tokens, and SentencePiece drops the
    space of a first word. So the tokens of the last piece are kept and decoded again in front of the new ones.
    An unfinished character at the end is held back, and only it; `flush` gives up what is still held. Of a long run of
    bytes that are no text the last three alone are held: a character has four at most.
    """

    def __init__(self, tokenizer, skip_special_tokens):
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        self._ids = []  # tokens of the last whole piece, then those whose text has not been returned, or not in full
        self._whole = 0  # tokens of the last whole piece
        self._shown = 0  # characters of the others that have been returned

    def push(self, ids):
        self._ids.extend(ids)
        text = self._new_text()
        finished = text.rstrip(UNFINISHED)
        if text and finished == text:
            piece = finished[self._shown :]
            self._ids = self._ids[self._whole :]
            self._whole, self._shown = len(self._ids), 0
        elif len(ids) > 1:
            # Characters may end within these tokens, and some decoders tell only where the last token ends one.
            del self._ids[-len(ids) :]
            piece = "".join([self.push([one]) for one in ids])
        elif len(self._ids) - self._whole <= MOST_HELD:
            piece = finished[self._shown :]
            self._shown = max(self._shown, len(finished))
        else:
            piece = self._give_up(text)
        return piece

    def _give_up(self, text):
        """The new text but for the characters of the last bytes; the tokens before these are forgotten."""
        with_text = [one for one in self._ids[self._whole :] if self._decode([one])]
        self._ids[self._whole :] = with_text[-MOST_BYTES:]
        piece, kept = text[self._shown :], self._new_text()
        held = min(MOST_BYTES, *(len(one) - len(one.rstrip(UNFINISHED)) for one in (piece, kept)))
        self._shown = len(kept) - held
        return piece[: len(piece) - held]

    def flush(self):
        piece = self._new_text()[self._shown :]
        self._whole, self._shown = len(self._ids), 0
        return piece

    def _new_text(self):
        before = self._decode(self._ids[: self._whole])
        return self._decode(self._ids)[len(before) :]


class Streams:
    """Asks models that answer with several responses.

    The stub holds an iterator over responses too, until a moment after the last one. Were it the last to let go, a
    thread of its own would free Python objects without the interpreter's lock and ruin the heap: so each is kept here
    for longer than that moment.
    """

    KEEP_SECONDS = 5.0

    def __init__(self):
        self._kept = collections.deque()  # (when it ended, iterator)

    def ask(self, request):
        responses = request.exec(decoupled=True)
        try:
            yield from responses
        finally:
            now = time.monotonic()
            while self._kept and now - self._kept[0][0] > self.KEEP_SECONDS:
                self._kept.popleft()
            self._kept.append((now, responses))
