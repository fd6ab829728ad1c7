"""Check of the tokenizer folders of the text models."""

from __future__ import annotations

import filecmp
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.chat_template import require_template
from trtpipe.engines.json_input import TooLarge, load_json
from trtpipe.triton_repo.check.faults import Report
from trtpipe.triton_repo.check.models import Model
from trtpipe.triton_repo.check.paths import HUB_ID, locate, may_be_hub_id, tell_not_here
from trtpipe.triton_repo.check.scripts import OWN_MODULE
from trtpipe.triton_repo.check.whole import EMPTY, check_leftovers, check_whole, damage

# Files that each suffice for AutoTokenizer; this project's models read only the first one.
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")
# Files that may suffice without a vocabulary file, because they name a class that has a vocabulary.
SETTINGS = ("tokenizer_config.json", "qwen.tiktoken", "tokenizer.tiktoken", "tiktoken.model")
GENERATION = "generation_config.json"
# Files of a tokenizer that are not read here.
_OTHERS = (*FILES[1:], *SETTINGS[1:], "merges.txt")
# Roles of the models that convert between text and tokens.
ROLES = ("preprocessing", "postprocessing", "bls")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens of a tokenizer.json.

    size   number of tokens, without added tokens
    ids    one more than the highest id, added tokens included
    named  highest id that generation_config.json gives under each name, -1 for none
    """

    path: Path
    size: int
    ids: int
    named: dict[str, int]


def check_tokenizers(repository: Path, models: dict[str, Model], report: Report) -> list[Vocabulary]:
    """Check the tokenizer of each text model; return the vocabularies that could be read."""
    found: dict[str, tuple[Model, Path]] = {}
    given: dict[str, tuple[Model, str]] = {}
    vocabularies = []
    folders: dict[Path, Model] = {}
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
            folders[folder] = model
    for folder, model in folders.items():
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
    folder = place.path
    own = _is_own(model)
    if place.absent and (own or not may_be_hub_id(text, repository)):
        # The hub's oldest models have names of one word, such as gpt2.
        add = report.warning if text.isalnum() and not own else report.error
        add("tokenizer-folder", where, f"{named}, which is not there", place.why)
        return None
    if folder is None:
        tell_not_here(where, text, report, hub=place.absent)
        return None
    if not folder.is_dir():
        report.error("tokenizer-folder", where, f"{named}, which is not a folder", remedy="name its folder")
        return None
    names = {path.name for path in folder.iterdir()}
    wanted = FILES[:1] if own else (*FILES, *SETTINGS)
    if not names & set(wanted):
        if place.mapped and not own:  # the container may have another folder mounted there
            tell_not_here(where, text, report)
            return None
        inner = sorted(path.parent.name for path in folder.glob(f"*/{FILES[0]}"))
        report.error(
            "tokenizer-folder",
            where,
            f"{named}, which holds no tokenizer" if not own else f"{named}, which has no {FILES[0]}",
            why=f"none of {', '.join(FILES[:3])} is in it" if not own else "the model's script reads that file only",
            remedy=f"name {text.rstrip('/')}/{inner[0]}" if inner else "copy the model's tokenizer files into it",
        )
        return None
    lacks = None
    if not names & {*FILES, *SETTINGS[1:]}:
        lacks = f"only {SETTINGS[0]}"
    elif names & set(FILES) == {"vocab.json"} and "merges.txt" not in names:
        lacks = "vocab.json and no merges.txt"
    if lacks is not None:
        report.warning(
            "tokenizer-folder", where, f"{named}, which has {lacks}",
            "most tokenizers need more", "copy the model's tokenizer files into it",
        )  # fmt: skip
    return folder


def _is_own(model: Model) -> bool:
    """Whether the model's script is this project's: it reads tokenizer.json, and the ids of generation_config first."""
    return model.version_folder is not None and (model.version_folder / OWN_MODULE).is_file()


def _check_folder(folder: Path, model: Model, report: Report) -> Vocabulary | None:
    settings = _json(folder / "tokenizer_config.json", report)
    tokenizer = _json(folder / "tokenizer.json", report)
    generation = _json(folder / GENERATION, report)
    special = _json(folder / "special_tokens_map.json", report)
    ends = [settings.get("eos_token"), special.get("eos_token"), generation.get("eos_token_id")]
    # Without settings, a tokenizer.json has no class with special tokens of its own.
    bare = bool(tokenizer) and not (folder / SETTINGS[0]).is_file()
    if (bare or settings.keys() & {"bos_token", "unk_token", "pad_token"}) and all(end in (None, "") for end in ends):
        report.warning(
            "tokenizer-end",
            (folder / "tokenizer_config.json", "eos_token"),
            "is missing",
            why="generation then runs to max_tokens",
            remedy="name the model's end-of-sequence token",
        )
    check_leftovers("tokenizer-damaged", folder, report)
    check_whole("tokenizer-damaged", (folder / name for name in _OTHERS if (folder / name).is_file()), report)
    if _is_own(model):
        try:
            require_template(folder)
        except InputDataError as error:
            report.error("tokenizer-damaged", folder, error.what, why=error.why, remedy=error.remedy)
    stated = [(SETTINGS[0], settings, "eos_token"), ("special_tokens_map.json", special, "eos_token")]
    stated.append((SETTINGS[0], settings, "pad_token"))
    if _is_own(model) and generation.get("eos_token_id") is not None:
        stated = [row for row in stated if row[2] != "eos_token"]
    return _vocabulary(folder, tokenizer, settings, stated, generation, report)


def _vocabulary(
    folder: Path, tokenizer: dict[str, Any], settings: dict[str, Any], stated: list[tuple[str, dict[str, Any], str]],
    generation: dict[str, Any], report: Report,
) -> Vocabulary | None:  # fmt: skip
    """The vocabulary of tokenizer.json. Reports special tokens that are not in it: those `stated` by the files that
    name them by their texts, and those of generation_config.json, which names them by their ids."""
    body = tokenizer.get("model")
    vocab = body.get("vocab") if isinstance(body, dict) else None
    if not isinstance(vocab, (dict, list)):
        return None
    if isinstance(vocab, dict):
        ids = {token: number for token, number in vocab.items() if isinstance(number, int)}
    else:
        ids = {str(row[0]): number for number, row in enumerate(vocab) if isinstance(row, list) and row}
    added = tokenizer.get("added_tokens")
    for row in added if isinstance(added, list) else ():
        if isinstance(row, dict) and isinstance(row.get("id"), int):
            ids[str(row.get("content"))] = row["id"]
    slow = settings.get("added_tokens_decoder")
    rows = slow.items() if isinstance(slow, dict) else ()
    ids |= {content: int(key) for key, row in rows if (content := _content(row)) and key.isascii() and key.isdigit()}
    for file, source, name in stated:
        word = _content(source.get(name))
        if word and word not in ids:
            add = report.error if name == "eos_token" else report.warning
            why = "generation does not end with it" if name == "eos_token" else "it is another model's"
            told, remedy = f"is '{word}', which is not in the vocabulary", "copy the model's tokenizer again"
            add("tokenizer-end", (folder / file, name), told, why, remedy)
            break
    ends, pad = generation.get("eos_token_id"), generation.get("pad_token_id")
    place = folder / GENERATION
    listed = ends if isinstance(ends, list) else [ends]
    if any(not isinstance(end, int) for end in listed if ends is not None):
        remedy = "give one id, or a list of ids"
        report.error("tokenizer-end", (place, "eos_token_id"), f"is {ends!r}, which is no id", remedy=remedy)
    found = tuple(end for end in listed if isinstance(end, int))
    end = next((ids.get(_content(source.get(name)) or "") for _, source, name in stated if name == "eos_token"), None)
    highest = max(ids.values(), default=-1) + 1
    if end is not None and found and end not in found and max(found) < highest:
        report.warning(
            "tokenizer-end",
            (place, "eos_token_id"),
            f"is {', '.join(map(str, found))}, and the tokenizer's eos_token has the id {end}",
            why="one of the two is of another model",
            remedy="copy both from the engine's model",
        )
    named = {"eos_token_id": max(found, default=-1), "pad_token_id": pad if isinstance(pad, int) else -1}
    return Vocabulary(path=folder / FILES[0], size=len(vocab), ids=highest, named=named)


def _content(token: Any) -> str | None:
    """A token's text; tokenizer_config.json writes it plain or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _json(path: Path, report: Report) -> dict[str, Any]:
    """Read a JSON object; {} when the file is absent, or damaged, which is reported."""
    if not path.is_file():
        return {}
    found, remedy = damage(path), "copy the model's tokenizer again"
    if found is not None:
        add = report.warning if found == EMPTY and path.name != FILES[0] else report.error
        add("tokenizer-damaged", path, found, remedy=remedy)
        return {}
    try:
        value = load_json(path)
    except TooLarge as error:
        report.warning("tokenizer-damaged", path, "is not looked at", why=str(error))
        return {}
    except (OSError, ValueError) as error:
        report.error("tokenizer-damaged", path, "is not JSON", why=str(error), remedy=remedy)
        return {}
    whole = isinstance(value, dict) and (path.name != FILES[0] or isinstance(value.get("model"), dict))
    if not whole:
        told = "has no model" if isinstance(value, dict) else "is no JSON object"
        report.error("tokenizer-damaged", path, told, why="the tokenizer is not in it", remedy=remedy)
    return value if whole else {}


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
                    where,
                    f"holds another tokenizer than that of {other.name}",
                    why="text would be encoded by one and decoded by the other",
                    remedy="name the same folder in both",
                )
        elif not HUB_ID.fullmatch(text) and not HUB_ID.fullmatch(base):
            report.warning(
                "tokenizers-differ",
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
