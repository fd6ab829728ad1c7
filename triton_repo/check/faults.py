"""Faults that a check reports, one per cause, and the list of rules."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

ERROR = "error"
WARNING = "warning"
# A file or folder, or what in it.
Location: TypeAlias = "Path | tuple[Path, str]"

# Identifier of each rule -> what it requires. Scripts use the identifiers, which must not change.
RULES: dict[str, str] = {
    "no-models": "the folder holds models, each in a folder of its own",
    "not-a-model": "a folder beside the models, which Triton takes for one",
    "config-missing": "each model has a config.pbtxt",
    "config-unreadable": "config.pbtxt is UTF-8 text",
    "syntax": "config.pbtxt is a model configuration in protobuf text",
    "placeholder": "no placeholder of a template is left where a value is needed",
    "unfilled-parameter": "no optional parameter still holds the placeholder of its template",
    "model-name": "a configuration names the model as its folder does",
    "version-folder": "each model has a numbered version folder that its version policy takes",
    "backend": "a model names a backend or platform that exists",
    "model-script": "a model of the Python backend has a script with its class",
    "model-code": "code in the repository is that of a known template",
    "script-import": "what a script imports from its own folder is there",
    "script-environment": "the environment of a script is there",
    "batch-size": "batch sizes of dynamic batching and of models that feed each other agree",
    "batch-above-engine": "no model takes larger batches than the engine was built for",
    "instance-group": "instance groups name what they may",
    "tensor": "tensors have a name, a type and dimensions that Triton takes",
    "duplicate-tensor": "no input is declared twice",
    "queue-policy": "priorities and timeouts of dynamic batching agree",
    "warmup": "warm-up requests have the model's inputs, and their files are there",
    "response-cache": "no response cache on a decoupled model",
    "ensemble": "an ensemble has steps, and nothing that only other models may have",
    "ensemble-model": "each step's model is in the repository, in that version",
    "ensemble-input": "steps feed inputs that exist, each required one once",
    "ensemble-output": "steps take outputs that exist, each name once",
    "ensemble-flow": "what a step or client is fed is produced, what is produced is used, and nothing goes in circles",
    "ensemble-type": "a tensor has one type along the graph",
    "ensemble-shape": "a tensor has one shape along the graph",
    "ensemble-decoupled": "a step's inputs come from the same decoupled model",
    "missing-parameter": "parameters that a backend looks up are there",
    "unknown-parameter": "each parameter is one that the model reads",
    "dead-parameter": "no parameter that the release does not read (any more)",
    "engine-limit": "no parameter that was fixed when the engine was built",
    "duplicate-parameter": "no parameter is given twice",
    "boolean-value": "booleans are spelt as the backend reads them",
    "number-value": "numbers are read as what they say",
    "range-value": "numbers are within their bounds",
    "choice-value": "words are of those that the backend knows",
    "value-space": "no path or name begins or ends with a space",
    "list-value": "lists are in the backend's form",
    "lookahead": "lookahead decoding has its three sizes",
    "guided-decoding": "guided decoding has its backend and its tokenizer file",
    "missing-tensor": "tensors that a model, its script or its callers need are declared",
    "unknown-tensor": "each tensor of the engine model is one that the backend reads",
    "renamed-tensor": "tensors have the names of the release",
    "tensor-type": "tensors have the types that the backend reads",
    "tensor-shape": "tensors have the shapes that the backend reads",
    "required-input": "inputs that clients may leave out are optional",
    "logits-type": "logits have one type, the engine's",
    "template-release": "the configuration is of the release that serves it",
    "engine-release": "the engine is of the release that serves it",
    "release-runtime": "the release serves this kind of repository",
    "engine-folder": "the engine's folder is there and is an engine",
    "engine-config": "the engine's config.json can be read",
    "engine-file": "the engine's and the model's files are whole",
    "engine-ranks": "the engine's folder holds one file for each rank",
    "engine-gpu": "this machine can run the engine",
    "passport": "the engine's passport can be read and is of this engine",
    "gpu-ids": "GPU and rank lists fit the engine's ranks and the model's instances",
    "beam-width": "no more beams than the engine was built for",
    "kv-cache-tokens": "the KV cache holds one whole sequence",
    "paged-attention": "chunked context and KV cache reuse are possible with the engine",
    "prompt-limit": "prompts that the engine admits fit its step",
    "batching-strategy": "the batching strategy is possible with the engine",
    "decoding-mode": "the decoding mode is the engine's",
    "engine-feature": "what a parameter asks for was built into the engine",
    "attention-window": "an attention window is no longer than a sequence",
    "not-here": "what a configuration names is on this machine, so that it can be checked",
    "tokenizer-folder": "tokenizer folders are there and hold a tokenizer",
    "tokenizer-damaged": "tokenizer files can be read",
    "tokenizer-vocabulary": "the tokenizer has the engine's tokens",
    "tokenizer-end": "the tokenizer knows how a text ends",
    "tokenizers-differ": "text is encoded and decoded by the same tokenizer",
    "decoupled": "models that call each other are decoupled alike",
    "model-missing": "models that a script calls are in the repository",
    "instances": "models have as many instances as they can keep apart",
    "shared-gpu": "engines on one GPU leave each other memory",
    "static-batching": "requests join a running batch",
    "llmapi-settings": "an LLM API model has its model.yaml, with triton_config",
    "llmapi-argument": "model.yaml gives LLM what it takes",
    "llmapi-model": "model.yaml names a model that the LLM API can load",
    "llmapi-policy": "model.yaml and config.pbtxt agree",
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a repository; faults of the same cause are reported once.

    severity  error: the repository does not load, or does not behave as configured; warning: it works but is suspicious
    path      file or folder, relative to the repository
    where     parameter, tensor or line in it; empty for the whole file
    rule      identifier in RULES
    """

    severity: str
    path: str
    where: str
    what: str
    why: str = ""
    remedy: str = ""
    rule: str

    def __str__(self) -> str:
        place = f"{self.path}: {self.where}" if self.where else self.path
        cause = f"{place}: {self.what}: {self.why}" if self.why else f"{place}: {self.what}"
        return " ".join((f"{cause}; {self.remedy}" if self.remedy else cause).split())


@dataclass
class Report:
    """Collects faults; records the tensors and models that already have one, so that no cause is reported twice."""

    repository: Path
    faults: list[Fault] = field(default_factory=list)
    outdated: set[str] = field(default_factory=set)
    returning: set[str] = field(default_factory=set)
    _blamed: set[tuple[str, str]] = field(default_factory=set)

    def error(self, rule: str, at: Location, what: str, why: str = "", remedy: str = "") -> None:
        self.add(ERROR, rule, at, what, why, remedy)

    def warning(self, rule: str, at: Location, what: str, why: str = "", remedy: str = "") -> None:
        self.add(WARNING, rule, at, what, why, remedy)

    def add(self, severity: str, rule: str, at: Location, what: str, why: str, remedy: str) -> None:
        path, where = (at, "") if isinstance(at, Path) else at
        try:
            name = path.relative_to(self.repository).as_posix()
        except ValueError:
            name = str(path)
        self.faults.append(
            Fault(severity=severity, path=name, where=where, what=what, why=why, remedy=remedy, rule=rule)
        )

    def blame(self, model: str, *tensors: str) -> None:
        self._blamed.update((model, tensor) for tensor in tensors)

    def blames(self, model: str, tensor: str) -> bool:
        return (model, tensor) in self._blamed

    def sorted(self) -> list[Fault]:
        return sorted(dict.fromkeys(self.faults), key=lambda fault: (fault.severity != ERROR, fault.path))


def nearest(name: str, names: Iterable[str], cutoff: float = 0.8) -> str | None:
    """The name in `names` that `name` probably misspells; None when none is near."""
    plain = {_plain(one): one for one in names}
    if _plain(name) in plain:
        return plain[_plain(name)]
    near = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=cutoff)
    return plain[near[0]] if near else None


def did_you_mean(name: str | None) -> str:
    return f"did you mean '{name}'?" if name else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
