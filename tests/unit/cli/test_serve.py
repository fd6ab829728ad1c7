"""`trtpipe serve` and the commands for servers, clusters and model repositories."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pwd
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trtpipe
from tests.unit.cli.conftest import Outcome, Run, remember, rows
from trtpipe.engines.errors import HostError, InputDataError, StageFailed, TrtpipeError, UsageError
from trtpipe.engines.files import write_json
from trtpipe.engines.passport import Passport
from trtpipe.pipeline.cli.console_serve import first_steps
from trtpipe.pipeline.serving import model_control, ports, serve, triton_package, tritonserver
from trtpipe.pipeline.serving.ports import Endpoints
from trtpipe.pipeline.serving.repositories import find_repository
from trtpipe.pipeline.serving.servers import find_running, running, starting
from trtpipe.pipeline.store.store import Store
from trtpipe.triton_repo.layout import ENGINE_FOLDER


def test_stop_without_servers_is_no_failure(run: Run) -> None:
    assert run("stop") == Outcome(0, "no server is running\n", "")


@pytest.mark.loopback
def test_a_taken_port_is_the_machine_s(build: Run, run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_package, "find_installation", lambda: None)
    assert build(model).status == 0
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        for taken, others in (("grpc", ("metrics", "openai")), ("openai", ("grpc", "metrics"))):
            free = [part for name in ("http", *others) for part in (f"--{name}-port", "0")]
            done = run("serve", f"--{taken}-port", port, *free)
            assert done.status == 4
            assert done.error() == (
                f"port {port} on 127.0.0.1 cannot be taken: Address already in use; "
                f"stop what listens there, or pass --{taken}-port 0 to choose a free one"
            )


def test_a_damaged_repository_is_refused_before_anything_starts(
    build: Run, run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_installation() -> None:
        raise StageFailed("the server is next")

    monkeypatch.setattr(triton_package, "find_installation", find_installation)
    assert build(model).status == 0
    shutil.copytree(Path("runs/tiny.cpu.fp32/repository").resolve(), "mine")
    config = Path("mine/postprocessing/config.pbtxt")
    config.chmod(0o644)
    text = config.read_text()
    config.write_text(text + "max_batch_size: many\n")
    mine = Path("mine").resolve()
    done = run("serve", "mine")
    assert done.status == 3
    line = len(text.splitlines()) + 1
    assert done.error() == (
        f"{mine} has 1 fault(s): postprocessing/config.pbtxt: line {line}, column 17: is not a model configuration: "
        f"Couldn't parse integer: many; run `trtpipe check {mine}` for all"
    )
    checked = run("check", "mine")
    assert checked.status == 3
    assert checked.error().startswith(f"mine has 1 fault(s): postprocessing/config.pbtxt: line {line}, column 17: is ")
    # What is only suspicious is served.
    config.write_text(text + 'parameters: { key: "no_such_thing" value: { string_value: "1" } }\n')
    assert run("check", "mine").out.startswith("warning  postprocessing/config.pbtxt: parameter no_such_thing")
    monkeypatch.setattr(ports, "choose_endpoints", lambda *ports: Endpoints(host="h", http=1, grpc=2, metrics=3))
    assert run("serve", "mine").error() == "the server is next"


def test_check_finds_other_bytes_of_the_same_length_in_a_target_as_serve_does(
    build: Run, run: Run, model: Path
) -> None:
    assert build(model).status == 0
    assert run("check", "tiny.cpu.fp32").status == 0
    (weights,) = Path("runs/tiny.cpu.fp32/repository/tensorrt_llm/1").glob("rank0*")
    weights = weights.resolve()
    weights.chmod(0o644)
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x40")
    served, checked = run("serve", "tiny.cpu.fp32"), run("check", "tiny.cpu.fp32")
    assert (served.status, checked.status) == (3, 3)
    damage = served.error().removeprefix("the repository of tiny.cpu.fp32 is damaged: ")
    assert weights.name in damage
    assert checked.error() == f"tiny.cpu.fp32 has 1 fault(s): .: is damaged: {damage}"


@pytest.mark.loopback
def test_a_target_that_is_served_is_served_once_more_by_another_name(
    build: Run, run: Run, model: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_installation() -> None:
        raise StageFailed("the server is next")

    monkeypatch.setattr(triton_package, "find_installation", find_installation)
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    assert build(model).status == 0
    remember(store, "tiny.cpu.fp32")
    ports = [part for name in ("http", "grpc", "metrics", "openai") for part in (f"--{name}-port", "0")]
    with monkeypatch.context() as unchecked:
        unchecked.setattr(serve, "check_repository", lambda folder: pytest.fail("it is checked first"))
        refused = run("serve", *ports)
    assert refused.status == 2
    assert refused.error() == (
        "tiny.cpu.fp32 is already served at http://127.0.0.1:1; "
        "run `trtpipe stop` first, or serve it as NAME: `ln -s tiny.cpu.fp32 runs/NAME`"
    )
    Path("runs/second").symlink_to("tiny.cpu.fp32")
    assert run("serve", "second", *ports).error() == "the server is next"
    remember(store, "second", source=Path("runs/tiny.cpu.fp32").absolute())
    remember(store, "tiny.cpu.fp32", source=Path("runs/tiny.cpu.fp32").absolute())
    assert [row[-1] for row in rows(run("ls").out)[1:]] == ["second, tiny.cpu.fp32"] * 2
    assert run("rm", "tiny.cpu.fp32").error() == (
        "tiny.cpu.fp32 is served; run `trtpipe stop second` and `trtpipe stop tiny.cpu.fp32` first"
    )
    assert (store.home / "servers" / "second" / "models" / "tensorrt_llm").is_dir()


@pytest.mark.loopback
def test_keys_and_certificate_are_read_before_anything_starts(
    build: Run, run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find_installation() -> None:
        raise StageFailed("the server is next")

    monkeypatch.setattr(triton_package, "find_installation", find_installation)
    assert build(model).status == 0
    ports = [part for name in ("http", "grpc", "metrics", "openai") for part in (f"--{name}-port", "0")]

    def refused(*arguments: object) -> tuple[int, str]:
        done = run("serve", *ports, *arguments)
        return done.status, done.error()

    empty = tmp_path / "empty"
    empty.touch()
    assert refused("--api-keys-file", empty) == (3, f"{empty} holds no API key; write one key a line")
    with monkeypatch.context() as patch:
        for none in ("", " , "):  # as of "$A,$B" where both are unset
            patch.setenv("TRTPIPE_API_KEYS", none)
            words = "TRTPIPE_API_KEYS holds no API key; write keys with commas between them, or unset it"
            assert refused() == (3, words)
    assert refused("--tls-cert", empty) == (2, "TLS needs a certificate and a key; give both files or neither")
    status, words = refused("--tls-cert", empty, "--tls-key", empty)
    assert (status, words.partition(":")[0]) == (3, f"{empty} and {empty} are not a certificate and its key")
    assert words.endswith("; give PEM files that belong together, the key without a password")
    assert "starting" not in run("serve", *ports, "--api-keys-file", empty).err
    assert run("serve", *ports, "--front", "nativ").err == "error: unknown front 'nativ'; did you mean 'native'?\n"
    assert run("serve", *ports).error() == "the server is next"


def test_an_engine_that_belongs_elsewhere_exits_with_6(
    run: Run, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = in_folder / "repository-of-mine"
    (repository / "tensorrt_llm").mkdir(parents=True)
    (repository / "tensorrt_llm" / "config.pbtxt").touch()
    engine = repository / "tensorrt_llm" / "1"
    engine.mkdir(parents=True)
    done = run("serve", repository)
    assert done.status == 6
    assert done.error().startswith(f"{engine} has no passport.json: ")
    passport = Passport(
        runtime="tensorrt_llm", gpu="h100", sm=90, sms=(90,), toolchain="1.2.1", image="image:tag", versions={},
        tp_size=1, pp_size=1, dtype="bfloat16", quant_algo=None, kv_cache_quant_algo=None, rank_bytes=1 << 30,
        checkpoint="0", build_config={},
    )  # fmt: skip
    write_json(engine / "passport.json", dataclasses.asdict(passport))
    monkeypatch.setenv("PATH", "")
    for command in ("serve", "passport"):
        done = run(command, repository)
        assert done.status == 6
        assert done.error() == (
            f"the engine in {repository} does not run on this machine: it is for h100 (SM90), and this machine has no "
            "NVIDIA GPU; serve it on h100 (SM90), or build for the GPU here with `trtpipe build --gpu`"
        )


@pytest.mark.parametrize("target", ["t.cpu.bf16", "runs/t.cpu.bf16", "./runs/t.cpu.bf16/", "{}/runs/t.cpu.bf16", None])
def test_a_run_is_found_by_name_or_path_and_named_without_a_slash(in_folder: Path, target: str | None) -> None:
    # The name becomes a folder and a log of the server: a path in it would reach outside the store.
    repository = in_folder / "artefact"
    (repository / "tensorrt_llm").mkdir(parents=True)
    (repository / "tensorrt_llm" / "config.pbtxt").touch()
    (in_folder / "runs" / "t.cpu.bf16").mkdir(parents=True)
    (in_folder / "runs" / "t.cpu.bf16" / "repository").symlink_to(repository)
    found = find_repository(target if target is None else target.format(in_folder))
    assert found == ("t.cpu.bf16", repository, in_folder / "runs" / "t.cpu.bf16")


def test_a_repository_is_found_by_path_also_from_within(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = in_folder / "mine"
    (repository / "tensorrt_llm").mkdir(parents=True)
    (repository / "tensorrt_llm" / "config.pbtxt").touch()
    (repository / "runs").mkdir()
    assert find_repository(str(repository)) == ("mine", repository, repository)
    monkeypatch.chdir(repository)
    assert find_repository(".") == ("mine", repository, repository)


def test_a_link_that_leads_out_of_a_container_is_told(in_folder: Path) -> None:
    (in_folder / "runs" / "t").mkdir(parents=True)
    (in_folder / "runs" / "t" / "repository").symlink_to("/gone/files")
    for name in ("runs/t/repository", str(in_folder / "runs" / "t" / "repository")):
        with pytest.raises(InputDataError, match=r"it is a link to /gone/files, which is not there.*`cp -rL "):
            find_repository(name)


def test_the_newest_run_is_served(in_folder: Path) -> None:
    for name in ("old", "newest", "older"):
        (in_folder / name / "tensorrt_llm").mkdir(parents=True)
        (in_folder / name / "tensorrt_llm" / "config.pbtxt").touch()
        link = in_folder / "runs" / name / "repository"
        link.parent.mkdir(parents=True)
        link.symlink_to(in_folder / name)
        os.utime(link, (1, {"older": 1, "old": 2, "newest": 3}[name]), follow_symlinks=False)
    assert find_repository(None) == ("newest", in_folder / "newest", in_folder / "runs" / "newest")


def test_which_server_is_meant(store: Store, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    remember(store, "a")
    assert find_running(store, None).name == "a"
    assert first_steps(find_running(store, None))[0].endswith('?"')
    assert find_running(store, None).find(None).tokenizer == Path("/r/preprocessing/1/tokenizer")
    remember(store, "b")
    assert find_running(store, "b").name == "b"
    assert first_steps(find_running(store, "b"))[0].endswith(" --server b")
    with pytest.raises(UsageError) as caught:
        find_running(store, None)
    assert str(caught.value) == "several servers are running; name one with --server: a, b"
    assert find_running(store, None, "b").name == find_running(store, None, "runs/b").name == "b"
    assert trtpipe.Client("b").server == "b"
    with pytest.raises(UsageError, match="several servers are running"):
        find_running(store, None, "another")
    for words in (["generate", "Hello", "--server", "c"], ["lora", "list", "--server", "c"], ["stop", "c"]):
        assert run(*words).error() == "no server named 'c' is running; name one that runs: a, b"
    table = rows(run("ps").out)
    assert table[:2] == [["server", "state", "http", "openai"], ["a", "running", "http://127.0.0.1:1", "-"]]
    assert run("stop").error() == "several servers are running; name one, or pass --all: a, b"


def test_a_server_of_another_machine_that_shares_the_store_is_named(store: Store, run: Run) -> None:
    remember(store, "a")
    record = store.home / "servers" / "a.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "machine": "gpu-7"}))
    assert run("stop", "a").error() == (
        "no server named 'a' is running: a was started on gpu-7, which shares the store; "
        f"give the command on gpu-7, or remove {record} if that machine is gone"
    )
    with (
        store.alone("serves-a", HostError("")),  # as the process there does
        pytest.raises(HostError) as caught,
        starting(store, "a"),
    ):
        pass
    assert str(caught.value) == (
        "a is already served on gpu-7, which shares the store; "
        f"run `trtpipe stop a` on it first, or remove {record} if that machine is gone"
    )
    assert record.exists()
    for name in ("a", "b"):  # what serves no longer is no obstacle
        with starting(store, name):
            assert not store.held(f"serves-{name}")
        assert store.held(f"serves-{name}")


def test_stop_ends_the_only_server_the_named_or_all(store: Store, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    monkeypatch.setattr(tritonserver, "end", lambda pid, program, drain_s: True)
    remember(store, "a")
    assert run("stop").out == "stopped a\n"
    for name in ("a", "b", "c"):
        remember(store, name)
    (stopped,) = json.loads(run("stop", "b", "--json").out)
    assert (stopped["server"], stopped["http"], stopped["models"]) == ("b", "http://127.0.0.1:1", {"b": ["b"]})
    assert (stopped["state"], stopped["pid"]) == ("stopped", None)
    assert run("stop", "a", "--all").error() == "--all takes no name, got 'a'; leave out one of the two"
    assert run("stop", "--all").out == "stopped a\nstopped c\n"
    assert running(store) == []


def test_a_stop_that_is_interrupted_leaves_the_record_of_a_server_that_its_watchdog_ends(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtpipe.pipeline.serving import serve, servers

    def interrupted(server: servers.Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    monkeypatch.setattr(serve, "end_watcher", interrupted)
    monkeypatch.setattr(serve, "end", lambda server: pytest.fail("it was not asked to end yet"))
    cleaned: list[str] = []
    monkeypatch.setattr(servers, "clean_up", lambda store, server: cleaned.append(server.name))
    remember(store, "a")
    with pytest.raises(KeyboardInterrupt):
        serve.stop(store, "a")
    assert ([server.name for server in running(store)], cleaned) == (["a"], [])
    # Without a watchdog this command ends the server, and a second Ctrl-C kills it.
    monkeypatch.setattr(serve, "end_watcher", lambda server: None)
    monkeypatch.setattr(serve, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve.stop(store, "a")
    assert (running(store), cleaned) == ([], ["a"])


def test_a_server_that_died_is_remembered_until_stop_names_it(store: Store, run: Run) -> None:
    log = store.home / "serve.log"
    remember(store, "a", log=log)
    log.write_text("E1125 12:00:00.0 1 x.cc:1] out of memory\n")
    for _ in range(2):
        assert run("ps").out.splitlines()[-1] == f"a died: out of memory; its log is {log}"
    (told,) = json.loads(run("ps", "--json").out)
    assert (told["state"], told["pid"], told["died"], told["log"]) == ("died", None, "out of memory", str(log))
    told = run("generate", "Hello")
    assert (told.status, told.error()) == (
        2, f"no server is running: a died: out of memory; see {log}; run `trtpipe serve`"
    )  # fmt: skip
    assert run("stop").out == "no server is running\n"
    for name, words in (("a", "why it died\n"), ("b", "another server's\n")):
        (store.home / "logs").mkdir(exist_ok=True)
        (store.home / "logs" / f"serve-{name}.log").write_text(words)
    assert run("logs").out == "why it died\n"
    assert run("stop", "a").out == "dropped a, which had died\n"
    assert run("ps").out == f"no server is running that was started from the store in {store.home}\n"


def test_what_died_is_not_dropped_while_it_is_started_again(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(store, "a")
    assert running(store) == []
    monkeypatch.setattr(tritonserver, "end_stubs", lambda backends: pytest.fail("they are of the one that is started"))
    with store.alone("serve-a", HostError("")):  # as `serve` does
        assert run("stop", "a").error() == (
            "a is being started by another command, which may be `trtpipe prove`; wait until `trtpipe ps` lists it, or "
            "until that command has ended"
        )
    assert run("stop", "a").out == "dropped a, which had died\n"


def test_a_server_that_died_is_told_where_its_record_cannot_be_written(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtpipe.pipeline.serving import servers

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    remember(store, "a")
    remember(store, "b", pid=2)
    monkeypatch.setattr(servers, "write_whole", full)
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: pid == 2)
    assert [row[:2] for row in rows(run("ps").out)[1:3]] == [["a", "died"], ["b", "running"]]


def test_processes_of_before_a_reboot_are_not_those_of_the_same_number(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtpipe.pipeline.gateway import process
    from trtpipe.pipeline.serving import servers

    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    monkeypatch.setattr(servers, "words_of", lambda pid: [b"trtpipe", b"serve"])
    monkeypatch.setattr(process, "end", lambda pid, drain_s: pytest.fail("it is another server's gateway"))
    monkeypatch.setattr(servers, "BOOT", tmp_path / "boot")
    servers.BOOT.write_text("first\n")
    remember(store, "a", gateway_pid=4, gateway_url="http://127.0.0.1:9000")
    (found,) = running(store)
    assert (found.boot, servers.watched(dataclasses.replace(found, watcher=5))) == ("first", True)
    servers.BOOT.write_text("second\n")
    assert not servers.watched(dataclasses.replace(found, watcher=5))
    assert running(store) == []
    record = store.home / "servers" / "a.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "died": None, "boot": "second"}))
    assert len(running(store)) == 1
    earlier = json.loads(record.read_text())
    del earlier["boot"]  # as earlier versions wrote it
    record.write_text(json.dumps(earlier))
    assert len(running(store)) == 1


def test_a_container_that_a_killed_server_left_is_removed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtpipe.pipeline.serving import servers

    class Docker:
        def __init__(self, image: str) -> None: ...

        def remove_left(self, out: Path) -> None:
            removed.append(out)
            raise HostError("Docker cannot be reached")

    removed: list[Path] = []
    monkeypatch.setattr(tritonserver, "DockerExecutor", Docker)
    remember(store, "a")
    (died,) = servers.recorded(store)
    assert removed == []
    for native in ("", "trtllm-serve"):
        servers.remember(store, dataclasses.replace(died, died=None, docker=True, native=native))
        assert running(store) == []
    assert removed == [store.home / "servers" / "a" / folder for folder in ("models", "native")]


def test_a_server_of_another_user_is_not_changed(store: Store, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What root writes into its folder, that user could not replace at the next start."""
    from trtpipe.pipeline.serving import adapters

    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    remember(store, "a", pid=os.getpid())
    owner = pwd.getpwuid(os.geteuid()).pw_name
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    line = (
        f"a is served by {owner}: {owner} could not replace what #54321 writes into its folder; "
        f"give the command as that user, as with `sudo -u {owner}`"
    )
    assert run("reload").error() == line
    (server,) = running(store)
    for change in (
        lambda: adapters.add(store, server, server.served[0], "x", Path("/x")),
        lambda: adapters.remove(store, server, server.served[0], "x"),
    ):
        with pytest.raises(UsageError) as refused:
            change()
        assert str(refused.value) == line


def test_a_server_that_is_started_again_is_called_so(store: Store, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtpipe.pipeline.serving import servers

    remember(store, "a")
    monkeypatch.setattr(servers, "watched", lambda server: True)
    (told,) = json.loads(run("ps", "--json").out)
    assert (told["state"], told["pid"]) == ("restarting", None)
    assert rows(run("ps").out)[1][:2] == ["a", "restarting"]
    again = "a is being started again; wait until `trtpipe ps` says running"
    for words in (["generate", "Hello"], ["bench", "--server", "a"], ["top", "--once"]):
        done = run(*words)
        assert (done.status, done.error()) == (4, again)


def test_a_server_whose_gateway_and_watchdog_have_ended_is_called_so(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtpipe.pipeline.serving import servers

    remember(store, "a", gateway_pid=servers.MAX_PID - 1, gateway_url="http://127.0.0.1:9000")
    monkeypatch.setattr(servers.Server, "alive", True)
    (told,) = json.loads(run("ps", "--json").out)
    assert (told["state"], told["died"]) == ("no gateway", None)
    out = run("ps").out
    assert "9000" not in out
    assert "the gateway of a has ended: stop the server, and serve it again\n" in out
    monkeypatch.setattr(servers, "watched", lambda server: True)
    assert rows(run("ps").out)[1][:2] == ["a", "restarting"]


@pytest.mark.loopback
def test_a_gateway_alone_tells_who_reaches_it_and_whether_its_triton_answers(
    build: Run, run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from trtpipe.pipeline.gateway import supervisor

    monkeypatch.setattr(supervisor, "serve", lambda options, **calls: None)
    assert build(model).status == 0
    (tmp_path / "keys").write_text("key\n")
    open_to_all = "warning: whoever reaches 0.0.0.0 can use the gateway: it asks for no key; pass --api-keys-file\n"

    def told(triton: str, *more: object) -> str:
        done = run("gateway", "tiny.cpu.fp32", "--triton", triton, *more)
        assert done.status == 0, done.err
        return done.err

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert told(f"grpc://{address}/", "--host", "0.0.0.0") == open_to_all
        assert told(address, "--host", "0.0.0.0", "--api-keys-file", tmp_path / "keys") == ""
        assert told(address, "--host", "::1") == ""
    assert told(address) == (
        f"nothing answers at {address} yet: requests fail until a Triton does; --triton names another\n"
    )


def test_a_gateway_is_deployed_from_an_image_or_not_at_all(in_folder: Path, run: Run) -> None:
    from tests.unit.engines.test_passport import passport, target

    (in_folder / "r" / "tensorrt_llm").mkdir(parents=True)
    (in_folder / "r" / "tensorrt_llm" / "config.pbtxt").touch()
    (in_folder / "r" / ENGINE_FOLDER).mkdir(parents=True)
    passport(target()).write(in_folder / "r" / ENGINE_FOLDER)
    deploy = ("deploy", "k8s", "r", "--pvc", "models", "-o")
    assert "give --gateway-image" in run(*deploy, "one").error()
    assert run(*deploy, "one", "--set", "pvc=other").error() == (
        "--set pvc says what an option says already; leave out --set pvc"
    )
    settings = ("--set", 'tolerations=["spot:NoSchedule"]', "--set", "api_keys=false")
    assert run(*deploy, "one", "--gateway-image", "ours:1", *settings).status == 0
    written = (in_folder / "one" / "base" / "deployment.yaml").read_text()
    assert "key: spot" in written
    assert ("image: ours:1" in written, "--api-keys-file" in written) == (True, False)
    assert written.count("trtpipe/repository: ") == 1
    assert "helm install NAME three/chart -n llm " in run(*deploy, "three", "--no-openai", "--namespace", "llm").out
    told = json.loads(run(*deploy, "two", "--no-openai", "--json").out)
    assert (told["folder"], "base/deployment.yaml" in told["files"]) == ("two", True)
    assert "gateway" not in (in_folder / "two" / "base" / "deployment.yaml").read_text()


def test_a_repository_is_deployed_that_serve_would_serve(in_folder: Path, run: Run) -> None:
    from tests.unit.engines.test_passport import passport, target

    script = in_folder / "r" / "preprocessing" / "1" / "model.py"
    for folder in (script.parent, in_folder / "r" / ENGINE_FOLDER):
        folder.mkdir(parents=True)
    passport(target()).write(in_folder / "r" / ENGINE_FOLDER)
    for name in ("tensorrt_llm", "preprocessing"):
        (in_folder / "r" / name / "config.pbtxt").touch()
    script.write_text("print()\n")
    deploy = ("deploy", "k8s", "r", "--pvc", "models", "--no-openai", "-o", "out")
    refused = run(*deploy)
    assert refused.status == 6
    assert "r holds code that is of no known template: preprocessing/1/model.py is not a file of a known" in refused.err
    assert "then pass --allow-model-code; or build it again, if another version of trtpipe made it" in refused.err
    assert not (in_folder / "out").exists()
    assert run(*deploy, "--allow-model-code").status == 0


def test_monitoring_scrapes_the_server_that_runs(
    in_folder: Path, store: Store, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import yaml

    from trtpipe.pipeline.serving import servers

    (in_folder / "a" / "tensorrt_llm").mkdir(parents=True)
    (in_folder / "a" / "tensorrt_llm" / "config.pbtxt").touch()

    def scraped(*arguments: str) -> list[list[str]]:
        assert run("monitoring", "a", *arguments).status == 0
        config = yaml.safe_load((in_folder / "monitoring" / "prometheus.yml").read_text())
        return [job["static_configs"][0]["targets"] for job in config["scrape_configs"]]

    assert scraped() == [["localhost:8002"], ["localhost:9000"]]
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    remember(store, "a")
    (server,) = running(store)
    servers.remember(store, dataclasses.replace(server, gateway_url="http://127.0.0.1:4"))
    remember(store, "b")
    assert scraped() == [["127.0.0.1:3"], ["127.0.0.1:4"]]
    servers.remember(store, dataclasses.replace(server, gateway_url="https://127.0.0.1:4", keyed=True))
    assert "--api-key-file" in run("monitoring", "a").err
    assert run("monitoring", "a", "--api-key-file", "/keys").err == ""
    told = json.loads(run("monitoring", "a", "--json").out)
    assert (told["folder"], "prometheus.yml" in told["files"]) == ("monitoring", True)
    assert scraped("--metrics", "x:1,y:2", "--gateways", "z:3") == [["x:1", "y:2"], ["z:3"]]
    assert scraped("--metrics", "x:1", "--gateways", "") == [["x:1"]]
    servers.remember(store, dataclasses.replace(server, gateway_url="http://127.0.0.1:4"))
    assert scraped("--metrics", "x:1") == [["x:1"]]  # the gateway here is of the server here
    assert "name those beside these servers by --gateways" in run("monitoring", "a", "--metrics", "x:1").err
    assert "'not a host' is not the address" in run("monitoring", "a", "--metrics", "not a host").error()


def test_monitoring_misses_what_the_server_was_to_load_and_no_gateway_that_there_is_not(
    in_folder: Path, store: Store, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import yaml

    from trtpipe.pipeline.serving import servers

    for path in ("a/tensorrt_llm", "b/ensemble", "b/tensorrt_llm"):
        (in_folder / path).mkdir(parents=True)
        (in_folder / path / "config.pbtxt").touch()

    def written(*arguments: str) -> tuple[list[str], list[str]]:
        """Jobs, and models that are missed when they are not loaded."""
        assert run("monitoring", "a", *arguments).status == 0
        config = yaml.safe_load((in_folder / "monitoring" / "prometheus.yml").read_text())
        (group,) = yaml.safe_load((in_folder / "monitoring" / "alerts.yml").read_text())["groups"]
        missed = [rule["labels"]["model"] for rule in group["rules"] if rule["alert"] == "TrtpipeModelMissing"]
        return [job["job_name"] for job in config["scrape_configs"]], missed

    assert written() == (["trtpipe", "trtpipe-gateway"], ["tensorrt_llm"])
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    remember(store, "a+b")
    (server,) = running(store)
    served = tuple(
        dataclasses.replace(one, prefix=f"{one.name}.", repository=in_folder / one.name) for one in server.served
    )
    servers.remember(store, dataclasses.replace(server, served=served))
    assert written() == (["trtpipe"], ["a.tensorrt_llm", "b.ensemble", "b.tensorrt_llm"])
    assert written("--gateways", "x:9000")[0] == ["trtpipe", "trtpipe-gateway"]
    servers.remember(store, dataclasses.replace(server, served=served[:1], native="vllm", gateway_url="http://x:9000"))
    assert run("monitoring", "a").error() == (
        "a is served by its runtime's own server: that publishes none of Triton's metrics, which the dashboard and the "
        "alerts are about; serve it with --front triton, or name other servers by --metrics"
    )
    assert run("top").error() == (
        "a+b is served by its runtime's own server: that publishes none of Triton's metrics; "
        "read http://127.0.0.1:3/metrics"
    )
    assert run("reload").error() == (
        "a+b is served by its runtime's own server: that cannot change its model; stop it, and serve the new one"
    )
    assert written("--metrics", "x:8002") == (["trtpipe"], ["tensorrt_llm"])


@pytest.mark.parametrize(
    ("whys", "starts", "ready"),
    [
        (["it crashed: boost::interprocess::lock_exception", ""], 2, True),
        (["it crashed: boost::interprocess::lock_exception"] * 2, 2, False),
        (["model x: no such file"], 1, False),
    ],
)
def test_a_server_that_broke_down_at_its_start_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, whys: list[str], starts: int, ready: bool
) -> None:
    from trtpipe.pipeline.serving.serve import start_until_ready

    left = list(whys)
    ended: list[Any] = []
    notes: list[str] = []

    def wait_ready(process: Any, endpoints: Endpoints, log: Path, tick: Any, *, seconds: int) -> None:
        assert seconds == 1800
        why = left.pop(0)
        if why:
            raise StageFailed("tritonserver does not start", why=why)

    monkeypatch.setattr(model_control, "wait_ready", wait_ready)
    monkeypatch.setattr(tritonserver, "end", ended.append)
    process: Any = SimpleNamespace(pid=1)
    points = Endpoints(host="127.0.0.1", http=1, grpc=2, metrics=3)

    def start() -> Any:
        return process

    if ready:
        assert start_until_ready(start, points, tmp_path / "log", notes.append, seconds=1800) is process
    else:
        with pytest.raises(StageFailed, match="tritonserver does not start"):
            start_until_ready(start, points, tmp_path / "log", notes.append, seconds=1800)
    assert len(whys) - len(left) == starts
    assert len(ended) == starts - ready
    assert len(notes) == starts - 1


@pytest.mark.parametrize(
    ("terminal", "asked", "status"),
    [(True, ["one", "long", "busy", "two", "gone"], 4), (False, ["one", "long"], 2)],
)
def test_a_question_that_is_refused_ends_no_chat_in_a_terminal(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch, *, terminal: bool, asked: list[str], status: int
) -> None:
    from trtpipe.pipeline.cli import chat
    from trtpipe.pipeline.serving.chat import Conversation
    from trtpipe.pipeline.serving.openai_client import ContextFull

    lines = ["one", "long", "busy", "two", "gone", "three"]
    failures: dict[str, TrtpipeError] = {
        "long": ContextFull("it is refused", why="60 tokens"),
        "busy": StageFailed("it is refused", why="the server is full"),
        "gone": HostError("it does not answer"),
    }
    heard = []

    def ask(talk: Conversation, text: str) -> Iterator[str]:
        heard.append(text)
        if text in failures:
            raise failures[text]
        yield f"to {text}"

    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    monkeypatch.setattr(Conversation, "ask", ask)
    monkeypatch.setattr(chat, "_typed", lambda: iter(lines))
    typed = io.StringIO("\n".join(lines))
    monkeypatch.setattr(sys, "stdin", typed)
    for stream in (typed, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
    remember(store, "a", gateway_url="http://127.0.0.1:4")
    done = run("chat")
    assert (heard, done.status) == (asked, status)
    if terminal:
        assert done.out == "to one\nto two\n"
        assert done.err.splitlines()[1:] == [
            "error: it is refused: 60 tokens; /clear begins anew",
            "error: it is refused: the server is full",
            "error: it does not answer",
        ]


def test_a_question_that_is_not_text_is_refused(store: Store, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    remember(store, "a", gateway_url="http://127.0.0.1:4")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Qui\xe9n?\n"), "utf-8", "strict"))
    done = run("chat")
    assert (done.status, done.error()) == (2, "the input is not text: it holds bytes that are not UTF-8")


def test_the_log_of_a_server_that_has_ended(store: Store, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = run("logs")
    assert (nothing.status, nothing.error()) == (
        2, "no server is running, and none has left a log; run `trtpipe serve`"
    )  # fmt: skip
    logs = store.home / "logs"
    logs.mkdir(parents=True)
    (logs / "serve-a.cpu.bf16.log").write_text("first\nlast\n")
    (logs / "serve-a.cpu.bf16.gateway.log").write_text("gateway at x\n")
    (logs / "build-b.log").write_text("no server's\n")
    assert run("logs") == Outcome(0, "first\nlast\n", "")
    assert run("logs", "-n", "1", "-f") == Outcome(0, "last\n", "")
    assert run("logs", "--gateway") == Outcome(0, "gateway at x\n", "")
    assert run("logs", "--server", "a.cpu.bf61").error() == (
        "there is no log of a server named 'a.cpu.bf61'; did you mean 'a.cpu.bf16'?"
    )
    (logs / "serve-b.log").write_text("of b\n")
    assert run("logs").error() == (
        "no server is running, and several have left a log; name one with --server: a.cpu.bf16, b"
    )
    assert run("logs", "--server", "b").out == "of b\n"
    assert run("logs", "--server", "b", "--gateway").error() == "b has had no gateway; leave out --gateway"
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    remember(store, "b")
    assert run("logs").out == "of b\n"  # the one that runs is meant


def test_a_log_that_is_cut_or_set_aside_is_followed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtpipe.pipeline.serving.logs import read_log

    log = store.home / "logs" / "serve-a.log"
    log.parent.mkdir(parents=True)
    log.write_text("before\n")
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: pid == 1)
    remember(store, "a")
    pieces = read_log(store, "a", lines=9, follow=True)
    assert next(pieces) == "before\n"
    log.write_text("cut\n")  # as logrotate's copytruncate
    assert next(pieces) == "cut\n"
    with log.open("a") as file:
        file.write("last of the old\n")
        log.rename(log.with_suffix(".log.1"))
    log.write_text("first of the new\n")
    assert next(pieces) == "last of the old\n"
    assert next(pieces) == "first of the new\n"
    remember(store, "a", pid=2)
    assert list(pieces) == []


def test_which_of_a_servers_targets_is_meant(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    remember(store, "chat+draft")
    server = find_running(store, None)
    assert server.find("draft").name == "draft"
    with pytest.raises(UsageError, match="serves several models; name one, by --target: chat, draft"):
        server.find(None)
    with pytest.raises(UsageError, match="does not serve 'draf'; did you mean 'draft'"):
        server.find("draf")
    remember(store, "old", source=Path("/elsewhere/new"))  # which `reload` has loaded
    loaded = find_running(store, "old")
    assert loaded.find("new") == loaded.find("old") == loaded.served[0]
    assert (loaded.served[0].name, loaded.served[0].target) == ("old", "new")


def test_records_of_damaged_servers_are_dropped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: pid == 1)
    remember(store, "living")
    remember(store, "dead", pid=2)
    (store.home / "servers" / "damaged.json").write_text("{")
    record = json.loads((store.home / "servers" / "living.json").read_text())
    record.update(name="list", gateway_pid=[])
    (store.home / "servers" / "list.json").write_text(json.dumps(record))
    (store.home / "servers" / "other.json").write_text('{"name": "x"}')
    assert [server.name for server in running(store)] == ["living"]
    left = [store.home / "servers" / name for name in ("dead.json", "list.json", "living.json")]
    assert sorted((store.home / "servers").iterdir()) == left  # the second may be of another version


def test_a_record_that_cannot_be_read_is_named(store: Store, run: Run) -> None:
    record = store.home / "servers" / "x.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"name": "x", "pid": 7}')
    told = (
        f"{record} is damaged or of another version of trtpipe: stop the server with that version, or remove the file "
        "if process 7 is gone"
    )
    assert told in run("ps").err
    assert told in run("ps", "--json").err
    assert told in run("stop", "x").error()
    assert told not in run("stop", "y").error()
    assert record.is_file()


def test_a_record_of_a_later_version_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    remember(store, "a")
    record = store.home / "servers" / "a.json"
    later = json.loads(record.read_text())
    for part in (later, later["endpoints"], *later["served"]):
        part["later"] = {"than": "this"}
    record.write_text(json.dumps(later))
    assert [server.name for server in running(store)] == ["a"]
    assert json.loads(record.read_text()) == later


def test_a_record_that_another_user_alone_may_read_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtpipe.pipeline.serving import servers

    def unreadable(path: Path) -> None:
        raise PermissionError

    remember(store, "theirs")
    monkeypatch.setattr(servers, "read_server", unreadable)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert running(store) == []
    assert (store.home / "servers" / "theirs.json").is_file()


def test_requests_of_a_server_of_its_own_get_no_time_of_triton_s(run: Run) -> None:
    assert run("serve", "x", "--front", "native", "--drain", "60").error() == (
        "--drain is for tritonserver and its gateway: with --front native the runtime's own server stands alone; "
        "leave it out, or serve with --front triton"
    )


def test_a_gateway_s_port_without_a_gateway_is_refused(run: Run) -> None:
    done = run("serve", "--no-openai", "--openai-port", "9100")
    assert done.status == 2
    assert done.error() == (
        "--openai-port is for the gateway, and --no-openai starts none; leave out --openai-port or --no-openai"
    )


def test_why_a_server_ended_is_what_its_watchdog_wrote_last(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that comes between the reading of the record and the look at the watchdog."""
    from trtpipe.pipeline.serving import servers

    remember(store, "a")

    def leave(server: servers.Server) -> bool:
        servers.bury(store, server, "it was killed")
        return False

    monkeypatch.setattr(servers, "watched", leave)
    assert [one.died for one in servers.recorded(store)] == ["it was killed"]
