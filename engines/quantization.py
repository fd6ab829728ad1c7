"""Quantization algorithms, by TensorRT-LLM's names, and the quantization of a checkpoint."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

# Checkpoint formats: TensorRT-LLM's, ModelOpt's unified Hugging Face folder, llm-compressor's Hugging Face folder.
COMPRESSED_TENSORS = "compressed-tensors"
FORMATS = ("trtllm", "hf", COMPRESSED_TENSORS)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Facts of a quantization algorithm.

    arithmetic      its `engines.quantize.algorithms.Arithmetic`, as module:class
    codes           safetensors type of a weight's codes in a TensorRT-LLM checkpoint
    scale           the weights that share a scale: those of a tensor, of an output row, of a group or a vector of input
                    features in a row, or of a square block. Codes of a group or a vector have four bits: of a group two
                    output rows to a byte; of a vector two input features to a byte, and the scale is e4m3
    block           number of input features, and of rows of a block, that share a scale, where the algorithm fixes it
    scalar          shape of a scale of the tensor in a TensorRT-LLM checkpoint
    scale_name      name of the weight's scale in a TensorRT-LLM checkpoint
    second_scale    whether a weight has one scale more, for the tensor
    static_input    whether the input has one scale, from calibration
    smoothed        whether the input is multiplied by a vector before the product with the weight
    passes          how often calibration runs the samples through a layer; 0 if scales depend on the weights alone
    operands        type of the operands of the GPU's product; "" for the model's type
    tiled           whether TensorRT-LLM's kernel needs whole tiles of weights
    native          SMs with tensor cores for the operands, where the recipe has others on which a runtime computes with
                    the weights alone
    group_sizes     group sizes that TensorRT-LLM's kernel knows
    engine_encodes  whether a TensorRT-LLM checkpoint stores float weights, which the engine build encodes in the layout
                    of its GPU
    exclude         modules that TensorRT-LLM's loader is told not to quantize
    modelopt_name   name in ModelOpt's folder, where it is not TensorRT-LLM's
    formats         checkpoint formats that can hold it; what a runtime reads of them, its backend says (`READS`)
    expert_formats  those of them in which a runtime also computes experts
    """

    arithmetic: str
    codes: str
    scale: Literal["tensor", "row", "group", "vector", "block"]
    block: int = 0
    scalar: tuple[int, ...] = (1,)
    scale_name: str = "weights_scaling_factor"
    second_scale: bool = False
    static_input: bool = False
    smoothed: bool = False
    passes: int
    operands: Literal["fp4", "fp8", "int8", ""] = ""
    native: tuple[int, ...] = ()
    tiled: bool = False
    group_sizes: tuple[int, ...] = ()
    engine_encodes: bool = False
    exclude: tuple[str, ...] = ("lm_head",)
    modelopt_name: str = ""
    formats: tuple[str, ...] = FORMATS[:2]
    expert_formats: tuple[str, ...] = ()

    @property
    def fp8_attention(self) -> bool:
        """Whether linears take FP8 or FP4 inputs with a scale from calibration, so that attention can be in FP8."""
        return self.operands in ("fp8", "fp4") and self.static_input

    @property
    def four_bits(self) -> bool:
        """Whether weights are stored in 4 bits."""
        return self.scale in ("group", "vector")

    @property
    def fp8_tensors(self) -> bool:
        """Whether weights and inputs are FP8 with one scale each, which TensorRT multiplies without a plugin."""
        return self.operands == "fp8" and self.static_input and self.scale == "tensor"


_ARITHMETIC = "trtpipe.engines.quantize.algorithms:"
_BLOCKS = "trtpipe.engines.quantize.blocks:"


class QuantAlgo(str, enum.Enum):
    """Quantization algorithms, by TensorRT-LLM's names where it has one; one row each."""

    row: Algorithm

    def __new__(cls, name: str, row: Algorithm) -> QuantAlgo:
        made = str.__new__(cls, name)
        made._value_ = name
        made.row = row
        return made

    FP8 = (
        "FP8",
        Algorithm(
            arithmetic=_ARITHMETIC + "Fp8Tensor",
            codes="F8_E4M3",
            scale="tensor",
            static_input=True,
            passes=1,
            operands="fp8",
            formats=FORMATS,
            expert_formats=FORMATS,
        ),
    )
    FP8_PER_CHANNEL_PER_TOKEN = (
        "FP8_PER_CHANNEL_PER_TOKEN",
        Algorithm(
            arithmetic=_ARITHMETIC + "Fp8Row",
            codes="F8_E4M3",
            scale="row",
            scale_name="per_channel_scale",
            passes=0,
            operands="fp8",
            formats=FORMATS,
            expert_formats=(COMPRESSED_TENSORS,),
        ),
    )
    W8A8_SQ_PER_CHANNEL = (
        "W8A8_SQ_PER_CHANNEL",
        Algorithm(
            arithmetic=_ARITHMETIC + "Int8Row",
            codes="I8",
            scale="row",
            static_input=True,
            smoothed=True,
            passes=1,
            operands="int8",
            formats=FORMATS,
        ),
    )
    # TensorRT-LLM has no name for it: its INT8 with a scale for each token is smoothed.
    INT8_PER_CHANNEL_PER_TOKEN = (
        "INT8_PER_CHANNEL_PER_TOKEN",
        Algorithm(
            arithmetic=_ARITHMETIC + "Int8RowPerToken",
            codes="I8",
            scale="row",
            passes=0,
            operands="int8",
            formats=(COMPRESSED_TENSORS,),
            expert_formats=(COMPRESSED_TENSORS,),
        ),
    )
    W8A16 = (
        "W8A16",
        Algorithm(
            arithmetic=_ARITHMETIC + "Int8Weight",
            codes="I8",
            scale="row",
            passes=0,
            tiled=True,
            engine_encodes=True,
            # Its loader is the only one that would quantize the embedding, and its scales are not written.
            exclude=("lm_head", "transformer.vocab_embedding"),
            formats=FORMATS,
            # vLLM's kernel for experts of INT8 weights wants groups of inputs that share a scale.
            expert_formats=("trtllm",),
        ),
    )
    W4A16_AWQ = (
        "W4A16_AWQ",
        Algorithm(
            arithmetic=_ARITHMETIC + "Int4Weight",
            codes="I8",
            scale="group",
            smoothed=True,
            passes=2,
            tiled=True,
            group_sizes=(64, 128),
            formats=FORMATS,
            expert_formats=("trtllm", COMPRESSED_TENSORS),
        ),
    )
    W4A8_AWQ = (
        "W4A8_AWQ",
        Algorithm(
            arithmetic=_ARITHMETIC + "Int4WeightFp8",
            codes="I8",
            scale="group",
            second_scale=True,
            static_input=True,
            smoothed=True,
            passes=2,
            operands="fp8",
            tiled=True,
            group_sizes=(128,),
        ),
    )
    NVFP4 = (
        "NVFP4",
        Algorithm(
            arithmetic=_BLOCKS + "Nvfp4Vectors",
            codes="U8",
            scale="vector",
            block=16,
            scalar=(),
            second_scale=True,
            static_input=True,
            passes=1,
            operands="fp4",
            native=(100, 103, 120),
            expert_formats=("hf",),
        ),
    )
    FP8_BLOCK_SCALES = (
        "FP8_BLOCK_SCALES",
        Algorithm(
            arithmetic=_BLOCKS + "Fp8Blocks",
            codes="F8_E4M3",
            scale="block",
            block=128,
            passes=0,
            operands="fp8",
            modelopt_name="fp8_pb_wo",
            # TensorRT-LLM's engines have no kernel for it; the LLM API has.
            formats=("hf",),
        ),
    )


class KvCacheQuantAlgo(str, enum.Enum):
    """Type of keys and values in the cache, as a checkpoint states it."""

    FP8 = "FP8"
    INT8 = "INT8"
    NVFP4 = "NVFP4"

    def row_bytes(self, numbers: int) -> int:
        """Bytes of `numbers` numbers, such as the key of one head for one token."""
        return numbers // 2 + numbers // 16 if self is KvCacheQuantAlgo.NVFP4 else numbers


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Quantization of a checkpoint; both algorithms are None when there is none.

    group_size  number of input features that share a scale, where the algorithm has groups; its own where it fixes it
    """

    quant_algo: QuantAlgo | None = None
    kv_cache_quant_algo: KvCacheQuantAlgo | None = None
    group_size: int = 128

    def __post_init__(self) -> None:
        if self.quant_algo is not None and self.quant_algo.row.block:
            object.__setattr__(self, "group_size", self.quant_algo.row.block)

    @property
    def packed(self) -> bool:
        """Whether weights are 4-bit integers, two rows to a byte, with a scale for each group."""
        return self.quant_algo is not None and self.quant_algo.row.scale == "group"

    @property
    def pre_quant_scale(self) -> bool:
        """Whether a linear's input is multiplied by a vector before the product with the weight."""
        return self.quant_algo is not None and self.quant_algo.row.smoothed

    @property
    def calibrated(self) -> bool:
        """Whether scales depend on activations, so that calibration samples must be run."""
        return self.passes > 0

    @property
    def passes(self) -> int:
        """Number of times that calibration runs the samples through a layer."""
        weights = 0 if self.quant_algo is None else self.quant_algo.row.passes
        return max(weights, 0 if self.kv_cache_quant_algo is None else 1)


UNQUANTIZED = Quantization()
