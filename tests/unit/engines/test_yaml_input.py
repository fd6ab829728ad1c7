"""YAML that others wrote: read within limits, and refused in words that name the limit and the line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from trtpipe.engines import yaml_input
from trtpipe.engines.yaml_input import MAX_BYTES, YamlError, load_yaml, parse_yaml

BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9))


@pytest.fixture(params=["libyaml", "python"])
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both loaders: PyYAML may be built without libyaml."""
    yaml_input._loader.cache_clear()
    if request.param == "python":
        monkeypatch.setattr(yaml_input, "_base", lambda: yaml.SafeLoader)
    yield
    yaml_input._loader.cache_clear()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &x [1, {b: *y}]\n", "undefined alias"),
        ("[" * 65 + "]" * 65, "nested more than 64 deep, on line 1"),
        ("[" * 500_000, "nested more than|maximum nesting depth"),
        ("{a: " * 100_000, "nested more than"),
        ("- " * 100_000, "nested more than"),
        (BOMB, "more than 100,000 values, on line 6"),
        (MERGED, "more than 100,000 values, on line 6"),
        ("a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 70)), "nested more than 64 deep"),
        ("[" + "a," * 100_001 + "]", "more than 100,000 values"),
        ("a: &a [1, *a]", "'a' is a part of itself, on line 1"),
        ("b: 1\na: &a {<<: *a}", "'a' is a part of itself, on line 2"),
        ("a: " + "9" * 65, "a number has more than 64 digits, on line 1"),
        ("a: 0x" + "f" * 500_000, "a number has more than 64 digits"),
        ("a: 1" + ":1" * 200_000, "a number has more than 64 digits"),  # to base 60, which takes 12 s
        ("a: 1" + ":1" * 2000 + ".5", "a number has more than 64 digits"),
        ("x: 1\na: 2001-99-99", "'2001-99-99' is not a value of type timestamp, on line 2"),
        ("a: !!int ''", "'' is not a value of type int"),
        ("a: !!bool perhaps", "'perhaps' is not a value of type bool"),
        ("a: !!timestamp soon", "'soon' is not a value of type timestamp"),
        ("a: 0x_", "'0x_' is not a value of type int"),
        ("? [a]\n: 1", "found unhashable key"),
        ('a: "\\uD800"', "invalid Unicode character|half of a surrogate pair"),
        ("a: \0", "#x0000"),
        ("a: 1\n---\na: 2", "expected a single document"),
        ("x" * (MAX_BYTES + 1), "more than 1,048,576 bytes"),
        (b"\xff\xfea", "can't decode byte"),
    ],
    ids=lambda value: str(value[:12]),
)
@pytest.mark.usefixtures("loader")
def test_a_limit_is_told_by_name(text: str | bytes, words: str) -> None:
    with pytest.raises(YamlError, match=words):
        parse_yaml(text)


@pytest.mark.usefixtures("loader")
def test_what_is_within_the_limits_reads_as_pyyaml_reads_it() -> None:
    text = "a: &a {x: 1, y: [.5, 0x1f, 1:30, yes, ~, 2001-01-02]}\nb: {<<: *a, x: 2}\nc: [*a, *a]\nd: !!str 1\n"
    assert parse_yaml(text) == yaml.safe_load(text)
    assert parse_yaml("[" * 64 + "]" * 64) == yaml.safe_load("[" * 64 + "]" * 64)
    assert parse_yaml("") is None
    assert parse_yaml("9" * 64) == int("9" * 64)


def test_a_key_given_twice_is_an_error_unless_it_is_expected() -> None:
    with pytest.raises(YamlError, match="'a' is given twice, on lines 1 and 2") as caught:
        parse_yaml("a: 1\na: 2")
    assert caught.value.line == 2
    assert parse_yaml("a: 1\na: 2", repeats=True) == {"a": 2}


def test_a_pipe_is_refused_at_once_and_an_endless_file_at_its_limit(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ValueError, match="not a regular file"):
        load_yaml(tmp_path / "pipe.yaml")
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="more than 1,048,576 bytes"):
        load_yaml(tmp_path / "large.yaml")
