"""The commands that are fuzzed, what each reads, and what is wrong with what it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.attacks.world import MODEL, TARGET, World, artefacts, members

BENCH = ("bench", "--grpc-url", "127.0.0.1:1", "--protocol", "grpc", "--tokenizer", "hf/tokenizer.json")

QUANTIZE = ("quantize", "hf", "new", "--quant", "fp8", "--samples", "4", "--seq-len", "32", "--calib")


@dataclass(frozen=True, kw_only=True)
class Target:
    """One command and what it reads.

    arguments  of the command; {yaml} stands for a mutated YAML value
    files      patterns of the files of the world of which one is mutated
    changes    folders that the command changes, which are made anew for each run
    makes      what else it makes in the working folder
    wrong      says what is wrong with what a successful command has made; None for nothing
    home       the store: the one that the target was built in, or `elsewhere`, which is empty
    share      runs of this one, beside those of others
    alone      run within the test's process only, where no child is started and no server is waited for
    """

    arguments: tuple[str, ...]
    files: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    wrong: Callable[[World], str | None] = lambda world: None
    home: str = "home"
    share: int = 1
    alone: bool = False


def other_artefacts(world: World) -> str | None:
    """Which artefact that a run folder links to is not as it was made."""
    for makes, files in artefacts(world.work, world.root, world.root).items():
        expected = world.artefacts.get(makes, {})
        for name in files.keys() | expected.keys():
            if files.get(name) != expected.get(name):
                return f"{makes}/{name} is not as it was made"
    return None


def other_export(world: World) -> str | None:
    """Which member of an export is not as it was made, but for the settings in its index."""
    found = members(world.work / "new.tar")
    other = [name for name, digest in world.exported.items() if found.get(name) != digest and name != "trtpipe.json"]
    return f"{other[0]} is not as it was made" if other else None


STORE = ("home/artefacts/**/*", "home/digests.json", "home/roots/*", f"work/runs/{TARGET}/*.json")
MANIFESTS = ("home/artefacts/*/*/manifest.json", "home/digests.json", "home/roots/*", f"work/runs/{TARGET}/*.json")
BOTH = ("home", "work/runs")
ELSEWHERE = ("elsewhere", "work/runs")
TARGETS: dict[str, Target] = {
    "inspect": Target(arguments=("inspect", "hf"), files=("work/hf/*",), share=3),
    "inspect-checkpoint": Target(arguments=("inspect", "checkpoint"), files=("work/checkpoint/*",), share=3),
    "inspect-against": Target(
        arguments=("inspect", "checkpoint", "--verify-against", "hf"), files=("work/checkpoint/*", "work/hf/*"), share=2
    ),
    "convert": Target(arguments=("convert", "hf", "new"), files=("work/hf/*",), makes=("new",), share=3),
    "restore": Target(
        arguments=("restore", "checkpoint", "new"), files=("work/checkpoint/*",), makes=("new",), share=2
    ),
    "settings": Target(arguments=("settings", "--recipe", "recipe.yaml"), files=("work/recipe.yaml",), share=2),
    "set": Target(arguments=("settings", *MODEL, "--set", "build.tokens_per_block={yaml}")),
    "set-name": Target(arguments=("settings", *MODEL, "--set", "calibration={yaml}")),
    "status": Target(arguments=("status", *MODEL), files=(*STORE, "work/hf/*")),
    "build": Target(arguments=("build", *MODEL), files=("work/hf/*",), changes=BOTH),
    "build-store": Target(arguments=("build", *MODEL), files=STORE, changes=BOTH, wrong=other_artefacts, share=2),
    "build-manifest": Target(arguments=("build", *MODEL), files=MANIFESTS, changes=BOTH, wrong=other_artefacts),
    "gc": Target(arguments=("gc",), files=(*MANIFESTS, "home/servers/*"), changes=BOTH, share=2),
    "scrub": Target(arguments=("scrub",), files=STORE, changes=("home",)),
    "export": Target(
        arguments=("export", TARGET, "-o", "new.tar"), files=STORE, changes=BOTH, makes=("new.tar",),
        wrong=other_export,
    ),
    "import": Target(
        arguments=("import", "out.tar"), files=("work/out.tar",), changes=BOTH, wrong=other_artefacts, share=3
    ),
    "build-from": Target(
        arguments=("build", "--from", "out.tar"), files=("work/out.tar",), changes=BOTH, wrong=other_artefacts, share=2
    ),
    "import-elsewhere": Target(
        arguments=("import", "out.tar"), files=("work/out.tar",), changes=ELSEWHERE, home="elsewhere",
        wrong=other_artefacts, share=3,
    ),
    "build-from-elsewhere": Target(
        arguments=("build", "--from", "out.tar"), files=("work/out.tar",), changes=ELSEWHERE, home="elsewhere",
        wrong=other_artefacts,
    ),
    "push": Target(arguments=("push", TARGET, "other"), files=STORE, changes=BOTH, makes=("other",)),
    "pull": Target(
        arguments=("pull", TARGET, "shelf"), files=("work/shelf/**/*",), changes=BOTH, wrong=other_artefacts, share=2
    ),
    "pull-elsewhere": Target(
        arguments=("pull", TARGET, "shelf"), files=("work/shelf/**/*",), changes=ELSEWHERE, home="elsewhere",
        wrong=other_artefacts, share=2,
    ),
    "search": Target(arguments=("search", "shelf"), files=("work/shelf/**/*",)),
    "provenance": Target(arguments=("provenance", TARGET), files=MANIFESTS),
    "verify-provenance": Target(arguments=("verify-provenance", TARGET), files=STORE),
    "statement": Target(
        arguments=("verify-provenance", TARGET, "--statement", "statement.json"), files=("work/statement.json",),
        share=2,
    ),
    "passport": Target(arguments=("passport", TARGET), files=("home/artefacts/package/*/files/**/*.json",)),
    "check": Target(arguments=("check", "nvidia"), files=("work/nvidia/**/*",), share=2),
    "check-llmapi": Target(arguments=("check", "llmapi"), files=("work/llmapi/**/*",), share=2),
    "check-own": Target(arguments=("check", TARGET), files=("home/artefacts/package/*/files/**/*",), share=2),
    "migrate": Target(
        arguments=("migrate", TARGET, "--to", "vllm", "--gpu", "h100", "-o", "new"),
        files=("home/artefacts/package/*/files/**/*", f"work/runs/{TARGET}/plan.json"), makes=("new",), share=2,
    ),
    "serve": Target(
        arguments=("serve", TARGET), files=("home/artefacts/package/*/**/*",), changes=("home",), alone=True
    ),
    "adapter": Target(arguments=("settings", *MODEL, "--lora", "a=adapter"), files=("work/adapter/*",)),
    "monitoring": Target(
        arguments=("monitoring", TARGET, "-o", "new"), files=("home/artefacts/package/*/**/*",), makes=("new",)
    ),
    "deploy": Target(
        arguments=("deploy", "k8s", TARGET, "-o", "new", "--pvc", "x", "--image", "x"),
        files=("home/artefacts/package/*/files/**/*.json",), makes=("new",),
    ),
    "deploy-set": Target(
        arguments=("deploy", "k8s", TARGET, "-o", "new", "--pvc", "x", "--image", "x", "--set", "cpus={yaml}"),
        makes=("new",),
    ),
    "ps": Target(arguments=("ps",), files=("home/servers/*",), changes=("home/servers",), share=2),
    "stop": Target(arguments=("stop",), files=("home/servers/*",), changes=("home/servers",)),
    "doctor": Target(arguments=("doctor",), files=("home/servers/*", "home/digests.json"), changes=("home/servers",)),
    "gpus": Target(arguments=("gpus",), files=("home/gpus/*",), share=2),
    "plan": Target(
        arguments=("plan", "--model", "hf", "--gpu", "h100", "--input-tokens", "64", "--output-tokens", "64"),
        files=("work/hf/config.json", "home/gpus/*"),
    ),
    "plan-load": Target(
        arguments=("plan", "--model", "llama3-8b", "--gpu", "h100", "--tp", "1", "--load", "load.yaml"),
        files=("work/load.yaml",),
    ),
    "plan-lengths": Target(
        arguments=("plan", "--model", "llama3-8b", "--gpu", "h100", "--tp", "1", "--load", "lines.yaml"),
        files=("work/lines.yaml", "work/lengths.txt"),
    ),
    "quantize": Target(
        arguments=(*QUANTIZE, "texts.txt"), files=("work/texts.txt", "work/hf/*"), makes=("new", "new.log"), alone=True
    ),
    "quantize-lines": Target(
        arguments=(*QUANTIZE, "texts.jsonl"), files=("work/texts.jsonl",), makes=("new", "new.log"), alone=True, share=2
    ),
    "verify": Target(
        arguments=("verify", "hf", "checkpoint", "--text", "texts.jsonl", "--rows", "2", "--seq-len", "16"),
        files=("work/texts.jsonl", "work/hf/*"), alone=True,
    ),
    "compare": Target(arguments=("compare", "one/report.json", "two/report.json"), files=("work/one/*",), share=2),
    "again": Target(
        arguments=("bench", "again", "one/report.json", "--tokenizer", "hf/tokenizer.json"), files=("work/one/*",),
        alone=True,
    ),
    "bench-load": Target(
        arguments=(*BENCH, "--load", "lines.yaml"), files=("work/lines.yaml", "work/lengths.txt", "work/hf/tokenizer*"),
        alone=True,
    ),
    "bench-prompts": Target(
        arguments=(*BENCH, "--concurrency", "1", "--requests", "2", "--prompts", "prompts.jsonl"),
        files=("work/prompts.jsonl",), alone=True,
    ),
    "bench-sharegpt": Target(
        arguments=(*BENCH, "--concurrency", "1", "--requests", "2", "--sharegpt", "sharegpt.json"),
        files=("work/sharegpt.json",), alone=True,
    ),
    "bench-trace": Target(arguments=(*BENCH, "--trace", "trace.jsonl"), files=("work/trace.jsonl",), alone=True),
    "bench-sampling": Target(
        arguments=(*BENCH, "--concurrency", "1", "--requests", "2", "--sampling", "top_p={yaml}"), alone=True
    ),
}  # fmt: skip
