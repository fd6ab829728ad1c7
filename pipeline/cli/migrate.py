"""`trtpipe migrate`: the service of a TensorRT-LLM engine, from the LLM API or vLLM."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtpipe.pipeline.cli import completion as complete
from trtpipe.pipeline.cli.options import FOLDER, Dtype, Gpu, Json, KvCache, Model, Revision, Set, own_store

if TYPE_CHECKING:
    from trtpipe.pipeline.migration import Migration
    from trtpipe.triton_repo.migration import Row

# The table, in the run folder of the new target.
TABLE = "migration.json"


def migrate(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A target in ./runs, a model repository, or an engine folder.", autocompletion=complete.targets
        ),
    ],
    to: Annotated[
        str, typer.Option(help="What serves it: llmapi or vllm.", autocompletion=complete.words("llmapi", "vllm"))
    ],
    engine: Annotated[
        Path | None, typer.Option(help="Engine folder, where the repository names a path of a container.", **FOLDER)
    ] = None,
    model: Model = None, revision: Revision = None, gpu: Gpu = None, dtype: Dtype = None, kv_cache: KvCache = None,
    settings: Set = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a build recipe to this file, and build nothing.")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Make the same service of an engine by the LLM API or vLLM.

    Prints what becomes of each setting of the engine and of its repository, and builds the new target. Weights are
    those that the engine was built from: of a target of ours its own source, else --model. No weights are taken out
    of an engine.

    \b
    Examples:
      trtpipe migrate llama3-8b.h100.fp8 --to vllm
      trtpipe migrate REPO --to llmapi --model llama3-8b --gpu h100 -o new.yaml
    """
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.api.build import build as make_target
    from trtpipe.pipeline.api.migrate import migrate as find
    from trtpipe.pipeline.cli import console, console_build
    from trtpipe.pipeline.cli.build import announce, next_command
    from trtpipe.pipeline.layers import assignments
    from trtpipe.pipeline.run_folder import RunFolder
    from trtpipe.pipeline.store.folders import require_place, write_whole

    if output is not None:
        if output.exists():
            raise UsageError(f"{output} exists already", remedy="give another file, or remove it")
        require_place(output)
    found = find(
        folder, to=to, engine=engine, model=model, revision=revision, gpu=gpu, dtype=dtype, kv_cache=kv_cache,
        set=assignments(settings or []),
    )  # fmt: skip
    if not as_json:
        _show(found)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, _recipe(found))
        if as_json:
            console.result_json({**found.to_json(), "recipe": output})
        else:
            console.result(f"next: trtpipe build --recipe {output}")
        return
    announce(found.spec)
    run = RunFolder.of(found.spec.target)
    _note_replaced(found, run.path / TABLE)
    try:
        make_target(found.spec, store=own_store(), reporter=console_build.BuildReporter())
    finally:
        with contextlib.suppress(FileNotFoundError):  # a target that was refused has no folder
            write_whole(run.path / TABLE, json.dumps(found.to_json(), indent=2) + "\n")
    if as_json:
        console.result_json({**found.to_json(), "folder": run.path.absolute()})
    else:
        console.result(f"the table is in {run.path / TABLE}", f"next: {next_command(found.spec.target)}")


def _note_replaced(found: Migration, table: Path) -> None:
    """Say where the new target is that of another deployment, whose table is there."""
    from trtpipe.engines.json_input import load_json
    from trtpipe.pipeline.cli import console

    try:
        before = load_json(table)
    except (OSError, ValueError):
        return
    source = before.get("source") if isinstance(before, dict) else None
    if isinstance(source, str) and Path(source).absolute() != found.source.absolute():
        told = f"this replaces {found.spec.target}, which was migrated from {source}"
        console.note(f"{told}: to keep both, migrate in another folder")


def _show(found: Migration) -> None:
    """Print what people have to look at as tables, of the rest the names; with --verbose all as tables."""
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.cli.console_table import words
    from trtpipe.triton_repo.migration import Verdict

    for verdict in Verdict:
        rows = [row for row in found.rows if row.verdict is verdict]
        if rows and verdict not in (Verdict.LOST, Verdict.CHANGED) and not console.FLAGS.verbose:
            names = dict.fromkeys(row.setting for row in rows)
            console.result(f"{verdict.value}: {len(rows)}: {', '.join(names)}")
        elif rows:
            console.result(f"{verdict.value}: {len(rows)}")
            rows = _joined(rows)
            cells = {
                "where": [row.place for row in rows],
                "setting": [row.setting for row in rows],
                "value": [row.value for row in rows],
                "becomes": [
                    words(row.to) if row.becomes.endswith(f".{row.setting}") else _becomes(row) for row in rows
                ],
                "why": [row.why for row in rows],
            }
            columns = [name for name, column in cells.items() if any(cell not in (None, "") for cell in column)]
            console.table(columns, list(zip(*(cells[name] for name in columns), strict=True)))


def _joined(rows: list[Row]) -> list[Row]:
    """The rows, one for all that have a place and a reason in common, and no values."""
    import dataclasses

    out: dict[tuple[str, ...], Row] = {}
    for row in rows:
        alone = () if row.value is None and row.to is None else (row.setting,)
        key = (row.place, row.why, *alone)
        first = out.get(key)
        if first is not None:
            becomes = f"{first.becomes}, {row.becomes}".removeprefix(", ")
            row = dataclasses.replace(first, setting=f"{first.setting}, {row.setting}", becomes=becomes)
        out[key] = row
    return list(out.values())


def _becomes(row: Row) -> str:
    from trtpipe.pipeline.cli.console_table import words

    return row.becomes if row.to is None else f"{row.becomes} = {words(row.to)}"


def _recipe(found: Migration) -> str:
    """A build recipe; what is not as it was stands in comments before it."""
    import yaml

    from trtpipe.pipeline.cli.console_table import words
    from trtpipe.triton_repo.migration import Verdict

    lines = [f"# The service of {found.source}, by {found.spec.runtime}."]
    for verdict in (Verdict.LOST, Verdict.CHANGED):
        lines.append(f"# {verdict.value}:")
        for row in found.rows:
            if row.verdict is verdict:
                became = f" -> {_becomes(row)}" if row.becomes else ""
                value = "" if row.value is None else f" {words(row.value)}"
                lines.append(f"#   {row.place}: {row.setting}{value}{became}: {row.why}")
    # A value of a foreign repository that breaks its line would be a setting of the recipe.
    heads = ["".join(letter if letter.isprintable() else " " for letter in line) for line in lines]
    return "\n".join(heads) + "\n" + yaml.safe_dump(found.recipe, sort_keys=False)
