"""`trtpipe push`, `pull` and `search`."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.factories import hf_folder
from tests.unit.cli.conftest import SETTINGS, Run
from tests.unit.registry.test_signatures import KINDS, write_pair
from trtpipe.pipeline import compatibility
from trtpipe.pipeline.compatibility import Verdict
from trtpipe.pipeline.stages.convert import CONVERT
from trtpipe.pipeline.stages.tokenizer import TOKENIZER


def test_what_another_version_made_is_named_wherever_it_goes(
    run: Run, in_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--model", str(hf_folder(in_folder / "tiny")), "--gpu", "cpu", "--dtype", "bf16", *SETTINGS)
    target, shelf, said = "tiny.cpu.bf16", str(tmp_path / "shelf"), "another version of trtpipe made the "
    with monkeypatch.context() as earlier:
        for stage in (CONVERT, TOKENIZER):
            earlier.setattr(type(stage), "version", stage.version - 1)
        assert run("build", *options).status == 0
        quiet = [run("push", target, shelf), run("export", target), run("provenance", target)]
        assert not [done for done in quiet if said in done.err]
        assert "version" in json.loads(quiet[-1].out)["predicate"]["runDetails"]["builder"]
    both = (
        f"{said}tokenizer (version {TOKENIZER.version - 1} of tokenizer, here {TOKENIZER.version}) and the checkpoint "
        f"(version {CONVERT.version - 1} of convert, here {CONVERT.version}) of {target}, and this one makes it "
        "otherwise: build the target again from its model"
    )

    def names_it(*words: str) -> bool:
        return both in " ".join(run(*words).err.split())

    assert names_it("push", target, shelf)
    assert names_it("export", target)
    assert "version" not in json.loads(run("provenance", target).out)["predicate"]["runDetails"]["builder"]
    shutil.rmtree("runs")
    for words in (("import", f"{target}.tar"), ("build", "--from", target), ("pull", target, shelf)):
        assert names_it(*words)
    assert f"another version of trtpipe made it ({TOKENIZER.version - 1}, here {TOKENIZER.version})" in " ".join(
        run("status", *options).out.split()
    )
    assert run("build", *options).status == 0
    assert said not in run("push", target, shelf).err


def test_a_target_goes_to_a_folder_and_comes_back(
    run: Run, in_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_folder(in_folder / "tiny")
    assert run("build", "--model", "tiny", "--gpu", "cpu", "--dtype", "bf16", *SETTINGS).status == 0
    shelf = str(tmp_path / "shelf")
    done = run("push", "tiny.cpu.bf16", shelf)
    assert done.status == 0
    assert re.search(r"^pushed tokenizer, engine: \d\d\.\d kB sent, 0 B was there$", done.out, re.MULTILINE)
    assert done.out.endswith(f"next, elsewhere: trtpipe pull tiny.cpu.bf16 {shelf}\n")
    found = json.loads(run("search", shelf, "--gpu", "cpu", "--json").out)
    assert [(one["target"], one["passport"]["runtime"]) for one in found] == [("tiny.cpu.bf16", "reference")]
    assert "tiny.cpu.bf16" in run("search", shelf, "--dtype", "bfloat16").out
    assert json.loads(run("search", shelf, "--gpu", "h100", "--json").out) == []

    told = tmp_path / "new" / "provenance.json"
    assert run("provenance", "tiny.cpu.bf16", "-o", str(told)).out == f"{told}: 5 artefacts\n"
    shutil.rmtree("runs")
    done = run("pull", "tiny.cpu.bf16", shelf)
    assert done.out.startswith("pulled tokenizer, engine: ")
    assert f"engine: imported from {shelf}, not built here" in done.err
    assert done.out.endswith("next: trtpipe serve tiny.cpu.bf16\n")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(
            compatibility, "examine", lambda passport: Verdict(passport=passport, objections=["of x"], remarks=[])
        )
        assert "or with --any-machine" in run("pull", "tiny.cpu.bf16", shelf).error()
        done = run("pull", "tiny.cpu.bf16", shelf, "--any-machine")
    served = "next: trtpipe deploy k8s tiny.cpu.bf16 -o FOLDER   (it is served on cpu, not here)\n"
    assert done.out.endswith(served)
    done = run("verify-provenance", "tiny.cpu.bf16", "--statement", str(told))
    assert done.out.endswith(
        "the digests of 5 artefacts hold together\n"
        f"not here, and told by {told} alone: model, checkpoint; a signed statement proves them\n"
    )
    done = run("verify-provenance", "tiny.cpu.bf16")
    assert done.out.endswith(
        "not here, and told by whoever pushed them: model, checkpoint; a signed statement proves them\n"
    )
    assert run("search", shelf, "--gpu", "h100").out == f"{shelf} has no such target; it has: tiny.cpu.bf16\n"
    for option, value, near in (
        ("--dtype", "fp33", "; did you mean --dtype fp32?\n"), ("--dtype", "fp8", "\n"),
        ("--gpu", "h101", "; did you mean --gpu h100?\n"), ("--gpu", "SM90", "\n"), ("--gpu", "zzz", "\n"),
    ):  # fmt: skip
        done = run("search", shelf, option, value)
        assert done.out == f"{shelf} has no such target; it has: tiny.cpu.bf16{near}"

    for name in ("tiny.cpu.bf16", "runs/tiny.cpu.bf16"):
        assert f"note: the engine was imported from {shelf}, not built here\n" in run("passport", name).out

    asked = ("build", "--model", "tiny", "--gpu", "cpu", "--dtype", "bf16", *SETTINGS, "--until", "download")
    done = run(*asked, "--trust-origin", shelf, "--trust-origin", "oci://host/typo")
    noted = [line for line in done.err.splitlines() if "trust" in line]
    assert noted == ["nothing in the store came from oci://host/typo, so trust in it reuses nothing"]

    refused = run(*asked, "--trust-key", str(told))  # although nothing would be compared with it
    assert (refused.status, refused.error().partition(";")[0]) == (3, f"{told} is not a public key in PEM form")

    # Builds make nothing of what came from elsewhere.
    for makes, remedy in (
        ("repository", "run `trtpipe build --from tiny.cpu.bf16`"),
        ("engine", "the next `trtpipe build` of their targets moves them aside and makes them again; pull or import "
         "the target again where they are in imported/; `trtpipe gc` drops those of no target"),
    ):  # fmt: skip
        file = next(path for path in Path("runs/tiny.cpu.bf16", makes).resolve().rglob("config.*"))
        file.chmod(0o644)
        file.write_text(file.read_text() + " ")
        damaged = run("scrub").error() if makes == "engine" else run("serve", "tiny.cpu.bf16").error()
        assert damaged.endswith(f"; {remedy}")
    for command in ("check", "serve"):
        assert run(command, "tiny.cpu.bf16").error().endswith("; pull or import the target again")
    assert run("pull", "tiny.cpu.bf16", shelf).status == 0
    assert "damaged" not in run("scrub").err

    # What came with the target has no signature, then one.
    private, public = write_pair(tmp_path, KINDS["ed25519"]())
    refused = run("verify-provenance", "tiny.cpu.bf16", "--trust-key", str(public))
    assert (refused.status, "is not signed" in refused.error()) == (6, True), refused.error()
    run("push", "tiny.cpu.bf16", shelf, "--sign-key", str(private))
    shutil.rmtree("runs")
    run("pull", "tiny.cpu.bf16", shelf, "--trust-key", str(public))
    done = run("verify-provenance", "tiny.cpu.bf16", "--trust-key", str(public))
    came = Path("runs") / "tiny.cpu.bf16" / "provenance.json"
    assert done.out.endswith(f"the digests of 5 artefacts hold together; {came} is signed with {public}\n")
    for words, signed in (((), False), (("--trust-key", str(public)), True)):
        found = json.loads(run("verify-provenance", "tiny.cpu.bf16", *words, "--json").out)
        assert found["signature_verified"] is signed
    (Path("runs") / "tiny.cpu.bf16" / "provenance.json").unlink()
    refused = run("verify-provenance", "tiny.cpu.bf16", "--trust-key", str(public))
    assert refused.error() == "no statement has come with tiny.cpu.bf16; give the signed one with --statement"

    monkeypatch.setenv("TRTPIPE_HOME", str(tmp_path / "other"))
    assert run("pull", "tiny.cpu.bf16", shelf).status == 0
    # A large file is one of the engine and of the repository; this one is small and has a copy.
    for place in ("engine", "repository/tensorrt_llm/1"):
        weights = Path("runs/tiny.cpu.bf16", place, "rank0.safetensors").resolve()
        weights.chmod(0o644)
        content = weights.read_bytes()
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for command in ("check", "serve"):
        error = run(command, "tiny.cpu.bf16").error()
        assert error.endswith("/rank0.safetensors has changed; pull or import the target again")
    assert run("pull", "tiny.cpu.bf16", shelf).status == 0
    assert run("check", "tiny.cpu.bf16").status == 0
    done = run(*asked[:-2], "--until", "tokenizer")
    why = r"tokenizer +running +\(what was imported is not trusted by --trust-origin or --trust-key\)"
    assert re.search(why, done.err), done.err


def test_a_run_folder_of_another_name_or_place(run: Run, in_folder: Path, tmp_path: Path) -> None:
    model, shelf = hf_folder(in_folder / "tiny"), str(tmp_path / "shelf")
    build = ("build", "--model", "tiny", "--gpu", "cpu", "--dtype", "bf16", *SETTINGS)
    run(*build)
    Path("runs").rename("other")
    hf_folder(model, seed=1)
    run(*build)
    # The one at that path, not the one in ./runs.
    for target in ("other/tiny.cpu.bf16", "tiny.cpu.bf16"):
        done = run("push", target, shelf)
        assert done.out.endswith(f"next, elsewhere: trtpipe pull tiny.cpu.bf16 {shelf}\n")
        index = json.loads(Path(shelf, "targets", "tiny.cpu.bf16.json").read_text())
        weights = Path(target if "/" in target else f"runs/{target}", "engine", "rank0.safetensors").read_bytes()
        assert hashlib.sha256(weights).hexdigest() in [
            file["sha256"] for file in index["artefacts"]["engine"]["files"]
        ]  # fmt: skip

    Path("runs", "tiny.cpu.bf16").rename(Path("runs", "mine"))
    assert "trtpipe pull tiny.cpu.bf16 " in run("push", "mine", shelf).out
    assert [path.name for path in Path(shelf, "targets").iterdir()] == ["tiny.cpu.bf16.json"]
    assert run("pull", "tiny.cpu.bf16", shelf).status == 0
    assert run("export", "mine").out == (
        "mine.tar holds the target tiny.cpu.bf16\nnext, on another machine: trtpipe build --from mine.tar\n"
    )
    shutil.rmtree(Path("runs", "tiny.cpu.bf16"))
    done = run("build", "--from", "mine.tar")
    assert (done.status, Path("runs", "tiny.cpu.bf16", "engine").is_dir()) == (0, True), done.err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("push", "none", "shelf"), 2, "there is no target 'none' in ./runs: `trtpipe ls` lists them"),
        (("push", "none", "shelf", "--only", "engin"), 2, "nothing of a target is called 'engin'"),
        (("pull", "none", "shelf"), 2, "shelf; check its path, or push a target to it first"),
        (("search", "x9://there"), 2, "x9://there: Protocol not known: x9"),
        (("provenance", "none"), 2, "there is no target 'none' in ./runs"),
        (("verify-provenance", "none"), 2, "there is no target 'none' in ./runs"),
    ],
)
def test_registries_and_wrong_words(run: Run, arguments: tuple[str, ...], status: int, message: str) -> None:
    done = run(*arguments)
    assert done.status == status
    assert message.split(":")[0] in done.error()


def test_a_target_is_not_exported_into_the_key_that_signs_it(build: Run, run: Run, model: Path) -> None:
    assert build(model).status == 0
    key = Path("key.pem")
    key.write_text("a key")
    Path("link.pem").symlink_to("key.pem")
    for out in ("key.pem", "link.pem"):
        done = run("export", "tiny.cpu.fp32", "--sign-key", "key.pem", "-o", out)
        assert (done.status, done.error()) == (2, f"{out} is read by the same command; give another file to write")
    assert key.read_text() == "a key"
