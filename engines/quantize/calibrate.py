"""Calibration with ModelOpt, one decoder layer at a time, so that memory does not depend on the number of layers.

Each layer is wrapped as a model of one layer, which ModelOpt quantizes like any other model. Its input is the output
of the layers before it for the calibration samples; its output is the next layer's input. ModelOpt's max, SmoothQuant
and AWQ calibrations treat one linear at a time and pass unquantized activations on, so a layer's scales equal those of
a calibration of the whole model, up to the rounding of a different batch.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModel

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.model_config import Experts
from trtpipe.engines.quantization import KvCacheQuantAlgo, Quantization
from trtpipe.engines.quantize.expert_layer import ExpertLayer, share_scales
from trtpipe.engines.quantize.scales import LayerScales, LinearScales
from trtpipe.engines.reference.masks import prompt_mask

# ModelOpt's quantizer of each type of KV cache that it calibrates.
_KV_CACHE = {
    KvCacheQuantAlgo.FP8: {"num_bits": (4, 3), "axis": None},
    KvCacheQuantAlgo.NVFP4: {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}},
}


class Calibrator:
    """Passes the hidden states of the calibration samples through the model and finds each layer's scales.

    modelopt      name of a ModelOpt configuration, such as FP8_DEFAULT_CFG; None quantizes no weights
    samples       [samples, seq_len] token ids
    names         names of the family's tensors, which transformers' modules have too, but those of experts
    experts       None for a dense model
    windows       most tokens that a token attends to in a layer, or None: see `Geometry.window`
    batch_tokens  tokens in one forward pass; more tokens are faster and take more memory
    scratch       folder for hidden states that do not fit into memory
    """

    def __init__(
        self,
        folder: Path,
        embedding: torch.Tensor,
        samples: npt.NDArray[np.int32],
        quantization: Quantization,
        names: SourceNames,
        experts: Experts | None,
        windows: Callable[[int], int | None],
        *,
        modelopt: str | None,
        batch_tokens: int,
        scratch: Path,
        hidden_bytes: int,
    ) -> None:
        self._quantization, self._names, self._experts, self._windows = quantization, names, experts, windows
        # Layer -> numbers of its experts that no token of the samples has reached.
        self.unreached: dict[int, list[int]] = {}
        self._recipe = _configuration(modelopt, quantization)
        config = AutoConfig.from_pretrained(folder)
        # A model of one layer and a vocabulary of one token.
        config.update({"num_hidden_layers": 1, "vocab_size": 1, "use_cache": False, "pad_token_id": None})
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1]
        config._attn_implementation = "sdpa"
        self._config = config
        self._dtype, self._device = embedding.dtype, embedding.device
        self._rows = max(1, batch_tokens // samples.shape[1])
        self._hidden = _room((*samples.shape, embedding.shape[1]), embedding, scratch, hidden_bytes)
        for rows in self._batches():
            ids = torch.from_numpy(samples[rows]).to(self._device, torch.long)
            self._hidden[rows] = torch.nn.functional.embedding(ids, embedding).to(self._hidden.device)

    def layer(self, index: int, weights: dict[str, torch.Tensor]) -> LayerScales:
        """Find the scales of the next layer, whose tensors are `weights`; `weights` are not changed.

        Raises InputDataError naming the layer, and the sample if a sample is the cause.
        """
        model = self._model(weights)
        layer = model.layers[0]
        qkv = (
            _Maximum(layer, self._names.attention_inputs)
            if self._quantization.kv_cache_quant_algo is KvCacheQuantAlgo.INT8
            else None
        )
        # How often ModelOpt runs the samples through a layer.
        passes, needed = 0, self._quantization.passes

        def forward(_: torch.nn.Module) -> None:
            nonlocal passes
            passes += 1
            # AWQ reads the same hidden states twice, so only its second pass may replace them by the layer's output.
            self._forward(model, index, replace=passes == needed)

        try:
            with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
                if self._recipe is not None:
                    mtq.quantize(model, self._recipe, forward if needed else None)
                else:
                    forward(model)
        except AssertionError as error:
            raise InputDataError(
                f"layer {index} cannot be calibrated",
                why=str(error).partition("\n")[0],
                remedy="look at its weights with `trtpipe inspect`",
            ) from None
        scales = self._scales(layer, qkv)
        shared = self._experts is not None and self._quantization.quant_algo is not None
        if shared and (unreached := share_scales(scales.linears, self._names)):
            self.unreached[index] = unreached
        # ModelOpt's modules form reference cycles: without this the weights would stay until garbage collection.
        for module in model.modules():
            module._parameters.clear()
        return scales

    def _model(self, weights: dict[str, torch.Tensor]) -> Any:
        with torch.device("meta"):
            model = AutoModel.from_config(self._config, dtype=self._dtype)
        # The rotary frequencies are computed, not stored, so the module must be created on the device.
        model.rotary_emb = type(model.rotary_emb)(config=self._config, device=self._device)
        if self._quantization.pre_quant_scale:
            # Clone, since smoothing changes the weights in place.
            weights = {name: tensor.clone() for name, tensor in weights.items()}
        self._load(model.layers[0], weights)
        model.embed_tokens = torch.nn.Identity()
        model.norm = torch.nn.Identity()
        return model.eval()

    def _load(self, layer: Any, weights: dict[str, torch.Tensor]) -> None:
        facts, names = self._experts, self._names
        if facts is None:
            layer.load_state_dict(weights, assign=True)
            return
        # transformers' releases have called this module by different names.
        place = next(name for name, module in layer.named_children() if hasattr(module, "experts"))
        setattr(layer, place, torch.nn.Identity())
        apart = (f"{names.router}.weight", *(f"{name}.weight" for mlp in names.mlps for name in mlp))
        layer.load_state_dict({name: weights[name] for name in weights.keys() - set(apart)}, assign=True)
        setattr(layer, place, ExpertLayer(names, facts, weights))

    def _batches(self) -> Iterator[slice]:
        for start in range(0, len(self._hidden), self._rows):
            yield slice(start, start + self._rows)

    def _forward(self, model: Any, index: int, *, replace: bool) -> None:
        length = self._hidden.shape[1]
        positions = torch.arange(length, device=self._device).unsqueeze(0)
        # Attention without a mask is causal; no padding mask is needed, since every sample fills its row.
        mask = prompt_mask(0, length, self._windows(index) or length, self._dtype, self._device)
        for rows in self._batches():
            hidden = self._hidden[rows].to(self._device)
            rotary = model.rotary_emb(hidden, positions)
            out = model.layers[0](hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
            out = out[0] if isinstance(out, tuple) else out
            if replace:
                # One sum per sample: it is not finite if any value is not.
                sums = out.float().sum(dim=(1, 2))
                if not torch.isfinite(sums).all():
                    sample = rows.start + int(torch.nonzero(~torch.isfinite(sums))[0])
                    raise InputDataError(
                        f"layer {index} gives a value that is infinite or not a number for calibration sample {sample}",
                        why="no scale can be found for it",
                        remedy="use bfloat16, or leave the sample out",
                    )
                self._hidden[rows] = out.to(self._hidden.device)

    def _scales(self, layer: Any, qkv: _Maximum | None) -> LayerScales:
        def amax(quantizer: Any) -> torch.Tensor | None:
            if not quantizer.is_enabled or quantizer.amax is None:
                return None
            return quantizer.amax.float().reshape(()).cpu()  # type: ignore[no-any-return]

        linears: dict[str, LinearScales] = {}
        of_experts = next((part.linears() for part in layer.children() if isinstance(part, ExpertLayer)), {})
        for name in self._names.linears if self._recipe is not None else ():
            linear = of_experts[name] if name in of_experts else layer.get_submodule(name)
            linears[name] = LinearScales(input_amax=amax(linear.input_quantizer), smooth=_smooth(linear))
        attention = layer.get_submodule(self._names.attention.rstrip("."))
        k = v = None
        if self._quantization.kv_cache_quant_algo in _KV_CACHE:
            k, v = amax(attention.k_bmm_quantizer), amax(attention.v_bmm_quantizer)
        return LayerScales(linears=linears, k_amax=k, v_amax=v, qkv_amax=qkv.amax.cpu() if qkv else None)


class _Maximum:
    """Largest magnitude among the outputs of some submodules."""

    def __init__(self, layer: Any, names: tuple[str, ...]) -> None:
        self.amax = torch.zeros(())
        for name in names:
            layer.get_submodule(name).register_forward_hook(self._see)

    def _see(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        self.amax = torch.maximum(self.amax.to(output.device), output.abs().amax().float())


def _configuration(name: str | None, quantization: Quantization) -> dict[str, Any] | None:
    """ModelOpt's configuration `name`, with the group size and KV cache of `quantization`."""
    cache = _KV_CACHE.get(quantization.kv_cache_quant_algo) if quantization.kv_cache_quant_algo else None
    entry = {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": cache, "enable": True}
    if name is None:
        everything = {"quantizer_name": "*", "enable": False}
        return {"quant_cfg": [everything, entry], "algorithm": "max"} if cache else None
    recipe: dict[str, Any] = copy.deepcopy(getattr(mtq, name))
    if quantization.packed:
        for one in recipe["quant_cfg"]:
            cfg = one.get("cfg")
            for part in cfg if isinstance(cfg, list) else [cfg]:
                if part and "block_sizes" in part:
                    part["block_sizes"][-1] = quantization.group_size
        # The debug helper keeps the search's result in float32; ModelOpt's quantizer rounds it to the model's type.
        recipe["algorithm"] = {"method": "awq_lite", "alpha_step": 0.1, "debug": True}
    if cache:
        recipe["quant_cfg"].append(entry)
    return recipe


def _smooth(linear: Any) -> torch.Tensor | None:
    """[in] float32: factors of the linear's input, with ModelOpt's values before rounding."""
    if not hasattr(linear.input_quantizer, "_pre_quant_scale"):
        return None
    if hasattr(linear, "awq_lite"):
        best: torch.Tensor | None = linear.awq_lite.best_scale
        return None if best is None else (1.0 / best).cpu()
    # SmoothQuant with alpha 1, as in `mtq.smoothquant`: the factor of a channel that is always zero is 1.
    amax = linear.input_quantizer._amax_for_smoothing.float().reshape(-1)
    smooth: torch.Tensor = 1.0 / amax
    if smooth.min() <= 2.0**-31:
        smooth[amax <= 2.0**-31] = 1.0
    return smooth.clamp(min=1e-4, max=1e4).cpu()


def _room(shape: tuple[int, ...], like: torch.Tensor, scratch: Path, limit: int) -> torch.Tensor:
    """Allocate a tensor for hidden states: on the device up to `limit` bytes, else in a mapped file.

    The file is already unlinked when this returns; its space is freed with the tensor.
    """
    count = math.prod(shape)
    if count * like.element_size() <= limit:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    path = scratch / "hidden"
    mapped = torch.from_file(str(path), shared=True, size=count, dtype=like.dtype).view(shape)
    path.unlink()
    return mapped
