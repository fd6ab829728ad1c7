"""A server for the time of a `with` block, and the client of a served target."""

from __future__ import annotations

import contextlib
import json
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from trtpipe.pipeline.api.arguments import checked, known_errors

if TYPE_CHECKING:
    import subprocess

    from typing_extensions import Unpack

    from trtpipe.pipeline.serving.servers import Served, Server
    from trtpipe.pipeline.store.store import Store

log = logging.getLogger("trtpipe")


class Sampling(TypedDict, total=False):
    """How tokens are chosen; greedily if nothing is given. One that is None counts as left out.

    temperature         divides the logits; 0 is greedy
    top_k, top_p        number of likeliest tokens, and probability mass, to sample from
    repetition_penalty  divides the logits of tokens that were there
    seed                equal requests with one seed get equal tokens
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    seed: int | None


class Client:
    """A target that is served on this machine, by `trtpipe serve` or `trtpipe.serve`; it is asked over gRPC, and with
    an adapter over its OpenAI API.

    For a server elsewhere use a client of OpenAI's API: `openai_url` is the address of this one's.
    """

    @checked
    def __init__(
        self, target: str | Path | None = None, *, server: str | None = None, adapter: str | None = None
    ) -> None:
        """Find the running server of that name, or the only one (of several the only one that serves `target`), and
        its target of that name, or the only one.

        adapter  LoRA adapter that answers; the model alone if left out

        Raises UsageError, and HostError while the server is being started again.
        """
        from trtpipe.configs.home import default_home
        from trtpipe.engines.errors import UsageError
        from trtpipe.pipeline.serving.servers import find_ready
        from trtpipe.pipeline.store.store import Store

        name = None if target is None else str(target)
        self._server: Server = find_ready(Store(default_home()), server, name)
        self._served: Served = self._server.find(name)
        self._adapter = adapter
        if adapter is not None and self._server.gateway_url is None:
            raise UsageError(
                f"{self._server.name} has no gateway",
                why="an adapter is named there",
                remedy="serve without --no-openai",
            )

    @property
    def server(self) -> str:
        """Name of the server."""
        return self._server.name

    @property
    def target(self) -> str:
        """Name of the target."""
        return self._served.name

    @property
    def adapter(self) -> str | None:
        """Name of the LoRA adapter that answers; None for the model alone."""
        return self._adapter

    @property
    def model(self) -> str:
        """Name at `openai_url` of what answers: of the model, or of the model with its adapter."""
        return self._served.model_name(self._adapter)

    @property
    def tokenizer(self) -> Path:
        """The model's tokenizer.json."""
        return self._served.tokenizer / "tokenizer.json"

    @property
    def grpc_url(self) -> str:
        return self._server.endpoints.grpc_url

    @property
    def http_url(self) -> str:
        return self._server.endpoints.http_url

    @property
    def metrics_url(self) -> str:
        return self._server.endpoints.metrics_url

    @property
    def openai_url(self) -> str | None:
        """Base URL of the OpenAI-compatible gateway; None where none was started."""
        return f"{self._server.gateway_url}/v1" if self._server.gateway_url else None

    def generate(
        self, prompt: str, *, max_tokens: int = 128, stop: Sequence[str] = (), **sampling: Unpack[Sampling]
    ) -> str:
        """The model's continuation of `prompt`, without a chat template; "" where it ends at once.

        Raises as `stream`.
        """
        return "".join(self.stream(prompt, max_tokens=max_tokens, stop=stop, **sampling))

    def chat(
        self, messages: str | Sequence[Mapping[str, Any]], *, max_tokens: int = 128, stop: Sequence[str] = (),
        **sampling: Unpack[Sampling],
    ) -> str:  # fmt: skip
        """The model's answer to a message, or to a conversation of {role, content}. Raises as `stream`."""
        return self.generate(self.prompt(messages), max_tokens=max_tokens, stop=stop, **sampling)

    @checked
    def prompt(self, messages: str | Sequence[Mapping[str, Any]]) -> str:
        """The prompt that the model's chat template makes of a message, or of a conversation of {role, content} as the
        gateway takes it; a model without a template gets a message as it is.

        Raises InputDataError for a template that cannot be applied, UsageError for a conversation without one and for
        messages that the gateway refuses.
        """
        from trtpipe.engines.errors import UsageError
        from trtpipe.engines.hf import chat_template

        template = chat_template.read_template(self._served.tokenizer)
        if template is None:
            if isinstance(messages, str):
                return messages
            raise UsageError(f"{self.target} has no chat template", remedy="give a text")
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else _turns(messages)
        return chat_template.apply_template(self._served.tokenizer, template, turns)

    @checked
    def stream(
        self, prompt: str, *, max_tokens: int = 128, stop: Sequence[str] = (), **sampling: Unpack[Sampling]
    ) -> Iterator[str]:
        """Yield the text of a continuation as it arrives, up to one of the texts in `stop`.

        Raises UsageError for a value that the model cannot take and a request that the server refuses, HostError where
        the server is gone, StageFailed where it fails.
        """
        from trtpipe.engines.hf.chat_template import special_tokens
        from trtpipe.engines.sampling import SamplingParams
        from trtpipe.pipeline.net.api_key import api_key
        from trtpipe.pipeline.serving import generate

        params = SamplingParams(**sampling)
        generate.check_options(params, max_tokens)
        gateway = self._server.gateway_url
        if gateway is not None and (self._server.native or self._adapter is not None):
            model, key = self._served.model_name(self._adapter), api_key()
            bos = special_tokens(self._served.tokenizer).get("bos_token") if self._server.native else None
            return generate.stream_openai(
                gateway, prompt, params, model=model, max_tokens=max_tokens, stop_words=stop, key=key, bos=bos
            )
        model = self._served.front
        return generate.stream(self.grpc_url, prompt, params, model=model, max_tokens=max_tokens, stop_words=stop)


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a conversation as chat templates take them. Raises UsageError."""
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.gateway.failure import Failure
    from trtpipe.pipeline.gateway.messages import plain
    from trtpipe.pipeline.gateway.requests import TokenizeRequest, parse

    try:
        asked = parse(json.dumps({"messages": list(map(dict, messages))}).encode(), TokenizeRequest)
        return plain(asked.messages or [])
    except Failure as failure:
        raise UsageError(failure.message) from None
    except (TypeError, ValueError) as error:
        raise UsageError("the messages are not JSON", why=str(error)) from None


@contextlib.contextmanager
@checked
def serve(
    target: str | Path | Sequence[str | Path] | None = None, *, front: str = "triton", server: str = "auto",
    image: str | None = None, host: str = "127.0.0.1", http_port: int = 0,
    grpc_port: int = 0, metrics_port: int = 0, openai_port: int | None = 0, gpus: Sequence[int] | None = None,
    engine_python: str | Path | None = None, allow_model_code: bool = False, drain_s: int = 15, ready_s: int = 600,
) -> Iterator[Client]:  # fmt: skip
    """Serve a target while the `with` block runs: `with trtpipe.serve("smollm2-135m.cpu.fp32") as client:`.

    target            a target in ./runs, or a model repository; several share one server; the newest run if left out
    front             triton, or native: the runtime's own server (`vllm serve`, `trtllm-serve`) at `openai_port`
    server            auto, local (tritonserver of this environment) or docker (the toolchain's image)
    image             image of a docker server, in place of the toolchain's
    http_port, ...    ports; 0 takes a free one. openai_port is the gateway's, and None starts none
    gpus              indices of the GPUs that a container gets; all visible ones if left out
    engine_python     Python that runs engines; for vLLM that of the environment beside this one if left out
    allow_model_code  whether code of unknown templates may run
    drain_s           seconds that requests in flight have to end after the block
    ready_s           seconds that the models have to load

    Yields a client of the first target. `trtpipe serve` also repairs a server whose Python process has died, which
    this does not. Raises UsageError, HostError, InputDataError, ArtefactRefused or StageFailed.
    """
    from trtpipe.configs.home import default_home
    from trtpipe.engines.errors import UsageError
    from trtpipe.pipeline.serving import launch_options, repositories
    from trtpipe.pipeline.serving import serve as serving
    from trtpipe.pipeline.store.store import Store

    # What the block itself raises is the program's.
    with known_errors():
        store = Store(default_home())
        names = [target] if target is None or isinstance(target, str | Path) else target
        if not names:
            raise UsageError("target is an empty list", remedy="name a target, or leave it out for the newest")
        found = [repositories.find_repository(None if name is None else str(name)) for name in names]
        options = launch_options.LaunchOptions(
            front=front, server=server, image=image, host=host, http=http_port, grpc=grpc_port, metrics=metrics_port,
            openai=openai_port, gpus=None if gpus is None else tuple(gpus),
            engine_python=None if engine_python is None else str(engine_python), allow_model_code=allow_model_code,
            drain_s=drain_s, ready_s=ready_s,
        )  # fmt: skip
        running, process = serving.launch(found, store, options, log.info)
    # Called once: at the end of the program where the block has not ended, as that of an ExitStack that stays open.
    end = weakref.finalize(process, _end, store, running, process)
    try:
        yield Client(found[0].name, server=running.name)
    finally:
        with known_errors():
            end()


def _end(store: Store, server: Server, process: subprocess.Popen[bytes]) -> None:
    """End this very server, which may have ended, and another one may be served by its name since."""
    from trtpipe.engines.errors import HostError
    from trtpipe.pipeline.serving import serve as serving
    from trtpipe.pipeline.serving.servers import recorded

    if (server.name, server.pid) in [(one.name, one.pid) for one in recorded(store)]:
        with contextlib.suppress(HostError):  # it has died, and another command starts it again
            serving.stop(store, server.name)
    elif server.alive:  # its record was removed
        serving.end(server)
    process.wait()
