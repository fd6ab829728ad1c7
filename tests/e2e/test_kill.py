"""Killed at any moment: the next build finishes, and what it made is the same."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Cli
from tests.support.factories import MIXTRAL, hf_folder

pytestmark = pytest.mark.real

# About 50 MB, cast to float32: the copying takes long enough to be hit.
SIZES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 8000, "num_hidden_layers": 6,
}  # fmt: skip
# Models of about the same size, each built and killed beside the other, and how their ranks are divided. A rank file of
# experts is written out of order: each stack from many tensors, and one tensor into the files of several ranks.
CHAINS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({**MIXTRAL, "intermediate_size": 512, "num_local_experts": 8, "num_hidden_layers": 3},
     ["--tp", "2", "--moe-ep", "2"]),
]  # fmt: skip
BUILD = ["--gpu", "cpu", "--dtype", "fp32", "--set", "build.max_input_len=64", "--set", "build.max_seq_len=128"]


def contents(cli: Cli) -> dict[str, str]:
    """Stage -> content digest of every artefact in the home."""
    out = {}
    for path in sorted(cli.home.glob("artefacts/*/*/manifest.json")):
        manifest = json.loads(path.read_text())
        out[manifest["record"]["stage"]] = manifest["content"]
    return out


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_a_build_that_is_killed_again_and_again_is_the_same_build(tmp_path: Path, kills: int) -> None:
    def chain(seed: int) -> int:
        """Builds of one home, killed at random moments; how many were."""
        family, options = CHAINS[seed]
        model = hf_folder(tmp_path / f"model{seed}", **{**SIZES, **family})
        arguments = ["build", "--model", str(model), *BUILD, *options]
        whole = at(tmp_path / f"whole{seed}")
        start = time.monotonic()
        build = whole.start(*arguments)
        build.communicate()
        seconds = time.monotonic() - start
        wanted = contents(whole)
        assert wanted.keys() == {"download", "tokenizer", "convert", "build", "package"}
        rng = random.Random(seed)
        cli = at(tmp_path / str(seed))
        killed = 0
        while killed < kills // len(CHAINS):
            build = cli.start(*arguments)
            time.sleep(rng.uniform(0.1, 0.8 * seconds))
            build.kill()
            build.communicate()
            hit = build.returncode == -signal.SIGKILL
            killed += hit
            # Several kills hit one build before it is finished; one that came too late has let it finish.
            if not hit or killed % 3 == 0:
                cli.ok(*arguments)
                assert contents(cli) == wanted
                assert not list(cli.home.glob("artefacts/*/.*")), "what the kills left behind is swept"
                shutil.rmtree(cli.home)
        if cli.home.exists():
            cli.ok(*arguments)
            assert contents(cli) == wanted
        return killed

    with ThreadPoolExecutor(len(CHAINS)) as pool:
        assert sum(pool.map(chain, range(len(CHAINS)))) == kills


def at(folder: Path) -> Cli:
    folder.mkdir()
    return Cli(folder, folder / "home")
