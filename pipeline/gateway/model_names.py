"""Names of models at the gateway: those of its options, and of their LoRA adapters, which come and go."""

from __future__ import annotations

from collections.abc import Iterator

from trtpipe.engines.adapters import AdapterFolder, Placed
from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.gateway.failure import Failure
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.gateway.requests import quoted

# Between the name of a model and that of its adapter, which has none.
SEPARATOR = ":"
# Names that a message lists.
LISTED = 20


def joined(model: str, adapter: str) -> str:
    """Name of a model with an adapter."""
    return f"{model}{SEPARATOR}{adapter}"


def require_free(options: GatewayOptions, models: tuple[str, ...], adapter: str) -> None:
    """Raises UsageError where a model is already called what the adapter of `models` would be."""
    for model in models:
        if options.find(joined(model, adapter)) is not None:
            raise UsageError(
                f"a model is called {joined(model, adapter)}, as {model} with its adapter {adapter} would be",
                remedy="give one of them another name",
            )


class ModelNames:
    """Finds models and adapters by the names that requests give."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._folders = {model.name: AdapterFolder(model.adapters) for model in options.models}

    def find(self, name: str | None) -> tuple[ServedModel, Placed | None]:
        """The model of that name, and its adapter if the name has one; the first model where a request need not name
        one. Raises Failure 404."""
        if name is None:
            return self._options.models[0], None
        served = self._options.find(name)
        if served is not None:
            return served, None
        base, separator, adapter = name.rpartition(SEPARATOR)
        served = self._options.find(base) if separator else None
        placed = self._folders[served.name].find(adapter) if served is not None else None
        if served is None or placed is None:
            raise self._unknown(name)
        return served, placed

    def all(self) -> Iterator[tuple[str, str | None]]:
        """Every name, and for a model with an adapter the name of the model."""
        for model in self._options.models:
            for name in model.names:
                yield name, None
                for placed in self._folders[model.name].all():
                    yield joined(name, placed.name), name

    def _unknown(self, name: str) -> Failure:
        served = [known for known, _ in self.all()]
        more = f" and {len(served) - LISTED} more" if len(served) > LISTED else ""
        what = f"model '{quoted(name)}' does not exist; served: {', '.join(served[:LISTED])}{more}"
        return Failure(404, what, param="model", code="model_not_found")
