"""A load as the planner simulates it: the lengths and times of the load tester's own load files, without texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from engines.errors import UsageError
from pipeline.advise.scheduler import Asked
from pipeline.bench.work.arrivals import due_times
from pipeline.bench.work.loads import Open
from pipeline.bench.work.seeds import generator
from pipeline.bench.work.trace import read_trace
from pipeline.bench.work.work import Work

# Clients of one simulation, by whether each asks once: a p99 rests on eight requests.
CLIENTS, CLIENTS_WITH_TURNS = 800, 400
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of a load's requests: means, and the longest prompt and sequence that it asks for."""

    mean_input: float
    mean_output: float
    longest_input: int
    longest: int

    @property
    def mean_context(self) -> float:
        """Of a sequence half way through its answer."""
        return self.mean_input + self.mean_output / 2


class Demand:
    """What clients ask for, by a seed.

    reuse   whether prompts that begin alike find their beginning in the KV cache
    """

    def __init__(self, work: Work, arrivals: str = "poisson", burstiness: float = 1.0, *, reuse: bool = False) -> None:
        if work.prompts is not None or work.sharegpt is not None:
            raise UsageError(
                "the lengths of a prompt file are not known before it is tokenised",
                remedy="give input_tokens and output_tokens, empirical:FILE for instance",
            )
        self.work = work
        self.reuse = reuse
        self._arrivals = {"arrivals": arrivals, "burstiness": burstiness}
        self._turns = work.turns()
        # How many requests a client makes, on average.
        self.turns = 1.0 if self._turns is None else float(self._turns[0].tokens(generator((SEED, 2)), 4000).mean())
        # A trace's own order of lengths; its times are a load of their own, and here requests come at a rate.
        self._trace = None if work.trace is None else read_trace(work.folder / work.trace, work.max_total_tokens)

    def requests(self, rate: float | None, count: int | None = None) -> tuple[list[Asked], Follow]:
        """The first requests of `count` clients that come at `rate` a second (None: all at once), and what follows.

        Without `count` as many clients as a p99 needs.
        """
        count = count or (CLIENTS if self._turns is None else CLIENTS_WITH_TURNS)
        rng = generator((SEED, 1))
        inputs, outputs = self._lengths(rng, count)
        due = np.zeros(count)
        if rate is not None:
            due = due_times(Open(rate=rate, requests=count, **self._arrivals), (SEED, 0), count=count) / 1e9  # type: ignore[arg-type]
        shared = self._shared(rng, inputs)
        asked = [Asked(*row) for row in zip(due.tolist(), inputs.tolist(), outputs.tolist(), shared, strict=True)]
        return asked, self._follow(asked, rng)

    def together(self, concurrency: int, count: int = CLIENTS) -> tuple[list[Asked], Follow]:
        """`count` requests of so many clients, each of which asks again as soon as it is answered."""
        asked, _ = self.requests(None, count)
        rest = iter(asked[concurrency:])

        def follow(index: int, now: float) -> Asked | None:
            more = next(rest, None)
            return None if more is None else replace(more, arrival=now)

        return asked[:concurrency], follow

    def lengths(self) -> Lengths:
        """Of many requests, later turns included."""
        asked, follow = self.requests(None, 4000)
        every = list(asked)
        if self._turns is not None:
            for index, one in enumerate(asked):
                at: tuple[int, Asked | None] = (index, one)
                while (more := follow(at[0], 0.0)) is not None:
                    every.append(more)
                    at = (len(every) - 1, more)
        inputs = np.array([one.input for one in every])
        outputs = np.array([one.output for one in every])
        return Lengths(
            mean_input=float(inputs.mean()), mean_output=float(outputs.mean()), longest_input=int(inputs.max()),
            longest=int((inputs + outputs).max()),
        )  # fmt: skip

    def _lengths(self, rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        if self._trace is not None:
            rows = [self._trace[index % len(self._trace)] for index in range(count)]
            return np.array([row.input_tokens for row in rows]), np.array([row.output_tokens for row in rows])
        first, second = self.work.lengths()
        inputs, outputs = first.tokens(rng, count), second.tokens(rng, count)
        most = self.work.max_total_tokens
        if most is not None:
            for _ in range(100):
                over = np.flatnonzero(inputs + outputs > most)
                if not len(over):
                    break
                inputs[over], outputs[over] = first.tokens(rng, len(over)), second.tokens(rng, len(over))
            else:
                raise UsageError(f"almost no request is within max_total_tokens {most}", remedy="raise it")
        return inputs, outputs

    def _shared(self, rng: np.random.Generator, inputs: Ints) -> list[int]:
        prefix = self.work.shared_prefix
        if not self.reuse or prefix is None:
            return [0] * len(inputs)
        hit = rng.random(len(inputs)) < prefix.share
        return [int(one) for one in np.where(hit, np.minimum(prefix.tokens, inputs - 1), 0)]

    def _follow(self, asked: list[Asked], rng: np.random.Generator) -> Follow:
        if self._turns is None:
            return lambda index, now: None
        turns, think, user = self._turns
        inputs, outputs = self.work.lengths()
        state = [(one, left - 1) for one, left in zip(asked, turns.tokens(rng, len(asked)).tolist(), strict=True)]

        def follow(index: int, now: float) -> Asked | None:
            one, left = state[index]
            if left < 1:
                return None
            history = one.input + one.output
            new = int((user or inputs).tokens(rng, 1)[0])
            answer = int(outputs.tokens(rng, 1)[0])
            most = self.work.max_total_tokens
            if most is not None and history + new + answer > most:
                return None
            wait = float(np.maximum(think.sample(rng, 1)[0], 0))
            more = Asked(now + wait, history + new, answer, history if self.reuse else 0)
            state.append((more, left - 1))
            return more

        return follow


Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Follow = Callable[[int, float], "Asked | None"]
