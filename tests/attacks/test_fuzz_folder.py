"""Damaged folders: each is refused by our own error class or is a sound folder; nothing else happens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.attacks.mutations import mutate
from tests.attacks.world import SHAPES
from tests.support.factories import hf_folder
from trtpipe.engines.checkpoint.convert import check_source
from trtpipe.engines.errors import TrtpipeError
from trtpipe.engines.hf.folder import locate_tensors, read_model_config


@pytest.mark.parametrize("rounds", [2_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_damage_is_always_told_in_our_own_words(tmp_path: Path, rounds: int) -> None:
    folder = hf_folder(tmp_path / "hf", shards=2, tokenizer=False, **SHAPES)
    files = ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors")
    sound = {folder / name: (folder / name).read_bytes() for name in files}
    rng = random.Random(rounds)
    refusals: list[TrtpipeError] = []
    for _ in range(rounds):
        path = rng.choice(list(sound))
        path.write_bytes(mutate(rng, path.name, sound[path]))
        try:
            check_source(folder, read_model_config(folder), locate_tensors(folder))
        except TrtpipeError as error:
            refusals.append(error)
        finally:
            path.write_bytes(sound[path])
    assert {error.exit_code for error in refusals} == {3}
    assert not [error for error in refusals if "\n" in str(error)]
    # A changed epsilon or an extra key is no damage; most of the rest is.
    assert len(refusals) > rounds * 0.6
