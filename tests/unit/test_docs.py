"""The pages of docs/ and README: each command line in them exists, and the site has no broken link."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import formats, generate
from tests.support.commands import command_of_examples
from tests.support.paths import ROOT
from trtpipe.engines import BACKENDS
from trtpipe.pipeline.cli import app

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A command line ends before a remark (two blanks, or #), a pipe, a redirection, and the end of the line.
COMMAND = r"""trtpipe((?: (?:'[^']*'|"[^"]*"|[^\s'"`#>|&;]+))+)"""
FENCED = re.compile(rf"^[ $]*(?:\.venv/bin/)?{COMMAND}", re.MULTILINE)
INDENTED = re.compile(rf"(?:^    +|    +){COMMAND}", re.MULTILINE)
MENTIONED = re.compile(rf"`{COMMAND}`")
COMMANDS = command_of_examples()


def command_lines(page: str) -> Iterator[list[str]]:
    """The command lines of a page as words, without `trtpipe`. Those between backticks may lack what they need."""
    page = re.sub(r"\\\n *", "", page).replace(" | --", " --")
    for place, part in enumerate(re.split(r"^ *```.*$", page, flags=re.MULTILINE)):
        for found in FENCED.findall(part) if place % 2 else INDENTED.findall(part):
            yield shlex.split(re.sub(r"[\[\]]", "", found))
        yield from ([*shlex.split(found), "..."] for found in MENTIONED.findall(part))


def parse(words: list[str]) -> None:
    """Have the command's own parser read the words. Raises its error for an unknown command, option or value."""
    command, mentioned = COMMANDS, words[-1] == "..."
    if words[0] == "VERB":
        return
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    context = command.make_context("", [], resilient_parsing=True)
    context.resilient_parsing = False
    if mentioned:
        _, left, _ = command.make_parser(context).parse_args(list(words))
        if hasattr(command, "commands") and left not in ([], ["..."]):
            command.resolve_command(context, left)
    else:
        command.make_context("", list(words))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_line_of_a_page_is_one_that_the_command_takes(page: Path) -> None:
    for words in command_lines(page.read_text()):
        try:
            parse(words)
        except app.CLICK_ERROR as error:
            pytest.fail(f"trtpipe {shlex.join(words)}: {error.format_message()}")


def test_what_counts_as_a_command_line() -> None:
    page = "trtpipe is prose\n\n    trtpipe ps    trtpipe logs -f   the log\n\nand `trtpipe stop` [`trtpipe x`]\n"
    page += "```sh\ntrtpipe compare --fail-if 'ttft > 1.1x' \\\n    --json | jq\n$ trtpipe chat # talk\n```\n"
    assert [" ".join(words) for words in command_lines(page)] == [
        "ps", "logs -f", "stop ...", "x ...", "compare --fail-if ttft > 1.1x --json", "chat",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words", [["bild", "..."], ["build", "--modle", "x"], ["build", "--no-such", "..."], ["bench", "--repeat", "x"],
              ["deploy", "k8s", "TARGET"]]
)  # fmt: skip
def test_a_command_line_that_the_command_refuses_is_found(words: list[str]) -> None:
    with pytest.raises(app.CLICK_ERROR):
        parse(words)


def test_generated_parts_say_what_the_code_says() -> None:
    said = {name: "\n".join(part()) for name, part in generate.PARTS.items()}
    assert "### trtpipe bench selftest" in said["commands"]
    assert "| `--fail-if <str>` | Fail if the condition holds at any load point:" in said["commands"]
    assert "| `build.tokens_per_block` | `32` | from 1 | tokens in a KV-cache block;" in said["settings"]
    assert "| `serving.ensemble` | `graph` |  | kind of the model `ensemble`:" in said["settings"]
    # A recipe is of one target: what `build` takes besides, lists and ray, it refuses.
    assert (
        "| `executor` | Where trtllm-build runs: auto, local (this environment) or docker (the image). |"
        in (said["settings"])
    )
    assert "| `tp` | " in said["settings"]
    assert "| `replicas_max` | none | most replicas; their number is fixed when it equals" in said["deployment"]
    assert "| `gpus_per_node` | `8` | GPUs of a node:" in said["deployment"]
    assert "pvc" not in said["deployment"]
    assert (
        "### time_to_first_token\n\nFirst response with tokens, those of reasoning and tool calls included - "
        "request sent." in said["metrics"]
    )
    assert "| 6 | an artefact must not be used here | `ArtefactRefused` | An artefact is intact" in said["errors"]
    assert "| `max_completion_tokens` | integer \u2265 1 |  |" in said["api-fields"]
    assert "| `best_of` | `1` |" in said["api-fields"]
    assert "version tag does not match.*current version: {here}," in said["serve-failures"]
    assert "### fp8-needs-newer-gpu" in said["build-failures"]
    assert not re.search(r"<(?!/?code)[a-z]+>", re.sub(r"(?s)```.*?```|`[^`]*`", "", "\n".join(said.values())))


def test_what_the_table_of_formats_says_ran_is_on_the_page_that_it_names() -> None:
    rows = {row[0].strip("`"): dict(zip(BACKENDS, row[1:], strict=True)) for row in formats.rows()}
    assert rows["fp8-block"] == {
        "reference": "refused: it does not read the formats that can hold it (hf)",
        "tensorrt_llm": "refused: it does not read the formats that can hold it (hf)",
        "trtllm_pytorch": "written: SM90, SM100",
        "vllm": "runs: [H100](measurements/vllm.md); written: SM89, SM100, SM120",
    }
    assert rows["int8-sq"]["vllm"] == "runs: [H100](measurements/vllm.md); written: SM80, SM86, SM89"
    assert rows["KV cache nvfp4"]["vllm"] == "written: SM100"
    assert rows["fp32"]["vllm"].startswith("runs: [CPU](measurements/cpu.md); written: SM80")
    assert not any("runs" in row[runtime] for row in rows.values() for runtime in ("tensorrt_llm", "trtllm_pytorch"))
    for one in formats.ran():
        assert rows[one.format][one.runtime].startswith("runs: "), one
    assert all((ROOT / test).is_file() for test in formats.TESTS.values())


def test_the_first_errors_have_the_words_of_the_code() -> None:
    """A quoted error's parts, without what `...` stands for, are in the sources."""
    table = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## When")[0]
    sources = "\n".join(
        path.read_text() for room in ("pipeline", "engines", "configs") for path in (ROOT / room).rglob("*.py")
    )
    quoted = [words for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for words in re.findall("`(.+?)`", row)]
    assert len(quoted) > 10
    for words in quoted:
        for part in words.replace("runs/TARGET/", "").split("..."):
            assert part.strip() in sources, words


@pytest.mark.process
def test_the_site_has_no_broken_links_but_those_that_are_planted(tmp_path: Path) -> None:
    for name in ("docs", "mkdocs.yml", *generate.BESIDE):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    with (tmp_path / "docs" / "install.md").open("a") as page:
        page.write("[a](engines.md#nothing) [b](nothing.md)\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(tmp_path / "mkdocs.yml"), "--site-dir"]
    done = subprocess.run([*command, str(tmp_path / "site")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    warnings = sorted(line for line in done.stderr.splitlines() if line.startswith("WARNING"))
    assert len(warnings) == 2, done.stderr
    assert "'engines.md#nothing'" in warnings[0]
    assert "'nothing.md'" in warnings[1]
    commands = (tmp_path / "site" / "reference" / "commands.html").read_text()
    assert '<h3 id="trtpipe-compare">' in commands
    assert "generated:" not in commands
