"""lm-eval, unchanged, against the gateway; and its scores beside those of `trtpipe verify` for the same files."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Cli, Served
from tests.support.paths import ROOT

TASKS = ROOT / "tests" / "data" / "tasks"
LM_EVAL = ROOT / ".venv-lm-eval" / "bin" / "lm_eval"
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not LM_EVAL.exists(), reason="no lm-eval beside this environment: `make setup-lm-eval`"),
]


@pytest.fixture(scope="module")
def url(served: Served) -> str:
    return served.openai


def lm_eval(tmp_path: Path, kind: str, task: str, /, *words: str, **args: object) -> dict[str, Any]:
    """Run lm-eval in the folder of the tasks; its results of the task, by metric and filter."""
    given = ",".join(f"{name}={value}" for name, value in args.items())
    done = subprocess.run(
        [LM_EVAL, "run", "--model", kind, "--tasks", task, "--include_path", TASKS, "--model_args", given,
         "--output_path", tmp_path, *words],
        cwd=TASKS, capture_output=True, text=True, check=False, timeout=1500,
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
             "OPENAI_API_KEY": "none"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (file,) = tmp_path.rglob("results_*.json")
    found: dict[str, Any] = json.loads(file.read_text())["results"][task]
    return found


@pytest.fixture(scope="module")
def verified(cli: Cli, smollm2_hf: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """(task, metric) -> what `trtpipe verify` says of the model alone."""
    files = [word for file in sorted(TASKS.glob("*.yaml")) for word in ("--tasks", str(file))]
    report = json.loads(cli.ok("verify", str(smollm2_hf), "--rows", "1", "--json", *files).out)
    return {(one["task"], one["metric"]): one for one in report["tasks"]}


def test_completions_with_echo_give_the_likelihoods_that_verify_computes(
    served: Served, url: str, smollm2_hf: Path, verified: dict[tuple[str, str], dict[str, Any]], tmp_path: Path
) -> None:
    found = lm_eval(
        tmp_path, "local-completions", "capitals",
        model=served.name, base_url=f"{url}/v1/completions", tokenizer=smollm2_hf, add_bos_token=True,
        num_concurrent=2,
    )  # fmt: skip
    for metric in ("acc", "acc_norm"):
        ours = verified["capitals", metric]
        assert found[f"{metric},none"] == pytest.approx(ours["quantized"]), metric
        assert found[f"{metric}_stderr,none"] == pytest.approx(ours["quantized_stderr"]), metric
    assert 0.3 < found["acc,none"] < 1.0, "a task that all or none is right of compares nothing"


def test_completions_give_the_answers_that_verify_scores(
    served: Served, url: str, smollm2_hf: Path, verified: dict[tuple[str, str], dict[str, Any]], tmp_path: Path
) -> None:
    found = lm_eval(
        tmp_path, "local-completions", "capitals_generated",
        model=served.name, base_url=f"{url}/v1/completions", tokenizer=smollm2_hf, add_bos_token=True,
    )  # fmt: skip
    ours = verified["capitals_generated", "exact_match"]
    assert found["exact_match,first word"] == pytest.approx(ours["quantized"])
    assert found["exact_match_stderr,first word"] == pytest.approx(ours["quantized_stderr"])


def test_chat_completions_are_scored_as_their_answers_are(served: Served, url: str, tmp_path: Path) -> None:
    found = lm_eval(
        tmp_path, "local-chat-completions", "capitals_generated", "--apply_chat_template",
        model=served.name, base_url=f"{url}/v1/chat/completions",
    )  # fmt: skip
    right = []
    for row in map(json.loads, (TASKS / "capitals.jsonl").read_text().splitlines()):
        asked = [{"role": "user", "content": f"The capital of {row['country']} is"}]
        fields = {"max_tokens": 8, "temperature": 0, "stop": [".", "\n"]}
        answer = httpx.post(
            f"{url}/v1/chat/completions", json={"model": served.name, "messages": asked, **fields}, timeout=280
        )
        word = re.search("[A-Z][a-z]+", answer.json()["choices"][0]["message"]["content"])
        right.append(word is not None and word[0] == row["capital"])
    assert found["exact_match,first word"] == pytest.approx(sum(right) / 16)
    assert len(right) == found["sample_len"] == 16
