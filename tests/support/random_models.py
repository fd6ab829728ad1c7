"""Tiny random models of transformers, of any family that it knows."""

from __future__ import annotations

from typing import Any

# transformers imports it, and it runs lscpu, which a unit test may not.
import numpy.testing  # noqa: F401


def random_model(family: str = "llama", *, seed: int = 0, **config: Any) -> Any:
    """A model in float32, of the `model_type` `family`; no norm is 1 and no bias 0, which would hide a lost one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**ids, **config}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()
