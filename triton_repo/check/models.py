"""Models of a repository: their folders, versions, parsed configurations and roles."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trtpipe.triton_repo.check.faults import Report, did_you_mean, nearest
from trtpipe.triton_repo.check.text import PLACEHOLDER, line_of, line_of_word, parse

CONFIG = "config.pbtxt"
SCRIPT = "model.py"
ENGINE_BACKEND = "tensorrtllm"
# Backends in Triton's containers; another name may be a user's own backend.
BACKENDS = (
    ENGINE_BACKEND, "python", "vllm", "onnxruntime", "tensorrt", "pytorch", "dali", "identity", "openvino", "fil",
    "repeat", "square", "tensorflow",
)  # fmt: skip
# Backend that Triton takes for a platform, and for a file, in this order, where config.pbtxt names no backend. Source:
# AutoCompleteBackendFields in src/model_config_utils.cc of Triton's core.
PLATFORMS = {
    "tensorflow_savedmodel": "tensorflow", "tensorflow_graphdef": "tensorflow", "tensorrt_plan": "tensorrt",
    "onnxruntime_onnx": "onnxruntime", "pytorch_libtorch": "pytorch", "libtorch": "pytorch", "torch_aoti": "pytorch",
}  # fmt: skip
FILES = {
    "model.savedmodel": "tensorflow", "model.graphdef": "tensorflow", "model.plan": "tensorrt",
    "model.onnx": "onnxruntime", "model.xml": "openvino", "model.pt": "pytorch", "model.pt2": "pytorch",
    SCRIPT: "python",
}  # fmt: skip
_STANDARD = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")
# Parameters that name another model. This project's scripts also have the text models here; NVIDIA's hard-codes them.
MODEL_KEYS = (
    "tensorrt_llm_model_name", "tensorrt_llm_draft_model_name", "context_model_name", "generation_model_name",
    "preprocessing_model_name", "postprocessing_model_name",
)  # fmt: skip
# Folders of a model that are not versions.
_SKIPPED = ("warmup", "initial_state", "configs")


@dataclass
class Model:
    """One model folder.

    role      engine, preprocessing, postprocessing, bls, disaggregated, llmapi, ensemble, or empty for others
    versions  versions that the version policy loads, the newest first
    config    None when config.pbtxt cannot be parsed
    """

    name: str
    folder: Path
    text: str
    config: Any | None
    versions: tuple[int, ...] = ()
    role: str = ""
    parameters: dict[str, str] = field(default_factory=dict)

    @cached_property
    def path(self) -> Path:
        return self.folder / CONFIG

    @property
    def backend(self) -> str:
        """The backend that config.pbtxt names, or the one that Triton takes in its place; empty for none."""
        if self.config is None:
            return ""
        if self.config.backend:
            return str(self.config.backend)
        platform, named = self.config.platform, self.config.default_model_filename
        if platform or named:
            return PLATFORMS.get(platform) or FILES.get(named, "")
        # Triton looks into the first folder alone, and then takes what follows the first dot of the model's name.
        first = min((path for path in self.folder.glob("*") if path.is_dir()), default=None)
        there = {path.name for path in first.glob("*")} if first is not None else set()
        return next((backend for name, backend in FILES.items() if name in there), self.name.partition(".")[2])

    @property
    def batch(self) -> int:
        return int(self.config.max_batch_size) if self.config is not None else 0

    @property
    def decoupled(self) -> bool:
        return bool(self.config.model_transaction_policy.decoupled) if self.config is not None else False

    @property
    def instances(self) -> int:
        groups = self.config.instance_group if self.config is not None else ()
        return sum(max(1, group.count) for group in groups) or 1

    @property
    def version_folder(self) -> Path | None:
        return self.folder / str(self.versions[0]) if self.versions else None

    @property
    def python_runtime(self) -> bool:
        """Whether this is an engine model that runs a Python script instead of the C++ backend."""
        return self.role == "engine" and self.backend in ("python", "")

    def version_files(self, name: str) -> list[Path]:
        """Files of that name in the version folders."""
        return sorted(path for path in self.folder.glob(f"*/{name}") if path.parent.name.isdigit() and path.is_file())

    def inputs(self) -> dict[str, Any]:
        return {tensor.name: tensor for tensor in self.config.input} if self.config is not None else {}

    def outputs(self) -> dict[str, Any]:
        return {tensor.name: tensor for tensor in self.config.output} if self.config is not None else {}

    def value(self, name: str) -> str | None:
        """Value of a parameter; None when it is absent, empty, or still a placeholder."""
        value = self.parameters.get(name, "").strip()
        return value if value and not PLACEHOLDER.fullmatch(value) else None

    def at_parameter(self, name: str) -> tuple[Path, str]:
        return self.path, f"parameter {name}" + line_of_word(self.text, "key", name)

    def at_tensor(self, kind: str, name: str) -> tuple[Path, str]:
        return self.path, f"{kind} {name}" + line_of_word(self.text, "name", name)

    def at_field(self, name: str) -> tuple[Path, str]:
        return self.path, name + line_of(self.text, rf"\b{name}\b")


def read_models(repository: Path, report: Report) -> dict[str, Model]:
    """Read all models of the repository by name; report folders that are not models or lack a part."""
    models: dict[str, Model] = {}
    bare: list[Path] = []
    for folder in sorted(path for path in repository.iterdir() if path.is_dir()):
        if (folder / CONFIG).is_file():
            text, config = parse(folder / CONFIG, report)
            model = Model(name=folder.name, folder=folder, text=text, config=config)
            if config is not None:
                model.parameters = {key: value.string_value for key, value in config.parameters.items()}
            model.role = _role(model)
            models[folder.name] = model
        else:
            bare.append(folder)
    if not models:
        _no_models(repository, report)
        return {}
    used = {name for model in models.values() for name in called(model)}
    for folder in bare:
        if folder.name in used or folder.name in _STANDARD:
            report.error(
                "config-missing", folder, f"has no {CONFIG}", why="the model's tensors and parameters are in it"
            )
        elif _version_folders(folder):
            report.warning(
                "config-missing",
                folder,
                f"has no {CONFIG}",
                why="Triton has to complete it from the model, which launch_triton_server.py turns off",
                remedy="write one",
            )
        else:
            report.warning(
                "not-a-model",
                folder,
                "is not a model, and Triton takes each folder of a repository for one",
                why=f"it has neither {CONFIG} nor a version folder",
                remedy="move it out, or start with --model-control-mode=explicit",
            )
    for model in models.values():
        _check_layout(model, report)
    return models


def called(model: Model) -> set[str]:
    """Names of the models that the model's configuration refers to."""
    if model.config is None:
        return set()
    steps = {step.model_name for step in model.config.ensemble_scheduling.step}
    return steps | {value for key in MODEL_KEYS if (value := model.value(key))}


def _role(model: Model) -> str:
    if model.config is None:
        # The configuration cannot be read, so the role comes from the name.
        return model.name if model.name in ("preprocessing", "postprocessing", "ensemble") else ""
    names, outputs = set(model.inputs()), set(model.outputs())
    if model.config.HasField("ensemble_scheduling") or model.config.platform == "ensemble":
        return "ensemble"
    if any(name.startswith("sampling_param_") for name in names) or (
        model.version_files("model.yaml") and model.backend in ("python", "")
    ):
        return "llmapi"
    if "context_model_name" in model.parameters or model.name == "disaggregated_serving_bls":
        return "disaggregated"
    if model.backend == ENGINE_BACKEND or "gpt_model_type" in model.parameters:
        return "engine"
    if model.name == "preprocessing" or {"QUERY", "INPUT_ID"} <= names | outputs:
        return "preprocessing"
    if model.name == "postprocessing" or {"TOKENS_BATCH", "OUTPUT"} <= names | outputs:
        return "postprocessing"
    if model.name == "tensorrt_llm_bls" or {"accumulate_tokens", "tensorrt_llm_model_name"} & set(model.parameters):
        return "bls"
    return ""


def _version_folders(folder: Path) -> list[int]:
    """Version folders by Triton's rule: whole numbers without a leading zero; the newest first."""
    names = [path.name for path in folder.iterdir() if path.is_dir() and path.name not in _SKIPPED]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and str(int(name)) == name)[::-1]


def _no_models(repository: Path, report: Report) -> None:
    inner = sorted(path.parent.parent.name for path in repository.glob(f"*/*/{CONFIG}"))
    if (repository / CONFIG).is_file():
        remedy = "give the folder above: this is one model"
    elif inner:
        remedy = f"give the folder {inner[0]} in it"
    else:
        remedy = "give the folder that tritonserver gets as --model-repository"
    report.error("no-models", repository, "holds no model", why=f"no folder in it has a {CONFIG}", remedy=remedy)


def _check_layout(model: Model, report: Report) -> None:
    existing = _version_folders(model.folder)
    if model.config is None:
        model.versions = tuple(existing)
        return
    if model.config.name not in ("", model.name):
        report.error(
            "model-name",
            model.at_field("name"),
            f"names the model '{model.config.name}', its folder is '{model.name}'",
            why="Triton wants both alike",
        )
    model.versions = _chosen(model, existing, report)
    _check_backend(model, report)


def _chosen(model: Model, existing: list[int], report: Report) -> tuple[int, ...]:
    assert model.config is not None
    policy = model.config.version_policy
    kind = policy.WhichOneof("policy_choice")
    if not existing:
        zeros = [path.name for path in model.folder.iterdir() if path.is_dir() and path.name.isdigit()]
        report.error(
            "version-folder",
            model.folder,
            "has no version folder",
            why=f"Triton skips '{zeros[0]}', which begins with a zero" if zeros else "also an ensemble needs one",
            remedy="create a folder named 1 in it",
        )
        return ()
    if kind == "specific":
        chosen = [version for version in policy.specific.versions if version in existing]
        missing = [version for version in policy.specific.versions if version not in existing]
        if missing:
            report.error(
                "version-folder",
                model.at_field("version_policy"),
                f"asks for version {missing[0]}, which has no folder",
                remedy=f"there is {', '.join(map(str, existing))}",
            )
        return tuple(sorted(chosen, reverse=True))
    if kind == "latest" and policy.latest.num_versions == 0:
        report.error(
            "version-folder",
            model.at_field("version_policy"),
            "asks for the latest 0 versions",
            why="Triton then loads none",
            remedy="give num_versions 1, or leave the policy out",
        )
    return tuple(existing) if kind == "all" else tuple(existing[: max(1, policy.latest.num_versions)])


def _check_backend(model: Model, report: Report) -> None:
    config = model.config
    assert config is not None
    field = "backend" if config.backend else "platform" if config.platform or model.role == "ensemble" else ""
    where = model.at_field(field) if field else model.path
    if model.role == "ensemble":
        if config.platform != "ensemble" or config.backend:
            report.error(
                "backend",
                where,
                f"has the platform '{config.platform}' and the backend '{config.backend}'",
                why="an ensemble has the platform 'ensemble' and no backend",
            )
        return
    name = model.backend
    found = PLACEHOLDER.search(name)
    if found:
        report.error(
            "backend",
            where,
            f"still holds the placeholder {found.group()}",
            why="Triton looks for a backend of that name",
            remedy=f"fill in {ENGINE_BACKEND}, or python",
        )
    elif not name or (model.role and not config.backend and name not in BACKENDS):
        report.error(
            "backend",
            where,
            f"names the platform '{config.platform}' and no backend" if config.platform else "names no backend",
            remedy=f'write backend: "{ENGINE_BACKEND}"' if model.role == "engine" else 'write backend: "python"',
        )
    elif name not in BACKENDS:
        near = nearest(name, BACKENDS, 0.7) or {"trtllm": ENGINE_BACKEND}.get(name)
        what = f"names the backend '{name}'"
        if not config.backend:
            what = f"names no backend, and Triton takes '{name}' from the model's name"
        why = "Triton finds no backend of that name"
        if near:
            report.error("backend", where, what, why, did_you_mean(near))
        else:
            report.warning("backend", where, what, "none of that name comes with Triton")
    elif model.role == "engine" and name not in (ENGINE_BACKEND, "python"):
        report.error(
            "backend",
            where,
            f"names the backend '{name}'",
            why="the parameters are those of TensorRT-LLM's",
            remedy=did_you_mean(ENGINE_BACKEND),
        )
