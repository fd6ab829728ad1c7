"""A checkpoint equals its source or says where not, and gives the source back."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.factories import MIXTRAL, hf_folder, read_tensors, write_safetensors
from tests.support.strategies import models
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.config import CheckpointError
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.checkpoint.layout import rank_file
from trtpipe.engines.checkpoint.restore import differences, restore
from trtpipe.engines.checkpoint.split import check_mapping
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.hf.safetensors_file import read_header
from trtpipe.engines.model_config import EmbeddingSharding


def checkpoint(
    source: Path, out: Path, *, tp: int = 1, pp: int = 1, ep: int = 1, dtype: DataType | None = None, **rest: Any
) -> Path:
    out.mkdir()
    convert(source, out, dtype=dtype, mapping=Mapping(tp_size=tp, pp_size=pp, moe_ep_size=ep), **rest)
    return out


def change(path: Path, tensor: str, element: int = 0) -> None:
    """Flip one bit of a tensor in a file."""
    entry = read_header(path).tensors[tensor]
    with path.open("r+b") as file:
        file.seek(entry.offset + element * entry.nbytes // int(np.prod(entry.shape)))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def set_config(folder: Path, **values: Any) -> None:
    """Give the config.json of a folder other values."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **values}))


@given(case=models(), tied=st.booleans(), embedding=st.sampled_from(EmbeddingSharding))
def test_a_restored_checkpoint_equals_its_source(
    case: tuple[dict[str, Any], Mapping], tied: bool, embedding: EmbeddingSharding
) -> None:
    overrides, mapping = case
    # A Phi-3's is what its heads make, which ranks share already.
    if embedding is EmbeddingSharding.HIDDEN and overrides.get("model_type") != "phi3":
        overrides["hidden_size"] *= mapping.tp_size
    with tempfile.TemporaryDirectory() as scratch:
        source = hf_folder(Path(scratch, "hf"), tokenizer=False, tie_word_embeddings=tied, **overrides)
        check_mapping(read_model_config(source), mapping, embedding)
        made = Path(scratch, "out")
        made.mkdir()
        convert(source, made, dtype=None, mapping=mapping, embedding=embedding)
        told: list[tuple[int, int]] = []
        assert differences(made, source, lambda done, total: told.append((done, total))) == []
        assert told[0][0] < told[-1][0] == told[-1][1]
        back = Path(scratch, "back")
        back.mkdir()
        restore(made, back)
        found, wanted = read_tensors(back / "model.safetensors"), read_tensors(source / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not np.array_equal(found[name], wanted[name])] == []
        assert read_model_config(back) == read_model_config(source)


def test_a_cast_checkpoint_equals_its_source_after_the_same_cast(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", dtype="F32", shards=3)
    assert differences(checkpoint(source, tmp_path / "out", tp=2, dtype=DataType.BFLOAT16), source) == []


def test_a_router_is_restored_as_wide_as_it_must_be(tmp_path: Path) -> None:
    # Ranks hold it in float32: what began as bfloat16 is that again, what began wider is not rounded.
    for dtype, stored in (("BF16", "BF16"), ("F32", "F32")):
        source, back = hf_folder(tmp_path / dtype, dtype=dtype, **MIXTRAL), tmp_path / f"{dtype}-back"
        made = checkpoint(source, tmp_path / f"{dtype}-out", tp=2, ep=2, dtype=DataType.BFLOAT16)
        back.mkdir()
        restore(made, back)
        tensors = read_header(back / "model.safetensors").tensors
        assert tensors["model.layers.1.block_sparse_moe.gate.weight"].dtype == stored
        assert tensors["model.layers.1.block_sparse_moe.experts.3.w1.weight"].dtype == "BF16"


def test_swapped_experts_are_found(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", **MIXTRAL)
    made = checkpoint(source, tmp_path / "out", tp=2, ep=2)
    first, second = rank_file(made, 0), rank_file(made, 1)
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    assert (
        "tensor 'transformer.layers.0.mlp.fc.weight' in rank0.safetensors: differs from "
        "'model.layers.0.block_sparse_moe.experts.0.w3.weight' of the source"
    ) in differences(made, source)


def test_one_bit_is_found_and_named(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf")
    made = checkpoint(source, tmp_path / "out", tp=2, pp=2)
    change(rank_file(made, 3), "transformer.layers.0.mlp.proj.weight", 100)
    assert differences(made, source) == [
        "tensor 'transformer.layers.0.mlp.proj.weight' in rank3.safetensors: differs from "
        "'model.layers.1.mlp.down_proj.weight' of the source"
    ]


def test_padding_that_is_not_zero_is_found(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", vocab_size=301)
    made = checkpoint(source, tmp_path / "out", tp=2)
    change(rank_file(made, 1), "lm_head.weight", 150 * 32)
    assert differences(made, source) == ["tensor 'lm_head.weight' in rank1.safetensors: its padding is not zero"]


def test_a_lost_rotary_setting_is_found(tmp_path: Path) -> None:
    """What upstream's converter does to a config it does not understand."""
    source = hf_folder(tmp_path / "hf", rope_theta=500000.0)
    made = checkpoint(source, tmp_path / "out")
    set_config(made, rotary_base=10000.0)
    assert differences(made, source) == ["config.json: rotary_base is 10000.0, the source has 500000.0"]


def test_biases_that_a_checkpoint_has_no_place_for_are_found(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf")
    made = checkpoint(source, tmp_path / "out")
    set_config(source, mlp_bias=True)
    assert differences(made, source) == [
        f"{source} has biases in its feed-forward layers (mlp_bias): a LlamaForCausalLM of TensorRT-LLM has none, and "
        "its converter drops them silently"
    ]
    set_config(source, mlp_bias=False)
    tensors = read_tensors(source / "model.safetensors")
    bias = {"model.layers.1.self_attn.q_proj.bias": np.ones(32, np.uint16)}
    write_safetensors(source / "model.safetensors", tensors | bias, "BF16")
    assert differences(made, source) == [
        f"tensor 'model.layers.1.self_attn.q_proj.bias' in {source / 'model.safetensors'} has no place in a "
        "LlamaForCausalLM: converting without it would change the model"
    ]


@pytest.mark.parametrize(
    ("windows", "found"),
    [
        ([16], []),
        (None, ["config.json: the attention window of layer 0 is None, the source has 16"]),
        ([5], ["config.json: the attention window of layer 0 is 5, the source has 16"]),
        ([16, 300], ["config.json: the attention window of layer 1 is None, the source has 16"]),
    ],
)
def test_another_attention_window_is_found(tmp_path: Path, windows: list[int] | None, found: list[str]) -> None:
    family: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    source = hf_folder(tmp_path / "hf", sliding_window=16, **family)
    made = checkpoint(source, tmp_path / "out")
    set_config(made, runtime_defaults=windows and {"max_attention_window": windows})
    assert differences(made, source) == found


def test_a_window_that_no_sequence_fills_is_none(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf")
    made = checkpoint(source, tmp_path / "out")
    set_config(made, runtime_defaults={"max_attention_window": [256]})
    assert differences(made, source) == []
    (tmp_path / "back").mkdir()
    set_config(made, runtime_defaults={"max_attention_window": [5]})
    with pytest.raises(CheckpointError, match=r"^no Hugging Face folder equals .*/out: .* layer 0 is 5, the source"):
        restore(made, tmp_path / "back")


def test_a_head_is_compared_with_what_the_source_computes_with(tmp_path: Path) -> None:
    tied, untied = hf_folder(tmp_path / "tied", tie_word_embeddings=True), hf_folder(tmp_path / "hf", seed=1)
    made = checkpoint(tied, tmp_path / "out")
    # As converters write it that do not know the setting.
    set_config(made, tie_word_embeddings=False)
    assert differences(made, tied) == []
    head = "tensor 'lm_head.weight' in rank0.safetensors: differs from 'lm_head.weight' of the source"
    assert head in differences(made, untied)
    made = checkpoint(untied, tmp_path / "out-untied")
    set_config(made, tie_word_embeddings=True)
    assert differences(made, untied) == ["config.json: tie_word_embeddings is True, the source has False"]


def test_swapped_gate_and_up_are_found(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", num_hidden_layers=1)
    made = checkpoint(source, tmp_path / "out")
    path = rank_file(made, 0)
    data = path.read_bytes().replace(b".mlp.fc.", b".mlp.XX.").replace(b".mlp.gate.", b".mlp.fc.")
    path.write_bytes(data.replace(b".mlp.XX.", b".mlp.gate."))
    assert [line.split(":")[0] for line in differences(made, source)] == [
        "tensor 'transformer.layers.0.mlp.fc.weight' in rank0.safetensors",
        "tensor 'transformer.layers.0.mlp.gate.weight' in rank0.safetensors",
    ]


def test_ranks_that_disagree_give_no_folder(tmp_path: Path) -> None:
    made = checkpoint(hf_folder(tmp_path / "hf"), tmp_path / "out", tp=2)
    change(rank_file(made, 1), "transformer.ln_f.weight")
    (tmp_path / "back").mkdir()
    with pytest.raises(CheckpointError, match=r"the ranks of .* disagree: tensor 'transformer\.ln_f\.weight' in rank"):
        restore(made, tmp_path / "back")


def test_an_architecture_that_no_folder_is_written_for_is_named(tmp_path: Path) -> None:
    made = checkpoint(hf_folder(tmp_path / "hf"), tmp_path / "out")
    config = (made / "config.json").read_text()
    (made / "config.json").write_text(config.replace('"LlamaForCausalLM"', '"MlamaForCausalLM"'))
    (tmp_path / "back").mkdir()
    with pytest.raises(
        CheckpointError, match="of the architecture 'MlamaForCausalLM'; did you mean 'LlamaForCausalLM'"
    ):
        restore(made, tmp_path / "back")


def test_another_model_s_folder_is_refused_by_name(tmp_path: Path) -> None:
    made = checkpoint(hf_folder(tmp_path / "hf"), tmp_path / "out")
    other = hf_folder(tmp_path / "other", seed=1, num_hidden_layers=3)
    found = differences(made, other)
    assert found[0] == "config.json: num_hidden_layers is 2, the source has 3"
    with pytest.raises(InputDataError):
        differences(made, tmp_path / "absent")
