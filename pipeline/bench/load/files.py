"""Load files: configs/load/*.yaml and files of the user's, read and validated.

    name, description; the name defaults to the name of the file
    load   when requests are sent: exactly one of `concurrency`, `rate`, `stages` and `trace` selects the kind; the
           fields are those of its class in load.loads. `concurrency`, `rate` and `speedup` may be lists: one load
           point for each entry.
    work   what is sent: the fields of load.work.Work. A trace's load brings its own prompts.

Relative file names in it start from its own folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trtpipe import configs
from trtpipe.configs import read
from trtpipe.configs.read import ConfigError
from trtpipe.engines.errors import TrtpipeError, UsageError, suggestion
from trtpipe.pipeline.bench.load.lines import shown
from trtpipe.pipeline.bench.load.loads import Closed, Load, Open, Replay, Staged
from trtpipe.pipeline.bench.load.work import Sessions, SharedPrefix, Work

_T = TypeVar("_T")
# (class, its fields, where they are from, class of the error to raise) -> object
Build = Callable[[type[Any], dict[str, Any], str, type[TrtpipeError]], Any]

LOADS = Path(configs.__file__).parent / "load"
# The key that selects the kind of a load.
KINDS: dict[str, type[Load]] = {"concurrency": Closed, "rate": Open, "stages": Staged, "trace": Replay}
# Keys that may hold a list, with a load point for each entry.
LISTS = ("concurrency", "rate", "speedup")
MOST_LOAD_POINTS = 1000
STAGE_KEYS = ("duration_s", "rate", "from", "to")
PARTS: dict[str, type] = {"shared_prefix": SharedPrefix, "sessions": Sessions}


@dataclass(frozen=True, kw_only=True)
class LoadFile:
    """A load file: its load points in order, and the work that each of them does."""

    name: str
    description: str
    load_points: tuple[Load, ...]
    work: Work


def names() -> list[str]:
    """Names of the load files that are shipped."""
    return sorted(path.stem for path in LOADS.glob("*.yaml"))


def find_load(name: str) -> LoadFile:
    """The load file of configs/load of that name, or the YAML file at that path.

    Raises UsageError where no such file exists, ConfigError for a mistake in it.
    """
    path = LOADS / f"{name}.yaml" if name in names() else Path(name)
    if not path.is_file():
        raise UsageError(f"unknown load '{name}'", why="there is no such file either", remedy=suggestion(name, names()))
    raw = read.read_yaml(path)
    read.check_keys(raw, [field.name for field in dataclasses.fields(_Plain)], path.name)
    plain = read.build(_Plain, raw, path.name)
    load_points = parse_loads(plain.load, f"{path.name}: load", path.parent)
    return LoadFile(
        name=plain.name or path.stem,
        description=plain.description,
        load_points=load_points,
        work=parse_work(plain.work, f"{path.name}: work", path.parent, load_points),
    )


def parse_loads(
    raw: dict[str, Any], where: str, folder: Path, error: type[TrtpipeError] = ConfigError, build: Build = read.build
) -> tuple[Load, ...]:
    """The load points of a `load` mapping. Raises `error` naming `where` and the mistake.

    build  makes an object of a class from its fields, and checks their types where nothing has before
    """
    known = {field.name for kind in KINDS.values() for field in dataclasses.fields(kind)}
    read.check_keys(raw, known, where, error)
    chosen = [key for key in KINDS if key in raw]
    if len(chosen) != 1:
        found = " and ".join(chosen) if chosen else "none"
        raise error(
            f"{where}: a load has one of {', '.join(KINDS)}", why=f"there is {found}", remedy="give one of them"
        )
    kind = KINDS[chosen[0]]
    own = [field.name for field in dataclasses.fields(kind)]
    for key in raw:
        if key not in own:
            raise error(f"{where}: {key} does not apply to a load of {chosen[0]}", remedy="known: " + ", ".join(own))
    data = dict(raw)
    if kind is Staged:
        data["stages"] = _stages(raw["stages"], f"{where}: stages", error)
    if kind is Replay:
        data["trace"] = _beside(raw["trace"], f"{where}: trace", folder, error)
    lists = [key for key in LISTS if isinstance(data.get(key), list)]
    if not lists:
        return (_build(kind, data, where, error, build),)
    (key,) = lists
    if not data[key]:
        raise error(f"{where}: {key} is an empty list", remedy="give one value or more")
    if len(data[key]) > MOST_LOAD_POINTS:
        raise error(
            f"{where}: {key} is a list of {len(data[key]):,}", remedy=f"give at most {MOST_LOAD_POINTS:,} values"
        )
    twice = next((value for place, value in enumerate(data[key]) if value in data[key][:place]), None)
    if twice is not None:
        remedy = "give it once; --repeat 2 measures each load point twice"
        raise error(f"{where}: {key} is a list with {twice} twice", remedy=remedy)
    return tuple(_build(kind, {**data, key: value}, where, error, build) for value in data[key])


def parse_work(
    raw: dict[str, Any],
    where: str,
    folder: Path,
    load_points: tuple[Load, ...] = (),
    error: type[TrtpipeError] = ConfigError,
    build: Build = read.build,
) -> Work:
    """The `work` mapping of a load with these load points. Raises `error` naming `where` and the mistake."""
    data = dict(raw)
    for key, kind in PARTS.items():
        if isinstance(data.get(key), dict):
            read.check_keys(data[key], [field.name for field in dataclasses.fields(kind)], f"{where}: {key}", error)
    replays = [point for point in load_points if isinstance(point, Replay)]
    if replays:
        for key in ("trace", "max_total_tokens"):
            if key in data:
                raise error(f"{where}: {key} is given twice", why="the load names it", remedy="leave it out here")
        # All load points of a file replay one trace.
        data["trace"] = replays[0].trace
        data["max_total_tokens"] = replays[0].max_total_tokens
    data.setdefault("folder", folder)
    return _build(Work, data, where, error, build)


@dataclass(frozen=True, kw_only=True)
class _Plain:
    """A load file before its `load` and `work` are parsed."""

    load: dict[str, Any]
    work: dict[str, Any] = dataclasses.field(default_factory=dict)
    name: str = ""
    description: str = ""


def _stages(value: Any, where: str, error: type[TrtpipeError]) -> list[dict[str, Any]]:
    """Stages as Stage has them, from {duration_s, rate} or {duration_s, from, to}."""
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        raise error(f"{where} must be a list of mappings")
    out = []
    for entry in value:
        read.check_keys(entry, STAGE_KEYS, where, error)
        rates = {key for key in entry if key != "duration_s"}
        if rates not in ({"rate"}, {"from", "to"}):
            raise error(f"{where}: a stage has a rate, or from and to", why=f"{shown(entry)} has neither or too much")
        start, end = (entry.get("rate", entry.get(key)) for key in ("from", "to"))
        out.append({"start": start, "end": end, **{key: entry[key] for key in entry if key == "duration_s"}})
    return out


def _beside(value: Any, where: str, folder: Path, error: type[TrtpipeError]) -> Path:
    if not isinstance(value, str | Path):
        raise error(f"{where} is {shown(value)}, not a file")
    # Absolute, so that the load and the work, which has a folder of its own, name the same file.
    return (folder / value).absolute()


def _build(kind: type[_T], data: dict[str, Any], where: str, error: type[TrtpipeError], build: Build) -> _T:
    try:
        made: _T = build(kind, data, where, error)
        return made
    except UsageError as mistake:
        if mistake.what.startswith(where):
            raise
        # The class says what is wrong with its values; this adds the name of the file.
        raise error(f"{where}: {mistake.what}", why=mistake.why, remedy=mistake.remedy) from None
