"""Load files: the shipped ones make a schedule and prompts, lists become load points, and every mistake is named."""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.small_tokenizers import make
from trtpipe.configs import facts
from trtpipe.configs.read import ConfigError
from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.load.arrivals import schedule, slot_starts
from trtpipe.pipeline.bench.load.files import find_load, names, parse_loads, parse_work
from trtpipe.pipeline.bench.load.loads import Closed, Open, Replay, Stage, Staged
from trtpipe.pipeline.bench.load.texts import load_tokenizer
from trtpipe.pipeline.bench.load.work import Sessions, SharedPrefix, Work
from trtpipe.pipeline.bench.load.workload import Workload

SHIPPED = ["batch", "burst", "chat", "rag", "trace"]


def load(text: str, tmp_path: Path) -> Any:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    return find_load(str(path))


def test_every_shipped_load_is_named_as_its_file() -> None:
    assert names() == SHIPPED
    assert [find_load(name).name for name in SHIPPED] == SHIPPED
    assert all(find_load(name).description for name in SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_load_can_be_made(name: str, tmp_path: Path) -> None:
    found = find_load(name)
    asks = Workload(found.work, load_tokenizer(make("byte-level", tmp_path)), 0).asks()
    for load_point in found.load_points:
        if isinstance(load_point, Closed):
            assert len(slot_starts(load_point)) == load_point.concurrency
        else:
            made = schedule(load_point, 0)
            # Long enough for percentiles of the tail to be of more than a handful of requests.
            assert made.end - made.first > 20
    for ask in islice(asks, 60):
        assert found.work.max_total_tokens is not None
        assert ask.input_tokens + ask.output_tokens <= found.work.max_total_tokens


def test_the_shipped_trace_is_replayed_with_its_own_prompts() -> None:
    found = find_load("trace")
    assert found.work.trace == facts.CONFIGS / "load" / "trace.jsonl"
    assert found.load_points[0] == Replay(trace=found.work.trace, max_total_tokens=4096, warmup_s=5)
    assert [load_point.speedup for load_point in found.load_points if isinstance(load_point, Replay)] == [1, 2]


def test_lists_are_load_points(tmp_path: Path) -> None:
    found = load("name: my\nload: {rate: [1, 2.5], requests: 10, arrivals: gamma, burstiness: 2}", tmp_path)
    assert found.load_points == tuple(Open(rate=rate, requests=10, arrivals="gamma", burstiness=2) for rate in (1, 2.5))
    assert found.work == Work(folder=tmp_path)
    closed = load("name: my\nload: {concurrency: [1, 64], ramp_s: 2, warmup: 0}", tmp_path)
    assert closed.load_points == (Closed(concurrency=1, ramp_s=2, warmup=0), Closed(concurrency=64, ramp_s=2, warmup=0))
    assert load("name: my\nload: {concurrency: 3}", tmp_path).load_points == (Closed(concurrency=3),)


def test_a_stage_has_a_rate_or_goes_from_one_to_another(tmp_path: Path) -> None:
    text = "name: my\nload: {stages: [{duration_s: 5, rate: 2}, {from: 2, to: 0.5, duration_s: 1}], max_in_flight: 7}"
    stages = (Stage(duration_s=5, start=2, end=2), Stage(duration_s=1, start=2, end=0.5))
    assert load(text, tmp_path).load_points == (Staged(stages=stages, max_in_flight=7),)


def test_work_is_read_in_depth(tmp_path: Path) -> None:
    found = load(
        """
        name: my
        load: {concurrency: 1}
        work:
          input_tokens: normal:128,32
          output_tokens: 9
          shared_prefix: {share: 0.5, tokens: 64, groups: 2}
          sessions: {turns: "uniform:1,3", think_s: 0.5}
          options: {temperature: 0.5, stop: [x]}
        """,
        tmp_path,
    )
    assert found.work == Work(
        input_tokens="normal:128,32",
        output_tokens=9,
        shared_prefix=SharedPrefix(share=0.5, tokens=64, groups=2),
        sessions=Sessions(turns="uniform:1,3", think_s=0.5),
        options={"temperature": 0.5, "stop": ["x"]},
        folder=tmp_path,
    )
    files = load("name: my\nload: {concurrency: 1}\nwork: {prompts: mine.txt, shuffle: true}", tmp_path)
    assert files.work == Work(prompts=Path("mine.txt"), shuffle=True, folder=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: my", "my.yaml: load: Field required"),
        ("name: my\nlaod: {}", "my.yaml: unknown key 'laod'; did you mean 'load'?"),
        ("name: my\nload: [1]", "my.yaml: load: Input should be an object"),
        ("name: my\nload: {}", "my.yaml: load: a load has one of concurrency, rate, stages, trace: there is none; "
         "give one of them"),
        ("name: my\nload: {rate: 1, concurrency: 1}", "my.yaml: load: a load has one of concurrency, rate, stages, "
         "trace: there is concurrency and rate; give one of them"),
        ("name: my\nload: {concurency: 1}", "my.yaml: load: unknown key 'concurency'; did you mean 'concurrency'?"),
        ("name: my\nload: {concurrency: 1, burstiness: 2}", "my.yaml: load: burstiness does not apply to a "
         "load of concurrency; known: concurrency, requests, duration_s, warmup, cooldown, ramp_s"),
        ("name: my\nload: {concurrency: many}", "my.yaml: load: concurrency: Input should be a valid integer"),
        ("name: my\nload: {concurrency: [4, 0]}", "my.yaml: load: concurrency is 0; give 1 or more"),
        ("name: my\nload: {rate: []}", "my.yaml: load: rate is an empty list; give one value or more"),
        ("name: my\nload: {rate: 1}", "my.yaml: load: an open loop has no end; give requests or duration_s"),
        ("name: my\nload: {rate: 1, requests: 5, arrivals: poison}", "my.yaml: load: unknown arrivals 'poison'; did "
         "you mean 'poisson'?"),
        ("name: my\nload: {stages: {}}", "my.yaml: load: stages must be a list of mappings"),
        ("name: my\nload: {stages: [{duration: 5, rate: 1}]}", "my.yaml: load: stages: unknown key 'duration'; did you "
         "mean 'duration_s'?"),
        ("name: my\nload: {stages: [{duration_s: 5, from: 1}]}", "my.yaml: load: stages: a stage has a rate, or from "
         "and to: {'duration_s': 5, 'from': 1} has neither or too much"),
        ("name: my\nload: {stages: [{duration_s: 5, rate: 1, to: 2}]}", "my.yaml: load: stages: a stage has a "),
        ("name: my\nload: {stages: [{rate: 1}]}", "my.yaml: load: stages.0.duration_s: Field required"),
        ("name: my\nload: {stages: [{duration_s: 1, rate: 0}]}", "my.yaml: load: the stages make no request; "),
        ("name: my\nload: {trace: 5}", "my.yaml: load: trace is 5, not a file"),
        ("name: my\nload: {trace: a.jsonl, speedup: [1, -1]}", "my.yaml: load: speedup is -1; "),
        ("name: my\nload: {concurrency: 1}\nwork: {input_token: 5}", "my.yaml: work: unknown key 'input_token'; did "
         "you mean 'input_tokens'?"),
        ("name: my\nload: {concurrency: 1}\nwork: {input_tokens: norml:1}", "my.yaml: work: input_tokens 'norml:1' "
         "cannot be drawn from: there is no 'norml'; did you mean 'normal'?"),
        ("name: my\nload: {concurrency: 1}\nwork: {input_tokens: [5]}", "my.yaml: work: input_tokens"),
        ("name: my\nload: {concurrency: 1}\nwork: {shared_prefix: {shard: 1}}", "my.yaml: work: shared_prefix: unknown "
         "key 'shard'; did you mean 'share'?"),
        ("name: my\nload: {concurrency: 1}\nwork: {shared_prefix: {share: 1}}", "my.yaml: work: shared_prefix.tokens: "
         "Field required"),
        ("name: my\nload: {concurrency: 1}\nwork: {sessions: {turns: 2, think: 1}}", "my.yaml: work: sessions: unknown "
         "key 'think'; did you mean 'think_s'?"),
        ("name: my\nload: {concurrency: 1}\nwork: {options: {temprature: 1}}", "my.yaml: work: options: unknown "
         "sampling option 'temprature'; did you mean 'temperature'?"),
        ("name: my\nload: {trace: a.jsonl}\nwork: {trace: b.jsonl}", "my.yaml: work: trace is given twice: the load "
         "names it; leave it out here"),
        ("name: my\nload: {trace: a.jsonl}\nwork: {input_tokens: 5}", "my.yaml: work: input_tokens does not apply to "
         "trace; "),
    ],
)  # fmt: skip
def test_a_mistake_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, tmp_path)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_load_is_called_as_its_file_where_it_has_no_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("load: {concurrency: 1}")
    assert find_load(str(tmp_path / "mine.yaml")).name == "mine"


def test_an_unknown_load_gets_the_nearest_spelling(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^unknown load 'chatt': there is no such file either; did you mean 'chat'"):
        find_load("chatt")
    with pytest.raises(UsageError, match=r"^unknown load '.*none\.yaml': there is no such file either; known: batch, "):
        find_load(str(tmp_path / "none.yaml"))


def test_options_are_read_as_a_file_is_and_refused_as_the_command_s() -> None:
    load_points = parse_loads({"rate": [1], "duration_s": 5}, "--load", Path(), UsageError)
    assert load_points == (Open(rate=1, duration_s=5),)
    with pytest.raises(UsageError, match=r"^--load: unknown key 'ratte'; did you mean 'rate'"):
        parse_loads({"ratte": 1}, "--load", Path(), UsageError)
    with pytest.raises(UsageError, match=r"^work: output_tokens '0' cannot be drawn from"):
        parse_work({"output_tokens": 0}, "work", Path(), load_points, UsageError)


def test_another_trace_in_the_place_of_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = yaml.safe_load((facts.CONFIGS / "load" / "trace.yaml").read_text())
    raw["load"]["trace"] = "mine.jsonl"
    shutil.copy(facts.CONFIGS / "load" / "trace.jsonl", tmp_path / "mine.jsonl")
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(raw))
    # From the folder above: what is beside the file is not in the working folder.
    monkeypatch.chdir(tmp_path.parent)
    found = find_load(f"{tmp_path.name}/my.yaml")
    assert found.work.trace is not None
    assert found.work.folder / found.work.trace == tmp_path / "mine.jsonl"
    assert found.work.max_total_tokens == 4096
