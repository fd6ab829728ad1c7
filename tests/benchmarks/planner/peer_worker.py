"""What NVIDIA's AIConfigurator predicts of measured runs. Executed by the Python of an environment that has it.

    python peer_worker.py ROWS.json PREDICTED.jsonl OPERATIONS.json MINUTES

A row is {model: folder with config.json beside ROWS.json, system, tp, batch, isl, osl, dtype, experts}.
PREDICTED.jsonl gets a line for each, {row, predicted}, where `predicted` is {tokens_per_s, ttft_ms, tpot_ms} or
{refused: why}; rows that it has already are not predicted again, and after MINUTES no further row is begun. A batch
that AIConfigurator takes for too large is made smaller until it fits. OPERATIONS.json gets what its tables measured of
single operations of TensorRT-LLM, in seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

MODES = {"fp8": "fp8", "nvfp4": "nvfp4"}
SHRINK, TRIES = 0.85, 8


def predict(api: Any, row: dict[str, Any], folder: Path) -> dict[str, Any]:
    gemm = MODES.get(row["dtype"], "bfloat16")
    rest = "bfloat16" if gemm == "bfloat16" else "fp8"
    experts = {"moe_tp_size": row["tp"], "moe_ep_size": 1, "moe_quant_mode": gemm} if row["experts"] else {}
    batch, why = row["batch"], ""
    for _ in range(TRIES):
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                found = api.cli_estimate(
                    str(folder / row["model"]), row["system"], batch_size=max(1, batch), isl=row["isl"], osl=row["osl"],
                    tp_size=row["tp"], gemm_quant_mode=gemm, kvcache_quant_mode=rest, fmha_quant_mode=rest, **experts,
                )  # fmt: skip
        except Exception as error:  # whatever it raises is why this row has no figure
            why = f"{type(error).__name__}: {error}"[:200]
            if "OOM" not in why:
                break
            batch = int(batch * SHRINK)
        else:
            values = {"tokens_per_s": found.tokens_per_second, "ttft_ms": found.ttft, "tpot_ms": found.tpot}
            return {name: float(value) for name, value in values.items()}
    return {"refused": why}


def operations() -> list[dict[str, Any]]:
    """Products in BF16 of layers' sizes, decode attention over more than 64 MB of keys and values, prompts of more than
    2,000 tokens, all-reduces over NVLink."""
    pandas = importlib.import_module("pandas")
    core = importlib.import_module("aiconfigurator_core")
    data = Path(core.__path__[0]) / "systems" / "data"
    out: list[dict[str, Any]] = []
    for system, gpu in (("h100_sxm", "h100"), ("h200_sxm", "h200"), ("a100_sxm", "a100"), ("l40s", "l40s")):

        def table(kind: str, name: str, system: str = system) -> Any:
            newest = sorted((data / system / kind / "trtllm").iterdir())[-1]
            return pandas.read_parquet(newest / f"{name}_perf.parquet")

        of = table("gemm", "gemm")
        for row in of[
            (of.gemm_dtype == "bfloat16") & of.n.between(4096, 16384) & of.k.between(4096, 16384)
        ].itertuples():
            out.append({"what": "BF16 product", "gpu": gpu, "m": row.m, "n": row.n, "k": row.k, "ms": row.latency})
        for name in ("generation_attention", "context_attention"):
            of = table("attention", name)
            of = of[(of.head_dim == 128) & (of.num_key_value_heads > 0) & (of.num_heads >= of.num_key_value_heads)]
            if "window_size" in of:
                of = of[of.window_size == 0]
            for row in of.itertuples():
                eight = row.kv_cache_dtype == "fp8"
                length = row.isl + (row.step if name[0] == "g" else 0)
                moved = row.batch_size * length * 2 * row.num_key_value_heads * 128 * (1 if eight else 2)
                if (name[0] == "g" and moved > 64e6) or (
                    name[0] == "c" and length > 2000 and (row.attn_dtype == "fp8") == eight
                ):
                    what = "decode attention" if name[0] == "g" else "prompt attention"
                    out.append(
                        {"what": what, "gpu": gpu, "batch": row.batch_size, "length": length, "heads": row.num_heads,
                         "own": row.num_key_value_heads, "eight": eight, "ms": row.latency}
                    )  # fmt: skip
        if gpu != "l40s":
            for row in table("comm", "custom_allreduce").itertuples():
                out.append(
                    {
                        "what": "NVLink all-reduce",
                        "gpu": gpu,
                        "tp": row.num_gpus,
                        "bytes": 2 * row.message_size,  # a number of values in 16 bits
                        "ms": row.latency,
                    }
                )
    return [{key: getattr(value, "item", lambda value=value: value)() for key, value in one.items()} for one in out]


def main() -> None:
    rows, out, measured = map(Path, sys.argv[1:4])
    until = time.monotonic() + 60 * float(sys.argv[4])
    if not measured.is_file():
        measured.write_text(json.dumps(operations()))
    api = importlib.import_module("aiconfigurator.cli.api")
    known = [json.loads(line)["row"] for line in out.read_text().splitlines()] if out.is_file() else []
    with out.open("a") as kept:
        for row in json.loads(rows.read_text()):
            if time.monotonic() > until:
                return
            if row not in known:
                kept.write(json.dumps({"row": row, "predicted": predict(api, row, rows.parent)}) + "\n")
                kept.flush()


if __name__ == "__main__":
    main()
