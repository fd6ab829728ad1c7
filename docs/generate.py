"""Hooks of mkdocs, named in mkdocs.yml: parts of the site that are made from the code while it is built.

A line `<!-- generated: NAME -->` of a page is replaced by what PARTS[NAME] writes. SECURITY.md and its like, which are
beside docs/, become pages of the site in project/.
"""

from __future__ import annotations

import dataclasses
import html
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docs.formats import rows as format_rows
from trtpipe.configs import facts
from trtpipe.engines import BACKENDS, load_backend
from trtpipe.engines.errors import TrtpipeError
from trtpipe.pipeline.bench.results.metrics import METRICS
from trtpipe.pipeline.cli import app
from trtpipe.pipeline.cli.help import COMMON
from trtpipe.pipeline.deploy.config import OPTIONS, DeployConfig
from trtpipe.pipeline.execution.diagnosis import Where, load_failures
from trtpipe.pipeline.gateway import requests
from trtpipe.pipeline.layers import GROUPS, LORA, SCALARS
from trtpipe.triton_repo.check.facts import Successor, successors

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
MARK = re.compile(r"^<!-- generated: (\S+) -->$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for name in BESIDE:
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](../")
        files.append(File.generated(config, f"project/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Raises KeyError for a part that is not in PARTS."""
    markdown = markdown if page.file.generated_by else re.sub(r"\]\(\.\./([A-Z]+\.md)", r"](project/\1", markdown)
    return MARK.sub(lambda mark: "\n".join(PARTS[mark[1]]()), markdown)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    yield from ("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows)
    yield ""


def code(value: Any) -> str:
    return f"`{value}`" if value != "" else ""


def text(words: str) -> str:
    """Words of a help text or a message: HTML in them is none, and what stands in backticks stays code."""
    parts = words.split("`")
    return "`".join(part if place % 2 else html.escape(part, quote=False) for place, part in enumerate(parts))


def commands() -> Iterator[str]:
    """Every command by its group, with its help and its options."""
    root = app.command()
    for group, functions in app.GROUPS.items():
        yield f"## {group}\n"
        for name in map(app.command_name, functions):
            yield from _command(f"trtpipe {name}", root.commands[name])


def _command(path: str, command: Any) -> Iterator[str]:
    about, _, examples = inspect.cleandoc(command.help).replace("\b\n", "").partition("Examples:\n")
    yield f"### {path}\n\n{text(about)}"
    if examples:
        yield f"```\n{inspect.cleandoc(examples)}\n```\n"
    context = command.make_context(path, [], resilient_parsing=True)
    rows = [
        (code(record[0]), text(record[1]))
        for parameter in command.params
        if getattr(parameter, "rich_help_panel", None) != COMMON
        if (record := parameter.get_help_record(context)) is not None
    ]
    yield from table(("option", "meaning"), rows) if rows else ()
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command(f"{path} {name}", inner)


def settings() -> Iterator[str]:
    """Every setting of a recipe: the scalars, then each group."""
    options = {one.name: one for one in app.command().commands["settings"].params}
    yield "## Target\n"
    yield from table(("setting", "meaning"), [(code(name), text(options[name].help)) for name in (*SCALARS, LORA)])
    for group, kind in GROUPS.items():
        yield f"## {group}\n"
        meanings = _meanings(kind)
        rows = []
        for field in dataclasses.fields(kind):
            words, least = field.metadata.get("choices", ()), field.metadata.get("least")
            allowed = ", ".join(map(code, words)) or ("" if least is None else f"from {least}")
            default = "chosen by the build" if field.default is None else code(field.default)
            rows.append((code(f"{group}.{field.name}"), default, allowed, text(meanings[field.name])))
        yield from table(("setting", "default", "values", "meaning"), rows)


def deployment() -> Iterator[str]:
    """Every setting of `deploy k8s --set`: those without an option of their own."""
    meanings = _meanings(DeployConfig)
    defaults = {None: "none", (): "none", dataclasses.MISSING: "the target"}
    rows = [
        (code(one.name), defaults.get(one.default) or code(one.default), text(meanings[one.name]))
        for one in dataclasses.fields(DeployConfig)
        if one.name not in (*OPTIONS, "openai")
    ]
    yield from table(("setting", "default", "meaning"), rows)


def _meanings(kind: type[Any]) -> dict[str, str]:
    """Meaning of each field: its metadata's, else its line of the class's docstring."""
    found = re.findall(r"^(\w+) +(\S.*(?:\n  .*)*)", inspect.cleandoc(kind.__doc__ or ""), re.MULTILINE)
    said = {name: " ".join(meaning.split()) for name, meaning in found}
    return {one.name: one.metadata.get("meaning") or said[one.name] for one in dataclasses.fields(kind)}


def metrics() -> Iterator[str]:
    for one in METRICS:
        yield f"### {one.name}\n\n{text(one.formula[:1].upper() + one.formula[1:])}.\n"
        names = ", ".join(map(code, one.aliases))
        undefined, better = text(one.undefined), one.better or "neither"
        rows = [("shown as", one.heading()), ("unit", one.unit or "a share"), ("undefined", undefined),
                ("better", better), ("in `--slo` and `--fail-if` also", names)]  # fmt: skip
        yield from table(("", ""), [row for row in rows if row[1]])


def errors() -> Iterator[str]:
    classes = {kind.exit_code: kind for kind in TrtpipeError.__subclasses__() if kind.__module__.endswith(".errors")}
    rows = []
    for number, meaning in app.EXIT_CODES:
        kind = classes.get(int(number))
        rows.append((number, meaning, code(kind.__name__) if kind else "", text(kind.__doc__ or "") if kind else ""))
    yield from table(("exit code", "meaning", "class in Python", "raised when"), rows)


def api_fields() -> Iterator[str]:
    """Fields of the two kinds of request that the gateway accepts; those it ignores; those it refuses."""
    chat, completion = (kind.model_json_schema() for kind in (requests.ChatRequest, requests.CompletionRequest))
    names = dict.fromkeys([*chat["properties"], *completion["properties"]])
    rows = [(code(name), *(_values(kind["properties"].get(name)) for kind in (chat, completion))) for name in names]
    yield "## Accepted\n"
    yield from table(("field", "`/v1/chat/completions`", "`/v1/completions`"), rows)
    for name, kind in chat["$defs"].items():
        yield f"### {name}\n"
        yield from table(("field", "values"), [(code(one), _values(of)) for one, of in kind["properties"].items()])
    yield "## Accepted without an effect\n"
    yield ", ".join(map(code, requests._IGNORED)) + ".\n"
    yield "## Refused\n"
    harmless = {name: ", ".join(code(json.dumps(one)) for one in sent) for name, sent in requests._UNSUPPORTED.items()}
    yield from table(
        ("field", "but for these values, which change nothing, and null"),
        [(code(name), sent) for name, sent in harmless.items()],
    )


def _values(schema: dict[str, Any] | None) -> str:
    """The type of a field and its limits, in words; empty for a field that is not there."""
    if schema is None:
        return ""
    if "anyOf" in schema:
        return " or ".join(_values(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "$ref" in schema:
        return code(schema["$ref"].rpartition("/")[2])
    if "enum" in schema or "const" in schema:
        return ", ".join(code(json.dumps(one)) for one in schema.get("enum", [schema.get("const")]))
    if schema.get("maxItems") == 0:
        return code("[]")
    if schema.get("type") == "array":
        return f"list of {_values(schema['items'])}"
    if "type" not in schema:
        return "string, token ids, or a list of either"
    signs = {"minimum": "≥", "maximum": "≤"}
    limits = [f"{sign} {schema[name]:g}" for name, sign in signs.items() if abs(schema.get(name, 2**63)) < 2**31]
    return " ".join([schema["type"], ", ".join(limits)]).strip()


def runtimes() -> Iterator[str]:
    """The runtime of a target where none is named."""
    rows = (
        (code(row.gpu) or "any other", ", ".join(map(code, row.architectures)) or "any", code(row.runtime), row.reason)
        for row in facts.load_usual_runtimes()
    )
    yield from table(("GPU", "model", "runtime", "because"), rows)


def failures(where: Where) -> Iterator[str]:
    for one in load_failures(where):
        words = re.sub(r"\(\?P<(\w+)>(?:[^()\\]|\\.|\([^()]*\))*\)", r"{\1}", one.pattern).replace("(?i)", "")
        words = re.sub(r"\\([^\w\s])", r"\1", words.replace("(?:", "(")).replace(r"\d+", "N")
        yield f"### {one.name}\n\n```text\n{words.strip()}\n```\n"
        yield f"{text(one.cause[:1].upper() + one.cause[1:])}. What to do: {text(one.remedy)}.\n"


def migration() -> Iterator[str]:
    """What becomes of each setting of an engine and its repository under the LLM API and vLLM."""
    known, runtimes = successors(), {"LLM API": "trtllm_pytorch", "vLLM": "vllm"}
    groups = {"Build": known.build, **{f"Model: {role}": rows for role, rows in known.parameters.items()}}
    groups |= {f"config.pbtxt: {role}": rows for role, rows in known.fields.items()}
    for title, rows in groups.items():
        yield f"### {title}\n"
        cells = [(code(name), *(text(_successor(row, one)) for one in runtimes.values())) for name, row in rows.items()]
        yield from table(("setting", *runtimes), cells)


def _successor(row: Successor, runtime: str) -> str:
    """What a runtime makes of a setting, in words."""
    backend, name = load_backend(runtime), row.becomes
    if row.instead:
        return f"replaced: {row.instead}"
    if row.lost:
        why = "; ".join([row.lost, *(f"{value}: {words}" for value, words in row.values.items())])
        return f"none: {why}" + (f"; its own is `{row.there[runtime]}`" if runtime in row.there else "")
    held, why = backend.FIXED.get(name, ("", ""))
    followed = not name.startswith("build.") or name.removeprefix("build.") in backend.SETTINGS
    if held is None or not followed:
        return f"none: {why}"
    if why:
        return f"always `{json.dumps(held)}`: {why}"
    return f"`{name}`" + (f": {backend.MEANS[name]}" if name in backend.MEANS else "")


def formats() -> Iterator[str]:
    """Rows of the formats' table: where a runtime ran a format, where it is only written, or why it is refused."""
    yield from table(("`--dtype`", *map(code, BACKENDS)), format_rows())


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "commands": commands,
    "settings": settings,
    "deployment": deployment,
    "metrics": metrics,
    "runtimes": runtimes,
    "errors": errors,
    "formats": formats,
    "api-fields": api_fields,
    "migration": migration,
    "build-failures": lambda: failures("build"),
    "serve-failures": lambda: failures("serve"),
}
