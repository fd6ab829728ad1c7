"""Check of the tokenizer folders of the text models."""

from __future__ import annotations

import filecmp
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpipe.engines.json_input import TooLarge, load_json, open_regular
from trtpipe.triton_repo.check.faults import Report
from trtpipe.triton_repo.check.models import Model
from trtpipe.triton_repo.check.paths import HUB_ID, locate, may_be_hub_id

# Files that each suffice for AutoTokenizer; this project's models read only the first one.
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")
# Files that may suffice without a vocabulary file, because they name a class that has a vocabulary.
SETTINGS = ("tokenizer_config.json", "qwen.tiktoken", "tokenizer.tiktoken", "tiktoken.model")
# Roles of the models that convert between text and tokens.
ROLES = ("preprocessing", "postprocessing", "bls")
_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Number of tokens in a tokenizer.json, without added tokens."""

    path: Path
    size: int


def check_tokenizers(repository: Path, models: dict[str, Model], report: Report) -> list[Vocabulary]:
    """Check the tokenizer of each text model; return the vocabularies that could be read."""
    found: dict[str, tuple[Model, Path]] = {}
    given: dict[str, tuple[Model, str]] = {}
    vocabularies = []
    seen: dict[str, Path | None] = {}
    for model in models.values():
        text = model.value("tokenizer_dir")
        if model.role not in ROLES or text is None or "${" in text:
            continue
        given[model.role] = model, text
        if text not in seen:  # a folder that several models name is reported once
            others = [
                other.name
                for other in models.values()
                if other is not model and other.role in ROLES and other.value("tokenizer_dir") == text
            ]
            seen[text] = _folder(model, text, others, repository, models, report)
        folder = seen[text]
        if folder is not None:
            found[model.role] = model, folder
    for folder, model in {folder: model for model, folder in found.values()}.items():
        vocabulary = _check_folder(folder, model, report)
        if vocabulary is not None:
            vocabularies.append(vocabulary)
    _check_same(found, given, report)
    return vocabularies


def _folder(
    model: Model, text: str, others: list[str], repository: Path, models: dict[str, Model], report: Report
) -> Path | None:
    named = f"is '{text}'" + (f", as in {' and '.join(others)}" if others else "")
    where = model.at_parameter("tokenizer_dir")
    place = locate(text, repository, models)
    if place.absent and not may_be_hub_id(text, repository):
        # The hub's oldest models have names of one word, such as gpt2.
        add = report.warning if text.isalnum() else report.error
        add("tokenizer-folder", model.path, where, f"{named}, which is not there", place.why)
    if place.path is None:
        return None
    if not place.path.is_dir():
        report.error("tokenizer-folder", model.path, where, f"{named}, which is not a folder", remedy="name its folder")
        return None
    names = {path.name for path in place.path.iterdir()}
    if names & {*FILES, *SETTINGS}:
        return place.path
    if not place.mapped:  # the container may have another folder mounted there
        report.error(
            "tokenizer-folder",
            model.path,
            where,
            f"{named}, which holds no tokenizer",
            why=f"none of {', '.join(FILES[:3])} is in it",
            remedy="copy the model's tokenizer files into it",
        )
    return None


def _check_folder(folder: Path, model: Model, report: Report) -> Vocabulary | None:
    settings = _json(folder / "tokenizer_config.json", report)
    tokenizer = _json(folder / "tokenizer.json", report)
    generation = _json(folder / "generation_config.json", report)
    special = _json(folder / "special_tokens_map.json", report)
    ends = [settings.get("eos_token"), special.get("eos_token"), generation.get("eos_token_id")]
    if (
        settings
        and all(end in (None, "") for end in ends)
        and settings.keys() & {"bos_token", "unk_token", "pad_token"}
    ):
        report.warning(
            "tokenizer-end",
            folder / "tokenizer_config.json",
            "eos_token",
            "is missing",
            why="generation then runs to max_tokens",
            remedy="name the model's end-of-sequence token",
        )
    body = tokenizer.get("model")
    vocab = body.get("vocab") if isinstance(body, dict) else None
    return Vocabulary(path=folder / "tokenizer.json", size=len(vocab)) if isinstance(vocab, (dict, list)) else None


def _json(path: Path, report: Report) -> dict[str, Any]:
    """Read a JSON object; {} when the file is absent, or damaged, which is reported."""
    if not path.is_file():
        return {}
    try:
        with open_regular(path) as file:
            start = file.read(len(_POINTER))
        if not start.strip():
            report.warning("tokenizer-damaged", path, "", "is empty", remedy="copy the model's tokenizer again")
            return {}
        if start == _POINTER:
            report.error(
                "tokenizer-damaged", path, "", "is a Git LFS pointer, not the file", remedy="fetch it with git lfs pull"
            )
            return {}
        value = load_json(path)
    except TooLarge as error:
        report.warning("tokenizer-damaged", path, "", "is not looked at", why=str(error))
        return {}
    except (OSError, ValueError) as error:
        report.error(
            "tokenizer-damaged", path, "", "is not JSON", why=str(error), remedy="copy the model's tokenizer again"
        )
        return {}
    return value if isinstance(value, dict) else {}


def _check_same(found: dict[str, tuple[Model, Path]], given: dict[str, tuple[Model, str]], report: Report) -> None:
    """Report text models with different tokenizers: text encoded by one and decoded by another is nonsense."""
    first = next((role for role in ("preprocessing", "postprocessing", "bls") if role in given), None)
    for role in ("postprocessing", "bls"):
        if first is None or role == first or role not in given:
            continue
        (model, text), (other, base) = given[role], given[first]
        if text.rstrip("/") == base.rstrip("/"):
            continue
        where = model.at_parameter("tokenizer_dir")
        if role in found and first in found:
            if _differ(found[role][1], found[first][1]):
                report.error(
                    "tokenizers-differ",
                    model.path,
                    where,
                    f"holds another tokenizer than that of {other.name}",
                    why="text would be encoded by one and decoded by the other",
                    remedy="name the same folder in both",
                )
        elif not HUB_ID.fullmatch(text) and not HUB_ID.fullmatch(base):
            report.warning(
                "tokenizers-differ",
                model.path,
                where,
                f"is '{text}', and that of {other.name} is '{base}'",
                why="both have to be the same tokenizer",
                remedy="name the same folder in both",
            )


def _differ(left: Path, right: Path) -> bool:
    """Whether the first file that both folders have differs; two folders may hold one tokenizer in different forms."""
    for name in FILES:
        if (left / name).is_file() and (right / name).is_file():
            return not filecmp.cmp(left / name, right / name, shallow=False)
    return False
