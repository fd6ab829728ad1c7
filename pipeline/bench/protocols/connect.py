"""Factory of a client for a protocol and a URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trtpipe.pipeline.bench.protocols.transport import Client, Codec, Sender

if TYPE_CHECKING:
    from trtpipe.pipeline.bench.protocols.http_setup import Site

TRANSPORTS = ("own", "tritonclient")


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """Connection options.

    transport      own (our readers) or tritonclient (the libraries: TLS, proxies)
    connections    number of gRPC connections of our own reader; HTTP has one for each request in flight
    kernel_stamps  take stamps from the kernel instead of the time of the read
    headers        headers of every HTTP request
    """

    transport: str = "own"
    connections: int = 1
    kernel_stamps: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)


async def connect(protocol: str, url: str, model: str, tokenize: Callable[[str], list[int]], wiring: Wiring) -> Client:
    """Query the server at `url` and return a client for `model`.

    Raises HostError when no server of this protocol answers, UsageError for a model that is not served there,
    StageFailed for one that the server failed to load.
    """
    if protocol == "grpc":
        return await _grpc(url, model, tokenize, wiring)
    from trtpipe.pipeline.bench.protocols.http_setup import Site

    site = Site.of(url, wiring.headers)
    if wiring.transport == "tritonclient":
        from trtpipe.pipeline.bench.protocols.library import fetch

        site = replace(site, fetch=fetch)
    sender = _http_sender(site, wiring)
    try:
        return Client(_http_codec(protocol, site, model, tokenize), sender)
    except BaseException:
        await sender.close()
        raise


async def _grpc(url: str, model: str, tokenize: Callable[[str], list[int]], wiring: Wiring) -> Client:
    from trtpipe.pipeline.bench.protocols.triton_grpc import TritonGrpc

    if wiring.transport == "tritonclient":
        from trtpipe.pipeline.bench.protocols.library import GrpcAioSender

        sender: GrpcAioSender | H2Sender = GrpcAioSender(url)
    else:
        from trtpipe.pipeline.bench.protocols.h2_sender import H2Sender
        from trtpipe.pipeline.net.stamped import dial

        sender = await H2Sender.open(url, wiring.connections, dial if wiring.kernel_stamps else None)
    try:
        return Client(await TritonGrpc.find(sender.ask, url, model, tokenize), sender)
    except BaseException:
        await sender.close()
        raise


def _http_codec(protocol: str, site: Site, model: str, tokenize: Callable[[str], list[int]]) -> Codec:
    if protocol == "http":
        from trtpipe.pipeline.bench.protocols.triton_http import TritonHttp

        return TritonHttp.find(site, model, tokenize)
    from trtpipe.pipeline.bench.protocols.openai_http import OpenAiHttp

    return OpenAiHttp.find(site, model, chat=protocol == "chat")


def _http_sender(site: Site, wiring: Wiring) -> Sender:
    if wiring.transport == "tritonclient":
        from trtpipe.pipeline.bench.protocols.library import HttpxSender

        return HttpxSender(site)
    from trtpipe.pipeline.bench.protocols.http1 import HttpSender

    return HttpSender(site, kernel_stamps=wiring.kernel_stamps)
