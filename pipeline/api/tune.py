"""The settings with which a target serves most on this machine, found by measuring them."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtpipe.pipeline.api.arguments import checked

if TYPE_CHECKING:
    from trtpipe.pipeline.bench.load.loads import Open
    from trtpipe.pipeline.bench.options import BenchOptions, Progress
    from trtpipe.pipeline.spec import BuildSpec
    from trtpipe.pipeline.tune.candidates import Candidate
    from trtpipe.pipeline.tune.schedule import Schedule
    from trtpipe.pipeline.tune.search import Score, Winner
    from trtpipe.pipeline.tune.study import Run, Study

log = logging.getLogger("trtpipe")

# Relative precision of the rate in the first round; each later round halves it, to the least.
PRECISION, LEAST_PRECISION = 0.2, 0.05
# Most runs of a rate that is near the limit.
RUNS = 3
MOST_MINUTES = 7 * 24 * 60
# Seconds that Triton waits at its end for requests that a measurement has abandoned: an ensemble goes on with them.
DRAIN_S = 2


@checked
def tune(
    target: str | Path, slo: str | Sequence[str], *, minutes: float = 30.0, find: str = "max-goodput",
    load: str | Path | None = None, input_tokens: int | str | None = None, output_tokens: int | str | None = None,
    protocol: str = "grpc", price: float | None = None, engine_python: str | Path | None = None, ready_s: int = 600,
    note: Callable[[str], None] = log.info, progress: Callable[[Progress], None] | None = None,
) -> Study:  # fmt: skip
    """Search the settings of a target for the highest rate within objectives, by serving and measuring it.

    target         a target in ./runs; it is left as it is
    slo            objectives: "ttft:p99<200ms"
    minutes        upper bound on the search's time
    find           max-goodput (a share of requests meets the objectives) or max-rate (their statistics do)
    load           load of configs/load, or a YAML file: its lengths, and the arrivals of its first rate
    input_tokens, output_tokens  lengths: 128, or a distribution such as "lognormal:128,0.5"
    price          of one GPU for an hour; that of the GPU's file if left out
    engine_python, ready_s  Python that runs engines, and seconds that a server may take to be ready, as of `serve`

    Every measurement is kept in ./runs/TARGET/tune, and the same call goes on with those of an interrupted one.
    Where no change could be measured, the study has no winner, and its state is "no answer"; where the best gain is
    less than twice its error, or that is not known, or time was over before a rate that decides was found, it is
    "undecided". Neither has a recipe.
    Raises UsageError, HostError, and what building, serving or measuring the target as it is raises. Ctrl-C leaves
    the result of what was measured.
    """
    session = _Session(
        str(target), slo, minutes=minutes, find=find, protocol=protocol, engine_python=engine_python,
        lengths={"load": load, "input_tokens": input_tokens, "output_tokens": output_tokens}, price=price,
        ready_s=ready_s,
        note=note, progress=progress,
    )  # fmt: skip
    with session.alone():
        session.open()
        return _search(session, note)


def _search(session: _Session, note: Callable[[str], None]) -> Study:
    """Measure the session's candidates, and write what was found."""
    from trtpipe.engines.errors import Ended
    from trtpipe.pipeline.tune import page
    from trtpipe.pipeline.tune.search import search
    from trtpipe.pipeline.tune.study import RECIPE_NAME

    study = session.study
    try:
        winner = search(session.candidates, session.score, session.time_for)
        untried = session.leave_out()
        if study.compared:
            study.winner = winner
            study.state = "complete" if winner.complete and not untried else "out of time"
            if not winner.proven:
                study.state = "undecided"
        else:
            study.state = "no answer"
    except (KeyboardInterrupt, Ended):
        study.winner = session.best_so_far()
        note(f"what was measured is in {study.folder}; the same command goes on from there")
        raise
    finally:
        if study.runs:
            if study.winner is not None and study.decided:
                session.write_recipe(study.winner.candidate)
            else:  # an interrupted search may have left one
                (study.folder / RECIPE_NAME).unlink(missing_ok=True)
            study.write()
            page.write(study)
    return study


class _Session:
    """One search: candidates of a target, and how each is measured. Made from the options; to be opened `alone`."""

    def __init__(
        self, target: str, slo: str | Sequence[str], *, minutes: float, find: str, protocol: str,
        lengths: dict[str, Any], price: float | None, engine_python: str | Path | None, ready_s: int,
        note: Callable[[str], None], progress: Callable[[Progress], None] | None,
    ) -> None:  # fmt: skip
        from trtpipe.configs.home import default_home
        from trtpipe.engines.errors import UsageError
        from trtpipe.pipeline.api.bench_options import choose, require_room
        from trtpipe.pipeline.run_folder import require_run
        from trtpipe.pipeline.store.store import Store

        if not 0 < minutes <= MOST_MINUTES:
            raise UsageError(f"--minutes is {minutes:g}", remedy=f"give a positive number, at most {MOST_MINUTES:,}")
        if price is not None and not 0 < price < 1e6:
            raise UsageError(f"--price is {price:g}", remedy="give the price of one GPU for an hour, such as 2.5")
        self._run = require_run(target)
        self._spec = self._run.spec()
        self._store = Store(default_home())
        self._bench: dict[str, Any] = {
            **lengths, "protocol": protocol, "slo": [slo] if isinstance(slo, str) else list(slo),
        }  # fmt: skip
        # An address nobody asks: what cannot be measured is refused before anything is built.
        plain = {
            **self._bench,
            "openai_url": "http://127.0.0.1:1/v1",
            "grpc_url": "127.0.0.1:1",
            "http_url": "http://127.0.0.1:1",
            "tokenizer": self._run.path / "tokenizer" / "tokenizer.json",
        }
        self._options, _ = choose(**plain)
        if len(self._options.targets) > 1:
            raise UsageError(f"--protocol {protocol} are several", remedy="give the one that users will use")
        self._arrivals = self._search(self._options, find, rate=None, seconds=1.0, number=0, limit_s=1.0).loads[0]
        require_room(self._options.work, self._spec.target, self._run.linked("repository"))
        self._find, self._engine_python, self._ready_s = find, engine_python, ready_s
        self._note, self._progress = note, progress
        self._minutes, self._price = minutes, price

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other searches from this machine, builds and `rm` from the target. Raises HostError while one runs."""
        from trtpipe.engines.errors import HostError

        # Measurements of two searches would be of each other's work too.
        other = HostError("another `trtpipe tune` runs on this machine", remedy="wait until it has ended")
        with self._store.alone("tune", other), self._store.alone(self._run.tune_lock, other):
            yield

    def open(self) -> None:
        """Open the study, and choose the candidates. Raises HostError while something is served here."""
        from trtpipe.engines.errors import HostError
        from trtpipe.pipeline.bench.results.digest import digest
        from trtpipe.pipeline.serving.servers import running
        from trtpipe.pipeline.tune.candidates import AS_IT_IS

        options = self._options
        served = running(self._store)
        if served:
            raise HostError(
                f"{served[0].name} is being served on this machine", why="its work would be measured too",
                remedy="run `trtpipe stop` first",
            )  # fmt: skip
        question = {
            "objectives": [str(one) for one in options.objectives], "goal": self._find, "minutes": self._minutes,
            "work": options.to_json()["work"], "protocol": self._bench["protocol"], "settings": self._spec.settings,
            "arrivals": asdict(self._arrivals), "files": {str(file): digest(file) for file in options.work.files},
        }  # fmt: skip
        self.study = _open_study(self._run.path, self._spec, question, self._price)
        self._began, self._spent_before = time.monotonic(), self.study.spent_s
        if self.study.runs:
            self._note(
                f"{len(self.study.runs)} measurements are there already, of {self._spent_before / 60:.1f} minutes"
            )
        self._specs: dict[Candidate, BuildSpec] = {AS_IT_IS: self._spec}
        self._expected: dict[Candidate, float | None] = {}
        self.candidates = self._ordered(options)
        self._seconds = 60 * self._minutes

    def score(self, candidate: Candidate, number: int, repeat: int) -> Score:
        """See search.Measure."""
        return self._measure(candidate, number, repeat).score

    def time_for(self, measurements: int, candidate: Candidate, number: int, repeat: int) -> bool:
        """See search.TimeFor."""
        done = self.study.find(candidate, number, repeat) is not None
        return done or self._left_s >= measurements * self._schedule.least_s

    def leave_out(self) -> bool:
        """Note which changes have no result and why, and how many minutes would be enough. Return whether there was no
        time for one of them."""
        from trtpipe.pipeline.tune.study import best_run

        study, schedule = self.study, self._schedule
        took = [run.seconds for run in study.runs if run.candidate.changes and run.report]
        each_s = sum(took) / len(took) if took else 0.0
        untried = [one for one in self.candidates if not study.of(one)]
        for one in self.candidates:
            runs = study.of(one)
            if one in untried:
                minutes = math.ceil(schedule.enough_s(len(self.candidates), each_s) / 60)
                study.left[one.name] = f"there was no time for it: --minutes {minutes} is enough for all changes"
            elif best_run(runs).rate is None:
                study.left[one.name] = runs[-1].told
        if took or untried:
            # Where a change had its time, and that was not enough, the same is not enough again.
            seconds = 2 * self._seconds if took else schedule.enough_s(1, each_s)
            study.remedy = f"give --minutes {math.ceil(seconds / 60)} or more"
        return bool(untried)

    def best_so_far(self) -> Winner | None:
        """The winner of an interrupted search, from what it has measured."""
        from trtpipe.pipeline.tune.search import OutOfTime, search

        def again(candidate: Candidate, number: int, repeat: int) -> Score:
            found = self.study.find(candidate, number, repeat)
            if found is None:
                raise OutOfTime
            return found.score

        return search(self.candidates, again, self.time_for) if self.study.runs else None

    def write_recipe(self, candidate: Candidate) -> None:
        """Write the build recipe of a candidate, with what was measured as its comment."""
        import yaml

        from trtpipe.pipeline.tune.study import RECIPE_NAME, put

        spec = self._spec_of(candidate)
        head = (
            f"# {self.study.said()}\n# Objectives: {', '.join(self.study.question['objectives'])}. "
            "Measurements: tune.json and tune.html beside this file.\n"
        )
        put(self.study.folder, {RECIPE_NAME: head + yaml.safe_dump(spec.settings, sort_keys=False)})

    def _ordered(self, options: BenchOptions) -> list[Candidate]:
        from trtpipe.engines import load_backend
        from trtpipe.engines.errors import TrtpipeError
        from trtpipe.engines.hf.folder import read_model_config
        from trtpipe.pipeline.planner.demand import Demand
        from trtpipe.pipeline.tune import prior
        from trtpipe.pipeline.tune.candidates import single_changes

        spec = self._spec
        possible = single_changes(spec.runtime, spec.build, spec.serving, on_cpu=spec.gpu.is_cpu)
        for one in possible:
            try:
                self._spec_of(one)
            except TrtpipeError as error:
                self.study.left[one.name] = str(error)
        expected = self._expected
        if not spec.gpu.is_cpu and not (options.work.prompts or options.work.sharegpt):  # of unknown lengths
            model, demand = read_model_config(self._run.linked("model"), quantized=True), Demand(options.work)
            for one, its in self._specs.items():
                expected[one] = prior.expected_rate(
                    model, its.gpu, its.precision, its.mapping, its.runtime, its.build, its.serving, demand,
                    options.objectives,
                )  # fmt: skip
        able = [one for one in possible if one in self._specs]
        kept, left = prior.worth_measuring(able, expected, compiled=load_backend(spec.runtime).COMPILED)
        self.study.left |= left
        return kept

    def _spec_of(self, candidate: Candidate) -> BuildSpec:
        """Raises UsageError for settings that contradict each other."""
        from trtpipe.pipeline.layers import dotted_layer
        from trtpipe.pipeline.resolve import resolve

        if candidate not in self._specs:
            layers = [("the target", self._spec.settings), dotted_layer(dict(candidate.changes))]
            self._specs[candidate] = resolve(layers, model=self._spec.model)
        return self._specs[candidate]

    def _measure(self, candidate: Candidate, number: int, repeat: int) -> Run:
        """Measure a candidate, or find its measurement. Raises OutOfTime, KeyboardInterrupt, what the system refuses,
        such as DiskFull, and for the target as it is what its build or server raises."""
        from trtpipe.engines.errors import StageFailed, TrtpipeError
        from trtpipe.engines.files import DiskFull
        from trtpipe.pipeline.tune.search import OutOfTime
        from trtpipe.pipeline.tune.study import Run

        done = self.study.find(candidate, number, repeat)
        if done is not None:
            return done
        if self.study.runs and not self.time_for(1, candidate, number, repeat):
            raise OutOfTime
        begun = time.monotonic()
        self._note(f"round {number + 1}: {candidate.name}")
        try:
            run = self._served(candidate, number, repeat, begun)
        except TrtpipeError as error:
            # What the machine refuses says nothing about the change: the same command measures it later.
            if not candidate.changes or isinstance(error, DiskFull) or isinstance(error.__cause__, OSError):
                raise
            run = Run(
                candidate=candidate, round=number, repeat=repeat, seconds=time.monotonic() - begun, rate=None,
                told=str(error),
            )  # fmt: skip
        if run.rate is None and not self.study.runs:  # the target as it is: there is nothing to compare with
            minutes = math.ceil(self._schedule.longer_s / 60)
            raise StageFailed(
                f"{self.study.target} could not be measured as it is", why=run.told,
                remedy=f"give --minutes {minutes}, shorter answers (--output-tokens), or an --slo that it can meet",
            )  # fmt: skip
        self.study.runs.append(run)
        self.study.write()
        self._note(f"round {number + 1}: {candidate.name}: {run.said(self.study.unit)}")
        return run

    @property
    def _schedule(self) -> Schedule:
        """With what the first measurement, of the target as it is, showed, and the longest start and stop so far."""
        from trtpipe.pipeline.tune.schedule import Schedule

        schedule = Schedule(seconds=self._seconds, candidates=len(self.candidates))
        if not self.study.runs:
            return schedule
        first = self.study.runs[0]
        around_s = max(run.around_s for run in self.study.runs)
        return replace(schedule, around_s=around_s, request_s=first.request_s, tail_s=first.tail_s)

    @property
    def _left_s(self) -> float:
        return max(0.0, self._seconds - self._spent_before - (time.monotonic() - self._began))

    def _search_s(self, number: int, repeat: int) -> float:
        """Seconds of the search for a rate in a measurement that begins now."""
        from trtpipe.pipeline.tune.search import ONCE_MORE

        schedule = self._schedule
        if not self.study.runs:
            return min(schedule.first_s, self._left_s)
        if repeat:
            return schedule.search_s(self._seconds if repeat == ONCE_MORE else schedule.limit_s(number), self._left_s)
        done = sum(run.round == number and not run.repeat for run in self.study.runs)
        others = max(0, schedule.size(number) - done - 1)
        return schedule.search_s(schedule.limit_s(number), self._left_s, others)

    def _served(self, candidate: Candidate, number: int, repeat: int, begun: float) -> Run:
        from trtpipe.pipeline.api.bench import measure
        from trtpipe.pipeline.api.bench_options import choose
        from trtpipe.pipeline.api.build import build
        from trtpipe.pipeline.api.serve import serve
        from trtpipe.pipeline.bench.results.files import write_report
        from trtpipe.pipeline.bench.results.summary import unknown_objective
        from trtpipe.pipeline.tune.study import Run

        search_s = self._search_s(number, repeat)
        folder = self.study.folder / _folder_name(candidate)
        build(self._spec_of(candidate), store=self._store, folder=folder, given=self._imported(candidate))
        built = time.monotonic()
        with serve(
            str(folder), openai_port=None if self._bench["protocol"] in ("grpc", "http") else 0,
            engine_python=self._engine_python, drain_s=DRAIN_S, ready_s=self._ready_s,
        ) as client:  # fmt: skip
            start_s = time.monotonic() - built
            # The first search needs more load points, since it knows no rate to begin at.
            point_s = self._schedule.point_s(search_s if self.study.runs else self._schedule.limit_s(0))
            options, served = choose(client.target, **{**self._bench, "server": client.server})
            options = self._search(
                options, self._find, rate=self._start_rate(candidate), seconds=point_s, number=number,
                limit_s=min(search_s, self._left_s),
            )  # fmt: skip
            asked = time.monotonic()
            report = measure(replace(options, seed=repeat), served, self._progress, self._note)
            searched_s = time.monotonic() - asked
            tail_s = max(0.0, searched_s / max(1, len(report.results)) - point_s)
        if report.interrupted:
            raise report.interruption()
        if report.broken is not None:
            raise report.broken
        unknown = unknown_objective(report)
        if unknown is not None:
            self._note(unknown)
        file = folder / f"round{number + 1}.{repeat + 1}.json"
        write_report(report, file)
        seconds = time.monotonic() - begun
        return Run.measured(
            report, candidate=candidate, round=number, repeat=repeat, seconds=seconds, start_s=start_s,
            around_s=seconds - searched_s - (built - begun), tail_s=tail_s,
            report=str(file.relative_to(self.study.folder)),
        )  # fmt: skip

    def _imported(self, candidate: Candidate) -> dict[str, Any]:
        """The target's artefacts that were made elsewhere, as far as the candidate's settings leave them."""
        from trtpipe.pipeline import stages

        changed = {"repository", *(["engine"] if candidate.rebuilds else [])}
        found = {stage.makes: self._run.find(stage.name, self._store) for stage in stages.STAGES}
        return {
            makes: artefact
            for makes, artefact in found.items()
            if artefact is not None and artefact.origin is not None and makes not in changed
        }

    def _start_rate(self, candidate: Candidate) -> float | None:
        """Where a candidate's search begins: at its own last rate, or that of the target as it is, or what the planner
        expects of that; None for none of these."""
        from trtpipe.pipeline.tune.candidates import AS_IT_IS

        known = [run.rate for one in (AS_IT_IS, candidate) for run in self.study.of(one) if run.rate]
        return known[-1] if known else self._expected.get(AS_IT_IS) or None

    def _search(
        self, options: BenchOptions, find: str, *, rate: float | None, seconds: float, number: int, limit_s: float
    ) -> BenchOptions:
        """`options` as a search for a rate that takes about `limit_s`. Raises UsageError."""
        from trtpipe.pipeline.bench.load.loads import Open
        from trtpipe.pipeline.bench.search import Search

        asked = next((load for load in options.loads if isinstance(load, Open)), None)
        start = rate or 1.0
        load: Open = (
            Open(rate=start, duration_s=seconds)
            if asked is None
            else replace(asked, rate=start, duration_s=seconds, requests=None)
        )
        wanted = Search(
            goal=find, load=load, known=rate is not None, precision=max(LEAST_PRECISION, PRECISION / 2**number),
            repeats=RUNS, limit_s=limit_s,
        )  # fmt: skip
        return replace(options, loads=(load,), search=wanted)


def _open_study(run: Path, spec: BuildSpec, question: dict[str, Any], price: float | None) -> Study:
    import hashlib
    import json

    from trtpipe.pipeline.tune.study import Study

    digest = hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()[:8]
    study = Study.open(spec.target, question, run / "tune" / digest)
    each = spec.gpu.price_per_hour if price is None else price
    study.price = None if each is None else each * spec.mapping.world_size
    return study


def _folder_name(candidate: Candidate) -> str:
    """Name of a candidate's folder: what it changes, short enough for a file's name."""
    import hashlib

    words = [f"{name.partition('.')[2]}-{value}" for name, value in candidate.changes]
    name = "+".join(words) or "as-it-is"
    return name if len(name) <= 80 else f"{name[:70]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
