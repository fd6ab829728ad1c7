"""The server that the tests of this folder share, and the gateway. An idle one costs the others time: both end with the
last of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from tests.e2e.conftest import Cli, Served
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.gateway.supervisor import Gateway

if TYPE_CHECKING:
    import openai

MODEL, ALIAS = "smollm2-135m", "gpt-4o"
# The same model to a gateway that does not know the engine's limits, and with a chat template that contains the tools.
UNLIMITED, TOOLS = "unlimited", "tools"
KEY = "the-key"
TOKENS = 6
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call one by <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture(scope="session")
def tokenizer(smollm2_hf: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_hf / "tokenizer.json"))


@pytest.fixture(scope="session")
def texts(greedy_texts: tuple[str, ...]) -> tuple[str, ...]:
    return greedy_texts[:8]


@pytest.fixture(scope="session")
def expected_texts(texts: tuple[str, ...], expected: list[list[int]], tokenizer: Tokenizer) -> list[str]:
    """Greedy tokens of transformers in float32, the first TOKENS of each prompt."""
    return [tokenizer.decode(tokens[:TOKENS]) for tokens in expected[: len(texts)]]


@pytest.fixture(scope="package")
def served(cli: Cli, target: str, serve: Callable[..., Served]) -> Iterator[Served]:
    """The float32 SmolLM2 behind a real tritonserver."""
    server = serve(target)
    yield server
    cli.kill_server(server.name)


@pytest.fixture(scope="package")
def gateway(served: Served, smollm2_hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two workers, which ask for a key."""
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "keys").write_text(f"{KEY}\n")
    with_tools = folder / "model"
    shutil.copytree(smollm2_hf, with_tools, ignore=shutil.ignore_patterns("*.safetensors*", "chat_template.jinja"))
    (with_tools / "chat_template.jinja").write_text(TEMPLATE)
    models = (
        ServedModel(name=MODEL, tokenizer=smollm2_hf, aliases=(ALIAS,), max_input_len=512, max_seq_len=1024),
        ServedModel(name=UNLIMITED, tokenizer=smollm2_hf),
        ServedModel(name=TOOLS, tokenizer=with_tools, max_input_len=512, max_seq_len=1024),
    )
    options = GatewayOptions(
        models=models, grpc_url=served.grpc, port=0, workers=2, api_keys_file=folder / "keys"
    )  # fmt: skip
    made = Gateway.start(options)
    yield made
    made.stop()


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0, timeout=280) as made:
        yield made
