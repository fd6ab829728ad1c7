"""A family is one module: a Llama under other names, in a module that only this test has, works everywhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.factories import hf_folder, write_tokenizer
from tests.unit.engines.hf.test_inspection import quantized
from trtpipe.engines import families
from trtpipe.engines.accuracy.models import open_model
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.config import CheckpointError, read_config
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.checkpoint.restore import differences, restore
from trtpipe.engines.hf.export import export
from trtpipe.engines.hf.folder import UnknownModel, read_model_config
from trtpipe.engines.hf.inspection import inspect
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.engines.reference.hf_weights import HfFolder, QuantizedFolder
from trtpipe.engines.reference.mlp import GatedMlp
from trtpipe.engines.reference.weights import WeightSource

MODULE = """
from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.families.llama import Llama


class Yak(Llama):
    architectures = {"YakForCausalLM": "yak"}
    names = SourceNames(
        embedding="yak.tokens", final_norm="yak.last", head="yak.head", layers="yak.blocks.", attention="look.",
        q="look.queries", k="look.keys", v="look.values", o="look.out", gate="feed.open", up="feed.in",
        down="feed.out", input_norm="before", post_norm="between",
    )


FAMILY = Yak()
"""
# Llama's names, or parts of them, and a Yak's.
RENAMED = {
    "model.embed_tokens": "yak.tokens", "model.norm": "yak.last", "lm_head": "yak.head", "model.layers": "yak.blocks",
    "self_attn.q_proj": "look.queries", "self_attn.k_proj": "look.keys", "self_attn.v_proj": "look.values",
    "self_attn.o_proj": "look.out", "mlp.gate_proj": "feed.open", "mlp.up_proj": "feed.in",
    "mlp.down_proj": "feed.out", "post_attention_layernorm": "between", "input_layernorm": "before",
}  # fmt: skip
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "attention_bias": True}


@pytest.fixture
def yak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "yak.py").write_text(MODULE)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path / "families")])
    families.families.cache_clear()
    yield
    families.families.cache_clear()
    sys.modules.pop("trtpipe.engines.families.yak", None)


@pytest.fixture
def folders(tmp_path: Path, yak: None) -> tuple[Path, Path]:
    """A Llama's folder, and a Yak's with the same numbers."""
    llama, yaks = hf_folder(tmp_path / "llama", **SIZES), tmp_path / "yak"
    yaks.mkdir()
    config = json.loads((llama / "config.json").read_text())
    (yaks / "config.json").write_text(json.dumps({**config, "architectures": ["YakForCausalLM"], "model_type": "yak"}))
    save_file(renamed(load_file(llama / "model.safetensors")), yaks / "model.safetensors")
    write_tokenizer(yaks)
    return llama, yaks


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {}
    for name, tensor in tensors.items():
        for ours, theirs in RENAMED.items():
            name = name.replace(ours, theirs)
        out[name] = tensor
    return out


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape)
        and torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8))
        for name in a
    )


def first_layer(source: WeightSource) -> torch.Tensor:
    """Output of a layer's linears, each fed with the one before as far as shapes allow."""
    (shard,) = source.layer(0)
    x = torch.linspace(-1, 1, 128).to(source.embedding()[0].dtype).unsqueeze(0)
    assert isinstance(shard.mlp, GatedMlp)
    gate, up = shard.mlp.branches(x * shard.post_norm)
    return torch.cat([shard.qkv(x * shard.input_norm), shard.dense(x), shard.mlp.proj(gate * up)], dim=-1)


def test_it_is_unknown_without_the_module(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="describes a YakForCausalLM"):
        read_model_config(hf_folder(tmp_path, architectures=["YakForCausalLM"]))
    assert sorted(families.families()) == [
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    ]


def test_it_is_converted_compared_and_restored(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    made = []
    for source in folders:
        out, back = tmp_path / f"{source.name}-out", tmp_path / f"{source.name}-back"
        out.mkdir()
        back.mkdir()
        convert(source, out, dtype=None, mapping=Mapping(tp_size=2, pp_size=2))
        assert differences(out, source) == []
        assert inspect(out).problems == ()
        restore(out, back)
        made.append([load_file(out / f"rank{rank}.safetensors") for rank in range(4)])
    assert all(same(a, b) for a, b in zip(*made, strict=True))
    yaks = tmp_path / "yak-out"
    assert read_config(yaks).architecture == "YakForCausalLM"
    back = tmp_path / "yak-back"
    assert json.loads((back / "config.json").read_text())["model_type"] == "yak"
    assert same(load_file(back / "model.safetensors"), load_file(folders[1] / "model.safetensors"))


def test_it_is_exported_and_inspected(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    out = tmp_path / "half"
    out.mkdir()
    export(folders[1], out, dtype=DataType.FLOAT16)
    assert inspect(out).problems == ()
    expected = {name: tensor.half() for name, tensor in load_file(folders[1] / "model.safetensors").items()}
    assert same(load_file(out / "model.safetensors"), expected)


def test_it_is_computed_by_the_reference_runtime(folders: tuple[Path, Path]) -> None:
    llama, yaks = (open_model(folder, torch.device("cpu")) for folder in folders)
    assert isinstance(yaks, HfFolder)
    assert torch.equal(first_layer(llama), first_layer(yaks))


@pytest.mark.parametrize("algo", [QuantAlgo.FP8, QuantAlgo.W4A16_AWQ])
def test_it_is_quantized_in_both_formats(tmp_path: Path, folders: tuple[Path, Path], algo: QuantAlgo) -> None:
    quantization = Quantization(quant_algo=algo, kv_cache_quant_algo=KvCacheQuantAlgo.FP8, group_size=64)
    for form, file in (("trtllm", "rank0.safetensors"), ("hf", "model.safetensors")):
        llama, yaks = (quantized(source, tmp_path / f"{source.name}-{form}", quantization, form) for source in folders)
        expected = load_file(llama / file)
        assert same(load_file(yaks / file), expected if form == "trtllm" else renamed(expected))
        assert inspect(yaks).problems == ()
        both = [open_model(folder, torch.device("cpu")) for folder in (llama, yaks)]
        assert isinstance(both[1], QuantizedFolder) == (form == "hf")
        assert torch.equal(first_layer(both[0]), first_layer(both[1]))


def test_a_checkpoint_of_an_unknown_family_is_refused(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    convert(folders[1], out, dtype=None, mapping=Mapping())
    path = out / "config.json"
    path.write_text(path.read_text().replace("YakForCausalLM", "YakForCausalLN"))
    with pytest.raises(
        CheckpointError, match=r"is of the architecture 'YakForCausalLN'; did you mean 'YakForCausalLM'"
    ):
        read_config(out)
