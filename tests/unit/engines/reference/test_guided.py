"""Guided decoding in the reference runtime: answers of a random model that have a form, and grammars that have none."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from tests.support.factories import hf_folder
from tests.support.schemas import schemas
from tests.support.tool_models import call_text
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.engine_process.request import Output, Request, RequestRefused
from trtpipe.engines.reference import grammars
from trtpipe.engines.reference import runtime as reference
from trtpipe.engines.reference.runtime import Runtime
from trtpipe.engines.sampling import Guide, GuideKind, SamplingParams
from trtpipe.pipeline.gateway.schemas import checked
from trtpipe.pipeline.gateway.tools import required
from trtpipe.pipeline.gateway.tools.formats import FORMATS
from trtpipe.pipeline.gateway.tools.parser import CallParser, ToolUse
from trtpipe.triton_repo.shared_text import tokenizer_info

# Grammars are compiled in a process of their own.
pytestmark = [pytest.mark.process, pytest.mark.usefixtures("one_thread")]
END = 1
VOCAB = 300


def test_a_guide_without_xgrammar_is_refused_with_what_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "find_spec", lambda name: None)
    assert grammars.guide_refusal(Guide("regex", "a")).endswith(
        "xgrammar is not installed; `trtpipe doctor` prints the command that installs it"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("model") / "tiny", vocab_size=VOCAB, eos_token_id=END)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engine")
    convert(folder, out, dtype=DataType.FLOAT32, mapping=Mapping())
    (out / "info.json").write_text(tokenizer_info(folder))
    limits = {
        "max_batch_size": 64,
        "max_input_len": 64,
        "max_seq_len": 1024,
        "max_num_tokens": 512,
        "max_beam_width": 1,
    }
    engine = {
        "pretrained_config": json.loads((out / "config.json").read_text()),
        "build_config": {**limits, "plugin_config": {"tokens_per_block": 32}},
    }
    (out / "config.json").write_text(json.dumps(engine))
    return out


@pytest.fixture(scope="module")
def runtime(engine: Path) -> Iterator[Runtime]:
    made = Runtime(engine, guided_decoding={"tokenizer_info": str(engine / "info.json")})
    yield made
    made.close()


@pytest.fixture
def compiling(runtime: Runtime) -> grammars.Grammars:
    """The runtime's own: the process in which grammars are compiled takes seconds to start."""
    assert runtime._grammars is not None
    return runtime._grammars


def request(number: int, kind: GuideKind, text: str = "", **rest: Any) -> Request:
    sampling = SamplingParams(seed=number, top_p=1.0, temperature=1.0)
    fields: dict[str, Any] = {"max_tokens": 400, "end_id": END, "sampling": sampling, **rest}
    return Request(id=number, prompt=(5, 6, 7), guide=Guide(kind, text), **fields)


def run(runtime: Runtime, *requests: Request) -> dict[Any, list[Output]]:
    for one in requests:
        runtime.submit(one)
    out: dict[Any, list[Output]] = {one.id: [] for one in requests}
    while runtime.has_work:
        for output in runtime.step():
            out[output.id].append(output)
    return out


def text_of(folder: Path, outputs: list[Output]) -> str:
    tokens = [token for output in outputs for token in output.tokens]
    return str(Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens))


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_finished_answers_of_random_sampling_are_valid(folder: Path, runtime: Runtime, count: int) -> None:
    wanted = schemas(count, seed=count)
    asked = [request(number, "json_schema", checked(one, "schema")) for number, one in enumerate(wanted)]
    finished = 0
    for number, outputs in run(runtime, *asked).items():
        assert outputs[-1].finish in ("end_id", "length"), (wanted[number], outputs[-1].refusal)
        if outputs[-1].finish == "end_id":
            finished += 1
            answer = json.loads(text_of(folder, outputs))
            jsonschema.Draft202012Validator(wanted[number]).validate(answer)
    assert finished >= 0.75 * count


def test_required_calls_of_random_sampling_are_calls_with_valid_arguments(folder: Path, runtime: Runtime) -> None:
    node = {"$ref": "#/$defs/Node", "$defs": {"Node": {"type": "object", "properties": {
        "value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
        "required": ["value"]}}}  # fmt: skip
    weather = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
    }
    wanted: dict[str, Any] = {"grow": node, "get_weather": weather, "get_time": None}
    empty = {"type": "object", "maxProperties": 0}
    named = {name: required.arguments(schema, "tools") for name, schema in wanted.items()}
    for parallel in (True, False):
        guide = required.guide(named, parallel=parallel)
        use = ToolUse(format="hermes", names=tuple(wanted), required=True, parallel=parallel)
        seen, most, finished = set(), 0, 0
        for outputs in run(runtime, *(request(number, guide.kind, guide.text) for number in range(16))).values():
            parser = CallParser(use)
            said = "".join(parser.push(piece) for piece in text_of(folder, outputs)) + parser.push("", final=True)
            assert (said, bool(parser.calls)) == ("", True)
            most = max(most, len(parser.calls))
            if outputs[-1].finish == "end_id":
                finished += 1
                for call in parser.calls:
                    seen.add(call.name)
                    arguments = json.loads("".join(call.arguments))
                    jsonschema.Draft202012Validator(wanted[call.name] or empty).validate(arguments)
        assert seen == set(wanted)
        assert finished > 8
        assert (most > 1) == parallel


@pytest.mark.parametrize(
    "form", ["hermes", *(pytest.param(one, marks=pytest.mark.slow) for one in ("llama3_json", "mistral"))]
)
def test_a_call_that_a_text_begins_has_the_strict_functions_arguments(
    folder: Path, compiling: grammars.Grammars, form: str
) -> None:
    import xgrammar

    weather = {"city": {"enum": ["Oslo", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}
    parameters = {"type": "object", "properties": weather, "required": ["city"]}
    tag = FORMATS[form].structural_tag({"get_weather": required.arguments(parameters, ""), "other": {"type": "object"}})
    guide = Guide("structural_tag", json.dumps(tag))
    asked = request(0, guide.kind, guide.text)
    grammar, tokenizer = compiling.compile(guide).result(), Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = call_text(form, "get_weather", city="x").partition('"x"')[0]
    for seed in range(8):
        random, matcher = np.random.default_rng(seed), grammars.Follower(grammar, asked).matcher
        # Free text before the call, and a function of another name is no call of this one.
        assert matcher.accept_string(("Let me see. " if form != "llama3_json" else "") + begin)
        tokens: list[int] = []
        parser = CallParser(ToolUse(format=form, names=("get_weather", "other"), required=False, parallel=True))
        parser.push(begin)
        while not parser.calls:
            mask = xgrammar.allocate_token_bitmask(1, VOCAB)
            matcher.fill_next_token_bitmask(mask)
            allowed = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:VOCAB].nonzero()[0]
            tokens.append(int(random.choice(allowed)))
            assert matcher.accept_token(tokens[-1])
            parser.push(tokenizer.decode(tokens[-1:], skip_special_tokens=False))
        arguments = json.loads("".join(parser.calls[0].arguments))
        jsonschema.Draft202012Validator({**parameters, "additionalProperties": False}).validate(arguments)
    plain = grammars.Follower(grammar, asked)
    assert plain.matcher.accept_string("No call at all, only text.")
    plain.accept(END)
    assert plain.complete


def test_drafts_change_no_answer_that_has_a_form(
    folder: Path, engine: Path, runtime: Runtime, compiling: grammars.Grammars, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shutil.copytree(engine, tmp_path / "engine")
    config = json.loads((engine / "config.json").read_text())
    config["build_config"] |= {"speculative_decoding_mode": "ngram", "max_draft_len": 4}
    (tmp_path / "engine" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(reference, "Grammars", lambda *info: compiling)
    guessing = Runtime(tmp_path / "engine", guided_decoding={"tokenizer_info": str(engine / "info.json")})
    wanted = schemas(12, seed=4)
    asked = [
        request(number, "json_schema", checked(one, "schema"), max_tokens=120, **more)
        for number, one in enumerate(wanted)
        for more in [{"sampling": SamplingParams()} if number % 2 else {}]
    ]
    expected, found = run(runtime, *asked), run(guessing, *asked)
    finished = 0
    for number, outputs in found.items():
        assert [t for o in outputs for t in o.tokens] == [t for o in expected[number] for t in o.tokens]
        assert outputs[-1].finish == expected[number][-1].finish
        if outputs[-1].finish == "end_id":
            finished += 1
            jsonschema.Draft202012Validator(wanted[number]).validate(json.loads(text_of(folder, outputs)))
    assert finished > 3
    assert guessing.stats()["accepted_draft_tokens"] > 0


def test_other_kinds_and_free_requests_in_one_batch(folder: Path, runtime: Runtime) -> None:
    free = SamplingParams(seed=1, top_p=1.0)
    alone = run(runtime, Request(id="free", prompt=(5, 6, 7), max_tokens=30, sampling=free))["free"]
    together = run(
        runtime,
        request(0, "regex", r"\d{3}-[a-f]+x"),
        request(1, "ebnf_grammar", 'root ::= "yes" | "no"'),
        request(2, "json", max_tokens=30),
        request(3, "ebnf_grammar", 'root ::= "go"', end_id=None),
        request(4, "ebnf_grammar", 'root ::= "go"', end_id=None, stop_words=((0,), (END,))),
        request(5, "ebnf_grammar", 'root ::= "go"', sampling=SamplingParams(min_tokens=10)),
        request(6, "structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": [
            {"type": "const_string", "value": "<call>"},
            {"type": "json_schema", "json_schema": {"type": "boolean"}}]}})),
        Request(id="free", prompt=(5, 6, 7), max_tokens=30, sampling=free),
    )  # fmt: skip
    assert re.fullmatch(r"\d{3}-[a-f]+x", text_of(folder, together[0]))
    assert text_of(folder, together[1]) in ("yes", "no")
    # Without an end token the complete form ends the answer; a stop word of one token is an end token.
    assert [text_of(folder, together[number]) for number in (3, 4, 5)] == ["go"] * 3
    assert [together[number][-1].finish for number in (3, 4, 5)] == ["stop_words", "stop_words", "end_id"]
    assert text_of(folder, together[6]) in ("<call>true", "<call>false")
    assert [output.tokens for output in together["free"]] == [output.tokens for output in alone]


@pytest.mark.parametrize(
    ("kind", "text", "telling"),
    [
        ("json_schema", '{"type": "fruit"}', "JSON schema cannot be used"),
        ("json_schema", '{"type"', "JSON schema cannot be used"),
        ("regex", "(a", "Regex parsing error at position 3: The parenthesis is not closed"),
        ("ebnf_grammar", "root ::= missing", "not defined"),
        ("structural_tag", "[]", "structural tag cannot be used"),
    ],
)
def test_what_is_no_grammar_is_refused_and_nobody_waits(
    runtime: Runtime, kind: GuideKind, text: str, telling: str
) -> None:
    runtime.submit(request(0, kind, text))
    runtime.submit(Request(id="free", prompt=(5, 6, 7), max_tokens=3))
    seen: list[Output] = []
    while runtime.has_work:
        seen += runtime.step()
    refused = next(output for output in seen if output.id == 0)
    assert refused.finish == "refused"
    assert refused.refusal.startswith("guided_decoding_guide: ")
    assert telling in refused.refusal
    assert [output.finish for output in seen if output.id == "free"] == [None, None, "length"]


def test_a_grammar_that_takes_hours_to_compile_is_given_up_and_others_are_compiled_meanwhile(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "SECONDS", 1)
    (tmp_path / "info.json").write_text(tokenizer_info(folder))
    compiling = grammars.Grammars(tmp_path / "info.json", VOCAB)
    properties: dict[str, Any] = {f"p{number}": {} for number in range(3000)}  # any of them, in 2 ** 3000 combinations
    bomb = compiling.compile(Guide("json_schema", json.dumps({"type": "object", "properties": properties})))
    assert compiling.compile(Guide("regex", "[ab]")).result(60).memory_size_bytes > 0
    with pytest.raises(RequestRefused, match=r"takes more than 1 s of processor time or 1024 MB"):
        bomb.result(60)
    # The process that lost a child goes on.
    assert compiling.compile(Guide("regex", "[ac]")).result(60).memory_size_bytes > 0
    compiling.close()


def test_an_ambiguous_grammar_is_ended_when_it_has_taken_its_time(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "ALL_SECONDS", 0.05)
    only_a = np.where(np.arange(VOCAB) == 2 + sorted(ByteLevel.alphabet()).index("a"), 100, 0).astype(np.float32)
    asked = request(0, "ebnf_grammar", 'root ::= root root | "a" | ""', embedding_bias=only_a)
    outputs = run(runtime, asked)[0]
    assert outputs[-1].finish == "refused"
    assert "takes too long to follow" in outputs[-1].refusal
    assert len(outputs) < 400


@pytest.mark.parametrize("end_id", [0, END])
def test_a_grammar_that_no_answer_can_complete_ends_the_answer(runtime: Runtime, end_id: int) -> None:
    """Where a mask allows no token the likeliest one is token 0, which may be the end token."""
    for text, most in (('root ::= root "a"', 0), ('root ::= "ab" rest\nrest ::= rest "c"', 2)):
        outputs = run(runtime, request(0, "ebnf_grammar", text, end_id=end_id))[0]
        assert outputs[-1].finish == "refused"
        assert "guided_decoding_guide: its grammar allows no token here" in outputs[-1].refusal
        assert sum(len(output.tokens) for output in outputs) <= most


def test_what_is_refused_before_it_is_compiled(runtime: Runtime) -> None:
    for guide, telling in (
        (Guide("json_schema", "x" * 70_000), "70000 bytes"),
        (Guide("lark"), "no type of a guide is called 'lark'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(RequestRefused, match=telling):
            runtime.submit(Request(id=0, prompt=(5,), max_tokens=3, guide=guide))
    assert not runtime.has_work


def test_a_request_that_is_cancelled_while_its_grammar_is_compiled(runtime: Runtime) -> None:
    runtime.submit(request(0, "regex", "[ab]{9}"))
    runtime.cancel(0)
    assert [output.finish for output in runtime.step()] == ["cancelled"]
    assert not runtime.has_work


def test_a_compiling_process_that_was_just_killed_is_started_again(
    compiling: grammars.Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling.compile(Guide("regex", "[ab]x")).result()
    killed = compiling._process
    assert killed is not None
    killed.kill()
    killed.wait()
    monkeypatch.setattr(killed, "poll", lambda: None)  # as a moment before
    assert compiling.compile(Guide("regex", "[ab]y")).result().memory_size_bytes > 0
    assert compiling._process is not killed


def test_a_grammar_whose_compilation_was_ended_is_compiled_for_the_next_request(
    compiling: grammars.Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = Guide("regex", "[ab]z")
    with monkeypatch.context() as killed:
        killed.setattr(compiling, "_ask", lambda guide: b"")
        with pytest.raises(RequestRefused, match=r"takes more than 10 s of processor time or 1024 MB of memory"):
            compiling.compile(guide).result()
    assert compiling.compile(guide).result().memory_size_bytes > 0


def test_a_grammar_that_does_not_arrive_whole_fails_its_own_request_alone(
    runtime: Runtime, compiling: grammars.Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(guide: Guide) -> bytes:
        raise OSError(12, "Cannot allocate memory")

    free = Request(id="free", prompt=(5, 6, 7), max_tokens=3)
    for number, ask, cause in ((0, lambda guide: b'\1{"cut": [1,', RuntimeError), (1, no_process, OSError)):
        monkeypatch.setattr(compiling, "_ask", ask)
        seen = run(runtime, request(number, "regex", "[ab]w"), free)
        assert [(output.finish, output.failed, output.refusal) for output in seen[number]] == [
            ("refused", True, "guided_decoding_guide: its grammar was not compiled; the server's log says why")
        ]
        assert isinstance(seen[number][0].cause, cause)
        assert [output.finish for output in seen["free"]] == [None, None, "length"]
