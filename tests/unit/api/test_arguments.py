"""Arguments of the Python API: wrong ones are refused by name, and a path is taken wherever a text names a file."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import trtpipe
from tests.support.factories import hf_folder
from trtpipe.pipeline.api.arguments import KINDS
from trtpipe.pipeline.api.bench_options import choose
from trtpipe.pipeline.serving import serve as serving

# A client of no server: its arguments are looked at first.
CLIENT = trtpipe.Client.__new__(trtpipe.Client)
TEXT, WHOLE, PATH = "give a text", "give a whole number", "give a text or a path"
# Annotations that are not checked: what only our own commands give, and any value.
UNCHECKED = {"Any", "Artefact", "Progress", "Reporter"}


@pytest.mark.parametrize(
    ("function", "arguments", "name", "remedy"),
    [
        (trtpipe.build, ["smollm2-cpu"], "spec",
         "give what `trtpipe.settings` returns, or recipe=... or model=... instead"),
        (trtpipe.build, {"folder": 5}, "folder", PATH),
        (trtpipe.build, {"model": 5}, "model", PATH),
        (trtpipe.build, {"until": 5}, "until", TEXT),
        (trtpipe.build, {"verify": "no"}, "verify", "give True or False"),
        (trtpipe.build, {"given": ["engine"]}, "given", "give a mapping"),
        (trtpipe.build, {"store": "s"}, "store", "give a store"),
        (trtpipe.build, {"trust_key": "key.pem"}, "trust_key", "give a list of texts or paths"),
        (trtpipe.settings, {"recipe": 5}, "recipe", PATH),
        (trtpipe.settings, {"gpu": Path("cpu")}, "gpu", TEXT),
        (trtpipe.settings, {"tp": "a"}, "tp", WHOLE),
        (trtpipe.settings, {"tp": True}, "tp", WHOLE),
        (trtpipe.settings, {"tasks": "a.yaml"}, "tasks", "give a list of texts or paths"),
        (trtpipe.settings, {"lora": ["a"]}, "lora", 'give a mapping, such as {"support": "adapters/support"}'),
        (trtpipe.settings, {"set": "a=4"}, "set", 'give a mapping, such as {"build.max_batch_size": 16}'),
        (trtpipe.settings, {"set": {5: 4}}, "set", 'give a mapping, such as {"build.max_batch_size": 16}'),
        (trtpipe.plan, [None], "model", PATH),
        (trtpipe.plan, {"model": "m", "gpu": 5}, "gpu", "give a text or a list of texts"),
        (trtpipe.plan, {"model": "m", "dtype": [8]}, "dtype", "give a text or a list of texts"),
        (trtpipe.plan, {"model": "m", "tp": "a"}, "tp", "give a whole number or a list of whole numbers"),
        (trtpipe.plan, {"model": "m", "rate": "x"}, "rate", "give a number"),
        (trtpipe.plan, {"model": "m", "input_tokens": 1.5}, "input_tokens", "give a whole number or a text"),
        (trtpipe.plan, {"model": "m", "price": [2.5]}, "price", 'give a mapping, such as {"h100": 2.5}'),
        (trtpipe.plan, {"model": "m", "price": {"h100": "x"}}, "price", 'give a mapping, such as {"h100": 2.5}'),
        (trtpipe.check, [5], "repository", PATH),
        (trtpipe.check, {"repository": "r", "toolchain": 1.2}, "toolchain", TEXT),
        (trtpipe.migrate, {"folder": 5, "to": "vllm"}, "folder", PATH),
        (trtpipe.migrate, {"folder": "f", "to": "vllm", "tp": "a"}, "tp", WHOLE),
        (trtpipe.tune, {"target": 5, "slo": "ttft:1s"}, "target", PATH),
        (trtpipe.tune, {"target": "t", "slo": 200}, "slo", 'give a text or a list of texts, such as "ttft:p99<200ms"'),
        (trtpipe.tune, {"target": "t", "slo": [], "minutes": "x"}, "minutes", "give a number"),
        (trtpipe.tune, {"target": "t", "slo": [], "price": {"h100": 2}}, "price", "give a number"),
        (trtpipe.tune, {"target": "t", "slo": [], "note": "x"}, "note", "give a function"),
        (trtpipe.prove, [5], "model", PATH),
        (trtpipe.prove, {"output": 5}, "output", PATH),
        (trtpipe.prove, {"dtype": 8}, "dtype", "give a text or a list of texts"),
        (trtpipe.serve, [5], "target", "give a text, a path or a list of texts or paths"),
        (trtpipe.serve, {"http_port": "8000"}, "http_port", WHOLE),
        (trtpipe.serve, {"gpus": 0}, "gpus", "give a list of whole numbers"),
        (trtpipe.serve, {"gpus": b"01"}, "gpus", "give a list of whole numbers"),
        (trtpipe.Client, [5], "target", PATH),
        (trtpipe.Client, {"server": 5}, "server", TEXT),
        (CLIENT.chat, [5], "messages",
         'give a text or a list of mappings, such as [{"role": "user", "content": "Hello"}]'),
        (CLIENT.generate, [None], "prompt", TEXT),
        (CLIENT.generate, {"prompt": "p", "max_tokens": "x"}, "max_tokens", WHOLE),
        (CLIENT.stream, {"prompt": "p", "stop": "END"}, "stop", "give a list of texts"),
        (CLIENT.stream, {"prompt": "p", "top_p": "x"}, "top_p", "give a number"),
        (trtpipe.bench, [5], "target", "give a text, a path or a client"),
        (trtpipe.bench, {"report": 5}, "report", PATH),
        (trtpipe.bench, {"progress": 5}, "progress", "give a function"),
        (trtpipe.bench, {"concurrency": "a"}, "concurrency", "give a whole number or a list of whole numbers"),
        (trtpipe.bench, {"rate": [1, "b"]}, "rate", "give a number or a list of numbers"),
        (trtpipe.bench, {"rate": {1: 2}}, "rate", "give a number or a list of numbers"),
        (trtpipe.bench, {"duration": "10s"}, "duration", "give a number"),
        (trtpipe.bench, {"connections": "2"}, "connections", WHOLE),
        (trtpipe.bench, {"requests": 1.5}, "requests", WHOLE),
        (trtpipe.bench, {"slo": [2]}, "slo", 'give a text or a list of texts, such as "ttft:p99<200ms"'),
        (trtpipe.bench, {"protocol": 1}, "protocol", "give a text or a list of texts"),
        (trtpipe.bench, {"tokenizer": 1}, "tokenizer", PATH),
        (trtpipe.bench, {"load": 1}, "load", PATH),
        (trtpipe.bench, {"sampling": "top_p"}, "sampling", 'give a mapping, such as {"top_p": 0.9}'),
    ],
)  # fmt: skip
def test_an_argument_of_a_wrong_kind_is_named(function: Any, arguments: Any, name: str, remedy: str) -> None:
    value = arguments[0] if isinstance(arguments, list) else arguments[name]
    with pytest.raises(trtpipe.UsageError) as error:
        function(*arguments) if isinstance(arguments, list) else function(**arguments)
    assert str(error.value) == f"{name} is {value!r}; {remedy}"


def test_an_option_that_is_none_is_left_out_beside_a_spec() -> None:
    spec = trtpipe.settings(recipe="smollm2-cpu")
    with pytest.raises(trtpipe.UsageError, match="a spec and dtype are given; give one of them"):
        trtpipe.build(spec, gpu=None, dtype="fp32")
    with pytest.raises(trtpipe.UsageError, match="unknown stage 'none'"):
        trtpipe.build(spec, gpu=None, until="none")


def test_what_the_system_refuses_is_told_as_the_command_tells_it(in_folder: Path) -> None:
    long = "x" * 300  # a file's name has 255 characters at most
    Path("file").touch()
    for work in (lambda: trtpipe.check(long), lambda: trtpipe.plan(long), lambda: trtpipe.migrate(long, to="vllm")):
        with pytest.raises(trtpipe.HostError, match=r"File name too long; name another place$") as error:
            work()
        assert isinstance(error.value.__cause__, OSError)
    with pytest.raises(trtpipe.HostError, match=r"^file/run: Not a directory; name another place$"):
        trtpipe.build(model=hf_folder(in_folder / "tiny"), gpu="cpu", dtype="fp32", folder="file/run")
    with pytest.raises(trtpipe.HostError, match="File name too long"), trtpipe.serve(long):
        pass


def test_every_function_is_checked_and_every_annotation_is_known() -> None:
    client = (trtpipe.Client.__init__, trtpipe.Client.prompt, trtpipe.Client.stream)
    of_the_api = (getattr(trtpipe, name) for name in trtpipe.__all__)
    functions: list[Any] = [*client, *(one for one in of_the_api if isinstance(one, FunctionType))]
    annotations: set[str] = set()
    for function in functions:
        inner = inspect.unwrap(function)
        assert inner is not function, function
        annotations |= {kind for name, kind in inner.__annotations__.items() if name != "return"}
    options = {kind for kind in annotations if kind.startswith("Unpack[")}
    assert options == {"Unpack[BenchArguments]", "Unpack[BuildOptions]", "Unpack[Sampling]"}
    for one in (trtpipe.BenchArguments, trtpipe.BuildOptions, trtpipe.Sampling):
        annotations |= {kind.__forward_arg__ for kind in one.__annotations__.values()}
    nodes = [node for kind in annotations - options for node in ast.walk(ast.parse(kind))]
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    assert named <= KINDS.keys() | UNCHECKED


def test_settings_and_plans_of_paths(in_folder: Path) -> None:
    model = hf_folder(in_folder / "tiny", dtype="F32").relative_to(in_folder)
    recipe, load = in_folder / "own.yaml", in_folder / "load.yaml"
    recipe.write_text("gpu: h100\ndtype: bf16\n")
    load.write_text("load: {concurrency: 1}\nwork: {input_tokens: 16, output_tokens: 8}\n")
    spec = trtpipe.settings(recipe=recipe, model=model, load=load)
    assert spec.to_json() == trtpipe.settings(recipe=str(recipe), model=str(model), load=str(load)).to_json()
    demand = trtpipe.plan(model, gpu="h100", dtype="bf16", tp=1, load=load).question.demand
    assert demand.work.input_tokens == 16
    server = {"grpc_url": "localhost:8001", "protocol": "grpc", "tokenizer": "tokenizer.json"}
    assert choose(**server, load=load)[0] == choose(**server, load=str(load))[0]  # type: ignore[arg-type]
    (prompts := in_folder / "prompts.txt").write_text("Hello\n")
    assert choose(**server, prompts=str(prompts))[0].work.prompts == prompts  # type: ignore[arg-type]


@pytest.mark.process
def test_a_target_and_its_repository_as_paths(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_folder(in_folder / "tiny", dtype="F32")
    built = trtpipe.build(model=model, gpu="cpu", dtype="fp32", folder="elsewhere")
    assert (built.folder, built.target) == (in_folder / "elsewhere", "tiny.cpu.fp32")
    built = trtpipe.build(model=model, gpu="cpu", dtype="fp32", trust_origin=[Path("x")], trust_key=[])
    found: list[Any] = []

    def launch(targets: Any, *_: Any) -> Any:
        found.extend((one.name, one.folder) for one in targets)
        raise trtpipe.HostError("launched")

    monkeypatch.setattr(serving, "launch", launch)
    target = Path("runs") / built.target
    for served in (built.folder, target, Path(built.target), built.target, [target], built.repository):
        with pytest.raises(trtpipe.HostError, match="launched"), trtpipe.serve(served):
            pass
    assert found[:5] == [(built.target, built.repository)] * 5
    assert found[5][1] == built.repository
    with pytest.raises(trtpipe.UsageError, match="target is an empty list"), trtpipe.serve([]):
        pass
    assert trtpipe.check(target) == []
    with pytest.raises(trtpipe.UsageError, match="minutes"):
        trtpipe.tune(target, "ttft:1s", minutes=-1)
    with pytest.raises(trtpipe.UsageError, match="no target 'x'"):
        trtpipe.tune(Path("x"), "ttft:1s")
    with pytest.raises(trtpipe.UsageError, match="no server is running"):
        trtpipe.bench(target)
    with pytest.raises(trtpipe.UsageError, match="no server is running"):
        trtpipe.Client(target)
