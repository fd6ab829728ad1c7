"""What is asked for, checked before anything is made: lengths, prefixes, sessions, files, sampling options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.load.lengths import MOST_TOKENS, Distribution, parse
from trtpipe.pipeline.bench.load.lines import shown
from trtpipe.pipeline.bench.load.prompt_files import check_options

DEFAULT_TOKENS = 64
# Common texts of a shared prefix.
MOST_GROUPS = 10_000


@dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """A share of the requests begins with one of `groups` common texts, each equally often.

    tokens  of such a text, special tokens in front included; the prompt's length stays what it is
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
    """Conversations; all three are written as lengths are.

    turns        requests of a session
    think_s      seconds from the end of an answer until the next turn is due
    user_tokens  new text of each turn after the first; None: as input_tokens
    """

    turns: int | str
    think_s: float | str = 0
    user_tokens: int | str | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """What requests ask. At most one of `prompts`, `sharegpt` and `trace`; without one, prompts are made.

    input_tokens      lengths of made prompts (see lengths), all their tokens counted
    output_tokens     lengths of answers, to made prompts and where a prompt file does not say
    shared_prefix     of made prompts
    sessions          of made prompts
    prompts           a prompt file
    sharegpt          conversations in ShareGPT's form
    trace             a trace in Mooncake's format: its lengths and shared blocks; its times are a load of their own
    shuffle           take the prompts of a file in an order fixed by the seed instead of the file's
    options           sampling options of every request; a file's own go before
    ignore_eos        answers are exactly as long as asked: end tokens are ignored, and min_tokens is the length
    max_total_tokens  requests longer than that, prompt and answer together, are left out; sessions end before
    folder            where relative files are
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
        """Of prompts and of answers. Raises UsageError."""
        given = (self.input_tokens, self.output_tokens)
        inputs, outputs = (DEFAULT_TOKENS if value is None else value for value in given)
        return (
            parse(inputs, "input_tokens", folder=self.folder),
            parse(outputs, "output_tokens", column=1, folder=self.folder),
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """All that it is made from, as absolute paths."""
        sources = [source for source in (self.prompts, self.sharegpt, self.trace) if source is not None]
        lengths = [one for one in (*self.lengths(), *(self.turns() or ())) if one is not None]
        found = [self.folder / source for source in sources] + [file for one in lengths for file in one.files]
        return tuple(dict.fromkeys(file.absolute() for file in found))

    def turns(self) -> tuple[Distribution, Distribution, Distribution | None] | None:
        """Turns, think times and lengths of later user texts; None without sessions. Raises UsageError."""
        if self.sessions is None:
            return None
        user = self.sessions.user_tokens
        return (
            parse(self.sessions.turns, "turns", folder=self.folder),
            parse(self.sessions.think_s, "think_s", whole=False, folder=self.folder),
            None if user is None else parse(user, "user_tokens", folder=self.folder),
        )
