"""Base class of the models of a request's body."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Unknown fields, and values of other types, are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
