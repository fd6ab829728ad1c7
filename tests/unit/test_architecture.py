"""The shape of the code, read from its import statements: who may import whom, and where heavy things may be."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from trtpipe.engines import BACKENDS

ROOT = Path(__file__).parent.parent
PACKAGES = ("pipeline", "engines", "triton_repo", "configs")
# Payload that runs inside Triton, never imported by us.
PAYLOAD = ("triton_repo/templates/", "triton_repo/backends/")
HEAVY = {"vllm", "torch", "triton", "transformers", "modelopt", "tensorrt_llm", "ray", "gguf", "accelerate", "pytriton"}
# Run as child processes, or imported by one that is.
WORKERS = (
    {
        "trtpipe.engines.reference.devices",
        "trtpipe.engines.hf.gguf_worker",
        "trtpipe.engines.reference.mapped_tensors",
        "trtpipe.engines.probe_worker",
        "trtpipe.engines.engine_process.vllm_runtime",
    }
    | {"trtpipe.pipeline.serving.docker_server"}
    # Of the gateway, what its processes load.
    | {
        f"trtpipe.pipeline.gateway.{name}"
        for name in ("__main__", "answers", "app", "connections", "preparation", "prompts")
    }
    | {f"trtpipe.pipeline.gateway.{name}" for name in ("prompt_process", "server", "text", "upstream")}
    | {"trtpipe.pipeline.net.h2.pool"}
    # The load tester's own server: a process of its own.
    | {"trtpipe.pipeline.bench.mock_server.server"}
    | {f"trtpipe.pipeline.bench.mock_server.{name}" for name in ("events", "frames", "grpc", "http", "link", "triton")}
    | {f"trtpipe.engines.accuracy.{name}" for name in ("distributions", "models", "watch", "worker")}
    | {f"trtpipe.engines.quantize.{name}" for name in ("calibrate", "encode", "scales", "source", "worker", "writer")}
    | {
        f"trtpipe.engines.backends.reference.{name}"
        for name in (
            "attention",
            "branches",
            "codes",
            "fused",
            "graphs",
            "hf_weights",
            "kernels",
            "kv_codec",
            "layer",
            "linear",
            "model",
            "parallel",
            "products",
            "ranks",
            "weights",
            "rope",
            "sampling",
            "runtime",
            "process",
        )
    }
)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    name_of(path): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if not path.relative_to(ROOT).as_posix().startswith(PAYLOAD)
}


@cache
def imports(module: str) -> frozenset[str]:
    """Every module that `module` names in an import, wherever in the file, except for type checking only."""
    out: set[str] = set()
    todo: list[ast.AST] = [ast.parse(MODULES[module].read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            out.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            assert node.module is not None
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            out.update(name if name in MODULES else node.module for name in inner)
        todo += ast.iter_child_nodes(node)
    return frozenset(out)


def ours(module: str) -> Iterator[str]:
    return (name for name in imports(module) if name.split(".")[0] in PACKAGES)


def within(module: str, *allowed: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in allowed)


def offenders(package: str, *allowed: str) -> set[tuple[str, str]]:
    members = [module for module in MODULES if within(module, package)]
    assert members
    return {(module, name) for module in members for name in ours(module) if not within(name, *allowed)}


def test_imports_run_one_way() -> None:
    assert offenders("engines", "engines") == set()
    # The checker's facts are read by itself: what a repository may say is no business of the pipeline's.
    assert offenders("triton_repo", "triton_repo", "engines", "configs") == set()
    assert offenders("configs") == set()
    assert offenders("pipeline", *PACKAGES) == set()


def test_the_load_tester_knows_urls_and_nothing_else() -> None:
    known = (
        "trtpipe.pipeline.bench",
        "trtpipe.pipeline.net.h2",
        "trtpipe.pipeline.net.triton_metrics",
        "trtpipe.pipeline.net.fetch",
        "trtpipe.pipeline.store.folders",
        "trtpipe.pipeline.pages.render",
        "trtpipe.engines.errors",
        "trtpipe.engines.json_input",
        "trtpipe.engines.process",
    )
    assert offenders("trtpipe.pipeline.bench", *known) == set()


def test_what_runs_inside_triton_imports_nothing_of_ours() -> None:
    payload = [path for folder in PAYLOAD for path in sorted((ROOT / folder).rglob("*.py"))]
    assert payload
    for path in payload:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            # The LLM API's model is the engine itself: it runs in the toolchain's image alone.
            own = {"tensorrt_llm"} if path.parent.name == "llmapi" else set()
            assert not {name.split(".")[0] for name in names} & ({*PACKAGES, *HEAVY} - own), path


def test_heavy_packages_are_named_in_workers_only() -> None:
    # Ray's own client has to be here, where work is divided; `--hosts` and `--executor ray` alone import it.
    asked_for = {"trtpipe.pipeline.bench.workers.ray", "trtpipe.pipeline.cluster.driver"}
    naming = {module for module in MODULES if {name.split(".")[0] for name in imports(module)} & HEAVY}
    assert naming <= WORKERS | asked_for


def test_nothing_the_command_can_reach_is_heavy() -> None:
    reached: set[str] = set()
    todo = ["trtpipe.pipeline.cli.app", *BACKENDS.values()]
    while todo:
        module = todo.pop()
        if module in reached or module not in MODULES:
            continue
        reached.add(module)
        # Importing a.b.c runs a and a.b as well.
        todo += [name for found in ours(module) for name in parents(found)]
    # __main__ is the same command by another door.
    assert {module for module in MODULES if within(module, "pipeline")} - {
        "trtpipe.pipeline.__main__"
    } - WORKERS <= reached
    assert reached & WORKERS == set()


def parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


@pytest.mark.process
def test_the_command_starts_in_a_blink() -> None:
    slow = (
        "yaml",
        "pydantic",
        "rich",
        "numpy",
        "httpx",
        "torch",
        "jinja2",
        "tokenizers",
        "huggingface_hub",
        "tritonclient",
        "docker",
        "requests",
    )
    script = f"import sys, trtpipe.pipeline.cli.app; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


@pytest.mark.process
def test_planning_and_every_stage_load_nothing_heavy() -> None:
    script = (
        "import sys, trtpipe.pipeline.spec, trtpipe.pipeline.runner, trtpipe.pipeline.serving.serve, trtpipe.pipeline.store.gc, trtpipe.pipeline.cli.doctor;"
        "from trtpipe.pipeline.spec import recipe_layer, resolve; resolve([recipe_layer('smollm2-cpu')]);"
        f"print(sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def calls(path: Path) -> set[str]:
    return {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    }


def test_only_the_console_prints_and_only_the_command_exits() -> None:
    speaks = {"print", "typer.echo", "click.echo", "sys.stdout.write", "sys.stderr.write"}
    exits = {"sys.exit", "exit", "quit", "os._exit"}
    consoles = {"trtpipe.pipeline.cli.console", "trtpipe.pipeline.cli.console_top"}
    # The gateway's first line is for whoever started it.
    consoles |= {"trtpipe.pipeline.gateway.process"}
    assert {module for module in MODULES if calls(MODULES[module]) & speaks} - WORKERS == consoles
    assert {module for module in MODULES if calls(MODULES[module]) & exits} - WORKERS == {"trtpipe.pipeline.cli.app"}


def test_no_child_is_started_where_the_current_folder_decides_what_runs() -> None:
    """`python -m` looks for modules there first; trtpipe.engines.process.python_command does not."""
    for module, path in MODULES.items():
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        assert "-m" not in {node.value for node in nodes if isinstance(node, ast.Constant)}, module


def test_no_file_names_a_place_of_one_machine() -> None:
    place = re.compile(r"(?<![\w.$}/-])/(?:home|root|work|Users|mnt)/\w")
    files = [ROOT / "pyproject.toml", *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile"]
    for folder in (*PACKAGES, "tests"):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".j2", ".json")]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if place.search(line)
    ]
    assert found == []


def test_no_other_distribution_claims_our_names() -> None:
    distributions = importlib.metadata.packages_distributions()
    assert {owner for name in PACKAGES for owner in distributions.get(name, [])} <= {"trtpipe"}


def test_every_stage_and_command_has_a_module() -> None:
    stages = {module.rpartition(".")[2] for module in MODULES if module.startswith("trtpipe.pipeline.stages.")} - {
        "base"
    }
    assert stages == {"download", "convert", "calibrate", "quantize", "verify", "build", "tokenizer", "package"}
    assert set(BACKENDS.values()) <= set(MODULES)
