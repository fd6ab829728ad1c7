"""Description of a load's requests, validated first: lengths, prefixes, sessions, files, sampling options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.load.lengths import MOST_TOKENS, Distribution, parse
from trtpipe.pipeline.bench.load.lines import shown
from trtpipe.pipeline.bench.load.loads import Load
from trtpipe.pipeline.bench.load.prompt_files import check_options

DEFAULT_TOKENS = 64
# Most common texts of a shared prefix.
MOST_GROUPS = 10_000


@dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """A share of the requests begins with one of `groups` common texts, each equally often.

    tokens  length of such a text, special tokens in front included; the length of the prompt does not change
    """

    share: float
    tokens: int
    groups: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(f"shared_prefix: share is {shown(self.share)}", remedy="give more than 0, up to 1")
        for name, most in (("tokens", MOST_TOKENS), ("groups", MOST_GROUPS)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise UsageError(f"shared_prefix: {name} is {shown(value)}", remedy=f"give 1 to {most:,}")


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """Conversations; the three fields are distributions, written as lengths are.

    turns        requests of a session
    think_s      seconds from the end of an answer until the next turn is due
    user_tokens  new text of each turn after the first; None: as input_tokens
    """

    turns: int | str
    think_s: float | str = 0
    user_tokens: int | str | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """Description of requests. At most one of `prompts`, `sharegpt` and `trace`; without one, prompts are synthetic.

    input_tokens      lengths of synthetic prompts (see lengths), special tokens included
    output_tokens     lengths of answers to synthetic prompts, and where a prompt file gives none
    shared_prefix     shared prefixes of synthetic prompts
    sessions          conversations of synthetic prompts
    prompts           a prompt file
    sharegpt          conversations in ShareGPT's format
    trace             a trace in Mooncake's format: its lengths and shared blocks; its times are a load of their own
    shuffle           take the prompts of a file in an order that the seed determines instead of the file's order
    options           sampling options of every request; those that a file gives for a request take precedence
    ignore_eos        answers are exactly as long as asked: end tokens are ignored, and min_tokens is the length
    max_total_tokens  longer requests (prompt plus answer) are left out, and sessions end before them
    folder            folder that relative file names start from
    """

    input_tokens: int | str | None = None
    output_tokens: int | str | None = None
    shared_prefix: SharedPrefix | None = None
    sessions: Sessions | None = None
    prompts: Path | None = None
    sharegpt: Path | None = None
    trace: Path | None = None
    shuffle: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = True
    max_total_tokens: int | None = None
    folder: Path = Path()

    def __post_init__(self) -> None:
        sources = [name for name in ("prompts", "sharegpt", "trace") if getattr(self, name) is not None]
        if len(sources) > 1:
            raise UsageError(f"both {' and '.join(sources)} are given", remedy="give one of them")
        for source in sources:
            own = ("input_tokens", "shared_prefix", "sessions")
            for name in own if source == "prompts" else (*own, "output_tokens"):
                if getattr(self, name) is not None:
                    raise UsageError(f"{name} does not apply to {source}", remedy="give one of them")
        if self.shuffle and self.prompts is None and self.sharegpt is None:
            raise UsageError("shuffle does not apply", why="there is no file of prompts")
        if self.max_total_tokens is not None and self.max_total_tokens < 2:
            raise UsageError(f"max_total_tokens is {shown(self.max_total_tokens)}", remedy="give 2 or more")
        check_options(self.options, "options", UsageError)
        self.lengths()
        self.turns()

    def lengths(self) -> tuple[Distribution, Distribution]:
        """Distributions of the lengths of prompts and of answers. Raises UsageError."""
        given = (self.input_tokens, self.output_tokens)
        inputs, outputs = (DEFAULT_TOKENS if value is None else value for value in given)
        return (
            parse(inputs, "input_tokens", folder=self.folder),
            parse(outputs, "output_tokens", column=1, folder=self.folder),
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that the requests are made from, as absolute paths."""
        sources = [source for source in (self.prompts, self.sharegpt, self.trace) if source is not None]
        lengths = [one for one in (*self.lengths(), *(self.turns() or ())) if one is not None]
        found = [self.folder / source for source in sources] + [file for one in lengths for file in one.files]
        return tuple(dict.fromkeys(file.absolute() for file in found))

    @property
    def rate_unit(self) -> str:
        """What the rate of an open loop counts: with sessions the first turns alone."""
        return "requests/s" if self.sessions is None else "conversations/s"

    def label(self, load: Load) -> str:
        """Label of a load point of this load."""
        return load.label.replace("requests/s", self.rate_unit)

    def turns(self) -> tuple[Distribution, Distribution, Distribution | None] | None:
        """Distributions of turns, think times and later user texts; None without sessions. Raises UsageError."""
        if self.sessions is None:
            return None
        user = self.sessions.user_tokens
        return (
            parse(self.sessions.turns, "turns", folder=self.folder),
            parse(self.sessions.think_s, "think_s", whole=False, folder=self.folder),
            None if user is None else parse(user, "user_tokens", folder=self.folder),
        )
