"""Table of a migration: what becomes of each setting of a deployment under a runtime without engines."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trtpipe.configs.facts import load_toolchains
from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import EngineBackend, ServedBy
from trtpipe.engines.build_config import LORA, BuildConfig
from trtpipe.triton_repo import llmapi, tensors
from trtpipe.triton_repo.check import facts
from trtpipe.triton_repo.deployment import Deployment
from trtpipe.triton_repo.deployment_settings import Setting
from trtpipe.triton_repo.serving import ServingConfig

# Place of the rows of what clients ask.
REQUESTS = "requests"
# Inputs of NVIDIA's ensemble whose names the LLM API's model spells otherwise; to others it adds `sampling_param_`.
LLM_API_NAMES = {
    "stream": "streaming", "stop_words": "sampling_param_stop", "random_seed": "sampling_param_seed",
    "exclude_input_in_output": "sampling_param_exclude_input_from_output",
    "return_log_probs": "return_cumulative_logprob",
}  # fmt: skip


class Verdict(str, enum.Enum):
    """What becomes of a setting, in the order in which people have to look at it.

    LOST      the new target has nothing for it
    CHANGED   it has another value, or another sense
    REPLACED  something else does its work, and needs no value
    CARRIED   it is the same in the new target
    UNUSED    it has its default, and the new target needs nothing for that
    """

    LOST = "no counterpart"
    CHANGED = "changed"
    REPLACED = "replaced"
    CARRIED = "carried over"
    UNUSED = "not used"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting of the deployment and what becomes of it.

    place    `engine`, the model whose config.pbtxt has it, or `requests` for an input of those
    becomes  the setting of trtpipe, or the input, that takes its place; `to` is its value there
    """

    place: str
    setting: str
    value: Any
    verdict: Verdict
    becomes: str = ""
    to: Any = None
    why: str = ""


def migration_table(deployment: Deployment, runtime: str) -> list[Row]:
    """Rows for all settings of `deployment`, in its order, for an engine of `runtime`."""
    backend = load_backend(runtime)
    rows = [row for one in deployment.settings if one.kind != "requests" and (row := _row(one, runtime, backend))]
    rows = _fitted(rows)
    inputs = [one for one in deployment.settings if one.kind == "requests"]
    return [*rows, *_request_rows(inputs, backend)] if inputs else rows


def chosen(rows: list[Row]) -> dict[str, Any]:
    """The settings of trtpipe that the rows give values, by dotted name; a later row's value counts."""
    return {
        row.becomes: row.to for row in rows if row.becomes.startswith(("build.", "serving.")) and row.to is not None
    }


def _row(one: Setting, runtime: str, backend: EngineBackend) -> Row | None:
    """The row of a setting; None for a default that is trtpipe's too."""
    base = Row(place=one.place, setting=one.name, value=one.value, verdict=Verdict.LOST)
    if one.kind == "model":
        return dataclasses.replace(base, why="what a repository has beside NVIDIA's templates is not carried over")
    known = facts.successors()
    by_role = {"build": {one.role: known.build}, "parameters": known.parameters, "fields": known.fields}[one.kind]
    row = by_role.get(one.role, {}).get(one.name) or (
        known.fields["any"].get(one.name) if one.kind == "fields" else None
    )
    if row is None:
        why = "no model of TensorRT-LLM reads it" if one.kind == "parameters" else "trtpipe writes no such setting"
        return dataclasses.replace(base, why=why)
    if row.becomes:
        return _carried(one, base, row.becomes, backend)
    if not one.stated:
        return None
    fact = facts.parameters().get(one.role, {}).get(one.name) if one.kind == "parameters" else None
    if fact is not None and one.value == fact.default:
        return dataclasses.replace(base, verdict=Verdict.UNUSED, why="it is the default")
    if one.name == "instance_group.count" and one.value == 1:
        return None
    if row.instead:
        return dataclasses.replace(base, verdict=Verdict.REPLACED, why=row.instead)
    there = f"; {runtime} itself calls it {row.there[runtime]}" if runtime in row.there else ""
    return dataclasses.replace(base, why=row.values.get(str(one.value), row.lost) + there)


def _carried(one: Setting, base: Row, name: str, backend: EngineBackend) -> Row | None:
    """The row of a setting that trtpipe has too."""
    value = one.value
    if value is None:
        return dataclasses.replace(base, verdict=Verdict.CHANGED, becomes=name, why=f"{one.note}; here trtpipe's")
    if name == "serving.max_attention_window_size":
        if len(value) > 1:
            return dataclasses.replace(base, why="all layers have one window")
        value = value[0]
    if name == "serving.triton_max_batch_size" and value < 1:
        return dataclasses.replace(base, verdict=Verdict.CHANGED, becomes=name, why="it is the engine's max_batch_size")
    group, _, field = name.partition(".")
    ours = getattr({"build": BuildConfig, "serving": ServingConfig}[group](), field)
    if name == "serving.kv_cache_host_memory_bytes":
        value = value or None
        if value is None:
            return dataclasses.replace(base, verdict=Verdict.UNUSED, why="it is the default") if one.stated else None
    if not one.stated and value == ours:
        return None
    why = "; ".join(part for part in (one.note, "" if one.stated else "the value is its reader's default") if part)
    if name in backend.FIXED:
        held, reason = backend.FIXED[name]
        followed = group == "serving" or field in backend.SETTINGS
        if held is None and value == ours:
            return dataclasses.replace(base, verdict=Verdict.UNUSED, why=reason)
        if held is None or (held != value and not followed):
            return dataclasses.replace(base, why=reason)
        if not followed:
            return dataclasses.replace(base, verdict=Verdict.CARRIED)
        if held == value:
            return dataclasses.replace(base, verdict=Verdict.CARRIED, becomes=name, to=held)
        why = "; ".join(part for part in (reason, why) if part)
        return dataclasses.replace(base, verdict=Verdict.CHANGED, becomes=name, to=held, why=why)
    if group == "build" and field not in (*backend.SETTINGS, *LORA):
        return dataclasses.replace(base, why="the runtime has no such setting")
    verdict = Verdict.CHANGED if name in backend.MEANS else Verdict.CARRIED
    return dataclasses.replace(base, verdict=verdict, becomes=name, to=value, why=backend.MEANS.get(name, why))


def _fitted(rows: list[Row]) -> list[Row]:
    """The rows with sizes that an engine could have and a new target cannot."""
    found = chosen(rows)
    usual = BuildConfig()

    def size(name: str) -> int:
        return int(found.get(f"build.{name}", getattr(usual, name)))

    longest, batch = size("max_seq_len"), size("max_batch_size")
    tokens = max(size("max_num_tokens"), batch * size("max_beam_width"), size("tokens_per_block"))
    prompt, why = size("max_input_len"), ""
    if prompt >= longest:
        prompt, why = longest - 1, "a prompt leaves room for one token of output"
    if found.get("serving.enable_chunked_context") is False and prompt > tokens:
        prompt, why = tokens, "without chunked context a prompt is computed in one step"
    changes = {
        "build.max_num_tokens": (tokens, "a full batch decodes in one step"),
        "build.max_input_len": (prompt, why),
        "serving.triton_max_batch_size": (
            min(found.get("serving.triton_max_batch_size", batch), batch), "the engine runs no more requests at once"
        ),
    }  # fmt: skip
    return [
        dataclasses.replace(row, verdict=Verdict.CHANGED, to=changes[row.becomes][0], why=changes[row.becomes][1])
        if row.becomes in changes and row.to not in (None, changes[row.becomes][0])
        else row
        for row in rows
    ]


def _request_rows(inputs: list[Setting], backend: EngineBackend) -> Iterator[Row]:
    """Rows for the clients of text: the models that they name, and each input that is another one or none."""
    fronts = ", ".join(dict.fromkeys(name for one in inputs for name in one.place.split(", ")))
    base = Row(place=REQUESTS, setting="model", value=fronts, verdict=Verdict.CARRIED)
    if backend.SERVED_BY is ServedBy.LLM_API:
        yield dataclasses.replace(
            base,
            verdict=Verdict.CHANGED,
            becomes=llmapi.MODEL,
            why="its inputs and outputs have other names",
        )
        there = {tensor.name for tensor in llmapi.INPUTS}
    else:
        yield dataclasses.replace(base, why="inputs and outputs have the same names")
        there = {tensor.name for tensor in tensors.CLIENT_INPUTS}
    samplers = [release.sampler for release in load_toolchains().values()]
    ignored = {name for sampler in samplers if sampler.draws for name in sampler.ignores}
    for one in inputs:
        row = Row(place=REQUESTS, setting=one.name, value=None, verdict=Verdict.LOST)
        name = _input(one.name, backend)
        _, why = backend.FIXED.get(f"request.{name}", (None, facts.successors().refused.get(name, "")))
        if backend.SERVED_BY is ServedBy.LLM_API:
            why = ""
        if name not in there:
            yield dataclasses.replace(row, why="the new model has no such input")
        elif why:
            yield dataclasses.replace(row, why=why)
        elif name != one.name:
            why = "it is called so there"
            if name.removeprefix("sampling_param_") in ignored:
                why += "; the model of a release whose sampler ignores it has no such input"
            yield dataclasses.replace(row, verdict=Verdict.CHANGED, becomes=name, why=why)


def _input(name: str, backend: EngineBackend) -> str:
    """Name of an input in the new target; in some releases of NVIDIA's templates it has another."""
    if backend.SERVED_BY is ServedBy.LLM_API:
        there = {tensor.name for tensor in llmapi.INPUTS}
        names = (name, LLM_API_NAMES.get(name, ""), f"sampling_param_{name}")
        return next((one for one in names if one in there), name)
    row = facts.tensors()["bls"].inputs.get(name)
    return name if row is None or row.renamed is None else row.renamed
