"""`quantization_config` of a compressed-tensors folder, as llm-compressor writes it: made, and read.

A folder has one scheme for all linears of the layers: a type, a number of bits and a strategy of scales for the
weights, and the same for the inputs, whose scales are static or found for each token. `QuantAlgo`'s rows say which
scheme an algorithm is. Smoothing (SmoothQuant, AWQ) is no part of the format: it is folded into other weights.

Source: the wheels compressed-tensors 0.17 to 0.20 (quantization/quant_config.py, quant_args.py, quant_scheme.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.quantization import (
    COMPRESSED_TENSORS,
    Algorithm,
    KvCacheQuantAlgo,
    QuantAlgo,
    Quantization,
)

# Release of compressed-tensors whose form is written.
VERSION = "0.19.0"
PACKED = "pack-quantized"
# Format of sparse weights whose zeros are stored.
DENSE = "dense"
_STRATEGIES = {"tensor": "tensor", "row": "channel", "group": "group"}
_ALL = "Linear"


def storage(row: Algorithm) -> str:
    """The format's name for how the codes of an algorithm are stored: `pack-quantized` packs integers into int32."""
    if row.operands == "":
        return PACKED
    return "float-quantized" if row.operands == "fp8" else "int-quantized"


def bits(row: Algorithm) -> int:
    """Bits of a weight's code."""
    return 4 if row.scale == "group" else 8


def make(quantization: Quantization, ignored: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of a folder; `ignored` are the names of linears that are not quantized."""
    algo = quantization.quant_algo
    assert algo is not None
    row, kind = algo.row, _kind(algo.row)
    inputs = None
    if row.operands:
        inputs = (
            _args(kind, 8, "tensor", observer="static_minmax")
            if row.static_input
            else _args(kind, 8, "token", observer=None, dynamic=True)
        )
    group = {
        "format": storage(row),
        "input_activations": inputs,
        "output_activations": None,
        "targets": [_ALL],
        "weights": _args(
            kind,
            bits(row),
            _STRATEGIES[row.scale],
            observer="memoryless_minmax",
            group_size=quantization.group_size if quantization.packed else None,
        ),
    }
    cache = None
    if quantization.kv_cache_quant_algo is KvCacheQuantAlgo.FP8:
        cache = _args("float", 8, "tensor", observer=None)
    return {
        "config_groups": {"group_0": group},
        "format": storage(row),
        "global_compression_ratio": None,
        "ignore": list(ignored),
        "kv_cache_scheme": cache,
        "quant_method": COMPRESSED_TENSORS,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": VERSION,
    }


def parse(raw: dict[str, Any], where: str, head: str = "lm_head", router: str = "") -> Quantization:
    """Parse a `quantization_config` whose `quant_method` is compressed-tensors; messages begin with `where`.

    head    name of the head
    router  name within a layer of the experts' router, which may be without quantization as the head must be

    Raises InputDataError for what is damaged, and for what no algorithm here computes: several schemes, zero points,
    reordered groups, sparse or transformed weights, a quantized head.
    """
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise InputDataError(f"{where}: config_groups is not an object with a scheme")
    if len(groups) > 1:
        raise _unread(where, f"it has {len(groups)} schemes, {', '.join(groups)}", "layers of mixed precision")
    sparsity = raw.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == DENSE):
        raise _unread(where, "it has a sparsity_config", "sparse weights")
    if raw.get("transform_config"):
        raise _unread(where, "it has a transform_config", "transformed weights")
    (scheme,) = groups.values()
    if scheme.get("targets") != [_ALL]:
        raise _unread(where, f"its scheme is for {scheme.get('targets')!r}, not for every {_ALL}", "other targets")
    _check_ignored(raw.get("ignore"), where, head, router)
    if scheme.get("output_activations"):
        raise _unread(where, "it has output_activations", "quantized outputs")
    weights, inputs = (_read_args(scheme.get(part), f"{where}: {part}") for part in ("weights", "input_activations"))
    if weights is None:
        raise InputDataError(f"{where}: its scheme has no weights")
    algo = next((algo for algo in QuantAlgo if _is(algo.row, weights, inputs)), None)
    if algo is None:
        known = [algo.value for algo in QuantAlgo if COMPRESSED_TENSORS in algo.row.formats]
        raise InputDataError(
            f"{where} has {_named(weights)} weights and {_named(inputs)} inputs",
            why=f"the schemes read here are those of {', '.join(known)}",
        )
    stored = scheme.get("format") or raw.get("format")
    if stored != storage(algo.row):
        raise InputDataError(f"{where}: its format is {stored!r}", why=f"{algo.value} is stored as {storage(algo.row)}")
    return Quantization(
        quant_algo=algo, kv_cache_quant_algo=_cache(raw.get("kv_cache_scheme"), where), group_size=weights[3] or 128
    )


# (type, bits, strategy, group size or 0, dynamic) of weights or inputs.
_Args = tuple[str, int, str, int, bool]


def _args(
    kind: str,
    width: int,
    strategy: str,
    *,
    observer: str | None,
    dynamic: bool = False,
    group_size: int | None = None,
) -> dict[str, Any]:
    """`observer` is how llm-compressor finds scales; a reader has no use for it."""
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": dynamic,
        "group_size": group_size,
        "num_bits": width,
        "observer": observer,
        "observer_kwargs": {},
        "scale_dtype": None,
        "strategy": strategy,
        "symmetric": True,
        "type": kind,
        "zp_dtype": None,
    }


def _kind(row: Algorithm) -> str:
    return "float" if row.operands == "fp8" else "int"


def _is(row: Algorithm, weights: _Args, inputs: _Args | None) -> bool:
    if COMPRESSED_TENSORS not in row.formats:
        return False
    if weights[:3] != (_kind(row), bits(row), _STRATEGIES[row.scale]) or (weights[3] > 0) != (row.scale == "group"):
        return False
    if not row.operands:
        return inputs is None
    wanted = (_kind(row), 8, "tensor" if row.static_input else "token", 0, not row.static_input)
    return inputs == wanted


def _read_args(raw: Any, where: str) -> _Args | None:
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise InputDataError(f"{where} is {raw!r}, not an object")
    if raw.get("symmetric", True) is not True:
        raise _unread(where, "it is not symmetric", "zero points")
    if raw.get("actorder") in ("group", "dynamic", True):
        raise _unread(where, "its actorder is group", "reordered groups")
    width, group, dynamic = raw.get("num_bits", 8), raw.get("group_size"), raw.get("dynamic", False)
    group = 0 if group in (None, -1) else group
    if type(width) is not int or type(group) is not int or group < 0:
        raise InputDataError(f"{where}: num_bits {width!r} and group_size {group!r} are not whole numbers")
    if type(dynamic) is not bool:
        raise _unread(where, f"dynamic is {dynamic!r}", "scales of two kinds")
    strategy = raw.get("strategy") or ("group" if group else "tensor")
    return str(raw.get("type", "int")), width, str(strategy), group, dynamic


def _cache(raw: Any, where: str) -> KvCacheQuantAlgo | None:
    args = _read_args(raw, f"{where}: kv_cache_scheme")
    if args is None:
        return None
    if args != ("float", 8, "tensor", 0, False):
        raise _unread(where, f"its KV cache is {_named(args)}", "KV caches other than FP8 with a scale a layer")
    return KvCacheQuantAlgo.FP8


def _check_ignored(ignored: Any, where: str, head: str, router: str) -> None:
    ignored = [] if ignored is None else ignored
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise InputDataError(f"{where}: ignore is not a list of names")
    routed = [name for name in ignored if router and f".{_module(name)}".endswith(f".{router}")]
    inner = [name for name in ignored if _module(name) != head and "embed" not in name and name not in routed]
    if inner:
        raise _unread(where, f"it ignores {inner[0]!r}", "layers of mixed precision")
    if not any(_module(name) == head for name in ignored):
        raise _unread(where, f"it does not ignore {head}", "quantized heads")


def _module(entry: str) -> str:
    """The module that an entry of `ignore` names: by its name, or by an expression that is a name and wildcards.

    Other expressions are not evaluated: a file from elsewhere could have one that takes for ever.
    """
    name = entry.removeprefix("re:")
    if name == entry:
        return name
    return name.removeprefix("^").removeprefix(".*").removesuffix("$").removesuffix(".*").replace("\\.", ".")


def _named(args: _Args | None) -> str:
    if args is None:
        return "unquantized"
    kind, width, strategy, group, dynamic = args
    return f"{kind}{width} {strategy}{f' of {group}' if group else ''}{' dynamic' if dynamic else ''}"


def _unread(where: str, why: str, what: str) -> InputDataError:
    return InputDataError(f"{where} cannot be read", why=f"{why}, and {what} are not read here")
