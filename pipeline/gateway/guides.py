"""Forms that an answer must have: how requests ask for them, and limits of what is taken."""

from __future__ import annotations

from typing import Any, NamedTuple

from trtpipe.engines.sampling import Guide


class Asked(NamedTuple):
    """A guide, and the field of the request that asks for it, which errors name."""

    guide: Guide
    param: str

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.guide.kind, "text": self.guide.text, "param": self.param}
