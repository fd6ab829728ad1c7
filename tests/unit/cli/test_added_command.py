"""A command is added as a function and a place in GROUPS."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from trtpipe.pipeline.cli import app as cli
from trtpipe.pipeline.cli.help import in_section


def weigh_(
    target: Annotated[str, typer.Argument(help="Target to weigh.")],
    unit: Annotated[str, in_section("Output")("Unit of the weight.", "--unit")] = "kg",
) -> None:
    """Weigh a target."""
    typer.echo(f"{target} in {unit}")


def test_a_command_is_listed_in_its_group_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.GROUPS, "Facts", (*cli.GROUPS["Facts"], weigh_))
    made, run = cli.make_app(), CliRunner().invoke
    listed = run(made, ["--help"]).output
    assert "weigh" not in listed.partition("Facts:")[0]
    facts = [line.split() for line in listed.partition("Facts:")[2].splitlines()]
    assert ["weigh", "Weigh", "a", "target."] in facts
    assert "Output:\n  --unit" in run(made, ["weigh", "--help"]).output
    assert run(made, ["weigh", "x", "--unit", "g"]).output == "x in g\n"
