"""Metrics with values of each request: times, gaps between responses, lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trtpipe.pipeline.bench.results.metric import Distribution, Values
from trtpipe.pipeline.bench.results.records import NONE, Records

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


def _per_request(numbers: Callable[[Records, Ints], Any], *needed: str) -> Callable[[Records], Values]:
    """A metric from a function that gives a value for each of some good requests: those that have at least one response
    and known values in all columns `needed` (a file of another tool may lack some)."""
    import numpy as np

    def values(records: Records) -> Values:
        known = records.good()
        for name in needed:
            known &= getattr(records, name) != NONE
        owners = np.flatnonzero(known)
        return Values(values=np.asarray(numbers(records, owners), dtype=np.float64), owners=owners)

    return values


def _first(records: Records, owners: Ints) -> Ints:
    out: Ints = records.stamps[records.offsets[owners]]
    return out


def _last(records: Records, owners: Ints) -> Ints:
    out: Ints = records.stamps[records.offsets[owners + 1] - 1]
    return out


def _gaps(records: Records) -> tuple[Floats, Ints, Ints]:
    """(gap in ms, tokens of the later response, request) of each gap between two responses of a good request."""
    import numpy as np

    counts = np.diff(records.offsets)
    owners = np.repeat(np.arange(len(records)), counts)
    inner = owners[1:] == owners[:-1] if len(owners) else np.zeros(0, dtype=np.bool_)
    inner &= records.good()[owners[1:]] if len(owners) else inner
    gaps = np.diff(records.stamps)[inner] / 1e6 if len(records.stamps) else np.zeros(0)
    return gaps, records.tokens[1:][inner], owners[1:][inner]


def _chunk_gaps(records: Records) -> Values:
    gaps, _, owners = _gaps(records)
    return Values(values=gaps, owners=owners)


def _token_gaps(records: Records) -> Values:
    import numpy as np

    gaps, tokens, owners = _gaps(records)
    known = tokens > 0
    times = tokens[known]
    return Values(values=np.repeat(gaps[known] / times, times), owners=np.repeat(owners[known], times))


def _unknown_token_gaps(records: Records) -> NDArray[np.bool_]:
    """Which good requests have gaps between responses but none between tokens, since the server does not tell how many
    tokens each response had."""
    import numpy as np

    _, tokens, owners = _gaps(records)
    unknown = np.zeros(len(records), dtype=np.bool_)
    unknown[owners] = True
    unknown[owners[tokens > 0]] = False
    return unknown


def _after_first(records: Records) -> tuple[Ints, Ints]:
    """(good requests whose responses brought more than one token, number of tokens after the first response; 0 where
    nobody tells when those came)."""
    import numpy as np

    responses = np.diff(records.offsets)
    owners = np.flatnonzero(records.good() & (responses > 0) & (records.output_tokens != NONE))
    several, output = responses[owners] > 1, records.output_tokens[owners]
    streamed = output - np.maximum(0, records.unstreamed_tokens[owners])
    first = records.tokens[records.offsets[owners]]
    # Where nobody tells how many tokens the first response had, one is assumed.
    after = np.where(first == NONE, streamed - 1, output - first)
    there = several | (streamed > 1)
    return owners[there], np.where(several, np.maximum(0, after), 0)[there]


def _time_per_output_token(records: Records) -> Values:
    owners, after = _after_first(records)
    owners, after = owners[after > 0], after[after > 0]
    return Values(values=(_last(records, owners) - _first(records, owners)) / 1e6 / after, owners=owners)


def _unknown_time_per_output_token(records: Records) -> NDArray[np.bool_]:
    import numpy as np

    owners, after = _after_first(records)
    unknown = np.zeros(len(records), dtype=np.bool_)
    unknown[owners[after == 0]] = True
    return unknown


def _from(moment: str, until: Callable[[Records, Ints], Ints]) -> Callable[[Records], Values]:
    def milliseconds(records: Records, owners: Ints) -> Any:
        return (until(records, owners) - getattr(records, moment)[owners]) / 1e6

    return _per_request(milliseconds, moment)


def _per_user(records: Records) -> Values:
    import numpy as np

    owners = np.flatnonzero(records.good() & (records.sent != NONE) & (records.output_tokens != NONE))
    seconds = (_last(records, owners) - records.sent[owners]) / 1e9
    positive = seconds > 0
    return Values(values=records.output_tokens[owners][positive] / seconds[positive], owners=owners[positive])


_NOBODY = "no successful request"
REQUEST_METRICS = (
    Distribution(
        name="time_to_first_token",
        unit="ms",
        short="TTFT",
        better="lower",
        aliases=("ttft",),
        tabled=True,
        drawn=True,
        judged="time_to_first_token_from_due",
        formula="first response with tokens, those of reasoning and tool calls included - request sent",
        undefined=_NOBODY,
        values=_from("sent", _first),
    ),
    Distribution(
        name="time_to_first_token_from_due",
        unit="ms",
        better="lower",
        formula="first response with tokens - request due (what the client itself delayed is included)",
        undefined=_NOBODY,
        values=_from("due", _first),
    ),
    Distribution(
        name="inter_chunk_latency",
        unit="ms",
        short="chunk gap",
        better="lower",
        aliases=("icl",),
        instead_of="inter_token_latency",
        drawn=True,
        formula="gap between consecutive responses with tokens; one value a gap",
        undefined="no successful request with two such responses",
        values=_chunk_gaps,
    ),
    Distribution(
        name="inter_token_latency",
        unit="ms",
        short="ITL",
        better="lower",
        aliases=("itl",),
        tabled=True,
        drawn=True,
        formula=(
            "gap before a response / tokens in that response; one value a token, tokens of the first response left "
            "out. (NVIDIA's inter_token_latency, one mean a request, is time_per_output_token here.)"
        ),
        undefined="no successful request with two responses, or nobody says how many tokens each had",
        values=_token_gaps,
        unknown=_unknown_token_gaps,
        untold="the server does not tell how many tokens each response had",
    ),
    Distribution(
        name="time_per_output_token",
        unit="ms",
        short="TPOT",
        better="lower",
        aliases=("tpot",),
        tabled=True,
        formula=(
            "(request_latency - time_to_first_token) / (output tokens - those of the first response, or 1 where nobody "
            "tells, - those that no response brought, such as the end token and hidden reasoning); one value a request"
        ),
        undefined="no successful request with tokens after the first response",
        values=_time_per_output_token,
        unknown=_unknown_time_per_output_token,
        untold="all tokens came in one response, or nobody tells how many came after it",
    ),
    Distribution(
        name="request_latency",
        unit="ms",
        short="latency",
        better="lower",
        aliases=("latency", "e2e"),
        tabled=True,
        drawn=True,
        judged="request_latency_from_due",
        formula="last response with tokens - request sent (an empty final response is not waited for)",
        undefined=_NOBODY,
        values=_from("sent", _last),
    ),
    Distribution(
        name="request_latency_from_due",
        unit="ms",
        better="lower",
        formula="last response with tokens - request due (what the client itself delayed is included)",
        undefined=_NOBODY,
        values=_from("due", _last),
    ),
    Distribution(
        name="dispatch_delay",
        unit="ms",
        better="lower",
        formula="request sent - request due: the client's own lateness, waiting for a free place included",
        undefined=_NOBODY,
        values=_per_request(lambda records, owners: (records.sent - records.due)[owners] / 1e6, "due", "sent"),
    ),
    Distribution(
        name="output_token_throughput_per_user",
        unit="tokens/s",
        better="higher",
        formula="output tokens / request_latency; one value a request",
        undefined=_NOBODY,
        values=_per_user,
    ),
    Distribution(
        name="input_sequence_length",
        unit="tokens",
        formula="tokens of a prompt, special ones included: the server's count where it says, else the tokenizer's",
        undefined=_NOBODY,
        values=_per_request(lambda records, owners: records.input_tokens[owners], "input_tokens"),
    ),
    Distribution(
        name="output_sequence_length",
        unit="tokens",
        formula="tokens of an answer; token_count_source says who counted",
        undefined=_NOBODY,
        values=_per_request(lambda records, owners: records.output_tokens[owners], "output_tokens"),
    ),
)
