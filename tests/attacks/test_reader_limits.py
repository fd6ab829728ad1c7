"""The largest and worst files that the readers of JSON and YAML take, and larger ones, read by the command itself: in
bounded memory and time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attacks.running import LIMIT_BYTES, LIMIT_S, run_apart
from tests.support.triton_repositories import inflight
from trtpipe.engines.json_input import MAX_BYTES, MAX_VALUES, MAX_WIDE_BYTES
from trtpipe.engines.yaml_input import MAX_BYTES as MAX_YAML_BYTES

pytestmark = pytest.mark.process
FACE = "\U0001f600"


def joined(one: Callable[[int], str], count: int, ends: str) -> bytes:
    return (ends[0] + ",".join(map(one, range(count))) + ends[1]).encode()


# Of what is within the limits, what takes most memory. The first one took 850 MB, the fourth 520 MB.
WORST: dict[str, Callable[[], bytes]] = {
    "entries": lambda: joined(lambda n: f'"{FACE}{n:x}":"{FACE}{n:x}"', MAX_VALUES // 3 - 10, "{}"),
    "texts": lambda: joined(lambda n: f'"{FACE}{n:x}"', MAX_VALUES - 10, "[]"),
    "depth": lambda: joined(lambda _: '{"a":' * 50 + "0" + "}" * 50, MAX_VALUES // 152, "[]"),
    "one text": lambda: f'"{FACE}'.encode() + b"a" * (MAX_WIDE_BYTES - 10) + b'"',
    "one plain text": lambda: b'"' + b"a" * (MAX_BYTES - 10) + b'"',
    "escapes": lambda: b'"' + rb"\ud83d\ude00" * (MAX_WIDE_BYTES // 12 - 10) + b'"',
    "numbers": lambda: joined(lambda n: f"{n}.5", MAX_VALUES - 10, "[]"),
}
# Beyond them: 3 GB each, had they been read.
BEYOND: dict[str, Callable[[], bytes]] = {
    "more entries": lambda: joined(lambda n: f'"{n:x}":{n}', MAX_VALUES, "{}"),
    "more texts": lambda: joined(lambda n: f'"{FACE}{n:x}"', 2 * MAX_VALUES, "[]"),
    "a number": lambda: b"9" * MAX_BYTES,
    "a deep one": lambda: b"[" * (MAX_VALUES - 10),
    "a wide one": lambda: f'"{FACE}'.encode() + b"a" * (MAX_BYTES - 10) + b'"',
}
# What is read is no tokenizer; of these not more is read than shows it, and of the others nothing is known to be wrong.
DAMAGED = (*WORST, "a number", "a deep one")
QUICK = ("entries", "more entries", "a number")
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in (*WORST, *BEYOND) if kind not in QUICK]


@pytest.mark.parametrize("kind", [*QUICK, *SLOW])
def test_the_worst_json_takes_bounded_memory_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    inflight(tmp_path / "repository")
    tokenizer = tmp_path / "repository" / "preprocessing" / "1" / "tokenizer" / "tokenizer.json"
    assert tokenizer.is_file()
    tokenizer.write_bytes({**WORST, **BEYOND}[kind]())
    done = run_apart(["check", "repository"])
    assert done.code == (3 if kind in DAMAGED else 0), done
    assert done.peak < LIMIT_BYTES
    assert done.seconds < 2 * LIMIT_S


YAML: dict[str, tuple[Callable[[], bytes], int]] = {
    "values": (lambda: b"build: {max_batch_size: [" + b"[]," * 99_000 + b"]}", 2),
    "comments": (lambda: b"gpu: cpu\n" + b"#\n" * ((MAX_YAML_BYTES - 10) // 2), 2),
    "a number to base 60": (lambda: b"tp: 1" + b":1" * 500_000, 3),
    "aliases": (lambda: b"a: &a [" + b"x," * 1000 + b"]\n" + b"- *a\n" * 100_000, 3),
    "without end": (lambda: b"", 3),
}


@pytest.mark.parametrize("kind", YAML)
def test_the_worst_yaml_takes_bounded_memory_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make, code = YAML[kind]
    path = tmp_path / "recipe.yaml"
    path.write_bytes(make())
    if kind == "without end":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    done = run_apart(["settings", "--recipe", "recipe.yaml"])
    assert done.code == code, done
    assert done.peak < LIMIT_BYTES
    assert done.seconds < 2 * LIMIT_S


def test_a_setting_of_the_command_line_is_read_within_the_same_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_apart(["settings", "--model", "x", "--gpu", "cpu", "--set", "tp=1" + ":1" * 60_000])
    assert (done.code, done.err.splitlines()) == (
        2, ["error: --set tp is not a YAML value: a number has more than 64 digits, on line 1"],
    )  # fmt: skip
    assert done.seconds < LIMIT_S
