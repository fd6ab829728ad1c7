"""Distributions of token lengths and of think times, parsed from short strings.

    128                              always the same
    normal:128,32                    mean and standard deviation
    lognormal:128,0.5                median, and sigma of the logarithm; the mean is median x exp(sigma^2 / 2)
    uniform:64,256                   from the first to the second, both included, all equally likely
    mix:0.7*128+0.3*normal:1024,64   each part with the probability of its weight; the weights add up to 1
    empirical:FILE                   drawn from a file: a number or "in out" a line, or JSONL with input_length and
                                     output_length

Token lengths are rounded, and at least 1; the tails of normal and lognormal distributions are not cut otherwise.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trtpipe.engines.errors import InputDataError, UsageError, suggestion
from trtpipe.pipeline.bench.load.lines import numbered, read_object

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

KINDS = ("normal", "lognormal", "uniform", "mix", "empirical")
FORMS = "give a number, normal:128,32, lognormal:128,0.5, uniform:64,256, mix:0.7*128+0.3*1024 or empirical:FILE"
# Upper limits of a length, and of a time in seconds. The largest contexts have 10 million tokens.
MOST_TOKENS = 1 << 24
MOST_SECONDS = 1e6
# Most characters of a description.
LONGEST = 4096
LONGEST_SHOWN = 200
# Names of the two parameters of a distribution.
ARGUMENTS = {"normal": ("mean", "std"), "lognormal": ("median", "sigma"), "uniform": ("first", "last")}
COLUMNS = ("input_length", "output_length")
# A part of a mix begins with its weight; a file name may hold a plus of its own.
_NEXT_PART = re.compile(r"\s*\+\s*(?=[0-9.]+\s*\*)")


class Distribution(ABC):
    """A distribution to draw values from."""

    @property
    @abstractmethod
    def typical(self) -> float:
        """Least value that is not a mere tail: the centre of normal and lognormal, the minimum of all others."""

    @abstractmethod
    def sample(self, rng: np.random.Generator, count: int) -> Floats:
        """Draw `count` values, neither rounded nor bounded."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the distribution is read from."""
        return ()

    def tokens(self, rng: np.random.Generator, count: int) -> Ints:
        return np.clip(np.rint(self.sample(rng, count)), 1, MOST_TOKENS).astype(np.int64)

    def token_count(self, rng: np.random.Generator) -> int:
        """The same as `tokens` of one, in a fifth of its time: conversations draw their lengths one after another."""
        return round(min(max(float(self.sample(rng, 1)[0]), 1), MOST_TOKENS))

    def seconds(self, rng: np.random.Generator, count: int) -> Floats:
        return np.clip(self.sample(rng, count), 0, MOST_SECONDS)


@dataclass(frozen=True)
class Fixed(Distribution):
    value: float

    @property
    def typical(self) -> float:
        return self.value

    def sample(self, rng: np.random.Generator, count: int) -> Floats:
        return np.full(count, self.value, dtype=np.float64)


@dataclass(frozen=True)
class Normal(Distribution):
    mean: float
    std: float

    @property
    def typical(self) -> float:
        return self.mean

    def sample(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.normal(self.mean, self.std, count)


@dataclass(frozen=True)
class Lognormal(Distribution):
    median: float
    sigma: float

    @property
    def typical(self) -> float:
        return self.median

    def sample(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.lognormal(math.log(self.median), self.sigma, count)


@dataclass(frozen=True)
class Uniform(Distribution):
    first: float
    last: float

    @property
    def typical(self) -> float:
        return self.first

    def sample(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.uniform(self.first, self.last, count)

    def tokens(self, rng: np.random.Generator, count: int) -> Ints:
        # Rounding a continuous draw would make the two ends half as frequent as the rest.
        return rng.integers(int(self.first), int(self.last), count, dtype=np.int64, endpoint=True)

    def token_count(self, rng: np.random.Generator) -> int:
        return int(rng.integers(int(self.first), int(self.last), dtype=np.int64, endpoint=True))


@dataclass(frozen=True)
class Mix(Distribution):
    weights: tuple[float, ...]
    parts: tuple[Distribution, ...]

    @property
    def typical(self) -> float:
        return min(part.typical for part in self.parts)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file for part in self.parts for file in part.files)

    def sample(self, rng: np.random.Generator, count: int) -> Floats:
        drawn: Floats = np.stack([part.sample(rng, count) for part in self.parts])[self._choice(rng, count)]
        return drawn

    def tokens(self, rng: np.random.Generator, count: int) -> Ints:
        drawn: Ints = np.stack([part.tokens(rng, count) for part in self.parts])[self._choice(rng, count)]
        return drawn

    def token_count(self, rng: np.random.Generator) -> int:
        return int(self.tokens(rng, 1)[0])

    def _choice(self, rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        # Every part draws `count` values: its draws must not depend on how often another part is chosen.
        return rng.choice(len(self.parts), size=count, p=self.weights), np.arange(count)


@dataclass(frozen=True)
class Empirical(Distribution):
    """Rows of a file, read at the first draw; `column` 0 is the input length, 1 the output length."""

    file: Path
    column: int = 0

    @property
    def typical(self) -> float:
        return float(self._values.min())

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file,)

    def sample(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.choice(self._values, count).astype(np.float64)

    @property
    def _values(self) -> Ints:
        values: Ints = self.rows[:, self.column if self.rows.shape[1] > 1 else 0]
        return values

    @cached_property
    def rows(self) -> Ints:
        """Rows as an array of shape [rows, 1 or 2]. Raises InputDataError."""
        with closing(numbered(self.file, "lengths")) as lines:
            rows = [self._row(where, line) for where, line in lines]
        if not rows:
            raise InputDataError(f"lengths {self.file} holds no line")
        if len({len(row) for row in rows}) > 1:
            raise InputDataError(f"lengths {self.file} has lines of one number and lines of two")
        return np.array(rows, dtype=np.int64)

    def _row(self, where: str, line: str) -> list[int]:
        if line.lstrip().startswith("{"):
            entry = read_object(where, line)
            row = [entry.get(name) for name in COLUMNS]
        else:
            row = [int(word) if word.isdecimal() and len(word) <= 9 else None for word in line.split()]
        lengths = [value for value in row if type(value) is int and 0 < value <= MOST_TOKENS]
        if len(row) > 2 or len(lengths) < len(row):
            raise InputDataError(
                f"{where}: no lengths in '{line.strip()[:60]}'",
                remedy='write a positive number, "in out", or a JSON object with ' + " and ".join(COLUMNS),
            )
        return lengths


def draw_pairs(inputs: Distribution, outputs: Distribution, rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
    """Draw `count` input and output lengths; both are from one line where both distributions read the same file."""
    if isinstance(inputs, Empirical) and isinstance(outputs, Empirical) and inputs.file == outputs.file:
        rows = inputs.rows[rng.integers(0, len(inputs.rows), count)]
        return rows[:, 0], rows[:, -1]
    return inputs.tokens(rng, count), outputs.tokens(rng, count)


def parse(
    value: float | str, what: str, *, whole: bool = True, column: int = 0, folder: Path | None = None
) -> Distribution:
    """The distribution that `value` describes. Raises UsageError naming `what` and the mistake.

    whole   token lengths: numbers must be whole and positive; otherwise seconds, of which 0 is allowed
    column  column of an empirical file
    folder  folder that relative file names start from
    """
    text = str(value)
    if len(text) > LONGEST:
        raise UsageError(f"{what} has {len(text):,} characters", remedy=FORMS)
    return _Parser(what, text, whole, column, folder or Path()).parse(text.strip(), inside=False)


@dataclass(frozen=True)
class _Parser:
    what: str
    text: str
    whole: bool
    column: int
    folder: Path

    def parse(self, text: str, *, inside: bool) -> Distribution:
        kind, colon, rest = text.partition(":")
        if not colon:
            return Fixed(self._length(text, "the value"))
        if kind == "empirical":
            return Empirical(self.folder / rest, self.column)
        if kind == "mix":
            if inside:
                raise self._wrong("a mix holds another mix")
            return self._mix(rest)
        if kind not in ARGUMENTS:
            raise self._wrong(f"there is no '{kind}'", suggestion(kind, KINDS))
        names, words = ARGUMENTS[kind], rest.split(",")
        if len(words) != 2:
            raise self._wrong(f"{kind} takes two numbers, {names[0]} and {names[1]}")
        if kind == "uniform":
            first, last = (self._length(word, name) for word, name in zip(words, names, strict=True))
            if first > last:
                raise self._wrong(f"the first value, {first:g}, is above the last, {last:g}")
            return Uniform(first, last)
        centre, spread = (self._number(word, name) for word, name in zip(words, names, strict=True))
        if centre <= 0 or spread < 0:
            raise self._wrong(f"{names[0]} must be positive and {names[1]} at least 0")
        return Normal(centre, spread) if kind == "normal" else Lognormal(centre, spread)

    def _mix(self, text: str) -> Mix:
        weights, parts = [], []
        for part in _NEXT_PART.split(text):
            weight, star, rest = part.partition("*")
            if not star:
                raise self._wrong(f"'{part}' has no weight", "write weight*lengths")
            weights.append(self._number(weight, "the weight"))
            parts.append(self.parse(rest.strip(), inside=True))
        if min(weights) <= 0 or not math.isclose(sum(weights), 1, abs_tol=1e-6):
            raise self._wrong(f"the weights {' + '.join(f'{weight:g}' for weight in weights)} do not add up to 1")
        return Mix(tuple(weight / sum(weights) for weight in weights), tuple(parts))

    def _number(self, text: str, name: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise self._wrong(f"{name} '{text.strip()}' is not a number", FORMS) from None
        if not math.isfinite(number):
            raise self._wrong(f"{name} is not finite")
        most = MOST_TOKENS if self.whole else MOST_SECONDS
        if number > most:
            raise self._wrong(f"{name}, {number:g}, is more than {most:,.0f}")
        return number

    def _length(self, text: str, name: str) -> float:
        number = self._number(text, name)
        if self.whole and (number < 1 or number != int(number)):
            raise self._wrong(f"{name}, {number:g}, is not a whole number of tokens from 1 on")
        if number < 0:
            raise self._wrong(f"{name}, {number:g}, is negative")
        return number

    def _wrong(self, why: str, remedy: str = "") -> UsageError:
        return UsageError(f"{self.what} '{self.text[:LONGEST_SHOWN]}' cannot be drawn from", why=why, remedy=remedy)
