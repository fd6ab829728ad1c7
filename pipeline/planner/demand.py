"""Demand that the planner simulates: lengths and arrival times of the load generator's load files, without texts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.load.arrivals import due_times
from trtpipe.pipeline.bench.load.loads import Open
from trtpipe.pipeline.bench.load.seeds import generator
from trtpipe.pipeline.bench.load.trace import read_trace
from trtpipe.pipeline.bench.load.work import Work
from trtpipe.pipeline.planner.lengths import Lengths
from trtpipe.pipeline.planner.scheduler import Asked

# Requests per simulation, so that eight requests lie beyond the p99.
REQUESTS = 800
# Number of requests that these are drawn from.
POOL = 4000
SEED = 0

Follow = Callable[[int, float], "Asked | None"]


class Demand:
    """Requests of clients, determined by a seed. Turns of a conversation are mixed with other requests, each with its
    history: so a simulation starts in its steady state, whatever the think times are.

    reuse   whether prompts with a common beginning find it in the KV cache
    turns   mean number of requests per client
    """

    def __init__(self, work: Work, *, reuse: bool = False) -> None:
        if work.prompts is not None or work.sharegpt is not None:
            raise UsageError(
                "the lengths of a prompt file are not known before it is tokenised",
                remedy="give input_tokens and output_tokens, empirical:FILE for instance",
            )
        self.work = work
        self.reuse = reuse
        clients = list(self._clients(generator((SEED, 1))))
        self.turns = sum(map(len, clients)) / len(clients)
        self._pool = [request for client in clients for request in client]

    def prompts(self) -> Demand:
        """The same clients, of whose answers only the first token is asked."""
        return self._with([one._replace(output=1) for one in self._pool])

    def answers(self) -> Demand:
        """The same clients, whose prompts are in the KV cache already, all but the last token."""
        return self._with([one._replace(reused=one.input - 1) for one in self._pool])

    def _with(self, pool: list[Asked]) -> Demand:
        made = copy.copy(self)
        made._pool = pool
        return made

    def requests(self, rate: float, count: int = REQUESTS) -> list[Asked]:
        """`count` requests of clients that begin at `rate` per second."""
        load = Open(rate=rate * self.turns, requests=count)
        due = due_times(load, (SEED, 0), count=count) / 1e9
        drawn = zip(self._drawn(count), due.tolist(), strict=True)
        return [Asked(at, prompt, answer, reused) for (_, prompt, answer, reused), at in drawn]

    def together(
        self, concurrency: int, count: int, front_s: float, *, in_step: bool = False
    ) -> tuple[list[Asked], Follow]:
        """`count` requests of `concurrency` clients, each of which sends the next as soon as one is answered."""
        return closed_loop(self._drawn(count), concurrency, front_s, in_step=in_step)

    def _drawn(self, count: int) -> list[Asked]:
        return [self._pool[index] for index in generator((SEED, 2)).choice(len(self._pool), count).tolist()]

    def lengths(self) -> Lengths:
        inputs = np.array([one.input for one in self._pool])
        outputs = np.array([one.output for one in self._pool])
        return Lengths(
            mean_input=float(inputs.mean()), mean_output=float(outputs.mean()), longest_input=int(inputs.max()),
            longest=int((inputs + outputs).max()),
        )  # fmt: skip

    def _clients(self, rng: np.random.Generator) -> Any:
        """Requests of each client in order."""
        work = self.work
        if work.trace is not None:
            for row in read_trace(work.folder / work.trace, work.max_total_tokens):
                yield [Asked(0.0, row.input_tokens, row.output_tokens)]
            return
        most = work.max_total_tokens
        inputs, outputs = work.lengths()
        turns = work.turns()
        prefix = work.shared_prefix if self.reuse else None
        drawn = zip(inputs.tokens(rng, POOL).tolist(), outputs.tokens(rng, POOL).tolist(), strict=True)
        kept = [one for one in drawn if most is None or sum(one) <= most]
        if not kept:
            raise UsageError(f"no request is within max_total_tokens {most}", remedy="raise it")
        shared = rng.random(len(kept)) < (0.0 if prefix is None else prefix.share)
        for (prompt, answer), hit in zip(kept, shared.tolist(), strict=True):
            found = min(prefix.tokens, prompt - 1) if hit and prefix is not None else 0
            client = [Asked(0.0, prompt, answer, found)]
            if turns is not None:
                number, _, user = turns
                for _ in range(number.token_count(rng) - 1):
                    history = client[-1].input + client[-1].output
                    new, answer = (user or inputs).token_count(rng), outputs.token_count(rng)
                    if most is not None and history + new + answer > most:
                        break
                    client.append(Asked(0.0, history + new, answer, history if self.reuse else 0))
            yield client


def closed_loop(asked: list[Asked], concurrency: int, front_s: float, *, in_step: bool) -> tuple[list[Asked], Follow]:
    """First requests of `concurrency` clients, and what each sends next, which is with the engine `front_s` later: it
    misses the step that begins when its client's last answer ends.

    in_step  whether all clients start together: asking for equal lengths, they stay in step and wait for one another's
             prompts. Otherwise they are spread, as `trtpipe bench` spreads them: of its first answer each has some
             part still to come, drawn evenly
    """
    parts = np.ones(concurrency) if in_step else generator((SEED, 3)).random(concurrency)
    first = [
        Asked(0.0, one.input, max(1, round(one.output * part)), one.reused)
        for one, part in zip(asked[:concurrency], parts.tolist(), strict=False)
    ]
    rest = iter(asked[concurrency:])

    def follow(index: int, now: float) -> Asked | None:
        more = next(rest, None)
        return None if more is None else Asked(now + front_s, more.input, more.output, more.reused)

    return first, follow
