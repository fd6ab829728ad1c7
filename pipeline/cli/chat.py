"""`trtpipe chat`: a conversation in the terminal with a served model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from trtpipe.pipeline.cli.options import AdapterName, ServerName, TargetName, own_store


def chat(
    server: ServerName = None,
    target: TargetName = None,
    adapter: AdapterName = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer; as many as the model takes if left out.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; the model's, or 0, if left out.")
    ] = None,
) -> None:
    """Talk with a served model.

    Ctrl-C stops an answer, Ctrl-D or /exit ends, /clear begins anew. Where the input is no terminal, each line is a
    question, also one that begins with /.

    \b
    Examples:
      trtpipe chat
      trtpipe chat --system "Answer in one word." < questions.txt
    """
    from trtpipe.engines.errors import StageFailed, UsageError
    from trtpipe.engines.sampling import SamplingParams
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.net.api_key import KeyRefused, api_key
    from trtpipe.pipeline.serving import servers
    from trtpipe.pipeline.serving.chat import Conversation, usual_temperature
    from trtpipe.pipeline.serving.generate import check_options
    from trtpipe.pipeline.serving.openai_client import ContextFull

    check_options(SamplingParams(temperature=temperature), max_tokens)
    found = servers.find_ready(own_store(), server, target)
    served = found.find(target)
    if found.gateway_url is None:
        raise UsageError(f"{found.name} has no gateway", remedy="serve it without --no-openai, or use `generate`")
    temperature = usual_temperature(served.tokenizer) if temperature is None else temperature
    asked = {"max_tokens": max_tokens, "temperature": temperature}
    options = {name: value for name, value in asked.items() if value is not None}
    key = api_key()
    model = served.model_name(adapter)
    talk = Conversation(
        found.gateway_url, model, key=key, system=system, options=options,
        thinking=lambda: console.note("the model reasons before it answers"),
    )  # fmt: skip
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        console.note(f"{model}: Ctrl-C stops an answer, Ctrl-D ends, /clear begins anew")
    for line in _typed() if interactive else sys.stdin:
        text = line.strip()
        if interactive and text == "/exit":
            return
        if interactive and text == "/clear":
            talk.clear()
        elif text:
            try:
                with contextlib.closing(talk.ask(text)) as pieces:
                    console.stream(pieces)
            except KeyboardInterrupt:
                if not interactive:
                    raise
            except (UsageError, StageFailed) as error:
                if not interactive or isinstance(error, KeyRefused):
                    raise
                console.error(f"{error}; /clear begins anew" if isinstance(error, ContextFull) else str(error))


def _typed() -> Iterator[str]:
    """Lines that a user types, until Ctrl-D; Ctrl-C drops the line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # `input` then edits lines, and knows the earlier ones
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            sys.stdout.write("\n")
        except EOFError:
            sys.stdout.write("\n")
            return
