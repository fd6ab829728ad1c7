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
    """Token ids whose likelihood after `context` is asked for; both hold at least one."""

    context: list[int]
    tokens: list[int]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A greedy answer to the token ids `prompt`: up to `max_tokens`, an end token, or one of the texts in `until`."""

    prompt: list[int]
    max_tokens: int
    until: list[str]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Replies in the order of the requests: a sum of log-probabilities in nats, and a text without its stop text."""

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
    """Run requests on the model in a folder of any kind that `accuracy.models.open_model` reads.

    tokenizer  folder of the tokenizer that made the ids
    ends       token ids that end an answer
    progress   called with (requests done, requests in all)

    The whole model is on the device. Raises InputDataError for a folder that is no such model or computes numbers that
    are not finite, HostError without device or memory.
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
