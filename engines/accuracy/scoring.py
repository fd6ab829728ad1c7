"""Scoring job: likelihoods of continuations and greedy answers of one model, computed in a process that has torch."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trtpipe.engines.files import write_json
from trtpipe.engines.json_input import read_json
from trtpipe.engines.process import Progress, run_worker


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Request for the likelihood of the token ids `tokens` after the token ids `context`; neither may be empty."""

    context: list[int]
    tokens: list[int]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Request for a greedy answer to the token ids `prompt`.

    The answer ends after `max_tokens` tokens, at an end token, or before a text of `until`.
    """

    prompt: list[int]
    max_tokens: int
    until: list[str]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Replies, each list in the order of its requests.

    likelihoods  sum of the log-probabilities of a continuation's tokens, in nats
    texts        greedy answer, without an end token or a text of `until`
    """

    likelihoods: list[float]
    texts: list[str]


def answer(
    model: Path,
    continuations: Sequence[Continuation],
    generations: Sequence[Generation],
    *,
    tokenizer: Path,
    ends: Sequence[int],
    device: str = "auto",
    log: Path,
    progress: Progress = lambda done, total: None,
) -> Answers:
    """Run requests on the model in the folder `model`, of any format that `accuracy.models.open_model` reads.

    tokenizer  folder of the tokenizer that made the ids
    ends       token ids that end an answer
    progress   called with (requests done, requests in all)

    The whole model must fit on the device. Raises InputDataError for a folder that is no model, and for a model with
    results that are not finite; HostError where the device is missing or its memory does not suffice.
    """
    with tempfile.TemporaryDirectory(prefix=".scoring.", dir=log.parent) as scratch:
        asked, out = Path(scratch, "asked.json"), Path(scratch, "answers.json")
        write_json(
            asked,
            {
                "continuations": [asdict(one) for one in continuations],
                "generations": [asdict(one) for one in generations],
            },
        )
        spec = {
            "model": str(model), "tokenizer": str(tokenizer), "ends": list(ends), "device": device,
            "asked": str(asked), "out": str(out),
        }  # fmt: skip
        run_worker("trtpipe.engines.accuracy.scoring_worker", spec, log, what="scoring the tasks", progress=progress)
        return Answers(**read_json(out, "answers"))
