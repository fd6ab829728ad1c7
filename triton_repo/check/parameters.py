"""Check of the `parameters` in config.pbtxt: whether the model reads each key, and reads the value as intended."""

from __future__ import annotations

from trtpipe.triton_repo.check import facts, values
from trtpipe.triton_repo.check.facts import Parameter
from trtpipe.triton_repo.check.faults import Location, Report, did_you_mean, nearest
from trtpipe.triton_repo.check.models import Model
from trtpipe.triton_repo.check.release import OLDEST, Release, release_key
from trtpipe.triton_repo.check.scripts import Script
from trtpipe.triton_repo.check.text import PLACEHOLDER, repeated_parameters

# The C++ backend looks up these keys together; absent keys cause one failure.
_LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
# Parameters of Triton and of its Python backend, valid for every role.
_ANYWHERE = ("FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH", "SHUTDOWN_TIMEOUT_SECONDS")
_WITHOUT_ROLE = ("FORCE_CPU_ONLY_INPUT_TENSORS",)
# Words that users write for a boolean and that readers do not accept.
_YES, _NO = ("yes", "on", "y", "t", "enable", "enabled"), ("no", "off", "n", "f", "disable", "disabled", "none")


def check_parameters(model: Model, script: Script, release: Release, report: Report) -> None:
    known = facts.parameters().get(model.role)
    if model.config is None:
        return
    for name, (first, last) in repeated_parameters(model.text).items():
        report.error(
            "duplicate-parameter",
            model.at_parameter(name),
            f"is given twice, as '{first}' and '{last}'",
            why="the last one counts",
            remedy="drop one",
        )
    forced = model.value("FORCE_CPU_ONLY_INPUT_TENSORS")
    if model.backend == "python" and forced not in (None, "yes", "no"):
        report.error(
            "choice-value",
            model.at_parameter(_WITHOUT_ROLE[0]),
            f"is '{forced}'",
            why="the Python backend refuses it",
            remedy="give yes or no",
        )
    if known is None:
        return
    _check_present(model, known, release, report)
    unfilled = []
    for name, text in model.parameters.items():
        fact = known.get(name)
        if fact is None:
            _check_unknown(model, name, known, script, report)
        elif not _check_place(model, name, fact, release, report):
            # This project's scripts require a value for a boolean; all other readers use their default.
            must = fact.required or (script.own and fact.kind == "bool")
            if PLACEHOLDER.fullmatch(text.strip()) and not must:
                unfilled.append(name)
            else:
                _check_value(model, name, text, fact, script, report)
    _tell_unfilled(model, sorted(unfilled), report)
    if model.role == "engine":
        _check_lookahead(model, report)
        _check_guided(model, report)


def _check_present(model: Model, known: dict[str, Parameter], release: Release, report: Report) -> None:
    """Report missing parameters: required ones, and those whose key a release looks up outside its try blocks."""
    for name, fact in known.items():
        if not fact.required or (model.python_runtime and name == "gpt_model_type"):
            continue
        if name == "gpt_model_path" and model.value("encoder_model_path"):
            continue  # an encoder without a decoder
        text = model.parameters.get(name)
        if text is None:
            near = nearest(name, set(model.parameters) - set(known))
            if near is None:  # else the misspelt key is reported
                report.error(
                    "missing-parameter",
                    (model.path, f"parameter {name}"),
                    "is missing",
                    why="the model does not load without it",
                    remedy=_choices(fact) or "add it",
                )
        elif not text.strip():
            report.error(
                "missing-parameter",
                model.at_parameter(name),
                "is empty",
                why="the model does not load without it",
                remedy=_choices(fact) or "fill it in",
            )
    absent = [
        name
        for name, fact in known.items()
        if fact.exists and name not in model.parameters and release.reaches(fact.exists)
    ]
    # The Python runtime has a default for every key.
    if absent and not model.python_runtime and model.role == "engine" and model.name not in report.outdated:
        many = len(absent) > 1
        report.error(
            "missing-parameter",
            (model.path, f"parameter {', '.join(absent)}"),
            "are missing" if many else "is missing",
            why=f"{release.told()} looks {'them' if many else 'it'} up without a default, also when unused",
            remedy='add with the value ""',
        )


def _tell_unfilled(model: Model, names: list[str], report: Report) -> None:
    """Report all unfilled parameters in one warning: most are left unfilled in use, but one may be an oversight."""
    if names:
        many = len(names) > 1
        report.warning(
            "unfilled-parameter",
            (model.path, f"parameter {', '.join(names)}"),
            "still hold their placeholders" if many else "still holds its placeholder",
            why=f"the model takes its default for {'each' if many else 'it'}",
            remedy='fill in what you mean to set, and write "" for a default you mean' if many else
            'fill it in, or write "" if you mean the default',
        )  # fmt: skip


def _check_unknown(model: Model, name: str, known: dict[str, Parameter], script: Script, report: Report) -> None:
    if name in _ANYWHERE or (name in script.words and (model.role != "engine" or model.python_runtime)):
        return
    if script.unread:
        return  # the script is reported, and the keys that it reads are unknown
    where = model.at_parameter(name)
    live = [one for one, fact in known.items() if not fact.dead and not fact.limit]
    near = nearest(name, live, 0.82)
    elsewhere = [role for role, rows in facts.parameters().items() if name in rows and role != model.role]
    if near:
        report.error(
            "unknown-parameter", where, "is none that the model reads", "it is passed over",
            did_you_mean(near),
        )  # fmt: skip
    elif elsewhere and model.role != "llmapi":
        report.error(
            "unknown-parameter", where, "is none that the model reads",
            f"it belongs to {' and '.join(elsewhere)}", "move it there",
        )  # fmt: skip
    elif (model.role == "engine" and not model.python_runtime) or script.real:
        report.warning("unknown-parameter", where, "is none that the model reads", "it is passed over", "drop it")


def _check_place(model: Model, name: str, fact: Parameter, release: Release, report: Report) -> bool:
    """Whether this release and runtime ignore the parameter, so that its value need not be checked."""
    value = model.value(name)
    where = model.at_parameter(name)
    if fact.limit:
        report.error(
            "engine-limit",
            where,
            "has no effect here",
            why="it was fixed when the engine was built",
            remedy="drop it, and build the engine with it",
        )
        return True
    if fact.dead:
        # Unfilled ones are in the templates; and before the release that dropped the parameter it is no fault.
        old = release_key(fact.until)
        unknown = release.at_least is None and old is not None and old < OLDEST
        if value is None or not (unknown or release.has_left(fact.until)):
            return True
        if name == "enable_trt_overlap" and value.lower() in ("true", "1"):
            _tell_overlap(model, where, report)
        elif value.lower() not in ("false", "0"):
            report.warning("dead-parameter", where, "is not read", fact.dead, "drop it")
        return True
    if fact.until and release.has_left(fact.until):
        return True
    if value is not None and release.lacks(fact.since) and not _is_default(value, fact):
        report.error(
            "dead-parameter",
            where,
            f"is '{value}', and {release.told()} does not read it",
            why=f"it came with {fact.since}",
            remedy="drop it, or serve with a newer release",
        )
        return True
    if model.python_runtime and not fact.python:
        if value is not None and not _is_default(value, fact):
            report.warning(
                "dead-parameter",
                where,
                "is not read by the Python runtime",
                remedy="use the backend tensorrtllm, or drop it",
            )
        return True
    return False


def _tell_overlap(model: Model, where: Location, report: Report) -> None:
    if model.python_runtime:
        report.error("dead-parameter", where, "is on", why="the Python runtime refuses to load with it")
    else:
        report.warning("dead-parameter", where, "is on", why="it is deprecated and ignored", remedy="drop it")


def _is_default(value: str, fact: Parameter) -> bool:
    return value.lower() in (fact.default_text.lower(), {"true": "1", "false": "0"}.get(fact.default_text, ""))


def _check_value(model: Model, name: str, text: str, fact: Parameter, script: Script, report: Report) -> None:
    where = model.at_parameter(name)
    found = PLACEHOLDER.search(text)
    if found:
        report.error(
            "placeholder", where, f"still holds the placeholder {found.group()}", remedy=_choices(fact) or "fill it in"
        )
        return
    if text != text.strip() and fact.kind in ("path", "model") and text.strip():
        report.error(
            "value-space", where, f"is '{text}', with a space at its end or beginning",
            "the server takes it for a part of the name", "drop it",
        )  # fmt: skip
    if not text.strip():
        return  # every reader uses its default for this value
    if fact.kind == "bool":
        _check_bool(model, name, text, fact, script, report)
    elif fact.kind in ("int", "size", "float"):
        _check_number(model, name, text, fact, report)
    elif fact.kind == "enum":
        _check_word(model, name, text, fact, report)
    elif fact.kind in ("ids", "windows", "tree"):
        _check_list(model, name, text, fact, report)
    elif name == "lora_prefetch_dir" and model.python_runtime:
        report.error("dead-parameter", where, "is not read by the Python runtime", why="it takes it for a number")


def _check_bool(model: Model, name: str, text: str, fact: Parameter, script: Script, report: Report) -> None:
    words: tuple[str, ...]
    if model.role == "engine" and not model.python_runtime:
        read, words = text in (*values.CPP_TRUE, *values.CPP_FALSE), (*values.CPP_TRUE, *values.CPP_FALSE)
        reader = "the backend"
    else:
        words = ("true", "false", "1", "0")
        reader = "the Python runtime" if model.role == "engine" else "the script"
        if not script.own and model.role != "engine":
            words = values.BLS_WORDS if model.role == "bls" else values.TEXT_WORDS
        read = (text.strip() if script.own else text).lower() in words
    if read:
        return
    meant = "true" if text.strip().lower() in ("true", "1", *_YES) else "false"
    if script.own:
        effect = f"{reader} refuses it"
    elif (model.role == "engine" and model.python_runtime) or model.role == "bls":
        effect = f"{reader} takes it for false"
    else:
        effect = f"{reader} cannot read it and takes its default, {fact.default_text}"
    spelt = meant if text.strip().lower() in ("true", "1", "false", "0", *_YES, *_NO) else "true or false"
    report.error(
        "boolean-value",
        model.at_parameter(name),
        f"is '{text}'",
        why=effect,
        remedy=f"write {spelt}" if reader != "the backend" else f"write {spelt} ({', '.join(words)} are read)",
    )


def _check_number(model: Model, name: str, text: str, fact: Parameter, report: Report) -> None:
    where = model.at_parameter(name)
    if model.python_runtime:
        read = values.read_python_float(text) if fact.kind == "float" else values.read_python_int(text)
    elif fact.kind == "float":
        read = values.read_float(text)
    elif model.role == "preprocessing":
        # max_num_images: the reader tests str.isdigit, and takes None otherwise.
        read = values.Read(int(text), True) if text.isdigit() and text.isascii() else values.Read(None, False)
    else:
        read = values.read_int(text, values.SIZE if fact.kind == "size" else values.INT32)
    kind = "number" if fact.kind == "float" else "whole number"
    if read.value is None:
        report.error(
            "number-value",
            where,
            f"is '{text}'",
            why=f"the backend cannot read it and takes its default, {fact.default_text}",
            remedy=f"give a {kind}",
        )
    elif not read.faithful:
        report.error("number-value", where, f"is '{text}', and is read as {read.value:g}", remedy=f"give a {kind}")
    else:
        _check_range(model, name, read.value, fact, report)


def _check_range(model: Model, name: str, value: float, fact: Parameter, report: Report) -> None:
    told = None
    # NaN, which Python reads, is neither less nor more.
    if (fact.least is not None and not value >= fact.least) or (fact.above is not None and not value > fact.above):
        told = f"at least {fact.least:g}" if fact.least is not None else f"more than {fact.above:g}"
    elif (fact.most is not None and value > fact.most) or (fact.below is not None and value >= fact.below):
        told = f"at most {fact.most:g}" if fact.most is not None else f"less than {fact.below:g}"
    if told:
        report.error(
            "range-value",
            model.at_parameter(name),
            f"is {value:g}",
            why="the model does not load with it",
            remedy=f"give {told}",
        )


def _check_word(model: Model, name: str, text: str, fact: Parameter, report: Report) -> None:
    choices = fact.choices
    asked = text
    if model.python_runtime:
        if name in ("gpt_model_type", "batch_scheduler_policy"):
            asked, choices = text.lower(), tuple(choice.lower() for choice in choices)
        elif name == "decoding_mode":
            choices = (*choices, "auto")
    if asked in choices:
        return
    refused = name == "gpt_model_type" or (model.python_runtime and name != "guided_decoding_backend")
    why = "the model does not load with it" if refused else f"the backend takes its default, {fact.default_text}"
    if name == "guided_decoding_backend":
        why = "the backend has no other than xgrammar"
    report.error(
        "choice-value",
        model.at_parameter(name),
        f"is '{text}'",
        why=why,
        remedy=did_you_mean(nearest(text, choices, 0.7)) or _choices(fact),
    )


def _check_list(model: Model, name: str, text: str, fact: Parameter, report: Report) -> None:
    told, form = None, ""
    if fact.kind == "tree":
        form = "{0}, {0, 0}, {1}"
        told = None if values.is_tree(text) else f"is '{text}'"
    elif fact.kind == "windows":
        form = "4096, or 4096,1024"
        numbers, read = values.read_ints(text)
        told = None if read else f"is '{text}'"
        for number in numbers if read else []:
            _check_range(model, name, number, fact, report)
    else:
        form = "0,1 or, for two instances, 0,1;2,3"
        groups, read = values.read_groups(text)
        flat = [number for group in groups for number in group]
        if not read or (model.python_runtime and ";" in text):
            told = f"is '{text}'"
        elif any(number < 0 for number in flat):
            told = f"is '{text}', with a negative number"
        elif any(len(set(group)) < len(group) for group in groups):
            told = f"is '{text}', with a number twice"
    if told:
        why = "the backend cannot read it and takes its default" if "with" not in told else ""
        report.error("list-value", model.at_parameter(name), told, why=why, remedy=f"write it as {form}")


def _check_lookahead(model: Model, report: Report) -> None:
    if model.value("decoding_mode") != "lookahead":
        return
    missing = [name for name in _LOOKAHEAD if model.value(name) is None]
    if missing:
        report.error(
            "lookahead",
            model.at_parameter("decoding_mode"),
            f"is lookahead, and {', '.join(missing)} has no value",
            why="the model does not load",
            remedy="give all three sizes",
        )
        return
    window, ngram, verification = (values.read_int(model.value(name) or "").value for name in _LOOKAHEAD)
    if ngram == 1 and (window != 1 or verification != 0):
        report.error(
            "lookahead",
            model.at_parameter(_LOOKAHEAD[1]),
            "is 1",
            why="that needs a window of 1 and a verification set of 0",
            remedy="give 2 or more",
        )


def _check_guided(model: Model, report: Report) -> None:
    backend, info = model.value("guided_decoding_backend"), model.value("xgrammar_tokenizer_info_path")
    where = model.at_parameter("guided_decoding_backend")
    if model.python_runtime:
        if backend == "xgrammar" and model.value("tokenizer_dir") is None:
            report.error(
                "guided-decoding",
                where,
                "is xgrammar, and tokenizer_dir has no value",
                why="the Python runtime does not load without the tokenizer",
                remedy="fill in tokenizer_dir",
            )
    elif backend == "xgrammar" and info is None:
        report.error(
            "guided-decoding",
            where,
            "is xgrammar, and xgrammar_tokenizer_info_path has no value",
            why="the backend then leaves guided decoding off",
            remedy="make the file with TensorRT-LLM's generate_xgrammar_tokenizer_info.py and name it",
        )
    elif backend is None and info is not None:
        report.error(
            "guided-decoding",
            model.at_parameter("xgrammar_tokenizer_info_path"),
            "is given, and guided_decoding_backend has no value",
            why="the backend then leaves guided decoding off",
            remedy="give guided_decoding_backend xgrammar",
        )


def _choices(fact: Parameter) -> str:
    return f"give {' or '.join(fact.choices)}" if fact.choices else ""
