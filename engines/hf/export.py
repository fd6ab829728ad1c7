"""Export of an unquantized Hugging Face folder in one element type, in shards with an index.

If the source has that type already, its files are linked and no weight is read.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from trtpipe.engines.base import Checkpoint, DataType
from trtpipe.engines.checkpoint.convert import Progress, check_source, rewrite
from trtpipe.engines.checkpoint.layout import SAFETENSORS_DTYPE, source_shapes
from trtpipe.engines.files import place, write_json
from trtpipe.engines.hf.folder import index_of, locate_tensors, read_model_config
from trtpipe.engines.hf.layout import config_in, copy_companions, lay_out, whole


def export(source: Path, out: Path, *, dtype: DataType, progress: Progress = lambda done, total: None) -> Checkpoint:
    """Write the unquantized folder `source`, in `dtype`, into the existing folder `out`.

    Raises InputDataError for a damaged or incomplete source.
    """
    model, located = read_model_config(source), locate_tensors(source)
    check_source(source, model, located)
    stored = SAFETENSORS_DTYPE[dtype]
    write_json(out / "config.json", config_in(source, dtype))
    copy_companions(source, out)
    if all(tensor.entry.dtype == stored for tensor in located.values()):
        files = sorted({tensor.path for tensor in located.values()})
        for path in files:
            place(path, out / path.name)
        index = index_of(source)
        if index is not None:
            shutil.copyfile(index, out / index.name)
        return Checkpoint(path=out)
    plans = [whole(name, shape, None) for name, shape in source_shapes(model).items()]
    rewrite(located, lay_out(out, plans, stored), dtype, progress)
    return Checkpoint(path=out)
