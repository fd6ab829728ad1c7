"""A benchmark of a server, from keyword arguments to its report."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trtpipe.pipeline.api.arguments import checked
from trtpipe.pipeline.api.bench_options import BenchArguments, choose, joined, text

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trtpipe.pipeline.api.serve import Client
    from trtpipe.pipeline.bench.options import BenchOptions, Progress
    from trtpipe.pipeline.bench.results.report import BenchReport
    from trtpipe.pipeline.serving.servers import Served

Result = TypeVar("Result")
# Called with a function that ends a run as a signal of that number does.
Begun = Callable[[Callable[[int], None]], None]

log = logging.getLogger("trtpipe")


@checked
def bench(
    target: str | Path | Client | None = None, *, report: str | Path | None = None,
    progress: Callable[[Progress], None] | None = None, **arguments: Unpack[BenchArguments],
) -> BenchReport:  # fmt: skip
    """Measure a server: TTFT, ITL, TPOT, throughput, goodput.

    target    the target to measure, where the server has several; or a client of it
    report    file or folder of the report, if one is to be written; CSV, page and requests go beside it
    progress  called as load points begin, go on and end

    Believe the figures of a report that is `valid`, is not `partial` and has no `failures()`: the command fails
    otherwise. Raises UsageError, InputDataError, HostError or StageFailed where nothing could be measured.
    """
    from trtpipe.pipeline.bench.results.folders import place

    file = None if report is None else place(report)
    if file is not None:
        check_place(file, arguments.get("load"))
    if target is not None and not isinstance(target, str | Path):
        from trtpipe.engines.errors import UsageError

        address = next((name for name in ("grpc_url", "http_url", "openai_url") if arguments.get(name)), "")
        if address:
            raise UsageError(f"{address} says what is measured, and so does the client", remedy=f"leave out {address}")
        if target.adapter is not None:
            arguments = _for_adapter(target, arguments)
        if arguments.get("server") not in (None, target.server):
            raise UsageError(
                f"server is {arguments['server']}, and the client's is {target.server}", remedy="leave out server"
            )
        arguments["server"], target = target.server, target.target
    options, served = choose(text(target), **arguments)
    if file is not None:
        check_place(file, options.tokenizer, *options.work.files)
    measured = measure(options, served, progress)
    if file is not None:
        from trtpipe.pipeline.bench.results.files import write_report

        write_report(measured, file)
    return measured


def _for_adapter(client: Client, arguments: BenchArguments) -> BenchArguments:
    """The arguments of a benchmark of a client's adapter, which only the OpenAI API names. Raises UsageError."""
    from trtpipe.engines.errors import UsageError

    protocol = joined(arguments.get("protocol")) or "completions"
    if not {*protocol.split(",")} <= {"completions", "chat"}:
        raise UsageError(
            f"protocol {protocol} measures the model without the adapter {client.adapter}",
            remedy="give completions or chat, or a client without an adapter",
        )
    return {**arguments, "openai_model": arguments.get("openai_model") or client.model, "protocol": protocol}


def measure(
    options: BenchOptions, served: Served | None, progress: Callable[[Progress], None] | None = None,
    note: Callable[[str], None] = log.info,
) -> BenchReport:  # fmt: skip
    """Run a benchmark, and add to its report what `served` is. Raises as `bench`."""
    from trtpipe.engines.errors import Ended, TrtpipeError
    from trtpipe.engines.hf import chat_template
    from trtpipe.pipeline.bench.run import run

    template = chat_template.read_template(options.tokenizer.parent)
    render = None if template is None else chat_template.compile_template(options.tokenizer.parent, template)
    measured = _outside_a_loop(partial(run, options, render, progress))
    # Imported after the load, so that the first request does not wait for it and the load has the memory.
    if options.wiring.transport != "own" and not measured.partial:
        from trtpipe.pipeline.bench.selftest import state_error

        try:
            _outside_a_loop(lambda begun: state_error(measured, options))
        except TrtpipeError as error:  # the measurement must not be lost for that
            note(f"how wrong {options.wiring.transport} is here is not known: {error}")
        except (KeyboardInterrupt, Ended) as ending:  # nor for a signal that comes after it
            measured.interrupted = True
            if isinstance(ending, Ended):
                measured.ended_by = ending.args[0] - 128
    if served is not None:
        from trtpipe.engines.passport import read_passport
        from trtpipe.pipeline.store.manifest import read_manifest
        from trtpipe.triton_repo.layout import ENGINE_FOLDER

        measured.target = served.target
        try:
            measured.engine = {**vars(read_passport(served.repository / ENGINE_FOLDER))}
        except TrtpipeError as error:  # the measurement must not be lost for that
            note(f"the report does not say which engine was measured: {error}")
        made = read_manifest(served.repository.resolve().parent / "manifest.json")
        if made is not None:  # None for another program's folder
            measured.repository_sha256 = made.content
            if measured.engine is not None:
                measured.engine["content"] = made.record.inputs["engine"]
    return measured


def _outside_a_loop(work: Callable[[Begun], Result]) -> Result:
    """Call `work`: in a thread of its own where this one runs an event loop, as a notebook's does. There a Ctrl-C calls
    what `work` has given to its argument, and its result is awaited."""
    import asyncio
    import signal
    from concurrent.futures import ThreadPoolExecutor

    interrupts: list[Callable[[int], None]] = []
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work(interrupts.append)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work, interrupts.append)
        while True:
            try:
                return running.result()
            except KeyboardInterrupt:
                if running.done() or not interrupts:  # it is the work's own, or `work` does not hear of one
                    raise
                for interrupt in interrupts:
                    interrupt(signal.SIGINT)


def check_place(report: Path, *inputs: str | Path | None) -> None:
    """Check, before anything is measured, that a report can be written there, and that neither it nor a file beside it
    is one of `inputs`, which are read. Raises UsageError or HostError."""
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.bench.results.folders import files_of
    from trtpipe.pipeline.store.folders import require_place

    require_place(report, *inputs)
    if report.suffix in (".csv", ".html", ".jsonl"):
        raise UsageError(f"--report {report} is the name of a file beside it", remedy="give a name such as report.json")
    for file in files_of(report):
        require_place(file, *inputs)
