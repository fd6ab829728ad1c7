"""Model families: one module each, whose FAMILY is found by the `architectures` entry of a model's config.json.

A new module in this folder is a new family; no list names the modules.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping

from trtpipe.engines.families.base import Family, SourceNames
from trtpipe.engines.model_config import Geometry


@functools.cache
def families() -> Mapping[str, Family]:
    """All families, by the Hugging Face architectures that they cover."""
    out: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name != "base":
            family: Family = importlib.import_module(f"{__name__}.{module.name}").FAMILY
            out.update(dict.fromkeys(family.architectures, family))
    return out


def family_of(model: Geometry) -> Family:
    """The family of a model whose config was read, so that its architecture is known."""
    return families()[model.architecture]


def names_of(model: Geometry) -> SourceNames:
    """Names of the tensors of a model's Hugging Face folder, those of its experts included."""
    names = family_of(model).names
    return names if model.experts is None else names.of_experts(model.experts.count)
