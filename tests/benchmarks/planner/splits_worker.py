"""How NVIDIA's AIConfigurator ranks disaggregated serving. Executed by the Python of an environment that has it.

    python splits_worker.py CASES.json RANKED.jsonl

A case is {model: folder with config.json beside CASES.json, system, gpus, isl, osl, ttft, tpot} with times in ms.
RANKED.jsonl gets a line for each, {case, together, split, ways}: tokens a second of a GPU of the best of either kind,
and the best split as [engines for prompts, their GPUs, engines for answers, their GPUs]. Those there are left out.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

COLUMNS = ("(p)workers", "(p)tp", "(d)workers", "(d)tp")


def rank(api: Any, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = api.cli_default(
            str(folder / case["model"]), case["gpus"], case["system"], isl=case["isl"], osl=case["osl"],
            ttft=case["ttft"], tpot=case["tpot"],
        )  # fmt: skip
    best = {name: table.iloc[0] for name, table in found.best_configs.items() if len(table)}
    each = {name: float(row["tokens/s/gpu"]) for name, row in best.items()}
    ways = [int(best["disagg"][column]) for column in COLUMNS] if "disagg" in best else None
    return {"case": case, "together": each.get("agg"), "split": each.get("disagg"), "ways": ways}


def main() -> None:
    cases, out = map(Path, sys.argv[1:3])
    api = importlib.import_module("aiconfigurator.cli.api")
    known = [json.loads(line)["case"] for line in out.read_text().splitlines()] if out.is_file() else []
    for case in json.loads(cases.read_text()):
        if case not in known:
            line = json.dumps(rank(api, case, cases.parent)) + "\n"
            with out.open("a") as kept:
                kept.write(line)


if __name__ == "__main__":
    main()
