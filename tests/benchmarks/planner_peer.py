"""What NVIDIA's AIConfigurator says of measured runs. Executed by the Python of an environment that has it.

    python planner_peer.py ROWS.json SAID.json

A row is {model: folder with config.json, system, tp, batch, isl, osl, dtype}; what is said of it {tokens_per_s, ttft_ms,
tpot_ms}, or {refused: why}. A batch that it takes for too large is made smaller until it fits.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

MODES = {"fp8": "fp8", "nvfp4": "nvfp4"}
SHRINK, TRIES = 0.85, 8


def say(api: Any, row: dict[str, Any]) -> dict[str, Any]:
    gemm = MODES.get(row["dtype"], "bfloat16")
    rest = "bfloat16" if gemm == "bfloat16" else "fp8"
    experts = {"moe_tp_size": row["tp"], "moe_ep_size": 1, "moe_quant_mode": gemm} if row["experts"] else {}
    batch, why = row["batch"], ""
    for _ in range(TRIES):
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                found = api.cli_estimate(
                    row["model"], row["system"], batch_size=max(1, batch), isl=row["isl"], osl=row["osl"],
                    tp_size=row["tp"], gemm_quant_mode=gemm, kvcache_quant_mode=rest, fmha_quant_mode=rest, **experts,
                )  # fmt: skip
        except Exception as error:  # whatever it raises is why this row has no figure
            why = f"{type(error).__name__}: {error}"[:200]
            if "OOM" not in why:
                break
            batch = int(batch * SHRINK)
        else:
            return {
                "tokens_per_s": float(found.tokens_per_second), "ttft_ms": float(found.ttft), "tpot_ms": float(found.tpot),
            }  # fmt: skip
    return {"refused": why}


def main() -> None:
    rows, out = map(Path, sys.argv[1:])
    api = importlib.import_module("aiconfigurator.cli.api")
    said = [say(api, row) for row in json.loads(rows.read_text())]
    out.write_text(json.dumps(said))


if __name__ == "__main__":
    main()
