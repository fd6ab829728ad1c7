"""`trtpipe generate`."""

from __future__ import annotations

from typing import Annotated

import typer

from trtpipe.pipeline.cli.options import AdapterName, Json, ServerName, TargetName


def generate(
    prompt: Annotated[str, typer.Argument(help="Prompt.")],
    server: ServerName = None,
    target: TargetName = None,
    adapter: AdapterName = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; greedy if 0 or left out.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Number of likeliest tokens to sample from.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Probability mass to sample from.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Penalty of tokens that occurred before.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling.")] = None,
    stop_word: Annotated[list[str] | None, typer.Option("--stop", help="Stop at this text; repeatable.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the text without the chat template.")] = False,
    as_json: Json = False,
) -> None:
    """Stream an answer from a running server.

    On a terminal, control characters in it are shown as escapes.

    \b
    Examples:
      trtpipe generate "Why is the sky blue?"
      trtpipe generate "def fib(n):" --raw --max-tokens 64
    """
    from trtpipe.engines.sampling import SamplingParams
    from trtpipe.pipeline.api.serve import Client, Sampling
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.serving.generate import check_options

    sampling: Sampling = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "repetition_penalty": repetition_penalty,
        "seed": seed,
    }  # fmt: skip
    check_options(SamplingParams(**sampling), max_tokens)
    client = Client(target, server=server, adapter=adapter)
    text = prompt if raw else client.prompt(prompt)
    pieces = client.stream(text, max_tokens=max_tokens, stop=stop_word or (), **sampling)
    if as_json:
        console.result_json({"prompt": text, "text": "".join(pieces)})
        return
    console.stream(pieces)
