"""Parser of server-sent events: each event with the stamp of the read that completed it."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.protocols.http1 import chunk_length, pieces, told_error
from trtpipe.pipeline.bench.protocols.transport import BadAnswer

# Field names of valid lines; the empty one is that of a comment.
_FIELDS = (b"data", b"event", b"id", b"retry", b"")


class SseDecoder:
    """Splits a byte stream into the data of server-sent events, however the bytes were cut."""

    def __init__(self) -> None:
        self._open: list[bytes] = []  # pieces of a line that has no end yet
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of the events that `piece` completes. Raises ValueError for a line that an event stream cannot hold.

        A browser skips unknown fields. Here they indicate a proxy's error page, or a token in a broken line.
        """
        head, end, rest = piece.rpartition(b"\n")
        if not end:
            self._open.append(piece)
            return []
        lines = b"".join([*self._open, head]).split(b"\n")
        self._open = [rest]
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            else:
                _check_line(line, whole=True)
        return events

    def check_tail(self) -> None:
        """Raise ValueError where the bytes after the last line end cannot become a line of an event stream."""
        _check_line(self._tail, whole=False)

    @property
    def _tail(self) -> bytes:
        return b"".join(self._open)

    @property
    def pending(self) -> bytes:
        """Data of an event that is not complete yet."""
        tail = self._tail.removesuffix(b"\r")
        return b"\n".join([*self._data, tail[5:].removeprefix(b" ")] if tail.startswith(b"data:") else self._data)

    @property
    def unfinished(self) -> bool:
        return bool(self._tail or self._data)


def _check_line(line: bytes, *, whole: bool) -> None:
    name, colon, _ = line.partition(b":")
    if name not in _FIELDS and (whole or colon or not any(field.startswith(name) for field in _FIELDS)):
        raise ValueError(f"no line of an event stream: {line[:80]!r}")


def events(request: InFlightRequest) -> list[tuple[bytes, int]]:
    """(data, stamp) of each event of a finished answer. Raises BadAnswer."""
    found = _a_chunk_each(request)
    if found is None:
        found = _however_cut(request)
    most = request.response_limit
    longest = max((len(event) for event, _ in found), default=0) if sum(request.sizes) > most else 0
    if longest > most:
        why = f"an event of {longest:,} bytes, where {request.max_tokens:,} tokens were asked for"
        raise BadAnswer("OversizedResponse", why)
    return found


def _however_cut(request: InFlightRequest) -> list[tuple[bytes, int]]:
    """Events of a body that is cut in any way. Raises BadAnswer."""
    decoder = SseDecoder()
    out = []
    try:
        for piece, stamp in pieces(request):
            out += [(event, stamp) for event in decoder.feed(piece)]
        decoder.check_tail()
    except ValueError as error:
        told = told_error(b"".join(piece for piece, _ in _whole(request)))
        raise BadAnswer(*(("MalformedResponse", str(error)) if told is None else ("ServerError", told))) from None
    if decoder.pending == b"[DONE]":  # some servers omit the line ends after it
        return [*out, (b"[DONE]", request.stamps[-1])]
    if decoder.unfinished:
        raise BadAnswer("TruncatedStream", f"the body ended within an event, after {len(out)} events")
    return out


def _whole(request: InFlightRequest) -> list[tuple[bytes, int]]:
    """Pieces of the body. Raises BadAnswer where its chunks cannot be read."""
    try:
        return list(pieces(request))
    except ValueError:
        return []


def _a_chunk_each(request: InFlightRequest) -> list[tuple[bytes, int]] | None:
    """The same events in a fraction of the time, where each event is one `data: ` line and one HTTP/1.1 chunk, which is
    how servers send tokens: the body's lines are then lengths and chunks in turn. None for any other body."""
    lines = request.body.split(b"\r\n")
    if not request.chunked or lines[-3:] != [b"0", b"", b""] or len(lines) % 2 == 0:
        return None
    lengths, chunks = lines[:-3:2], lines[1:-3:2]
    sizes = list(map(len, chunks))
    try:
        told = {length: chunk_length(length) for length in set(lengths)}
    except ValueError:
        return None
    text = b"".join(chunks)
    found = text[6:-2].split(b"\n\ndata: ")
    if (
        [told[length] for length in lengths] != sizes
        or not (text.startswith(b"data: ") and text.endswith(b"\n\n"))
        or text.count(b"\n") != 2 * len(found)
        or [len(event) + 8 for event in found] != sizes
    ):
        return None
    # A chunk ends after its line end, but the read with its content may come without the line end.
    ends = list(accumulate(len(length) + size + 4 for length, size in zip(lengths, sizes, strict=True)))
    reads = list(accumulate(request.sizes))
    if reads[: len(ends)] == ends:
        return list(zip(found, request.stamps, strict=False))  # the end of the body may be a read of its own
    return [(event, request.stamps[bisect_left(reads, end - 2)]) for event, end in zip(found, ends, strict=True)]
