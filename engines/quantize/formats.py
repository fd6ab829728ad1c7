"""Names of a quantized linear's tensors in the three formats, by the roles of `engines.quantize.algorithms`."""

from __future__ import annotations

from dataclasses import dataclass

from trtpipe.engines.quantization import QuantAlgo


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of quantized linears.

    scale         name of the weight's scale; None for the algorithm's own
    second_scale, smooth  names of what the format has; "" for what it has no place for
    scalar_shape  shape of a scale of a tensor, where the format fixes it
    fuses         whether linears of one input are one matrix, whose scale of a tensor they share
    int8_max, int4_max  see `engines.quantize.algorithms.Unencoded`
    """

    scale: str | None
    second_scale: str
    input_scale: str
    smooth: str
    scalar_shape: tuple[int, ...]
    fuses: bool
    int8_max: float = 127.0
    int4_max: float = 7.0

    def names(self, algo: QuantAlgo) -> dict[str, str]:
        """Role -> name."""
        return {
            "weight": "weight",
            "scale": self.scale or algo.row.scale_name,
            "second_scale": self.second_scale,
            "input_scale": self.input_scale,
            "smooth": self.smooth,
        }


TENSORRT_LLM = Format(
    scale=None,
    second_scale="weights_scaling_factor_2",
    input_scale="activation_scaling_factor",
    smooth="prequant_scaling_factor",
    scalar_shape=(1,),
    fuses=True,
)
HUGGING_FACE = Format(
    scale="weight_scale",
    second_scale="weight_scale_2",
    input_scale="input_scale",
    smooth="pre_quant_scale",
    scalar_shape=(),
    fuses=False,
)
# The codes of a weight are in an order of their own: see `engines.quantize.packing`. llm-compressor has 7.5 for four
# bits, but AWQ makes weights that matter the largest of their groups, and calibration looked for vectors with 7.
COMPRESSED_TENSORS = Format(
    scale="weight_scale",
    second_scale="",
    input_scale="input_scale",
    smooth="",
    scalar_shape=(1,),
    fuses=False,
    int8_max=127.5,
)
