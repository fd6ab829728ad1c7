"""Proof that a machine runs what trtpipe builds: each precision is built, served, compared and measured there."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtpipe.pipeline.api.arguments import checked

if TYPE_CHECKING:
    from trtpipe.pipeline.api.build import Built
    from trtpipe.pipeline.prove.proof import Lane, Proof, Speed, State, Step
    from trtpipe.pipeline.spec import BuildSpec

log = logging.getLogger("trtpipe")

# Small sizes: an engine is built in minutes, and the shortest benchmark fills it.
SIZES = {"build.max_batch_size": 8, "build.max_input_len": 512, "build.max_seq_len": 1024}
PROMPTS = (
    "The capital of France is", "Water boils at a temperature of", "def fibonacci(n):", "The opposite of hot is",
    "One, two, three, four,", "The sun rises in the", "A triangle has three", "The first month of the year is",
)  # fmt: skip
ANSWER_TOKENS = 32
# Share of prompts whose first token must be the reference runtime's. Rounding moves few of them; a wrong weight, scale
# or head moves nearly all.
FIRST_TOKENS = 0.5
# Share of those whose second token must be the reference runtime's too: it is the first that comes from a decode step,
# with the KV cache and its positions, and the prompt's step says nothing of that. Weights of 4 bits leave the first
# choice nearer to the others, and runtimes may decode them with other inputs.
SECOND_TOKENS, SECOND_TOKENS_4_BITS = 0.5, 0.25
# An answer is cut where it has less than this share of the reference runtime's tokens. Tokens are counted in the text
# of an answer, where their number differs a little from what was computed.
WHOLE_ANSWER = 0.75
CONCURRENCY = (1, 8)
INPUT_TOKENS, OUTPUT_TOKENS = 64, 32
# Requests of a load point, at each number in flight.
REQUESTS = 16
LOG_LINES = 60


@checked
def prove(
    model: str | Path = "smollm2-135m", *, gpu: str | None = None, runtime: str | None = None,
    dtype: str | Sequence[str] = (), toolchain: str | None = None, executor: str | None = None,
    set: Mapping[str, Any] | None = None, engine_python: str | Path | None = None,  # noqa: A002
    ready_s: int = 600, output: str | Path = "proof", note: Callable[[str], None] = log.info,
    progress: Callable[[str], None] = lambda step: None,
) -> Proof:  # fmt: skip
    """Build, serve, compare and measure a small model on this machine, in each precision that its GPU runs.

    gpu       a name of `trtpipe gpus`; this machine's if left out
    runtime   the usual one of the GPU if left out
    dtype     precisions; bf16 and every quantization recipe if left out
    set       any other setting of the builds by its dotted name; the engines are small if left out
    ready_s   seconds that a server may take to be ready, as of `serve`
    output    folder of proof.json, proof.html, and runs/ with the run folders of what is built
    progress  called with the precision and the step that begins

    Greedy answers are compared with those of the reference runtime, which computes in PyTorch with the same quantized
    weights. A precision that fails is part of the report, with the end of its logs; the others are tried all the same.
    A named one that this GPU or runtime does not run has failed too.
    The report holds no value of a variable that names a secret, and no home folder.

    Raises UsageError (an unknown name, no precision that this GPU runs) and HostError.
    """
    from trtpipe import __version__
    from trtpipe.configs import facts
    from trtpipe.configs.home import default_home
    from trtpipe.engines.errors import UsageError
    from trtpipe.engines.nvidia import read_gpus
    from trtpipe.engines.precision import dtype_names
    from trtpipe.pipeline.api.build import settings
    from trtpipe.pipeline.prove import page
    from trtpipe.pipeline.prove.proof import Proof
    from trtpipe.pipeline.serving.serve import require_programs
    from trtpipe.pipeline.serving.servers import running
    from trtpipe.pipeline.store.store import Store

    model, output, gpu = str(model), Path(output), gpu or this_gpu()
    names = (dtype,) if isinstance(dtype, str) else tuple(dtype)
    common: dict[str, Any] = {
        "model": model, "gpu": gpu, "runtime": runtime, "toolchain": toolchain, "executor": executor,
        "accept_accuracy": True, "set": {**SIZES, **(set or {})},
    }  # fmt: skip
    specs: dict[str, BuildSpec] = {}
    errors: dict[str, UsageError] = {}
    for name in names or ("bf16", *(one for one in facts.load_quant_recipes() if one != "none")):
        try:
            specs[name] = settings(**common, dtype=name)
        except UsageError as error:
            if name not in dtype_names(facts.load_quant_recipes()):
                raise
            errors[name] = error
    refused = {name: str(error) for name, error in errors.items()}
    if not specs:
        if len({*refused.values()}) == 1:
            raise next(iter(errors.values()))
        raise UsageError("no precision is left to prove", why="; ".join(f"{k}: {v}" for k, v in refused.items()))
    if gpu != "cpu":
        read_gpus()  # raises HostError here, not once for each precision
    served = {server.name for server in running(Store(default_home()))}
    if taken := next((spec.target for spec in specs.values() if spec.target in served), None):
        raise UsageError(
            f"a server is called {taken}, as that of the proof would be", remedy=f"run `trtpipe stop {taken}` first"
        )
    for used in {spec.runtime for spec in specs.values()}:
        asked = None if engine_python is None else str(engine_python)
        require_programs(used, on_cpu=gpu == "cpu", asked=asked)
    output.mkdir(parents=True, exist_ok=True)  # before an hour of work for it
    lanes = []
    for name, spec in specs.items():
        note(f"{name}: {spec.target}")
        way = _Way(name, note, progress)
        lanes.append(_lane(way, spec, {**common, "dtype": name}, output / "runs", engine_python, ready_s))
    proof = Proof(
        version=__version__, date=time.strftime("%Y-%m-%d"), machine=_machine(gpu, next(iter(specs.values()))),
        model=scrubbed(model), runtime=next(iter(specs.values())).runtime, lanes=tuple(lanes), refused=refused,
        named=bool(names),
    )  # fmt: skip
    page.write(proof, output)
    return proof


def this_gpu() -> str:
    """Name of this machine's GPU in `trtpipe gpus`, or cpu. Raises UsageError for a GPU without a file, and for a MIG
    slice, of which the driver reports the card."""
    from trtpipe.configs import facts
    from trtpipe.engines.errors import UsageError
    from trtpipe.engines.nvidia import NoDriver, read_gpus

    try:
        gpus = read_gpus()
    except NoDriver:
        return "cpu"
    if not gpus:
        return "cpu"
    if gpus[0].uuid.startswith("MIG-") or gpus[0].total_mib is None:  # a container may have nothing but the slice
        raise UsageError(
            f"this is a MIG slice of {gpus[0].name}", why="the driver does not report its size",
            remedy="give --gpu, such as h100-mig-3g.40gb of `trtpipe gpus`",
        )  # fmt: skip
    found = facts.gpu_of(gpus[0].name)
    if found is None:
        raise UsageError(f"no file of `trtpipe gpus` is of {gpus[0].name}", remedy="give --gpu")
    return found.name


class _Way:
    """The steps of one precision: after one that failed the others are left out."""

    def __init__(self, dtype: str, note: Callable[[str], None], progress: Callable[[str], None]) -> None:
        self.dtype = dtype
        self.steps: list[Step] = []
        self._note, self._progress = note, progress
        self._failed = ""

    def step(self, name: str, work: Callable[[], tuple[str, Any]]) -> Any:
        """Run `work`, which returns what it found in words, and a value. Returns that value, None if it failed."""
        from trtpipe.pipeline.matrix import failure

        if self._failed:
            self.leave_out(name, f"{self._failed} failed")
            return None
        self._progress(f"{self.dtype}: {name}")
        begun, since = time.monotonic(), time.time()
        try:
            told, value = work()
        except Exception as error:
            known = failure(error)  # also a full disk; raises what is a defect of ours
            self._failed = name
            self._add(name, "failed", time.monotonic() - begun, str(known), _logs(since))
            return None
        self._add(name, "held", time.monotonic() - begun, told)
        return value

    def leave_out(self, name: str, why: str) -> None:
        self._add(name, "left out", 0.0, why)

    def _add(self, name: str, state: State, seconds: float, told: str, logs: str = "") -> None:
        from trtpipe.pipeline.prove.proof import Step

        self.steps.append(Step(name=name, state=state, seconds=seconds, told=scrubbed(told), log=scrubbed(logs)))
        self._note(f"  {name}: {state}: {told}")


def _lane(
    way: _Way, spec: BuildSpec, options: Mapping[str, Any], runs: Path, engine_python: str | Path | None, ready_s: int
) -> Lane:
    """`runs`: where the targets' run folders are made, so that none of ./runs is replaced."""
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.api.build import build, settings
    from trtpipe.pipeline.prove.proof import ANSWERS, Lane

    def made(what: Mapping[str, Any], target: str) -> Callable[[], tuple[str, Built]]:
        def work() -> tuple[str, Built]:
            built = build(**what, folder=runs / target)
            stages = [stage.stage for stage in built.stages if not stage.reused]
            return ("made " + ", ".join(stages)) if stages else "all was made before", built

        return work

    way.step("build", made(options, spec.target))
    served: tuple[list[list[int]], list[Speed]] | None = way.step(
        "serve", lambda: _served(spec, runs / spec.target, options["model"], engine_python, ready_s)
    )
    reference = {**options, "runtime": "reference", "toolchain": None, "executor": None}
    try:
        target = settings(**reference).target
    except UsageError as error:  # a precision that other runtimes have
        way.leave_out("reference build", str(error))
        way.leave_out(ANSWERS, str(error))
    else:
        way.step("reference build", made(reference, target))
        way.step(ANSWERS, lambda: _compared(served[0] if served else [], runs / target, spec, ready_s))
    return Lane(dtype=way.dtype, target=spec.target, steps=tuple(way.steps), speeds=tuple(served[1]) if served else ())


def _served(
    spec: BuildSpec, run: Path, model: str, engine_python: str | Path | None, ready_s: int
) -> tuple[str, tuple[list[list[int]], list[Speed]]]:
    """Serve the target in the run folder `run`; its greedy answers as tokens, and its speed beside the plan's."""
    from trtpipe.engines.errors import StageFailed
    from trtpipe.pipeline.api.bench import bench
    from trtpipe.pipeline.api.serve import serve
    from trtpipe.pipeline.prove.proof import Speed

    planned = _planned(spec, model)
    # An interrupted measurement leaves requests behind.
    with serve(str(run), engine_python=engine_python, openai_port=None, drain_s=2, ready_s=ready_s) as client:
        answers = _answers(client)
        report = bench(
            client, protocol="grpc", concurrency=CONCURRENCY, requests=REQUESTS, input_tokens=INPUT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
        )  # fmt: skip
    if report.interrupted:
        raise report.interruption()
    if report.broken is not None:
        raise report.broken
    if report.partial or report.failures():
        stopped = next((result.stopped for result in report.results if result.stopped), None)
        kinds = ", ".join(f"{count} {kind}" for kind, count in report.failures().items())
        raise StageFailed("requests of the benchmark failed", why=stopped or kinds)
    if any(result.metrics["output_token_throughput"]["value"] is None for result in report.results):
        reasons = [one["why"] for one in report.verdict()["reasons"] if one["what"].endswith("there is no throughput")]
        raise StageFailed("the benchmark has no throughput", why=next(iter(reasons), ""))
    speeds = [
        Speed(
            concurrency=concurrency, tokens_per_s=result.metrics["output_token_throughput"]["value"],
            ttft_ms=result.metrics["time_to_first_token"]["p50"], predicted_tokens_per_s=planned.get(concurrency),
        )
        for concurrency, result in zip(CONCURRENCY, report.results, strict=True)
    ]  # fmt: skip
    told = ", ".join(f"{one.tokens_per_s:.0f} tokens/s at {one.concurrency} in flight" for one in speeds)
    told += "".join(f"; INVALID: {reason['what']}" for reason in report.verdict()["reasons"])
    return told, (answers, speeds)


def _planned(spec: BuildSpec, model: str) -> dict[int, float]:
    """Tokens per second that the planner predicts, by requests in flight; empty where it cannot plan this, such as
    several pipeline stages."""
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.api.plan import plan
    from trtpipe.pipeline.bench.load.work import Work
    from trtpipe.pipeline.planner.demand import Demand

    if spec.mapping.pp_size > 1:
        return {}
    demand = Demand(Work(input_tokens=str(INPUT_TOKENS), output_tokens=str(OUTPUT_TOKENS)))
    with suppress(UsageError):
        advice = plan(
            model, gpu=spec.gpu.name, dtype=spec.precision.name, tp=spec.mapping.tp_size,
            moe_ep=spec.mapping.moe_ep_size, runtime=spec.runtime, toolchain=spec.toolchain.name,
            input_tokens=INPUT_TOKENS, output_tokens=OUTPUT_TOKENS,
        )  # fmt: skip
        option = advice.candidates[0].option
        if option is not None:
            return {n: option.together(demand, n).tokens_per_s for n in CONCURRENCY}
    return {}


def _compared(answers: list[list[int]], run: Path, spec: BuildSpec, ready_s: int) -> tuple[str, None]:
    """Compare with the answers of the reference runtime's target in the run folder `run`. Raises StageFailed where too
    few begin alike, go on alike, or are as long."""
    from trtpipe.engines.errors import StageFailed
    from trtpipe.pipeline.api.serve import serve

    with serve(str(run), openai_port=None, drain_s=2, ready_s=ready_s) as client:
        expected = _answers(client)
    algo = spec.quantization.quant_algo
    found = compared(answers, expected)
    failure = found.failure(SECOND_TOKENS_4_BITS if algo is not None and algo.row.four_bits else SECOND_TOKENS)
    if failure:
        raise StageFailed(failure, why=found.describe())
    return found.describe(), None


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """How alike answers are to the reference runtime's.

    first, second  answers whose first token is the same; whose first two are, of the `second_of` of these for which the
                   reference runtime has a second token
    cut            answers that are much shorter
    whole          answers that are the same to the end
    alike, tokens  tokens before the answers part, and in all
    """

    answers: int
    first: int
    second: int
    second_of: int
    cut: int
    whole: int
    alike: int
    tokens: int

    def failure(self, second_tokens: float) -> str:
        """Why the engine does not compute as the reference runtime does; "" where it does.

        second_tokens  share of the answers with the same first token whose second one must be the same
        """
        if self.first < FIRST_TOKENS * self.answers:
            return "the engine does not compute as the reference runtime does"
        if self.second < second_tokens * self.second_of:
            return "the engine computes prompts as the reference runtime does, and not the tokens after them"
        # Few, since an answer that rounding has changed may end early.
        if self.cut > (1 - FIRST_TOKENS) * self.answers:
            return "the engine's answers are cut"
        return ""

    def describe(self) -> str:
        return (
            f"{self.first} of {self.answers} answers begin with the same token, {self.second} of these "
            f"{self.second_of} go on with the same, {self.whole} are the same to the end, {self.cut} are cut; "
            f"{self.alike} of {self.tokens} tokens come before they part"
        )


def compared(answers: list[list[int]], expected: list[list[int]]) -> Likeness:
    """Compare answers with those expected, token by token."""
    pairs = list(zip(answers, expected, strict=True))
    begun = [(one, other) for one, other in pairs if one[:1] == other[:1]]
    going = [(one, other) for one, other in begun if len(other) > 1]
    return Likeness(
        answers=len(pairs), first=len(begun), second=sum(one[:2] == other[:2] for one, other in going),
        second_of=len(going), cut=sum(len(one) < WHOLE_ANSWER * len(other) for one, other in pairs),
        whole=sum(one == other for one, other in pairs), alike=sum(_common(one, other) for one, other in pairs),
        tokens=sum(map(len, expected)),
    )  # fmt: skip


def _answers(client: Any) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(client.tokenizer))
    texts = [client.generate(prompt, max_tokens=ANSWER_TOKENS) for prompt in PROMPTS]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def _common(one: list[int], other: list[int]) -> int:
    """Number of tokens before two answers part."""
    same = (a == b for a, b in zip(one, other, strict=False))
    return next((index for index, equal in enumerate(same) if not equal), min(len(one), len(other)))


def _logs(since: float) -> str:
    """The last lines of each log of the store that was written since then."""
    from trtpipe.configs.home import default_home

    def lines() -> Iterator[str]:
        for path in sorted((default_home() / "logs").glob("**/*.log")):
            with suppress(OSError):
                if path.stat().st_mtime >= since:
                    text = path.read_text(encoding="utf-8", errors="replace").splitlines()
                    yield from (f"{path.name}: {line}" for line in text[-LOG_LINES:])

    return "\n".join(lines())


def scrubbed(text: str) -> str:
    """The text without values of secret variables, and with ~ for the home folder."""
    from trtpipe.pipeline.serving.environment import without_secrets

    kept = without_secrets(os.environ)
    for name in sorted(os.environ.keys() - kept.keys(), key=lambda name: -len(os.environ[name])):
        if os.environ[name]:
            text = text.replace(os.environ[name], f"${name}")
    home = str(Path.home())
    return text.replace(home, "~") if home != "/" else text


def _machine(gpu: str, spec: BuildSpec) -> dict[str, str]:
    import importlib.metadata

    from trtpipe.engines.nvidia import NoDriver, read_gpus

    versions = {}
    for name in ("torch", "transformers", "nvidia-modelopt", "nvidia-pytriton", "tensorrt-llm", "numpy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    driver = "none"
    with suppress(NoDriver):
        driver = next((one.driver for one in read_gpus()), "none")
    return {
        "gpu": gpu, "driver": driver, "system": platform.platform(), "processors": str(os.cpu_count()),
        "python": platform.python_version(), "toolchain": spec.toolchain.name, **versions,
    }  # fmt: skip
