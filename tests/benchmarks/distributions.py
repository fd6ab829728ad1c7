"""What a folder's model says of every place of some rows, as our runtime's arithmetic has it, layer by layer."""

from __future__ import annotations

from pathlib import Path

import torch

from trtpipe.engines.accuracy.models import embed
from trtpipe.engines.hf.stored import read_stored
from trtpipe.engines.reference.fused import rms_norm
from trtpipe.engines.reference.hf_weights import HfFolder, QuantizedFolder
from trtpipe.engines.reference.layer import run_layer
from trtpipe.engines.reference.rope import rotary_tables


@torch.inference_mode()
def distributions(folder: Path, rows: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[n, length - 1, vocabulary] log-probabilities of what follows, for token ids [n, length].

    folder  a Hugging Face folder, plain or quantized; computed in `dtype`
    """
    source = (HfFolder if read_stored(folder) is None else QuantizedFolder)(folder, dtype, device)
    hidden = embed(source, rows)
    tables = tuple(table.to(device) for table in rotary_tables(source.config, rows.shape[1]))
    for index in range(source.config.num_hidden_layers):
        hidden = run_layer(source.config, source.layer(index), hidden, *tables)
    norm, head, _ = source.head()
    states = rms_norm(hidden[:, :-1], norm, source.config.norm_epsilon)
    return (states.float() @ torch.cat(list(head)).float().t()).log_softmax(-1)
