"""The tensors of a Hugging Face folder, a layer at a time, ready on a device before they are asked for."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from trtpipe.engines.checkpoint.convert import check_source
from trtpipe.engines.hf.folder import ModelConfig, locate_tensors
from trtpipe.engines.reference.mapped_tensors import MappedTensors


class Source:
    """Reads tensors of `folder` as `dtype` on `device`. While a layer is in use the next one is being read.

    Raises InputDataError for a folder that lacks a tensor or has one too many.
    """

    def __init__(self, folder: Path, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._located = locate_tensors(folder)
        check_source(folder, model, self._located)
        self._dtype, self._device = dtype, device
        self._mapped = MappedTensors(self._located, torch.device("cpu"))
        self._layers = model.num_hidden_layers
        self._pool = ThreadPoolExecutor(1)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: tuple[int, Future[dict[str, torch.Tensor]]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(tensor.entry.nbytes for tensor in self._located.values())

    def tensor(self, name: str, *, on_device: bool = True) -> torch.Tensor:
        """One tensor by its full name, on the device or on the CPU."""
        mapped = self._mapped[name]
        # On a CPU a copy is read ahead in the background, and a page of the file is not.
        copy = on_device and self._device.type == "cpu"
        return mapped.to(device=self._device if on_device else mapped.device, dtype=self._dtype, copy=copy)

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of decoder layer `index` by their names within it."""
        ready = self._ahead is not None and self._ahead[0] == index
        tensors = self._ahead[1].result() if self._ahead is not None and ready else self._read(index)
        self._ahead = None
        if index + 1 < self._layers:
            self._ahead = (index + 1, self._pool.submit(self._read, index + 1))
        return tensors

    def _read(self, index: int) -> dict[str, torch.Tensor]:
        prefix = f"model.layers.{index}."
        names = [name for name in self._located if name.startswith(prefix) and not name.endswith(".inv_freq")]
        # A stream of its own: copies must not wait for the layer that is being computed.
        with torch.cuda.stream(self._stream):
            tensors = {name.removeprefix(prefix): self.tensor(name) for name in names}
        if self._stream is not None:
            self._stream.synchronize()
        return tensors
