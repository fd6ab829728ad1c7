"""Routes of the gateway: they check the key and the request, and make the order for an answer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
import uuid
from array import array
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from trtpipe import __version__
from trtpipe.engines.sampling import LEAST_TEMPERATURE, SamplingParams
from trtpipe.pipeline.gateway.access import read_keys
from trtpipe.pipeline.gateway.answers import Answer
from trtpipe.pipeline.gateway.choices import Order
from trtpipe.pipeline.gateway.connections import BODY, UNFINISHED_BYTES, Connections
from trtpipe.pipeline.gateway.engine_requests import (
    EngineModel,
    engine_request,
    require_bias,
    require_guide,
    require_prompt_log_probs,
    require_sampling,
)
from trtpipe.pipeline.gateway.failure import Failure, wrong
from trtpipe.pipeline.gateway.model_names import ModelNames, adapter_model_name
from trtpipe.pipeline.gateway.options import GatewayOptions
from trtpipe.pipeline.gateway.prompts import ForkServer, Prompts
from trtpipe.pipeline.gateway.requests import ChatOptions, CompletionOptions, quoted
from trtpipe.pipeline.gateway.shared_counters import SharedCounters
from trtpipe.pipeline.gateway.text import Text
from trtpipe.pipeline.gateway.traces import SPAN, RequestSpan, TraceMiddleware, Traces
from trtpipe.pipeline.gateway.upstream import Upstream

T = TypeVar("T")
ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
# Paths open to anybody, without a key and without a body.
OPEN = ("/health", "/health/live", "/health/ready")
# Below this top_p, as below LEAST_TEMPERATURE, only the likeliest token is drawn.
LEAST_TOP_P = 1e-6


class Gateway:
    """State that the routes share."""

    def __init__(self, options: GatewayOptions, counters: SharedCounters, forks: ForkServer) -> None:
        """Raises InputDataError for keys or a tokenizer that cannot be read."""
        self.options = options
        self.counters = counters
        self.keys = read_keys(options.api_keys_file)
        self.models = {model.name: model for model in options.models}
        self.names = ModelNames(options)
        self.texts = {model.name: Text(model.tokenizer) for model in options.models}
        self.prompts = Prompts(options, forks)
        self.upstream = Upstream(*options.upstream(), options.connections)
        self.started = int(time.time())
        self.traces = Traces(options.traces_url) if options.traces_url else None

    def authorise(self, authorization: str) -> None:
        """Raises Failure 401 for a wrong key. Every key is compared, in the same time whatever was sent."""
        if not self.keys:
            return
        scheme, _, given = authorization.partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, key) for key in self.keys]
        if scheme.lower() != "bearer" or not any(matches):
            what = "the API key is not valid" if given else "no API key: send 'Authorization: Bearer KEY'"
            raise Failure(401, what, code="invalid_api_key")

    def admit(self, path: str, authorization: str) -> int:
        """Limit of a request's body in bytes, from the request's head. Raises Failure 401."""
        if path in OPEN:
            return 0
        self.authorise(authorization)
        return self.options.max_body_bytes

    def count(self, path: str, status: int) -> None:
        """Count an answer by its status."""
        endpoint = ENDPOINTS.get(path)
        if endpoint is not None:
            self.counters.answered(endpoint, status)

    async def in_time(self, preparing: Coroutine[Any, Any, T]) -> T:
        """What the prompt processes reply. Raises Failure, with 504 when they take too long."""
        try:
            return await asyncio.wait_for(preparing, self.options.timeout_s)
        except asyncio.TimeoutError:
            raise Failure(504, "the prompt was not made in time", code="timeout") from None

    async def tokens(self, request: Request) -> dict[str, Any]:
        """vLLM's answer to /tokenize or /detokenize."""
        self.authorise(request.headers.get("authorization", ""))
        endpoint = request.scope["path"].strip("/")
        head, ids = await self.in_time(self.prompts.ask(endpoint, request.scope[BODY]))
        return {**head, "tokens": array("i", ids).tolist()} if endpoint == "tokenize" else head

    async def answer(self, request: Request) -> Answer:
        arrived = asyncio.get_running_loop().time()
        span: RequestSpan | None = request.scope.get(SPAN)
        self.authorise(request.headers.get("authorization", ""))
        if self.options.max_requests and self.counters.own("running") >= self.options.max_requests:
            raise Failure(429, "the gateway is answering as many requests as it may", code="overloaded", retry_after=1)
        prepared = await self.in_time(self.prompts.prepare(ENDPOINTS[request.scope["path"]], request.scope[BODY]))
        asked, prompts = prepared.options, prepared.prompts
        text = self.texts[asked.model]
        engine = await self.upstream.model(self.models[asked.model].triton_model)
        model = asked.model if prepared.adapter is None else adapter_model_name(asked.model, prepared.adapter)
        # Looked up again, since it may have been removed while the prompt was made.
        _, adapter = self.names.find(model)
        copies = asked.n or 1
        sampling = _sampling(asked, text, engine)
        # A form has an end: beyond it vLLM's answer would be free.
        ends = [] if asked.ignore_eos and prepared.guide is None else text.end_ids
        changed = (
            prepared.bias
            or prepared.guide
            or asked.presence_penalty
            or asked.frequency_penalty
            or (asked.min_tokens and ends)  # end tokens are not drawn before
        )
        plain = sampling.top_k == 1 and sampling.repetition_penalty in (None, 1) and not changed
        log_probs = _log_probs(asked, engine, sampling, likeliest_known=plain or not prepared.max_tokens)
        scored = bool(prepared.echoes) and log_probs is not None
        if scored:
            require_prompt_log_probs(engine)
        require_sampling(engine, replace(sampling, seed=asked.seed), ends, log_probs=log_probs is not None)
        if prepared.bias:
            require_bias(engine)
        if prepared.guide is not None:
            require_guide(engine, *prepared.guide)
        # A given seed makes every copy repeatable; without a given seed, all copies differ. The engine's own default
        # would give every client the same answer.
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        bias = _dense(prepared.bias, self.models[asked.model].vocab_size or text.vocab_size)
        requests = []
        for number in range(copies * len(prompts)):
            made = engine_request(
                engine,
                prompts[number // copies],
                replace(sampling, seed=(seed + number) % 2**64),
                max_tokens=max(1, prepared.max_tokens),
                # As a stop word the first end token too comes with its log-probability.
                ends=[-1, *ends] if scored else ends,
                pad_id=text.pad_id,
                log_probs=log_probs is not None,
                traced=span,
                prompt_log_probs=scored,
                bias=bias,
                guide=prepared.guide and prepared.guide.guide,
                adapter=adapter,
            )
            requests.append(made)
        self.counters.add("prompt_tokens", sum(map(len, prompts)))
        chat = isinstance(asked, ChatOptions)
        order = Order(
            id=("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
            chat=chat,
            model=model,
            created=int(time.time()),
            prompt_lengths=tuple(map(len, prompts)),
            requests=tuple(requests),
            max_tokens=prepared.max_tokens,
            min_tokens=asked.min_tokens or 0,
            stops=asked.stops(),
            end_ids=frozenset(ends),
            stream=bool(asked.stream),
            include_usage=asked.include_usage,
            continuous_usage=asked.continuous_usage,
            log_probs=log_probs is not None,
            likeliest=bool(log_probs),
            tools=prepared.tools,
            reasoning=prepared.reasoning,
            continued=() if chat else tuple(map(text.continued, prompts)),
            echoes=prepared.echoes,
            guide_param=prepared.guide.param if prepared.guide else "",
            prompts=tuple(prompts) if scored else (),
        )
        if span is not None:
            span.prepared(order)
        return Answer(order, text, self.upstream, self.counters, arrived, arrived + self.options.timeout_s, span)


def _sampling(asked: ChatOptions | CompletionOptions, text: Text, engine: EngineModel) -> SamplingParams:
    """Sampling parameters in the engine's terms: its own default is greedy, OpenAI's is to draw from all tokens."""

    def chosen(name: str, value: float | None, default: float | None) -> float | None:
        return value if value is not None else text.defaults.get(name, default)

    temperature = chosen("temperature", asked.temperature, 1.0)
    top_p = chosen("top_p", asked.top_p, 1.0)
    top_k = int(chosen("top_k", asked.top_k, 0) or 0)
    scored = isinstance(asked, CompletionOptions) and asked.echo and asked.logprobs is not None
    if scored or not engine.takes("repetition_penalty"):
        # A prompt that is scored: a recommended penalty is for answers, and would hide which tokens are the likeliest.
        repetition = asked.repetition_penalty
    else:
        repetition = chosen("repetition_penalty", asked.repetition_penalty, None)
    assert temperature is not None
    assert top_p is not None
    greedy = temperature < LEAST_TEMPERATURE or top_p < LEAST_TOP_P or top_k == 1
    return SamplingParams(
        temperature=None if greedy else temperature,
        top_k=1 if greedy else max(top_k, 0),  # 0 and -1 mean all
        top_p=None if greedy else top_p,
        repetition_penalty=repetition,
        presence_penalty=asked.presence_penalty or None,
        frequency_penalty=asked.frequency_penalty or None,
        min_tokens=asked.min_tokens,
    )


def _dense(bias: dict[int, float], vocab_size: int) -> array[float] | None:
    """Number that is added to each logit, [vocab_size] float32; None without a bias."""
    if not bias:
        return None
    out = array("f", bytes(4 * vocab_size))
    for token, value in bias.items():
        out[token] = value
    return out


def _log_probs(
    asked: ChatOptions | CompletionOptions, engine: EngineModel, sampling: SamplingParams, *, likeliest_known: bool
) -> int | None:
    """How many of the likeliest tokens to list, or None: the engine reports the chosen one alone. Raises Failure."""
    wanted, likeliest = asked.wants_log_probs()
    if not wanted:
        return None
    param = "top_logprobs" if isinstance(asked, ChatOptions) else "logprobs"
    if not {"output_log_probs"} <= engine.outputs or "return_log_probs" not in engine.inputs:
        raise wrong("this model gives no log-probabilities", "logprobs", "unsupported_parameter")
    if likeliest > 1:
        raise wrong(
            f"'{param}' of {likeliest}: this server knows the chosen token's alone", param, "unsupported_parameter"
        )
    if likeliest == 1 and not likeliest_known:
        why = "the likeliest token is only known at temperature 0 without penalties, biases, forms and min_tokens"
        penalty = sampling.repetition_penalty
        if asked.repetition_penalty is None and penalty not in (None, 1):
            why += f"; the model recommends a repetition_penalty of {penalty:g}, so give 'repetition_penalty': 1"
        raise wrong(f"'{param}' of 1: {why}", param, "unsupported_parameter")
    return likeliest


def build(
    options: GatewayOptions, counters: SharedCounters, forks: ForkServer, *, most_connections: int
) -> tuple[FastAPI, Connections]:
    """The application and the limits of its connections. Raises InputDataError for unreadable keys or tokenizers."""
    gateway = Gateway(options, counters, forks)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await forks.ready()
        yield
        gateway.prompts.close()
        await gateway.upstream.close()
        if gateway.traces is not None:
            gateway.traces.close()

    # No pages that describe the API: they would be the only pages that need no key.
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    if options.cors_origins:
        # No key is asked for here: a browser sends none before it knows that its page may call.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("retry-after",),
        )

    if gateway.traces is not None:
        app.add_middleware(TraceMiddleware, traces=gateway.traces)

    def refuse(request: Request, failure: Failure) -> Response:
        gateway.count(request.scope["path"], failure.status)
        return JSONResponse(failure.body(), failure.status, failure.headers())

    @app.exception_handler(Failure)
    async def failed(request: Request, failure: Failure) -> Response:
        return refuse(request, failure)

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        path = request.scope["path"]
        what = f"{request.method} {quoted(path)}: {error.detail}"
        if error.status_code == 404 and f"/v1{path}" in {getattr(route, "path", "") for route in app.routes}:
            what += f"; try /v1{path}, with /v1 at the end of the base URL"
        response = refuse(request, Failure(error.status_code, what))
        response.headers.update(error.headers or {})  # a 405's Allow
        return response

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return refuse(request, Failure(500, "the gateway failed; its log says why"))

    @app.post("/v1/chat/completions", response_model=None)
    @app.post("/v1/completions", response_model=None)
    async def answer(request: Request) -> Response:
        return await gateway.answer(request)

    @app.post("/tokenize", response_model=None)
    @app.post("/detokenize", response_model=None)
    async def tokens(request: Request) -> Response:
        return JSONResponse(await gateway.tokens(request))

    @app.get("/version", response_model=None)
    async def version(request: Request) -> Response:
        gateway.authorise(request.headers.get("authorization", ""))
        return JSONResponse({"version": __version__})

    def described(name: str, base: str | None = None) -> dict[str, object]:
        parent = {} if base is None else {"parent": base}
        return {"id": name, "object": "model", "created": gateway.started, "owned_by": "trtpipe", **parent}

    @app.get("/v1/models", response_model=None)
    async def models(request: Request) -> Response:
        gateway.authorise(request.headers.get("authorization", ""))
        return JSONResponse({"object": "list", "data": [described(name, base) for name, base in gateway.names.all()]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(request: Request, name: str) -> Response:
        gateway.authorise(request.headers.get("authorization", ""))
        gateway.names.find(name)
        return JSONResponse(described(name, dict(gateway.names.all()).get(name)))

    @app.get("/health/live", response_model=None)
    async def live() -> Response:
        return PlainTextResponse("live\n")

    @app.get("/health", response_model=None)
    @app.get("/health/ready", response_model=None)
    async def ready() -> Response:
        """Report ready when every model of the gateway is ready, and the gateway is not about to end."""
        if connections.leaving:
            return PlainTextResponse("not ready: the gateway is ending\n", 503)
        names = sorted({model.triton_model for model in options.models})
        answers = await asyncio.gather(*(gateway.upstream.ready(name) for name in names))
        missing = [name for name, answer in zip(names, answers, strict=True) if not answer]
        if missing:
            return PlainTextResponse(f"not ready: {', '.join(missing)}\n", 503)
        return PlainTextResponse("ready\n")

    @app.get("/metrics", response_model=None)
    async def metrics(request: Request) -> Response:
        gateway.authorise(
            request.headers.get("authorization", "")
        )  # the number and length of requests are confidential
        return PlainTextResponse(counters.text(), media_type="text/plain; version=0.0.4")

    connections = Connections(
        gateway.admit,
        gateway.count,
        most=most_connections,
        unfinished_bytes=max(UNFINISHED_BYTES, 4 * options.max_body_bytes),
        origins=options.cors_origins,
    )
    return app, connections
