"""`trtpipe bench`: turns the command line into options of the load generator."""

from __future__ import annotations

import gc
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtpipe.pipeline.cli.help import SectionedCommand, SectionedGroup, in_section

if TYPE_CHECKING:
    from trtpipe.engines.errors import TrtpipeError
    from trtpipe.pipeline.bench.load.loads import Load
    from trtpipe.pipeline.bench.load.work import Work
    from trtpipe.pipeline.bench.options import BenchOptions, Target
    from trtpipe.pipeline.bench.search import Search
    from trtpipe.pipeline.serving.servers import Served, Server

# Only Linux timestamps received data in the kernel.
LINUX = sys.platform == "linux"
# Default duration of each load point of a search.
SEARCH_SECONDS = 30.0
# Options for the fields of a load. `requests` is a word too: a field only beside the other, or before "is".
FLAGS = {
    r"requests (and|or) duration_s": r"--requests \1 --duration",
    r"requests is": "--requests is",
    "duration_s": "--duration",
    "ramp_s": "--ramp",
    "timeout_s": "--timeout",
    "token_timeout_s": "--token-timeout",
    "max_in_flight": "--max-in-flight",
}

# Options for fields of the work.
OWN_FLAGS = {"options": "sampling", "ignore_eos": "natural_end"}

app = typer.Typer(cls=SectionedGroup, rich_markup_mode=None, invoke_without_command=True)

_server, _load_option, _request = in_section("Server"), in_section("Load"), in_section("Requests")
_goal, _client = in_section("Objectives"), in_section("Client and report")


@app.callback()
def bench(
    context: typer.Context,
    server: Annotated[str | None, _server("Name of a running server; the only one if left out.")] = None,
    target: Annotated[str | None, _server("Target to measure, where the server has several.")] = None,
    protocol: Annotated[str, _server("Protocols, one after the other: grpc, http, completions, chat.")] = "grpc,http",
    model: Annotated[str, _server("Triton model: ensemble, tensorrt_llm_bls or tensorrt_llm.")] = "ensemble",
    grpc_url: Annotated[str | None, _server("URL of an external Triton server: host:8001.")] = None,
    http_url: Annotated[str | None, _server("URL of an external Triton server: http://host:8000.")] = None,
    openai_url: Annotated[
        str | None, _server("URL of an external OpenAI-compatible server: http://host:9000/v1.")
    ] = None,
    openai_model: Annotated[str | None, _server("Name of the model at --openai-url.")] = None,
    tokenizer: Annotated[Path | None, _server("tokenizer.json of the model of an external server.")] = None,
    metrics_url: Annotated[str | None, _server("Metrics of an external server: http://host:8002/metrics.")] = None,
    load: Annotated[str | None, _load_option("Load of configs/load, or a YAML file.")] = None,
    concurrency: Annotated[
        str | None, _load_option("Numbers of requests in flight, one load point each: 1,4,16.")
    ] = None,
    rate: Annotated[str | None, _load_option("Request rates of an open loop, one load point each: 2,4,8.")] = None,
    arrivals: Annotated[str | None, _load_option("Arrivals of --rate: constant, poisson or gamma.")] = None,
    burstiness: Annotated[
        float | None, _load_option("Shape of gamma arrivals: 1 is Poisson, more is smoother.")
    ] = None,
    max_in_flight: Annotated[int | None, _load_option("Most requests in flight of an open loop; others wait.")] = None,
    trace: Annotated[Path | None, _load_option("Mooncake trace to replay: times and lengths.")] = None,
    speedup: Annotated[float | None, _load_option("Factor by which the trace is replayed faster.")] = None,
    requests: Annotated[int | None, _load_option("Number of measured requests of a load point.")] = None,
    duration: Annotated[float | None, _load_option("Seconds of a load point, instead of --requests.")] = None,
    ramp: Annotated[float | None, _load_option("Seconds over which a closed loop starts its slots.")] = None,
    repeat: Annotated[
        int | None, _load_option("Number of runs of each load point: 1; at most 3 in a search.", min=1)
    ] = None,
    input_tokens: Annotated[
        str | None, _request("Tokens of a prompt: 128, normal:128,32, lognormal:128,0.5, uniform:64,256, ...")
    ] = None,
    output_tokens: Annotated[str | None, _request("Tokens of an answer, in the same form.")] = None,
    prompts: Annotated[Path | None, _request("File of prompts: text lines, or JSONL.")] = None,
    sharegpt: Annotated[Path | None, _request("File of conversations in ShareGPT's format.")] = None,
    sampling: Annotated[list[str] | None, _request("Sampling option of every request: top_p=0.9; repeatable.")] = None,
    natural_end: Annotated[bool, _request("Let the model end its answers.", "--natural-end")] = False,
    slo: Annotated[list[str] | None, _goal("Service level objective: ttft:p99<200ms, itl:30ms; repeatable.")] = None,
    find: Annotated[str | None, _goal("Search for the highest load within --slo: max-rate or max-goodput.")] = None,
    attainment: Annotated[float, _goal("Share of requests that must meet --slo in a max-goodput search.")] = 0.9,
    precision: Annotated[float, _goal("Relative precision at which a search ends.")] = 0.05,
    transport: Annotated[str, _client("Client library: own, or tritonclient for TLS and proxies.")] = "own",
    connections: Annotated[int, _client("Number of gRPC connections.", min=1)] = 1,
    kernel_timestamps: Annotated[
        bool | None,
        _client(
            "Take the kernel's time of arrival; the default on Linux.", "--kernel-timestamps/--no-kernel-timestamps"
        ),
    ] = None,
    workers: Annotated[int, _client("Number of processes that share each load.")] = 1,
    hosts: Annotated[int, _client("Number of machines of a Ray cluster that share each load.")] = 0,
    ray: Annotated[str, _client("Address of the Ray cluster; auto is the one on this machine.")] = "auto",
    seed: Annotated[int, _client("Seed of prompts and arrival times.")] = 0,
    timeout: Annotated[float, _client("Fail a request after this many seconds.")] = 300.0,
    token_timeout: Annotated[float, _client("Fail a request after this many seconds without a token.")] = 60.0,
    report: Annotated[
        Path | None,
        _client(
            "File of the report, with CSV, page and requests beside it; in reports/TIME-TARGET/ if left out.",
            "--report",
            "-o",
        ),
    ] = None,
    as_json: Annotated[bool, _client("Print the report as JSON.", "--json")] = False,
) -> None:
    """Measure a server: TTFT, ITL, TPOT, throughput, goodput.

    \b
    Examples:
      trtpipe bench --concurrency 1,4,16 --slo 'ttft:p99<500ms'
      trtpipe bench --rate 2,4,8 --duration 60 --protocol grpc
    """
    from dataclasses import replace

    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.bench.options import BenchOptions
    from trtpipe.pipeline.bench.protocols.connect import Wiring
    from trtpipe.pipeline.bench.results.slo import parse_objective

    if context.invoked_subcommand is not None:
        return
    gc.disable()  # collections during the imports would delay the first request by 60 ms
    context.call_on_close(gc.enable)
    kernel_stamps = _kernel_stamps(kernel_timestamps, transport)
    if connections > 1 and "grpc" not in protocol.split(","):
        raise UsageError("--connections is of gRPC", remedy="leave it out, or add grpc to --protocol")
    if connections > 1 and transport == "tritonclient":
        raise UsageError("--connections is of our own reader: tritonclient's library has one", remedy="leave it out")
    if ray != "auto" and not hosts:
        raise UsageError("--ray says of which cluster --hosts are", remedy="give --hosts too")
    if find is not None and not (load or concurrency or trace):
        rate, known = rate or "1", rate is not None
        duration = duration if requests or duration else SEARCH_SECONDS
    else:
        known = True
    load_points, work = _load(
        load,
        {"concurrency": _list(concurrency, whole=True), "rate": _list(rate), "trace": trace, "arrivals": arrivals,
         "burstiness": burstiness, "max_in_flight": max_in_flight, "speedup": speedup, "requests": requests,
         "duration_s": duration, "ramp_s": ramp},
        {"input_tokens": input_tokens, "output_tokens": output_tokens, "prompts": prompts,
         "sharegpt": sharegpt, "options": _sampling(sampling or []) or None,
         "ignore_eos": False if natural_end else None},
    )  # fmt: skip
    urls = {"grpc": grpc_url, "http": http_url, "completions": openai_url, "chat": openai_url}
    with _in_flags():
        # Before a server is looked for: a mistake in an option needs none.
        options = BenchOptions(
            targets=_targets(protocol, dict.fromkeys(urls, ""), model, "", None),
            tokenizer=tokenizer or Path(),
            loads=load_points,
            work=work,
            wiring=Wiring(
                transport=transport, connections=connections, kernel_stamps=kernel_stamps, headers=_headers()
            ),
            objectives=tuple(parse_objective(text) for text in slo or ()),
            repeat=repeat or 1,
            workers=workers,
            hosts=hosts,
            ray=ray,
            search=None if find is None else _search(find, load_points, known, attainment, precision, repeat or 3),
            seed=seed,
            timeout_s=timeout,
            token_timeout_s=token_timeout,
        )
    served: Served | None = None
    if not any(urls.values()):
        found, served = _served(server, target)
        urls = _urls(found)
        tokenizer = tokenizer or served.tokenizer / "tokenizer.json"
        model, openai_model = served.model(model), openai_model or served.model_names[0]
        metrics_url = found.endpoints.metrics_url
    targets = _targets(protocol, urls, model, openai_model or model, metrics_url)
    options = replace(options, targets=targets, tokenizer=_tokenizer(tokenizer))
    _measure(options, served, report, as_json=as_json)


@app.command(cls=SectionedCommand)
def again(
    earlier: Annotated[Path, typer.Argument(help="report.json of an earlier measurement.")],
    report: Annotated[
        Path | None, typer.Option("--report", "-o", help="File of the new report; in reports/TIME-TARGET/ if left out.")
    ] = None,
    grpc_url: Annotated[str | None, typer.Option(help="URL of the gRPC server now: host:8001.")] = None,
    http_url: Annotated[str | None, typer.Option(help="URL of Triton's HTTP server now: http://host:8000.")] = None,
    openai_url: Annotated[
        str | None, typer.Option(help="URL of the OpenAI-compatible server now: http://host:9000/v1.")
    ] = None,
    metrics_url: Annotated[str | None, typer.Option(help="URL of the server's metrics now.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Path of the tokenizer.json now.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Repeat a measurement from its report.

    The requests are the same, and are sent at the same times.

    \b
    Examples:
      trtpipe bench again reports/latest/report.json
      trtpipe bench again report.json --report b.json --grpc-url host:8001
    """
    from dataclasses import replace

    from trtpipe.pipeline.bench.results.files import read_again

    options = read_again(earlier, tokenizer)
    urls = {"grpc": grpc_url, "http": http_url, "completions": openai_url, "chat": openai_url}
    targets = tuple(
        replace(target, url=urls[target.protocol] or target.url, metrics_url=metrics_url or target.metrics_url)
        for target in options.targets
    )
    wiring = replace(options.wiring, headers=_headers())
    _measure(replace(options, targets=targets, wiring=wiring), None, report, as_json=as_json)


@app.command(cls=SectionedCommand)
def selftest(
    protocol: Annotated[str, typer.Option(help="Protocols: grpc, http, completions, chat.")] = "grpc,http",
    streams: Annotated[str, typer.Option(help="Numbers of requests in flight.")] = "16,256",
    itl: Annotated[float, typer.Option(help="Milliseconds between two tokens of a stream.")] = 10.0,
    transport: Annotated[str, typer.Option(help="Client library: own or tritonclient.")] = "own",
    kernel_timestamps: Annotated[
        bool | None,
        typer.Option(
            "--kernel-timestamps/--no-kernel-timestamps",
            help="Take the kernel's time of arrival; the default on Linux.",
        ),
    ] = None,
) -> None:
    """Measure the error of this client on this machine.

    A mock server of known timing is measured. The last line says how many tokens a second a core of the client can
    take.

    \b
    Examples:
      trtpipe bench selftest
      trtpipe bench selftest --protocol chat --streams 64
    """
    from trtpipe.pipeline.bench.protocols.connect import Wiring
    from trtpipe.pipeline.bench.selftest import ceiling, measure
    from trtpipe.pipeline.cli import console

    rows = []
    wiring = Wiring(transport=transport, kernel_stamps=_kernel_stamps(kernel_timestamps, transport))
    for one in protocol.split(","):
        for count in _list(streams) or ():
            found = measure(one, int(count), itl / 1e3, wiring)
            rows.append(
                (one, found.streams, f"{found.ttft_p50:.2f}", f"{found.ttft_p99:.2f}", f"{found.itl_mean:.3f}",
                 f"{found.itl_p99_said:.2f}/{found.itl_p99_true:.2f}", f"{found.reached:.1%}")
            )  # fmt: skip
    errors = ("TTFT p50 error ms", "p99 error ms", "ITL mean error ms", "ITL p99 said/true ms")
    columns = ("protocol", "in flight", *errors, "load reached")
    console.table(columns, rows, numeric=columns[1:])
    limits = [f"{one} {ceiling(one, wiring):,.0f}" for one in protocol.split(",")]
    console.result("tokens/s that a core of this client can take: " + ", ".join(limits))


def compare(
    reports: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Two or more results, the base first: report.json of `trtpipe bench`, or files of AIPerf "
            "or `vllm bench serve --save-result`; or folders with one. The last two of ./reports if left out."
        ),
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="Fail if the condition holds at any load point: 'p99_ttft > 1.1x', 'error_rate > 1%'."),
    ] = None,
    price_per_hour: Annotated[
        str | None,
        typer.Option(help="Price of an hour, of all reports or one each: 2.5,3.9; the GPU file's if left out."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page of the comparison, with charts, to this file.")
    ] = None,
) -> None:
    """Compare reports: differences and their significance.

    \b
    Examples:
      trtpipe compare
      trtpipe compare before/report.json after/report.json --fail-if 'p99_ttft > 1.1x'
    """
    from trtpipe.pipeline.bench.compare.comparison import compare as compare_reports
    from trtpipe.pipeline.bench.results import folders
    from trtpipe.pipeline.cli import console_bench

    compared = compare_reports(
        reports or folders.last_two(),
        fail_if=fail_if or (),
        price_per_hour=_list(price_per_hour) or (),
        own_price=_price_of,
    )
    console_bench.comparison(compared, as_json=as_json)
    if html is not None:
        from trtpipe.pipeline.bench.compare import page

        page.write(compared, html)
    refusal = compared.refusal()
    if refusal is not None:
        raise refusal


def _price_of(report: Mapping[str, Any]) -> float | None:
    """Price of an hour of a report's engine, where the file of its GPU has one; else None."""
    from trtpipe.configs import facts

    engine = report.get("engine") or {}
    gpu = facts.load_gpus().get(str(engine.get("gpu")))
    if gpu is None or gpu.price_per_hour is None:
        return None
    try:
        return gpu.price_per_hour * float(engine["tp_size"]) * float(engine["pp_size"])
    except (KeyError, TypeError, ValueError):  # another program's report
        return None


def _measure(options: BenchOptions, served: Served | None, report: Path | None, *, as_json: bool) -> None:
    """Run the benchmark, write and print the report. Raises StageFailed where the figures are not to be believed."""
    from trtpipe.engines.errors import HostError
    from trtpipe.engines.hf import chat_template
    from trtpipe.engines.json_input import load_json
    from trtpipe.pipeline.bench.results import folders
    from trtpipe.pipeline.bench.run import run
    from trtpipe.pipeline.cli import console, console_bench

    place = report or folders.new(served.name if served is not None else options.targets[0].model)
    _check_place(place)
    template = chat_template.read_template(options.tokenizer.parent)
    render = None if template is None else chat_template.compile_template(options.tokenizer.parent, template)
    with console_bench.progress() as progress:
        measured = run(options, render, progress)
    if measured.interrupted and not any(result.requests["measured"] for result in measured.results):
        console.note("interrupted before anything was measured: no report is written")
        raise KeyboardInterrupt
    # Imported after the load, so that the first request does not wait for it and the load has the memory.
    from trtpipe.pipeline.bench.results import summary
    from trtpipe.pipeline.bench.results.files import write_report

    if options.wiring.transport != "own" and not measured.partial:
        from trtpipe.pipeline.bench.selftest import state_error

        try:
            state_error(measured, options)
        except HostError as error:  # the measurement must not be lost for that
            console.note(f"how wrong {options.wiring.transport} is here is not known: {error}")
    if served is not None:
        from trtpipe.pipeline.serving import serve
        from trtpipe.pipeline.store.manifest import read_manifest

        measured.target = served.name
        measured.engine = {**vars(serve.check_passport(served.repository))}
        made = read_manifest(served.repository.resolve().parent / "manifest.json")
        if made is not None:  # None for another program's folder
            measured.repository_sha256 = made.content
            measured.engine["content"] = made.record.inputs["engine"]
    if not as_json:
        console_bench.report(measured)  # also where no report can be written
    *_, page, _ = write_report(measured, place)
    if report is None:
        folders.link_latest(place.parent)
    if as_json:
        console.result_json(load_json(place))
    for line in summary.notes(measured):
        console.note(line)
    if not as_json:
        console.result(*(search.said() for search in measured.searches))
        console.result(f"report: {place}  page: {page}")
    gc.freeze()  # the process ends, and its last collection would take a tenth of a second
    if measured.interrupted:
        raise KeyboardInterrupt
    refusal = summary.refusal(measured, place)
    if refusal is not None:
        raise refusal


def _check_place(report: Path) -> None:
    """Check, before anything is measured, that a report can be written there. Raises UsageError or HostError."""
    import tempfile

    from trtpipe.engines.errors import HostError, UsageError

    if not report.name or report.is_dir() or (report.exists() and not report.is_file()):
        raise UsageError(f"--report '{report}' is not a file", remedy="give a name such as report.json")
    if report.suffix in (".csv", ".html", ".jsonl"):
        raise UsageError(f"--report {report} is the name of a file beside it", remedy="give a name such as report.json")
    try:
        # Missing folders are made with the report: a run that fails before leaves none behind.
        with tempfile.TemporaryFile(dir=next(folder for folder in report.absolute().parents if folder.exists())):
            pass
    except OSError as error:
        below_a_file = isinstance(error, NotADirectoryError)
        why = f"{report.parent} is not a folder" if below_a_file else error.strerror or str(error)
        raise HostError(f"report {report} cannot be written", why=why, remedy="give another place for it") from None


def _list(text: str | None, *, whole: bool = False) -> list[float] | None:
    """Numbers separated by commas; whole ones are ints, and `whole` accepts only those. Raises UsageError."""
    from trtpipe.engines.errors import UsageError

    if text is None:
        return None
    try:
        return [int(word) if whole or word.strip().isdigit() else float(word) for word in text.split(",")]
    except ValueError:
        kind = "whole numbers" if whole else "numbers"
        raise UsageError(f"'{text}' is not a list of {kind}", remedy="give for example 1,4,16") from None


def _sampling(words: list[str]) -> dict[str, Any]:
    from trtpipe.configs.read import parse_yaml_value
    from trtpipe.engines.errors import UsageError

    out = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise UsageError(f"'{word}' is not an option", remedy="give NAME=VALUE, such as top_p=0.9")
        out[name] = parse_yaml_value(value, f"--sampling {name}")
    return out


def _kernel_stamps(asked: bool | None, transport: str) -> bool:
    """Whether reads use the kernel's timestamps: by default wherever that is possible. Raises UsageError."""
    from trtpipe.engines.errors import UsageError

    own = transport != "tritonclient"
    if asked and not LINUX:
        raise UsageError("only Linux stamps what it receives", remedy="leave --kernel-timestamps out")
    if asked and not own:
        raise UsageError(
            "--kernel-timestamps is of our own reader: tritonclient's libraries read for themselves",
            remedy="leave it out, or leave out --transport tritonclient",
        )
    return LINUX and own if asked is None else asked


def _load(name: str | None, when: dict[str, Any], what: dict[str, Any]) -> tuple[tuple[Load, ...], Work]:
    """The load points and their work, from a load file or from options. Raises UsageError."""
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.bench.load.files import find_load, parse_loads, parse_work

    when, what = ({key: value for key, value in given.items() if value is not None} for given in (when, what))
    if name is not None:
        if when or what:
            first = next(iter([*when, *what]))
            option = FLAGS.get(first, "--" + OWN_FLAGS.get(first, first).replace("_", "-"))
            raise UsageError(f"--load says what {option} would", remedy="leave one of them out")
        found = find_load(name)
        return found.load_points, found.work
    if not {"rate", "trace"} & set(when):
        # Those for which the requests are enough: one request at a time always is.
        most = when.get("requests", math.inf) / 2
        when.setdefault("concurrency", [1, *(number for number in (4, 16) if number <= most)])
    with _in_flags():
        load_points = parse_loads(when, "options", Path(), UsageError, _typed)
    return load_points, parse_work(what, "options", Path(), load_points, UsageError, _typed)


def _typed(kind: type[Any], data: dict[str, Any], where: str, error: type[TrtpipeError]) -> Any:
    """Make `kind` of options, whose types typer has checked: a second check would take a tenth of a second."""
    return kind(**data)


@contextmanager
def _in_flags() -> Iterator[None]:
    """Name the command-line options, instead of the fields, in a UsageError."""
    from trtpipe.engines.errors import UsageError

    try:
        yield
    except UsageError as error:
        raise UsageError(_flags(error.what), why=_flags(error.why), remedy=_flags(error.remedy)) from None


def _flags(words: str) -> str:
    for field, flag in FLAGS.items():
        words = re.sub(rf"\b{field}\b", flag, words)
    return words


def _search(
    goal: str, load_points: tuple[Load, ...], known: bool, attainment: float, precision: float, most: int
) -> Search:
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.bench.load.loads import Open
    from trtpipe.pipeline.bench.search import Search

    if len(load_points) != 1 or not isinstance(load_points[0], Open):
        raise UsageError("a search changes a rate", remedy="with --find give one --rate to begin at, or none")
    return Search(goal=goal, load=load_points[0], known=known, attainment=attainment, precision=precision, repeats=most)


def _served(server: str | None, target: str | None) -> tuple[Server, Served]:
    from trtpipe.configs.home import default_home
    from trtpipe.pipeline.serving import servers
    from trtpipe.pipeline.store.store import Store

    found = servers.find_running(Store(default_home()), server)
    return found, found.find(target)


def _urls(server: Server) -> dict[str, str | None]:
    openai = f"{server.gateway_url}/v1" if server.gateway_url else None
    points = server.endpoints
    return {"grpc": points.grpc_url, "http": points.http_url, "completions": openai, "chat": openai}


def _targets(
    protocols: str, urls: dict[str, str | None], model: str, openai_model: str, metrics_url: str | None
) -> tuple[Target, ...]:
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.bench.options import Target

    out = []
    for protocol in protocols.split(","):
        url = urls.get(protocol, "")
        if url is None:
            option = {"grpc": "--grpc-url", "http": "--http-url"}.get(protocol, "--openai-url")
            raise UsageError(f"there is no address for {protocol}", remedy=f"give {option}, or another --protocol")
        name = model if protocol in ("grpc", "http") else openai_model
        out.append(Target(protocol=protocol, url=url, model=name, metrics_url=metrics_url))
    return tuple(out)


def _tokenizer(path: Path | None) -> Path:
    from trtpipe.engines.errors import UsageError

    if path is None:
        raise UsageError(
            "prompts of a known length need a tokenizer", remedy="give --tokenizer, the model's tokenizer.json"
        )
    return path


def _headers() -> dict[str, str]:
    key = os.environ.get("TRTPIPE_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}
