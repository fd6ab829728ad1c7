"""What a recorded step is given: filled up to a size, it must compute what the step as it is does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.factories import hf_folder
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.config import read_config
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.quantization import KvCacheQuantAlgo, Quantization
from trtpipe.engines.reference.attention import Attention, Span
from trtpipe.engines.reference.cuda import graphs
from trtpipe.engines.reference.cuda.graphs import fill_up, size_for
from trtpipe.engines.reference.kv_codec import KvCodec
from trtpipe.engines.reference.model import Model
from trtpipe.engines.reference.weights import load_weights

BLOCK, BLOCKS = 4, 24


def test_sizes_that_graphs_are_made_for() -> None:
    assert [size_for(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 25, 64, 65, 97, 256)] == [
        1, 2, 3, 4, 6, 6, 8, 12, 16, 24, 32, 64, 96, 128, 256,
    ]  # fmt: skip


@given(st.integers(1, 5000))
def test_a_size_holds_the_requests_and_not_half_as_many_again(requests: int) -> None:
    assert requests <= size_for(requests) < 1.5 * requests + 1


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MIN_TOKENS", 32)


def test_a_step_is_filled_up_to_the_size_of_its_graph() -> None:
    step = fill_up([7, 8, 9, 10, 11], [0, 3, 4, 9, 1], [[5], [2], [3, 4], [1, 6, 0], [8]], BLOCK, spare=24)
    assert step.ids.tolist() == [7, 8, 9, 10, 11, 0]
    assert step.positions.tolist() == [0, 3, 4, 9, 1, 0]
    assert step.slots.tolist() == [20, 11, 16, 1, 33, 96]
    assert step.tables.view(6, 8).tolist() == [
        [5, *[24] * 7],
        [2, *[24] * 7],
        [3, 4, *[24] * 6],
        [1, 6, 0, *[24] * 5],
        [8, *[24] * 7],
        [24] * 8,
    ]


def test_tables_grow_in_steps_and_leave_out_blocks_not_begun() -> None:
    blocks = list(range(12))
    assert fill_up([1], [35], [blocks], BLOCK, spare=24).tables.tolist() == [*range(9), *[24] * 3]


# Triton's interpreter, for a loop to a number that it has as an array.
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("cache", [None, KvCacheQuantAlgo.FP8, KvCacheQuantAlgo.INT8])
def test_filled_up_it_computes_the_same_and_so_it_does_where_the_cache_lies(
    tmp_path: Path, cache: KvCacheQuantAlgo | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    convert(hf_folder(tmp_path / "hf"), tmp_path / "out", dtype=DataType.FLOAT32, mapping=Mapping())
    config = read_config(tmp_path / "out")
    weights = load_weights(tmp_path / "out", config, torch.float32)
    if cache is not None:
        config = replace(config, quantization=Quantization(kv_cache_quant_algo=cache))
        scale = torch.tensor([0.05])
        codec = KvCodec.make(cache, scale, scale, config.num_key_value_heads)
        layers = tuple(tuple(replace(shard, kv_codec=codec) for shard in layer) for layer in weights.layers)
        weights = replace(weights, layers=layers)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3, 2]]
    blocks = [[7], [2, 3], [11, 4, 0]]
    logits = []
    for filled, paged in ((False, False), (True, False), (False, True), (True, True)):
        monkeypatch.setattr(Attention, "_has_paged_attention", lambda _, paged=paged: paged)
        model = Model(config, weights, max_positions=64, num_blocks=BLOCKS, tokens_per_block=BLOCK)
        model.forward([Span(prompt, 0, own, 0) for prompt, own in zip(prompts, blocks, strict=True)])
        if filled:
            logits.append(model.decode(fill_up([10, 11, 12], [3, 5, 9], blocks, BLOCK, spare=BLOCKS)))
        else:
            spans = [Span([10 + i], len(prompts[i]), blocks[i], 1) for i in range(3)]
            # Beside a prompt, whose logits nobody wants.
            logits.append(model.forward([*spans, Span([1, 2], 0, [15], 0)]))
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], atol=1e-5, rtol=1e-5)
    assert logits[0].std() > 0.03


def test_filled_up_it_computes_the_windows_of_the_layers(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    source = hf_folder(tmp_path / "hf", architectures=["MistralForCausalLM"], sliding_window=4)
    convert(source, tmp_path / "out", dtype=DataType.FLOAT32, mapping=Mapping())
    config = read_config(tmp_path / "out")
    prompts, blocks = [[3, 1, 4], [5, 3, 5, 8, 9, 7, 9, 3, 2]], [[7], [11, 4, 0]]

    def decoded(windows: tuple[int, ...], *, filled: bool) -> torch.Tensor:
        one = replace(config, attention_windows=windows)
        weights = load_weights(tmp_path / "out", one, torch.float32)
        model = Model(one, weights, max_positions=64, num_blocks=BLOCKS, tokens_per_block=BLOCK)
        model.forward([Span(prompt, 0, own, 0) for prompt, own in zip(prompts, blocks, strict=True)])
        if filled:
            return model.decode(fill_up([10, 11], [3, 9], blocks, BLOCK, spare=BLOCKS))[:2]
        return model.forward([Span([10 + i], len(prompts[i]), blocks[i], 1) for i in range(2)])

    for windows in ((4,), (64, 4)):
        wanted = decoded(windows, filled=False)
        torch.testing.assert_close(decoded(windows, filled=True), wanted, atol=1e-5, rtol=1e-5)
        # The first sequence has four tokens, and the window holds all of them.
        near = [torch.allclose(a, b, atol=1e-5) for a, b in zip(wanted, decoded((), filled=False), strict=True)]
        assert near == [True, False]
