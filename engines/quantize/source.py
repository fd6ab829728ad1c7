"""Reader of a Hugging Face folder's tensors, one layer at a time, which prefetches the next layer to the device."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from trtpipe.engines.checkpoint.convert import check_source
from trtpipe.engines.families import names_of
from trtpipe.engines.hf.folder import locate_tensors
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.reference.mapped_tensors import MappedTensors

# Bytes of each tensor in the digest of the weights: enough to tell training, few enough to be read in moments.
SAMPLED_BYTES = 4096


class Source:
    """Reads tensors of `folder` as `dtype` on `device`, and prefetches the next layer in the background.

    Raises InputDataError for a folder with a missing or unexpected tensor.
    """

    def __init__(self, folder: Path, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._located = locate_tensors(folder)
        check_source(folder, model, self._located)
        self._dtype, self._device = dtype, device
        self._mapped = MappedTensors(self._located, torch.device("cpu"))
        self._names = names_of(model)
        self._layers = model.num_hidden_layers
        self._pool = ThreadPoolExecutor(1)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: tuple[int, Future[dict[str, torch.Tensor]]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(tensor.entry.nbytes for tensor in self._located.values())

    def digest(self) -> str:
        """Digest of the weights, from the type, the shape and the first bytes of each."""
        found = hashlib.sha256()
        for name in sorted(self._located):
            entry = self._located[name].entry
            with self._located[name].path.open("rb") as file:
                file.seek(entry.offset)
                first = file.read(min(entry.nbytes, SAMPLED_BYTES))
            found.update(f"{name} {entry.dtype} {entry.shape} {len(first)}\n".encode() + first)
        return found.hexdigest()

    def tensor(self, name: str, *, on_device: bool = True) -> torch.Tensor:
        """Read a tensor by its full name, to the device or to the CPU. A router keeps its type: see `Writer`."""
        mapped = self._mapped[name]
        dtype = mapped.dtype if self._names.experts and name.endswith(f"{self._names.router}.weight") else self._dtype
        # On a CPU only a copy reads the file in the background; a mapped page is read at its first use.
        copy = on_device and self._device.type == "cpu"
        return mapped.to(device=self._device if on_device else mapped.device, dtype=dtype, copy=copy)

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """Read the tensors of decoder layer `index`, by their names within it."""
        ready = self._ahead is not None and self._ahead[0] == index
        tensors = self._ahead[1].result() if self._ahead is not None and ready else self._read(index)
        self._ahead = None
        if index + 1 < self._layers:
            self._ahead = (index + 1, self._pool.submit(self._read, index + 1))
        return tensors

    def _read(self, index: int) -> dict[str, torch.Tensor]:
        prefix = self._names.layer(index)
        names = [name for name in self._located if name.startswith(prefix) and not name.endswith(".inv_freq")]
        # A separate stream, so that copies do not wait for the layer that is being computed.
        with torch.cuda.stream(self._stream):
            tensors = {name.removeprefix(prefix): self.tensor(name) for name in names}
        if self._stream is not None:
            self._stream.synchronize()
        return tensors
