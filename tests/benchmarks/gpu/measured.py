"""The runtime of an engine that is served, which is measured first, in the engine's own process and without the server.

So one engine, loaded once, gives both sides of the comparison. Loaded by the engine process in place of the runtime
that the passport names; what to measure and where to write it is in TRTPIPE_MEASURE, as JSON.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu import in_process, loop


def Runtime(folder: Path, **options: Any) -> Any:  # noqa: N802  # the name the engine process asks for
    """The runtime, after it has been measured. A model of two instances is one engine: it is measured once."""
    name = json.loads((folder / "passport.json").read_text(encoding="utf-8"))["runtime"]
    if name == "vllm":
        in_process.without_multicast()
    engine = in_process.ENGINES[name](folder, **options)
    asked = json.loads(os.environ["TRTPIPE_MEASURE"])
    found = loop.measure(engine, asked["levels"], asked["seconds"])
    Path(asked["out"]).write_text(json.dumps(found), encoding="utf-8")
    return engine.runtime
