"""Adapters of a folder in a model: each is loaded at its first request, and kept until it is gone from the folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from trtpipe.engines.adapters import AdapterFolder
from trtpipe.engines.engine_process.request import RequestRefused, adapter_fault
from trtpipe.engines.errors import TrtpipeError
from trtpipe.engines.reference.model import Model
from trtpipe.engines.reference.parallel import ParallelModel


class ServedAdapters:
    """Adapters of `folder` in `model`; `used` gives the numbers that unfinished requests have."""

    def __init__(self, folder: Path | None, model: Model | ParallelModel, used: Callable[[], Iterable[int]]) -> None:
        self._folder, self._model, self._used = AdapterFolder(folder), model, used
        self._loaded: set[int] = set()

    def require(self, number: int) -> None:
        """Load an adapter, unless it is there, and drop those that are gone from the folder and in no request.

        Raises RequestRefused.
        """
        placed = self._folder.numbered(number)
        if placed is None:
            raise RequestRefused(f"no adapter has the number {number}")
        if number in self._loaded:
            return
        try:
            self._model.load_adapter(number, placed.path)
        except TrtpipeError as error:
            raise adapter_fault(placed.name) from error
        self._loaded.add(number)
        # With `number`: it may have left the folder while it was loaded, and its request is still to come.
        kept = {number, *self._used(), *(one.number for one in self._folder.all())}
        for gone in self._loaded - kept:
            self._model.drop_adapter(gone)
            self._loaded.remove(gone)
