"""The arithmetic of each quantized linear on numbers small enough to work out by hand."""

from __future__ import annotations

import psutil
import pytest
import torch

from trtpipe.engines.accuracy.watch import Count, _watch_branches
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo
from trtpipe.engines.quantize.algorithms import make_linear
from trtpipe.engines.reference import matmul
from trtpipe.engines.reference.kv_codec import KvCodec
from trtpipe.engines.reference.linear import Fp8, Int8, Linear, Plain, Smoothed, Stacked
from trtpipe.engines.reference.mlp import Each, OneInput, OneProduct, make_branches
from trtpipe.engines.reference.number_formats import (
    pack_e2m1,
    quantize_rows,
    to_e4m3,
    to_int8,
    unpack_e2m1,
    unpack_int4,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def f32(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def e4m3(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows).to(torch.float8_e4m3fn)


def int8(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int8)


def packed(rows: list[list[int]]) -> torch.Tensor:
    """int4 rows [out, in] in bytes [out / 2, in]: even rows low."""
    codes = torch.tensor(rows)
    return ((codes[0::2] & 15) | ((codes[1::2] & 15) << 4)).to(torch.uint8)


def apply(linear: Linear, rows: list[list[float]], dtype: torch.dtype = torch.float32) -> list[list[float]]:
    out = linear(torch.tensor(rows, dtype=dtype))
    assert out.dtype == dtype
    return out.tolist()


def test_e4m3_saturates_and_rounds_half_to_even() -> None:
    values = f32(448, 449, 1e9, -torch.inf, 1.0625, 1.1875, -1.0625, 2**-10, 3 * 2**-10)
    assert to_e4m3(values).float().tolist() == [448, 448, 448, -448, 1.0, 1.25, -1.0, 0.0, 2**-8]


def test_int8_saturates_and_rounds_half_to_even() -> None:
    assert to_int8(f32(0.5, 1.5, 2.5, -0.5, -1.5, 127.5, -128.5, 1e9)).tolist() == [0, 2, 2, 0, -2, 127, -128, 127]


def test_e2m1_saturates_and_rounds_half_to_the_even_code() -> None:
    numbers = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7], [-0.2, -1e9, 0.26, -0.0, 4.9, -5.1, 2.6, 0.6]])
    codes = pack_e2m1(numbers)
    # An even column is in the low nibble, the sign in its highest bit; a negative number stays negative.
    assert codes.tolist() == [[0x20, 0x42, 0x64, 0x76], [0xF8, 0x01, 0xF6, 0x15]]
    assert unpack_e2m1(codes, torch.float32).tolist() == [[0, 1, 1, 2, 2, 4, 4, 6], [0, -6, 0.5, 0, 4, -6, 3, 0.5]]


def test_weight_only_takes_128_and_rounds_half_away_from_zero() -> None:
    below_half = 0.49999997
    codes, scale = quantize_rows(
        torch.tensor([[128, 2.5, -2.5, below_half], [-64, 0.75, -0.75, 0.2], [0, 0, 0, 0]], dtype=torch.float32)
    )
    # The largest positive number has no code of its own: 128 becomes 127.
    assert codes.tolist() == [[127, 3, -3, 0], [-128, 2, -2, 0], [0, 0, 0, 0]]
    assert scale.tolist() == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_even_rows_are_in_the_low_nibble(dtype: torch.dtype) -> None:
    bytes_ = torch.tensor([[0x9F, 0x70], [0x08, 0x12]], dtype=torch.uint8).view(dtype)
    assert unpack_int4(bytes_).tolist() == [[-1, 0], [-7, 7], [-8, 2], [0, 1]]


def fp8(rows: list[list[float]], output_scale: float = 0.25) -> Fp8:
    return Fp8(e4m3(rows).float(), f32(0.5), f32(output_scale))


def coded_int8(rows: list[list[int]], output_scale: float, input_scale: float = 0.5) -> Int8:
    return Int8(int8(rows), f32(input_scale), f32(*[output_scale] * len(rows)))


def test_branches_of_one_input_are_one_product_or_share_its_codes() -> None:
    x = torch.tensor([[1.0, -2.0], [0.25, 3.0]])
    plain = Plain(torch.tensor([[1.0, 2.0]])), Plain(torch.tensor([[3.0, -1.0]]))
    coded = fp8([[1, 2]]), fp8([[3, -1]])
    whole = coded_int8([[1, 2]], 0.25), coded_int8([[3, -1]], 2.0)
    for first, second in (plain, coded, whole):
        together = OneProduct.of(first, second)
        assert together is not None
        assert [part.tolist() for part in together(x)] == [part.tolist() for part in Each(first, second)(x)]
    unlike = coded[0], fp8([[3, -1]], output_scale=0.125)
    assert OneProduct.of(*unlike) is None
    assert OneProduct.of(plain[0], coded[0]) is None
    for pair in (unlike, whole):
        shared = make_branches(*pair)
        assert isinstance(shared, OneInput)
        assert [part.tolist() for part in shared(x)] == [part.tolist() for part in Each(*pair)(x)]
    apart = whole[0], coded_int8([[3, -1]], 2.0, input_scale=0.125)
    assert OneProduct.of(*apart) is None
    assert isinstance(make_branches(*apart), Each)
    assert isinstance(make_branches(coded[0], whole[0]), Each)


@pytest.mark.parametrize(
    ("pair", "large"),
    [
        ((fp8([[1, 2]]), fp8([[3, -1]])), 224.5),  # divided by 0.5 it is beyond 448
        ((coded_int8([[1, 2]], 1), coded_int8([[3, -1]], 1)), 64.0),  # and beyond 127
    ],
)
def test_what_enters_one_product_is_counted_for_both_branches(pair: tuple[Linear, Linear], large: float) -> None:
    counts: dict[str, Count] = {}
    together = OneProduct.of(*pair)
    assert together is not None
    _watch_branches(together, counts)(torch.tensor([[large, -2.0], [0.25, 3.0]]))
    assert {name: (count.beyond, count.inputs) for name, count in counts.items()} == {
        "mlp.fc": (1, 4),
        "mlp.gate": (1, 4),
    }


@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("supported", [True, False])
def test_products_of_16_bits_are_summed_in_32(
    monkeypatch: pytest.MonkeyPatch, supported: bool, dtype: torch.dtype, rows: int
) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_fp16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: supported)
    # In 16 bits 1 + 2^-12 is 1 again, as often as it is added.
    weight = torch.cat([f32(1), torch.full((4096,), 2.0**-12)])[None].to(dtype)
    out = Plain(weight)(torch.ones(rows, 4097, dtype=dtype))
    assert out.dtype == dtype
    assert out.tolist() == [[2.0]] * rows


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_from_three_rows_on_16_bits_are_multiplied_in_float32(
    monkeypatch: pytest.MonkeyPatch, rows: int, threads: int
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    # A weight is converted in parts of three rows, the last of one row.
    monkeypatch.setattr(matmul, "_CONVERTED", 3 * 40)
    converted: list[int] = []
    product = matmul._converted_product

    def counted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        converted.append(len(x))
        return product(x, weight)

    monkeypatch.setattr(matmul, "_converted_product", counted)
    weight = torch.randn(10, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(2)).bfloat16()
    out = Plain(weight)(x[:rows])
    assert converted == ([rows] if rows >= 3 else [])
    # Rounded once, whatever the number of rows: within half of a step of bfloat16.
    exact = x[:rows].double() @ weight.double().t()
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-5).all()


@pytest.mark.parametrize("rows", [0, 1, 7, 33, 600])
def test_a_packed_weight_gives_the_same_product(rows: int) -> None:
    # Whole numbers, whose sums float32 holds exactly.
    weight = (torch.arange(10 * 40).reshape(10, 40) % 5 - 2).float()
    x = (torch.arange(rows * 40).reshape(rows, 40) % 3 - 1).float()
    packed = matmul.packed(weight)
    assert packed.is_mkldnn == torch.backends.mkldnn.is_available()
    assert Plain(packed)(x).tolist() == (x.double() @ weight.double().t()).tolist()
    assert matmul.packed(weight.bfloat16()).is_mkldnn is False


def test_products_of_any_number_of_rows_keep_little_memory() -> None:
    weight = matmul.packed(torch.ones(32, 32))
    process = psutil.Process()
    before = process.memory_info().rss
    for rows in range(1, 257):
        matmul.multiply(torch.ones(rows, 32), weight)
    # oneDNN keeps 0.5 MB for each number of rows that it is called with.
    assert process.memory_info().rss - before < 40 << 20


def test_plain_and_stacked() -> None:
    left, right = Plain(torch.tensor([[1.0, 2.0]])), Plain(torch.tensor([[0.0, 1.0], [3.0, 0.0]]))
    assert apply(Stacked((left, right)), [[1, 10], [2, 0]]) == [[21, 10, 3], [2, 0, 6]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_divides_by_the_input_scale_and_saturates(dtype: torch.dtype) -> None:
    stored = {"weight": e4m3([[2, 1], [0, 0.125]]), "scale": f32(0.5), "input_scale": f32(2)}
    linear = make_linear(QuantAlgo.FP8, stored, dtype)
    # 3 / 2 and 4000 / 2, of which 448 is left; products in codes, times 2 * 0.5.
    assert apply(linear, [[3, 4000]], dtype) == [[451 if dtype != torch.bfloat16 else 452, 56]]
    # 17 and 19 lie halfway between two codes.
    assert apply(linear, [[2 * 17, 2 * 19], [0, 0]], dtype) == [[52, 2.5], [0, 0]]


def test_fp8_takes_scalars_of_either_shape() -> None:
    flat = {"weight": e4m3([[2, 1]]), "scale": f32(0.5), "input_scale": f32(2)}
    bare = {**flat, "scale": torch.tensor(0.5), "input_scale": torch.tensor(2.0)}
    x = [[3.0, 5.0]]
    assert apply(make_linear(QuantAlgo.FP8, flat, torch.float32), x) == [[5.5]]
    assert apply(make_linear(QuantAlgo.FP8, bare, torch.float32), x) == [[5.5]]


def test_fp8_in_16_bits_sums_beyond_their_range() -> None:
    stored = {"weight": e4m3([[448] * 64]), "scale": f32(2**-10), "input_scale": f32(2**-10)}
    (out,) = apply(make_linear(QuantAlgo.FP8, stored, torch.float16), [[1.0] * 64])
    # 64 * 448 * 448 is far above float16's 65504.
    assert out == [64 * 448 * 448 * 2**-20]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_token_has_its_own_scale(dtype: torch.dtype) -> None:
    stored = {"weight": e4m3([[1, 1], [2, -4]]), "scale": f32(3, 0.5)}
    linear = make_linear(QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN, stored, dtype)
    # 896 has the scale 2 and 4 becomes 2; 7 the scale 1/64 and 1 becomes 64; zeros stay zeros.
    assert apply(linear, [[896, -4], [7, 1], [0, 0]], dtype) == [
        [pytest.approx(2676, rel=2**-8), pytest.approx(904, rel=2**-8)],
        [24, 5],
        [0, 0],
    ]


def test_a_small_token_has_the_smallest_scale() -> None:
    linear = make_linear(QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN, {"weight": e4m3([[1]]), "scale": f32(1)}, torch.float32)
    # In units of 1 / (448 * 512) it is 0.0234: 12 of the steps of 2^-9 there, and not 448 of its own.
    assert apply(linear, [[0.0229 / (448 * 512)]]) == [[pytest.approx(12 * 2**-9 / (448 * 512), rel=1e-6)]]


@pytest.fixture(params=[True, False], ids=["vnni", "plain"])
def vnni(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not torch.cpu._is_vnni_supported():
        pytest.skip("this processor has no such instructions")
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_smooths_rounds_and_saturates(vnni: bool, dtype: torch.dtype) -> None:
    stored = {
        "weight": int8([[3, -100], [1, 0]]),
        "scale": f32(0.5, 4),
        "input_scale": f32(2),
        "smooth": f32(2, 0.5).to(dtype),
    }
    linear = make_linear(QuantAlgo.W8A8_SQ_PER_CHANNEL, stored, dtype)
    # 2.5 -> 5 -> 2.5 -> 2 by smoothing, scale and rounding, and 40 -> 20 -> 10; then 1000 -> 2000 -> 127.
    expected = torch.tensor([[-994, 16], [381, 1016]], dtype=dtype)
    assert apply(linear, [[2.5, 40], [1000, 0]], dtype) == expected.tolist()


def test_int8_sums_are_exact(vnni: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randint(-128, 128, (3, 5000), dtype=torch.int8)
    # The largest sum there can be, which float32 could not hold to the unit.
    x = torch.randint(-128, 128, (2, 5000), dtype=torch.int8)
    x[0], weight[0] = -128, -128
    x[0, 0], weight[0, 0] = 1, 1
    stored = {"weight": weight, "scale": torch.ones(3), "input_scale": f32(1)}
    got = make_linear(QuantAlgo.W8A8_SQ_PER_CHANNEL, stored, torch.float32)(x.float())
    exact = x.long() @ weight.long().T
    assert exact[0, 0] == 4999 * 2**14 + 1
    assert torch.equal(got, exact.float())


def test_weight_only_multiplies_in_the_models_type() -> None:
    stored = {"weight": torch.tensor([[128.0, 2.5], [-64, 0.75]])}
    linear = make_linear(QuantAlgo.W8A16, stored, torch.float32)
    assert apply(linear, [[1, 0], [0, 1]]) == [[127, -64], [3, 1]]
    coded = {"weight": int8([[101, -3]]), "scale": f32(1 + 2**-7)}
    (weight,) = make_linear(QuantAlgo.W8A16, coded, torch.bfloat16)(torch.eye(2, dtype=torch.bfloat16)).T.tolist()
    # 101 * (1 + 1/128) is 101.79; bfloat16 has halves there.
    assert weight == [102, -3.03125]


def test_awq_scales_groups_and_smooths() -> None:
    stored = {
        "weight": packed([[7, -8, 1, 2], [0, 1, -1, 3]]),
        "scale": torch.tensor([[0.5, 2.0], [1.0, 0.25]]),
        "smooth": f32(1, 2, 1, 4),
    }
    linear = make_linear(QuantAlgo.W4A16_AWQ, stored, torch.float32)
    assert apply(linear, torch.eye(4).tolist()) == [[3.5, 0], [-8, 2], [2, -0.25], [16, 3]]
    del stored["smooth"]
    assert apply(make_linear(QuantAlgo.W4A16_AWQ, stored, torch.float32), [[0, 1, 0, 1]]) == [[0, 1.75]]


def test_w4a8_rounds_weights_to_e4m3_and_saturates_them() -> None:
    stored = {
        "weight": packed([[7, 7, 7, -8], [3, 0, 0, 1]]),
        # In units of the second scale: 3 and 2000; 1 and 2.
        "scale": torch.tensor([[1.5, 1000.0], [0.5, 1.0]]),
        "second_scale": f32(0.5),
        "input_scale": f32(2),
    }
    linear = make_linear(QuantAlgo.W4A8_AWQ, stored, torch.float32)
    # 7 * 3 lies halfway between the codes 20 and 22; 7 * 2000 is 448. The output is 2 * 0.5 times the codes'.
    assert apply(linear, [[2, 0, 0, 0], [0, 0, 2, 0], [0, 0, 0, 2]]) == [[20, 3], [448, 0], [-448, 2]]
    # Inputs too: 3.4 / 2 is nearest to 1.75, and a large one is cut.
    assert apply(linear, [[3.4, 0, 0, 0], [1e6, 0, 0, 0]]) == [[35, 5.25], [448 * 20, 448 * 3]]


def test_w4a8_smooths_and_divides_with_one_vector() -> None:
    stored = {
        "weight": packed([[1], [1]]),
        "scale": torch.ones(2, 1),
        "second_scale": f32(1),
        "input_scale": f32(3),
        "smooth": torch.ones(1, dtype=torch.bfloat16),
    }
    linear = make_linear(QuantAlgo.W4A8_AWQ, stored, torch.bfloat16)
    assert isinstance(linear, Smoothed)
    # A third in bfloat16.
    assert linear.vector.tolist() == [0.333984375]
    assert apply(linear, [[3.0]], torch.bfloat16) == [[3, 3]]


def test_an_fp8_cache_holds_saturated_codes_of_one_byte() -> None:
    codec = KvCodec.make(KvCacheQuantAlgo.FP8, torch.tensor(2.0), f32(0.5), kv_heads=1)
    kv = torch.tensor([[[2.0, 1e4], [0.5625, -1e4]]])
    codes = codec.encode(kv)
    assert (codes.dtype, codes.shape) == (torch.int8, kv.shape)
    assert codec.decode(codes, torch.float32).tolist() == [[[2, 896], [0.5625, -224]]]
    assert codec.decode(codec.encode(torch.tensor([[[1.0], [0.53125]]])), torch.float32).tolist() == [[[1], [0.5]]]


def test_an_int8_cache_rounds_half_to_even() -> None:
    codec = KvCodec.make(KvCacheQuantAlgo.INT8, f32(0.5), f32(0.5), kv_heads=1)
    kv = torch.tensor([[[1.25, 1.75], [1e4, -1e4]]])
    assert codec.encode(kv).tolist() == [[[2, 4], [127, -128]]]
    assert codec.decode(codec.encode(kv), torch.bfloat16).tolist() == [[[1, 2], [63.5, -64]]]


def nvfp4_weight(*rows: list[float]) -> torch.Tensor:
    """Codes of rows whose numbers beyond those given are zero, up to 32."""
    return pack_e2m1(torch.tensor([row + [0.0] * (32 - len(row)) for row in rows]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_scales_vectors_of_inputs_and_of_weights(dtype: torch.dtype) -> None:
    stored = {
        "weight": nvfp4_weight([6, 1], [0.5] + [0] * 15 + [-2]),
        "scale": e4m3([[2, 1], [16, 3]]),
        "second_scale": torch.tensor(0.5),
        "input_scale": torch.tensor(0.25),
    }
    linear = make_linear(QuantAlgo.NVFP4, stored, dtype)
    # The first vector has the scale 4 * 0.25, so that 0.6 becomes 0.5. In the second the largest number is 0.003, whose
    # scale becomes the smallest of e4m3, 2^-9, so that 6 * 2^-9 * 0.25 is left. Then 10000, whose scale is 448.
    rows = [[6, 0.6] + [0.0] * 14 + [0.003] + [0.0] * 15, [0.0] * 16 + [1e4] + [0.0] * 15, [0.0] * 32]
    second = 6 * 2**-9 * 0.25
    assert apply(linear, rows, dtype) == [
        [pytest.approx(36.5, rel=2**-8), pytest.approx(6 * 0.5 * 16 * 0.5 - second * 2 * 3 * 0.5, rel=2**-8)],
        [0, -6 * 448 * 0.25 * 2 * 3 * 0.5],
        [0, 0],
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_blocks_have_scales_of_their_own(dtype: torch.dtype) -> None:
    weight = torch.zeros(130, 130)
    weight[0, :2], weight[0, 128:], weight[129, 0] = f32(1, -4), f32(1, 2), 3
    stored = {"weight": weight.to(torch.float8_e4m3fn), "scale": torch.tensor([[2.0, 0.5], [8.0, 1.0]])}
    linear = make_linear(QuantAlgo.FP8_BLOCK_SCALES, stored, dtype)
    # 896 has the scale 2 and -4 becomes -2; 7 has the scale 1/64 and 1 becomes 64; zeros stay zeros.
    (got, zeros) = apply(linear, [[896.0, -4.0] + [0.0] * 126 + [7.0, 1.0], [0.0] * 130], dtype)
    first = (448 * 1 + 2 * 4) * 2 * 2 + (448 * 1 + 64 * 2) / 64 * 0.5
    assert [got[0], got[129]] == [pytest.approx(first, rel=2**-8), 448 * 3 * 2 * 8]
    assert (set(got[1:129]), set(zeros)) == ({0.0}, {0.0})


def test_an_nvfp4_cache_has_half_a_byte_a_number_and_a_scale_for_16() -> None:
    codec = KvCodec.make(KvCacheQuantAlgo.NVFP4, torch.tensor(2.0), f32(0.5), kv_heads=1)
    kv = torch.zeros(1, 2, 16)
    kv[0, 0, :3], kv[0, 1, 15] = f32(12, 1, -3.1), 3.0
    codes = codec.encode(kv)
    assert (codes.dtype, codes.shape) == (torch.int8, (1, 2, 9))
    # Keys in units of 2, where -3.1 is nearest to -3; values in units of 0.5.
    kv[0, 0, 2] = -3
    assert torch.equal(codec.decode(codes, torch.float32), kv)
