"""Length distributions: what the strings mean, what they make, and what is said of a mistake."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.pipeline.bench.load.lengths import Empirical, Fixed, Lognormal, Mix, Normal, Uniform, draw_pairs, parse

N = 40_000


def draw(text: str | int, seed: int = 1) -> npt.NDArray[np.int64]:
    return parse(text, "input_tokens").tokens(np.random.default_rng(seed), N)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (128, Fixed(128)),
        ("128", Fixed(128)),
        ("normal:128,32", Normal(128, 32)),
        ("lognormal:128,0.5", Lognormal(128, 0.5)),
        ("uniform: 64, 256", Uniform(64, 256)),
        ("mix:0.7*128+0.3*normal:1024,64", Mix((0.7, 0.3), (Fixed(128), Normal(1024, 64)))),
        (
            "mix: 0.25*uniform:1,2 + .75*empirical:a+b.txt",
            Mix((0.25, 0.75), (Uniform(1, 2), Empirical(Path("a+b.txt")))),
        ),
    ],
)
def test_a_string_says_what_is_drawn(text: str | int, parsed: object) -> None:
    assert parse(text, "input_tokens") == parsed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the value '' is not a number; give a number, normal:128,32, "),
        ("many", "the value 'many' is not a number"),
        ("0", "the value, 0, is not a whole number of tokens from 1 on"),
        ("12.5", "the value, 12.5, is not a whole number of tokens from 1 on"),
        ("nan", "the value is not finite"),
        ("norml:128,32", "there is no 'norml'; did you mean 'normal'?"),
        ("zipf:2", "there is no 'zipf'; known: empirical, lognormal, mix, normal, uniform"),
        ("normal:128", "normal takes two numbers, mean and std"),
        ("lognormal:1,2,3", "lognormal takes two numbers, median and sigma"),
        ("normal:128,wide", "std 'wide' is not a number"),
        ("normal:128,-1", "mean must be positive and std at least 0"),
        ("lognormal:0,1", "median must be positive and sigma at least 0"),
        ("uniform:256,64", "the first value, 256, is above the last, 64"),
        ("uniform:0,64", "first, 0, is not a whole number of tokens from 1 on"),
        ("mix:0.7*128", "the weights 0.7 do not add up to 1"),
        ("mix:0.7*128+0.4*64", "the weights 0.7 + 0.4 do not add up to 1"),
        ("mix:-1*128+2*64", "the weights -1 + 2 do not add up to 1"),
        ("mix:128", "'128' has no weight; write weight*lengths"),
        ("mix:1*mix:1*2", "a mix holds another mix"),
        ("mix:0.5*1+0.5*uniform:5", "uniform takes two numbers, first and last"),
    ],
)
def test_a_mistake_is_named(text: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, "input_tokens")
    assert str(caught.value).startswith(f"input_tokens '{text}' cannot be drawn from: {why}")


def test_lengths_have_the_mean_and_deviation_of_their_distribution() -> None:
    assert set(draw(128)) == {128}
    normal = draw("normal:128,32")
    assert normal.mean() == pytest.approx(128, abs=0.5)
    assert normal.std() == pytest.approx(32, rel=0.02)
    lognormal = draw("lognormal:128,0.5")
    assert np.median(lognormal) == pytest.approx(128, rel=0.01)
    assert lognormal.mean() == pytest.approx(128 * math.exp(0.125), rel=0.01)
    assert np.log(lognormal).std() == pytest.approx(0.5, rel=0.02)


def test_uniform_includes_both_ends_as_often_as_the_rest() -> None:
    values, counts = np.unique(draw("uniform:3,5"), return_counts=True)
    assert values.tolist() == [3, 4, 5]
    assert counts == pytest.approx([N / 3] * 3, rel=0.03)


def test_a_mix_takes_its_parts_by_weight() -> None:
    mixed = draw("mix:0.7*128+0.3*uniform:1000,1001")
    assert np.mean(mixed == 128) == pytest.approx(0.7, abs=0.01)
    assert set(mixed) == {128, 1000, 1001}


@given(st.sampled_from(["normal:2,50", "lognormal:1,3", "mix:0.5*normal:1,9+0.5*1"]), st.integers(0, 2**32))
def test_lengths_are_positive_and_fixed_by_the_seed(text: str, seed: int) -> None:
    first = draw(text, seed)
    assert first.min() == 1
    assert first.dtype == np.int64
    assert (first == draw(text, seed)).all()


def test_seconds_are_neither_whole_nor_negative() -> None:
    think = parse("normal:0.5,1", "think_s", whole=False).seconds(np.random.default_rng(0), N)
    assert think.min() == 0
    assert len(np.unique(think)) > N / 2
    assert parse(0, "think_s", whole=False).seconds(np.random.default_rng(0), 2).tolist() == [0, 0]
    with pytest.raises(UsageError, match="think_s '-1' cannot be drawn from: the value, -1, is negative"):
        parse(-1, "think_s", whole=False)


@pytest.mark.parametrize(
    ("text", "typical"),
    [("128", 128), ("normal:128,32", 128), ("lognormal:99,2", 99), ("uniform:64,256", 64), ("mix:0.5*9+0.5*7", 7)],
)
def test_the_typical_length_of_a_distribution(text: str, typical: float) -> None:
    assert parse(text, "input_tokens").typical == typical


def test_lengths_drawn_one_after_another_are_those_of_draws_of_one(tmp_path: Path) -> None:
    """The same seed gives the same lengths either way, and leaves the generator in the same state."""
    lengths_file(tmp_path, "5\n7\n9\n")
    kinds = ["7", "normal:2,3", "lognormal:99,2", "lognormal:1e6,90", "uniform:1,6", "mix:0.5*9+0.5*normal:7,1",
             "empirical:lengths.txt"]  # fmt: skip
    one, other = np.random.default_rng(3), np.random.default_rng(3)
    for text in kinds * 50:
        found = parse(text, "x", folder=tmp_path)
        assert found.token_count(one) == found.tokens(other, 1)[0], text
    assert one.bit_generator.state == other.bit_generator.state


def lengths_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    return path


def test_a_file_of_numbers_serves_either_side(tmp_path: Path) -> None:
    lengths_file(tmp_path, "5\n\n7\n5\n9\n")
    for column in (0, 1):
        found = parse("empirical:lengths.txt", "x", column=column, folder=tmp_path)
        values, counts = np.unique(found.tokens(np.random.default_rng(0), N), return_counts=True)
        assert values.tolist() == [5, 7, 9]
        assert counts == pytest.approx([N / 2, N / 4, N / 4], rel=0.05)
        assert found.typical == 5


@pytest.mark.parametrize(
    "text",
    [
        "100 10\n200 20\r\n",
        '{"input_length": 100, "output_length": 10, "id": 1}\n{"output_length": 20, "input_length": 200}',
    ],
)
def test_pairs_of_a_file_stay_together(tmp_path: Path, text: str) -> None:
    path = lengths_file(tmp_path, text)
    inputs, outputs = (parse(f"empirical:{path}", "x", column=column) for column in (0, 1))
    drawn = draw_pairs(inputs, outputs, np.random.default_rng(0), 1000)
    assert {(int(a), int(b)) for a, b in zip(*drawn, strict=True)} == {(100, 10), (200, 20)}
    # One side of it with something else is drawn by itself.
    apart = draw_pairs(inputs, Fixed(3), np.random.default_rng(0), 1000)
    assert (set(apart[0]), set(apart[1])) == ({100, 200}, {3})
    assert outputs.typical == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lengths.txt holds no line"),
        ("5\n6 7\n", "lengths.txt has lines of one number and lines of two"),
        ("5\n0\n", "lengths.txt:2: no lengths in '0'; write a positive number"),
        ("5\n1 2 3\n", "lengths.txt:2: no lengths in '1 2 3'"),
        ("five", "lengths.txt:1: no lengths in 'five'"),
        ('{"input_length": 5}', "lengths.txt:1: no lengths in "),
        ('{"input_length": true, "output_length": 1}', "lengths.txt:1: no lengths in "),
        ("{", "lengths.txt:1 is not JSON"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputDataError) as caught:
        parse(f"empirical:{lengths_file(tmp_path, text)}", "x").tokens(np.random.default_rng(0), 1)
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match=r"lengths .*none\.txt cannot be read: No such file"):
        parse("empirical:none.txt", "x", folder=tmp_path).tokens(np.random.default_rng(0), 1)
