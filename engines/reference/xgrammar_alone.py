"""XGrammar, imported without transformers unless that is imported already.

It imports all of transformers, which takes two seconds of processor time, for a base class of an adapter and for
classes of tokenizers that nothing here uses.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch  # noqa: F401  # before XGrammar does: it looks at all modules

__all__ = ["xgrammar"]


class _Names(ModuleType):
    """A module that has every public name: each is a class of its own."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("_"):
            raise AttributeError(name)
        return type(name, (), {})


if "transformers" in sys.modules:
    import xgrammar
else:
    sys.modules["transformers"] = _Names("transformers")
    try:
        import xgrammar
    finally:
        del sys.modules["transformers"]
