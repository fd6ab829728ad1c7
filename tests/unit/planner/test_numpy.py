"""The planner with numpy 2, which a plain installation has. This environment has 1, for Triton's Python backend."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import numpy as np
import pytest

import trtpipe
from tests.support.paths import ROOT
from trtpipe.pipeline.serving.engine_python import beside

ASKED: dict[str, Any] = {"model": "llama3-8b", "gpu": "h100", "tp": [1, 2], "load": "chat", "slo": "ttft:500ms"}
PROGRAM = f"""
import json, numpy, trtpipe
print(json.dumps([numpy.__version__, [candidate.name for candidate in trtpipe.plan(**{ASKED}).candidates]]))
"""


@pytest.mark.process
@pytest.mark.skipif(beside() is None, reason="no vLLM, and so no numpy 2, beside this environment: `make setup-vllm`")
def test_a_plan_with_objectives_ranks_the_same_with_numpy_2() -> None:
    done = subprocess.run(
        [str(beside()), "-c", PROGRAM], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
        check=True,
    )  # fmt: skip
    version, names = json.loads(done.stdout)
    assert (np.__version__[0], version[0]) == ("1", "2")
    assert names == [candidate.name for candidate in trtpipe.plan(**ASKED).candidates]
