"""Analysis of a model's Python files as syntax trees, without running them: parameters and tensors that they look up
without a default, and outputs that they request from other models."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from trtpipe.engines.json_input import read_bounded
from trtpipe.triton_repo.check.faults import Report, did_you_mean, nearest
from trtpipe.triton_repo.check.models import SCRIPT, Model

CLASS = "TritonPythonModel"
# Marks this project's own scripts, which are stricter than NVIDIA's.
OWN_MODULE = "trtpipe_text.py"
# Attributes of NVIDIA's BLS decoder that list the outputs requested from each model.
_ASKED = {"_preproc_outputs": "preprocessing", "_llm_outputs": "engine", "_postproc_outputs": "postprocessing"}
# Modules that lie beside a script.
_BESIDE = ("helpers", "lib", "trtpipe_text")
# Largest script that is parsed: NVIDIA's largest has 50 kB, and a syntax tree takes up to 700 times the memory of its
# text.
_LARGEST = 1 << 18


@dataclass
class Script:
    """Content of the Python files of a version folder.

    words       all strings in them
    parameters  names that are looked up as `parameters[name]` while the model is initialised
    inputs, outputs  tensors whose types are looked up in the configuration during initialisation
    asked       outputs that are requested from other models, by role
    sends       whether it sends responses, instead of returning them
    real        whether the script has code: an empty file stands for a script that is elsewhere
    unread      whether it is missing or broken, so that its lookups are unknown
    own         whether it is a script of this project
    """

    words: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)
    asked: dict[str, list[str]] = field(default_factory=dict)
    sends: bool = False
    real: bool = False
    unread: bool = False
    own: bool = False


@dataclass
class _Parsed:
    """What one file of a script says.

    script      its lookups
    names       its classes and functions
    imported    whether it may take TritonPythonModel from elsewhere
    beside      modules that it imports from its own folder, each with the line
    code        whether it has a statement
    real        whether it has a class or a function, at any depth
    """

    script: Script
    names: set[str]
    imported: bool
    beside: list[tuple[str, int]]
    code: bool
    real: bool


def read_script(model: Model, report: Report) -> Script:
    """Read the scripts of a model's newest version; report a missing or broken one."""
    script = Script()
    folder = model.version_folder
    if folder is None or model.config is None or model.role == "ensemble":
        return script
    python = model.backend in ("python", "")
    main = model.config.default_model_filename or SCRIPT
    for version in model.versions:
        if python and not (model.folder / str(version) / main).is_file():
            report.error(
                "model-script",
                model.folder / str(version),
                f"has no {main}",
                why="the Python backend runs it",
                remedy=f"copy {main} of the release's template into it",
            )
            script.unread = True
            return script
    if not python:
        return script
    script.own = (folder / OWN_MODULE).is_file()
    for path in sorted({folder / main, *folder.glob("*.py"), *folder.glob("lib/*.py")}):
        parsed = _read(path, report) if path.is_file() else None
        if parsed is None:
            script.unread |= path == folder / main
        else:
            _add(parsed.script, script)
            if path == folder / main:
                _check_main(parsed, path, folder, report)
                script.real = parsed.real
    return script


def check_script(model: Model, script: Script, report: Report) -> None:
    """Report what the script looks up without a default and the configuration lacks."""
    for name in sorted(script.parameters - set(model.parameters)):
        near = nearest(name, model.parameters)
        report.error(
            "missing-parameter",
            (model.path, f"parameter {name}"),
            "is missing",
            why="the model's script looks it up without a default",
            remedy=did_you_mean(near) or "add it, if need be with an empty value",
        )
    for kind, wanted, there in (("input", script.inputs, model.inputs()), ("output", script.outputs, model.outputs())):
        for name in sorted(wanted - set(there)):
            report.error(
                "missing-tensor",
                (model.path, f"{kind} {name}"),
                "is missing",
                why="the model's script looks its type up when it is loaded",
                remedy=did_you_mean(nearest(name, there)) or "take the tensors of the script's own template",
            )
            report.blame(model.name, name)


def _read(path: Path, report: Report) -> _Parsed | None:
    try:
        if path.stat().st_size > _LARGEST:
            return None
        return _parse(read_bounded(path, _LARGEST))
    except SyntaxError as error:
        # Not reported: a newer Python allows more inside f-strings than this one.
        if "f-string" not in str(error.msg):
            report.error(
                "model-script", (path, f"line {error.lineno}"), "is not Python", why=str(error.msg), remedy="replace it"
            )
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        report.error("model-script", path, "cannot be read", why=str(error))
    return None


# A repository is read several times: before and after it is placed, and once more when it is served.
@lru_cache(maxsize=32)
def _parse(text: bytes) -> _Parsed:
    """Raises SyntaxError, and others for a text that Python's parser does not bear."""
    tree = ast.parse(text)
    script = Script()
    real = _collect(tree, script)
    beside = []
    for node in tree.body:
        modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module]
        beside += [(module, node.lineno) for module in modules if module.split(".")[0] in _BESIDE]
    return _Parsed(
        script=script,
        names={node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))},
        imported=any(
            isinstance(node, (ast.ImportFrom, ast.Assign)) and (_names(node, CLASS) or _star(node))
            for node in tree.body
        ),
        beside=beside,
        code=bool(tree.body),
        real=real,
    )


def _add(found: Script, script: Script) -> None:
    script.words |= found.words
    script.parameters |= found.parameters
    script.inputs |= found.inputs
    script.outputs |= found.outputs
    script.asked.update(found.asked)
    script.sends |= found.sends


def _check_main(parsed: _Parsed, path: Path, folder: Path, report: Report) -> None:
    if parsed.names and CLASS not in parsed.names and not parsed.imported:
        report.error(
            "model-script",
            path,
            f"has no class {CLASS}",
            why="the Python backend makes one",
            remedy=did_you_mean(nearest(CLASS, parsed.names)),
        )
    if not parsed.code:
        report.warning(
            "model-script", path, f"holds no code, and no class {CLASS}", "the Python backend runs it",
            "check the repository where the script is, or copy it here",
        )  # fmt: skip
    for module, line in parsed.beside:
        _check_import(module, line, path, folder, report)


def _check_import(module: str, line: int, path: Path, folder: Path, report: Report) -> None:
    target = folder.joinpath(*module.split("."))
    if not target.with_suffix(".py").is_file() and not target.is_dir():
        report.error(
            "script-import",
            (path, f"line {line}"),
            f"imports {module}, and {target.relative_to(folder).with_suffix('.py')} is not beside it",
            remedy="copy it from the same template",
        )


def _collect(tree: ast.Module, script: Script) -> bool:
    """Collect into `script`; whether there is a class or a function."""
    real = False
    for node in ast.walk(tree):
        real |= isinstance(node, (ast.ClassDef, ast.FunctionDef))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            script.words.add(node.value)
        elif isinstance(node, ast.Attribute):
            script.sends |= node.attr == "get_response_sender"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            role = _ASKED.get(node.targets[0].attr)
            if role:
                script.asked[role] = list(_strings(node.value))
        elif isinstance(node, ast.FunctionDef) and node.name == "initialize":
            _collect_initialize(node, script)
    return real


def _collect_initialize(function: ast.FunctionDef, script: Script) -> None:
    """Collect unconditional lookups only, since statements under a condition may never run."""
    lists: dict[str, list[str]] = {}
    looked_up = _names(function, "get_output_config_by_name")
    for statement in function.body:
        if isinstance(statement, (ast.If, ast.Try, ast.While, ast.With, ast.FunctionDef)):
            continue
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            lists[statement.targets[0].id] = list(_strings(statement.value))
        for node in ast.walk(statement):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Subscript):
                name = _word(node.slice)
                if _word(node.value.slice) == "parameters" and name:
                    script.parameters.add(name)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 2:
                name = _word(node.args[1])
                if node.func.attr == "get_output_config_by_name" and name:
                    script.outputs.add(name)
                elif node.func.attr == "get_input_config_by_name" and name:
                    script.inputs.add(name)
    if looked_up:
        script.outputs.update(lists.get("output_names", []))
        script.inputs.update(lists.get("input_names", []))


def _star(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.names[0].name == "*"


def _names(tree: ast.AST, word: str) -> bool:
    """Whether an identifier or a string in `tree` contains `word`. This is a loop, because ast.dump is recursive and a
    sum of 1,000 terms is nested 1,000 levels deep."""
    return any(isinstance(value, str) and word in value for node in ast.walk(tree) for value in vars(node).values())


def _strings(node: ast.expr) -> Iterator[str]:
    if isinstance(node, (ast.List, ast.Tuple)):
        for element in node.elts:
            word = _word(element)
            if word:
                yield word


def _word(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
