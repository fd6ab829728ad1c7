"""`inspect` says what a folder holds and everything that is wrong with it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.factories import hf_folder, read_tensors, write_safetensors
from trtpipe.configs.facts import load_quant_recipes
from trtpipe.engines.backends.base import METHODS
from trtpipe.engines.base import Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.folder import locate_tensors, read_model_config
from trtpipe.engines.hf.inspection import FOR_WHOM, Inspection, inspect
from trtpipe.engines.hf.stored import read_stored
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.engines.quantize import job
from trtpipe.pipeline.cli import console

# Sizes that groups of 64 divide.
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    convert(hf_folder(tmp_path / "hf", shards=2), out, dtype=None, mapping=Mapping(tp_size=2))
    return out


def quantized(source: Path, out: Path, quantization: Quantization, form: str = "hf", **mapping: int) -> Path:
    """`source` as the worker quantizes it, in this process and with scales that no calibration has found."""
    import torch

    from trtpipe.engines.families import names_of
    from trtpipe.engines.quantize.scales import LayerScales, LinearScales, save_scales
    from trtpipe.engines.quantize.worker import work

    def found() -> LayerScales:
        ffn = model.experts.intermediate_size if model.experts else model.intermediate_size
        own = {names.o: model.num_attention_heads * model.head_size, **{down: ffn for *_, down in names.mlps}}
        widths = {name: own.get(name, model.hidden_size) for name in names.linears}
        linears = {
            name: LinearScales(input_amax=torch.ones(()), smooth=torch.ones(width)) for name, width in widths.items()
        }
        return LayerScales(linears=linears, k_amax=torch.ones(()), v_amax=torch.ones(()))

    model = read_model_config(source)
    names = names_of(model)
    scales = out.with_suffix(".scales")
    save_scales((found() for _ in range(model.num_hidden_layers)), scales, quantization, names)
    out.mkdir()
    spec = {
        "source": str(source), "out": str(out), "format": form, "dtype": "bfloat16", "device": "cpu",
        "quantization": dataclasses.asdict(quantization), "mapping": {"tp_size": 1, "pp_size": 1, **mapping},
        "embedding": "none", "toolchain": None, "scales_in": str(scales), "scales_out": None,
    }  # fmt: skip
    work(spec, lambda done, total: None)
    return out


@pytest.fixture(scope="module")
def fp8_kv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ModelOpt's folder of a tiny model with FP8 weights and KV cache. Not to be changed: see `altered`."""
    place = tmp_path_factory.mktemp("unified")
    both = Quantization(quant_algo=QuantAlgo.FP8, kv_cache_quant_algo=KvCacheQuantAlgo.FP8)
    return quantized(hf_folder(place / "hf"), place / "out", both)


def altered(folder: Path, out: Path, name: str, **changes: Any) -> Path:
    """A copy with keys of one JSON file replaced; `quantization` ones within that section. None removes a key."""
    shutil.copytree(folder, out)
    raw = json.loads((out / name).read_text())
    place = raw["quantization" if name == "hf_quant_config.json" else "quantization_config"]
    place.update(changes)
    (out / name).write_text(json.dumps(raw))
    return out


def test_an_hf_folder(tmp_path: Path) -> None:
    found = inspect(hf_folder(tmp_path / "hf", shards=2))
    assert (found.kind, found.architecture, found.dtype) == ("huggingface", "LlamaForCausalLM", "bfloat16")
    assert found.mapping == {"shards": 2, "index": True}
    # 2 x 300 x 32 for both tables, 32 + 2 x 64 for norms, 2 layers of 3072 attention and 4608 feed-forward weights
    assert found.parameters == 2 * 300 * 32 + 32 + 2 * (2 * 32 + 3072 + 4608)
    assert found.nbytes == 2 * found.parameters
    assert found.problems == ()


def test_a_tensorrt_llm_checkpoint(checkpoint: Path) -> None:
    found = inspect(checkpoint)
    assert (found.kind, found.mapping["tp_size"], len(found.tensors)) == ("tensorrt_llm", 2, 2 * 17)
    assert {tensor.file for tensor in found.tensors} == {"rank0.safetensors", "rank1.safetensors"}
    assert found.problems == ()


def test_a_missing_rank_and_a_wrong_size_are_both_named(checkpoint: Path) -> None:
    (checkpoint / "rank1.safetensors").unlink()
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "intermediate_size": 50}))
    problems = inspect(checkpoint).problems
    assert "rank1.safetensors is missing: the mapping has 2 ranks" in problems
    fc = "rank0.safetensors: tensor 'transformer.layers.0.mlp.fc.weight'"
    assert f"{fc} has shape [24, 32], config.json implies [25, 32]" in problems


def test_a_quantized_checkpoint_must_have_its_codes_and_scales(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization"]["quant_algo"] = "FP8"
    (checkpoint / "config.json").write_text(json.dumps(config))
    found = inspect(checkpoint)
    assert found.quantization["quant_algo"] == "FP8"
    linear = "rank0.safetensors: tensor 'transformer.layers.0.mlp.fc."
    assert linear + "weight' is BF16, config.json implies F8_E4M3" in found.problems
    assert linear + "weights_scaling_factor' is missing" in found.problems


def test_a_file_beyond_the_ranks_is_named_once(checkpoint: Path) -> None:
    shutil.copyfile(checkpoint / "rank0.safetensors", checkpoint / "rank2.safetensors")
    assert inspect(checkpoint).problems == ("rank2.safetensors is of no rank: the mapping has 2",)


@pytest.mark.parametrize(("algo", "form"), [(algo, form) for algo in QuantAlgo for form in algo.row.formats])
def test_every_quantized_checkpoint_is_sound(tmp_path: Path, algo: QuantAlgo, form: str) -> None:
    """As the worker writes them, in all formats; int4 needs groups that divide."""
    source = hf_folder(tmp_path / "hf", **SIZES)
    cache = KvCacheQuantAlgo.FP8 if algo is QuantAlgo.FP8 else None
    quantization = Quantization(quant_algo=algo, kv_cache_quant_algo=cache, group_size=64)
    found = inspect(quantized(source, tmp_path / "out", quantization, form, pp_size=2 if form == "trtllm" else 1))
    if form == "trtllm":
        assert (found.kind, found.quantization["quant_algo"], found.problems, found.notes) == (
            "tensorrt_llm", algo.value, (), (),
        )  # fmt: skip
        return
    notes = (FOR_WHOM,) if form == "hf" else ()
    assert (found.kind, found.problems, found.notes) == ("huggingface", (), notes)
    assert found.quantization == {
        "quant_method": METHODS[form],
        "quant_algo": algo.value,
        "kv_cache_quant_algo": cache and cache.value,
        "group_size": 64 if quantization.packed else None,
    }


def test_modelopts_folder_is_listed_and_said_to_be_for_others_than_transformers(fp8_kv: Path) -> None:
    found = inspect(fp8_kv)
    types = {tensor.name: (tensor.dtype, tensor.shape) for tensor in found.tensors}
    assert types["model.layers.1.mlp.up_proj.weight"] == ("F8_E4M3", (48, 32))
    assert types["model.layers.1.mlp.up_proj.input_scale"] == ("F32", ())
    assert types["model.layers.0.self_attn.v_proj.v_scale"] == ("F32", ())
    # 3 outside the layers; in a layer 2 norms, 7 linears of 3 tensors and 2 scales of the cache.
    assert len(types) == 3 + 2 * (2 + 7 * 3 + 2)
    assert "transformers does not know" in found.notes[0]
    assert "vLLM" in found.notes[0]


def test_either_place_of_the_quantization_is_enough(fp8_kv: Path, tmp_path: Path) -> None:
    for place in ("hf_quant_config.json", "config.json"):
        folder = tmp_path / place
        shutil.copytree(fp8_kv, folder)
        if place == "config.json":
            (folder / "hf_quant_config.json").unlink()
        else:
            raw = json.loads((folder / "config.json").read_text())
            del raw["quantization_config"]
            (folder / "config.json").write_text(json.dumps(raw))
        assert inspect(folder) == inspect(fp8_kv)


DETAILS, CONFIG = "hf_quant_config.json", "config.json"


@pytest.mark.parametrize(
    ("file", "changes", "telling"),
    [
        (
            DETAILS,
            {"kv_cache_quant_algo": None},
            "describes two quantizations: quantization_config says quant_algo FP8",
        ),
        (DETAILS, {"quant_algo": "MXFP8"}, "hf_quant_config.json is quantized with MXFP8"),
        (CONFIG, {"quant_method": "gptq"}, "is quantized by gptq: the methods read here are modelopt, "),
        (CONFIG, {"kv_cache_scheme": {"type": "int", "num_bits": 8}}, "the KV cache is quantized with the scheme"),
        (CONFIG, {"kv_cache_scheme": 8}, "the KV cache is quantized with the scheme 8"),
        (CONFIG, {"ignore": []}, "exclude_modules does not name lm_head"),
    ],
)
def test_a_quantization_that_is_not_read_here_is_a_problem(
    fp8_kv: Path, tmp_path: Path, file: str, changes: dict[str, Any], telling: str
) -> None:
    found = inspect(altered(fp8_kv, tmp_path / "out", file, **changes))
    assert len(found.problems) == 1
    assert telling in found.problems[0]
    assert len(found.tensors) == len(inspect(fp8_kv).tensors), "what is there is listed all the same"


@pytest.mark.parametrize(
    ("file", "content", "telling"),
    [
        (DETAILS, "[]", "holds a list"),
        (DETAILS, '{"quantization": 4}', "has no quantization section"),
        (CONFIG, '"fp8"', "quantization_config is 'fp8', not an object"),
        (CONFIG, "{}", "names no quantization: quantization_config is without a quant_algo"),
    ],
)
def test_a_quantization_of_no_known_form_is_a_problem(
    fp8_kv: Path, tmp_path: Path, file: str, content: str, telling: str
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(fp8_kv, folder)
    if file == CONFIG:
        (folder / DETAILS).unlink()
        raw = json.loads((folder / CONFIG).read_text())
        content = json.dumps({**raw, "quantization_config": json.loads(content)})
    (folder / file).write_text(content)
    (problem,) = inspect(folder).problems
    assert telling in problem


def test_an_int8_cache_has_no_place_in_modelopts_folder(fp8_kv: Path, tmp_path: Path) -> None:
    folder = altered(fp8_kv, tmp_path / "out", DETAILS, kv_cache_quant_algo="INT8")
    raw = json.loads((folder / CONFIG).read_text())
    del raw["quantization_config"]
    (folder / CONFIG).write_text(json.dumps(raw))
    (problem,) = inspect(folder).problems
    assert "quantized with INT8: ModelOpt's format has no place for its scales" in problem


def test_tensors_of_another_quantization_are_all_named(fp8_kv: Path, tmp_path: Path) -> None:
    folder = altered(fp8_kv, tmp_path / "out", DETAILS, quant_algo="W8A8_SQ_PER_CHANNEL", kv_cache_quant_algo=None)
    altered(folder, tmp_path / "both", CONFIG, quant_algo="W8A8_SQ_PER_CHANNEL", kv_cache_scheme=None)
    problems = inspect(tmp_path / "both").problems
    linear = "tensor 'model.layers.0.self_attn.k_proj."
    assert f"model.safetensors: {linear}weight' is F8_E4M3, config.json implies I8" in problems
    assert f"model.safetensors: {linear}weight_scale' has shape [], config.json implies [16]" in problems
    assert f"{linear}pre_quant_scale' is missing" in problems
    assert f"model.safetensors: {linear}k_scale' has no place in this model" in problems
    # A layer has 7 linears, each with these three wrong, and the 2 scales of a cache.
    assert len(problems) == 2 * (7 * 3 + 2)


def test_a_copy_of_the_embedding_as_a_tied_head_and_an_old_buffer_are_no_problem(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", tie_word_embeddings=True)
    folder = quantized(source, tmp_path / "out", Quantization(quant_algo=QuantAlgo.W8A16))
    stored = inspect(folder)
    assert stored.problems == ()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    table = read_tensors(folder / "model-00001-of-00002.safetensors")["model.embed_tokens.weight"]
    spare = {"lm_head.weight": table, "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.uint16)}
    write_safetensors(folder / "model-00002-of-00002.safetensors", spare, "BF16")
    files = {tensor.name: "model-00001-of-00002.safetensors" for tensor in stored.tensors}
    files |= dict.fromkeys(spare, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    found = inspect(folder)
    assert (found.mapping, found.problems) == ({"shards": 2, "index": True}, ())
    # A head that was trained apart is one.
    spare["lm_head.weight"] = table + 1
    write_safetensors(folder / "model-00002-of-00002.safetensors", spare, "BF16")
    (problem,) = inspect(folder).problems
    told = "00002.safetensors is not the embedding, to which config.json ties it"
    assert told in problem
    quantization = read_stored(folder)
    assert quantization is not None
    with pytest.raises(InputDataError, match=told):
        quantization.check("it", read_model_config(folder, quantized=True), locate_tensors(folder))


def test_a_damaged_quantized_folder_still_shows_what_it_says_of_itself(fp8_kv: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(fp8_kv, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    found = inspect(folder)
    assert (found.tensors, found.quantization["quant_algo"], found.notes) == ((), "FP8", (FOR_WHOM,))
    assert all("is damaged" in problem for problem in found.problems)


def test_modelopts_folder_is_no_source(fp8_kv: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(InputDataError, match="describes an already quantized model: only an unquantized one can be"):
        convert(fp8_kv, tmp_path / "out", dtype=None, mapping=Mapping())
    with pytest.raises(InputDataError, match="describes an already quantized model"):
        job.check(fp8_kv, load_quant_recipes()["int8-wo"], job.Layout())
    assert not list((tmp_path / "out").iterdir())


def test_notes_are_printed_and_are_no_problem(fp8_kv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(found: Inspection, *, as_json: bool) -> str:
        console.inspection(found, found.problems, as_json=as_json)
        return capsys.readouterr().out

    lines = printed(inspect(fp8_kv), as_json=False).splitlines()
    assert lines[-3:] == [
        "quantization: quant_method modelopt, quant_algo FP8, kv_cache_quant_algo FP8",
        f"note: {FOR_WHOM}",
        "no problem found",
    ]
    told = json.loads(printed(inspect(fp8_kv), as_json=True))
    assert (told["notes"], told["problems"]) == ([FOR_WHOM], [])


def test_a_damaged_file_is_a_problem_and_the_rest_is_still_shown(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    found = inspect(folder)
    assert {tensor.file for tensor in found.tensors} == {"model-00001-of-00002.safetensors"}
    assert any("is damaged" in problem for problem in found.problems)


@pytest.mark.parametrize(
    ("config", "telling"),
    [
        (None, "it has no config.json"),
        ({}, "names no architecture"),
        ({"version": "1.2.1", "pretrained_config": {}}, "is an engine folder"),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, config: object, telling: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputDataError, match=telling):
        inspect(tmp_path)
    with pytest.raises(InputDataError, match="there is no such folder"):
        inspect(tmp_path / "none")


def test_an_index_that_is_not_read_is_not_told(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", shards=2)
    assert inspect(folder).mapping == {"shards": 2, "index": True}
    hf_folder(folder)
    assert inspect(folder).mapping == {"shards": 1, "index": False}
