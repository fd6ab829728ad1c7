"""The routes: who may ask, what was asked, and the order that an answer is made from."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
import uuid
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from pipeline.gateway.access import read_keys
from pipeline.gateway.answers import Answer, Order
from pipeline.gateway.board import Board
from pipeline.gateway.failure import Failure, wrong
from pipeline.gateway.options import GatewayOptions, ServedModel
from pipeline.gateway.requests import ChatRequest, CompletionRequest, parse
from pipeline.gateway.text import Text
from pipeline.gateway.upstream import EngineModel, Sampling, Upstream, engine_request

# OpenAI's default for text completions.
COMPLETION_TOKENS = 16


class Gateway:
    """What the routes share."""

    def __init__(self, options: GatewayOptions, board: Board) -> None:
        """Raises InputDataError for keys or a tokenizer that cannot be read."""
        self.options = options
        self.board = board
        self.keys = read_keys(options.api_keys_file)
        self.models = {model.name: model for model in options.models}
        self.texts = {model.name: Text(model.tokenizer) for model in options.models}
        self.upstream = Upstream(*options.upstream(), options.connections)
        self.started = int(time.time())

    def authorise(self, request: Request) -> None:
        """Raises Failure 401. Every key is compared, in the same time whatever was sent."""
        if not self.keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, key) for key in self.keys]
        if scheme.lower() != "bearer" or not any(matches):
            what = "the API key is not valid" if given else "no API key: send 'Authorization: Bearer KEY'"
            raise Failure(401, what, code="invalid_api_key")

    async def body(self, request: Request) -> bytes:
        """Raises Failure 413 as soon as there is too much of it."""
        limit = self.options.max_body_bytes
        length = request.headers.get("content-length", "")
        parts = []
        size = int(length) if length.isdigit() else 0
        if size <= limit:
            size = 0
            async for part in request.stream():
                size += len(part)
                parts.append(part)
                if size > limit:
                    break
        if size > limit:
            raise Failure(413, f"the request is larger than {limit} bytes", code="request_too_large")
        return b"".join(parts)

    def find(self, name: str) -> ServedModel:
        model = self.models.get(name)
        if model is None:
            served = ", ".join(self.models)
            raise Failure(
                404, f"model '{name}' does not exist; served: {served}", param="model", code="model_not_found"
            )
        return model

    async def answer(self, request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Answer:
        deadline = asyncio.get_running_loop().time() + self.options.timeout_s
        self.authorise(request)
        if self.options.max_requests and self.board.own("running") >= self.options.max_requests:
            raise Failure(429, "the gateway is answering as many requests as it may", code="overloaded", retry_after=1)
        asked = parse(await self.body(request), kind)
        served = self.find(asked.model)
        text = self.texts[served.name]
        engine = await self.upstream.model(served.triton_model)
        if isinstance(asked, ChatRequest):
            param, prompts = "messages", [text.chat_prompt([one.plain() for one in asked.messages])]
        else:
            param = "prompt"
            prompts = [text.prompt(one) if isinstance(one, str) else _checked(one, text) for one in asked.prompts()]
        limit = self._limit(asked, served, prompts, param)
        copies = asked.n or 1
        if copies * len(prompts) > self.options.max_choices:
            raise wrong(f"at most {self.options.max_choices} answers a request, not {copies * len(prompts)}", "n")
        drawn = _drawn(asked, text)
        log_probs = _log_probs(asked, engine, greedy=drawn["top_k"] == 1)
        ends = [] if asked.ignore_eos else text.end_ids
        # Given, a seed makes each of the copies what it was the time before; not given, none is like another.
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        requests = []
        for number in range(copies * len(prompts)):
            sampling = Sampling(
                max_tokens=limit,
                seed=(seed + number) % 2**64,
                end_id=ends[0] if ends else -1,
                pad_id=text.pad_id,
                # The engine takes one end id; the model's others end the text as stop words of one token.
                stop_words=text.words([[token] for token in ends[1:]]) if ends[1:] else None,
                min_tokens=asked.min_tokens,
                presence_penalty=asked.presence_penalty or None,
                frequency_penalty=asked.frequency_penalty or None,
                log_probs=log_probs is not None,
                **drawn,  # type: ignore[arg-type]
            )
            requests.append(engine_request(engine, prompts[number // copies], sampling))
        self.board.add("prompt_tokens", sum(map(len, prompts)))
        order = Order(
            id=("chatcmpl-" if param == "messages" else "cmpl-") + uuid.uuid4().hex,
            chat=param == "messages",
            model=served.name,
            created=int(time.time()),
            prompts=tuple(prompts),
            requests=tuple(requests),
            max_tokens=limit,
            stops=asked.stops(),
            end_ids=frozenset(ends),
            stream=bool(asked.stream),
            include_usage=asked.include_usage,
            continuous_usage=asked.continuous_usage,
            log_probs=log_probs is not None,
            likeliest=bool(log_probs),
        )
        return Answer(order, text, self.upstream, self.board, deadline)

    def _limit(
        self, asked: ChatRequest | CompletionRequest, served: ServedModel, prompts: list[list[int]], param: str
    ) -> int:
        """How many tokens each answer may have. Raises Failure when prompt or answer do not fit the engine."""
        longest = max(map(len, prompts))
        if min(map(len, prompts)) == 0:
            raise wrong("the prompt is empty", param)
        code = "context_length_exceeded"
        if served.max_input_len is not None and longest > served.max_input_len:
            raise wrong(f"the prompt has {longest} tokens; this model takes {served.max_input_len}", param, code)
        wished = asked.limit()
        most = served.max_seq_len
        if most is not None and longest + (wished or 1) > most:
            sides = f"the prompt has {longest} tokens and max_tokens is {wished or 1}"
            raise wrong(f"{sides}; this model takes {most} together", param, code)
        if wished is not None:
            return wished
        default = COMPLETION_TOKENS if isinstance(asked, CompletionRequest) else self.options.default_max_tokens
        if most is None:
            return default
        room = most - longest
        return room if isinstance(asked, ChatRequest) else min(default, room)


def _checked(ids: list[int], text: Text) -> list[int]:
    if not all(0 <= token < text.vocab_size for token in ids):
        raise wrong(f"'prompt' holds ids outside of 0 to {text.vocab_size - 1}", "prompt")
    return ids


def _drawn(asked: ChatRequest | CompletionRequest, text: Text) -> dict[str, float | int | None]:
    """How tokens are drawn, in the engine's terms: its own default is greedy, OpenAI's is to draw from all."""

    def chosen(name: str, value: float | None, default: float | None) -> float | None:
        return value if value is not None else text.defaults.get(name, default)

    temperature = chosen("temperature", asked.temperature, 1.0)
    top_p = chosen("top_p", asked.top_p, 1.0)
    top_k = int(chosen("top_k", asked.top_k, 0) or 0)
    repetition = chosen("repetition_penalty", asked.repetition_penalty, None)
    if temperature == 0 or top_p == 0 or top_k == 1:
        return {"top_k": 1, "temperature": None, "top_p": None, "repetition_penalty": repetition}
    return {
        "top_k": max(top_k, 0),  # 0 and -1 mean all
        "temperature": temperature,
        "top_p": top_p,
        "repetition_penalty": repetition,
    }


def _log_probs(asked: ChatRequest | CompletionRequest, engine: EngineModel, *, greedy: bool) -> int | None:
    """None, or how many of the likeliest tokens to list: the engine reports the chosen one alone. Raises Failure."""
    wanted, likeliest = asked.wants_log_probs()
    if not wanted:
        return None
    param = "top_logprobs" if isinstance(asked, ChatRequest) else "logprobs"
    if not {"output_log_probs"} <= engine.outputs or "return_log_probs" not in engine.inputs:
        raise wrong("this model gives no log-probabilities", "logprobs", "unsupported_parameter")
    if likeliest > 1:
        raise wrong(
            f"'{param}' of {likeliest}: this server knows the chosen token's alone", param, "unsupported_parameter"
        )
    if likeliest == 1 and not greedy:
        why = "the likeliest token is only known where nothing is drawn (temperature 0)"
        raise wrong(f"'{param}' of 1: {why}", param, "unsupported_parameter")
    return likeliest


def build(options: GatewayOptions, board: Board) -> FastAPI:
    """The application. Raises InputDataError for keys or a tokenizer that cannot be read."""
    gateway = Gateway(options, board)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await gateway.upstream.close()

    # No pages that describe the API: they would be the only ones that need no key.
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    def refuse(request: Request, failure: Failure) -> Response:
        name = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}.get(request.url.path)
        if name is not None:
            board.answered(name, failure.status)
        return JSONResponse(failure.body(), failure.status, failure.headers())

    @app.exception_handler(Failure)
    async def failed(request: Request, failure: Failure) -> Response:
        return refuse(request, failure)

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        return refuse(request, Failure(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return refuse(request, Failure(500, "the gateway failed; its log says why"))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        return await gateway.answer(request, ChatRequest)

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        return await gateway.answer(request, CompletionRequest)

    def described(model: ServedModel) -> dict[str, object]:
        return {"id": model.name, "object": "model", "created": gateway.started, "owned_by": "trtpipe"}

    @app.get("/v1/models", response_model=None)
    async def models(request: Request) -> Response:
        gateway.authorise(request)
        return JSONResponse({"object": "list", "data": [described(model) for model in options.models]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(request: Request, name: str) -> Response:
        gateway.authorise(request)
        return JSONResponse(described(gateway.find(name)))

    @app.get("/health/live", response_model=None)
    async def live() -> Response:
        return PlainTextResponse("live\n")

    @app.get("/health/ready", response_model=None)
    async def ready() -> Response:
        """Ready when every model behind it is."""
        names = sorted({model.triton_model for model in options.models})
        answers = await asyncio.gather(*(gateway.upstream.ready(name) for name in names))
        missing = [name for name, answer in zip(names, answers, strict=True) if not answer]
        if missing:
            return PlainTextResponse(f"not ready: {', '.join(missing)}\n", 503)
        return PlainTextResponse("ready\n")

    @app.get("/metrics", response_model=None)
    async def metrics(request: Request) -> Response:
        gateway.authorise(request)  # how much is asked, and of what length, is nobody else's business
        return PlainTextResponse(board.text(), media_type="text/plain; version=0.0.4")

    return app
