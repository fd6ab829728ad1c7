"""`trtpipe bench`: turns the command line into options of the load generator."""

from __future__ import annotations

import gc
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtpipe.pipeline.cli import completion as complete
from trtpipe.pipeline.cli.help import SectionedCommand, SectionedGroup, in_section
from trtpipe.pipeline.cli.options import FILE, Json, numbers

if TYPE_CHECKING:
    from trtpipe.pipeline.bench.options import BenchOptions
    from trtpipe.pipeline.serving.servers import Served

app = typer.Typer(cls=SectionedGroup, rich_markup_mode=None, invoke_without_command=True)

_server, _load_option, _request = in_section("Server"), in_section("Load"), in_section("Requests")
_goal, _client = in_section("Objectives"), in_section("Client and report")


@app.callback()
def bench(
    context: typer.Context,
    server: Annotated[
        str | None, _server("Name of a running server; the only one if left out.", autocompletion=complete.servers)
    ] = None,
    target: Annotated[
        str | None, _server("Target to measure, where the server has several.", autocompletion=complete.targets)
    ] = None,
    protocol: Annotated[
        str | None,
        _server(
            "Protocols, one after the other: grpc, http, completions, chat; those of the server or the URLs given."
        ),
    ] = None,
    model: Annotated[str, _server("Triton model: ensemble, tensorrt_llm_bls or tensorrt_llm.")] = "ensemble",
    grpc_url: Annotated[str | None, _server("URL of an external Triton server: host:8001.")] = None,
    http_url: Annotated[str | None, _server("URL of an external Triton server: http://host:8000.")] = None,
    openai_url: Annotated[
        str | None, _server("URL of an external OpenAI-compatible server: http://host:9000/v1.")
    ] = None,
    openai_model: Annotated[str | None, _server("Name of the model at --openai-url.")] = None,
    tokenizer: Annotated[
        Path | None, _server("tokenizer.json of an external server's model, or its folder.", exists=True)
    ] = None,
    metrics_url: Annotated[str | None, _server("Metrics of an external server: http://host:8002/metrics.")] = None,
    load: Annotated[
        str | None, _load_option("Load of configs/load, or a YAML file.", autocompletion=complete.of("load"))
    ] = None,
    concurrency: Annotated[
        str | None, _load_option("Numbers of requests in flight, one load point each: 1,4,16.")
    ] = None,
    rate: Annotated[str | None, _load_option("Request rates of an open loop, one load point each: 2,4,8.")] = None,
    arrivals: Annotated[str | None, _load_option("Arrivals of --rate: constant, poisson or gamma.")] = None,
    burstiness: Annotated[
        float | None, _load_option("Shape of gamma arrivals: 1 is Poisson, more is smoother.")
    ] = None,
    max_in_flight: Annotated[int | None, _load_option("Most requests in flight of an open loop; others wait.")] = None,
    trace: Annotated[Path | None, _load_option("Mooncake trace to replay: times and lengths.", **FILE)] = None,
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
    prompts: Annotated[Path | None, _request("File of prompts: text lines, or JSONL.", **FILE)] = None,
    sharegpt: Annotated[Path | None, _request("File of conversations in ShareGPT's format.", **FILE)] = None,
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
        str | None,
        _client(
            "File or folder of the report, with CSV, page and requests beside it; reports/TIME-TARGET/ if left out.",
            "--report",
            "-o",
        ),
    ] = None,
    log_samples: Annotated[
        bool | None,
        _client(
            "Keep a few prompts and answers in the report; the default unless prompts come from a file.",
            "--log-samples/--no-log-samples",
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
    from trtpipe.pipeline.api.bench_options import BenchArguments, choose

    arguments: dict[str, Any] = locals()
    if context.invoked_subcommand is not None:
        return
    gc.disable()  # collections during the imports would delay the first request by 60 ms
    context.call_on_close(gc.enable)
    options, served = choose(
        **{name: arguments[name] for name in ("target", *BenchArguments.__annotations__)}
        | {
            "concurrency": numbers(concurrency, whole=True),
            "rate": numbers(rate),
            "sampling": _sampling(sampling or []),
        }
    )
    _measure(options, served, report, (load,), as_json=as_json)


@app.command(cls=SectionedCommand)
def again(
    earlier: Annotated[Path, typer.Argument(help="report.json of an earlier measurement, or its folder.", exists=True)],
    report: Annotated[
        str | None,
        typer.Option("--report", "-o", help="File or folder of the new report; reports/TIME-TARGET/ if left out."),
    ] = None,
    grpc_url: Annotated[str | None, typer.Option(help="URL of the gRPC server now: host:8001.")] = None,
    http_url: Annotated[str | None, typer.Option(help="URL of Triton's HTTP server now: http://host:8000.")] = None,
    openai_url: Annotated[
        str | None, typer.Option(help="URL of the OpenAI-compatible server now: http://host:9000/v1.")
    ] = None,
    metrics_url: Annotated[str | None, typer.Option(help="URL of the server's metrics now.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json now, or its folder.", exists=True)] = None,
    as_json: Json = False,
) -> None:
    """Repeat a measurement from its report.

    The requests are the same, and are sent at the same times.

    \b
    Examples:
      trtpipe bench again reports/latest
      trtpipe bench again report.json --report b.json --grpc-url host:8001
    """
    from dataclasses import replace

    from trtpipe.pipeline.api.bench_options import headers, served_at, served_tokenizers
    from trtpipe.pipeline.bench.results import folders
    from trtpipe.pipeline.bench.results.files import read_again

    options = read_again(earlier, tokenizer, served_tokenizers())
    urls = {"grpc": grpc_url, "http": http_url, "completions": openai_url, "chat": openai_url}
    targets = tuple(
        replace(target, url=urls[target.protocol] or target.url, metrics_url=metrics_url or target.metrics_url)
        for target in options.targets
    )
    options = replace(options, targets=targets, wiring=replace(options.wiring, headers=headers()))
    if metrics_url is not None:
        from trtpipe.pipeline.bench.monitors.server import require_metrics

        require_metrics(metrics_url)
    _measure(options, served_at(options), report, (earlier, folders.place(earlier)), as_json=as_json)


@app.command(cls=SectionedCommand)
def selftest(
    protocol: Annotated[str, typer.Option(help="Protocols: grpc, http, completions, chat.")] = "grpc,http",
    streams: Annotated[str, typer.Option(help="Numbers of requests in flight.")] = "16,256",
    itl: Annotated[float, typer.Option(help="Milliseconds between two tokens of a stream.", min=0.1, max=4e3)] = 10.0,
    transport: Annotated[str, typer.Option(help="Client library: own or tritonclient.")] = "own",
    kernel_timestamps: Annotated[
        bool | None,
        typer.Option(
            "--kernel-timestamps/--no-kernel-timestamps",
            help="Take the kernel's time of arrival; the default on Linux.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the error of this client on this machine.

    A mock server of known timing is measured. The last line says how many tokens a second a core of the client can
    take.

    \b
    Examples:
      trtpipe bench selftest
      trtpipe bench selftest --protocol chat --streams 64
    """
    from trtpipe.pipeline.api.bench_options import kernel_timestamps as choose_timestamps
    from trtpipe.pipeline.bench.protocols.connect import Wiring
    from trtpipe.pipeline.bench.selftest import Finding, ceiling, check, measure
    from trtpipe.pipeline.cli import console, console_progress

    wiring = Wiring(transport=transport, kernel_stamps=choose_timestamps(kernel_timestamps, transport))
    protocols, found, limits = protocol.split(","), list[Finding](), dict[str, float]()
    for one in protocols:
        for count in numbers(streams, whole=True) or ():
            check(one, count, wiring)
    with console_progress.working("selftest", announce=False) as work:
        for one in protocols:
            for count in numbers(streams, whole=True) or ():
                work.step(f"{one}, {count} in flight")
                found.append(measure(one, count, itl / 1e3, wiring))
        for one in protocols:
            work.step(f"{one}, as many tokens as it can take")
            limits[one] = ceiling(one, wiring)
    if as_json:
        console.result_json({"found": found, "tokens_per_s_of_a_core": limits})
        return
    rows = [
        (one.protocol, one.streams, f"{one.ttft_p50:.2f}", f"{one.ttft_p99:.2f}", f"{one.itl_mean:.3f}",
         f"{one.itl_p99_said:.2f}/{one.itl_p99_true:.2f}", f"{one.reached:.1%}")
        for one in found
    ]  # fmt: skip
    errors = ("TTFT p50 error ms", "p99 error ms", "ITL mean error ms", "ITL p99 said/true ms")
    columns = ("protocol", "in flight", *errors, "load reached")
    console.table(columns, rows, numeric=columns[1:])
    told = ", ".join(f"{one} {limit:,.0f}" for one, limit in limits.items())
    console.result(f"tokens/s that a core of this client can take: {told}")


def compare(
    reports: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Two or more results, the base first: report.json of `trtpipe bench`, or files of AIPerf "
            "or `vllm bench serve --save-result`; or folders with one. The last two of ./reports if left out.",
            exists=True,
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
    as_json: Json = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page of the comparison, with charts, to this file.")
    ] = None,
) -> None:
    """Compare reports: differences and their significance.

    \b
    Examples:
      trtpipe compare
      trtpipe compare before.json after.json --fail-if 'p99_ttft > 1.1x'
    """
    from trtpipe.pipeline.bench.compare.comparison import compare as compare_reports
    from trtpipe.pipeline.bench.results import folders
    from trtpipe.pipeline.cli import console_bench

    compared = compare_reports(
        reports or folders.last_two(),
        fail_if=fail_if or (),
        price_per_hour=numbers(price_per_hour) or (),
        own_price=_price_of,
    )
    if html is not None:  # before the table, whose reader may close the pipe
        from trtpipe.pipeline.bench.compare import page
        from trtpipe.pipeline.bench.results.folders import beside
        from trtpipe.pipeline.store.folders import require_place

        paths = [Path(path) for path in compared.paths.values()]
        require_place(html, *paths, *(beside(path, ".requests.jsonl") for path in paths))
        page.write(compared, html)
    console_bench.comparison(compared, as_json=as_json)
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


def _measure(
    options: BenchOptions, served: Served | None, report: str | None, read: Sequence[str | Path | None], *,
    as_json: bool,
) -> None:  # fmt: skip
    """Run the benchmark, write and print the report. Raises UsageError where that is one of the files `read` for the
    options, StageFailed where the figures are not to be believed."""
    from trtpipe.engines.errors import HostError
    from trtpipe.engines.json_input import load_json
    from trtpipe.pipeline.api.bench import check_place, measure
    from trtpipe.pipeline.bench.results import folders
    from trtpipe.pipeline.cli import console, console_bench

    name = served.target if served is not None else options.targets[0].model
    place = folders.new(name) if report is None else folders.place(report)
    check_place(place, *read, options.tokenizer, *options.work.files)
    with console_bench.progress() as progress:
        measured = measure(options, served, progress, console.note)
    if measured.interrupted and not any(result.requests["measured"] for result in measured.results):
        console.note("nothing was measured: no report is written")
        raise measured.interruption()
    # Imported after the load, so that the first request does not wait for it and the load has the memory.
    from trtpipe.pipeline.bench.results import summary
    from trtpipe.pipeline.bench.results.files import write_report

    try:
        if not as_json:
            console_bench.report(measured)  # also where no report can be written
    except HostError:
        if measured.ended_by != signal.SIGHUP:  # which comes when the terminal has been closed
            raise
    finally:  # also where standard output cannot be written
        place = folders.claim(place) if report is None else place
        *_, page, _ = write_report(measured, place)
    if report is None:
        try:
            folders.link_latest(place.parent)
        except HostError as error:  # the measurement must not be lost for that
            console.note(str(error))
    if as_json:
        console.result_json(load_json(place))
    for line in summary.notes(measured):
        console.note(line)
    if not as_json:
        console.result(*(search.said() for search in measured.searches))
        console.result(f"report: {place}", f"page: {page}")
    gc.freeze()  # the process ends, and its last collection would take a tenth of a second
    if measured.interrupted:
        raise measured.interruption()
    refusal = summary.refusal(measured, place)
    if refusal is not None:
        raise refusal


def _sampling(words: list[str]) -> dict[str, Any]:
    from trtpipe.configs.read import named_values, parse_yaml_value

    texts = named_values(words, "--sampling ", example="top_p=0.9")
    return {name: parse_yaml_value(text, f"--sampling {name}") for name, text in texts.items()}
