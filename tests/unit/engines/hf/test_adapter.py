"""LoRA adapters as PEFT saves them: refusals, the folder that a server reads, and TensorRT-LLM's arrays."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.adapters import write_adapter
from tests.support.factories import MIXTRAL, PHI3, hf_folder
from trtpipe.engines import files
from trtpipe.engines.adapters import AdapterFolder, check_name
from trtpipe.engines.base import DataType
from trtpipe.engines.errors import InputDataError, TrtpipeError, UsageError
from trtpipe.engines.hf.adapter import lay_out, located_pairs, read_adapter, require_rank
from trtpipe.engines.hf.adapter_check import checked_adapter
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.hf.safetensors_file import header_bytes
from trtpipe.engines.lora_arrays import require_type, whole_groups, write_arrays


def told(**changes: Any) -> Callable[[Path], None]:
    """A change of the adapter's config."""

    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def weights(*tensors: tuple[str, tuple[int, ...]], dtype: str = "F32") -> Callable[[Path], None]:
    """Other weights, all zeros."""

    def change(folder: Path) -> None:
        header, _ = header_bytes((name, dtype, shape) for name, shape in tensors)
        size = {"F32": 4, "I8": 1}[dtype]
        data = bytes(sum(size * int(np.prod(shape)) for _, shape in tensors))
        (folder / "adapter_model.safetensors").write_bytes(header + data)

    return change


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def linear(name: str, *, layer: int = 0, out: int = 32, features: int = 32) -> Callable[[Path], None]:
    prefix = f"base_model.model.model.layers.{layer}.{name}"
    return weights((f"{prefix}.lora_A.weight", (4, features)), (f"{prefix}.lora_B.weight", (out, 4)))


HEAD = "base_model.model.lm_head.weight"
ONE_SIDE = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
REFUSED: list[tuple[str, Callable[[Path], Any], str]] = [
    ("no folder", shutil.rmtree, "is not a LoRA adapter: there is no such folder"),
    ("no config", lambda folder: (folder / "adapter_config.json").unlink(), "it has no adapter_config.json"),
    ("another kind", told(peft_type="IA3"), "describes an adapter of the type 'IA3'"),
    ("DoRA", told(use_dora=True), "use_dora is True: only plain LoRA is computed"),
    ("biases", told(bias="lora_only"), "bias is lora_only"),
    ("whole modules", told(modules_to_save=["lm_head"]), r"modules_to_save is \['lm_head'\]"),
    ("ranks by pattern", told(rank_pattern={"q_proj": 8}), "rank_pattern is"),
    ("PiSSA", told(init_lora_weights="pissa"), "init_lora_weights is pissa"),
    ("LoRA-GA", told(init_lora_weights="lora_ga"), "init_lora_weights is lora_ga: the adapter belongs to weights that"),
    ("no rank", told(r="8"), "r is '8', not a rank"),
    ("rank 0", told(r=0), "r is 0, not a rank"),
    ("no alpha", told(lora_alpha=None), "lora_alpha is None, not a number"),
    ("another rank", told(r=8), "are not of rank 8, as adapter_config.json says"),
    ("a pickle", pickled, r"has its weights only as a pickle \(adapter_model.bin\): a pickle can run code"),
    ("a head", weights((HEAD, (4, 4))), "'base_model.model.lm_head.weight' is not of an adapter of a linear"),
    ("codes", weights((ONE_SIDE, (4, 32)), dtype="I8"), "is no matrix of floating-point numbers"),
    ("one side", weights((ONE_SIDE, (4, 32))), "'model.layers.0.self_attn.q_proj' has lora_A alone"),
    ("no tensors", weights(), "holds no tensors"),
    ("a layer too many", linear("self_attn.q_proj", layer=2), "is of another model: it adapts layer 2, and the model"),
    ("another size", linear("self_attn.q_proj", out=64), "its self_attn.q_proj is 64 x 32, the model's is 32 x 32"),
    ("an unknown linear", linear("self_attn.qkv_proj"), "a LlamaForCausalLM has no such linear"),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("models") / "tiny", tokenizer=False)


@pytest.mark.parametrize(("change", "words"), [pytest.param(*row[1:], id=row[0]) for row in REFUSED])
def test_what_is_refused(tmp_path: Path, model: Path, change: Callable[[Path], Any], words: str) -> None:
    folder = write_adapter(tmp_path / "adapter", model)
    change(folder)
    kind = InputDataError if folder.is_dir() else UsageError
    with pytest.raises(kind, match=words) as refused:
        located_pairs(read_adapter(folder), read_model_config(model))
    assert "\n" not in str(refused.value)


def test_adapters_of_experts_are_refused_and_those_of_attention_are_not(tmp_path: Path) -> None:
    model = hf_folder(tmp_path / "mixtral", tokenizer=False, **MIXTRAL)
    facts = read_model_config(model)
    attention = read_adapter(write_adapter(tmp_path / "a", model, roles=("q", "o")))
    assert {role for _, role in located_pairs(attention, facts)} == {"q", "o"}
    folder = write_adapter(tmp_path / "b", model, roles=("q",))
    linear("mlp.experts.0.gate_proj")(folder)
    with pytest.raises(InputDataError, match="adapters of experts are not computed, those of attention are"):
        located_pairs(read_adapter(folder), facts)


def test_linears_that_a_family_has_as_one(tmp_path: Path) -> None:
    model = hf_folder(tmp_path / "phi3", tokenizer=False, **PHI3)
    facts = read_model_config(model)
    folder = write_adapter(tmp_path / "a", model, roles=("o", "down"))
    assert {role for _, role in located_pairs(read_adapter(folder), facts)} == {"o", "down"}
    for name, words in (
        ("self_attn.qkv_proj", "as one linear are not computed"),
        ("self_attn.q_proj", "a Phi3ForCausalLM has no such linear"),
    ):
        linear(name)(folder)
        with pytest.raises(InputDataError, match=words):
            located_pairs(read_adapter(folder), facts)


def test_a_rank_above_the_engine_s_and_names_that_cannot_be(tmp_path: Path, model: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path / "adapter", model, rank=16))
    with pytest.raises(UsageError, match=r"has rank 16, the engine takes 8: .* --set build.max_lora_rank=16"):
        require_rank(adapter, 8)
    for name in ("", "a:b", "../a", "a/b", ".a", "a" * 65, "a b"):
        with pytest.raises(UsageError, match="cannot be the name of an adapter"):
            check_name(name)
    check_name("Support-2.1_b")


@pytest.mark.parametrize(
    ("number", "alpha", "dtype", "words"),
    [
        (np.nan, 8, DataType.FLOAT32, "holds numbers that are not finite"),
        (-np.inf, 8, DataType.FLOAT32, "holds numbers that are not finite"),
        (65504, 4, DataType.FLOAT16, None),  # alpha / rank is 1
        (-65504, 4.01, DataType.FLOAT16, "has numbers beyond the range of float16"),
        (65504, 4.01, DataType.BFLOAT16, None),
        (3e38, 8, DataType.FLOAT32, "holds numbers that are not finite"),  # it is 6e38 with its scale
    ],
)
def test_numbers_that_the_model_s_type_does_not_hold(
    tmp_path: Path, model: Path, number: float, alpha: float, dtype: DataType, words: str | None
) -> None:
    folder = write_adapter(tmp_path / "adapter", model, lora_alpha=alpha)
    path = folder / "adapter_model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-4:] = np.float32(number).tobytes()  # of a B
    path.write_bytes(bytes(raw))
    with pytest.raises(InputDataError, match=words) if words else nullcontext():
        checked_adapter(folder, read_model_config(model), 4, dtype)


def test_the_folder_is_read_again_when_it_changes(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "lora"
    folder.mkdir()
    seen = AdapterFolder(folder)
    assert (seen.all(), AdapterFolder(None).all(), AdapterFolder(tmp_path / "none").all()) == ((), (), ())
    source = write_adapter(tmp_path / "adapter", model, base_model_name_or_path="meta/llama")
    first = lay_out(read_adapter(source), "b", folder)
    second = lay_out(read_adapter(source), "a", folder)
    assert [one.name for one in seen.all()] == ["a", "b"]
    # The number depends on the name and the content, and is one of TensorRT-LLM's 31 bits.
    assert first != second
    assert (seen.numbered(int(first.name)), 0 < int(first.name) < 1 << 31) == (seen.find("b"), True)
    told(lora_alpha=16)(source)
    assert lay_out(read_adapter(source), "b", folder) != first
    shutil.rmtree(second)
    (folder / "77").mkdir()  # one that is half removed
    assert [one.name for one in seen.all()] == ["b", "b"]
    again = read_adapter(first)
    assert (again.rank, again.scale, again.base) == (4, 2.0, "meta/llama")


def test_a_training_that_goes_on_does_not_change_what_was_added(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LINK_FROM_BYTES", 1)
    source = write_adapter(tmp_path / "adapter", model)
    before = (source / "adapter_model.safetensors").read_bytes()
    made = lay_out(read_adapter(source), "a", tmp_path)
    # Into the file that is there, as torch and cp write.
    with (source / "adapter_model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    assert (source / "adapter_model.safetensors").read_bytes() != before
    assert (made / "adapter_model.safetensors").read_bytes() == before


@pytest.mark.parametrize("init", [None, True, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_model_as_it_is(tmp_path: Path, model: Path, init: str | bool | None) -> None:
    assert read_adapter(write_adapter(tmp_path / "adapter", model, init_lora_weights=init)).rank == 4


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_arrays_of_tensorrt_llm(tmp_path: Path, model: Path, dtype: str) -> None:
    """Row by row as hf_lora_convert.py writes them: A, then B times alpha / rank, padded to the widest row."""
    from safetensors import safe_open

    roles = ("q", "k", "down")
    folder = write_adapter(tmp_path / "adapter", model, rank=2, roles=roles, dtype=dtype, lora_alpha=6)
    size = write_arrays(read_adapter(folder), read_model_config(model), tmp_path)
    found, facts = (np.load(tmp_path / f"model.lora_{name}.npy") for name in ("weights", "config"))
    # Rows are by layer and role; modules are 6 (down), 2 (k) and 1 (q).
    assert facts.tolist() == [[[6, 0, 2], [2, 0, 2], [1, 0, 2], [6, 1, 2], [2, 1, 2], [1, 1, 2]]]
    assert (facts.dtype, found.dtype, found.shape) == (np.int32, np.float16, (1, 6, 2 * 48 + 2 * 32))
    assert size == found.nbytes
    names = {6: "mlp.down_proj", 2: "self_attn.k_proj", 1: "self_attn.q_proj"}
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        for row, (module, layer, _) in zip(found[0], facts[0], strict=True):
            prefix = f"base_model.model.model.layers.{layer}.{names[int(module)]}"
            a, b = (file.get_tensor(f"{prefix}.lora_{side}.weight").float().numpy() for side in "AB")
            whole = np.concatenate([a.ravel(), (b * 3).ravel()]).astype(np.float16)
            assert np.array_equal(row[: len(whole)], whole)
            assert not row[len(whole) :].any()


def test_what_tensorrt_llm_takes() -> None:
    assert whole_groups(["attn_v", "attn_dense"]) == ("attn_dense", "attn_k", "attn_q", "attn_v")
    assert whole_groups(["mlp_gate"]) == ("mlp_gate", "mlp_h_to_4h")
    require_type(DataType.FLOAT16)
    with pytest.raises(TrtpipeError, match="does not serve adapters of a bfloat16 engine by name"):
        require_type(DataType.BFLOAT16)
