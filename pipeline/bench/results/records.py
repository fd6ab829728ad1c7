"""Records of a load point as columns: one entry per request, and the stamps of all responses in one array.

Times are nanoseconds of `time.monotonic_ns`; NONE stands for a time that never came and for an unknown number.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trtpipe.engines.errors import InputDataError
from trtpipe.pipeline.bench.loop.in_flight import Failure, InFlightRequest
from trtpipe.pipeline.bench.protocols.transport import Answer, BadAnswer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

NONE = -1
# Source of an answer's token count.
SERVER, USAGE, TOKENIZER = "server", "usage", "tokenizer"
# A server that reports more than twice the requested tokens plus this number is not believed: every token becomes an
# entry in what is computed of an answer.
SURPLUS = 64
# Most requests and tokens of a load point read from a file: a table of some hundred numbers per request, and several
# entries per token, are made of them. Servers send one token in a response, seldom more than a few.
MOST_REQUESTS = 500_000
MOST_COUNTED, MOST_A_RESPONSE = 4_000_000, 16
_NUMBERS = (
    "slot", "session", "turn", "due_ns", "sent_ns", "end_ns", "input_tokens", "max_tokens", "output_tokens",
    "unstreamed_tokens",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Records:
    """n requests, m responses with tokens.

    ids, failures, sources  n strings, n Failures or None, n of SERVER, USAGE, TOKENIZER or None
    slot, session, turn     n; the last two are NONE for a request outside conversations
    due, sent, end          n
    input_tokens, max_tokens, output_tokens  n; the last is NONE for a failed request
    unstreamed_tokens       n, those of output_tokens that no response brought: the end token, reasoning that the server
                            keeps to itself; NONE where a file does not say
    offsets                 n + 1; the responses of request i are offsets[i] to offsets[i + 1]
    stamps                  m, in the order of their arrival within a request
    tokens                  m, tokens of each response; NONE where unknown. The first has the unstreamed ones
    """

    ids: list[str]
    failures: list[Failure | None]
    sources: list[str | None]
    warmup: NDArray[np.bool_]
    slot: Ints
    session: Ints
    turn: Ints
    due: Ints
    sent: Ints
    end: Ints
    input_tokens: Ints
    max_tokens: Ints
    output_tokens: Ints
    unstreamed_tokens: Ints
    offsets: Ints
    stamps: Ints
    tokens: Ints

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def failed(self) -> NDArray[np.bool_]:
        import numpy as np

        return np.array([failure is not None for failure in self.failures], dtype=np.bool_)

    def measured(self) -> NDArray[np.bool_]:
        return ~self.warmup

    def good(self) -> NDArray[np.bool_]:
        """Measured requests without a failure."""
        return ~self.warmup & ~self.failed

    def first_share(self) -> float:
        """Share of the measured requests that are not a later turn of a conversation; 1 where nothing is measured."""
        measured = self.measured()
        return float((self.turn[measured] <= 0).mean()) if measured.any() else 1.0

    def shifted(self, by_ns: int) -> Records:
        """The same records by a clock that is ahead by `by_ns`."""
        import numpy as np

        moments = {name: getattr(self, name) for name in ("due", "sent", "end", "stamps")}
        moved: dict[str, Any] = {name: np.where(at == NONE, NONE, at + by_ns) for name, at in moments.items()}
        return replace(self, **moved)

    def objects(self) -> Iterator[dict[str, Any]]:
        """Each request as a JSON value for a file."""
        columns = ("due", "sent", "end")
        for i, identity in enumerate(self.ids):
            a, b = int(self.offsets[i]), int(self.offsets[i + 1])
            tokens = self.tokens[a:b].tolist()
            failure = self.failures[i]
            output = int(self.output_tokens[i])
            yield {
                "id": identity,
                "warmup": bool(self.warmup[i]),
                **{name: _known(int(getattr(self, name)[i])) for name in ("slot", "session", "turn")},
                **{f"{name}_ns": _known(int(getattr(self, name)[i])) for name in columns},
                "stamps_ns": self.stamps[a:b].tolist(),
                "tokens": None if NONE in tokens else tokens,
                "input_tokens": int(self.input_tokens[i]),
                "output_tokens": _known(output),
                "unstreamed_tokens": _known(int(self.unstreamed_tokens[i])),
                "max_tokens": int(self.max_tokens[i]),
                "failure": failure and {"kind": failure.kind, "message": failure.message},
            }


class TooManyToCompare(InputDataError):
    """A load point has more requests or tokens than can be computed with."""


class Columns:
    """Builder of Records from values of `Records.objects`, or from another tool's requests in that form, in which any
    number may be None (NONE here). It takes one request at a time: as objects they would need fifty times the memory.

    The source of token counts is not kept; responses of failed requests are left out.
    """

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._failures: list[Failure | None] = []
        self._warmup: list[bool] = []
        self._numbers = {name: array("q") for name in _NUMBERS}
        self._offsets, self._stamps, self._tokens = array("q", [0]), array("q"), array("q")
        self._counted = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Raises TooManyToCompare."""
        failure = line["failure"] and Failure(line["failure"]["kind"], line["failure"]["message"])
        stamps = [] if failure else line["stamps_ns"]
        tokens = [NONE] * len(stamps) if line["tokens"] is None else line["tokens"][: len(stamps)]
        self._ids.append(line["id"])
        self._failures.append(failure)
        self._warmup.append(line["warmup"])
        for name, column in self._numbers.items():
            value = line.get(name)
            column.append(NONE if value is None or (failure and name == "output_tokens") else value)
        self._stamps.extend(stamps)
        self._tokens.extend(tokens)
        self._offsets.append(len(self._stamps))
        self._counted += max(0, sum(tokens))
        if len(self._ids) > MOST_REQUESTS or self._counted > MOST_COUNTED + MOST_A_RESPONSE * len(self._stamps):
            raise TooManyToCompare(
                f"it has {len(self._ids):,} requests and {self._counted:,} tokens or more, too many for intervals",
                why=f"the bounds are {MOST_REQUESTS:,} requests, and {MOST_COUNTED:,} tokens and {MOST_A_RESPONSE} for "
                "each response",
            )

    def records(self) -> Records:
        import numpy as np

        columns: dict[str, Any] = {
            name.removesuffix("_ns"): np.array(column, dtype=np.int64) for name, column in self._numbers.items()
        }
        return Records(
            ids=self._ids,
            failures=self._failures,
            sources=[None] * len(self._ids),
            warmup=np.array(self._warmup, dtype=np.bool_),
            **columns,
            offsets=np.array(self._offsets, dtype=np.int64),
            stamps=np.array(self._stamps, dtype=np.int64),
            tokens=np.array(self._tokens, dtype=np.int64),
        )


def read_objects(lines: Iterable[Mapping[str, Any]]) -> Records:
    """Records of all lines; see `Columns`."""
    columns = Columns()
    for line in lines:
        columns.add(line)
    return columns.records()


def joined(parts: Sequence[Records]) -> Records:
    """The requests of all parts, one part after the other. At least one part."""
    import numpy as np

    if len(parts) == 1:
        return parts[0]
    lists = ("ids", "failures", "sources")
    columns = ("warmup", *(name.removesuffix("_ns") for name in _NUMBERS))
    whole: dict[str, Any] = {name: [one for part in parts for one in getattr(part, name)] for name in lists}
    whole |= {name: np.concatenate([getattr(part, name) for part in parts]) for name in (*columns, "stamps", "tokens")}
    counts = np.concatenate([np.diff(part.offsets) for part in parts])
    return Records(**whole, offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def _known(value: int) -> int | None:
    return None if value == NONE else value


def settle(
    requests: Sequence[InFlightRequest],
    decode: Callable[[InFlightRequest], Answer],
    count_tokens: Callable[[str], int],
) -> Records:
    """Decode the responses of finished requests, and free their bytes.

    The tokens of an answer are the sum of the server's counts, else its usage, else `count_tokens` of the whole text;
    never the number of responses, since one may carry several. An answer that ended well but has no token becomes a
    failure, since it has no latencies; so does an answer of another length than requested, which is other work. Our
    own tokenizer may split a text in another way than the server did, so its count alone never fails a request. The
    tokens of a prompt are the server's count too where it gives one.
    """
    import numpy as np

    failures: list[Failure | None] = []
    sources: list[str | None] = []
    totals: list[int] = []
    unstreamed: list[int] = []
    prompts: list[int] = []
    offsets = [0]
    stamps, tokens = array("q"), array("q")  # a list would have an object for each number
    for request in requests:
        failure, source, total = request.failure, None, NONE
        answer = Answer([], [])
        if failure is None:
            try:
                answer = decode(request)
            except BadAnswer as error:
                failure = Failure.of(error.kind, str(error))
            else:
                answer, source, total = _count(answer, count_tokens)
                failure = _unlike(request, source, total if answer.stamps_ns else 0)
                if failure is not None:
                    answer, source, total = Answer([], []), None, NONE
        request.forget()
        prompts.append(request.input_tokens if answer.prompt is None else answer.prompt)
        failures.append(failure)
        sources.append(source)
        totals.append(total)
        unstreamed.append(answer.unstreamed)
        stamps.extend(answer.stamps_ns)
        tokens.extend([NONE] * len(answer.stamps_ns) if answer.tokens is None else answer.tokens)
        offsets.append(len(stamps))

    def column(values: Sequence[int | None]) -> Ints:
        return np.array([NONE if value is None else value for value in values], dtype=np.int64)

    return Records(
        ids=[request.id for request in requests],
        failures=failures,
        sources=sources,
        warmup=np.array([request.warmup for request in requests], dtype=np.bool_),
        slot=column([request.slot for request in requests]),
        session=column([request.session for request in requests]),
        turn=column([request.turn for request in requests]),
        due=column([request.due_ns for request in requests]),
        sent=column([request.sent_ns for request in requests]),
        end=column([request.end_ns for request in requests]),
        input_tokens=np.array(prompts, dtype=np.int64),
        max_tokens=column([request.max_tokens for request in requests]),
        output_tokens=np.array(totals, dtype=np.int64),
        unstreamed_tokens=np.array(unstreamed, dtype=np.int64),
        offsets=np.array(offsets, dtype=np.int64),
        stamps=np.asarray(stamps),
        tokens=np.asarray(tokens),
    )


def _unlike(request: InFlightRequest, source: str, total: int) -> Failure | None:
    asked = request.max_tokens
    if not total:
        return Failure.of("EmptyOutput", f"the stream ended without a token of the {asked} asked for")
    if total > 2 * asked + SURPLUS and source != TOKENIZER:
        return Failure.of("WrongLength", f"{total} tokens by the server's count, where {asked} were asked for")
    if request.exact and total != asked and source != TOKENIZER:
        return Failure.of(
            "WrongLength", f"{total} tokens, not {asked}: where a server ends answers itself, ask for --natural-end"
        )
    return None


def _count(answer: Answer, count_tokens: Callable[[str], int]) -> tuple[Answer, str, int]:
    if answer.tokens is not None:
        return answer, SERVER, sum(answer.tokens)
    source, total = (TOKENIZER, count_tokens(answer.text)) if answer.usage is None else (USAGE, answer.usage)
    # The end token, which usage counts, has no response of its own.
    silent = {0, answer.unstreamed, answer.unstreamed + (answer.ended and source == USAGE)}
    unstreamed = total - len(answer.stamps_ns)
    if answer.stamps_ns and unstreamed in silent:  # then each response carried one
        # No gap between tokens is of the first response.
        tokens = [1 + unstreamed, *[1] * (len(answer.stamps_ns) - 1)]
        answer = answer._replace(tokens=tokens, unstreamed=unstreamed)
    return answer, source, total
