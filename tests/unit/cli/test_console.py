"""Whatever others have named, answered or generated: no control character of theirs reaches a terminal or a log."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.engines.errors import HostError
from trtpipe.engines.hf.inspection import Inspection, TensorInfo
from trtpipe.engines.process import python_command
from trtpipe.pipeline.cli import console, console_bench, console_build, console_plan, console_top
from trtpipe.pipeline.cli.console_progress import working
from trtpipe.pipeline.cli.console_text import LONGEST, bounded, one_line, visible
from trtpipe.pipeline.net.triton_metrics import EngineFigures, Figures, GpuFigures, ModelFigures
from trtpipe.pipeline.planner import tables
from trtpipe.pipeline.serving.top import Snapshot
from trtpipe.triton_repo.check import Fault

ESC, CSI, BEL, RLO, PDF = "\x1b", "\x9b", "\x07", "\u202e", "\u202c"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("caf\u00e9, \u6f22\u5b57 and \U0001f600", "caf\u00e9, \u6f22\u5b57 and \U0001f600"),
        (f"{ESC}[2J{ESC}]0;owned{BEL}", r"\x1b[2J\x1b]0;owned\x07"),
        (f"{CSI}31mred", r"\x9b31mred"),
        ("100%\rfine", r"100%\x0dfine"),
        ("a\x7f\x08b", r"a\x7f\x08b"),
        (f"safe{RLO}gpj.exe{PDF}", r"safe\u202egpj.exe\u202c"),
        ("\u2066isolated\u2069", r"\u2066isolated\u2069"),
        ("half \ud83d of a pair", r"half \ud83d of a pair"),
        ("one\x85two\u2028three\u2029", r"one\x85two\u2028three\u2029"),
        ("\x00\x0b\x0c\x1f", r"\x00\x0b\x0c\x1f"),
    ],
)
def test_what_hides_is_made_visible(text: str, shown: str) -> None:
    assert visible(text) == one_line(text) == bounded(text) == shown
    assert visible(shown) == shown


def test_text_keeps_its_lines_and_a_name_has_none() -> None:
    assert visible("one\n\ttwo") == "one\n\ttwo"
    assert one_line("one\n\ttwo") == r"one\x0a\x09two"


def test_the_middle_of_a_long_line_is_left_out() -> None:
    assert bounded("a" * LONGEST) == "a" * 2000
    assert bounded("a" * 3000 + "b" * 3000) == "a" * 1000 + " [4,000 characters left out] " + "b" * 1000
    assert bounded(ESC * 1000) == r"\x1b" * 250 + " [2,000 characters left out] " + r"\x1b" * 250


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Pipe(io.StringIO):
    encoding = "utf-8"


# Of rich's own: colours, and what it draws over a line with. No hostile text here has a bracket after ESC.
OWN = re.compile(r"\r?\x1b\[[0-9;?]*[A-Za-z]")
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
HOSTILE = st.text(
    st.one_of(
        st.sampled_from("ab \n\t\r" + ESC + CSI + BEL + RLO + PDF + "\x7f\x85\u2028\ud800\udcff"),
        st.characters(exclude_characters="["),
    ),
    max_size=40,
)  # fmt: skip
Printing = Callable[[str], None]


def stage(text: str) -> None:
    with working(text, text) as work:
        work(1, 2)
        work.step(text, text)


def finished(text: str) -> None:
    manifest = SimpleNamespace(seconds=1.0, size=1, notes={"notices": [text]})
    done: Any = SimpleNamespace(stage="build", reason=text, reused=False, artefact=SimpleNamespace(manifest=manifest))
    console_build.BuildReporter().finished(done)
    console_build.ClusterReporter(text).finished(done)


def told(text: str) -> None:
    for kind, words in (("begins", text), ("ends", text), ("progress", "1/2"), ("line", text)):
        console_build.ClusterReporter.told(text, text, kind, words)
    console_build.ClusterReporter(text).line(text)
    console_build.ClusterReporter(text).note(text)


def inspection(text: str) -> None:
    tensor = TensorInfo(file=text, name=text, dtype=text, shape=(1,), nbytes=1)
    found = Inspection(
        kind="huggingface", architecture=text, dtype=text, mapping={text: text}, quantization={text: text},
        tensors=(tensor,), problems=(text,), notes=(text,),
    )  # fmt: skip
    for as_json in (False, True):
        console.inspection(found, [text], as_json=as_json)


def fault(text: str) -> None:
    console.faults([Fault(severity="error", rule="x", path="a", where=text, what=text, why=text, remedy=text)])


def snapshot(text: str) -> Snapshot:
    values: Any = {
        **dict.fromkeys(ModelFigures.__annotations__), **dict.fromkeys(EngineFigures.__annotations__),
        **dict.fromkeys(GpuFigures.__annotations__), "model": text, "uuid": text, "kv_fraction": 0.5,
    }  # fmt: skip

    def made(kind: Any) -> Any:
        return kind(**{name: values[name] for name in kind.__annotations__})

    figures = Figures(
        seconds=1.0, restarted=(text,), models=(made(ModelFigures),), engines=(made(EngineFigures),),
        gpus=(made(GpuFigures),),
    )  # fmt: skip
    return Snapshot(server=text, url=text, time=text, up=True, figures=figures)


def top(text: str) -> None:
    down = Snapshot(server=text, url=text, time=text, up=False, why=text)
    for as_json in (False, True):
        console_top.show([snapshot(text), down], as_json=as_json)
        console_top.show_once(snapshot(text), as_json=as_json)


def advice(text: str) -> None:
    found: Any = SimpleNamespace(
        remarks=[text], getting_there=(text,), question=SimpleNamespace(model=text, objectives=())
    )
    empty = SimpleNamespace(columns=("a", text), rows=[(text, text)], title=text)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("options", "memory", "refusals"):
            patch.setattr(tables, name, lambda found: empty)
        patch.setattr(tables, "load", lambda found: text)
        console_plan.advice(found, [], [], explain=True, as_json=False)


def failure(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError as error:
        console.traceback(ValueError, error, error.__traceback__)


def bench(text: str) -> None:
    live: Any = SimpleNamespace(
        done=1, failed=0, left_s=None, elapsed_s=1.0, warmed=0, first_ns=[], in_flight=0, responses=1, to_make=0
    )
    at: Any = SimpleNamespace(protocol=text, label=text, total=1, live=live, result=None)
    at.name = text
    for at.state in ("begun", "running", "ended"):
        with console_bench.progress() as progress:
            progress(at)


PRINTING: list[Printing] = [
    console.error, console.note, console.result, stage, finished, told, inspection, fault, top, advice, failure, bench,
    lambda text: console.error(str(HostError(text, why=text, remedy=text))),
    lambda text: console.result(text, text),
    lambda text: console.result_json({text: [text]}),
    lambda text: console.passport({text: {text: text}, "x": text}),
    lambda text: console.table((text, "b"), [(text, None), (text, text)], numeric=(text,)),
    lambda text: console_build.BuildReporter().line(text),
    lambda text: console_build.BuildReporter().note(text),
]  # fmt: skip


@pytest.mark.parametrize("kind", [Terminal, Pipe])
@given(text=HOSTILE)
def test_nothing_hidden_comes_out(kind: type[io.StringIO], text: str) -> None:
    for printing in PRINTING:
        out, err = kind(), kind()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TERM", "xterm")
            patch.setenv("COLUMNS", "200")
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            printing(text)
        for written in (out.getvalue(), err.getvalue()):
            assert not HIDDEN.search(OWN.sub("", written)), printing
            written.encode()


@pytest.mark.parametrize(
    ("kind", "variables", "coloured"),
    [
        (Terminal, {}, True),
        (Terminal, {"NO_COLOR": "1"}, False),
        (Pipe, {}, False),
        (Pipe, {"FORCE_COLOR": "1"}, False),
    ],
)
def test_colour_is_for_a_terminal_whose_user_wants_it(
    monkeypatch: pytest.MonkeyPatch, kind: type[io.StringIO], variables: dict[str, str], coloured: bool
) -> None:
    err = kind()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    console.error("it broke")
    assert ("\x1b[31m" in err.getvalue()) is coloured
    assert "error: it broke" in err.getvalue()


def test_json_takes_what_reports_are_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    console.result_json({"path": Path("a/b"), "fault": Fault(severity="error", rule="r", path="p", where="", what="w")})
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["fault"]["severity"]) == ("a/b", "error")


def test_prose_is_folded_at_blanks_and_a_next_step_is_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    console.result("the weights take more", "next: trtpipe serve a-long-name")
    assert out.getvalue().splitlines() == ["the weights take", "more", "next: trtpipe serve a-long-name"]


def test_a_pipe_is_none_where_colour_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = Pipe(), Pipe()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "20")):
        monkeypatch.setenv(name, value)
    console.result("the weights take more than there is")
    console.table(("model", "what it is"), [("llama3-8b-instruct", "a model of eight billion weights")])
    assert out.getvalue().splitlines() == [
        "the weights take more than there is",
        "model               what it is",
        "llama3-8b-instruct  a model of eight billion weights",
    ]
    with working("download", "first run") as work:
        work.step("reading", "a")
    assert err.getvalue().splitlines() == ["download  running  (first run)", "download  reading"]


def test_a_folded_remark_stands_behind_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    console.note("the weights take more", head="gpu   ")
    assert OWN.sub("", err.getvalue()).splitlines() == ["gpu   the weights", "      take more"]


def test_streamed_text_is_as_it_is_but_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"one\ttwo\n{ESC}[2J{RLO}"
    for kind, written in ((Terminal, "one\ttwo\n" + r"\x1b[2J\u202e"), (Pipe, text)):
        out = kind()
        monkeypatch.setattr(sys, "stdout", out)
        console.text(text)
        assert out.getvalue() == written


@pytest.mark.parametrize(
    ("kind", "pieces", "written"),
    [
        (Pipe, ["under"], "under\n"),
        (Terminal, ["under"], "under\n"),
        (Terminal, [], "\n"),
        (Pipe, [], ""),
    ],
)
def test_what_follows_an_interrupted_text_begins_a_line(
    kind: type[io.StringIO], pieces: list[str], written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(error: BaseException) -> Iterator[str]:
        yield from pieces
        raise error

    out = kind()
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(KeyboardInterrupt):
        console.stream(answer(KeyboardInterrupt()))
    assert out.getvalue() == written
    monkeypatch.setattr(sys, "stdout", failed := kind())
    with pytest.raises(HostError):
        console.stream(answer(HostError("gone")))
    assert failed.getvalue() == ("under\n" if pieces else "")


def test_a_name_can_neither_begin_a_line_nor_be_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console.result("problem: x\nno problem found")
    console.table(("name",), [("x\nmodel  ready [red]",)])
    console.error("broken\nerror: none")
    out, err = capsys.readouterr()
    assert [line.rstrip() for line in out.splitlines()] == [
        r"problem: x\x0ano problem found",
        "name",
        r"x\x0amodel  ready [red]",
    ]
    assert err == r"error: broken\x0aerror: none" + "\n"


def test_json_is_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"name": f"{ESC}\x7f\x9b\ud800\u202e caf\u00e9"}
    console.result_json(value)
    out = capsys.readouterr().out
    assert r'"\u001b\u007f\u009b\ud800\u202e caf\u00e9"' in out
    assert json.loads(out) == value


@pytest.mark.process
@pytest.mark.parametrize(
    ("locale", "shown"), [("C.UTF-8", rb"mod\xe8le\udcff\x1b[31m"), ("C", rb"mod\udcc3\udca8le\udcff\x1b[31m")]
)
def test_an_output_that_lacks_a_character(tmp_path: Path, locale: str, shown: bytes) -> None:
    """A folder's name has a letter that ASCII lacks, a byte that is not text, and an escape sequence."""
    folder = os.fsencode(tmp_path) + "/mod\u00e8le".encode() + b"\xff\x1b[31m"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0", "LC_ALL": locale}
    for words in ((b"check", folder), (b"--debug", b"check", folder)):
        done = subprocess.run([*python_command("trtpipe"), *words], env=environment, capture_output=True, check=False)
        assert done.stderr.isascii()
        assert b"\x1b" not in done.stderr
        assert shown + b"'; `trtpipe ls` lists" in done.stderr.replace(b"\n", b"")
    script = (
        r"from trtpipe.pipeline.cli import console; console.prepare(); console.text('\u00b1'); console.result('\u2026')"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    assert done.stdout == rb"\xb1\u2026" + b"\n"


@pytest.mark.process
def test_a_reader_of_standard_error_that_leaves_ends_nothing() -> None:
    """As after Ctrl-C under `2>&1 | tee`: what is measured is yet to be written."""
    program = """
from trtpipe.pipeline.cli import console
console.prepare()
input()
console.note("ending")
print("report", flush=True)
console.note("ended")
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        process.stderr.close()
        process.stderr = None
        out, _ = process.communicate("go on\n", timeout=60)
    assert (process.returncode, out) == (0, "report\n")
