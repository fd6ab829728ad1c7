"""Reader of LoRA adapters as PEFT saves them, their check against a model, and writer of a server's adapter folder.

A linear with an adapter computes W x + scale * B (A x), with A [rank, in] and B [out, rank]. Format: a folder with
adapter_config.json and adapter_model.safetensors, whose tensors are named `base_model.model.` + the linear's name +
`.lora_A.weight`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trtpipe.engines.adapters import INFO
from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.engines.families import family_of, names_of
from trtpipe.engines.files import copy, write_json
from trtpipe.engines.hf.folder import PICKLE_PATTERNS, LocatedTensor
from trtpipe.engines.hf.safetensors_file import read_header
from trtpipe.engines.json_input import read_json
from trtpipe.engines.model_config import Geometry

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Linears of a layer that can have an adapter: fields of `engines.families.base.SourceNames`.
ROLES = ("q", "k", "v", "o", "gate", "up", "down")
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<linear>.+)\.lora_(?P<side>[AB])\.weight")
_STORED = ("F32", "F16", "BF16")
# Keys that change what an adapter computes, and their values for plain LoRA. All other keys concern the training alone.
# Source: LoraConfig of PEFT 0.21.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (None, []),
    "alpha_pattern": (None, {}),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None, []),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_dora": (False, None),
    "use_qalora": (False, None),
}
# Initialisations that leave the model's weights as they are. Others, such as PiSSA and LoRA-GA, change them.
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


class Pair(NamedTuple):
    """The two matrices of an adapted linear: `a` [rank, in] and `b` [out, rank]."""

    a: LocatedTensor
    b: LocatedTensor


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA adapter in `folder`.

    base     name of the model that it was trained for, by its config; "" where the config has none
    scale    factor of B A
    linears  name of a linear in the model -> the matrices
    """

    folder: Path
    base: str
    rank: int
    alpha: float
    rslora: bool
    linears: Mapping[str, Pair]

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def modules(self) -> tuple[str, ...]:
        """Last parts of the linears' names, sorted: `q_proj`."""
        return tuple(sorted({name.rpartition(".")[2] for name in self.linears}))

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices as they are stored."""
        return sum(side.entry.nbytes for pair in self.linears.values() for side in pair)


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter's config and the heads of its tensors. Raises UsageError for a folder that is not there,
    InputDataError for one that is no adapter, and for an adapter other than plain LoRA."""
    path = folder / CONFIG
    if not path.is_file():
        there = folder.is_dir()
        raise (InputDataError if there else UsageError)(
            f"{folder} is not a LoRA adapter",
            why=f"it has no {CONFIG}" if there else "there is no such folder",
            remedy="give a folder that PEFT has saved",
        )
    raw = read_json(path, "adapter config")
    if raw.get("peft_type") != "LORA":
        raise InputDataError(
            f"{path} describes an adapter of the type {raw.get('peft_type')!r}", why="only LoRA adapters are computed"
        )
    for name, plain in _PLAIN.items():
        if name in raw and not any(raw[name] == value and type(raw[name]) is type(value) for value in plain):
            raise InputDataError(
                f"{path}: {name} is {str(raw[name])[:60]}",
                why="only plain LoRA is computed, two matrices for each linear",
                remedy=f"merge the adapter into the model, or train it without {name}",
            )
    if raw.get("init_lora_weights") not in _INITIAL:
        raise InputDataError(
            f"{path}: init_lora_weights is {str(raw['init_lora_weights'])[:60]}",
            why="the adapter belongs to weights that this initialisation has changed",
            remedy="convert it to plain LoRA with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
    rank, alpha, base = raw.get("r"), raw.get("lora_alpha"), raw.get("base_model_name_or_path")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise InputDataError(f"{path}: r is {rank!r}, not a rank")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise InputDataError(f"{path}: lora_alpha is {alpha!r}, not a number")
    rslora = raw.get("use_rslora", False)
    if not isinstance(rslora, bool):
        raise InputDataError(f"{path}: use_rslora is {rslora!r}, not true or false")
    return Adapter(
        folder=folder,
        base=base if isinstance(base, str) else "",
        rank=rank,
        alpha=float(alpha),
        rslora=rslora,
        linears=_linears(folder, rank),
    )


def _linears(folder: Path, rank: int) -> dict[str, Pair]:
    path = folder / WEIGHTS
    if not path.is_file():
        pickles = sorted(p.name for pattern in PICKLE_PATTERNS for p in folder.glob(pattern))
        if pickles:
            raise InputDataError(
                f"{folder} has its weights only as a pickle ({pickles[0]})",
                why="a pickle can run code when it is loaded",
                remedy="save it again with PEFT's save_pretrained, which writes safetensors",
            )
        raise InputDataError(f"{folder} has no weights", why=f"{WEIGHTS} is not there")
    sides: dict[str, dict[str, LocatedTensor]] = {}
    for name, entry in read_header(path).tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise InputDataError(
                f"{path}: tensor '{name[:100]}' is not of an adapter of a linear",
                why="embeddings, heads and whole modules are not adapted here",
                remedy="train the adapter without them",
            )
        if entry.dtype not in _STORED or len(entry.shape) != 2:
            raise InputDataError(f"{path}: tensor '{name[:100]}' is no matrix of floating-point numbers")
        sides.setdefault(found["linear"].removeprefix(_PREFIX), {})[found["side"]] = LocatedTensor(
            path=path, entry=entry
        )
    for name, pair in sides.items():
        if pair.keys() != {"A", "B"}:
            raise InputDataError(f"{path}: '{name[:100]}' has lora_{min(pair)} alone", remedy="save the adapter again")
        if pair["A"].entry.shape[0] != rank or pair["B"].entry.shape[1] != rank:
            raise InputDataError(f"{path}: the matrices of '{name[:100]}' are not of rank {rank}, as {CONFIG} says")
    if not sides:
        raise InputDataError(f"{path} holds no tensors", remedy="save the adapter again")
    return {name: Pair(a=pair["A"], b=pair["B"]) for name, pair in sides.items()}


def located_pairs(adapter: Adapter, model: Geometry) -> dict[tuple[int, str], Pair]:
    """(layer, role of ROLES) -> the matrices. Raises InputDataError for linears or sizes that `model` does not have."""
    names, path = names_of(model), adapter.folder / WEIGHTS
    dense = {getattr(names, role): role for role in ROLES if model.experts is None or role in ROLES[:4]}
    shapes = family_of(model).layer_shapes(model)
    place = re.compile(re.escape(names.layers) + r"(0|[1-9]\d{0,5})\.(.+)")
    out: dict[tuple[int, str], Pair] = {}
    for name, pair in adapter.linears.items():
        found = place.fullmatch(name)
        role = dense.get(found[2]) if found and f"{found[2]}.weight" in shapes else None
        if found is None or role is None:
            why, remedy = f"a {model.architecture} has no such linear", "give an adapter of this model"
            if model.experts is not None and "mlp" in name:
                why = "adapters of experts are not computed, those of attention are"
                remedy = "train the adapter for the linears of attention alone"
            elif found and found[2] in (names.qkv, names.gate_up):
                why = "adapters of q, k and v or of gate and up as one linear are not computed"
                remedy = "train the adapter for the other linears alone"
            raise InputDataError(f"{path} adapts '{name[:100]}'", why=why, remedy=remedy)
        layer = int(found[1])
        if layer >= model.num_hidden_layers:
            raise _another(adapter, f"it adapts layer {layer}, and the model has {model.num_hidden_layers}")
        out_size, in_size = shapes[f"{found[2]}.weight"]
        have = pair.b.entry.shape[0], pair.a.entry.shape[1]
        if have != (out_size, in_size):
            raise _another(adapter, f"its {found[2]} is {have[0]} x {have[1]}, the model's is {out_size} x {in_size}")
        out[layer, role] = pair
    return out


def _another(adapter: Adapter, why: str) -> InputDataError:
    trained = f"; it was trained for {adapter.base[:100]}" if adapter.base else ""
    return InputDataError(
        f"the adapter in {adapter.folder} is of another model", why=why + trained,
        remedy="give an adapter of this model",
    )  # fmt: skip


def require_rank(adapter: Adapter, most: int) -> None:
    """Raises UsageError for a rank above `most`, the highest that an engine takes."""
    if adapter.rank > most:
        raise UsageError(
            f"the adapter in {adapter.folder} has rank {adapter.rank}, the engine takes {most}",
            why="build.max_lora_rank sets the workspace of adapters",
            remedy=f"build with --set build.max_lora_rank={adapter.rank}",
        )


def lay_out(adapter: Adapter, name: str, out: Path) -> Path:
    """Write the adapter as `name` into a new folder in `out`, named by the adapter's number; return the new folder."""
    digest = hashlib.sha256(f"{name}\0{adapter.rank}\0{adapter.alpha}\0{adapter.rslora}\0".encode())
    with (adapter.folder / WEIGHTS).open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    # TensorRT-LLM reads the number as 32 bits; 0 means no adapter.
    made = out / str(int.from_bytes(digest.digest()[:4], "big") >> 1 or 1)
    made.mkdir()
    # Not a link: a training that goes on would write into what is served.
    copy(adapter.folder / WEIGHTS, made / WEIGHTS)
    # Only the keys that PEFT, vLLM and the LLM API read for inference.
    write_json(
        made / CONFIG,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": adapter.base or None,
            "inference_mode": True,
            "r": adapter.rank,
            "lora_alpha": adapter.alpha,
            "use_rslora": adapter.rslora,
            "target_modules": list(adapter.modules),
            "bias": "none",
        },
    )
    write_json(made / INFO, {"name": name, "rank": adapter.rank})
    return made
