"""Console output that all commands share; console_* hold that of some. Progress and complaints go to stderr,
results to stdout.

Control characters are made visible in all output (console_text), except in text that `generate` and `logs` write to a
pipe or a file: as with `ls`, the reader of that gets it unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from trtpipe.engines.files import size_text
from trtpipe.pipeline.cli.console_text import bounded, one_line, visible

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.segment import Segment

    from trtpipe.engines.hf.inspection import Inspection
    from trtpipe.pipeline.accuracy.gate import AloneReport
    from trtpipe.pipeline.accuracy.gate import Report as AccuracyReport
    from trtpipe.triton_repo.check import Fault

    Progress = Callable[[int, int], None]


# Keys of a checkpoint's quantization of which a quantized one has a value.
QUANTIZED = ("quant_method", "quant_algo", "kv_cache_quant_algo")


@dataclass
class Flags:
    """The options -q and -v of the command that runs."""

    quiet: bool = False
    verbose: bool = False


FLAGS = Flags()


# Exit status after the reader of the output has left, as `head` does: what a shell reports of other programs then.
READER_LEFT = 128 + 13


class _Output(io.TextIOWrapper):
    """Standard output, whose failures are not taken for those of a file, or of a connection; or standard error, which
    says nothing any more after a failure: a measurement goes on where the terminal has ended, or a log's disk is full.
    """

    def write(self, text: str) -> int:
        if text == "":  # click tries streams so, and takes no failure for one
            return 0
        with self._failing():
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._failing():
            super().flush()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            from trtpipe.engines.errors import HostError

            # What is left must not fail once more as the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self is sys.stderr:
                return
            if isinstance(error, BrokenPipeError):
                raise SystemExit(READER_LEFT) from None
            raise HostError("standard output cannot be written", why=error.strerror or str(error)) from None


def prepare() -> None:
    """Make standard output and standard error say when they fail, and let no output fail for a character that its
    encoding lacks (LANG=C): the character is written as an escape. Input that is not text is read all the same, and is
    refused where it would be sent, as arguments are."""
    FLAGS.quiet = FLAGS.verbose = False
    _open_closed()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    sys.stdout, sys.stderr = _prepared(sys.stdout), _prepared(sys.stderr)


def _prepared(stream: TextIO) -> TextIO:
    if type(stream) is not io.TextIOWrapper:  # a test's stream, or one that is prepared
        return stream
    return _Output(
        stream.buffer, stream.encoding, "backslashreplace",
        line_buffering=stream.line_buffering, write_through=stream.write_through,
    )  # fmt: skip


def _open_closed() -> None:
    """Open standard streams that the caller has closed (`>&-`): else the next file or socket would take their place,
    and a child process would write into it. What is written to a closed standard output fails."""
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # takes the lowest number that is free, this one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = _reopened(1)
    if sys.stderr is None:
        sys.stderr = _reopened(2)


def _reopened(number: int) -> TextIO:
    return _Output(io.BufferedWriter(io.FileIO(number, "w", closefd=False)), "utf-8", "backslashreplace")


def out() -> RichConsole:
    """Standard output; rich is imported here because `--help` must not wait for it."""
    return console(soft_wrap=True)


def err() -> RichConsole:
    return console(stderr=True, soft_wrap=True)


def console(*, stderr: bool = False, soft_wrap: bool = False) -> RichConsole:
    # rich would take a pipe for a terminal where FORCE_COLOR is set, as CI services do.
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    # Paths and causes are shown unchanged: `[old]` in a path is not markup, and `:key:` is not an emoji.
    return _console_class()(
        stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False, force_terminal=terminal
    )


@functools.cache
def _console_class() -> type[RichConsole]:
    from rich.console import Console
    from rich.segment import Segment

    class VisibleConsole(Console):
        """Passes everything it writes, tables and progress too, through `visible`, except rich's own sequences."""

        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(visible(segment.text), segment.style)

    return VisibleConsole


def error(line: str) -> None:
    _print(err(), f"error: {bounded(line)}", style="red")


def traceback(kind: type[BaseException], failure: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback as Python does, with its message made visible."""
    from traceback import format_exception

    sys.stderr.write(visible("".join(format_exception(kind, failure, trace))))


def note(line: str, *, head: str = "") -> None:
    """Print a remark; nothing with --quiet. What is folded stands behind `head`."""
    if not FLAGS.quiet:
        _print(err(), bounded(line), style="dim", head=head)


def say(line: str, style: str | None = None) -> None:
    if not FLAGS.quiet:
        _print(err(), bounded(line), style)


def be_quiet() -> None:
    """Print results and errors alone."""
    FLAGS.quiet = True


def be_verbose() -> None:
    """Print defaults too, and what libraries log."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(f"{record.name}: {record.getMessage()}")

    FLAGS.verbose = True
    logging.basicConfig(level=logging.INFO, handlers=[Notes()])


def result(*lines: str, style: str | None = None) -> None:
    for line in lines:
        _print(out(), one_line(line), style)


def _print(where: RichConsole, line: str, style: str | None = None, head: str = "") -> None:
    """Print a line, on a terminal folded at blanks; but a command to copy is left whole."""
    from trtpipe.pipeline.cli.console_table import wrap

    fold = where.is_terminal and not line.startswith("next")
    for part in wrap(line, where.width - len(head)) if fold else [line]:
        where.print(head + part, style=style)
        head = " " * len(head)


def result_json(value: Any) -> None:
    """Print a value as JSON; dataclasses, enums and paths in it too."""
    print(_json(value, indent=2))


def json_line(value: Any) -> None:
    """Print one value of a stream of JSON lines."""
    print(_json(value, allow_nan=False), flush=True)


def _json(value: Any, **options: Any) -> str:
    """JSON in ASCII; DEL, which is part of ASCII, is an escape too."""
    return json.dumps(value, default=_plain, **options).replace("\x7f", "\\u007f")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def text(piece: str) -> None:
    """Print streamed text as it arrives: unchanged into a pipe or a file, control characters visible on a terminal."""
    sys.stdout.write(visible(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


def stream(pieces: Iterable[str]) -> None:
    """Print the pieces of a text as they arrive, and end its line; where they end early too, so that what is printed
    next begins a line of its own."""
    begun = False
    try:
        for piece in pieces:
            text(piece)
            begun = True
    except BaseException as error:
        # A terminal shows ^C.
        if begun or (isinstance(error, KeyboardInterrupt) and sys.stdout.isatty()):
            text("\n")
        raise
    finally:
        if isinstance(pieces, Generator):
            pieces.close()  # an error that is told later would keep its stream
    text("\n")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, numeric: Sequence[str] = ()) -> None:
    """A plain table on stdout; `numeric` columns are aligned to the right. What does not fit is folded, or listed."""
    from rich.text import Text

    from trtpipe.pipeline.cli.console_table import layout, words

    where = out()
    cells = [[one_line(words(cell)) for cell in row] for row in rows]
    # A pipe has no width: what a program or a log will read is not folded.
    width = where.width if where.is_terminal else None
    heads, right = [one_line(column) for column in columns], [one_line(column) for column in numeric]
    for line in layout(heads, cells, right, width):
        where.print(Text.assemble(*line))


size = size_text


def inspection(found: Inspection, problems: Sequence[str], *, tensors: bool = False, as_json: bool) -> None:
    """Print a checkpoint's facts, notes and faults, and its tensors where they are asked for."""
    if as_json:
        value = dataclasses.asdict(found)
        result_json({**value, "bytes": found.nbytes, "parameters": found.parameters, "problems": list(problems)})
        return
    kind = f"{found.kind} {found.architecture}, {found.dtype}"
    if found.tensors:
        result(f"{kind}, {found.parameters:,} values, {size(found.nbytes)}")
        files = len({tensor.file for tensor in found.tensors})
        result(f"tensors: {len(found.tensors):,} in {files} file(s)" + ("" if tensors else "; --tensors lists them"))
    else:
        result(kind, "tensors: none that can be read")
    for name, settings in (("mapping", found.mapping), ("quantization", found.quantization)):
        told = ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)
        if name == "quantization" and not any(settings.get(key) for key in QUANTIZED):
            told = ""  # the rest are defaults that nothing uses
        result(f"{name}: {told or 'none'}")
    for remark in found.notes:
        result(f"note: {remark}")
    result(*(f"problem: {problem}" for problem in problems), style="red")
    if not problems:
        result("no problem found", style="green")
    if tensors:
        rows = [(t.file, t.name, t.dtype, "x".join(map(str, t.shape)), t.nbytes) for t in found.tensors]
        table(("file", "tensor", "dtype", "shape", "bytes"), rows, numeric=("bytes",))


def passport(facts: dict[str, Any]) -> None:
    """Print an engine's passport, nested facts under dotted names."""
    rows: list[tuple[str, Any]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            rows += [(f"{name}.{inner}", inside) for inner, inside in value.items()]
        else:
            rows.append((name, size(value) if name == "rank_bytes" else value))
    table(("passport", "value"), rows)


def faults(found: Sequence[Fault]) -> None:
    """Print the faults of a checked repository, one a line."""
    for fault in found:
        place = f"{fault.path}: {fault.where}" if fault.where else str(fault.path)
        told = f"{fault.what}: {fault.why}" if fault.why else fault.what
        line = f"{fault.severity}  {place}  {told}{'; ' + fault.remedy if fault.remedy else ''}  [{fault.rule}]"
        result(line, style="red" if fault.severity == "error" else "yellow")
    if not found:
        result("no fault found")


def accuracy(report: AccuracyReport | AloneReport) -> None:
    """Print a comparison with the original: figures and limits, the worst layers, clipped inputs, the verdict.

    Of a model alone there are figures and clipped inputs.
    """
    from trtpipe.pipeline.accuracy.gate import WORST, AloneReport, percent

    if isinstance(report, AloneReport):
        table(("", report.kind), report.summary(), numeric=(report.kind,))
    else:
        table(("", "original", "quantized", "limit"), report.summary(), numeric=("original", "quantized", "limit"))
        layers = [(f"layer {layer.layer}", percent(layer.local), percent(layer.accumulated)) for layer in report.worst]
        table(("worst layers", "local error", "accumulated"), layers, numeric=("local error", "accumulated"))
    clipped = [
        (f"layer {entry.layer} {entry.linear}", entry.beyond, entry.inputs, percent(entry.share))
        for entry in report.saturated[:WORST]
    ]
    if clipped:
        table(("clipped inputs", "numbers", "of", "share"), clipped, numeric=("numbers", "of", "share"))
    failures = [f"failed: {failure}" for failure in report.failures]
    if isinstance(report, AloneReport):
        result(*failures or [report.line()], style="red" if failures else "green")
        return
    passed = "the unquantized weights pass" if report.recipe == "none" else f"{report.recipe} passes"
    result(*failures or [f"{passed} the accuracy gate"], style="red" if failures else "green")
