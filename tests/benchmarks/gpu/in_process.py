"""Engines in this process, stepped by `loop`: vLLM's own and the reference runtime."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu import loop


class Vllm:
    """vLLM's own engine, as our runtime sets it up; its steps are vLLM's, without ours."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from trtpipe.engines.engine_process.vllm_runtime import Runtime

        self.runtime = Runtime(folder, **options)
        self.engine = self.runtime._engine
        self._params: Callable[[int], Any] = lambda new: SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )

    @property
    def vocabulary(self) -> int:
        return int(self.engine.model_config.get_vocab_size())

    def add(self, number: int, prompt: Sequence[int], new: int) -> None:
        self.engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, self._params(new))

    def step(self) -> Iterable[tuple[int, int, bool]]:
        for reply in self.engine.step():
            yield int(reply.request_id), len(reply.outputs[0].token_ids), reply.finished

    def drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()


class Reference:
    """The reference runtime."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from trtpipe.engines.reference.runtime import Runtime

        self.runtime = Runtime(folder, **options)

    @property
    def vocabulary(self) -> int:
        return self.runtime.config.vocab_size

    def add(self, number: int, prompt: Sequence[int], new: int) -> None:
        from trtpipe.engines.engine_process.request import Request

        self.runtime.submit(Request(id=number, prompt=tuple(prompt), max_tokens=new))

    def step(self) -> Iterable[tuple[int, int, bool]]:
        for output in self.runtime.step():
            yield output.id, len(output.tokens), output.finish is not None

    def drain(self) -> None:
        while self.runtime.has_work:
            self.runtime.step()


ENGINES: dict[str, Any] = {"vllm": Vllm, "reference": Reference}


def vllm_throughput(engine: str, levels: list[int]) -> dict[str, dict[str, float]]:
    """Output tokens a second of vLLM in this process, by requests in flight."""
    without_multicast()
    return loop.measure(Vllm(Path(engine)), levels, None)


def without_multicast() -> None:
    """Have vLLM's ranks add up without NVLink's multicast, which can put the GPUs of a shared host out of service."""
    import vllm

    os.environ |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm"}
    passes = {"pass_config": {"fuse_allreduce_rms": False}}
    vllm.EngineArgs = functools.partial(vllm.EngineArgs, compilation_config=passes)
