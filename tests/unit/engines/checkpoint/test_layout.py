"""The TensorRT-LLM checkpoint format: names, shapes and split rules as literal tables, and the config both ways."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.support import factories
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.config import CheckpointError, config_json, parse_config, read_config
from trtpipe.engines.checkpoint.layout import plan_rank, rank_file, source_shapes
from trtpipe.engines.checkpoint.plan import Piece, TensorPlan, kv_head_rows
from trtpipe.engines.checkpoint.split import check_mapping
from trtpipe.engines.errors import UsageError
from trtpipe.engines.model_config import CheckpointConfig, EmbeddingSharding, Experts, ModelConfig
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo, Quantization

# 4 heads of 8 over 2 key/value heads; a vocabulary of 11 that no tp divides.
MODEL = dataclasses.replace(factories.MODEL, vocab_size=11, num_hidden_layers=3)


# Six experts of 8 features, of which a token takes two.
MIXTRAL = dataclasses.replace(
    MODEL, architecture="MixtralForCausalLM", intermediate_size=8,
    experts=Experts(count=6, top_k=2, normalize=True, intermediate_size=8),
)  # fmt: skip


def model(**overrides: Any) -> ModelConfig:
    return dataclasses.replace(MODEL, **overrides)


Plans = list[TensorPlan]
# Rows of heads of 16, of which rank 2 of 4 has the second.
KV_OF_RANK_2 = (("k", (16, 32)), ("v", (16, 32)))


def plan(source: ModelConfig, tp: int = 1, pp: int = 1, *, tp_rank: int = 0, pp_rank: int = 0, **options: Any) -> Plans:
    mapping = Mapping(tp_size=tp, pp_size=pp)
    return list(plan_rank(source, mapping, tp_rank=tp_rank, pp_rank=pp_rank, **options))


def named(plans: Plans, name: str) -> TensorPlan:
    (found,) = [tensor for tensor in plans if tensor.name == name]
    return found


def test_every_tensor_of_rank_1_at_tp_2() -> None:
    ours, theirs = "transformer.layers.0.", "model.layers.0."
    assert plan(model(num_hidden_layers=1), tp=2, tp_rank=1) == [
        TensorPlan("transformer.vocab_embedding.weight", (11, 32), (Piece("model.embed_tokens.weight", (0, 11)),)),
        TensorPlan(ours + "input_layernorm.weight", (32,), (Piece(theirs + "input_layernorm.weight", (0, 32)),)),
        # Q, then K, then V, each split by itself.
        TensorPlan(
            ours + "attention.qkv.weight",
            (32, 32),
            (
                Piece(theirs + "self_attn.q_proj.weight", (16, 32)),
                Piece(theirs + "self_attn.k_proj.weight", (8, 16)),
                Piece(theirs + "self_attn.v_proj.weight", (8, 16)),
            ),
        ),
        TensorPlan(
            ours + "attention.dense.weight", (32, 16), (Piece(theirs + "self_attn.o_proj.weight", (0, 32), (16, 32)),)
        ),
        TensorPlan(
            ours + "post_layernorm.weight", (32,), (Piece(theirs + "post_attention_layernorm.weight", (0, 32)),)
        ),
        # TensorRT-LLM computes act(fc(x)) * gate(x): fc is gate_proj, gate is up_proj.
        TensorPlan(ours + "mlp.fc.weight", (24, 32), (Piece(theirs + "mlp.gate_proj.weight", (24, 48)),)),
        TensorPlan(ours + "mlp.gate.weight", (24, 32), (Piece(theirs + "mlp.up_proj.weight", (24, 48)),)),
        TensorPlan(ours + "mlp.proj.weight", (32, 24), (Piece(theirs + "mlp.down_proj.weight", (0, 32), (24, 48)),)),
        TensorPlan("transformer.ln_f.weight", (32,), (Piece("model.norm.weight", (0, 32)),)),
        # 11 rows over 2 ranks: 6 each, the last rank 5 and a row of zeros.
        TensorPlan("lm_head.weight", (6, 32), (Piece("lm_head.weight", (6, 11)),), pad_rows=1),
    ]


def test_shapes_at_tp_1() -> None:
    shapes = {tensor.name: tensor.shape for tensor in plan(model(num_hidden_layers=1))}
    assert shapes == {
        "transformer.vocab_embedding.weight": (11, 32),
        "transformer.layers.0.input_layernorm.weight": (32,),
        "transformer.layers.0.attention.qkv.weight": (64, 32),
        "transformer.layers.0.attention.dense.weight": (32, 32),
        "transformer.layers.0.post_layernorm.weight": (32,),
        "transformer.layers.0.mlp.fc.weight": (48, 32),
        "transformer.layers.0.mlp.gate.weight": (48, 32),
        "transformer.layers.0.mlp.proj.weight": (32, 48),
        "transformer.ln_f.weight": (32,),
        "lm_head.weight": (11, 32),
    }


def test_heads_wider_than_hidden_size_by_heads() -> None:
    plans = plan(model(head_size=16), tp=2)
    assert named(plans, "transformer.layers.0.attention.qkv.weight").shape == (32 + 16 + 16, 32)
    assert named(plans, "transformer.layers.0.attention.dense.weight").shape == (32, 32)


def test_biases_of_attention() -> None:
    plans = plan(model(attn_bias=True), tp=2, tp_rank=1)
    attn = "model.layers.0.self_attn."
    assert named(plans, "transformer.layers.0.attention.qkv.bias") == TensorPlan(
        "transformer.layers.0.attention.qkv.bias",
        (32,),
        (
            Piece(attn + "q_proj.bias", (16, 32)),
            Piece(attn + "k_proj.bias", (8, 16)),
            Piece(attn + "v_proj.bias", (8, 16)),
        ),
    )
    # Row-parallel: whole on every rank.
    dense = named(plans, "transformer.layers.0.attention.dense.bias")
    assert (dense.shape, dense.pieces) == ((32,), (Piece(attn + "o_proj.bias", (0, 32)),))


def test_a_qwen_has_biases_of_q_k_and_v_or_norms_of_heads() -> None:
    ours, attn = "transformer.layers.0.attention.", "model.layers.0.self_attn."

    def attention(architecture: str, **changes: Any) -> Plans:
        # Four ranks of two key/value heads: heads 0 and 1 are on two ranks each.
        plans = plan(model(architecture=architecture, **changes), tp=4, tp_rank=2)
        return [tensor for tensor in plans if tensor.name.startswith(ours)]

    weights = [
        TensorPlan(
            ours + "qkv.weight",
            (48, 32),
            tuple(Piece(f"{attn}{name}_proj.weight", rows) for name, rows in (("q", (32, 48)), *KV_OF_RANK_2)),
        ),
        TensorPlan(ours + "dense.weight", (32, 16), (Piece(attn + "o_proj.weight", (0, 32), (32, 48)),)),
    ]
    bias = TensorPlan(
        ours + "qkv.bias",
        (48,),
        tuple(Piece(f"{attn}{name}_proj.bias", rows) for name, rows in (("q", (32, 48)), *KV_OF_RANK_2)),
    )
    assert attention("Qwen2ForCausalLM", attn_bias=True, head_size=16) == [weights[0], bias, weights[1]]
    norms = [
        TensorPlan(f"{ours}{name}_layernorm.weight", (16,), (Piece(f"{attn}{name}_norm.weight", (0, 16)),))
        for name in ("q", "k")
    ]
    assert attention("Qwen3ForCausalLM", head_size=16) == [*weights, *norms]


@pytest.mark.parametrize(
    ("heads", "tp", "rows"),
    [
        (2, 1, [(0, 16)]),
        (2, 2, [(0, 8), (8, 16)]),
        (2, 4, [(0, 8), (0, 8), (8, 16), (8, 16)]),  # each head serves two ranks in a row
        (1, 4, [(0, 8)] * 4),
        (4, 2, [(0, 16), (16, 32)]),
    ],
)
def test_key_value_heads_of_each_rank(heads: int, tp: int, rows: list[tuple[int, int]]) -> None:
    source = model(num_key_value_heads=heads)
    assert [kv_head_rows(source, tp, rank) for rank in range(tp)] == rows


def test_repeated_key_value_heads_widen_qkv() -> None:
    qkv = named(plan(model(), tp=4, tp_rank=2), "transformer.layers.0.attention.qkv.weight")
    assert qkv.shape == (8 + 8 + 8, 32)
    assert [piece.rows for piece in qkv.pieces] == [(16, 24), (8, 16), (8, 16)]


@pytest.mark.parametrize(
    ("vocab", "tp", "rows"),
    [
        (12, 4, [(0, 3, 0), (3, 6, 0), (6, 9, 0), (9, 12, 0)]),
        (11, 4, [(0, 3, 0), (3, 6, 0), (6, 9, 0), (9, 11, 1)]),
        (5, 4, [(0, 2, 0), (2, 4, 0), (4, 5, 1), (5, 5, 2)]),  # the last rank holds padding only
    ],
)
def test_the_head_is_cut_by_rows_and_padded(vocab: int, tp: int, rows: list[tuple[int, int, int]]) -> None:
    heads = [named(plan(model(vocab_size=vocab), tp=tp, tp_rank=rank), "lm_head.weight") for rank in range(tp)]
    assert [(*head.pieces[0].rows, head.pad_rows) for head in heads] == rows
    assert {head.shape for head in heads} == {(-(-vocab // tp), 32)}


def test_a_parallel_embedding_is_cut_by_rows_or_by_columns() -> None:
    name = "transformer.vocab_embedding.weight"
    rows = named(plan(model(), tp=2, tp_rank=1, embedding=EmbeddingSharding.VOCABULARY), name)
    assert rows == TensorPlan(name, (6, 32), (Piece("model.embed_tokens.weight", (6, 11)),), pad_rows=1)
    columns = named(plan(model(), tp=2, tp_rank=1, embedding=EmbeddingSharding.HIDDEN), name)
    assert columns == TensorPlan(name, (11, 16), (Piece("model.embed_tokens.weight", (0, 11), (16, 32)),))


def test_a_tied_head_is_taken_from_the_embedding() -> None:
    head = named(plan(model(tie_word_embeddings=True)), "lm_head.weight")
    assert head.pieces == (Piece("model.embed_tokens.weight", (0, 11)),)


@pytest.mark.parametrize(
    ("layers", "pp", "stages"),
    [
        (3, 1, [[0, 1, 2]]),
        (3, 2, [[0, 1], [2]]),  # the remainder goes to the first stages
        (7, 3, [[0, 1, 2], [3, 4], [5, 6]]),
        (8, 3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (4, 4, [[0], [1], [2], [3]]),
    ],
)
def test_layers_of_each_pipeline_stage_are_numbered_from_0(layers: int, pp: int, stages: list[list[int]]) -> None:
    source = model(num_hidden_layers=layers)
    for pp_rank, stage in enumerate(stages):
        names = {tensor.name: tensor for tensor in plan(source, pp=pp, pp_rank=pp_rank)}
        taken = [
            names[f"transformer.layers.{local}.mlp.fc.weight"].pieces[0].source.split(".")[2]
            for local in range(len(stage))
        ]
        assert taken == [str(layer) for layer in stage]
        assert f"transformer.layers.{len(stage)}.mlp.fc.weight" not in names
        assert ("transformer.vocab_embedding.weight" in names) == (pp_rank == 0)
        assert ("transformer.ln_f.weight" in names) == ("lm_head.weight" in names) == (pp_rank == pp - 1)


def test_ranks_count_tensor_parallel_first() -> None:
    mapping = Mapping(tp_size=2, pp_size=3)
    assert [mapping.rank(tp_rank=tp, pp_rank=pp) for pp in range(3) for tp in range(2)] == [0, 1, 2, 3, 4, 5]
    assert rank_file(Path("checkpoint"), 5) == Path("checkpoint/rank5.safetensors")


@pytest.mark.parametrize(
    ("overrides", "tp", "pp", "line"),
    [
        ({}, 3, 1, "tp_size 3 does not divide the 4 attention heads"),
        ({}, 8, 1, "tp_size 8 does not divide the 4 attention heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, 1, "tp_size 4 neither divides nor is a multiple of"),
        ({"intermediate_size": 50}, 4, 1, "tp_size 4 does not divide intermediate_size 50"),
        ({}, 1, 4, "pp_size 4 exceeds the 3 layers"),
    ],
)
def test_impossible_mappings(overrides: dict[str, Any], tp: int, pp: int, line: str) -> None:
    with pytest.raises(UsageError) as error:
        check_mapping(model(**overrides), Mapping(tp_size=tp, pp_size=pp))
    assert error.value.exit_code == 2
    assert line in str(error.value)


@pytest.mark.parametrize(
    ("experts", "mapping", "line"),
    [
        (8, {"tp_size": 4, "moe_ep_size": 4}, ""),
        (
            6,
            {"tp_size": 4, "moe_ep_size": 4},
            "moe_ep_size 4 does not divide the 6 experts; --moe-ep values that fit: 1, 2, 3, 6; --tp is a multiple "
            "of it",
        ),
        (0, {"tp_size": 2, "moe_ep_size": 2}, "moe_ep_size 2 is for a model with experts, and this one has none"),
        (8, {"tp_size": 4}, "moe_tp_size 4 does not divide intermediate_size of an expert 6"),
        (8, {"tp_size": 4, "moe_ep_size": 2}, ""),
    ],
)
def test_mappings_of_experts(experts: int, mapping: dict[str, int], line: str) -> None:
    facts = Experts(count=experts, top_k=2, normalize=True, intermediate_size=6) if experts else None
    with contextlib.nullcontext() if not line else pytest.raises(UsageError) as error:
        check_mapping(model(experts=facts), Mapping(**mapping))
    assert error is None or str(error.value).startswith(line)


@pytest.mark.parametrize(
    ("asked", "ep"), [((4, None, None), 1), ((4, 2, None), 2), ((4, None, 4), 4), ((4, 1, 4), 4), ((1, 1, 1), 1)]
)
def test_sizes_of_experts_parallelism(asked: tuple[int, int | None, int | None], ep: int) -> None:
    tp, moe_tp, moe_ep = asked
    mapping = Mapping.of(tp, 1, moe_tp, moe_ep)
    assert (mapping.moe_ep_size, mapping.moe_tp_size) == (ep, tp // ep)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ((4, 2, 4), "moe_tp_size 2 times moe_ep_size 4 does not make tp_size 4"),
        ((4, 3, None), "moe_tp_size 3 does not make tp_size 4"),
        (
            (4, None, 3),
            "moe_ep_size 3 does not divide tp_size 4: the tensor-parallel ranks share the experts; --moe-ep values "
            "that divide --tp 4: 1, 2, 4; or, if 3 divides the number of experts, give a multiple of 3 as --tp",
        ),
        ((4, 0, None), "moe_tp_size 0 does not make tp_size 4"),
    ],
)
def test_sizes_whose_product_is_another(asked: tuple[int, int | None, int | None], line: str) -> None:
    with pytest.raises(UsageError) as error:
        Mapping.of(asked[0], 1, *asked[1:])
    assert str(error.value).startswith(line)


def test_ranks_that_hold_an_expert() -> None:
    # (moe_tp_rank, moe_ep_rank) of ranks 0 to 3: the expert's index varies fastest.
    mapping = Mapping(tp_size=4, moe_ep_size=2)
    assert [mapping.moe_ranks(rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 3), (4, 3)])
def test_possible_mappings(tp: int, pp: int) -> None:
    check_mapping(model(), Mapping(tp_size=tp, pp_size=pp))


def test_a_mapping_of_nothing() -> None:
    with pytest.raises(UsageError, match="must both be at least 1"):
        Mapping(tp_size=0)


def test_what_the_source_must_hold() -> None:
    layer = "model.layers.0."
    assert source_shapes(model(num_hidden_layers=1, attn_bias=True, head_size=16)) == {
        "model.embed_tokens.weight": (11, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (11, 32),
        layer + "input_layernorm.weight": (32,),
        layer + "post_attention_layernorm.weight": (32,),
        layer + "self_attn.q_proj.weight": (64, 32),
        layer + "self_attn.q_proj.bias": (64,),
        layer + "self_attn.k_proj.weight": (32, 32),
        layer + "self_attn.k_proj.bias": (32,),
        layer + "self_attn.v_proj.weight": (32, 32),
        layer + "self_attn.v_proj.bias": (32,),
        layer + "self_attn.o_proj.weight": (32, 64),
        layer + "self_attn.o_proj.bias": (32,),
        layer + "mlp.gate_proj.weight": (48, 32),
        layer + "mlp.up_proj.weight": (48, 32),
        layer + "mlp.down_proj.weight": (32, 48),
    }
    assert "lm_head.weight" not in source_shapes(model(tie_word_embeddings=True))


def test_experts_of_rank_2_at_tp_4_in_two_groups() -> None:
    mapping = Mapping(tp_size=4, moe_ep_size=2)
    plans = [one for one in plan_rank(MIXTRAL, mapping, tp_rank=2, pp_rank=0) if ".0.mlp." in one.name]
    ours, theirs = "transformer.layers.0.mlp.", "model.layers.0.block_sparse_moe."
    # The first three experts, and of each the second half: up before gate.
    assert plans == [
        TensorPlan(
            f"{ours}fc.weight", (3, 8, 32),
            tuple(Piece(f"{theirs}experts.{e}.{w}.weight", (4, 8)) for e in (0, 1, 2) for w in ("w3", "w1")),
        ),
        TensorPlan(
            f"{ours}proj.weight", (3, 32, 4),
            tuple(Piece(f"{theirs}experts.{e}.w2.weight", (0, 32), (4, 8)) for e in (0, 1, 2)),
        ),
        TensorPlan(f"{ours}router.weight", (6, 32), (Piece(f"{theirs}gate.weight", (0, 6)),), dtype="F32"),
    ]  # fmt: skip


# --- config.json ---

RAW = config_json(MODEL, DataType.BFLOAT16, Mapping(tp_size=2))


def test_what_is_written_is_read_back() -> None:
    scaled = model(rotary_scaling={"rope_type": "linear", "factor": 2.0}, attn_bias=True)
    raw = config_json(scaled, DataType.FLOAT16, Mapping(tp_size=2, pp_size=3), embedding=EmbeddingSharding.VOCABULARY)
    assert parse_config(raw, "config.json") == CheckpointConfig(
        architecture="LlamaForCausalLM",
        dtype=DataType.FLOAT16,
        vocab_size=11,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_size=8,
        norm_epsilon=1e-5,
        max_position_embeddings=256,
        rotary_base=10000.0,
        rotary_scaling={"rope_type": "linear", "factor": 2.0},
        attn_bias=True,
        tie_word_embeddings=False,
        mapping=Mapping(tp_size=2, pp_size=3),
        embedding=EmbeddingSharding.VOCABULARY,
    )


def test_experts_are_read_back() -> None:
    mapping = Mapping(tp_size=4, moe_ep_size=2)
    raw = config_json(MIXTRAL, DataType.BFLOAT16, mapping)
    read = parse_config(raw, "config.json")
    assert (read.experts, read.mapping) == (MIXTRAL.experts, mapping)
    # ModelOpt writes three keys of a mapping, and three of the experts.
    short = {key: raw["moe"][key] for key in ("num_experts", "top_k", "normalization_mode")}
    sizes = {"world_size": 4, "tp_size": 4, "pp_size": 1}
    assert parse_config({**raw, "moe": short, "mapping": sizes}, "config.json").mapping == Mapping(tp_size=4)
    # Older loaders know the two keys, and no others of a newer one.
    assert config_json(MIXTRAL, DataType.BFLOAT16, mapping, toolchain="0.21.0")["mapping"] == {
        **sizes, "moe_tp_size": 2, "moe_ep_size": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("place", "changed", "line"),
    [
        ("moe", {"num_experts": 0}, "num_experts is 0, not a positive number"),
        (
            "moe",
            {"num_experts": 1 << 53},
            "num_experts is 9,007,199,254,740,992, and at most 1,024 are read; convert the model again",
        ),
        ("moe", {"top_k": 7}, "top_k 7 exceeds num_experts 6"),
        ("moe", {"normalization_mode": 2}, "normalization_mode is 2: 0 and 1 are read here"),
        ("mapping", {"moe_ep_size": 4}, "moe_tp_size 2 times moe_ep_size 4 does not make tp_size 4"),
        ("mapping", {"moe_tp_size": 3, "moe_ep_size": -1}, "moe_tp_size 3 does not make tp_size 4"),
    ],
)
def test_experts_that_are_not_sound(place: str, changed: dict[str, int], line: str) -> None:
    raw = config_json(MIXTRAL, DataType.BFLOAT16, Mapping(tp_size=4, moe_ep_size=2))
    with pytest.raises(CheckpointError) as error:
        parse_config({**raw, place: {**raw[place], **changed}}, "config.json")
    assert str(error.value).startswith(f"config.json: {line}")


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"moe": None}, "config.json lacks moe"),
        ({"hidden_act": "silu"}, "config.json: hidden_act is 'silu', not swiglu"),
    ],
)
def test_a_mixtral_without_experts(changed: dict[str, Any], line: str) -> None:
    raw = config_json(MIXTRAL, DataType.BFLOAT16, Mapping())
    with pytest.raises(CheckpointError, match=line):
        parse_config({**raw, **changed}, "config.json")


def test_absent_keys_have_the_loaders_defaults() -> None:
    needed = ("architecture", "dtype", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
              "num_attention_heads", "max_position_embeddings", "position_embedding_type")  # fmt: skip
    read = parse_config({key: RAW[key] for key in needed}, "config.json")
    assert (read.num_key_value_heads, read.head_size, read.norm_epsilon, read.rotary_base) == (4, 8, 1e-5, 10000.0)
    assert (read.rotary_scaling, read.attn_bias, read.mapping) == (None, False, Mapping())
    assert read.embedding is EmbeddingSharding.NONE


def test_keys_of_other_producers_are_no_trouble() -> None:
    raw = {**RAW, "producer": {"name": "modelopt"}, "mapping": {**RAW["mapping"], "gpus_per_node": 8}, "rotary_base": 5}
    assert parse_config(raw, "config.json").rotary_base == 5.0


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"vocab_size": None}, "lacks vocab_size; convert the model again"),
        ({"dtype": None}, "lacks dtype"),
        ({"position_embedding_type": None}, "lacks position_embedding_type"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type is not rope_gpt_neox"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', not silu"),
        ({"dtype": "float8"}, "dtype 'float8' is none of bfloat16, float16, float32"),
        ({"dtype": 16}, "dtype is 16, not a string"),
        ({"hidden_size": "32"}, "hidden_size is '32', not a whole number"),
        ({"hidden_size": 32.5}, "hidden_size is 32.5, not a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, not a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, not a positive number"),
        ({"head_size": -8}, "head_size is -8, not a positive number"),
        ({"norm_epsilon": "small"}, "norm_epsilon is 'small', not a number"),
        ({"attn_bias": "false"}, "attn_bias is 'false', not true or false"),
        ({"rotary_scaling": "llama3"}, "rotary_scaling is 'llama3', not an object"),
        ({"mapping": [2, 1]}, r"mapping is \[2, 1\], not an object"),
        ({"mapping": {"tp_size": 0}}, "tp_size is 0, not a positive number"),
        ({"mapping": {"pp_size": "two"}}, "pp_size is 'two', not a whole number"),
        ({"quantization": "FP8"}, "quantization is 'FP8', not an object"),
        (
            {"quantization": {"quant_algo": "W4A16_GPTQ"}},
            "is quantized with W4A16_GPTQ: the algorithms read here are FP8, ",
        ),
        (
            {"quantization": {"kv_cache_quant_algo": "FP6"}},
            "KV cache is quantized with FP6: the types read here are FP8, INT8, NVFP4; start from",
        ),
        ({"quantization": {"has_zero_point": True}}, "has_zero_point is set"),
        ({"quantization": {"group_size": 0}}, "group_size is 0, not a positive number"),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": "lm_head"}}, "exclude_modules is not a list"),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": []}}, "exclude_modules does not name lm_head"),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "*.mlp.fc"]}}, "mixed precision"),
    ],
)
def test_a_config_that_is_not_ours_to_read(overrides: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=why) as error:
        parse_config({**RAW, **overrides}, "engine/config.json")
    assert error.value.exit_code == 3
    assert "engine/config.json" in str(error.value)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="cannot be read: No such file") as error:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_nvfp4_vectors_must_divide_a_ranks_features() -> None:
    nvfp4 = Quantization(quant_algo=QuantAlgo.NVFP4)
    check_mapping(MODEL, Mapping(), quantization=nvfp4)
    with pytest.raises(UsageError) as error:
        check_mapping(MODEL, Mapping(tp_size=2), quantization=nvfp4)
    assert str(error.value) == (
        "blocks of 16 do not divide the 16 and 24 and 32 input features at tp_size 2; tp sizes that fit: 1"
    )
    cache = Quantization(kv_cache_quant_algo=KvCacheQuantAlgo.NVFP4)
    with pytest.raises(UsageError, match="an NVFP4 KV cache is not for heads of 8: 16 numbers of a head share a scale"):
        check_mapping(MODEL, Mapping(), quantization=cache)
