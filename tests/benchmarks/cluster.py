"""How well a cluster is used, and what its driver costs: `make bench-cluster`, on any machine.

A real Ray cluster of four machines on this one, with made-up cards: two H100s and two A100s. Its stages sleep for the
time that they took elsewhere, in parts of a second, and leave a small file; planning, records, keys, the store, Ray and
its resources are as they are. The matrix is of 24 targets: 2 models, 2 precisions, 2 kinds of GPU, tp 1, 2 and 4.

The bound is what no schedule beats: the longest chain of stages; or for each kind of card the time until its first
build can begin, its builds one after the other on each of its machines, and a package; or all that needs a card, over
all cards.

Cost: targets of one checkpoint that differ in a build setting, with stages that take no time.

    python -m tests.benchmarks.cluster [--scale 0.2] [--targets 24,100,300,1000] [--report FILE.md]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import tempfile
import time
from collections import Counter
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.factories import hf_folder
from tests.support.paths import ROOT
from tests.unit.test_runner import SIZES, Recorder
from trtpipe.pipeline.cluster.driver import Cluster
from trtpipe.pipeline.cluster.work import Answer, Order, Tell
from trtpipe.pipeline.layers import set_layer
from trtpipe.pipeline.resolve import read_spec, resolve
from trtpipe.pipeline.runner import wanted_record
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages import stages_of
from trtpipe.pipeline.store.manifest import Record
from trtpipe.pipeline.store.store import Store

# Seconds of Llama 3 8B's shapes on an H200, as builds of `make gpu-e2e` told them; those of a compiled build are not
# measured, but of the order that TensorRT-LLM's users tell.
SECONDS = {
    "tokenizer": 0.1, "convert": 21.4, "calibrate": 26.9, "quantize": 15.2, "verify": 8.6, "build": 90.0,
    "package": 0.5,
}  # fmt: skip
MACHINES = ("H100", "H100", "A100", "A100")
GPUS, DTYPES, RANKS = ("h100", "a100"), ("bf16", "int8"), (1, 2, 4)


def simulated(scale: float, order: Order, tell: Tell) -> Answer:
    """A stage that takes its time and leaves a file."""
    store, plan = Store(Path(order.home)), read_spec(order.spec, "the order")
    stage = next(one for one in stages_of(plan) if one.name == order.stage)
    digests = {}
    for name, raw in order.inputs.items():
        found = store.find(Record(**raw))
        assert found is not None
        digests[name] = found.manifest.content
    record = wanted_record(stage, plan, digests, store)

    def work(out: Path) -> dict[str, Any]:
        time.sleep(SECONDS[stage.name] * scale)
        (out / "made").write_text(record.key)
        return {}

    with store.locked(record):
        store.make(record, work)
    tell("begins", stage.name)
    return Answer(record=dataclasses.asdict(record), reused=False, reason="simulated", node=os.uname().nodename)


def matrix(models: list[Path]) -> list[BuildSpec]:
    return [target(model, gpu, dtype, tp=tp) for model in models for dtype in DTYPES for gpu in GPUS for tp in RANKS]


def target(model: Path, gpu: str, dtype: str, *settings: str, **options: Any) -> BuildSpec:
    layer = {"model": str(model), "gpu": gpu, "dtype": dtype, **options}
    return resolve([("option", layer), set_layer(SIZES), set_layer(list(settings))])


def bound(plans: list[BuildSpec]) -> float:
    """Seconds that no schedule beats; see above."""
    chains = {plan.target: [stage.name for stage in stages_of(plan)] for plan in plans}
    before = {
        name: sum(SECONDS.get(stage, 0) for stage in chain if stage not in ("build", "package", "tokenizer"))
        for name, chain in chains.items()
    }
    longest = max(before.values()) + SECONDS["build"] + SECONDS["package"]
    found = [longest]
    on_cards = 0.0
    for gpu in GPUS:
        mine = [plan for plan in plans if plan.gpu.name == gpu]
        cards = sum(machine.lower() == gpu for machine in MACHINES)
        first = min(before[plan.target] for plan in mine)
        found.append(first + len(mine) * SECONDS["build"] / cards + SECONDS["package"])
        on_cards += len(mine) * SECONDS["build"]
    shared = Counter(
        (plan.model.source.describe(), plan.mapping.tp_size) for plan in plans if plan.precision.recipe is not None
    )
    calibrated = {model for model, _ in shared}
    on_cards += len(shared) * (SECONDS["quantize"] + SECONDS["verify"]) + len(calibrated) * SECONDS["calibrate"]
    found.append(on_cards / len(MACHINES))
    return max(found)


def run(address: str, plans: list[BuildSpec], scale: float, folder: Path) -> tuple[float, Counter[str]]:
    """(seconds, how often each stage ran on the cluster)."""
    ran: list[str] = []
    cluster = Cluster(
        address, Store(folder), None, lambda target, stage, kind, text: ran.append(stage), partial(simulated, scale)
    )
    try:
        began = time.perf_counter()
        outcomes = cluster.build(plans, lambda plan: Recorder(), None)
        seconds = time.perf_counter() - began
    finally:
        cluster.close()
    failed = [str(outcome.error) for outcome in outcomes if outcome.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} failed: {failed[0]}")
    return seconds, Counter(ran)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.2, help="of the time that stages take")
    parser.add_argument("--targets", default="24,100,300,1000")
    parser.add_argument("--report", type=lambda word: Path(word).absolute())
    args = parser.parse_args()
    import ray
    from ray.cluster_utils import Cluster as Machines

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    root = ROOT
    node: dict[str, Any] = {
        "num_cpus": 16, "object_store_memory": 100 * 2**20, "include_dashboard": False,
        "env_vars": {"PYTHONPATH": str(root)},
    }  # fmt: skip
    made = Machines(initialize_head=True, head_node_args={**node, "num_gpus": 0})
    for kind in MACHINES:
        made.add_node(**node, num_gpus=1, resources={f"accelerator_type:{kind}": 1})
    made.wait_for_nodes()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            text = measure(made.address, Path(scratch), args.scale, [int(word) for word in args.targets.split(",")])
    finally:
        ray.shutdown()
        made.shutdown()
    print(text)
    if args.report:
        args.report.write_text(text, encoding="utf-8")


def measure(address: str, scratch: Path, scale: float, counts: list[int]) -> str:
    os.chdir(scratch)
    models = [hf_folder(scratch / f"model{number}", seed=number, num_attention_heads=4, num_key_value_heads=4)
              for number in range(2)]  # fmt: skip
    plans = matrix(models)
    run(address, plans[:2], 0.0, scratch / "warm")  # workers start
    seconds, ran = run(address, plans, scale, scratch / "matrix")
    least = bound(plans) * scale
    lines = [
        "# Builds on a cluster",
        "",
        f"{datetime.now(timezone.utc):%Y-%m-%d}, {os.cpu_count()} cores, Ray on this machine alone. Written by",
        f"`python -m tests.benchmarks.cluster --scale {scale:g}`, which says what the columns mean.",
        "",
        f"{len(plans)} targets over {len(MACHINES)} machines ({', '.join(MACHINES)}): {seconds:.1f} s, where no",
        f"schedule takes less than {least:.1f} s: {seconds / least:.2f} times the bound.",
        "",
        "| stage | targets that need it | times it ran |",
        "|---|---|---|",
        *(
            f"| {name} | {sum(name in [stage.name for stage in stages_of(plan)] for plan in plans)} | {count} |"
            for name, count in sorted(ran.items())
        ),
        "",
        "What the driver, the store and Ray cost, of stages that take no time:",
        "",
        "| targets | seconds | ms a target |",
        "|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for count in counts:
        many = []
        for size in range(1, count + 1):
            name = scratch / f"same{size}"
            if not name.exists():
                shutil.copytree(models[0], name)
            many.append(target(name, "h100", "bf16", f"build.max_batch_size={size}", "build.max_num_tokens=2048"))
        seconds, _ = run(address, many, 0.0, scratch / f"many{count}")
        lines.append(f"| {count:,} | {seconds:.1f} | {seconds / count * 1e3:.0f} |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
