"""Model names at the gateway: those of its options, and MODEL:ADAPTER for each LoRA adapter that is installed."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from trtpipe.engines.adapters import AdapterFolder, InstalledAdapter
from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.gateway.failure import Failure
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.gateway.requests import quoted

# Between the name of a model and that of its adapter, which contains no colon.
SEPARATOR = ":"
# Most names that a message lists.
LISTED = 20


def adapter_model_name(model: str, adapter: str) -> str:
    """Name under which requests use an adapter of a model."""
    return f"{model}{SEPARATOR}{adapter}"


def require_free(taken: Collection[str], models: tuple[str, ...], adapter: str) -> None:
    """Raises UsageError where one of the models' names, `taken`, is the name that an adapter of `models` would get."""
    for model in models:
        name = adapter_model_name(model, adapter)
        if name in taken:
            raise UsageError(
                f"the name {name} is that of a model, and of {model} with the adapter {adapter}",
                remedy="give one of them another name",
            )


class ModelNames:
    """Finds models and adapters by the names that requests give."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._folders = {model.name: AdapterFolder(model.adapters) for model in options.models}

    def find(self, name: str | None) -> tuple[ServedModel, InstalledAdapter | None]:
        """The model of that name, and the adapter if the name is MODEL:ADAPTER; the first model for None, which routes
        allow whose requests need not name a model. Raises Failure 404."""
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
        """(name, None) for each model name, and (name, name of the model) for each adapter."""
        for model in self._options.models:
            for name in model.names:
                yield name, None
                for placed in self._folders[model.name].all():
                    yield adapter_model_name(name, placed.name), name

    def _unknown(self, name: str) -> Failure:
        served = [known for known, _ in self.all()]
        more = f" and {len(served) - LISTED} more" if len(served) > LISTED else ""
        what = f"model '{quoted(name)}' does not exist; served: {', '.join(served[:LISTED])}{more}"
        return Failure(404, what, param="model", code="model_not_found")
