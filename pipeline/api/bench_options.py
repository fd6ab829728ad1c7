"""Options of a benchmark and the server it measures, chosen from keyword arguments."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
    "^options: ": "",
    r"requests (and|or) duration_s": r"--requests \1 --duration",
    "(requests|concurrency|rate|workers|hosts|repeat) is": r"--\1 is",
    "input_tokens '": "--input-tokens '",
    "output_tokens '": "--output-tokens '",
    "duration_s": "--duration",
    "ramp_s": "--ramp",
    "timeout_s": "--timeout",
    "token_timeout_s": "--token-timeout",
    "max_in_flight": "--max-in-flight",
}

# Options for fields of the work.
OWN_FLAGS = {"options": "sampling", "ignore_eos": "natural_end"}


class BenchArguments(TypedDict, total=False):
    """What to measure: the options of `trtpipe bench`. One that is None counts as left out.

    server            name of a running server; the only one if left out
    protocol          protocols, one after the other: grpc, http, completions, chat; "grpc,http" if left out, "chat"
                      where only openai_url is given, "completions" for a runtime's own server
    model             Triton model: ensemble, tensorrt_llm_bls or tensorrt_llm
    grpc_url, http_url, openai_url  addresses of a server that trtpipe did not start
    openai_model, tokenizer, metrics_url  its model's name, its tokenizer.json or a folder with it, the address of its
                      metrics
    load              load of configs/load, or a YAML file
    concurrency       numbers of requests in flight, one load point each
    rate              request rates of an open loop, one load point each
    arrivals, burstiness, max_in_flight  of `rate`: constant, poisson or gamma; gamma's shape; most in flight
    trace, speedup    Mooncake trace to replay, and how much faster
    requests, duration  number of measured requests of a load point, or its seconds
    ramp              seconds over which a closed loop starts its slots
    repeat            number of runs of each load point
    input_tokens, output_tokens  lengths: 128, or a distribution such as "lognormal:128,0.5"
    prompts, sharegpt file of prompts, or of conversations
    sampling          sampling options of every request: {"top_p": 0.9}
    natural_end       whether the model ends its answers
    slo               objectives: "ttft:p99<200ms"
    find              search for the highest load within `slo`: max-rate or max-goodput
    attainment, precision  of `find`: share of requests that must meet `slo`; relative precision
    transport, connections, kernel_timestamps  client library, its gRPC connections, whose timestamps
    workers, hosts, ray  processes, machines and Ray cluster that share each load
    seed              of prompts and arrival times
    timeout, token_timeout  seconds after which a request has failed: in all, and without a token
    log_samples       keep a few prompts and answers in the report; the default unless prompts come from a file
    """

    server: str | None
    protocol: str | Sequence[str] | None
    model: str | None
    grpc_url: str | None
    http_url: str | None
    openai_url: str | None
    openai_model: str | None
    tokenizer: str | Path | None
    metrics_url: str | None
    load: str | Path | None
    concurrency: int | Sequence[int] | None
    rate: float | Sequence[float] | None
    arrivals: str | None
    burstiness: float | None
    max_in_flight: int | None
    trace: str | Path | None
    speedup: float | None
    requests: int | None
    duration: float | None
    ramp: float | None
    repeat: int | None
    input_tokens: int | str | None
    output_tokens: int | str | None
    prompts: str | Path | None
    sharegpt: str | Path | None
    sampling: Mapping[str, Any] | None
    natural_end: bool | None
    slo: str | Sequence[str] | None
    find: str | None
    attainment: float | None
    precision: float | None
    transport: str | None
    connections: int | None
    kernel_timestamps: bool | None
    workers: int | None
    hosts: int | None
    ray: str | None
    seed: int | None
    timeout: float | None
    token_timeout: float | None
    log_samples: bool | None


# What counts where an argument is left out.
DEFAULTS: BenchArguments = {
    "model": "ensemble", "attainment": 0.9, "precision": 0.05, "transport": "own",
    "connections": 1, "workers": 1, "hosts": 0, "ray": "auto", "seed": 0, "timeout": 300.0, "token_timeout": 60.0,
}  # fmt: skip


def choose(target: str | None = None, **arguments: Unpack[BenchArguments]) -> tuple[BenchOptions, Served | None]:
    """The options of a measurement, and what is served where trtpipe started the server. Raises UsageError."""
    from dataclasses import replace

    from trtpipe.engines.errors import UsageError
    from trtpipe.engines.files import file_in
    from trtpipe.pipeline.bench.options import BenchOptions
    from trtpipe.pipeline.bench.protocols.connect import Wiring
    from trtpipe.pipeline.bench.results.slo import parse_objective

    given = {name: value for name, value in arguments.items() if value is not None}
    ask: Any = SimpleNamespace(**{**dict.fromkeys(BenchArguments.__annotations__), **DEFAULTS, **given})
    address = (
        "--grpc-url" if ask.grpc_url else "--http-url" if ask.http_url else "--openai-url" if ask.openai_url else ""
    )
    name = "--server" if ask.server else "--target" if target else ""
    if address and name:
        raise UsageError(f"{address} says what is measured, and so does {name}", remedy="leave one of them out")
    kernel_stamps = kernel_timestamps(ask.kernel_timestamps, ask.transport)
    tokenizer = None if ask.tokenizer is None else file_in(Path(ask.tokenizer), "tokenizer.json")
    named = {"grpc": ask.grpc_url, "http": ask.http_url, "chat": ask.openai_url}
    protocol = joined(ask.protocol) or ",".join([name for name, url in named.items() if url] or ("grpc", "http"))
    if ask.connections > 1 and "grpc" not in protocol.split(","):
        raise UsageError("--connections is of gRPC", remedy="leave it out, or add grpc to --protocol")
    if ask.connections > 1 and ask.transport == "tritonclient":
        raise UsageError("--connections is of our own reader: tritonclient's library has one", remedy="leave it out")
    if ask.ray != "auto" and not ask.hosts:
        raise UsageError("--ray says of which cluster --hosts are", remedy="give --hosts too")
    for option in ("attainment", "precision"):
        if ask.find is None and getattr(ask, option) != DEFAULTS[option]:
            raise UsageError(f"--{option} is for --find", remedy="give both, or leave it out")
    concurrency, rate, duration, known = _several(ask.concurrency), _several(ask.rate), ask.duration, True
    if ask.find is not None and not (ask.load or concurrency or ask.trace):
        rate, known = rate or [1], rate is not None
        duration = duration if ask.requests or duration else SEARCH_SECONDS
    load_points, work = _load(
        text(ask.load),
        {"concurrency": concurrency, "rate": rate, "trace": _path(ask.trace), "arrivals": ask.arrivals,
         "burstiness": ask.burstiness, "max_in_flight": ask.max_in_flight, "speedup": ask.speedup,
         "requests": ask.requests, "duration_s": duration, "ramp_s": ask.ramp},
        {"input_tokens": text(ask.input_tokens), "output_tokens": text(ask.output_tokens),
         "prompts": _path(ask.prompts), "sharegpt": _path(ask.sharegpt), "options": dict(ask.sampling or {}) or None,
         "ignore_eos": False if ask.natural_end else None},
    )  # fmt: skip
    urls = {"grpc": ask.grpc_url, "http": ask.http_url, "completions": ask.openai_url, "chat": ask.openai_url}
    with _in_flags():
        # Before a server is looked for: a mistake in an option needs none.
        options = BenchOptions(
            targets=_targets(protocol, dict.fromkeys(urls, ""), ask.model, "", None),
            tokenizer=tokenizer or Path(),
            loads=load_points,
            work=work,
            wiring=Wiring(
                transport=ask.transport, connections=ask.connections, kernel_stamps=kernel_stamps, headers=headers()
            ),
            objectives=tuple(parse_objective(text) for text in _several(ask.slo) or ()),
            repeat=ask.repeat or 1,
            workers=ask.workers,
            hosts=ask.hosts,
            ray=ask.ray,
            search=None
            if ask.find is None
            else _search(ask.find, load_points, known, ask.attainment, ask.precision, ask.repeat or 3),
            seed=ask.seed,
            timeout_s=ask.timeout,
            token_timeout_s=ask.token_timeout,
            log_samples=ask.log_samples,
        )
    model, openai_model, metrics_url = ask.model, ask.openai_model, ask.metrics_url
    served: Served | None = None
    if not any(urls.values()):
        found, served = _served(ask.server, target)
        urls = _urls(found)
        protocol = "completions" if found.native and not ask.protocol else protocol
        tokenizer = tokenizer or served.tokenizer / "tokenizer.json"
        model, openai_model = served.model(model), openai_model or served.model_names[0]
        metrics_url = metrics_url or found.endpoints.metrics_url
        require_room(options.work, served.name, served.repository)
    targets = _targets(protocol, urls, model, openai_model or model, metrics_url)
    options = replace(options, targets=targets, tokenizer=_tokenizer(tokenizer))
    if ask.metrics_url is not None:
        from trtpipe.pipeline.bench.monitors.server import require_metrics

        require_metrics(ask.metrics_url)
    return options, served


def _several(value: Any) -> list[Any] | None:
    if value is None:
        return None
    return [value] if isinstance(value, str | Real) else list(value)


def text(value: object) -> str | None:
    return None if value is None else str(value)


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


def kernel_timestamps(asked: bool | None, transport: str) -> bool:
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
        words = re.sub(rf"\b{field}", flag, words)
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

    found = servers.find_ready(Store(default_home()), server, target)
    return found, found.find(target)


def served_at(options: BenchOptions) -> Served | None:
    """The target that `trtpipe serve` serves at the addresses and with the tokenizer in `options`, if any.

    A target that was built again has the same tokenizer in another place.
    """
    from trtpipe.configs.home import default_home
    from trtpipe.pipeline.bench.results.digest import digest
    from trtpipe.pipeline.serving import servers
    from trtpipe.pipeline.store.store import Store

    for found in servers.running(Store(default_home())):
        urls = _urls(found)
        if all(urls.get(target.protocol) == target.url for target in options.targets):
            files = {one.tokenizer / "tokenizer.json": one for one in found.served}
            same = [one for file, one in files.items() if file.is_file() and digest(file) == digest(options.tokenizer)]
            return files.get(options.tokenizer, same[0] if len(same) == 1 else None)
    return None


def served_tokenizers() -> Iterator[Path]:
    """The tokenizer.json of each target that `trtpipe serve` serves."""
    from trtpipe.configs.home import default_home
    from trtpipe.pipeline.serving import servers
    from trtpipe.pipeline.store.store import Store

    for found in servers.running(Store(default_home())):
        yield from (one.tokenizer / "tokenizer.json" for one in found.served)


def require_room(work: Work, name: str, repository: Path) -> None:
    """Refuse lengths whose usual prompt, or prompt and answer, the engine does not take. Raises UsageError,
    InputDataError for a file of lengths, and ArtefactRefused without a passport."""
    from trtpipe.engines.errors import UsageError
    from trtpipe.engines.passport import read_passport
    from trtpipe.pipeline.bench.load.lengths import Fixed
    from trtpipe.triton_repo.layout import ENGINE_FOLDER

    if work.prompts or work.sharegpt or work.trace:
        return
    prompt, answer = work.lengths()
    build = read_passport(repository / ENGINE_FOLDER).build_config
    both = min(prompt.typical + answer.typical, work.max_total_tokens or math.inf)  # longer ones are left out
    lengths = (("prompts", min(prompt.typical, both - 1), "max_input_len"), ("prompt and answer", both, "max_seq_len"))
    over = [one for one in lengths if one[1] > build.get(one[2], math.inf)]
    if over:
        what, length, limit = over[0]
        larger = " ".join(f"--set build.{limit}={length:.0f}" for _, length, limit in over)
        if not isinstance(prompt, Fixed):
            larger = f"a larger build.{limit}; on a GPU `build --load` chooses it"
        raise UsageError(
            f"{what} of {length:,.0f} tokens are more than {name} takes",
            why=f"its {limit} is {build[limit]:,}",
            remedy=f"ask for fewer or, if the model takes them, build with {larger}",
        )


def _urls(server: Server) -> dict[str, str | None]:
    openai = f"{server.gateway_url}/v1" if server.gateway_url else None
    points = server.endpoints
    triton = (None, None) if server.native else (points.grpc_url, points.http_url)
    return {"grpc": triton[0], "http": triton[1], "completions": openai, "chat": openai}


def joined(words: str | Sequence[str] | None) -> str:
    """A list as the command takes it, with commas."""
    return words or "" if words is None or isinstance(words, str) else ",".join(words)


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
            others = " or ".join(name for name, known in urls.items() if known)
            remedy = f"give {option}" + (f", or --protocol {others}" if others else "")
            raise UsageError(f"there is no address for {protocol}", remedy=remedy)
        name = model if protocol in ("grpc", "http") else openai_model
        out.append(Target(protocol=protocol, url=url, model=name, metrics_url=metrics_url))
    return tuple(out)


def _tokenizer(path: Path | None) -> Path:
    from trtpipe.engines.errors import UsageError

    if path is None:
        raise UsageError(
            "prompts of a known length need a tokenizer",
            remedy="give --tokenizer, the model's tokenizer.json or its folder",
        )
    return path


def headers() -> dict[str, str]:
    """Headers of every HTTP request: the API key in TRTPIPE_API_KEY."""
    from trtpipe.pipeline.net.api_key import api_key

    key = api_key()
    return {"Authorization": f"Bearer {key}"} if key else {}
