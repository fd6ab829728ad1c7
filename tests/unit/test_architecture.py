"""The shape of the code, read from its import statements: who may import whom, and where heavy things may be."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from trtpipe.engines import BACKENDS

PACKAGES = ("pipeline", "engines", "triton_repo", "configs")
# Lowest first. A room is a folder of pipeline/, or another package; `pipeline` are the modules in that folder itself.
LAYERS = (
    "engines", "configs", "triton_repo", "store net pages", "bench", "planner", "sources execution accuracy prove tune",
    "pipeline stages", "registry gateway", "serving cluster", "deploy", "api", "cli",
)  # fmt: skip
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms.split()}
# Payload that runs inside Triton, never imported by us.
PAYLOAD = ("triton_repo/templates/", "triton_repo/backends/")
HEAVY = {"vllm", "torch", "triton", "transformers", "modelopt", "tensorrt_llm", "ray", "gguf", "accelerate", "pytriton"}
# What has a process of its own, and Ray's client where work is divided.
HEAVY_PLACES = re.compile(r"engines/(quantize|accuracy|reference|engine_process)/|_worker\.py$|/ray\.py$|/cluster/")
PATHS = [
    path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if not path.relative_to(ROOT).as_posix().startswith(PAYLOAD)
]
MODULES = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in PATHS}


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path: Path, *, typing: bool = True) -> Iterator[str]:
    """Every module and name that an import statement of the file names, wherever it stands."""
    for_types: set[ast.AST] = set()
    if not typing:
        guards = (
            node for node in nodes(path) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        for_types = {node for guard in guards for statement in guard.body for node in ast.walk(statement)}
    for node in nodes(path):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str:
    package, _, rest = name.partition(".")
    inner = rest.partition(".")[0]
    return package if package != "pipeline" else inner if inner in RANK else "pipeline"


def test_a_room_imports_lower_rooms_only() -> None:
    for module, path in MODULES.items():
        here = room(module)
        for name in imports(path):
            there = room(name.removeprefix("trtpipe."))
            inside = {here, there} <= {"pipeline", "stages"} or here == there
            if name.startswith("trtpipe.") and there in RANK:
                assert inside or RANK[there] < RANK[here], f"{module} imports {name}"


def test_every_folder_of_the_pipeline_has_a_layer() -> None:
    folders = {path.name for path in (ROOT / "pipeline").iterdir() if (path / "__init__.py").exists()}
    assert folders == RANK.keys() - {"engines", "configs", "triton_repo", "pipeline"}


def test_heavy_packages_are_imported_by_workers_only() -> None:
    for path in PATHS:
        if not HEAVY_PLACES.search(path.relative_to(ROOT).as_posix()):
            assert not {name.split(".")[0] for name in imports(path, typing=False)} & HEAVY, path


def test_what_runs_inside_triton_imports_nothing_of_ours() -> None:
    payload = [path for folder in PAYLOAD for path in sorted((ROOT / folder).rglob("*.py"))]
    assert payload
    for path in payload:
        # The LLM API's model is the engine itself: it runs in the toolchain's image alone.
        own = {"tensorrt_llm"} if path.parent.name == "llmapi" else set()
        assert not {name.split(".")[0] for name in imports(path)} & ({"trtpipe", *PACKAGES, *HEAVY} - own), path


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
    modules = ("spec", "runner", "serving.serve", "serving.references", "cli.doctor", "registry.package")
    script = (
        f"import sys, {', '.join(f'trtpipe.pipeline.{module}' for module in modules)};"
        "from trtpipe.pipeline.layers import recipe_layer;"
        "from trtpipe.pipeline.resolve import resolve; resolve([recipe_layer('smollm2-cpu')]);"
        f"print(sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def calls(path: Path) -> set[str]:
    return {ast.unparse(node.func) for node in nodes(path) if isinstance(node, ast.Call)}


def test_only_the_command_prints_and_exits() -> None:
    speaks = {"print", "typer.echo", "click.echo", "sys.stdout.write", "sys.stderr.write"}
    exits = {"sys.exit", "exit", "quit", "os._exit"}
    for module, path in MODULES.items():
        # A program of its own speaks and ends as it likes.
        if not module.startswith("pipeline.cli.") and "__main__" not in path.read_text(encoding="utf-8"):
            assert not calls(path) & (speaks | exits), module


def test_no_child_is_started_where_the_current_folder_decides_what_runs() -> None:
    """`python -m` looks for modules there first; trtpipe.engines.process.python_command does not."""
    for module, path in MODULES.items():
        assert "-m" not in {node.value for node in nodes(path) if isinstance(node, ast.Constant)}, module


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


def test_only_one_name_is_installed() -> None:
    distributions = importlib.metadata.packages_distributions()
    assert distributions.get("trtpipe", ["trtpipe"]) == ["trtpipe"]
    assert not [name for name in PACKAGES if "trtpipe" in distributions.get(name, [])]


def test_every_runtime_has_a_module() -> None:
    assert {module.removeprefix("trtpipe.") for module in BACKENDS.values()} <= MODULES.keys()
