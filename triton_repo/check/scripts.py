"""Analysis of a model's Python files as syntax trees, without running them: parameters and tensors that they look up
without a default, and outputs that they request from other models."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trtpipe.engines.json_input import read_bounded
from trtpipe.triton_repo.check.faults import Report, did_you_mean, nearest
from trtpipe.triton_repo.check.models import SCRIPT, Model

CLASS = "TritonPythonModel"
# Marks this project's own scripts, which are stricter than NVIDIA's.
OWN_MODULE = "trtpipe_text.py"
# Attributes of NVIDIA's BLS decoder that list the outputs requested from each model.
_ASKED = {"_preproc_outputs": "preprocessing", "_llm_outputs": "engine", "_postproc_outputs": "postprocessing"}
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
        tree = _tree(path, report) if path.is_file() else None
        if tree is None:
            script.unread |= path == folder / main
        else:
            _collect(tree, script)
            if path == folder / main:
                _check_main(tree, path, folder, report)
                script.real = any(isinstance(node, (ast.ClassDef, ast.FunctionDef)) for node in ast.walk(tree))
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


def _tree(path: Path, report: Report) -> ast.Module | None:
    try:
        if path.stat().st_size > _LARGEST:
            return None
        return ast.parse(read_bounded(path, _LARGEST))
    except SyntaxError as error:
        # Not reported: a newer Python allows more inside f-strings than this one.
        if "f-string" not in str(error.msg):
            report.error(
                "model-script", (path, f"line {error.lineno}"), "is not Python", why=str(error.msg), remedy="replace it"
            )
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        report.error("model-script", path, "cannot be read", why=str(error))
    return None


def _check_main(tree: ast.Module, path: Path, folder: Path, report: Report) -> None:
    names = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    imported = any(isinstance(node, (ast.ImportFrom, ast.Assign)) and _names(node, CLASS) for node in tree.body)
    stars = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in tree.body)
    if names and CLASS not in names and not imported and not stars:
        report.error(
            "model-script",
            path,
            f"has no class {CLASS}",
            why="the Python backend makes one",
            remedy=did_you_mean(nearest(CLASS, names)),
        )
    if not tree.body:
        report.warning(
            "model-script", path, f"holds no code, and no class {CLASS}", "the Python backend runs it",
            "check the repository where the script is, or copy it here",
        )  # fmt: skip
    for node in tree.body:
        modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module]
        for module in modules:
            if module.split(".")[0] in ("helpers", "lib", "trtpipe_text"):
                _check_import(node, module, path, folder, report)


def _check_import(node: ast.stmt, module: str, path: Path, folder: Path, report: Report) -> None:
    target = folder.joinpath(*module.split("."))
    if not target.with_suffix(".py").is_file() and not target.is_dir():
        report.error(
            "script-import",
            (path, f"line {node.lineno}"),
            f"imports {module}, and {target.relative_to(folder).with_suffix('.py')} is not beside it",
            remedy="copy it from the same template",
        )


def _collect(tree: ast.Module, script: Script) -> None:
    for node in ast.walk(tree):
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
